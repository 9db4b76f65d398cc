"""Tracking memory over time: what it adds to an operator and to a training step, beside PyTorch's own observers.

Each sample runs the same work once under one observer; entering and leaving it is part of the sample.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from harness import Case, Results, finish, measure, start
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.profiler import ProfilerActivity, profile
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import tensorplay

OPERATORS, QUICK_OPERATORS = 3000, 200
STEPS, QUICK_STEPS = 5, 1


class Nothing(TorchDispatchMode):
    """A dispatch mode that passes everything on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass it on."""
        return func(*args, **(kwargs or {}))


def under(observer: Callable[[], AbstractContextManager[object]], work: Callable[[], None]) -> Callable[[], None]:
    def observed() -> None:
        with observer():
            work()

    return observed


OBSERVERS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "nothing": contextlib.nullcontext,
    "tensorplay.track(stacks=False)": lambda: tensorplay.track(stacks=False),
    "tensorplay.track()": tensorplay.track,
    "no-op TorchDispatchMode": Nothing,
    "MemTracker": MemTracker,
    "DebugMode()": DebugMode,
    "profiler(memory, shapes, stack)": lambda: profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ),
}


def run_work(results: Results, title: str, work: Callable[[], None], names: list[str], rounds: int) -> None:
    cases = [Case(f"{title}: {name}", "work()", {"work": under(OBSERVERS[name], work)}) for name in names]
    results.add_cases(cases, measure(cases, rounds=min(rounds, 31), sample_ms=0.1))
    results.ratio(f"{title}: tensorplay.track(stacks=False)", f"{title}: nothing")
    for name in names:
        if not name.startswith("tensorplay"):
            results.ratio(f"{title}: tensorplay.track()", f"{title}: {name}")


def adding(count: int) -> Callable[[], None]:
    a, b = torch.randn(4), torch.randn(4)

    def work() -> None:
        for _ in range(count):
            a + b

    return work


def training(model: nn.Module, x: torch.Tensor, steps: int) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def work() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    return work


def run(results: Results, arguments: Namespace) -> None:
    names = list(OBSERVERS)
    operators = QUICK_OPERATORS if arguments.quick else OPERATORS
    steps = QUICK_STEPS if arguments.quick else STEPS
    run_work(results, f"{operators} x a + b, 4 floats", adding(operators), names[:-1], arguments.rounds)
    without = [name for name in names if name != "MemTracker"]  # which refuses a second step
    mlp = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    run_work(
        results, f"{steps} steps, small MLP", training(mlp, torch.randn(64, 128), steps), without, arguments.rounds
    )
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    transformer = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    x = torch.randn(8, 64, 128)
    run_work(results, f"{steps} steps, 4 layers of a transformer", training(transformer, x, steps), names[:3],
             arguments.rounds)  # fmt: skip


def main() -> None:
    arguments = start("Tracking")
    results = Results("track")
    run(results, arguments)
    finish(results, arguments)


if __name__ == "__main__":
    main()
