"""What modules have registered, read from their own tables: no property, no hook and no state_dict() is run."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from tensorplay.classes import derives, mro, namespace
from tensorplay.walk import is_parameter

__all__ = ["SCRIPTED", "Modules", "Orphans", "Slot", "collection_paused", "held_by", "lists_in", "orphans_of"]

SCRIPTED = "a scripted module"
_OWN_LOADING = "_load_from_state_dict"
# Theirs add what old checkpoints lack: what it is, is known here.
_KNOWN_LOADERS = (nn.Module, _NormBase)


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Let no automatic collection start: thousands of new objects would bring one about, and none is garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Slot(NamedTuple):
    """One entry of a module's tables; refers to the tensor, so it lives no longer than the call."""

    key: str
    """As state_dict() names it."""
    module: int
    """The module's number."""
    is_parameter: bool
    """Whether it is in ``_parameters``; otherwise it is a buffer."""
    is_persistent: bool
    """Whether state_dict() has it."""
    tensor: Any
    record: Any

    @property
    def has_memory(self) -> bool:
        """Whether it could have values: it is neither on meta nor fake, and not still to be shaped."""
        return not self.is_meta and self.record.kind not in ("fake", "uninitialized")

    @property
    def is_meta(self) -> bool:
        """Whether it is on meta, as no fake tensor is."""
        return bool(self.record.impl.device == "meta" and self.record.kind != "fake")

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, 0 where that is not known."""
        impl = self.record.impl
        return impl.numel * impl.itemsize if isinstance(impl.numel, int) else 0


class _Kind(NamedTuple):
    """What is not as of most modules about a class."""

    loads_itself: bool
    has_extra_state: bool
    is_scripted: bool
    is_absent: bool
    """It is None's."""

    @classmethod
    def of(cls, kind: type) -> _Kind:
        """Look at a class; it is asked nothing."""
        if not derives(kind, nn.Module):
            return cls(False, False, False, kind is type(None))
        return cls(
            _owner(kind, _OWN_LOADING) not in _KNOWN_LOADERS,
            _owner(kind, "set_extra_state") is not nn.Module,
            derives(kind, torch.jit.ScriptModule),
            False,
        )


class Modules:
    """The tables of a module and of all in it, as load_state_dict() goes through them: shared ones by each path.

    Args:
        model: the outermost module.
        prefix: what every key begins with.
    """

    def __init__(self, model: Any, prefix: str = "") -> None:
        self.model = model
        self.loaders: dict[str, str] = {}
        """What of the modules loads in a way of its own, by their paths."""
        self.renaming: list[str] = []
        """Of these, by their paths, what may take a key by another name."""
        self.deciding: list[str] = []
        """Modules with a hook after loading, which may forgive keys that are missing or too many."""
        self.extra_states: list[str] = []
        """Keys of what modules keep beside their tables."""
        self.absent: list[str] = []
        """Paths of what is None where a module could be: load_state_dict() accepts any key below them."""
        self.has_value: dict[str, str] = {}
        """Of keys on meta whose value an offload hook has: the device that the value is on, or where it is kept."""
        self._by_path: dict[str, int] | None = None
        self.slots, self._modules = C.registered(model, Slot, prefix)
        self._read()

    def _read(self) -> None:
        kinds = {cls: _Kind.of(cls) for cls in {type(module) for _, module, _ in self._modules}}
        odd = {cls for cls, kind in kinds.items() if any(kind)}
        hooks: list[tuple[str, Any]] = []
        for path, module, has_hooks in self._modules:
            if not has_hooks and type(module) not in odd:
                continue  # as most are
            cls = type(module)
            loads_itself, has_extra, is_scripted, is_absent = kinds[cls]
            if is_absent:
                self.absent.append(path)
                continue
            if is_scripted:
                self.loaders[path] = SCRIPTED
                self.renaming.append(path)
                continue
            own = C.instance_dict(module)
            assert own is not None  # it was read of it
            if loads_itself:
                self.loaders[path] = f"{cls.__name__}.{_OWN_LOADING}()"
            elif own.get("_load_state_dict_pre_hooks"):
                self.loaders[path] = "a hook before loading"
                loads_itself = not all(map(_is_of_fsdp, own["_load_state_dict_pre_hooks"].values()))
            if loads_itself:
                self.renaming.append(path)
            if not all(map(_is_of_fsdp, (own.get("_load_state_dict_post_hooks") or {}).values())):
                self.deciding.append(path)
            if has_extra:
                self.extra_states.append(path + _EXTRA_STATE_KEY_SUFFIX)
            if "_hf_hook" in own:
                hooks += ((path, weights) for weights in _weights_of(own["_hf_hook"]))
        for slot in self.slots if hooks else ():
            if slot.is_meta:
                for path, weights in hooks:
                    place = _place_in(weights, slot.key[len(path) :]) if slot.key.startswith(path) else None
                    if place is not None:
                        self.has_value[slot.key] = place

    def items(self) -> Iterator[tuple[str, Any]]:
        """Answer the modules with their paths, which end in a dot."""
        return ((path, module) for path, module, _ in self._modules if module is not None)

    def hooked(self) -> Iterator[tuple[str, Any]]:
        """Answer those that have hooks of loading."""
        return ((path, module) for path, module, has_hooks in self._modules if has_hooks and module is not None)

    def each(self) -> Iterator[Any]:
        """Answer the modules."""
        return (module for _, module in self.items())

    def put(self, slot: Slot, tensor: Any) -> None:
        """Set the entry of a module's table, and of lists of its own as an LSTM has; no hook of registration is run."""
        own = C.instance_dict(self._modules[slot.module][1])
        assert own is not None  # the slot was read of it
        own["_parameters" if slot.is_parameter else "_buffers"][slot.key.rpartition(".")[2]] = tensor
        for listed in lists_in(own):
            listed[:] = [tensor if one is slot.tensor else one for one in listed]

    def module_of(self, slot: Slot) -> tuple[str, Any]:
        """Answer the module that has an entry, and its path before it."""
        path, module, _ = self._modules[slot.module]
        return path, module

    def place_of(self, key: str) -> tuple[int, str]:
        """Answer the module that has a key's entry, which may be there under several paths, and the entry's name."""
        path, dot, name = key.rpartition(".")
        if self._by_path is None:
            self._by_path = {path: id(module) for path, module in self.items()}
        return self._by_path[path + dot], name

    @property
    def count(self) -> int:
        """How many modules there are, each by all its paths."""
        return len(self._modules) - len(self.absent)

    def may_lack(self, slot: Slot) -> bool:
        """Tell whether a checkpoint of before torch 0.4.1 may lack it: load_state_dict() then leaves it as it is."""
        return slot.key.endswith("num_batches_tracked") and isinstance(self._modules[slot.module][1], _NormBase)


def lists_in(own: dict[str, Any]) -> list[list[Any]]:
    """Answer the lists in which a module keeps tensors beside its tables."""
    return [value for value in own.values() if type(value) is list and any(map(C.is_tensor, value))]


def _is_of_fsdp(hook: Any) -> bool:
    """Tell whether a hook of loading is FSDP2's own, which renames nothing and forgives nothing."""
    function = (C.instance_dict(hook) or {}).get("hook", hook)
    module = str(getattr(getattr(function, "__func__", function), "__module__", ""))
    return module.startswith(("torch.distributed.fsdp._fully_shard", "torch.distributed._composable"))


def _owner(cls: type, name: str) -> type:
    return next(base for base in mro(cls) if name in namespace(base))


def _items(table: Any) -> list[tuple[str, Any]]:
    return list(table.items()) if isinstance(table, dict) else []


def _weights_of(hook: Any, depth: int = 0) -> Iterator[Any]:
    """Answer where an offload hook, or one of several in a sequence, keeps the values."""
    own = C.instance_dict(hook) or {}
    if own.get("weights_map") is not None:
        yield own["weights_map"]
    inner = own.get("hooks")
    if isinstance(inner, (list, tuple)) and depth < 5:
        for one in inner:
            yield from _weights_of(one, depth + 1)


def _place_in(weights: Any, name: str, depth: int = 0) -> str | None:
    """Say where a mapping of an offload hook has a value; None for one that it lacks. Nothing of it is called."""
    if isinstance(weights, dict):
        value = dict.get(weights, name)
        if not C.is_tensor(value):
            return None if value is None else "a hook"
        device = C.read(value).impl.device
        return None if device == "meta" else str(device)
    own = C.instance_dict(weights) or {}
    if depth < 5 and "dataset" in own and isinstance(own.get("prefix"), str):
        return _place_in(own["dataset"], own["prefix"] + name, depth + 1)
    place = _place_in(own["state_dict"], name, depth + 1) if isinstance(own.get("state_dict"), dict) else None
    if place is None and isinstance(own.get("index"), dict) and name in own["index"]:
        place = "disk"
    return place


class Orphans(NamedTuple):
    """Parameters that an optimizer holds and no module has."""

    optimizer: str
    held: int
    """How many parameters the optimizer holds."""
    shared: int
    """How many of these are the modules' own objects."""
    sharing_storage: int
    """How many others lie over the storage of one that is."""
    parameters: list[tuple[str, Any]]
    """Path and record of each."""
    replaced_by: list[str]
    """Keys of the parameters that no optimizer holds and that have their shapes and types."""

    @property
    def nbytes(self) -> int:
        """Bytes of their storages, each counted once."""
        found = {one.storage.address: one.storage.nbytes for _, one in self.parameters if one.storage is not None}
        return sum(nbytes for nbytes in found.values() if isinstance(nbytes, int))


class _Held:
    """What one optimizer holds."""

    def __init__(self, name: str, optimizer: Any, own: set[int]) -> None:
        self.name = name
        fields = C.instance_dict(optimizer) or {}
        groups = fields.get("param_groups")
        self.parameters: list[tuple[str, Any]] = [
            (f"{name}.param_groups[{number}].params[{index}]", tensor)
            for number, group in enumerate(groups if isinstance(groups, list) else ())
            if isinstance(group, dict) and isinstance(group.get("params"), (list, tuple))
            for index, tensor in enumerate(group["params"])
            if C.is_tensor(tensor)
        ]
        self.references = Counter(id(pair[1]) for pair in self.parameters)
        state = fields.get("state")
        if isinstance(state, dict):
            self.references.update(id(key) for key in list(dict.keys(state)) if C.is_tensor(key))
        self.strangers = [pair for pair in self.parameters if id(pair[1]) not in own]


def held_by(optimizers: Iterable[tuple[str, Any]]) -> set[int]:
    """Answer which tensors some optimizers hold, by identity."""
    return {id(pair[1]) for name, one in optimizers for pair in _Held(name, one, set()).parameters}


def orphans_of(optimizers: Iterable[tuple[str, Any]], slots: Sequence[Slot], observer_refs: int = 0) -> list[Orphans]:
    """Find what optimizers hold that is no parameter of these modules, nor of any other one that is alive.

    What a script keeps beside its modules is none: a parameter is an orphan where nobody but optimizers holds it, or
    where an ``nn.Parameter`` of the same shape and type stands, without an optimizer, for each that an optimizer has.

    Args:
        optimizers: with their names.
        slots: what the modules have registered.
        observer_refs: how many references the caller holds to each parameter.
    """
    own = {id(slot.tensor) for slot in slots}
    holders = [_Held(name, optimizer, own) for name, optimizer in optimizers]
    suspects = [one for one in holders if one.strangers]
    if not suspects:
        return []
    references: Counter[int] = sum((one.references for one in holders), Counter())
    elsewhere = _registered(pair[1] for one in suspects for pair in one.strangers)
    storages = {slot.record.storage.address for slot in slots if slot.record.storage is not None and slot.has_memory}
    bereft = [
        slot
        for slot in slots
        if slot.is_parameter and id(slot.tensor) not in references and slot.record.impl.requires_grad is not False
    ]
    found = []
    for one in suspects:
        # The pair and the call hold one reference each.
        read = [(pair[0], C.read(pair[1], 2 + observer_refs), id(pair[1])) for pair in one.strangers]
        strangers = [(path, record, number) for path, record, number in read if number not in elsewhere]
        forms = Counter(_form(record) for _, record, _ in strangers)
        counterparts = []
        for slot in bereft:
            if forms[_form(slot.record)] > 0:
                forms[_form(slot.record)] -= 1
                counterparts.append(slot.key)
        replaced = len(strangers) == len(one.parameters) == len(counterparts) > 1
        replaced = replaced and all(is_parameter(pair[1]) for pair in one.strangers)
        orphans = [
            (path, record) for path, record, number in strangers if replaced or _holders(record) <= references[number]
        ]
        if orphans:
            shared = sum(id(pair[1]) in own for pair in one.parameters)
            sharing = sum(record.storage is not None and record.storage.address in storages for _, record, _ in read)
            found.append(Orphans(one.name, len(one.parameters), shared, sharing, orphans, counterparts))
    return found


def _holders(record: Any) -> int:
    """Count the references of Python code to a tensor's object: not the one that its impl, held in C++, has itself."""
    own = 1 if record.impl.use_count > 1 and record.python.slot_is_self else 0
    return int(record.python.refcount - own)


def _form(record: Any) -> tuple[Any, ...]:
    return record.impl.shape, record.impl.dtype


def _registered(tensors: Iterable[Any]) -> set[int]:
    """Answer which tensors any module that is alive has registered."""
    wanted = {id(tensor) for tensor in tensors}
    return {
        id(tensor)
        for obj in gc.get_objects()
        if derives(type(obj), nn.Module)
        for table in ("_parameters", "_buffers")
        for _, tensor in _items((C.instance_dict(obj) or {}).get(table))
        if id(tensor) in wanted
    }
