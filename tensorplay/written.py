"""Which memory no operator ever wrote: MemorySanitizer for storages, seen where operators are dispatched.

A watch sees every operator of its thread while it is entered, and keeps a ledger of storages: which operator made each,
and which bytes of it operators wrote. Writes through NumPy, DLPack or C++ code that bypasses operators, of other
threads, and inside of compiled code and higher-order operators go unseen, and an operator that writes by index or mask
counts as writing all of its argument. An operator that computes in place, as ``mul_`` does, writes nothing new.
"""

from __future__ import annotations

import bisect
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorplay.callers import shorten
from tensorplay.layers import WITH_MEMORY, WRAPPERS
from tensorplay.storages import region
from tensorplay.walk import attributes

__all__ = ["Provenance", "WriteWatch"]

_MOST_PIECES = 1024
"""Of one storage: what was written past so many pieces is forgotten, and numbers are the least they can be."""
_MOST_STRIDED = 256
"""Of these with holes: each new one is compared with them."""
_FIRST_SWEEP = 1024
_DEEPEST_WRAPPER = 4
_INTERNAL = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parent) + os.sep, "<frozen")
_GENERATED = os.sep + "torchinductor_"
"""In the path of code that torch.compile made: kernels write there what it allocates, without operators."""

_EMPTY = frozenset({
    "aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided",
    "aten::empty_permuted", "aten::empty_quantized", "aten::_empty_affine_quantized",
    "aten::_empty_per_channel_affine_quantized", "prims::empty", "prims::empty_strided", "prims::empty_permuted",
})  # fmt: skip
# Their outputs are elements of the first argument, unless they lie in its storage.
_COPIES = frozenset({
    "aten::clone", "aten::_to_copy", "aten::_lazy_clone", "aten::contiguous", "aten::to", "aten::reshape",
    "aten::reshape_as", "aten::flatten", "aten::ravel", "aten::type_as", "aten::cpu", "aten::cuda", "aten::alias_copy",
    "aten::detach_copy", "aten::view_copy", "aten::pin_memory", "aten::_pin_memory", "prims::clone",
    "prims::convert_element_type", "prims::device_put",
})  # fmt: skip
_COPY_INTO = frozenset({"aten::copy_", "aten::_foreach_copy_", "prims::copy_to", "fsdp::copy_"})
_RESIZE = frozenset({"aten::resize_", "aten::resize_as_", "aten::_resize_output_", "prims::resize"})
# Operators in place of these names give values; all others compute them from what is there, garbage from garbage.
_FILLS = frozenset({
    "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_",
    "cauchy_", "masked_fill_", "masked_scatter_", "index_fill_", "index_put_", "_index_put_impl_",
    "_unsafe_index_put_", "index_copy_", "scatter_", "put_", "fill_diagonal_", "set_", "addmm_", "addbmm_", "baddbmm_",
    "addmv_", "addr_", "_foreach_zero_", "_foreach_copy_",
})  # fmt: skip
# Marked as writes in their schemas, beside those that have a tag: they leave values alone.
_METADATA = frozenset({"aten::record_stream", "aten::retain_grad", "aten::set_data", "aten::requires_grad_"})
# Write what their schemas do not mark: in "c10d" all that are not among these write the first argument.
_SEND_ONLY = frozenset({"c10d::send", "c10d::barrier", "c10d::monitored_barrier_", "c10d::check_for_nan"})
_UNMARKED = {"fsdp::all_gather_copy_in": (1, "all_gather_output"), "_c10d_functional::irecv": (0, "tensor")}

_Site = tuple[str, int] | None
"""File and line."""
_Event = tuple[str, _Site]
"""An operator, and the line of the user's code that called it."""


class Provenance(NamedTuple):
    """What is known of the bytes that a tensor reaches. One without elements, or without memory, is unseen."""

    state: Literal["unseen", "never", "partly", "written"]
    """unseen: made out of the watch's sight, and nothing wrote to it since."""
    written_nbytes: int | None
    """Bytes that were written; None for unseen."""
    nbytes: int | None
    """Bytes it reaches; None where that is not known."""
    origin: str | None
    """Operator that made the memory, or made it longer; None for memory that was there before."""
    site: str | None
    """Line of the user's code that ran it."""
    last_write: str | None
    """Operator of the last write to the memory, and the line that ran it."""
    copied_from: str | None
    """What made the memory, never written, that this was copied from."""
    exact: bool = True
    """Whether `written_nbytes` is the number; else the least it can be."""


class WriteWatch:
    """Keep a ledger, while entered, of which memory operators make and write. Keeps no tensor and no memory alive.

    Cost: 3-10 microseconds an operator beside the 4-9 of any dispatch mode; 500 bytes a storage.
    """

    def __init__(self) -> None:
        self._ledger = _Ledger()
        self._modes: list[_Mode] = []

    def __enter__(self) -> WriteWatch:
        mode = _Mode(self._ledger)
        mode.__enter__()
        self._modes.append(mode)
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.pop().__exit__(*error)

    def of(self, tensor: torch.Tensor) -> Provenance:
        """Answer whether anything wrote to the bytes of a tensor, and what made them. Runs no operator."""
        return self._ledger.provenance(_parts(tensor))


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    """Tells the ledger of every operator, after it ran."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile do its work: it would run everything as it stands, and raise where fullgraph is asked."""
        return True

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ledger, kwargs = self._ledger, kwargs or {}
        plan = ledger.plans.get(func)
        if plan is None:
            plan = ledger.plans[func] = _plan(func)
        before = _lengths(plan, args, kwargs) if plan.kind == "resize" else None
        result = func(*args, **kwargs)
        try:
            ledger.note(plan, args, kwargs, result, before)
        except Exception:  # an odd tensor: what it is to the user's code is not our business
            return result
        return result


# -- operators --------------------------------------------------------------------------------------------------------


class _Plan(NamedTuple):
    """What an operator does to memory."""

    name: str
    kind: Literal["other", "empty", "copies", "copy_into", "resize", "metadata", "lift", "broadcast"]
    writes: tuple[tuple[int, str], ...]
    """Position and name of each argument that it writes."""
    makes: bool
    """Whether it answers more than what it was given to write."""
    views: bool
    """Whether its schema says that all it answers lies in memory of its arguments; some copy where it cannot."""


def _plan(func: Any) -> _Plan:
    """Read an operator's schema; one without any is taken to answer values and to write nothing."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return _Plan(str(func), "other", (), True, False)
    name: str = schema.name
    writes = tuple(
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write and "Tensor" in str(argument.type)
    )
    views = all(answer.alias_info is not None for answer in schema.returns)
    makes = any(answer.alias_info is None or not answer.alias_info.is_write for answer in schema.returns)
    kind: Any = "other"
    if name in _METADATA:
        kind = "metadata"
    elif name in _RESIZE or (name in _EMPTY and writes):
        kind = "resize"
    elif torch.Tag.inplace_view in func.tags:
        kind = "metadata"
    elif name in _EMPTY:
        kind = "empty"
    elif name in _COPY_INTO:
        kind = "copy_into"
    elif name in _COPIES:
        kind = "copies"
    elif name == "aten::lift_fresh":
        kind = "lift"
    elif name == "c10d::broadcast_":
        kind = "broadcast"
    if kind == "other" and _computes_in_place(name, writes):
        writes = ()
    if name.startswith("c10d::") and name not in _SEND_ONLY:
        writes, makes = ((0, schema.arguments[0].name),), False
    elif name in _UNMARKED:
        writes = (_UNMARKED[name],)
    return _Plan(name, kind, writes, makes, views)


def _computes_in_place(name: str, writes: tuple[tuple[int, str], ...]) -> bool:
    """Tell whether an operator of ATen reads what it writes: ``mul_``, and not ``fill_``."""
    base = name.removeprefix("aten::")
    return base is not name and base.endswith("_") and writes == ((0, "self"),) and base not in _FILLS


def _given(place: tuple[int, str], args: Any, kwargs: Any) -> Any:
    return args[place[0]] if place[0] < len(args) else kwargs.get(place[1])


def _is_source(args: Any) -> bool:
    """Tell whether this process is the one that a broadcast sends from: nothing is written there."""
    try:
        return bool(torch.distributed.ProcessGroup.unbox(args[1]).rank() == args[2])
    except Exception:  # a group that is not one of torch's
        return False


def _tensors(value: Any) -> Iterator[Any]:
    if C.is_tensor(value):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _parts(tensor: Any, depth: int = 0) -> list[Any]:
    """Read a tensor that has memory, or those that a wrapper subclass holds; nothing for other kinds, and for meta."""
    record = C.read(tensor)
    kind = record.kind
    if kind in WITH_MEMORY:
        storage, extent = record.storage, record.extent
        if storage is None or extent is None or type(storage.nbytes) is not int or not extent.nbytes:
            return []
        return [record] if record.data is not None and record.data.pointer and region(record) is not None else []
    found: list[Any] = []
    if kind in WRAPPERS and depth < _DEEPEST_WRAPPER:
        for value in attributes(tensor).values():
            for inner in _tensors(value):
                found += _parts(inner, depth + 1)
    return found


def _lengths(plan: _Plan, args: Any, kwargs: Any) -> list[int] | None:
    """Answer how many bytes the storages have that an operator may make longer."""
    try:
        given = _tensors(_given(plan.writes[0], args, kwargs))
        return [int(storage.nbytes) for storage in (C.read(tensor).storage for tensor in given) if storage is not None]
    except Exception:  # symbolic
        return None


def _user_line() -> _Site:
    """Find the innermost line that is neither torch's nor ours. Reads no locals."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_INTERNAL):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _line_text(site: _Site) -> str | None:
    return None if site is None else f"{shorten(site[0])}:{site[1]}"


def _event_text(event: _Event | None) -> str | None:
    if event is None:
        return None
    return event[0] if event[1] is None else f"{event[0]} at {_line_text(event[1])}"


# -- memory -----------------------------------------------------------------------------------------------------------


class _Memory:
    """What is known of one storage.

    Its weak reference to the StorageImpl keeps the address from being given to another one; the bytes go when the last
    tensor does.
    """

    __slots__ = ("copied_from", "forgot", "last", "made", "nbytes", "reference", "spans", "strided")

    def __init__(self, address: int, nbytes: int, made: _Event | None) -> None:
        self.reference: int = torch.UntypedStorage._new_with_weak_ptr(address)._weak_ref()
        self.nbytes = nbytes
        self.made = made
        self.last: _Event | None = None
        self.copied_from: _Event | None = None
        self.spans: list[tuple[int, int]] = []
        """Bytes that were written, in order, none touching the next."""
        self.strided: list[tuple[Any, ...]] = []
        """Regions with holes that were written."""
        self.forgot = False
        """Whether more may have been written."""

    def __del__(self, free: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:
        free(self.reference)

    @property
    def whole(self) -> bool:
        """Whether every byte was written."""
        return self.spans == [(0, self.nbytes)]

    def write(self, record: Any) -> None:
        """Note that what a tensor reaches was written."""
        extent = record.extent
        if extent.visible_nbytes == self.nbytes:
            self._fill()
        elif extent.non_overlapping_and_dense:
            self.add(extent.first_byte, extent.needed_nbytes)
        else:
            self.add_strided(region(record) or ())

    def add(self, first: int, end: int) -> None:
        """Note bytes as written."""
        spans = self.spans
        low = bisect.bisect_left(spans, (first,))
        if low and spans[low - 1][1] >= first:
            low -= 1
            first = spans[low][0]
        high = low
        while high < len(spans) and spans[high][0] <= end:
            end = max(end, spans[high][1])
            high += 1
        if low == high and len(spans) >= _MOST_PIECES:
            self.forgot = True
            return
        spans[low:high] = [(first, end)]
        if self.whole:
            self._fill()

    def add_strided(self, piece: tuple[Any, ...]) -> None:
        """Note a region as written; regions that follow each other at equal steps, as columns do, become one."""
        strided = self.strided
        if piece in strided:
            return
        shape, stride, offset, *rest = piece
        sizes, steps, start, *others = strided[-1] if strided else ((), (), 0)
        if others == rest and (sizes, steps) == (shape, stride) and offset > start:
            strided[-1] = ((2, *shape), (offset - start, *stride), start, *rest)
        elif others == rest and (sizes[1:], steps[1:]) == (shape, stride) and offset == start + sizes[0] * steps[0]:
            strided[-1] = ((sizes[0] + 1, *shape), steps, start, *rest)
        elif len(strided) < _MOST_STRIDED:
            strided.append(piece)
        else:
            self.forgot = True
            return
        pieces = len(strided)
        if pieces & (pieces - 1) == 0 and self._bytes([])[0] >= self.nbytes:  # seldom asked where there are many
            self._fill()

    def _fill(self) -> None:
        self.spans, self.strided, self.forgot, self.copied_from = [(0, self.nbytes)], [], False, None

    def erase(self, record: Any) -> None:
        """Note that what a tensor reaches holds no values now. Around its holes, nothing is erased."""
        extent = record.extent
        if extent.visible_nbytes == self.nbytes:
            self.spans, self.strided, self.forgot = [], [], False
        elif extent.non_overlapping_and_dense:
            first, end = extent.first_byte, extent.needed_nbytes
            pieces = [((a, min(b, first)), (max(a, end), b)) for a, b in self.spans]
            self.spans = [(a, b) for a, b in itertools.chain.from_iterable(pieces) if a < b]

    def carry(self, source: _Memory, of: Any, to: Any) -> None:
        """Note what a copy of a tensor that was not all written leaves in another one."""
        self.erase(to)
        self.copied_from = source.copied_from or source.made
        if not (source.spans or source.strided or source.forgot):
            return
        alike = of.extent.non_overlapping_and_dense and of.impl.shape == to.impl.shape
        if source.strided or source.forgot or not alike or of.impl.stride != to.impl.stride:
            self.forgot = True  # other places: how many of its bytes were written is not counted
            return
        old, new = of.impl.itemsize, to.impl.itemsize
        begin, end = of.extent.first_byte, of.extent.needed_nbytes
        for first, last in source.spans:
            low, high = max(first, begin) - begin, min(last, end) - begin
            if low < high:
                self.add(to.extent.first_byte + low // old * new, to.extent.first_byte + -(-high // old) * new)

    def resize(self, nbytes: int) -> None:
        """Follow the storage to another length: what is new of it was never written."""
        if nbytes < self.nbytes:
            self.spans = [(first, min(end, nbytes)) for first, end in self.spans if first < nbytes]
            self.forgot = self.forgot or bool(self.strided)
            self.strided = []
        self.nbytes = nbytes

    def written(self, record: Any) -> tuple[int, int, int]:
        """Answer the least and the most bytes that were written of what a tensor reaches, and how many it reaches."""
        own: Any = region(record)
        _, fewest, reached = C.coverage_of([own], self.nbytes)
        if self.whole:
            return reached, reached, reached
        if not self.spans and not self.strided:
            return 0, reached if self.forgot else 0, reached
        least, most = self._bytes([])
        union_least, union_most = self._bytes([own])
        low = max(0, fewest + least - union_most)
        return low, reached if self.forgot else min(reached, reached + most - union_least), reached

    def _bytes(self, more: list[Any]) -> tuple[int, int]:
        spans = [((end - first,), (1,), first, 1, 0) for first, end in self.spans]
        _, least, most = C.coverage_of([*spans, *self.strided, *more], self.nbytes)
        return least, most


class _Ledger:
    """Storages by the address of their StorageImpl."""

    def __init__(self) -> None:
        self.plans: dict[Any, _Plan] = {}
        self._memories: dict[int, _Memory] = {}
        self._sweep_at = _FIRST_SWEEP

    def note(self, plan: _Plan, args: Any, kwargs: Any, result: Any, before: list[int] | None) -> None:
        """Note what an operator did."""
        kind = plan.kind
        if kind == "metadata" or (kind == "broadcast" and _is_source(args)):
            return
        if plan.writes:
            values = [_given(place, args, kwargs) for place in plan.writes]
            if kind == "resize":
                self._grew(plan, _tensors(values[0]), before)
            elif kind == "copy_into" or kind == "copies":
                sources = _tensors(args[1] if kind == "copy_into" else args[0])
                for target, source in zip(_tensors(values[0]), sources, strict=False):
                    self._copy(plan, source, target)
            else:
                event = None
                for tensor in _tensors(values):
                    for record in _parts(tensor):
                        event = event or (plan.name, _user_line())
                        self._write(record, event)
        if plan.makes and result is not None:
            for tensor in (result,) if C.is_tensor(result) else _tensors(result):
                self._made(plan, args, kwargs, tensor)

    def _made(self, plan: _Plan, args: Any, kwargs: Any, tensor: Any) -> None:
        """Note memory that an operator made; views of memory that was there are none."""
        kind = plan.kind
        sources: list[Any] | None = None
        for index, record in enumerate(parts := _parts(tensor)):
            known = self._memories.get(record.storage.address)
            if known is not None or not (kind == "lift" or _is_new(record, tensor, plan, args, kwargs)):
                if known is not None and kind == "lift":
                    known.write(record)
                continue
            event = (plan.name, _user_line())
            memory = self._new(record, event)
            if kind == "empty" and _GENERATED not in (event[1] or ("",))[0]:
                continue
            if kind == "copies":
                sources = _parts(args[0]) if sources is None else sources
                source = sources[index] if len(sources) == len(parts) else None
                origin = self._unwritten(source)
                if origin is not None:
                    memory.carry(origin, source, record)
                    continue
            memory.last = event
            memory._fill()

    def _copy(self, plan: _Plan, source: Any, target: Any) -> None:
        sources, targets = _parts(source), _parts(target)
        if not targets or (not sources and (C.read(source).impl.device or "").startswith("meta")):
            return
        event = (plan.name, _user_line())
        for index, record in enumerate(targets):
            origin = self._unwritten(sources[index]) if len(sources) == len(targets) else None
            if origin is None:
                self._write(record, event)
                continue
            memory = self._known(record)
            if memory is origin and sources[index].impl.storage_offset == record.impl.storage_offset:
                continue
            if memory is None:
                memory = self._new(record, None)
                memory._fill()  # what is not copied over was there before
            memory.carry(origin, sources[index], record)

    def _unwritten(self, record: Any) -> _Memory | None:
        """Answer the memory of a tensor that was made here and not all written since."""
        memory = None if record is None else self._known(record)
        if memory is None or memory.whole or (memory.made is None and memory.copied_from is None):
            return None
        least, _, reached = memory.written(record)
        return memory if least < reached else None

    def _write(self, record: Any, event: _Event) -> None:
        memory = self._known(record)
        if memory is None:
            memory = self._new(record, None)
        memory.last = event
        if not memory.whole:
            memory.write(record)

    def _grew(self, plan: _Plan, tensors: Iterable[Any], before: list[int] | None) -> None:
        for tensor, nbytes in zip(tensors, before or (), strict=False):
            for record in _parts(tensor):
                if record.storage.nbytes <= nbytes:
                    continue
                event = (plan.name, _user_line())
                memory = self._known(record)
                if memory is None:
                    memory = self._new(record, event)
                    if nbytes:
                        memory.add(0, nbytes)  # what was there before
                memory.made = event

    def _known(self, record: Any) -> _Memory | None:
        memory = self._memories.get(record.storage.address)
        if memory is not None and memory.nbytes != record.storage.nbytes:
            memory.resize(record.storage.nbytes)
        return memory

    def _new(self, record: Any, made: _Event | None) -> _Memory:
        if len(self._memories) >= self._sweep_at:
            expired = torch.UntypedStorage._expired
            self._memories = {a: m for a, m in list(self._memories.items()) if not expired(m.reference)}
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._memories))
        memory = self._memories[record.storage.address] = _Memory(record.storage.address, record.storage.nbytes, made)
        return memory

    def provenance(self, parts: list[Any]) -> Provenance:
        """Answer what is known of some tensors that are parts of one, taken together."""
        if not parts:
            return Provenance("unseen", None, None, None, None, None, None)
        least = most = nbytes = 0
        shown: _Memory | None = None
        for record in parts:
            memory = self._known(record)
            if memory is None:
                continue
            low, high, reached = memory.written(record)
            if shown is None or (low < reached and least == nbytes):
                shown = memory  # the first that lacks something, else the first
            least, most, nbytes = least + low, most + high, nbytes + reached
        if shown is None:
            nbytes = sum(record.extent.visible_nbytes or 0 for record in parts)
            return Provenance("unseen", None, nbytes, None, None, None, None)
        state: Any = "written" if least >= nbytes else "partly" if most else "never"
        return Provenance(
            state,
            least,
            nbytes,
            None if shown.made is None else shown.made[0],
            None if shown.made is None else _line_text(shown.made[1]),
            _event_text(shown.last),
            None if state == "written" else _event_text(shown.copied_from),
            least == most,
        )


def _is_new(record: Any, tensor: Any, plan: _Plan, args: Any, kwargs: Any) -> bool:
    """Tell whether an operator's answer lies in memory of its own, whatever the schema says."""
    if record.storage.use_count == 1:  # no other tensor lies in it, but this one may be an argument
        return not any(argument is tensor for argument in args)
    if plan.views:
        return False
    given = itertools.chain(_tensors(args), _tensors(list(kwargs.values())))
    address = record.storage.address
    return not any(part.storage.address == address for argument in given for part in _parts(argument))
