"""Which cells of a storage a picture shows, row by row as they lie, and what each one is.

The text and the SVG draw the same layout; neither decides what is left out.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tensorplay.render.reach import Found, Reach
from tensorplay.words import plural

__all__ = ["NUMBER", "SEVERAL", "Bar", "Cell", "Gap", "Geometry", "IndexWriter", "Layout", "Mark", "Row", "Rows"]

NUMBER = "@"
"""Stands before an element's number that is written in place of its index."""
SEVERAL = "reached by more than one index"
_MOST_ROWS = 6
_MOST_MARKS = 64
_WIDEST_INDEX = 24


class Geometry(NamedTuple):
    """What is drawn: a shape without zeros, its strides in cells, and the storage they lie over."""

    shape: Sequence[int]
    stride: Sequence[int]
    offset: int
    """The cell of index 0, ..., 0."""
    storage_cells: int
    """How many cells the storage has; those past them are outside."""


class Mark(enum.Enum):
    """What a cell, or a stretch of the bar, is."""

    REACHED = "reached"
    PART = "partly reached"
    OUTSIDE = "outside the storage"
    EMPTY = "not reached"
    UNKNOWN = "not worked out"


class Cell(NamedTuple):
    """One cell: where it lies and what reaches it."""

    number: int
    mark: Mark
    found: Found


class Row(NamedTuple):
    """Cells that lie side by side; what is left out before and after them is cut."""

    cells: tuple[Cell, ...]
    cut_before: bool
    cut_after: bool


class Gap(NamedTuple):
    """Rows that are left out, in words."""

    words: str


class Rows(NamedTuple):
    """The rows from the top, and whether they show every cell."""

    rows: tuple[Row | Gap, ...]
    complete: bool


class Bar(NamedTuple):
    """The whole storage in stretches of equal length."""

    marks: tuple[Mark, ...]
    each: int
    """Cells to a mark."""


class IndexWriter(NamedTuple):
    """Writes indices in full, or as the element's number in row-major order, or not at all."""

    shape: Sequence[int]
    width: int
    """The widest one, in characters."""
    in_full: bool

    def __call__(self, index: Sequence[int]) -> str:
        """Write an index."""
        if self.in_full:
            return ",".join(map(str, index))
        element = 0
        for size, place in zip(self.shape, index, strict=True):
            element = element * size + place
        return f"{NUMBER}{element}" if self.width else ""


class Layout:
    """The cells that a geometry reaches, laid out in rows as long as its largest stride.

    Cost:
        Bounded for every geometry: what takes too long to find is unknown.
    """

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.reach = Reach(geometry.shape, geometry.stride, geometry.offset)
        self.begin = min(self.reach.first, 0)
        self.end = max(geometry.storage_cells, self.reach.last + 1)
        self.number_width = max(len(str(self.begin)), len(str(self.end - 1)))
        steps = [
            abs(step) for size, step in zip(geometry.shape, geometry.stride, strict=True) if size > 1 and abs(step) > 1
        ]
        self._longest_step = max(steps, default=1)
        self._one_row = not steps

    def rows(self, fits: int) -> Rows:
        """Lay out rows of at most `fits` cells.

        Where a row does not fit, the columns from the first one reached are shown, the same in every row, so that a
        column of the picture is one; of many rows those from the first to the last one reached.
        """
        length = fits if self._one_row else self._longest_step
        column = (self.reach.first - self.begin) % length
        skipped = min(column, length - fits) if length > fits and column > fits // 2 else 0
        count = -(-(self.end - self.begin) // length)
        first, last = ((cell - self.begin) // length for cell in (self.reach.first, self.reach.last))
        if count <= _MOST_ROWS:
            first, last = 0, count - 1
        elided = last - first + 2 - _MOST_ROWS if last - first >= _MOST_ROWS else 0
        rows: list[Row | Gap] = []
        if first:
            rows.append(Gap(f"{plural(first, 'row')} of {length} before"))
        for number in [*range(first, first + _MOST_ROWS - 2), last] if elided else range(first, last + 1):
            if elided and number == last:
                rows.append(Gap(f"{elided} more rows of {length}"))
            start = self.begin + number * length
            stop = min(start + length, self.end)
            cells = map(self.cell, range(start + skipped, min(stop, start + skipped + fits)))
            rows.append(Row(tuple(cells), bool(skipped), stop - start - skipped > fits))
        if last < count - 1:
            rows.append(Gap(f"{plural(count - 1 - last, 'row')} of {length} after, to cell {self.end - 1}"))
        return Rows(tuple(rows), last - first == count - 1 and not elided and length <= fits)

    def cell(self, number: int) -> Cell:
        """Look at one cell."""
        found = self.reach.find(number)
        if found.reached is None:
            return Cell(number, Mark.UNKNOWN, found)
        if not found.reached:
            return Cell(number, Mark.EMPTY, found)
        inside = 0 <= number < self.geometry.storage_cells
        return Cell(number, Mark.REACHED if inside else Mark.OUTSIDE, found)

    def index_writer(self, room: int) -> IndexWriter:
        """Answer how indices are written in so many characters."""
        shape = self.geometry.shape
        full = len(",".join(str(size - 1) for size in shape))
        if full <= min(_WIDEST_INDEX, room):
            return IndexWriter(shape, full, True)
        number = len(f"{NUMBER}{math.prod(shape) - 1}")
        return IndexWriter(shape, number if number <= room else 0, False)

    def bar(self, most: int) -> Bar | None:
        """Lay the whole storage out in at most `most` stretches; None where it has too few cells to need that."""
        if self.end - self.begin <= _MOST_MARKS:
            return None
        length = self._longest_step
        each = -(-(self.end - self.begin) // max(1, min(_MOST_MARKS, most)))
        # Whole marks to a row or whole rows to a mark, so that the bar repeats as the rows do.
        if each > length:
            each = -(-each // length) * length
        else:
            by_row = length // each
            each = next((length // n for n in range(by_row, by_row // 2, -1) if length % n == 0), each)
        return Bar(tuple(self._marks(each)), each)

    def _marks(self, each: int) -> Iterator[Mark]:
        storage_cells, count = self.geometry.storage_cells, self.reach.count
        for start in range(self.begin, self.end, each):
            stop = min(start + each, self.end)
            begin, end = max(start, 0), min(stop, storage_cells)
            inside = count(begin, end)
            outside = [count(start, min(stop, 0)), count(max(start, storage_cells), stop)]
            if any(outside):
                yield Mark.OUTSIDE
            elif inside is None or None in outside:
                yield Mark.UNKNOWN
            elif inside == 0:
                yield Mark.EMPTY
            else:
                yield Mark.REACHED if inside == end - begin else Mark.PART
