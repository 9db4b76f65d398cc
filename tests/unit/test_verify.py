"""Focused probes: verify_data_ptr_consistency, inspect_data_ptr, inspect_storage_device."""

from __future__ import annotations

import json

import pytest
import torch

import tensorplay as tp
from tensorplay._native import C
from tests import helpers


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(4, 6)[1:, ::2],
        lambda: torch.ones(3).expand(4, 3),
        helpers.numpy_tensor,
        helpers.inference,
        lambda: torch.zeros(5)[5:],
        lambda: torch._lazy_clone(torch.ones(3)),
    ],
)
def test_consistent_tensor_is_true_and_shows_its_equation(make):
    verdict = tp.verify_data_ptr_consistency(make())

    assert verdict
    assert verdict.ok is True
    assert "storage pointer + offset x itemsize = data pointer" in verdict.reasons[0]
    assert json.loads(verdict.to_json())["ok"] is True


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: helpers.fake("cuda"),
        helpers.symbolic_fake,
        lambda: helpers.Wrapper(torch.ones(3)),
        lambda: torch.ones(2, 2).to_mkldnn(),
    ],
)
def test_kind_without_memory_has_nothing_to_check_and_says_so(make):
    verdict = tp.verify_data_ptr_consistency(make(), strict=True)

    assert verdict
    assert verdict.reasons[0].startswith("nothing to check")


def test_released_storage_is_inconsistent():
    view, _ = helpers.released()

    verdict = tp.verify_data_ptr_consistency(view)

    assert not verdict
    assert verdict.reasons == ("the last byte reached is number 23, the storage has 0 B",)
    assert [finding.code for finding in verdict.findings] == ["TP102"]
    assert "not consistent" in str(verdict)


def test_null_pointer_with_bytes_is_inconsistent():
    verdict = tp.verify_data_ptr_consistency(helpers.null_pointer())

    assert not verdict
    assert verdict.reasons == ("the pointer is null, the storage says it has 16 B",)
    assert [finding.code for finding in verdict.findings] == ["TP103"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensor_over_a_shrunk_storage_is_inconsistent():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    assert tp.verify_data_ptr_consistency(nested).reasons == ("bytes 0 to 71 are inside the storage of 72 B",)
    nested.untyped_storage().resize_(16)

    assert tp.verify_data_ptr_consistency(nested).reasons == (
        "the last byte reached is number 71, the storage has 16 B",
    )


def test_strict_raises_the_reason():
    view, _ = helpers.released()

    with pytest.raises(tp.InconsistentTensor, match="the storage has 0 B"):
        tp.verify_data_ptr_consistency(view, strict=True)


def test_data_pointer_is_the_impl_s_own_answer():
    x = torch.ones(4, 6)[1:]

    assert C.impl_data_address(x) == x.data_ptr()


@pytest.mark.parametrize("probe", [tp.inspect_data_ptr, tp.inspect_storage_device, tp.verify_data_ptr_consistency])
@pytest.mark.parametrize("thing", [3, [torch.ones(1)], None])
def test_what_is_no_tensor_is_refused_in_one_line(probe, thing):
    with pytest.raises(TypeError, match=r"takes a torch.Tensor, got \w+$"):
        probe(thing)


def test_data_ptr_report_shows_the_data_layer_alone(capsys):
    x = torch.ones(4)[1:]

    report = tp.inspect_data_ptr(x)
    text = capsys.readouterr().err

    assert hex(x.untyped_storage().data_ptr()) in text
    assert hex(x.data_ptr()) in text
    assert "use_count" not in text
    assert report.records[0].data.data_ptr == x.data_ptr()


def test_storage_device_report_shows_the_four_facts(capsys):
    report = tp.inspect_storage_device(helpers.key_set_of_another_device())
    text = capsys.readouterr().err

    for word in ("impl", "key set", "DataPtr", "allocator"):
        assert word in text
    assert [finding.code for finding in report.findings] == ["TP101"]
