"""inspect() and its kin: read each tensor natively, ask the rules, answer a report."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch

from tensorplay.callers import Caller
from tensorplay.errors import InconsistentTensor
from tensorplay.layers import Change, Finding, TensorRecord, Truncated
from tensorplay.reports import Read, Report, Verdict, inner_model, name_roots
from tensorplay.rules.registry import record_rules
from tensorplay.selection import select_findings
from tensorplay.walk import find_tensors
from tensorplay.words import bytes_text

__all__ = [
    "MAX_TENSORS",
    "check",
    "inspect",
    "inspect_data_ptr",
    "inspect_storage_device",
    "inspect_tensor_memory",
    "verify_data_ptr_consistency",
]

MAX_TENSORS = 10_000
"""How many tensors one call reads unless told otherwise."""


def _references_of_a_call() -> int:
    """Count the references that a Python call holds to an argument: 1, or 2 before Python 3.11."""

    def called(argument: object) -> int:
        return sys.getrefcount(argument)

    sample = object()
    return called(sample) - sys.getrefcount(sample)


_CALL_REFS = _references_of_a_call()
_RULES = record_rules()
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# The last records of each label, by path: addresses, no tensors. The label used longest ago goes first.
_MOST_LABELS = 256
_history: dict[str, dict[str, TensorRecord]] = {}


def inspect(
    x: object, label: str | torch.Tensor | None = None, *, quiet: bool = False, max_tensors: int = MAX_TENSORS
) -> Report:
    """Read what a tensor, or every tensor in a container, really is; print it and answer the report.

    Args:
        x: a tensor, or anything that holds tensors: a module, an optimizer, a state dict, a dataclass, a list, nested.
        label: a title. Asked again with the same one, only what changed since is printed, tensors being matched by
            name; an equal address may belong to a new tensor, which the report then says. A tensor in this place is
            read into the same report.
        quiet: print nothing. Inside IPython nothing is printed either: the report shows itself.
        max_tensors: read at most so many; the report says when it cut.

    Returns:
        The report: ``.records``, ``.findings``, ``str()``, ``.to_json()``.

    Raises:
        TypeError: there is no tensor in x.

    Cost: constant for a tensor, O(n) for a container of n objects. Runs no operator, keeps no reference.

    Source: c10/core/TensorImpl.h, c10/core/StorageImpl.h, torch/csrc/autograd/variable.h, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    if type(x) in _PLAIN and (label is None or type(label) is str):
        # This call's argument and that of read() are the probe's references.
        reads, truncated = [Read("x", C.read(x, _CALL_REFS + 1))], None
    else:
        named = [("x", x)] if label is None or isinstance(label, str) else [("x", x), ("y", label)]
        reads, truncated = _read_all(named, max_tensors, grads=False, root_refs=_CALL_REFS + 1)
        if not reads:
            raise TypeError(_nothing_found("inspect", x))
    paths = [read.name for read in reads] if type(label) is str else []
    report = _answer(reads, caller, report_unused=not quiet, truncated=truncated)
    if type(label) is str:
        _compare_with_last(label, report, paths)
    if not quiet and not _in_ipython():
        _print(report)
    return report


inspect_tensor_memory = inspect
"""The same as inspect(), under the name that says it."""


def check(
    objs: object,
    *,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    max_tensors: int = MAX_TENSORS,
) -> Report:
    """Run every rule over all tensors that some objects reach, and answer the report.

    Args:
        objs: one object, a list of them, or a dict of name to object: tensors, modules, optimizers, state dicts,
            containers. What is not known is passed over.
        select: codes or families (``TP102``, ``TP1``) to show, in place of the configuration's.
        ignore: codes or families to hide, in place of the configuration's.
        max_tensors: read at most so many; the report says when it cut.

    Returns:
        The report; its records include the gradients that autograd keeps. It prints nothing.

    Raises:
        UnknownCode: a selector names no rule.
        TargetError: ``[tool.tensorplay]`` in pyproject.toml is not valid.

    Cost: O(n) for n objects reached. Runs no operator, keeps no reference.

    Source: as for inspect().
    """
    caller = Caller.at(sys._getframe(1))
    return check_at(caller, objs, select=select, ignore=ignore, max_tensors=max_tensors)


def check_at(
    caller: Caller | None,
    objs: object,
    *,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    max_tensors: int = MAX_TENSORS,
    name: str | None = None,
) -> Report:
    """Do what check() does for a line of code that is known already; `name` is what a single object is called."""
    if type(objs) is dict and all(type(key) is str for key in objs):
        named: list[tuple[str, object]] = list(objs.items())
        root_refs = 1  # the pair in `named`
    else:
        root_refs = 2 * _CALL_REFS + 1  # the same, and the arguments of check() and of this
        named = [(name or (caller.argument("objs") if caller else "objs"), objs)]
    reads, truncated = _read_all(named, max_tensors, grads=True, root_refs=root_refs)
    selection = select_findings(_explain(_suspects(reads)), select=select, ignore=ignore, caller=caller)
    return Report(reads, selection.findings, truncated=truncated, **selection.fields())


def inspect_data_ptr(x: torch.Tensor) -> Report:
    """Read where a tensor's bytes are and who frees them.

    Args:
        x: a tensor of any kind.

    Returns:
        A report whose text shows the data layer alone: pointer, offset, device label, context, deleter, maker.

    Raises:
        TypeError: x is no tensor.

    Cost: constant.

    Source: c10/core/Allocator.h ``DataPtr``, c10/core/StorageImpl.h ``data_ptr_``, torch 2.13 and 2.14.
    """
    return _focused(x, "data", Caller.at(sys._getframe(1)))


def inspect_storage_device(x: torch.Tensor) -> Report:
    """Read the device facts PyTorch keeps of one tensor: impl, key set, DataPtr, allocator.

    Args:
        x: a tensor of any kind.

    Returns:
        A report whose text shows the four facts side by side; TP101 is among the findings where they disagree.

    Raises:
        TypeError: x is no tensor.

    Cost: constant.

    Source: c10/core/TensorImpl.h ``device_opt_``, ``key_set_``; c10/core/StorageImpl.h, torch 2.13 and 2.14.
    """
    return _focused(x, "devices", Caller.at(sys._getframe(1)))


def verify_data_ptr_consistency(x: torch.Tensor, strict: bool = False) -> Verdict:
    """Check that pointer, offset and bytes of a tensor fit each other.

    Three equations: storage pointer + offset x itemsize = the impl's own data pointer; the first byte reached is not
    before the storage; the last one is not after it. A kind that has no memory of its own has nothing to check and is
    consistent, with that reason.

    Args:
        x: a tensor of any kind.
        strict: raise instead of answering a false verdict.

    Returns:
        A verdict, true when all hold, with ``.reasons`` and ``.findings``.

    Raises:
        TypeError: x is no tensor.
        InconsistentTensor: strict, and one of the three does not hold.

    Cost: constant.

    Source: c10/core/TensorImpl.h ``data()``, ``storage_offset_``; c10/core/StorageImpl.h ``size_bytes_``.
    """
    read = _one(x, "verify_data_ptr_consistency", calls=2)
    report = _answer([read], Caller.at(sys._getframe(1)), report_unused=False)
    ok, reasons = _consistency(report.records[0], C.impl_data_address(x))
    if strict and not ok:
        raise InconsistentTensor("; ".join(reasons))
    return Verdict(ok, reasons, report)


def _consistency(record: TensorRecord, own: int | None) -> tuple[bool, list[str]]:
    extent, data, impl = record.extent, record.data, record.impl
    if data is None or extent is None or extent.needed_nbytes is None or extent.storage_nbytes is None:
        reasons = record.absent
        why = next((reasons[key] for key in ("data", "extent", "extent.needed_nbytes") if key in reasons), None)
        return True, [f"nothing to check: {why or record.absent.get('extent.storage_nbytes', record.kind)}"]
    if record.kind not in ("strided", "quantized", "uninitialized"):
        return True, [f"nothing to check: a {record.kind} tensor has no memory of its own"]
    assert isinstance(impl.storage_offset, int) and extent.first_byte is not None
    problems, facts = [], []
    computed = data.pointer + impl.storage_offset * impl.itemsize
    equation = f"{data.pointer:#x} + {impl.storage_offset} x {impl.itemsize} = {computed:#x}"
    if own is not None and impl.numel != 0 and own != computed:
        problems.append(f"storage pointer + offset x itemsize is {equation}, the impl answers {own:#x}")
    else:
        facts.append(f"storage pointer + offset x itemsize = data pointer: {equation}")
    if extent.first_byte < 0:
        problems.append(f"the first byte reached lies {bytes_text(-extent.first_byte)} before the storage")
    if extent.needed_nbytes > extent.storage_nbytes:
        has = bytes_text(extent.storage_nbytes)
        problems.append(f"the last byte reached is number {extent.needed_nbytes - 1}, the storage has {has}")
    elif impl.numel == 0:
        facts.append("no elements: no byte is reached")
    else:
        facts.append(
            f"bytes {extent.first_byte} to {extent.needed_nbytes - 1} are inside the storage of "
            f"{bytes_text(extent.storage_nbytes)}"
        )
    return (False, problems) if problems else (True, facts)


def _one(x: object, call: str, calls: int) -> Read:
    if not C.is_tensor(x):
        raise TypeError(_nothing_found(call, x, container=False))
    return Read("x", C.read(x, calls * _CALL_REFS + 1))


def _focused(x: object, focus: str, caller: Caller) -> Report:
    reads = [_one(x, f"inspect_{'data_ptr' if focus == 'data' else 'storage_device'}", calls=3)]
    report = _answer(reads, caller, report_unused=True, focus=focus)
    if not _in_ipython():
        _print(report)
    return report


def _read_all(
    named: list[tuple[str, object]], max_tensors: int, *, grads: bool, root_refs: int
) -> tuple[list[Read], Truncated | None]:
    if max_tensors < 1:
        raise ValueError(f"max_tensors must be 1 or more, got {max_tensors}")
    reads: list[Read] = []
    known: dict[int, Read] = {}
    roots = {id(obj) for _, obj in named}
    for path, tensor in find_tensors(named):
        if (before := known.get(id(tensor))) is not None:
            before.also.append(path)
            continue
        if len(reads) >= max_tensors:
            return reads, Truncated(max_tensors=max_tensors)
        # The walk, this loop and the call hold one reference each; a root is held by its callers' frames as well.
        extra = root_refs if id(tensor) in roots else 0
        read = known[id(tensor)] = Read(path, C.read(tensor, 3 + extra))
        reads.append(read)
        if grads and len(reads) < max_tensors and (grad := C.read_grad(tensor)) is not None:
            reads.append(Read(f"{path}.grad", grad))
    return reads, None


def _answer(reads: list[Read], caller: Caller, *, report_unused: bool, **fields: Any) -> Report:
    """Ask the rules and make the report; where there is nothing to say, names are left for later."""
    suspects = _suspects(reads)
    if not suspects and not report_unused:
        return Report(reads, (), caller=caller, **fields)
    reads = name_roots(reads, caller)
    selection = select_findings(_explain(suspects), caller=caller)
    return Report(reads, selection.findings, **fields, **selection.fields())


_Suspects = list[tuple[int, Read, Any]]


def _suspects(reads: Iterable[Read]) -> _Suspects:
    """Answer which rule suspects which record; the tensors that a tensor is made of are asked about too."""
    found: _Suspects = []
    for read in reads:
        records = [read.record]
        for record in records:
            for number, rule in enumerate(_RULES):
                if rule.suspects(record):
                    found.append((number, read, record))
            records += [inner for _, inner in record.inner]
    return found


def _explain(suspects: _Suspects) -> tuple[Finding, ...]:
    by_rule: dict[int, list[TensorRecord]] = {}
    for number, read, record in suspects:
        model = read.model() if record is read.record else inner_model(read, record)
        by_rule.setdefault(number, []).append(model)
    return tuple(finding for number in sorted(by_rule) for finding in _RULES[number].findings(by_rule[number]))


def _nothing_found(call: str, x: object, container: bool = True) -> str:
    kind = type(x).__name__
    if isinstance(x, torch.UntypedStorage):
        return f"{call}() got an UntypedStorage: pass a tensor over it, torch.tensor([], dtype=...).set_(storage)"
    if container:
        return (
            f"{call}() found no tensor in this {kind}: pass a torch.Tensor, or a module, optimizer, state dict, "
            "dataclass, list or dict that holds some"
        )
    return f"{call}() takes a torch.Tensor, got {kind}"


def _compare_with_last(label: str, report: Report, paths: list[str]) -> None:
    """Note what changed since the last report of a label; tensors are matched by their path below the argument."""
    records = dict(zip(paths, report.records, strict=True))
    last = _history.pop(label, None)
    report.replace_document(label=label, changes=None if last is None else tuple(_changes(last, records)))
    _history[label] = records
    if len(_history) > _MOST_LABELS:
        del _history[next(iter(_history))]


_LAYERS = ("python", "impl", "storage", "data", "extent")


def _changes(before: dict[str, TensorRecord], after: dict[str, TensorRecord]) -> Iterable[Change]:
    for path, record in after.items():
        last = before.get(path)
        if last is None:
            yield Change(name=record.name, field="record", before=None, after="new")
            continue
        if last.kind != record.kind:
            yield Change(name=record.name, field="kind", before=last.kind, after=record.kind)
        for layer in _LAYERS:
            one, two = getattr(last, layer), getattr(record, layer)
            if one is None or two is None:
                if one is not two:
                    yield Change(name=record.name, field=layer, before=one and "present", after=two and "present")
                continue
            for field in two.__struct_fields__:
                if getattr(one, field) != getattr(two, field):
                    yield Change(
                        name=record.name,
                        field=f"{layer}.{field}",
                        before=getattr(one, field),
                        after=getattr(two, field),
                    )
    for path, record in before.items():
        if path not in after:
            yield Change(name=record.name, field="record", before="there", after=None)


def _in_ipython() -> bool:
    module = sys.modules.get("IPython")
    shell = getattr(module, "get_ipython", None)
    return shell is not None and shell() is not None


def _print(report: Report) -> None:
    from tensorplay.render.text import print_report

    if sys.stderr is not None:  # pythonw, a daemon
        print_report(report.document, sys.stderr)
