"""What storages came between two moments, and what each hangs on: all that the rules on leaks look at."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from tensorplay._native import C
from tensorplay.activations import attributes_over, hooks_of, is_suspect
from tensorplay.classes import derives
from tensorplay.failures import Frame, KeptError, kept_error, variable_of
from tensorplay.layers import Grown, Growth, Slope
from tensorplay.live import OWN_FILES
from tensorplay.paths import PathNames, Root
from tensorplay.selection import Config
from tensorplay.walk import OF_ALL_MODULES, attributes

import torch  # isort: skip
from torch import nn  # isort: skip

__all__ = ["NewStorage", "Placed", "Row", "Storages", "Surge", "growth_between", "nbytes_of", "rows_of"]

_INDEX = re.compile(r"\[\d+\]")
_MEMORY = ("impl", "storage")
_T = TypeVar("_T")


class Storages(NamedTuple):
    """The storages of one moment, without a reference to any.

    An address, pointer and size that are all the same later are taken for the same storage: a new one that got the
    memory of one that went is not told from it. The sums are right all the same.
    """

    tally: memoryview
    """Address, pointer, bytes, and whether it waits for the collector: four numbers each."""

    @classmethod
    def now(cls) -> Storages:
        """Tally them: one walk over the heap."""
        return cls(C.find_storages(OWN_FILES)[0])

    @property
    def total(self) -> int:
        """How many there are."""
        return len(self.tally) // 4

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return sum(self.tally[2::4])

    @property
    def keys(self) -> set[tuple[int, int, int]]:
        """Address, pointer and bytes of each."""
        return set(zip(self.tally[::4], self.tally[1::4], self.tally[2::4], strict=True))

    @property
    def held_nbytes(self) -> int:
        """Bytes of those that something holds."""
        return self.nbytes - sum(n for n, garbage in zip(self.tally[2::4], self.tally[3::4], strict=True) if garbage)


class NewStorage(NamedTuple):
    """One that was not there before."""

    address: int
    nbytes: int
    device: str
    entry: int
    """Of what stands for it: its tensor's object, else its impl or itself."""
    state: str
    around: Sequence[Any]
    """Of garbage: the references of the cycle it hangs on."""
    way: Sequence[Any]
    """And those from the cycle to it."""

    def tensor(self, names: PathNames) -> Any:
        """Answer the object of its tensor, or None."""
        entries = [self.entry, *(end for _, _, end in reversed([*self.around, *self.way]))]
        objects = (names.object(entry) for entry in entries)
        return next((found for found in objects if derives(type(found), torch.Tensor)), None)


class Placed(NamedTuple):
    """A new storage and the place that holds it, in words: refers to nothing."""

    address: int
    nbytes: int
    device: str
    state: str
    path: str
    place: int
    """The entry that the path leads to."""
    direct: bool
    """Whether it is the storage of the tensor there, and not one that lives behind that."""
    root: Root


class Row(NamedTuple):
    """New storages that one place holds, or places that differ in an index alone."""

    path: str
    state: str
    members: list[Placed]

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return nbytes_of(self.members)

    @property
    def direct(self) -> list[Placed]:
        """Those of the tensors at the place itself."""
        return [member for member in self.members if member.direct]

    @property
    def indirect(self) -> list[Placed]:
        """Those that only live behind these tensors."""
        return [member for member in self.members if not member.direct]

    def model(self) -> Grown:
        """Answer it as plain data."""
        first = self.members[0]
        return Grown(
            path=self.path,
            root=first.root.kind,
            file=first.root.file,
            line=first.root.line,
            devices=tuple(sorted({member.device for member in self.members})),
            storages=len(self.direct),
            nbytes=nbytes_of(self.direct),
            indirect_storages=len(self.indirect),
            indirect_nbytes=nbytes_of(self.indirect),
            places=len({member.place for member in self.members}),
            cycle=self.path if self.state == "cycle" else None,
        )


class Activations(NamedTuple):
    """What modules keep outside parameters and buffers."""

    storages: list[NewStorage]
    attributes: list[str]
    """Their paths."""
    modules: int
    hooks: int
    """Forward hooks that these modules have still."""


def rows_of(placed: Iterable[Placed]) -> list[Row]:
    """Answer storages by the places that hold them, those that pin most first."""
    found: dict[tuple[str, str], list[Placed]] = {}
    for member in placed:
        found.setdefault((_INDEX.sub("[*]", member.path), member.state), []).append(member)
    rows = [
        Row(pattern if len({member.path for member in members}) > 1 else members[0].path, state, members)
        for (pattern, state), members in found.items()
    ]
    return sorted(rows, key=lambda row: (-row.nbytes, -nbytes_of(row.direct), row.path))


def growth_between(before: Storages, after: Storages, placed: Sequence[Placed], slope: Slope | None = None) -> Growth:
    """Answer what came, stayed and went, and who holds what came."""
    new_nbytes = nbytes_of(placed)
    return Growth(
        nbytes_before=before.nbytes,
        nbytes_after=after.nbytes,
        storages_before=before.total,
        storages_after=after.total,
        new_storages=len(placed),
        new_nbytes=new_nbytes,
        gone_storages=before.total + len(placed) - after.total,
        gone_nbytes=before.nbytes + new_nbytes - after.nbytes,
        grown=tuple(row.model() for row in rows_of(placed)),
        slope=slope,
    )


def nbytes_of(storages: Iterable[Placed] | Iterable[NewStorage]) -> int:
    """Answer the bytes of some storages."""
    return sum(storage.nbytes for storage in storages)


class Surge:
    """The new storages of one moment, with the ways that lead to them.

    Refers to objects: made for one call, and dropped with it.
    """

    def __init__(self, before: Storages, config: Config, slope: Slope | None = None) -> None:
        tally, self._entries, found = C.find_storages(OWN_FILES, before.tally)
        self.before = before
        self.after = Storages(tally)
        self.config = config
        self.slope = slope
        self.names = PathNames(self._entries)
        self.new = [
            NewStorage(address, nbytes, device, entry, state, *(((), ()) if cycle is None else cycle))
            for address, nbytes, device, entry, state, cycle in found
        ]

    def way_to(self, entry: int) -> list[int]:
        """Answer the entries from a root to one, which is the last."""
        way = [entry]
        while self._entries[way[-1]][5] >= 0:
            way.append(self._entries[way[-1]][5])
        return way[::-1]

    def inherited(self, start: Callable[[int], _T | None]) -> list[_T | None]:
        """Answer for each entry what start() says of the first one on the way to it of which it says something."""
        found: list[_T | None] = []
        for number, entry in enumerate(self._entries):
            outer = found[entry[5]] if entry[5] >= 0 else None
            found.append(start(number) if outer is None else outer)
        return found

    def counts(self, storages: Iterable[Placed] | Iterable[NewStorage]) -> bool:
        """Tell whether the bytes of some storages are worth a word, by the configuration."""
        return nbytes_of(storages) >= self.config.pinned_nbytes

    @functools.cached_property
    def _above(self) -> list[int | None]:
        """Of each entry, the first new tensor on the way to it, which may be itself."""
        new = {storage.entry for storage in self.new}
        return self.inherited(lambda number: number if number in new else None)

    def is_parameter(self, storage: NewStorage) -> bool:
        """Tell whether it is a parameter's."""
        return derives(type(storage.tensor(self.names)), nn.Parameter)

    def kind_of_cycle(self, around: Sequence[Any]) -> str:
        """Say what closes a cycle: the context of a Function, an exception, a hook, or something other."""
        objects = [self.names.object(begin) for begin, _, _ in around]
        if any(derives(type(obj), torch.autograd.function.FunctionCtx) for obj in objects):
            return "context"
        if any(derives(type(obj), BaseException) for obj in objects):
            return "exception"
        return "hook" if "_hooks" in self.names.cycle(around) else "other"

    # No cached property: its frame would hold what this refers to while the heap is walked.
    def kept_errors(self) -> list[KeptError]:
        """Answer the exceptions that new storages hang on, and what nothing but their tracebacks holds."""
        behind: dict[int, dict[int, Frame]] = {}
        for storage in self.new:
            way = [] if storage.state == "cycle" else self.way_to(storage.entry)
            objects = [self.names.object(entry) for entry in way]
            if not any(type(obj) is types.TracebackType for obj in objects):
                continue
            error = next((n for n, obj in enumerate(objects) if derives(type(obj), BaseException)), None)
            frame = next((n for n, obj in enumerate(objects) if type(obj) is types.FrameType), None)
            if error is None or frame is None or frame + 1 >= len(objects):
                continue
            name = variable_of(objects[frame], objects[frame + 1])
            frames = behind.setdefault(way[error], {})
            frames.setdefault(way[frame + 1], Frame(name, [])).storages.append((storage.address, storage.nbytes))
        return [
            kept_error(
                self.names.text(entry), self.names.object(entry), list(frames.values()), self.config.pinned_nbytes
            )
            for entry, frames in behind.items()
        ]

    @functools.cached_property
    def activations(self) -> Activations:
        """The new storages that modules hold in plain attributes, where these look like what a step computed."""
        steps = self._attributes_of_modules()
        held: dict[tuple[int, str], list[NewStorage]] = {}
        for storage in self.new:
            step = steps[storage.entry]
            if step is not None and storage.state == "reached":
                held.setdefault(step, []).append(storage)
        modules: dict[int, list[str]] = {}
        for entry, name in held:
            if is_suspect(self.names.object(entry), name):
                modules.setdefault(entry, []).append(name)
        storages = {
            storage.address: storage
            for entry, names in modules.items()
            for name in names
            for storage in held[entry, name]
        }
        return Activations(
            storages=list(storages.values()),
            attributes=sorted(attributes_over(self.names, modules, set(storages))),
            modules=len(modules),
            hooks=sum(hooks_of(self.names.object(entry)) for entry in modules),
        )

    def _attributes_of_modules(self) -> list[tuple[int, str] | None]:
        """Answer for each entry the module and its plain attribute that lead to it, or None."""
        found: list[tuple[int, str] | None] = []
        for _, obj, _, _, how, parent in self._entries:
            outer = found[parent] if parent >= 0 else None
            if derives(type(obj), nn.Module):
                outer = None
            elif parent >= 0 and how is not None:
                outer = self._attribute(parent, obj, how) or outer
            found.append(outer)
        return found

    def _attribute(self, parent: int, obj: Any, how: Any) -> tuple[int, str] | None:
        holder = self.names.object(parent)
        name: Any = None
        if type(holder) is dict and how[0] == "key":
            outer = self._entries[parent][5]
            module = self.names.object(outer) if outer >= 0 else None
            if derives(type(module), nn.Module) and C.instance_dict(module) is holder:
                parent, name = outer, how[1]
        elif derives(type(holder), nn.Module):  # CPython may keep attributes without a dictionary
            name = next((name for name, value in attributes(holder).items() if value is obj), None)
        return None if name is None or name in OF_ALL_MODULES else (parent, name)

    @functools.cached_property
    def placed(self) -> list[Placed]:
        """The new storages with the places that hold them, in the order of ``new``."""
        found = []
        for storage in self.new:
            if storage.state == "cycle":
                place, path = storage.entry, self.names.cycle(storage.around) or "a cycle"
                direct = all(self.names.kind(end) in _MEMORY for _, _, end in storage.way)
            else:
                above = self._above[storage.entry]
                place = storage.entry if above is None else above
                path = self.names.text(place)
                direct = place == storage.entry
            root = self.names.root(place)
            found.append(
                Placed(storage.address, storage.nbytes, storage.device, storage.state, path, place, direct, root)
            )
        return found

    def rows(self, state: str) -> list[Row]:
        """Answer the new storages of one state by the places that hold them, those that pin most first."""
        return rows_of(member for member in self.placed if member.state == state)

    def growth(self) -> Growth:
        """Answer it as plain data."""
        return growth_between(self.before, self.after, self.placed, self.slope)
