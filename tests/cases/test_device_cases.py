"""Faults of devices, as people reported them in public, each with its near-identical healthy twin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tensorplay as tp
from tests.helpers import raises

# Registered buffers follow .to(), a plain list of the same buffers does not.


class Net(nn.Module):
    def __init__(self, as_list: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        for number in range(3):
            self.register_buffer(f"b{number}", torch.ones(2) * number)
        if as_list:
            self.items = [self.b0, self.b1, self.b2]


@pytest.mark.parametrize("as_list", [True, False])
def test_a_list_of_buffers_is_left_behind(as_list):
    model = Net(as_list)
    assert not tp.audit_device_consistency(model).findings
    model.to("meta")
    report = tp.audit_device_consistency(model)

    if not as_list:
        assert not report.findings
        return
    assert raises(lambda: [item + buffer for item, buffer in zip(model.items, model.buffers(), strict=True)])
    (finding,) = report.findings
    assert (finding.code, finding.severity, finding.where.name) == ("TP404", "warning", "model.items[0]")
    assert finding.evidence["plain_attr_devices"] == ["cpu", "cpu", "cpu"]
    assert (finding.evidence["left_bytes"], finding.evidence["expected"]) == (24, ["meta"])
    assert finding.evidence["same_shape_as"] == ["b0", "b1", "b2"]
    assert "through a property" in finding.fix


# The model is moved after the first step; Adam's moments stay, and so does `step`, which may.


@pytest.mark.parametrize("carried", [True, False])
def test_the_moments_of_adam_are_left_behind(carried):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)  # the parameters stay the same objects, as on a GPU
    try:
        model.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    if carried:
        for parameter, state in optimizer.state.items():
            state.update({key: value.to(parameter.device) for key, value in state.items() if key != "step"})
    report = tp.audit_device_consistency(model, optimizer)

    assert {state["step"].device.type for state in optimizer.state.values()} == {"cpu"}
    if carried:
        assert not report.findings
        return
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("TP406", "warning")
    assert finding.evidence["wrong_device"] == ["exp_avg", "exp_avg_sq", "exp_avg", "exp_avg_sq"]
    assert finding.evidence["param_device"] == "meta"
    assert "'step' on the CPU is normal" in finding.fix
