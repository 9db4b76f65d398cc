"""Faults of memory that stays, as people reported them in public, each with its near-identical healthy twin."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tensorplay as tp
from tests.helpers import KeepsOutput, collected_by_hand


@pytest.fixture(autouse=True)
def _collected_by_hand() -> Iterator[None]:
    with collected_by_hand():
        yield


def codes(report: Any) -> list[str]:
    return [finding.code for finding in report.findings if finding.severity != "info"]


# A custom Function keeps its output on ctx.


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


@pytest.mark.parametrize("function", [KeepsOutput, Saved])
def test_output_kept_on_ctx_waits_for_the_collector(function):
    with tp.leak_check(quiet=True) as check:
        y = function.apply(torch.zeros(250_000, requires_grad=True))
        node = weakref.ref(y.grad_fn)
        del y

    assert (node() is None) is (function is Saved)
    if function is Saved:
        assert codes(check) == []
        return
    (finding,) = check.findings
    assert (finding.code, finding.evidence["bytes"]) == ("TP306", 1_000_000)
    assert "save_for_backward" in finding.fix
    gc.collect()
    assert node() is None


# A caught out-of-memory error is kept, and with it the batch.


def step(refs: list[Any]) -> None:
    big = torch.zeros(1_000_000)
    refs.append(weakref.ref(big))
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("keep", [True, False])
def test_kept_exception_keeps_the_batch(keep):
    refs: list[Any] = []
    log: list[Any] = []
    try:
        step(refs)
    except RuntimeError as error:
        log.append(error if keep else str(error))

    report = tp.check({"log": log})

    assert (refs[0]() is None) is not keep
    if not keep:
        assert codes(report) == []
        return
    (finding,) = report.findings
    assert finding.code == "TP308"
    assert finding.evidence["bytes"] == 4_000_000
    assert finding.evidence["held_through"] == ["step.big"]
    assert finding.evidence["log_type"] == "RuntimeError"


# A module's forward hook closes over the module.


class Network(nn.Module):
    def __init__(self, *, weak: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(1000, 1000)
        me = weakref.proxy(self) if weak else self
        self.register_forward_hook(lambda *_: me.linear.weight.shape)


@pytest.mark.parametrize("weak", [True, False])
def test_hook_that_closes_over_its_module_keeps_it(weak):
    with tp.leak_check(quiet=True) as check:
        network = Network(weak=weak)
        weight = weakref.ref(network.linear.weight)
        del network

    assert (weight() is None) is weak
    if weak:
        assert codes(check) == []
        return
    (finding,) = check.findings
    assert finding.code == "TP306"
    assert finding.evidence["parameter_bytes"] == 4_004_000
    assert "_forward_hooks" in finding.evidence["cycle"]


# Hooks are removed, and what they saved on the modules stays.


@pytest.mark.parametrize("clean", [True, False])
def test_what_hooks_saved_on_modules_stays(clean):
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def grab(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        module.input, module.output = inputs[0].detach(), output.detach()

    hooks = [module.register_forward_hook(grab) for module in network]
    with tp.leak_check(quiet=True) as check:
        network(torch.ones(32, 64))
        for hook in hooks:
            hook.remove()
        for module in network if clean else ():
            del module.input, module.output

    if clean:
        assert codes(check) == []
        return
    (finding,) = check.findings
    assert finding.code == "TP309"
    assert (finding.evidence["distinct_storages"], finding.evidence["held_bytes"]) == (4, 74_752)
    assert (len(finding.evidence["tensor_attributes"]), finding.evidence["hooks_left"]) == (6, 0)
