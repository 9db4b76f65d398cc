"""Device facts that disagree, on a second device: each way that Python has, and those that only C++ has."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorplay as tp
from tests.extensions import built
from tests.rules.test_false_alarms import MODELS

pytestmark = [pytest.mark.usefixtures("npu")]


def alarms(report: Any) -> list[str]:
    return [finding.code for finding in report.findings if finding.severity != "info"]


@pytest.fixture(scope="module")
def faults() -> Any:
    """C++ that brings device facts to disagree."""
    return built("device_faults", [Path(__file__).parent.parent / "extensions" / "device_faults.cpp"])


# -- what Python can do -------------------------------------------------------------------------------------------


def test_tensors_and_models_that_are_all_there_are_silent():
    x = torch.ones(4, device="npu:1")
    for obj in (x, x[1:], x.view(2, 2).t(), nn.Linear(2, 2).to("npu"), [x, x.cpu(), x.to("npu:0")]):
        assert alarms(tp.check({"obj": obj})) == []
    audit = tp.audit_device_consistency(nn.Linear(2, 2).to("npu:1"))
    assert [(row.role, row.device, row.tensors) for row in audit.placement.rows] == [("parameter", "npu:1", 2)]
    assert audit.placement.asked == 2  # the driver was asked whose the memory is, and it agreed


def test_tp404_after_a_move_to_a_real_device():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].scales = [torch.ones(2), torch.ones(2)]
    model.to("npu")
    (finding,) = tp.audit_device_consistency(model).findings
    assert (finding.code, finding.where.name) == ("TP404", "model.1.scales[0]")
    assert finding.evidence["expected"] == ["npu:0"]
    model[1].forward = lambda x: x + model[1].scales[0]  # type: ignore[method-assign]
    x = torch.ones(1, 2, device="npu")
    with pytest.raises(RuntimeError, match="same device") as raised, tp.audit_device_consistency(model):
        model(x)
    assert "TP404 model.1.scales[0]" in str(raised.value)


def test_a_model_spread_over_devices_is_silent_and_a_module_of_two_is_not():
    model = nn.Sequential(nn.Linear(2, 2).to("npu:0"), nn.BatchNorm1d(2).to("npu:1"), nn.Linear(2, 2))
    assert alarms(tp.audit_device_consistency(model)) == []
    model[0].table = torch.ones(2, device="npu:1")
    (finding,) = tp.audit_device_consistency(model).findings
    assert (finding.code, finding.evidence["expected"]) == ("TP404", ["npu:0"])
    del model[0].table
    model[1].running_mean = torch.zeros(2)
    (mixed,) = tp.audit_device_consistency(model).findings
    assert (mixed.code, mixed.where.name, mixed.evidence["devices"]) == ("TP408", "model.1", ["cpu", "npu:1"])


def test_tp406_after_a_move_that_kept_the_parameters():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.to("npu")
    (finding,) = tp.audit_device_consistency(model, optimizer).findings
    assert (finding.code, finding.evidence["param_device"]) == ("TP406", "npu:0")
    optimizer.load_state_dict(optimizer.state_dict())  # what the fix says
    assert alarms(tp.audit_device_consistency(model, optimizer)) == []
    model(torch.ones(1, 2, device="npu")).sum().backward()
    optimizer.step()


def test_tp101_a_gradient_beside_its_parameter():
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    assert alarms(tp.check({"weight": weight})) == []
    weight.grad.data = torch.ones(4, device="npu")
    (finding,) = tp.check({"weight": weight}).findings
    assert (finding.code, finding.where.name, finding.evidence["device"]) == ("TP101", "weight.grad", "npu:0")


def test_tp101_a_view_of_what_its_base_was():
    base = torch.ones(4)
    view = base[:2]
    assert alarms(tp.check({"view": view})) == []
    base.data = torch.zeros(4, device="npu")
    (finding,) = tp.check({"view": view}).findings
    assert (finding.code, finding.evidence["role"], finding.evidence["device"]) == ("TP101", "base", "npu:0")


def labelled(source: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor over another one's memory that says it is somewhere."""
    storage = torch._C._construct_storage_from_data_pointer(source.data_ptr(), torch.device(device), source.nbytes)
    return torch.empty(0, device=device).set_(storage, 0, source.shape, source.stride())


@pytest.mark.parametrize(
    ("real", "claimed", "driver", "owner"),
    [("cpu", "npu:0", "denied", None), ("npu:1", "npu:0", "answered", "npu:1"), ("npu:1", "cpu", "answered", "npu:1")],
)
def test_tp110_memory_of_another_device(real, claimed, driver, owner):
    source = torch.ones(4, device=real)
    (finding,) = (one for one in tp.check({"x": labelled(source, claimed)}).findings if one.severity != "info")
    assert finding.code == "TP110"
    assert (finding.evidence["driver"], finding.evidence["owner_device"]) == (driver, owner)
    assert finding.evidence["data_device"] == claimed
    assert alarms(tp.check({"x": labelled(source, real)})) == []


# -- what only C++ can do -----------------------------------------------------------------------------------------


def test_a_label_that_an_extension_changed(faults):
    x = torch.ones(4, device="npu:0")
    faults.relabel(x, "npu:1")
    found = tp.check({"x": x}).findings
    assert {finding.code for finding in found if finding.severity != "info"} == {"TP101", "TP110"}
    conflicts = next(finding for finding in found if finding.code == "TP101").evidence["conflicts"]
    assert conflicts == ["the impl says npu:0, its DataPtr npu:1"]
    faults.relabel(x, "npu:0")
    assert alarms(tp.check({"x": x})) == []


def test_memory_that_an_extension_put_under_another_impl(faults):
    x, source = torch.ones(4, device="npu:0"), torch.ones(4)
    faults.put_memory_of(x, source)
    found = {finding.code: finding for finding in tp.check({"x": x}).findings}
    assert "the impl says npu:0, its DataPtr cpu" in found["TP101"].evidence["conflicts"]
    y, there = torch.ones(4, device="npu:0"), torch.ones(4, device="npu:1")
    faults.put_memory_of(y, there)
    assert "the impl says npu:0, its DataPtr npu:1" in tp.check({"y": y}).findings[0].evidence["conflicts"]


def test_a_blob_with_a_target_of_its_own(faults):
    source = torch.ones(4)
    x = faults.claim(source, "npu:1")
    (finding,) = (one for one in tp.check({"x": x}).findings if one.severity != "info")
    assert (finding.code, finding.evidence["driver"]) == ("TP110", "denied")
    there = torch.ones(4, device="npu:1")
    assert alarms(tp.check({"x": faults.claim(there, "npu:1")})) == []


# -- the whole ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_each_way_is_made_and_found():
    report = tp.reproduce_device_mismatch(setup="from tests.npu import load; load()")
    shown = {one.name: one for one in report.mismatches}
    assert {name: one.error for name, one in shown.items() if one.error} == {}
    codes = {name: set(one.codes) - {"TP104"} for name, one in shown.items()}
    assert codes == {
        "local": {"TP410"},
        "gradient": {"TP101"},
        "state": {"TP406"},
        "view": {"TP101"},
        "keys": {"TP101"},
        "dlpack": {"TP110"},
        "storage": {"TP110"},
        "fake": set(),
        "wrapper": set(),
    }
    assert {name for name, one in shown.items() if one.by_design} == {"fake", "wrapper"}
    assert "Expected all tensors to be on the same device" in shown["state"].effect
    assert "Tensor._set_device does not exist" in str(report)
    assert not hasattr(torch.Tensor, "_set_device")
    assert len(json.loads(report.to_json())["mismatches"]) == 9


@pytest.mark.parametrize("name", MODELS)
def test_stock_models_are_silent_on_the_npu(name):
    build, data = MODELS[name]
    model = build().to("npu")
    optimizer = torch.optim.Adam(model.parameters()) if list(model.parameters()) else None
    assert alarms(tp.audit_device_consistency(model, optimizer)) == []
    batch = data().to("npu")
    audit = tp.audit_device_consistency(model, optimizer)
    # A layer that PyTorch has no kernel for there; one whose forward makes indices on the CPU.
    with contextlib.suppress(NotImplementedError, RuntimeError), audit:
        model(batch)
    assert alarms(audit) == []
    assert all(row.device in ("npu:0", "cpu") for row in audit.placement.rows)
