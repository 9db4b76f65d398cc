"""What an in-place write on a tensor would do now."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import msgspec
import torch

from tensorplay.arrays import producer_of
from tensorplay.callers import Caller
from tensorplay.inspection import MAX_TENSORS, explained, outside_compiled_code, read_one
from tensorplay.layers import WITH_MEMORY, WRAPPERS, Finding, TensorRecord
from tensorplay.live import Live, LiveTensor
from tensorplay.reports import Report, Verdict
from tensorplay.rules.foreign import MappedReadOnly, NotMapped
from tensorplay.storages import region
from tensorplay.walk import find_tensors
from tensorplay.words import bytes_text, describe, plural

__all__ = ["RULES", "Hazard", "SafeView", "Surroundings", "is_safe_view", "judge"]

_MOST_SAVERS = 5
"""So many nodes are named that saved a tensor; the rest is counted."""

RULES = (MappedReadOnly(), NotMapped())
"""Rules about memory that a write would run into."""
# Findings that say what an in-place write does; others that a report has do not make it unsafe.
_UNSAFE = frozenset({"TP102", "TP103", "TP105", "TP107"})
# What is a hazard as long as nobody writes will bite the write that is asked about.
_CODES = {
    "leaf_view": "TP201",
    "multi_output": "TP202",
    "custom_function": "TP203",
    "no_grad_view": "TP203",
    "inference_view": "TP203",
    "expanded": "TP204",
    "self_overlapping": "TP204",
}


class Hazard(NamedTuple):
    """One thing that an in-place write would run into."""

    kind: Literal[
        "leaf", "leaf_view", "multi_output", "custom_function", "no_grad_view", "inference_view", "other_view",
        "unrefreshed_view", "inference_tensor", "zerotensor", "uninitialized", "expanded", "self_overlapping",
        "saved", "saved_unseen", "read_only", "memory", "no_memory",
    ]  # fmt: skip
    reason: str
    evidence: dict[str, Any]
    raises: bool | None
    """Whether the write itself raises; None where that depends on the operator, or nobody can promise it."""
    later: bool = False
    """Whether write and backward go through, and only the next use of a view raises: said, but not unsafe."""


class SafeView(Verdict):
    """Whether an in-place write now would do what it says; true when it would."""

    __slots__ = ("evidence", "hazards", "later")

    def __init__(self, hazards: Iterable[Hazard], notes: Iterable[str], report: Report) -> None:
        hazards = list(hazards)
        self.hazards = tuple(hazard for hazard in hazards if not hazard.later)
        self.later = tuple(hazard for hazard in hazards if hazard.later)
        """What neither the write nor the backward runs into, but the next use of a view."""
        reasons = [hazard.reason for hazard in self.hazards]
        reasons += [*notes, *(hazard.reason for hazard in self.later)]
        super().__init__(not self.hazards, reasons, report)
        self.evidence: dict[str, Any] = {}
        for hazard in self.hazards:
            self.evidence |= hazard.evidence

    def facts(self) -> dict[str, Any]:
        """Answer the verdict and its evidence without its report, as dicts and lists."""
        hazards, later = (
            [{"kind": h.kind, "raises": h.raises, "reason": h.reason} for h in group]
            for group in (self.hazards, self.later)
        )
        evidence = msgspec.to_builtins(self.evidence)
        return {**super().facts(), "hazards": hazards, "later": later, "evidence": evidence}

    def __str__(self) -> str:
        return "\n".join([f"{'safe' if self.ok else 'unsafe'} in place", *(f"  {reason}" for reason in self.reasons)])

    def __repr__(self) -> str:
        return f"<tensorplay.SafeView: {self.ok}, {'; '.join(self.reasons)}>"


@outside_compiled_code
def is_safe_view(x: torch.Tensor, *, value_requires_grad: bool = False) -> SafeView:
    """Tell what an in-place write on a tensor would do now, in the grad mode of this moment.

    Unsafe is a write that raises, that makes a backward raise which would have run, that gives wrong numbers, or
    that ends the process: on a leaf that requires grad or a view of one; on a view that autograd did not see being
    made, or that is one of several; on an inference tensor outside inference mode; where several indices reach one
    element; where a live node saved the tensor for backward, or another one over its bytes; in memory that is
    mapped read-only, gone, or of an object that may not be written: ``bytes``, an array that is not writeable.

    With grad mode off a write on a view that autograd cannot follow goes through, and so does one on its base: it is
    safe. That the next use of the view with grad mode on raises is said in ``.reasons`` and ``.later``.

    Args:
        x: a tensor of any kind; that it is a view is not needed.
        value_requires_grad: whether what is written requires grad, as ``weight`` in ``x.mul_(weight)`` does.

    Returns:
        A verdict, true when the write is safe, with ``.reasons``, ``.hazards``, ``.evidence``, ``.findings``.

    Raises:
        TypeError: x is no tensor.

    Cost: a scan of the process's objects for live tensors and nodes, some 15 ms beside torch alone; half a millisecond
        for the memory map; a walk of the graphs behind them, about a microsecond a node. Runs no operator, no hook, and
        unpacks nothing. Not seen: what hooks of saved tensors keep, what a custom Function keeps on its ctx by itself,
        and what a checkpointed function reads beside its arguments, as a module's weights (PyTorch does not check
        versions there: nothing raises, and backward uses the new values); graphs that C++ alone holds; saved aliases by
        NumPy, and any by DLPack; and tensors that torch.func transforms captured, which raise inside them.

    Source: torch/csrc/autograd/VariableTypeUtils.h ``check_inplace``; torch/csrc/autograd/variable.cpp
        ``handle_view_on_rebase``; torch/csrc/autograd/saved_variable.h; ATen/MemoryOverlap.h, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    read = read_one(x, "is_safe_view", calls=2)
    report, findings = explained([read], caller, RULES)
    return judge(report, findings, Surroundings(x, report.records[0], value_requires_grad))


class Surroundings:
    """The live tensors around one that is to be written. Holds them: made for one call, and dropped with it."""

    def __init__(self, x: torch.Tensor, record: TensorRecord, value_requires_grad: bool) -> None:
        self.x = x
        self.recorded = torch.is_grad_enabled() and (record.impl.requires_grad or value_requires_grad)
        """Whether autograd would record the write."""
        self.live = Live()
        producer = producer_of(x)
        self.constant = None if producer is None else producer.constant
        """Class of the object whose memory it is and that may not be written."""
        self.other_views: Sequence[LiveTensor] = self._other_views(record)
        """Views whose next use raises once their shared version moves."""

    def _other_views(self, record: TensorRecord) -> list[LiveTensor]:
        impl, storage = record.impl, record.storage
        if storage is None or impl.version_counter is None:
            return []
        root = impl.address if impl.base is None else impl.base

        def is_bitten(entry: LiveTensor) -> bool:
            other = entry.record.impl
            if other.creation_meta not in _MADE or other.version_counter != impl.version_counter:
                return False
            requires_grad = other.requires_grad or (self.recorded and other.base == root)
            return requires_grad and not other.grad_fn_stale and entry.in_python and entry.tensor is not self.x

        return [entry for entry in self.live.over([storage.address])[storage.address] if is_bitten(entry)]


def judge(report: Report, findings: Iterable[Finding], around: Surroundings) -> SafeView:
    """Put together what a write would run into. The findings are all there are, also those a report does not show."""
    record = report.records[0]
    hazards = [*_of_autograd(record, around.recorded), *_of_other_views(around.other_views)]
    hazards += _of_memory(record, findings, around.constant)
    savers, notes = _savers(record, around)
    hazards += savers
    if not around.recorded and record.impl.grad_fn_stale and record.impl.creation_meta in _MADE:
        notes.append("its base was written since it was made: the next use with grad mode on raises already")
    now = [hazard for hazard in hazards if not hazard.later]
    report.raise_severity((_CODES[hazard.kind] for hazard in now if hazard.kind in _CODES), "warning")
    return SafeView(hazards, notes or ([] if now else [_why_safe(record)]), report)


def _why_safe(record: TensorRecord) -> str:
    impl = record.impl
    if impl.requires_grad:
        mode = "autograd records it" if torch.is_grad_enabled() else "grad mode is off, the gradient is not touched"
        return f"{mode}; no live node saved the tensor"
    return "nothing that autograd or memory would object to; no live node saved the tensor"


def _visible(record: TensorRecord) -> str:
    extent = record.extent
    if extent is None or extent.visible_nbytes is None or extent.storage_nbytes is None:
        return ""
    return f", {bytes_text(extent.visible_nbytes)} of {bytes_text(extent.storage_nbytes)}"


_MADE = {
    "MULTI_OUTPUT_NODE": (
        "multi_output",
        "one of several views that one operator returned{made}: autograd cannot rewrite the history of one; "
        "not because of overlap",
    ),
    "IN_CUSTOM_FUNCTION": ("custom_function", "view made inside a custom autograd.Function{made}{hook}"),
    "NO_GRAD_MODE": ("no_grad_view", "view made under torch.no_grad()"),
    "INFERENCE_MODE": ("inference_view", "view made in inference mode"),
}
"""Kind and words for each way to make a view that autograd does not rewrite the history of."""


def _of_autograd(record: TensorRecord, recorded: bool) -> Iterator[Hazard]:
    """Repeat the checks that PyTorch makes before an in-place operator, in its order."""
    impl = record.impl
    if record.kind == "uninitialized":
        yield Hazard("uninitialized", "a parameter that has no values yet: it raises for any operator", {}, True)
        return
    if impl.is_zerotensor:
        reason = "zero tensor without memory, as forward-mode AD makes them: PyTorch refuses to write to it"
        yield Hazard("zerotensor", reason, {"is_zerotensor": True}, True)
        return
    if impl.is_inference and impl.version_counter is None and not torch.is_inference_mode_enabled():
        yield Hazard(
            "inference_tensor",
            "inference tensor: it has no version counter, in-place only inside inference_mode",
            {"is_inference": True},
            True,
        )
        return
    evidence: dict[str, Any] = {
        "grad_mode": torch.is_grad_enabled(),
        "creation_meta": impl.creation_meta,
        "grad_fn": impl.grad_fn,
    }
    if impl.is_view:
        evidence |= {"base_is_leaf": impl.base_is_leaf, "base_requires_grad": impl.base_requires_grad}
        if record.extent is not None:
            evidence |= {
                "storage_nbytes": record.extent.storage_nbytes,
                "view_nbytes": record.extent.visible_nbytes,
            }
        if impl.creation_meta in _MADE:
            if recorded or (impl.requires_grad and not impl.grad_fn_stale):
                yield _untracked(impl, recorded, evidence)
            return
    if not recorded or not impl.requires_grad:
        return
    if impl.is_view and impl.base_is_leaf:
        reason = (
            f"view of a leaf that requires grad{_visible(record)}: raises while grad mode is on, safe under no_grad"
        )
        yield Hazard("leaf_view", reason, evidence, True)
    elif impl.grad_fn is None and impl.is_view:
        reason = (
            "view whose base was written since, and got a history then: PyTorch takes it for a leaf, and raises, until "
            "its grad_fn is read"
        )
        yield Hazard("unrefreshed_view", reason, evidence, True)
    elif impl.grad_fn is None:
        reason = "leaf that requires grad: raises while grad mode is on, safe under no_grad"
        yield Hazard("leaf", reason, evidence | {"is_leaf": True}, True)


def _untracked(impl: Any, recorded: bool, evidence: dict[str, Any]) -> Hazard:
    kind: Any
    kind, how = _MADE[impl.creation_meta]
    made = f" ({impl.grad_fn})" if impl.grad_fn else ""
    hook = ": a full backward hook on the module" if made.startswith(" (BackwardHookFunction") else ""
    reason = how.format(made=made, hook=hook)
    if recorded:
        return Hazard(kind, f"{reason}; raises while grad mode is on", evidence, True)
    reason += "; grad mode is off: the write goes through, and the next use of the view with grad mode on raises"
    return Hazard(kind, reason, evidence, False, later=True)


def _of_other_views(views: Sequence[LiveTensor]) -> Iterator[Hazard]:
    if not views:
        return
    impl = views[0].record.impl
    how = _MADE[impl.creation_meta][1].partition("{")[0].partition(":")[0]
    more = f", and {plural(len(views) - 1, 'more live view')}" if len(views) > 1 else ""
    article = "" if how.startswith("one of") else "a "
    reason = (
        f"the live view {describe(views[0].record)}{more} over the same memory is {article}{how}: "
        "the write goes through, and its next use with grad mode on raises"
    )
    found = [{"shape": v.record.impl.shape, "creation_meta": v.record.impl.creation_meta} for v in views]
    yield Hazard("other_view", reason, {"other_views": found}, False, later=True)


def _of_memory(record: TensorRecord, findings: Iterable[Finding], constant: str | None) -> Iterator[Hazard]:
    for finding in findings:
        if finding.code == "TP204":
            evidence = finding.evidence
            reason = (
                f"{evidence['elements']} elements on {evidence['distinct_cells']} cells (stride {evidence['stride']}): "
            )
            if evidence["expanded"]:
                reason += (
                    "expanded: most in-place operators raise; of the others those that write one value (fill_, zero_) "
                    "are right, those that depend on the index (tril_, fill_diagonal_) wrong"
                )
                yield Hazard("expanded", reason, evidence, None)
            else:
                reason += (
                    "self-overlapping: PyTorch raises nothing, and operators that read what they write (mul_, add_) or "
                    "write a value an index (copy_, normal_) give wrong numbers"
                )
                yield Hazard("self_overlapping", reason, evidence, False)
        elif finding.code in _UNSAFE:
            kind: Any = "read_only" if finding.code == "TP105" else "memory"
            yield Hazard(kind, f"{finding.code} {finding.headline}: {finding.why}", finding.evidence, None)
    read_only = record.data is not None and record.data.read_only  # DLPack's producer says so
    if (constant or read_only) and record.extent is not None and record.extent.nbytes:
        lender = f"a {constant} object that is not writeable" if constant else "another library, which forbids writing"
        reason = f"memory of {lender}: PyTorch does not ask, and the write changes what others take for constant"
        yield Hazard("read_only", reason, {"producer_type": constant, "producer_writeable": False}, False)
    storage = record.storage
    if storage is not None and storage.throws_on_write and record.kind in WITH_MEMORY:
        yield Hazard("no_memory", "its storage refuses to be written", {"throws_on_write": True}, True)


def _savers(record: TensorRecord, around: Surroundings) -> tuple[list[Hazard], list[str]]:
    """Find the live nodes that saved the tensor, or another one over some of its bytes."""
    found: Sequence[Any] = ()
    busy = 0
    if record.impl.version_counter is not None:
        found, _, busy = C.saved_tensors(around.live.roots, around.x)
    held = [_saver(slot) for slot in found if not _is_doomed(slot)]
    doomed = [_saver(slot) for slot in found if _is_doomed(slot)]
    hazards = _silent_savers(record, around)
    notes = [] if not busy else [f"{plural(busy, 'node')} of the graph is held by another thread: not known"]
    if doomed:
        notes.append(f"saved for backward by {_savers_text(doomed)}, and written since: that backward raises already")
    if not held:
        return hazards, notes
    named, version = _savers_text(held), record.impl.version
    evidence = {"saved_by": held, "version": version}
    reason = f"saved for backward by {named}: the write moves its version past {version}, and that backward will raise"
    return [Hazard("saved", reason, evidence, False), *hazards], notes


def _silent_savers(record: TensorRecord, around: Surroundings) -> list[Hazard]:
    """Find what nodes saved over the same bytes under another version counter: nobody notices the write there."""
    written = [part for part in _written_parts(record, around.x) if _has_bytes(part)]
    if not written:
        return []
    roots, counter = around.live.roots, record.impl.version_counter
    owner = producer_of(around.x)
    lenders = () if owner is None else (lender.tensor for lender in owner.lenders)
    lent = [one.storage.address for one in lenders if one is not None and one.storage is not None]
    slots: Sequence[Any] = C.saved_tensors(roots, None, [*(part.storage.address for part in written), *lent])[0]
    found = [slot for slot in slots if slot[6].impl.version_counter != counter and _meet(written, [slot[6]])]
    for wrapper in _wrappers_over(written, around.live, counter):
        found += C.saved_tensors(roots, wrapper)[0]
    held = [_saver(slot) for slot in found if not _is_doomed(slot)]
    if not held:
        return []
    reason = (
        f"the same bytes are saved for backward by {_savers_text(held)} under another version counter: nothing "
        "raises, and that backward computes with the new values"
    )
    return [Hazard("saved_unseen", reason, {"saved_unseen_by": held}, False)]


# By identity: a class may have a metaclass with its own __hash__ and __eq__.
_PLAIN = frozenset(map(id, (torch.Tensor, torch.nn.Parameter)))


def _wrappers_over(written: Sequence[Any], live: Live, counter: int | None) -> list[Any]:
    """Find the live wrapper tensors that consist of some bytes, one for each version counter but the written one's.

    A write to a wrapper moves its own version and that of no tensor it consists of, nor does one to these move its.
    """
    found: dict[int, Any] = {}
    for tensor in live.tensors:
        if id(type(tensor)) in _PLAIN or (outer := C.read(tensor)).kind not in WRAPPERS:
            continue
        number = outer.impl.version_counter
        if number not in (None, counter) and number not in found and _meet(written, [r for _, r in _insides(tensor)]):
            found[number] = tensor
    return list(found.values())


def _written_parts(record: TensorRecord, x: torch.Tensor) -> list[Any]:
    """Answer where a write goes to: the tensor, or what a wrapper consists of, but not its offsets or scales."""
    if record.kind in WITH_MEMORY:
        return [record]
    inner = _insides(x) if record.kind in WRAPPERS else []
    if record.kind == "nested_jagged":
        return [part for path, part in inner if path == "._values"]
    sizes = [part.extent.nbytes or 0 for _, part in inner]
    return [part for size, (_, part) in zip(sizes, inner, strict=True) if 2 * size >= max(sizes)]


def _insides(wrapper: Any) -> list[tuple[str, Any]]:
    """Answer the tensors with memory that a wrapper's attributes lead to, each after its path."""
    places = find_tensors([("", wrapper)], most=MAX_TENSORS).places
    read = ((place.path, C.read(place.tensor)) for place in places)
    return [(path, record) for path, record in read if _has_bytes(record)]


def _has_bytes(record: Any) -> bool:
    return record.kind in WITH_MEMORY and record.storage is not None and bool(record.data and record.data.pointer)


def _meet(ones: Iterable[Any], others: Sequence[Any]) -> bool:
    """Tell whether tensors of both groups have a byte in common, or nobody can tell that they do not."""
    return any(_share_bytes(one, other) for one in ones for other in others)


def _share_bytes(one: Any, other: Any) -> bool:
    origin = min(one.data.pointer, other.data.pointer)
    a, b = region(one, origin), region(other, origin)
    return a is None or b is None or C.overlap_of(a, b)[0] != "disjoint"


def _is_doomed(slot: Any) -> bool:
    """Tell whether a saved tensor was written since, so that its backward raises whatever is written now."""
    return bool(slot[5] != slot[6].impl.version)


def _saver(slot: Any) -> dict[str, Any]:
    node, _, argument, index, _, expected, kept, _ = slot
    return {
        "node": node,
        "argument": argument if index is None else f"{argument}[{index}]",
        "expected_version": expected,
        "shape": None if kept is None else kept.impl.shape,
    }


def _savers_text(held: Sequence[dict[str, Any]]) -> str:
    named = ", ".join(f"{entry['node']} ({entry['argument']})" for entry in held[:_MOST_SAVERS])
    return f"{named} and {len(held) - _MOST_SAVERS} more" if len(held) > _MOST_SAVERS else named
