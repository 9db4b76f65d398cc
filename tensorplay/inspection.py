"""inspect() and its kin: read each tensor natively, ask the rules, answer a report."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, TypeVar

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch
from torch._C._dynamo import eval_frame

from tensorplay.arrays import owner_of, producer_of, read_array
from tensorplay.backward import Graph, Known
from tensorplay.bodies import Body, bodies_of, with_sharded
from tensorplay.callers import Caller
from tensorplay.classes import class_name, derives
from tensorplay.differences import Held, changes_between, compared
from tensorplay.errors import InconsistentTensor
from tensorplay.layers import WITH_MEMORY, WRAPPERS, Finding, TensorRecord, Truncated, Unread
from tensorplay.loading import ModelState
from tensorplay.modules import Modules
from tensorplay.placement import Placement
from tensorplay.reports import ROOTS, Read, Report, Verdict, inner_model, name_roots
from tensorplay.rules.foreign import NotMapped
from tensorplay.rules.registry import SceneRule, body_rules, device_rules, record_rules, scene_rules, state_rules
from tensorplay.scene import Lent, Scene
from tensorplay.selection import Selection, lenient_config, select_findings
from tensorplay.walk import Found, Place, find_tensors, is_parameter
from tensorplay.words import bytes_text

__all__ = [
    "CALL_REFS",
    "MAX_TENSORS",
    "check",
    "checked_bound",
    "explained",
    "inspect",
    "inspect_data_ptr",
    "inspect_storage_device",
    "inspect_tensor_memory",
    "named_objects",
    "outside_compiled_code",
    "print_report",
    "read_one",
    "report_of",
    "verify_data_ptr_consistency",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])

MAX_TENSORS = 10_000
"""How many tensors one call reads unless told otherwise."""


def _references_of_a_call() -> int:
    """Count the references that a Python call holds to an argument: 1, or 2 before Python 3.11."""

    def called(argument: object) -> int:
        return sys.getrefcount(argument)

    sample = object()
    return called(sample) - sys.getrefcount(sample)


CALL_REFS = _references_of_a_call()
_RULES = record_rules()
_NOT_MAPPED = NotMapped()
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
# The last records of each label, by path: addresses, no tensors. The label used longest ago goes first.
_MOST_LABELS = 256
_MOST_LABELLED_RECORDS = 50_000
_history: dict[str, dict[str, TensorRecord]] = {}
_history_lock = threading.Lock()


def outside_compiled_code(function: _Function) -> _Function:
    """Make torch.compile leave a function to Python, with all that it calls.

    Traced, it would read the tracer's tensors, and counts with the tracer's own references. This is what
    torch.compiler.disable() marks a function with, without importing the compiler, which takes seconds.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "tensorplay reads live tensors"  # type: ignore[attr-defined]
    skip = eval_frame._FrameAction.SKIP
    code = function.__code__
    eval_frame.set_code_exec_strategy(code, eval_frame._FrameExecStrategy(skip, skip))
    return function


@outside_compiled_code
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
    title = str.__str__(label) if issubclass(type(label), str) else None
    beside: dict[str, Any] = {}
    if type(x) in _PLAIN and (label is None or title is not None):
        # This call's argument and that of read() are the probe's references.
        reads = [Read(ROOTS[0], C.read(x, CALL_REFS + 1))]
    else:
        named: list[tuple[str, object]] = [(ROOTS[0], x)]
        if C.is_tensor(label):
            named.append((ROOTS[1], label))
        elif label is not None and title is None:
            raise TypeError(f"inspect() takes a title (str) or a torch.Tensor after x, got {class_name(type(label))}")
        reads, _, beside, *_ = _read_all(named, max_tensors, grads=False, lenders=False, root_refs=CALL_REFS + 1)
        if not reads:
            raise TypeError(_nothing_found("inspect", x))
    if C.track_is_on():
        _remember(reads)
    paths = [] if title is None else [read.name for read in reads]
    second = next((n for n, read in enumerate(reads) if ROOTS[1] in (read.name, *read.also)), 0)
    report = report_of(reads, caller, report_unused=not quiet, **beside)
    if label is not None and title is None:
        compare_two(report, x, label, second)
    if title is not None:
        _compare_with_last(title, report, paths)
    if not quiet and not in_ipython():
        print_report(report)
    return report


_MOST_REMEMBERED = 1000


def _remember(reads: Sequence[Read]) -> None:
    """Ask the running tracker what it knows of the tensors' memory."""
    from tensorplay.history import history_of

    for read in reads[:_MOST_REMEMBERED]:
        read.history = history_of(read.record)


inspect_tensor_memory = inspect
"""The same as inspect(), under the name that says it."""


@outside_compiled_code
def check(
    objs: object,
    *,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    max_tensors: int = MAX_TENSORS,
    grads: bool = True,
) -> Report:
    """Run every rule over all tensors that some objects reach, and answer the report.

    Args:
        objs: one object, a list of them, or a dict of name to object: tensors, modules, optimizers, state dicts,
            containers, NumPy arrays. What is not known is passed over.
        select: codes or families (``TP102``, ``TP1``) to show, in place of the configuration's.
        ignore: codes or families to hide, in place of the configuration's.
        max_tensors: read at most so many; the report says when it cut.
        grads: whether the gradients that autograd keeps are read too. Say False where another thread runs backward()
            meanwhile: PyTorch sets ``.grad`` without a lock, so that nobody can read it safely then.

    Returns:
        The report. It prints nothing.

    Raises:
        TypeError: select or ignore is no sequence of codes, or grads no bool.
        UnknownCode: a selector names no rule.
        TargetError: ``[tool.tensorplay]`` in pyproject.toml is not valid.

    Cost: O(n) for n objects reached, and half a millisecond for the process's memory map. Runs no operator, keeps no
        reference, reads no element.

    Source: as for inspect(); /proc/self/maps; NumPy's own descriptors of an array.
    """
    caller = Caller.at(sys._getframe(1))
    for name, codes in (("select", select), ("ignore", ignore)):
        if codes is not None and not issubclass(type(codes), (Sequence, Set)):
            raise TypeError(f"check({name}=) takes a list of codes like 'TP102', got {class_name(type(codes))}")
    if type(grads) is not bool:
        raise TypeError(f"check(grads=) takes True or False, got {class_name(type(grads))}")
    return check_at(caller, objs, select=select, ignore=ignore, max_tensors=max_tensors, grads=grads)


def check_at(
    caller: Caller | None,
    objs: object,
    *,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    max_tensors: int = MAX_TENSORS,
    grads: bool = True,
    name: str | None = None,
) -> Report:
    """Do what check() does for a line of code that is known already; `name` is what a single object is called."""
    named = named_objects(objs)
    root_refs = 1  # the pair in `named`
    if named is None:
        root_refs = 2 * CALL_REFS + 1  # the same, and the arguments of check() and of this
        named = [(name or (caller.argument("objs") if caller else "objs"), objs)]
    found = _read_all(named, max_tensors, grads=grads, lenders=True, root_refs=root_refs)
    reads, lent, beside = found.reads, found.arrays, found.beside
    scene = Scene(reads, lent, found.repeated_modules, found.modules, found.errors, found.graph)
    findings = [*_explain(_suspects(reads)), *_explain_scene(scene, scene_rules())]
    if found.state is not None:
        findings += [finding for rule in state_rules() for finding in rule.in_state(found.state)]
    if found.placement is not None:
        findings += [finding for rule in device_rules() for finding in rule.in_placement(found.placement)]
    if found.bodies:
        findings += [finding for rule in body_rules() for finding in rule.in_bodies(found.bodies)]
    selection = select_findings(findings, select=select, ignore=ignore, caller=caller)
    beside["unread"] += tuple(scene.unread)
    return Report(reads, selection.findings, arrays=tuple(a.record for a in lent), **beside, **selection.fields())


def named_objects(objs: object) -> list[tuple[str, object]] | None:
    """Answer the objects of a dict under its keys, as names that can be printed; None for anything but such a dict."""
    if type(objs) is not dict or not all(type(key) is str for key in list(objs)):
        return None
    return [(key if key and key.isprintable() else repr(key), obj) for key, obj in objs.items()]


def checked_bound(max_tensors: int) -> int:
    """Answer a bound on how much is read.

    Raises:
        TypeError: it is no int.
        ValueError: it is below 1.
    """
    if type(max_tensors) is not int:
        raise TypeError(f"max_tensors must be an int, got {class_name(type(max_tensors))}")
    if max_tensors < 1:
        raise ValueError(f"max_tensors must be 1 or more, got {max_tensors}")
    return max_tensors


class Groups(NamedTuple):
    """A report on groups of objects, and how many of its records each group has."""

    report: Report
    sizes: list[int]


def check_groups(
    groups: Iterable[dict[str, object]],
    *,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    max_tensors: int = MAX_TENSORS,
) -> Groups:
    """Do what check() does for objects that no line of code made, as those of files; no gradients are looked for."""
    reads: list[Read] = []
    unread: list[Unread] = []
    sizes: list[int] = []
    cut = None
    for group in groups:
        if cut is not None or len(reads) == max_tensors:
            cut = Truncated(max_tensors=max_tensors)
            sizes.append(0)
            continue
        found, _, beside, *_ = _read_all(
            list(group.items()), max_tensors - len(reads), grads=False, lenders=False, root_refs=1
        )
        reads += found
        unread += beside["unread"]
        sizes.append(len(found))
        if beside["truncated"] is not None:
            cut = Truncated(max_tensors=max_tensors)
    selection = select_findings(_explain(_suspects(reads)), select=select, ignore=ignore)
    report = Report(reads, selection.findings, truncated=cut, unread=tuple(unread), **selection.fields())
    return Groups(report, sizes)


@outside_compiled_code
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


@outside_compiled_code
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


@outside_compiled_code
def verify_data_ptr_consistency(x: torch.Tensor, strict: bool = False) -> Verdict:
    """Check that pointer, offset and bytes of a tensor fit each other.

    Five facts: storage pointer + offset x itemsize = the impl's own data pointer; the first byte reached is not before
    the storage; the last one is not after it; the pointer is not null where there are bytes to read; readable
    mappings of this process hold all of them. A kind that has no memory of its own has nothing to check and is
    consistent, with that reason.

    Args:
        x: a tensor of any kind.
        strict: raise instead of answering a false verdict.

    Returns:
        A verdict, true when all hold, with ``.reasons`` and ``.findings``.

    Raises:
        TypeError: x is no tensor.
        InconsistentTensor: strict, and one of the five does not hold.

    Cost: constant, half a millisecond of it for the memory map. No byte of the tensor is read.

    Source: c10/core/TensorImpl.h ``data()``, ``storage_offset_``; c10/core/StorageImpl.h ``size_bytes_``;
        /proc/self/maps.
    """
    read = read_one(x, "verify_data_ptr_consistency", calls=2)
    report = report_of([read], Caller.at(sys._getframe(1)), report_unused=False, rules=(_NOT_MAPPED,))
    ok, reasons = _consistency(report.records[0], C.impl_data_address(x))
    unmapped = [finding.headline for finding in report.findings if finding.code == _NOT_MAPPED.code]
    if unmapped:
        ok, reasons = False, unmapped + ([] if ok else reasons)
    if strict and not ok:
        raise InconsistentTensor("; ".join(reasons))
    return Verdict(ok, reasons, report)


def _consistency(record: TensorRecord, own: int | None) -> tuple[bool, list[str]]:
    extent, data, impl = record.extent, record.data, record.impl
    if data is None or extent is None or extent.needed_nbytes is None or extent.storage_nbytes is None:
        reasons = record.absent
        why = next((reasons[key] for key in ("data", "extent", "extent.needed_nbytes") if key in reasons), None)
        return True, [f"nothing to check: {why or record.absent.get('extent.storage_nbytes', record.kind)}"]
    if record.kind not in WITH_MEMORY:
        return True, [f"nothing to check: a {record.kind} tensor has no memory of its own"]
    assert extent.first_byte is not None
    problems, facts = [], []
    if isinstance(impl.storage_offset, int):  # a nested tensor has one for each component
        computed = data.pointer + impl.storage_offset * impl.itemsize
        equation = f"{data.pointer:#x} + {impl.storage_offset} x {impl.itemsize} = {computed:#x}"
        if own is not None and impl.numel != 0 and own != computed:
            problems.append(f"storage pointer + offset x itemsize is {equation}, the impl answers {own:#x}")
        else:
            facts.append(f"storage pointer + offset x itemsize = data pointer: {equation}")
    if data.pointer == 0 and 0 < extent.needed_nbytes <= extent.storage_nbytes:
        problems.append(f"the pointer is null, the storage says it has {bytes_text(extent.storage_nbytes)}")
    if extent.first_byte < 0:
        problems.append(f"the first byte reached lies {bytes_text(-extent.first_byte)} before the storage")
    if extent.needed_nbytes > extent.storage_nbytes:
        has = bytes_text(extent.storage_nbytes)
        problems.append(f"the last byte reached is number {extent.needed_nbytes - 1}, the storage has {has}")
    elif extent.nbytes == 0:
        facts.append("no elements: no byte is reached")
    else:
        facts.append(
            f"bytes {extent.first_byte} to {extent.needed_nbytes - 1} are inside the storage of "
            f"{bytes_text(extent.storage_nbytes)}"
        )
    return (False, problems) if problems else (True, facts)


def read_one(x: object, call: str, calls: int) -> Read:
    """Read the one tensor that a call takes; `calls` is how many Python calls hold it as their argument.

    Raises:
        TypeError: x is no tensor.
    """
    if not C.is_tensor(x):
        raise TypeError(_nothing_found(call, x, container=False))
    return Read(ROOTS[0], C.read(x, calls * CALL_REFS + 1))


def _focused(x: object, focus: str, caller: Caller) -> Report:
    reads = [read_one(x, f"inspect_{'data_ptr' if focus == 'data' else 'storage_device'}", calls=3)]
    report = report_of(reads, caller, report_unused=True, focus=focus)
    if not in_ipython():
        print_report(report)
    return report


class _Reads(NamedTuple):
    """What was read of everything handed in, and what a Report takes beside that."""

    reads: list[Read]
    arrays: list[Lent]
    beside: dict[str, Any]
    repeated_modules: list[list[str]]
    modules: dict[str, int]
    errors: list[tuple[str, BaseException]]
    graph: Graph | None
    placement: Placement | None
    state: ModelState | None
    bodies: list[Body]


def _read_all(
    named: list[tuple[str, object]], max_tensors: int, *, grads: bool, lenders: bool, root_refs: int
) -> _Reads:
    roots = Counter(id(obj) for _, obj in named)
    found = find_tensors(named, most=checked_bound(max_tensors), grads=grads)
    reads = []
    for place in found.places:
        # The place and the call hold one reference each; a root is held by its callers' frames as well.
        record = place.record or C.read(place.tensor, 2 + root_refs * roots[id(place.tensor)])
        borrowed = lenders and record.data is not None and record.data.producer_type is not None
        producer = producer_of(place.tensor) if borrowed else None
        reads.append(Read(place.path, record, place.also, producer, lenders and is_parameter(place.tensor)))
    state = _state(found) if lenders else None
    arrays = [
        Lent(read_array(place.path, place.tensor, tuple(place.also)), owner_of(place.tensor))
        for place in (found.arrays if lenders else ())
    ]
    cut = Truncated(max_tensors=max_tensors) if found.cut else None
    beside = {"truncated": cut, "unread": tuple(found.unread)}
    graph = _graph_behind(found.places, reads) if lenders else None
    placement = _placement(found, grads) if lenders else None
    bodies = _bodies(found, state) if lenders else []
    return _Reads(reads, arrays, beside, found.repeated, found.modules, found.errors, graph, placement, state, bodies)


def _state(found: Found) -> ModelState | None:
    """Read what modules have registered, and what optimizers hold of it."""
    modules = [Modules(obj, f"{path}.") for path, obj in found.tops if derives(type(obj), torch.nn.Module)]
    optimizers = [(path, obj) for path, obj in found.tops if derives(type(obj), torch.optim.Optimizer)]
    return ModelState(modules, optimizers, observer_refs=1) if modules else None  # the place's


def _bodies(found: Found, state: ModelState | None) -> list[Body]:
    """Read the DTensors; one whose memory was released is a tensor that reaches past its storage."""
    sharding = [] if state is None else state.sharding
    places = [(place.path, place.tensor) for place in found.places if place.tensor is not None]
    registered = {id(slot.tensor) for slot in (() if state is None else state.slots)}
    registered |= {id(one.parameter) for one in sharding}
    bodies = bodies_of(with_sharded(places, sharding), sharding)
    return [body._replace(is_registered=id(body.tensor) in registered) for body in bodies if body.state != "FREED"]


def _placement(found: Found, grads: bool) -> Placement:
    """Read what lies where in modules and optimizers, and of the tensors beside them."""
    optimizers = [(path, obj) for path, obj in found.tops if derives(type(obj), torch.optim.Optimizer)]
    known = {id(obj) for _, obj in optimizers}
    roots = [(path, obj) for path, obj in found.tops if id(obj) not in known]
    return Placement(
        [*roots, *((place.path, place.tensor) for place in found.places if place.tensor is not None)],
        optimizers,
        gradients=grads,
    )


def _graph_behind(places: Sequence[Place], reads: Sequence[Read]) -> Graph | None:
    """Read the graph behind the tensors that have one."""
    roots = []
    owner: tuple[str, Any] = ("", None)
    for place, read in zip(places, reads, strict=True):
        if place.tensor is not None:
            owner = (place.path, place.tensor)
        # A gradient without a Python object follows the tensor whose it is.
        if read.record.impl.grad_fn is not None:
            roots.append(owner)
    return Graph.of(roots, [Known(read.name, read.record, read.is_parameter) for read in reads]) if roots else None


def report_of(
    reads: list[Read], caller: Caller, *, report_unused: bool, rules: Sequence[SceneRule] = (), **fields: Any
) -> Report:
    """Ask the rules and make the report; where nobody prints it, names and explanations are left for later."""
    if not report_unused and not rules:
        pending = functools.partial(_explained_later, caller) if _suspects(reads) else None
        return Report(reads, (), caller=caller, pending=pending, **fields)
    reads, findings = _explained(caller, reads, rules)
    selection = select_findings(findings, caller=caller, config=lenient_config(caller))
    return Report(reads, selection.findings, **fields, **selection.fields())


def explained(reads: list[Read], caller: Caller, rules: Sequence[SceneRule]) -> tuple[Report, list[Finding]]:
    """Ask the rules and answer the report, and all findings: those too that the report was told not to show."""
    reads, findings = _explained(caller, reads, rules)
    selection = select_findings(findings, caller=caller, config=lenient_config(caller))
    return Report(reads, selection.findings, **selection.fields()), findings


def _explained(caller: Caller, reads: list[Read], rules: Sequence[SceneRule]) -> tuple[list[Read], list[Finding]]:
    """Name the tensors as the caller does, and explain what is wrong with them."""
    reads = name_roots(reads, caller)
    return reads, [*_explain(_suspects(reads)), *_explain_scene(Scene(reads), rules)]


def _explained_later(caller: Caller, reads: list[Read]) -> tuple[list[Read], Selection]:
    reads, findings = _explained(caller, reads, ())
    return reads, select_findings(findings, caller=caller, config=lenient_config(caller))


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


def _explain_scene(scene: Scene, rules: Iterable[SceneRule]) -> Iterator[Finding]:
    for rule in rules:
        yield from rule.findings(scene)


def compare_two(report: Report, x: torch.Tensor, y: torch.Tensor, second: int) -> None:
    """Put two tensors beside each other: the first record of a report, and the second or the same."""
    one, two = report.records[0], report.records[second]
    report.replace_document(comparison=compared(one, two, (_held_by(x, one), _held_by(y, two))))


def _held_by(tensor: torch.Tensor, record: TensorRecord) -> Held:
    """Read what a wrapper consists of; beside the values of a jagged tensor nothing, as offsets."""
    if record.kind not in WRAPPERS:
        return ()
    found = find_tensors([("", tensor)], most=MAX_TENSORS)
    return [
        (place.path, Read(place.path, C.read(place.tensor, 2)).model())
        for place in found.places
        if place.path and (record.kind != "nested_jagged" or place.path == "._values")
    ]


def _nothing_found(call: str, x: object, container: bool = True) -> str:
    kind = class_name(type(x))
    if type(x) in (torch.UntypedStorage, torch.TypedStorage):
        return f"{call}() got an {kind}: pass a tensor over it, torch.tensor([], dtype=...).set_(storage)"
    if container:
        return (
            f"{call}() found no tensor in this {kind}: pass a torch.Tensor, or a module, optimizer, state dict, "
            "dataclass, list or dict that holds some"
        )
    return f"{call}() takes a torch.Tensor, got {kind}"


def _compare_with_last(label: str, report: Report, paths: list[str]) -> None:
    """Note what changed since the last report of a label; tensors are matched by their path below the argument."""
    records = dict(zip(paths, report.records, strict=True))
    with _history_lock:
        last = _history.pop(label, None)
        _history[label] = records
        kept = sum(map(len, _history.values()))
        while len(_history) > 1 and (len(_history) > _MOST_LABELS or kept > _MOST_LABELLED_RECORDS):
            kept -= len(_history.pop(next(iter(_history))))
    report.replace_document(label=label, changes=None if last is None else tuple(changes_between(last, records)))


def in_ipython() -> bool:
    """Tell whether a report shows itself there."""
    module = sys.modules.get("IPython")
    shell = getattr(module, "get_ipython", None)
    return shell is not None and shell() is not None


def print_report(report: Report) -> None:
    """Print a report to stderr; where that is not possible, warn."""
    from tensorplay.render import text

    if sys.stderr is None:  # pythonw, a daemon
        return
    try:
        text.print_report(report.document, sys.stderr)
    except Exception as error:  # a full disk, a closed or a foreign stream: no reason to end the program
        warnings.warn(f"tensorplay could not print to stderr: {error}", stacklevel=4)
