"""A log from which modules are put back as they were: objects, ties, bytes, versions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch

from tensorplay.layers import WITH_MEMORY
from tensorplay.modules import Modules, Slot

__all__ = ["Undo"]

_TABLES = ("_parameters", "_buffers")


class Undo:
    """What modules were, made before the first write; holds references until it is dropped.

    The tables are kept always: they cost a reference an entry. Bytes are kept of what is given to :meth:`keep`, each
    once, however many names it has.
    """

    def __init__(self, modules: Modules) -> None:
        self.nbytes = 0
        """Memory that the kept bytes take."""
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._sets: list[tuple[set[str], set[str]]] = []
        self._others: list[Callable[[], None]] = []
        self._kept: dict[tuple[Any, ...], tuple[Any, Any, int | None]] = {}
        seen: set[int] = set()
        for module in modules.each():
            if id(module) in seen:
                continue
            seen.add(id(module))
            own = C.instance_dict(module) or {}
            for name in _TABLES:
                if isinstance(own.get(name), dict):
                    self._tables.append((own[name], dict(own[name])))
            if isinstance(own.get("_non_persistent_buffers_set"), set):
                self._sets.append((own["_non_persistent_buffers_set"], set(own["_non_persistent_buffers_set"])))

    def keep(self, slots: Iterable[Slot]) -> None:
        """Copy the bytes of what is to be written.

        Raises whatever copying raises, as where memory runs out; nothing has been written then.
        """
        for slot in slots:
            record = slot.record
            if not slot.has_memory:
                continue
            if record.kind in WITH_MEMORY and record.storage is not None:
                place: tuple[Any, ...] = (
                    record.storage.address,
                    record.impl.storage_offset,
                    record.impl.shape,
                    record.impl.stride,
                    record.impl.dtype,
                )
            else:
                place = (record.impl.address,)
            if place in self._kept:
                continue
            with torch.no_grad():
                copy = slot.tensor.detach().clone()
            self._kept[place] = (slot.tensor, copy, record.impl.version)
            self.nbytes += slot.nbytes

    def also(self, put_back: Callable[[], None]) -> None:
        """Call a function too, before anything else is put back."""
        self._others.append(put_back)

    def put_back(self) -> list[BaseException]:
        """Make everything as it was, as far as it goes; answer what failed."""
        failed: list[BaseException] = []
        for put_back in reversed(self._others):
            _try(put_back, failed)
        for table, before in self._tables:
            _try(functools.partial(_refill, table, before), failed)
        for names, kept in self._sets:
            _try(functools.partial(_exchange, names, kept), failed)
        for tensor, copy, version in reversed(self._kept.values()):
            _try(functools.partial(_rewrite, tensor, copy, version), failed)
        return failed


def _try(action: Callable[[], None], failed: list[BaseException]) -> None:
    """Go on whatever happens: what is left half done would be worse than what raised."""
    try:
        action()
    except BaseException as error:
        failed.append(error)


def _refill(table: dict[str, Any], before: dict[str, Any]) -> None:
    table.clear()
    table.update(before)


def _exchange(names: set[str], kept: set[str]) -> None:
    names.clear()
    names.update(kept)


def _rewrite(tensor: Any, copy: Any, version: int | None) -> None:
    with torch.no_grad():
        if version is not None and tensor._version == version and C.same_values(tensor, copy):
            return
        tensor.copy_(copy)
    if version is not None:
        # The bytes are what they were at that version: a graph that saved them may go on.
        torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
