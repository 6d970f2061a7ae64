"""Test files under another transformers than the environment's: python -m tests.overlays [VERSION ...]

An overlay is a folder `.venvs/transformers-VERSION` that holds that version alone, put before the environment's
packages; it is made from the package registry when it is missing. The oldest and the newest supported versions are
listed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
OVERLAYS = {
    "5.16.0": ["transformers==5.16.0", "huggingface-hub==1.33.0"],
    "5.24.0": ["transformers==5.24.0"],
}
FILES = ["tests/zaya/test_interchange.py", "tests/zaya/test_cache.py"]


def overlay(version: str) -> Path:
    """The folder of `version`, made when it is missing. Raises RuntimeError when the registry cannot be reached."""
    folder = ROOT / ".venvs" / f"transformers-{version}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", temporary + "/made"]
        done = subprocess.run(command + OVERLAYS[version], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"cannot install transformers {version} for its tests: {done.stderr.strip()[-400:]}")
        os.rename(temporary + "/made", folder)
    return folder


def run(version: str) -> subprocess.CompletedProcess:
    """Run FILES under `version` in a child process."""
    path = os.pathsep.join([str(overlay(version)), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    code = (
        "import sys, pytest, transformers; "
        f"assert transformers.__version__ == {version!r}, transformers.__version__; "
        f"sys.exit(pytest.main(['-q', '-x', '--no-header', '-p', 'no:cacheprovider', *{FILES!r}]))"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def main() -> int:
    """Run the versions named, or all; print what pytest printed."""
    codes = []
    for version in sys.argv[1:] or OVERLAYS:
        done = run(version)
        print(f"transformers {version}\n{done.stdout}{done.stderr}", flush=True)
        codes.append(done.returncode)
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
