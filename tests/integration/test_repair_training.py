"""Training after a repair is what it is where nothing was ever broken; and what each wrong recipe does instead.

One rank: the stand-in for HyperParallel (tests/hyperparallel.py), DTensors of its mechanism that C++ can train, and
torch's own DTensor.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tensorplay import dtensor, repairs
from tensorplay._native import C
from tensorplay.errors import RepairRefused
from tests.hyperparallel import DTensor, Mesh, Shard, fully_shard, materialize, on_meta, sharded_params

ONE = Mesh()
STEPS = 4


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def values() -> dict[str, torch.Tensor]:
    """What net() holds, the same at every call."""
    torch.manual_seed(1)
    return dict(net().state_dict())


def plain() -> nn.Module:
    model = net()
    model.load_state_dict(values())
    return model


def direct() -> nn.Module:
    """The model that was built where it is trained."""
    return fully_shard(plain(), ONE)


def materialized(model: nn.Module) -> None:
    materialize(model, "cpu")
    model.load_state_dict(values())


def loaded(model: nn.Module) -> None:
    model.load_state_dict(values())
    model.requires_grad_()  # the library's load loses it


def assigned(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param._local_tensor = values()[name].requires_grad_()
    for state in sharded_params(model):
        state.reset_sharded_param()


WAYS = [materialized, loaded, assigned]


def broken(way: Callable[[nn.Module], None] = materialized) -> nn.Module:
    model = fully_shard(on_meta(net), ONE)
    way(model)
    assert set(dtensor.verify(model).states.values()) == {"BODY_META"}
    return model


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda params, **how: torch.optim.SGD(params, lr=0.1, momentum=0.9, **how),
    "Adam": lambda params, **how: torch.optim.Adam(params, lr=0.1, **how),
    "AdamW": lambda params, **how: torch.optim.AdamW(params, lr=0.1, **how),
}
HOW: list[dict[str, bool]] = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def parts(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(param, "_local_tensor", param).detach().clone() for param in model.parameters()]


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Any = None,
    steps: range = range(STEPS),
    wrap: Callable[[torch.Tensor], torch.Tensor] = lambda x: x,
) -> Iterator[list[torch.Tensor]]:
    """Yield the loss and the parameters after every step."""
    inputs = torch.linspace(-1, 1, STEPS * 5 * 4).view(STEPS, 5, 4)
    for step in steps:
        optimizer.zero_grad()
        loss = model(wrap(inputs[step])).pow(2).sum()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        yield [loss.detach().clone(), *parts(model)]


def same_steps(one: Iterator[list[torch.Tensor]], other: Iterator[list[torch.Tensor]], steps: int = STEPS) -> None:
    count = 0
    for left, right in zip(one, other, strict=True):
        count += 1
        for x, y in zip(left, right, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert count == steps


def state_of(model: Any) -> list[str]:
    return sorted(set(dtensor.verify(model).states.values()))


# Training.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_repaired_model_trains_bitwise_as_one_built_on_the_device(name, how, way):
    model, twin = broken(way), direct()
    optimizer = OPTIMIZERS[name](model.parameters(), **how)

    report = dtensor.repair(model, optimizer=optimizer)

    assert report.repaired == list(values())
    assert (report.refused, report.reasons, report.findings) == ([], [], ())
    assert state_of(model) == ["OK"]
    same_steps(trained(model, optimizer), trained(twin, OPTIMIZERS[name](twin.parameters(), **how)))
    assert state_of(model) == ["OK"]


def scaled(model: nn.Module, name: str) -> Iterator[list[torch.Tensor]]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
    return trained(model, OPTIMIZERS[name](model.parameters(), fused=True), scaler)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_fused_step_of_a_scaler_moves_nothing_until_the_body_is_repaired(name):
    # C++ groups by the body's device and runs the kernel of meta, which writes nothing and says nothing.
    model = broken()
    before = parts(model)
    for _ in scaled(model, name):
        assert all(map(torch.equal, parts(model), before))

    model = broken()
    dtensor.repair(model)

    same_steps(scaled(model, name), scaled(direct(), name))
    assert not any(map(torch.equal, parts(model), before))


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_repair_in_the_middle_keeps_what_the_optimizer_has(name, how):
    model, twin = broken(), direct()
    optimizer, other = (OPTIMIZERS[name](each.parameters(), **how) for each in (model, twin))
    same_steps(trained(model, optimizer, steps=range(2)), trained(twin, other, steps=range(2)), 2)
    kept = {id(param): {key: id(value) for key, value in of_it.items()} for param, of_it in optimizer.state.items()}
    moments = next(iter(optimizer.state.values()))
    assert {value.device.type for value in moments.values() if torch.is_tensor(value)} == {"cpu"}
    model.zero_grad()

    report = dtensor.repair(model, optimizer=optimizer)

    assert report.repaired == list(values())
    assert [check.name for plan in report.plans for check in plan.checks if check.result == "reported"] == []
    after = {id(param): {key: id(value) for key, value in of_it.items()} for param, of_it in optimizer.state.items()}
    assert after == kept
    later = range(2, STEPS)
    same_steps(trained(model, optimizer, steps=later), trained(twin, other, steps=later), len(later))


@pytest.mark.parametrize("way", WAYS)
def test_everything_but_the_impl_survives(way):
    model = broken(way)
    optimizer = torch.optim.Adam(model.parameters())
    params = list(model.parameters())
    references = [weakref.ref(param) for param in params]
    keys = list(model.state_dict())
    fired: list[str] = []
    for name, param in model.named_parameters():
        param._local_tensor.register_hook(lambda grad, name=name: fired.append(name))
    before = [(id(param), type(param), dict(param.__dict__), C.read(param).impl.address) for param in params]
    buffers = [state._sharded_param_data for state in sharded_params(model)]

    dtensor.repair(model, optimizer=optimizer)

    for param, (number, cls, own, impl) in zip(model.parameters(), before, strict=True):
        assert (id(param), type(param)) == (number, cls)
        assert isinstance(param, nn.Parameter)
        assert param.__dict__.keys() == own.keys()
        assert all(param.__dict__[key] is value for key, value in own.items())
        assert (param._device_mesh, param._placements) == (ONE, (Shard(0),))
        assert C.read(param).impl.address != impl
        assert C.read(param).storage.address == C.read(param._local_tensor).storage.address
        assert C.read(param).impl.version_counter == C.read(param._local_tensor).impl.version_counter
    assert [reference() for reference in references] == params
    assert all(held is param for held, param in zip(optimizer.param_groups[0]["params"], params, strict=True))
    assert all(state.sharded_param is param for state, param in zip(sharded_params(model), params, strict=True))
    assert all(state._sharded_param_data is data for state, data in zip(sharded_params(model), buffers, strict=True))
    assert list(model.state_dict()) == keys
    for param in params:
        param._local_tensor.sum().backward()
    assert fired == list(values())


def test_the_old_bodies_go():
    model = broken()
    owners = [_owners(param._local_tensor) for param in model.parameters()]
    gc.collect()
    before = sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    dtensor.repair(model)

    assert sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()) == before
    assert [C.read(param).impl.use_count for param in model.parameters()] == [1] * 4
    # The local tensor has as many as before, its memory the body more.
    assert [_owners(param._local_tensor) for param in model.parameters()] == [(impl, n + 1) for impl, n in owners]


def _owners(tensor: torch.Tensor) -> tuple[int, int]:
    record = C.read(tensor)
    return record.impl.use_count, record.storage.use_count


def test_a_load_and_another_reset_after_the_repair_keep_it():
    model = broken()
    for state in sharded_params(model):
        dtensor.reset_sharded_param(state)
    assert state_of(model) == ["OK"]

    model.load_state_dict({name: value + 1 for name, value in values().items()})
    for state in sharded_params(model):
        state.reset_sharded_param()

    assert state_of(model) == ["OK"]
    assert all(map(torch.equal, parts(model), (value + 1 for value in values().values())))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x)).sum()


def test_tied_parameters_are_repaired_once_and_stay_tied():
    model = fully_shard(on_meta(Tied), ONE)
    materialize(model, "cpu")

    report = dtensor.repair(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    assert report.repaired == ["embed.weight"]
    assert model.head.weight is model.embed.weight
    assert dtensor.verify(model).states == {"embed.weight": "OK"}


# Versions.


def gradient_after_a_write(make: Callable[[nn.Module], None]) -> float:
    """Write to the local tensor between forward and backward of what C++ computes with the body."""
    model = broken()
    param = model[0].weight
    with torch.no_grad():
        param._local_tensor.fill_(2.0)
    make(model)
    x = torch.ones(6, 4, requires_grad=True)
    with torch._C.DisableTorchFunction():
        y = (x * model[0].weight).sum()
    with torch.no_grad():
        model[0].weight._local_tensor.fill_(100.0)
    y.backward()
    return x.grad[0, 0].item()


def swapped(model: nn.Module) -> None:
    torch._C._swap_tensor_impl(model[0].weight, model[0].weight._local_tensor.data)
    assert dtensor.verify(model[0].weight).states == ("VERSION_SPLIT",)


def rebuilt(model: nn.Module) -> None:
    local = torch.full((6, 4), 2.0)
    model[0].weight = nn.Parameter(DTensor(local, ONE, (Shard(0),)))


@pytest.mark.parametrize("make", [rebuilt, dtensor.repair])
def test_a_write_between_forward_and_backward_raises_as_in_a_healthy_one(make):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient_after_a_write(make)


def test_with_a_data_donor_the_gradient_is_silently_wrong():
    assert gradient_after_a_write(swapped) == 100.0  # and not 2.0


# Wrong recipes, each by what it does.


@pytest.fixture
def weight() -> Any:
    param = broken()[0].weight
    assert dtensor.verify(param).states == ("BODY_META",)
    return param


def test_two_data_aliases_exchanged_change_nothing(weight):
    impl = C.read(weight).impl.address
    with torch._C.DisableTorchFunction():
        of_body = torch.Tensor.data.__get__(weight)
    of_local = weight.data
    torch._C._swap_tensor_impl(of_body, of_local)

    assert (of_body.is_meta, of_local.is_meta) == (False, True)
    assert C.read(weight).impl.address == impl
    assert dtensor.verify(weight).states == ("BODY_META",)


def test_the_local_tensor_as_donor_moves_the_fault_to_it(weight):
    local = weight._local_tensor
    torch._C._swap_tensor_impl(weight, local)

    assert weight._local_tensor is local
    assert local.is_meta
    assert dtensor.verify(weight).state == "LOCAL_META"


def test_swap_tensors_with_an_alias_makes_a_plain_tensor_of_it(weight):
    alias = weight._local_tensor.detach()
    torch.utils.swap_tensors(weight, alias)

    assert type(weight) is torch.Tensor
    assert not isinstance(weight, nn.Parameter)
    assert weight.__dict__ == {}
    assert type(alias) is DTensor


def test_data_assigned_by_the_class_writes_to_the_local_tensor_alone(weight):
    weight.data = torch.ones(6, 4)

    assert dtensor.verify(weight).states == ("BODY_META",)
    assert torch.equal(weight._local_tensor, torch.ones(6, 4))


def test_data_assigned_past_the_class_raises(weight):
    with torch._C.DisableTorchFunction(), pytest.raises(RuntimeError, match="incompatible tensor type"):
        torch.Tensor.data.__set__(weight, weight._local_tensor)

    assert dtensor.verify(weight).states == ("BODY_META",)


def test_a_new_parameter_is_not_the_one_that_optimizer_and_framework_hold():
    model = broken()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    old = model[0].weight
    model[0].weight = nn.Parameter(DTensor(old._local_tensor, ONE, (Shard(0),)))

    assert dtensor.verify(model[0].weight).state == "OK"
    assert dtensor.verify(model, optimizer)["0.weight"].state == "DETACHED"


# PyTorch's exchange itself.


def test_swap_tensor_impl_exchanges_impls_and_slots_and_leaves_hooks_behind():
    one, other = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    fired: list[str] = []
    one.register_hook(lambda grad: fired.append("one"))
    one.note, reference = "kept", weakref.ref(one)
    impls = [C.read(each).impl.address for each in (one, other)]
    hooks = one._backward_hooks

    torch._C._swap_tensor_impl(one, other)

    assert [C.read(each).impl.address for each in (other, one)] == impls
    assert all(C.read(each).python.slot_is_self for each in (one, other))
    assert (one.tolist(), one.note, reference() is one) == ([0.0, 0.0], "kept", True)
    assert (one._backward_hooks is hooks, other._backward_hooks) == (True, None)
    one.sum().backward()
    assert (fired, one.grad.tolist(), other.grad) == ([], [1.0, 1.0], None)
    one.register_hook(lambda grad: fired.append("later"))
    one.sum().backward()
    assert fired == []  # nor does a later one fire
    other.sum().backward()
    assert fired[0] == "one"  # the old impl has them

    torch._C._swap_tensor_impl(one, other)
    fired.clear()
    assert [C.read(each).impl.address for each in (one, other)] == impls
    assert all(C.read(each).python.slot_is_self for each in (one, other))
    one.sum().backward()
    assert "one" in fired
    assert one.tolist() == [1.0, 1.0]


def test_swap_tensor_impl_leaves_an_accumulator_with_the_old_impl():
    one, other = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    loss = (one * 3).sum()
    torch._C._swap_tensor_impl(one, other)
    loss.backward()

    assert one.grad is None
    assert other.grad.tolist() == [3.0, 3.0]


def test_swap_tensor_impl_refuses_weak_references_of_cpp_and_no_owner(cpp_owners):
    one, other = torch.ones(2), torch.zeros(2)
    watched = torch._C._WeakTensorRef(one)
    with pytest.raises(RuntimeError, match="no weakrefs"):
        torch._C._swap_tensor_impl(one, other)
    assert one.tolist() == [1.0, 1.0]
    del watched

    cpp_owners.hold_tensor(one)
    torch._C._swap_tensor_impl(one, other)
    assert one.tolist() == [0.0, 0.0]
    cpp_owners.release()


@pytest.mark.parametrize("held", ["owner", "alias", "weak"])
def test_repair_refuses_what_the_exchange_would_not_see(cpp_owners, held):
    model = broken()
    param = model[0].weight
    before = C.read(param).impl.address
    watched = None
    if held == "weak":
        watched = torch._C._WeakTensorRef(param)
    else:
        getattr(cpp_owners, {"owner": "hold_tensor", "alias": "hold_alias"}[held])(param)

    if held == "alias":
        report = dtensor.repair(model)
        assert report.repaired == list(values())  # an alias on meta shows nothing
    else:
        with pytest.raises(RepairRefused) as refused:
            dtensor.repair(model)
        (reason,) = refused.value.reasons
        assert reason.name == {"owner": "not-held", "weak": "no-weak-references"}[held]
        assert C.read(param).impl.address == before
        assert state_of(model) == ["BODY_META"]
    cpp_owners.release()
    del watched
    dtensor.repair(model)
    assert state_of(model) == ["OK"]


# All or none.


def failing(monkeypatch: pytest.MonkeyPatch, at: int, how: BaseException | str) -> None:
    """Have the exchange with this number raise, or take one of its checks as failed."""
    real, count = C.apply_repair, iter(range(100))

    def apply_repair(*arguments: Any) -> Any:
        if next(count) != at:
            return real(*arguments)
        if isinstance(how, str):
            return real(*arguments[:5], how)
        raise how

    class Native:
        def __getattr__(self, name: str) -> Any:
            return apply_repair if name == "apply_repair" else getattr(C, name)

    monkeypatch.setattr(repairs, "C", Native())


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), SystemExit()], ids=lambda one: type(one).__name__
)
def test_an_exception_in_the_middle_takes_all_back_and_passes(monkeypatch, error):
    model = broken()
    before = [(C.read(param).impl.address, C.read(param).impl.use_count) for param in model.parameters()]
    failing(monkeypatch, 2, error)

    with pytest.raises(type(error)):
        dtensor.repair(model)

    assert [(C.read(each).impl.address, C.read(each).impl.use_count) for each in model.parameters()] == before
    assert state_of(model) == ["BODY_META"]
    monkeypatch.undo()
    dtensor.repair(model)
    assert state_of(model) == ["OK"]


@pytest.mark.parametrize("check", C.repair_checks())
def test_a_check_that_fails_afterwards_takes_all_back_or_that_one(monkeypatch, check):
    model = broken()
    before = [C.read(param).impl.address for param in model.parameters()]
    failing(monkeypatch, 2, check)
    with pytest.raises(RepairRefused) as refused:
        dtensor.repair(model)
    assert [(one.name, one.tensor) for one in refused.value.reasons] == [(check, "2.weight")]
    assert [C.read(param).impl.address for param in model.parameters()] == before
    assert refused.value.report.repaired == []
    monkeypatch.undo()

    failing(monkeypatch, 2, check)
    report = dtensor.repair(model, partial=True)
    assert (report.repaired, report.refused) == (["0.weight", "0.bias", "2.bias"], ["2.weight"])
    assert dtensor.verify(model).states == dict(zip(values(), ["OK", "OK", "BODY_META", "OK"], strict=True))


def test_a_dry_run_changes_nothing_and_answers_all():
    model = broken()
    before = [C.read(param).impl.address for param in model.parameters()]

    report = dtensor.repair(model, dry_run=True)

    assert {plan.outcome for plan in report.plans} == {"planned"}
    assert [C.read(param).impl.address for param in model.parameters()] == before
    assert state_of(model) == ["BODY_META"]


def test_a_model_of_mixed_states_is_refused_whole_and_repaired_in_part():
    model = broken()
    healthy = DTensor(torch.ones(6), ONE, (Shard(0),))
    model[0].bias = nn.Parameter(healthy)
    model[0].weight._local_tensor = torch.empty(6, 4, device="meta")
    model[2].bias._local_tensor = torch.zeros(3)
    before = dtensor.verify(model).states

    with pytest.raises(RepairRefused) as refused:
        dtensor.repair(model)
    assert [(one.name, one.tensor) for one in refused.value.reasons] == [("shape", "2.bias")]
    assert dtensor.verify(model).states == before

    report = dtensor.repair(model, partial=True)
    assert [plan.outcome for plan in report.plans] == ["pending", "unchanged", "repaired", "refused"]
    assert {name: dtensor.verify(model).states[name] for name in ("0.weight", "2.weight", "2.bias")} == {
        "0.weight": "PENDING",
        "2.weight": "OK",
        "2.bias": before["2.bias"],
    }


# Under DistributedDataParallel.


class Bare(torch.Tensor):
    """A DTensor over an ordinary tensor, whose class adds nothing: C++ computes with the body."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Bare:
        made: Bare = torch.Tensor._make_subclass(cls, local, True)
        made.__dict__.update(_local_tensor=local, _is_param=True)
        return made


class Bared(nn.Module):
    """One such parameter whose local tensor is another than the body's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Bare(torch.ones(3, 3))
        self.weight._local_tensor = torch.full((3, 3), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum()


def everything(param: torch.Tensor) -> Any:
    impl = C.read(param).impl
    states = dtensor.verify(param).states
    return impl.address, impl.use_count, impl.version, impl.requires_grad, dict(param.__dict__), states


def test_ddp_keeps_accumulators_alive_and_a_repair_is_refused(single_process_group):
    model = Bared()
    wrapped = DistributedDataParallel(model)
    for backward in (False, True):
        if backward:
            wrapped(torch.ones(2, 3)).backward()
            torch._C.TensorBase.grad.__set__(model.weight, None)
        before = everything(model.weight)
        assert before[-1] == ("SPLIT", "REQUIRES_GRAD", "HELD")

        with pytest.raises(RepairRefused) as refused:
            dtensor.repair(model)

        (reason,) = refused.value.reasons
        assert (reason.name, reason.tensor) == ("no-graph", "weight")
        assert "DistributedDataParallel" in reason
        assert "before wrapping" in reason.way_out
        assert everything(model.weight) == before


def test_a_repair_before_ddp_is_accepted_and_trains(single_process_group):
    model = Bared()
    assert dtensor.verify(model)["weight"].state == "SPLIT"

    assert dtensor.repair(model).repaired == ["weight"]

    assert dtensor.verify(model)["weight"].states == ("REQUIRES_GRAD",)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    loss = wrapped(torch.ones(1, 3))
    assert loss.item() == 18.0
    loss.backward()
    optimizer.step()
    assert torch.equal(model.weight._local_tensor, torch.full((3, 3), 1.5))


def test_a_pending_graph_is_refused_until_it_has_gone():
    model = Bared()
    loss = model(torch.ones(1, 3))
    with pytest.raises(RepairRefused, match="backward is pending"):
        dtensor.repair(model)
    del loss

    assert dtensor.repair(model).repaired == ["weight"]


# torch's own DTensor.


def torch_dtensor(local: torch.Tensor) -> nn.Parameter:
    mesh = init_device_mesh("cpu", (1,))
    return nn.Parameter(torch_tensor.DTensor.from_local(local, mesh, [torch_tensor.Shard(0)], run_check=False))


def test_torch_wrapper_left_on_meta_is_mended_by_the_public_way_alone(single_process_group):
    param = torch_dtensor(torch.empty(2, 3, device="meta"))
    param._local_tensor = torch.zeros(2, 3)
    number = id(param)
    assert param.is_meta
    assert not dtensor.verify(param)

    with pytest.raises(RepairRefused) as refused:
        dtensor.repair(param)
    assert "body-without-key" in [one.name for one in refused.value.reasons]
    assert "method='public'" in str(refused.value)
    assert param.is_meta
    report = dtensor.repair(param, method="public")

    assert (report.repaired, report.findings) == (["param"], ())
    assert (id(param), type(param), str(param.device)) == (number, torch_tensor.DTensor, "cpu")
    assert isinstance(param, nn.Parameter)
    assert dtensor.verify(param).state == "OK"


def distributed(model: nn.Module) -> nn.Module:
    return torch_tensor.distribute_module(
        model,
        init_device_mesh("cpu", (1,)),
        lambda name, module, mesh: _shard(module, mesh),
    )


def _shard(module: nn.Module, mesh: Any) -> None:
    for name, param in list(module._parameters.items()):
        placed = torch_tensor.distribute_tensor(param.detach(), mesh, [torch_tensor.Shard(0)])
        module._parameters[name] = nn.Parameter(placed)


def replicated(x: torch.Tensor) -> torch.Tensor:
    return torch_tensor.DTensor.from_local(x, init_device_mesh("cpu", (1,)), [torch_tensor.Replicate()])


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_torch_dtensors_repaired_publicly_train_as_direct_ones(single_process_group, name):
    model, twin = distributed(on_meta(net)), distributed(plain())
    for key, param in model.named_parameters():
        param._local_tensor = values()[key]
    params = list(model.parameters())
    optimizer = OPTIMIZERS[name](params)

    report = dtensor.repair(model, method="public", optimizer=optimizer)

    assert report.repaired == list(values())
    assert state_of(model) == ["OK"]
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    steps = trained(model, optimizer, wrap=replicated)
    others = trained(twin, OPTIMIZERS[name](twin.parameters()), wrap=replicated)
    for one, other in zip(steps, others, strict=True):
        assert torch.equal(one[0].full_tensor(), other[0].full_tensor())
        assert all(map(torch.equal, one[1:], other[1:]))
    assert state_of(model) == ["OK"]


@pytest.mark.parametrize("reshard", [False, True])
def test_fsdp2_is_in_order_in_every_phase(single_process_group, reshard):
    mesh = init_device_mesh("cpu", (1,))
    model = fsdp.fully_shard(on_meta(net), mesh=mesh, reshard_after_forward=reshard)
    seen = [dtensor.verify(model).states]

    def look() -> None:
        found = dtensor.verify(model, optimizer)
        assert (bool(found), found.findings) == (True, ())
        seen.append(found.states)

    optimizer = None
    look()
    model.to_empty(device="cpu")
    look()
    with torch.no_grad():
        for key, param in model.named_parameters():
            param._local_tensor.copy_(values()[key])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    look()
    for _ in range(2):
        loss = model(torch.ones(3, 4)).pow(2).sum()
        look()
        loss.backward()
        look()
        optimizer.step()
        look()
        optimizer.zero_grad()
        look()
    assert {state for states in seen[:2] for state in states.values()} == {"PENDING"}
    assert {state for states in seen[2:] for state in states.values()} == {"OK"}
    for state in _fsdp_params(model):
        assert dtensor.verify(state.sharded_param).state == "OK"


def _fsdp_params(model: Any) -> list[Any]:
    return model._get_fsdp_state()._fsdp_param_group.fsdp_params
