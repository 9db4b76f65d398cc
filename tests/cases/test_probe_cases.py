"""Faults people reported in public, each with its near-identical healthy twin, each through the call a person makes."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.utils._expanded_weights.expanded_weights_impl import ExpandedWeight

import tensorplay as tp
from tests import helpers


def loud(report: tp.Report) -> list[str]:
    return [finding.code for finding in report.findings if finding.severity != "info"]


# A storage resized to 0 while views live on (FSDP reshards so): reading a view ends the process.


def test_view_of_a_released_storage_is_found():
    view, flat = helpers.released()

    report = tp.check({"view": view, "flat": flat})

    assert loud(report) == ["TP102"]
    evidence = report.findings[0].evidence
    assert (evidence["storage_nbytes"], evidence["needed_nbytes"], evidence["data_ptr"]) == (0, 24, 8)
    assert "out of bounds" in report.findings[0].subject


def test_view_of_a_refilled_storage_is_healthy():
    view, flat = helpers.released()
    flat.untyped_storage().resize_(32)
    flat.copy_(torch.arange(8.0))

    report = tp.check({"view": view, "flat": flat})

    assert report.findings == ()
    assert report.records[0].extent.needed_nbytes == 24


# A subclass whose attributes raise in Python: the impl still says what it is.


@pytest.mark.parametrize("wrapped", [True, False])
def test_subclass_whose_properties_raise_is_read_natively(wrapped):
    parameter = torch.ones(3, 4, requires_grad=True)
    x = ExpandedWeight(parameter, 3, "sum") if wrapped else parameter
    if wrapped:
        with pytest.raises(RuntimeError):
            _ = x.is_cpu

    report = tp.inspect(x, quiet=True)

    record = report.records[0]
    assert record.python.type == ("ExpandedWeight" if wrapped else "Tensor")
    assert (record.impl.device, record.impl.shape, record.impl.dtype) == ("cpu", (3, 4), "float32")
    assert record.extent.nbytes == 48
    assert record.data.pointer != 0
    assert loud(report) == []
    assert '"type":"ExpandedWeight"' in report.to_json() or not wrapped


# data_ptr() inside vmap: the tensor is a wrapper without storage.


def test_tensor_inside_vmap_has_no_storage_and_shows_what_it_wraps():
    reports = []
    torch.func.vmap(lambda row: (reports.append(tp.inspect(row, quiet=True)), row * 1)[1])(torch.ones(2, 3))

    (report,) = reports
    record = report.records[0]
    assert (record.kind, record.impl.shape, record.storage) == ("batched", (3,), None)
    assert record.inner[0].record.impl.shape == (2, 3)
    assert record.inner[0].record.extent.nbytes == 24
    assert loud(report) == []
    assert "this kind has no storage of its own" in str(report)


def test_row_outside_vmap_is_an_ordinary_tensor():
    record = tp.inspect(torch.ones(2, 3)[0], quiet=True).records[0]

    assert (record.kind, record.inner) == ("strided", ())


# A kernel indexes data_ptr() of a permuted image as if it were dense row-major.


@pytest.mark.parametrize("repaired", [False, True])
def test_permuted_image_is_said_not_to_be_row_major(repaired):
    image = torch.arange(24.0).view(2, 4, 3).permute(2, 0, 1)
    image = image.contiguous() if repaired else image

    report = tp.inspect(image, quiet=True)

    extent = report.records[0].extent
    assert extent.contiguous is repaired
    assert report.records[0].impl.stride == ((8, 4, 1) if repaired else (1, 12, 3))
    assert extent.non_overlapping_and_dense
    assert ("not row-major" in str(report)) is not repaired
    assert loud(report) == []


# The bytes behind x.conj() are not conjugated.


@pytest.mark.parametrize("resolved", [False, True])
def test_conjugate_bit_is_stated(resolved):
    z = torch.tensor([1 + 2j])
    c = z.conj().resolve_conj() if resolved else z.conj()

    report = tp.inspect(c, quiet=True)
    imaginary = tp.inspect(c.imag, quiet=True).records[0]

    assert report.records[0].impl.is_conj is not resolved
    assert imaginary.impl.is_neg is not resolved
    shares = report.records[0].storage.address == tp.inspect(z, quiet=True).records[0].storage.address
    assert shares is not resolved
    assert loud(report) == []


# A 0-dim tensor ranks below others in type promotion, and is real memory all the same.


@pytest.mark.parametrize("dims", [0, 1])
def test_zero_dim_tensor_is_real_memory(dims):
    b = torch.tensor([1.0] if dims else 1.0, dtype=torch.float64) * 70000

    report = tp.inspect(b, quiet=True)

    record = report.records[0]
    assert (record.impl.dim, record.extent.nbytes, record.impl.is_wrapped_number) == (dims, 8, False)
    assert record.data.pointer != 0
    assert ("ranks below tensors with dimensions" in report.text(width=200)) is (dims == 0)
    assert json.loads(report.to_json())["records"][0]["impl"]["dim"] == dims
