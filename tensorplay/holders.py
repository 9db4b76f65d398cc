"""who_holds(): what keeps an object's memory alive, with every reference accounted for."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tensorplay._native import C
from tensorplay.callers import Caller
from tensorplay.classes import class_name, derives, namespace
from tensorplay.inspection import outside_compiled_code
from tensorplay.layers import Held, Holder, Ledger, Unread
from tensorplay.live import OWN_FILES
from tensorplay.paths import PathNames
from tensorplay.reports import Report
from tensorplay.words import describe, plural

__all__ = ["HoldersReport", "who_holds"]

_COUNTERS = {"object": "refcount", "impl": "use_count", "storage": "storage use_count"}
_KINDS = {"Python object": "reference", "base": "view", "variable": "accumulator of the gradient"}


_MOST_ALIKE = 16
_NUMBER = re.compile(r"(\d+)")
_flags: Callable[[Any], int] = namespace(type)["__flags__"].__get__


class HoldersReport(Report):
    """A report whose text is who keeps an object alive."""

    __slots__ = ()
    about = ("holders",)

    @property
    def holders(self) -> tuple[Holder, ...]:
        """All who refer to the object or its memory, the shortest paths first."""
        return self.document.held[0].holders

    @property
    def ledgers(self) -> tuple[Ledger, ...]:
        """The counts of references as sums: of the Python object, the TensorImpl and the StorageImpl."""
        return self.document.held[0].ledgers

    @property
    def state(self) -> str:
        """Whether a root leads to it: reached, cycle (garbage), unknown (C or C++ alone), probe (this call)."""
        return self.document.held[0].state

    @property
    def cycle(self) -> str | None:
        """The steps of the cycle it hangs on, if it is garbage."""
        return self.document.held[0].cycle

    @property
    def unaccounted(self) -> int:
        """References that nothing explains: C or C++ code alone has them."""
        return sum(ledger.unaccounted for ledger in self.ledgers)

    def __repr__(self) -> str:
        held = self.document.held[0]
        return f"<tensorplay.HoldersReport: {held.name}, {plural(len(held.holders), 'holder')}>"


@outside_compiled_code
def who_holds(x: object) -> HoldersReport:
    """Answer what keeps a tensor's memory alive: Python paths, views, autograd nodes, gradients, hooks, C++ owners.

    Paths begin at module globals, at variables of executing frames in all threads, at thread-local and context
    variables, and lead through containers, attributes, slots, closures, caches, generators, exceptions and the nodes of
    autograd. Three ledgers say that nothing is missing: the refcount of the Python object, the use_count of its
    TensorImpl and that of its StorageImpl are the sums of the references that were found; the rest is C++-only.

    Args:
        x: a tensor, or any other object that the garbage collector can know: then its references alone are listed.

    Returns:
        The report: ``.holders``, ``.ledgers``, ``.state``, ``.cycle``, ``str()``, ``.to_json()``. It prints nothing.

    Raises:
        TypeError: x is an object without references of its own to list, as a number or a str.

    Cost: one walk over the heap, some 70 ms beside torch alone, 0.4 s for a million objects. Runs no operator, no code
        of the objects, changes no count. Other threads wait meanwhile.

    Source: tp_traverse of every type; c10/util/intrusive_ptr.h; torch/csrc/autograd/{variable,saved_variable,node}.h;
        torch/csrc/autograd/python_hook.h, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    record = C.read(x, 0) if C.is_tensor(x) else None
    watched = _layers(x, record)
    entries, answers, busy, _ = C.find_holders(watched, OWN_FILES)
    held = _held(caller.argument("x", 0), x, record, watched, PathNames(entries), answers)
    del entries
    unread = () if not busy else (_busy(busy),)
    return HoldersReport([], unread=unread, held=(held,), focus="holders")


def _busy(count: int) -> Unread:
    return Unread(name=plural(count, "node"), reason="held by another thread, as while backward runs")


def _layers(x: Any, record: Any) -> list[tuple[str, int]]:
    """Answer what has a count of references: the object, and of a tensor its impl and its storage."""
    if record is None:
        if not _is_known_to_collector(x):
            what = f"class {class_name(x)}" if derives(type(x), type) else class_name(type(x))
            raise TypeError(f"who_holds() takes a tensor or an object that the garbage collector knows, got {what}")
        return [("object", id(x))]
    found = [("object", id(x)), ("impl", record.impl.address)]
    return found if record.storage is None else [*found, ("storage", record.storage.address)]


def _is_known_to_collector(x: object) -> bool:
    if type(x) is tuple and not x:
        return False  # the one empty tuple
    if derives(type(x), type):
        return bool(_flags(x) & 1 << 9)  # Py_TPFLAGS_HEAPTYPE of Include/object.h: those made in C are for good
    return bool(_flags(type(x)) & 1 << 14)  # Py_TPFLAGS_HAVE_GC


class _Reference(NamedTuple):
    of: Any
    how: str
    path: str
    root: Any
    steps: tuple[str, ...] = ()


def _held(name: str, x: Any, record: Any, watched: list[tuple[str, int]], names: PathNames, answers: list[Any]) -> Held:
    references: list[_Reference] = []
    ledgers = []
    for (layer, _), (count, found, stacks, _, _) in zip(watched, answers, strict=True):
        mine = _references(layer, found, x, names)
        references += mine
        # Of a frame that runs C code, the end of the evaluation stack is not known; a function that PyTorch kept for a
        # view may hold the base again, out of sight.
        guesses = {"on the evaluation stack of a frame": stacks, "in the functions of views of it": _kept(found, names)}
        ledgers.append(_ledger(layer, count, mine, guesses))
    state, cycle = answers[0][3:5]
    return Held(
        name=name,
        description=f"a {class_name(type(x))}" if record is None else describe(record),
        nbytes=_nbytes(record),
        state=state,
        holders=tuple(_merged(references)),
        ledgers=tuple(ledgers),
        cycle=None if cycle is None else names.cycle(cycle[0]),
        cycle_steps=() if cycle is None else names.cycle_steps(cycle[0]),
    )


def _nbytes(record: Any) -> int | None:
    storage = None if record is None else record.storage
    return storage.nbytes if storage is not None and isinstance(storage.nbytes, int) else None


def _references(layer: Any, found: Sequence[tuple[int, Any]], x: Any, names: PathNames) -> list[_Reference]:
    """Name references; of many whose paths differ in an index alone, all by one name."""
    if len(found) <= _MOST_ALIKE:
        return [_reference(layer, number, how, x, names) for number, how in found]
    merged = names.merged()
    alike = [_reference(layer, number, how, x, merged) for number, how in found]
    counts = Counter((reference.how, reference.path) for reference in alike)
    return [
        reference if counts[reference.how, reference.path] > _MOST_ALIKE else _reference(layer, number, how, x, names)
        for reference, (number, how) in zip(alike, found, strict=True)
    ]


def _reference(layer: Any, number: int, how: Any, x: Any, names: PathNames) -> _Reference:
    word, what = how
    root = names.root(number)
    place = names.text(number), root, names.steps(number)
    if layer == "object":
        if names.kind(number) == "impl":
            return _Reference(layer, "impl", *place)
        if word == "owns":  # what autograd holds in Python: a hook's dictionary, what a hook packed
            return _Reference(layer, what, *place)
        path, steps = names.target(number, how, x)
        return _Reference(layer, "reference", path, root, steps)
    if names.object(number) is x and names.kind(number) in ("object", "impl"):
        return _Reference(layer, "itself", "", root)
    return _Reference(layer, "Python object" if names.kind(number) == "object" else what, *place)


def _kept(found: Iterable[tuple[int, Any]], names: PathNames) -> int:
    """Count the functions that PyTorch kept for views and that may hold a tensor a second time, out of sight."""
    owned = [(number, what) for number, (word, what) in found if word == "owns"]
    views = (names.object(number) for number, what in owned if what == "base")
    answers = (C.view_of(view) for view in views if view is not None)
    kept = [answer for answer in answers if answer is not None and answer[2] is not None]
    return len(kept) + [what for _, what in owned].count("view function")


def _ledger(layer: Any, count: int, references: Iterable[_Reference], guesses: dict[str, int]) -> Ledger:
    kinds: Counter[str] = Counter()
    for reference in references:
        if reference.root.kind == "probe" and reference.how == "reference":
            kinds["of this call"] += 1
        elif reference.how == "itself":
            kinds["its Python object" if layer == "impl" else "its TensorImpl"] += 1
        elif reference.how == "impl":
            kinds["its TensorImpl's, which C++ holds too"] += 1
        elif layer == "storage" and reference.how == "storage":
            kinds["other TensorImpls"] += 1
        elif layer == "impl" and reference.how == "base":
            kinds["views of it"] += 1
        else:
            kinds[_KINDS.get(reference.how, reference.how)] += 1
    left = count - sum(kinds.values())
    for kind, most in guesses.items():
        if left > 0 and most:
            kinds[kind] = min(left, most)
            left -= min(left, most)
    terms = tuple((number, _plural(kind, number)) for kind, number in kinds.items())
    return Ledger(of=layer, counter=_COUNTERS[layer], count=count, terms=terms, unaccounted=max(0, left))


def _plural(kind: str, count: int) -> str:
    if kind == "reference":
        return "reference" if count == 1 else "references"
    if count == 1 and kind in ("other TensorImpls", "views of it"):
        return {"other TensorImpls": "other TensorImpl", "views of it": "view of it"}[kind]
    return kind


def _merged(references: Iterable[_Reference]) -> Iterator[Holder]:
    """Leave out what is no holder, and say once what several references from one place are."""
    found: dict[tuple[str, str], list[_Reference]] = {}
    for reference in references:
        if reference.how not in ("itself", "impl") and reference.root.kind != "probe":
            found.setdefault((reference.how, reference.path), []).append(reference)
    views = {path for how, path in found if how == "base"}
    for (how, path), same in sorted(found.items(), key=lambda item: _rank(*item[0])):
        if how == "storage" and path in views:
            continue  # a view owns its base and the storage: one holder
        first = same[0]
        yield Holder(
            of=first.of,
            how=how,
            path=path,
            steps=first.steps,
            root=first.root.kind,
            file=first.root.file,
            line=first.root.line,
            count=len(same),
        )


def _rank(how: str, path: str) -> tuple[Any, ...]:
    """Sort by the steps of a path, about, then by its words, numbers as numbers."""
    steps = path.count(".") + path.count("[") + 2 * path.count("→") + path.count("…")
    return steps, [int(part) if part.isdecimal() else part for part in _NUMBER.split(path)], how
