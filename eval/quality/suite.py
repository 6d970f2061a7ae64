"""Suites: which tasks, which of their items, and how. A YAML file each in suites/, on lm-eval's own task files."""

import difflib
import fnmatch
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from zaya import plainyaml
from zaya.errors import UserError
from zaya.eval.quality.sources import DATASETS, read_rows
from zaya.files import read_json_lines, sha256_json, write_text

SUITES = Path(__file__).with_name("suites")


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]  # of a file, and of lm-eval's task
Count = Annotated[int, Field(ge=1, strict=True)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)


class Choice(_Strict):
    """A multiple-choice task in cloze form: each answer's whole text is scored after the prompt."""

    name: Name
    """Name in results."""
    include: str
    """lm-eval's task file with the official prompt, relative to lm_eval/tasks."""
    data: str
    """Data set of `zaya data eval`."""
    items: Count | None = None
    """Items asked, chosen by the suite's seed; unset asks all."""
    primary: Literal["acc", "acc_norm"]
    """The metric that a comparison uses: accuracy, or accuracy with log-likelihoods per character."""
    cluster: str | None = None
    """Column whose equal values mark items that stand or fall together (a passage, a subject); unset: none do."""


class Text(_Strict):
    """Bits per byte of held-out text."""

    name: Name
    """Name in results."""
    files: str = "*"
    """Glob over the names of held-out files."""
    items: Count | None = None
    """Files scored, chosen by the suite's seed; unset scores all."""
    max_bytes: Count = 4096
    """Bytes of each file, from its start."""
    window_tokens: Count = 256
    """Tokens in one forward pass, the <bos> that starts it included. At most the model's maximum."""
    context_tokens: int = 128
    """Tokens of the text before it that each later window sees again, unscored."""

    @model_validator(mode="after")
    def _consistent(self) -> "Text":
        if not 0 <= self.context_tokens < self.window_tokens - 1:
            raise ValueError("context_tokens must be less than window_tokens - 1")
        return self


class Suite(_Strict):
    """A named set of tasks."""

    name: str
    seed: int = 0
    """Chooses the items of every task."""
    choices: list[Choice] = []
    texts: list[Text] = []

    @model_validator(mode="after")
    def _named_once(self) -> "Suite":
        found = [task.name for task in (*self.choices, *self.texts)]
        if not found:
            raise ValueError("no task in it; give choices or texts")
        if twice := [n for n in found if found.count(n) > 1]:
            raise ValueError(f"two tasks are named {twice[0]}; give each its own name")
        return self


@dataclass
class Rendered:
    """A suite ready for lm-eval: task files in a folder, and what each task holds."""

    suite: Suite
    folder: Path
    counts: dict[str, int] = field(default_factory=dict)  # items per task
    whole: dict[str, int] = field(default_factory=dict)  # items per task without a limit
    digests: dict[str, str] = field(default_factory=dict)  # of the items, per task
    clusters: dict[str, str] = field(default_factory=dict)  # the column that clusters a task's items
    texts: dict[str, Text] = field(default_factory=dict)  # the tasks that are bits per byte


def names() -> list[str]:
    """Names of the suites that exist."""
    return sorted(p.stem for p in SUITES.glob("*.yaml"))


def load_suite(name: str) -> Suite:
    """The suite called `name`, or the one in the file of that path. Raises UserError naming the nearest otherwise."""
    path = Path(name) if name.endswith(".yaml") else SUITES / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, names(), n=1, cutoff=0)
        raise UserError(f"--suite {name}: no such suite; did you mean {near[0]!r}? There are {', '.join(names())}")
    try:
        suite = Suite.model_validate(plainyaml.read(path, "suite", "eval/quality/suites/demo.yaml"))
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        message = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {where}: {message}; see eval/quality/suite.py") from None
    if unknown := [c.data for c in suite.choices if c.data not in DATASETS]:
        raise UserError(f"{path}: no data set {unknown[0]!r}; there are {', '.join(DATASETS)}")
    return suite


def pick(rows: Iterable[Any], key: Callable[[Any], str], count: int | None, seed: int) -> list[Any]:
    """`count` of `rows` in their order. Which ones depends on seed and key alone; a smaller count takes a subset."""
    rows = list(rows)
    if count is None or count >= len(rows):
        return rows
    rank = lambda i: hashlib.sha256(f"{seed}:{key(rows[i])}".encode()).digest()
    return [rows[i] for i in sorted(sorted(range(len(rows)), key=rank)[:count])]


def render(suite: Suite, folder: Path, data: Path | None, heldout: Path | None, limit: int | None) -> Rendered:
    """Write task files and their items into `folder`; paths in them are absolute, because lm-eval needs them so.

    limit: at most so many items per task, a subset of the suite's own. Raises UserError for missing data.
    """
    out = Rendered(suite, folder)
    least = lambda items: limit if items is None else min(items, limit or items)
    for task in suite.choices:
        key = lambda i, name=task.data: f"{name}:{i}"
        numbers = pick(range(DATASETS[task.data].rows), key, least(task.items), suite.seed)
        rows = [{"item": str(i), **r} for i, r in zip(numbers, read_rows(task.data, data, numbers), strict=True)]
        if task.cluster and task.cluster not in rows[0]:
            raise UserError(f"suite task {task.name}: cluster: {task.data} has no column {task.cluster}")
        _write(out, task.name, rows, _choice_yaml(task, folder))
        out.whole[task.name] = min(task.items or DATASETS[task.data].rows, DATASETS[task.data].rows)
        if task.cluster:
            out.clusters[task.name] = task.cluster
    for text in suite.texts:
        documents = _documents(text, heldout)
        rows = pick(documents, lambda r: r["item"], least(text.items), suite.seed)
        _write(out, text.name, rows, TEXT_YAML)
        out.whole[text.name] = min(text.items or len(documents), len(documents))
        out.texts[text.name] = text
    return out


def _documents(text: Text, heldout: Path | None) -> list[dict[str, str]]:
    """Held-out files as items, cut to `max_bytes` at a character's end."""
    make = "run `zaya data tokenize RECIPE` and give its heldout.jsonl with --heldout"
    if heldout is None:
        raise UserError(f"task {text.name} scores held-out text and none was given; {make}")
    if not heldout.is_file():
        raise UserError(f"{heldout}: no such file of held-out text; {make}")
    documents = [(d["path"], d["text"]) for d in read_json_lines(heldout, "file of held-out text", ("path", "text"))]
    if not all(isinstance(x, str) for d in documents for x in d):
        raise UserError(f"{heldout}: a field `path` or `text` is not text; {make}")
    cut = lambda s: s.encode()[: text.max_bytes].decode(errors="ignore")
    kept = [{"item": path, "text": cut(t)} for path, t in documents if fnmatch.fnmatch(path, text.files) and t.strip()]
    if not kept:
        raise UserError(f"{heldout}: no file named {text.files} with text in it, which task {text.name} scores")
    return kept


TEXT_YAML: dict[str, Any] = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "text",
    "metric_list": [{"metric": "bits_per_byte"}],
    "metadata": {"version": 1.0},
}


def _choice_yaml(task: Choice, folder: Path) -> dict[str, Any]:
    import lm_eval

    official = Path(lm_eval.__file__).parent / "tasks" / task.include
    if not official.is_file():
        raise UserError(f"suite task {task.name}: this lm-eval has no tasks/{task.include}; install lm-eval>=0.4.13")
    return {"include": str(official), "training_split": None, "fewshot_split": None, "num_fewshot": 0}


def _write(out: Rendered, name: str, rows: list[dict[str, Any]], task: dict[str, Any]) -> None:
    items = out.folder / f"{name}.jsonl"
    write_text(items, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    local = {
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": str(items)}, "cache_dir": str(out.folder / "cache")},
        "validation_split": "validation",
        "test_split": None,
    }
    write_text(out.folder / f"{name}.yaml", yaml.safe_dump(task | local, sort_keys=False))
    out.counts[name], out.digests[name] = len(rows), sha256_json(rows)
