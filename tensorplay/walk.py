"""Find the tensors in an object, each with its path.

Runs no user code: attributes come from instance dictionaries and slots, never from getattr; types decide, never
``__class__``. The exception are containers registered with torch's pytree, whose flatten function is asked, since that
is what it is registered for. Unknown things are passed over. Iterative: nesting may be as deep as it likes.
"""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree

from tensorplay._native import C

__all__ = ["Found", "attributes", "find_tensors"]

Found = tuple[str, torch.Tensor]

# What nn.Module keeps for itself in the instance dictionary, beside the three tables read by name.
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module())) - {"_parameters", "_buffers", "_modules"}
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_LEAVES = (
    type(None),
    str,
    bytes,
    bytearray,
    memoryview,
    int,
    float,
    complex,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.UntypedStorage,
    torch.Generator,
)


def find_tensors(named: Iterable[tuple[str, object]]) -> Iterator[Found]:
    """Yield every tensor reached, depth first, in the order of its container; one reached twice comes twice.

    A plain object's attributes are looked at, but not those of further plain objects that it holds.
    While a tensor is handed out, the walk itself holds one reference to it.
    """
    # path, object, whether it may be opened if it is a plain object. What is on the stack is held by its tuple, and
    # the tuple dies when it is unpacked.
    stack: list[tuple[str, Any, bool]] = [(path, obj, True) for path, obj in named]
    stack.reverse()
    seen: set[int] = set()
    names: dict[int, str] = {}
    keep: list[object] = []  # lists made by flattening: while they live, their items' ids are not used again
    while stack:
        path, obj, may_open = stack.pop()
        first = id(obj) not in seen
        seen.add(id(obj))
        is_tensor = C.is_tensor(obj)
        if is_tensor:
            names.setdefault(id(obj), path)
            yield path, obj
        if not first or issubclass(type(obj), _LEAVES) or type(obj) is torch.Tensor:
            continue
        children = None if is_tensor else _container_children(path, obj, names, keep)
        if children is None and (is_tensor or (may_open and type(obj).__module__ != "builtins")):
            children, may_open = _attribute_children(path, obj), False
        stack.extend((name, child, may_open) for name, child in reversed(children or ()))
        del obj, children


def attributes(obj: object) -> dict[str, Any]:
    """Answer an object's own attributes: its instance dictionary and its slots. Runs no user code."""
    found: dict[str, Any] = {}
    cls = type(obj)
    for name in _slots(cls):
        slot = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        if type(slot) is not types.MemberDescriptorType:
            continue  # hidden by another attribute of a subclass
        try:
            found[name] = slot.__get__(obj, cls)
        except AttributeError:
            continue  # a slot that was never set
    if cls.__dictoffset__ != 0:
        found.update(object.__getattribute__(obj, "__dict__"))
    return found


# Names only: a descriptor would keep its class alive.
_known_slots: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _slots(cls: type) -> tuple[str, ...]:
    known = _known_slots.get(cls)
    if known is None:
        # types.SimpleNamespace has its dictionary in a slot of that name.
        known = _known_slots[cls] = tuple(
            dict.fromkeys(
                name
                for base in cls.__mro__
                for name, member in vars(base).items()
                if type(member) is types.MemberDescriptorType and name != "__dict__"
            )
        )
    return known


def _container_children(path: str, obj: Any, names: dict[int, str], keep: list[object]) -> list[tuple[str, Any]] | None:
    """Answer what a container holds, or None for what is no container."""
    cls = type(obj)
    if issubclass(cls, torch.optim.Optimizer):
        return _of_optimizer(path, obj, names)
    for kind, read in _CONTAINERS:
        if issubclass(cls, kind):
            return read(path, obj)
    node = _pytree.SUPPORTED_NODES.get(cls)
    if node is not None:
        children, _ = node.flatten_fn(obj)
        keep.append(children)
        return [(f"{path}[{index}]", child) for index, child in enumerate(children)]
    if any("__dataclass_fields__" in vars(base) for base in cls.__mro__):
        return _attribute_children(path, obj)
    return None


def _attribute_children(path: str, obj: Any) -> list[tuple[str, Any]]:
    return [(f"{path}.{name}", value) for name, value in attributes(obj).items()]


def _of_module(path: str, module: Any) -> list[tuple[str, Any]]:
    own = object.__getattribute__(module, "__dict__")
    tables = [own.get(table) or {} for table in _MODULE_TABLES]
    plain = {name: value for name, value in own.items() if name not in _MODULE_INTERNALS and name not in _MODULE_TABLES}
    return [(f"{path}.{name}", value) for table in (*tables, plain) for name, value in table.items()]


def _of_optimizer(path: str, optimizer: Any, names: dict[int, str]) -> list[tuple[str, Any]]:
    own = object.__getattribute__(optimizer, "__dict__")
    found: list[tuple[str, Any]] = []
    index = 0
    for number, group in enumerate(own.get("param_groups", ())):
        for place, parameter in enumerate(group.get("params", ())):
            found.append((f"{path}.param_groups[{number}]['params'][{place}]", parameter))
            names.setdefault(id(parameter), str(index))
            index += 1
    for parameter, state in own.get("state", {}).items():
        name = names.get(id(parameter), "?")
        found += [(f"{path}.state[{name}].{key}", value) for key, value in state.items()]
    return found


def _of_dict(path: str, mapping: Any) -> list[tuple[str, Any]]:
    return [(_item(path, key), value) for key, value in dict.items(mapping)]


def _item(path: str, key: object) -> str:
    return f"{path}[{key!r}]" if isinstance(key, (str, int, float, bool, tuple)) else f"{path}[<{type(key).__name__}>]"


def _of_sequence(iterate: Callable[[Any], Iterator[Any]]) -> Callable[[str, Any], list[tuple[str, Any]]]:
    def read(path: str, sequence: Any) -> list[tuple[str, Any]]:
        fields = vars(type(sequence)).get("_fields")
        for base in type(sequence).__mro__:
            fields = fields or vars(base).get("_fields")
        if isinstance(fields, tuple):  # a named tuple
            return [(f"{path}.{name}", value) for name, value in zip(fields, iterate(sequence), strict=False)]
        return [(f"{path}[{index}]", value) for index, value in enumerate(iterate(sequence))]

    return read


def _of_set(path: str, items: Any) -> list[tuple[str, Any]]:
    iterate = set.__iter__ if issubclass(type(items), set) else frozenset.__iter__
    return [(f"{path}{{{index}}}", value) for index, value in enumerate(iterate(items))]


def _of_wrapper(path: str, wrapper: Any) -> list[tuple[str, Any]]:
    return [(path, object.__getattribute__(wrapper, "__dict__").get("data"))]


_CONTAINERS: tuple[tuple[type, Callable[[str, Any], list[tuple[str, Any]]]], ...] = (
    (torch.nn.Module, _of_module),
    (dict, _of_dict),
    (list, _of_sequence(list.__iter__)),
    (tuple, _of_sequence(tuple.__iter__)),
    (collections.deque, _of_sequence(collections.deque.__iter__)),
    (set, _of_set),
    (frozenset, _of_set),
    (collections.UserDict, _of_wrapper),
    (collections.UserList, _of_wrapper),
    (types.SimpleNamespace, _attribute_children),
)
