"""Charts as inline SVG: they need no script and no network, follow the page's colours, and print."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zaya.leaderboards.html import Markup, tag

Format = Callable[[float], str]
MARKS = ("circle", "square", "triangle")  # shape per series, beside its colour


@dataclass(frozen=True)
class Series:
    """A line. `style` 0, 1, 2 picks colour, dash and mark; `points` marks every point."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    style: int
    points: bool = False
    faint: bool = False
    opacity: float | None = None


@dataclass(frozen=True)
class Interval:
    """A dot with its interval; without one, `low` and `high` are None."""

    name: str
    value: float
    low: float | None
    high: float | None
    style: int


@dataclass(frozen=True)
class Bar:
    """A bar up to `value`, with a tick at `reach` when there is one."""

    group: str
    name: str
    value: float
    style: int
    reach: float | None = None


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers within [low, high]."""
    raw = (high - low) / max(1, count) or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw), default=power)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A tick's text: short, without a trailing zero."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    return f"{value / 1e3:.3g}k" if abs(value) >= 1e4 else f"{value:.4g}"


def svg(width: float, height: float, label: str, *children: Markup | list[Markup], class_: str = "") -> Markup:
    """An accessible SVG that scales with its column. The table beside it holds the same numbers."""
    box = f"0 0 {width:g} {height:g}"
    style = f"max-width:{1.25 * width:g}px"
    return tag("svg", *children, viewBox=box, role="img", aria_label=label, class_=f"chart {class_}", style=style)


def mark(x: float, y: float, style: int, size: float = 4.5, title: str | None = None, class_: str = "") -> Markup:
    """The mark of a series at a point."""
    hint = tag("title", title) if title else Markup("")
    css = f"s{style} mark {class_}".strip()
    shape = MARKS[style % len(MARKS)]
    if shape == "circle":
        return tag("circle", hint, cx=x, cy=y, r=size, class_=css)
    if shape == "square":
        return tag("rect", hint, x=x - size, y=y - size, width=2 * size, height=2 * size, class_=css)
    points = f"{x:.2f},{y - size * 1.2:.2f} {x - size * 1.2:.2f},{y + size:.2f} {x + size * 1.2:.2f},{y + size:.2f}"
    return tag("polygon", hint, points=points, class_=css)


def legend(names: Sequence[tuple[str, int]], lines: bool = False) -> Markup:
    """Names with their marks, as HTML above a chart."""
    items = []
    for name, style in names:
        stroke = tag("line", x1=0, y1=6, x2=26, y2=6, class_=f"s{style} curve") if lines else Markup("")
        icon = tag("svg", stroke, mark(13, 6, style), viewBox="0 0 26 12", width=26, height=12, aria_hidden="true")
        items.append(tag("li", icon, " ", name))
    return tag("ul", items, class_="legend")


def both(draw: Callable[[float], Markup], wide: float = 860, narrow: float = 325) -> Markup:
    """The same chart drawn for a wide and for a narrow screen; the style sheet shows one."""
    return tag("div", tag("div", draw(wide), class_="wide"), tag("div", draw(narrow), class_="narrow"))


def line_chart(
    series: Sequence[Series],
    width: float,
    label: str,
    x_label: str,
    y_label: str,
    levels: Sequence[tuple[str, float]] = (),
    y_range: tuple[float, float] | None = None,
    height: float = 300,
) -> Markup:
    """Lines over a shared x axis; `levels` are labelled horizontal lines. What is outside `y_range` is cut."""
    left, right, top, bottom = 46.0, 14.0, 26.0, 40.0
    xs = [x for s in series for x in s.x]
    ys = [y for s in series for y in s.y] + [v for _, v in levels]
    low, high = y_range or _padded(min(ys), max(ys))
    x0, x1 = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    px = lambda x: left + (x - x0) / (x1 - x0) * (width - left - right)
    py = lambda y: top + (high - y) / (high - low) * (height - top - bottom)
    parts = [tag("text", y_label, x=0, y=13, class_="axis-label")]
    parts += _grid_y(low, high, py, left, width - right)
    for t in ticks(x0, x1, 4 if width < 500 else 7):
        parts.append(tag("text", number(t), x=px(t), y=height - bottom + 17, class_="tick middle"))
    parts.append(tag("text", x_label, x=width - right, y=height - 4, class_="axis-label end"))
    for name, value in levels:
        parts.append(tag("line", x1=left, x2=width - right, y1=py(value), y2=py(value), class_="level"))
        parts.append(tag("text", f"{name} {value:.2f}", x=width - right, y=py(value) - 5, class_="level-label end"))
    parts.append(
        _clipped([_curve(s, px, py) for s in series], left - 8, top - 6, width - left + 8, height - bottom - top + 14)
    )
    return svg(width, height, label, parts)


def _clipped(parts: list[Markup], x: float, y: float, width: float, height: float) -> Markup:
    """What of `parts` lies in the box."""
    box = f"{x:g} {y:g} {width:g} {height:g}"
    return tag("svg", parts, x=x, y=y, width=width, height=height, viewBox=box, style="overflow:hidden")


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def _grid_y(low: float, high: float, py, x0: float, x1: float) -> list[Markup]:
    parts = []
    for t in ticks(low, high, 5):
        parts.append(tag("line", x1=x0, x2=x1, y1=py(t), y2=py(t), class_="grid"))
        parts.append(tag("text", number(t), x=x0 - 7, y=py(t) + 4, class_="tick end"))
    return parts


def _curve(s: Series, px, py) -> Markup:
    points = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in zip(s.x, s.y, strict=True))
    css = f"s{s.style} curve" + (" faint" if s.faint else "")
    parts = [tag("polyline", points=points, class_=css, stroke_opacity=s.opacity)]
    if s.points:
        parts += [
            mark(px(x), py(y), s.style, 3.6, f"{s.name}: {y:.4g} at {x:g}") for x, y in zip(s.x, s.y, strict=True)
        ]
    return tag("g", parts)


def interval_chart(
    rows: Sequence[Interval],
    label: str,
    show: Format = number,
    level: tuple[str, float] | None = None,
    width: float = 350,
) -> Markup:
    """A dot and its interval per row over one horizontal axis; `level` is a labelled vertical line."""
    left, right, step, top = 14.0, 14.0, 42.0, 26.0 if level else 8.0
    values = [v for r in rows for v in (r.low, r.value, r.high) if v is not None] + ([level[1]] if level else [])
    low, high = _padded(min(values), max(values))
    px = lambda v: left + (v - low) / (high - low) * (width - left - right)
    foot = top + step * len(rows)
    parts = []
    for t in ticks(low, high, 5):
        parts.append(tag("line", x1=px(t), x2=px(t), y1=top, y2=foot, class_="grid"))
        parts.append(tag("text", show(t), x=px(t), y=foot + 16, class_="tick middle"))
    if level:
        parts.append(tag("line", x1=px(level[1]), x2=px(level[1]), y1=top - 8, y2=foot, class_="level"))
        side = "end" if px(level[1]) > width * 0.75 else "middle" if px(level[1]) > width * 0.2 else ""
        parts.append(tag("text", level[0], x=px(level[1]), y=top - 12, class_=f"level-label {side}"))
    for i, r in enumerate(rows):
        parts.append(_interval_row(r, px, top + i * step + 28, width))
    return svg(width, foot + 22, label, parts)


def _interval_row(r: Interval, px, y: float, width: float) -> Markup:
    parts = [tag("text", r.name, x=0, y=y - 11, class_="row-label")]
    if r.low is not None and r.high is not None:
        parts.append(tag("line", x1=px(r.low), x2=px(r.high), y1=y, y2=y, class_=f"s{r.style} whisker"))
    parts.append(mark(px(r.value), y, r.style, 5.5, f"{r.name}: {r.value:.4g}"))
    return tag("g", parts)


def bar_chart(bars: Sequence[Bar], label: str, show: Format, width: float = 350) -> Markup:
    """Horizontal bars from zero under group headings, each with its number; ticks at `reach`."""
    top, row = 4.0, 34.0
    longest = max([b.reach or b.value for b in bars] + [b.value for b in bars]) or 1.0
    scale = (width - 78) / longest
    parts, y, group = [], top, None
    for b in bars:
        if b.group != group:
            group, y = b.group, y + (6 if group is not None else 0)
            parts.append(tag("text", group, x=0, y=y + 13, class_="group-label"))
            y += 18 if group else 0
        parts.append(tag("text", b.name, x=0, y=y + 11, class_="row-label"))
        parts.append(tag("rect", x=0, y=y + 16, width=max(1.0, b.value * scale), height=11, class_=f"s{b.style} bar"))
        end = b.value * scale
        if b.reach is not None:
            end = max(end, b.reach * scale)
            parts.append(tag("line", x1=b.value * scale, x2=end, y1=y + 21.5, y2=y + 21.5, class_="reach"))
            parts.append(tag("line", x1=end, x2=end, y1=y + 16, y2=y + 27, class_="reach"))
        parts.append(tag("text", show(b.value), x=end + 6, y=y + 26, class_="value"))
        y += row
    return svg(width, y + 4, label, parts)


def heatmap(
    rows: Sequence[Sequence[float]], row_names: Sequence[str], columns: Sequence[str], label: str, width: float
) -> Markup:
    """Cells shaded by value, the value in percent in each; the darkest is the largest."""
    left, top, height = 58.0, 22.0, 30.0
    size = (width - left) / len(columns)
    largest = max(max(r) for r in rows) or 1.0
    parts = [tag("text", c, x=left + (j + 0.5) * size, y=14, class_="tick middle") for j, c in enumerate(columns)]
    for i, (name, values) in enumerate(zip(row_names, rows, strict=True)):
        y = top + i * height
        parts.append(tag("text", name, x=0, y=y + 19, class_="row-label"))
        for j, value in enumerate(values):
            hint = tag("title", f"{name}, {columns[j]}: {value:.2%}")
            shade = f"{0.08 + 0.92 * value / largest:.3f}"
            box = {"x": left + j * size + 1, "y": y + 1, "width": size - 2, "height": height - 2, "rx": 3}
            parts.append(tag("rect", hint, class_="cell", fill_opacity=shade, **box))
            strong = " strong" if value / largest > 0.55 else ""
            shown = f"{100 * value:.0f}" if size < 34 else f"{100 * value:.1f}"
            x, at = left + (j + 0.5) * size, y + 19
            parts.append(tag("text", shown, x=x, y=at, class_=f"cell-text middle{strong}"))
    return svg(width, top + height * len(rows) + 4, label, parts)
