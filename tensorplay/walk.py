"""Find the tensors in an object, each with its path.

Runs no user code: attributes come from instance dictionaries and slots, never from getattr; types decide, by identity,
never ``__class__`` and never a metaclass. The exception are containers registered with torch's pytree, whose flatten
function is asked, since that is what it is registered for. Unknown things are passed over. Iterative: nesting may be as
deep as it likes.
"""

from __future__ import annotations

import collections
import gc
import os
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree

from tensorplay._native import C
from tensorplay.arrays import is_array_class
from tensorplay.classes import class_name, derives, mro, namespace
from tensorplay.layers import Unread

__all__ = [
    "ERROR_FIELDS",
    "OF_ALL_MODULES",
    "Found",
    "Place",
    "attribute_text",
    "attributes",
    "find_tensors",
    "is_parameter",
    "key_text",
    "records_in",
    "slots_of",
    "tracebacks_of",
    "variables_of",
]

_Child = tuple[str, Any]
_LONGEST_KEY = 120
_LONGEST_PATH = 2000
_MOST_BELOW = 10_000

# What nn.Module keeps for itself in the instance dictionary, beside the three tables read by name.
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")
OF_ALL_MODULES = frozenset(vars(torch.nn.Module()))
_MODULE_INTERNALS = OF_ALL_MODULES.difference(_MODULE_TABLES)
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
    range,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.CodeType,
    types.FrameType,
    weakref.ReferenceType,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.UntypedStorage,
    torch.Generator,
)
# By identity: a class may have a metaclass with its own __hash__ and __eq__.
_LEAF_IDS = frozenset(map(id, (*_LEAVES, bool)))
_PRINTED_IDS = frozenset(map(id, (type(None), str, bytes, int, float, complex, bool, torch.dtype, torch.device)))


class Place:
    """A tensor, or a NumPy array, and the paths it was found under."""

    __slots__ = ("also", "path", "record", "tensor")

    def __init__(self, path: str, tensor: Any, record: Any = None) -> None:
        self.path = path
        self.tensor = tensor
        """The tensor or the array."""
        self.record = record
        """Read already: of a gradient that has no Python object, so that ``tensor`` is None."""
        self.also: list[str] = []


class Found(NamedTuple):
    """What a walk found. A place is the only thing here that refers to its tensor or array."""

    places: list[Place]
    arrays: list[Place]
    unread: list[Unread]
    cut: bool
    repeated: list[list[str]]
    """The paths of each module that has several."""
    modules: dict[str, int]
    """Number of the module at each path that leads to one."""
    tops: list[tuple[str, object]]
    """The modules and optimizers that no module holds, with their paths."""
    errors: list[tuple[str, BaseException]]
    """The exceptions, with their paths."""


def find_tensors(
    named: Iterable[tuple[str, object]], *, most: int, grads: bool = False, ask_pytree: bool = True
) -> Found:
    """Answer every tensor reached, depth first, in the order of its container; one reached twice is one place.

    A plain object's attributes are looked at, but not those of further plain objects that it holds.

    Args:
        named: path and object of each place to begin at.
        most: stop where one more tensor than this is reached.
        grads: whether the gradient that autograd keeps for a tensor follows it.
        ask_pytree: whether containers registered with pytree are asked for their parts, which runs their own function.
    """
    places: list[Place] = []
    arrays: list[Place] = []
    unread: list[Unread] = []
    tops: dict[int, tuple[str, object]] = {}
    errors: list[tuple[str, BaseException]] = []
    known: dict[int, Place] = {}
    # Of each module, its paths, and whether one leads there through plain objects.
    modules: dict[int, list[tuple[str, bool]]] = {}
    # What was opened, and whether plain objects in it were too; held, so that an id is not used again meanwhile.
    opened: dict[int, tuple[object, bool]] = {}
    # Path of what is being opened, its children, whether plain objects among them may be opened, and whether a module
    # holds it.
    stack: list[tuple[str, Iterator[_Child], bool, bool]] = [("", iter(list(named)), True, False)]

    def answer(cut: bool) -> Found:
        numbers = {path: number for number, paths in enumerate(modules.values()) for path, _ in paths}
        repeated = [names for paths in modules.values() if not cut and len(names := _module_names(paths)) > 1]
        return Found(places, arrays, unread, cut, repeated, numbers, list(tops.values()), errors)

    while stack:
        outer, children, may_open, in_module = stack[-1]
        try:
            path, obj = next(children)
        except StopIteration:
            stack.pop()
            continue
        except Exception as error:  # a pytree flatten function's, or what another thread did to the container
            stack.pop()
            unread.append(Unread(name=outer, reason=f"opening it raised {class_name(type(error))}"))
            continue
        if C.is_tensor(obj):
            if (place := known.get(id(obj))) is not None:
                place.also.append(path)
                continue
            if len(places) >= most:
                return answer(cut=True)
            places.append(known.setdefault(id(obj), Place(path, obj)))
            # Beside its class nothing: no attributes. Asking for them would make the dictionary.
            if len(gc.get_referents(obj)) > 1:
                stack.append((path, _attribute_children(path, obj), False, in_module))
            if not grads:
                continue
            if (grad := C.grad_object(obj)) is not None:
                stack.append((path, iter([(f"{path}.grad", grad)]), False, in_module))
            elif (record := C.read_grad(obj)) is not None:
                if len(places) >= most:
                    return answer(cut=True)
                places.append(Place(f"{path}.grad", None, record))
            continue
        plan = _plan(type(obj))
        if plan.module:
            modules.setdefault(id(obj), []).append((_shortened(path), may_open))
        if plan.array:
            if (place := known.get(id(obj))) is not None:
                place.also.append(path)
            elif len(arrays) < most:
                arrays.append(known.setdefault(id(obj), Place(path, obj)))
            continue
        # Also one that was met before, in a list that another module has.
        if not in_module and (plan.module or plan.read is _of_optimizer):
            tops.setdefault(id(obj), (path, obj))
        if plan.leaf or (id(obj) in opened and (opened[id(obj)][1] or not may_open)):
            continue
        if plan.sealed is not None:
            unread.append(Unread(name=path, reason=plan.sealed))
            continue
        path = _shortened(path)
        if plan.read is _of_error:
            errors.append((path, obj))
        if plan.read is not None:
            opened[id(obj)] = (obj, may_open)
            stack.append((path, plan.read(path, obj, known), may_open, in_module or plan.module))
        elif ask_pytree and (node := _pytree_nodes().get(id(type(obj)))) is not None:
            opened[id(obj)] = (obj, may_open)
            stack.append((path, _of_pytree(path, obj, node), may_open, in_module))
        elif may_open:
            opened[id(obj)] = (obj, may_open)
            stack.append((path, _attribute_children(path, obj), False, in_module))
    return answer(cut=False)


def _module_names(paths: list[tuple[str, bool]]) -> list[str]:
    """Leave out the paths to a module through plain objects, as a wrapper's records, where there are others."""
    direct = [path for path, is_direct in paths if is_direct]
    return direct or [path for path, _ in paths]


class _Plan(NamedTuple):
    """How objects of a class are opened."""

    leaf: bool
    array: bool
    module: bool
    sealed: str | None  # why it cannot be looked into, though tensors may be there
    read: Callable[[str, Any, dict[int, Place]], Iterator[_Child]] | None
    slots: tuple[str, ...]  # names only: a descriptor would keep its class alive


def _shortened(path: str) -> str:
    """Bound the path of a container: each level below copies it."""
    return path if len(path) <= _LONGEST_PATH else f"{path[: _LONGEST_PATH // 2]}...{path[-_LONGEST_PATH // 4 :]}"


_plans: dict[int, tuple[weakref.ref[type], _Plan]] = {}


def _plan(cls: type) -> _Plan:
    entry = _plans.get(id(cls))
    if entry is not None and entry[0]() is cls:
        return entry[1]
    bases = mro(cls)
    slots = tuple(
        dict.fromkeys(
            name
            for base in bases
            for name, member in namespace(base).items()
            # Its own: one taken from another class reads that class's objects only.
            if type(member) is types.MemberDescriptorType and member.__objclass__ is base and name != "__dict__"
        )
    )
    leaf = any(id(base) in _LEAF_IDS for base in bases)
    read = next((read for kind, read in _CONTAINERS if derives(cls, kind)), None)
    if read is None and any("__dataclass_fields__" in namespace(base) for base in bases):
        read = _of_attributes
    sealed = None if read is not None else next((why for kind, why in _SEALED if derives(cls, kind)), None)
    plan = _Plan(leaf, is_array_class(cls), read is _of_module, sealed, read, slots)
    key = id(cls)
    _plans[key] = (weakref.ref(cls, lambda _: _plans.pop(key, None)), plan)
    return plan


_nodes: tuple[int, dict[int, Any]] = (-1, {})


def _pytree_nodes() -> dict[int, Any]:
    """Answer pytree's table of classes by the identity of the class."""
    global _nodes
    if _nodes[0] != len(_pytree.SUPPORTED_NODES):
        nodes = list(_pytree.SUPPORTED_NODES.items())
        _nodes = (len(nodes), {id(cls): node for cls, node in nodes})
    return _nodes[1]


def is_parameter(tensor: object) -> bool:
    """Tell whether a tensor is an nn.Parameter, by its class or, in a subclass of another kind, by its mark."""
    if derives(type(tensor), torch.nn.Parameter):
        return True
    own = C.instance_dict(tensor) if len(gc.get_referents(tensor)) > 1 else None
    return own is not None and dict.get(own, "_is_param") is True


def slots_of(cls: type) -> dict[str, types.MemberDescriptorType]:
    """Answer the slots of a class, by name; not those that another attribute of a subclass hides."""
    return {
        name: slot
        for name in _plan(cls).slots
        if type(slot := next(namespace(base)[name] for base in mro(cls) if name in namespace(base)))
        is types.MemberDescriptorType
    }


def attributes(obj: object) -> dict[str, Any]:
    """Answer an object's own attributes: its slots and its instance dictionary. Runs no user code."""
    found: dict[str, Any] = {}
    cls = type(obj)
    for name, slot in slots_of(cls).items():
        try:
            found[name] = slot.__get__(obj, cls)
        except AttributeError:
            continue  # a slot that was never set
    own = C.instance_dict(obj)
    for name, value in () if own is None else _items(own):
        found[name if type(name) is str else key_text(name)] = value
    return found


def _items(mapping: Any) -> list[tuple[Any, Any]]:
    """Copy a dictionary's items; another thread may change it meanwhile."""
    for _ in range(100):
        try:
            return list(dict.items(mapping))
        except RuntimeError:  # changed its size: a garbage collection in between let the other thread run
            continue
    return list(dict.items(mapping))


def _attribute_children(path: str, obj: Any) -> Iterator[_Child]:
    for name, value in attributes(obj).items():
        if id(type(value)) not in _LEAF_IDS:
            yield attribute_text(path, name), value


def attribute_text(path: str, name: object) -> str:
    """Name an attribute of what has a path."""
    plain = type(name) is str and name.isprintable() and len(name) <= _LONGEST_KEY
    return f"{path}.{name}" if plain else f"{path}.{key_text(name)}"


def _of_attributes(path: str, obj: Any, _: dict[int, Place]) -> Iterator[_Child]:
    return _attribute_children(path, obj)


ERROR_FIELDS = {name: namespace(BaseException)[name] for name in ("__traceback__", "__context__", "__cause__", "args")}


def tracebacks_of(error: BaseException) -> list[types.TracebackType]:
    """Answer the traceback of an exception and those behind it."""
    found = []
    traceback = ERROR_FIELDS["__traceback__"].__get__(error)
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def variables_of(frame: types.FrameType) -> list[tuple[str, Any]]:
    """Answer the variables of a frame that ended; of one that runs nothing."""
    found = C.frame_object_locals(frame)
    return [] if found is None else found[3]


def records_in(obj: object) -> list[Any]:
    """Read the tensors that one object leads to, not more than some thousands."""
    places = find_tensors([("", obj)], most=_MOST_BELOW, ask_pytree=False).places
    return [C.read(place.tensor, 0) for place in places if place.tensor is not None]


def _of_error(path: str, error: Any, _: dict[int, Place]) -> Iterator[_Child]:
    """Open an exception: what it was made with, its attributes, the variables of frames that ended, its causes."""
    for name in ("args", "__context__", "__cause__"):
        yield f"{path}.{name}", ERROR_FIELDS[name].__get__(error)
    yield from _attribute_children(path, error)
    for traceback in tracebacks_of(error):
        for name, value in variables_of(traceback.tb_frame):
            where = f"{os.path.basename(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno}"
            yield f"{path} → {name} in {traceback.tb_frame.f_code.co_name} ({where})", value


def _of_module(path: str, module: Any, _: dict[int, Place]) -> Iterator[_Child]:
    own = attributes(module)
    if "_actual_script_module" in own:  # torch.jit.trace's wrapper
        yield path, own["_actual_script_module"]
        return
    if type(own.get("_c")) is torch._C.ScriptModule:
        yield from _of_script(path, own["_c"], _)
        return
    for name in _MODULE_TABLES:
        table = own.get(name)
        if issubclass(type(table), dict):
            for key, value in _items(table):
                if value is not None:
                    yield attribute_text(path, key), value
        elif table is not None:
            yield f"{path}.{name}", table
    for name, value in own.items():
        if name not in _MODULE_INTERNALS and name not in _MODULE_TABLES and id(type(value)) not in _LEAF_IDS:
            yield attribute_text(path, name), value


def _of_script(path: str, module: Any, _: dict[int, Place]) -> Iterator[_Child]:
    """Look into TorchScript's own module: in C++, with Python objects made for its tensors as parameters() does."""
    for table in (torch._C.ParameterDict, torch._C.BufferDict, torch._C.ModuleDict):
        for name, value in table(module).items():
            yield attribute_text(path, name), value


def _of_optimizer(path: str, optimizer: Any, known: dict[int, Place]) -> Iterator[_Child]:
    own = attributes(optimizer)
    names: dict[int, str] = {}
    groups: Any = own.get("param_groups")
    for number, group in enumerate(list.copy(groups) if issubclass(type(groups), list) else ()):
        params: Any = dict.get(group, "params") if issubclass(type(group), dict) else None
        for parameter in list.copy(params) if issubclass(type(params), list) else ():
            place = known.get(id(parameter))
            names.setdefault(id(parameter), str(len(names)) if place is None else place.path)
        yield f"{path}.param_groups[{number}]", group
    if "param_groups" in own and not issubclass(type(groups), list):
        yield f"{path}.param_groups", groups
    state = own.get("state")
    for parameter, kept in _items(state) if issubclass(type(state), dict) else ():
        name = f"{path}.state[{names.get(id(parameter)) or key_text(parameter)}]"
        if not issubclass(type(kept), dict):
            yield name, kept
            continue
        for key, value in _items(kept):
            yield attribute_text(name, key), value
    if not issubclass(type(state), dict):
        yield f"{path}.state", state
    for name, value in own.items():
        if name not in ("param_groups", "state", "defaults") and id(type(value)) not in _LEAF_IDS:
            yield attribute_text(path, name), value


def _of_pytree(path: str, obj: Any, node: Any) -> Iterator[_Child]:
    """Ask a registered class's own function; named by its keys where it has a function for them."""
    if node.flatten_with_keys_fn is not None:
        children, _ = node.flatten_with_keys_fn(obj)
        for index, (key, child) in enumerate(children):
            yield _pytree_key(path, key, index), child
        return
    children, _ = node.flatten_fn(obj)
    for index, child in enumerate(children):
        yield f"{path}[{index}]", child


def _pytree_key(path: str, key: Any, index: int) -> str:
    if type(key) is _pytree.GetAttrKey:
        return attribute_text(path, key.name)
    if type(key) is _pytree.MappingKey:
        return f"{path}[{key_text(key.key)}]"
    return f"{path}[{index}]"


def _of_dict(path: str, mapping: Any, _: dict[int, Place]) -> Iterator[_Child]:
    for index, (key, value) in enumerate(_items(mapping)):
        if id(type(value)) not in _LEAF_IDS:
            yield f"{path}[{key_text(key)}]", value
        if C.is_tensor(key):
            yield f"{path}.keys()[{index}]", key


def key_text(key: Any, depth: int = 0) -> str:
    """Write a key without asking it: built-in types as Python does, anything else by its class."""
    cls = type(key)
    if cls is int and int.bit_length(key) > 256:
        text = "<int>"
    elif id(cls) in _PRINTED_IDS:
        text = repr(key)
    elif cls is tuple and depth < 3:
        words = [key_text(part, depth + 1) for part in key]
        text = f"({', '.join(words)}{',' if len(words) == 1 else ''})"
    elif issubclass(cls, str):
        text = repr(str.__str__(key))
    else:
        text = f"<{class_name(cls)}>"
    return text if len(text) <= _LONGEST_KEY else f"{text[: _LONGEST_KEY - 21]}...{text[-18:]}"


def _sequence(copy: Callable[[Any], Iterable[Any]]) -> Callable[[str, Any, dict[int, Place]], Iterator[_Child]]:
    def read(path: str, sequence: Any, _: dict[int, Place]) -> Iterator[_Child]:
        spaces = map(namespace, mro(type(sequence)))
        fields = next((space["_fields"] for space in spaces if type(space.get("_fields")) is tuple), None)
        values = copy(sequence)
        if fields is not None:  # a named tuple
            yield from ((attribute_text(path, name), value) for name, value in zip(fields, values, strict=False))
            return
        for index, value in enumerate(values):
            if id(type(value)) not in _LEAF_IDS:
                yield f"{path}[{index}]", value

    return read


def _of_set(path: str, items: Any, _: dict[int, Place]) -> Iterator[_Child]:
    iterate = set.__iter__ if issubclass(type(items), set) else frozenset.__iter__
    for index, value in enumerate(list(iterate(items))):
        yield f"{path}{{{index}}}", value


def _of_wrapper(path: str, wrapper: Any, _: dict[int, Place]) -> Iterator[_Child]:
    """Look through UserDict and UserList, which are what their `data` is, and at what a subclass adds."""
    for name, value in attributes(wrapper).items():
        yield path if name == "data" else attribute_text(path, name), value


def _of_proxy(path: str, proxy: Any, _: dict[int, Place]) -> Iterator[_Child]:
    for mapping in gc.get_referents(proxy):  # the mapping behind it; no method names it without asking it
        yield path, mapping


def _of_view(path: str, view: Any, _: dict[int, Place]) -> Iterator[_Child]:
    for index, value in enumerate(list(view)):
        yield f"{path}[{index}]", value


_ITERATOR = "an iterator, which looking would use up: pass a list of it"
_SEALED: tuple[tuple[type, str], ...] = (
    *((kind, _ITERATOR) for kind in (types.GeneratorType, zip, map, filter, enumerate, reversed)),
    *((kind, _ITERATOR) for kind in map(type, (iter([]), iter(()), iter({}), iter({}.values()), iter(set())))),
    (torch._C.ScriptObject, "a C++ object of TorchScript or of a quantized module, whose tensors no field names"),
)
_CONTAINERS: tuple[tuple[type, Callable[[str, Any, dict[int, Place]], Iterator[_Child]]], ...] = (
    (torch.optim.Optimizer, _of_optimizer),
    (torch._C.ScriptModule, _of_script),
    (torch.nn.Module, _of_module),
    (BaseException, _of_error),
    (dict, _of_dict),
    (list, _sequence(list.copy)),
    (tuple, _sequence(tuple.__iter__)),
    (collections.deque, _sequence(lambda deque: list(collections.deque.__iter__(deque)))),
    (set, _of_set),
    (frozenset, _of_set),
    (collections.UserDict, _of_wrapper),
    (collections.UserList, _of_wrapper),
    (types.MappingProxyType, _of_proxy),
    (type({}.keys()), _of_view),
    (type({}.values()), _of_view),
    (type({}.items()), _of_view),
    (types.SimpleNamespace, _of_attributes),
)
