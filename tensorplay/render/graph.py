"""The graph behind some tensors in words: what is saved for backward, by kind and module, and a line on the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorplay.layers import GraphSummary, SavedSum, SavedTensor
from tensorplay.render.parts import Phrase, Table
from tensorplay.words import bytes_text, plural, shape_text, some_of

__all__ = ["graph", "graph_summary", "saved"]

_MOST_KINDS = 12
_MOST_SAVED = 30
_WIDEST_NAME = 44
_NUMBERS = frozenset({"nodes", "saved", "storages", "bytes"})


def graph(found: GraphSummary) -> Iterator[Table | Phrase]:
    """Answer the pieces: the sums by kind, and by module where there are several."""
    if found.by_kind:
        yield _sums("saved by", found.by_kind)
    if len(found.by_module) > 1:
        yield _sums("with the parameters of", found.by_module)
    if found.packed:
        yield Phrase(f"{plural(found.packed, 'saved tensor')} packed by a hook: n bytes unknown", "attention")
    if found.busy:
        yield Phrase(f"{plural(found.busy, 'node')} held by another thread: not counted", "attention")


def _sums(heading: str, sums: Sequence[SavedSum]) -> Table:
    rows = tuple(
        (one.name, str(one.nodes), str(one.saved), str(one.storages), bytes_text(one.nbytes))
        for one in sums[:_MOST_KINDS]
    )
    left = len(sums) - len(rows)
    rest = f"... and {left} more: report.graph has all" if left else None
    return Table((heading, "nodes", "saved", "storages", "bytes"), rows, numbers=_NUMBERS, rest=rest, first_width=24)


def saved(found: Sequence[SavedTensor]) -> Iterator[Table | Phrase]:
    """Answer the pieces: the saved tensors, the largest first."""
    if not found:
        return
    rows = tuple(_row(one) for one in found[:_MOST_SAVED])
    left = len(found) - len(rows)
    rest = f"... and {plural(left, 'more saved tensor')}: report.saved has all" if left else None
    width = min(_WIDEST_NAME, max(len(word) for row in rows for word in row[0].split()))
    headings = ("saved as", "tensor", "bytes", "known in Python as")
    yield Table(headings, rows, numbers=_NUMBERS, rest=rest, first_width=width)


def _row(one: SavedTensor) -> tuple[str, str, str, str]:
    if one.state == "packed_by_hook":
        return one.held_by, "packed by a hook", "unknown", ""
    if one.state == "released":
        return one.held_by, "given back", "", ""
    known = one.name or ("no name found" if one.in_python else "nothing: no Python object shows it")
    also = f", also {some_of(one.also_held_by, 2)}" if one.also_held_by else ""
    return f"{one.held_by}{also}", f"{one.dtype}{shape_text(one.shape)}", bytes_text(one.held_bytes), known


def graph_summary(found: GraphSummary) -> Iterator[Phrase]:
    """Answer the one line that counts."""
    held = f"{bytes_text(found.activation_bytes_held)} in {plural(found.activations_held, 'storage')}"
    yield Phrase(f"{plural(found.nodes, 'node')} hold {held} for backward")
    if found.parameter_storages:
        yield Phrase(f", beside {bytes_text(found.parameter_bytes)} of parameters and other leaves", "dim")
