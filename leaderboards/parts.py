"""What the page's sections are made of: headings, notes, tables, panels, legends."""

from collections.abc import Sequence
from typing import Any

from zaya.leaderboards.charts import legend
from zaya.leaderboards.collect import CONTROL, Release
from zaya.leaderboards.html import Markup, tag


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
