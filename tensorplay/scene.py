"""All that check() gathered at one moment: records, arrays, who lends memory, and where addresses lie.

The rules that need more than one record look here. The process's memory map is read after the records, so that the
memory of every tensor read is in it, and only when a rule asks.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch

from tensorplay.arrays import Owner
from tensorplay.backward import Graph
from tensorplay.failures import KeptError, kept_errors
from tensorplay.layers import WITH_MEMORY, ArrayRecord, TensorRecord, Unread
from tensorplay.live import Live, LiveTensor, Owners, find_owners
from tensorplay.reports import Read, inner_model
from tensorplay.selection import Config, load_config
from tensorplay.storages import array_region, region

__all__ = ["Beyond", "Lent", "Mapping", "Pairs", "Scene", "StorageGroup", "Subject"]

_MOST_PAIRS = 2_000
"""So many pairs of tensors of one storage are compared."""

_MOST_COUNTED = 100
"""Of so many tensors with gaps in one storage it is counted how many bytes several reach."""


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
    array: ArrayRecord | None = None
    """The array that alone keeps the tensor, and whose name the read has."""

    def model(self) -> TensorRecord:
        """Copy the record into the model, under its path."""
        return self.read.model() if self.record is self.read.record else inner_model(self.read, self.record)

    @property
    def region(self) -> tuple[Any, ...] | None:
        """What C.overlap_of() takes, for the bytes of the storage that it shows."""
        if self.array is None:
            return region(self.record)
        return array_region(self.array, self.record.data.pointer)


class StorageGroup(NamedTuple):
    """A storage and the tensors among the objects that lie in it, each TensorImpl once."""

    address: int
    nbytes: int
    members: list[Subject]

    @property
    def use_count(self) -> int:
        """Owners of the StorageImpl."""
        count: int = self.members[0].record.storage.use_count
        return count


class Pairs(NamedTuple):
    """Pairs of tensors of one storage that reach the same bytes, in the order of the tensors."""

    found: list[tuple[Subject, Subject, str, int | None]]
    """Both, how their bytes lie to each other, and how many they share."""
    complete: bool
    """Whether all pairs were compared."""


class Beyond(NamedTuple):
    """Who else reaches into a storage: native records."""

    tensors: list[Any]
    """Other live tensors that Python code can reach."""
    owned: list[Any]
    """Those that an owner in C++ keeps: a graph, a gradient's slot, a future, a DLPack capsule."""
    saved: list[Any]
    """Tensors that the graphs behind live tensors saved for backward."""
    storage_held: bool
    """Whether Python code holds the storage's own object, which shows all of it."""
    unexplained: int
    """Further owners of the storage: in C++, or reached by no path that was looked at."""

    @property
    def records(self) -> list[Any]:
        """Whatever is seen to reach into it; not the bases that only live through their views."""
        return [*self.tensors, *self.owned, *self.saved]


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

    def __init__(
        self,
        reads: Sequence[Read],
        arrays: Sequence[Lent] = (),
        repeated_modules: Sequence[Sequence[str]] = (),
        modules: dict[str, int] | None = None,
        errors: Sequence[tuple[str, BaseException]] = (),
        graph: Graph | None = None,
    ) -> None:
        self.reads = reads
        self.arrays = arrays
        self.repeated_modules = repeated_modules
        """The paths of each module that has several."""
        self.modules = {} if modules is None else modules
        """Number of the module at each path that leads to one."""
        self.errors = errors
        """The exceptions among the objects, with their paths."""
        self.graph = graph
        """The graph behind the objects, where there is one."""
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

    def kept_errors(self) -> list[KeptError]:
        """Answer what the exceptions hold alone, through the frames they passed: one walk over the heap each."""
        return kept_errors(self.errors, self.config.pinned_nbytes)

    @functools.cached_property
    def config(self) -> Config:
        """What ``[tool.tensorplay]`` says."""
        return load_config()

    @functools.cached_property
    def groups(self) -> dict[int, StorageGroup]:
        """The storages that have memory, with the tensors over each, by address, in the order they are met."""
        found: dict[int, StorageGroup] = {}
        seen: set[int] = set()
        for subject in self.subjects:
            record = subject.record
            storage, data = record.storage, record.data
            if storage is None or data is None or record.kind not in WITH_MEMORY or record.impl.address in seen:
                continue
            if (data.pointer == 0 and storage.nbytes != 0) or not isinstance(storage.nbytes, int):
                continue
            seen.add(record.impl.address)
            found.setdefault(storage.address, StorageGroup(storage.address, storage.nbytes, [])).members.append(subject)
        return found

    @functools.cached_property
    def array_groups(self) -> dict[int, StorageGroup]:
        """The storages that arrays keep, through a tensor that nobody else has, and no tensor among the objects."""
        found: dict[int, StorageGroup] = {}
        for array, owner in self.arrays:
            lender = owner.lenders[0].tensor if owner is not None and owner.sole and owner.lenders else None
            if lender is None or lender.storage.address in self.groups:
                continue
            group = StorageGroup(lender.storage.address, lender.storage.nbytes, [])
            members = found.setdefault(group.address, group).members
            members.append(Subject(Read(array.name, lender, list(array.also)), lender, None, array))
        return found

    @functools.cached_property
    def storages(self) -> dict[int, StorageGroup]:
        """The groups, and the array groups after them."""
        return self.groups | self.array_groups

    def overlap(self, a: Any, b: Any) -> tuple[str, int | None]:
        """Answer how the bytes of two records over one storage lie to each other, and how many they share."""
        one, two = region(a), region(b)
        return ("too_hard", None) if one is None or two is None else C.overlap_of(one, two)

    def pairs(self, subjects: Sequence[Subject]) -> Pairs:
        """Compare the tensors of one storage whose bytes may meet.

        Of those with one geometry, the first stands for all, and each other one is answered as a pair with it.
        """
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, subject in enumerate(subjects):
            found = region(subject.record)
            if found is not None and subject.record.extent.needed_nbytes:
                alike.setdefault(found, []).append(number)
        pairs = [
            (members[0], other, "identical", subjects[other].record.extent.visible_nbytes)
            for members in alike.values()
            for other in members[1:]
        ]
        complete = True
        if not self._are_disjoint(subjects, alike):
            met, complete = self._meetings(subjects, alike)
            pairs += met
        return Pairs([(subjects[a], subjects[b], how, shared) for a, b, how, shared in sorted(pairs)], complete)

    def _are_disjoint(self, subjects: Sequence[Subject], alike: dict[tuple[Any, ...], list[int]]) -> bool:
        """Tell whether some geometries have no byte in common by their sum, without looking at any pair."""
        each = [subjects[members[0]].record.extent.visible_nbytes for members in alike.values()]
        if len(each) < 2 or None in each:
            return len(each) < 2
        end = max(subjects[members[0]].record.extent.needed_nbytes for members in alike.values())
        return bool(C.coverage_of(list(alike), end)[0] == sum(each))

    def _meetings(
        self, subjects: Sequence[Subject], alike: dict[tuple[Any, ...], list[int]]
    ) -> tuple[list[tuple[int, int, str, int | None]], bool]:
        """Compare geometries whose ranges of bytes meet."""
        found: list[tuple[int, int, str, int | None]] = []
        open_ones: list[int] = []
        compared = 0
        for number in sorted(
            (members[0] for members in alike.values()), key=lambda n: subjects[n].record.extent.first_byte
        ):
            begin = subjects[number].record.extent.first_byte
            open_ones = [other for other in open_ones if subjects[other].record.extent.needed_nbytes > begin]
            for other in open_ones:
                compared += 1
                if compared > _MOST_PAIRS:
                    return found, False
                a, b = sorted((number, other))
                how, shared = self.overlap(subjects[a].record, subjects[b].record)
                if how != "disjoint":
                    found.append((a, b, how, shared))
            open_ones.append(number)
        return found, True

    def shared_bytes(self, subjects: Sequence[Subject]) -> int:
        """Answer how many bytes of one storage several of some tensors reach; at least, where that is too hard.

        Of a single tensor, which then has several names, all that it reaches.
        """
        extents = [subject.record.extent for subject in subjects]
        if len(subjects) == 1:
            return int(extents[0].visible_nbytes or 0)
        if all(extent.visible_nbytes == extent.needed_nbytes - extent.first_byte for extent in extents):
            return _reached_twice(sorted((extent.first_byte, extent.needed_nbytes) for extent in extents))
        regions = [found for subject in subjects if (found := region(subject.record)) is not None]
        end = max(extent.needed_nbytes for extent in extents)
        if len(regions) <= _MOST_COUNTED:
            alone = [C.exclusive_of(regions, index, end) for index in range(len(regions))]
            known, reached = [nbytes for nbytes in alone if nbytes is not None], C.coverage_of(regions, end)[0]
            if len(known) == len(alone) and reached is not None:
                return reached - sum(known)
        return max((shared or 0 for *_, shared in self.pairs(subjects).found), default=0)

    def reached(self, regions: Sequence[tuple[Any, ...] | None], nbytes: int) -> int:
        """Answer how many bytes of a storage some regions reach, at most where that is too hard to count.

        One whose geometry is not known, as a nested tensor's, may reach all of it.
        """
        known = [found for found in regions if found is not None]
        return C.coverage_of(known, nbytes)[2] if len(known) == len(regions) else nbytes

    def reached_by_members(self, group: StorageGroup) -> int:
        """Answer how many bytes of a storage the objects themselves reach, at most."""
        return self.reached([subject.region for subject in group.members], group.nbytes)

    def beyond(self, addresses: Iterable[int]) -> dict[int, Beyond]:
        """Look in the whole process for who else reaches into some of the groups' storages."""
        wanted = [self.storages[address] for address in addresses]
        if not wanted:
            return {}
        live = Live()
        over = live.over(group.address for group in wanted)
        saved: dict[int, list[Any]] = {group.address: [] for group in wanted}
        for *_, record, _ in C.saved_tensors(live.roots, None, [group.address for group in wanted])[0]:
            assert record is not None and record.storage is not None  # of these storages alone
            saved[record.storage.address].append(record)
        return {group.address: _beyond(group, over[group.address], saved[group.address]) for group in wanted}

    def counts_as_waste(self, unseen: int, nbytes: int) -> bool:
        """Tell whether so many bytes of a storage are worth a word, by the configuration."""
        return unseen >= self.config.pinned_nbytes and unseen >= self.config.pinned_share * nbytes

    @functools.cached_property
    def unseen(self) -> dict[int, Beyond]:
        """Who else reaches into the storages of which the objects themselves see too little."""
        found = []
        for group in self.storages.values():
            if group.nbytes < self.config.pinned_nbytes or not _is_own_memory(group.members):
                continue
            if all(subject.read.name.endswith(".grad") for subject in group.members):
                continue  # autograd made it, and the next step replaces it
            if self.counts_as_waste(group.nbytes - self.reached_by_members(group), group.nbytes):
                found.append(group.address)
        return self.beyond(found)

    @functools.cached_property
    def pinned(self) -> dict[int, int]:
        """How many bytes of these storages nobody can see but through the members, where they are worth a word."""
        found = {}
        for address, beyond in self.unseen.items():
            if beyond.unexplained or beyond.storage_held:
                continue  # an owner in C++ may see the rest
            group = self.storages[address]
            regions = [subject.region for subject in group.members] + [region(record) for record in beyond.records]
            pinned = group.nbytes - self.reached(regions, group.nbytes)
            if self.counts_as_waste(pinned, group.nbytes):
                found[address] = pinned
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


def _reached_twice(spans: Sequence[tuple[int, int]]) -> int:
    """Answer how many bytes several of some spans hold, which come by their beginning."""
    twice = end = counted_to = 0
    for begin, stop in spans:
        twice += max(0, min(stop, end) - max(begin, counted_to))
        counted_to = max(counted_to, min(stop, end))
        end = max(end, stop)
    return twice


def _is_own_memory(members: Sequence[Subject]) -> bool:
    """Tell whether a storage is memory of this process alone: not mapped or shared, nor an array that others have."""
    record = members[0].record
    if record.data.origin == "callback":
        return any(subject.read.producer is not None and subject.read.producer.sole for subject in members)
    return record.data.origin not in ("mapped", "borrowed", "storage_slice", "copy_on_write")


def _beyond(group: StorageGroup, over: list[LiveTensor], saved: list[Any]) -> Beyond:
    known = {subject.record.impl.address for subject in group.members}
    others = [entry for entry in over if entry.record.impl.address not in known]
    alive = known | {entry.record.impl.address for entry in others}
    slots = Counter(record.impl.address for record in saved)
    hidden = [entry.record for entry in others if not entry.in_python]
    # A base may have no Python object: it is an owner that only its views name.
    bases: dict[int, Any] = {}
    for entry in over:
        address = entry.record.impl.base
        if address is not None and address not in alive and address not in bases:
            view = C.view_of(entry.tensor)
            storage = None if view is None else view[0].storage
            if view is not None and storage is not None and storage.address == group.address:
                bases[address] = view[0]
    unseen = {record.impl.address: record for record in itertools.chain(hidden, bases.values())}
    # A view whose function PyTorch kept may name its base a second time, in that function.
    again = Counter(
        entry.record.impl.base
        for entry in over
        if (view := C.view_of(entry.tensor)) is not None and view[2] is not None
    )
    owned = [
        unseen[address]
        for address, owners in find_owners("impl", unseen).items()
        if _shows_more(owners, again[address])
    ]
    wrapper = any(subject.record.storage.has_python_wrapper for subject in group.members)
    owners = len(alive | slots.keys() | bases.keys()) + wrapper
    return Beyond(
        tensors=[entry.record for entry in others if entry.in_python],
        owned=owned,
        saved=saved,
        storage_held=wrapper and _storage_is_held(over),
        unexplained=max(0, group.use_count - owners),
    )


def _shows_more(owners: Owners, again: int) -> bool:
    """Tell whether a tensor that no Python code refers to has an owner that may show it.

    Its own Python object cannot, nor its views, the nodes that saved it, and the node that accumulates its gradient.
    """
    cannot = ("object", "base", "view function", "variable")
    return owners.unexplained > again or any(not link.startswith(("saved ", *cannot)) for link in owners.links)


def _storage_is_held(over: list[LiveTensor]) -> bool:
    """Tell whether Python code refers to the storage's object, which exists; True, too, where that cannot be seen."""
    if not over:
        return True
    try:
        with torch._C.DisableTorchFunctionSubclass():
            storage = torch._C.TensorBase.untyped_storage(over[0].tensor)
    except (RuntimeError, NotImplementedError):
        return True
    return sys.getrefcount(storage) > _UNHELD


_UNHELD = 3
"""References to a storage's object that nobody else holds: a variable, an argument, and the StorageImpl's own."""
