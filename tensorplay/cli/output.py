"""How the commands write: results to standard output, and what is wrong in one line."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from tensorplay.errors import TensorPlayError
from tensorplay.words import needs_ascii

if TYPE_CHECKING:  # they take time to import, and a command with wrong options has no use for them
    from tensorplay.render.checkpoint import Rows
    from tensorplay.reports import Report

__all__ = ["escaped", "message_of", "print_report", "print_text"]


def print_report(report: Report, *, addresses: bool = False, rows: Rows | None = None) -> None:
    """Write a report as standard output can show it: its colours, its characters; of a checkpoint these rows."""
    from tensorplay.render.text import render

    stdout = sys.stdout
    color = stdout is not None and stdout.isatty() and not os.environ.get("NO_COLOR")
    print_text(render(report.document, color=color, ascii=needs_ascii(stdout), addresses=addresses, rows=rows))


def print_text(text: str | bytes) -> None:
    """Write a result to standard output; characters that it cannot show are written as escapes.

    Raises:
        TensorPlayError: nobody reads it, the disk is full, or there is none.
    """
    if sys.stdout is None:
        raise TensorPlayError("cannot write to standard output: it is closed")
    if isinstance(text, str):
        encoding = sys.stdout.encoding or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        click.echo(text)
    except OSError as error:
        # What stays in its buffer would be written at exit, and fail again with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise TensorPlayError(f"cannot write to standard output: {error.strerror}") from error


def message_of(error: BaseException) -> str:
    """Answer an exception's type and the first line of its message."""
    name = type(error).__name__
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # users' exceptions may fail at that, too
        return name
    return f"{name}: {lines[0]}" if lines else name


def escaped(text: str) -> str:
    """Answer a text in one line that a terminal shows and does not obey."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
