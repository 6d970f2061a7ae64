"""The page's text: verdict, numbers, what was not measured, and names that try to be markup."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from tests.leaderboards.support import BIGRAM, LOSS, make_release
from zaya.errors import UserError
from zaya.files import read_manifest, write_text
from zaya.leaderboards.checks import compare, run_checks, verdict
from zaya.leaderboards.cli import build
from zaya.leaderboards.collect import collect
from zaya.leaderboards.html import Markup, tag
from zaya.leaderboards.page import SECTIONS, render
from zaya.results import load, save

HOSTILE = "<img src=x onerror=alert(1)>\"&'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_release(tmp_path_factory.mktemp("release"))


def states(folder: Path) -> dict[str, str]:
    return {c.section + ": " + c.title: c.state for c in run_checks(collect([folder]), 0.7)}


def edit(path: Path, change) -> None:
    result = load(path)
    change(result)
    save(path.parent, result)


def test_a_good_release_is_ready(folder):
    assert verdict(run_checks(collect([folder]), 0.7)) == ("pass", "Ready: all 9 checks passed")


def test_the_page_holds_every_section_and_every_measured_number(folder):
    release = collect([folder])
    page = render(release, "A title", 0.7)
    for anchor in SECTIONS:
        assert f'id="{anchor}"' in page, anchor
    for scored in release.scores().values():
        for found in scored.values():
            metric = found.metric(str(found.result.settings["primary"]))
            assert f"{metric.value:.3f} ± {metric.stderr:.3f}" in page
    for run in release.runs:
        assert f"{run.last('heldout_loss'):.3f}" in page
    for found in release.of("latency"):
        if (ttft := found.value("ttft_ms_p50")) is not None:
            assert f"{ttft:.1f}" in page
    assert "not measured" not in re.sub(r"<style>.*?</style>", "", page, flags=re.S).lower().replace(
        "not measured here", ""
    )


def test_every_footnote_has_its_source_and_every_source_its_command(folder):
    release = collect([folder])
    page = render(release, "A title", 0.7)
    used, present = set(re.findall(r'href="#source-(\d+)"', page)), set(re.findall(r'id="source-(\d+)"', page))
    assert used <= present
    assert len(present) == len(release.found) + len(release.runs) + 1
    for found in release.found:
        assert tag("code", found.result.provenance.command) in page
    assert tag("code", "zaya train demo.yaml --arm baseline") in page
    assert tag("code", "zaya data tokenize demo.yaml") in page
    assert "not recorded" not in page


def test_a_source_without_provenance_says_so(tmp_path):
    (make_release(tmp_path) / "train" / "zaya" / "provenance.json").unlink()
    page = render(collect([tmp_path]), "A title", 0.7)
    assert "command, commit, hardware</dt><dd>not recorded" in page


@pytest.mark.parametrize(
    ("part", "missing"),
    [
        ("training", {"training", "experts"}),
        ("scores", {"scores"}),
        ("verify", {"verification"}),
        ("latency", {"serving", "verification"}),
        ("bench", {"speed"}),
    ],
)
def test_what_was_not_measured_says_so_and_is_never_ready(tmp_path, part, missing):
    release = collect([make_release(tmp_path, without=(part,))])
    checks = run_checks(release, 0.7)
    assert {c.section for c in checks if c.state == "missing"} == missing
    state, words = verdict(checks)
    assert state == "missing"
    assert "not measured" in words
    page = render(release, "A title", 0.7)
    assert all(f'id="{anchor}"' in page for anchor in SECTIONS)


def test_bad_numbers_fail_their_check(tmp_path):
    make_release(tmp_path)
    [verify] = (tmp_path / "verify").glob("*.json")
    edit(verify, lambda r: setattr(r.metrics[0], "value", 2e-4))
    [parity] = (tmp_path / "latency" / "zaya").glob("*--parity--*.json")
    edit(parity, lambda r: setattr(r.metrics[1], "value", 255.0))
    [loop] = (tmp_path / "bench").glob("*.json")
    edit(loop, lambda r: setattr(r.metrics[2], "value", 0.97))
    [load_, *_] = (tmp_path / "latency" / "zaya").glob("*--serving--*.json")
    edit(load_, lambda r: setattr(r.metrics[0], "value", 1.0))
    release = collect([tmp_path])
    failed = {c.title for c in run_checks(release, BIGRAM - LOSS["zaya"] + 0.1) if c.state == "fail"}
    assert len(failed) == 5
    assert verdict(run_checks(release, 2.0))[1] == "Not ready: 5 of 9 checks failed"
    assert states(tmp_path)["training: Held-out loss at least 0.7 nats below a bigram model"] == "pass"


def test_results_of_other_weights_fail(tmp_path):
    make_release(tmp_path)
    [verify] = (tmp_path / "verify").glob("*.json")
    edit(verify, lambda r: setattr(r, "subject_sha256", "cd" * 32))
    [failed] = [c for c in run_checks(collect([tmp_path]), 0.7) if c.state == "fail"]
    assert failed.title == "Every number is of the same weights"
    assert "2 digests" in failed.says


def test_an_idle_expert_fails(tmp_path):
    log = make_release(tmp_path) / "train" / "zaya" / "log.jsonl"
    lines = [json.loads(x) for x in log.read_text().splitlines()]
    lines[-1]["expert_counts"][2][5] = 0
    log.write_text("\n".join(map(json.dumps, lines)))
    [check] = [c for c in run_checks(collect([tmp_path]), 0.7) if c.section == "experts"]
    assert check.state == "fail"
    assert "31 of 32" in check.says
    assert "layer 2 expert 5" in check.says


def test_a_worse_model_fails_and_an_equal_one_is_undecided(tmp_path):
    make_release(tmp_path, names={"zaya": "qwen3", "qwen3": "zaya"})  # the better scores under the other's name
    for run in ("zaya", "qwen3"):
        about = tmp_path / "train" / run / "run.json"
        text = about.read_text()
        arm = "zaya" if run == "zaya" else "baseline"
        about.write_text(json.dumps(json.loads(text) | {"arm": arm}))
    assert states(tmp_path)["scores: Held-out text: no worse than qwen3"] == "fail"
    for i in (0, 1):
        samples = tmp_path / "scores" / str(i) / "samples" / "heldout_python.jsonl"
        rows = [json.loads(x) for x in samples.read_text().splitlines()]
        for j, row in enumerate(rows):
            row["nats"] = 1000.0 + (j % 2 if i else (j + 1) % 2)
        samples.write_text("\n".join(map(json.dumps, rows)))
    assert states(tmp_path)["scores: Held-out text: no worse than qwen3"] == "even"


def test_models_scored_on_different_items_are_not_compared(tmp_path):
    samples = make_release(tmp_path) / "scores" / "0" / "samples" / "piqa.jsonl"
    samples.write_text("\n".join(samples.read_text().splitlines()[:-1]))
    release = collect([tmp_path])
    assert compare(release, "zaya", "qwen3", "piqa") is None
    assert compare(release, "zaya", "qwen3", "arc_easy") is not None


def test_a_run_that_diverged_is_shown_and_fails(tmp_path):
    make_release(tmp_path)
    log = tmp_path / "train" / "zaya" / "log.jsonl"
    lines = [json.loads(x) for x in log.read_text().splitlines()]
    lines[-1] |= {"loss": math.nan, "heldout_loss": math.nan}
    log.write_text("\n".join(map(json.dumps, lines)))
    [bits] = (tmp_path / "scores" / "0").glob("*heldout_python*.json")
    edit(bits, lambda r: setattr(r.metrics[0], "value", math.inf))
    release = collect([tmp_path])
    [check] = [c for c in run_checks(release, 0.7) if c.section == "training"]
    assert check.state == "fail"
    page = render(release, "A title", 0.7)
    assert "nan" in page
    assert "inf ±" in page


def test_hostile_names_are_text(tmp_path):
    make_release(tmp_path, names={"zaya": HOSTILE, "qwen3": "</script><b>"})
    page = render(collect([tmp_path]), "<script>alert(2)</script>", 0.7)
    assert "<img" not in page
    assert "<b>" not in page.replace("<b>", "", page.count('<dd class="value"><b>') + page.count("<summary><b>"))
    assert "<script" not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


def test_tags_escape_what_is_not_markup():
    assert tag("p", "<i>", Markup("<b>x</b>"), title='"') == '<p title="&quot;">&lt;i&gt;<b>x</b></p>'


def test_the_page_needs_nothing_else(folder):
    page = render(collect([folder]), "A title", 0.7)
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!#|data:,)', page)
    assert "url(" not in page
    assert "@import" not in page


def test_the_command_writes_a_whole_folder_that_is_the_same_again(folder, tmp_path, capsys):
    build([folder], tmp_path / "board", "A title", as_json=True)
    answer = json.loads(capsys.readouterr().out)
    first = Path(answer["page"]).read_text()
    assert answer["verdict"] == "Ready: all 9 checks passed"
    assert read_manifest(tmp_path / "board")["timings"].keys() == {"index.html"}
    build([folder], tmp_path / "board", "A title")
    assert Path(answer["page"]).read_text() == first


def test_folders_without_results_are_refused_with_one_line(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        build([tmp_path / "nothing"])
    with pytest.raises(UserError, match="no results in it; run `zaya release`"):
        build([tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_two_results_of_one_measurement_are_refused(folder, tmp_path):
    make_release(tmp_path / "other")
    with pytest.raises(UserError, match="a second result of zaya"):
        collect([folder, tmp_path / "other"])


def test_a_file_of_another_schema_is_named(tmp_path):
    [path] = (make_release(tmp_path) / "verify").glob("*.json")
    path.write_text(path.read_text().replace('"metrics"', '"metrix"'))
    with pytest.raises(UserError, match="field metrics"):
        collect([tmp_path])


def test_a_run_that_a_changed_recipe_moved_aside_is_not_shown(tmp_path):
    folder = make_release(tmp_path)
    runs = [r.name for r in collect([folder]).runs]
    shutil.copytree(folder / "train" / runs[0], folder / "train" / f".{runs[0]}.previous")
    assert [r.name for r in collect([folder]).runs] == runs


def scored_again(folder: Path, number: int, **settings) -> None:
    """The piqa result of one model again in `folder`/again, with other settings and the first 20 of its items."""
    source, again = folder / "scores" / str(number), folder / "scores" / f"again{number}"
    [path] = source.glob("*piqa*.json")
    result = load(path)
    result.metrics = [m.model_copy(update={"n": 20, "value": 0.99}) for m in result.metrics]
    result.settings |= settings
    save(again, result)
    rows = (source / "samples" / "piqa.jsonl").read_text().splitlines()[:20]
    write_text(again / "samples" / "piqa.jsonl", "\n".join(rows))


def test_a_part_of_the_items_is_never_ranked_with_the_whole(tmp_path):
    make_release(tmp_path)
    for number in (0, 1):
        scored_again(tmp_path, number, partial=True, suite_items=100, protocol_sha256="part")
    release = collect([tmp_path])
    label = "piqa (partial, 20 of 100 items)"
    assert set(release.scores()["piqa"]) == {"zaya", "qwen3", "random"}
    assert {f.result.metrics[0].n for f in release.scores()["piqa"].values()} == {100}
    assert set(release.scores()[label]) == {"zaya", "qwen3"}
    assert compare(release, "zaya", "random", label) is None
    assert compare(release, "zaya", "qwen3", label).n == 20
    assert compare(release, "zaya", "qwen3", "piqa").n == 100
    page = render(release, "A title", 0.7)
    assert label in page
    assert "mean of 3 tasks, against qwen3" in page  # the part is not in the mean


def test_one_model_scored_twice_on_the_same_questions_is_refused(tmp_path):
    make_release(tmp_path)
    scored_again(tmp_path, 0, backend="vllm")
    with pytest.raises(UserError, match="a second result of zaya on piqa"):
        collect([tmp_path])


def test_differences_are_shown_against_every_other_model_with_holm_and_what_was_detectable(folder):
    page = render(collect([folder]), "A title", 0.7)
    for other in ("qwen3", "random"):
        for task in ("arc_easy", "hellaswag", "piqa", "heldout_python"):
            assert f"{task}, against {other}" in page
    assert "p, Holm" in page
    assert "Detectable" in page
