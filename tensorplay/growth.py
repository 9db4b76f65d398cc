"""What storages came between two moments, and what each hangs on: all that the rules on leaks look at."""

from __future__ import annotations

import collections
import functools
import gc
import types
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tensorplay._native import C
from tensorplay.activations import attributes_over, hooks_of, is_suspect
from tensorplay.classes import derives
from tensorplay.failures import Frame, KeptError, kept_by, variable_of
from tensorplay.layers import Grown, Growth, Slope
from tensorplay.live import OWN_FILES
from tensorplay.paths import PathNames, Root
from tensorplay.selection import Config
from tensorplay.walk import OF_ALL_MODULES, attributes

import torch  # isort: skip
from torch import nn  # isort: skip

__all__ = ["NewStorages", "Placed", "Row", "Storages", "Surge", "count_of", "growth_between", "nbytes_of", "rows_of"]

_MEMORY = ("impl", "storage")
_APART = (
    BaseException,
    nn.Module,
    types.FunctionType,
    types.GeneratorType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    types.FrameType,
)
"""Classes of objects that are told from their equals: by the rules, or because each names what it holds."""
_INDEXED = (collections.deque,)
_MADE_BY_C = frozenset({list, tuple, dict, set, frozenset})


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


class NewStorages(NamedTuple):
    """Some that were not there before and are held alike: the ways to them differ in indices alone.

    What stands for all is the first one.
    """

    numbers: memoryview
    """Address and bytes of each."""
    device: str
    entry: int
    """Of its tensor's object, else of its impl or itself."""
    state: str
    around: Sequence[Any]
    """Of garbage: the references of the cycle it hangs on."""
    way: Sequence[Any]
    """And those from the cycle to it."""
    place: int
    """The entry of the first new tensor on the way to it, which may be itself."""
    places: int
    """How many of these there are."""

    @property
    def sizes(self) -> Iterable[tuple[int, int]]:
        """Address and bytes of each."""
        return zip(self.numbers[::2], self.numbers[1::2], strict=True)

    def tensor(self, names: PathNames) -> Any:
        """Answer the object of its tensor, or None."""
        entries = [self.entry, *(end for _, _, end in reversed([*self.around, *self.way]))]
        objects = (names.object(entry) for entry in entries)
        return next((found for found in objects if derives(type(found), torch.Tensor)), None)


class Placed(NamedTuple):
    """New storages and the place that holds them, in words: refers to nothing."""

    numbers: memoryview
    """Address and bytes of each."""
    device: str
    state: str
    path: str
    """The pattern, where there are several places."""
    pattern: str
    """The path with ``[*]`` for its indices."""
    steps: tuple[str, ...]
    """What each step adds to the pattern."""
    place: int
    """A number that tells it from other places."""
    places: int
    """So many it stands for."""
    direct: bool
    """Whether they are those of the tensors there, and not some that live behind these."""
    root: Root

    def among(self, addresses: set[int]) -> Placed:
        """Answer those with these addresses."""
        pairs = zip(self.numbers[::2], self.numbers[1::2], strict=True)
        left = [number for pair in pairs if pair[0] in addresses for number in pair]
        return self._replace(numbers=memoryview(array("Q", left)))


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
    def storages(self) -> int:
        """How many there are."""
        return count_of(self.members)

    @property
    def places(self) -> int:
        """How many places hold them."""
        ones = {member.place for member in self.members if member.places == 1}
        return len(ones) + max((member.places for member in self.members if member.places > 1), default=0)

    @property
    def direct(self) -> list[Placed]:
        """Those of the tensors at the place itself."""
        return [member for member in self.members if member.direct]

    @property
    def indirect(self) -> list[Placed]:
        """Those that were met behind these tensors."""
        return [member for member in self.members if not member.direct]

    def model(self) -> Grown:
        """Answer it as plain data."""
        first = self.members[0]
        return Grown(
            path=self.path,
            steps=first.steps,
            root=first.root.kind,
            file=first.root.file,
            line=first.root.line,
            devices=tuple(sorted({member.device for member in self.members})),
            storages=count_of(self.direct),
            nbytes=nbytes_of(self.direct),
            indirect_storages=count_of(self.indirect),
            indirect_nbytes=nbytes_of(self.indirect),
            places=self.places,
            cycle=self.path if self.state == "cycle" else None,
        )


class Activations(NamedTuple):
    """What modules keep outside parameters and buffers."""

    storages: list[NewStorages]
    attributes: list[str]
    """Their paths."""
    modules: int
    hooks: int
    """Forward hooks that these modules have still."""


def rows_of(placed: Iterable[Placed]) -> list[Row]:
    """Answer storages by the places that hold them, those that pin most first."""
    found: dict[tuple[str, str], list[Placed]] = {}
    for member in placed:
        found.setdefault((member.pattern, member.state), []).append(member)
    rows = [
        Row(members[0].path if len({member.path for member in members}) == 1 else pattern, state, members)
        for (pattern, state), members in found.items()
    ]
    return sorted(rows, key=lambda row: (-row.nbytes, -nbytes_of(row.direct), row.path))


def growth_between(before: Storages, after: Storages, placed: Sequence[Placed], slope: Slope | None = None) -> Growth:
    """Answer what came, stayed and went, and who holds what came."""
    new, new_nbytes = count_of(placed), nbytes_of(placed)
    return Growth(
        nbytes_before=before.nbytes,
        nbytes_after=after.nbytes,
        storages_before=before.total,
        storages_after=after.total,
        new_storages=new,
        new_nbytes=new_nbytes,
        gone_storages=before.total + new - after.total,
        gone_nbytes=before.nbytes + new_nbytes - after.nbytes,
        grown=tuple(row.model() for row in rows_of(placed)),
        slope=slope,
    )


def nbytes_of(storages: Iterable[Placed] | Iterable[NewStorages]) -> int:
    """Answer the bytes of some storages."""
    return sum(sum(some.numbers[1::2]) for some in storages)


def count_of(storages: Iterable[Placed] | Iterable[NewStorages]) -> int:
    """Answer how many some storages are."""
    return sum(len(some.numbers) // 2 for some in storages)


class Surge:
    """The new storages of one moment, with the ways that lead to them.

    Refers to objects: made for one call, and dropped with it.
    """

    def __init__(self, before: Storages, config: Config, slope: Slope | None = None) -> None:
        tally, self._entries, found, crowded, self.c_code_between = C.find_storages(
            OWN_FILES, before.tally, _APART, _INDEXED
        )
        """Whether C code lies between frames of some thread."""
        self.before = before
        self.after = Storages(tally)
        self.config = config
        self.slope = slope
        self.names = PathNames(self._entries)
        self._merged = PathNames(self._entries, merged=True, crowded=crowded)
        self.new: list[NewStorages] = []
        for numbers, device, entry, state, cycle, place, places in found:
            around, way = cycle or ((), ())
            self.new.append(NewStorages(numbers, device, entry, state, around, way, place, places))

    def way_to(self, entry: int) -> list[int]:
        """Answer the entries from a root to one, which is the last."""
        way = [entry]
        while self._entries[way[-1]][5] >= 0:
            way.append(self._entries[way[-1]][5])
        return way[::-1]

    def counts(self, storages: Iterable[Placed] | Iterable[NewStorages]) -> bool:
        """Tell whether the bytes of some storages are worth a word, by the configuration."""
        return nbytes_of(storages) >= self.config.pinned_nbytes

    def is_parameter(self, storages: NewStorages) -> bool:
        """Tell whether they are parameters'."""
        return derives(type(storages.tensor(self.names)), nn.Parameter)

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
        for storages in self.new:
            way = [] if storages.state == "cycle" else self.way_to(storages.entry)
            objects = [self.names.object(entry) for entry in way]
            if not any(type(obj) is types.TracebackType for obj in objects):
                continue
            error = next((n for n, obj in enumerate(objects) if derives(type(obj), BaseException)), None)
            frame = next((n for n, obj in enumerate(objects) if type(obj) is types.FrameType), None)
            if error is None or frame is None or frame + 1 >= len(objects):
                continue
            name = variable_of(objects[frame], objects[frame + 1])
            frames = behind.setdefault(way[error], {})
            frames.setdefault(way[frame + 1], Frame(name, [])).storages.extend(storages.sizes)
        errors = [
            (self.names.text(entry), self._merged.text(entry), self.names.object(entry), list(frames.values()))
            for entry, frames in behind.items()
        ]
        return kept_by(errors, self.config.pinned_nbytes)

    @functools.cached_property
    def activations(self) -> Activations:
        """The new storages that modules hold in plain attributes, where these look like what a step computed."""
        steps = self._attributes_of_modules()
        held: dict[tuple[int, str], list[NewStorages]] = {}
        for storages in self.new:
            step = steps[storages.entry]
            if step is not None and storages.state == "reached":
                held.setdefault(step, []).append(storages)
        owners = Counter(
            name for entry in {entry for entry, _ in held} for name in attributes(self.names.object(entry))
        )
        modules: dict[int, list[str]] = {}
        for entry, name in held:
            if is_suspect(self.names.object(entry), name, is_shared=owners[name] > 1):
                modules.setdefault(entry, []).append(name)
        found = [some for entry, names in modules.items() for name in names for some in held[entry, name]]
        addresses = {address for some in found for address, _ in some.sizes}
        return Activations(
            storages=found,
            attributes=sorted(attributes_over(self.names, modules, addresses)),
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
        return [self._placed(storages) for storages in self.new]

    def _placed(self, storages: NewStorages) -> Placed:
        names, merged, place = self.names, self._merged, storages.place
        if storages.state == "cycle":
            path, pattern = (one.cycle(storages.around) or "a cycle" for one in (names, merged))
            steps = merged.cycle_steps(storages.around)
            direct = all(names.kind(end) in _MEMORY for _, _, end in storages.way)
        else:
            pattern, steps = merged.text(place), merged.steps(place)
            path = names.text(place) if storages.places == 1 else pattern
            direct = place == storages.entry
        return Placed(
            numbers=storages.numbers,
            device=storages.device,
            state=storages.state,
            path=path,
            pattern=pattern,
            steps=steps,
            place=place,
            places=storages.places,
            direct=direct,
            root=names.root(place),
        )

    @functools.cached_property
    def held_by_c(self) -> list[Row]:
        """The new storages that C or C++ code alone holds, without what such code may be making just now."""
        pairs = zip(self.new, self.placed, strict=True)
        return rows_of(
            placed for storages, placed in pairs if placed.state == "unknown" and not self._may_be_in_making(storages)
        )

    def _may_be_in_making(self, storages: NewStorages) -> bool:
        # As in list(map(load, files)): nobody but the C function that fills it has the list.
        if not self.c_code_between:
            return False
        objects = [self.names.object(entry) for entry in self.way_to(storages.entry)]
        return type(next((obj for obj in objects if obj is not None), None)) in _MADE_BY_C

    def has_script_modules(self) -> bool:
        """Tell whether a TorchScript module is alive: its tensors hang on C++ alone."""
        return any(derives(type(obj), torch.jit.ScriptModule) for obj in gc.get_objects())

    def rows(self, state: str) -> list[Row]:
        """Answer the new storages of one state by the places that hold them, those that pin most first."""
        return rows_of(member for member in self.placed if member.state == state)

    def growth(self) -> Growth:
        """Answer it as plain data."""
        return growth_between(self.before, self.after, self.placed, self.slope)
