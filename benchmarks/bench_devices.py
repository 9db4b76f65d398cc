"""What lies where: a model of a thousand modules audited, against the loop over Python's getters.

The loop by hand asks `named_parameters()` and `named_buffers()` for their devices, and looks into `vars(module)` for
tensors and lists of tensors, as one would write it. It compares no key set and no allocator.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from harness import Case, Results, finish, measure, start
from torch import nn

import tensorplay
from tensorplay._native import C

BLOCKS, QUICK_BLOCKS = 333, 20
TARGET_NS = 5_000_000


def network(blocks: int) -> nn.Module:
    """Three modules a block, the container's own beside."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(blocks)))


def loop_by_hand(model: nn.Module) -> dict[torch.device, int]:
    devices: dict[torch.device, int] = {}
    for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
        devices[tensor.device] = devices.get(tensor.device, 0) + 1
        if tensor.grad is not None:
            devices[tensor.grad.device] = devices.get(tensor.grad.device, 0) + 1
    for module in model.modules():
        for value in vars(module).values():
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, torch.Tensor):
                    devices[item.device] = devices.get(item.device, 0) + 1
    return devices


def check(model: nn.Module) -> None:
    """What is timed answers as the loop does."""
    audit = tensorplay.audit_device_consistency(model)
    assert sum(row.tensors for row in audit.placement.rows) == sum(loop_by_hand(model).values())
    assert audit.findings == ()


def run(results: Results, arguments: Namespace) -> None:
    model = network(QUICK_BLOCKS if arguments.quick else BLOCKS)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    check(model)
    known = {"tensorplay": tensorplay, "C": C, "nn": nn, "model": model, "optimizer": optimizer}
    known["loop_by_hand"] = loop_by_hand
    title = f"{len(list(model.modules()))} modules"
    cases = [
        Case(
            f"{title}: audit_device_consistency(model)", "tensorplay.audit_device_consistency(model)", known, TARGET_NS
        ),
        Case(f"{title}: its native part", "C.placement(nn.Module, [model], [])", known),
        Case(f"{title}: with an optimizer's state", "tensorplay.audit_device_consistency(model, optimizer)", known),
        Case(f"{title}: loop by hand", "loop_by_hand(model)", known),
    ]
    results.add_cases(cases, measure(cases, rounds=min(arguments.rounds, 15), sample_ms=1.0, collector=True))
    results.ratio(cases[0].name, cases[3].name)


def main() -> None:
    arguments = start("what lies where")
    results = Results("devices")
    run(results, arguments)
    finish(results, arguments)


if __name__ == "__main__":
    main()
