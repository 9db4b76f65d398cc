"""Weights on the CPU while the device says cuda: the story as it is told, and as it can really happen.

``docs/explanation/devices.md`` tells the same; what is printed here is compared with what stands there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tensorplay
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "explanation" / "devices.md").read_text(encoding="utf-8")


class Sharded(torch.Tensor):
    """Answers from its local tensor, as some DTensors do."""

    _local_tensor: torch.Tensor

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._local_tensor.device


def test_the_device_says_one_thing_and_the_weights_are_elsewhere(npu):
    # The call of which it is told does not exist.
    assert not hasattr(torch.Tensor, "_set_device")
    assert "`Tensor._set_device` does not exist" in PAGE

    # A label alone cannot be moved: PyTorch refuses to put a storage of another device under a tensor.
    weight = torch.ones(4)
    with pytest.raises(RuntimeError, match="on different device"):
        weight.set_(torch.ones(4, device="npu").untyped_storage())

    # What happens in practice: the model moved, and a part of it did not.
    model: Any = nn.Sequential(nn.Linear(4, 4))
    model[0].scales = [torch.ones(4)]
    model[0].register_forward_hook(lambda module, inputs, output: output * module.scales[0])
    model.to("npu")
    assert next(model.parameters()).device.type == "npu"
    audit = tensorplay.audit_device_consistency(model)
    assert [finding.code for finding in audit.findings] == ["TP404"]
    assert audit.findings[0].where.name == "model.0.scales[0]"

    # PyTorch's own error names neither; within the audit it does.
    batch = torch.ones(1, 4, device="npu")
    with pytest.raises(RuntimeError, match="same device") as raised, audit:
        model(batch)
    assert "TP404 model.0.scales[0]" in str(raised.value)

    # What the finding says to do puts it right.
    scale = model[0].scales.pop()
    model[0].register_buffer("scale", scale.to("npu"), persistent=False)
    model[0].scales = [model[0].scale]
    assert tensorplay.audit_device_consistency(model).findings == ()
    assert model(batch).device.type == "npu"

    # A wrapper that answers `.device` in Python, over a body that is elsewhere.
    sharded = torch.Tensor._make_subclass(Sharded, torch.empty(4, device="meta"))
    sharded._local_tensor = torch.ones(4)
    assert sharded.device.type == "cpu"
    (finding,) = tensorplay.check({"weight": sharded}).findings
    assert f"{finding.code} {finding.headline}" in PAGE

    # All labels say the device, and the bytes are the CPU's: only the driver can tell.
    source = torch.ones(4)
    storage = torch._C._construct_storage_from_data_pointer(source.data_ptr(), torch.device("npu:0"), 16)
    claimed = torch.empty(0, device="npu:0").set_(storage, 0, (4,), (1,))
    assert npu.owner_of(claimed.data_ptr()) is None
    facts = tensorplay.inspect_storage_device(claimed).records[0]
    assert (facts.impl.device, facts.impl.backend, facts.data.device) == ("npu:0", "npu", "npu:0")
    found = {finding.code: finding for finding in tensorplay.check({"weight": claimed}).findings}
    assert found["TP110"].evidence["driver"] == "denied"
