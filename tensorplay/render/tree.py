"""Paths drawn as a tree from left to right: what holds objects alive, and what came between two moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tensorplay.layers import Grown, Growth, Held
from tensorplay.render.canvas import CHARACTER, LINE, MARGIN, Arrow, Box, Canvas, Picture, Place, columns
from tensorplay.render.growth import row_text
from tensorplay.render.holders import how_text
from tensorplay.words import bytes_text, plural

__all__ = ["growth_picture", "holders_picture"]

_MOST_PATHS = 24
_WIDEST = 44
_GAP = 46
_BETWEEN = 12
_LAYERS = {"object": "Python object", "impl": "TensorImpl", "storage": "StorageImpl"}


class _Twig:
    """A step, or several that nothing branches off between."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.notes: list[str] = []
        self.targets: list[str] = []
        self.is_cycle = False
        self.further: dict[str, _Twig] = {}

    @property
    def is_end(self) -> bool:
        return bool(self.notes)

    def grow(self, steps: Sequence[str]) -> _Twig:
        """Answer the twig at the end of a path."""
        at = self
        for step in steps:
            at = at.further.setdefault(step, _Twig([step]))
        return at

    def settle(self) -> None:
        """Make one of steps between which nothing branches off; an end that goes on gets a leaf of its own."""
        while len(self.further) == 1 and not self.is_end:
            (only,) = self.further.values()
            self.words += only.words
            self.notes, self.targets, self.further = only.notes, only.targets, only.further
        if self.is_end and self.further:
            leaf = _Twig(["itself"])
            leaf.notes, leaf.targets = self.notes, self.targets
            self.notes, self.targets = [], []
            self.further = {"": leaf, **self.further}
        for twig in self.further.values():
            twig.settle()

    @property
    def lines(self) -> tuple[str, ...]:
        """The words in lines that are not too long, and the notes."""
        lines = [""]
        for word in self.words:
            if lines[-1] and (self.is_cycle or len(lines[-1]) + len(word) > _WIDEST):
                lines.append("  ")
            lines[-1] += word
        return (*(_short(line.strip() if number == 0 else line) for number, line in enumerate(lines)), *self.notes)


def _short(line: str) -> str:
    return line if len(line) <= 2 * _WIDEST else f"{line[:_WIDEST]} ... {line[-_WIDEST // 2 :]}"


class _Placed(NamedTuple):
    key: str
    twig: _Twig
    column: int
    outer: str | None


def holders_picture(held: Held) -> Picture:
    """Draw the paths that end in an object's layers: roots at the left, the layers at the right."""
    root = _Twig([])
    for holder in held.holders[:_MOST_PATHS]:
        end = root.grow(holder.steps or (holder.path,))
        end.notes.append(how_text(holder))
        end.targets.append(holder.of)
    for ledger in held.ledgers:
        if ledger.unaccounted:
            end = root.grow(["C or C++: ", f"to the {_LAYERS[ledger.of]}"])
            end.notes.append(plural(ledger.unaccounted, "C++-only reference"))
            end.targets.append(ledger.of)
    if held.cycle_steps:
        _add_cycle(root, held.cycle_steps, "garbage that is not collected yet")
    left = len(held.holders) - _MOST_PATHS
    title = f"who holds {held.name}: {plural(len(held.holders), 'holder')}"
    words = [f"{holder.path}: {how_text(holder)}" for holder in held.holders[:_MOST_PATHS]]
    words += [ledger.equation for ledger in held.ledgers]
    if left > 0:
        words.append(f"{plural(left, 'more holder')} not drawn")
    layers = [
        Box(f"\0{ledger.of}", 0, (_LAYERS[ledger.of], f"{ledger.counter} {ledger.count}")) for ledger in held.ledgers
    ]
    if held.nbytes is not None and layers:
        layers[-1] = layers[-1]._replace(lines=(*layers[-1].lines, bytes_text(held.nbytes)))
    return _Tree(root, layers).picture(title, words)


def growth_picture(growth: Growth) -> Picture:
    """Draw the paths to the places that hold what came."""
    root = _Twig([])
    for row in growth.grown[:_MOST_PATHS]:
        if row.cycle is not None:
            _add_cycle(root, row.steps or (row.cycle,), row_text(row))
        else:
            root.grow(row.steps or (row.path,)).notes.append(row_text(row))
    title = f"what came and stayed: {plural(growth.new_storages, 'storage')}, {bytes_text(growth.new_nbytes)}"
    words = [f"{_path(row)}: {row_text(row)}" for row in growth.grown[:_MOST_PATHS]]
    if len(growth.grown) > _MOST_PATHS:
        words.append(f"{plural(len(growth.grown) - _MOST_PATHS, 'more place')} not drawn")
    return _Tree(root, ()).picture(title, words)


def _path(row: Grown) -> str:
    return row.path if row.cycle is None else f"garbage: {row.path}"


def _add_cycle(root: _Twig, steps: Sequence[str], note: str) -> None:
    twig = root.further.setdefault(f"\0{''.join(steps)}", _Twig(steps))
    twig.notes.append(note)
    twig.is_cycle = True


class _Tree:
    """Places twigs in columns by their depth, each end in a row of its own, and the layers at the right."""

    def __init__(self, root: _Twig, layers: Sequence[Box]) -> None:
        self.layers = layers
        self.placed: list[_Placed] = []
        for number, twig in enumerate(root.further.values()):
            twig.settle()
            self.collect(twig, str(number), 0, None)
        self.places: dict[str, Place] = {}
        self.free = float(MARGIN)
        widths = [
            max((_width(one.twig.lines) for one in self.placed if one.column == column), default=0.0)
            for column in range(1 + max((one.column for one in self.placed), default=0))
        ]
        self.lefts = [MARGIN + sum(width + _GAP for width in widths[:column]) for column in range(len(widths) + 1)]
        self.widths = widths
        for one in self.placed:
            if one.outer is None:
                self.place(one)

    def collect(self, twig: _Twig, key: str, column: int, outer: str | None) -> None:
        self.placed.append(_Placed(key, twig, column, outer))
        for number, further in enumerate(twig.further.values()):
            self.collect(further, f"{key}.{number}", column + 1, key)

    def place(self, one: _Placed) -> Place:
        """Place the twigs behind one first: it stands in their middle."""
        height = 10.0 + LINE * len(one.twig.lines)
        behind = [self.place(other) for other in self.placed if other.outer == one.key]
        top = self.free
        if behind:
            top = max(MARGIN, (behind[0].middle + behind[-1].middle - height) / 2)
        place = Place(self.lefts[one.column], top, self.widths[one.column], height)
        self.places[one.key] = place
        self.free = max(self.free, place.bottom + _BETWEEN)
        return place

    def picture(self, title: str, words: Sequence[str]) -> Picture:
        layers = dict(self.place_layers())
        right = max([place.right for place in (*self.places.values(), *layers.values())], default=MARGIN * 20.0)
        bottom = max([place.bottom for place in (*self.places.values(), *layers.values())], default=MARGIN * 2.0)
        loops = any(one.twig.is_cycle for one in self.placed)
        canvas = Canvas(right + MARGIN + (26 if loops else 0), bottom + MARGIN)
        for one in self.placed:
            self.draw_arrows(canvas, one, layers)
        for upper, lower in zip(self.layers, self.layers[1:], strict=False):
            canvas.down(layers[upper.key], layers[lower.key])
        for one in self.placed:
            canvas.box(self.places[one.key], Box(one.key, 0, one.twig.lines, "fault" if one.twig.is_cycle else "box"))
        for box in self.layers:
            canvas.box(layers[box.key], box)
        return canvas.picture(title, words)

    def place_layers(self) -> Iterator[tuple[str, Place]]:
        heights = [10.0 + LINE * len(box.lines) for box in self.layers]
        total = sum(heights) + 2 * _BETWEEN * (len(heights) - 1)
        top = max(float(MARGIN), (self.free - _BETWEEN + MARGIN - total) / 2)
        width = max((_width(box.lines) for box in self.layers), default=0.0)
        for box, height in zip(self.layers, heights, strict=True):
            yield box.key, Place(self.lefts[-1] + _GAP, top, width, height)
            top += height + 2 * _BETWEEN

    def draw_arrows(self, canvas: Canvas, one: _Placed, layers: dict[str, Place]) -> None:
        place = self.places[one.key]
        if one.outer is not None:
            canvas.arrow(self.places[one.outer], place, Arrow(one.outer, one.key))
        if one.twig.is_cycle:
            canvas.loop(place)
        edge = place._replace(width=self.lefts[-1] - place.left)  # no box of a later column lies in its row
        for target in dict.fromkeys(one.twig.targets):
            if edge.right > place.right:
                canvas.line(place.right, edge.right, place.middle)
            canvas.arrow(edge, layers[f"\0{target}"], Arrow(one.key, target))


def _width(lines: Iterable[str]) -> float:
    return 20 + CHARACTER * max((columns(line) for line in lines), default=0)
