"""What lies on which device in words: roles and devices, how they came to disagree, and a line on the whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorplay.layers import Mismatch, PlacementSummary
from tensorplay.render.parts import Phrase, Table
from tensorplay.words import bytes_text, plural

__all__ = ["mismatches", "placement", "placement_summary"]

_NUMBERS = frozenset({"tensors", "bytes"})
_MOST_CALLS = 4
_WORDS = {
    "attribute": "tensors that are not registered",
    "hook": "tensors that hooks hold",
    "own attribute": "tensors that tensors hold",
    "local": "local tensors of wrappers",
    "base": "bases of views",
    "state": "optimizer state",
}


def placement(found: PlacementSummary) -> Iterator[Table | Phrase]:
    """Answer the pieces: how many tensors of each role are on each device."""
    rows = tuple(
        (_WORDS.get(row.role, f"{row.role}s"), row.device, str(row.tensors), bytes_text(row.nbytes))
        for row in found.rows
    )
    if rows:
        yield Table(
            ("what", "device", "tensors", "bytes"), rows, numbers=frozenset({"tensors", "bytes"}), first_width=24
        )
    if len(found.stack) > 1:
        yield Phrase(f"asked in {' ← '.join(found.stack[:_MOST_CALLS])}", "dim")
    if found.answering:
        yield Phrase(f"{plural(found.answering, 'tensor')} of classes that answer .device in Python: not asked", "dim")
    if found.offloaded:
        yield Phrase(f"{plural(found.offloaded, 'tensor')} of modules with an offload hook: moved as needed", "dim")


def placement_summary(found: PlacementSummary) -> Iterator[Phrase]:
    """Answer the one line that counts."""
    tensors = sum(row.tensors for row in found.rows)
    devices = sorted({row.device for row in found.rows})
    on = f" on {', '.join(devices)}" if devices else ""
    yield Phrase(f"{plural(found.modules, 'module')}, {plural(tensors, 'tensor')}{on}")


def mismatches(found: Sequence[Mismatch]) -> Iterator[Table | Phrase]:
    """Answer the pieces: each way, what PyTorch does, and what was found."""
    rows = tuple(
        (
            one.name,
            one.title,
            one.error or one.effect,
            "not shown" if one.error else ", ".join(one.codes) or ("by design" if one.by_design else "nothing"),
        )
        for one in found
    )
    if rows:
        yield Table(("way", "what disagrees", "what PyTorch does", "found"), rows, first_width=8)
