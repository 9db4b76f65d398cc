"""The stand-in for HyperParallel (tests/hyperparallel.py) has the library's mechanism, and its fault.

Run by pytest it starts itself: as two ranks over gloo, and beside the real library where TENSORPLAY_HYPERPARALLEL
names the folder that holds hyper_parallel.
"""

from __future__ import annotations

import copy
import datetime
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensorplay._native import C
from tests.conftest import need
from tests.helpers import ROOT
from tests.hyperparallel import (
    DTensor,
    Layout,
    Mesh,
    Replicate,
    Shard,
    ShardedState,
    fully_shard,
    materialize,
    on_meta,
    sharded_params,
)

ONE = Mesh()
STEPS = 3


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def sharded(make: Callable[[], nn.Module] = net) -> nn.Module:
    return fully_shard(make(), ONE)


def values() -> dict[str, torch.Tensor]:
    """What net() holds, the same at every call."""
    torch.manual_seed(1)
    return dict(net().state_dict())


def with_values(device: str = "cpu") -> nn.Module:
    model = net()
    model.load_state_dict(values())
    return model.to(device)


def states(model: nn.Module) -> list[Any]:
    """Sharding states by what keeps them: the hook that runs after a load."""
    cells = [
        cell.cell_contents
        for module in model.modules()
        for hook in module._load_state_dict_post_hooks.values()
        for cell in hook.__closure__ or ()
    ]
    return [each for each in cells if hasattr(each, "_sharded_param_data")]


def repair(param: Any) -> None:
    """Give the DTensor a body over its local tensor."""
    torch._C._swap_tensor_impl(param, param._local_tensor.detach())


# Facts that hold for the stand-in and for the library.


class Library(NamedTuple):
    wrap: Callable[[torch.Tensor], Any]
    shard: Callable[[nn.Module], nn.Module]


STAND_IN = Library(lambda local: DTensor(local, ONE, (Shard(0),)), lambda model: fully_shard(model, ONE))


def relation(x: Any) -> dict[str, Any]:
    """How a body and its local tensor are related."""
    body, local = C.read(x), C.read(x._local_tensor)
    return {
        "one storage": body.storage.address == local.storage.address,
        "one impl": body.impl.address == local.impl.address,
        "one counter": body.impl.version_counter == local.impl.version_counter,
        "devices": (body.impl.device, local.impl.device, str(x.device), x.is_meta),
        "dtypes": (body.impl.dtype, local.impl.dtype, str(x.dtype)),
        "requires_grad": (body.impl.requires_grad, local.impl.requires_grad, x.requires_grad),
        "leaf": (body.impl.is_leaf, local.impl.is_leaf, x.is_leaf),
        "use counts": (body.impl.use_count, local.impl.use_count),
        "kind": (body.impl.type, body.impl.is_python_dispatch, body.impl.is_view),
        "parameter": isinstance(x, nn.Parameter),
        "in dict": {"_local_tensor", "_device_mesh", "_placements", "_layout"} <= set(x.__dict__),
    }


def buffers(model: nn.Module) -> list[tuple[bool, bool, str, bool]]:
    """Whether each state's buffer is the part's memory, which device has it, and whether the module has its part."""
    return [
        (
            C.read(state._sharded_param_data).storage.address
            == C.read(state.sharded_param._local_tensor).storage.address,
            state.sharded_param is getattr(state._module_info.module, state._module_info.param_name),
            str(state._sharded_param_data.device),
            state._param_fqn is None,
        )
        for state in states(model)
    ]


def refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except (RuntimeError, TypeError):
        return True
    return False


def facts(library: Library) -> dict[str, Any]:
    found: dict[str, Any] = {}

    for requires_grad in (False, True):
        x = library.wrap(torch.ones(4, 2, requires_grad=requires_grad))
        found[f"made, requires_grad={requires_grad}"] = relation(x)
        found[f"detached, requires_grad={requires_grad}"] = relation(x.detach())
        found[f"parameter, requires_grad={requires_grad}"] = relation(nn.Parameter(x, requires_grad))
    found["empty part"] = relation(library.wrap(torch.empty(0, 2)))

    x = library.wrap(torch.ones(4, 2))
    data = C.read(x.data)
    found[".data"] = (
        type(x.data).__name__,
        data.storage.address == C.read(x).storage.address,
        data.impl.version_counter == C.read(x).impl.version_counter,
        x.data_ptr() == x._local_tensor.data_ptr(),
        tuple(x.shape),
    )
    x._local_tensor.add_(1)
    found["versions after a write to the part"] = (C.read(x).impl.version, C.read(x._local_tensor).impl.version)
    x.data = torch.zeros(4, 2)
    found["after .data = other"] = relation(x)
    found["refused"] = [
        refused(action)
        for action in (
            lambda: torch.cholesky_inverse(x),
            lambda: copy.deepcopy(x),
            lambda: pickle.dumps(x),
        )
    ]

    model = library.shard(with_values())
    weight = model[0].weight
    found["made on the device"] = (relation(weight), buffers(model))
    weight.grad = library.wrap(torch.ones(6, 4))
    found["gradient"] = (weight.grad is weight._local_tensor.grad, type(weight.grad) is type(weight), relation(weight))
    found["entry of a state dict"] = relation(model.state_dict()["0.weight"])

    model = library.shard(with_values())
    model.load_state_dict(values())
    found["loaded on the device"] = (relation(model[0].weight), buffers(model))
    model[0].weight._local_tensor = model[0].weight._local_tensor.detach().clone()
    found["another part"] = (relation(model[0].weight), buffers(model))
    for state in states(model):
        state.reset_sharded_param()
    found["another part, reset"] = (relation(model[0].weight), buffers(model))

    for name, break_it in WAYS.items():
        model = library.shard(on_meta(net))
        found[f"{name}: before"] = (relation(model[0].weight), buffers(model))
        with torch.no_grad():
            break_it(library, model)
        weight = model[0].weight
        found[f"{name}: after"] = (relation(weight), buffers(model))
        found[f"{name}: in C++"] = [
            str(device) for device, _ in torch._C._group_tensors_by_device_and_dtype([[weight]], False)
        ]
        found[f"{name}: entry of a state dict"] = relation(model.state_dict()["0.weight"])
        found[f"{name}: entry with keep_vars"] = relation(model.state_dict(keep_vars=True)["0.weight"])
        before = id(weight), type(weight), set(weight.__dict__), id(weight._local_tensor)
        repair(weight)
        after = id(weight), type(weight), set(weight.__dict__), id(weight._local_tensor)
        found[f"{name}: repaired"] = (relation(weight), before == after)
    return json.loads(json.dumps(found))


def loaded_parts(library: Library, model: nn.Module) -> None:
    model.load_state_dict({name: library.wrap(value) for name, value in values().items()}, assign=True)


def loaded_whole(library: Library, model: nn.Module) -> None:
    model.load_state_dict(values())


def assigned(library: Library, model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param._local_tensor = values()[name].requires_grad_()


def emptied(library: Library, model: nn.Module) -> None:
    for param in model.parameters():
        param._local_tensor = torch.empty_like(param._local_tensor, device="cpu").requires_grad_()
    for state in states(model):
        state.reset_sharded_param()


WAYS = {"loaded, parts": loaded_parts, "loaded, whole": loaded_whole, "assigned": assigned, "emptied": emptied}


def real(folder: str, store: str) -> Library:
    """The library itself, in a process of its own."""
    os.environ["HYPER_PARALLEL_PLATFORM"] = "torch"
    sys.path.insert(0, folder)
    from hyper_parallel import DTensor as RealDTensor
    from hyper_parallel import init_device_mesh
    from hyper_parallel.core.fully_shard.api import fully_shard as real_fully_shard
    from hyper_parallel.core.placement_types import Shard as RealShard

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(store, 1))
    mesh = init_device_mesh(device_type="cpu", mesh_shape=(1,), mesh_dim_names=("dp",))
    return Library(
        lambda local: RealDTensor.from_local(local, mesh, [RealShard(0)]),
        lambda model: real_fully_shard(model, mesh=mesh, device=torch.device("cpu")),
    )


def started(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", __file__, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> Any:
    """The last line, read as JSON."""
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return json.loads(output.splitlines()[-1])


def test_the_library_has_the_same_facts(tmp_path):
    folder = os.environ.get("TENSORPLAY_HYPERPARALLEL", "")
    need("hyperparallel", bool(folder), "TENSORPLAY_HYPERPARALLEL names no folder with hyper_parallel")

    assert facts(STAND_IN) == said(started("facts", folder, str(tmp_path / "store")))


# The mechanism.


def test_body_is_an_ordinary_tensor_over_the_storage_of_the_local_one():
    local = torch.arange(8.0).view(4, 2)
    x = DTensor(local, ONE, (Shard(0),))
    found = relation(x)

    assert (found["one storage"], found["one impl"], found["one counter"]) == (True, False, True)
    assert found["kind"] == ("c10::TensorImpl", False, False)
    assert found["in dict"]
    assert type(x.data) is torch.Tensor
    assert C.read(x.data).impl.version_counter != C.read(x).impl.version_counter
    assert len({C.read(each).impl.address for each in (x, local, x.data)}) == 3


def test_shape_is_the_whole_and_the_body_has_the_part():
    x = DTensor(torch.ones(3, 4), Mesh((2, 2), (0, 1)), (Shard(1), Replicate()))

    assert (x.shape, x.size(1), x.numel(), x.ndim) == ((3, 8), 8, 24, 2)
    assert C.read(x).impl.shape == (3, 4)
    assert x.to_local().shape == (3, 4)


def test_an_empty_part_can_be_made():
    x = DTensor(torch.empty(0, 4), Mesh((2,), (1,)), (Shard(0),))

    assert (x.shape, x.data_ptr()) == ((0, 4), 0)
    assert relation(x)["one storage"]


def test_healthy_parameter_requires_grad_for_python_alone():
    weight = sharded()[0].weight

    assert isinstance(weight, nn.Parameter)
    assert relation(weight)["requires_grad"] == (False, True, True)
    assert relation(weight)["use counts"] == (1, 1)


def test_unknown_operators_are_refused():
    x = DTensor(torch.ones(2, 2), ONE, (Shard(0),))

    with pytest.raises(TypeError, match="does not know cholesky_inverse"):
        torch.cholesky_inverse(x)
    with pytest.raises(TypeError, match="__deepcopy__"):
        copy.deepcopy(x)


def test_known_operators_run_on_the_part():
    x = DTensor(torch.ones(4, 2), ONE, (Shard(0),))

    assert torch.equal((x * 3).to_local(), torch.full((4, 2), 3.0))
    assert x.add_(1) is x
    assert torch.equal(x.to_local(), torch.full((4, 2), 2.0))
    assert type(torch.zeros_like(x)) is torch.Tensor
    x.grad = torch.ones(4, 2)
    assert x.to_local().grad is x.grad


def test_parts_are_cut_and_uneven_ones_refused():
    layouts = [Layout(Mesh((2,), (rank,)), (Shard(1),)) for rank in range(2)]
    whole = torch.arange(8.0).view(2, 4)

    assert torch.equal(torch.cat([each.part(whole) for each in layouts], 1), whole)
    with pytest.raises(NotImplementedError, match="2 ranks cannot share"):
        layouts[0].part(torch.ones(2, 3))


# Training.


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params, **how: torch.optim.SGD(params, lr=0.1, momentum=0.9, **how),
    "Adam": lambda params, **how: torch.optim.Adam(params, lr=0.1, **how),
    "AdamW": lambda params, **how: torch.optim.AdamW(params, lr=0.1, **how),
}
HOW: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def trained(model: nn.Module, make: Callable[..., torch.optim.Optimizer], device: str = "cpu", **how: bool) -> Any:
    """Yield the parameters after every step."""
    optimizer = make(model.parameters(), **how)
    inputs = torch.linspace(-1, 1, STEPS * 5 * 4).view(STEPS, 5, 4).to(device)
    for batch in inputs:
        optimizer.zero_grad()
        model(batch).pow(2).sum().backward()
        optimizer.step()
        yield [getattr(param, "_local_tensor", param).detach().cpu().clone() for param in model.parameters()]


def same_steps(one: Any, other: Any) -> None:
    steps = 0
    for left, right in zip(one, other, strict=True):
        steps += 1
        for x, y in zip(left, right, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert steps == STEPS


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_rank_trains_as_plain_torch(name, how):
    model = fully_shard(with_values(), ONE)

    same_steps(trained(model, OPTIMIZERS[name], **how), trained(with_values(), OPTIMIZERS[name], **how))
    assert all(relation(param)["one storage"] for param in model.parameters())
    assert [state._param_fqn for state in sharded_params(model)] == list(values())


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_repaired_model_trains_as_plain_torch(name, how):
    model = fully_shard(on_meta(net), ONE)
    loaded_whole(STAND_IN, model)
    for param in model.parameters():
        param.requires_grad_()
        repair(param)

    same_steps(trained(model, OPTIMIZERS[name], **how), trained(with_values(), OPTIMIZERS[name], **how))
    assert all(relation(param)["one storage"] for param in model.parameters())


def test_the_module_has_the_whole_while_it_runs():
    model = sharded()
    seen: list[object] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append((type(module.weight), module.weight.is_leaf)))
    (state, *_) = sharded_params(model)
    model[0].register_forward_pre_hook(lambda module, args: seen.append(state.sharded_state))
    model(torch.ones(1, 4))

    assert seen == [(nn.Parameter, True), ShardedState.UNSHARDED]
    assert state.sharded_state is ShardedState.SHARDED
    assert type(model[0].weight) is DTensor


def test_gradients_of_two_backwards_are_added():
    model, plain = fully_shard(with_values(), ONE), with_values()
    for each in (model, plain):
        for _ in range(2):
            each(torch.ones(3, 4)).sum().backward()

    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert type(param.grad) is DTensor
        assert torch.equal(param.grad.to_local(), other.grad)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def test_tied_parameters_stay_tied():
    torch.manual_seed(2)
    plain = Tied()
    model = fully_shard(copy.deepcopy(plain), ONE)
    for each in (model, plain):
        each(torch.arange(4)).pow(2).sum().backward()

    assert model.embed.weight is model.head.weight
    assert torch.equal(model.embed.weight.grad.to_local(), plain.embed.weight.grad)


def test_two_ranks_train_as_one(tmp_path):
    ranks = [started("rank", str(rank), str(tmp_path / "store")) for rank in range(2)]

    try:
        assert [said(rank) for rank in ranks] == ["equal", "equal"]
    finally:
        for rank in ranks:
            rank.kill()


def as_rank(rank: int, store: str) -> None:
    """Train on half of the rows each, made on the device and repaired, and compare with all of them on one rank."""
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2), timeout=timeout)
    mesh = Mesh.of_world()
    for make in (lambda: fully_shard(with_values(), mesh), lambda: fully_shard(on_meta(net), mesh)):
        model, plain = make(), with_values()
        if model[0].weight.is_meta:
            loaded_whole(STAND_IN, model)
            for param in model.parameters():
                param.requires_grad_()
                repair(param)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain)]
        for step in range(STEPS):
            batch = torch.linspace(-1, 1, 6 * 4).view(6, 4) + step
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(batch.chunk(2)[rank]).pow(2).mean().backward()
            plain(batch).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            if tuple(param.shape) != tuple(other.shape):
                raise AssertionError((param.shape, other.shape))
            torch.testing.assert_close(param.to_local(), other.chunk(2)[rank], rtol=1e-4, atol=1e-5)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps("equal"))


# The fault.


def materialized(library: Library, model: nn.Module) -> None:
    materialize(model, "cpu")


@pytest.mark.parametrize("break_it", [*WAYS.values(), materialized])
def test_body_stays_on_meta(break_it):
    model = fully_shard(on_meta(net), ONE)
    assert relation(model[0].weight)["one storage"]
    break_it(STAND_IN, model)

    for param in model.parameters():
        found = relation(param)
        assert found["devices"] == ("meta", "cpu", "cpu", False)
        assert not found["one storage"]
        assert not found["one counter"]


def test_buffer_between_ranks_follows_a_load_and_no_assignment():
    model = fully_shard(on_meta(net), ONE)
    assigned(STAND_IN, model)
    assert [device for _, _, device, _ in buffers(model)] == ["meta"] * 4
    for state in sharded_params(model):
        state.reset_sharded_param()
    assert [(same, device) for same, _, device, _ in buffers(model)] == [(True, "cpu")] * 4

    loaded = fully_shard(on_meta(net), ONE)
    loaded_whole(STAND_IN, loaded)
    assert [(same, device) for same, _, device, _ in buffers(loaded)] == [(True, "cpu")] * 4


def test_reset_takes_what_the_module_holds_and_refuses_another_shape():
    model = sharded()
    (state, *_) = sharded_params(model)
    model[0].weight = nn.Parameter(DTensor(torch.ones(6, 4), ONE, (Shard(0),)))
    state.reset_sharded_param()
    assert state.sharded_param is model[0].weight
    assert state._sharded_param_data.data_ptr() == model[0].weight.data_ptr()

    model[0].weight._local_tensor = torch.ones(5, 4)
    with pytest.raises(ValueError, match=r"expected a part of \(6, 4\), not \(5, 4\)"):
        state.reset_sharded_param()


def test_reset_on_meta_changes_nothing():
    model = fully_shard(on_meta(net), ONE)
    kept = [state._sharded_param_data for state in sharded_params(model)]
    for state in sharded_params(model):
        state.reset_sharded_param()

    assert all(state._sharded_param_data is data for state, data in zip(sharded_params(model), kept, strict=True))


def test_states_are_found_by_the_hooks_after_loads():
    model = sharded()

    assert states(model) == sharded_params(model)


def test_a_broken_model_trains_until_something_asks_the_body():
    model = fully_shard(on_meta(net), ONE)
    loaded_whole(STAND_IN, model)
    model.requires_grad_()

    same_steps(trained(model, OPTIMIZERS["Adam"]), trained(with_values(), OPTIMIZERS["Adam"]))
    assert relation(model[0].weight)["devices"][0] == "meta"
    with torch.no_grad(), torch._C.DisableTorchFunction():
        torch.Tensor.zero_(model[0].weight)
    assert model[0].weight.to_local().abs().sum() > 0


@pytest.mark.parametrize("repaired", [False, True])
def test_a_fused_step_with_a_scaler_does_nothing_to_a_broken_model(repaired):
    model = fully_shard(on_meta(net), ONE)
    loaded_whole(STAND_IN, model)
    for param in model.parameters():
        param.requires_grad_()
        if repaired:
            repair(param)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model(torch.ones(3, 4)).sum()).backward()
    scaler.step(optimizer)

    moved = [
        not torch.equal(param.to_local(), value)
        for param, value in zip(model.parameters(), values().values(), strict=True)
    ]
    assert moved == [repaired] * 4


# On a device that is none.


def test_it_trains_on_the_npu(npu):
    how = {"foreach": False}
    model = fully_shard(with_values("npu"), ONE)

    same_steps(trained(model, OPTIMIZERS["Adam"], "npu", **how), trained(with_values(), OPTIMIZERS["Adam"], **how))
    assert relation(model[0].weight)["devices"] == ("npu:0", "npu:0", "npu:0", False)
    assert relation(model[0].weight)["one storage"]


@pytest.mark.parametrize("repaired", [False, True])
def test_body_stays_on_meta_beside_the_npu(npu, repaired):
    how = {"foreach": False}
    model = fully_shard(on_meta(net), ONE)
    materialize(model, "npu")
    assert relation(model[0].weight)["devices"] == ("meta", "npu:0", "npu:0", False)
    model.load_state_dict(values())
    for param in model.parameters() if repaired else ():
        repair(param)

    same_steps(trained(model, OPTIMIZERS["SGD"], "npu", **how), trained(with_values(), OPTIMIZERS["SGD"], **how))
    assert relation(model[0].weight)["one storage"] is repaired


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        as_rank(int(sys.argv[2]), sys.argv[3])
    else:
        print(json.dumps(facts(real(sys.argv[2], sys.argv[3]))))
