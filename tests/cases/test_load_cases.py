"""Faults of loading, as people reported them in public, each with its near-identical healthy twin."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import tensorplay as tp
from tests.helpers import raises


def found(report) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in report.findings]


# A language model is built on meta; to_empty() makes a parameter for every name, and the head is tied no more.


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight


@pytest.mark.parametrize("on_meta", [True, False])
def test_to_empty_breaks_a_tie(on_meta):
    checkpoint = Language().state_dict()
    if on_meta:
        with torch.device("meta"):
            model = Language()
        assert model.head.weight is model.emb.weight
        model.to_empty(device="cpu")
    else:
        model = Language().to(torch.float64).to(torch.float32)  # an ordinary conversion keeps it
    report = tp.validate_state_dict_load(model, checkpoint)

    if not on_meta:
        assert not report.findings
        return
    assert model.head.weight is not model.emb.weight
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("TP403", "warning")
    assert finding.evidence["names"] == ["emb.weight", "head.weight"]
    assert finding.evidence["distinct_storages"] == 2
    assert (finding.evidence["parameter_bytes"], finding.evidence["tied_parameter_bytes"]) == (120, 60)
    assert "120 B of parameters instead of 60 B" in finding.subject
    assert "tie_weights()" in finding.fix


# Parameters on meta whose values an offload hook has are offloaded; without a hook they are missing.


class _Hook:
    """As accelerate's AlignDevicesHook: the values by name, put in before forward()."""

    def __init__(self, module: nn.Module) -> None:
        self.weights_map = {name: value.detach() for name, value in module.named_parameters(recurse=False)}


class _Prefixed:
    """As accelerate's PrefixedDataset: reading an item is not free, and is not done."""

    def __init__(self, dataset: object, prefix: str) -> None:
        self.dataset, self.prefix = dataset, prefix

    def __getitem__(self, key: str) -> object:
        raise AssertionError("the probe called the hook")


def offloaded(model: nn.Module) -> nn.Module:
    everything = {name: value.detach() for name, value in model.named_parameters()}
    for path, module in model.named_modules():
        if module._parameters:
            module._hf_hook = _Hook(module)
            module._hf_hook.weights_map = _Prefixed(everything, f"{path}.")
        for name, parameter in list(module._parameters.items()):
            module._parameters[name] = nn.Parameter(parameter.to("meta"))
    return model


@pytest.mark.parametrize("has_hooks", [True, False])
def test_offloaded_is_not_missing(has_hooks):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model = offloaded(model) if has_hooks else model.to("meta")
    (finding,) = tp.check({"model": model}).findings

    assert finding.code == "TP401"
    assert finding.evidence["meta_params"] == 4
    assert finding.evidence["values_in_hooks"] == (4 if has_hooks else 0)
    if has_hooks:
        assert finding.severity == "info"
        assert "offloaded, not missing" in finding.headline
        assert finding.evidence["hook_devices"] == ["cpu"]
        assert "nothing is to be repaired" in finding.fix
        del model[2]._hf_hook.weights_map.dataset["2.bias"]
        missing, kept = tp.check({"model": model}).findings
        assert (missing.severity, missing.evidence["tensors"]) == ("warning", ["model.2.bias"])
        assert kept.evidence["values_in_hooks"] == 3
    else:
        assert finding.severity == "warning"
        assert raises(lambda: model(torch.ones(1, 4)))


# load_state_dict() into a model on meta says that all keys matched, and loads nothing.


@pytest.mark.parametrize("assign", [False, True])
def test_loading_into_meta_does_nothing(assign):
    checkpoint = nn.Linear(3, 2).state_dict()
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = model.load_state_dict(checkpoint, assign=assign)
    assert (answer.missing_keys, answer.unexpected_keys) == ([], [])
    report = tp.validate_state_dict_load(model, checkpoint)
    (finding,) = report.findings

    if assign:
        assert (finding.code, finding.severity) == ("TP504", "info")
        assert finding.evidence["aliases"] == ["weight", "bias"]
        return
    assert (finding.code, finding.severity) == ("TP507", "error")
    assert finding.evidence["meta_after"] == ["weight", "bias"]
    assert "2 of 2 keys match, 2 on meta" in finding.headline
    assert "assign=True" in finding.fix


# load_state_dict(assign=True) after the optimizer was built: it moves parameters that the model no longer has.


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_assign_orphans_the_optimizer(optimizer_first):
    checkpoint = {key: value.clone() for key, value in nn.Linear(3, 1).state_dict().items()}
    model = nn.Linear(3, 1)
    if optimizer_first:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.load_state_dict(checkpoint, assign=True)
    if not optimizer_first:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().clone()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(before, model.weight) is optimizer_first

    for report in (
        tp.check({"model": model, "opt": optimizer}),
        tp.validate_state_dict_load(model, copy_of(checkpoint), optimizer),
    ):
        if not optimizer_first:
            assert not report.findings
            continue
        (finding,) = report.findings
        assert (finding.code, finding.severity) == ("TP405", "warning")
        assert finding.evidence["optimizer_params"] == 2
        assert (finding.evidence["shared_objects"], finding.evidence["shared_storages"]) == (0, 0)
        assert finding.evidence["orphan_bytes"] == 16
        assert finding.evidence["replaced_by"] == _prefixed(report, "weight", "bias")
        assert "after loading" in finding.fix


def copy_of(state_dict):
    return {key: value.clone() for key, value in state_dict.items()}


def _prefixed(report, *names: str) -> list[str]:
    return list(names) if report.document.load is not None else [f"model.{name}" for name in names]


# Rotary frequencies are in no checkpoint: after to_empty() nothing writes them, though all keys matched.


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 8, 2) / 8), persistent=False)

    def reset(self) -> None:
        self.inv_freq.copy_(10000.0 ** -(torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_buffer_that_nothing_wrote(reset, filled):
    checkpoint = Rotary().state_dict()
    with torch.device("meta"):
        model = Rotary()
    torch.use_deterministic_algorithms(filled)  # fills new memory with NaN: which is no write
    try:
        with tp.materialize_audit(model) as audit:
            model.to_empty(device="cpu")
            answer = model.load_state_dict(checkpoint)
            if reset:
                model.reset()
    finally:
        torch.use_deterministic_algorithms(False)
    assert str(answer) == "<All keys matched successfully>"

    if reset:
        assert not audit.findings
        return
    (finding,) = audit.findings
    assert (finding.code, finding.severity) == ("TP402", "warning")
    assert finding.evidence["never_written"] == finding.evidence["non_persistent"] == ["inv_freq"]
    assert finding.evidence["unwritten_bytes"] == 16
    assert finding.evidence["allocated_by"] == "aten::empty_like"
