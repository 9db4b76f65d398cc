"""Faults of DTensors, as people reported them in public, each with its near-identical healthy twin."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import tensorplay as tp

# "got mixed torch.Tensor and DTensor": the parameters were distributed, one mask was not.


class Masked(nn.Module):
    def __init__(self, mesh, mask_too: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Shard(0)], run_check=False))
        mask = torch.ones(4, 4)
        self.register_buffer("mask", DTensor.from_local(mask, mesh, [Replicate()]) if mask_too else mask)

    def forward(self) -> torch.Tensor:
        return self.w * self.mask


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize("mask_too", [False, True])
def test_a_mask_is_not_distributed(mask_too):
    model = Masked(init_device_mesh("cpu", (1,)), mask_too)

    report = tp.check({"model": model})

    if mask_too:
        assert not report.findings
        model()
        return
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor"):
        model()
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.where.name) == ("TP407", "warning", "model.mask")
    assert finding.headline == "w is a DTensor Shard(0), mask a plain Tensor: distribute mask"
    assert finding.evidence["kinds"] == {"w": "DTensor", "mask": "Tensor"}
    assert finding.evidence["placements"] == {"w": str(model.w.placements)}
    assert finding.evidence["devices"] == ["cpu"]
    assert not tp.audit_device_consistency(model).findings
    assert "distribute_tensor(mask, mesh, [Replicate()])" in finding.fix


# The local shard was materialised, and the DTensor around it is still on meta.


@pytest.mark.parametrize("mended", [False, True])
def test_the_body_of_a_dtensor_is_left_on_meta(single_process_group, mended):
    mesh = init_device_mesh("cpu", (1,))
    local = torch.empty(2, 3, device="meta")
    weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    number = id(weight)
    weight._local_tensor = torch.zeros(2, 3)
    if mended:
        tp.dtensor.repair(weight, method="public")

    found = tp.dtensor.verify(weight)

    assert id(weight) == number
    if mended:
        assert (found.state, found.findings) == ("OK", ())
        assert (str(weight.device), weight.data_ptr()) == ("cpu", 0)
        return
    assert found.state == "BODY_META"
    (finding,) = found.findings
    assert finding.headline == "outer TensorImpl device meta, local tensor device cpu: inconsistent"
    assert (finding.evidence["outer_device"], finding.evidence["local_device"]) == ("meta", "cpu")
    assert "torch.utils.swap_tensors(p, donor)" in finding.fix
    assert [one.code for one in tp.check({"weight": weight}).findings] == ["TP410"]


# The shard of a rank without elements looks like the one on meta that it replaced: both pointers are 0.


@pytest.mark.parametrize("rows", [0, 1])
def test_an_empty_shard_beside_the_one_on_meta(rows):
    old, new = torch.empty(rows, 4, device="meta"), torch.empty(rows, 4)

    report = tp.compare(old, new)

    assert report.document.comparison.same_storage is False
    assert (old.data_ptr() == new.data_ptr()) is (rows == 0)
    found = [one for one in report.findings if one.code == "TP112"]
    assert len(found) == (rows == 0)
    if found:
        assert found[0].severity == "info"
        assert found[0].headline == "not the same storage, though both pointers are 0: devices meta and cpu"
        assert (found[0].evidence["really_same"], found[0].evidence["old_device"]) == (False, "meta")
