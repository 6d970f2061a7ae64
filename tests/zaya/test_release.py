"""The chain's bookkeeping: which stages run, and why. The chain itself is in test_chain.py."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.zaya.chain import write_recipe
from zaya import release
from zaya.errors import CheckFailed, UserError

WRITE = """
import sys, pathlib
from zaya.files import stage_dir
out, text = pathlib.Path(sys.argv[1]), sys.argv[2]
with open(out.parent / "ran.txt", "a") as f:
    f.write(out.name + " ")
if text == "fail":
    sys.exit(1)
with stage_dir(out, out.name, {}, timings=("speed",)) as folder:
    (folder / "text").write_text(text)
    (folder / "speed").write_text(str(__import__("time").time()))
"""


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """A chain of two stages; `run(text)` releases with that setting of the first and returns which stages ran."""
    monkeypatch.setattr(release, "command", lambda argv: [sys.executable, "-c", WRITE, *argv])
    monkeypatch.setattr(release, "resolve", lambda path: {"out": str(tmp_path)})
    recipe = tmp_path / "recipe.yaml"
    recipe.touch()

    def run(text="a", last="b", needs_timings=False, **options):
        def stage(name, what, needs=()):
            argv = [str(tmp_path / name), what]
            return release.Stage(name, argv, tmp_path / name, {"text": what}, needs, needs_timings and bool(needs))

        def plan(recipe_path, recipe, out):
            one = stage("one", text)
            return [one, stage("two", last, (one,))]

        monkeypatch.setattr(release, "plan", plan)
        (tmp_path / "ran.txt").write_text("")
        release.release(recipe, **options)
        return (tmp_path / "ran.txt").read_text().split()

    run.at = tmp_path
    return run


def test_a_second_release_runs_nothing(chain):
    assert chain() == ["one", "two"]
    assert chain() == []


def test_a_changed_setting_runs_its_stage_and_those_after_it(chain):
    chain()
    assert chain(text="other") == ["one", "two"]
    assert chain(text="other", last="other") == ["two"]


def test_a_rerun_with_the_same_result_stops_there(chain):
    chain()
    assert chain(force=["one"]) == ["one"]


def test_times_count_where_a_stage_shows_them(chain):
    chain(needs_timings=True)
    assert chain(needs_timings=True, force=["one"]) == ["one", "two"]


def test_a_lost_or_changed_output_is_made_again(chain):
    chain()
    (chain.at / "one" / "text").unlink()
    assert chain() == ["one"]
    shutil.rmtree(chain.at / "two")
    assert chain() == ["two"]


def test_a_failed_stage_is_not_stamped_and_keeps_what_was_there(chain):
    chain()
    with pytest.raises(CheckFailed, match="stage one ended with exit code 1"):
        chain(text="fail")
    assert (chain.at / "one" / "text").read_text() == "a"
    assert chain() == []


def test_until_dry_run_and_unknown_stage(chain, capsys):
    assert chain(until="one") == ["one"]
    assert chain(dry_run=True) == []
    assert "two: would run, not made yet" in capsys.readouterr().err
    with pytest.raises(UserError, match="no stage 'three'"):
        chain(until="three")


def test_a_dry_run_writes_nothing(chain):
    assert chain(dry_run=True) == []
    assert sorted(os.listdir(chain.at)) == ["ran.txt", "recipe.yaml"]


def test_a_damaged_stamp_runs_its_stage(chain, capsys):
    for content in ("[", "[]", "{}"):
        chain()
        (chain.at / ".stages" / "one.json").write_text(content)
        assert chain() == ["one"]


def test_what_is_in_the_way_of_a_late_stage_is_said_at_once(chain):
    (chain.at / "two").mkdir()
    (chain.at / "two" / "thesis.txt").touch()
    with pytest.raises(UserError, match="was not made by zaya"):
        chain()
    assert (chain.at / "ran.txt").read_text() == ""


@pytest.mark.parametrize(
    ("stage", "told"), [("scores/zaya", "score.suite nope: no such suite"), ("latency/zaya", "serve: input_len")]
)
def test_a_recipe_that_would_fail_late_fails_at_once(tmp_path, stage, told, monkeypatch):
    monkeypatch.setattr(release, "NEEDS", {})
    monkeypatch.setattr(release.importlib.util, "find_spec", lambda name: True)
    recipe = {
        "score": {"suite": "nope"},
        "model": {"max_position_embeddings": 64},
        "serve": {"input_len": 60, "output_len": 5},
    }
    with pytest.raises(UserError, match=told):
        release.preflight(tmp_path, recipe, [release.Stage(stage, [], tmp_path / "x", {})])


def test_two_releases_at_once(chain):
    with release.only_one(chain.at), pytest.raises(UserError, match="another release is running"):
        chain()
    assert chain() == ["one", "two"]


def test_what_would_stop_the_chain_later_stops_it_now(chain, monkeypatch):
    monkeypatch.setenv("ZAYA_FREE_BYTES", "1000")
    with pytest.raises(UserError, match="are free"):
        chain()
    monkeypatch.delenv("ZAYA_FREE_BYTES")
    monkeypatch.setitem(release.NEEDS, "no_such_package", "eval")
    with pytest.raises(UserError, match=r"no_such_package, which is not installed; pip install 'zaya\[eval\]'"):
        chain()
    assert not (chain.at / "ran.txt").read_text()


def test_the_recipes_that_we_ship_resolve_to_a_plan():
    for path in Path("training/recipes").glob("*.yaml"):
        recipe = release.resolve(path)
        stages = release.plan(path, recipe, Path(recipe["out"]))
        names = [s.name for s in stages]
        assert names[0] == "data"
        assert names[-1] == "board"
        assert len(set(names)) == len(names)
        assert all(needed.name in names[: names.index(stage.name)] for stage in stages for needed in stage.needs)


def test_resolve_passes_on_the_one_line(tmp_path):
    bad = tmp_path / "bad.yaml"
    bad.write_text(Path("training/recipes/mini.yaml").read_text().replace("  steps: ", "  step: "))
    with pytest.raises(UserError, match=r"train\.step\b.*steps"):
        release.resolve(bad)
    assert os.listdir(tmp_path) == ["bad.yaml"]


def test_sigterm_ends_the_stage_with_the_release(tmp_path):
    """One line in all, though two processes of the command are ended."""
    recipe = write_recipe(tmp_path)
    command = [sys.executable, "-P", "-m", "zaya", "release", str(recipe)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "running" not in (line := process.stderr.readline()):
        assert line
    while not (children := psutil.Process(process.pid).children(recursive=True)):
        time.sleep(0.01)
    process.terminate()
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.strip() == "error: ended by SIGTERM; the same command goes on from what is finished"
    assert psutil.wait_procs(children, timeout=5)[1] == []
    assert not list((tmp_path / "run").glob(".data.tmp-*"))
