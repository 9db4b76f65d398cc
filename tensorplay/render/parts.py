"""The pieces that words are put into: every output shows them, and decides only how they look."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Phrase", "Table", "Tone"]

Tone = Literal["plain", "strong", "dim", "attention", "good", "error", "warning", "info"]


class Phrase(NamedTuple):
    """Words and how they are meant."""

    words: str
    tone: Tone = "plain"


class Table(NamedTuple):
    """Rows under their headings."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[str] = frozenset()
    """Headings of the columns that hold numbers."""
    rest: str | None = None
    """What is said of rows that are left out."""
    first_width: int = 0
    """Columns of text that the first one gets before the last one does."""
