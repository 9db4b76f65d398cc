"""What differs between records, and what two tensors of one moment have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import msgspec

from tensorplay.layers import WITH_MEMORY, Change, Comparison, TensorRecord
from tensorplay.storages import parts, region

__all__ = [
    "FilePlace",
    "Held",
    "changed_fields",
    "changes_between",
    "compared",
    "file_places",
    "may_be_mapped",
    "same_order",
]

Held = Sequence[tuple[str, TensorRecord]]
"""Tensors that a wrapper holds in attributes, by their path below it."""

_LAYERS = ("python", "impl", "storage", "data", "extent")


# -- fields that differ -----------------------------------------------------------------------------------------------


def changes_between(before: Mapping[str, TensorRecord], after: Mapping[str, TensorRecord]) -> Iterator[Change]:
    """Compare records by name; those that came or went are changes too."""
    for path, record in after.items():
        last = before.get(path)
        if last is None:
            yield Change(name=record.name, field="record", before=None, after="new")
        else:
            yield from changed_fields(last, record)
    for path, record in before.items():
        if path not in after:
            yield Change(name=record.name, field="record", before="there", after=None)


def changed_fields(last: TensorRecord, record: TensorRecord) -> Iterator[Change]:
    """Compare two records layer by layer, then the tensors they are made of by their role."""

    def change(field: str, before: object, after: object) -> Change:
        return Change(name=record.name, field=field, before=_as_json(before), after=_as_json(after))

    if last.kind != record.kind:
        yield change("kind", last.kind, record.kind)
    for layer in _LAYERS:
        one, two = getattr(last, layer), getattr(record, layer)
        if one is None or two is None:
            if one is not two:
                yield change(layer, one and "present", two and "present")
            continue
        for field in two.__struct_fields__:
            if getattr(one, field) != getattr(two, field):
                yield change(f"{layer}.{field}", getattr(one, field), getattr(two, field))
    yield from changes_between(
        {inner.role: inner.record for inner in last.inner}, {inner.role: inner.record for inner in record.inner}
    )


def _as_json(value: object) -> object:
    """Answer a field's value as JSON gives it back."""
    return list(value) if isinstance(value, tuple) else msgspec.to_builtins(value)


# -- two tensors ------------------------------------------------------------------------------------------------------


class FilePlace(NamedTuple):
    """Where in a file some memory lies that is mapped from it."""

    file: str
    """Device and inode."""
    path: str
    begin: int
    """Offset in the file."""
    private: bool
    """Whether a write makes its page this mapping's own."""


def may_be_mapped(record: Any) -> bool:
    """Tell whether a record's memory may be that of a file: PyTorch's own allocator maps none."""
    data = record.data
    return data is not None and data.pointer != 0 and data.origin != "cpu_allocator" and data.device.startswith("cpu")


def file_places(spans: Sequence[tuple[int, int]]) -> list[FilePlace | None]:
    """Answer where in a file each half-open range of addresses lies; None where one file does not hold all of it.

    Reads the process's memory map. A block that processes share is a file as well.
    """
    return [_file_place(span, parts) for span, parts in zip(spans, C.mapped_files(spans), strict=True)]


def _file_place(span: tuple[int, int], parts: Sequence[tuple[int, int, int, str, str, bool]]) -> FilePlace | None:
    reached, private = span[0], False
    for begin, end, offset, file, _, shared in parts:
        first_begin, _, first_offset, first_file, *_ = parts[0]
        if begin > reached or file != first_file or offset - begin != first_offset - first_begin:
            return None
        reached, private = end, private or not shared
    if not parts or reached < span[1]:
        return None
    begin, _, offset, file, path, _ = parts[0]
    return FilePlace(file, path, span[0] - begin + offset, private)


def same_order(a: Any, b: Any) -> bool | None:
    """Tell whether two records of one shape have the same strides wherever a dimension has more than one index."""
    if a.impl.stride is None or b.impl.stride is None or a.impl.shape != b.impl.shape:
        return None
    steps = zip(a.impl.shape, a.impl.stride, b.impl.stride, strict=True)
    return all(size == 1 or one == two for size, one, two in steps)


def compared(a: TensorRecord, b: TensorRecord, held: Sequence[Held] = ((), ())) -> Comparison:
    """Put two records of one moment beside each other, with what each holds in attributes where it is a wrapper."""
    same_object = a.python is not None and b.python is not None and a.python.address == b.python.address
    same_impl = a.impl.address == b.impl.address
    same_storage = None if a.storage is None or b.storage is None else a.storage.address == b.storage.address
    pointers = [None if record.data is None else record.data.data_ptr for record in (a, b)]
    same_pointer = None if None in pointers else pointers[0] == pointers[1]
    counters = [record.impl.version_counter for record in (a, b)]
    same_counter = None if None in counters else counters[0] == counters[1]
    relation, shared, mapped = _overlap(a, b)
    return Comparison(
        a=a.name,
        b=b.name,
        verdict=_verdict(a, b, same_object, same_impl, same_storage, same_counter, relation, shared, mapped, held),
        same_object=same_object,
        same_impl=same_impl,
        same_storage=same_storage,
        same_pointer=same_pointer,
        same_version_counter=same_counter,
        same_memory_order=same_order(a, b),
        relation=relation,
        shared_nbytes=shared,
        differences=tuple(change for change in changed_fields(a, b) if not change.field.startswith("python.")),
    )


class _Overlap(NamedTuple):
    relation: str | None
    shared_nbytes: int | None
    mapped: Literal["", "shared", "private"] = ""
    """How one file is mapped twice, where that makes bytes at different addresses the same."""


def _overlap(a: TensorRecord, b: TensorRecord) -> _Overlap:
    if a.data is None or b.data is None or a.storage is None or b.storage is None:
        return _Overlap(None, None)
    same_storage = a.storage.address == b.storage.address
    if not same_storage and (0 in (a.data.pointer, b.data.pointer) or a.data.device != b.data.device):
        # Storages without memory, or of two devices: they have no byte in common.
        both = a.kind in WITH_MEMORY and b.kind in WITH_MEMORY
        return _Overlap("disjoint", 0) if both else _Overlap(None, None)
    origin = 0 if same_storage else min(a.data.pointer, b.data.pointer)
    one, two = region(a, origin), region(b, origin)
    if one is None or two is None:
        return _Overlap(None, None)
    found = _Overlap(*C.overlap_of(one, two))
    if found.relation != "disjoint" or same_storage or not (may_be_mapped(a) and may_be_mapped(b)):
        return found
    return _overlap_in_file(a, b) or found


def _overlap_in_file(a: TensorRecord, b: TensorRecord) -> _Overlap | None:
    """Answer what two tensors share of a file that is mapped twice."""
    spans = []
    for record in (a, b):
        assert record.data is not None and record.extent is not None
        pointer, extent = record.data.pointer, record.extent
        spans.append((pointer + (extent.first_byte or 0), pointer + (extent.needed_nbytes or 0)))
    if any(begin == end for begin, end in spans):
        return None
    one, two = file_places(spans)
    if one is None or two is None or one.file != two.file:
        return None
    # Bytes count from where the file would begin.
    of_a, of_b = region(a, spans[0][0] - one.begin), region(b, spans[1][0] - two.begin)
    assert of_a is not None and of_b is not None
    relation, shared = C.overlap_of(of_a, of_b)
    if relation == "disjoint":
        return None
    return _Overlap(relation, shared, "private" if one.private or two.private else "shared")


def _verdict(
    a: TensorRecord,
    b: TensorRecord,
    same_object: bool,
    same_impl: bool,
    same_storage: bool | None,
    same_counter: bool | None,
    relation: str | None,
    shared: int | None,
    mapped: str,
    held: Sequence[Held],
) -> str:
    if same_object:
        return "one tensor: the same Python object"
    if same_impl:
        return "two Python objects over one TensorImpl"
    counter = {True: "one version counter", False: "version counters of their own", None: "no version counter"}
    storage = a.storage
    if same_storage and storage is not None:
        nbytes = storage.nbytes
        of = f" of {nbytes}" if isinstance(nbytes, int) else ""
        if shared and isinstance(nbytes, int) and shared > nbytes:
            common = f"the same {shared} bytes reached, of which it has {nbytes or 'none'}"
        elif relation is None and a.data is not None and a.data.pointer:
            common = f"{_unmeasured(a, b)}: which bytes they have in common is not known"
        else:
            common = _common(relation, shared, of)
        return f"{_kinship(a, b)} of one storage, {common}, {counter[same_counter]}"
    if relation not in (None, "disjoint"):
        lazy = all(r.storage is not None and r.storage.copy_on_write for r in (a, b))
        over = "two storages over one buffer until one is written" if lazy else "two storages over one buffer"
        common = _common(relation, shared, "")
        if mapped:
            over = "two storages over one file"
            common += " where no private page was written" if mapped == "private" else ""
        return f"{over}, {common}, {counter[same_counter]}"
    if relation is None:
        pair = "two tensors" if a.kind == b.kind else "tensors of two kinds"
        without = next((r for r in (a, b) if r.storage is None or r.kind not in WITH_MEMORY), None)
        if without is None:
            return f"two storages, {_unmeasured(a, b)}: whether they have bytes in common is not known"
        return (
            f"{pair}: a {without.kind.replace('_', ' ')} tensor has no memory of its own to share{_inside(a, b, held)}"
        )
    null = [r for r in (a, b) if r.data is not None and r.data.pointer == 0]
    said = "; null pointers, which prove nothing" if len(null) == 2 else ""
    return f"two storages, no byte in common{said}"


def _unmeasured(a: TensorRecord, b: TensorRecord) -> str:
    record = a if a.impl.stride is None or a.extent is None else b
    return f"a {record.kind.replace('_', ' ')} tensor has no strides"


def _inside(a: TensorRecord, b: TensorRecord, held: Sequence[Held]) -> str:
    """Say which tensors that two are made of have bytes in common."""
    if any(record.kind == "wrapper_subclass" and not found for record, found in zip((a, b), held, strict=True)):
        return ""
    one, two = (
        [(f"{record.name}{role}", part) for role, part in (*parts(record), *found)]
        for record, found in zip((a, b), held, strict=True)
    )
    shared = [
        f"{name} and {other_name}"
        for name, part in one
        for other_name, other in two
        if part.impl.address == other.impl.address or _overlap(part, other)[0] not in (None, "disjoint")
    ]
    return f"; {', '.join(shared)} have bytes in common" if shared else ""


def _kinship(a: TensorRecord, b: TensorRecord) -> str:
    if a.impl.base == b.impl.address or b.impl.base == a.impl.address:
        return "a tensor and a view of it: views"
    return "two views" if a.impl.is_view and b.impl.is_view else "two tensors"


def _common(relation: str | None, shared: int | None, of: str) -> str:
    if shared is not None:
        return f"{shared}{of} bytes in common" if shared else "no byte in common"
    if relation == "overlapping":
        return "some bytes in common, how many is too hard to say"
    return "bytes in common too hard to say" if relation == "too_hard" else "without memory"
