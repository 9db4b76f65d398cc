"""What a DTensor's body is meant to be: a wrapper or an ordinary tensor, with the Python key or without, wherever its
class keeps the local tensor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

import tensorplay as tp
from tensorplay import dtensor
from tensorplay._native import C
from tests.dtensors import broken, over, torchs_own


class Dispatching(torch.Tensor):
    """Operators reach it by the Python key; the local tensor is in its dictionary."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unpacked(x: Any) -> Any:
            return x._local_tensor if isinstance(x, Dispatching) else x

        return func(*tree_map(unpacked, args), **tree_map(unpacked, kwargs or {}))


class DispatchingSlot(Dispatching):
    __slots__ = ["_local_tensor"]


class Slot(torch.Tensor):
    """An ordinary tensor whose local tensor is in a slot."""

    __slots__ = ["_local_tensor"]


def with_local(tensor: Any, local: torch.Tensor) -> Any:
    tensor._local_tensor = local
    return tensor


def wrapped(cls: type, shape: tuple[int, ...], local: torch.Tensor, device: str | None = None) -> Any:
    made = torch.Tensor._make_wrapper_subclass(cls, shape, device=device or local.device)
    return with_local(made, local)


def ordinary(cls: type, body: torch.Tensor, local: torch.Tensor) -> Any:
    return with_local(torch.Tensor._make_subclass(cls, body), local)


@pytest.mark.parametrize("cls", [Dispatching, DispatchingSlot])
def test_wrappers_have_a_shape_of_their_own_and_no_memory(cls):
    healthy = [
        wrapped(cls, (8,), torch.ones(4)),
        wrapped(cls, (4,), torch.ones(4)),
        wrapped(cls, (4, 2), torch.ones(2, 4).t()),
        wrapped(cls, (0,), torch.ones(0)),
    ]

    for tensor in healthy:
        assert dtensor.verify(tensor).state == "OK"
        assert dtensor.verify(tensor).layers.wrapper
        assert {one.code for one in tp.check({"tensor": tensor}).findings} <= {"TP108"}  # of the strided one
    assert dtensor.verify(wrapped(cls, (0,), torch.empty(0, device="meta"))).state == "PENDING"
    left = wrapped(cls, (8,), torch.ones(4), "meta")
    assert dtensor.verify(left).state == "BODY_META"
    assert "method='public'" in dtensor.verify(left).findings[0].fix
    with pytest.raises(tp.RepairRefused, match="use method='public'"):
        dtensor.repair(left)
    dtensor.repair(left, method="public")
    assert (dtensor.verify(left).state, left.shape, str(left.device)) == ("OK", (8,), "cpu")
    assert torch.equal(left + 1, torch.full((4,), 2.0))


@pytest.mark.parametrize("cls", [Dispatching, DispatchingSlot])
def test_ordinary_bodies_with_the_key_are_compared_as_others_and_replaced_whole(cls):
    local = torch.ones(4)
    assert dtensor.verify(ordinary(cls, local, local)).state == "OK"
    assert not tp.check({"tensor": ordinary(cls, local, local)}).findings

    for state, body in (("SPLIT", torch.zeros(4)), ("BODY_META", torch.empty(4, device="meta"))):
        apart = ordinary(cls, body, local)
        found = dtensor.verify(apart)
        assert (found.state, found.layers.wrapper) == (state, False)
        assert "method='public'" in found.findings[0].fix
        with pytest.raises(tp.RepairRefused, match=r"Python key of its body, a tensor.*use method='public'"):
            dtensor.repair(apart)
        assert dtensor.repair(apart, method="public").repaired == ["apart"]
        assert dtensor.verify(apart).state == "OK"
        assert "Python" in C.read(apart).impl.keys
    other_shape = ordinary(cls, torch.zeros(5), local)
    assert "public" not in dtensor.verify(other_shape).findings[0].fix
    with pytest.raises(tp.RepairRefused, match="another shape than the body"):
        dtensor.repair(other_shape, method="public")


def test_a_body_that_lost_its_key():
    for cls, made in ((Dispatching, ordinary(Dispatching, torch.ones(4), torch.ones(4))),
                      (DispatchingSlot, wrapped(DispatchingSlot, (8,), torch.ones(4)))):  # fmt: skip
        local = made._local_tensor
        torch._C._swap_tensor_impl(made, local.detach())
        found = dtensor.verify(made)
        assert (found.state, found.layers.wrapper) == ("NO_PYTHON_KEY", cls is DispatchingSlot)
        for method, reason in (("impl", "Python key of its body"), ("public", "global shape was lost")):
            with pytest.raises(tp.RepairRefused, match=reason):
                dtensor.repair(made, method=method)


@pytest.mark.parametrize("method", ["impl", "public"])
def test_a_slot_alone_makes_no_wrapper(method):
    local = torch.ones(4)
    assert dtensor.verify(ordinary(Slot, local, local)).state == "OK"
    apart = ordinary(Slot, torch.empty(4, device="meta"), local)
    assert dtensor.verify(apart).state == "BODY_META"

    assert dtensor.repair(apart, method=method).repaired == ["apart"]

    assert dtensor.verify(apart).state == "OK"


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_devices_alone_tell_of_a_wrapper_in_a_wrapper(single_process_group):
    mesh = init_device_mesh("cpu", (1,))
    local = TwoTensor(torch.ones(4), torch.ones(4))

    assert dtensor.verify(DTensor.from_local(local, mesh, [Shard(0)])).state == "OK"
    for kept in (local, torch.ones(4).to_sparse(), torch.ones(2, 2).to_sparse_csr(), torch.ones(4).to_mkldnn()):
        weight = torchs_own(kept)
        found = dtensor.verify(weight)
        assert (found.state, found.findings[0].code) == ("BODY_META", "TP410")
        assert dtensor.repair(weight, method="public").repaired == ["weight"]
        assert (dtensor.verify(weight).state, str(weight.device)) == ("OK", "cpu")
    on_meta = TwoTensor(torch.empty(4, device="meta"), torch.empty(4, device="meta"))
    assert dtensor.verify(torchs_own(on_meta)).state == "PENDING"


def test_a_local_tensor_that_the_placements_rule_out(single_process_group):
    mesh = init_device_mesh("cpu", (1,))
    weight = distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])
    fitting = weight._local_tensor
    # On several ranks a shard is smaller, down to nothing.
    for local in (fitting, torch.ones(3, 6), torch.ones(0, 6)):
        weight._local_tensor = local
        assert dtensor.verify(weight).state == "OK"

    for local in (torch.ones(7), torch.ones(5, 6), torch.ones(4, 5), torch.ones(4, 6, 1)):
        weight._local_tensor = local
        found = dtensor.verify(weight)
        assert (found.state, [one.code for one in found.findings]) == ("SHAPE", ["TP414"])
        assert f"shape {list(local.shape)} is no part of a DTensor of [4, 6]" in found.findings[0].headline
        (plan,) = dtensor.repair(weight, method="public").plans
        assert plan.outcome == "unchanged"
        assert [one.reason for one in plan.checks if one.result == "reported"] == [
            "SHAPE alone is not what a body is exchanged for: the finding on it says what puts it right"
        ]

    left = torchs_own(torch.ones(5))
    assert dtensor.verify(left).states[:2] == ("BODY_META", "SHAPE")
    with pytest.raises(tp.RepairRefused, match=r"\[5\] is no part of \[4\], \(Shard\(dim=0\),\)"):
        dtensor.repair(left, method="public")


def test_a_parameter_that_is_still_to_be_shaped():
    model = nn.Module()
    model.one = nn.parameter.UninitializedParameter()
    model.one._local_tensor = torch.ones(4)
    model.register_parameter("two", None)
    model._parameters["two"] = over(torch.empty(4, device="meta"), nn.parameter.UninitializedParameter())

    assert dtensor.verify(model).states["one"] == "SHAPE"
    assert "that is still to come" in str(dtensor.verify(model))
    assert {one.code for one in tp.check(model).findings} >= {"TP414"}
    assert tp.audit_device_consistency(model).findings
    assert not dtensor.repair(model, partial=True).repaired


def test_one_device_by_two_names():
    assert dtensor.verify(wrapped(DispatchingSlot, (4,), torch.ones(4), "cpu:0")).state == "OK"


def test_a_wrapper_may_stand_for_another_type_than_its_shard_of_bytes():
    def weight(dtype: torch.dtype, local: torch.Tensor) -> str:
        made = torch.Tensor._make_wrapper_subclass(DispatchingSlot, (4,), dtype=dtype)
        return dtensor.verify(with_local(made, local)).state

    assert weight(torch.bfloat16, torch.ones(4, dtype=torch.int8)) == "OK"
    assert weight(torch.bfloat16, torch.ones(4).to(torch.float8_e4m3fn)) == "OK"
    assert weight(torch.bfloat16, torch.ones(4)) == "DTYPE"
    assert weight(torch.int32, torch.ones(4, dtype=torch.int8)) == "DTYPE"


def test_one_cause_has_one_reason():
    itself = broken()
    itself._local_tensor = itself
    conjugate = over(torch.empty(4, device="meta", dtype=torch.complex64), torch.ones(4, dtype=torch.complex64).conj())

    for tensor, name in ((itself, "local-not-body"), (conjugate, "conjugate-negative")):
        with pytest.raises(tp.RepairRefused) as refused:
            dtensor.repair(tensor)
        assert [reason.name for reason in refused.value.reasons] == [name]
