"""A bar on stderr for what takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Step", "bar"]

Step = Callable[[str, int, int], None]
"""Told what is being worked on, how much of it is done, and of how much."""

_SECONDS_WITHOUT_BAR = 1.0


@contextmanager
def bar() -> Iterator[Step | None]:
    """Show a bar on stderr where it is a terminal and the work takes long."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    begin = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", start=True)

    def step(path: str, done: int, total: int) -> None:
        if time.monotonic() - begin < _SECONDS_WITHOUT_BAR:
            return
        bar.start()
        bar.update(task, description=escape(path), completed=done, total=total)

    try:
        yield step
    finally:
        bar.stop()
