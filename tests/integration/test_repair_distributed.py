"""Repairs on two ranks over gloo: the stand-in for HyperParallel, FSDP2 beside it, and the real library.

Run by pytest it starts processes of itself, which go through every situation together. The real library is run where
TENSORPLAY_HYPERPARALLEL names the folder that holds hyper_parallel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh

from tensorplay import dtensor
from tests.conftest import need
from tests.hyperparallel import Mesh, fully_shard, materialize, on_meta, sharded_params
from tests.ranks import Answers, go_through, judge, run_ranks

pytestmark = pytest.mark.long

STEPS = 5
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]
ON_BODY = dict.fromkeys(NAMES, "BODY_META")
IN_ORDER = dict.fromkeys(NAMES, "OK")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params, **how: torch.optim.SGD(params, lr=0.1, momentum=0.9, **how),
    "Adam": lambda params, **how: torch.optim.Adam(params, lr=0.1, **how),
}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def plain() -> nn.Sequential:
    torch.manual_seed(1)
    return net()


def values() -> dict[str, torch.Tensor]:
    return dict(plain().state_dict())


def same(answer: object, expected: object) -> None:
    """Fail with both: what runs in the ranks is not pytest's."""
    if answer != expected:
        raise AssertionError(f"{answer!r}\nand not {expected!r}")


def near(one: list[float], other: list[float]) -> None:
    same(len(one), len(other))
    if any(abs(x - y) > 1e-6 for x, y in zip(one, other, strict=True)):
        raise AssertionError(f"{one}\nis not near {other}")


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, context: Callable[[], Any] = nullcontext) -> list[float]:
    """Train on this rank's rows, and answer the mean loss of every step over all ranks."""
    found = []
    for step in range(STEPS):
        batch = torch.linspace(-1, 1, 6 * 4).view(6, 4) * (step + 1)
        with context():
            loss = model(batch.chunk(dist.get_world_size())[dist.get_rank()]).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append(mean.item() / dist.get_world_size())
    return found


def whole_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train on all rows, as one rank alone."""
    found = []
    for step in range(STEPS):
        batch = torch.linspace(-1, 1, 6 * 4).view(6, 4) * (step + 1)
        loss = model(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def same_parts(model: nn.Module, other: nn.Module) -> None:
    for param, whole in zip(model.parameters(), other.parameters(), strict=True):
        part = whole.detach().chunk(dist.get_world_size())[dist.get_rank()]
        torch.testing.assert_close(param._local_tensor.detach(), part, rtol=0, atol=1e-6)


def collectives() -> int:
    """How many this rank has called so far."""
    return int(dist.group.WORLD._get_sequence_number_for_group())


SITUATIONS: dict[str, dict[str, Callable[[], None]]] = {"own": {}, "real": {}}


def situation(kind: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        SITUATIONS[kind][function.__name__] = function
        return function

    return register


# The stand-in.


def broken() -> nn.Module:
    model = fully_shard(on_meta(net), Mesh.of_world())
    materialize(model, "cpu")
    model.load_state_dict(values())
    same(dtensor.verify(model).states, ON_BODY)
    return model


@situation("own")
def a_repaired_model_trains_as_one_built_on_the_device() -> None:
    for make in OPTIMIZERS.values():
        for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
            model, twin, alone = broken(), fully_shard(plain(), Mesh.of_world()), plain()
            optimizer = make(model.parameters(), **how)
            same(dtensor.repair(model, optimizer=optimizer).repaired, NAMES)

            found = losses(model, optimizer)

            same(found, losses(twin, make(twin.parameters(), **how)))
            near(found, whole_losses(alone, make(alone.parameters(), **how)))
            same_parts(model, alone)
            same(dtensor.verify(model, optimizer).states, IN_ORDER)


@situation("own")
def a_repair_calls_no_collective_and_needs_no_other_rank() -> None:
    model = broken()
    store = dist.distributed_c10d._get_default_store()
    called = collectives()
    for number in range(dist.get_world_size()):
        if number != dist.get_rank():
            store.wait([f"repaired by {number}"])  # in no collective
            continue
        same(dtensor.verify(model).states, ON_BODY)
        dtensor.repair(model)
        same(dtensor.verify(model).states, IN_ORDER)
        store.set(f"repaired by {number}", "yes")
    same(collectives(), called)
    dist.barrier()
    same(collectives() > called, True)


@situation("own")
def ranks_that_reset_one_by_one_train_on() -> None:
    model, alone = broken(), plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = sharded_params(model)
    for state in mine if dist.get_rank() == 0 else reversed(mine):
        report = dtensor.reset_sharded_param(state, optimizer=optimizer, registered_in=model)
        same(len(report.repaired), 1)
    same(dtensor.verify(model, optimizer).states, IN_ORDER)
    near(losses(model, optimizer), whole_losses(alone, torch.optim.SGD(alone.parameters(), lr=0.1)))


@situation("own")
def a_rank_that_refuses_leaves_the_other_alone() -> None:
    model = broken()
    if dist.get_rank() == 1:
        model[2].bias._local_tensor = torch.zeros(3)
        try:
            dtensor.repair(model)
        except dtensor.RepairRefused as refused:
            same([(one.name, one.tensor) for one in refused.reasons], [("shape", "2.bias")])
        same({**dtensor.verify(model).states, "2.bias": "BODY_META"}, ON_BODY)
    else:
        same(dtensor.repair(model).repaired, NAMES)
        same(dtensor.verify(model).states, IN_ORDER)


# FSDP2, whose wrappers are in order all along.


class Uneven(nn.Module):
    """Two ranks share three rows unevenly, and one row leaves the second with none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh())


@situation("own")
def fsdp2_is_in_order_in_every_phase() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    alone = Uneven()
    for reshard in (True, False):
        model: Any = on_meta(Uneven)
        fsdp.fully_shard(model.first, mesh=mesh, reshard_after_forward=reshard)
        fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def look(phase: str, state: str, model: Any = model, optimizer: Any = optimizer) -> None:
            report = dtensor.verify(model, optimizer)
            same((phase, set(report.states.values()) <= {state}), (phase, True))
            same((phase, [one.code for one in report.findings]), (phase, []))

        look("on meta", "PENDING")
        model.to_empty(device="cpu")
        look("emptied", "OK")
        sizes = [len(param._local_tensor) for param in model.parameters()]
        same(sizes, [[2, 2, 1, 1], [1, 1, 0, 0]][dist.get_rank()])
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, alone.state_dict() if dist.get_rank() == 0 else {}, options=options)
        look("loaded", "OK")
        for _ in range(2):
            loss = model(torch.ones(2, 4)).pow(2).sum()
            look("after forward", "OK")
            loss.backward()
            look("after backward", "OK")
            optimizer.step()
            look("after the step", "OK")
            optimizer.zero_grad()
            look("after zero_grad", "OK")
        same(len(dtensor.verify(model)), 4)
        plans = dtensor.repair(model, method="public").plans
        same({plan.outcome for plan in plans}, {"unchanged"})


# The real library: its optimizers run under SkipDTensorDispatch, and it gathers once a step.


def real_model(make: Callable[[], nn.Module]) -> Any:
    from hyper_parallel import init_device_mesh as real_mesh
    from hyper_parallel.core.fully_shard.api import fully_shard as real_fully_shard

    mesh = real_mesh(device_type="cpu", mesh_shape=(dist.get_world_size(),), mesh_dim_names=("dp",))
    model = make()
    real_fully_shard(model, mesh=mesh, reshard_after_forward=False, device=torch.device("cpu"))
    return model


def real_states(model: Any) -> list[Any]:
    return list(model.hsdp_scheduler.hsdp_state.hsdp_params)


def real_loaded(model: Any) -> None:
    model.load_state_dict(values())
    for param in model.parameters():
        param.requires_grad_(True)  # the load loses it


def real_assigned(model: Any) -> None:
    for name, param in model.named_parameters():
        part = values()[name].chunk(dist.get_world_size())[dist.get_rank()].clone()
        param._local_tensor = part.requires_grad_()


def real_repaired() -> Iterator[tuple[Any, Callable[..., torch.optim.Optimizer], dict[str, bool]]]:
    """Models left on meta in each way, and accepted: the library's own reset, and the repair after it."""
    for way in (real_loaded, real_assigned):
        for make in OPTIMIZERS.values():
            for how in ({"foreach": False}, {"foreach": True}, {"fused": True}):
                model = real_model(lambda: on_meta(net))
                same(set(dtensor.verify(model).states.values()), {"PENDING"})
                way(model)
                same(dtensor.verify(model).states, ON_BODY)
                yield model, make, how


def accept(model: Any, optimizer: torch.optim.Optimizer) -> None:
    called = collectives()
    params = list(model.parameters())
    for state, param in zip(real_states(model), params, strict=True):
        report = dtensor.reset_sharded_param(state, optimizer=optimizer, registered_in=model)
        same((len(report.repaired), report.reasons), (1, []))
        same(state.sharded_param is param, True)
    same(collectives(), called)
    report = dtensor.verify(model, optimizer)
    same((report.states, report.findings), (IN_ORDER, ()))
    same([id(param) for param in model.parameters()], [id(param) for param in params])
    for state in real_states(model):
        # A buffer that requires grad makes the library's own gather raise.
        state._sharded_param_data = state.sharded_param._local_tensor.detach().view(-1)
    same(dtensor.verify(model, optimizer).states, IN_ORDER)


@situation("real")
def the_library_resets_and_all_is_in_order() -> None:
    for model, make, how in real_repaired():
        accept(model, make(model.parameters(), **how))


@situation("real")
def the_library_trains_after_the_repair() -> None:
    from hyper_parallel import SkipDTensorDispatch

    if dist.get_world_size() == 1:
        return  # the library hands on no gradients on one rank
    for model, make, how in real_repaired():
        alone = plain()
        optimizer = make(model.parameters(), **how)
        accept(model, optimizer)
        near(losses(model, optimizer, SkipDTensorDispatch), whole_losses(alone, make(alone.parameters(), **how)))
        for state, whole in zip(real_states(model), alone.parameters(), strict=True):
            part = whole.detach().chunk(dist.get_world_size())[dist.get_rank()]
            torch.testing.assert_close(state.sharded_param._local_tensor.detach(), part, rtol=0, atol=1e-6)
            same(dtensor.verify(state.sharded_param).state, "OK")


# Starting the ranks.


def main(kind: str, number: int, ranks: int, folder: Path) -> None:
    """Be one rank."""
    if kind == "real":
        os.environ["HYPER_PARALLEL_PLATFORM"] = "torch"
        sys.path.insert(0, os.environ["TENSORPLAY_HYPERPARALLEL"])
    torch.set_num_threads(1)
    go_through(lambda: SITUATIONS[kind], number, ranks, folder)


@pytest.fixture(scope="module")
def own_answers(tmp_path_factory) -> Answers:
    return run_ranks(__file__, 2, tmp_path_factory.mktemp("own"), "own")


@pytest.fixture(scope="module", params=[1, 2])
def real_answers(request, tmp_path_factory) -> Answers:
    folder = os.environ.get("TENSORPLAY_HYPERPARALLEL", "")
    need("hyperparallel", bool(folder), "TENSORPLAY_HYPERPARALLEL names no folder with hyper_parallel")
    return run_ranks(__file__, request.param, tmp_path_factory.mktemp("real"), "real")


@pytest.mark.parametrize("name", SITUATIONS["own"])
def test_on_two_ranks(name, own_answers):
    judge(name, own_answers)


@pytest.mark.parametrize("name", SITUATIONS["real"])
def test_with_the_library_itself(name, real_answers):
    judge(name, real_answers)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
