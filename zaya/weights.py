"""The weights of a Hugging Face folder as files: which they are, whether they are all there, and their one digest."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from zaya.errors import UserError
from zaya.files import read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CHUNK_BYTES = 1 << 24


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    dtype: str  # as safetensors names it, "F32", "BF16", ...
    shape: list[int]
    start: int  # bytes from the beginning of the file
    end: int


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that `from_pretrained(folder)` reads: the one, or every shard that the index names.

    Raises UserError when there are none, and for a shard that is not there.
    """
    folder = Path(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if not (folder / INDEX).is_file():
        found = sorted(p.name for p in folder.glob("*.safetensors"))
        if found:
            raise UserError(
                f"{folder}: holds {found[0]} and neither {SINGLE} nor {INDEX}; copy the model again, whole"
            )
        raise UserError(f"{folder}: holds no weights ({SINGLE} or {INDEX}); export the model again")
    shards = sorted(set(_weight_map(folder).values()))
    lost = [name for name in shards if not (folder / name).is_file()]
    if lost:
        more = f" and {len(lost) - 1} more" if lost[1:] else ""
        raise UserError(f"{folder}: shard {lost[0]}{more} of {len(shards)} is missing; copy the model again, whole")
    return [folder / name for name in shards]


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Where every tensor of the folder lies, by name.

    Raises UserError for a file that is damaged or cut short, and for one that lacks a tensor that the index promises.
    """
    files = weight_files(folder)
    held = {file: _header(file) for file in files}
    found = {name: stored for file in files for name, stored in held[file].items()}
    if files[0].name != SINGLE:
        for name, file in _weight_map(Path(folder)).items():
            if name not in held[Path(folder) / file]:
                raise UserError(f"{Path(folder) / file}: lacks {name}, which {INDEX} promises; export the model again")
    return found


def weights_sha256(folder: Path) -> str:
    """Hex digest of a folder's weights: of names, dtypes, shapes and bytes, in the order of the names.

    How the tensors are spread over files, and what else the files' headers say, makes no difference; nor does a head
    that config.json ties to the embedding, whether it is stored or not. Raises UserError as `stored_tensors`.
    """
    tied = read_object(Path(folder) / "config.json", "model config").get("tie_word_embeddings", False)
    digest = hashlib.sha256()
    for name, at in sorted(stored_tensors(folder).items()):
        if tied and name == "lm_head.weight":
            continue
        digest.update(json.dumps([name, at.dtype, at.shape]).encode())
        with open(at.file, "rb") as f:
            f.seek(at.start)
            for start in range(at.start, at.end, CHUNK_BYTES):
                digest.update(f.read(min(CHUNK_BYTES, at.end - start)))
    return digest.hexdigest()


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_object(folder / INDEX, "index of weights")
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(v, str) for v in names.values()):
        raise UserError(f"{folder / INDEX}: has no weight_map; export the model again")
    return names


def _header(file: Path) -> dict[str, Stored]:
    """A file's tensors. The header is read here and not by safetensors, which needs numpy or torch for it."""
    damaged = UserError(f"{file}: damaged or cut short; export the model again, or copy it again")
    with open(file, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if not 2 <= length <= min(100_000_000, file.stat().st_size - 8):
            raise damaged
        try:
            header: dict[str, Any] = json.loads(f.read(length))
            header.pop("__metadata__", None)
            first = 8 + length
            found = {
                name: Stored(file, t["dtype"], t["shape"], *(first + offset for offset in t["data_offsets"]))
                for name, t in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError):
            raise damaged from None
    if max((t.end for t in found.values()), default=first) != file.stat().st_size:
        raise damaged
    return found
