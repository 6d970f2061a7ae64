"""Whole writes: a folder appears with its manifest or not at all."""

import json
import os

import pytest

from zaya import files
from zaya.errors import UserError


def test_stage_dir_writes_manifest_last(tmp_path):
    out = tmp_path / "stage"
    with files.stage_dir(out, "demo", {"seed": 0}, timings=("speed*",)) as folder:
        (folder / "a.txt").write_text("a")
        (folder / "speed.jsonl").write_text("1.0")
        assert not out.exists(), "the target must not exist before it is whole"
    manifest = files.read_manifest(out)
    assert set(manifest["outputs"]) == {"a.txt"}
    assert set(manifest["timings"]) == {"speed.jsonl"}
    assert manifest["inputs_sha256"] == files.sha256_json({"seed": 0})


def test_times_do_not_change_the_digest(tmp_path):
    for name, speed in (("one", "1.0"), ("two", "2.0")):
        with files.stage_dir(tmp_path / name, "demo", {}, timings=("speed*",)) as folder:
            (folder / "a.txt").write_text("a")
            (folder / "speed.jsonl").write_text(speed)
    assert files.manifest_digest(tmp_path / "one") == files.manifest_digest(tmp_path / "two")


def test_a_failed_stage_leaves_the_old_result_and_nothing_else(tmp_path):
    out = tmp_path / "stage"
    with files.stage_dir(out, "demo", {}) as folder:
        (folder / "a.txt").write_text("old")
    with pytest.raises(RuntimeError), files.stage_dir(out, "demo", {}) as folder:
        (folder / "a.txt").write_text("new")
        raise RuntimeError
    assert (out / "a.txt").read_text() == "old"
    assert os.listdir(tmp_path) == ["stage"]


@pytest.mark.parametrize("there", ["file", "folder"])
def test_what_is_not_ours_is_never_replaced(tmp_path, there):
    out = tmp_path / "precious"
    if there == "folder":
        out.mkdir()
    kept = out if there == "file" else out / "thesis.txt"
    kept.write_text("a year's work")
    with pytest.raises(UserError, match="was not made by zaya"), files.stage_dir(out, "demo", {}) as folder:
        (folder / "a.txt").write_text("a")
    assert kept.read_text() == "a year's work"
    assert os.listdir(tmp_path) == ["precious"]


def test_an_empty_folder_may_be_filled(tmp_path):
    (tmp_path / "out").mkdir()
    with files.stage_dir(tmp_path / "out", "demo", {}) as folder:
        (folder / "a.txt").write_text("a")
    assert (tmp_path / "out" / "a.txt").exists()


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    (tmp_path / ".stage.tmp-killed").mkdir()
    with files.whole_dir(tmp_path / "stage") as folder:
        (folder / "a.txt").write_text("a")
    assert os.listdir(tmp_path) == ["stage"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path, monkeypatch):
    out = tmp_path / "stage"
    with files.stage_dir(out, "demo", {}) as folder:
        (folder / "a.txt").write_text("old")
    real, seen = os.rename, []

    def rename(a, b):
        if seen:
            os._exit(9)
        seen.append(a)
        real(a, b)

    pid = os.fork()
    if pid == 0:
        monkeypatch.setattr(os, "rename", rename)
        with files.whole_dir(out) as folder:
            (folder / "a.txt").write_text("new")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    with files.whole_dir(tmp_path / "other"):
        pass
    assert files.recover(out).joinpath("a.txt").read_text() == "old"


def test_write_json_is_whole_and_readable(tmp_path):
    path = tmp_path / "deep" / "x.json"
    files.write_json(path, {"ü": [1, 2]})
    assert files.read_json(path) == {"ü": [1, 2]}
    assert oct(path.stat().st_mode & 0o777) == "0o644"
    assert os.listdir(path.parent) == ["x.json"]


@pytest.mark.parametrize("content", [None, "{", b"\xff\xfe"])
def test_read_json_names_the_file(tmp_path, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=r"x\.json"):
        files.read_json(path)


def test_free_space(tmp_path, monkeypatch):
    files.require_free_space(tmp_path / "not" / "there", 1, "a test")
    monkeypatch.setenv("ZAYA_FREE_BYTES", "1000")
    with pytest.raises(UserError, match=r"a test needs about 2\.00 GB and 0\.00 GB are free"):
        files.require_free_space(tmp_path, 2_000_000_000, "a test")


def test_manifest_digest_of_an_unfinished_folder(tmp_path):
    with pytest.raises(UserError, match="not a finished stage folder"):
        files.manifest_digest(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({"outputs": {}})[:-2])
    assert files.read_manifest(tmp_path) is None


def test_what_another_stage_made_is_never_replaced(tmp_path):
    """`zaya export RUN RUN` must not end with the run gone."""
    run = tmp_path / "run"
    with files.stage_dir(run, "train", {}) as folder:
        (folder / "weights").write_text("a week's work")
    with pytest.raises(UserError, match="holds what another stage made"), files.stage_dir(run, "export", {}):
        pass
    assert (run / "weights").read_text() == "a week's work"
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("manifest", ['{"name": "a web application"}', "[]", "{}", "[" * 100_000, '{"stage": "x"}'])
def test_a_foreign_manifest_marks_nothing_as_ours(tmp_path, manifest):
    out = tmp_path / "site"
    out.mkdir()
    (out / "manifest.json").write_text(manifest)
    assert files.read_manifest(out) is None
    with pytest.raises(UserError, match="was not made by zaya"), files.stage_dir(out, "demo", {}):
        pass


def test_symbolic_links_are_followed_and_stay(tmp_path):
    (tmp_path / "disk").mkdir()
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "disk" / "result")
    for text in ("one", "two"):
        with files.stage_dir(out, "demo", {}) as folder:
            (folder / "a.txt").write_text(text)
    assert out.is_symlink()
    assert (tmp_path / "disk" / "result" / "a.txt").read_text() == "two"
    assert os.listdir(tmp_path / "disk") == ["result"]
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(UserError, match="in a circle"):
        files.check_target(tmp_path / "circle")


def test_two_writers_of_one_folder(tmp_path):
    with files.whole_dir(tmp_path / "out") as first:
        (first / "a.txt").write_text("first")
        with pytest.raises(UserError, match="another command is writing it"), files.whole_dir(tmp_path / "out"):
            pass
        with files.whole_dir(tmp_path / "*"):  # a name is not a pattern
            pass
    assert (tmp_path / "out" / "a.txt").read_text() == "first"
    assert sorted(os.listdir(tmp_path)) == ["*", "out"]


def test_everybody_may_read_what_was_written(tmp_path):
    with files.whole_dir(tmp_path / "out") as folder:
        (folder / "weights").touch(mode=0o600)
    assert oct((tmp_path / "out" / "weights").stat().st_mode & 0o777) == "0o644"


def test_a_target_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    for check in (files.check_target, files.check_file):
        with pytest.raises(UserError, match=r"below|folder"):
            check(tmp_path / "file" / "out")


def test_json_lines_end_at_newlines_only(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "one\u2028line\x85"}\n\n{"text": "two"}\n', encoding="utf-8")
    assert [r["text"] for r in files.read_json_lines(path, needs=("text",))] == ["one\u2028line\x85", "two"]
    for bad, told in (("{", "line 1: not JSON"), ("[1]", "line 1: not a JSON object"), ("{}", "no field 'text'")):
        path.write_text(bad)
        with pytest.raises(UserError, match=told):
            files.read_json_lines(path, needs=("text",))


def test_free_bytes_that_are_no_number(tmp_path, monkeypatch):
    monkeypatch.setenv("ZAYA_FREE_BYTES", "lots")
    with pytest.raises(UserError, match="ZAYA_FREE_BYTES is 'lots'"):
        files.require_free_space(tmp_path, 1, "a test")
