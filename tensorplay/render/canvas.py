"""What pictures are made of: shapes on paper of their own, light or dark as the reader's system is.

The same input gives the same text. Each picture comes with the same facts in words.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Literal, NamedTuple
from xml.sax.saxutils import escape

from tensorplay.words import visible

__all__ = [
    "CHARACTER",
    "LINE",
    "MARGIN",
    "Arrow",
    "Box",
    "Canvas",
    "Picture",
    "Place",
    "columns",
    "diagram",
    "rectangle",
    "shortened",
    "tenths",
]

_STYLE = """
text{font:12px ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;fill:#1f2328}
.faint{fill:#59636e}.strong{font-weight:bold}.small text{font-size:10px}.middle{text-anchor:middle}
.paper{fill:#fff}.box{fill:#f6f8fa;stroke:#59636e}.fault{fill:#ffebe9;stroke:#cf222e}
.ghost{fill:none;stroke:#59636e;stroke-dasharray:4 3}
.arrow{fill:none;stroke:#59636e}.arrowhead{fill:#59636e}
.dashed{fill:none;stroke:#0969da;stroke-dasharray:4 3}.dashedhead{fill:#0969da}
.label{paint-order:stroke;stroke:#fff;stroke-width:4px}
.empty{fill:none;stroke:#d1d9e0}.reached{fill:#b6e3ff;stroke:#0969da}
.several{fill:none;stroke:#0969da;stroke-width:2.5}
.outside{fill:#ffebe9;stroke:#cf222e;stroke-dasharray:4 2}
.unknown{fill:none;stroke:#9a6700;stroke-dasharray:2 2}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.faint{fill:#9198a1}
.paper{fill:#161b22}.box{fill:#21262d;stroke:#9198a1}.fault{fill:#4c1519;stroke:#ff7b72}
.ghost,.arrow{stroke:#9198a1}.arrowhead{fill:#9198a1}.dashed{stroke:#58a6ff}.dashedhead{fill:#58a6ff}
.label{stroke:#161b22}.empty{stroke:#3d444d}.reached{fill:#0c3b6e;stroke:#58a6ff}.several{stroke:#58a6ff}
.outside{fill:#4c1519;stroke:#ff7b72}.unknown{stroke:#d29922}}
"""
CHARACTER = 7.25
LINE = 16
MARGIN = 12


class Picture(NamedTuple):
    """A picture and what it says."""

    svg: str
    width: int
    height: int
    title: str
    """One line for who does not see it."""
    words: tuple[str, ...]
    """All that it shows, as a list."""


class Box(NamedTuple):
    """A thing with a few lines of text; the first one is its name."""

    key: str
    column: int
    lines: tuple[str, ...]
    look: Literal["box", "fault", "ghost"] = "box"


class Arrow(NamedTuple):
    """An arrow between two boxes, by their keys."""

    source: str
    target: str
    look: Literal["arrow", "dashed"] = "arrow"
    label: str = ""


def diagram(
    title: str, headings: Sequence[str], boxes: Sequence[Box], arrows: Sequence[Arrow], words: Sequence[str]
) -> Picture:
    """Place boxes in columns, each as high as those that point to it, and join them.

    Args:
        title: one line for who does not see it.
        headings: what stands above each column.
        boxes: from top to bottom within their column.
        arrows: from a column to a later one, or within a column, where they bend to the left of it.
        words: what boxes and arrows say, as a list.
    """
    column_of = {box.key: box.column for box in boxes}
    places: dict[str, Place] = {}
    left = float(MARGIN)
    for column, heading in enumerate(headings):
        inward = [arrow for arrow in arrows if column_of[arrow.target] == column]
        if column or inward:
            left += 52 + max((columns(arrow.label) for arrow in inward), default=0) * CHARACTER
        here = [box for box in boxes if box.column == column]
        width = 20 + CHARACTER * max([columns(heading), *(columns(line) for box in here for line in box.lines)])
        free = float(MARGIN + LINE + 10)
        for box in here:
            height = 10 + LINE * len(box.lines)
            above = [
                places[arrow.source].middle for arrow in inward if arrow.target == box.key and arrow.source in places
            ]
            top = max(free, sum(above) / len(above) - height / 2) if above else free
            places[box.key] = Place(left, top, width, height)
            free = top + height + 14
        places[f"\0{column}"] = Place(left, MARGIN, width, LINE)
        left += width
    # What points to one thing stands beside it, now that it is known where that is.
    free = 0.0
    for box in (box for box in boxes if box.column == 0):
        place = places[box.key]
        beside = [
            places[arrow.target].middle for arrow in arrows if arrow.source == box.key and column_of[arrow.target]
        ]
        if len(beside) == 1:
            place = place._replace(top=max(free, beside[0] - place.height / 2))
            places[box.key] = place
        free = place.bottom + 14
    canvas = Canvas(left + MARGIN, max(place.bottom for place in places.values()) + MARGIN)
    for column, heading in enumerate(headings):
        place = places[f"\0{column}"]
        canvas.text(place.left + 2, place.top + 12, heading, "faint strong")
    for arrow in arrows:
        canvas.arrow(places[arrow.source], places[arrow.target], arrow)
    for box in boxes:
        canvas.box(places[box.key], box)
    return canvas.picture(title, words)


class Place(NamedTuple):
    """Where a box lies."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its right side."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Its lower side."""
        return self.top + self.height

    @property
    def middle(self) -> float:
        """The height of its middle."""
        return self.top + self.height / 2


class Canvas:
    """Collects the shapes of one picture."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = round(width), round(height)
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, look: str = "") -> None:
        """Write words."""
        looks = f' class="{look}"' if look else ""
        self._shapes.append(f'<text{looks} x="{tenths(x)}" y="{tenths(y)}">{escape(visible(words))}</text>')

    def path(self, data: str, look: str) -> None:
        """Draw a path, by SVG's own commands."""
        self._shapes.append(f'<path class="{look}" d="{data}"/>')

    def box(self, place: Place, box: Box) -> None:
        """Draw a box with its lines."""
        self.path(rectangle(place.left, place.top, place.width, place.height), box.look)
        for number, line in enumerate(box.lines):
            look = "strong" if number == 0 and box.look != "ghost" else "faint" if box.look == "ghost" else ""
            self.text(place.left + 10, place.top + 18 + number * LINE, line, look)

    def arrow(self, source: Place, target: Place, arrow: Arrow) -> None:
        """Draw an arrow between two boxes."""
        if source.left == target.left:  # within a column: below the arrows that come from the left
            start, end = (place.middle + min(12.0, place.height / 2 - 6) for place in (source, target))
            bend = target.left - 34
            data = f"M{tenths(source.left)} {tenths(start)}C{tenths(bend)} {tenths(start)} "
            self.path(f"{data}{tenths(bend)} {tenths(end)} {tenths(target.left - 6)} {tenths(end)}", arrow.look)
        else:
            start, end = source.middle, target.middle
            bend = (source.right + target.left) / 2
            data = f"M{tenths(source.right)} {tenths(start)}C{tenths(bend)} {tenths(start)} "
            self.path(f"{data}{tenths(bend)} {tenths(end)} {tenths(target.left - 6)} {tenths(end)}", arrow.look)
        self.path(f"M{tenths(target.left)} {tenths(end)}l-8-4v8z", f"{arrow.look}head")
        if arrow.label:
            self.text(bend, (start + end) / 2 + 4, arrow.label, "label middle")

    def line(self, left: float, right: float, height: float, look: str = "arrow") -> None:
        """Draw a level line."""
        self.path(f"M{tenths(left)} {tenths(height)}H{tenths(right)}", look)

    def down(self, upper: Place, lower: Place) -> None:
        """Draw an arrow from a box to the one below it."""
        x = upper.left + upper.width / 2
        self.path(f"M{tenths(x)} {tenths(upper.bottom)}V{tenths(lower.top - 6)}", "arrow")
        self.path(f"M{tenths(x)} {tenths(lower.top)}l-4-8h8z", "arrowhead")

    def loop(self, place: Place) -> None:
        """Draw an arrow from the end of a box back to its beginning, at the right of it."""
        start, end, bend = place.bottom - 10, place.top + 12, place.right + 26
        data = f"M{tenths(place.right)} {tenths(start)}C{tenths(bend)} {tenths(start)} "
        self.path(f"{data}{tenths(bend)} {tenths(end)} {tenths(place.right + 6)} {tenths(end)}", "arrow")
        self.path(f"M{tenths(place.right)} {tenths(end)}l8-4v8z", "arrowhead")

    def open_small(self) -> None:
        """Begin a group of small text."""
        self._shapes.append('<g class="small middle">')

    def close(self) -> None:
        """End the group."""
        self._shapes.append("</g>")

    def picture(self, title: str, words: Sequence[str]) -> Picture:
        """Answer all that was drawn."""
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(visible(title))}</title>'
        paper = f'<rect class="paper" width="{self.width}" height="{self.height}" rx="6"/>'
        svg = "\n".join([head, f"<style>{_STYLE}</style>", paper, *self._shapes, "</svg>"]) + "\n"
        return Picture(svg, self.width, self.height, title, tuple(words))


def rectangle(x: float, y: float, width: float, height: float) -> str:
    """Answer the path of a rectangle."""
    return f"M{tenths(x)} {tenths(y)}h{tenths(width)}v{tenths(height)}h{tenths(-width)}z"


def tenths(value: float) -> str:
    """Answer a number as SVG takes it, to a tenth."""
    return f"{value:.1f}".removesuffix(".0")


def columns(text: str) -> int:
    """Answer how many columns of a monospaced font a text takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def shortened(text: str, most: int = 28) -> str:
    """Cut a line that would make its box too wide; control characters are written out first."""
    text = visible(text)
    if columns(text) <= most:
        return text
    kept, used = [], 0
    for character in text:
        used += columns(character)
        if used >= most:
            break
        kept.append(character)
    return f"{''.join(kept)}…"
