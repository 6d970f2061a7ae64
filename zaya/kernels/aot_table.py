"""The ahead-of-time report as a table in docs/kernels.md, between two markers."""

from pathlib import Path
from typing import Any

from zaya.errors import UserError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
START, END = "<!-- aot table: start (written by python -m zaya.kernels.aot) -->", "<!-- aot table: end -->"
HEAD = {
    "hip": (
        "VGPRs",
        "spills",
        "LDS KiB",
        "waves/SIMD",
        "MFMA in loop / body",
        "buffer / global loads",
        "MI300X floor µs",
    ),
    "cuda": (
        "registers",
        "spill bytes",
        "shared KiB",
        "blocks/SM",
        "wgmma or mma in loop / body",
        "TMA / cp.async",
        "H200 floor µs",
    ),
}
TITLES = {"hip": "gfx942 (MI300X): compiled and analysed, never run on it", "cuda": "sm_90 (H200)"}


def _cells(backend: str, found: dict[str, Any]) -> tuple[str, ...]:
    matrix = f"{found['matrix_loop']} / {found['matrix_body']}"
    if backend == "hip":
        spills = found["vgpr_spills"] + found["sgpr_spills"]
        loads = f"{found['buffer_loads']} / {found['global_loads']}"
        return (
            str(found["vgprs"]),
            str(spills),
            f"{found['lds_bytes'] / 1024:g}",
            f"{found['waves_per_simd']:g}",
            matrix,
            loads,
        )
    spills = found["spill_store_bytes"] + found["spill_load_bytes"]
    copies = f"{found['tma_loads']} / {found['async_copies']}"
    return (
        str(found["registers"]),
        str(spills),
        f"{found['smem_bytes'] / 1024:g}",
        str(found["blocks_per_sm"]),
        matrix,
        copies,
    )


def _floor(backend: str, work: list | None) -> str:
    from zaya.flops import HARDWARE, op_work

    if work is None:
        return ""
    name, tokens = work
    seconds = op_work(tokens)[name].floor_s(HARDWARE["MI300X" if backend == "hip" else "H200"])
    return f"{seconds * 1e6:.1f} at T={tokens}"


def render(report: dict[str, Any]) -> str:
    """Two Markdown tables, one per target, and the named exceptions below each."""
    out = []
    for backend, head in HEAD.items():
        out += [f"**{TITLES[backend]}**, triton {report['triton']}", ""]
        columns = ("op", "tile", "warps", "stages", *head)
        out += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        rows = [r for r in report["kernels"] if r["backend"] == backend]
        for r in rows:
            launch = (str(r["options"].get("num_warps", 4)), str(r["options"].get("num_stages", "")))
            cells = (r["op"], r["name"], *launch, *_cells(backend, r["found"]), _floor(backend, r["work"]))
            out.append("| " + " | ".join(cells) + " |")
        out += [""]
        exceptions = [(r["op"], r["name"], k, *v) for r in rows for k, v in r["allowances"].items()]
        out += [f"- exception: {op} {name}, {key} up to {limit}: {why}" for op, name, key, limit, why in exceptions]
        out += [""] if exceptions else []
    return "\n".join(out).strip() + "\n"


def _split(text: str) -> tuple[str, str, str]:
    if START not in text or END not in text:
        raise UserError(f"{DOCS}: the markers of the table are gone; put back the lines {START} and {END}")
    before, rest = text.split(START)
    inside, after = rest.split(END)
    return before, inside, after


def write(report: dict[str, Any]) -> None:
    """Replace the table in docs/kernels.md."""
    from zaya.files import write_text

    before, _, after = _split(DOCS.read_text(encoding="utf-8"))
    write_text(DOCS, f"{before}{START}\n\n{render(report)}\n{END}{after}")


def stale(report: dict[str, Any]) -> list[str]:
    """A line when docs/kernels.md holds another table than `report` gives."""
    inside = _split(DOCS.read_text(encoding="utf-8"))[1]
    return [] if inside.strip() == render(report).strip() else [f"{DOCS.name}: another table"]
