"""A report as terminal text."""

from __future__ import annotations

import io
import re
import shutil
from typing import IO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tensorplay.layers import Document, Finding
from tensorplay.render import outline as parts
from tensorplay.render.cells import Geometry
from tensorplay.render.checkpoint import Rows
from tensorplay.render.parts import Phrase
from tensorplay.render.parts import Table as Grid
from tensorplay.render.strides import strides_picture
from tensorplay.words import UNSEEN, needs_ascii, visible

__all__ = ["print_report", "render", "render_finding"]

_LEAST_WIDTH = 40  # in fewer columns the facts themselves would go
# What a terminal would act on instead of showing it, except for line ends and our own colours.
_CONTROL = re.compile(f"(\x1b\\[[0-9;]*m)|(?!\n){UNSEEN}")
_STYLES = {
    "plain": "",
    "strong": "bold",
    "dim": "dim",
    "attention": "yellow",
    "good": "green",
    "error": "bold red",
    "warning": "bold yellow",
    "info": "bold cyan",
}


class _AsciiBuffer(io.StringIO):
    """A string buffer that tells rich to draw with ASCII characters."""

    encoding = "ascii"


def render(
    document: Document,
    *,
    width: int | None = None,
    color: bool = False,
    ascii: bool = False,
    addresses: bool = False,
    rows: Rows | None = None,
) -> str:
    """Answer a report as text; arguments as for Report.text(), and the rows to show of a checkpoint."""
    buffer = _AsciiBuffer() if ascii else io.StringIO()
    columns = max(_LEAST_WIDTH, width or shutil.get_terminal_size((100, 24)).columns)
    _console(buffer, columns, color).print(_report(parts.outline(document, addresses=addresses, rows=rows), ascii))
    return _finish(buffer.getvalue(), color)


def print_report(document: Document, file: IO[str]) -> None:
    """Write a report to a stream: colours where it is a terminal and NO_COLOR is not set."""
    ascii = needs_ascii(file)
    terminal = Console(file=file, force_jupyter=False)
    color = terminal.is_terminal and not terminal.no_color
    file.write(
        render(document, width=terminal.width if terminal.is_terminal else None, color=color, ascii=ascii) + "\n"
    )
    file.flush()


def render_finding(finding: Finding, *, width: int = 100) -> str:
    """Answer one finding as text."""
    buffer = io.StringIO()
    _console(buffer, width, color=False).print(_diagnosis(parts.diagnosis(finding)))
    return _finish(buffer.getvalue(), color=False)


def _console(file: IO[str], width: int, color: bool) -> Console:
    # Names hold brackets and colons: nothing in them is markup.
    return Console(
        file=file,
        width=width,
        force_terminal=color,
        no_color=not color,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
        force_jupyter=False,  # in a kernel it would show the text there and then, and leave the file empty
    )


def _finish(text: str, color: bool) -> str:
    """Write control characters and lone surrogates out, trim the lines."""

    def shown(match: re.Match[str]) -> str:
        return match[0] if color and match[1] else visible(match[0])

    return "\n".join(line.rstrip() for line in _CONTROL.sub(shown, text).rstrip("\n").split("\n"))


class _Picture:
    """The strides picture, as wide as the place it is put: a record inside another one stands further right."""

    def __init__(self, geometry: Geometry, ascii: bool) -> None:
        self.geometry = geometry
        self.ascii = ascii

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = strides_picture(*self.geometry, width=options.max_width, ascii=self.ascii)
        yield Text("\n".join(lines), no_wrap=True, overflow="crop")


def _report(report: parts.Outline, ascii: bool) -> RenderableType:
    shown: list[RenderableType] = []
    if report.label is not None:
        shown.append(Text(report.label, style="bold"))
    if report.changes is not None:
        shown.append(_table(report.changes) if report.changes.rows else Text(report.unchanged))
    if report.note is not None:
        shown.append(Text(report.note, style="dim"))
    shown += [_facts(tensor) for tensor in report.focus]
    shown += [_tensor(tensor, ascii) for tensor in report.tensors]
    if report.table is not None:
        shown.append(_table(report.table))
    if report.comparison is not None:
        shown.append(_phrase(report.comparison.verdict))
        shown.append(_table(report.comparison.table))
    for chain in report.chains:
        shown.append(_phrase(chain.title))
        if chain.table is not None:
            shown.append(_table(chain.table))
        shown += [_phrase(note) for note in chain.notes]
    for piece in (*report.sharing, *report.checkpoint):
        shown.append(_table(piece) if isinstance(piece, Grid) else _phrase(piece))
    if report.arrays is not None:
        shown.append(_table(report.arrays))
    shown += [Group("", _diagnosis(diagnosis)) for diagnosis in report.diagnoses]
    if report.more_diagnoses is not None:
        shown.append(Text(f"\n{report.more_diagnoses}", style="dim"))
    shown.append(Text.assemble(*((phrase.words, _STYLES[phrase.tone]) for phrase in report.summary)))
    shown += [_phrase(remark) for remark in report.remarks]
    return Group(*shown)


def _phrase(phrase: Phrase) -> Text:
    return Text(phrase.words, style=_STYLES[phrase.tone])


def _title(tensor: parts.TensorPart) -> Text:
    text = Text.assemble((tensor.name, "bold"), "  ", tensor.title)
    if tensor.also:
        text.append(f"  {tensor.also}", style="dim")
    return text


def _tensor(tensor: parts.TensorPart, ascii: bool) -> Tree:
    tree = Tree(_title(tensor), guide_style="dim")
    node = tree
    for layer in tensor.layers:
        node = tree.add(_layer(layer))
    if tensor.geometry is not None:
        node.add(_Picture(tensor.geometry, ascii))
    for inner in tensor.inner:
        tree.add(_tensor(inner, ascii))
    return tree


def _layer(layer: parts.Layer) -> Table:
    # A grid, so that long lines wrap under their own beginning.
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=8, no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row(layer.word, Text("\n".join([layer.head, *layer.lines])))
    return grid


def _facts(tensor: parts.TensorPart) -> Tree:
    tree = Tree(_title(tensor), guide_style="dim")
    for fact in tensor.layers:
        if fact.lines:
            tree.add(_layer(fact))
        else:
            tree.add(Text.assemble((f"{fact.word:<16}", "bold"), fact.head))
    return tree


def _table(content: Grid) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in content.headings:
        table.add_column(heading, justify="right" if heading in content.numbers else "left", overflow="fold")
    table.columns[0].min_width = content.first_width or None
    for row in content.rows:
        table.add_row(*row)
    return table if content.rest is None else Group(table, Text(content.rest, style="dim"))


def _diagnosis(diagnosis: parts.Diagnosis) -> RenderableType:
    style = _STYLES[diagnosis.severity]
    head = Text.assemble((diagnosis.code, style), " ", (diagnosis.headline, "bold"), "  ", (diagnosis.severity, style))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in diagnosis.rows.items():
        table.add_row(key, Text(value))
    return Group(head, Padding(table, (0, 0, 0, 2)))
