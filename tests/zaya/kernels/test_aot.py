"""The offline gate: the committed report is what the compiler says today, and the gate refuses what it should.

Compiling happens in child processes without TRITON_INTERPRET; here, kernels are interpreted.
"""

import copy
import json
import os
import subprocess
import sys

import pytest

from zaya.errors import UserError
from zaya.kernels import aot, aot_table
from zaya.kernels.aot_resources import hot_loop, loop_bodies

BAD_VARIANTS = """
import dataclasses, json
from zaya.kernels import aot

def first(backend, name):
    return next(v for v in aot.op_variants("router", backend) if v.name.startswith(name))

def but(v, **options):
    return dataclasses.replace(v, options=v.options | options)

fwd, add = first("hip", "fwd any T"), first("hip", "add")
wide = dataclasses.replace(fwd, constexprs=fwd.constexprs | {"BT": 128, "BC": 64})
cases = {
    "lds": ("hip", but(fwd, num_stages=2)),
    "threads": ("hip", but(add, num_warps=32)),
    "spills": ("cuda", but(first("cuda", "bwd_outer"), num_warps=4)),
    "matrix": ("hip", dataclasses.replace(add, matrix="loop")),
    "global": ("hip", dataclasses.replace(fwd, large_tensors=True)),
    "good": ("hip", fwd),
}
print(json.dumps({k: aot.report_variant("router", b, v)["problems"] for k, (b, v) in cases.items()}))
"""


def child(*arguments: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=aot.ROOT, timeout=600)


@pytest.mark.aot
def test_committed_report_is_what_the_compiler_says():
    done = child("-m", "zaya.kernels.aot", "--check", "--jobs", "2")
    assert done.returncode == 0, done.stderr


@pytest.mark.aot
def test_gate_refuses_what_the_gpu_would():
    done = child("-c", BAD_VARIANTS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("good") == []
    assert any("lds_bytes 73728 > 65536" in p for p in found["lds"])
    assert any("threads 2048 > 1024" in p for p in found["threads"])
    assert any("spill_store_bytes" in p for p in found["spills"])
    assert "no matrix instruction in the loop" in found["matrix"]
    assert any("global loads" in p for p in found["global"])


BAD_CODE = """
import json
import triton
import triton.language as tl
from zaya.kernels import aot

@triton.jit
def adds(out, N: tl.constexpr, KIND: tl.constexpr):
    tl.atomic_add(out + tl.arange(0, N) % 8, tl.full((N,), 1, KIND))

@triton.jit
def chains(a, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(a + at)
    acc = tl.zeros((N, N), tl.float32)
    for i in range(4):
        acc = tl.dot(x, x, acc)
        acc = tl.dot(x.T, x, acc)
    tl.store(out + at, acc)

def said(kernel, signature, constants, backend):
    variant = aot.AotVariant(kernel, "bad", signature, constants, {"num_warps": 1})
    return aot.code_problems(aot.compile_variant(variant, backend), backend)

kinds = {"*fp32": tl.float32, "*fp16": tl.float16, "*bf16": tl.bfloat16, "*i32": tl.int32}
found = {f"{b} {t}": said(adds, {"out": t}, {"N": 64, "KIND": k}, b) for b in aot.BACKENDS for t, k in kinds.items()}
found |= {f"{b} chain": said(chains, {"a": "*bf16", "out": "*fp32"}, {"N": 32}, b) for b in aot.BACKENDS}
print(json.dumps(found))
"""


@pytest.mark.aot
def test_gate_refuses_atomics_on_floats_and_chained_products(tmp_path):
    """sglang#2334, vllm#56887, ao#4469, aiter#5339: sums by atomics differed from run to run. Liger#1294, Liger#1413:
    two products in a row into one accumulator gave wrong gradients on one GPU. No shipped tile has either."""
    script = tmp_path / "bad_code.py"  # the compiler reads a kernel's source from its file
    script.write_text(BAD_CODE, encoding="utf-8")
    done = child(str(script))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for backend in aot.BACKENDS:
        assert found.pop(f"{backend} *i32") == [], "integers may be counted by atomics"
        assert "two products" in found.pop(f"{backend} chain")[0]
    assert len(found) == 6
    for kind, said in found.items():
        assert "atomics on floats" in said[0], kind


def report() -> dict:
    return json.loads(aot.REPORT.read_text(encoding="utf-8"))


def test_committed_report_covers_every_op_on_both_targets_and_passes():
    committed = report()
    assert aot.failures(committed) == []
    assert {(r["op"], r["backend"]) for r in committed["kernels"]} == {
        (op, b) for op in aot.op_modules() for b in aot.BACKENDS
    }
    for row in committed["kernels"]:
        assert all(len(reason.split()) > 3 for _, reason in row["allowances"].values()), (
            "an exception needs its reason"
        )


def test_differences_are_named():
    old, new = report(), report()
    assert aot.differences(old, new) == []
    row = new["kernels"][0]
    first = f"{row['op']} {row['backend']} {row['name']}"
    row["found"] = row["found"] | {"threads": 1}
    assert any(line.startswith(f"{first}: found was") for line in aot.differences(old, new))
    newer = copy.deepcopy(new) | {"triton": "99.0"}
    assert aot.differences(old, newer) == [], "numbers of another compiler are not compared"
    del newer["kernels"][0]
    assert aot.differences(old, newer) == [f"in the committed report only: {first}"]


def test_page_holds_the_table_of_the_report():
    assert aot_table.stale(report()) == []
    changed = report()
    changed["kernels"][0]["found"]["threads"] = 1
    changed["kernels"][0]["name"] = "renamed"
    assert aot_table.stale(changed) == ["kernels.md: another table"]


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UserError, match="unset it"):
        aot.build_report(["router"])


def test_hot_loop_is_the_one_with_the_matrix_instructions():
    assembly = "\n".join(
        ["\tv_mfma_a v[0:3]", ".LBB0_1:", "\ts_add_u32 s0", "\ts_cbranch_scc1 .LBB0_1"]
        + [".LBB0_2:", "\tv_mfma_a v[0:3]", "\tv_mfma_a v[0:3]", "\tbuffer_load_dwordx4 v1", "\ts_branch .LBB0_2"]
        + ["\ts_cbranch_scc1 .LBB0_3", "\tv_mfma_a v[0:3]", ".LBB0_3:", "\ts_endpgm"]
    )
    loops = loop_bodies(assembly, r"(\.LBB\w+):", r"\bs_c?branch\w*\s+(\.LBB\w+)")
    assert len(loops) == 2
    assert hot_loop(loops, r"\bv_mfma_") == (2, 4)
    assert hot_loop([], r"\bv_mfma_") == (0, 0)
