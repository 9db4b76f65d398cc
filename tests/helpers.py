"""Tensors of every kind, and the brute-force answers the probe is compared with."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

ROOT = Path(__file__).parent.parent


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class Wrapper(torch.Tensor):
    """A wrapper subclass: no memory of its own, the tensor is in an attribute."""

    @staticmethod
    def __new__(cls, elem: torch.Tensor, **kwargs):
        return torch.Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype, device=elem.device, **kwargs)

    def __init__(self, elem: torch.Tensor, **kwargs) -> None:
        self.elem = elem

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"the probe ran {func}")


class Hostile(torch.Tensor):
    """Whatever is asked in Python raises."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"the probe called {func}")

    def __getattribute__(self, name: str):
        raise AssertionError(f"the probe asked for .{name}")


class KeepsOutput(torch.autograd.Function):
    """Keeps its output on ctx: a cycle of node and output."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.y = x.exp()
        return ctx.y

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.y


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """Keep the collector from running meanwhile."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cells(shape, stride, offset: int = 0) -> set[int]:
    """Every cell reached, by enumeration."""
    return {
        offset + sum(i * step for i, step in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    }


def symbolic_fake() -> torch.Tensor:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    return mode.from_tensor(torch.randn(5, 7), static_shapes=False)


def fake(device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(3, 4, device=device)


def inside(transform: Callable, argument: torch.Tensor, look: Callable[[torch.Tensor], None]) -> None:
    """Show the tensor that a functorch transform hands to its function."""

    def function(x: torch.Tensor) -> torch.Tensor:
        look(x)
        return (x * 1).sum()

    transform(function)(argument)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def released() -> tuple[torch.Tensor, torch.Tensor]:
    """A view and its base, whose storage was resized to 0 bytes."""
    flat = torch.arange(8.0)
    view = flat[2:6]
    flat.untyped_storage().resize_(0)
    return view, flat


def null_pointer() -> torch.Tensor:
    storage = torch._C._construct_storage_from_data_pointer(0, torch.device("cpu"), 16)
    return torch.empty(0).set_(storage, 0, (4,))


def key_set_of_another_device() -> torch.Tensor:
    return torch.Tensor._make_subclass(Plain, torch.ones(3), False, device_for_backend_keys=torch.device("meta"))


def numpy_tensor() -> torch.Tensor:
    return torch.from_numpy(np.zeros(5))


def raises(action: Callable[[], object]) -> bool:
    """Whether PyTorch refuses."""
    try:
        action()
    except RuntimeError:
        return True
    return False


class Same(torch.autograd.Function):
    """Answers its input as it is: a view made in a custom Function."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad
