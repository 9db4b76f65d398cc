"""The picture of strides: a storage's cells in order, those a tensor reaches marked with their index."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

__all__ = ["strides_picture"]

_MOST_ROWS = 6
_MOST_STEPS = 10_000


def strides_picture(
    shape: Sequence[int], stride: Sequence[int], offset: int, storage_cells: int, *, width: int, ascii: bool = False
) -> list[str]:
    """Draw the storage row by row, as it lies.

    Args:
        shape: sizes, none of them 0.
        stride: strides in cells.
        offset: the cell of index 0, ..., 0.
        storage_cells: how many cells the storage has; cells past them are marked as outside.
        width: columns to fill.
        ascii: draw with ASCII characters only.

    Returns:
        One line a row. A row is as long as the largest stride. Where it does not fit, the columns from the first one
        reached are shown; what is left out is said.
    """
    reached, outside, empty, more = ("#", "!", ".", "...") if ascii else ("▪", "✗", "·", "…")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if step > 0)
    first = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if step < 0)
    cells = max(storage_cells, last + 1)
    low = min(first, 0)

    def cell_text(cell: int) -> str:
        found, several = _first_index(shape, stride, cell - offset)
        if found is None:
            return f"{cell} {empty}"
        mark = reached if 0 <= cell < storage_cells else outside
        return f"{cell} {mark}{','.join(map(str, found))}{'+' if several else ''}"

    widest = len(f"{cells - 1} {reached}" + ",".join(str(size - 1) for size in shape)) + 1
    fits = max(2, (width - 2 * (len(more) + 1)) // (widest + 1))
    steps = [abs(step) for size, step in zip(shape, stride, strict=True) if size > 1 and abs(step) > 1]
    row_length = max(steps, default=fits)
    starts = range(low, cells, row_length)
    # The same columns in every row, so that a column of the picture is one.
    column = (offset - low) % row_length
    skipped = min(column, row_length - fits) if row_length > fits and column > fits // 2 else 0
    shown = list(starts) if len(starts) <= _MOST_ROWS else [*starts[: _MOST_ROWS - 2], None, starts[-1]]
    rows: list[list[str] | str] = []
    for start in shown:
        if start is None:
            rows.append(f"{more} {len(starts) - _MOST_ROWS + 1} more rows of {row_length}")
            continue
        end = min(start + row_length, cells)
        begin = start + skipped
        row = [cell_text(cell) for cell in range(begin, min(end, begin + fits))]
        rows.append([*([more] if skipped else []), *row, *([more] if end - begin > fits else [])])
    pad = max((len(text) for row in rows if isinstance(row, list) for text in row if text != more), default=0)
    return [
        row if isinstance(row, str) else " ".join(_padded(text, pad, more) for text in row).rstrip() for row in rows
    ]


def _padded(text: str, width: int, more: str) -> str:
    return text if text == more else text.ljust(width)


def _first_index(shape: Sequence[int], stride: Sequence[int], cell: int) -> tuple[tuple[int, ...] | None, bool]:
    """Find the first index that reaches a cell, and whether another one does too."""
    lows, highs = [0], [0]
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        lows.append(lows[-1] + min(0, (size - 1) * step))
        highs.append(highs[-1] + max(0, (size - 1) * step))
    lows.reverse()
    highs.reverse()
    found: tuple[int, ...] | None = None
    stack: list[tuple[tuple[int, ...], int]] = [((), cell)]
    for _ in itertools.repeat(None, _MOST_STEPS):
        if not stack:
            return found, False
        index, rest = stack.pop()
        dim = len(index)
        if dim == len(shape):
            if found is not None:
                return found, True
            found = index
            continue
        step, low, high = stride[dim], rest - highs[dim + 1], rest - lows[dim + 1]
        if step == 0:
            choices = range(min(shape[dim], 2)) if low <= 0 <= high else range(0)
        elif step > 0:
            choices = range(max(0, -(-low // step)), min(shape[dim] - 1, high // step) + 1)
        else:
            choices = range(max(0, -(high // -step)), min(shape[dim] - 1, -low // -step) + 1)
        stack.extend(((*index, i), rest - i * step) for i in reversed(choices))
    return found, False
