"""DTensors: naming the state of a body beside its local tensor, and mending it, beside the unchecked exchange.

A repair is timed together with leaving the body behind again, and that alone stands beside it.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from harness import Case, Results, finish, measure, start
from torch import nn

import tensorplay
from tensorplay._native import C

PARAMETERS, QUICK_PARAMETERS = 1000, 50
ONE_TARGET_NS, MODEL_TARGET_NS = 20_000, 50_000_000


class Sharded(torch.Tensor):
    """A DTensor over an ordinary body."""


def left_behind() -> Any:
    tensor = torch.Tensor._make_subclass(Sharded, torch.empty(4, 4, device="meta"))
    tensor._local_tensor = torch.ones(4, 4)
    tensor._is_param = True
    return tensor


def leave_behind(tensors: list[Any]) -> None:
    for tensor in tensors:
        torch._C._swap_tensor_impl(tensor, torch.empty(4, 4, device="meta"))


def exchange_unchecked(tensors: list[Any]) -> None:
    for tensor in tensors:
        torch._C._swap_tensor_impl(tensor, tensor._local_tensor.detach())


def model_of(count: int) -> tuple[nn.Module, list[Any]]:
    model = nn.ModuleList([nn.Module() for _ in range(count)])
    tensors = [left_behind() for _ in range(count)]
    for module, tensor in zip(model, tensors, strict=True):
        module._parameters["weight"] = tensor
    return model, tensors


def run_one(results: Results, rounds: int) -> None:
    tensor = left_behind()
    names = {"C": C, "dtensor": tensorplay.dtensor, "tensor": tensor, "leave_behind": leave_behind}
    names |= {"address": C.read(tensor).impl.address, "tensors": [tensor], "exchange_unchecked": exchange_unchecked}
    cases = [
        Case(
            "one parameter: every check, the exchange, its verification, and back",
            "journal = []\nC.apply_repair(tensor, None, 0, (), journal)\n"
            "C.undo_repairs([(tensor, journal[0], address)])",
            names,
            ONE_TARGET_NS,
        ),
        Case(
            "one parameter: dtensor.repair() and left behind again",
            "dtensor.repair(tensor)\nleave_behind(tensors)",
            names,
        ),
        Case("one parameter: dtensor.verify()", "dtensor.verify(tensor)", names),
        Case(
            "one parameter: unchecked, and left behind again",
            "exchange_unchecked(tensors)\nleave_behind(tensors)",
            names,
        ),
    ]
    results.add_cases(cases, measure(cases, rounds=rounds))
    for case in cases[:2]:
        results.ratio(case.name, cases[3].name)


def run_model(results: Results, count: int, rounds: int) -> None:
    model, tensors = model_of(count)
    names = {"dtensor": tensorplay.dtensor, "model": model, "tensors": tensors}
    names |= {"leave_behind": leave_behind, "exchange_unchecked": exchange_unchecked}
    title = f"{count} parameters"
    ours = f"{title}: dtensor.repair() and left behind again"
    cases = [
        Case(ours, "dtensor.repair(model)\nleave_behind(tensors)", names, MODEL_TARGET_NS),
        Case(f"{title}: dtensor.repair(dry_run=True)", "dtensor.repair(model, dry_run=True)", names),
        Case(f"{title}: dtensor.verify()", "dtensor.verify(model)", names),
        Case(f"{title}: left behind again", "leave_behind(tensors)", names),
        Case(
            f"{title}: unchecked, and left behind again",
            "exchange_unchecked(tensors)\nleave_behind(tensors)",
            names,
        ),
    ]
    results.add_cases(cases, measure(cases, rounds=min(rounds, 15), sample_ms=1.0, collector=True))
    results.ratio(cases[0].name, cases[4].name)


def run(results: Results, arguments: Namespace) -> None:
    run_one(results, arguments.rounds)
    run_model(results, QUICK_PARAMETERS if arguments.quick else PARAMETERS, arguments.rounds)


def main() -> None:
    arguments = start("DTensors")
    results = Results("dtensor")
    run(results, arguments)
    finish(results, arguments)


if __name__ == "__main__":
    main()
