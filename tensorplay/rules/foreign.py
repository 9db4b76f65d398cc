"""TP104-TP109: memory that PyTorch does not own, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensorplay.arrays import Lender
from tensorplay.layers import WITH_MEMORY, Finding, TensorRecord
from tensorplay.rules.registry import Rule, SceneRule
from tensorplay.scene import Mapping, Scene, Subject
from tensorplay.words import bytes_text, describe, plural

__all__ = ["BorrowedMemory", "MappedReadOnly", "NotMapped", "OwnerMoved", "ProducerNotWriteable"]

_DATA = "c10/core/Allocator.h DataPtr"
_MAPS = "/proc/self/maps"
_MAKERS = {
    "numpy": "NumPy, through torch.from_numpy() or torch.as_tensor()",
    "frombuffer": "a Python buffer, through torch.frombuffer()",
    "dlpack": "another library, through torch.from_dlpack()",
}


class BorrowedMemory(Rule):
    """The tensor's memory belongs to somebody else: NumPy, a Python buffer, another library, C++ code.

    ## What it checks

    Which function frees the memory. PyTorch's own memory is freed by its allocators; what came from outside carries a
    callable, whose C++ type names the way in: `from_numpy`, `frombuffer`, DLPack, or the user's own `from_blob`. A
    `from_blob` without a deleter has none at all: nobody here keeps the memory alive.

    ## Why it matters

    A write on one side is seen on the other. The storage cannot grow: `resize_()` raises. And the memory lives only as
    long as its owner keeps it: with `from_blob` and no deleter that is nobody's promise.

    ## Known limits

    A fact, not a fault: sharing memory is what these functions are for. A storage that cannot be resized is no proof of
    foreign memory, `.numpy()` makes PyTorch's own storages so. Memory of another device is told by the same callable.

    ## Example

    ```python
    array = numpy.zeros(4)
    x = torch.from_numpy(array)
    ```

    ## Use instead

    ```python
    array = numpy.zeros(4)
    x = torch.tensor(array)
    ```

    ## Fix safety

    `clone()` copies the visible bytes into PyTorch's own memory; writes then no longer reach the other side.

    ## Sources

    c10/core/Allocator.h (`DataPtr`), torch/csrc/utils/tensor_numpy.cpp, torch/csrc/utils/tensor_new.cpp,
    ATen/DLConvertor.cpp, torch 2.13 and 2.14.
    """

    code = "TP104"

    def suspects(self, record: Any) -> bool:
        """Look at who frees the memory."""
        data = record.data
        if data is None or data.origin not in ("borrowed", "callback"):  # a null pointer's origin is none
            return False
        return record.kind in WITH_MEMORY and record.extent is not None and bool(record.extent.nbytes)

    def findings(self, records: Sequence[TensorRecord]) -> Iterator[Finding]:
        """Explain one finding a way in."""
        groups: dict[tuple[str, str | None], list[TensorRecord]] = {}
        for record in records:
            assert record.data is not None
            groups.setdefault((record.data.origin, record.data.maker), []).append(record)
        for (origin, maker), group in groups.items():
            record = group[0]
            assert record.data is not None and record.storage is not None
            owner = _MAKERS.get(maker or "", "C++ code, through from_blob()")
            kept = record.data.producer_type or "a callback"
            yield self.finding(
                record.name,
                headline=f"memory of {owner}",
                subject=_and_more(record, group),
                evidence={
                    "origin": origin,
                    "maker": maker,
                    "producer": record.data.producer,
                    "producer_type": record.data.producer_type,
                    "read_only": record.data.read_only,
                    "resizable": record.storage.resizable,
                    "storage_nbytes": record.storage.nbytes,
                    "tensors": [r.name for r in group],
                },
                why=(
                    "nobody here keeps this memory alive: it is valid only while its owner in C++ keeps it"
                    if origin == "borrowed"
                    else f"it is shared: a write here is seen there, and the reverse; {kept} keeps it alive"
                ),
                fix="nothing, if the sharing is meant; else clone()",
                source=f"read: {_DATA}",
            )


def _and_more(record: TensorRecord, group: Sequence[Any]) -> str:
    return describe(record) + (f", and {plural(len(group) - 1, 'more tensor')}" if len(group) > 1 else "")


def _by_storage(subjects: Iterator[tuple[Subject, Any]]) -> list[tuple[list[Subject], Any]]:
    """Group by storage: what happened to its memory happened once."""
    groups: dict[int, tuple[list[Subject], Any]] = {}
    for subject, fact in subjects:
        group, _ = groups.setdefault(subject.record.storage.address, ([], fact))
        group.append(subject)
    return list(groups.values())


class MappedReadOnly(SceneRule):
    """The tensor's memory is mapped read-only: the first write ends the process.

    ## What it checks

    The permissions of the mappings that hold the tensor's bytes, as the kernel lists them. PyTorch has no read-only
    tensors: whatever it is given it takes for writable.

    ## Why it matters

    A write to such a page ends the process with SIGSEGV, without an exception and without a traceback. It may come from
    far away: a normalisation in place, an optimizer's step, `pin_memory`, a C++ kernel.

    ## Known limits

    Only CPU memory, and only in `check`: reading the map takes half a millisecond. An array that NumPy merely flags as
    not writeable lies in ordinary memory: that is TP106. Pages that are readable now and writable later are not known.

    ## Example

    ```python
    numpy.save("weights.npy", numpy.zeros(4))
    x = torch.from_numpy(numpy.load("weights.npy", mmap_mode="r"))
    ```

    ## Use instead

    ```python
    numpy.save("weights.npy", numpy.zeros(4))
    x = torch.from_numpy(numpy.load("weights.npy", mmap_mode="c"))
    ```

    ## Fix safety

    Mode `c` maps the same file privately: a write makes a copy of its page, the file is never changed. `clone()` copies
    all bytes into memory.

    ## Sources

    /proc/self/maps (proc_pid_maps(5)), c10/core/StorageImpl.h (`data_ptr_`), torch 2.13 and 2.14.
    """

    code = "TP105"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding a storage."""
        writeable = {lent.record.address: lent.record.writeable for lent in scene.arrays}
        for group, mapping in _by_storage(self._read_only(scene)):
            record = group[0].model()
            assert record.data is not None and record.storage is not None
            where = f"a file mapping of {mapping.path}" if mapping.path.startswith("/") else "a mapping"
            evidence = {
                "mapped_now": True,
                "map_permissions": mapping.permissions,
                "map_path": mapping.path or None,
                "file_backed": mapping.path.startswith("/"),
                "data_ptr": record.data.data_ptr,
                "storage_nbytes": record.storage.nbytes,
                "tensors": [subject.read.name for subject in group],
            }
            if record.data.producer in writeable:
                evidence["numpy_writeable"] = writeable[record.data.producer]
            yield self.finding(
                record.name,
                headline="a write to this tensor ends the process: its memory is mapped read-only",
                subject=f"{_and_more(record, group)} in {where} with permissions {mapping.permissions}",
                evidence=evidence,
                why="PyTorch knows no read-only tensors; the processor does, and answers a write with SIGSEGV",
                fix="map it privately, numpy.load(..., mmap_mode='c') or shared=False, or clone() it before any write",
                source=f"read: {_MAPS}; {_DATA}",
            )

    def _read_only(self, scene: Scene) -> Iterator[tuple[Subject, Mapping]]:
        for subject in scene.subjects:
            span = subject.span
            for mapping in (scene.mappings(span) if span else None) or ():
                if mapping.permissions[:2] == "r-":
                    yield subject, mapping
                    break


class ProducerNotWriteable(SceneRule):
    """The array that the tensor shares its memory with is not writeable.

    ## What it checks

    Whether an array among the objects, which lends a tensor its memory, has NumPy's `writeable` flag off. That it is
    the tensor's own producer is read from the tensor's deleter, not guessed from addresses.

    ## Why it matters

    PyTorch ignores the flag: `from_numpy` warns once, `from_dlpack` says nothing. A write through the tensor then
    changes an array that its owner took for constant: a cached dataset, an immutable array of another library.

    ## Known limits

    Only `check` knows of arrays, and only those it was given or that what it was given holds. Memory that the kernel
    maps read-only is TP105, and is not reported twice. A view without the flag over a writeable array is nobody's
    constant, unless the view itself is among the objects.

    ## Example

    ```python
    array = numpy.arange(4.0)
    array.flags.writeable = False
    x = torch.from_dlpack(array)
    ```

    ## Use instead

    ```python
    array = numpy.arange(4.0)
    array.flags.writeable = False
    x = torch.from_dlpack(array, copy=True)
    ```

    ## Fix safety

    A copy costs the bytes of the tensor once; the array is then out of reach.

    ## Sources

    torch/csrc/utils/tensor_numpy.cpp, ATen/DLConvertor.cpp (the callable's captured producer), NumPy's `flags`, torch
    2.13 and 2.14.
    """

    code = "TP106"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding an array."""
        constant = {lent.record.address: lent.record for lent in scene.arrays if not lent.record.writeable}
        groups: dict[int, list[Subject]] = {}
        for subject in scene.subjects if constant else ():
            span = subject.span
            array = next((constant[i] for i in subject.read.lenders(subject.record) if i in constant), None)
            if array is None and span and subject.record.data.read_only:
                # DLPack's producer may be a view that nobody handed in; it says itself that it is constant.
                over = (a for a in constant.values() if a.begin <= span[0] and span[1] <= a.end)
                array = next(over, None)
            mapped = (scene.mappings(span) if span else None) or []
            if array is not None and span and all("w" in mapping.permissions for mapping in mapped):
                groups.setdefault(array.address, []).append(subject)
        for address, group in groups.items():
            record, array = group[0].model(), constant[address]
            assert record.data is not None and record.storage is not None
            yield self.finding(
                record.name,
                headline=f"{array.name}, whose memory this tensor shares, is not writeable",
                subject=f"{_and_more(record, group)} over {array.name}, {array.type} {array.dtype}{list(array.shape)}",
                evidence={
                    "producer": array.address,
                    "producer_name": array.name,
                    "producer_writeable": False,
                    "same_address": record.data.data_ptr == array.pointer,
                    "maker": record.data.maker,
                    "resizable": record.storage.resizable,
                    "tensors": [subject.read.name for subject in group],
                },
                why="PyTorch ignores the flag: a write through the tensor changes the array",
                fix="copy it on the way in: torch.tensor(array), from_dlpack(array, copy=True), or clone()",
                source=f"read: {_DATA}, its callable's producer; numpy.ndarray.flags",
            )


class NotMapped(SceneRule):
    """The tensor's bytes lie at addresses where this process has no memory.

    ## What it checks

    Whether readable mappings cover all bytes from the first to the last one the tensor reaches. The map is read after
    the tensor, and the tensor's bytes are never touched.

    ## Why it matters

    Reading one element ends the process with SIGSEGV. It comes from memory whose owner gave it back: a `mmap` that was
    closed under `torch.frombuffer`, a C++ buffer under `from_blob`, a library that unloaded.

    ## Known limits

    Only CPU memory, and only in `check` and `verify_data_ptr_consistency`. Memory that was freed and is still mapped,
    or mapped again by somebody else, looks valid here: the heap keeps most of what is freed. A tensor that reaches past
    its own storage is TP102.

    ## Example

    ```python
    memory = mmap.mmap(-1, 4096)
    x = torch.frombuffer(memory, dtype=torch.float32, count=8)
    memory.close()
    ```

    ## Use instead

    ```python
    memory = mmap.mmap(-1, 4096)
    x = torch.from_numpy(numpy.frombuffer(memory, dtype=numpy.float32, count=8))
    ```

    ## Fix safety

    The bytes are gone. NumPy holds the buffer's export, so that closing it is refused while the tensor lives; `clone()`
    while the buffer is open copies them.

    ## Sources

    /proc/self/maps (proc_pid_maps(5)), c10/core/StorageImpl.h (`data_ptr_`, `size_bytes_`), torch 2.13 and 2.14.
    """

    code = "TP107"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding a storage."""
        for group, first in _by_storage(self._not_mapped(scene)):
            record = group[0].model()
            assert record.data is not None and record.storage is not None and record.extent is not None
            span = group[0].span
            assert span is not None
            held = f"; it borrows the memory of a {record.data.producer_type}" if record.data.producer_type else ""
            yield self.finding(
                record.name,
                headline="the tensor's address is in no readable mapping of this process",
                subject=f"{_and_more(record, group)}, {bytes_text(record.extent.nbytes)} at {span[0]:#x}",
                evidence={
                    "mapped_now": False,
                    "first_missing": first,
                    "data_ptr": record.data.data_ptr,
                    "storage_nbytes": record.storage.nbytes,
                    "resizable": record.storage.resizable,
                    "maker": record.data.maker,
                    "producer_type": record.data.producer_type,
                    "tensors": [subject.read.name for subject in group],
                },
                why=f"reading it ends the process with SIGSEGV{held}",
                fix="keep the owner open, clone() before it closes, or go through NumPy, which keeps the buffer open",
                source=f"read: {_MAPS}; {_DATA}",
            )

    def _not_mapped(self, scene: Scene) -> Iterator[tuple[Subject, int]]:
        for subject in scene.subjects:
            span = subject.span
            mappings = scene.mappings(span) if span else None
            if span is None or mappings is None:
                continue
            if (first := first_missing(span, mappings)) is not None:
                yield subject, first


def first_missing(span: tuple[int, int], mappings: Sequence[Mapping]) -> int | None:
    """Answer the first address of a span that no readable mapping holds, or None."""
    reached = span[0]
    for mapping in mappings:
        if mapping.begin > reached or mapping.permissions[0] != "r":
            break
        reached = mapping.end
        if reached >= span[1]:
            return None
    return reached


class OwnerMoved(SceneRule):
    """An array or a tensor looks at memory that its owner moved or freed.

    ## What it checks

    Who lends the memory, as the borrower itself names it: the base of an array, the producer in a tensor's deleter.
    Then, where the lender's bytes are now. The borrower's address outside of them is a dangling alias.

    ## Why it matters

    Both sides keep the owner's object alive, not its block of memory. `share_memory_()`, or sending the tensor through
    a queue or a DataLoader, moves the storage's bytes to shared memory and frees the old ones; an array made with
    `.numpy()` before that reads whatever comes to lie there. The reverse: `resize()` of an array or a bytearray under a
    tensor.

    ## Known limits

    Lenders that are known: tensors, arrays, bytearray, bytes, mmap and array.array, through any number of hands. What
    went through DLPack, or a memoryview that was released, cannot be followed. Where a tensor among the objects has the
    bytes now, it is named. An address in no mapping is TP107.

    ## Example

    ```python
    x = torch.zeros(8)
    array = x.numpy()
    x.share_memory_()
    ```

    ## Use instead

    ```python
    x = torch.zeros(8).share_memory_()
    array = x.numpy()
    ```

    ## Fix safety

    Make the borrower anew from the owner: the owner's bytes were copied when it moved, nothing is lost.

    ## Sources

    NumPy's `base`, torch/csrc/utils/tensor_numpy.cpp, c10/core/StorageImpl.h (`data_ptr_`), torch 2.13 and 2.14.
    """

    code = "TP109"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding a borrower."""
        yield from self._arrays(scene)
        yield from self._tensors(scene)

    def _arrays(self, scene: Scene) -> Iterator[Finding]:
        for lent in scene.arrays:
            array, owner = lent.record, lent.owner
            span = (array.begin, array.end)
            lost = None if owner is None or array.begin == array.end else owner.lost(span)
            if lost is None:
                continue
            tensor = None if lost.tensor is None else lost.tensor.storage
            yield self.finding(
                array.name,
                headline=f"the array looks at memory that its owner, a {lost.type}, {_what_happened(lost, span)}",
                subject=(
                    f"{array.type} {array.dtype}{list(array.shape)} at {array.pointer:#x}; "
                    f"the {lost.type} has {_now(lost.begin, lost.end)}{_strangers(scene, span)}"
                ),
                evidence={
                    "array_points_at_tensor": False,
                    "array_pointer": array.pointer,
                    "owner": array.owner,
                    "owner_type": lost.type,
                    "owner_begin": lost.begin,
                    "owner_end": lost.end,
                    "storage_nbytes": None if tensor is None else tensor.nbytes,
                    "owner_is_shared": tensor is not None and tensor.shared_memory is not None,
                    "mapped_now": first_missing(span, scene.mappings(span) or []) is None,
                    "belongs_now_to": scene.owners_of(span),
                },
                why="it keeps its owner's object alive, not the block of memory that it points at: dangling alias",
                fix="make the array anew; call share_memory_() before .numpy(), or copy()",
                source="read: numpy.ndarray.base; c10/core/StorageImpl.h data_ptr_, size_bytes_",
            )

    def _tensors(self, scene: Scene) -> Iterator[Finding]:
        for group, lost in _by_storage(self._moved_under(scene)):
            record, span = group[0].model(), group[0].span
            assert record.data is not None and record.storage is not None and span is not None
            yield self.finding(
                record.name,
                headline=f"the tensor looks at memory that its owner, a {lost.type}, {_what_happened(lost, span)}",
                subject=(
                    f"{_and_more(record, group)}; the {lost.type} has {_now(lost.begin, lost.end)}"
                    f"{_strangers(scene, span)}"
                ),
                evidence={
                    "tensor_points_at_producer": False,
                    "data_ptr": record.data.data_ptr,
                    "storage_nbytes": record.storage.nbytes,
                    "owner_type": lost.type,
                    "owner_begin": lost.begin,
                    "owner_end": lost.end,
                    "maker": record.data.maker,
                    "mapped_now": True,
                    "belongs_now_to": scene.owners_of(span),
                    "tensors": [subject.read.name for subject in group],
                },
                why="it keeps its owner's object alive, not the block of memory that it points at: dangling alias",
                fix=f"make the tensor anew from the {lost.type}; copy it where the {lost.type} will grow or close",
                source=f"read: {_DATA}, its callable's producer; the producer's buffer",
            )

    def _moved_under(self, scene: Scene) -> Iterator[tuple[Subject, Any]]:
        for subject in scene.subjects:
            owner, span = subject.read.producer, subject.span
            if owner is None or span is None or subject.record is not subject.read.record:
                continue
            lost = owner.lost(span)
            mappings = scene.mappings(span) if lost is not None else None
            if lost is None or (mappings is not None and first_missing(span, mappings) is not None):
                continue  # in no mapping: TP107
            yield subject, lost


def _what_happened(lost: Lender, span: tuple[int, int]) -> str:
    if lost.begin is not None and lost.end is not None and lost.begin <= span[0] <= lost.end:
        return "shrank"
    return "moved or freed"


def _strangers(scene: Scene, span: tuple[int, int]) -> str:
    names = scene.owners_of(span)
    return f"; these bytes belong to {names[0]} now: a write goes there" if names else ""


def _now(begin: int | None, end: int | None) -> str:
    if begin is None or end is None:
        return "no memory any more"
    return f"its {bytes_text(end - begin)} at {begin:#x}"
