"""What came and went between two moments, in words: a table of who holds what came, and a line on the whole."""

from __future__ import annotations

from collections.abc import Iterator

from tensorplay.layers import Grown, Growth, Slope
from tensorplay.render.parts import Phrase, Table
from tensorplay.words import bytes_text, plural

__all__ = ["growth", "growth_summary", "row_text"]

_MOST_ROWS = 30
_NUMBERS = frozenset({"storages", "bytes", "behind"})


def growth(found: Growth) -> Iterator[Table | Phrase]:
    """Answer the pieces."""
    if found.slope is not None:
        yield Phrase(_steps(found.slope), "attention" if found.slope.low > 0 else "plain")
    if found.grown:
        rows = tuple(
            (
                row.path if row.cycle is None else f"garbage: {row.path}",
                str(row.storages),
                bytes_text(row.nbytes),
                bytes_text(row.indirect_nbytes) if row.indirect_storages else "",
            )
            for row in found.grown[:_MOST_ROWS]
        )
        left = len(found.grown) - len(rows)
        rest = f"{plural(left, 'more place')}: report.growth.grown has all" if left else None
        yield Table(("held by", "storages", "bytes", "behind"), rows, numbers=_NUMBERS, rest=rest)


def row_text(row: Grown) -> str:
    """Say what a place holds, in one line."""
    behind = f", {bytes_text(row.indirect_nbytes)} behind" if row.indirect_storages else ""
    return f"{plural(row.storages, 'storage')}, {bytes_text(row.nbytes)}{behind}"


def _steps(slope: Slope) -> str:
    low, high = _signed(slope.low), _signed(slope.high)
    return (
        f"over {plural(len(slope.nbytes), 'step')}: {_signed(slope.nbytes_per_step)} a step, "
        f"{low} to {high} with {slope.confidence:.0%} confidence"
    )


def _signed(nbytes: float) -> str:
    return f"{'-' if nbytes < 0 else ''}{bytes_text(round(abs(nbytes)))}"


def growth_summary(found: Growth) -> Iterator[Phrase]:
    """Answer the one line that counts."""
    if not found.new_storages:
        yield Phrase("nothing came that is still there", "good")
    else:
        yield Phrase(f"{plural(found.new_storages, 'storage')} came and stayed, {bytes_text(found.new_nbytes)}")
    if found.gone_storages:
        yield Phrase(f"; {plural(found.gone_storages, 'storage')} went, {bytes_text(found.gone_nbytes)}")
    yield Phrase(f"; now {plural(found.storages_after, 'storage')}, {bytes_text(found.nbytes_after)}", "dim")
