"""What modules hold beside a state dict, beside themselves at an earlier moment, and beside what was written since."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
from tensorplay.bodies import ShardingState, as_sharded, sharding_states
from tensorplay.layers import WITH_MEMORY, WRAPPERS, TensorRecord, Unread
from tensorplay.mixed import Mixture, mixtures_of
from tensorplay.modules import Modules, Orphans, Slot, held_by, orphans_of
from tensorplay.reports import Read
from tensorplay.storages import region

if TYPE_CHECKING:
    from tensorplay.written import Provenance

__all__ = ["ASSIGN_MARK", "Entry", "Loading", "ModelState", "Moment", "NonFinite", "Pair", "Tie", "lies_at"]

ASSIGN_MARK = "assign_to_params_buffers"
"""What load_state_dict(assign=True) leaves in a state dict's metadata: every later load of it assigns too."""

_WRAPPING = ("module.", "_orig_mod.", "model.", "_fsdp_wrapped_module.")
_NESTED_MOST = 50
_MOST_PAIRS = 1_000
_MOST_MEETINGS = 100_000
# What C.differences_of answers.
SHAPE, DTYPE, DEVICE, KIND, OURS_ON_META, THEIRS_ON_META, MEMORY, REQUIRES_GRAD = (1 << bit for bit in range(8))
# What C.marks_of answers.
ON_META, INFERENCE, SMALL_PART, PAST_STORAGE = 1, 2, 4, 8
_Item = TypeVar("_Item")
_Named = TypeVar("_Named", bound="Slot | Entry")


class Entry(NamedTuple):
    """A tensor of a state dict; refers to it, so it lives no longer than the call."""

    key: str
    tensor: Any
    record: Any


class Pair(NamedTuple):
    """A registered tensor and what the state dict has for it."""

    slot: Slot
    entry: Entry


class Tie(NamedTuple):
    """Several keys of the same bytes."""

    keys: tuple[str, ...]
    nbytes: int
    is_one_object: bool | None
    """Whether one tensor has all the names; None for what state_dict() made views of."""


class NonFinite(NamedTuple):
    """How many elements of a tensor are no numbers."""

    key: str
    nans: int
    infinities: int
    elements: int


class Moment(NamedTuple):
    """What is kept of modules for a later look: no reference to any tensor."""

    ties: list[Tie]
    requires_grad: dict[str, bool]
    impls: dict[str, int]
    versions: dict[str, int | None]
    meta: frozenset[str]

    @classmethod
    def of(cls, modules: Modules) -> Moment:
        """Note what is to be compared later."""
        slots = modules.slots
        return cls(
            ties=ties_of(slots),
            requires_grad={slot.key: slot.record.impl.requires_grad for slot in slots if slot.is_parameter},
            impls={slot.key: slot.record.impl.address for slot in slots},
            versions={slot.key: slot.record.impl.version for slot in slots},
            meta=frozenset(slot.key for slot in slots if slot.is_meta),
        )

    def is_replaced(self, slot: Slot) -> bool:
        """Tell whether another tensor has the key now. One that was freed may have had the same address."""
        return slot.record.impl.address != self.impls.get(slot.key) or (slot.key in self.meta and not slot.is_meta)


def lies_at(record: Any) -> tuple[Any, ...]:
    """Answer what is the same for two tensors of the same bytes."""
    impl = record.impl
    return record.storage.address, impl.storage_offset, impl.shape, impl.stride, impl.dtype, impl.is_conj, impl.is_neg


def sharing(tensors: Sequence[_Named]) -> list[list[_Named]]:
    """Answer the tensors over each storage that several have, in their order."""
    ids, storages = C.group_by_storage([one.tensor for one in tensors])
    if len(storages) == len(tensors):
        return []
    groups: dict[int, list[_Named]] = {}
    for number, one in zip(ids, tensors, strict=True):
        groups.setdefault(number, []).append(one)
    return [members for members in groups.values() if len(members) > 1]


def ties_of(tensors: Sequence[Slot | Entry]) -> list[Tie]:
    """Answer which keys have the same bytes, in the same order: whole tensors, not parts of others."""
    found = []
    for members in sharing(tensors):
        alike: dict[tuple[Any, ...], list[Slot | Entry]] = {}
        for one in members:
            if one.record.impl.numel != 0:
                alike.setdefault(lies_at(one.record), []).append(one)
        for lying in alike.values():
            if len(lying) > 1:
                impl = lying[0].record.impl
                nbytes = impl.numel * impl.itemsize if isinstance(impl.numel, int) else 0
                impls = {one.record.impl.address for one in lying}
                is_one = len(impls) == 1 if isinstance(lying[0], Slot) else None
                found.append(Tie(tuple(one.key for one in lying), nbytes, is_one))
    return found


class Loading:
    """A state dict beside the modules it is for: what there is, key by key.

    Args:
        modules: the modules.
        state_dict: what is to be loaded, or was.
        assign: whether the state dict's tensors take the place of the modules' own, as ``assign=True`` has it; they do
            too where the state dict was loaded so once.
        strict: whether every key has to match.
        ahead: whether the modules were built to be compared, and the load is still to come.
    """

    def __init__(
        self,
        modules: Modules,
        state_dict: Mapping[Any, Any],
        *,
        assign: bool = False,
        strict: bool = True,
        ahead: bool = False,
        values: bool = False,
    ) -> None:
        self.strict = strict
        self.ahead = ahead
        self.modules = modules
        self.items = list(state_dict.items())
        self.metadata = getattr(state_dict, "_metadata", None)
        self.assign = assign or _is_marked(self.metadata)
        self.entries, self.others = C.read_entries(self.items, Entry)
        """The tensors with a name, and all that is none."""
        self.by_key = {entry.key: entry for entry in self.entries}
        self.values = values
        self.unread: list[Unread] = []
        """Entries whose bytes were to be read and are not there."""
        self._compared: dict[tuple[str, str], bool | None] = {}

    def beside(self, modules: Modules) -> Loading:
        """Answer the same state dict beside the modules as they are now; what was read of its values is kept."""
        other = Loading(modules, {}, assign=self.assign, strict=self.strict, ahead=self.ahead, values=self.values)
        other.items, other.metadata = self.items, self.metadata
        other.entries, other.others, other.by_key = self.entries, self.others, self.by_key
        other.nonfinite = self.nonfinite
        other._compared = self._compared
        return other

    @functools.cached_property
    def slots(self) -> list[Slot]:
        """What a state dict of the modules has."""
        return [slot for slot in self.modules.slots if slot.is_persistent]

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        """What has a value in the state dict."""
        return C.pair_up(self.slots, self.by_key, Pair)

    @functools.cached_property
    def _differences(self) -> bytes:
        """Bits of what differs, one byte a pair."""
        return C.differences_of([pair.slot.tensor for pair in self.pairs], [pair.entry.tensor for pair in self.pairs])

    def differing(self, bits: int) -> list[Pair]:
        """Answer the pairs that differ in something; the bits are those of ``C.differences_of``."""
        return _with_bits(self.pairs, self._differences, bits)

    @functools.cached_property
    def retyped(self) -> list[Pair]:
        """Pairs of two types."""
        return self.differing(DTYPE)

    def records_of(self, keys: Iterable[str]) -> list[TensorRecord]:
        """Answer what was read of some keys, as plain data: of the modules' tensor and of the state dict's."""
        wanted = set(keys)
        return [
            Read(name, record).model()
            for slot, entry in self.pairs
            if slot.key in wanted
            for name, record in ((slot.key, slot.record), (f"state_dict[{slot.key!r}]", entry.record))
            if record.extent is not None and record.extent.out_of_bounds
        ]

    @functools.cached_property
    def without_values(self) -> list[Pair]:
        """Pairs of which the state dict's tensor is on meta."""
        return self.differing(THEIRS_ON_META)

    @functools.cached_property
    def without_memory(self) -> list[Pair]:
        """Pairs of which the modules' tensor alone is on meta."""
        theirs = {pair.slot.key for pair in self.without_values}
        return [pair for pair in self.differing(OURS_ON_META) if pair.slot.key not in theirs]

    @functools.cached_property
    def short(self) -> list[str]:
        """Keys of which one of the tensors reaches past its storage."""
        sides = ((pair.slot.key, pair.slot.tensor, pair.entry.tensor) for pair in self.pairs)
        keys, ours, theirs = (list(one) for one in zip(*sides, strict=True)) if self.pairs else ([], [], [])
        marks = zip(keys, C.marks_of(ours, 0), C.marks_of(theirs, 0), strict=True)
        return [key for key, one, other in marks if (one | other) & PAST_STORAGE]

    @functools.cached_property
    def refused(self) -> list[str]:
        """Keys of inference tensors that are to become parameters that require grad, and are none yet."""
        marks = C.marks_of([pair.entry.tensor for pair in self.pairs], 0)
        return [
            slot.key
            for slot, entry in _with_bits(self.pairs, marks, INFERENCE)
            if slot.is_parameter and slot.record.impl.requires_grad and not slot.record.impl.is_inference
        ]

    @functools.cached_property
    def frozen(self) -> list[str]:
        """Keys of parameters that do not require grad where the state dict's tensors do."""
        met = [pair.slot for pair in self.differing(REQUIRES_GRAD)]
        return [slot.key for slot in met if slot.is_parameter and not slot.record.impl.requires_grad]

    def counted(self) -> tuple[dict[str, int], dict[str, int]]:
        """Count the keys by their types, and by their devices, where they differ as from which to which."""
        dtypes, devices = map(Counter, C.count_labels([pair.entry.tensor for pair in self.pairs]))
        for counts, pairs, label in ((dtypes, self.retyped, "dtype"), (devices, self.differing(DEVICE), "device")):
            for slot, entry in pairs:
                have = getattr(entry.record.impl, label) or "no device"
                counts[have] -= 1
                counts[f"{have} -> {getattr(slot.record.impl, label)}"] += 1
        return dict(+dtypes), dict(+devices)

    @functools.cached_property
    def misshapen(self) -> list[Pair]:
        """Pairs whose shapes differ."""
        return [
            pair
            for pair in self.differing(SHAPE)
            if pair.slot.record.impl.shape != pair.entry.record.impl.shape
            and pair.slot.record.kind != "uninitialized"
            and not _is_number_of_old(pair)
        ]

    @functools.cached_property
    def _given(self) -> set[str]:
        return {key for key, _ in self.items if type(key) is str}

    @functools.cached_property
    def _own(self) -> set[str]:
        return {slot.key for slot in self.slots}

    @functools.cached_property
    def missing(self) -> list[str]:
        """Keys that the modules have and the state dict lacks, but for those that it may lack."""
        present = self._given
        found = [slot.key for slot in self.slots if slot.key not in present and not self._is_filled(slot)]
        return found + [key for key in self.modules.extra_states if key not in present]

    @functools.cached_property
    def unexpected(self) -> list[str]:
        """Keys that the state dict has and the modules have not."""
        known = self._own.union(self.modules.extra_states)
        if self._given <= known and len(self._given) == len(self.items):
            return []
        return [key if type(key) is str else repr(key)[:80] for key, _ in self.items if key not in known]

    @functools.cached_property
    def accepted(self) -> list[str]:
        """Unexpected keys that load_state_dict() accepts all the same: below a module that is None."""
        absent = tuple(self.modules.absent)
        return [key for key in self.unexpected if absent and key.startswith(absent)]

    @functools.cached_property
    def not_tensors(self) -> list[tuple[str, str]]:
        """Keys of the modules whose value in the state dict is none that can be loaded, with what it is."""
        known = self._own
        return [(key, type(value).__name__) for key, value in self.others if type(key) is str and key in known]

    @functools.cached_property
    def tied_to(self) -> dict[str, str]:
        """Of missing keys whose tensor the state dict has under another name of it: that name."""
        missing = set(self.missing)
        return {
            key: given[0]
            for tie in ties_of(self.modules.slots)
            if (given := [name for name in tie.keys if name in self.by_key])
            for key in tie.keys
            if key in missing
        }

    @functools.cached_property
    def own_loading(self) -> list[str]:
        """Modules that load in a way of their own, with it."""
        return [f"{path.rstrip('.') or 'the model'}: {how}" for path, how in self.modules.loaders.items()]

    @functools.cached_property
    def _taken(self) -> dict[str, Pair]:
        """Pairs that loading does not raise for, by their keys."""
        left_out = {pair.slot.key for pair in self.misshapen}
        if not self.assign:
            left_out.update(pair.slot.key for pair in self.without_values)
        return {pair.slot.key: pair for pair in self.pairs if pair.slot.key not in left_out}

    def written_together(self, tie: Tie) -> list[list[str]]:
        """Answer which of a tie's keys one tensor gets its values from: with ``assign`` those of one table's entry."""
        keys = [key for key in tie.keys if key in self._taken]
        if not self.assign:
            return [keys]
        by_place: dict[tuple[int, str], list[str]] = {}
        for key in keys:
            by_place.setdefault(self.modules.place_of(key), []).append(key)
        return list(by_place.values())

    def is_decided_elsewhere(self, keys: Iterable[str]) -> bool:
        """Tell whether code of the modules decides if these keys are missing, or too many."""
        renaming = tuple(self.modules.renaming)
        return bool(self.modules.deciding) or all(key.startswith(renaming) for key in keys)

    def settle(self, missing: Sequence[str], unexpected: Sequence[str]) -> None:
        """Take what load_state_dict() itself found in the place of what a comparison tells."""
        self.__dict__.update(missing=list(missing), unexpected=list(unexpected))

    def loads_itself(self, key: str) -> bool:
        """Tell whether a module around a key loads in a way of its own, so that names may be changed on the way."""
        return any(key.startswith(path) for path in self.modules.loaders)

    def _is_filled(self, slot: Slot) -> bool:
        if not slot.key.endswith("num_batches_tracked") or not self.modules.may_lack(slot):
            return False
        metadata = self.metadata
        if not isinstance(metadata, Mapping):
            return True  # as of a plain dict
        own = metadata.get(slot.key.rpartition(".")[0])
        version = own.get("version") if isinstance(own, Mapping) else None
        return version is None or version < 2

    @functools.cached_property
    def prefix(self) -> tuple[str, str] | None:
        """What all keys of the state dict, or of the modules, have in front of the others' names: (whose, prefix)."""
        if not self.missing or not self.unexpected or self.pairs:
            return None
        theirs, ours = self._given, self._own
        for whose, longer, shorter in (("state dict", theirs, ours), ("model", ours, theirs)):
            for infix in _WRAPPING[:2]:
                if any(infix in key for key in longer) and {key.replace(infix, "") for key in longer} == shorter:
                    return whose, infix
            for prefix in (*_WRAPPING, *_prefixes(longer)):
                if all(key.startswith(prefix) for key in longer) and _mostly(
                    {k[len(prefix) :] for k in longer}, shorter
                ):
                    return whose, prefix
        return None

    @property
    def nested(self) -> str | None:
        """The key of the state dict under which the one for these modules is; None where several are, too."""
        return self.nesting[0] if len(self.nesting) == 1 else None

    @functools.cached_property
    def nesting(self) -> list[str]:
        """Keys under which there is a state dict that could be for these modules."""
        ours, found = self._own, []
        for key, value in self.others[:_NESTED_MOST]:
            if not isinstance(value, Mapping):
                continue
            theirs = {k for k in value if type(k) is str}
            if _mostly(theirs, ours) or any(
                _mostly({k[len(prefix) :] for k in theirs if k.startswith(prefix)}, ours)
                for prefix in (*_WRAPPING, *_prefixes(theirs))
            ):
                found.append(str(key))
        return found

    @functools.cached_property
    def aliases(self) -> list[tuple[Pair, str]]:
        """Pairs of which both are over the same memory, and how: identical, or some words on it."""
        met = self.differing(MEMORY)
        return [(pair, how) for pair in met if (how := _shares(pair.slot.record, pair.entry.record))]

    @functools.cached_property
    def strangers_sharing(self) -> list[tuple[str, str]]:
        """Keys of entries over the memory of another key's tensor that is overwritten before they are read."""
        pairs = list(self._taken.values())
        aliased = {pair.slot.key: how for pair, how in self.aliases}
        met = C.meetings_of([pair.slot.tensor for pair in pairs], [pair.entry.tensor for pair in pairs], _MOST_MEETINGS)
        found: dict[str, str] = {}
        for ours, theirs in met:
            written, entry = pairs[ours].slot, pairs[theirs].entry
            if ours > theirs or entry.key in found or pairs[theirs].slot.key in aliased:
                continue
            if aliased.get(written.key) != "identical" and _shares(written.record, entry.record):
                found[entry.key] = written.key
        return list(found.items())

    @functools.cached_property
    def ties(self) -> list[Tie]:
        """What the state dict has several names for."""
        return ties_of(self.entries)

    @functools.cached_property
    def wasteful(self) -> list[tuple[list[Entry], int, int]]:
        """Entries over storages of which no entry reaches most bytes: with the storage's bytes and these."""
        marks = C.marks_of([entry.tensor for entry in self.entries], _LEAST_WASTE)
        small = _with_bits(self.entries, marks, SMALL_PART)
        by_storage: dict[int, list[Entry]] = {entry.record.storage.address: [] for entry in small}
        for entry in self.entries if small else ():
            if entry.record.storage is not None and entry.record.storage.address in by_storage:
                by_storage[entry.record.storage.address].append(entry)
        found = []
        for entries in by_storage.values():
            nbytes = entries[0].record.storage.nbytes
            if sum(entry.record.impl.numel * entry.record.impl.itemsize for entry in entries) >= nbytes:
                continue
            regions = _regions(entries)
            if regions is None:
                continue
            unseen = nbytes - C.coverage_of(regions, nbytes)[2]
            if unseen >= _LEAST_WASTE and unseen * 2 >= nbytes:
                found.append((entries, nbytes, unseen))
        return found

    @functools.cached_property
    def mixed(self) -> list[Pair]:
        """Pairs that copy_() refuses: a wrapper, as DTensor is, and a plain tensor; a sparse one and a dense one."""
        met = self.differing(KIND)
        ways = [(pair, _way(pair.slot.record.kind), _way(pair.entry.record.kind)) for pair in met]
        return [pair for pair, ours, theirs in ways if ours != theirs and (ours, theirs) != ("quantized", "")]

    @functools.cached_property
    def order(self) -> list[str]:
        """The keys in the order in which load_state_dict() goes through them."""
        return [slot.key for slot in self.slots]

    @functools.cached_property
    def overlapping(self) -> list[tuple[str, str, int]]:
        """Keys of the modules that have some bytes in common, and not all, each with a tensor in the state dict."""
        found = []
        for several in sharing(self.slots):
            members: dict[tuple[Any, ...], Slot] = {}
            for slot in several:
                if _memory_of(slot.record) and slot.key in self.by_key:
                    members.setdefault(lies_at(slot.record), slot)
            if len(members) < 2 or _are_apart(list(members.values())):
                continue
            for one, other in itertools.islice(itertools.combinations(members.values(), 2), _MOST_PAIRS):
                regions = _regions([one, other])
                if regions is not None and not self._lies_alike(one, other):
                    how, shared = C.overlap_of(*regions)
                    if how not in ("disjoint", "too_hard"):
                        found.append((one.key, other.key, shared or 0))
        return found

    def _lies_alike(self, one: Slot, other: Slot) -> bool:
        """Tell whether the state dict's tensors lie to each other as these do, so that each write gives the same."""
        ours, theirs = (one.record, other.record), (self.by_key[one.key].record, self.by_key[other.key].record)
        if theirs[0].storage is None or theirs[1].storage is None or theirs[0].impl.stride is None:
            return False
        between = [second.impl.storage_offset - first.impl.storage_offset for first, second in (ours, theirs)]
        return (
            theirs[0].storage.address == theirs[1].storage.address
            and between[0] == between[1]
            and all(_steps(a) == _steps(b) and a.impl.dtype == b.impl.dtype for a, b in zip(ours, theirs, strict=True))
        )

    def same_values(self, one: str, other: str) -> bool | None:
        """Tell whether two entries have the same bytes; None where they cannot be read, or are of different types."""
        if self.by_key[one].record.impl.dtype != self.by_key[other].record.impl.dtype:
            return None
        if (one, other) not in self._compared:
            try:
                same = C.same_values(self.by_key[one].tensor, self.by_key[other].tensor)
            except OSError:  # the file behind one was cut: who reads it says so
                same = None
            self._compared[one, other] = same
        return self._compared[one, other]

    @functools.cached_property
    def nonfinite(self) -> list[NonFinite]:
        """Entries that hold NaN or infinities: their bytes are read, where that was asked for."""
        if not self.values:
            return []
        found = []
        for entry in self.entries:
            try:
                counts = C.count_nonfinite(entry.tensor)
            except OSError as error:
                self.unread.append(Unread(name=entry.key, reason=f"its bytes are not there: {error.args[-1]}"))
                continue
            if counts is not None and (counts[0] or counts[1]):
                found.append(NonFinite(entry.key, *counts))
        return found


_LEAST_WASTE = 4096


def _with_bits(items: Sequence[_Item], found: bytes, bits: int) -> list[_Item]:
    """Answer the items whose byte has one of some bits; most often none has."""
    if not any(byte & bits for byte in set(found)):
        return []
    return [item for item, byte in zip(items, found, strict=True) if byte & bits]


_LAID_OUT_ALONE = ("sparse_coo", "sparse_compressed", "mkldnn", "quantized")


def _way(kind: str) -> str:
    """Answer what two tensors have in common that are copied into each other."""
    return "wrapper" if kind in WRAPPERS else kind if kind in _LAID_OUT_ALONE else ""


def _regions(tensors: Sequence[Slot] | Sequence[Entry]) -> list[Any] | None:
    """Answer where tensors lie in their storage; None where that is not known of one."""
    regions = [region(one.record) for one in tensors]
    return None if None in regions else regions


def _are_apart(slots: Sequence[Slot]) -> bool:
    """Tell whether tensors over one storage have no byte in common, by their sum."""
    regions = _regions(slots)
    nbytes = slots[0].record.storage.nbytes
    return regions is not None and bool(C.coverage_of(regions, nbytes)[0] == sum(slot.nbytes for slot in slots))


def _memory_of(record: Any) -> bool:
    """Tell whether a record has memory of this process that can be compared by its addresses."""
    return (
        record.kind in WITH_MEMORY
        and record.data is not None
        and record.data.pointer != 0
        and isinstance(record.storage.nbytes, int)
        and record.storage.nbytes > 0
    )


def _shares(one: Any, other: Any) -> str | None:
    """Say how two tensors share bytes; None where they do not."""
    if one.storage is None or other.storage is None:
        return None
    if one.storage.address != other.storage.address and not (
        _memory_of(one)
        and _memory_of(other)
        and one.data.pointer < other.data.pointer + other.storage.nbytes
        and other.data.pointer < one.data.pointer + one.storage.nbytes
    ):
        return None
    if one.kind not in WITH_MEMORY or one.data.pointer == 0:
        return None
    origin = min(one.data.pointer, other.data.pointer)
    first, second = region(one, origin), region(other, origin)
    if first is None or second is None:
        return "identical"
    how, _ = C.overlap_of(first, second)
    if how == "identical" and _steps(one) != _steps(other):
        return "in another order"
    return None if how == "disjoint" else str(how)


def _steps(record: Any) -> list[tuple[Any, Any]]:
    """Answer what tells in which order a tensor goes through its bytes."""
    impl = record.impl
    return [(size, step) for size, step in zip(impl.shape, impl.stride, strict=True) if size != 1]


def _is_marked(metadata: Any) -> bool:
    """Tell whether a state dict was loaded with assign=True before: what load_state_dict() notes in its metadata."""
    return isinstance(metadata, Mapping) and any(
        ASSIGN_MARK in one and one[ASSIGN_MARK] for one in metadata.values() if type(one) is dict
    )


def _is_number_of_old(pair: Pair) -> bool:
    """Tell whether it is a number that torch 0.3 stored as one element, which load_state_dict() takes."""
    return bool(pair.slot.record.impl.shape == () and pair.entry.record.impl.shape == (1,))


def _prefixes(keys: Iterable[str]) -> list[str]:
    """Answer what all keys begin with, up to a dot."""
    first = next(iter(keys), "")
    parts = first.split(".")[:-1]
    return [".".join(parts[: number + 1]) + "." for number in range(min(len(parts), 4))]


def _mostly(some: set[str], others: set[str]) -> bool:
    return bool(some) and len(some & others) * 2 > max(len(some), len(others))


def _has_local_memory(tensor: Any) -> bool:
    kept = C.local_tensor(tensor)
    return kept is not None and kept[2] is not None and C.read(kept[2]).impl.device != "meta"


class ModelState:
    """What rules on modules' state are asked about.

    Args:
        modules: the modules, each with its own name in front of its keys, or one without.
        optimizers: with their names.
        loading: the state dict beside them.
        before: what was so before.
        written: answers what is known of how a tensor's memory came to its values.
        whole: whether modules that are altogether on meta are worth a word.
        observer_refs: how many references the caller holds to each parameter of an optimizer.
    """

    def __init__(
        self,
        modules: Sequence[Modules],
        optimizers: Sequence[tuple[str, Any]] = (),
        *,
        loading: Loading | None = None,
        before: Moment | None = None,
        written: Callable[[Any], Provenance] | None = None,
        whole: bool = True,
        observer_refs: int = 0,
    ) -> None:
        self.modules = modules
        self.loading = loading
        self.before = before
        self.whole = whole
        self._written = written
        # Now: later others may refer to what an optimizer holds.
        self.held = held_by(optimizers)
        """Identities of what optimizers hold."""
        self.orphans: list[Orphans] = []
        """What optimizers hold that no module has."""
        if optimizers:
            self.orphans = orphans_of(optimizers, as_sharded(self.slots, self.sharding), observer_refs)

    @functools.cached_property
    def slots(self) -> list[Slot]:
        """Everything registered."""
        if len(self.modules) == 1:
            return self.modules[0].slots
        return list(itertools.chain.from_iterable(one.slots for one in self.modules))

    @functools.cached_property
    def sharding(self) -> list[ShardingState]:
        """What frameworks keep of sharded parameters."""
        return sharding_states(self.modules)

    @functools.cached_property
    def leftovers(self) -> list[Slot]:
        """What is on meta; not a DTensor whose local tensor has memory: of that one the body was left behind."""
        return [slot for slot in self._marked(ON_META) if not _has_local_memory(slot.tensor)]

    @functools.cached_property
    def inference(self) -> list[Slot]:
        """What is an inference tensor."""
        return self._marked(INFERENCE)

    def _marked(self, bit: int) -> list[Slot]:
        return _with_bits(self.slots, self._marks, bit)

    @functools.cached_property
    def _marks(self) -> bytes:
        return C.marks_of([slot.tensor for slot in self.slots], 0)

    def has_value(self, slot: Slot) -> str | None:
        """Say where an offload hook has the value of one that is on meta; None where none has."""
        return next((place for one in self.modules if (place := one.has_value.get(slot.key))), None)

    @functools.cached_property
    def ties(self) -> list[Tie]:
        """What is registered under several names."""
        return ties_of(self.slots)

    @functools.cached_property
    def mixtures(self) -> list[Mixture]:
        """Modules with plain tensors among their DTensors."""
        return mixtures_of(self.modules, lambda: self.sharding)

    @functools.cached_property
    def parameter_bytes(self) -> dict[int, int]:
        """Bytes of the parameters' storages, by address."""
        return {
            slot.record.storage.address: slot.record.storage.nbytes
            for slot in self.slots
            if slot.is_parameter and slot.record.storage is not None and isinstance(slot.record.storage.nbytes, int)
        }

    def _is_still_to_come(self, slot: Slot) -> bool:
        """Tell whether a load that nobody watched may be still to come, and would write it."""
        return self.loading is not None and self.before is None and slot.key in self.loading.by_key

    @functools.cached_property
    def provenance(self) -> list[tuple[Slot, Provenance]]:
        """What is known of how each tensor with memory came to its values, where that was watched."""
        if self._written is None:
            return []
        return [(slot, self._written(slot.tensor)) for slot in self.slots if slot.has_memory]

    @functools.cached_property
    def unwritten(self) -> list[tuple[Slot, Provenance]]:
        """What has memory of which not every byte was written, as far as that was watched."""
        return [
            (slot, known)
            for slot, known in self.provenance
            if not self._is_still_to_come(slot)
            # Of memory that was there before, other bytes were written before.
            if known.state == "never" or (known.state == "partly" and (known.origin or known.copied_from))
        ]
