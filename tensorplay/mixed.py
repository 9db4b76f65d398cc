"""Modules that have DTensors and plain tensors in their own tables: read from dicts and slots, no property is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch
from torch import nn

from tensorplay.bodies import ShardingState, is_torchs_own, placements_of
from tensorplay.classes import class_name, derives, mro, namespace
from tensorplay.layers import WRAPPERS
from tensorplay.modules import Modules, Slot

__all__ = ["Distributed", "Mixture", "mixtures_of"]

_NEVER_DISTRIBUTED = frozenset({id(torch.Tensor), id(nn.Parameter)})
_MANAGED = "_is_fsdp_managed_module"
"""What fully_shard() notes at every module that it manages."""


class Distributed(NamedTuple):
    """A registered DTensor."""

    slot: Slot
    placements: tuple[str, ...]
    """As repr() says each; empty where that is not known."""
    is_torchs: bool
    """Whether its class is torch's own."""


class Mixture(NamedTuple):
    """One module's DTensors, and the plain tensors among them."""

    path: str
    """The module's, without a dot at its end."""
    kind: str
    """Its class's name."""
    distributed: list[Distributed]
    plain: list[Slot]

    @property
    def form(self) -> tuple[Any, ...]:
        """What is alike where several modules have one cause."""
        names = [(name_in(one.slot), one.placements) for one in self.distributed]
        return self.kind, tuple(names), tuple(map(name_in, self.plain))


def name_in(slot: Slot) -> str:
    """Answer the name that a tensor has in its module."""
    return slot.key.rpartition(".")[2]


def mixtures_of(modules: Sequence[Modules], sharding: Callable[[], Iterable[ShardingState]]) -> list[Mixture]:
    """Find the modules in whose own tables plain tensors stand among DTensors, each once.

    What becomes plain before forward is neither: DTensors that fully_shard() of torch or of another library gathers,
    and those under whose name the class has a property. Tensors of one element may meet DTensors, and are left out.
    """
    found: dict[int, Mixture] = {}
    gathering: _Gathering | None = None
    for one in modules:
        if {id(type(slot.tensor)) for slot in one.slots} <= _NEVER_DISTRIBUTED:
            continue  # as of most models
        by_module: dict[int, list[Slot]] = {}
        for slot in one.slots:
            by_module.setdefault(slot.module, []).append(slot)
        for slots in by_module.values():
            distributed = [known for slot in slots if (known := _distributed(slot)) is not None]
            if not distributed or len(distributed) == len(slots):
                continue
            path, module = one.module_of(slots[0])
            if id(module) in found:
                continue
            gathering = gathering or _Gathering(sharding())
            distributed = [
                known
                for known in distributed
                if not gathering.makes_plain(module, known.slot) and not _is_property(module, known.slot)
            ]
            plain = [slot for slot in slots if C.local_tensor(slot.tensor) is None and _meets_others(slot)]
            if distributed and plain:
                kind = class_name(type(module))
                found[id(module)] = Mixture(path.removesuffix("."), kind, distributed, plain)
    return list(found.values())


def _distributed(slot: Slot) -> Distributed | None:
    if id(type(slot.tensor)) in _NEVER_DISTRIBUTED:
        return None
    if C.local_tensor(slot.tensor) is None:
        return None
    return Distributed(slot, placements_of(slot.tensor), is_torchs_own(type(slot.tensor)))


def _meets_others(slot: Slot) -> bool:
    """Tell whether an operator would refuse it beside a DTensor: not of a class of its own, and not of one element."""
    return slot.record.kind not in WRAPPERS and slot.record.kind != "uninitialized" and slot.record.impl.numel != 1


def _is_property(module: Any, slot: Slot) -> bool:
    """Tell whether the module's class answers for a name: forward then sees what it answers, not the table's entry."""
    return any(derives(type(namespace(base).get(name_in(slot))), property) for base in mro(type(module)))


class _Gathering:
    """Which registered DTensors are put aside for plain tensors before forward."""

    def __init__(self, sharding: Iterable[ShardingState]) -> None:
        self._distributed_again: dict[tuple[int, str], bool] = {}
        for one in sharding:
            # Under tensor parallelism it was a DTensor before, and is gathered to one.
            again = C.own_value(one.state, "is_dtensor") is True
            for place in _places_of(C.own_value(one.state, "_module_info")):
                self._distributed_again[place] = again

    def makes_plain(self, module: Any, slot: Slot) -> bool:
        """Tell it of one entry; buffers are not gathered."""
        if not slot.is_parameter:
            return False
        again = self._distributed_again.get((id(module), name_in(slot)))
        if again is None:  # by a module that is not among these, or not at all
            return bool((C.instance_dict(module) or {}).get(_MANAGED))
        return not again


def _places_of(info: Any) -> Iterator[tuple[int, str]]:
    """Answer the modules that have a sharded parameter, by identity, and its name in each."""
    modules, names = C.own_value(info, "shared_modules"), C.own_value(info, "shared_param_names")
    yield id(C.own_value(info, "module")), C.own_value(info, "param_name")
    if isinstance(modules, list) and isinstance(names, list):
        yield from zip(map(id, modules), names, strict=False)
