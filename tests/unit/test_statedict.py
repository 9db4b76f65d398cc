"""validate_state_dict_load(): what loading accepts without a word, and what the report says of it."""

from __future__ import annotations

import copy
import json
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.layers import json_schema
from tensorplay.modules import Modules
from tensorplay.statedict import LoadReport
from tests.unit.test_observer import native_facts


def found(report) -> list[tuple[str, str]]:
    return [(finding.code, finding.severity) for finding in report.findings]


def clones(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def one(report, code: str):
    (finding,) = [finding for finding in report.findings if finding.code == code]
    return finding


# What load_state_dict(strict=True) accepts in silence


def accepted(model: nn.Module, state_dict, **options) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = model.load_state_dict(state_dict, **options)
    assert (answer.missing_keys, answer.unexpected_keys) == ([], [])


@pytest.mark.parametrize(
    ("have", "want", "words"),
    [
        (torch.float64, torch.float32, "29 bits of the fraction dropped"),
        (torch.float32, torch.bfloat16, "16 bits of the fraction dropped"),
        (torch.float32, torch.float16, "what is too large becomes infinity"),
        (torch.bfloat16, torch.float16, "what is too large becomes infinity"),
        (torch.float16, torch.bfloat16, "3 bits of the fraction dropped"),
        (torch.float32, torch.float8_e4m3fn, "20 bits of the fraction dropped"),
        (torch.int8, torch.float32, "quantised weights without a scale"),
        (torch.complex64, torch.float32, "the imaginary part is dropped"),
        (torch.complex128, torch.complex64, "29 bits of the fraction dropped"),
        (torch.float32, torch.int32, "cut to whole numbers"),
        (torch.int64, torch.int8, "wraps around"),
        (torch.int64, torch.bool, "all but zero becomes True"),
        (torch.float32, torch.bool, "all but zero becomes True"),
        (torch.int8, torch.uint8, "what is negative wraps around"),
        (torch.float8_e5m2, torch.float8_e4m3fn, "what is too large becomes NaN"),
    ],
)
def test_tp502_a_type_that_holds_less(have, want, words):
    model = nn.Module()
    model.register_buffer("b", torch.zeros(2, 3).to(want))
    state_dict = {"b": torch.ones(2, 3).to(have)}
    accepted(copy.deepcopy(model), state_dict)

    finding = one(tp.validate_state_dict_load(model, state_dict), "TP502")
    assert finding.severity == "warning"
    assert words in finding.headline
    assert finding.evidence["narrowed"] == ["b"]
    assert finding.evidence["elements"] == 6


@pytest.mark.parametrize(
    ("have", "want"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float32, torch.complex64),
        (torch.int32, torch.int64),
        (torch.bool, torch.float32),
        (torch.uint8, torch.int16),
    ],
)
def test_tp502_is_silent_where_every_value_has_its_like(have, want):
    model = nn.Module()
    model.register_buffer("b", torch.zeros(2, 3).to(want))
    assert not tp.validate_state_dict_load(model, {"b": torch.ones(2, 3).to(have)}).findings


def test_tp502_with_assign_the_model_changes_its_type():
    model, state_dict = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64).state_dict()
    assert found(tp.validate_state_dict_load(model, state_dict, assign=True)) == [("TP502", "info")]
    accepted(model, state_dict, assign=True)
    assert found(tp.validate_state_dict_load(model, state_dict, assign=True)) == [("TP504", "info")]


def test_tp502_with_assign_whole_numbers_cannot_require_grad():
    model = nn.Linear(2, 2)
    state_dict = {key: value.to(torch.int8) for key, value in clones(model).items()}
    assert found(tp.validate_state_dict_load(model, state_dict, assign=True)) == [("TP502", "error")]
    with pytest.raises(RuntimeError, match="floating point"):
        model.load_state_dict(state_dict, assign=True)
    model.requires_grad_(False)
    assert found(tp.validate_state_dict_load(model, state_dict, assign=True)) == [("TP502", "info")]
    accepted(model, state_dict, assign=True)


def test_tp505_an_untied_checkpoint_for_a_tied_model():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state_dict = clones(model)
    model[1].weight = model[0].weight
    accepted(copy.deepcopy(model), state_dict)

    finding = one(tp.validate_state_dict_load(model, state_dict), "TP505")
    assert finding.evidence["names"] == ["0.weight", "1.weight"]
    assert finding.evidence["last_write"] == "1.weight"
    model.load_state_dict(state_dict)
    assert torch.equal(model[0].weight, state_dict["1.weight"])
    assert not tp.validate_state_dict_load(model, clones(model)).findings


def test_tp505_parameters_that_overlap_in_part():
    flat = torch.zeros(6)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:4]), nn.Parameter(flat[2:])
    state_dict = {"a": torch.ones(4), "b": torch.full((4,), 2.0)}
    accepted(model, state_dict)
    assert not torch.equal(model.a, state_dict["a"])

    finding = one(tp.validate_state_dict_load(model, state_dict), "TP505")
    assert finding.evidence["overlapping_bytes"] == 8
    model.b = nn.Parameter(flat[4:])
    assert not tp.validate_state_dict_load(model, {"a": torch.ones(4), "b": torch.ones(2)}).findings


def test_tp504_an_aliased_checkpoint():
    model = nn.Linear(2, 2)
    state_dict = clones(model)
    accepted(model, state_dict, assign=True)

    assert one(tp.validate_state_dict_load(model, state_dict), "TP504").evidence["aliased_bytes"] == 24
    assert found(tp.validate_state_dict_load(model, model.state_dict())) == [("TP504", "info")]
    assert not tp.validate_state_dict_load(model, copy.deepcopy(state_dict)).findings


def test_tp504_two_storages_over_one_buffer():
    model = nn.Linear(4, 1, bias=False)
    array = model.weight.detach().numpy()
    assert found(tp.validate_state_dict_load(model, {"weight": torch.from_numpy(array)})) == [("TP504", "info")]
    assert not tp.validate_state_dict_load(model, {"weight": torch.from_numpy(array.copy())}).findings


def test_tp504_bytes_in_common_in_part():
    memory = torch.arange(6.0)
    model = nn.Module()
    model.w = nn.Parameter(memory[:4])

    finding = one(tp.validate_state_dict_load(model, {"w": memory[2:]}), "TP504")
    assert finding.severity == "warning"


def test_tp504_exchanged_keys():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state_dict = model.state_dict()
    state_dict["0.weight"], state_dict["1.weight"] = state_dict["1.weight"], state_dict["0.weight"]

    (whole, crossed) = tp.validate_state_dict_load(model, state_dict).findings
    assert whole.severity == "info"
    assert crossed.severity == "warning"
    assert crossed.evidence["over"] == {"1.weight": "0.weight"}  # which is overwritten when it is read
    accepted(model, state_dict)
    assert torch.equal(model[0].weight, model[1].weight)


def test_tp507_a_meta_checkpoint_with_assign():
    model = nn.Linear(2, 2)
    state_dict = nn.Linear(2, 2, device="meta").state_dict()
    assert found(tp.validate_state_dict_load(model, state_dict, assign=True)) == [("TP507", "error")]
    accepted(model, state_dict, assign=True)
    finding = one(tp.validate_state_dict_load(model, state_dict, assign=True), "TP507")
    assert finding.evidence["meta_in_state_dict"] == ["weight", "bias"]


def test_tp506_a_small_parameter_that_keeps_a_large_storage():
    model = nn.Linear(4, 4, bias=False)
    state_dict = {"weight": torch.zeros(4000)[:16].view(4, 4)}
    accepted(copy.deepcopy(model), state_dict, assign=True)

    finding = one(tp.validate_state_dict_load(model, state_dict), "TP506")
    assert (finding.evidence["used_bytes"], finding.evidence["storage_nbytes"]) == (64, 16000)
    assert finding.evidence["wasted_bytes"] == 15936


def test_tp506_is_silent_where_the_keys_share_one_buffer():
    model = nn.Sequential(*(nn.Linear(20, 20, bias=False) for _ in range(4)))
    flat = torch.zeros(1600)
    state_dict = {f"{n}.weight": flat[400 * n : 400 * (n + 1)].view(20, 20) for n in range(4)}
    assert not tp.validate_state_dict_load(model, state_dict).findings
    del state_dict["0.weight"]
    assert found(tp.validate_state_dict_load(model, state_dict)) == [("TP501", "error")]


def test_tp501_keys_below_a_module_that_is_none():
    model = nn.Linear(2, 2)
    model.extra = nn.Linear(2, 2)
    model.register_module("extra", None)
    state_dict = clones(nn.Linear(2, 2)) | {"extra.weight": torch.zeros(9)}
    accepted(model, state_dict)

    report = tp.validate_state_dict_load(model, state_dict)
    assert one(report, "TP501").evidence["accepted_unexpected"] == ["extra.weight"]
    assert one(report, "TP501").severity == "warning"


def test_a_number_that_was_stored_as_one_element_loads():
    model = nn.Module()
    model.scale = nn.Parameter(torch.tensor(1.0))
    accepted(model, {"scale": torch.tensor([3.0])})
    assert not tp.validate_state_dict_load(model, {"scale": torch.tensor([3.0])}).findings
    assert found(tp.validate_state_dict_load(model, {"scale": torch.tensor([3.0, 4.0])})) == [("TP501", "error")]


def test_batches_that_old_checkpoints_did_not_count():
    model = nn.Sequential(nn.BatchNorm1d(2))
    state_dict = model.state_dict()
    plain = {key: value.clone() for key, value in state_dict.items() if "num_batches" not in key}
    accepted(copy.deepcopy(model), dict(plain))
    assert not tp.validate_state_dict_load(model, plain).findings

    versioned = OrderedDict(plain)
    versioned._metadata = state_dict._metadata
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        copy.deepcopy(model).load_state_dict(versioned)
    assert tp.validate_state_dict_load(model, versioned).missing_keys == ["0.num_batches_tracked"]


def test_tp505_is_silent_where_the_state_dict_overlaps_alike():
    model = nn.Module()
    model.table = nn.Parameter(torch.ones(4, 4))
    model.register_buffer("first", model.table.detach()[0])
    model.register_buffer("turned", model.table.detach().t())
    assert not [
        one for one in tp.validate_state_dict_load(model, model.state_dict()).findings if one.severity != "info"
    ]
    assert not tp.validate_state_dict_load(model, copy.deepcopy(model.state_dict())).findings
    other = clones(model)
    other["first"] += 1
    assert "TP505" in {one.code for one in tp.validate_state_dict_load(model, other).findings}


def test_tp405_before_the_load_that_makes_the_orphans():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state_dict = clones(model)
    finding = one(tp.validate_state_dict_load(model, state_dict, optimizer, assign=True), "TP405")
    assert finding.evidence["to_be_orphans"] == ["weight", "bias"]
    assert not tp.validate_state_dict_load(model, state_dict, optimizer).findings
    model.load_state_dict(state_dict, assign=True)
    late = torch.optim.SGD(model.parameters(), lr=1.0)
    assert found(tp.validate_state_dict_load(model, state_dict, late, assign=True)) == [("TP504", "info")]


def test_tp405_of_a_layer_that_was_removed_and_not_of_what_a_script_keeps():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    del model[1]
    finding = one(tp.check({"model": model, "optimizer": optimizer}), "TP405")
    assert (finding.evidence["orphans"], finding.evidence["shared_objects"]) == (2, 2)

    fast = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    inner = torch.optim.SGD(fast, lr=1.0)
    assert not tp.check({"model": model, "inner": inner}).findings


def test_tp503_before_the_load_that_raises():
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        state_dict = clones(nn.Linear(2, 2))
    finding = one(tp.validate_state_dict_load(model, state_dict, assign=True), "TP503")
    assert finding.evidence["requires_grad_lost"] == ["weight", "bias"]
    with pytest.raises(RuntimeError, match="inference tensor"):
        model.load_state_dict(state_dict, assign=True)
    assert not tp.validate_state_dict_load(nn.Linear(2, 2), state_dict).findings


@pytest.mark.parametrize("side", ["model", "state dict"])
def test_a_storage_without_memory_is_told_and_not_read(side):
    model, state_dict = nn.Linear(2, 2), clones(nn.Linear(2, 2))
    (model.weight if side == "model" else state_dict["weight"]).untyped_storage().resize_(0)
    report = tp.validate_state_dict_load(model, state_dict, values=True)
    assert "TP102" in {finding.code for finding in report.findings}
    with pytest.raises(tp.LoadRefused, match="weight reaches past the storage"):
        tp.safe_load_state_dict(model, state_dict)


def test_what_a_hook_forgives_is_an_info():
    model = nn.Linear(2, 2)
    model.register_load_state_dict_post_hook(lambda module, keys: keys.missing_keys.clear())
    state_dict = {"weight": torch.zeros(2, 2)}
    accepted(model, state_dict)
    assert found(tp.validate_state_dict_load(model, state_dict)) == [("TP501", "info")]
    assert not tp.safe_load_state_dict(model, state_dict).findings

    strict = nn.Linear(2, 2)
    strict.register_load_state_dict_post_hook(lambda module, keys: None)
    before = strict.weight.detach().clone()
    with pytest.raises(RuntimeError, match="missing keys"):
        tp.safe_load_state_dict(strict, state_dict)
    assert torch.equal(strict.weight, before)


def test_keys_that_a_hook_of_torch_renames():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = clones(nn.utils.weight_norm(nn.Linear(2, 2)))
    accepted(copy.deepcopy(model), dict(old))
    report = tp.validate_state_dict_load(model, dict(old))
    assert {finding.severity for finding in report.findings} == {"info"}
    assert not tp.safe_load_state_dict(model, dict(old)).findings


def test_a_state_dict_with_a_prefix_in_a_larger_checkpoint():
    model = nn.Linear(2, 2)
    checkpoint = {"epoch": 1, "state_dict": {f"model.{key}": value for key, value in clones(model).items()}}
    assert one(tp.validate_state_dict_load(model, checkpoint), "TP501").evidence["nested_under"] == "state_dict"


# Keys


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.", "a.b."])
def test_a_prefix_is_one_finding(prefix):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    longer = {prefix + key: value for key, value in clones(model).items()}
    finding = one(tp.validate_state_dict_load(model, longer), "TP501")
    assert (finding.evidence["prefix"], finding.evidence["prefix_of"]) == (prefix, "state dict")

    around: nn.Module = model
    for name in reversed(prefix.rstrip(".").split(".")):
        outer = nn.Module()
        outer.add_module(name, around)
        around = outer
    finding = one(tp.validate_state_dict_load(around, clones(model)), "TP501")
    assert (finding.evidence["prefix"], finding.evidence["prefix_of"]) == (prefix, "model")


def test_a_state_dict_in_a_larger_checkpoint():
    model = nn.Linear(2, 2)
    checkpoint = {"epoch": 1, "state_dict": clones(model), "optimizer": {"state": {}}}
    finding = one(tp.validate_state_dict_load(model, checkpoint), "TP501")
    assert finding.evidence["nested_under"] == "state_dict"
    assert finding.fix == "checkpoint['state_dict']"


def test_strict_false_is_milder():
    model = nn.Linear(2, 2)
    state_dict = {"weight": torch.zeros(2, 2), "more": torch.zeros(1)}
    assert found(tp.validate_state_dict_load(model, state_dict)) == [("TP501", "error"), ("TP501", "error")]
    report = tp.validate_state_dict_load(model, state_dict, strict=False)
    assert found(report) == [("TP501", "warning"), ("TP501", "info")]
    assert (report.missing_keys, report.unexpected_keys) == (["bias"], ["more"])


def test_a_module_that_loads_in_a_way_of_its_own():
    class Renames(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, *args):
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel")
            super()._load_from_state_dict(state_dict, prefix, *args)

    model = nn.Sequential(Renames(2, 2, bias=False))
    report = tp.validate_state_dict_load(model, {"0.kernel": torch.zeros(2, 2)})
    assert found(report) == [("TP501", "info"), ("TP501", "info")]
    assert report.load.own_loading == ("0: Renames._load_from_state_dict()",)
    assert "load in a way of their own" in str(report)


def test_tp503_the_state_dict_s_parameter_requires_grad():
    model = nn.Linear(2, 2)
    kept = nn.Linear(2, 2).state_dict(keep_vars=True)
    assert not tp.validate_state_dict_load(model, kept).findings
    model.bias.requires_grad_(False)
    assert one(tp.validate_state_dict_load(model, kept), "TP503").evidence["requires_grad_lost"] == ["bias"]


def test_tp503_inference_tensors_that_are_to_be_trained():
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        state_dict = clones(nn.Linear(2, 2))
        model.load_state_dict(state_dict, assign=True)
    report = tp.validate_state_dict_load(model, clones(nn.Linear(2, 2)))
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained == ["weight", "bias"]
    assert one(report, "TP503").evidence["requires_grad_lost"] == trained
    with pytest.raises(RuntimeError, match="Inference tensors"):
        model(torch.ones(1, 2, requires_grad=True))


def test_tp508_values_that_are_no_numbers_are_read_where_asked():
    model = nn.Linear(2, 2)
    state_dict = clones(model)
    state_dict["weight"][0, 1] = float("nan")
    state_dict["bias"][0] = float("-inf")
    assert not tp.validate_state_dict_load(model, state_dict).findings

    finding = one(tp.validate_state_dict_load(model, state_dict, values=True), "TP508")
    assert (finding.evidence["nan"], finding.evidence["infinite"]) == (1, 1)
    assert finding.evidence["nonfinite"] == ["weight", "bias"]


def test_tp403_assign_unties_what_the_state_dict_does_not_tie():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    assert one(tp.validate_state_dict_load(model, clones(model), assign=True), "TP403").evidence["ties"] == [
        ["0.weight", "1.weight"]
    ]
    assert not tp.validate_state_dict_load(model, copy.deepcopy(model.state_dict()), assign=True).findings


def test_tp403_assigned_names_of_one_memory_are_parameters_of_their_own():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    state_dict = copy.deepcopy(model.state_dict())
    with tp.materialize_audit(model) as audit:
        model.load_state_dict(state_dict, assign=True)

    assert model[0].weight is not model[1].weight
    finding = one(audit, "TP403")
    assert (finding.severity, finding.evidence["distinct_storages"]) == ("warning", 1)
    assert one(tp.validate_state_dict_load(model, state_dict), "TP403").severity == "info"


# Modules and their tables


def test_tables_are_read_without_running_anything():
    class Guarded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1))

        def __getattr__(self, name):
            raise AssertionError(name) if name == "w" and "w" in self._parameters else AttributeError(name)

        def named_parameters(self, *_, **__):
            raise AssertionError

        def state_dict(self, *_, **__):
            raise AssertionError

        def _named_members(self, *_, **__):
            raise AssertionError

    model = nn.Sequential(Guarded(), nn.ModuleDict({"a": Guarded()}))
    modules = Modules(model)
    assert [slot.key for slot in modules.slots] == ["0.w", "1.a.w"]
    assert not tp.validate_state_dict_load(model, {"0.w": torch.ones(1), "1.a.w": torch.ones(1)}).findings


def test_keys_are_those_of_state_dict():
    shared = nn.BatchNorm1d(2)
    model = nn.Sequential(
        shared,
        nn.ModuleDict({"again": shared, "lstm": nn.LSTM(2, 2), "attention": nn.MultiheadAttention(2, 1)}),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        nn.ParameterList([nn.Parameter(torch.ones(1))]),
        nn.ParameterDict({"x": nn.Parameter(torch.ones(1))}),
    )
    model.register_buffer("gone", torch.ones(1), persistent=False)
    slots = Modules(model).slots

    assert sorted(slot.key for slot in slots if slot.is_persistent) == sorted(model.state_dict())
    assert [slot.key for slot in slots if not slot.is_persistent] == ["gone"]
    assert Modules(model, "m.").slots[0].key == "m.gone"


def test_modules_that_hold_each_other_end():
    model = nn.Sequential(nn.Linear(1, 1))
    model[0]._modules["back"] = model
    assert [slot.key for slot in Modules(model).slots] == ["0.weight", "0.bias"]


# The report


def test_the_report_goes_through_every_output(tmp_path):
    jsonschema = pytest.importorskip("jsonschema")
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    report = tp.validate_state_dict_load(model, clones(nn.Linear(2, 2)))

    stored = json.loads(report.to_json())
    jsonschema.validate(stored, json_schema())
    assert stored["load"]["keys"] == 7
    again = LoadReport.from_json(report.to_json())
    assert str(again) == str(report)
    assert again.missing_keys == report.missing_keys
    assert repr(report) == "<tensorplay.LoadReport: 0 of 7 keys, 2 findings>"
    assert "0 of 7 keys matched: 2 errors" in str(report)
    assert "clones(nn.Linear(2, 2)) beside model" in report.html()


def test_bad_arguments_are_one_line():
    model = nn.Linear(2, 2)
    for args, words in (
        (([model], {}), "takes an nn.Module, got list"),
        ((model, [1]), "a mapping of name to tensor, got list"),
        ((model, model), "pass its state_dict()"),
        ((model, {}, model), "takes an optimizer"),
    ):
        with pytest.raises(TypeError, match=r"^validate_state_dict_load") as raised:
            tp.validate_state_dict_load(*args)
        assert words in str(raised.value)


def test_nothing_is_changed():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state_dict = clones(model)
    tensors = [*model.parameters(), *model.buffers(), *state_dict.values()]
    before = [native_facts(tensor) for tensor in tensors]

    def ask() -> None:
        tp.validate_state_dict_load(model, state_dict, optimizer, values=True).to_json()
        str(tp.validate_state_dict_load(model, model.state_dict(), optimizer))
        with tp.materialize_audit(model, optimizer) as audit:
            pass
        audit.to_json()

    ask()
    assert [native_facts(tensor) for tensor in tensors] == before
    kept = tp.validate_state_dict_load(model, state_dict, optimizer)
    assert [native_facts(tensor) for tensor in tensors] == before
    assert kept.load.matched == 7


def test_a_prefix_within_keys():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compiled = {key.replace("1.", "1._orig_mod."): value for key, value in clones(model).items() if key[0] == "1"}
    finding = one(tp.validate_state_dict_load(nn.Sequential(nn.Identity(), nn.Linear(2, 2)), compiled), "TP501")
    assert finding.evidence["prefix"] == "_orig_mod."
    assert "key.replace('_orig_mod.', '')" in finding.fix
