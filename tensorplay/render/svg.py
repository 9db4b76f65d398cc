"""Pictures as SVG: the layers of tensors as boxes and arrows, and the cells of a storage that a tensor reaches.

Each picture stands on paper of its own, light or dark as the reader's system is, and comes with the same facts in
words. The same input gives the same text. Nothing here probes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from tensorplay.layers import TensorRecord
from tensorplay.render.canvas import (
    CHARACTER,
    MARGIN,
    Arrow,
    Box,
    Canvas,
    Picture,
    columns,
    diagram,
    rectangle,
    shortened,
)
from tensorplay.render.cells import NUMBER, SEVERAL, Bar, Cell, Geometry, IndexWriter, Layout, Mark, Row
from tensorplay.render.outline import Names, claims_memory
from tensorplay.words import bytes_text, describe, plural, shape_text, visible

__all__ = ["cells_picture", "layers_picture"]

_SMALL_CHARACTER = 6.05


def layers_picture(records: Sequence[TensorRecord], names: Names) -> Picture:
    """Draw who points to what: Python objects, impls, storages, data; tensors over one storage stand together.

    Args:
        records: tensors, with those they are made of.
        names: the report's short names for addresses.
    """
    return _Layers(records, names).picture()


def cells_picture(name: str, geometry: Geometry) -> Picture:
    """Draw a storage's cells as they lie, those reached with their index, and a bar of all where some are left out."""
    return _Cells(name, geometry).picture()


class _Layers:
    """Collects the boxes of some tensors; what several of them share is one box."""

    def __init__(self, records: Sequence[TensorRecord], names: Names) -> None:
        self.name = names
        self.boxes: dict[str, Box] = {}
        self.arrows: dict[tuple[str, str], Arrow] = {}
        self.words: list[str] = []
        for record in _by_storage(records):
            self.tensor(record)
        for record in records:
            self.view(record)
        self.title = f"Layers of {_first_names(records)}: {self.counts()}"

    def picture(self) -> Picture:
        headings = ("Python object", "TensorImpl", "StorageImpl", "DataPtr")
        return diagram(self.title, headings, list(self.boxes.values()), list(self.arrows.values()), self.words)

    def counts(self) -> str:
        kinds = [("P", "Python object"), ("I", "TensorImpl"), ("S", "StorageImpl")]
        counts = [(sum(key[0] == letter for key in self.boxes), noun) for letter, noun in kinds]
        return ", ".join(plural(count, noun) for count, noun in counts)

    def add(self, box: Box, source: str | None) -> None:
        self.boxes.setdefault(box.key, box)
        if source is not None:
            self.arrows.setdefault((source, box.key), Arrow(source, box.key))

    def tensor(self, record: TensorRecord) -> None:
        impl, python, storage, data = record.impl, record.python, record.storage, record.data
        words = []
        source = None
        if python is not None:
            name = self.name("P", python.address)
            source = f"P{python.address}"
            lines = [record.name, f"{name} {python.type}", f"refcount {python.refcount}"]
            self.add(_box(source, 0, lines), None)
            words.append(f"Python object {name}")
        name = self.name("I", impl.address)
        lines = [*([record.name] if python is None else []), f"{name} {describe(record)}", *self.geometry(record)]
        outside = record.extent is not None and bool(record.extent.out_of_bounds)
        self.add(_box(f"I{impl.address}", 1, lines, "fault" if outside else "box"), source)
        words.append(f"TensorImpl {name}" + (f", a view of {self.name('I', impl.base)}" if impl.is_view else ""))
        if storage is None or data is None:
            if not record.inner:
                self.add(_box(f"-{impl.address}", 2, ["no storage"], "ghost"), f"I{impl.address}")
            words.append("no storage")
        else:
            name = self.name("S", storage.address)
            lines = [f"{name} {bytes_text(storage.nbytes)}", f"use_count {storage.use_count}"]
            self.add(_box(f"S{storage.address}", 2, lines), f"I{impl.address}")
            words.append(f"StorageImpl {name} of {bytes_text(storage.nbytes)}")
            words.append(self.data(record))
        self.words.append(f"{visible(record.name)}: {', '.join(words)}" + (", out of bounds" if outside else ""))
        for inner in record.inner:
            self.tensor(inner.record)
            key = f"I{inner.record.impl.address}"
            self.arrows.setdefault((f"I{impl.address}", key), Arrow(f"I{impl.address}", key, "dashed"))

    def geometry(self, record: TensorRecord) -> Iterator[str]:
        impl = record.impl
        if impl.stride is not None:
            yield f"stride {shape_text(impl.stride)} offset {impl.storage_offset}"
        yield f"use_count {impl.use_count}"
        if impl.is_view:
            yield f"view of {self.name('I', impl.base)}"

    def data(self, record: TensorRecord) -> str:
        data, storage = record.data, record.storage
        assert data is not None
        assert storage is not None
        origin = data.maker or data.origin.replace("_", " ")
        if data.pointer:
            name = self.name("D", data.pointer)
            box = _box(f"D{data.pointer}", 3, [f"{name} on {data.device}", origin])
            words = f"DataPtr {name} on {data.device}"
        else:
            box = _box(f"0{storage.address}", 3, ["null pointer"], "fault" if claims_memory(record) else "ghost")
            words = "null pointer"
        self.add(box, f"S{storage.address}")
        return words

    def view(self, record: TensorRecord) -> None:
        impl = record.impl
        if impl.base is not None:
            base = f"{self.name('I', impl.base)}, not in this report"
            self.add(_box(f"I{impl.base}", 1, [base], "ghost"), None)
            self.arrows[f"I{impl.address}", f"I{impl.base}"] = Arrow(f"I{impl.address}", f"I{impl.base}", "dashed")
        for inner in record.inner:
            self.view(inner.record)


def _box(key: str, column: int, lines: Iterable[str], look: Literal["box", "fault", "ghost"] = "box") -> Box:
    return Box(key, column, tuple(map(shortened, lines)), look)


def _by_storage(records: Iterable[TensorRecord]) -> list[TensorRecord]:
    """Put tensors over one storage side by side, in the order in which the storages are met."""
    groups: dict[object, list[TensorRecord]] = {}
    for number, record in enumerate(records):
        groups.setdefault(-number if record.storage is None else record.storage.address, []).append(record)
    return [record for group in groups.values() for record in group]


def _first_names(records: Sequence[TensorRecord]) -> str:
    more = f" and {len(records) - 3} more" if len(records) > 3 else ""
    return ", ".join(visible(record.name) for record in records[:3]) + more


class _Cells:
    """Draws the rows, the bar and the legend, one below the other."""

    room = 860
    height = 34

    def __init__(self, name: str, geometry: Geometry) -> None:
        self.layout = Layout(geometry)
        self.index_text: IndexWriter = self.layout.index_writer(12)
        widest = max(self.layout.number_width + 1, self.index_text.width + 1)
        self.width = max(34, round(widest * _SMALL_CHARACTER) + 8)
        self.rows, self.complete = self.layout.rows(max(1, min(24, self.room // self.width)))
        self.bar = None if self.complete else self.layout.bar(64)
        self.title = f"Cells of the storage that {visible(name)} reaches"
        self.paths: dict[str, list[str]] = {}
        self.texts: list[tuple[float, float, str, str]] = []
        self.meanings: dict[str, str] = {}

    def picture(self) -> Picture:
        y = float(MARGIN)
        right = float(MARGIN)
        words = []
        indent = MARGIN + 20 * any(isinstance(row, Row) and row.cut_before for row in self.rows)
        for row in self.rows:
            if isinstance(row, Row):
                right = max(right, self.row(row, indent, y))
                words.append(_row_words(row))
                y += self.height + 2
            else:
                self.texts.append((indent, y + 13, f"… {row.words}", "faint"))
                right = max(right, indent + CHARACTER * columns(row.words) + 20)
                words.append(row.words)
                y += 20
        if self.bar is not None:
            right = max(right, self.draw_bar(self.bar, y + 8))
            words.append(_bar_words(self.bar))
            y += 52
        y, right = self.legend(y + 4, right)
        canvas = Canvas(right + MARGIN, y + MARGIN - 4)
        for look, data in self.paths.items():
            canvas.path("".join(data), look)
        small = [entry for entry in self.texts if entry[3] == "small"]
        canvas.open_small()
        for x, top, text, _ in small:
            canvas.text(x, top, text)
        canvas.close()
        for x, top, text, look in self.texts:
            if look != "small":
                canvas.text(x, top, text, look)
        return canvas.picture(self.title, words)

    def row(self, row: Row, x: float, y: float) -> float:
        if row.cut_before:
            self.texts.append((x - 18, y + 21, "…", "faint"))
        for cell in row.cells:
            self.cell(cell, x, y)
            x += self.width
        if row.cut_after:
            self.texts.append((x + 6, y + 21, "…", "faint"))
            x += 20
        return x

    def cell(self, cell: Cell, x: float, y: float) -> None:
        found = cell.found
        look = cell.mark.name.lower()
        self.draw(look, cell.mark.value, x + 1, y + 1, self.width - 2, self.height - 2)
        if found.several:
            self.draw("several", SEVERAL, x + 3, y + 3, self.width - 6, self.height - 6)
        middle = x + self.width / 2
        self.texts.append((middle, y + 13, str(cell.number), "small"))
        index = "" if found.first_index is None else self.index_text(found.first_index)
        unknown = found.reached is None or (found.reached and None in (found.first_index, found.several))
        if index.startswith(NUMBER):
            self.meanings.setdefault(NUMBER, f"{NUMBER} element in row-major order")
        if unknown:
            self.meanings.setdefault("?", f"? {Mark.UNKNOWN.value}")
        if index or unknown:
            self.texts.append((middle, y + 27, f"{index}{'?' if unknown else ''}", "small"))

    def draw(self, look: str, meaning: str, x: float, y: float, width: float, height: float) -> None:
        self.paths.setdefault(look, []).append(rectangle(x, y, width, height))
        self.meanings.setdefault(look, meaning)

    def draw_bar(self, bar: Bar, y: float) -> float:
        """Draw the stretches, with the numbers of the first and the last cell; a part is half as high."""
        each = 10
        for number, mark in enumerate(bar.marks):
            x = MARGIN + number * each
            if mark is Mark.PART:
                self.draw("reached", Mark.REACHED.value, x, y + 8, each, 8)
                self.meanings.setdefault("part", mark.value)
            else:
                self.draw(mark.name.lower(), mark.value, x, y, each, 16)
        end = MARGIN + each * len(bar.marks)
        words = f"cell {self.layout.begin} to {self.layout.end - 1}, each mark is {bar.each} cells"
        self.texts.append((MARGIN, y + 31, words, "faint"))
        return max(float(end), MARGIN + CHARACTER * len(words))

    def legend(self, y: float, right: float) -> tuple[float, float]:
        """Say below the picture what its marks mean, in as many lines as its width takes."""
        most = max(right, 420.0)
        x = float(MARGIN)
        for look, meaning in list(self.meanings.items()):
            swatch = 18 if look in self.paths or look == "part" else 0
            width = swatch + CHARACTER * columns(meaning)
            if x > MARGIN and x + width > most:
                x, y = float(MARGIN), y + 20
            if look == "part":
                self.paths["reached"].append(rectangle(x, y + 8, 12, 6))
            elif swatch:
                self.paths[look].append(rectangle(x, y + 2, 12, 12))
            self.texts.append((x + swatch, y + 12, meaning, "faint"))
            x += width + 20
            right = max(right, x - 20)
        return y + 20, right


def _row_words(row: Row) -> str:
    """Say which cells a row has and which index reaches each."""
    reached = []
    for cell in row.cells:
        found = cell.found
        if found.reached is False:
            continue
        text = str(cell.number)
        if found.first_index:
            text += f" is [{', '.join(map(str, found.first_index))}]"
        if found.several:
            text += " and others"
        if cell.mark in (Mark.OUTSIDE, Mark.UNKNOWN):
            text += f" ({cell.mark.value})"
        reached.append(text)
    if not row.cells:  # the last row ends before the columns that are shown
        return "none of the columns shown"
    cells = f"cells {row.cells[0].number} to {row.cells[-1].number}"
    return f"{cells}: {'; '.join(reached) or 'none reached'}"


def _bar_words(bar: Bar) -> str:
    """Say the bar from its left to its right, equal marks counted."""
    runs: list[tuple[Mark, int]] = []
    for mark in bar.marks:
        if runs and runs[-1][0] is mark:
            runs[-1] = (mark, runs[-1][1] + 1)
        else:
            runs.append((mark, 1))
    return f"the whole storage in stretches of {bar.each} cells: " + ", ".join(f"{n} {mark.value}" for mark, n in runs)
