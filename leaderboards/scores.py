"""The page's section of scores."""

import math
from typing import Any

from zaya.leaderboards.charts import Interval, both, interval_chart, number
from zaya.leaderboards.checks import LEVEL, compare, p_text, signed
from zaya.leaderboards.collect import CONTROL, Found, Release
from zaya.leaderboards.html import Markup, tag
from zaya.leaderboards.parts import missing, notes, panel, section, subjects_legend, table
from zaya.leaderboards.stats import (
    Z95,
    Difference,
    detectable,
    effective_items,
    holm,
    mean_difference,
    wilson_interval,
)

METRIC_NAMES = {
    "acc": "accuracy",
    "acc_norm": "accuracy, per character",
    "exact_match": "exact match",
    "bits_per_byte": "bits per byte",
}
INTRO = (
    "Marks are means over items, lines 95 % intervals: Wilson's for accuracies, 1.96 standard errors for bits per "
    "byte. Models answered the same items, so differences are paired: interval by bootstrap over items, p by "
    "McNemar's exact test (accuracies) or sign flips (bits per byte). Items of one passage or subject are resampled "
    "and flipped together. p is corrected for the number of tasks (Holm). Runs over a part of the items stand apart."
)


def scores(release: Release) -> Markup:
    """Accuracies and bits per byte with 95 % intervals, and paired differences from the baseline and the control."""
    by_task = release.scores()
    if not by_task:
        return missing("scores", "Scores", "zaya eval MODEL")
    names = [s for s in release.subjects if any(s in by for by in by_task.values())]
    panels = [_score_panel(release, task, by, names) for task, by in by_task.items()]

    return section(
        "scores",
        "Scores",
        INTRO,
        subjects_legend(release, names),
        tag("div", panels, class_="panels two"),
        _score_table(release, by_task, names),
        _difference_table(release, by_task),
    )


def _primary(found: Found) -> str:
    return str(found.result.settings.get("primary", found.result.metrics[0].name))


def _is_score(name: str) -> bool:
    return name in METRIC_NAMES or name.startswith("pass@")


def _score_panel(release: Release, task: str, by: dict[str, Found], names: list[str]) -> Markup:
    any_one = next(iter(by.values()))
    name = _primary(any_one)
    fraction = name != "bits_per_byte"
    rows = []
    for subject in names:
        metric = by[subject].metric(name) if subject in by else None
        if metric is not None and math.isfinite(metric.value):
            clustered = bool(by[subject].result.settings.get("cluster"))
            rows.append(_interval(subject, metric, release.style(subject), fraction, clustered))
    if not rows:
        return panel(task, "no finite score", Markup(""))
    chance = any_one.value("chance")
    show = (lambda v: f"{100 * v:.0f} %") if fraction else number
    metric = any_one.metric(name)
    about = [f"{METRIC_NAMES.get(name, name)}, {metric.n if metric else '?'} items, "]
    about += ["higher is better" if fraction else "lower is better"]
    rows, far = _without_far(rows)
    about += [f"; {far.name} is off this axis, at {far.value:.3f}"] if far else []
    about.append(notes(*(f.number for f in by.values())))
    label = f"{task}: " + ", ".join(f"{r.name} {r.value:.3f}" for r in rows)
    level = (f"chance {100 * chance:.0f} %", chance) if chance is not None else None
    return panel(task, about, both(lambda width: interval_chart(rows, label, show, level, width), 480, 310))


def _without_far(rows: list[Interval]) -> tuple[list[Interval], Interval | None]:
    """The rows to draw, and the last one apart when it is so far away that the others would fall on one point."""
    if len(rows) < 3 or rows[-1].name != CONTROL:
        return rows, None
    near = [v for r in rows[:-1] for v in (r.low, r.value, r.high) if v is not None]
    gap = min(abs(rows[-1].value - v) for v in near)
    return (rows[:-1], rows[-1]) if gap > 3 * (max(near) - min(near)) else (rows, None)


def _interval(name: str, metric: Any, style: int, fraction: bool, clustered: bool) -> Interval:
    if fraction and metric.n:
        n = effective_items(metric.value, metric.n, metric.stderr) if clustered else metric.n
        return Interval(name, metric.value, *wilson_interval(metric.value, n), style)
    if metric.stderr is None:
        return Interval(name, metric.value, None, None, style)
    return Interval(name, metric.value, metric.value - Z95 * metric.stderr, metric.value + Z95 * metric.stderr, style)


def _score_table(release: Release, by_task: dict[str, dict[str, Found]], names: list[str]) -> Markup:
    rows = []
    for task, by in by_task.items():
        wanted = dict.fromkeys(m.name for f in by.values() for m in f.result.metrics if _is_score(m.name))
        for name in wanted:
            cells = [_score_cell(by.get(s), name) for s in names]
            chance = next(iter(by.values())).value("chance")
            n = next((m.n for f in by.values() if (m := f.metric(name))), None)
            shown = f"{chance:.3f}" if chance is not None and name.startswith("acc") else "–"
            rows.append([task, METRIC_NAMES.get(name, name), n, shown, *cells])
    return table(["Task", "Metric", "Items", "Chance", *names], rows, "Table: scores ± standard error", open_=True)


def _score_cell(found: Found | None, name: str) -> Any:
    metric = found.metric(name) if found else None
    if metric is None or found is None:
        return "not measured"
    error = "" if metric.stderr is None else f" ± {metric.stderr:.3f}"
    return [f"{metric.value:.3f}{error}", notes(found.number)]


def _difference_table(release: Release, by_task: dict[str, dict[str, Found]]) -> Markup:
    rows = [
        row for other in release.subjects if other != release.ours for row in _differences(release, by_task, other)
    ]
    if not rows:
        return tag("p", "Paired differences: not measured (they need the samples of two models on the same items).")
    head = ["Comparison", "Metric", "Items", f"{release.ours} minus other", "95 % interval", "p", "p, Holm"]
    head += ["Detectable", "Ours is"]
    says = "Detectable: the smallest true difference that would be found with 80 % power at Holm's strictest level."
    return Markup(table(head, rows, "Table: paired differences", open_=True) + tag("p", says))


def _differences(release: Release, by_task: dict[str, dict[str, Found]], other: str) -> list[list[Any]]:
    """Rows of ours against one other model: a task each, and the mean over the accuracies when there are several."""
    every = {task: d for task in by_task if (d := compare(release, release.ours, other, task)) is not None}
    primaries = {task: _primary(by_task[task][release.ours or ""]) for task in every}
    rows = []
    for (task, d), p in zip(every.items(), holm([d.p for d in every.values()]), strict=True):
        bits = primaries[task] == "bits_per_byte"
        metric = METRIC_NAMES.get(primaries[task], primaries[task])
        rows.append(_difference_row(f"{task}, against {other}", metric, d, p, LEVEL / len(every), bits))
    whole = [t for t in every if not by_task[t][other].result.settings.get("partial")]
    fractions = [every[t] for t in whole if primaries[t] != "bits_per_byte" and every[t].stderr is not None]
    if len(fractions) > 1:
        mean = mean_difference(fractions)
        rows.append(_difference_row(f"mean of {len(fractions)} tasks, against {other}", "–", mean, None, LEVEL, False))
    return rows


def _difference_row(name: str, metric: str, d: Difference, adjusted: float | None, level: float, bits: bool) -> list:
    better = d.value < 0 if bits else d.value > 0
    p = d.p if adjusted is None else adjusted
    says = "no difference shown" if p >= LEVEL else "better" if better else "worse"
    least = detectable(d.stderr, level)
    items = f"{d.n}" if d.clusters == d.n else f"{d.n} in {d.clusters} clusters"
    corrected = "–" if adjusted is None else p_text(adjusted)
    interval = f"{signed(d.low)} to {signed(d.high)}"
    shown = "–" if least is None else f"{least:.3f}"
    return [name, metric, items, signed(d.value), interval, p_text(d.p), corrected, shown, says]
