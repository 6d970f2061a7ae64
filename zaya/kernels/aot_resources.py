"""Read what the compiler made: registers, memory, spills and instructions, from gfx942 assembly and from sm_90 PTX."""

import re
import subprocess
import tempfile
from typing import Any


def loop_bodies(text: str, label: str, branch: str) -> list[list[str]]:
    """Every stretch of lines from a label to a later branch back to it: the loops of the program, nested ones too.

    `label` and `branch` are patterns whose first group is the name of the label.
    """
    lines = text.splitlines()
    at = {m[1]: i for i, line in enumerate(lines) if (m := re.match(label, line))}
    jumps = [(i, m[1]) for i, line in enumerate(lines) if (m := re.search(branch, line))]
    return [lines[at[name] : i + 1] for i, name in jumps if at.get(name, i + 1) <= i]


def hot_loop(loops: list[list[str]], instruction: str) -> tuple[int, int]:
    """(matrix instructions, all instructions) of the loop with the most `instruction`s; of equals the shortest."""
    counted = [(sum(bool(re.search(instruction, x)) for x in loop), len(_instructions(loop))) for loop in loops]
    return max(counted, key=lambda c: (c[0], -c[1]), default=(0, 0))


def _instructions(lines: list[str]) -> list[str]:
    return [x for x in lines if re.match(r"\s+[a-z@{]", x) and not re.match(r"\s*(\.|;|//)", x)]


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def read_hip(kernel) -> dict[str, Any]:
    """Resources of a gfx942 kernel. `waves_per_simd` is the lower of what registers and LDS allow (8 at most)."""
    assembly = kernel.asm["amdgcn"]

    def note(key: str) -> int:  # of the amdhsa.kernels note at the end of the assembly
        return int(re.findall(rf"^[\s-]*\.{key}:\s*(\d+)", assembly, re.M)[-1])

    code = assembly.split(".amdhsa_kernel")[0]
    matrix, size = hot_loop(loop_bodies(code, r"(\.LBB\w+):", r"\bs_c?branch\w*\s+(\.LBB\w+)"), r"\bv_mfma_")
    lds, warps = kernel.metadata.shared, kernel.metadata.num_warps  # the note says 0 LDS: it is given at launch
    by_registers = min(8, 512 // max(8, -(-note("vgpr_count") // 8) * 8))
    by_lds = 65536 // lds * warps / 4 if lds else 8
    return {
        "vgprs": note("vgpr_count"),
        "sgprs": note("sgpr_count"),
        "vgpr_spills": note("vgpr_spill_count"),
        "sgpr_spills": note("sgpr_spill_count"),
        "scratch_bytes": note("private_segment_fixed_size"),
        "lds_bytes": lds,
        "threads": warps * 64,
        "waves_per_simd": min(by_registers, by_lds),
        "matrix_kinds": sorted(set(re.findall(r"\bv_mfma_\w+", code))),
        "matrix_body": _count(r"\bv_mfma_", code),
        "matrix_loop": matrix,
        "loop_instructions": size,
        "buffer_loads": _count(r"\bbuffer_load_", code),
        "global_loads": _count(r"\bglobal_load_", code),
    }


def _ptxas(ptx: str) -> str:
    """What ptxas says of a kernel's resources. The wheel's newest ptxas is taken: older ones cannot read its PTX."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", f.name, "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def read_cuda(kernel) -> dict[str, Any]:
    """Resources of an sm_90 kernel. `blocks_per_sm` is the lower of what registers and shared memory allow."""
    ptx, smem, warps = kernel.asm["ptx"], kernel.metadata.shared, kernel.metadata.num_warps
    log = _ptxas(ptx)
    registers = int(re.search(r"Used (\d+) registers", log)[1])  # type: ignore[index]
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    wide, narrow = r"wgmma\.mma_async", r"\bmma\.sync"
    loops = loop_bodies(ptx, r"\s*(\$L__BB\w+):", r"\bbra(?:\.uni)?\s+(\$L__BB\w+)")
    matrix, size = hot_loop(loops, f"{wide}|{narrow}")
    kinds = {"wgmma": _count(wide, ptx), "mma": _count(narrow, ptx)}
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    return {
        "registers": registers,
        "spill_store_bytes": int(spills[1]) if spills else 0,
        "spill_load_bytes": int(spills[2]) if spills else 0,
        "smem_bytes": smem,
        "threads": warps * 32,
        "blocks_per_sm": min(by_registers, 228 * 1024 // (smem + 1024), 2048 // (warps * 32)),
        "matrix_kinds": sorted(k for k, n in kinds.items() if n),
        "matrix_body": sum(kinds.values()),
        "matrix_loop": matrix,
        "loop_instructions": size,
        "tma_loads": _count(r"cp\.async\.bulk\.tensor", ptx),
        "async_copies": _count(r"cp\.async\.c[ag]", ptx),
    }


READERS = {"hip": read_hip, "cuda": read_cuda}
