"""The picture of strides: a storage's cells in order, those a tensor reaches marked with their index."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tensorplay.render.reach import Reach
from tensorplay.words import plural

__all__ = ["strides_picture"]

_MOST_ROWS = 6
_MOST_MARKS = 64
_WIDEST_INDEX = 24


class _Marks(NamedTuple):
    reached: str
    part: str
    outside: str
    empty: str
    more: str
    several: str = "+"
    unknown: str = "?"
    number: str = "@"

    def legend(self) -> dict[str, str]:
        return {
            self.part: "partly reached",
            self.outside: "outside the storage",
            self.several: "reached by more than one index",
            self.unknown: "not worked out",
            self.number: "element in row-major order",
        }


_UNICODE = _Marks("▪", "▫", "✗", "·", "…")
_ASCII = _Marks("#", ":", "!", ".", "...")


def strides_picture(
    shape: Sequence[int], stride: Sequence[int], offset: int, storage_cells: int, *, width: int, ascii: bool = False
) -> list[str]:
    """Draw the storage row by row, as it lies.

    A row is as long as the largest stride. Where it does not fit, the columns from the first one reached are shown;
    of many rows those from the first to the last one reached. What is left out is said, and a bar then shows where in
    the whole storage the tensor lies.

    Args:
        shape: sizes, none of them 0.
        stride: strides in cells.
        offset: the cell of index 0, ..., 0.
        storage_cells: how many cells the storage has; cells past them are marked as outside.
        width: columns to fill.
        ascii: draw with ASCII characters only.

    Returns:
        The rows, the bar where cells are left out of a storage of more than 64, and what rarer marks mean.

    Cost:
        Bounded for every geometry: what takes too long to find is marked as unknown.
    """
    return _Drawing(shape, stride, offset, storage_cells, width, _ASCII if ascii else _UNICODE).lines()


class _Drawing:
    def __init__(
        self, shape: Sequence[int], stride: Sequence[int], offset: int, storage_cells: int, width: int, marks: _Marks
    ) -> None:
        self.shape = shape
        self.reach = Reach(shape, stride, offset)
        self.storage_cells = storage_cells
        self.begin = min(self.reach.first, 0)
        self.end = max(storage_cells, self.reach.last + 1)
        self.width = width
        self.marks = marks
        self.room = width - 2 * (len(marks.more) + 1)
        number_width = max(len(str(self.begin)), len(str(self.end - 1)))
        self.index_text, index_width = self.index_writer(self.room - number_width - 3)
        self.fits = max(1, self.room // (number_width + 2 + index_width + 2))
        steps = [abs(step) for size, step in zip(shape, stride, strict=True) if size > 1 and abs(step) > 1]
        self.longest_step = max(steps, default=1)
        self.row_length = self.longest_step if steps else self.fits

    def lines(self) -> list[str]:
        lines, complete = self.rows()
        if not complete and self.end - self.begin > _MOST_MARKS:
            lines += self.bar()
        lines += self.legend(lines)
        return [self.cut(line) for line in lines]

    def rows(self) -> tuple[list[str], bool]:
        """Answer the rows, and whether they show every cell."""
        more, length = self.marks.more, self.row_length
        # The same columns in every row, so that a column of the picture is one.
        column = (self.reach.first - self.begin) % length
        skipped = min(column, length - self.fits) if length > self.fits and column > self.fits // 2 else 0
        count = -(-(self.end - self.begin) // length)
        first, last = ((cell - self.begin) // length for cell in (self.reach.first, self.reach.last))
        if count <= _MOST_ROWS:
            first, last = 0, count - 1
        elided = last - first + 2 - _MOST_ROWS if last - first >= _MOST_ROWS else 0
        rows: list[str | list[str]] = []
        if first:
            rows.append(f"{more} {plural(first, 'row')} of {length} before")
        for number in [*range(first, first + _MOST_ROWS - 2), last] if elided else range(first, last + 1):
            if elided and number == last:
                rows.append(f"{more} {elided} more rows of {length}")
            start = self.begin + number * length
            stop = min(start + length, self.end)
            row = [self.cell(cell) for cell in range(start + skipped, min(stop, start + skipped + self.fits))]
            cut = stop - start - skipped > self.fits
            rows.append([*([more] if skipped else []), *row, *([more] if cut else [])])
        if last < count - 1:
            rows.append(f"{more} {plural(count - 1 - last, 'row')} of {length} after, to cell {self.end - 1}")
        pad = max(len(text) for row in rows if isinstance(row, list) for text in row)
        lines = [
            row if isinstance(row, str) else " ".join(text if text == more else text.ljust(pad) for text in row)
            for row in rows
        ]
        complete = last - first == count - 1 and not elided and length <= self.fits
        return [line.rstrip() for line in lines], complete

    def cell(self, cell: int) -> str:
        marks, found = self.marks, self.reach.find(cell)
        if found.reached is None:
            return f"{cell} {marks.unknown}"
        if not found.reached:
            return f"{cell} {marks.empty}"
        mark = marks.reached if 0 <= cell < self.storage_cells else marks.outside
        if found.first_index is None:
            return f"{cell} {mark}{marks.unknown}"
        several = marks.unknown if found.several is None else marks.several if found.several else ""
        return f"{cell} {mark}{self.index_text(found.first_index)}{several}"

    def index_writer(self, room: int) -> tuple[Callable[[tuple[int, ...]], str], int]:
        """Answer how to write an index, and how wide it gets: in full, as the element's number, or not at all."""
        full = len(",".join(str(size - 1) for size in self.shape))
        number = len(f"{self.marks.number}{math.prod(self.shape) - 1}")
        if full <= min(_WIDEST_INDEX, room):
            return lambda index: ",".join(map(str, index)), full
        return (self.element, number) if number <= room else (lambda index: "", 0)

    def element(self, index: tuple[int, ...]) -> str:
        element = 0
        for size, place in zip(self.shape, index, strict=True):
            element = element * size + place
        return f"{self.marks.number}{element}"

    def bar(self) -> list[str]:
        length = self.longest_step
        each = -(-(self.end - self.begin) // max(1, min(_MOST_MARKS, self.width)))
        # Whole marks to a row or whole rows to a mark, so that the bar repeats as the rows do.
        if each > length:
            each = -(-each // length) * length
        else:
            by_row = length // each
            each = next((length // n for n in range(by_row, by_row // 2, -1) if length % n == 0), each)
        bar = "".join(self.mark(start, min(start + each, self.end)) for start in range(self.begin, self.end, each))
        words = f"each mark is {each} cells"
        return [f"{bar}  {words}"] if len(bar) + 2 + len(words) <= self.width else [bar, words]

    def mark(self, start: int, stop: int) -> str:
        marks, reach = self.marks, self.reach
        begin, end = max(start, 0), min(stop, self.storage_cells)
        inside = reach.count(begin, end)
        outside = [reach.count(start, min(stop, 0)), reach.count(max(start, self.storage_cells), stop)]
        if any(outside):
            return marks.outside
        if inside is None or None in outside:
            return marks.unknown
        if inside == 0:
            return marks.empty
        return marks.reached if inside == end - begin else marks.part

    def legend(self, lines: Sequence[str]) -> list[str]:
        """Answer what the marks mean that are not plain, in as few lines as it takes."""
        legend: list[str] = []
        for mark, meaning in self.marks.legend().items():
            if not any(mark in line for line in lines):
                continue
            words = f"{mark} {meaning}"
            if legend and len(legend[-1]) + 2 + len(words) <= self.width:
                legend[-1] += f", {words}"
            else:
                legend.append(words)
        return legend

    def cut(self, line: str) -> str:
        more = self.marks.more
        return line if len(line) <= self.width else line[: max(0, self.width - len(more))] + more[: max(0, self.width)]
