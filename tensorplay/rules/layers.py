"""TP1xx: what the four layers of one tensor say against each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tensorplay.layers import Finding, TensorRecord
from tensorplay.rules.registry import DeviceRule, PairRule, Rule
from tensorplay.words import bytes_text, describe, device_type, plural, same_device

if TYPE_CHECKING:  # a rule explains itself also where the extension does not load
    from tensorplay.placement import Placement

__all__ = ["DevicesDisagree", "NullPointerWithBytes", "NullPointersEqual", "ReachesPastStorage"]

_TENSOR_IMPL = "c10/core/TensorImpl.h"
_STORAGE_IMPL = "c10/core/StorageImpl.h"
# Kinds made by design without memory, or with labels of two devices.
_WITHOUT_MEMORY = frozenset({"meta", "fake", "zerotensor", "wrapper_subclass", "nested_jagged", "functional"})


def _by_storage(records: Iterable[TensorRecord]) -> Iterator[list[TensorRecord]]:
    groups: dict[int, list[TensorRecord]] = {}
    for record in records:
        if record.storage is not None:
            groups.setdefault(record.storage.address, []).append(record)
    yield from groups.values()


class DevicesDisagree(Rule, DeviceRule):
    """The impl, the key set, the DataPtr and the allocator name different devices; or a tensor and what belongs to it.

    ## What it checks

    Four device facts of one tensor that PyTorch keeps in four places: the impl's own label (`device_opt_`), the
    backend bits of its key set, the label of the storage's DataPtr, and the device type its allocator is registered
    for. They are read from the fields; `x.device` is not asked, since a subclass may answer it in Python.

    Besides, for audit_device_consistency() and check(), the device of a tensor against that of its gradient, and of
    the base that it is a view of. A DTensor beside its local tensor is TP410 to TP423.

    ## Why it matters

    The key set decides whose kernels run, the pointer decides what they read. With CPU keys over device memory the
    CPU dereferences a device address; with Meta keys over real memory results are never written. PyTorch checks
    neither: `x.device` looks right.

    ## Known limits

    Kinds that carry two devices by design are exempt: FakeTensor, wrapper subclasses, jagged nested tensors,
    functional wrappers, tensors without storage. Whose the memory really is, TP110 asks the driver.
    Where one of two labels has no index (`cuda` beside `cuda:0`), only the types are compared.

    ## Example

    ```python
    class Tagged(torch.Tensor):
        pass

    x = torch.Tensor._make_subclass(Tagged, torch.ones(3), False, device_for_backend_keys=torch.device("meta"))
    ```

    ## Use instead

    ```python
    class Tagged(torch.Tensor):
        pass

    x = torch.ones(3).as_subclass(Tagged)
    ```

    ## Fix safety

    Making the tensor anew on the device wanted copies its bytes; nothing else is changed.

    ## Sources

    c10/core/TensorImpl.h (`device_opt_`, `key_set_`), c10/core/StorageImpl.h (`data_ptr_`, `allocator_`),
    c10/core/Allocator.h (`GetAllocator`), torch 2.13 and 2.14.
    """

    code = "TP101"

    def suspects(self, record: Any) -> bool:
        """Compare the four device facts."""
        data = record.data
        if data is None:
            return False
        impl = record.impl
        device, backend, label = impl.device, impl.backend, data.device
        allocator = record.storage.allocator_device
        if device == label == backend and (allocator is None or allocator == label):
            return False
        return bool(device_conflicts(record.kind, device, backend, label, allocator))

    def findings(self, records: Sequence[TensorRecord]) -> Iterator[Finding]:
        """Explain one finding a cause: tensors whose labels disagree in the same way."""
        groups: dict[tuple[str, ...], list[TensorRecord]] = {}
        for record in records:
            groups.setdefault(tuple(_conflicts_of(record)), []).append(record)
        for conflicts, group in groups.items():
            record = group[0]
            assert record.storage is not None and record.data is not None
            also = f", and {plural(len(group) - 1, 'more tensor')} in the same way" if len(group) > 1 else ""
            yield self.finding(
                record.name,
                headline=f"device facts disagree: {conflicts[0]}",
                subject=f"{describe(record)}{also}",
                evidence={
                    "impl_device": record.impl.device,
                    "key_device": record.impl.backend,
                    "data_device": record.data.device,
                    "allocator_device": record.storage.allocator_device,
                    "allocator": record.storage.allocator,
                    "keys": list(record.impl.keys),
                    "kind": record.kind,
                    "conflicts": list(conflicts),
                    "tensors": [r.name for r in group],
                },
                why=(
                    "the key set chooses the kernels, the DataPtr the memory they touch: when the two are of different "
                    "devices, kernels read addresses that are not theirs, or write nothing"
                ),
                fix=(
                    f"make it anew there: torch.empty(shape, device={record.data.device!r}).copy_(source), "
                    "and find who set the device of one layer alone: a C++ extension, or "
                    "_make_subclass(device_for_backend_keys=)"
                ),
                source=f"read: {_TENSOR_IMPL} device_opt_, key_set_; {_STORAGE_IMPL} data_ptr_, allocator_",
            )

    def in_placement(self, placement: Placement) -> Iterator[Finding]:
        """Explain one finding for all tensors that are beside theirs in the same way."""
        beside_theirs = (
            group for group in placement.of("gradient", "base") if group.is_elsewhere and group.kind != "fake"
        )
        for group, members in placement.by_group(beside_theirs):
            beside = " or ".join(group.around)
            what = _BESIDE[group.role]
            also = f", and {plural(group.tensors - 1, 'more tensor')} in the same way" if group.tensors > 1 else ""
            first = members[0].record
            yield self.finding(
                members[0].path,
                headline=f"device facts disagree: {what} is on {group.device}, the tensor on {beside}",
                subject=f"{'a tensor' if first is None else describe(first)}{also}",
                evidence={
                    "role": group.role,
                    "device": group.device,
                    "tensor_device": beside,
                    "tensors": [member.path for member in members],
                },
                why=_BESIDE_WHY[group.role],
                fix=_BESIDE_FIX[group.role],
                source=f"read: {_TENSOR_IMPL} device_opt_ of both; torch/csrc/autograd/variable.h",
            )


_BESIDE = {
    "gradient": "the gradient",
    "base": "the base of a view",
}
_BESIDE_WHY = {
    "gradient": "PyTorch checks this where .grad is set, not where .data of either is: the next step raises, or adds "
    "up on the wrong device",
    "base": "the view was made before `.data` of its base was replaced: it shows the old memory, and writes to it "
    "reach nobody",
}
_BESIDE_FIX = {
    "gradient": "move both: optimizer.zero_grad() before the move, or p.grad = p.grad.to(p.device)",
    "base": "make the view again after the move",
}


def _conflicts_of(record: TensorRecord) -> list[str]:
    assert record.storage is not None and record.data is not None
    impl = record.impl
    return device_conflicts(record.kind, impl.device, impl.backend, record.data.device, record.storage.allocator_device)


def device_conflicts(
    kind: str, device: str | None, backend: str | None, label: str, allocator: str | None
) -> list[str]:
    """Say where the four facts disagree, in words; nothing for a kind that carries two devices by design."""
    if kind in _WITHOUT_MEMORY and kind != "meta":
        return []
    conflicts = []
    if device is not None and not same_device(device, label):
        conflicts.append(f"the impl says {device}, its DataPtr {label}")
    if backend is not None and device is not None and device_type(device) != backend:
        conflicts.append(f"the key set computes on {backend}, the impl says {device}")
    if allocator is not None and device_type(label) != allocator:
        conflicts.append(f"the DataPtr says {label}, its allocator serves {allocator}")
    return conflicts


class ReachesPastStorage(Rule):
    """The tensor's last element lies past the end of its storage.

    ## What it checks

    From sizes, strides and offset, the exact byte after the last element reached, against the bytes the storage has.
    Nothing is read from the memory itself.

    ## Why it matters

    `untyped_storage().resize_()` does not know which views are alive: they keep their shape and strides. Reading one
    then returns foreign bytes or ends the process, without a Python exception. After `resize_(0)` the pointer is null,
    and `data_ptr()` answers null plus the offset, which does not even look like a null pointer.

    ## Known limits

    Meta and fake tensors are passed over: they have no bytes to read. Symbolic sizes are not compared. A storage that
    says it has more bytes than were allocated is not found out here.

    ## Example

    ```python
    flat = torch.arange(8.0)
    view = flat[2:6]
    flat.untyped_storage().resize_(0)
    ```

    ## Use instead

    ```python
    flat = torch.arange(8.0)
    view = flat[2:6].clone()
    del flat
    ```

    ## Fix safety

    `clone()` before the storage shrinks copies the visible bytes and is safe; growing the storage back makes the view
    readable again, with undefined contents.

    ## Sources

    c10/core/StorageImpl.h (`size_bytes_`), c10/core/TensorImpl.h (`sizes_and_strides_`, `storage_offset_`), torch 2.13
    and 2.14.
    """

    code = "TP102"

    def suspects(self, record: Any) -> bool:
        """Compare the bytes needed with the bytes there are."""
        extent = record.extent
        return extent is not None and bool(extent.out_of_bounds) and record.kind not in _WITHOUT_MEMORY

    def findings(self, records: Sequence[TensorRecord]) -> Iterator[Finding]:
        """Explain one finding a storage: it shrank once."""
        for group in _by_storage(records):
            record = group[0]
            assert record.extent is not None and record.data is not None and record.storage is not None
            needed, has = record.extent.needed_nbytes, record.extent.storage_nbytes
            assert needed is not None and has is not None
            also = f", and {len(group) - 1} more over this storage" if len(group) > 1 else ""
            emptied = has == 0
            yield self.finding(
                record.name,
                headline="the tensor reaches past its storage",
                subject=(
                    f"{describe(record)} needs {bytes_text(needed)} of a storage of {bytes_text(has)}: "
                    f"out of bounds by {bytes_text(needed - has)}{also}"
                ),
                evidence={
                    "storage_nbytes": has,
                    "needed_nbytes": needed,
                    "first_byte": record.extent.first_byte,
                    "out_of_bounds": True,
                    "storage_pointer": record.data.pointer,
                    "data_ptr": record.data.data_ptr,
                    "storage": record.storage.address,
                    "tensors": [
                        {"name": r.name, "needed_nbytes": r.extent.needed_nbytes} for r in group if r.extent is not None
                    ],
                },
                why=(
                    "its storage was resized to 0 bytes while this tensor was alive; data_ptr() is null + offset, and "
                    "reading it ends the process"
                    if emptied
                    else "its storage shrank while this tensor was alive, or its geometry was set larger than "
                    "the storage; reading it returns foreign bytes or ends the process, without an exception"
                ),
                fix=(
                    "use it only while its storage is filled (FSDP: while the parameter is unsharded), or clone() it "
                    "before the storage is released"
                    if emptied
                    else f"grow the storage back first, untyped_storage().resize_({needed}), or make a new view of "
                    "the tensor that is left"
                ),
                source=f"read: {_STORAGE_IMPL} size_bytes_; {_TENSOR_IMPL} sizes_and_strides_, storage_offset_",
            )


class NullPointerWithBytes(Rule):
    """The storage claims bytes, its pointer is null, and the tensor has elements to read.

    ## What it checks

    Data pointer 0 where the tensor has elements and its storage says it has the bytes for them.

    ## Why it matters

    Any kernel that touches such a tensor dereferences null. It arises from C++ code that wraps a failed allocation or
    a moved-from buffer with `from_blob`, and from a DataPtr that was released while its tensor lived on.

    ## Known limits

    A null pointer proves nothing by itself: tensors without elements, meta, fake and zero tensors, and wrapper
    subclasses have one by design and are passed over. A storage of 0 bytes is TP102.

    ## Example

    ```python
    storage = torch._C._construct_storage_from_data_pointer(0, torch.device("cpu"), 16)
    x = torch.empty(0)
    x.set_(storage, 0, (4,))
    ```

    ## Use instead

    ```python
    source = torch.zeros(4)
    storage = torch._C._construct_storage_from_data_pointer(source.data_ptr(), torch.device("cpu"), 16)
    x = torch.empty(0)
    x.set_(storage, 0, (4,))
    ```

    ## Fix safety

    There is nothing to rescue: make the tensor anew from the source of its data.

    ## Sources

    c10/core/StorageImpl.h (`data_ptr_`, `size_bytes_`), torch 2.13 and 2.14.
    """

    code = "TP103"

    def suspects(self, record: Any) -> bool:
        """Look for a null pointer that should not be one."""
        data = record.data
        if data is None or data.pointer != 0:
            return False
        extent = record.extent
        if extent is None or extent.nbytes == 0 or record.kind in _WITHOUT_MEMORY:
            return False
        return extent.out_of_bounds is False and not record.storage.throws_on_read

    def findings(self, records: Sequence[TensorRecord]) -> Iterator[Finding]:
        """Explain one finding a storage."""
        for group in _by_storage(records):
            record = group[0]
            assert record.storage is not None and record.data is not None and record.extent is not None
            yield self.finding(
                record.name,
                headline="null pointer with bytes to read",
                subject=f"{describe(record)} over a storage of {bytes_text(record.storage.nbytes)} at address 0",
                evidence={
                    "storage_pointer": 0,
                    "storage_nbytes": record.storage.nbytes,
                    "needed_nbytes": record.extent.needed_nbytes,
                    "nbytes": record.extent.nbytes,
                    "origin": record.data.origin,
                    "deleter": record.data.deleter,
                    "tensors": [r.name for r in group],
                },
                why="every read of an element dereferences a null pointer and ends the process",
                fix=(
                    "make the tensor anew from the source of its data; look for the C++ code that wrapped a null or "
                    "moved-from buffer"
                ),
                source=f"read: {_STORAGE_IMPL} data_ptr_, size_bytes_",
            )


class NullPointersEqual(PairRule):
    """Two tensors answer the same data pointer, 0, and have two storages.

    ## What it checks

    Two tensors that compare() is given: both data pointers are null, and their StorageImpls are two.

    ## Why it matters

    Frameworks compare `data_ptr()` or `untyped_storage().data_ptr()` to find out whether a tensor was replaced. A meta
    tensor, a tensor without elements and a wrapper, as torch's own DTensor is, all answer 0: a shard without elements
    on a real device looks like the one on meta that it replaced, and stays behind.

    ## Known limits

    A fact, hence info: whether anybody compares these pointers is not known. Only in `compare`.

    ## Example

    ```python
    old = torch.empty(0, 4, device="meta")
    new = torch.empty(0, 4)
    tp.compare(old, new)
    ```

    ## Use instead

    ```python
    old = torch.empty(1, 4, device="meta")
    new = torch.empty(1, 4)
    tp.compare(old, new)
    ```

    ## Fix safety

    Comparing StorageImpls, `a.untyped_storage()._cdata == b.untyped_storage()._cdata`, changes nothing.

    ## Sources

    c10/core/StorageImpl.h (`data_ptr_`), c10/core/TensorImpl.h (`data()`), torch 2.13 and 2.14.
    """

    code = "TP112"

    def of_pair(self, a: TensorRecord, b: TensorRecord) -> Finding | None:
        """Explain two null pointers over two storages."""
        if a.storage is None or b.storage is None or a.data is None or b.data is None:
            return None
        if a.data.pointer or b.data.pointer or a.storage.address == b.storage.address:
            return None
        devices = f"{a.impl.device} and {b.impl.device}"
        where = f"devices {devices}" if a.impl.device != b.impl.device else f"both on {a.impl.device}"
        return self.finding(
            b.name,
            headline=f"not the same storage, though both pointers are 0: {where}",
            subject=f"{describe(b)} on {b.impl.device} beside {a.name}  {describe(a)} on {a.impl.device}",
            evidence={
                "really_same": False,
                "pointers_equal": True,
                "old_device": a.impl.device,
                "new_device": b.impl.device,
                "storages": [a.storage.address, b.storage.address],
                "numel": [a.impl.numel, b.impl.numel],
                "tensors": [a.name, b.name],
            },
            why="both pointers are 0 because nothing is allocated there; the StorageImpls differ",
            fix="compare StorageImpls, untyped_storage()._cdata, and take a pointer of 0 for no address",
            source=f"read: {_STORAGE_IMPL} data_ptr_, both addresses",
        )
