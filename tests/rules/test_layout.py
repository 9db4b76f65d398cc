"""TP108: layout facts, one finding a fact; compare() says where only strides of size-1 dimensions differ."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorplay as tp


def found(objs) -> list[tp.Finding]:
    return [finding for finding in tp.check(objs).findings if finding.code == "TP108"]


def of_pair(a: torch.Tensor, b: torch.Tensor) -> list[tp.Finding]:
    return [finding for finding in tp.compare(a, b).findings if finding.code == "TP108"]


def image(batch: int = 2, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, 4, 5)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: torch.ones(2, 3).t(), "not row-major"),
        (lambda: torch.ones(6)[::2], "not row-major"),
        (lambda: torch.ones(3, 1).expand(3, 4), "not row-major"),
        (lambda: image().to(memory_format=torch.channels_last), "not row-major"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugate or negative bit"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "conjugate or negative bit"),
        (lambda: image(1, 1).to(memory_format=torch.channels_last), "dimensions of size 1"),
    ],
)
def test_fact_is_stated_at_info(make, said):
    findings = found({"x": make()})

    assert [finding.severity for finding in findings if said in finding.headline] == ["info"]
    assert {finding.severity for finding in findings} == {"info"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, 3),
        lambda: torch.ones(2, 3).t().contiguous(),
        lambda: torch.ones(1, 3).t(),  # one row: the same bytes
        lambda: torch.ones(6)[2:],
        lambda: torch.ones(3, dtype=torch.complex64).conj().resolve_conj(),
        lambda: image(1),
        lambda: torch.empty(3, 0).t(),
        lambda: torch.empty(2, 3, device="meta").t(),
        lambda: torch.eye(3).to_sparse().t(),
    ],
)
def test_ordinary_layout_is_silent(make):
    assert found({"x": make()}) == []


def test_one_finding_for_all_tensors_of_a_fact():
    findings = found({"many": [torch.ones(2, 3).t() for _ in range(50)], "z": torch.ones(2, dtype=torch.cfloat).conj()})

    assert len(findings) == 2
    assert len(findings[1].evidence["tensors"]) == 50
    assert findings[1].evidence["stride"] == [1, 3]


def trained(model: torch.nn.Module, x: torch.Tensor) -> dict:
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "x": x, "best": copy.deepcopy(model.state_dict())}


def convolutions() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 4, 1))


def test_model_in_channels_last_is_silent_with_all_that_training_made():
    objs = trained(convolutions().to(memory_format=torch.channels_last), image().to(memory_format=torch.channels_last))

    assert found(objs) == found({"best": objs["best"]}) == []
    assert [f.evidence["tensors"] for f in found({**objs, "t": torch.ones(2, 3).t()})] == [["t"]]
    assert ["hwc"] in [f.evidence["tensors"] for f in found({**objs, "hwc": image()[0].permute(1, 2, 0)})]


def test_volumes_in_channels_last_are_silent_and_images_beside_them_are_not():
    model = torch.nn.Conv3d(3, 8, 2).to(memory_format=torch.channels_last_3d)
    image_last = image().to(memory_format=torch.channels_last)

    assert found(trained(model, torch.randn(2, 3, 4, 4, 4))) == []
    assert [f.evidence["tensors"] for f in found({"model": model, "x": image_last})] == [["x"]]


def test_image_in_channels_last_beside_a_model_that_is_not_is_stated():
    (finding,) = found(trained(convolutions(), image().to(memory_format=torch.channels_last)))

    assert finding.evidence["tensors"] == ["x"]


def test_gradient_and_states_of_a_transposed_parameter_are_not_told_beside_it():
    model = torch.nn.Linear(3, 2, bias=False)
    model.weight = torch.nn.Parameter(torch.randn(3, 2).t())

    (finding,) = found(trained(model, torch.randn(4, 3)))

    assert finding.evidence["tensors"] == ["model.weight"]


def test_batch_of_one_loses_its_format_in_a_reshape():
    q = image(1).to(memory_format=torch.channels_last)
    r = q.reshape(q.shape)

    (finding,) = of_pair(q, r)

    assert finding.severity == "info"
    assert finding.evidence["stride_before"] == [60, 1, 15, 3]
    assert finding.evidence["stride_after"] == [3, 1, 15, 3]
    assert (finding.evidence["same_memory_order"], finding.evidence["same_address"]) == (True, True)


def test_gradient_of_a_1x1_convolution_is_named_as_one():
    convolution = torch.nn.Conv2d(6, 4, 1)
    convolution(torch.ones(2, 6, 5, 5).to(memory_format=torch.channels_last)).sum().backward()
    weight, gradient = convolution.weight, convolution.weight.grad
    weight.grad = gradient.as_strided(gradient.shape, (6, 1, 6, 6))

    (finding,) = of_pair(weight, weight.grad)

    assert (finding.evidence["param_stride"], finding.evidence["grad_stride"]) == ([6, 1, 1, 1], [6, 1, 6, 6])
    assert finding.evidence["same_memory_order"]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (image(), image()),
        (image().to(memory_format=torch.channels_last), image()),
        (torch.ones(1, 3), torch.ones(1, 4)),
        (torch.ones(2, 3), torch.ones(3, 2).t()),
        (torch.ones(3), torch.ones(3, device="meta")),
    ],
)
def test_compare_is_silent_where_strides_are_equal_or_differ_in_more(a, b):
    assert of_pair(a, b) == []


@given(shape=st.lists(st.integers(1, 3), min_size=1, max_size=4), steps=st.lists(st.integers(1, 9), min_size=4))
@settings(deadline=None)
def test_random_strides_of_dimensions_of_size_one(shape, steps):
    x = torch.zeros(*shape)
    stride = [step if size == 1 else own for size, own, step in zip(shape, x.stride(), steps, strict=False)]
    y = x.as_strided(shape, stride)

    assert len(of_pair(x, y)) == (y.stride() != x.stride())
    assert not any("not row-major" in finding.headline for finding in found({"y": y}))


@given(order=st.permutations(range(4)), shape=st.lists(st.integers(1, 3), min_size=4, max_size=4))
@settings(deadline=None)
def test_random_permutations_are_not_row_major_where_pytorch_says_so(order, shape):
    x = torch.zeros(*shape).permute(*order)

    assert any("not row-major" in f.headline for f in found({"x": x})) == (not x.is_contiguous())
