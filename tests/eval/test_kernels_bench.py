"""`zaya bench kernels` on a CPU: the report holds what it should, and the check says no when the block is wrong."""

import json
import subprocess
import sys

import pytest
import torch

from zaya.errors import UserError
from zaya.eval.hardware import kernels, moe_check
from zaya.eval.hardware.moe_block import SMALL, build_ours, build_stock, make_layer
from zaya.flops import Hardware


def test_command_checks_and_times(tmp_path):
    path = tmp_path / "kernels.json"
    command = [sys.executable, "-P", "-m", "zaya.cli", "bench", "kernels", "--tokens", "16", "--seconds", "0.01"]
    done = subprocess.run([*command, "--out", str(path), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads(path.read_text())
    assert report["failed"] == []
    assert [c["tokens"] for c in report["checks"]] == list(moe_check.sizes("cpu"))
    rows = {(r["name"], r["direction"]): r for r in report["rows"]}
    for name in ("zaya", "transformers grouped_mm", "transformers batched_mm", "transformers eager"):
        for direction in ("forward", "forward+backward"):
            row = rows[name, direction]
            assert row["version"]
            assert row["median_ms"] > 0
            assert row["times_floor"] == pytest.approx(row["median_ms"] / row["floor_ms"])
    assert rows["grouped_mm products alone", "forward"]["median_ms"] < rows["zaya", "forward"]["median_ms"]
    assert {"torch", "triton"} <= report["provenance"]["versions"].keys()
    assert report["ceilings"]["copy_tb_per_s"] > 0


def test_bad_tokens_are_a_user_error():
    for text in ("many", "0", "16,", "-3"):
        with pytest.raises(UserError, match="--tokens"):
            kernels._tokens(text, "cpu")
    assert kernels._tokens("8,1", "cpu") == (8, 1)


def test_layer_spreads_its_tokens():
    layer = make_layer(SMALL, 256, 3, "cpu", torch.float32)
    ids = moe_check._ids(layer)
    counts = torch.bincount(ids, minlength=SMALL.experts + 1)
    assert counts[:-1].min() > 0.6 * 256 / SMALL.experts


def wrong(scale):
    def build(layer):
        call = build_ours(layer)
        return lambda h, state: call(h, state) * scale()

    return build


def test_check_refuses_a_wrong_result(monkeypatch):
    monkeypatch.setattr(moe_check, "build_ours", wrong(lambda: 1.001))
    found = moe_check.check(16, SMALL, "cpu")
    assert any("error of y" in p for p in found["problems"])
    assert "FAILED" in moe_check.text(found)


def test_check_refuses_nan(monkeypatch):
    monkeypatch.setattr(moe_check, "build_ours", wrong(lambda: float("nan")))
    assert any("nan" in p for p in moe_check.check(16, SMALL, "cpu")["problems"])


def test_check_refuses_results_that_change(monkeypatch):
    values = iter(1 + i * 1e-6 for i in range(9))
    monkeypatch.setattr(moe_check, "build_ours", wrong(lambda: next(values)))
    assert "T=16: two runs differ" in moe_check.check(16, SMALL, "cpu")["problems"]


def test_check_sees_a_missing_gradient(monkeypatch):
    def build(layer):
        call = build_ours(layer)
        return lambda h, state: call(h, state.detach()) + 0 * state.sum()

    monkeypatch.setattr(moe_check, "build_ours", build)
    assert any("error of state" in p for p in moe_check.check(16, SMALL, "cpu")["problems"])


def test_ours_shares_stocks_weights():
    layer = make_layer(SMALL, 16, 0, "cpu", torch.float32)
    ours, stock = build_ours(layer), build_stock("eager")(layer)
    layer.stock.experts.down_proj.data.mul_(2)
    torch.testing.assert_close(ours(layer.h, layer.state), stock(layer.h, layer.state))


def test_a_rival_that_fails_is_a_gap_and_ours_is_an_error():
    def broken(_layer):
        raise RuntimeError("no such kernel")

    layers = [make_layer(SMALL, 4, 0, "cpu", torch.float32)]
    rival = kernels.Implementation("rival", "torch", broken)
    assert kernels.time_block(rival, layers, kernels.FORWARD, "cpu", 0.0) == {"gap": "RuntimeError: no such kernel"}
    absent = kernels.Implementation("rival", "no-such-package", broken)
    assert kernels.time_block(absent, layers, kernels.FORWARD, "cpu", 0.0) == {
        "gap": "no-such-package is not installed"
    }
    with pytest.raises(RuntimeError, match="no such kernel"):
        kernels.time_block(kernels.Implementation("zaya", "zaya", broken), layers, kernels.FORWARD, "cpu", 0.0)


def test_table_shows_gaps():
    rows = kernels.measure((4,), SMALL, Hardware(1e12, 1e11), "cpu", 0.0)
    text = kernels.table({"rows": rows, "ceilings": {"tflop_per_s": 1.0, "copy_tb_per_s": 0.1}})
    assert "| zaya " in text
    assert "- sonic-moe, T = 4 forward: sonic-moe is not installed" in text


def test_a_gpu_times_few_tokens_replayed_and_many_launched():
    works = kernels._works((32768, 8192, 1), "cuda")
    assert works == [
        (32768, "forward"),
        (32768, "forward+backward"),
        (8192, "forward"),
        (8192, "forward replayed"),
        (8192, "forward+backward"),
        (1, "forward replayed"),
    ]


def test_check_refuses_a_wrong_choice(monkeypatch):
    monkeypatch.setattr(moe_check, "_ours_ids", lambda layer: (moe_check._ids(layer) + 1) % SMALL.experts)
    problems = moe_check.check(16, SMALL, "cpu")["problems"]
    assert any("below the best" in p for p in problems)
    assert any("nothing was compared" in p for p in problems)
