"""What a release left on disk, read for the page. What is not there is None or empty, never made up."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zaya.errors import UserError
from zaya.files import read_json_lines, read_manifest, read_object
from zaya.results import Kind, Metric, Provenance, Result, explain, load

CONTROL = "random"


@dataclass(frozen=True)
class Found:
    """A result with its place in the list of sources and its path as shown."""

    number: int
    path: str
    result: Result

    def metric(self, name: str) -> Metric | None:
        """The metric of that name, or None."""
        return next((m for m in self.result.metrics if m.name == name), None)

    def value(self, name: str) -> float | None:
        """Its value, or None."""
        found = self.metric(name)
        return None if found is None else found.value


@dataclass(frozen=True)
class Run:
    """One training run: its description, its log and the number of its entry in the list of sources."""

    number: int
    name: str
    about: dict[str, Any]
    log: list[dict[str, Any]]
    speed: list[dict[str, Any]]
    finished: bool
    provenance: Provenance | None

    @property
    def ours(self) -> bool:
        """Whether this is the model that the release is about."""
        return self.about.get("arm") == "zaya"

    def column(self, key: str) -> tuple[list[float], list[Any]]:
        """(tokens, values) of every line of the log that holds `key`, without numbers that are not finite."""
        whole = lambda v: not isinstance(v, float) or math.isfinite(v)
        lines = [(line["tokens"], line[key]) for line in self.log if key in line and whole(line[key])]
        return [t for t, _ in lines], [v for _, v in lines]

    def last(self, key: str) -> Any:
        """The newest value of `key`, or None."""
        return next((line[key] for line in reversed(self.log) if key in line), None)


@dataclass
class Release:
    """Everything that the page shows."""

    folder: Path
    found: list[Found] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    dataset: dict[str, Any] | None = None
    dataset_number: int = 0
    dataset_provenance: Provenance | None = None
    samples: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)  # by the number of their result

    @property
    def ours(self) -> str | None:
        """Name of the model that the release is about: of our run, else of what was verified or scored first."""
        named = [r.name for r in self.runs if r.ours] + [f.result.subject for f in self.of("verify")]
        scored = [f.result.subject for f in self.of("quality") if f.result.subject != CONTROL]
        return next(iter(named + scored), None)

    @property
    def subjects(self) -> list[str]:
        """Models in the page's order: ours, the others by name, the untrained control last."""
        every = {f.result.subject for f in self.of("quality", "latency")} | {r.name for r in self.runs}
        return sorted(every, key=lambda s: (s != self.ours, s == CONTROL, s))

    @property
    def baseline(self) -> str | None:
        """The first model that is neither ours nor the control."""
        return next((s for s in self.subjects if s not in (self.ours, CONTROL)), None)

    def style(self, subject: str) -> int:
        """0 ours, 1 others, 2 the control: colour and mark."""
        return 0 if subject == self.ours else 2 if subject == CONTROL else 1

    def of(self, *kinds: Kind) -> list[Found]:
        """Results of these kinds."""
        return [f for f in self.found if f.result.kind in kinds]

    def run(self, name: str | None) -> Run | None:
        """The training run of that name, or None."""
        return next((r for r in self.runs if r.name == name), None)

    def scores(self) -> dict[str, dict[str, Found]]:
        """Quality results by task, held-out text last, then by subject.

        Results of one task are together only when they asked the same: another set of items, another protocol or a
        part of the items (`--limit`) is a row of its own, and is never ranked with the rest.
        """
        groups: dict[tuple[str, str], dict[str, Found]] = {}
        for f in self.of("quality"):
            groups.setdefault((f.result.name, asked(f.result)), {})[f.result.subject] = f
        by_task = dict(zip(_labels(groups), groups.values(), strict=True))
        text = lambda task: any(f.metric("bits_per_byte") for f in by_task[task].values())
        return {task: by_task[task] for task in sorted(by_task, key=lambda t: (text(t), t))}


def asked(result: Result) -> str:
    """What a quality result asked, as one digest: results that share it may be compared."""
    return str(result.settings.get("protocol_sha256") or result.settings.get("items_sha256") or "")


def _labels(groups: dict[tuple[str, str], dict[str, Found]]) -> list[str]:
    """A name for each group: the task's, and what tells it from others of the same task."""
    labels: list[str] = []
    for (task, _), by in groups.items():
        found = next(iter(by.values()))
        settings, n = found.result.settings, found.result.metrics[0].n
        about = [f"partial, {n} of {settings.get('suite_items', '?')} items"] if settings.get("partial") else []
        if not about and any(name == task for name in labels):
            about = [f"suite {settings.get('suite', '?')}, {n} items"]
        label = " ".join([task, *(f"({a})" for a in about)])
        while label in labels:
            label += " "  # two protocols that differ in what is not named: the sources say in what
        labels.append(label)
    return labels


def collect(folders: list[Path]) -> Release:
    """Read a release folder, and results of other models from further folders.

    Raises UserError for a folder that is missing or empty, a file that does not fit its schema, and two results of
    one measurement of one model.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder of results; `zaya release` makes one")
    release = Release(folders[0])
    number = iter(range(1, 10_000))
    for folder in folders:
        _read_training(folder, release, number)
        _read_results(folder, release, number)
    if not release.found and not release.runs:
        raise UserError(f"{folders[0]}: no results in it; run `zaya release`, `zaya eval` or `zaya latency` first")
    return release


def _read_results(folder: Path, release: Release, number) -> None:
    seen = {_measurement(f.result) for f in release.found}
    hidden = lambda p: any(part.startswith(".") or part == "train" for part in p.relative_to(folder).parts)
    for path in sorted(p for p in folder.rglob("*--*.json") if not hidden(p)):
        result = load(path)
        key = _measurement(result)
        if key in seen:
            raise UserError(f"{path}: a second result of {result.subject} on {result.name}; remove one of the two")
        seen.add(key)
        found = Found(next(number), path.relative_to(folder).as_posix(), result)
        release.found.append(found)
        samples = path.parent / "samples" / f"{result.name}.jsonl"
        if result.kind == "quality" and samples.is_file():
            rows = _json_lines(samples, "file of samples", ("doc_hash", "item"))
            release.samples[found.number] = {r["doc_hash"] + str(r["item"]): r for r in rows}


def _measurement(result: Result) -> tuple[str, ...]:
    """What only one result may say. Of scores: a subject on what was asked, by whatever backend and dtype."""
    says = asked(result) if result.kind == "quality" else str(result.settings)
    return result.kind, result.subject, result.name, says


def _read_training(folder: Path, release: Release, number) -> None:
    if release.dataset is None and (folder / "data" / "dataset.json").is_file():
        release.dataset = read_object(folder / "data" / "dataset.json", "dataset summary")
        release.dataset_number = next(number)
        release.dataset_provenance = _provenance(folder / "data")
    for path in sorted((folder / "train").glob("[!.]*/run.json")):  # .NAME.previous is what a changed recipe left
        run = path.parent
        release.runs.append(
            Run(
                number=next(number),
                name=run.name,
                about=read_object(path, "run description"),
                log=_json_lines(run / "log.jsonl", "training log", ("step", "tokens")),
                speed=_json_lines(run / "speed.jsonl", "training log", ("step",)),
                finished=read_manifest(run) is not None,
                provenance=_provenance(run),
            )
        )
    release.runs.sort(key=lambda r: not r.ours)


def _provenance(folder: Path) -> Provenance | None:
    path = folder / "provenance.json"
    try:
        return Provenance.model_validate(read_object(path, "provenance")) if path.is_file() else None
    except ValidationError as e:
        raise UserError(f"{path}: not a valid provenance ({explain(e)}); make it again with this version") from None


def _json_lines(path: Path, what: str, needs: tuple[str, ...]) -> list[dict[str, Any]]:
    return read_json_lines(path, what, needs) if path.is_file() else []
