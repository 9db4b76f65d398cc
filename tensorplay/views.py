"""View chains: by which operators a tensor came from its base.

Three passive sources, best first: the view function that PyTorch kept is replayed on a meta tensor; the nodes between
the view and its base are read; the operators are solved from the geometry alone. No operator runs on a user's tensor,
and the meta tensors are this module's own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tensorplay._native import C
from tensorplay.layers import TensorRecord, ViewAlias, ViewChain, ViewSource, ViewStep
from tensorplay.words import describe

__all__ = ["chain_of", "record_views"]

_MOST_OPERATORS = 4
"""A longer chain than this is not looked for: as_strided says the same in one step."""


class record_views:  # noqa: N801 - it is called as a function
    """Make PyTorch keep the function of every view made from now on, so that their chains are exact.

    Called as a function it holds until it is called with False; as a context manager until the block ends. It is the
    switch of one thread, as grad mode is.

    Args:
        mode: whether to keep them.

    Cost: 0.1-0.4 microseconds a view, and the memory of a small object.

    Source: torch/csrc/autograd/variable.h ``ViewFunc``; ``torch.autograd.grad_mode._force_original_view_tracking``.
    """

    def __init__(self, mode: bool = True) -> None:
        if type(mode) is not bool:
            raise TypeError(f"record_views() takes True or False, got {type(mode).__name__}")
        self._before = torch._C._is_view_replay_enabled()
        torch._C._set_view_replay_enabled(mode)

    def __enter__(self) -> None:
        """Keep them until the block ends."""

    def __exit__(self, *_: object) -> None:
        """Go back to what was set before."""
        torch._C._set_view_replay_enabled(self._before)


class _Geometry(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    itemsize: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, record: Any) -> _Geometry | None:
        """Answer a record's geometry where it is made of numbers."""
        impl = record.impl
        if impl.stride is None or impl.shape is None or not isinstance(impl.storage_offset, int) or impl.is_symbolic:
            return None
        return cls(
            impl.shape, impl.stride, impl.storage_offset, impl.dtype, impl.itemsize, impl.is_conj, impl.is_neg
        )  # fmt: skip

    @classmethod
    def flat(cls, record: Any) -> _Geometry | None:
        """Answer the whole storage as one row of elements of a record's type."""
        impl, extent = record.impl, record.extent
        if extent is None or not extent.storage_nbytes or not impl.itemsize:
            return None
        return cls((extent.storage_nbytes // impl.itemsize,), (1,), 0, impl.dtype, impl.itemsize, False, False)

    def native(self) -> tuple[Any, ...]:
        """Answer what C.infer_chain() takes."""
        is_complex = self.dtype.startswith("complex")
        return (*self[:3], self.itemsize, is_complex, self.is_conj, self.is_neg, self.dtype)

    def step(self, op: str, args: dict[str, Any], source: ViewSource, output: int | None = None) -> ViewStep:
        """Answer the step that made this."""
        return ViewStep(
            op=op,
            args=args,
            output=output,
            shape=self.shape,
            stride=self.stride,
            storage_offset=self.offset,
            dtype=self.dtype,
            source=source,
        )


class _Solved(NamedTuple):
    steps: tuple[ViewStep, ...]
    source: ViewSource
    proven: bool = True
    note: str | None = None


_Over = Callable[[int], Iterable[tuple[str, Any]]]
"""Answers name and native record of the live tensors over a storage."""


def chain_of(x: torch.Tensor, record: TensorRecord, over: _Over, base: tuple[str, Any] | None = None) -> ViewChain:
    """Answer how a tensor came to be a view.

    Args:
        x: the tensor.
        record: what was read of it.
        over: finds the other tensors over its storage.
        base: name and native record of what it is to begin with, in place of its own base.
    """
    target = _Geometry.of(record)
    if target is None:
        why = record.absent.get("impl.stride") or record.absent.get("impl.shape") or f"a {record.kind} tensor"
        return _unknown(record, why)
    view = C.view_of(x)
    if base is None and view is not None:
        base_record, base_object, function = view
        start = _Geometry.of(base_record)
        others = _others(record, over, base_record.impl.address)
        name = next((name for name, other in others if other.impl.address == base_record.impl.address), None)
        if start is None:
            return _unknown(record, "its base has no strides of its own")
        solved = _replayed(x, start, target, function) or _from_nodes(x, start, target) or _inferred(start, target)
        return _chain(record, "base", name or f"its base, {describe(base_record)}", start, solved, _aliases(
            record, others, base_record.impl.address
        ))
    others = _others(record, over, None)
    begins = "alias" if base is None else "base"
    chosen = _best_alias(record, others) if base is None else base
    if chosen is None:
        return _from_storage(record, target)
    name, chosen_record = chosen
    start = _Geometry.of(chosen_record)
    if start is None:
        return _unknown(record, "its base has no strides of its own")
    solved = _inferred(start, target)
    if begins == "alias":
        shares = record.impl.version_counter == chosen_record.impl.version_counter
        alias = start.step("detach" if shares and record.impl.version_counter is not None else ".data", {}, "inferred")
        solved = solved._replace(steps=(alias, *solved.steps))
    aliases = _aliases(record, others, chosen_record.impl.address)
    return _chain(record, begins, name, start, solved, aliases)
