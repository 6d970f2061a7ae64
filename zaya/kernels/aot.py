"""Compile every shipped kernel tile ahead of time, for gfx942 and sm_90, and check what the compiler made of it.

Needs no GPU, ROCm or CUDA toolkit: the triton wheel holds an assembler and a linker for both. Each op's `triton.py`
exposes `aot_variants(backend) -> list[AotVariant]`, one per tile that it can launch on that backend ("hip", "cuda").

    python -m zaya.kernels.aot            compile all, rewrite docs/kernels_aot.json and the table of docs/kernels.md
    python -m zaya.kernels.aot --check    compile all, compare with the committed report instead

The gate holds resources and instructions. It says nothing of speed, and gfx942 code is analysed here, never run.
"""

import argparse
import importlib
import json
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zaya.errors import CheckFailed, UserError

BACKENDS = ("hip", "cuda")
TARGETS = {"hip": ("hip", "gfx942", 64), "cuda": ("cuda", 90, 32)}
# Per work-group (MI300X: 64 KiB of LDS, 1,024 threads) or block (sm_90: 227 KiB of shared memory, 255 registers).
LIMITS = {
    "hip": {"lds_bytes": 65536, "threads": 1024, "vgpr_spills": 0, "sgpr_spills": 0, "scratch_bytes": 0},
    "cuda": {
        "smem_bytes": 227 * 1024,
        "threads": 1024,
        "registers": 255,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
    },
}
ASSEMBLY = {"hip": "amdgcn", "cuda": "ptx"}
FLOAT_ATOMICS = {  # a compare and swap is how a type without an atomic instruction is added
    "hip": r"\b(?:global|buffer|flat)_atomic_\w*(?:f16|f32|f64|cmpswap)\w*|\bds_(?:\w+_f(?:16|32|64)|cmpst\w*)",
    "cuda": r"\b(?:atom|red)\.[\w.:]*(?:f16|f32|f64|cas)[\w.]*|\bcp\.reduce\.[\w.:]*",
}
ROOT = Path(__file__).resolve().parents[2]
REPORT = ROOT / "docs" / "kernels_aot.json"


@dataclass(frozen=True)
class AotVariant:
    """One shipped specialisation of one kernel.

    Pointers, and integers named `stride_*` or listed in `divisible`, are taken as multiples of 16, as the launcher
    finds them for the model's shapes. `large_tensors` compiles what the launcher picks for storage over 2 GiB on ROCm.
    """

    kernel: Any  # the @triton.jit function
    name: str  # unique within the op, e.g. "up T<=32768"
    signature: dict[str, str]  # run-time arguments: "*bf16", "i32", "fp32", …
    constexprs: dict[str, Any]
    options: dict[str, int] = field(default_factory=dict)  # num_warps, num_stages, and the backend's own
    divisible: tuple[str, ...] = ()
    large_tensors: bool = False
    matrix: Literal["loop", "body", "none"] = "loop"  # where matrix instructions must be; "body" when unrolled
    buffer_loads: bool = True  # ROCm: loads must be buffer loads
    allowances: dict[str, tuple[int, str]] = field(default_factory=dict)  # report field -> (raised limit, reason)
    work: tuple[str, int] | None = None  # (row of zaya.flops.op_work, tokens): the floor shown beside it


def op_modules() -> list[str]:
    """Names of the ops that have a Triton kernel, sorted."""
    return sorted(p.parent.name for p in Path(__file__).parent.glob("*/triton.py"))


def op_variants(op: str, backend: str) -> list[AotVariant]:
    """Every tile that `op` ships for `backend`."""
    variants = importlib.import_module(f"zaya.kernels.{op}.triton").aot_variants(backend)
    names = [v.name for v in variants]
    assert len(set(names)) == len(names), f"{op}: two variants of one name for {backend}"
    return variants


def compile_variant(variant: AotVariant, backend: str):
    """The compiled kernel (triton's CompiledKernel: `asm`, `metadata`)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    missing = [n for n in names if n not in variant.signature and n not in variant.constexprs]
    assert not missing, f"{variant.name}: no type for {', '.join(missing)}"
    signature = {n: "constexpr" if n in variant.constexprs else variant.signature[n] for n in names}
    source = ASTSource(
        variant.kernel,
        signature,
        {(names.index(n),): value for n, value in variant.constexprs.items()},
        {(i,): found for i, n in enumerate(names) if (found := _attributes(variant, n, signature[n], backend))},
    )
    return triton.compile(source, target=GPUTarget(*TARGETS[backend]), options=dict(variant.options))


def _attributes(variant: AotVariant, name: str, kind: str, backend: str) -> list[list]:
    """What the launcher would know of an argument: alignment, and on ROCm that its storage is within 2 GiB."""
    if kind.startswith("*"):
        small = [["tt.pointer_range", 32]] if backend == "hip" and not variant.large_tensors else []
        return [["tt.divisibility", 16], *small]
    aligned = kind.startswith("i") and (name.startswith("stride_") or name in variant.divisible)
    return [["tt.divisibility", 16]] if aligned else []


def problems(variant: AotVariant, backend: str, found: dict[str, Any]) -> list[str]:
    """What the gate has against a compiled variant; empty when it passes."""
    bad = []
    for key, limit in LIMITS[backend].items():
        raised, _ = variant.allowances.get(key, (limit, ""))
        if found[key] > raised:
            bad.append(f"{key} {found[key]} > {raised}")
    if variant.matrix != "none" and not found[f"matrix_{variant.matrix}"]:
        bad.append(f"no matrix instruction in the {variant.matrix}")
    if backend == "hip" and variant.buffer_loads and found["buffer_loads"] <= found["global_loads"]:
        bad.append(f"{found['buffer_loads']} buffer loads beside {found['global_loads']} global loads")
    return bad


def code_problems(kernel, backend: str) -> list[str]:
    """What must not be in the code of a compiled kernel, whatever its resources."""
    bad = []
    if found := sorted(set(re.findall(FLOAT_ATOMICS[backend], kernel.asm[ASSEMBLY[backend]]))):
        bad.append(f"atomics on floats, whose sums depend on the order of the threads: {', '.join(found)}")
    products = re.findall(r"(%[\w#]+) = tt\.dot %[\w#]+, %[\w#]+, (%[\w#]+)", kernel.asm["ttir"])
    if {accumulator for _, accumulator in products} & {result for result, _ in products}:
        bad.append("two products in a row into one accumulator, which a compiler has got wrong")
    return bad


def report_variant(op: str, backend: str, variant: AotVariant) -> dict[str, Any]:
    """Compile one variant and put it through the gate."""
    from zaya.kernels import aot_resources

    row: dict[str, Any] = {"op": op, "backend": backend, "name": variant.name, "kernel": variant.kernel.__name__}
    row["options"] = dict(sorted(variant.options.items()))
    row["work"] = list(variant.work) if variant.work else None
    row["allowances"] = {k: list(v) for k, v in sorted(variant.allowances.items())}
    kernel = compile_variant(variant, backend)
    found = aot_resources.READERS[backend](kernel)
    return row | {"found": found, "problems": problems(variant, backend, found) + code_problems(kernel, backend)}


def _report_index(task: tuple[str, str, int]) -> dict[str, Any]:
    op, backend, index = task
    return report_variant(op, backend, op_variants(op, backend)[index])


def build_report(ops: list[str], jobs: int = 1) -> dict[str, Any]:
    """Compile every tile of `ops` for both backends.

    Raises UserError in a process that has TRITON_INTERPRET set: the interpreter replaces the compiler.
    """
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise UserError("TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it for the offline gate")
    import triton

    tasks = [(op, b, i) for op in ops for b in BACKENDS for i in range(len(op_variants(op, b)))]
    with ProcessPoolExecutor(jobs) as pool:
        rows = list(pool.map(_report_index, tasks))
    return {"triton": triton.__version__, "targets": {"hip": "gfx942", "cuda": "sm_90"}, "kernels": rows}


def failures(report: dict[str, Any]) -> list[str]:
    """One line per variant that the gate refuses."""
    rows = (r for r in report["kernels"] if r["problems"])
    return [f"{r['op']} {r['name']} ({r['backend']}): {'; '.join(r['problems'])}" for r in rows]


def differences(committed: dict[str, Any], made: dict[str, Any]) -> list[str]:
    """What the committed report says differently. Numbers are compared only when both come from one Triton version."""
    old, new = ({(r["op"], r["backend"], r["name"]): r for r in x["kernels"]} for x in (committed, made))
    lines = [f"not in the committed report: {' '.join(k)}" for k in new if k not in old]
    lines += [f"in the committed report only: {' '.join(k)}" for k in old if k not in new]
    if committed["triton"] == made["triton"]:
        for key in new.keys() & old.keys():
            changed = [f for f in new[key] if new[key][f] != old[key].get(f)]
            lines += [f"{' '.join(key)}: {f} was {old[key].get(f)}, is {new[key][f]}" for f in changed]
    return sorted(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zaya.kernels.aot", description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed report; write nothing")
    parser.add_argument("--ops", nargs="+", help="only these ops, printed and not written")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compiler processes")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Entry point of `python -m zaya.kernels.aot`. Raises CheckFailed when the gate or the comparison says no."""
    from zaya.files import write_text
    from zaya.kernels import aot_table

    args = _parser().parse_args(argv)
    report = build_report(args.ops or op_modules(), args.jobs)
    if args.ops:
        print(aot_table.render(report))
    elif args.check:
        committed = json.loads(REPORT.read_text(encoding="utf-8"))
        if lines := differences(committed, report) + aot_table.stale(report):
            raise CheckFailed(
                "the committed report is out of date; run python -m zaya.kernels.aot: " + " | ".join(lines)
            )
    else:
        write_text(REPORT, json.dumps(report, indent=1) + "\n")
        aot_table.write(report)
    if lines := failures(report):
        raise CheckFailed("the gate refuses: " + " | ".join(lines))
    print(f"{len(report['kernels'])} compiled variants, all within the gate", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except (UserError, CheckFailed) as e:
        print(f"error: {e}", file=sys.stderr)
        raise SystemExit(2 if isinstance(e, UserError) else 1) from None
