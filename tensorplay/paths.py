"""Paths: how a program would name what lies on a way through the heap, from a root to an object.

``train.py:42 in step: batch['x'][0]`` begins at a variable of an executing frame, ``model.cache.rows[3]`` at a module.
Runs no code of the objects on the way.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import gc
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tensorplay._native import C
from tensorplay.arrays import is_array_class
from tensorplay.classes import class_name, derives, mro, namespace
from tensorplay.layers import RootKind
from tensorplay.walk import ERROR_FIELDS, attributes, key_text
from tensorplay.words import visible

import torch  # isort: skip

__all__ = ["PathNames", "Root"]

_INDEX = re.compile(r"\[\d+\]")
_LONGEST = 240
_MOST_STEPS = 16
_TABLES = frozenset({"_modules", "_parameters", "_buffers"})
"""Of a module: their entries are what the module calls its attributes."""
_PASSED = frozenset({"Context", "hamt", "hamt_bitmap_node", "hamt_array_node", "hamt_collision_node"})
"""Classes of what lies between a context and the values of its variables."""
_PARTS_OF_OTHERS = (
    types.FunctionType,
    types.MethodType,
    types.CellType,
    types.FrameType,
    list,
    set,
    tuple,
    dict,
)
"""What tells the less of a cycle the later it comes here."""
_MORE_NODES = " … "
_SAID = {"grad": ".grad", "base": "._base", "grad_fn": ".grad_fn"}


_ROOTS: dict[str, RootKind] = {"modules": "module", "thread": "thread", "unknown": "unknown"}


class Root(NamedTuple):
    """Where a path begins."""

    kind: RootKind
    """Unknown is C or C++ code."""
    file: str | None = None
    line: int | None = None
    function: str | None = None


class _Trail(NamedTuple):
    """A path, as what one step adds to the steps before it: long ways share their beginnings."""

    outer: _Trail | None
    word: str

    @property
    def words(self) -> list[str]:
        """What each step adds, from the root on."""
        found = []
        trail: _Trail | None = self
        while trail is not None:
            found.append(trail.word)
            trail = trail.outer
        return [word for word in reversed(found) if word]

    @property
    def text(self) -> str:
        """The path."""
        return _bounded("".join(self.words))

    @property
    def steps(self) -> tuple[str, ...]:
        """What each step adds to the path; of a long one the first and the last steps."""
        words = [visible(word) for word in self.words]
        half = _MOST_STEPS // 2
        return tuple(words if len(words) <= _MOST_STEPS else [*words[:half], " ... ", *words[-half:]])


class _Place(NamedTuple):
    trail: _Trail
    kind: str
    object: Any
    names: bool = False
    """Whether the entries of the dictionary here are attributes of what the path names."""
    variables: tuple[str, ...] = ()
    """Of a function's tuple of cells: what the variables in them are called."""

    def then(self, word: str, kind: str, obj: Any, **more: Any) -> _Place:
        """Answer the place that one more step leads to; an empty word where the step has no name of its own."""
        return _Place(_Trail(self.trail, word) if word else self.trail, kind, obj, **more)


class PathNames:
    """The entries of one walk, in words.

    Args:
        entries: what the walk answered.
        merged: whether paths that differ in an index alone are one, with ``[*]`` for it.
        crowded: entries of dictionaries whose keys count as indices then.
    """

    def __init__(self, entries: Sequence[Any], *, merged: bool = False, crowded: Iterable[int] = ()) -> None:
        self._entries = entries
        self._places: dict[int, _Place] = {}
        self._roots: dict[int, Root] = {}
        self._trails: dict[tuple[int, str], _Trail] | None = {} if merged else None
        self._crowded = frozenset(crowded)
        self._told: dict[int, tuple[str, tuple[str, ...]]] = {}

    def merged(self) -> PathNames:
        """Answer the same entries with merged paths."""
        return PathNames(self._entries, merged=True)

    def root(self, number: int) -> Root:
        """Answer where the way to an entry begins."""
        way = []
        while number not in self._roots and self._entries[number][5] >= 0:
            way.append(number)
            number = self._entries[number][5]
        root = self._roots.get(number) or _root(self._entries[number])
        self._roots.update(dict.fromkeys([number, *way], root))
        return root

    def kind(self, number: int) -> str:
        """Answer what an entry is: object, impl, storage, node, ..."""
        return str(self._entries[number][0])

    def object(self, number: int) -> Any:
        """Answer an entry's Python object, or None."""
        return self._entries[number][1]

    def text(self, number: int) -> str:
        """Name an entry."""
        return self._told_of(self._place(number))[0]

    def steps(self, number: int) -> tuple[str, ...]:
        """Answer what each step adds to an entry's name."""
        return self._told_of(self._place(number))[1]

    def target(self, number: int, how: Any, obj: Any) -> tuple[str, tuple[str, ...]]:
        """Name an object that an entry refers to, and answer what each step adds to that."""
        return self._told_of(self._shared(_step(self._place(number), ("object", obj, None, None, how, number))))

    def cycle(self, references: Sequence[Any]) -> str:
        """Name the steps of a cycle from one object back to it: the same for the same steps, wherever they begin."""
        return self._around(references).trail.text if references else ""

    def cycle_steps(self, references: Sequence[Any]) -> tuple[str, ...]:
        """Answer what each step adds to the name of a cycle."""
        return self._around(references).trail.steps if references else ()

    def _around(self, references: Sequence[Any]) -> _Place:
        first = min(range(len(references)), key=lambda number: self._rank(references[number][0]))
        begin = self._entries[references[first][0]]
        start = _what(begin[1]) if begin[0] == "object" else _node_name(begin[3]) if begin[0] == "node" else "a tensor"
        place = _Place(_Trail(None, start), begin[0], begin[1])
        for number, how, end in (*references[first:], *references[:first]):
            place = _step(place, (*self._entries[end][:4], how, number))
        return self._shared(place.then(f" → {start} again", "cycle", None))

    def _rank(self, number: int) -> tuple[Any, ...]:
        """Say how little an object tells as the beginning of a cycle."""
        kind, obj = self._entries[number][:2]
        cls = type(obj)
        part = next((place for place, one in enumerate(_PARTS_OF_OTHERS, 1) if derives(cls, one)), 0)
        return (kind != "object", derives(cls, torch.Tensor), part, class_name(cls))

    def _place(self, number: int) -> _Place:
        way = []
        while number >= 0 and number not in self._places:
            way.append(number)
            number = self._entries[number][5]
        place = self._places[number] if number >= 0 else None
        for number in reversed(way):
            entry = self._entries[number]
            place = _begin(entry, self.root(number)) if place is None else _step(place, entry)
            if entry[5] in self._crowded and entry[4][0] == "key":
                place = place._replace(trail=_Trail(place.trail.outer, ".*" if place.trail.word[0] == "." else "[*]"))
            place = self._places[number] = self._shared(place)
        assert place is not None
        return place

    def _told_of(self, place: _Place) -> tuple[str, tuple[str, ...]]:
        trail = place.trail
        if self._trails is None:  # one for each place, which may go before this does
            return trail.text, trail.steps
        if id(trail) not in self._told:
            self._told[id(trail)] = trail.text, trail.steps
        return self._told[id(trail)]

    def _shared(self, place: _Place) -> _Place:
        """Give places whose paths differ in an index alone one trail, where paths are merged."""
        return place if self._trails is None else place._replace(trail=self._merged(place.trail, self._trails))

    def _merged(self, trail: _Trail, known: dict[tuple[int, str], _Trail]) -> _Trail:
        if known.get((id(trail.outer), trail.word)) is trail:
            return trail
        outer = None if trail.outer is None else self._merged(trail.outer, known)
        word = _INDEX.sub("[*]", trail.word) if "[" in trail.word else trail.word
        return known.setdefault((id(outer), word), _Trail(outer, word))


def _bounded(text: str) -> str:
    text = visible(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 3 :]}"


def _root(entry: Any) -> Root:
    kind, _, _, name, _, _ = entry
    if kind in ("frame", "own"):
        file, function, line, _ = name
        return Root("probe" if kind == "own" else "frame", file, line or None, function)
    return Root(_ROOTS.get(kind, "cycle"))


def _begin(entry: Any, root: Root) -> _Place:
    kind, obj, _, name, _, _ = entry
    if root.file is not None:
        thread = name[3]
        where = f"{Path(root.file).name}:{root.line or '?'} in {root.function}"
        other = "" if thread == threading.get_ident() else f" (thread {_thread_name(thread)})"
        return _Place(_Trail(None, f"{where}{other}: "), kind, None)
    if kind == "thread":
        return _Place(_Trail(None, f"thread {_thread_name(name)}: "), kind, None)
    if kind == "unknown":
        return _Place(_Trail(None, "C or C++: "), kind, None)
    return _Place(_Trail(None, "" if kind == "modules" else _what(obj)), kind, obj)


def _thread_name(ident: int) -> str:
    # threading.current_thread() and enumerate() would make objects for threads that Python did not start.
    thread = threading._active.get(ident)  # type: ignore[attr-defined]
    name = None if thread is None else C.instance_dict(thread)
    return str(ident) if name is None else str(dict.get(name, "_name", ident))


def _link(place: _Place, what: Any) -> str:
    arrow = "" if place.trail.word.endswith(": ") else " → "  # directly behind a root
    return _SAID.get(str(what), f"{arrow}{what}")


def _node_name(name: str) -> str:
    return name.rpartition("::")[2]


def _step(place: _Place, entry: Any) -> _Place:
    """Go on from one place to what it refers to."""
    kind, obj, _, name, how, _ = entry
    word, what = ("", None) if how is None else how
    if kind == "node":
        if place.kind == "node":  # of a graph the first and the last node are named
            trail = place.trail.outer
            assert trail is not None
            between = trail if trail.word == _MORE_NODES else _Trail(trail, _MORE_NODES)
            return _Place(_Trail(between, f"({_node_name(name)})"), kind, None)
        link = "" if place.kind == "object" else _link(place, what)  # a node's own Python object
        return place.then(link, kind, None).then(f" ({_node_name(name)})", kind, None)
    if place.kind in ("impl", "storage", "node") or (place.kind == "thread" and word == "owns"):
        is_own = what in ("Python object", "storage")
        return place.then("" if is_own else _link(place, what), kind, obj)
    if kind in ("impl", "storage"):  # a tensor's own
        return place.then("a tensor" if place.kind == "unknown" else "", kind, obj)
    if place.kind == "modules":
        return place.then(str(what), kind, obj)
    if place.kind in ("frame", "own"):
        return place.then("a temporary" if what is None else str(what), kind, obj)
    if place.kind == "unknown":
        return place.then(_what(obj), kind, obj)
    return _of_object(place, kind, obj, word, what)


def _of_object(place: _Place, kind: str, obj: Any, word: str, what: Any) -> _Place:
    parent = place.object
    if word == "nth" and type(parent) is dict:  # Python 3.13 shows some dictionaries' values without their keys
        found = next((key for key, value in list(parent.items()) if value is obj), None)
        word, what = ("nth", what) if found is None else ("key", found)
    if word == "key":
        by_thread = type(what) is weakref.ReferenceType or class_name(type(what)) == "_localdummy"
        if by_thread and type(obj) is dict:  # thread-local variables
            return place.then(" of one thread", kind, obj, names=True)
        if place.names and type(what) is str:
            is_table = what in _TABLES and type(obj) is dict
            return place.then("" if is_table else f".{what}", kind, obj, names=is_table)
        return place.then(f"[{key_text(what)}]", kind, obj)
    if word == "is_key":
        return place.then(".keys()", kind, obj)
    if place.variables and word == "nth":
        return place.then(f" → closure variable {place.variables[what]}", kind, obj)
    if type(parent) in (list, tuple):
        return place.then(f"[{what}]", kind, obj)
    if type(parent) in (set, frozenset):
        return place.then("{...}", kind, obj)
    if word == "nth" and type(parent) is collections.deque:
        found = next((n for n in (what, what - 1) if 0 <= n < len(parent) and parent[n] is obj), None)
        if found is not None:  # behind its class, or not, by the version
            return place.then(f"[{found}]", kind, obj)
    if type(parent) is types.FunctionType and obj is parent.__closure__:
        return place.then("", kind, obj, variables=parent.__code__.co_freevars)
    if is_array_class(type(parent)) and word == "nth":  # the elements come behind the lender
        return place.then(f".flat[{what - 1}]" if what else ".base", kind, obj)
    if class_name(type(parent)) in _PASSED:
        return place.then(_variable_of_context(parent, what), kind, obj)
    if type(obj) is dict and (derives(type(parent), threading.local) or derives(type(parent), _CACHED)):
        return place.then("", kind, obj)
    if type(obj) is dict and _is_namespace(parent, obj):
        return place.then("", kind, obj, names=True)
    name = _named(parent, obj)
    if name in {f".{table}" for table in _TABLES} and type(obj) is dict:
        return place.then("", kind, obj, names=True)
    return place.then(f" → {_what(obj)}" if name is None else name, kind, obj)


def _variable_of_context(node: Any, number: Any) -> str:
    """Answer the name of the context variable whose value a node of a context's tree refers to, if it is one."""
    shown = gc.get_referents(node)  # from the last to the first: each value before its variable
    behind = shown[number + 1] if type(number) is int and number + 1 < len(shown) else None
    return f" {behind.name}" if type(behind) is contextvars.ContextVar else ""


def _is_namespace(parent: Any, child: dict[Any, Any]) -> bool:
    """Tell whether a dictionary holds the attributes of an object, class or module."""
    if type(parent) is types.ModuleType:
        return types.ModuleType.__getattribute__(parent, "__dict__") is child
    if derives(type(parent), type):
        return "__module__" in child
    return C.instance_dict(parent) is child


def _named(parent: Any, child: Any) -> str | None:
    """Say by which attribute, item or variable one object refers to another; None where nobody can tell."""
    cls = type(parent)
    for read in [_READERS[id(base)] for base in mro(cls) if id(base) in _READERS]:
        found = next((str(name) for name, value in read(parent) if value is child), None)
        if found is not None:
            return found
    if derives(cls, _CACHED):
        return " (a cached result)"
    found = next((name for name, value in attributes(parent).items() if value is child), None)
    if found is not None:
        return f".{found}"
    return ".__class__" if child is cls else None


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    yield ".__globals__", function.__globals__


def _of_cell(cell: types.CellType) -> Iterator[tuple[str, Any]]:
    yield "", cell.cell_contents


def _of_method(method: Any) -> Iterator[tuple[str, Any]]:
    yield ".__self__", method.__self__
    if type(method) is types.MethodType:
        yield ".__func__", method.__func__


def _of_partial(partial: functools.partial[Any]) -> Iterator[tuple[str, Any]]:
    for name in ("func", "args", "keywords"):
        yield f".{name}", namespace(functools.partial)[name].__get__(partial)


def _of_generator(generator: Any) -> Iterator[tuple[str, Any]]:
    if sys.version_info < (3, 11):  # its variables are those of a frame, which is an object there
        yield "", next((part for part in gc.get_referents(generator) if type(part) is types.FrameType), None)
    frame = C.generator_locals(generator)
    yield from () if frame is None else _variables(frame)


def _of_frame(frame: types.FrameType) -> Iterator[tuple[str, Any]]:
    found = C.frame_object_locals(frame)
    yield from () if found is None else _variables(found)


def _variables(frame: Any) -> Iterator[tuple[str, Any]]:
    file, function, line, variables = frame
    for name, value in variables:
        yield f" → {name} in {function} ({Path(file).name}:{line})", value


def _of_exception(error: BaseException) -> Iterator[tuple[str, Any]]:
    for name, field in ERROR_FIELDS.items():
        yield "" if name == "__traceback__" else f".{name}", field.__get__(error)


def _of_traceback(traceback: types.TracebackType) -> Iterator[tuple[str, Any]]:
    yield "", traceback.tb_next
    yield "", traceback.tb_frame


def _of_deque(items: collections.deque[Any]) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(list(collections.deque.__iter__(items))):
        yield f"[{index}]", value


def _of_set(items: Any) -> Iterator[tuple[str, Any]]:
    iterate = set.__iter__ if derives(type(items), set) else frozenset.__iter__
    for value in list(iterate(items)):
        yield "{...}", value


def _of_dict(items: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in list(dict.items(items)):
        yield f"[{key_text(key)}]", value
        yield ".keys()", key


def _of_list(items: list[Any]) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(list(list.__iter__(items))):
        yield f"[{index}]", value


def _of_tuple(items: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    for index, value in enumerate(list(tuple.__iter__(items))):
        yield f"[{index}]", value


def _of_property(found: property) -> Iterator[tuple[str, Any]]:
    yield ".fget", namespace(property)["fget"].__get__(found)


_CACHED = type(functools.lru_cache(len))
_READERS: dict[int, Callable[[Any], Iterator[tuple[str, Any]]]] = {
    id(types.FunctionType): _of_function,
    id(types.CellType): _of_cell,
    id(types.MethodType): _of_method,
    id(types.BuiltinMethodType): _of_method,
    id(functools.partial): _of_partial,
    id(types.GeneratorType): _of_generator,
    id(types.CoroutineType): _of_generator,
    id(types.AsyncGeneratorType): _of_generator,
    id(types.FrameType): _of_frame,
    id(types.TracebackType): _of_traceback,
    id(BaseException): _of_exception,
    id(collections.deque): _of_deque,
    id(set): _of_set,
    id(frozenset): _of_set,
    id(dict): _of_dict,
    id(list): _of_list,
    id(tuple): _of_tuple,
    id(property): _of_property,
}
"""By the identity of a class, which lives as long as this: its metaclass is not asked for a hash."""


def _what(obj: Any) -> str:
    """Name an object that nothing else names, by its kind."""
    cls = type(obj)
    if derives(cls, type):
        return f"class {class_name(obj)}"
    if cls is types.FunctionType:
        return f"function {obj.__qualname__}"
    if cls is types.ModuleType:
        return str(types.ModuleType.__getattribute__(obj, "__dict__").get("__name__", "a module"))
    if derives(cls, _CACHED):
        return "a cached function"
    return "memory" if obj is None else f"a {class_name(cls)}"
