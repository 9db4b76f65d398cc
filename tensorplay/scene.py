"""All that check() gathered at one moment: records, arrays, who lends memory, and where addresses lie.

The rules that need more than one record look here. The process's memory map is read after the records, so that the
memory of every tensor read is in it, and only when a rule asks.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensorplay._native import C
from tensorplay.arrays import Owner
from tensorplay.layers import WITH_MEMORY, ArrayRecord, TensorRecord, Unread
from tensorplay.reports import Read, inner_model

__all__ = ["Lent", "Mapping", "Scene", "Subject"]


class Mapping(NamedTuple):
    """A part of the address space, as the kernel lists it in /proc/self/maps."""

    begin: int
    end: int
    permissions: str
    path: str


class Lent(NamedTuple):
    """An array, and who lends it its memory."""

    record: ArrayRecord
    owner: Owner | None


class Subject(NamedTuple):
    """One tensor that a rule may be about: a record, native or copied, and the read it is part of."""

    read: Read
    record: Any
    span: tuple[int, int] | None
    """The addresses its elements lie in, where it has any in CPU memory that its storage covers."""

    def model(self) -> TensorRecord:
        """Copy the record into the model, under its path."""
        return self.read.model() if self.record is self.read.record else inner_model(self.read, self.record)


def _span(record: Any) -> tuple[int, int] | None:
    data, extent = record.data, record.extent
    if data is None or extent is None or record.kind not in WITH_MEMORY or not data.device.startswith("cpu"):
        return None
    pointer, needed = data.pointer, extent.needed_nbytes
    if pointer == 0 or not needed or extent.out_of_bounds is not False:
        return None
    return pointer + extent.first_byte, pointer + needed


class Scene:
    """What one check() gathered."""

    def __init__(self, reads: Sequence[Read], arrays: Sequence[Lent] = ()) -> None:
        self.reads = reads
        self.arrays = arrays
        self.unread: list[Unread] = []
        self._mappings: dict[tuple[int, int], list[Mapping]] | None = None

    @functools.cached_property
    def subjects(self) -> list[Subject]:
        """Every record, and those of the tensors inside it."""
        found = []
        for read in self.reads:
            records = [read.record]
            for record in records:
                found.append(Subject(read, record, _span(record)))
                records += [inner for _, inner in record.inner]
        return found

    @functools.cached_property
    def _blocks(self) -> list[tuple[int, int, str]]:
        """Blocks of memory that tensors among the objects own themselves, by address."""
        found: dict[tuple[int, int], str] = {}
        for subject in self.subjects:
            data, storage = subject.record.data, subject.record.storage
            if data is None or data.pointer == 0 or data.origin in ("borrowed", "callback"):
                continue
            if isinstance(storage.nbytes, int):
                found.setdefault((data.pointer, data.pointer + storage.nbytes), subject.read.name)
        return sorted((begin, end, name) for (begin, end), name in found.items())

    def owners_of(self, span: tuple[int, int]) -> list[str]:
        """Answer the tensors whose own memory a span overlaps."""
        after = bisect.bisect_left(self._blocks, (span[1],))
        near = self._blocks[max(0, after - 8) : after]  # blocks do not overlap
        return [name for begin, end, name in near if begin < span[1] and span[0] < end]

    def mappings(self, span: tuple[int, int]) -> list[Mapping] | None:
        """Answer the mappings that hold a byte of a subject's span, or None where the map cannot be read."""
        if self._mappings is None:
            spans = list({subject.span for subject in self.subjects if subject.span is not None})
            spans += [(lent.record.begin, lent.record.end) for lent in self.arrays]
            try:
                answers = C.find_mappings(spans)
            except RuntimeError as error:
                self.unread.append(Unread(name="/proc/self/maps", reason=str(error)))
                answers = []
            self._mappings = {
                span: [Mapping(*mapping) for mapping in found] for span, found in zip(spans, answers, strict=False)
            }
        return self._mappings.get(span)
