"""HTML that cannot be broken by what it shows: everything that is not a `Markup` is escaped."""

import html
from typing import Any

VOID = {"meta", "br", "hr", "img", "link", "path", "line", "rect", "circle", "polyline", "polygon", "use"}


class Markup(str):
    """A string that is HTML already."""

    __slots__ = ()


def text(value: Any) -> Markup:
    """`value` as escaped text; Markup as it is; lists joined; None as nothing."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup("")
    if isinstance(value, list | tuple):
        return Markup("".join(text(v) for v in value))
    return Markup(html.escape(str(value), quote=True))


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """An element. Attribute names: a trailing underscore is dropped, others become dashes; None leaves one out."""
    shown = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_attribute(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID and not children:
        return Markup(f"<{name}{shown}/>")
    return Markup(f"<{name}{shown}>{text(children)}</{name}>")


def _attribute(value: Any) -> str:
    if value is True:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
