"""Whole runs of a tiny recipe: what they leave, that ranks do not matter, that being killed does not matter."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from tests.training.conftest import finish, kill_group, start
from zaya.files import manifest_digest, read_manifest, stage_dir
from zaya.training.checkpoint.reader import open_checkpoint
from zaya.training.loss import IGNORE
from zaya.training.models import zaya_model
from zaya.training.parallel.group import Group
from zaya.training.recipe import load_recipe
from zaya.training.run import make_trainer, summary, train

LONG = ["train.steps=60", "train.checkpoint_every=10"]


@pytest.fixture(autouse=True)
def fresh_accelerator():
    """Accelerate keeps one state per process; every test makes its own."""
    AcceleratorState._reset_state(reset_partial_state=True)


def zaya_train(recipe: Path, data: Path, out: Path, *more: str, **options):
    return start("train", recipe, "--data", data, "--out", out, *more, **options)


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tiny, tiny_data, tmp_path_factory) -> Path:
    """A run of two ranks from start to end."""
    out = tmp_path_factory.mktemp("finished") / "zaya"
    code, printed, errors = finish(zaya_train(tiny, tiny_data, out, "--json"))
    assert code == 0, errors
    result = json.loads(printed)
    assert result == summary(out, tiny_data) | {"median_tokens_per_s": result["median_tokens_per_s"]}
    return out


def test_a_run_leaves_its_log_its_checkpoints_and_its_manifest(finished, tiny_data):
    log = records(finished)
    assert [r["step"] for r in log] == [0, 2, 4, 6, 8, 10, 12]
    assert [r["step"] for r in log if "heldout_loss" in r] == [0, 6, 12]
    assert log[-1]["tokens"] == 12 * 4 * 16
    assert log[-1]["heldout_loss"] < log[0]["heldout_loss"] - 0.1
    for r in log[1:]:
        assert [sum(layer) for layer in r["expert_counts"]] == [64, 64]  # of both ranks, each token once
        assert len(r["load_entropy"]) == len(r["skip_share"]) == 2
    steps = sorted(p.name for p in (finished / "checkpoints").iterdir())
    assert steps == ["step-000000", "step-000008", "step-000012"]
    manifest = read_manifest(finished)
    assert set(manifest["timings"]) == {"provenance.json", "speed.jsonl"}
    assert "log.jsonl" in manifest["outputs"]
    first, last = (dict(open_checkpoint(finished / "checkpoints" / s).tensors()) for s in (steps[0], steps[2]))
    for name in first:
        if name.endswith("balancing_biases"):
            assert not torch.equal(first[name], last[name])
            assert last[name].sum() == pytest.approx(float(first[name].sum()), abs=1e-5)
    unchanged = [n for n in first if torch.equal(first[n], last[n])]
    assert unchanged == []


def test_a_finished_run_is_not_run_again(finished, tiny, tiny_data):
    before = manifest_digest(finished)
    code, _, errors = finish(zaya_train(tiny, tiny_data, finished))
    assert code == 0
    assert "finished already" in errors
    assert manifest_digest(finished) == before


def test_one_rank_learns_what_two_learn(finished, tiny, tiny_data, tmp_path):
    recipe = load_recipe(tiny, ["train.ranks=1", "train.muon.ns_dtype=float32"])
    train(recipe, "zaya", tiny_data, tmp_path / "one")
    two = tmp_path / "two"
    code, _, errors = finish(zaya_train(tiny, tiny_data, two, "train.muon.ns_dtype=float32"))
    assert code == 0, errors
    for a, b in zip(records(tmp_path / "one"), records(two), strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), abs=1e-4)
        assert a.get("expert_counts") == b.get("expert_counts")
    one, other = (dict(open_checkpoint(run).tensors()) for run in (tmp_path / "one", two))
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=2e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_torchrun_ranks_are_ranks(finished, tiny, tiny_data, tmp_path):
    out = tmp_path / "zaya"
    run = "import sys; from torch.distributed.run import main; main(sys.argv[1:])"
    argv = ["--standalone", "--nproc-per-node=2", "-m", "zaya.cli", "train", str(tiny)]
    command = [sys.executable, "-c", run, *argv, "--data", str(tiny_data), "--out", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert manifest_digest(out) == manifest_digest(finished)


def _wait(process, condition, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.timeout(600)
def test_killed_anywhere_and_run_again_the_weights_are_the_same(tiny, tiny_data, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "killed"
    code, _, errors = finish(zaya_train(tiny, tiny_data, whole, *LONG))
    assert code == 0, errors
    folder, log = out / "checkpoints", out / "log.jsonl"
    lines = lambda: len(log.read_text().splitlines()) if log.exists() else 0
    staged = lambda n: [p for p in folder.glob(f".step-{n}*.tmp-*") if (p / "model.safetensors").exists()]
    moments = {
        "before the first checkpoint": lambda: out.exists() and not (folder / "step-000000").exists(),
        "between checkpoints": lambda: lines() >= 9,
        "while a checkpoint is written": lambda: staged("00004"),
        "at the end, before the manifest": lambda: (folder / "step-000060").exists(),
    }
    for moment, reached in moments.items():
        process = zaya_train(tiny, tiny_data, out, *LONG)
        _wait(process, reached)
        kill_group(process)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, moment
        assert not (out / "manifest.json").exists()
    code, _, errors = finish(zaya_train(tiny, tiny_data, out, *LONG))
    assert code == 0, errors
    assert "going on from step 60 of 60" in errors
    assert read_manifest(out)["outputs"] == read_manifest(whole)["outputs"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses Linux' parent-death signal")
def test_ranks_do_not_outlive_their_parent(tiny, tiny_data, tmp_path):
    process = zaya_train(tiny, tiny_data, tmp_path / "zaya", "train.steps=100000")
    try:
        _wait(process, (tmp_path / "zaya" / "log.jsonl").exists)
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=20)
        assert alive == []
    finally:
        kill_group(process)
        process.communicate()


@pytest.mark.parametrize("moment", ["while its ranks start", "while they train"])
def test_sigterm_is_one_line_and_ends_the_ranks(tiny, tiny_data, tmp_path, moment):
    process = zaya_train(tiny, tiny_data, tmp_path / "zaya", "train.steps=100000")
    try:
        log = tmp_path / "zaya" / "log.jsonl"
        ranks = lambda: psutil.Process(process.pid).children()
        _wait(process, log.exists if "train" in moment else lambda: len(ranks()) == 2)
        started = ranks()
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert errors.count("error:") == 1
        assert errors.strip().endswith("error: ended by SIGTERM; the same command goes on from what is finished")
        assert "Traceback" not in errors
        assert len(started) == 2
        assert psutil.wait_procs(started, timeout=5)[1] == []
    finally:
        kill_group(process)


def test_another_recipe_starts_anew_and_the_old_run_is_kept_aside(finished, tiny_data, tiny, tmp_path, caplog):
    out = tmp_path / "zaya"
    shutil.copytree(finished, out)
    recipe = load_recipe(tiny, ["train.ranks=1", "train.steps=2", "train.schedule.warmup_steps=0"])
    train(recipe, "zaya", tiny_data, out)
    assert "starting anew" in caplog.text
    assert [r["step"] for r in records(out)] == [0, 2]
    assert manifest_digest(tmp_path / ".zaya.previous") == manifest_digest(finished)


def test_the_loss_is_over_the_valid_tokens_of_the_whole_step(tiny, tiny_data, monkeypatch):
    """Microbatches with unequal numbers of valid targets; the oracle is one batch through cross_entropy's mean."""
    recipe = load_recipe(tiny, ["train.ranks=1", "train.microbatch_sequences=1"])
    trainer = make_trainer(recipe, "zaya", tiny_data, Accelerator(cpu=True), Group())
    inputs, targets = trainer.loader.batch(0, 4)
    targets[0, 3:] = IGNORE
    targets[2] = IGNORE
    monkeypatch.setattr(trainer.loader, "batch", lambda *a: (inputs, targets))
    reference = zaya_model(recipe)
    logits = reference(input_ids=inputs, use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    expected.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    record = trainer.train_step()
    assert record["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize(("arm", "precision"), [("baseline", "float32"), ("zaya", "bfloat16")])
def test_the_baseline_and_bfloat16_learn(tiny, tiny_data, tmp_path, arm, precision):
    recipe = load_recipe(tiny, ["train.ranks=1", f"train.precision={precision}"])
    train(recipe, arm, tiny_data, tmp_path / arm)
    log = records(tmp_path / arm)
    assert log[-1]["heldout_loss"] < log[0]["heldout_loss"] - 0.1
    assert ("load_entropy" in log[-1]) == (arm == "zaya")
    assert all(t.dtype == torch.float32 for _, t in open_checkpoint(tmp_path / arm).tensors())


@pytest.mark.parametrize(
    ("overrides", "env", "needle"),
    [
        (["tokenizer.vocab_size=321"], {}, "vocabulary of 320"),
        ([], {"ZAYA_FREE_BYTES": "1000"}, "GB are free"),
        ([], {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "give train.ranks=1"),
        ([], {"RANK": "0", "WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'"),
    ],
)
def test_what_cannot_be_trained_is_one_line_and_leaves_nothing(tiny, tiny_data, tmp_path, overrides, env, needle):
    out = tmp_path / "zaya"
    code, _, errors = finish(zaya_train(tiny, tiny_data, out, *overrides, env=env))
    assert code == 2, errors
    assert needle in errors
    assert "Traceback" not in errors
    assert list(out.glob("checkpoints/*")) == []


def test_missing_data_is_one_line(tiny, tmp_path):
    code, _, errors = finish(zaya_train(tiny, tmp_path / "nowhere", tmp_path / "zaya"))
    assert code == 2
    assert errors.strip().count("\n") == 0
    assert "zaya data tokenize" in errors
    assert not (tmp_path / "zaya").exists()


def test_the_loop_is_measured_beside_the_rival(tiny, tiny_data, tmp_path):
    from zaya.results import load_all

    code, printed, errors = finish(
        start("bench", "loop", tiny, "--data", tiny_data, "--out", tmp_path / "b", "--json")
    )
    assert code == 0, errors
    answer = json.loads(printed)
    assert answer["ratio"] == pytest.approx(answer["ours_tokens_per_s"] / answer["rival_tokens_per_s"])
    [result] = load_all(tmp_path / "b")
    assert {m.name for m in result.metrics} >= {"ours_tokens_per_s", "rival_tokens_per_s", "ratio"}
    assert all(v > 0 for v in result.series["ours_tokens_per_s"] + result.series["rival_tokens_per_s"])
    assert read_manifest(tmp_path / "b")["outputs"] == {}


@pytest.mark.parametrize("there", ["text", "export"])
def test_a_folder_of_something_else_is_not_trained_into(tiny, tiny_data, tmp_path, there):
    out = tmp_path / "precious"
    if there == "text":
        out.mkdir()
        (out / "log.jsonl").write_text("a captain's log")
    else:
        with stage_dir(out, "export", {}) as folder:
            (folder / "log.jsonl").write_text("a captain's log")
    before = sorted(os.listdir(out))
    code, _, said = finish(zaya_train(tiny, tiny_data, out))
    assert code == 2, said
    assert (out / "log.jsonl").read_text() == "a captain's log"
    assert sorted(os.listdir(out)) == before


def test_a_loss_that_is_no_number_is_a_failed_check(tiny, tiny_data, tmp_path):
    code, _, said = finish(zaya_train(tiny, tiny_data, tmp_path / "run", "train.muon.learning_rate=1e30"))
    assert code == 1
    assert "lower train.muon.learning_rate" in said
    assert "internal error" not in said


def test_fewer_heldout_sequences_than_ranks(tiny, tiny_data, tmp_path):
    code, _, said = finish(zaya_train(tiny, tiny_data, tmp_path / "run", "train.ranks=2", "train.heldout_tokens=1"))
    assert code == 0, said
