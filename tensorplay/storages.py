"""Who lies in which storage, and how much of it nobody reaches: arithmetic over records, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tensorplay.layers import WITH_MEMORY, Extent, TensorRecord

__all__ = ["StorageUse", "parts", "storages_of"]


class StorageUse:
    """A storage and what reaches into it."""

    __slots__ = ("_reached", "_wasted", "address", "names", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.names: dict[str, None] = {}
        """Of the tensors over it, each once, in order."""
        self._reached: list[Extent] = []
        self._wasted: tuple[int, bool] | None = None

    def add(self, record: TensorRecord) -> None:
        """Note one tensor over it."""
        self.names[record.name] = None
        self._wasted = None
        if record.extent is not None and record.extent.needed_nbytes:
            self._reached.append(record.extent)

    def wasted(self) -> tuple[int, bool]:
        """Answer how many bytes no tensor reaches, and whether that is exact or the least it can be."""
        if self._wasted is None:
            self._wasted = self._count()
        return self._wasted

    def _count(self) -> tuple[int, bool]:
        if len(self._reached) == 1 and (visible := self._reached[0].visible_nbytes) is not None:
            return max(0, self.nbytes - visible), True
        exact = all(extent.contiguous or extent.non_overlapping_and_dense for extent in self._reached)
        reached = end = 0
        for first, last in sorted((extent.first_byte or 0, extent.needed_nbytes or 0) for extent in self._reached):
            first, last = max(first, end), min(last, self.nbytes)
            if last > first:
                reached += last - first
                end = last
        return self.nbytes - reached, exact


def parts(record: TensorRecord) -> Iterator[TensorRecord]:
    """Answer a tensor that has memory, or those that have it and that it is made of."""
    if record.kind in WITH_MEMORY or not record.inner:
        yield record
    for inner in record.inner:
        yield from parts(inner.record)


def storages_of(records: Iterable[TensorRecord]) -> dict[int, StorageUse]:
    """Answer every storage that has memory, by its address, in the order they are met."""
    found: dict[int, StorageUse] = {}
    for record in records:
        for part in parts(record):
            storage = part.storage
            if storage is None or not isinstance(storage.nbytes, int):
                continue
            if part.data is None or (part.data.pointer == 0 and storage.nbytes > 0):  # meta: no bytes behind it
                continue
            use = found.get(storage.address)
            if use is None:
                use = found[storage.address] = StorageUse(storage.address, storage.nbytes)
            use.add(part)
    return found
