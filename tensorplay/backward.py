"""What backward would meet in the graph behind some tensors: read before it runs, and without running it."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
from torch._C._autograd import SavedTensor
from torch.utils.checkpoint import _CheckpointFrame

from tensorplay.layers import GraphSummary, SavedSum

__all__ = ["Accumulation", "Changed", "Graph", "Known", "SavedAt", "slot_text"]

_NO_MODULE = "no parameters"


class SavedAt(NamedTuple):
    """A tensor that a node saved for backward; refers to neither."""

    node: str
    address: int
    """Of the node."""
    argument: str
    number: int | None
    """In a list of tensors."""
    expected_version: int
    record: Any
    """What was read of the tensor; None where it is given back."""
    root: int
    """Number of the root that leads there."""
    origin: tuple[str, int] | None = None
    """The node it came from and which of its outputs it is, as PyTorch will say it."""

    @property
    def slot(self) -> str:
        """The argument, with its index in a list."""
        return slot_text(self.argument, self.number)


def slot_text(argument: str, index: int | None) -> str:
    """Name a place for a saved tensor: ``self``, ``tensors[1]``."""
    return argument if index is None else f"{argument}[{index}]"


class Known(NamedTuple):
    """A tensor that can be named."""

    path: str
    record: Any
    """The native record."""
    is_parameter: bool


class Accumulation(NamedTuple):
    """A sum of terms that each have a graph of their own; or several roots that have, as the items of a list."""

    roots: list[int]
    """Number of the sum; or those of the terms themselves."""
    terms: int
    released: int
    """Terms that a backward ran through already."""
    weights_moved: bool
    """Whether what one place in the model saved has another version in each: an optimizer's step lies between."""
    spans_steps: bool
    """Whether it is proven that the terms come from several steps."""


class Changed(NamedTuple):
    """A saved tensor whose bytes are others than at an earlier look, though its version is the same."""

    node: str
    slot: str
    record: Any
    aliases: tuple[str, ...]
    """What lies over the same bytes under another version counter, as far as it is alive."""


class Graph(NamedTuple):
    """The graph behind some tensors, in numbers, and what in it backward would stumble over."""

    roots: tuple[str, ...]
    total: SavedSum
    busy: int
    leaf_storages: int
    leaf_nbytes: int
    counts: tuple[int, int, int]
    """How many slots were written since they were saved, are given back, have no memory."""
    written: list[SavedAt]
    released: list[SavedAt]
    memoryless: list[SavedAt]
    by_kind: list[SavedSum]
    by_leaf: list[tuple[int | None, SavedSum]]
    accumulations: list[Accumulation]
    cycles: list[int]
    """TensorImpls of leaves whose gradient has a graph that leads back to them."""
    changed: list[Changed]
    """Saved tensors whose bytes changed since an earlier look, and whose version did not."""
    names: dict[int, str]
    """What tensors are called, by the address of their TensorImpl."""
    counters: dict[int, str]
    """The same, by their version counter: a view shares its base's."""

    @classmethod
    def of(cls, named: Sequence[tuple[str, Any]], known: Sequence[Known]) -> Graph:
        """Read the graph behind some tensors and nodes.

        Args:
            named: the roots, with their names.
            known: tensors that can be named.
        """
        parameters = {
            one.record.storage.address for one in known if one.is_parameter and one.record.storage is not None
        }
        answer = C.check_graph([root for _, root in named], list(parameters))
        total, busy, leaf_storages, leaf_nbytes, *counts = answer[:7]
        written, released, memoryless, by_kind, by_leaf, accumulations, cycles = answer[7:]
        names: dict[int, str] = {}
        counters: dict[int, str] = {}
        for path, record, _ in known:
            names.setdefault(record.impl.address, path)
            if record.impl.version_counter is not None:
                counters.setdefault(record.impl.version_counter, path)
        inputs = _written_inputs([root for _, root in named]) if total[4] else []
        return cls(
            roots=tuple(name for name, _ in named),
            total=_sum("all", total),
            busy=busy,
            leaf_storages=leaf_storages,
            leaf_nbytes=leaf_nbytes,
            counts=(counts[0] + len(inputs), counts[1], counts[2]),
            written=[*(SavedAt(*entry) for entry in written), *inputs],
            released=[SavedAt(*entry) for entry in released],
            memoryless=[SavedAt(*entry) for entry in memoryless],
            by_kind=[_sum(name.rpartition("::")[2], numbers) for name, numbers in by_kind],
            by_leaf=[(leaf, _sum("", numbers)) for leaf, numbers in by_leaf],
            accumulations=[Accumulation(*entry) for entry in accumulations],
            cycles=cycles,
            changed=[],
            names=names,
            counters=counters,
        )

    def name_of(self, record: Any) -> str | None:
        """Answer what a saved tensor is called, or one that shares its version counter."""
        found = self.names.get(record.impl.address)
        if found is None and record.impl.version_counter is not None:
            found = self.counters.get(record.impl.version_counter)
        return found

    def summary(self) -> GraphSummary:
        """Answer it as plain data."""
        return GraphSummary(
            roots=self.roots,
            nodes=self.total.nodes,
            saved=self.total.saved,
            activations_held=self.total.storages,
            activation_bytes_held=self.total.nbytes,
            parameter_storages=self.leaf_storages,
            parameter_bytes=self.leaf_nbytes,
            packed=self.total.packed,
            busy=self.busy,
            written=self.counts[0],
            released=self.counts[1],
            memoryless=self.counts[2],
            by_kind=tuple(sorted((one for one in self.by_kind if one.saved), key=_rank)),
            by_module=self._by_module(),
        )

    def _by_module(self) -> tuple[SavedSum, ...]:
        found: dict[str, list[SavedSum]] = {}
        for leaf, numbers in self.by_leaf:
            path = None if leaf is None else self.names.get(leaf)
            module = _NO_MODULE if leaf is None else "not named" if path is None else _module_of(path)
            found.setdefault(module, []).append(numbers)
        sums = (_added(name, members) for name, members in found.items())
        return tuple(sorted((one for one in sums if one.saved), key=_rank))


def _written_inputs(roots: Sequence[Any]) -> list[SavedAt]:
    """Answer the inputs of checkpointed functions that were written since: what computes them again checks that."""
    saved = []
    for packed in C.packed_objects(roots):
        cells = packed.__closure__ or () if type(packed) is types.FunctionType else ()
        for frame in (cell.cell_contents for cell in cells if _is_filled(cell)):
            if type(frame) is _CheckpointFrame:
                inputs = (C.instance_dict(frame) or {}).get("saved_args", ())
                saved += [one for one in inputs if type(one) is SavedTensor]
    slots = C.saved_tensors(saved)[0] if saved else []
    return [
        SavedAt(node, address, argument, index, expected or 0, record, 0)
        for node, address, argument, index, state, expected, record, _ in slots
        if state == "held" and record is not None and record.impl.version not in (None, expected)
    ]


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _module_of(path: str) -> str:
    return path.rpartition(".")[0] or path


def _rank(one: SavedSum) -> tuple[int, int, str]:
    return (-one.nbytes, -one.saved, one.name)


def _sum(name: str, numbers: tuple[int, int, int, int, int]) -> SavedSum:
    nodes, saved, storages, nbytes, packed = numbers
    return SavedSum(name=name, nodes=nodes, saved=saved, storages=storages, nbytes=nbytes, packed=packed)


def _added(name: str, members: Sequence[SavedSum]) -> SavedSum:
    return SavedSum(
        name=name,
        nodes=sum(one.nodes for one in members),
        saved=sum(one.saved for one in members),
        storages=sum(one.storages for one in members),
        nbytes=sum(one.nbytes for one in members),
        packed=sum(one.packed for one in members),
    )
