"""DTensors of any library, by their mechanism: the body, the local tensor, and the sharding state that has both.

A DTensor is a tensor of a class of its own that keeps a local tensor, in its dictionary or in a slot. Its body is the
tensor that C++ sees: of torch's own DTensor a wrapper without memory, of other libraries an ordinary tensor over the
local tensor's storage. Nothing of the class is run: no property, no hook, no operator.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch

from tensorplay.classes import class_name, derives, mro, namespace
from tensorplay.layers import FAULTLESS, CommunicationBuffer, DTensorLayers, Said
from tensorplay.modules import Modules, Orphans, Slot
from tensorplay.reports import Read

__all__ = [
    "Body",
    "ShardingState",
    "as_sharded",
    "bodies_in",
    "bodies_of",
    "dimension_of",
    "is_dtensor",
    "is_sharding_state",
    "is_torchs_own",
    "placements_in",
    "placements_of",
    "reread",
    "sharding_states",
    "with_sharded",
]

_TENSOR_BASES = mro(torch.Tensor)
_ANSWERS = ("device", "dtype", "shape", "is_meta", "requires_grad", "data_ptr")
"""What is asked of a tensor most, and may be answered by Python code."""
_MOST_CELLS = 20


class ShardingState(NamedTuple):
    """What a framework keeps of one sharded parameter; refers to it, so it lives no longer than the call."""

    path: str
    """The module's key of the parameter."""
    state: Any
    parameter: Any
    """What it takes the sharded parameter to be."""
    buffer: Any
    """Flat memory that it gathers from."""
    table: dict[str, Any] | None
    """The module's own table that has the parameter; None where the state does not say which."""
    name: str
    """The parameter's name there."""
    is_ready: bool
    """Whether it has begun to work: before, it takes parameter and buffer anew."""
    is_sharded: bool
    """Whether the module has the sharded parameter now, and not the gathered one."""

    @property
    def is_detached(self) -> bool:
        """Whether the module has another object than the state, which the next resharding would put back."""
        return (
            self.is_ready
            and self.is_sharded
            and self.table is not None
            and dict.get(self.table, self.name) is not self.parameter
        )


class Body(NamedTuple):
    """One DTensor; refers to it, so it lives no longer than the call."""

    path: str
    tensor: Any
    record: Any
    is_wrapper: bool
    """Whether the body has no memory by design."""
    has_key: bool
    """Whether operators are to reach its class by the body's Python key."""
    local: Any
    """None where there is none."""
    local_record: Any
    states: tuple[str, ...]
    """The worst first."""
    sharding: tuple[ShardingState, ...] = ()
    replaced_in: tuple[str, ...] = ()
    """Optimizers that hold another parameter in its place."""
    is_plain: bool = False
    """Whether it is no DTensor at all, but was handed in as one."""
    is_registered: bool = True
    """Whether a module has it, so that a look at the module finds it."""

    @property
    def state(self) -> str:
        """The worst."""
        return self.states[0]

    @property
    def placements(self) -> str | None:
        """How it lies on the mesh, as the class would print it."""
        placements = placements_of(self.tensor)
        if not placements:
            return None
        return f"({', '.join(placements)}{',' if len(placements) == 1 else ''})"

    @property
    def mesh(self) -> Any:
        """The mesh it lies on."""
        mesh = C.own_value(self.tensor, "_device_mesh")
        return C.own_value(C.own_value(self.tensor, "_spec"), "mesh") if mesh is None else mesh

    def layers(self, known: dict[int, Answers]) -> tuple[DTensorLayers, list[Read]]:
        """Answer what was read as plain data, and the records it names; `known` is what was found of classes so far."""
        reads = [Read(self.path, self.record)]
        local = alias = None
        if self.local is not None:
            local = f"{self.path}._local_tensor"
            reads.append(Read(local, self.local_record))
        if not self.is_wrapper and (made := C.data_alias(self.tensor)) is not None:
            alias = f"{self.path}.data"
            reads.append(Read(alias, made))
        buffers = []
        for one in self.sharding:
            if C.is_tensor(one.buffer):
                name = f"{self.path} in {class_name(type(one.state))}._sharded_param_data"
                record = C.read(one.buffer, 2)
                reads.append(Read(name, record))
                is_alias = _same_storage(record, self.local_record)
                buffers.append(CommunicationBuffer(record=name, aliases_local=is_alias, ready=one.is_ready))
        cls = type(self.tensor)
        mesh = self.mesh
        if id(cls) not in known:
            known[id(cls)] = _answers_of(cls)
        found = DTensorLayers(
            name=self.path,
            type=class_name(cls),
            wrapper=self.is_wrapper,
            state=self.state,
            states=self.states,
            placements=self.placements,
            mesh=None if mesh is None else class_name(type(mesh)),
            body=self.path,
            local=local,
            alias=alias,
            buffers=tuple(buffers),
            says=tuple(
                Said(attribute=name, value=None if of is None else self._fact(of, name), by=by)
                for name, of, by in known[id(cls)]
            ),
        )
        return found, reads

    def _fact(self, of: str, name: str) -> str | None:
        record = self.record if of == "body" else self.local_record
        return None if record is None else _fact(record, name)


Answers = tuple[tuple[str, str | None, str], ...]
"""What Python code answers for objects of a class: the attribute, the tensor it is taken from where that is known
without running code, who answers."""


def _answers_of(cls: type) -> Answers:
    """Tell what Python code answers for objects of a class, and from where; none of it is run."""
    found: list[tuple[str, str | None, str]] = []
    asks_class = _has_torch_function(cls)
    for name in _ANSWERS:
        owner, definition = _definition(cls, name)
        if _is_torch_tensors(owner):
            by = f"{class_name(cls)}.__torch_function__" if asks_class else "the body"
            found.append((name, None if asks_class else "body", by))
        elif _passes_on(definition, name):
            found.append((name, "local", "_local_tensor"))
        else:
            found.append((name, None, f"{class_name(owner)}.{name}"))
    return tuple(found)


def is_dtensor(tensor: object) -> bool:
    """Tell whether a tensor is a DTensor of some library."""
    return C.local_tensor(tensor) is not None


def is_torchs_own(cls: type) -> bool:
    """Tell whether a class is torch's own DTensor, or derives from it."""
    known = sys.modules.get("torch.distributed.tensor")
    return known is not None and derives(cls, known.DTensor)


def bodies_of(
    pairs: Iterable[tuple[str, Any]],
    sharding: Iterable[ShardingState] = (),
    orphans: Iterable[Orphans] = (),
) -> list[Body]:
    """Read the DTensors among some tensors.

    Args:
        pairs: tensors, with their paths.
        sharding: what frameworks keep of sharded parameters.
        orphans: what optimizers hold that no module has.
    """
    known: dict[int, list[ShardingState]] = {}
    by_path: dict[str, list[ShardingState]] = {}
    for one in sharding:
        known.setdefault(id(one.parameter), []).append(one)
        by_path.setdefault(one.path, []).append(one)
    replaced: dict[str, tuple[str, ...]] = {}
    for orphan in orphans:
        for key in orphan.replaced_by:
            replaced[key] = (*replaced.get(key, ()), orphan.optimizer)
    found = []
    for path, tensor in pairs:
        kept = C.local_tensor(tensor)
        if kept is None:
            continue
        is_wrapper, has_key, local = kept
        of_it = tuple({id(one.state): one for one in (*known.get(id(tensor), ()), *by_path.get(path, ()))}.values())
        record = C.read(tensor, 2)
        local_record = None if local is None else C.read(local, 3)
        states = ["NO_LOCAL"] if local is None or local is tensor else list(C.dtensor_states(tensor))
        body = Body(path, tensor, record, is_wrapper, has_key, local, local_record, (), of_it, replaced.get(path, ()))
        found.append(body._replace(states=_with_surroundings(body, states)))
    return found


def bodies_in(modules: Modules, sharding: Sequence[ShardingState], orphans: Iterable[Orphans] = ()) -> list[Body]:
    """Read the DTensors that modules have registered, each under its first name, and those put aside."""
    first: dict[int, tuple[str, Any]] = {}
    for slot in modules.slots:
        first.setdefault(id(slot.tensor), (slot.key, slot.tensor))
    return bodies_of(with_sharded(first.values(), sharding), sharding, orphans)


def reread(body: Body) -> Body:
    """Read a DTensor again whose body was exchanged; its local tensor, and what is around it, are as they were."""
    states = list(C.dtensor_states(body.tensor))
    return body._replace(record=C.read(body.tensor, 3), states=_with_surroundings(body, states))


_RANKS: dict[str, float] = {name: number for number, name in enumerate(C.DTENSOR_STATES)}
_RANKS |= {"DETACHED": _RANKS["STRIDE"] + 0.25, "COMM_STALE": _RANKS["STRIDE"] + 0.5}
"""The worst first; two of them only what is around a DTensor shows."""


def _with_surroundings(body: Body, states: list[str]) -> tuple[str, ...]:
    """Put in their place the states that what is around a DTensor shows, and what its placements say."""
    more = []
    if "NO_PYTHON_KEY" not in states and _is_no_part(body):  # with the key the global shape is gone
        more.append("SHAPE")
    if body.replaced_in or any(one.is_detached for one in body.sharding):
        more.append("DETACHED")
    if any(_is_stale(one, body.local_record) for one in body.sharding):
        more.append("COMM_STALE")
    if not more:
        return tuple(states)
    return tuple(sorted((*(state for state in states if state not in FAULTLESS), *more), key=_RANKS.__getitem__))


def _is_no_part(body: Body) -> bool:
    """Tell whether the local tensor of a wrapper cannot be what torch's own placements make of the global shape."""
    if not body.is_wrapper or body.local_record is None or body.local_record.kind not in ("strided", "meta"):
        return False
    whole, part = body.record.impl.shape, body.local_record.impl.shape
    placements = placements_in(body.tensor)
    if whole is None or part is None or not all(type(size) is int for size in (*whole, *part)):
        return False
    known = [_is_torchs_placement(type(one)) and class_name(type(one)) in _KEEPING for one in placements]
    if not known or not all(known):
        return False
    if len(whole) != len(part):
        return True
    sharded = {dim % len(whole) for one in placements if (dim := dimension_of(one)) is not None and whole}
    sizes = enumerate(zip(part, whole, strict=True))
    return any(size > full if dim in sharded else size != full for dim, (size, full) in sizes)


_KEEPING = frozenset({"Shard", "_StridedShard", "Replicate", "Partial"})
"""Placements that keep the number of dimensions, and cut no other than their own."""


def _is_stale(one: ShardingState, local: Any) -> bool:
    """Tell whether a framework gathers from other memory than the local tensor's."""
    if not one.is_ready or local is None or local.impl.numel == 0 or not C.is_tensor(one.buffer):
        return False
    return local.impl.device != "meta" and not _same_storage(C.read(one.buffer), local)


def _same_storage(one: Any, other: Any) -> bool:
    if one is None or other is None or one.storage is None or other.storage is None:
        return False
    return bool(one.storage.address == other.storage.address)


def sharding_states(modules: Iterable[Modules]) -> list[ShardingState]:
    """Find what frameworks keep of sharded parameters: in the hooks by which they follow a load."""
    modules = list(modules)
    states: list[tuple[Any, Any, str]] = []
    for one in modules:
        for path, module in one.hooked():
            hooks = (C.instance_dict(module) or {}).get("_load_state_dict_post_hooks") or {}
            states += ((state, module, path) for hook in hooks.values() if (state := _state_in(hook)) is not None)
    if not states:
        return []
    paths: dict[int, str] = {}
    for one in modules:
        for path, module in one.items():
            paths.setdefault(id(module), path)
    found: dict[int, ShardingState] = {}
    for state, module, path in states:
        if id(state) not in found:
            found[id(state)] = _sharding_state(state, module, path, paths)
    return list(found.values())


def _state_in(hook: Any) -> Any:
    """Answer the sharding state that a hook's closure, or its method, has; None where it has none."""
    candidates = []
    if type(hook) is types.MethodType:
        candidates.append(hook.__self__)
    elif type(hook) is types.FunctionType:
        for cell in (hook.__closure__ or ())[:_MOST_CELLS]:
            try:
                candidates.append(cell.cell_contents)
            except ValueError:  # not yet filled
                continue
    return next((one for one in candidates if is_sharding_state(one)), None)


def with_sharded(pairs: Iterable[tuple[str, Any]], sharding: Iterable[ShardingState]) -> list[tuple[str, Any]]:
    """Add to what is registered the sharded parameters that are put aside while their modules have gathered ones."""
    found = list(pairs)
    known = {id(tensor) for _, tensor in found}
    found += ((one.path, one.parameter) for one in sharding if not one.is_sharded and id(one.parameter) not in known)
    return [pair for pair in found if C.is_tensor(pair[1])]


def as_sharded(slots: Iterable[Slot], sharding: Iterable[ShardingState]) -> list[Slot]:
    """Answer what is registered with the sharded parameters in place of the gathered ones, as after resharding."""
    aside = {one.path: one.parameter for one in sharding if not one.is_sharded and C.is_tensor(one.parameter)}
    return [
        slot._replace(tensor=aside[slot.key], record=C.read(aside[slot.key], 2))
        if slot.is_parameter and slot.key in aside
        else slot
        for slot in slots
    ]


def is_sharding_state(obj: object) -> bool:
    """Tell whether an object is what a framework keeps of a sharded parameter."""
    own = C.instance_dict(obj)
    return own is not None and "sharded_param" in own and "_sharded_param_data" in own


def _sharding_state(state: Any, module: Any, path: str, paths: dict[int, str]) -> ShardingState:
    """Read a sharding state; a module that is not among those walked has the path of the hook's."""
    info = C.own_value(state, "_module_info")
    owner = C.own_value(info, "module")
    owner = module if owner is None else owner
    name = C.own_value(info, "param_name")
    name = name if type(name) is str else ""
    tables = C.instance_dict(owner) or {}
    table = tables.get("_parameters")
    phase = C.own_value(C.own_value(state, "sharded_state"), "_name_")
    return ShardingState(
        f"{paths.get(id(owner), path)}{name}",
        state,
        C.own_value(state, "sharded_param"),
        C.own_value(state, "_sharded_param_data"),
        table if name and isinstance(table, dict) else None,
        name,
        _takes_nothing_anew(state),
        phase in (None, "SHARDED"),
    )


def _takes_nothing_anew(state: Any) -> bool:
    """Tell whether a framework goes on with what it has: FSDP2 takes the buffers anew before the first forward."""
    lazily = str(type(state).__module__).startswith("torch.distributed.")
    return not lazily or C.own_value(state, "_param_fqn") is not None


def placements_in(tensor: Any) -> tuple[Any, ...]:
    """Answer a DTensor's placements; empty where they are not known."""
    placements = C.own_value(C.own_value(tensor, "_spec"), "placements")
    if placements is None:
        placements = C.own_value(tensor, "_placements")
    return tuple(placements) if type(placements) in (tuple, list) else ()


def placements_of(tensor: Any) -> tuple[str, ...]:
    """Answer the placements of a DTensor of any library, as repr() says each; empty where they are not known."""
    return tuple(map(_placement_text, placements_in(tensor)))


def _is_torchs_placement(cls: type) -> bool:
    known = sys.modules.get("torch.distributed.tensor.placement_types")
    return known is not None and vars(known).get(class_name(cls)) is cls


def dimension_of(placement: Any) -> int | None:
    """Answer the tensor's dimension that a placement shards; None where it names none."""
    if _is_torchs_placement(type(placement)):
        dim = getattr(placement, "dim", None)  # in C++ where torch has it there
        return dim if type(dim) is int else None
    return next((dim for name in ("dim", "_dim") if type(dim := C.own_value(placement, name)) is int), None)


def _placement_text(placement: Any) -> str:
    """Write a placement as its class would; one of a class of its own by its name and dimension."""
    if _is_torchs_placement(type(placement)):
        return repr(placement)
    dim = dimension_of(placement)
    return f"{class_name(type(placement))}({'' if dim is None else f'dim={dim}'})"


def _definition(cls: type, name: str) -> tuple[type, Any]:
    for base in mro(cls):
        if name in namespace(base):
            return base, namespace(base)[name]
    return torch.Tensor, None


def _is_torch_tensors(owner: type) -> bool:
    """Tell whether a class is torch.Tensor or one of its bases; by identity, as a metaclass may define equality."""
    return any(owner is base for base in _TENSOR_BASES)


def _has_torch_function(cls: type) -> bool:
    """Tell whether operators and attributes of torch.Tensor go to code of the class first."""
    owner, found = _definition(cls, "__torch_function__")
    disabled = torch._C._disabled_torch_function_impl
    return not _is_torch_tensors(owner) and found is not disabled and getattr(found, "__func__", None) is not disabled


def _passes_on(found: Any, name: str) -> bool:
    """Tell by its code whether a property or method does no more than ask the local tensor the same."""
    function = found.fget if type(found) is property else found
    if type(function) is not types.FunctionType:
        return False
    code = function.__code__
    return code.co_names == ("_local_tensor", name) and len(code.co_code) <= 100


def _fact(record: Any, name: str) -> str:
    impl = record.impl
    if name == "is_meta":
        return str(impl.device == "meta")
    if name == "data_ptr":
        return "0" if record.data is None or not record.data.data_ptr else f"{record.data.data_ptr:#x}"
    return str(list(impl.shape) if name == "shape" and impl.shape is not None else getattr(impl, name))
