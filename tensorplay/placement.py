"""What lies on which device: every tensor that modules and optimizers hold, registered or not, as one native walk read
it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
from torch import nn
from torch.utils import _python_dispatch
from torch.utils.data import DataLoader, Dataset, Sampler

from tensorplay.layers import Lying, PlacementSummary, TensorRecord
from tensorplay.reports import Read
from tensorplay.walk import attribute_text, key_text
from tensorplay.words import same_device

__all__ = ["Group", "Member", "Placement"]

_OF_OPTIMIZER = re.compile(r"\.(state|param_groups)\[")
_MOST_MEMBERS = 1000
_MOST_PARAMETERS = 100_000
_DATA = (Dataset, DataLoader, Sampler)


def _passed_over() -> tuple[type, ...]:
    """Answer the classes that are not looked into: what holds data or ranks is on the CPU on purpose."""
    mesh = sys.modules.get("torch.distributed.device_mesh")
    return _DATA if mesh is None else (*_DATA, mesh.DeviceMesh)


class Group(NamedTuple):
    """Tensors of which all device facts are the same; refers to none of them."""

    role: str
    """How they are held: parameter, buffer, attribute, hook, gradient, local, base, state, own attribute, tensor."""
    device: str | None
    """What the impl says, ``device_opt_``."""
    label: str | None
    """What the DataPtr says."""
    backend: str | None
    """What the key set computes on."""
    allocator: str | None
    """What the storage's allocator serves."""
    owner: str | None
    """What the driver answered, where it was asked."""
    driver: str
    """answered; denied: not its own; absent: no driver for it in this process; unknown."""
    was_asked: bool
    """Whether the driver was asked."""
    kind: str
    """The tensors' kind."""
    is_number: bool
    """Whether they are on the CPU and have no dimension, which computes with every device, or no element."""
    is_computed: bool
    """Whether they have a grad_fn."""
    has_offload_hook: bool
    """Whether a hook moves the module's tensors about."""
    is_registered: bool
    """Whether the module is: one in a plain list is not."""
    answers_device: bool
    """Whether the class answers ``.device`` in Python: it is not asked."""
    key: Any
    """Of an optimizer's state."""
    around: list[str]
    """The devices to compare with: of the module's own tensors, of all in it, or of the one tensor it belongs to."""
    model: list[str]
    """The devices of everything registered."""
    tensors: int
    """How many they are."""
    nbytes: int
    """Bytes of their storages, each counted where it was met first."""
    number: int
    """Of the group."""

    @property
    def expected(self) -> list[str]:
        """The devices that they could be on: where a part of a model has no memory yet, those of the rest."""
        real = [device for device in self.model if device != "meta"]
        return real if real and set(self.around) <= {"meta"} else self.around

    @property
    def is_elsewhere(self) -> bool:
        """Whether they are on none of the devices they could be on."""
        return (
            self.device is not None
            and bool(self.expected)
            and not any(same_device(self.device, one) for one in self.expected)
        )


class Member(NamedTuple):
    """One tensor of a group; refers to nothing."""

    path: str
    module: str | None
    """The module that holds it."""
    record: TensorRecord | None
    """None for one that no Python object stands for."""
    like: tuple[str, ...]
    """What the module has registered with the same shape and data type."""
    owner: int
    """Number of the parameter that an optimizer's state belongs to."""


class Placement:
    """What lies where in some modules, optimizers and tensors; refers to them, so it lives no longer than the call.

    Args:
        roots: modules and tensors, with their names.
        optimizers: with theirs.
        gradients: whether those that autograd keeps are read too.
    """

    def __init__(
        self, roots: Sequence[tuple[str, Any]], optimizers: Sequence[tuple[str, Any]] = (), *, gradients: bool = True
    ) -> None:
        self._names = [name for name, _ in (*roots, *optimizers)]
        self._roots = [root for _, root in roots]
        self._optimizers = [optimizer for _, optimizer in optimizers]
        self._gradients = gradients
        self._numbers: dict[int, int] = {}
        self.modules, groups = C.placement(nn.Module, self._roots, self._optimizers, gradients, _passed_over())
        self.groups = [Group._make((*group[:-1], number)) for number, group in enumerate(groups)]

    def of(self, *roles: str) -> Iterator[Group]:
        """Answer the groups of some roles."""
        return (group for group in self.groups if group.role in roles)

    def by_group(self, groups: Iterable[Group]) -> Iterator[tuple[Group, list[Member]]]:
        """Answer the tensors of some groups, the first thousand of each: one walk for all of them."""
        wanted = list(groups)
        found: list[list[Member]] = [[] for _ in self.groups]
        for path, module, tensor, number in self._members(wanted, _MOST_MEMBERS):
            read = None if tensor is None else Read(self._text(path), C.read(tensor, 3)).model()
            holder = None if module is None else self._text(module)
            like = () if read is None or module is None else tuple(self._alike(module, read))
            found[number].append(Member(self._text(path), holder, read, like, self._number(path)))
        return ((group, found[group.number]) for group in wanted if found[group.number])

    def members(self, groups: Iterable[Group]) -> list[Member]:
        """Answer the same without their groups."""
        return [member for _, members in self.by_group(groups) for member in members]

    def fake_modes(self, groups: Iterable[Group]) -> list[Any]:
        """Answer the modes that the fake tensors of some groups were made in."""
        tensors = (tensor for *_, tensor, _ in self._members(groups, _MOST_MEMBERS) if tensor is not None)
        modes = ((C.instance_dict(tensor) or {}).get("fake_mode") for tensor in tensors)
        return list({id(mode): mode for mode in modes if mode is not None}.values())

    def has_active(self, modes: Iterable[Any]) -> bool:
        """Tell whether one of some modes is at work now."""
        stack = _python_dispatch._get_current_dispatch_mode_stack()
        return any(any(mode is active for active in stack) for mode in modes)

    def summary(self, stack: tuple[str, ...] = ()) -> PlacementSummary:
        """Answer it as plain data: how many tensors of each role are on each device, and where that was asked."""
        rows: dict[tuple[str, str], tuple[int, int]] = {}
        for group in self.groups:
            where = (group.role, group.device or "no device")
            count, nbytes = rows.get(where, (0, 0))
            rows[where] = (count + group.tensors, nbytes + group.nbytes)
        return PlacementSummary(
            roots=tuple(self._names),
            stack=stack,
            modules=self.modules,
            rows=tuple(
                Lying(role=role, device=device, tensors=count, nbytes=nbytes)
                for (role, device), (count, nbytes) in rows.items()
            ),
            asked=sum(group.tensors for group in self.groups if group.was_asked),
            answering=sum(group.tensors for group in self.groups if group.answers_device),
            offloaded=sum(group.tensors for group in self.groups if group.has_offload_hook),
        )

    def mapping_of(self, pointer: int) -> str | None:
        """Say what the process's memory map has at an address; None where nothing is mapped there."""
        found = C.find_mappings([(pointer, pointer + 1)])[0]
        if not found:
            return None
        *_, permissions, path = found[0]
        return f"{path or 'memory without a file'} ({permissions})"

    def _members(self, groups: Iterable[Group], most: int) -> Iterator[Any]:
        """Walk again, now for the paths of some groups: (path, module's path, tensor, number of the group)."""
        numbers = [group.number for group in groups]
        if not numbers:
            return
        asked = (nn.Module, self._roots, self._optimizers, self._gradients, _passed_over(), most, numbers)
        answers = C.placement(*asked)[1]
        for number in numbers:
            # Another thread may have changed a module meanwhile.
            if number < len(answers):
                yield from ((*member, number) for member in answers[number][-1])

    def _text(self, path: Sequence[tuple[str, Any, int]]) -> str:
        text = ""
        for kind, key, index in path:
            if kind == "root":
                text = self._names[index]
            elif kind in ("module", "attribute"):
                text = attribute_text(text, key)
            elif kind == "item":
                text += f"[{index}]"
            elif kind == "key":
                if C.is_tensor(key):
                    text += f"[{self._parameters.get(id(key), 'a tensor')}]"
                elif text.endswith("]") and type(key) is str and key.isidentifier() and _OF_OPTIMIZER.search(text):
                    text += f".{key}"
                else:
                    text += f"[{key_text(key)}]"
            elif kind == "variable":
                text += f" → variable {key.__code__.co_freevars[index]}"
            elif key == "gradient":
                text += ".grad"
            else:
                text += f" → {key}"
        return text

    @functools.cached_property
    def _parameters(self) -> dict[int, str]:
        """Paths of parameters, by the identity of their objects."""
        members = self._members(self.of("parameter", "attribute", "tensor"), _MOST_PARAMETERS)
        return {id(tensor): self._text(path) for path, _, tensor, _ in members if tensor is not None}

    def _number(self, path: Sequence[tuple[str, Any, int]]) -> int:
        owners = [id(key) for kind, key, _ in path if kind == "key" and C.is_tensor(key)]
        return self._numbers.setdefault(owners[0], len(self._numbers)) if owners else 0

    def _alike(self, module: Sequence[tuple[str, Any, int]], record: TensorRecord) -> Iterator[str]:
        """Name what a module has registered that has the shape and the data type of a tensor."""
        obj: Any = None
        for kind, key, index in module:
            if kind == "root":
                obj = self._roots[index]
            elif kind == "module":
                obj = (C.instance_dict(obj) or {}).get("_modules", {}).get(key)
            else:
                return
        own = C.instance_dict(obj) or {}
        for table in (own.get("_parameters"), own.get("_buffers")):
            for name, tensor in (table or {}).items():
                if C.is_tensor(tensor):
                    other = C.read(tensor).impl
                    if (other.shape, other.dtype) == (record.impl.shape, record.impl.dtype):
                        yield name
