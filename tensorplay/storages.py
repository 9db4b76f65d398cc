"""Who lies in which storage, and how much of it nobody reaches: arithmetic over records, without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tensorplay.layers import WITH_MEMORY, ArrayRecord, TensorRecord

__all__ = ["StorageUse", "array_region", "parts", "region", "storages_of"]

Coverage = Callable[[list[Any], int], tuple[int | None, int, int]]
"""Answers of regions of a storage how many bytes they reach, where that is known, and the least and most they may."""


class StorageUse:
    """A storage and what reaches into it."""

    __slots__ = ("_coverage", "_reached", "_wasted", "address", "names", "nbytes")

    def __init__(self, address: int, nbytes: int, coverage: Coverage | None = None) -> None:
        self.address = address
        self.nbytes = nbytes
        self.names: dict[str, None] = {}
        """Of the tensors over it, each once, in order."""
        self._coverage = coverage
        self._reached: list[TensorRecord] = []
        self._wasted: tuple[int, bool] | None = None

    def add(self, record: TensorRecord) -> None:
        """Note one tensor over it."""
        self.names[record.name] = None
        self._wasted = None
        if record.extent is not None and record.extent.needed_nbytes:
            self._reached.append(record)

    def wasted(self) -> tuple[int, bool]:
        """Answer how many bytes no tensor reaches, and whether that is exact or the least it can be."""
        if self._wasted is None:
            self._wasted = self._count()
        return self._wasted

    def _count(self) -> tuple[int, bool]:
        extents = [record.extent for record in self._reached if record.extent is not None]
        if len(extents) == 1 and (visible := extents[0].visible_nbytes) is not None:
            return max(0, self.nbytes - visible), True
        regions = [region(record) for record in self._reached]
        if self._coverage is not None and None not in regions:
            exact_bytes, _, most = self._coverage(regions, self.nbytes)
            return self.nbytes - most, exact_bytes is not None
        exact = all(extent.contiguous or extent.non_overlapping_and_dense for extent in extents)
        reached = end = 0
        for first, last in sorted((extent.first_byte or 0, extent.needed_nbytes or 0) for extent in extents):
            first, last = max(first, end), min(last, self.nbytes)
            if last > first:
                reached += last - first
                end = last
        return self.nbytes - reached, exact


def parts(record: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Answer a tensor that has memory, or those that have it and that it is made of, each after the roles to it.

    Native records and those of the model alike.
    """
    if record.kind in WITH_MEMORY or not record.inner:
        yield path, record
    for inner in record.inner:
        role, part = inner if type(inner) is tuple else (inner.role, inner.record)
        yield from parts(part, f"{path}.{role}")


def region(record: Any, origin: int = 0) -> tuple[Any, ...] | None:
    """Answer what C.overlap_of() takes, where a record's bytes lie in its own storage; native records do as well.

    Args:
        record: the record.
        origin: address that byte offsets count from; 0 for the storage's own beginning.
    """
    impl, extent = record.impl, record.extent
    if record.kind not in WITH_MEMORY or extent is None or extent.needed_nbytes is None or impl.stride is None:
        return None
    start = record.data.pointer - origin if origin else 0
    return impl.shape, impl.stride, impl.storage_offset, impl.itemsize, start


def array_region(array: ArrayRecord, origin: int) -> tuple[Any, ...]:
    """Answer what C.overlap_of() takes: an array's strides are bytes, so that its elements are a dimension of bytes."""
    steps = sum(abs(step) * (size - 1) for size, step in zip(array.shape, array.stride_bytes, strict=True))
    itemsize = array.end - array.begin - steps  # what is left of its extent past its steps
    return (*array.shape, itemsize), (*array.stride_bytes, 1), 0, 1, array.pointer - origin


def storages_of(records: Iterable[TensorRecord], coverage: Coverage | None = None) -> dict[int, StorageUse]:
    """Answer every storage that has memory, by its address, in the order they are met.

    Args:
        records: the tensors.
        coverage: counts bytes by sizes and strides, as C.coverage_of() does; without it, ranges are taken.
    """
    found: dict[int, StorageUse] = {}
    for record in records:
        for _, part in parts(record):
            storage = part.storage
            if storage is None or not isinstance(storage.nbytes, int):
                continue
            if part.data is None or (part.data.pointer == 0 and storage.nbytes > 0):  # meta: no bytes behind it
                continue
            use = found.get(storage.address)
            if use is None:
                use = found[storage.address] = StorageUse(storage.address, storage.nbytes, coverage)
            use.add(part)
    return found
