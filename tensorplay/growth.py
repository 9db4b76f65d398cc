"""What storages came between two moments, and what each hangs on: all that the rules on leaks look at."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tensorplay._native import C
from tensorplay.classes import derives
from tensorplay.layers import Growth, Grown, Slope
from tensorplay.live import OWN_FILES
from tensorplay.paths import PathNames
from tensorplay.selection import Config

import torch  # isort: skip

__all__ = ["NewStorage", "Row", "Storages", "Surge"]

_INDEX = re.compile(r"\[\d+\]")
_MEMORY = ("impl", "storage")


class Storages(NamedTuple):
    """The storages of one moment, without a reference to any: pointer and bytes of each, by address.

    An address, pointer and size that are all the same later are taken for the same storage: a new one that got the
    memory of one that went is not told from it. The sums are right all the same.
    """

    known: dict[int, tuple[int, int]]
    garbage_nbytes: int
    """Bytes of those that wait for the collector."""

    @classmethod
    def now(cls) -> Storages:
        """Tally them: one walk over the heap."""
        numbers = C.tally_storages(OWN_FILES).tolist()
        known = dict(zip(numbers[::4], zip(numbers[1::4], numbers[2::4], strict=True), strict=True))
        garbage = sum(nbytes for nbytes, flag in zip(numbers[2::4], numbers[3::4], strict=True) if flag)
        return cls(known, garbage)

    @property
    def nbytes(self) -> int:
        """Their bytes."""
        return sum(nbytes for _, nbytes in self.known.values())

    @property
    def held_nbytes(self) -> int:
        """Bytes of those that something holds."""
        return self.nbytes - self.garbage_nbytes


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


class Row(NamedTuple):
    """New storages that one place holds, or places that differ in an index alone."""

    path: str
    state: str
    direct: list[NewStorage]
    indirect: list[NewStorage]
    places: set[int]

    @property
    def storages(self) -> list[NewStorage]:
        """All of them."""
        return [*self.direct, *self.indirect]


class Surge:
    """The new storages of one moment, with the ways that lead to them.

    Refers to objects: made for one call, and dropped with it.
    """

    def __init__(self, before: Storages, config: Config, steps: Sequence[int] = ()) -> None:
        self._entries, found = C.find_storages(OWN_FILES)
        self.before = before
        self.config = config
        self.steps = steps
        self.names = PathNames(self._entries)
        self.new: list[NewStorage] = []
        left = dict(before.known)
        self._storages = self._nbytes = 0
        for address, nbytes, pointer, device, entry, state, cycle in found:
            nbytes = nbytes or 0
            self._storages += 1
            self._nbytes += nbytes
            if before.known.get(address) == (pointer or 0, nbytes):
                left.pop(address, None)
            else:
                around, way = ((), ()) if cycle is None else cycle
                self.new.append(NewStorage(address, nbytes, device, entry, state, around, way))
        self._gone = [nbytes for _, nbytes in left.values()]

    @property
    def entries(self) -> Sequence[Any]:
        """The entries of the walk; each comes after the one that leads to it."""
        return self._entries

    def way_to(self, entry: int) -> list[int]:
        """Answer the entries from a root to one, which is the last."""
        way = [entry]
        while self._entries[way[-1]][5] >= 0:
            way.append(self._entries[way[-1]][5])
        return way[::-1]

    def counts(self, storages: Iterable[NewStorage]) -> bool:
        """Tell whether the bytes of some storages are worth a word, by the configuration."""
        return sum(storage.nbytes for storage in storages) >= self.config.pinned_nbytes

    @functools.cached_property
    def _above(self) -> list[int | None]:
        """Of each entry, the first new tensor on the way to it, which may be itself."""
        new = {storage.entry for storage in self.new}
        above: list[int | None] = []
        for number, entry in enumerate(self._entries):
            outer = above[entry[5]] if entry[5] >= 0 else None
            above.append(outer if outer is not None else number if number in new else None)
        return above

    @functools.cached_property
    def rows(self) -> list[Row]:
        """The new storages by who holds them, those that pin most first."""
        found: dict[tuple[str, str], Row] = {}
        for storage in self.new:
            if storage.state == "cycle":
                place, path = storage.entry, self.names.cycle(storage.around)
                is_direct = all(self.names.kind(end) in _MEMORY for _, _, end in storage.way)
            else:
                above = self._above[storage.entry]
                place = storage.entry if above is None else above
                path = self.names.text(place)
                is_direct = place == storage.entry
            pattern = _INDEX.sub("[*]", path)
            row = found.setdefault((pattern, storage.state), Row(path, storage.state, [], [], set()))
            (row.direct if is_direct else row.indirect).append(storage)
            row.places.add(place)
            if path != row.path:
                found[pattern, storage.state] = row._replace(path=pattern)
        return sorted(found.values(), key=lambda row: (-_sum(row.storages), -_sum(row.direct), row.path))

    def growth(self, slope: Slope | None) -> Growth:
        """Answer it as plain data."""
        return Growth(
            nbytes_before=self.before.nbytes,
            nbytes_after=self._nbytes,
            storages_before=len(self.before.known),
            storages_after=self._storages,
            new_storages=len(self.new),
            new_nbytes=_sum(self.new),
            gone_storages=len(self._gone),
            gone_nbytes=sum(self._gone),
            grown=tuple(self._grown()),
            slope=slope,
        )

    def _grown(self) -> Iterator[Grown]:
        for row in self.rows:
            first = min(row.places)
            root = self.names.root(first)
            how = self._entries[first][4]
            yield Grown(
                path=row.path,
                how=str(how[1]) if how is not None and how[0] == "owns" else "value",
                root="cycle" if row.state == "cycle" else root.kind,
                file=root.file,
                line=root.line,
                devices=tuple(sorted({storage.device for storage in row.storages})),
                storages=len(row.direct),
                nbytes=_sum(row.direct),
                indirect_storages=len(row.indirect),
                indirect_nbytes=_sum(row.indirect),
                places=len(row.places),
                cycle=row.path if row.state == "cycle" else None,
            )


def _sum(storages: Iterable[NewStorage]) -> int:
    return sum(storage.nbytes for storage in storages)
