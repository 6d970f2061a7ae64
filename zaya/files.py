"""Writing things whole, and knowing afterwards what was written.

Every stage of a release writes one folder through `stage_dir`: a temporary name beside the target, fsync, a
`manifest.json` as the last file, one rename. A folder without a manifest is not a result.
"""

import contextlib
import fcntl
import fnmatch
import glob
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
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as f:  # of a path that is not UTF-8
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
        return json.loads(_read_text(path, what))
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        raise UserError(f"{path}: not a valid {what} ({e}); make it again") from None


def _read_text(path: Path, what: str) -> str:
    """A file's text. Raises UserError when it is missing, a folder or not UTF-8, naming `what` it should be."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such {what}; check the path") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder, not a {what}; name the file") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{path}: not a valid {what} ({e}); make it again") from None


def read_json_lines(path: Path, what: str = "file of JSON lines", needs: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines. Blank lines are passed over; `needs` are keys that each must have.

    Raises UserError as `read_json` does, with the number of the line. Lines end at a newline only: str.splitlines
    would cut at U+2028 and its like, which a JSON string may hold as they are.
    """
    rows = []
    for number, line in enumerate(_read_text(path, what).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UserError(f"{path}, line {number}: not JSON ({e}), and a {what} has an object a line") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: not a JSON object, and a {what} has one a line")
        if lacking := [k for k in needs if k not in row]:
            raise UserError(f"{path}, line {number}: no field {lacking[0]!r}, which every line of a {what} has")
        rows.append(row)
    return rows


def read_object(path: Path, what: str = "file") -> dict[str, Any]:
    """`read_json` of a file that must hold a JSON object."""
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a valid {what} (it holds no JSON object); make it again")
    return value


def require_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raise UserError when the disk that holds `folder` has less than `needed_bytes` free.

    `folder` need not exist. The environment variable ZAYA_FREE_BYTES stands in for the disk's answer, for tests and
    for quotas that the file system does not report.
    """
    told = os.environ.get("ZAYA_FREE_BYTES")
    if told and not told.isdecimal():
        raise UserError(f"ZAYA_FREE_BYTES is {told!r}; set it to a number of bytes, or unset it")
    free = int(told) if told else shutil.disk_usage(_existing(folder)).free
    if free < needed_bytes:
        raise UserError(
            f"{folder}: {what} needs about {needed_bytes / 1e9:.2f} GB and {free / 1e9:.2f} GB are free; "
            "free some space or choose another folder"
        )


def _existing(path: Path) -> Path:
    """`path`, or the nearest folder above it that is there."""
    at = Path(path).absolute()
    while not at.exists():
        at = at.parent
    return at


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


def check_target(path: Path, stage: str | None = None) -> Path:
    """Where `stage` writes when it is told `path`: symbolic links are followed, so that they stay what they are.

    Raises UserError when something else is there: a file, a folder with something in it that zaya did not make, or
    what another stage made (None: any stage may be replaced). Long work asks this before it begins.
    """
    at = Path(os.path.realpath(path))
    if at.is_symlink():
        raise UserError(f"{path}: symbolic links that lead in a circle; choose another name")
    if at.exists():
        made = read_manifest(at)
        if not at.is_dir() or (made is None and any(at.iterdir())):
            raise UserError(
                f"{path}: is there already and was not made by zaya; choose another name, or remove it first"
            )
        if made is not None and stage not in (None, made["stage"]):
            raise UserError(
                f"{path}: holds what another stage made ({made['stage']}, and this is {stage}); choose another name, "
                "or remove it first"
            )
    above = _existing(at.parent)
    if not above.is_dir():
        raise UserError(f"{path}: {above} is a file, and a folder is needed there; choose another name")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{path}: {above} may not be written to; change its permissions or choose another folder")
    return at


def check_file(path: Path) -> None:
    """Raise UserError when a file cannot be written at `path`. Long work asks this before it begins."""
    path, above = Path(path), _existing(Path(path).absolute().parent)
    if path.is_dir():
        raise UserError(f"{path}: is a folder, and a file is to be written; name the file")
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{path}: {above} is not a folder that may be written to; choose another name")


def _hold(folder: Path) -> int | None:
    """Mark a temporary folder as in use while the returned descriptor is open; None when somebody has it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:  # a file system without locks of folders: a leftover and a folder in use look the same there
        pass
    return fd


def _remove_leftovers(path: Path) -> None:
    """Remove what killed runs left beside `path`. Raises UserError when one of them is alive."""
    for stale in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            held = _hold(stale)
            if held is None:
                raise UserError(f"{path}: another command is writing it; wait for it or choose another name")
            shutil.rmtree(stale, ignore_errors=True)
            os.close(held)


@contextlib.contextmanager
def whole_dir(path: Path, stage: str | None = None) -> Iterator[Path]:
    """A folder that appears whole or not at all: yields a temporary sibling, renamed to `path` on success.

    What was at `path` is replaced only then. Leftovers of killed runs beside it are removed first.
    Raises UserError for a target that `check_target` refuses, and when another process is writing it.
    """
    path = check_target(recover(path), stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.tmp-"))
    held = _hold(temporary)
    try:
        os.chmod(temporary, 0o755)
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                os.chmod(file, 0o644)  # some libraries write files that their owner alone may read
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
    finally:
        if held is not None:
            os.close(held)


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
    with whole_dir(path, stage) as temporary:
        yield temporary
        write_manifest(temporary, stage, inputs, timings, digest)


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a finished stage folder, or None when there is none that `write_manifest` could have written.

    A foreign file of that name, as web applications have one, marks nothing as ours.
    """
    try:
        manifest = json.loads((Path(path) / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("stage"), str):
        return None
    return manifest if all(isinstance(manifest.get(k), dict) for k in ("inputs", "outputs", "timings")) else None


def manifest_digest(path: Path) -> str:
    """One digest for what a stage made: of its manifest's `outputs`, so that timings do not count.

    Raises UserError when `path` is not a finished stage folder.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise UserError(f"{path}: not a finished stage folder (no {MANIFEST}); run the stage that makes it")
    return sha256_json(manifest["outputs"])
