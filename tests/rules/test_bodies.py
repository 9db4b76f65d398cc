"""Rules on DTensors: random positives and healthy neighbours for each."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tensorplay as tp
from tests import hyperparallel as hp
from tests.dtensors import Sharded, Wrapped, over, unwrapped

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64]


class Form:
    """A random geometry over a storage with room around it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.dtype = self.random.choice(DTYPES)
        self.shape = [self.random.randint(2, 4) for _ in range(self.random.randint(1, 3))]
        order = self.random.sample(range(len(self.shape)), len(self.shape))
        step = self.random.randint(1, 2)
        self.stride = [0] * len(self.shape)
        for dim in order:
            self.stride[dim] = step
            step *= self.shape[dim]
        self.offset = self.random.randint(0, 3)
        self.room = step + self.offset + 8

    def tensor(self, device: str = "cpu", *, dtype: torch.dtype | None = None, more: int = 0) -> torch.Tensor:
        base = torch.ones(self.room, dtype=dtype or self.dtype, device=device)
        return base.as_strided(self.shape, self.stride, self.offset + more).detach()

    def of(self, base: torch.Tensor, more: int = 0) -> torch.Tensor:
        """The same geometry in the storage of another one."""
        return base.detach().as_strided(self.shape, self.stride, self.offset + more).detach()

    def wrapper(self, device: str, local: Any, dtype: torch.dtype | None = None) -> Any:
        tensor = torch.Tensor._make_wrapper_subclass(Wrapped, self.shape, dtype=dtype or self.dtype, device=device)
        tensor._local_tensor = local
        return tensor


def released(form: Form) -> Any:
    local = form.tensor()
    tensor = over(local, local)
    local.untyped_storage().resize_(0)
    return tensor


def one_memory(form: Form) -> Any:
    local = form.tensor()
    whole = local.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), local.device, whole.nbytes())
    twice = torch.empty(0, dtype=form.dtype).set_(storage, form.offset, form.shape, form.stride)
    tensor = over(twice, local)
    tensor.kept = local
    return tensor


def computed(form: Form) -> Any:
    local = form.tensor().requires_grad_() * 1
    tensor = over(local.detach(), local)
    tensor._is_param = True
    return tensor


def transposed(form: Form) -> Any:
    base = torch.ones(5, 5, dtype=form.dtype)
    return over(base[:4, :4], base.t()[:4, :4])


POSITIVES: dict[str, list[Callable[[Form], Any]]] = {
    "TP410": [
        lambda form: over(form.tensor("meta"), form.tensor()),
        lambda form: form.wrapper("meta", form.tensor()),
    ],
    "TP411": [
        lambda form: over(form.tensor(), form.tensor("meta")),
        lambda form: form.wrapper("cpu", form.tensor("meta")),
    ],
    "TP412": [lambda form: over(form.tensor(), form.tensor())],
    "TP413": [one_memory],
    "TP414": [
        lambda form: (lambda x: over(form.of(x, 1), x))(form.tensor()),
        lambda form: (lambda x: over(x, x[:1]))(form.tensor()),
        transposed,
    ],
    "TP415": [
        lambda form: over(form.tensor(dtype=torch.int8), form.tensor()),
        lambda form: form.wrapper("cpu", form.tensor(), torch.int8),
    ],
    "TP419": [lambda form: torch.Tensor._make_subclass(Sharded, form.tensor())],
    "TP420": [lambda form: (lambda x: over(x.data, x))(form.tensor())],
    "TP421": [computed],
    "TP422": [lambda form: (lambda x: over(x, x, True))(form.tensor())],
    "TP423": [lambda form: unwrapped(form.tensor(), form.tensor())],
}
"""TP416 is told by check() as TP102; TP417 and TP418 need a framework: below."""


def healthy(form: Form) -> list[Any]:
    """What differs from each of them in the one fact."""
    local = form.tensor()
    grad = form.tensor().requires_grad_()
    parameter = over(grad.detach(), grad)
    parameter._is_param = True
    meta = form.tensor("meta")
    empty = torch.ones(0, dtype=form.dtype)
    return [
        over(local, local),
        over(local, local.detach()),
        parameter,
        over(meta, meta),
        over(form.tensor("meta"), form.tensor("meta")),
        over(empty, empty),
        form.wrapper("cpu", form.tensor()),
        form.wrapper("meta", form.tensor("meta")),
        form.wrapper("cpu", form.tensor()[:1]),
    ]


@pytest.mark.parametrize("code", POSITIVES)
def test_random_positives(code):
    for number, make in enumerate(POSITIVES[code]):
        for seed in range(25):
            found = tp.check({"x": make(Form(100 * number + seed))}).findings
            assert [one.code for one in found if one.severity != "info" or one.code == code] == [code], seed


def test_released_memory_is_told_once():
    for seed in range(10):
        tensor = released(Form(seed))
        assert [one.code for one in tp.dtensor.verify(tensor).findings] == ["TP416"]
        assert {one.code for one in tp.check({"x": tensor}).findings if one.severity != "info"} == {"TP102"}


def test_healthy_neighbours():
    for seed in range(60):
        for tensor in healthy(Form(seed)):
            found = tp.check({"x": tensor}).findings
            assert [one.code for one in found if one.severity != "info"] == []
            assert tp.dtensor.verify(tensor)


def test_models_of_random_states_have_one_finding_a_cause():
    for seed in range(20):
        rng = random.Random(seed)
        module = nn.ParameterDict()
        expected = {}
        for number in range(8):
            code = rng.choice(["TP410", "TP411", "TP412", "TP420", None])
            form = Form(1000 * seed + number)
            tensor = POSITIVES[code][0](form) if code else healthy(form)[0]
            module._parameters[f"p{number}"] = tensor
            expected.setdefault(code, []).append(f"p{number}")
        found = tp.dtensor.verify(module).findings
        assert {one.code: one.evidence["tensors"] for one in found} == {
            code: names for code, names in expected.items() if code
        }


def test_frameworks_before_and_after_a_step():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    hp.fully_shard(model, hp.Mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loud():
        found = [*tp.check({"model": model, "optimizer": optimizer}).findings, *tp.dtensor.verify(model).findings]
        return [one.code for one in found if one.severity != "info"]

    assert loud() == []
    for _ in range(2):
        output = model(torch.ones(1, 4))
        assert loud() == []
        output.sum().backward()
        assert loud() == []
        optimizer.step()
        optimizer.zero_grad()
        assert loud() == []
