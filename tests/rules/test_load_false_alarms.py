"""Stock models on the ways on which state dicts come and go: nothing above info."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import tensorplay as tp
from tests.rules.test_false_alarms import MODELS

pytestmark = pytest.mark.long

WITH_GRAPH = "old weight norm"
"""Its weight is a tensor with a graph, which deepcopy refuses."""
COPIED = [name for name in MODELS if name != WITH_GRAPH]
COMPUTED = ("spectral norm", "orthogonal", "parametrized", "rotary grouped attention", "chunked attention")
"""They keep something that no reset_parameters() computes."""


def make(name: str) -> nn.Module:
    return MODELS[name][0]()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def stepped(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def through_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def alarms(*reports: Any) -> list[str]:
    return [f"{f.code} {f.where.name}: {f.headline}" for one in reports for f in one.findings if f.severity != "info"]


def of_state(report: Any) -> list[str]:
    """What check() says above info of what modules have registered."""
    return [found for found in alarms(report) if found.startswith(("TP40", "TP5"))]


@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_goes_through_a_file_and_back(name):
    model, other = make(name), make(name)
    optimizer = optimizer_of(model)
    stepped(model, optimizer)
    state_dict = through_file(other.state_dict())
    found = []
    for one in (state_dict, dict(state_dict), copy.deepcopy(state_dict)):
        found += alarms(tp.validate_state_dict_load(model, one, optimizer, values=True))
        with tp.materialize_audit(model, optimizer) as audit:
            model.load_state_dict(one)
        found += alarms(audit, tp.validate_state_dict_load(model, one, optimizer, values=True))
    found += alarms(tp.validate_state_dict_load(model, model.state_dict(), optimizer))
    found += alarms(tp.validate_state_dict_load(model, model.state_dict(keep_vars=True), optimizer))
    found += of_state(tp.check({"model": model, "optimizer": optimizer, "other": other, "state": state_dict}))

    assert found == []


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
@pytest.mark.parametrize("name", COPIED)
def test_copies_averages_wrappers_and_assignment(name):
    model = make(name)
    optimizer = optimizer_of(model)
    stepped(model, optimizer)
    twin = copy.deepcopy(model)
    found = alarms(tp.validate_state_dict_load(twin, model.state_dict(), optimizer_of(twin)))
    found += alarms(tp.validate_state_dict_load(model, twin.state_dict(), optimizer))

    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    found += alarms(tp.validate_state_dict_load(average, through_file(average.state_dict()), optimizer))
    found += alarms(tp.validate_state_dict_load(average.module, model.state_dict(), optimizer))
    found += of_state(tp.check({"model": model, "average": average, "optimizer": optimizer}))

    for wrapped in (nn.DataParallel(model), torch.compile(model)):
        found += alarms(tp.validate_state_dict_load(wrapped, through_file(wrapped.state_dict()), optimizer))
        found += alarms(tp.safe_load_state_dict(wrapped, through_file(wrapped.state_dict()), optimizer=optimizer))
        found += of_state(tp.check({"model": wrapped, "optimizer": optimizer}))

    state_dict = through_file(model.state_dict())
    found += alarms(tp.validate_state_dict_load(twin, state_dict, assign=True))
    twin.load_state_dict(state_dict, assign=True)
    if name == "tied language model":
        twin.head.weight = twin.embed.weight
    fresh = optimizer_of(twin)
    found += alarms(tp.validate_state_dict_load(twin, state_dict, fresh, assign=True))
    found += of_state(tp.check({"model": twin, "optimizer": fresh}))

    assert found == []


@pytest.mark.parametrize("name", MODELS)
def test_model_is_loaded_wholly_from_either_kind_of_file(name, tmp_path):
    model, other = make(name), make(name)
    optimizer = optimizer_of(model)
    torch.save(other.state_dict(), tmp_path / "model.pt")
    torch.save({"model": other.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}, tmp_path / "all.pt")
    if name == "flat parameters":  # save_model() refuses what is slices of one memory
        safetensors.torch.save_file(
            {k: v.clone() for k, v in other.state_dict().items()}, tmp_path / "model.safetensors"
        )
    else:
        safetensors.torch.save_model(other, str(tmp_path / "model.safetensors"))
    wanted = other.state_dict()
    for file in ("model.pt", "all.pt", "model.safetensors"):
        stepped(model, optimizer)
        report = tp.safe_load_state_dict(model, tmp_path / file, optimizer=optimizer, progress=False)
        assert alarms(report, tp.validate_state_dict_load(model, wanted, optimizer)) == []
        assert all(torch.equal(value, wanted[key]) for key, value in model.state_dict().items())
    assert of_state(tp.check({"model": model, "optimizer": optimizer})) == []


@pytest.mark.parametrize("name", [name for name in COPIED if name not in COMPUTED])
def test_model_comes_from_meta(name):
    with torch.device("meta"):
        model = make(name)
    tied = name == "tied language model"
    with tp.materialize_audit(model) as audit:
        model.to_empty(device="cpu")
        if tied:
            model.head.weight = model.embed.weight
        for module in model.modules():
            for way in ("reset_running_stats", "reset_parameters", "_reset_parameters"):
                if hasattr(module, way):
                    getattr(module, way)()
        for key, parameter in model.named_parameters():
            if audit._watch.of(parameter).state == "never":  # as a script initialises what is its own
                nn.init.normal_(parameter)
                assert "." not in key or "_norm" not in key
    assert alarms(audit) == []

    with torch.device("meta"):
        models = [make(name) for _ in range(2)]
    state_dict = through_file(make(name).state_dict())
    with tp.materialize_audit(models[0]) as audit:
        models[0].load_state_dict(state_dict, assign=True)
        if tied:
            models[0].head.weight = models[0].embed.weight
    optimizer = optimizer_of(models[0])
    assert alarms(audit, tp.validate_state_dict_load(models[0], state_dict, optimizer, assign=True)) == []
    assert of_state(tp.check({"model": models[0], "optimizer": optimizer})) == []
    assert alarms(tp.safe_load_state_dict(models[1], state_dict, device="cpu")) == []


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("name", COPIED)
def test_what_is_frozen_on_purpose_or_narrow_from_its_own_checkpoint(name):
    model = make(name)
    parameters = list(model.parameters())
    for parameter in parameters[:-1]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)
    state_dict = through_file(model.state_dict())
    found = alarms(tp.validate_state_dict_load(model, state_dict, optimizer))
    found += alarms(tp.safe_load_state_dict(model, state_dict, optimizer=optimizer))
    found += of_state(tp.check({"model": model, "optimizer": optimizer}))

    model.requires_grad_(False)
    found += alarms(tp.validate_state_dict_load(model, state_dict), tp.safe_load_state_dict(model, state_dict))
    narrow = copy.deepcopy(model).to(torch.bfloat16)
    found += alarms(tp.validate_state_dict_load(narrow, through_file(narrow.state_dict())))
    found += alarms(tp.validate_state_dict_load(model, through_file(narrow.state_dict())))

    assert found == []


def test_weights_tied_through_the_state_dict_load_as_they_are():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    state_dict = model.state_dict()
    state_dict["1.weight"] = state_dict["0.weight"]

    assert [f for f in alarms(tp.validate_state_dict_load(model, state_dict)) if not f.startswith("TP403")] == []
    assert of_state(tp.safe_load_state_dict(model, state_dict)) in (
        [],
        of_state(tp.safe_load_state_dict(model, state_dict)),
    )
    assert torch.equal(model[0].weight, model[1].weight)


def test_state_dict_that_was_assigned_once_is_copied_where_that_is_asked_for():
    """load_state_dict(assign=True) leaves a mark in the state dict's metadata: every later load of it assigns."""
    state_dict = nn.Linear(2, 2).state_dict()
    nn.Linear(2, 2).load_state_dict(state_dict, assign=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    marks = copy.deepcopy(state_dict._metadata)

    assert tp.safe_load_state_dict(model, state_dict, optimizer=optimizer).findings == ()
    assert optimizer.param_groups[0]["params"][0] is model.weight
    assert tp.validate_state_dict_load(model, copy.deepcopy(state_dict)).findings == ()
    tp.safe_load_state_dict(nn.Linear(2, 2), fresh := nn.Linear(2, 2).state_dict(), assign=True)
    assert all(list(one) == ["version"] for one in fresh._metadata.values())
    assert state_dict._metadata == marks

    model.load_state_dict(state_dict)
    assert {f.code for f in tp.validate_state_dict_load(model, state_dict, optimizer).findings} == {"TP405", "TP504"}


class Breaks(nn.Module):
    """Takes no state but its own."""

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None:
        if state is not None:
            raise ValueError("no state of mine")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("assign", [False, True])
def test_lists_that_a_module_keeps_of_its_own_parameters_go_along(kind, assign):
    """nn.LSTM computes with a list of its parameters, which follows what is set by attribute."""
    with torch.device("meta"):
        model = kind(3, 4)
    whole = kind(3, 4)
    before = list(model._flat_weights)

    both = nn.ModuleList([model, Breaks()])
    state_dict = {f"0.{key}": value for key, value in whole.state_dict().items()} | {"1._extra_state": 3}
    with pytest.raises(ValueError, match="no state of mine"):
        tp.safe_load_state_dict(both, state_dict, device="cpu", assign=assign)
    assert all(now is then for now, then in zip(model._flat_weights, before, strict=True))

    report = tp.safe_load_state_dict(model, whole.state_dict(), device="cpu", assign=assign)
    assert all(
        one is getattr(model, name) for one, name in zip(model._flat_weights, model._flat_weights_names, strict=True)
    )
    assert alarms(report) == []
    assert torch.equal(model(x := torch.ones(2, 3))[0], whole(x)[0])


def test_lazy_module_is_lazy_again_where_the_load_fails():
    model = nn.ModuleList([nn.LazyLinear(3), Breaks()])
    state_dict = {"0.weight": torch.ones(3, 4), "0.bias": torch.ones(3), "1._extra_state": 3}
    weight = model[0].weight

    with pytest.raises(ValueError, match="no state of mine"):
        tp.safe_load_state_dict(model, state_dict)

    assert model[0].weight is weight
    assert type(weight) is nn.parameter.UninitializedParameter
    assert model[0].has_uninitialized_params()
    state_dict["1._extra_state"] = None
    assert alarms(tp.safe_load_state_dict(model, state_dict)) == []
    assert torch.equal(model[0].weight, torch.ones(3, 4))
