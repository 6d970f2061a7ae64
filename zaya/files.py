"""Writing things whole, and knowing afterwards what was written.

Every stage of a release writes one folder through `stage_dir`: a temporary name beside the target, fsync, a
`manifest.json` as the last file, one rename. A folder without a manifest is not a result.
"""

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zaya.errors import UserError

MANIFEST = "manifest.json"


def sha256_file(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex digest of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def tree_hashes(folder: Path, digest: Callable[[Path], str] = sha256_file) -> dict[str, str]:
    """Digest of every file under `folder`, by relative path, except its manifest."""
    files = sorted(p for p in Path(folder).rglob("*") if p.is_file() and p != Path(folder) / MANIFEST)
    return {p.relative_to(folder).as_posix(): digest(p) for p in files}


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole: readers see the old content or the new, never a part. Creates the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        _fsync(path.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole, keys in their given order, with a final newline."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def read_json(path: Path, what: str = "file") -> Any:
    """Read a JSON file. Raises UserError when it is missing or not JSON, naming `what` it should be."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what}; check the path") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a {what}; name the file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: not a valid {what} ({e}); make it again") from None


def require_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise UserError when the disk that holds `folder` has less than `needed_bytes` free.

    `folder` need not exist. The environment variable ZAYA_FREE_BYTES stands in for the disk's answer, for tests and
    for quotas that the file system does not report.
    """
    at = Path(folder).absolute()
    while not at.exists():
        at = at.parent
    free = int(os.environ.get("ZAYA_FREE_BYTES") or shutil.disk_usage(at).free)
    if free < needed_bytes:
        raise UserError(
            f"{folder}: {what} needs about {needed_bytes / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "free some space or choose another folder"
        )


@contextlib.contextmanager
def exclusive(lock: Path, busy: str) -> Iterator[None]:
    """Hold the file `lock` until the end, or the process's. Raises UserError(busy) when another process has it."""
    Path(lock).parent.mkdir(parents=True, exist_ok=True)
    with open(lock, "w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(busy) from None
        yield


def _replaced(path: Path) -> Path:
    return path.parent / f".{path.name}.replaced"


def recover(path: Path) -> Path:
    """Undo a replacement of the folder `path` that was killed between its two renames. Returns `path`."""
    path = Path(path)
    if _replaced(path).exists():
        if path.exists():
            shutil.rmtree(_replaced(path))
        else:
            os.rename(_replaced(path), path)
    return path


@contextlib.contextmanager
def whole_dir(path: Path) -> Iterator[Path]:
    """A folder that appears whole or not at all: yields a temporary sibling, renamed to `path` on success.

    What was at `path` is replaced only then. Leftovers of killed runs beside it are removed first.
    Raises UserError when `path` is a file, or a folder with something in it and no manifest: not ours to replace.
    """
    path = recover(path)
    if path.exists() and not (path.is_dir() and (read_manifest(path) is not None or not any(path.iterdir()))):
        raise UserError(f"{path}: is there already and was not made by zaya; choose another name, or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    for stale in path.parent.glob(f".{path.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.tmp-"))
    os.chmod(temporary, 0o755)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _fsync(file)
        _fsync(temporary)
        if path.exists():
            os.rename(path, _replaced(path))
            os.rename(temporary, path)
            shutil.rmtree(_replaced(path), ignore_errors=True)
        else:
            os.rename(temporary, path)
        _fsync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_manifest(
    folder: Path,
    stage: str,
    inputs: dict[str, Any],
    timings: tuple[str, ...] = (),
    digest: Callable[[Path], str] = sha256_file,
) -> None:
    """Mark `folder` as what `stage` made from `inputs`, with a digest of every file in it.

    inputs: JSON values that determine the result (settings, digests of what was read). timings: glob patterns of
    relative paths of files that hold times, which differ from run to run; the manifest lists them apart.
    """
    hashes = tree_hashes(folder, digest)
    timed = {k for k in hashes if any(fnmatch.fnmatch(k, pattern) for pattern in timings)}
    write_json(
        Path(folder) / MANIFEST,
        {
            "stage": stage,
            "inputs": inputs,
            "inputs_sha256": sha256_json(inputs),
            "outputs": {k: v for k, v in hashes.items() if k not in timed},
            "timings": {k: v for k, v in hashes.items() if k in timed},
        },
    )


@contextlib.contextmanager
def stage_dir(
    path: Path,
    stage: str,
    inputs: dict[str, Any],
    timings: tuple[str, ...] = (),
    digest: Callable[[Path], str] = sha256_file,
) -> Iterator[Path]:
    """`whole_dir` that ends with `write_manifest`: the one way in which a stage writes its folder."""
    with whole_dir(path) as temporary:
        yield temporary
        write_manifest(temporary, stage, inputs, timings, digest)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage folder, or None when there is none or it cannot be read."""
    try:
        return json.loads((Path(path) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def manifest_digest(path: Path) -> str:
    """One digest for what a stage made: of its manifest's `outputs`, so that timings do not count.

    Raises UserError when `path` is not a finished stage folder.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise UserError(f"{path}: not a finished stage folder (no {MANIFEST}); run the stage that makes it")
    return sha256_json(manifest["outputs"])
