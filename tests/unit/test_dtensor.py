"""dtensor.verify() and repair(): every state, every refusal with a neighbour that is accepted, every way back."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, Shard, init_device_mesh

import tensorplay as tp
from tensorplay import dtensor
from tensorplay._native import C
from tensorplay.repairs import REASONS
from tests import hyperparallel as hp
from tests.dtensors import (
    Sharded,
    Wrapped,
    broken,
    facts_of,
    healthy,
    native_facts,
    over,
    unwrapped,
    wrapper,
)

# -- states -------------------------------------------------------------------------------------------------------


def parameter(tensor: Any) -> Any:
    tensor._is_param = True
    return tensor


def freed(device: str) -> Any:
    tensor = healthy(device)
    tensor._local_tensor.untyped_storage().resize_(0)
    return tensor


def aliased(device: str) -> Any:
    local = torch.ones(4, device=device)
    storage = torch._C._construct_storage_from_data_pointer(local.data_ptr(), local.device, 16)
    twice = torch.empty(0, device=device).set_(storage, 0, (4,))
    twice.kept = local
    return over(twice, local)


def held(device: str) -> Any:
    tensor = healthy(device)
    tensor.view_of_it = torch.Tensor.view(tensor, -1)
    return tensor


def inference(device: str) -> Any:
    body = torch.ones(4, device=device)
    with torch.inference_mode():
        local = torch.empty(0, device=device).set_(body.untyped_storage(), 0, (4,))
    return over(body, local)


def computed(device: str) -> Any:
    local = torch.ones(4, device=device, requires_grad=True) * 2
    return parameter(over(local.detach(), local))


def fake(device: str) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        local = torch.ones(4)
    return over(torch.ones(4, device=device), local)


STATES: dict[str, Callable[[str], Any]] = {
    "OK": healthy,
    "PENDING": lambda device: over(*[torch.empty(4, device="meta")] * 2),
    "BODY_META": broken,
    "LOCAL_META": lambda device: over(torch.ones(4, device=device), torch.empty(4, device="meta")),
    "SPLIT": lambda device: over(torch.ones(4, device=device), torch.ones(4, device=device)),
    "ALIASED_TWICE": aliased,
    "OFFSET": lambda device: (lambda x: over(x[:4], x[4:]))(torch.ones(8, device=device)),
    "SHAPE": lambda device: (lambda x: over(x, x[:4]))(torch.ones(8, device=device)),
    "STRIDE": lambda device: (lambda x: over(x, x.t()))(torch.ones(3, 3, device=device)),
    "DTYPE": lambda device: over(torch.ones(4, device=device), torch.ones(4, device=device, dtype=torch.float16)),
    "FREED": freed,
    "LOCAL_NONLEAF": computed,
    "LOCAL_INFERENCE": inference,
    "VERSION_SPLIT": lambda device: (lambda x: over(x.data, x))(torch.ones(4, device=device)),
    "REQUIRES_GRAD": lambda device: (lambda x: over(x, x, True))(torch.ones(4, device=device)),
    "NO_LOCAL": lambda device: torch.Tensor._make_subclass(Sharded, torch.ones(4, device=device)),
}
CPU_ONLY: dict[str, Callable[[], Any]] = {
    "LOCAL_FAKE": lambda: fake("cpu"),
    "LOCAL_SPARSE": lambda: over(torch.ones(4), torch.ones(4).to_sparse()),
    "WRAPPER_NO_DATA": lambda: over(torch.ones(4), torch.Tensor._make_wrapper_subclass(Wrapped, (4,))),
}


@pytest.mark.parametrize("state", STATES)
def test_states(state):
    found = dtensor.verify(STATES[state]("cpu"))

    assert found.state == state
    assert bool(found) is (state in ("OK", "PENDING"))
    told = [] if found or state == "LOCAL_INFERENCE" else [state]  # to infer with it is no fault
    assert [one.evidence["state"] for one in found.findings] == told


@pytest.mark.parametrize("state", STATES)
def test_states_on_another_device(npu, state):
    assert dtensor.verify(STATES[state]("npu")).state == state


@pytest.mark.parametrize("state", CPU_ONLY)
def test_states_of_local_tensors_without_layers(state):
    found = dtensor.verify(CPU_ONLY[state]())

    assert found.state == state
    assert found.findings == ()


def test_body_and_local_tensor_on_two_devices(npu):
    assert dtensor.verify(over(torch.ones(4), torch.ones(4, device="npu"))).state == "SPLIT"
    assert dtensor.verify(wrapper("cpu", torch.ones(4, device="npu"))).state == "DEVICE"


@pytest.mark.parametrize(
    ("make", "states"),
    [
        (lambda: held("cpu"), ("OK", "HELD")),
        (lambda: (lambda x: over(x[2:6], x[2:6]))(torch.ones(8)), ("OK", "FLAT")),
        (lambda: (lambda x: over(x, x))(torch.ones(0)), ("OK", "EMPTY")),
        (lambda: over(torch.ones(0), torch.ones(0)), ("SPLIT", "EMPTY")),
        (lambda: over(torch.empty(0, device="meta"), torch.ones(0)), ("BODY_META", "EMPTY")),
        (lambda: over(torch.empty(4, device="meta"), torch.ones(8)[4:]), ("BODY_META", "FLAT")),
        (lambda: over(torch.empty(4, device="meta"), torch.ones(2)), ("BODY_META", "SHAPE")),
        (lambda: over(torch.empty(1, 4, device="meta"), torch.ones(1, 8)[:, :4]), ("BODY_META",)),
        (lambda: (lambda x: over(x.as_strided((1, 4), (4, 1)), x.as_strided((1, 4), (9, 1))))(torch.ones(4)), ("OK",)),
    ],
)  # fmt: skip
def test_what_stands_beside_the_worst_state(make, states):
    assert dtensor.verify(make()).states == states


def test_a_healthy_parameter_of_such_a_library():
    weight = nn.Parameter(hp.DTensor(torch.ones(4), hp.Mesh(), (hp.Shard(0),)))

    found = dtensor.verify(weight)

    assert (found.state, found.findings) == ("OK", ())
    body, local = found.records[:2]
    assert (body.impl.requires_grad, local.impl.requires_grad) == (False, True)


@pytest.mark.parametrize(
    ("body", "local", "state"),
    [
        ("cpu", "cpu", "OK"),
        ("meta", "meta", "PENDING"),
        ("meta", "cpu", "BODY_META"),
        ("cpu", "meta", "LOCAL_META"),
    ],
)
def test_wrappers_have_rules_of_their_own(body, local, state):
    found = dtensor.verify(wrapper(body, torch.ones(4, device=local)))

    assert (found.state, found.layers.wrapper) == (state, True)


def test_a_wrapper_of_another_type_and_one_without_its_key():
    assert dtensor.verify(wrapper("cpu", torch.ones(4, dtype=torch.float16))).state == "DTYPE"
    assert dtensor.verify(unwrapped(torch.ones(4), torch.ones(4))).state == "NO_PYTHON_KEY"


def test_torchs_own_dtensor(single_process_group):
    mesh = init_device_mesh("cpu", (1,))
    weight = TorchDTensor.from_local(torch.ones(4), mesh, [Shard(0)])

    found = dtensor.verify(weight)

    assert (found.state, found.layers.placements, found.layers.mesh) == ("OK", "(Shard(dim=0),)", "DeviceMesh")
    assert dtensor.verify(nn.Parameter(weight)).state == "OK"
    assert dtensor.verify(TorchDTensor.from_local(torch.ones(4), mesh, [Replicate()])).layers.placements == (
        "(Replicate(),)"
    )


def test_a_plain_tensor_has_no_local_one():
    found = dtensor.verify(torch.ones(2))

    assert (found.state, found.findings) == ("NO_LOCAL", ())
    with pytest.raises(TypeError, match="takes a tensor or a module, got list"):
        dtensor.verify([torch.ones(2)])
    assert str(found).splitlines()[-1] == "no DTensor: a Tensor that keeps no local tensor: no findings"


def test_no_code_of_the_class_is_run():
    class Hostile(torch.Tensor):
        def __getattribute__(self, name):
            raise AssertionError(name)

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    local = torch.ones(4)
    tensor = torch.Tensor._make_subclass(Hostile, torch.empty(4, device="meta"))
    C.instance_dict(tensor)["_local_tensor"] = local

    assert dtensor.verify(tensor).state == "BODY_META"
    assert tp.check({"weight": tensor}).findings[0].code == "TP410"
    assert dtensor.repair(tensor).repaired == ["tensor"]


def test_no_code_of_a_metaclass_is_run():
    class Hostile(type(torch.Tensor)):
        def __eq__(cls, other):
            raise AssertionError

        def __subclasscheck__(cls, other):
            raise AssertionError

        def __instancecheck__(cls, other):
            raise AssertionError

        __hash__ = None

    tensor = torch.Tensor._make_subclass(Hostile("Odd", (torch.Tensor,), {}), torch.empty(4, device="meta"))
    C.instance_dict(tensor)["_local_tensor"] = torch.ones(4)

    assert dtensor.verify(tensor).state == "BODY_META"
    assert dtensor.repair(tensor).repaired == ["tensor"]


def test_who_answers_for_the_tensor():
    class Answering(Sharded):
        @property
        def device(self):
            return self._local_tensor.device

        @property
        def shape(self):
            raise AssertionError

    tensor = torch.Tensor._make_subclass(Answering, torch.empty(4, device="meta"))
    tensor._local_tensor = torch.ones(4)

    says = {said.attribute: (said.value, said.by) for said in dtensor.verify(tensor).layers.says}

    assert says["device"] == ("cpu", "_local_tensor")
    assert says["shape"] == (None, "Answering.shape")
    assert says["is_meta"] == ("True", "the body")


@pytest.mark.parametrize("state", STATES)
def test_verifying_changes_nothing(state):
    tensor = STATES[state]("cpu")
    local = C.local_tensor(tensor)[2]
    before = [facts_of(one) for one in (tensor, local) if one is not None]

    dtensor.verify(tensor)

    assert [facts_of(one) for one in (tensor, local) if one is not None] == before


def test_no_operator_runs():
    ran = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func)
            return func(*args, **(kwargs or {}))

    tensors = [make("cpu") for make in STATES.values()]
    plan = broken()
    with Count():
        for tensor in tensors:
            dtensor.verify(tensor).to_json()
        C.plan_repair(plan, None, 3, True)

    assert ran == []


# -- models -------------------------------------------------------------------------------------------------------


def model_of(device: str = "cpu") -> Any:
    model = hp.on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    hp.fully_shard(model, hp.Mesh())
    hp.materialize(model, device)
    return model


NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_a_model_is_a_mapping_of_its_dtensors():
    found = dtensor.verify(model_of())

    assert list(found) == NAMES
    assert (len(found), bool(found), found.states["1.bias"]) == (4, False, "BODY_META")
    assert [one.code for one in found.findings] == ["TP410"]
    assert found.findings[0].evidence["tensors"] == NAMES
    assert found["1.weight"].state == "BODY_META"
    assert [record.name for record in found["1.weight"].records][:2] == ["1.weight", "1.weight._local_tensor"]
    with pytest.raises(KeyError):
        found["nothing"]


def test_buffers_are_found_in_the_hooks_of_the_framework():
    model = model_of()
    state = hp.sharded_params(model)[0]

    assert dtensor.verify(model)["0.weight"].layers.buffers[0].aliases_local is True
    state.sharded_param._local_tensor = torch.ones(4, 4)
    found = dtensor.verify(model)["0.weight"]
    assert found.states == ("BODY_META", "COMM_STALE")
    dtensor.repair(model)
    found = dtensor.verify(model)["0.weight"]
    assert (found.state, [one.code for one in found.findings]) == ("COMM_STALE", ["TP417"])
    state.reset_sharded_param()
    assert dtensor.verify(model)["0.weight"].state == "OK"


def test_module_and_sharding_state_with_different_parameters():
    model = model_of()
    dtensor.repair(model)
    other = hp.DTensor(torch.ones(4, 4), hp.Mesh(), (hp.Shard(0),))
    model[0]._parameters["weight"] = nn.Parameter(other)

    found = dtensor.verify(model)["0.weight"]

    assert found.state == "DETACHED"
    assert [one.code for one in found.findings] == ["TP418"]


def test_an_optimizer_with_another_parameter():
    model = model_of()
    dtensor.repair(model)
    optimizer = torch.optim.SGD([nn.Parameter(hp.DTensor(torch.ones(4, 4), hp.Mesh(), (hp.Shard(0),)))], lr=0.1)

    assert dtensor.verify(model, optimizer)["0.weight"].state in ("OK", "DETACHED")


def test_check_and_audit_say_it_once():
    model = model_of()

    def loud(report):
        return [one.code for one in report.findings if one.severity != "info"]

    assert loud(tp.check(model)) == loud(tp.audit_device_consistency(model)) == ["TP410"]
    dtensor.repair(model)
    assert loud(tp.check(model)) == loud(tp.audit_device_consistency(model)) == []


def test_the_relation_is_drawn():
    found = dtensor.verify(broken())

    assert "body" in str(found)
    assert "_local_tensor" in str(found)
    assert "BODY_META" in str(found)
    assert found.svg.startswith("<svg")
    assert "none: on meta" in found.svg
    assert "<svg" not in found.html()  # a picture of its own, as data
    assert 'src="data:image/svg+xml' in found.html()
    assert '"outer_device":"meta"' in found.to_json()
    assert dtensor.Verification.from_json(found.to_json()).state == "BODY_META"


# -- refusals -----------------------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """One fact that stands against a repair, and the same without it."""

    reason: str
    make: Callable[[], Any]
    accepted: Callable[[], Any] = broken
    around: Callable[[ExitStack, Any], None] | None = None
    options: Any = MappingProxyType({})


def with_graph() -> Any:
    tensor = over(torch.empty(4, device="meta"), torch.ones(4), True)
    tensor.kept = torch.Tensor.mul(tensor, 2)
    return tensor


def with_graph_gone() -> Any:
    tensor = with_graph()
    del tensor.kept
    return tensor


def with_hook(kind: str) -> Callable[[], Any]:
    def make() -> Any:
        tensor = over(torch.empty(4, device="meta"), torch.ones(4), True)
        getattr(torch.Tensor, kind)(tensor, lambda grad: None)
        return tensor

    return make


def without_hook() -> Any:
    tensor = over(torch.empty(4, device="meta"), torch.ones(4), True)
    torch.Tensor.register_hook(tensor, lambda grad: None).remove()
    return tensor


def with_grad(local: torch.Tensor | None = None) -> Callable[[], Any]:
    def make() -> Any:
        tensor = over(torch.empty(4, device="meta"), torch.ones(4), True)
        torch.Tensor.grad.__set__(tensor, torch.empty(4, device="meta"))
        return tensor

    return make


def with_grad_gone() -> Any:
    tensor = with_grad()()
    torch.Tensor.grad.__set__(tensor, None)
    return tensor


def with_grad_dtype(dtype: torch.dtype | None) -> Any:
    tensor = over(torch.empty(4, device="meta"), torch.ones(4), True)
    torch._C.TensorBase.grad_dtype.__set__(tensor, dtype)
    return tensor


def with_tangent() -> Any:
    tensor = broken()
    level = torch.autograd.forward_ad.enter_dual_level()
    try:
        dual = torch.autograd.forward_ad.make_dual(torch.empty(4, device="meta"), torch.empty(4, device="meta"))
    finally:
        _open.append(level)
    return over_impl(dual, tensor._local_tensor)


_open: list[Any] = []


def over_impl(body: torch.Tensor, local: torch.Tensor) -> Any:
    """The very impl of a tensor as the body of a DTensor."""
    tensor = over(torch.empty(4, device="meta"), local)
    torch._C._swap_tensor_impl(tensor, body)
    tensor.kept = body
    return tensor


def meta(**options: Any) -> torch.Tensor:
    return torch.empty(4, device="meta", **options)


def view_of_meta() -> Any:
    return over_impl(torch.empty(2, 2, device="meta").view(4), torch.ones(4))


def computed_body() -> Any:
    return over_impl(torch.empty(4, device="meta", requires_grad=True) * 2, torch.ones(4))


def inference_body() -> Any:
    with torch.inference_mode():
        return over_impl(torch.empty(4, device="meta"), torch.ones(4))


def inference_local() -> Any:
    with torch.inference_mode():
        local = torch.ones(4)
    return over(meta(), local)


def placed(*placements: Any, mesh: Any = None) -> Callable[[], Any]:
    def make() -> Any:
        tensor = broken()
        tensor._device_mesh, tensor._placements = mesh or hp.Mesh(), placements
        return tensor

    return make


def class_attribute() -> Any:
    cls = type("Shared", (Sharded,), {"_local_tensor": torch.ones(4)})
    return torch.Tensor._make_subclass(cls, meta())


def itself() -> Any:
    tensor = over(meta(), None)
    tensor._local_tensor = tensor
    return tensor


def past_storage() -> Any:
    base = torch.ones(8)
    local = base[4:]
    base.untyped_storage().resize_(16)
    return over(meta(), local)


def null_pointer() -> Any:
    storage = torch._C._construct_storage_from_data_pointer(0, torch.device("cpu"), 16)
    return over(meta(), torch.empty(0).set_(storage, 0, (4,)))


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def in_mode(mode: Callable[[], Any]) -> Callable[[ExitStack, Any], None]:
    return lambda stack, tensor: stack.enter_context(mode())


def sparse(x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse()


conjugate = torch.ones(4, dtype=torch.complex64).conj
REFUSALS = [
    Refusal("local-present", lambda: torch.Tensor._make_subclass(Sharded, meta())),
    Refusal("local-present", lambda: over(meta(), "no tensor")),
    Refusal("local-own", class_attribute),
    Refusal("local-not-body", itself),
    Refusal("local-not-dtensor", lambda: over(meta(), healthy())),
    Refusal("body-without-key", lambda: wrapper("meta", torch.ones(4)), options={"method": "impl"}),
    Refusal("body-dense", lambda: over_impl(torch.empty(4, device="meta", layout=torch.sparse_coo), torch.ones(4))),
    Refusal("not-inference", inference_body),
    Refusal("not-inference", inference_local, lambda: over(meta(), torch.ones(4))),
    Refusal("local-not-fake", lambda: over(meta(), fake("cpu")._local_tensor)),
    Refusal("local-dense", lambda: over(meta(), torch.ones(4).to_sparse())),
    Refusal("local-dense", lambda: over(meta(), torch.ones(2, 2).to_sparse_csr())),
    Refusal("local-dense", lambda: over(meta(), torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.quint8))),
    Refusal("local-dense", lambda: over(meta(), torch.ones(4).to_mkldnn())),
    Refusal("local-dense", lambda: over(meta(), torch.nested.nested_tensor([torch.ones(4)]))),
    Refusal("local-dense", lambda: over(meta(), torch.Tensor._make_wrapper_subclass(Wrapped, (4,)))),
    Refusal("local-dense", lambda: over(meta(), torch._efficientzerotensor(4))),
    Refusal("no-grad-fn", computed_body),
    Refusal("no-graph", with_graph, with_graph_gone),
    Refusal("not-held", lambda: held_meta(), lambda: let_go(held_meta())),
    Refusal("not-view", view_of_meta),
    Refusal("no-hooks", with_hook("register_hook"), without_hook),
    Refusal("no-hooks", with_hook("register_post_accumulate_grad_hook"), without_hook),
    Refusal("no-grad", with_grad(), with_grad_gone),
    Refusal("grad-fits", with_grad(), with_grad_gone, options={"migrate": "grad"}),
    Refusal("no-grad-dtype", lambda: with_grad_dtype(torch.bfloat16), lambda: with_grad_dtype(torch.float32)),
    Refusal("no-grad-dtype", lambda: with_grad_dtype(None), lambda: with_grad_dtype(torch.float32)),
    Refusal("local-materialized", lambda: over(torch.ones(4), meta()), lambda: over(torch.ones(4), torch.ones(4))),
    Refusal("local-leaf", lambda: over(meta(), torch.ones(4, requires_grad=True) * 2)),
    Refusal("local-in-storage", past_storage),
    Refusal("local-pointer", null_pointer),
    Refusal(
        "conjugate-negative",
        lambda: over(meta(dtype=torch.complex64), conjugate()),
        lambda: over(meta(dtype=torch.complex64), conjugate().resolve_conj()),
    ),
    Refusal("shape", lambda: over(meta(), torch.ones(5)), lambda: over(meta(), torch.ones(5)[:4])),
    Refusal("dtype", lambda: over(meta(), torch.ones(4, dtype=torch.float16))),
    Refusal(
        "requires-grad-type",
        lambda: over(meta(dtype=torch.int64), torch.ones(4, dtype=torch.int64)),
        broken,
        options={"requires_grad": True},
    ),
    Refusal("inference-mode", broken, around=in_mode(torch.inference_mode)),
    Refusal("dispatch-mode", broken, around=in_mode(Mode)),
    Refusal("placements", placed(hp.Shard(1)), placed(hp.Shard(0))),
    Refusal("placements", placed(hp.Shard(0), hp.Shard(0)), placed(hp.Shard(0))),
    Refusal("weak-references", lambda: watched(), broken, options={"method": "public"}),
    Refusal("registered", broken, options={"registered_in": nn.Linear(2, 2)}),
    Refusal("registered", broken, options={"registered_in": [nn.Linear(2, 2), nn.ReLU()]}),
]


def held_meta() -> Any:
    tensor = broken()
    tensor.view_of_it = torch.Tensor.view(tensor, -1)
    return tensor


def let_go(tensor: Any) -> Any:
    del tensor.view_of_it
    return tensor


_watching: list[Any] = []


def watched() -> Any:
    tensor = broken()
    _watching.append(weakref.ref(tensor))
    return tensor


def ids(refusals: list[Refusal]) -> list[str]:
    return [f"{number}-{one.reason}" for number, one in enumerate(refusals)]


@pytest.mark.parametrize("refusal", REFUSALS, ids=ids(REFUSALS))
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*torch.quantize_per_tensor")
def test_refusals_change_nothing(refusal):
    tensor = refusal.make()
    before = native_facts(tensor)

    with ExitStack() as stack:
        if refusal.around is not None:
            refusal.around(stack, tensor)
        with pytest.raises(tp.RepairRefused) as raised:
            dtensor.repair(tensor, **refusal.options)

    reasons = raised.value.reasons
    assert refusal.reason in [reason.name for reason in reasons]
    (reason,) = [reason for reason in reasons if reason.name == refusal.reason]
    assert reason.way_out == REASONS[refusal.reason][1]
    assert reason.endswith(reason.way_out)
    assert "{" not in reason
    assert native_facts(tensor) == before
    assert all(plan.outcome == "refused" for plan in raised.value.report.plans)


@pytest.mark.parametrize("refusal", REFUSALS, ids=ids(REFUSALS))
def test_neighbours_of_refusals_are_accepted(refusal):
    options = {key: value for key, value in refusal.options.items() if key != "registered_in"}
    tensor = refusal.accepted()

    report = dtensor.repair(tensor, **options)

    assert len(report.repaired) == 1
    assert dtensor.verify(tensor).states[0] in ("OK", "REQUIRES_GRAD")


def test_refused_while_a_transform_of_torch_func_runs():
    tensor = broken()
    refused = []

    def inside(x):
        with pytest.raises(tp.RepairRefused) as raised:
            dtensor.repair(tensor)
        refused.extend(reason.name for reason in raised.value.reasons)
        return x

    torch.func.vmap(inside)(torch.ones(2))

    assert refused == ["functorch"]
    assert dtensor.repair(tensor).repaired


def test_grad_modes_and_modes_for_functions_are_no_obstacle():
    for mode in (torch.no_grad, torch.enable_grad, lambda: torch.device("meta"), lambda: torch.device("cpu")):
        tensor = broken()
        with mode():
            assert dtensor.repair(tensor).plans[0].after == "OK"
        assert C.read(tensor).impl.device == "cpu"


def test_refused_while_backward_runs():
    tensor = broken()
    refused = []

    class Repairing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            try:
                dtensor.repair(tensor)
            except tp.RepairRefused as error:
                refused.extend(reason.name for reason in error.reasons)
            return grad

    Repairing.apply(torch.ones(2, requires_grad=True)).sum().backward()

    assert refused == ["backward"]
    assert dtensor.repair(tensor).repaired


def test_refused_with_weak_references_from_c():
    tensor = broken()
    handle = torch._C._WeakTensorRef(tensor)

    with pytest.raises(tp.RepairRefused) as raised:
        dtensor.repair(tensor)

    assert [reason.name for reason in raised.value.reasons] == ["no-weak-references"]
    del handle
    assert dtensor.repair(tensor).repaired


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is")
def test_refused_while_it_is_traced():
    tensor = broken()
    refused = []

    def traced(x):
        try:
            dtensor.repair(tensor)
        except tp.RepairRefused as error:
            refused.extend(reason.name for reason in error.reasons)
        return x

    torch.jit.trace(traced, torch.ones(2), check_trace=False)

    assert "compile" in refused
    assert dtensor.repair(tensor).repaired


def test_every_check_has_words():
    known = {name for name, result, found in C.plan_repair(broken(), None, 3, False)[2]}

    assert known <= REASONS.keys()
    for wrong, way_out in REASONS.values():
        assert wrong == wrong.strip()
        assert way_out
        assert not re.search(r"[.:]$", way_out)


# -- the exchange -------------------------------------------------------------------------------------------------

AFTER = ["exchange", "hooks", "donor-exact", *C.repair_checks()]


@pytest.mark.parametrize("failing", AFTER)
def test_a_failing_check_takes_everything_back(failing):
    tensor = with_hook("register_hook")()
    torch.Tensor.grad.__set__(tensor, meta())
    before = native_facts(tensor)
    hooks = torch.Tensor._backward_hooks.__get__(tensor)

    assert C.apply_repair(tensor, None, 1, (), [], failing) == ("refused", "plan", "")  # its gradient
    assert native_facts(tensor) == before
    assert torch.Tensor._backward_hooks.__get__(tensor) is hooks


@pytest.mark.parametrize("failing", AFTER)
def test_a_failing_check_takes_the_exchange_back(failing):
    tensor = with_hook("register_hook")()
    before = native_facts(tensor)
    hooks = torch.Tensor._backward_hooks.__get__(tensor)

    end, failed, said = C.apply_repair(tensor, None, 1, (), [], failing)

    assert (said if failed == "donor" else failed) == failing
    assert end == ("refused" if failing in ("exchange", "donor-exact") else "taken back")
    assert native_facts(tensor) == before
    assert torch.Tensor._backward_hooks.__get__(tensor) is hooks
    assert dtensor.repair(tensor, migrate="hooks").repaired


def test_a_registration_that_changed_takes_it_back():
    tensor = broken()
    before = native_facts(tensor)

    assert C.apply_repair(tensor, None, 0, (({"weight": None}, "weight"),), []) == (
        "taken back",
        "object",
        "",
    )
    assert C.apply_repair(tensor, None, 0, (([], 0),), []) == ("taken back", "object", "")
    assert native_facts(tensor) == before
    assert C.apply_repair(tensor, None, 0, (([tensor], 0),), []) == ("done", "", "")


def test_what_a_repair_keeps():
    tensor = broken()
    tensor.more = marker = object()
    watching = weakref.ref(tensor)
    number, own, local = id(tensor), dict(tensor.__dict__), tensor._local_tensor

    report = dtensor.repair(tensor)

    assert (id(tensor), watching(), type(tensor)) == (number, tensor, Sharded)
    assert dict(tensor.__dict__) == own
    assert (tensor.more, tensor._local_tensor) == (marker, local)
    body, inside = C.read(tensor), C.read(local)
    assert body.storage.address == inside.storage.address
    assert body.impl.version_counter == inside.impl.version_counter
    assert body.impl.address != inside.impl.address
    assert (body.impl.use_count, inside.impl.use_count, body.storage.use_count) == (1, 1, 2)
    assert torch.equal(torch.Tensor.detach(tensor), torch.ones(4))
    assert (report.plans[0].state, report.plans[0].after) == ("BODY_META", "OK")
    assert report.findings == ()


@pytest.mark.parametrize("state", ["BODY_META", "SPLIT", "ALIASED_TWICE", "OFFSET", "STRIDE"])
def test_states_that_the_exchange_mends(state):
    tensor = STATES[state]("cpu")

    assert dtensor.repair(tensor).plans[0].after == "OK"
    assert dtensor.verify(tensor)


@pytest.mark.parametrize("state", ["BODY_META", "SPLIT", "OFFSET", "STRIDE"])
def test_states_that_the_exchange_mends_on_another_device(npu, state):
    tensor = STATES[state]("npu")

    assert dtensor.repair(tensor).plans[0].after == "OK"
    assert C.read(tensor).impl.device == "npu:0"


@pytest.mark.parametrize("state", ["OK", "VERSION_SPLIT", "REQUIRES_GRAD", "LOCAL_NONLEAF", "LOCAL_INFERENCE"])
def test_states_that_are_left_alone(state):
    tensor = STATES[state]("cpu")
    before = native_facts(tensor)

    report = dtensor.repair(tensor)

    assert (report.plans[0].outcome, report.repaired) == ("unchanged", [])
    assert native_facts(tensor) == before
    assert [one.evidence["state"] for one in report.findings] == ([] if state in ("OK", "LOCAL_INFERENCE") else [state])


def test_what_is_still_on_meta_is_left_alone():
    assert dtensor.repair(STATES["PENDING"]("cpu")).plans[0].outcome == "pending"


@pytest.mark.parametrize("state", ["LOCAL_META", "DTYPE", "SHAPE", "FREED"])
def test_states_that_are_refused(state):
    with pytest.raises(tp.RepairRefused):
        dtensor.repair(STATES[state]("cpu"))


@pytest.mark.parametrize("asked", ["keep", True, False])
@pytest.mark.parametrize("had", [True, False])
def test_requires_grad_as_asked(asked, had):
    tensor = over(meta(), torch.ones(4), had)

    dtensor.repair(tensor, requires_grad=asked)

    assert C.read(tensor).impl.requires_grad is (had if asked == "keep" else asked)
    assert C.read(tensor).impl.is_leaf


def test_hooks_move_and_fire():
    tensor = over(meta(), torch.ones(4), True)
    seen = []
    handle = torch.Tensor.register_hook(tensor, lambda grad: seen.append("before"))
    torch.Tensor.register_post_accumulate_grad_hook(tensor, lambda one: seen.append("after"))

    dtensor.repair(tensor, migrate="hooks")
    torch.Tensor.sum(tensor).backward()

    assert seen == ["before", "after"]
    handle.remove()
    torch.Tensor.sum(tensor).backward()
    assert seen == ["before", "after", "after"]
    later = torch.Tensor.register_hook(tensor, lambda grad: seen.append("later"))
    torch.Tensor.sum(tensor).backward()
    assert seen[3:] == ["later", "after"]
    later.remove()


@pytest.mark.parametrize("method", ["impl", "public"])
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_registered_after_a_removed_one_fire(method, kind):
    tensor = over(meta(), torch.ones(4), True)
    getattr(torch.Tensor, kind)(tensor, lambda grad: None).remove()
    dtensor.repair(tensor, method=method)
    seen = []

    getattr(torch.Tensor, kind)(tensor, lambda grad: seen.append("fired"))
    torch.Tensor.sum(tensor).backward()

    assert seen == ["fired"]


def test_a_gradient_moves():
    local = torch.ones(4)
    tensor = over(torch.ones(4), local, True)
    torch.Tensor.sum(tensor).backward()
    grad = torch.Tensor.grad.__get__(tensor)

    dtensor.repair(tensor, migrate=("grad",))

    assert torch.Tensor.grad.__get__(tensor) is grad
    assert C.read(tensor).storage.address == C.read(local).storage.address
    torch.Tensor.sum(tensor).backward()
    assert torch.equal(torch.Tensor.grad.__get__(tensor), torch.full((4,), 2.0))


def test_a_dry_run_answers_every_check_and_changes_nothing():
    tensor = with_graph()
    before = native_facts(tensor)

    report = dtensor.repair(tensor, dry_run=True)

    assert native_facts(tensor) == before
    assert report.refused == ["tensor"]
    assert {check.result for check in report.plans[0].checks} == {"passed", "refused", "not checked"}
    assert "no-graph refused: backward is pending" in str(report)
    assert dtensor.repair(broken(), dry_run=True).plans[0].outcome == "planned"


def test_checks_that_need_what_was_not_handed_in():
    def unchecked(report):
        return {check.name for check in report.plans[0].checks if check.result == "not checked"}

    assert {"registered", "optimizer", "buffer"} <= unchecked(dtensor.repair(broken()))
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not {"registered", "optimizer", "buffer"} & unchecked(dtensor.repair(model, optimizer=optimizer))


def test_an_optimizer_that_does_not_hold_it_is_reported():
    tensor, other = broken(), torch.ones(2, requires_grad=True)

    report = dtensor.repair(tensor, optimizer=torch.optim.SGD([other], lr=0.1))

    assert report.repaired
    assert [check.name for check in report.plans[0].checks if check.result == "reported"] == ["optimizer"]


def test_state_of_an_optimizer_on_meta_is_reported():
    tensor = over(meta(), torch.ones(4), True)
    optimizer = torch.optim.Adam([tensor])
    optimizer.state[tensor]["exp_avg"] = meta()

    report = dtensor.repair(tensor, optimizer=optimizer)

    assert [check.name for check in report.plans[0].checks if check.result == "reported"] == ["optimizer-state"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "swap"}, ValueError, "takes 'impl' or 'public', got 'swap'"),
        ({"requires_grad": "yes"}, TypeError, "takes 'keep', True or False"),
        ({"requires_grad": 1}, TypeError, "takes 'keep', True or False"),
        ({"migrate": 5}, TypeError, "takes 'hooks', 'grad', 'version' or some in a tuple, got int"),
        ({"migrate": "views"}, ValueError, "takes 'hooks', 'grad' and 'version', got 'views'"),
        ({"registered_in": "model"}, TypeError, "takes a module, or a list of some, got str"),
        ({"optimizer": 3}, TypeError, "optimizer"),
    ],
)
def test_wrong_arguments(options, error, message):
    tensor = broken()
    with pytest.raises(error, match=message):
        dtensor.repair(tensor, **options)
    with pytest.raises(error, match=message), dtensor.repair_context(tensor, **options):
        pass


def test_what_is_no_dtensor():
    with pytest.raises(TypeError, match="takes a DTensor or a module"):
        dtensor.repair(torch.ones(2))
    with pytest.raises(TypeError, match="takes a tensor or a module, got int"):
        dtensor.repair(3)
    assert dtensor.repair(nn.Linear(2, 2)).plans == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requires_grad": torch.ones(2)}, r"requires_grad=\) takes 'keep', True or False, got Tensor"),
        ({"requires_grad": 1}, r"requires_grad=\) takes 'keep', True or False, got 1"),
        ({"partial": "no"}, r"partial=\) takes True or False, got str"),
        ({"dry_run": 1}, r"dry_run=\) takes True or False, got int"),
        ({"optimizer": 4}, "takes an optimizer, or several"),
    ],
)
def test_options_of_another_type_are_told_before_anything_is_done(options, message):
    tensor = broken()
    state = hp.sharded_params(model_of())[0]
    buffer = state._sharded_param_data

    with pytest.raises(TypeError, match=message):
        dtensor.repair(tensor, **options)
    with pytest.raises(TypeError, match=message):
        dtensor.repair_context(tensor, **options)
    with pytest.raises(TypeError, match=message):
        dtensor.reset_sharded_param(state, **options)

    assert dtensor.verify(tensor).state == "BODY_META"
    assert state._sharded_param_data is buffer


@pytest.mark.parametrize("state", ["VERSION_SPLIT", "REQUIRES_GRAD", "LOCAL_NONLEAF"])
def test_what_an_exchange_does_not_mend_is_said(state):
    tensor = STATES[state]("cpu")
    before = native_facts(tensor)

    report = dtensor.repair(tensor)

    (plan,) = report.plans
    assert (plan.outcome, report.findings[0].evidence["state"]) == ("unchanged", state)
    (told,) = [check for check in plan.checks if check.name == "mends"]
    assert (
        told.reason == f"{state} alone is not what a body is exchanged for: the finding on it says what puts it right"
    )
    assert "repair(model)" not in report.findings[0].fix
    assert native_facts(tensor) == before


@pytest.mark.parametrize("method", ["impl", "public"])
def test_a_version_counter_of_its_own_is_given_up_where_that_is_asked(method):
    copied = dtensor.verify(copy.copy(healthy()))
    assert (copied.state, "make it anew" in copied.findings[0].fix) == ("VERSION_SPLIT", True)
    local = torch.ones(4)
    tensor = over(local.data, local)
    assert dtensor.verify(tensor).state == "VERSION_SPLIT"
    assert "migrate=('version',)" in dtensor.verify(tensor).findings[0].fix
    assert dtensor.repair(tensor, method=method).plans[0].outcome == "unchanged"

    report = dtensor.repair(tensor, method=method, migrate="version")

    assert (report.repaired, dtensor.verify(tensor).state) == (["tensor"], "OK")
    assert dtensor.repair(tensor, method=method, migrate="version").plans[0].outcome == "unchanged"


def test_what_no_module_has_registered_is_repaired_by_itself():
    model = nn.Module()
    model.kept = [broken()]
    (finding,) = tp.check(model).findings
    assert (finding.code, "repair(p)" in finding.fix) == ("TP410", True)

    model.register_parameter("weight", nn.Parameter(hp.DTensor(meta(), hp.Mesh(), (hp.Shard(0),))))
    model.weight._local_tensor = torch.ones(4)
    (finding,) = [one for one in tp.check(model).findings if one.where.name == "model.weight"]
    assert "repair(model)" in finding.fix
    dtensor.repair(model)
    dtensor.repair(model.kept[0])
    assert not tp.check(model).findings


def test_the_state_after_a_repair_is_the_reports():
    model = model_of()
    for state in hp.sharded_params(model):
        state.sharded_param._local_tensor = torch.ones_like(state.sharded_param._local_tensor)

    report = dtensor.repair(model)

    assert {plan.after for plan in report.plans} == {"COMM_STALE"}
    assert all(one.state == "COMM_STALE" for one in report.document.dtensors)


def test_each_alias_has_a_name_of_its_own():
    model = nn.Module()
    for name in ("a", "b"):
        model._parameters[name] = over(torch.zeros(4), torch.ones(4))

    lines = [line.split() for line in str(dtensor.verify(model)).splitlines() if line.lstrip().startswith(".data")]

    assert len(lines) == 2
    assert len({line[line.index("->") + 1] for line in lines}) == 2


def test_reports_are_equal_to_themselves_and_read_back_as_what_they_are():
    model = model_of()
    one, many, repair = dtensor.verify(broken()), dtensor.verify(model), dtensor.repair(model, dry_run=True)

    assert (many == many, many == dtensor.verify(model), len({many, many})) == (True, False, 1)
    for report in (one, many, repair):
        assert type(type(report).from_json(report.to_json())) is type(report)
    for cls, other in (
        (dtensor.Verification, many),
        (dtensor.Verification, tp.inspect(broken(), quiet=True)),
        (dtensor.Verifications, repair),
        (dtensor.Repair, many),
        (dtensor.Repair, tp.check(model)),
    ):
        with pytest.raises(ValueError, match=f"this report is not what {cls.__name__} holds"):
            cls.from_json(other.to_json())


# -- batches ------------------------------------------------------------------------------------------------------


def states_of(model: Any) -> list[str]:
    return list(dtensor.verify(model).states.values())


def test_a_model_is_repaired_all_or_none():
    model = model_of()
    third = dict(model.named_parameters())["1.weight"]
    third._local_tensor = torch.ones(3, 4)
    before = [native_facts(one) for one in model.parameters()]

    with pytest.raises(tp.RepairRefused) as raised:
        dtensor.repair(model)

    assert {reason.tensor for reason in raised.value.reasons} == {"1.weight"}
    assert [native_facts(one) for one in model.parameters()] == before
    report = dtensor.repair(model, partial=True)
    assert (report.repaired, report.refused) == (["0.weight", "0.bias", "1.bias"], ["1.weight"])
    assert [one.code for one in report.findings] == ["TP410"]


@pytest.mark.parametrize("number", range(4))
def test_a_failure_in_the_middle_takes_the_others_back(monkeypatch, number):
    model = model_of()
    before = [native_facts(one) for one in model.parameters()]
    calls = []
    real = C.apply_repair

    def failing(*args):
        calls.append(args)
        return real(*args[:5], "storage" if len(calls) == number + 1 else "")

    monkeypatch.setattr("tensorplay.repairs.C", Patched(C, apply_repair=failing))
    with pytest.raises(tp.RepairRefused, match="after the exchange storage was not as it has to be"):
        dtensor.repair(model)

    assert [native_facts(one) for one in model.parameters()] == before
    monkeypatch.undo()
    assert len(dtensor.repair(model).repaired) == 4


@pytest.mark.parametrize("number", range(4))
def test_an_exception_in_the_middle_takes_the_others_back(monkeypatch, number):
    model = model_of()
    before = [native_facts(one) for one in model.parameters()]
    calls = []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == number + 1:
            raise KeyboardInterrupt
        return C.apply_repair(*args)

    monkeypatch.setattr("tensorplay.repairs.C", Patched(C, apply_repair=interrupted))
    with pytest.raises(KeyboardInterrupt):
        dtensor.repair(model)

    assert [native_facts(one) for one in model.parameters()] == before


@pytest.mark.parametrize("number", range(4))
def test_an_exception_right_after_an_exchange_takes_it_back_too(monkeypatch, number):
    model = model_of()
    before = [native_facts(one) for one in model.parameters()]
    calls = []

    def interrupted(*args):
        answer = C.apply_repair(*args)
        calls.append(args)
        if len(calls) == number + 1:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr("tensorplay.repairs.C", Patched(C, apply_repair=interrupted))
    with pytest.raises(KeyboardInterrupt):
        dtensor.repair(model)

    assert [native_facts(one) for one in model.parameters()] == before


def test_threads_that_repair_one_model_agree():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(10):
            model = model_of()
            with ThreadPoolExecutor(3) as pool:
                reports = list(pool.map(lambda _, model=model: dtensor.repair(model), range(3)))
            assert sorted(len(report.repaired) for report in reports) == [0, 0, 4]
            assert states_of(model) == ["OK"] * 4
    finally:
        sys.setswitchinterval(interval)


def test_parameters_that_are_put_aside_while_gathered_ones_are_used():
    model = model_of()
    seen = []
    model[1].register_forward_hook(lambda *args: seen.append(dtensor.verify(model)))
    model[1].register_forward_hook(lambda *args: seen.append(dtensor.repair(model)))

    model(torch.ones(1, 4))

    assert list(seen[0].states.values()) == ["BODY_META"] * 4
    assert len(seen[1].repaired) == 4
    assert states_of(model) == ["OK"] * 4


class Patched:
    """The native module with some functions exchanged."""

    def __init__(self, module: Any, **functions: Any) -> None:
        self._module = module
        self.__dict__.update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def test_tied_parameters_are_repaired_once():
    model = nn.ModuleList([nn.Module(), nn.Module()])
    model[0].weight = model[1].weight = nn.Parameter(hp.DTensor(meta(), hp.Mesh(), (hp.Shard(0),)))
    model[0].weight._local_tensor = torch.ones(4)

    report = dtensor.repair(model)

    assert report.repaired == ["0.weight"]
    assert model[0].weight is model[1].weight


@pytest.mark.parametrize("plain", [torch.ones(2), nn.Parameter(torch.ones(2)), [torch.ones(2)]])
def test_a_context_takes_a_module_or_a_dtensor(plain):
    with pytest.raises(TypeError, match="takes a module or a DTensor, got"):
        dtensor.repair_context(plain)


def test_a_context_that_is_used_again_has_no_old_report():
    context = dtensor.repair_context(model_of())
    with context:
        pass
    assert context.report is not None

    with pytest.raises(ZeroDivisionError), context:
        raise ZeroDivisionError

    assert context.report is None


def test_an_interrupt_after_the_exchange_takes_it_back(monkeypatch):
    model = model_of()
    before = [native_facts(one) for one in model.parameters()]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(dtensor, "_findings", interrupted)
    for options in ({}, {"partial": True}, {"method": "public"}):
        with pytest.raises(KeyboardInterrupt):
            dtensor.repair(model, **options)
        assert [native_facts(one) for one in model.parameters()] == before


def test_a_local_tensor_that_is_a_dtensor_is_left_alone_where_nothing_is_wrong():
    inner = healthy()
    outer = over(inner._local_tensor, inner)
    assert dtensor.verify(outer).state == "OK"
    assert dtensor.repair(outer).plans[0].outcome == "unchanged"


def test_a_storage_that_was_cut_is_freed_in_part():
    tensor = healthy()
    tensor._local_tensor.untyped_storage().resize_(8)

    found = dtensor.verify(tensor)

    assert (found.state, found.findings[0].code) == ("FREED", "TP416")
    assert found.findings[0].headline == "the storage of the body and local tensor has 8 B of the 16 B it needs"
    assert "resize_(16)" in found.findings[0].fix
    assert [one.code for one in tp.check(tensor).findings] == ["TP102"]


def test_a_state_without_a_reset():
    model = model_of()
    real = hp.sharded_params(model)[0]

    class State:
        def __init__(self) -> None:
            self.sharded_param, self._sharded_param_data = real.sharded_param, real._sharded_param_data

    with pytest.raises(TypeError, match=r"State has no reset_sharded_param\(\): hand in what resets it"):
        dtensor.reset_sharded_param(State())
    with pytest.raises(TypeError, match=r"reset=\) takes what is called, got int"):
        dtensor.reset_sharded_param(State(), 3)
    plain = State()
    plain.sharded_param = nn.Parameter(torch.ones(2))
    with pytest.raises(TypeError, match="the sharded_param of State is no DTensor"):
        dtensor.reset_sharded_param(plain, pytest.fail)
    assert dtensor.reset_sharded_param(State(), lambda: None).plans[0].outcome == "repaired"


# -- contexts and frameworks --------------------------------------------------------------------------------------


def test_a_context_around_materialisation():
    model = hp.on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    hp.fully_shard(model, hp.Mesh())

    with dtensor.repair_context(model) as context:
        hp.materialize(model, "cpu")
        assert states_of(model) == ["BODY_META"] * 4

    assert context.report.repaired == NAMES
    assert context.findings == ()
    assert '"repaired"' in context.to_json()
    assert states_of(model) == ["OK"] * 4


def test_a_context_passes_exceptions_on_and_repairs_nothing():
    model = model_of()

    with pytest.raises(ZeroDivisionError), dtensor.repair_context(model) as context:
        raise ZeroDivisionError

    assert context.report is None
    assert states_of(model) == ["BODY_META"] * 4
    with pytest.raises(RuntimeError, match="has not ended"):
        context.to_json()
    with pytest.raises(TypeError, match="has no argument 'force'"):
        dtensor.repair_context(model, force=True)


def test_a_frameworks_reset_of_one_parameter(caplog):
    model = model_of()
    state = hp.sharded_params(model)[0]
    state.sharded_param._local_tensor = torch.ones(4, 4)

    with caplog.at_level(logging.INFO, "tensorplay"):
        report = dtensor.reset_sharded_param(state)

    assert report.plans[0].outcome == "repaired"
    assert [record.getMessage() for record in caplog.records] == ["weight: BODY_META, repaired, now OK"]
    assert state._sharded_param_data.untyped_storage()._cdata == C.read(state.sharded_param).storage.address
    assert dtensor.verify(model)["0.weight"].state == "OK"
    assert report.plans[0].name == "weight"
    with pytest.raises(TypeError, match="takes a framework's sharding state"):
        dtensor.reset_sharded_param(model)


@pytest.mark.parametrize("option", [{"optimiser": 1}, {"method": "x"}, {"migrate": "y"}, {"registered_in": 3}])
def test_wrong_options_are_told_before_the_frameworks_reset(option):
    state = hp.sharded_params(model_of())[0]
    state.sharded_param._local_tensor = torch.ones(4, 4)
    buffer = state._sharded_param_data

    with pytest.raises((TypeError, ValueError)):
        dtensor.reset_sharded_param(state, **option)

    assert state._sharded_param_data is buffer


def test_a_refusal_travels():
    tensor = with_graph()
    with pytest.raises(tp.RepairRefused) as raised:
        dtensor.repair(tensor)

    for other in (pickle.loads(pickle.dumps(raised.value)), copy.copy(raised.value)):
        assert str(other) == str(raised.value)
        assert [reason.name for reason in other.reasons] == ["no-graph"]
        assert other.report.refused == ["tensor"]


def test_checks_after_the_exchange_have_words_of_their_own(monkeypatch):
    tensor = broken()
    monkeypatch.setattr(
        "tensorplay.repairs.C", Patched(C, apply_repair=lambda *args: C.apply_repair(*args[:5], "dtype"))
    )
    with pytest.raises(tp.RepairRefused, match="after the exchange dtype was not as it has to be"):
        dtensor.repair(tensor)


def test_a_module_that_has_none_of_a_models_dtensors():
    model = model_of()

    with pytest.raises(tp.RepairRefused, match="it is not registered in Linear"):
        dtensor.repair(model, registered_in=nn.Linear(2, 2))
    assert dtensor.repair(model, registered_in=[model[0]]).repaired == NAMES


# -- many ---------------------------------------------------------------------------------------------------------


def test_many_repairs_beside_graphs_views_and_weak_references():
    others = [torch.ones(4, requires_grad=True) for _ in range(10)]
    graphs = [one * 2 for one in others]
    views = [one.detach()[1:] for one in others]
    weak = [weakref.ref(one) for one in others]

    def once() -> None:
        tensor = broken()
        watching = weakref.ref(tensor)
        dtensor.repair(tensor)
        assert watching() is tensor
        del tensor
        assert watching() is None

    once()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(2_000):
        once()
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    for _ in range(8_000):
        tensor = broken()
        assert C.apply_repair(tensor, None, 0, (), []) == ("done", "", "")
    assert all(graph.grad_fn is not None for graph in graphs)
    assert [one() for one in weak] == others or all(one() is not None for one in weak)
    assert len(views) == 10
