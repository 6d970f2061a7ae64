"""The page's sections but the scores: each takes a release and returns HTML, or says that it was not measured."""

import math

from zaya.leaderboards.charts import Bar, Series, bar_chart, both, heatmap, line_chart
from zaya.leaderboards.checks import signed
from zaya.leaderboards.collect import Found, Release, Run
from zaya.leaderboards.html import Markup, tag
from zaya.leaderboards.parts import missing, notes, panel, section, subjects_legend, table

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
    if not series:
        return missing("training", "Training", "zaya train RECIPE")
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
    """A quantile of `what` (ttft, tpot, itl), ms; None where it was not measured or is not finite."""
    value = found.value(f"{what}_ms_{quantile}")
    return value if value is not None and math.isfinite(value) else None


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
            of = "" if m.n is None else f" of {m.n}" if m.unit == "tokens" else f" over {m.n}"
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
