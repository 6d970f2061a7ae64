"""Running a release as a person does, and killing it as a machine does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from zaya.files import read_manifest

MINI = Path(__file__).parents[2] / "training" / "recipes" / "mini.yaml"


def write_recipe(folder: Path, **changes) -> Path:
    """The miniature recipe with its output below `folder`, and some sections changed."""
    recipe = yaml.safe_load(MINI.read_text())
    for key, value in changes.items():
        recipe[key] = recipe[key] | value if isinstance(value, dict) else value
    recipe["out"] = str(folder / "run")
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def release(recipe: Path, *options: str) -> dict:
    """Run `zaya release --json` to its end and return what it printed."""
    argv = [sys.executable, "-P", "-m", "zaya.cli", "release", str(recipe), "--json", *options]
    with open(recipe.parent / "log.txt", "a") as log:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=log, text=True)
    assert done.returncode == 0, (recipe.parent / "log.txt").read_text()[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def release_and_kill(recipe: Path, moment: float | str) -> bool:
    """Start a release and SIGKILL its process group after `moment` seconds, or when the log says `moment`.

    Returns whether it was killed, and not at its end before that.
    """
    argv = [sys.executable, "-P", "-m", "zaya.cli", "release", str(recipe)]
    log = recipe.parent / "log.txt"
    start = log.stat().st_size if log.exists() else 0
    with open(log, "a") as f:
        process = subprocess.Popen(argv, stdout=f, stderr=f, start_new_session=True)
    began = time.monotonic()

    def due() -> bool:
        if isinstance(moment, str):
            return moment in log.read_text()[start:]
        return time.monotonic() - began >= moment

    while process.poll() is None and not due():
        time.sleep(0.01)
    killed = process.poll() is None
    os.killpg(process.pid, signal.SIGKILL) if killed else None
    process.wait()
    return killed


def hashes(run: Path) -> dict[str, str]:
    """Digest of everything that is not a timing, by path below `run`, from the manifests of its stages."""
    found = {}
    for path in sorted(run.rglob("manifest.json")):
        if "checkpoints" not in path.parts:
            for name, digest in read_manifest(path.parent)["outputs"].items():
                found[(path.parent / name).relative_to(run).as_posix()] = digest
    return found
