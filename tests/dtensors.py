"""DTensors as short as they can be, of both mechanisms."""

from __future__ import annotations

from typing import Any

import torch


class Sharded(torch.Tensor):
    """A DTensor over an ordinary body, and no more."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _local_tensor: Any


class Wrapped(torch.Tensor):
    """A DTensor whose body has no memory."""

    __slots__ = ["_local_tensor"]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


def over(body: torch.Tensor, local: Any, requires_grad: bool = False) -> Any:
    """A DTensor with the body that is made of one tensor, and another as its local one."""
    tensor = torch.Tensor._make_subclass(Sharded, body, requires_grad)
    tensor._local_tensor = local
    return tensor


def unwrapped(body: torch.Tensor, local: Any) -> Any:
    """One of a class with a slot, as wrappers are, that has no Python key."""
    slotted = type("Slotted", (torch.Tensor,), {"__slots__": ["_local_tensor"]})
    tensor = torch.Tensor._make_subclass(slotted, body)
    tensor._local_tensor = local
    return tensor
