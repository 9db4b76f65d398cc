"""materialize_audit(): what got values, what did not, and what was lost on the way."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.materialize import MaterializeAudit


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(5), persistent=False)


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


def found(report) -> list[tuple[str, str, object]]:
    return [(finding.code, finding.severity, finding.where.name) for finding in report.findings]


def materialized(model: Net) -> None:
    model.to_empty(device="cpu")
    model.head.weight = model.embed.weight
    model.load_state_dict(Net().state_dict())
    model.positions.copy_(torch.arange(5))


def test_a_model_that_got_all_its_values_is_silent():
    model = on_meta()
    with tp.materialize_audit(model) as audit:
        assert [finding.code for finding in audit.findings] == ["TP401"]  # as it is at the beginning
        materialized(model)

    assert not audit.findings
    assert audit.load.seen == {"written": 8}
    assert len(audit.load.replaced) == 8
    assert audit.load.on_meta == 0


@pytest.mark.parametrize(
    ("leave_out", "expected"),
    [
        ("tie", [("TP403", "warning", "embed.weight")]),
        ("positions", [("TP402", "warning", "positions")]),
        ("norm", [("TP402", "warning", "norm.weight")]),
        ("to_empty", [("TP401", "warning", "positions")]),
        ("load", [("TP402", "warning", "embed.weight")]),
    ],
)
def test_each_step_that_is_left_out_is_told(leave_out, expected):
    model = on_meta()
    state_dict = Net().state_dict()
    with tp.materialize_audit(model) as audit:
        if leave_out != "to_empty":
            model.to_empty(device="cpu")
        if leave_out != "tie":
            model.head.weight = model.embed.weight
        if leave_out == "norm":
            state_dict = {key: value for key, value in state_dict.items() if not key.startswith("norm")}
        if leave_out not in ("load", "to_empty"):
            model.load_state_dict(state_dict, strict=leave_out != "norm")
        if leave_out not in ("positions", "to_empty"):
            model.positions.copy_(torch.arange(5))

    assert found(audit) == expected


def test_half_of_a_parameter():
    with torch.device("meta"):
        model = nn.Linear(4, 6, bias=False)
    with tp.materialize_audit(model) as audit:
        model.to_empty(device="cpu")
        with torch.no_grad():
            model.weight[:3].fill_(1.0)
            model.weight[2:4, :2].zero_()

    (finding,) = audit.findings
    assert finding.code == "TP402"
    assert finding.evidence["partly_written"] == ["weight"]
    assert finding.evidence["unwritten_bytes"] == 96 - 48 - 8
    assert "weight has 56 B of 96 B written" in finding.subject


def test_a_copy_of_what_nobody_wrote():
    model = on_meta()
    with tp.materialize_audit(model) as audit:
        materialized(model)
        model.norm.to_empty(device="cpu")
        model.to(torch.float64)

    (finding,) = audit.findings
    assert finding.code == "TP402"
    assert finding.evidence["never_written"] == [
        "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
    ]  # fmt: skip


def test_buffers_that_are_replaced_have_the_values_of_their_operator():
    model = on_meta()
    with tp.materialize_audit(model) as audit:
        materialized(model)
        model.positions = torch.arange(5) * 2
        model.norm.running_mean = torch.zeros(3)
        model.norm.weight = nn.Parameter(torch.ones(3))

    assert not audit.findings


def test_what_was_there_before_is_left_alone():
    model = Net()
    with tp.materialize_audit(model) as audit:
        model.norm.reset_parameters()
        with torch.no_grad():
            model.embed.weight[0].zero_()

    assert not audit.findings
    assert audit.load.replaced == ()


def test_frozen_on_the_way_and_orphaned():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with tp.materialize_audit(model, optimizer) as audit:
        model.norm.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        model.norm.bias = nn.Parameter(torch.ones(3))

    codes = {finding.code: finding for finding in audit.findings}
    assert codes["TP503"].evidence["requires_grad_lost"] == ["norm.weight"]
    assert codes["TP405"].evidence["orphans"] == 2
    assert codes["TP405"].evidence["shared_objects"] == 1


def test_as_a_decorator_of_functions_and_of_coroutine_functions():
    model = on_meta()
    audit = tp.materialize_audit(model)

    @audit
    def build():
        model.to_empty(device="cpu")
        return 3

    @audit
    async def load():
        materialized(model)

    assert build() == 3
    assert "TP402" in {finding.code for finding in audit.findings}
    asyncio.run(load())
    assert not audit.findings


def test_an_error_within_goes_on_and_what_was_seen_is_told():
    model = on_meta()
    audit = tp.materialize_audit(model)

    @audit
    def fails():
        model.to_empty(device="cpu")
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        fails()

    assert {"TP402", "TP403"} <= {finding.code for finding in audit.findings}


def test_a_context_is_entered_once_at_a_time():
    model = Net()
    audit = tp.materialize_audit(model)
    with audit, pytest.raises(RuntimeError, match="entered already"), audit:
        pass
    with audit:  # again, later
        pass
    gone = tp.materialize_audit(Net())
    gc.collect()
    with pytest.raises(RuntimeError, match="is gone"):
        gone.__enter__()


def test_two_audits_may_lie_within_each_other():
    outer_model, inner_model = on_meta(), on_meta()
    with tp.materialize_audit(outer_model) as outer:
        materialized(outer_model)
        with tp.materialize_audit(inner_model) as inner:
            inner_model.to_empty(device="cpu")
    assert not outer.findings
    assert {"TP402", "TP403"} == {finding.code for finding in inner.findings}


def test_it_keeps_nothing_alive():
    model = on_meta()
    with tp.materialize_audit(model, torch.optim.SGD(model.parameters(), lr=1.0)) as audit:
        materialized(model)
    refs = [weakref.ref(model), *(weakref.ref(tensor) for tensor in model.parameters())]
    del model
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    assert audit.load.keys == 7


def test_the_report_reads_back():
    model = on_meta()
    with tp.materialize_audit(model) as audit:
        model.to_empty(device="cpu")
    again = MaterializeAudit.from_json(audit.to_json())
    assert str(again) == str(audit)
    assert json.loads(audit.to_json())["load"]["seen"] == {"never written": 8}
    assert "the state of model" in audit.html()
    assert "8 registered tensors: 2 warnings" in str(audit)


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"^materialize_audit\(\) takes an nn\.Module"):
        tp.materialize_audit([Net()])
    with pytest.raises(TypeError, match="takes an optimizer"):
        tp.materialize_audit(Net(), Net())
