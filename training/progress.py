"""Progress on standard error: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
EVERY_S = 15.0


class Line:
    """A tqdm stand-in for logs: one line on standard error every `EVERY_S` seconds and at the end."""

    def __init__(self, total: int, what: str, unit: str, initial: int = 0):
        self.total, self.what, self.unit, self.n = total, what, unit, initial
        self.began = self.last = time.monotonic()
        self.note = ""

    def update(self, n: int = 1) -> None:
        self.n += n
        now = time.monotonic()
        if now - self.last > EVERY_S:
            self.last = now
            self._print(now)

    def set_postfix_str(self, note: str, refresh: bool = True) -> None:
        self.note = f" {note}"

    def close(self) -> None:
        self._print(time.monotonic())

    def _print(self, now: float) -> None:
        text = f"{self.what}: {self.n}/{self.total} {self.unit}{self.note} ({now - self.began:.0f} s)"
        print(text, file=sys.stderr, flush=True)


def bar(total: int, what: str, unit: str, initial: int = 0):
    """A progress bar on standard error, or its quiet stand-in when that is not a terminal."""
    if sys.stderr.isatty():
        return tqdm(total=total, desc=what, unit=unit, initial=initial, dynamic_ncols=True, file=sys.stderr)
    return Line(total, what, unit, initial)


def progress(items: Iterable[T], total: int, what: str, unit: str) -> Iterator[T]:
    """Iterate with a progress bar."""
    shown = bar(total, what, unit)
    try:
        for item in items:
            yield item
            shown.update()
    finally:
        shown.close()
