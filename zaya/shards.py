"""Token shards: flat little-endian files of token ids, and an index that says what they are.

A data folder holds `<split>-00000.bin`, `<split>-00001.bin`, … and `index.json` with the tokens and digest of each
file, the size of the vocabulary, and one fingerprint over all of it, by which a checkpoint knows its training data.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from zaya.errors import UserError
from zaya.files import read_object, sha256_file, sha256_json, write_json

INDEX = "index.json"
VERSION = 1
SHARD_TOKENS = 1 << 27  # per file: 256 MB of 16-bit ids
_TYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


def token_dtype(vocab_size: int) -> str:
    """Name of the smallest type that holds every id of a vocabulary: uint16 or uint32."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def _cut(documents: Iterable[np.ndarray], limit: int) -> Iterator[list[np.ndarray]]:
    """Pieces of documents grouped into files of at most `limit` tokens."""
    group: list[np.ndarray] = []
    room = limit
    for document in documents:
        while len(document):
            piece, document = document[:room], document[room:]
            group.append(piece)
            room -= len(piece)
            if room == 0:
                yield group
                group, room = [], limit
    if group:
        yield group


def write_split(
    folder: Path, split: str, documents: Iterable[np.ndarray], vocab_size: int, shard_tokens: int = SHARD_TOKENS
) -> list[dict[str, Any]]:
    """Write documents (1-D integer arrays of ids) one after another; returns the split's entry for `write_index`.

    Raises UserError when an id is outside the vocabulary.
    """
    entries = []
    dtype = token_dtype(vocab_size)
    for number, group in enumerate(_cut(documents, shard_tokens)):
        tokens = np.concatenate(group)
        if tokens.min() < 0 or tokens.max() >= vocab_size:
            raise UserError(
                f"{folder}: token id {int(tokens.max())} is outside the vocabulary of {vocab_size}; "
                "tokenize with the tokenizer that the recipe names"
            )
        path = Path(folder) / f"{split}-{number:05d}.bin"
        with open(path, "wb") as f:  # not tofile, whose error on a full disk does not say what it is
            f.write(tokens.astype(_TYPES[dtype]).data)
        entries.append({"file": path.name, "tokens": len(tokens), "sha256": sha256_file(path)})
    return entries


def write_index(folder: Path, splits: dict[str, list[dict[str, Any]]], vocab_size: int) -> str:
    """Write index.json over what `write_split` returned. Returns the fingerprint, a hex digest."""
    content = {"version": VERSION, "dtype": token_dtype(vocab_size), "vocab_size": vocab_size, "splits": splits}
    fingerprint = sha256_json(content)
    write_json(Path(folder) / INDEX, content | {"fingerprint": fingerprint})
    return fingerprint


class TokenShards:
    """Read access to one split of a data folder: `len` tokens, sliced as if they were one array.

    Raises UserError when the index or a shard is missing, or a shard's length is not what the index says.
    """

    def __init__(self, folder: Path, split: str):
        folder = Path(folder)
        index = read_object(folder / INDEX, "index of token shards (make them with `zaya data tokenize`)")
        if index.get("version") != VERSION or split not in index.get("splits", {}):
            raise UserError(
                f"{folder / INDEX}: no split {split!r} of version {VERSION}; run `zaya data tokenize` again"
            )
        self.folder, self.split = folder, split
        try:
            self.vocab_size: int = index["vocab_size"]
            self.fingerprint: str = index["fingerprint"]
            self._shards = [self._open(entry, _TYPES[index["dtype"]]) for entry in index["splits"][split]]
        except (KeyError, TypeError) as e:
            raise UserError(
                f"{folder / INDEX}: not what was written ({e!r}); run `zaya data tokenize` again"
            ) from None
        self._starts = np.cumsum([0] + [len(s) for s in self._shards])

    def _open(self, entry: dict[str, Any], dtype: np.dtype) -> np.ndarray:
        path = self.folder / entry["file"]
        if not path.is_file():
            raise UserError(f"{path}: missing shard; run `zaya data tokenize` again")
        if path.stat().st_size != entry["tokens"] * dtype.itemsize:
            raise UserError(f"{path}: {path.stat().st_size} bytes are not {entry['tokens']} tokens; tokenize again")
        return np.memmap(path, dtype=dtype, mode="r")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) as int64 [count]. Raises IndexError outside the split."""
        if start < 0 or start + count > len(self):
            raise IndexError(f"tokens {start} to {start + count} of {len(self)}")
        out = np.empty(count, np.int64)
        done = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while done < count:
            at = start + done - int(self._starts[shard])
            piece = self._shards[shard][at : at + count - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            shard += 1
        return out

    def check_vocabulary(self, vocab_size: int, whose: str) -> None:
        """Raise UserError when `whose` vocabulary is not the one these tokens were made with."""
        if vocab_size != self.vocab_size:
            raise UserError(
                f"{self.folder}: the tokens are of a vocabulary of {self.vocab_size} and {whose} has {vocab_size}; "
                "run `zaya data tokenize` with this recipe, or give the folder that belongs to it"
            )
