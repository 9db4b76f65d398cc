"""Every tensor and node of the process that a Python object stands for, found by one native scan."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
from torch._C._autograd import SavedTensor

__all__ = ["OWN_FILES", "Live", "LiveTensor", "Owners", "caller_names", "find_owners", "scope_names"]

OWN_FILES = str(Path(__file__).parent) + os.sep
"""What the files of this package begin with."""


class LiveTensor(NamedTuple):
    """A live tensor and what was read of it; refers to the tensor, so it lives no longer than the call."""

    tensor: Any
    record: Any

    @property
    def in_python(self) -> bool:
        """Whether a Python reference holds it, and not only its own impl, which C++ holds."""
        python, impl = self.record.python, self.record.impl
        own = 1 if impl.use_count > 1 and python.slot_is_self else 0
        return bool(python.refcount > own)


class Live:
    """The tensors and nodes alive at one moment, looked for on first use.

    Holds a reference to each: made for one call, and dropped with it.
    """

    @functools.cached_property
    def _graph(self) -> tuple[list[Any], list[Any], list[Any]]:
        return C.live_graph()

    @property
    def tensors(self) -> list[Any]:
        """The tensors."""
        return self._graph[0]

    @property
    def roots(self) -> list[Any]:
        """What keeps tensors for backward: tensors, nodes of autograd, what checkpoints will compute from again."""
        tensors, nodes, frames = self._graph
        saved = (arg for frame in frames for arg in (C.instance_dict(frame) or {}).get("saved_args", ()))
        return [*tensors, *nodes, *(arg for arg in saved if type(arg) is SavedTensor)]

    @functools.cached_property
    def _grouped(self) -> tuple[memoryview, memoryview]:
        return C.group_by_storage(self.tensors)

    def over(self, storages: Iterable[int]) -> dict[int, list[LiveTensor]]:
        """Answer the live tensors over some storages, by the storage's address."""
        wanted = set(storages) - {0}
        if not wanted:
            return {}
        numbers, storages = self._grouped
        groups = {number: address for number, address in enumerate(storages) if address in wanted}
        found: dict[int, list[LiveTensor]] = {address: [] for address in wanted}
        for index, number in enumerate(numbers):
            if number in groups:
                found[groups[number]].append(self.read(index))
        return found

    def over_bytes(self, begin: int, end: int) -> list[LiveTensor]:
        """Answer the live tensors whose storages lie over some addresses: several storages may."""
        numbers, storages = self._grouped
        first = {number: index for index, number in reversed(list(enumerate(numbers)))}
        wanted = []
        for number, address in enumerate(storages):
            if address == 0 or number not in first:
                continue
            record = self.read(first[number]).record
            start, size = (None, None) if record.data is None else (record.data.pointer, record.storage.nbytes)
            if start and isinstance(size, int) and start < end and begin < start + size:
                wanted.append(address)
        return [entry for group in self.over(wanted).values() for entry in group]

    def read(self, index: int) -> LiveTensor:
        """Read one of them: this list, this function and its call hold a reference each."""
        tensor = self.tensors[index]
        record = C.read(tensor, 3)
        return LiveTensor(tensor, record)


class Owners(NamedTuple):
    """Who owns a TensorImpl or a StorageImpl."""

    total: int
    links: tuple[str, ...]
    """What each owner that was found is to it: its Python object ("object"), another one ("holder"), or as C++
    calls it ("saved self")."""

    @property
    def unexplained(self) -> int:
        """Owners that no path and no tensor, node or storage is."""
        return max(0, self.total - len(self.links))


def find_owners(kind: str, addresses: Iterable[int]) -> dict[int, Owners]:
    """Answer who owns some impls or storages, by one walk over the heap where there are any."""
    wanted = list(addresses)
    if not wanted:
        return {}
    owners = C.find_owners(kind, wanted)
    return {address: Owners(total, tuple(links)) for address, (total, links) in zip(wanted, owners, strict=True)}


def caller_names(scope: dict[str, Any]) -> dict[str, Any]:
    """Answer what the line that called us can name: the variables of its frame, and the globals handed in."""
    frames = C.frame_locals(threading.get_ident(), OWN_FILES)
    return {**scope, **dict(frames[0][3])} if frames else scope


def scope_names() -> list[tuple[str, Any]]:
    """Answer what the caller can name: variables of the frames that run now, and globals of the script.

    Innermost frames come first. The caller's own variables come by their bare names, those of other frames after the
    function's.
    """
    found: list[tuple[str, Any]] = []
    seen: set[str] = set()
    for number, (_, function, _, variables) in enumerate(C.frame_locals(None, OWN_FILES)):
        prefix = "" if number == 0 or function == "<module>" else f"{function}."
        for name, value in variables:
            if f"{prefix}{name}" not in seen:
                seen.add(f"{prefix}{name}")
                found.append((f"{prefix}{name}", value))
    main = sys.modules.get("__main__")
    for name, value in [] if main is None else list(vars(main).items()):
        if name not in seen and not name.startswith("__"):
            found.append((name, value))
    return found
