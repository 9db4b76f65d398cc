"""list_shared_storages(): who lies in which memory, and how much of it nobody sees."""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tensorplay._native import C
from tensorplay.arrays import read_array
from tensorplay.callers import Caller
from tensorplay.differences import FilePlace, file_places, may_be_mapped
from tensorplay.inspection import CALL_REFS, MAX_TENSORS, checked_bound, named_objects, outside_compiled_code
from tensorplay.layers import (
    WITH_MEMORY,
    ArrayRecord,
    SharedMember,
    SharedOverlap,
    SharedRange,
    SharedStorage,
    Truncated,
    Unread,
)
from tensorplay.live import Live, find_owners, scope_names
from tensorplay.reports import Read, Report
from tensorplay.storages import array_region, parts, region
from tensorplay.walk import Place, find_tensors
from tensorplay.words import describe, plural

__all__ = ["SharingReport", "list_shared_storages"]

_MOST_PAIRS = 5_000
"""So many pairs of one group are compared before the answer is that it is too hard."""

_NOTHING = "nothing among the objects holds a tensor or an array"


class SharingReport(Report):
    """A report whose text is the list of shared storages."""

    __slots__ = ()
    about = ("sharing",)

    @property
    def storages(self) -> tuple[SharedStorage, ...]:
        """The storages that several tensors lie in, the largest first."""
        return self.document.shared_storages

    @property
    def ranges(self) -> tuple[SharedRange, ...]:
        """Memory that several storages or arrays lie over."""
        return self.document.shared_ranges


class _Member(NamedTuple):
    """Somebody that lies in a storage: a native record."""

    name: str
    named: bool
    role: Any
    record: Any
    also: tuple[str, ...] = ()


@outside_compiled_code
def list_shared_storages(objs: object = None, *, max_tensors: int = MAX_TENSORS) -> SharingReport:
    """List the storages that several tensors lie in, with their bytes, dead bytes, members and exact overlap.

    Storages are told apart by their StorageImpl, never by a pointer: two empty tensors share nothing. A second list
    has memory that several storages or arrays lie over, as NumPy, DLPack, shared memory and files that are mapped twice
    make it.

    Args:
        objs: one object, a list of them, or a dict of name to object; everything of the process where it is None: all
            tensors of Python, frozen ones too, and what the graphs behind them saved for backward.
        max_tensors: read at most so many tensors below the objects; the report says when it cut.

    Returns:
        The report: ``.storages``, ``.ranges``, ``str()``, ``.to_json()``. It prints nothing.

    Raises:
        TypeError: max_tensors is no int.
        ValueError: max_tensors is below 1.

    Cost: a scan of the process's objects, and some 20 microseconds a tensor, those that graphs saved included; up
        to tens of milliseconds for a storage whose tensors interleave in many dimensions; half a millisecond for
        the memory map, where memory is not PyTorch's own. Runs no operator, reads no element.

    Source: c10/core/StorageImpl.h ``size_bytes_``, reference counts; c10/core/TensorImpl.h; torch/csrc/autograd/
        saved_variable.h, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    everything = objs is None
    named, root_refs = scope_names() if everything else named_objects(objs), 1
    if named is None:
        named, root_refs = [(caller.argument("objs"), objs)], CALL_REFS + 1
    found = find_tensors(named, most=checked_bound(max_tensors), grads=True, ask_pytree=not everything)
    roots = Counter(id(obj) for _, obj in named)
    places = [_read_place(place, 3 + root_refs * roots[id(place.tensor)]) for place in found.places]
    members = [_Member(name, True, role, record, also) for name, role, record, also in places]
    arrays = [read_array(place.path, place.tensor, tuple(place.also)) for place in found.arrays]
    tensors = [place.tensor for place in found.places if place.tensor is not None]
    owned: list[_Member] = []
    if everything:
        live = Live()
        others, owned = _others(live, {id(tensor) for tensor in tensors})
        members += others
        tensors = live.roots
    # What C++ alone keeps comes last: the graph may say who does.
    impls = {member.record.impl.address for member in members}
    saved, closed = _saved(tensors, impls)
    members += saved
    members += [member for member in owned if member.record.impl.address not in impls]
    groups = _by_storage(members)
    owners = find_owners("storage", (address for address, group in groups.items() if _has_more_owners(group)))
    storages = tuple(
        shared
        for address, group in groups.items()
        if (shared := _shared(address, group, owners[address].unexplained if address in owners else 0)) is not None
    )
    ranges = tuple(_ranges(groups, arrays, closed))
    shown = {member.impl for shared in storages for member in shared.members}
    shown |= {member.impl for shared in ranges for member in shared.members}
    listed = [member for member in members if not everything or member.record.impl.address in shown]
    unread: tuple[Unread, ...] = (*found.unread, *closed)
    return SharingReport(
        [Read(m.name, m.record, m.also) for m in listed][:max_tensors],
        arrays=tuple(arrays),
        unread=unread,
        truncated=Truncated(max_tensors=max_tensors) if found.cut else None,
        shared_storages=tuple(sorted(storages, key=lambda shared: -shared.nbytes)),
        shared_ranges=ranges,
        notes=() if members or arrays or unread or everything else (_NOTHING,),
        focus="sharing",
    )


def _others(live: Live, known: set[int]) -> tuple[list[_Member], list[_Member]]:
    """Answer the live tensors that no place is known for: those of Python, and what C++ alone keeps."""
    found: tuple[list[_Member], list[_Member]] = ([], [])
    for index in [index for index, tensor in enumerate(live.tensors) if id(tensor) not in known]:
        entry = live.read(index)
        text = f"an unnamed {describe(entry.record)}"
        found[not entry.in_python].append(_Member(text, False, "tensor", entry.record))
        if C.grad_object(entry.tensor) is None and (grad := C.read_grad(entry.tensor)) is not None:
            found[1].append(_Member(f"{text}'s .grad", False, "gradient", grad))
    return found


def _read_place(place: Place, refs: int) -> tuple[str, str, Any, tuple[str, ...]]:
    if place.record is not None:
        return place.path, "gradient", place.record, tuple(place.also)
    return place.path, "tensor", C.read(place.tensor, refs), tuple(place.also)


def _saved(roots: Sequence[Any], known: set[int]) -> tuple[list[_Member], list[Unread]]:
    """Answer what the graphs behind some tensors saved beside what is known, and what of it cannot be looked into."""
    slots, _, busy = C.saved_tensors(roots)
    members, packed = [], 0
    for node, _, argument, index, state, _, record, _ in slots:
        packed += state == "packed_by_hook"
        if record is None or record.impl.address in known:
            continue
        known.add(record.impl.address)
        slot = argument if index is None else f"{argument}[{index}]"
        members.append(_Member(f"saved by {node} ({slot})", True, "saved", record))
    unread = []
    if packed:
        unread.append(Unread(name=plural(packed, "saved tensor"), reason="packed by a hook, which is not run"))
    if busy:
        unread.append(Unread(name=plural(busy, "node"), reason="held by another thread, as while backward runs"))
    return members, unread


def _by_storage(members: Iterable[_Member]) -> dict[int, list[_Member]]:
    groups: dict[int, list[_Member]] = {}
    seen: set[int] = set()
    for outer in members:
        for path, record in parts(outer.record):
            if record.storage is None or record.data is None or record.kind not in WITH_MEMORY:
                continue
            if not isinstance(record.storage.nbytes, int):
                continue
            # Without bytes there is nothing to share.
            if record.storage.nbytes == 0 or record.data.pointer == 0 or record.impl.address in seen:
                continue
            seen.add(record.impl.address)
            member = (
                outer if record is outer.record else _Member(f"{outer.name}{path}", outer.named, outer.role, record)
            )
            groups.setdefault(record.storage.address, []).append(member)
    return groups


def _has_more_owners(group: list[_Member]) -> bool:
    return bool(group[0].record.storage.use_count > len(group))


def _shared(address: int, group: list[_Member], unreached: int) -> SharedStorage | None:
    names = sum(1 + len(member.also) for member in group)
    if names < 2 and not unreached:
        return None
    first = group[0].record
    nbytes: int = first.storage.nbytes
    regions = [found for member in group if (found := region(member.record)) is not None]
    visible, _, _ = C.coverage_of(regions, nbytes)
    return SharedStorage(
        storage=address,
        device=first.data.device,
        nbytes=nbytes,
        visible_nbytes=visible,
        dead_nbytes=None if visible is None else nbytes - visible,
        overlap=_overlap(group, regions, nbytes),
        members=tuple(_member(member) for member in group),
        use_count=first.storage.use_count,
        unreached_owners=unreached,
    )


def _member(member: _Member, origin: int = 0) -> SharedMember:
    record, extent = member.record, member.record.extent
    start = record.data.pointer - origin if origin else 0
    return SharedMember(
        name=member.name,
        named=member.named,
        role=member.role,
        dtype=record.impl.dtype,
        shape=tuple(size for size in record.impl.shape or () if isinstance(size, int)),
        first_byte=start + ((extent.first_byte or 0) if extent is not None else 0),
        needed_nbytes=start + ((extent.needed_nbytes or 0) if extent is not None else 0),
        visible_nbytes=None if extent is None else extent.visible_nbytes,
        impl=record.impl.address,
        also=member.also,
    )


def _overlap(group: Sequence[_Member], regions: Sequence[Any], nbytes: int) -> SharedOverlap:
    """Say how all members lie to each other, by sums where they tell it: there may be very many pairs."""
    if len(regions) < len(group):
        return "too_hard"
    sizes = {r: member.record.extent.visible_nbytes for r, member in zip(regions, group, strict=True)}
    left = list(sizes)
    twice = len(left) < len(regions)
    while None not in sizes.values() and (total := C.coverage_of(left, nbytes)[0]) is not None:
        if len(left) == 1:
            return "nested" if len(sizes) > 1 else "identical"
        if sum(sizes[r] for r in left) == total:  # no byte is reached twice
            return "nested" if twice else "disjoint"
        # Those that reach all that the others do hold them.
        inside = [r for r in left if sizes[r] != total]
        if len(inside) == len(left):
            break
        if not inside:
            return "nested" if len(left) < len(sizes) else "identical"
        left, twice = inside, True
    found = _of_pairs(left)
    return "nested" if twice and found in ("disjoint", "identical") else found


def _of_pairs(regions: Sequence[Any]) -> SharedOverlap:
    different = list(dict.fromkeys(regions))
    relations = set()
    for number, (a, b) in enumerate(itertools.combinations(different, 2)):
        if number == _MOST_PAIRS:
            return "too_hard"
        relation = C.overlap_of(a, b)[0]
        if relation == "partial":
            return "partial"
        relations.add(relation)
    if relations & {"too_hard", "overlapping"}:
        return "too_hard"
    if relations <= {"identical"}:
        return "identical"
    # Among those that are equal there are several of the same bytes.
    return "disjoint" if relations == {"disjoint"} and len(different) == len(regions) else "nested"


# -- several storages over one memory ---------------------------------------------------------------------------------


class _Block(NamedTuple):
    begin: int
    end: int
    members: list[_Member]
    storage: int | None
    arrays: list[ArrayRecord]


def _ranges(
    groups: dict[int, list[_Member]], arrays: Sequence[ArrayRecord], unread: list[Unread]
) -> Iterator[SharedRange]:
    blocks = [
        _Block(first.data.pointer, first.data.pointer + first.storage.nbytes, group, address, [])
        for address, group in groups.items()
        if (first := group[0].record).data.device.startswith("cpu")
    ]
    blocks += [_Block(array.begin, array.end, [], None, [array]) for array in arrays if array.end > array.begin]
    blocks.sort(key=lambda block: (block.begin, block.end))
    together: list[_Block] = []
    end = 0
    for block in [*blocks, None]:
        if block is not None and (not together or block.begin < end):
            together.append(block)
            end = max(end, block.end)
            continue
        if len(together) > 1:
            yield from _range(together, [block.begin for block in together], None)
        together = [] if block is None else [block]
        end = 0 if block is None else block.end
    blocks = [block for block in blocks if not block.members or may_be_mapped(block.members[0].record)]
    if len(blocks) < 2:
        return
    try:
        places = file_places([(block.begin, block.end) for block in blocks])
    except RuntimeError as error:
        unread.append(Unread(name="/proc/self/maps", reason=str(error)))
    else:
        yield from _of_files(blocks, places)


def _of_files(blocks: Sequence[_Block], places: Sequence[FilePlace | None]) -> Iterator[SharedRange]:
    """Find memory at different addresses that one part of one file is mapped to."""
    files: dict[str, list[tuple[FilePlace, _Block]]] = {}
    for place, block in zip(places, blocks, strict=True):
        if place is not None:
            files.setdefault(place.file, []).append((place, block))
    for several in files.values():
        several.sort(key=lambda found: found[0].begin)
        together: list[tuple[FilePlace, _Block]] = []
        end = 0
        for place, block in several:
            if together and place.begin >= end:
                yield from _of_mappings(together)
                together = []
            together.append((place, block))
            end = max(end, place.begin + block.end - block.begin)
        yield from _of_mappings(together)


def _of_mappings(together: Sequence[tuple[FilePlace, _Block]]) -> Iterator[SharedRange]:
    if len({block.begin - place.begin for place, block in together}) < 2:
        return  # one mapping, whose addresses tell
    place, block = together[0]
    shared = block.members[0].record.storage.shared_memory if block.members else None
    handle = place.path if shared is None or not shared.handle else shared.handle
    if any(place.private for place, _ in together):
        handle += " (where no private page was written)"
    yield from _range([block for _, block in together], [place.begin for place, _ in together], handle)


def _range(blocks: Sequence[_Block], at: Sequence[int], handle: str | None) -> Iterator[SharedRange]:
    """Describe blocks that lie at these addresses, or these bytes of a file."""
    begin = min(at)
    nbytes = max(place + block.end - block.begin for place, block in zip(at, blocks, strict=True)) - begin
    regions, members = [], []
    for place, block in zip(at, blocks, strict=True):
        origin = block.begin - (place - begin)
        for member in block.members:
            found = region(member.record, origin)
            if found is not None:
                regions.append(found)
                members.append(_member(member, origin))
        for array in block.arrays:
            regions.append(array_region(array, origin))
            members.append(
                SharedMember(
                    name=array.name,
                    named=True,
                    role="array",
                    dtype=array.dtype,
                    shape=array.shape,
                    first_byte=array.begin - origin,
                    needed_nbytes=array.end - origin,
                    visible_nbytes=C.coverage_of([array_region(array, array.begin)], array.end - array.begin)[0],
                    also=array.also,
                )
            )
    if len(members) < 2:
        return
    yield SharedRange(
        storages=tuple(block.storage for block in blocks if block.storage is not None),
        begin=0 if handle is not None else begin,
        nbytes=nbytes,
        handle=handle,
        overlap=_of_pairs(regions),
        members=tuple(members),
    )
