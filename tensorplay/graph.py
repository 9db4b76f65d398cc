"""check_graph() and saved_for_backward(): the autograd graph before backward, read without running it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch
from torch import nn

from tensorplay.backward import Graph, slot_text
from tensorplay.callers import Caller
from tensorplay.classes import derives
from tensorplay.inspection import MAX_TENSORS, named_objects, outside_compiled_code
from tensorplay.layers import GraphSummary, SavedTensor, Unread
from tensorplay.live import Live, scope_names
from tensorplay.reports import Report
from tensorplay.rules.registry import graph_rules
from tensorplay.selection import lenient_config, select_findings
from tensorplay.walk import attributes, find_tensors
from tensorplay.words import plural

__all__ = ["GraphReport", "check_graph", "saved_for_backward"]


class GraphReport(Report):
    """A report whose text is the graph behind some tensors."""

    __slots__ = ()

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
def check_graph(loss: object) -> GraphReport:
    """Look through the graph behind a loss before backward: what it would stumble over, and what it costs.

    Args:
        loss: a tensor or a node of autograd; or several, as a list, or as a dict of name to tensor.

    Returns:
        The report: ``.findings``, ``.graph`` with the sums by kind of node and by module, ``str()``, ``.to_json()``.
        It prints nothing.

    Raises:
        TypeError: it is none of these.

    Cost: half a microsecond a node, without recursion; some 20 microseconds for each tensor and module among the
        variables of the functions that run, for their names. Runs no operator and no hook, unpacks nothing.

    Source: torch/csrc/autograd/{node,saved_variable}.h, torch/csrc/autograd/generated/Functions.h, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    roots = _roots(loss, caller, "check_graph")
    graph = Graph.of(roots, _known(roots))
    findings = [finding for rule in graph_rules() for finding in rule.in_graph(graph)]
    selection = select_findings(findings, caller=caller, config=lenient_config(caller))
    return GraphReport(
        [], selection.findings, graph=graph.summary(), unread=_busy(graph.busy), focus="graph", **selection.fields()
    )


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
    if roots is None:
        named = [("everything alive", root) for root in Live().roots if type(root) is not _SAVED_ARGUMENT]
    else:
        named = _roots(roots, caller, "saved_for_backward")
    graph = Graph.of(named, _known(named if roots is not None else ()))
    return GraphReport(
        [],
        graph=graph.summary() if roots is not None else _all_alive(graph),
        saved=_saved([root for _, root in named], graph),
        unread=_busy(graph.busy),
        focus="graph",
    )


_State = Literal["held", "packed_by_hook", "released"]
_SAVED_ARGUMENT = torch._C._autograd.SavedTensor


def _all_alive(graph: Graph) -> GraphSummary:
    return graph._replace(roots=("everything alive",)).summary()


def _busy(count: int) -> tuple[Unread, ...]:
    return (
        (Unread(name=plural(count, "node"), reason="held by another thread, as while backward runs"),) if count else ()
    )


def _roots(asked: object, caller: Caller, call: str) -> list[tuple[str, Any]]:
    """Answer the tensors and nodes handed in, with their names."""
    named = named_objects(asked)
    if named is None:
        name = caller.argument("loss" if call == "check_graph" else "roots")
        several = type(asked) in (list, tuple)
        items: Iterable[Any] = asked if several else (asked,)  # type: ignore[assignment]
        named = [(f"{name}[{number}]" if several else name, root) for number, root in enumerate(items)]
    return named


class _Known(NamedTuple):
    path: str
    record: Any


def _known(roots: Sequence[tuple[str, Any]]) -> list[_Known]:
    """Answer the tensors that the caller can name: those handed in, variables, and modules' parameters and buffers."""
    scope: list[tuple[str, Any]] = [*roots]
    for name, value in scope_names():
        if _is_named(value):
            scope.append((name, value))
        elif name in ("self", "cls"):
            scope += [(f"{name}.{key}", inner) for key, inner in attributes(value).items() if _is_named(inner)]
    places = find_tensors(scope, most=MAX_TENSORS).places
    return [_Known(place.path, C.read(place.tensor)) for place in places if place.tensor is not None]


def _is_named(value: object) -> bool:
    return C.is_tensor(value) or derives(type(value), nn.Module)


def _saved(roots: Sequence[Any], graph: Graph) -> tuple[SavedTensor, ...]:
    slots = C.saved_tensors(roots)[0]
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
                in_python=record is not None and record.python is not None,
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
