"""DTensors as short as they can be, of both mechanisms."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Shard, init_device_mesh

from tensorplay._native import C
from tensorplay.reports import Read


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
    """A wrapper whose body was exchanged for an ordinary one, so that its Python key is gone."""
    tensor = torch.Tensor._make_wrapper_subclass(Wrapped, (8,))
    tensor._local_tensor = local
    torch._C._swap_tensor_impl(tensor, body.detach())
    return tensor


def wrapper(device: str, local: Any, dtype: torch.dtype = torch.float32) -> Any:
    """One whose body has no memory."""
    tensor = torch.Tensor._make_wrapper_subclass(Wrapped, (4,), dtype=dtype, device=device)
    tensor._local_tensor = local
    return tensor


def healthy(device: str = "cpu") -> Any:
    """One whose body lies over its local tensor."""
    local = torch.ones(4, device=device)
    return over(local, local)


def broken(device: str = "cpu") -> Any:
    """Built on meta; then the local tensor alone was materialised."""
    return over(torch.empty(4, device="meta"), torch.ones(4, device=device))


def facts_of(tensor: Any) -> dict[str, Any]:
    """Every field of all layers, but for the references of the test itself."""
    facts: dict[str, Any] = msgspec.to_builtins(Read("", C.read(tensor)).model())
    del facts["python"]["refcount"]
    return facts


def native_facts(tensor: Any) -> list[Any]:
    """Every field of body and local tensor, the dictionary's objects and the class."""
    local = C.local_tensor(tensor)
    own = C.instance_dict(tensor)
    return [
        facts_of(tensor),
        None if local is None or local[2] is None else facts_of(local[2]),
        None if own is None else {key: id(value) for key, value in own.items()},
        type(tensor),
    ]


def torchs_own(local: torch.Tensor) -> Any:
    """A parameter of torch's own class whose body stayed on meta; needs a process group."""
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(TorchDTensor.from_local(torch.empty(4, device="meta"), mesh, [Shard(0)]))
    weight._local_tensor = local
    return weight
