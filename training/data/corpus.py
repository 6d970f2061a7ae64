"""Text to train on: what this machine's Python brings, or files that the recipe names, split by whole files."""

import glob
import hashlib
import logging
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from zaya.errors import UserError
from zaya.training.recipe import Corpus

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Document:
    """A file's text under a name that is the same on every machine that has the file."""

    path: str
    text: str


def collect(corpus: Corpus, seed: int) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, each in the order of their names.

    Files that are empty, not UTF-8, or equal to an earlier one are left out, so that no held-out text is in training.
    Which are held out depends on the seed and the names alone. Raises UserError for a source without files and for a
    corpus without enough text to split.
    """
    documents: dict[str, Document] = {}
    seen: set[bytes] = set()
    skipped = 0
    for document in _read(_files(corpus.sources)):
        digest = b"" if document is None else hashlib.sha256(document.text.strip().encode()).digest()
        if document is None or not document.text.strip() or digest in seen:
            skipped += 1
            continue
        seen.add(digest)
        documents[document.path] = document
    if skipped:
        log.info("corpus: %d files are empty, not UTF-8 or copies of another, and left out", skipped)
    shuffled = sorted(documents.values(), key=lambda d: hashlib.sha256(f"{seed}:{d.path}".encode()).digest())
    shuffled = _limit(shuffled, corpus.max_bytes)
    if len(shuffled) < 2:
        raise UserError(
            f"corpus.sources {', '.join(corpus.sources)}: {len(shuffled)} files with text; at least 2 are needed, one "
            "of them held out: add files, or raise corpus.max_bytes"
        )
    cut = min(max(1, round(len(shuffled) * corpus.heldout_fraction)), len(shuffled) - 1)
    by_name = lambda part: sorted(part, key=lambda d: d.path)
    return by_name(shuffled[cut:]), by_name(shuffled[:cut])


def _limit(documents: list[Document], max_bytes: int | None) -> list[Document]:
    """The documents that fit into `max_bytes`, in order; one that does not fit is passed over."""
    if max_bytes is None:
        return documents
    kept, total = [], 0
    for document in documents:
        size = len(document.text.encode())
        if total + size <= max_bytes:
            kept.append(document)
            total += size
    return kept


def _files(sources: Iterable[str]) -> Iterator[tuple[str, Path | str]]:
    """(name, file or text) of every source, each source in the order of its names."""
    for source in sources:
        if source == "python-stdlib":
            yield from _python_stdlib()
        elif source == "pydoc-topics":
            yield from _pydoc_topics()
        else:
            yield from _matches(source)


def _python_stdlib() -> Iterator[tuple[str, Path]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    foreign = {"site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not foreign & set(relative.parts):
            yield f"python-stdlib/{relative.as_posix()}", path


def _pydoc_topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("corpus.sources: this Python has no pydoc_data; leave pydoc-topics out") from None
    for name in sorted(topics):
        yield f"pydoc-topics/{name}.txt", topics[name]


def _matches(pattern: str) -> Iterator[tuple[str, Path]]:
    if Path(pattern).is_dir():
        raise UserError(f"corpus.sources: {pattern} is a folder; name its files, for example {pattern}/**/*.txt")
    found = sorted(Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
    if not found:
        raise UserError(f"corpus.sources: {pattern}: no such file; check the path (relative ones start at the recipe)")
    plain = [part for part in Path(pattern).parts if not glob.has_magic(part)]
    root = Path(*plain) if len(plain) < len(Path(pattern).parts) else Path(pattern).parent
    for path in found:
        try:
            relative = path.relative_to(root)
        except ValueError:  # a wildcard in the middle of the pattern: name the file by its whole path
            relative = path
        yield f"{root.name}/{relative.as_posix()}", path


def _read(files: Iterable[tuple[str, Path | str]]) -> Iterator[Document | None]:
    """Documents; None for a file that is not UTF-8 text."""
    for name, source in files:
        try:
            yield Document(name, source if isinstance(source, str) else source.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            yield None
        except OSError as e:
            raise UserError(f"corpus.sources: {source}: may not be read ({e.strerror}); leave it out") from None
