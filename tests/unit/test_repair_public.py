"""dtensor.repair(method="public"): a whole DTensor in the place of another, and every way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay import dtensor
from tensorplay._native import C
from tensorplay.bodies import bodies_of
from tests.dtensors import broken, native_facts, torchs_own, unwrapped, wrapper


def test_torchs_own_dtensor_is_repaired_by_the_public_way(single_process_group):
    weight = torchs_own(torch.ones(4))
    number, spec, local = id(weight), weight._spec, weight._local_tensor

    with pytest.raises(tp.RepairRefused, match="use method='public'"):
        dtensor.repair(weight)
    report = dtensor.repair(weight, method="public")

    assert report.repaired == ["weight"]
    assert (id(weight), weight._spec, weight._local_tensor) == (number, spec, local)
    assert isinstance(weight, nn.Parameter)
    assert (str(weight.device), weight.requires_grad, dtensor.verify(weight).state) == ("cpu", True, "OK")
    (weight * 2).sum().backward()
    assert torch.equal(weight.grad.to_local(), torch.full((4,), 2.0))


def test_the_public_way_for_other_classes():
    for tensor in (broken(), wrapper("meta", torch.ones(4))):
        number = id(tensor)
        dtensor.repair(tensor, method="public")
        assert (id(tensor), dtensor.verify(tensor).state) == (number, "OK")


PUBLIC_CHECKS = ["donor", "exchange", "object", "slots", "registrations", "new-impl", "old-impl", "shape", "dtype",
                 "device", "keys", "leaf", "requires-grad", "storage", "version", "use-counts", "state"]  # fmt: skip


@pytest.mark.parametrize("failing", PUBLIC_CHECKS)
def test_a_failing_check_takes_the_public_exchange_back(single_process_group, failing):
    for tensor in (broken(), wrapper("meta", torch.ones(4)), torchs_own(torch.ones(4))):
        before = native_facts(tensor)
        (body,) = bodies_of([("tensor", tensor)])
        attempt = dtensor.Attempt(body, dtensor.Options("public"), dtensor.Places())
        attempt.apply(failing)
        assert attempt.plan.outcome == ("refused" if failing in ("donor", "exchange") else "taken back")
        after = native_facts(tensor)
        assert after[:2] == before[:2]
        assert after[2:] == before[2:]


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("attribute", ["__class__", "__dict__", "_local_tensor", "mesh", "name"])
def test_a_class_that_refuses_an_attribute_stays_as_it_is(attribute, error):
    class Strict(torch.Tensor):
        __slots__ = ["_local_tensor", "mesh", "name"]
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
        refused = ""

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

        def __setattr__(self, name: str, value: Any) -> None:
            if name == self.refused:
                raise error("read only")
            super().__setattr__(name, value)

    tensor = torch.Tensor._make_wrapper_subclass(Strict, (4,), device="meta")
    tensor._local_tensor, tensor.mesh, tensor.name, tensor.more = torch.ones(4), object(), "w", object()
    own, slots = tensor.__dict__, (tensor._local_tensor, tensor.mesh, tensor.name)
    before = native_facts(tensor)
    Strict.refused = attribute

    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            dtensor.repair(tensor, method="public")
    else:
        with pytest.raises(tp.RepairRefused, match=f"exchange was refused: {error.__name__}: read only"):
            dtensor.repair(tensor, method="public")

    assert C.instance_dict(tensor) is own
    assert all(one is other for one, other in zip((tensor._local_tensor, tensor.mesh, tensor.name), slots, strict=True))
    assert native_facts(tensor) == before
    Strict.refused = ""
    dtensor.repair(tensor, method="public")
    assert (dtensor.verify(tensor).state, C.instance_dict(tensor) is own) == ("OK", True)


@pytest.mark.parametrize("policy", ["dispatch_device", "dispatch_layout", "dispatch_sizes_strides_policy"])
def test_a_wrapper_that_answers_for_itself_is_not_replaced_by_one_that_does_not(policy):
    class Answering(torch.Tensor):
        __slots__ = ["_local_tensor"]

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    value = "sizes" if policy.endswith("policy") else True
    tensor = torch.Tensor._make_wrapper_subclass(Answering, (4,), device="meta", **{policy: value})
    Answering._local_tensor.__set__(tensor, torch.ones(4))
    form = C.dispatch_form(tensor)
    assert any(form[1:])

    with pytest.raises(tp.RepairRefused, match="after the exchange keys was not as it has to be"):
        dtensor.repair(tensor, method="public")

    assert C.dispatch_form(tensor) == form


def test_a_global_shape_that_is_lost_is_not_guessed(single_process_group):
    tensor = unwrapped(torch.ones(4), torch.ones(4))
    with pytest.raises(tp.RepairRefused, match="global shape was lost with the Python key"):
        dtensor.repair(tensor, method="public")
    assert dtensor.verify(tensor).state == "NO_PYTHON_KEY"

    own = torchs_own(torch.ones(4))
    torch._C._swap_tensor_impl(own, torch.ones(2))  # its spec still has the global shape
    assert dtensor.verify(own).state == "NO_PYTHON_KEY"
    assert dtensor.repair(own, method="public").repaired == ["own"]
    assert (own.shape, dtensor.verify(own).state) == ((4,), "OK")


def test_a_batch_is_taken_back_where_one_refuses(single_process_group):
    class Strict(torch.Tensor):
        __slots__ = ["_local_tensor"]

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

        def __setattr__(self, name: str, value: Any) -> None:
            raise AttributeError("read only")

    strict = torch.Tensor._make_wrapper_subclass(Strict, (4,), device="meta")
    Strict._local_tensor.__set__(strict, torch.ones(4))
    model = nn.Module()
    model.register_parameter("first", torchs_own(torch.ones(4)))
    model._parameters["second"] = strict
    own = model.first.__dict__
    before = native_facts(model.first)

    with pytest.raises(tp.RepairRefused, match="second: the exchange was refused"):
        dtensor.repair(model, method="public")

    assert (native_facts(model.first), C.instance_dict(model.first) is own) == (before, True)
    assert dtensor.repair(model, method="public", partial=True).repaired == ["first"]
    assert C.instance_dict(model.first) is own
