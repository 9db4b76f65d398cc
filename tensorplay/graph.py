"""check_graph() and saved_for_backward(): the autograd graph before backward, read without running it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, cast, overload

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from tensorplay.arrays import is_array_class, read_array
from tensorplay.backward import Changed, Graph, Known, SavedAt, slot_text
from tensorplay.callers import Caller
from tensorplay.classes import class_name, derives
from tensorplay.decorating import decorated
from tensorplay.inspection import MAX_TENSORS, explained, named_objects, outside_compiled_code
from tensorplay.layers import ArrayRecord, Finding, GraphSummary, SavedChecksum, SavedTensor, Unread
from tensorplay.live import Live, scope_names
from tensorplay.reports import Read, Report
from tensorplay.rules.graph import raised_message
from tensorplay.rules.registry import graph_rules
from tensorplay.selection import lenient_config, select_findings
from tensorplay.walk import attributes, find_tensors, is_parameter, tracebacks_of, variables_of
from tensorplay.words import describe, plural, shape_text

__all__ = ["GraphReport", "GuardBackward", "check_graph", "guard_backward", "saved_for_backward"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class GraphReport(Report):
    """A report whose text is the graph behind some tensors."""

    __slots__ = ()
    about = ("graph", "saved")

    @property
    def graph(self) -> GraphSummary:
        """Nodes, and what they saved, by kind and by module."""
        graph = self.document.graph
        assert graph is not None
        return graph

    @property
    def saved(self) -> tuple[SavedTensor, ...]:
        """What was saved, where saved_for_backward() asked; the largest first."""
        return self.document.saved

    def __repr__(self) -> str:
        return f"<tensorplay.GraphReport: {plural(self.graph.nodes, 'node')}, {plural(len(self.findings), 'finding')}>"


@outside_compiled_code
def check_graph(loss: object, *, checksums: bool = False, since: GraphReport | None = None) -> GraphReport:
    """Look through the graph behind a loss before backward: what it would stumble over, and what it costs.

    Args:
        loss: a tensor or a node of autograd; or several, as a list, or as a dict of name to tensor.
        checksums: whether to sum up the bytes of what is saved, for a later call with ``since``.
        since: the report of an earlier call with ``checksums=True``: saved tensors whose bytes changed, and whose
            version did not, are TP207.

    Returns:
        The report: ``.findings``, ``.graph`` with the sums by kind of node and by module, ``str()``, ``.to_json()``.
        It prints nothing.

    Raises:
        TypeError: it is none of these, checksums is no bool, or since no report with checksums.

    Cost: half a microsecond a node, without recursion; with checksums or since the bytes of what is saved are read,
        some gigabytes a second; some 20 microseconds for each tensor and module among the
        variables of the functions that run, for their names. Runs no operator and no hook, unpacks nothing.

    Source: torch/csrc/autograd/{node,saved_variable}.h, torch/csrc/autograd/generated/Functions.h, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    if not isinstance(checksums, bool):
        raise TypeError(f"check_graph(checksums=) takes True or False, got {class_name(type(checksums))}")
    if since is not None and not (isinstance(since, GraphReport) and since.document.checksums is not None):
        raise TypeError("check_graph(since=) takes the report of check_graph(..., checksums=True)")
    roots = _roots(loss, caller, "check_graph")
    known = _known(roots)
    graph = Graph.of(roots, known.tensors)
    sums = C.saved_checksums([root for _, root in roots]) if checksums or since is not None else None
    if since is not None and sums is not None:
        graph = graph._replace(changed=_changed(sums, since.document.checksums or (), graph, known.arrays))
    findings = [finding for rule in graph_rules() for finding in rule.in_graph(graph)]
    findings += explained([Read(f"{at.node}._saved_{at.slot}", at.record) for at in graph.memoryless], caller, ())[1]
    selection = select_findings(findings, caller=caller, config=lenient_config(caller))
    return GraphReport(
        [],
        selection.findings,
        graph=graph.summary(),
        checksums=None if sums is None else tuple(_checksum(one) for one in sums),
        notes=tuple(
            f"{name} needs no gradient: backward() through it raises"
            for name, root in roots
            if C.is_tensor(root) and not C.read(root).impl.requires_grad
        ),
        unread=(*_busy(graph.busy), *_cut(graph)),
        focus="graph",
        **selection.fields(),
    )


def _checksum(one: Any) -> SavedChecksum:
    node, thread, sequence_nr, argument, index, version, checksum, _ = one
    return SavedChecksum(
        node=node,
        thread=thread,
        sequence_nr=sequence_nr,
        argument=slot_text(argument, index),
        version=version,
        checksum=checksum,
    )


def _changed(
    sums: Sequence[Any], before: Iterable[SavedChecksum], graph: Graph, arrays: Sequence[ArrayRecord]
) -> list[Changed]:
    """Answer the saved tensors whose bytes changed though their version did not."""
    known = {(one.thread, one.sequence_nr, one.argument): one for one in before}
    found = []
    for entry in sums:
        now = _checksum(entry)
        then = known.get((now.thread, now.sequence_nr, now.argument))
        if then is not None and then.version == now.version and then.checksum != now.checksum:
            found.append((now, entry[-1]))
    live = Live()
    return [
        Changed(now.node, now.argument, record, tuple(_aliases(record, live, graph, arrays))) for now, record in found
    ]


def _aliases(record: Any, live: Live, graph: Graph, arrays: Sequence[ArrayRecord]) -> Iterator[str]:
    """Describe what lies over a saved tensor's bytes and has another version counter, or none: tensors and arrays."""
    begin = record.data.pointer
    end = begin + record.storage.nbytes
    for entry in live.over_bytes(begin, end):
        other = entry.record
        if other.impl.version_counter != record.impl.version_counter and entry.in_python:
            name = graph.names.get(other.impl.address, "a tensor")
            yield f"{name} {describe(other)} with its own version counter, at version {other.impl.version}"
    for array in arrays:
        if array.begin < end and begin < array.end:
            yield f"NumPy array {array.name} {array.dtype}{shape_text(array.shape)}"


@outside_compiled_code
def saved_for_backward(roots: object = None) -> GraphReport:
    """List every tensor that is saved for backward: what backward costs.

    Args:
        roots: tensors or nodes of autograd whose graphs are looked through, as for check_graph(); all that Python can
            reach where None.

    Returns:
        The report: ``.saved`` with node, argument, bytes, storage and name of each, those too that no Python object
        shows; ``.graph`` with the sums by kind of node and by module; ``str()``, ``.to_json()``. It prints nothing.

    Raises:
        TypeError: roots are none of these.

    Cost: some 3 microseconds a saved tensor; with None a scan of the process's objects, 15 ms beside torch alone. Runs
        no operator and no hook, unpacks nothing.

    Source: as for check_graph().
    """
    caller = Caller.at(sys._getframe(1))
    named: list[tuple[str, Any]]
    live = Live()
    if roots is None:
        named = [("everything alive", root) for root in live.roots if type(root) is not _SAVED_ARGUMENT]
    else:
        named = _roots(roots, caller, "saved_for_backward")
    graph = Graph.of(named, _known(named if roots is not None else []).tensors)
    return GraphReport(
        [],
        graph=graph.summary() if roots is not None else _all_alive(graph),
        saved=_saved([root for _, root in named], graph, live, everything=roots is None),
        unread=_busy(graph.busy),
        focus="saved",
    )


_State = Literal["held", "packed_by_hook", "released"]


class GuardBackward:
    """What guard_backward() answers: a context, or a decorator; afterwards it has the report.

    Until backward raises, and where it does not, ``.report`` is None and ``.findings`` is empty.
    """

    __slots__ = ("_caller", "report")

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self.report: GraphReport | None = None

    @outside_compiled_code
    def __enter__(self) -> GuardBackward:
        self.report = None
        return self

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Guard each call of a function; of a coroutine function the time it is awaited for.

        Raises:
            TypeError: it is an asynchronous generator function, or no function.
        """
        return decorated(function, lambda: GuardBackward(self._caller), "guard_backward")

    @outside_compiled_code
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or not error.args or not any(word in str(error) for word in _ERRORS):
            return
        message = str(error)
        if _SAID in message:
            return  # a guard within this one
        roots = _roots_of(error)
        frames = [traceback.tb_frame for traceback in tracebacks_of(error)]
        variables = [entry for frame in frames[::-1] for entry in variables_of(frame)]
        graph = Graph.of(roots, _known(roots, variables).tensors)
        graph = graph._replace(written=_told_by(message, graph.written))
        # The backward that failed gave back what it went through: what is farthest was given back before.
        graph = graph._replace(released=graph.released[::-1], accumulations=[])  # a sum of steps is no cause of it
        code = "TP206" if _ERRORS[0] in message else "TP208"
        found = [finding for rule in graph_rules() if rule.code == code for finding in rule.in_graph(graph)]
        if not found:
            return
        selection = select_findings(found, caller=self._caller, config=lenient_config(self._caller))
        self.report = GraphReport([], selection.findings, graph=graph.summary(), focus="graph", **selection.fields())
        more = f"\nand {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
        said = "\n".join(_told(finding) for finding in found[:_MOST_TOLD]) + more
        error.args = (f"{message}{_SAID}{said}", *error.args[1:])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found, where backward raised."""
        return () if self.report is None else self.report.findings

    def to_json(self) -> str:
        """Answer the report as JSON; null where backward raised nothing."""
        return "null" if self.report is None else self.report.to_json()


@overload
def guard_backward() -> GuardBackward: ...


@overload
def guard_backward(function: Callable[_P, _T], /) -> Callable[_P, _T]: ...


@outside_compiled_code
def guard_backward(function: Callable[_P, _T] | None = None, /) -> GuardBackward | Callable[_P, _T]:
    """Make backward's own errors say which tensor, saved by which node, was written.

    As a context, ``with tp.guard_backward(): loss.backward()``, or as a decorator, ``@tp.guard_backward`` on a function
    that calls backward. Where PyTorch raises that a variable
    was modified by an in-place operation, or that a graph was gone through before, the error gets the node, its
    argument, both versions, the tensor's name and a way out added to its text, and goes on as it is. Other errors are
    left alone, and so is all that goes well.

    Args:
        function: what is guarded, where it is a decorator.

    Returns:
        The guard; once backward raised within it, it has ``.report``, ``.findings`` and ``.to_json()``. As a decorator
        the function, guarded each time it is called.

    Raises:
        TypeError: it decorates no function, or an asynchronous generator function.

    Cost: nothing before an error; then as check_graph(). Runs no operator and no hook.

    Source: as for check_graph(); the frames of the error's traceback.
    """
    guard = GuardBackward(Caller.at(sys._getframe(1)))
    return guard if function is None else guard(function)


_ERRORS = ("has been modified by an inplace operation", "backward through the graph a second time")
_MOST_TOLD = 3
_SAID = "\n\nTensorPlay: "
_VERSIONS = re.compile(r"is at version (\d+); expected version (\d+) instead")
_ROOT_NAMES = ("self", "tensors", "outputs")


def _told_by(message: str, written: Sequence[SavedAt]) -> list[SavedAt]:
    """Answer those that PyTorch's message is on: word for word, or by shape and versions."""
    exact = [at for at in written if raised_message(at) in message]
    versions = _VERSIONS.search(message)
    if exact or versions is None:
        return exact
    now, expected = int(versions[1]), int(versions[2])
    return [
        at
        for at in written
        if str(list(at.record.impl.shape or ())) in message
        and (at.record.impl.version, at.expected_version) == (now, expected)
    ]


def _told(finding: Finding) -> str:
    return f"{finding.code} {finding.where.name}: {finding.subject}\n  fix: {finding.fix}"


def _roots_of(error: BaseException) -> list[tuple[str, Any]]:
    """Answer what backward was called on, from PyTorch's own frames in an error's traceback."""
    found: list[tuple[str, Any]] = []
    for traceback in tracebacks_of(error):
        frame = traceback.tb_frame
        if not frame.f_code.co_filename.startswith(_TORCH_FILES):
            continue
        for name, value in variables_of(frame):
            if name in _ROOT_NAMES:
                values = value if type(value) in (list, tuple) else (value,)
                found += [("the loss", root) for root in values if C.is_tensor(root)]
    return found or [("a live graph", root) for root in Live().roots if type(root) is not _SAVED_ARGUMENT]


_TORCH_FILES = str(Path(torch.__file__).parent)
_SAVED_ARGUMENT = torch._C._autograd.SavedTensor


def _all_alive(graph: Graph) -> GraphSummary:
    return graph._replace(roots=("everything alive",)).summary()


def _busy(count: int) -> tuple[Unread, ...]:
    return (
        (Unread(name=plural(count, "node"), reason="held by another thread, as while backward runs"),) if count else ()
    )


def _cut(graph: Graph) -> Iterator[Unread]:
    for count, listed, what in (
        (graph.counts[0], graph.written, "saved tensors that were written"),
        (graph.counts[2], graph.memoryless, "saved tensors without memory"),
    ):
        if count > len(listed):
            yield Unread(name=f"{count} {what}", reason=f"the first {len(listed)} are explained")


def _roots(asked: object, caller: Caller, call: str) -> list[tuple[str, Any]]:
    """Answer the tensors and nodes handed in, with their names."""
    named = named_objects(asked)
    if named is None:
        name = caller.argument("loss" if call == "check_graph" else "roots")
        several = type(asked) in (list, tuple)
        items: Iterable[Any] = asked if several else (asked,)  # type: ignore[assignment]
        named = [(f"{name}[{number}]" if several else name, root) for number, root in enumerate(items)]
    found = [(name, cast("GradientEdge", root).node if type(root) is GradientEdge else root) for name, root in named]
    for name, root in found:
        if not C.is_tensor(root) and not C.is_node(root):
            raise TypeError(
                f"{call}() takes a tensor with a graph, a node of autograd, or a list or dict of these; "
                f"{name} is of type {class_name(type(root))}"
            )
    return found


class _Names(NamedTuple):
    """What can be named."""

    tensors: list[Known]
    arrays: list[ArrayRecord]


def _known(roots: Sequence[tuple[str, Any]], more: Sequence[tuple[str, Any]] = ()) -> _Names:
    """Answer the tensors that can be named: those handed in, the caller's variables and more, modules' parameters."""
    scope: list[tuple[str, Any]] = [*roots]
    for name, value in (*scope_names(), *more):
        if _is_named(value):
            scope.append((name, value))
        elif name in ("self", "cls"):
            scope += [(f"{name}.{key}", inner) for key, inner in attributes(value).items() if _is_named(inner)]
    found = find_tensors(scope, most=MAX_TENSORS)
    tensors = [
        Known(place.path, C.read(place.tensor), is_parameter(place.tensor))
        for place in found.places
        if place.tensor is not None
    ]
    return _Names(tensors, [read_array(place.path, place.tensor) for place in found.arrays])


def _is_named(value: object) -> bool:
    return C.is_tensor(value) or derives(type(value), nn.Module) or is_array_class(type(value))


def _saved(roots: Sequence[Any], graph: Graph, live: Live, *, everything: bool) -> tuple[SavedTensor, ...]:
    slots = C.saved_tensors(roots, None, None, everything)[0]
    unseen = {
        record.storage.address
        for *_, record, _ in slots
        if record is not None and record.storage is not None and record.python is None
    }
    in_python = {address for address, over in live.over(unseen).items() if any(entry.in_python for entry in over)}
    over: dict[int, list[str]] = {}
    for node, _, argument, index, _, _, record, _ in slots:
        if record is not None and record.storage is not None:
            over.setdefault(record.storage.address, []).append(_held_by(node, argument, index))
    found = []
    seen: set[int] = set()
    for node, address, argument, index, state, expected, record, _ in slots:
        storage = None if record is None else record.storage
        if storage is not None:
            if storage.address in seen:
                continue
            seen.add(storage.address)
        held_by = _held_by(node, argument, index)
        others = [] if storage is None else over[storage.address]
        found.append(
            SavedTensor(
                held_by=held_by,
                node=address,
                state=cast("_State", state),
                expected_version=expected,
                version=None if record is None else record.impl.version,
                name=None if record is None else graph.name_of(record),
                in_python=record is not None
                and (record.python is not None or (storage is not None and storage.address in in_python)),
                dtype=None if record is None else record.impl.dtype,
                shape=None if record is None else record.impl.shape,
                storage=None if storage is None else storage.address,
                held_bytes=storage.nbytes if storage is not None and isinstance(storage.nbytes, int) else None,
                also_held_by=tuple(dict.fromkeys(other for other in others if other != held_by)),
            )
        )
    return tuple(sorted(found, key=lambda one: -(one.held_bytes or 0)))


def _held_by(node: str, argument: str, index: int | None) -> str:
    return f"{node.rpartition('::')[2]}._saved_{slot_text(argument, index)}"
