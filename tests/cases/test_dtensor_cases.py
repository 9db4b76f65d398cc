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
