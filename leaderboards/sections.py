"""The page's sections: each takes a release and returns HTML, or says that its part was not measured."""

import re
from collections.abc import Sequence
from typing import Any

from leaderboards.charts import Bar, Interval, Series, bar_chart, both, heatmap, interval_chart, legend, line_chart
from leaderboards.checks import compare, p_text, signed
from leaderboards.collect import CONTROL, Found, Release, Run
from leaderboards.html import Markup, tag
from leaderboards.stats import Z95

METRIC_NAMES = {
    "acc": "accuracy",
    "acc_norm": "accuracy, per character",
    "bits_per_byte": "bits per byte",
}


def notes(*numbers: int) -> Markup:
    """Links to entries in the list of sources."""
    links = [tag("a", n, href=f"#source-{n}", aria_label=f"source {n}") for n in sorted(set(numbers)) if n]
    return tag("sup", links, class_="notes") if links else Markup("")


def section(anchor: str, title: str, intro: Any, *children: Any) -> Markup:
    """A section of the page."""
    lead = tag("p", intro, class_="intro") if intro else None
    return tag("section", tag("h2", title), lead, *children, id=anchor, aria_label=title)


def missing(anchor: str, title: str, mend: str) -> Markup:
    """The section of a part that was not measured, with the command that measures it."""
    return section(
        anchor, title, None, tag("p", "Not measured. ", tag("code", mend), " measures it.", class_="missing")
    )


def table(head: Sequence[Any], rows: Sequence[Sequence[Any]], caption: str, open_: bool = False) -> Markup:
    """A table under its caption, folded unless `open_`. The first column names the row."""
    words = [bool(rows) and all(isinstance(r[i], str) and _is_word(r[i]) for r in rows) for i in range(len(head))]
    css = ["text" if w else None for w in words]
    top = tag("tr", [tag("th", h, scope="col", class_=c) for h, c in zip(head, css, strict=True)])
    cells = lambda r: [tag("td", x, class_=c) for x, c in zip(r[1:], css[1:], strict=True)]
    body = [tag("tr", tag("th", r[0], scope="row"), cells(r)) for r in rows]
    inner = tag("div", tag("table", tag("thead", top), tag("tbody", body)), class_="scroll", tabindex="0")
    return tag("details", tag("summary", caption), inner, open=open_ or None)


def _is_word(cell: str) -> bool:
    return not any(c.isdigit() for c in cell.split("-shot")[0][1:]) or "-shot" in cell


def panel(title: Any, about: Any, chart: Markup) -> Markup:
    """A small chart with its heading."""
    return tag("figure", tag("figcaption", tag("strong", title), tag("span", about)), chart)


def subjects_legend(release: Release, names: Sequence[str], lines: bool = False) -> Markup:
    """The legend that every chart of models shares."""
    return legend([(_role(release, n), release.style(n)) for n in names], lines)


def _role(release: Release, name: str) -> str:
    role = "ours" if name == release.ours else "untrained control" if name == CONTROL else "baseline"
    return f"{name} ({role})"


# Scores


def scores(release: Release) -> Markup:
    """Accuracies and bits per byte with 95 % intervals, and paired differences from the baseline and the control."""
    by_task = release.scores()
    if not by_task:
        return missing("scores", "Scores", "zaya eval MODEL")
    intro = (
        "Marks are means over items, lines 95 % intervals (1.96 standard errors). Models answered the same items, so "
        "differences are paired: interval by bootstrap over items, p by McNemar's exact test (accuracies) or sign "
        "flips (bits per byte), not corrected for the number of tasks."
    )
    names = [s for s in release.subjects if any(s in by for by in by_task.values())]
    panels = [_score_panel(release, task, by, names) for task, by in by_task.items()]

    return section(
        "scores",
        "Scores",
        intro,
        subjects_legend(release, names),
        tag("div", panels, class_="panels two"),
        _score_table(release, by_task, names),
        _difference_table(release, by_task),
    )


def _primary(found: Found) -> str:
    return str(found.result.settings.get("primary", found.result.metrics[0].name))


def _score_panel(release: Release, task: str, by: dict[str, Found], names: list[str]) -> Markup:
    any_one = next(iter(by.values()))
    name = _primary(any_one)
    fraction = name != "bits_per_byte"
    rows = []
    for subject in names:
        metric = by[subject].metric(name) if subject in by else None
        if metric is not None:
            rows.append(_interval(subject, metric, release.style(subject), fraction))
    chance = any_one.value("chance")
    show = (lambda v: f"{100 * v:.0f} %") if fraction else (lambda v: f"{v:.3g}")
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


def _interval(name: str, metric: Any, style: int, fraction: bool) -> Interval:
    if metric.stderr is None:
        return Interval(name, metric.value, None, None, style)
    low, high = metric.value - Z95 * metric.stderr, metric.value + Z95 * metric.stderr
    if fraction:
        low, high = max(0.0, low), min(1.0, high)
    return Interval(name, metric.value, low, high, style)


def _score_table(release: Release, by_task: dict[str, dict[str, Found]], names: list[str]) -> Markup:
    rows = []
    for task, by in by_task.items():
        wanted = dict.fromkeys(m.name for f in by.values() for m in f.result.metrics if m.name in METRIC_NAMES)
        for name in wanted:
            cells = [_score_cell(by.get(s), name) for s in names]
            chance = next(iter(by.values())).value("chance")
            n = next((m.n for f in by.values() if (m := f.metric(name))), None)
            shown = f"{chance:.3f}" if chance is not None and name.startswith("acc") else "–"
            rows.append([task, METRIC_NAMES[name], n, shown, *cells])
    return table(["Task", "Metric", "Items", "Chance", *names], rows, "Table: scores ± standard error", open_=True)


def _score_cell(found: Found | None, name: str) -> Any:
    metric = found.metric(name) if found else None
    if metric is None or found is None:
        return "not measured"
    error = "" if metric.stderr is None else f" ± {metric.stderr:.3f}"
    return [f"{metric.value:.3f}{error}", notes(found.number)]


def _difference_table(release: Release, by_task: dict[str, dict[str, Found]]) -> Markup:
    rows = []
    for other in (release.baseline, CONTROL):
        for task, by in by_task.items():
            d = compare(release, release.ours, other, task)
            if d is None or release.ours not in by:
                continue
            name = _primary(by[release.ours])
            better = d.value < 0 if name == "bits_per_byte" else d.value > 0
            says = "no difference shown" if d.p >= 0.05 else "better" if better else "worse"
            interval = f"{signed(d.low)} to {signed(d.high)}"
            metric = METRIC_NAMES.get(name, name)
            rows.append([f"{task}, against {other}", metric, d.n, signed(d.value), interval, p_text(d.p), says])
    if not rows:
        return tag("p", "Paired differences: not measured (they need the samples of two models on the same items).")
    head = ["Comparison", "Metric", "Items", f"{release.ours} minus other", "95 % interval", "p", "Ours is"]
    return table(head, rows, "Table: paired differences", open_=True)


# Training


def training(release: Release) -> Markup:
    """Loss curves of every run with the n-gram lines."""
    runs = [r for r in release.runs if len(r.log) > 1]
    if not runs:
        return missing("training", "Training", "zaya train RECIPE")
    levels = []
    if release.dataset is not None:
        for name in ("bigram", "unigram"):
            value = release.dataset.get(f"{name}_heldout_nats_per_token")
            levels += [(name, value)] if value else []
    series = []
    for r in runs:
        style = release.style(r.name)
        tokens, loss = r.column("loss")
        series += [Series(f"{r.name}, training", tokens, loss, style, faint=True)] if tokens else []
        tokens, loss = r.column("heldout_loss")
        series += [Series(f"{r.name}, held-out", tokens, loss, style, points=True)] if tokens else []
    label = "Loss over tokens: " + ", ".join(f"{r.name} ends at {_loss(r)}" for r in runs)
    y_range = _loss_range(series, [v for _, v in levels])
    draw = lambda width: line_chart(series, width, label, "training tokens", "nats per token", levels, y_range)
    intro = [
        "Marked lines are the loss on held-out files, thin ones the loss of the training batch; dashed, n-gram models "
        "counted on the same split.",
        notes(*(r.number for r in runs), release.dataset_number),
    ]
    lines = subjects_legend(release, [r.name for r in runs], lines=True)
    return section("training", "Training", intro, lines, tag("figure", both(draw)), _training_table(release, runs))


def _loss_range(series: list[Series], levels: list[float]) -> tuple[float, float]:
    """From the lowest loss to the higher of the n-gram lines and where runs end; early losses are cut off above."""
    low = min([y for s in series for y in s.y] + levels)
    high = max([s.y[-1] for s in series] + (levels or [s.y[0] for s in series]))
    return low - 0.08 * (high - low), high + 0.08 * (high - low)


def _loss(run: Run) -> str:
    value = run.last("heldout_loss")
    return "no held-out loss" if value is None else f"{value:.3f}"


def _training_table(release: Release, runs: list[Run]) -> Markup:
    bigram = (release.dataset or {}).get("bigram_heldout_nats_per_token")
    rows = []
    for r in runs:
        size = r.about.get("parameters") or {}
        speeds = sorted(s["tokens_per_s"] for s in r.speed if s["tokens_per_s"] > 0)
        heldout = r.last("heldout_loss")
        rows.append(
            [
                [r.name, notes(r.number)],
                _millions(size.get("total")),
                _millions(size.get("active")),
                f"{r.log[-1]['step']:,}",
                _millions(r.log[-1]["tokens"]),
                _loss(r),
                "–" if bigram is None or heldout is None else signed(heldout - bigram),
                f"{speeds[len(speeds) // 2]:,.0f}" if speeds else "not measured",
            ]
        )
    head = ["Run", "Parameters", "Active per token", "Steps", "Tokens", "Held-out loss, nats per token"]
    return table([*head, "Minus bigram", "Median tokens/s"], rows, "Table: training runs", open_=True)


def _millions(value: float | None) -> str:
    return "not measured" if value is None else f"{value / 1e6:.2f} M"


# Experts


def experts(release: Release) -> Markup:
    """Share of each expert per layer at the end, and skip share and load entropy over training."""
    run = release.run(release.ours)
    counts = run.last("expert_counts") if run else None
    if run is None or not counts:
        return missing("experts", "Experts", "zaya train RECIPE")
    shares = [[n / max(1, sum(layer)) for n in layer] for layer in counts]
    names = [f"layer {i}" for i in range(len(counts))]
    columns = [*(str(e) for e in range(len(counts[0]) - 1)), "skip"]
    label = "Share of tokens per expert and layer in the last logged step"
    title = tag(
        "figcaption",
        tag("strong", "Where tokens went"),
        tag("span", "percent of a layer's tokens per expert, last logged step"),
    )
    panels = [
        _layer_lines(run, "skip_share", "Skip share", "tokens that no expert saw", "fraction", (0.0, None)),
        _layer_lines(
            run, "load_entropy", "Load entropy", "1 is even, 0 is one expert only", "of its maximum", (0.0, 1.02)
        ),
    ]
    rows = [
        [name, *(f"{100 * s:.1f} %" for s in share), _at(run, "load_entropy", i), _at(run, "skip_share", i)]
        for i, (name, share) in enumerate(zip(names, shares, strict=True))
    ]
    head = ["Layer", *(f"expert {c}" if c != "skip" else c for c in columns), "Load entropy", "Skip share"]
    intro = [f"{run.name}: each token of a layer goes to one expert, or skips.", notes(run.number)]
    return section(
        "experts",
        "Experts",
        intro,
        tag("figure", title, both(lambda width: heatmap(shares, names, columns, label, width))),
        tag("div", panels, class_="panels two"),
        table(head, rows, "Table: load per layer, last logged step"),
    )


def _at(run: Run, key: str, layer: int) -> str:
    values = run.last(key)
    return "not measured" if values is None else f"{values[layer]:.3f}"


def _layer_lines(run: Run, key: str, title: str, about: str, unit: str, y_range: tuple[float, float | None]) -> Markup:
    tokens, values = run.column(key)
    if not values:
        return panel(title, "not measured", Markup(""))
    layers = len(values[0])
    shade = lambda i: 0.3 + 0.7 * (i / max(1, layers - 1))
    lines = [Series(f"layer {i}", tokens, [v[i] for v in values], i % 3, opacity=shade(i)) for i in range(layers)]
    top = y_range[1] if y_range[1] is not None else max(0.01, *(x for v in values for x in v)) * 1.08
    last = ", ".join(f"layer {i} {v:.2f}" for i, v in enumerate(values[-1]))
    label, span = f"{title} over tokens; at the end: {last}", (y_range[0], top)
    chart = both(lambda w: line_chart(lines, w, label, "training tokens", unit, (), span, 210), 480, 310)
    return panel(title, f"{about}; one line per layer, the deepest strongest", chart)


# Serving


LATENCIES = (("ttft", "Time to first token", "ms"), ("tpot", "Time per output token", "ms"))


def latency(found: Found, what: str, quantile: str) -> float | None:
    """The metric whose name holds `what`, a quantile such as p50, and ms, in any order."""
    for m in found.result.metrics:
        if {what, quantile, "ms"} <= set(re.split(r"[_\W]+", m.name)):
            return m.value
    return None


def loads(release: Release) -> list[tuple[int, str, Found]]:
    """(requests in flight, subject, result) of every serving measurement, in that order."""
    found = []
    for f in release.of("latency"):
        level = f.result.settings.get("concurrency")
        if level is not None and latency(f, "ttft", "p50") is not None:
            found.append((int(level), f.result.subject, f))
    order = {s: i for i, s in enumerate(release.subjects)}
    return sorted(found, key=lambda x: (x[0], order[x[1]]))


def serving(release: Release) -> Markup:
    """TTFT, TPOT and throughput of the vLLM server at each number of requests in flight."""
    every = loads(release)
    if not every:
        return missing("serving", "Serving", "zaya latency MODEL")
    panels = []
    for what, title, unit in LATENCIES:
        bars = [
            Bar(_flight(level), name, value, release.style(name), latency(f, what, "p99"))
            for level, name, f in every
            if (value := latency(f, what, "p50")) is not None
        ]
        label = f"{title}, {unit}: " + ", ".join(f"{b.name} with {b.group}: {b.value:.1f}" for b in bars)
        panels.append(panel(title, f"{unit}, median; the tick is p99; lower is better", bar_chart(bars, label, _one)))
    speed = [
        Bar(_flight(level), name, value, release.style(name))
        for level, name, f in every
        if (value := f.value("output_tokens_per_s")) is not None
    ]
    if speed:
        label = "Output tokens/s: " + ", ".join(f"{b.name} with {b.group}: {b.value:.0f}" for b in speed)
        panels.append(
            panel("Throughput", "output tokens/s; higher is better", bar_chart(speed, label, "{:,.0f}".format))
        )
    intro = ["vLLM's own serving benchmark against a server on this machine.", notes(*(f.number for _, _, f in every))]
    names = list(dict.fromkeys(name for _, name, _ in every))
    body = tag("div", panels, class_="panels")
    return section("serving", "Serving", intro, subjects_legend(release, names), body, _serving_table(every))


def _flight(level: int) -> str:
    return f"{level} request{'s' if level != 1 else ''} in flight"


def _one(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _serving_table(every: list[tuple[int, str, Found]]) -> Markup:
    names = list(dict.fromkeys(m.name for _, _, f in every for m in f.result.metrics))
    rows = []
    for level, subject, f in every:
        cells = ["not measured" if (v := f.value(n)) is None else f"{v:,.2f}" for n in names]
        rows.append([[f"{subject}, {_flight(level)}", notes(f.number)], *cells])
    return table(["Load", *(n.replace("_", " ") for n in names)], rows, "Table: every serving number")


# Verification, speed


def verification(release: Release) -> Markup:
    """Every number of every comparison with stock transformers and with vLLM."""
    found = [*release.of("verify"), *(f for f in release.of("latency") if f.metric("max_logprob_difference"))]
    if not found:
        return missing("verification", "Verification", "zaya verify MODEL")
    rows = []
    for f in found:
        bound = f.result.settings.get("atol")
        for m in f.result.metrics:
            of = f" of {m.n}" if m.n is not None else ""
            allowed = f"at most {bound:.0e}" if bound is not None and "difference" in m.name else "–"
            name = [f"{f.result.subject}, {f.result.name}", notes(f.number)]
            rows.append([name, m.name.replace("_", " "), f"{m.value:.4g}{of}", m.unit, allowed])
    intro = "The exported folder in our class, in stock transformers without our package, and behind a vLLM server."
    head = ["Comparison", "Quantity", "Value", "Unit", "Allowed"]
    return section("verification", "Verification", intro, table(head, rows, "Table: comparisons", open_=True))


def speed(release: Release) -> Markup:
    """Training throughput beside the plain loop over stock's class."""
    found = [f for f in release.of("hardware") if f.value("ours_tokens_per_s") and f.value("rival_tokens_per_s")]
    if not found:
        return missing("speed", "Training speed", "zaya bench loop RECIPE")
    f = found[0]
    bars = [
        Bar("", "this trainer", f.value("ours_tokens_per_s") or 0.0, 0),
        Bar("", "a plain loop over stock's class", f.value("rival_tokens_per_s") or 0.0, 1),
    ]
    label = "Training tokens/s: " + ", ".join(f"{b.name} {b.value:.0f}" for b in bars)
    rows = [[m.name.replace("_", " "), f"{m.value:,.2f}", m.unit, m.n] for m in f.result.metrics]
    intro = [
        "The rival: ",
        str(f.result.settings.get("rival", "")),
        ", in turns with ours at the same shape.",
        notes(f.number),
    ]
    chart = both(lambda width: bar_chart(bars, label, "{:,.0f}".format, width), 520, 310)
    body = [panel("Training throughput", "tokens/s; higher is better", chart)]
    head = ["Quantity", "Value", "Unit", "Turns"]
    return section("speed", "Training speed", intro, *body, table(head, rows, "Table: training speed"))
