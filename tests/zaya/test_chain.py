"""The whole chain on the miniature recipe: killed on the way, finished, repeated, compared.

ZAYA_KILLS=all kills it after every stage and at more moments inside stages (about 7 minutes).
"""

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.zaya.chain import hashes, release, release_and_kill, write_recipe
from zaya.results import load_all

pytestmark = [pytest.mark.chain, pytest.mark.timeout(2400)]
STAGES = ["data", "train/zaya", "train/qwen3", "bench", "export/zaya", "export/qwen3", "export/random", "verify"]
STAGES += ["latency/zaya", "latency/qwen3", "scores/zaya", "scores/qwen3", "scores/random", "board"]
SOME = [2.0, "training zaya", "train/qwen3: done", "latency/zaya: not made yet"]
INSIDE = {  # seconds after the start, or what it says, while a stage runs: killed there before being killed after it
    "data": [1.0, 4.0], "train/zaya": [9.0], "train/qwen3": ["training qwen3"], "bench": ["bench: not made yet"],
    "latency/zaya": [25.0], "latency/qwen3": [40.0],
}  # fmt: skip
ALL = [moment for stage in STAGES[:-1] for moment in (*INSIDE.get(stage, []), f"{stage}: done")]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished release that was killed on the way; its folder."""
    at = tmp_path_factory.mktemp("chain")
    recipe = write_recipe(at)
    moments = ALL if os.environ.get("ZAYA_KILLS") == "all" else SOME
    killed = [release_and_kill(recipe, m) for m in moments]
    print("killed:", dict(zip(moments, killed, strict=True)))
    assert any(killed), "the moments are too late: nothing was killed"
    summary = release(recipe)
    assert summary["ran"]
    return at / "run"


def test_a_second_release_runs_nothing(run):
    summary = release(run.parent / "recipe.yaml")
    assert summary["ran"] == []
    assert summary["skipped"] == STAGES


def test_a_release_that_was_never_killed_made_the_same(run, tmp_path):
    release(write_recipe(tmp_path), "--until", "export/random")
    clean = hashes(tmp_path / "run")
    assert {Path(p).parts[0] for p in clean} >= {"data", "train", "export"}
    dirty = hashes(run)
    assert {k: v for k, v in clean.items() if "bench" not in k} == {k: dirty[k] for k in clean if "bench" not in k}


def test_every_number_has_its_provenance(run):
    results = load_all(run)
    assert {r.kind for r in results} >= {"quality", "latency", "verify", "hardware"}
    assert all(r.provenance and r.provenance.versions["torch"] for r in results)


def test_nothing_half_written_and_nothing_running_is_left(run):
    assert list(run.rglob(".*tmp*")) == []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and ours(run):
        time.sleep(0.5)
    assert ours(run) == []


def ours(run: Path) -> list[str]:
    """Command lines of processes that work on this run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(run) in line and process.pid != os.getpid():
            found.append(line)
    return found


def test_the_page_shows_the_numbers(run):
    page = (run / "board" / "index.html").read_text()
    for r in load_all(run / "scores"):
        assert r.name in page


def test_a_changed_board_title_rebuilds_the_board_alone(run):
    recipe = write_recipe(run.parent, board={"title": "Another title"})
    assert release(recipe)["ran"] == ["board"]
    assert "Another title" in (run / "board" / "index.html").read_text()
