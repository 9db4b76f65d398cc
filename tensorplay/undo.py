"""A log from which modules are put back as they were: objects, ties, bytes, versions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch

from tensorplay.layers import WITH_MEMORY
from tensorplay.loading import lies_at
from tensorplay.modules import Modules, Slot, lists_in

__all__ = ["Undo"]

_TABLES = ("_parameters", "_buffers", "_modules")


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
        self._lists: list[tuple[list[Any], list[Any]]] = []
        self._lazy = [
            (slot.tensor, type(slot.tensor), slot.record.impl.version)
            for slot in modules.slots
            if slot.record.kind == "uninitialized"
        ]
        self._others: list[Callable[[], None]] = []
        self._kept: dict[tuple[Any, ...], _Kept] = {}
        self._training: list[tuple[dict[str, Any], object]] = []
        seen: set[int] = set()
        for module in modules.each():
            if id(module) in seen:
                continue
            seen.add(id(module))
            own = C.instance_dict(module) or {}
            for name in _TABLES:
                if isinstance(own.get(name), dict):
                    self._tables.append((own[name], dict(own[name])))
            if "training" in own:
                self._training.append((own, own["training"]))
            self._lists += [(listed, list(listed)) for listed in lists_in(own)]
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
                place: tuple[Any, ...] = lies_at(record)
            else:
                place = (record.impl.address,)
            if place in self._kept:
                continue
            with torch.no_grad():
                alias = slot.tensor.detach()
                copy = alias.clone()
            self._kept[place] = _Kept(slot.tensor, alias, copy, record)
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
        for lazy, kind, version in self._lazy:
            _try(functools.partial(_unshape, lazy, kind, version), failed)
        for listed, whole in self._lists:
            _try(functools.partial(listed.__setitem__, slice(None), whole), failed)
        for names, kept in self._sets:
            _try(functools.partial(_exchange, names, kept), failed)
        for own, training in self._training:
            own["training"] = training
        for one in reversed(self._kept.values()):
            _try(one.rewrite, failed)
        return failed


def _nbytes_of(record: Any) -> Any:
    return None if record.storage is None else record.storage.nbytes


class _Kept:
    """One tensor as it was."""

    def __init__(self, tensor: Any, alias: Any, copy: Any, record: Any) -> None:
        self._tensor = tensor
        self._alias = alias
        """Over the same memory, with the geometry of before."""
        self._copy = copy
        self._version: int | None = record.impl.version
        self._requires_grad: bool = record.impl.requires_grad
        self._place = lies_at(record) if record.kind in WITH_MEMORY else None
        self._nbytes = _nbytes_of(record)

    def rewrite(self) -> None:
        """Give the tensor its memory, its bytes, its version back, as far as they are others now."""
        record = C.read(self._tensor)
        moved = self._place is not None and lies_at(record) != self._place
        released = self._place is not None and _nbytes_of(C.read(self._alias)) != self._nbytes
        with torch.no_grad():
            if released:
                self._alias.untyped_storage().resize_(self._nbytes)
            if moved:
                self._tensor.data = self._alias
            if record.impl.requires_grad is not self._requires_grad and record.impl.is_leaf:
                self._tensor.requires_grad_(self._requires_grad)
            if not (moved or released) and C.same_values(self._tensor, self._copy):
                if record.impl.version == self._version:
                    return
            else:
                self._tensor.copy_(self._copy)
        if self._version is not None:
            # The bytes are what they were at that version: a graph that saved them may go on.
            torch._C._autograd._unsafe_set_version_counter((self._tensor,), (self._version,))


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


def _unshape(tensor: Any, kind: type, version: int | None) -> None:
    """Take from a parameter the shape that loading gave to it: it was still to be shaped."""
    if type(tensor) is not kind:
        tensor.data = tensor.data.new_empty(0)
        tensor.__class__ = kind
        if version is not None:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
