"""The picture of strides as text: a storage's cells in order, those a tensor reaches marked with their index."""

from __future__ import annotations

from collections.abc import Sequence

from tensorplay.render.cells import NUMBER, SEVERAL, Bar, Cell, Geometry, Layout, Mark, Row

__all__ = ["strides_picture"]

_UNICODE = {Mark.REACHED: "▪", Mark.PART: "▫", Mark.OUTSIDE: "✗", Mark.EMPTY: "·", Mark.UNKNOWN: "?"}
_ASCII = {Mark.REACHED: "#", Mark.PART: ":", Mark.OUTSIDE: "!", Mark.EMPTY: ".", Mark.UNKNOWN: "?"}
_SEVERAL = "+"


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
    return _Drawing(Geometry(shape, stride, offset, storage_cells), width, ascii).lines()


class _Drawing:
    def __init__(self, geometry: Geometry, width: int, ascii: bool) -> None:
        self.layout = Layout(geometry)
        self.width = width
        self.marks = _ASCII if ascii else _UNICODE
        self.more = "..." if ascii else "…"
        room = width - 2 * (len(self.more) + 1)
        number_width = self.layout.number_width
        self.index_text = self.layout.index_writer(room - number_width - 3)
        self.fits = max(1, room // (number_width + 2 + self.index_text.width + 2))

    def lines(self) -> list[str]:
        lines, complete = self.rows()
        if not complete and (bar := self.layout.bar(self.width)) is not None:
            lines += self.bar(bar)
        lines += self.legend(lines)
        return [self.cut(line) for line in lines]

    def rows(self) -> tuple[list[str], bool]:
        """Answer the rows, and whether they show every cell."""
        more = self.more
        rows, complete = self.layout.rows(self.fits)
        texts = [list(map(self.cell, row.cells)) if isinstance(row, Row) else [] for row in rows]
        pad = max(len(text) for row in texts for text in row)
        lines = []
        for row, cells in zip(rows, texts, strict=True):
            if isinstance(row, Row):
                before, after = [more] * row.cut_before, [more] * row.cut_after
                lines.append(" ".join([*before, *(text.ljust(pad) for text in cells), *after]))
            else:
                lines.append(f"{more} {row.words}")
        return [line.rstrip() for line in lines], complete

    def cell(self, cell: Cell) -> str:
        mark, found = self.marks[cell.mark], cell.found
        if not found.reached:
            return f"{cell.number} {mark}"
        unknown = self.marks[Mark.UNKNOWN]
        if found.first_index is None:
            return f"{cell.number} {mark}{unknown}"
        several = unknown if found.several is None else _SEVERAL if found.several else ""
        return f"{cell.number} {mark}{self.index_text(found.first_index)}{several}"

    def bar(self, bar: Bar) -> list[str]:
        line = "".join(self.marks[mark] for mark in bar.marks)
        words = f"each mark is {bar.each} cells"
        return [f"{line}  {words}"] if len(line) + 2 + len(words) <= self.width else [line, words]

    def legend(self, lines: Sequence[str]) -> list[str]:
        """Answer what the marks mean that are not plain, in as few lines as it takes."""
        meanings = {
            self.marks[Mark.PART]: Mark.PART.value,
            self.marks[Mark.OUTSIDE]: Mark.OUTSIDE.value,
            _SEVERAL: SEVERAL,
            self.marks[Mark.UNKNOWN]: Mark.UNKNOWN.value,
            NUMBER: "element in row-major order",
        }
        legend: list[str] = []
        for mark, meaning in meanings.items():
            if not any(mark in line for line in lines):
                continue
            words = f"{mark} {meaning}"
            if legend and len(legend[-1]) + 2 + len(words) <= self.width:
                legend[-1] += f", {words}"
            else:
                legend.append(words)
        return legend

    def cut(self, line: str) -> str:
        more = self.more
        return line if len(line) <= self.width else line[: max(0, self.width - len(more))] + more[: max(0, self.width)]
