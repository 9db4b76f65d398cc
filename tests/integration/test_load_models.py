"""Loads of transformers' models, as people do them and as they fail: what is told is right, and nothing else is."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tensorplay as tp
from tensorplay.errors import LoadRefused, TargetError
from tests.conftest import need

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

FAMILIES = ("gpt2", "llama")
SOURCES = ("one", "shards", "model.pt")
TOKENS = torch.arange(8)[None]


class Saved(NamedTuple):
    """A model, and the checkpoints of it."""

    library: Any
    model: Any
    config: Any
    folder: Path
    logits: torch.Tensor
    tie: list[str]
    rotary: list[str]
    """Buffers that no checkpoint has."""

    @property
    def keys(self) -> list[str]:
        return list(self.model.state_dict())

    @property
    def parameters(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def on_meta(self, **changed: Any) -> Any:
        """Build the same model without values."""
        config = copy.deepcopy(self.config)
        for name, value in changed.items():
            setattr(config, name, value)
        with torch.device("meta"):
            return self.library.AutoModelForCausalLM.from_config(config).eval()

    def fresh(self) -> Any:
        return copy.deepcopy(self.model)

    def state_dict(self, source: str) -> dict[str, torch.Tensor]:
        """Read a checkpoint, as its own library does."""
        path = self.folder / source
        if path.suffix == ".pt":
            return torch.load(path)
        from safetensors.torch import load_file

        return {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}

    def is_right(self, model: Any) -> bool:
        """Tell whether a model answers as the one that was saved, and is tied as that one is."""
        first, second = (model.get_parameter(name) for name in self.tie)
        return first is second and torch.equal(logits_of(model), self.logits)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def recompute(model: nn.Module) -> None:
    """Compute rotary frequencies anew, as their module's __init__ does."""
    for module in model.modules():
        if hasattr(module, "compute_default_rope_parameters"):
            frequencies, _ = module.compute_default_rope_parameters(module.config)
            module.inv_freq = frequencies
            module.original_inv_freq = frequencies.clone()


NAMES = {
    "TP401": ("tensors",),
    "TP402": ("never_written", "partly_written"),
    "TP403": ("names",),
    "TP405": ("replaced_by",),
    "TP501": ("tied", "misshapen", "prefix", "missing", "unexpected", "mixed"),
    "TP502": ("narrowed",),
    "TP505": ("names",),
    "TP507": ("meta_after", "meta_in_state_dict"),
    "TP508": ("nonfinite",),
}


def found(report: Any) -> list[tuple[str, str, Any]]:
    """Answer each finding's code and severity, and what it names."""
    answers = []
    for finding in report.findings:
        names = next((finding.evidence[field] for field in NAMES[finding.code] if finding.evidence.get(field)), None)
        answers.append((finding.code, finding.severity, names))
    return sorted(answers, key=lambda one: one[0])


def tied(saved: Saved, source: str) -> list[tuple[str, str, Any]]:
    """Answer what is told of a file that has one name of two."""
    return [] if source == "model.pt" else [("TP501", "info", {saved.tie[1]: saved.tie[0]})]


def unwritten(names: list[str]) -> list[tuple[str, str, Any]]:
    return [("TP402", "warning", names)] if names else []


def left_on_meta(names: list[str]) -> list[tuple[str, str, Any]]:
    return [("TP401", "warning", names)] if names else []


def looks(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Answer what a load must leave alone where it is refused: objects, versions, bytes."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        name: (id(one), one._version, one.device, None if one.is_meta else one.detach().numpy().tobytes())
        for name, one in named
    }


def refusal(model: nn.Module, path: Any, error: type[Exception] = LoadRefused, **options: Any) -> str:
    """Load what is refused; answer why, having seen that the model is as it was."""
    before = looks(model)
    with pytest.raises(error) as refused:
        tp.safe_load_state_dict(model, path, progress=False, **options)
    assert looks(model) == before
    return str(refused.value)


@pytest.fixture(scope="module")
def library() -> Any:
    need("transformers", find_spec("transformers") is not None, "models of other people's making")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, library, tmp_path_factory) -> Saved:
    torch.manual_seed(0)
    if request.param == "gpt2":
        config = library.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64)
        first = "transformer.wte.weight"
    else:
        config = library.LlamaConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            vocab_size=64,
            tie_word_embeddings=True,
        )
        first = "model.embed_tokens.weight"
    model = library.AutoModelForCausalLM.from_config(config).eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    torch.save(model.state_dict(), folder / "model.pt")
    assert len(list((folder / "shards").glob("*.safetensors"))) > 2
    rotary = [name for name, _ in model.named_buffers() if name not in model.state_dict()]
    assert bool(rotary) == (request.param == "llama")
    assert model.get_parameter(first) is model.get_parameter("lm_head.weight")
    return Saved(library, model, config, folder, logits_of(model), [first, "lm_head.weight"], rotary)


# -- as they should be ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recomputed", [True, False])
@pytest.mark.parametrize("source", SOURCES)
def test_to_empty_and_load(saved, source, recomputed):
    model = saved.on_meta()
    checkpoint = saved.state_dict(source)
    with tp.materialize_audit(model) as audit:
        model.to_empty(device="cpu")
        model.tie_weights()
        if recomputed:
            recompute(model)
        model.load_state_dict(checkpoint, strict=source == "model.pt")
    assert found(audit) == ([] if recomputed else unwritten(saved.rotary))
    assert found(tp.validate_state_dict_load(model, checkpoint)) == tied(saved, source)
    recompute(model)
    assert saved.is_right(model)


@pytest.mark.parametrize("options", [{}, {"chunk_nbytes": 1000}, {"undo": False}], ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_safe_load_into_meta(saved, source, options):
    model = saved.on_meta()
    with tp.materialize_audit(model) as audit:
        report = tp.safe_load_state_dict(model, saved.folder / source, device="cpu", progress=False, **options)
    assert found(report) == unwritten(saved.rotary) + tied(saved, source)
    assert found(audit) == unwritten(saved.rotary)
    with tp.materialize_audit(model) as audit:
        recompute(model)
    assert found(audit) == []
    assert saved.is_right(model)
    assert report.load.matched == len(saved.keys) - (source != "model.pt")
    assert report.missing_keys == ([] if source == "model.pt" else saved.tie[1:])


@pytest.mark.parametrize("source", SOURCES)
def test_safe_load_by_assigning(saved, source):
    model = saved.on_meta()
    report = tp.safe_load_state_dict(model, saved.folder / source, assign=True, progress=False)
    assert found(report) == left_on_meta(saved.rotary) + tied(saved, source)
    recompute(model)
    assert saved.is_right(model)
    report = tp.safe_load_state_dict(model, saved.folder / source, progress=False)
    assert found(report) == tied(saved, source)
    assert saved.is_right(model)


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("source", ["one", "shards"])
def test_from_pretrained(saved, source, threads, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "0" if threads else "1")
    holder = nn.Module()
    with tp.materialize_audit(holder) as audit:
        holder.inner = saved.library.AutoModelForCausalLM.from_pretrained(saved.folder / source, local_files_only=True)
    assert found(audit) == []
    assert sum(audit.load.seen.values()) == len(saved.keys) + len(saved.rotary)
    if not threads:
        assert audit.load.seen == {"written": len(saved.keys) + len(saved.rotary)}
    assert found(tp.validate_state_dict_load(holder.inner, saved.state_dict(source))) == tied(saved, source)
    assert saved.is_right(holder.inner)


def test_from_pretrained_narrower(saved, monkeypatch):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    holder = nn.Module()
    with tp.materialize_audit(holder) as audit:
        holder.inner = saved.library.AutoModelForCausalLM.from_pretrained(
            saved.folder / "one", local_files_only=True, dtype=torch.bfloat16
        )
    assert found(audit) == []
    assert audit.load.seen == {"written": len(saved.keys) + len(saved.rotary)}
    report = tp.validate_state_dict_load(holder.inner, saved.state_dict("model.pt"))
    assert found(report) == [("TP502", "warning", saved.keys)]


@pytest.mark.parametrize("chunk_nbytes", [None, 1000])
def test_safe_load_where_new_tensors_are_on_meta(saved, chunk_nbytes):
    with torch.device("meta"):
        model = saved.library.AutoModelForCausalLM.from_config(saved.config)
        tp.safe_load_state_dict(model, saved.folder / "shards", device="cpu", chunk_nbytes=chunk_nbytes, progress=False)
    recompute(model)
    assert saved.is_right(model)


def test_a_model_beside_its_own_state_dict(saved):
    report = tp.validate_state_dict_load(
        saved.model, {key: value.clone() for key, value in saved.model.state_dict().items()}
    )
    assert found(report) == []
    optimizer = torch.optim.AdamW(saved.model.parameters())
    assert found(tp.materialize_audit(saved.model, optimizer)) == []


# -- as they fail -----------------------------------------------------------------------------------------------------


def test_tie_forgotten(saved):
    checkpoint = saved.state_dict("model.pt")
    model = saved.on_meta()
    with tp.materialize_audit(model) as audit:
        model.to_empty(device="cpu")
        recompute(model)
        model.load_state_dict(checkpoint)
    assert found(audit) == [("TP403", "warning", saved.tie)]
    assert found(tp.validate_state_dict_load(model, checkpoint)) == [("TP403", "warning", saved.tie)]


def test_tie_forgotten_where_the_file_has_one_name(saved):
    checkpoint = saved.state_dict("shards")
    model = saved.on_meta()
    with tp.materialize_audit(model) as audit:
        model.to_empty(device="cpu")
        recompute(model)
        model.load_state_dict(checkpoint, strict=False)
    assert found(audit) == [*unwritten(saved.tie[1:]), ("TP403", "warning", saved.tie)]
    report = tp.validate_state_dict_load(model, checkpoint, strict=False)
    assert found(report) == [("TP501", "warning", saved.tie[1:])]


def test_another_vocabulary(saved):
    model = saved.on_meta(vocab_size=70)
    model.to_empty(device="cpu").tie_weights()
    assert found(tp.validate_state_dict_load(model, saved.state_dict("model.pt"))) == [("TP501", "error", saved.tie)]
    for source in SOURCES:
        assert f"TP501 {saved.tie[0]}" in refusal(model, saved.folder / source)
        assert f"TP501 {saved.tie[0]}" in refusal(saved.on_meta(vocab_size=70), saved.folder / source, device="cpu")


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod."])
def test_prefix(saved, prefix):
    own = {prefix + key: value for key, value in saved.model.state_dict().items()}
    assert found(tp.validate_state_dict_load(saved.model, own)) == [("TP501", "error", prefix)]
    read = {prefix + key: value for key, value in saved.state_dict("model.pt").items()}
    assert found(tp.validate_state_dict_load(saved.fresh(), read)) == [("TP501", "error", prefix)]
    assert "TP501" in refusal(saved.fresh(), read)
    assert "TP501" in refusal(saved.on_meta(), read, device="cpu")


def test_types_narrowed(saved):
    wide = {key: value.double() for key, value in saved.state_dict("model.pt").items()}
    assert found(tp.validate_state_dict_load(saved.model, wide)) == [("TP502", "warning", saved.keys)]
    narrow = saved.fresh().half()
    assert found(tp.validate_state_dict_load(narrow, saved.state_dict("model.pt"))) == [
        ("TP502", "warning", saved.keys)
    ]
    report = tp.safe_load_state_dict(narrow, saved.folder / "model.pt", progress=False)
    assert found(report) == [("TP502", "warning", saved.keys)]
    halves = {key: value.half() for key, value in saved.state_dict("model.pt").items()}
    assert found(tp.validate_state_dict_load(saved.model, halves)) == []


def test_load_into_meta(saved):
    checkpoint = saved.state_dict("model.pt")
    model = saved.on_meta()
    expected = [*left_on_meta(saved.rotary), ("TP507", "error", saved.keys)]
    assert found(tp.validate_state_dict_load(model, checkpoint)) == expected
    with tp.materialize_audit(model) as audit:
        model.load_state_dict(checkpoint)
    assert found(tp.validate_state_dict_load(model, checkpoint)) == expected
    (code, _, names) = found(audit)[0]
    assert (code, set(names)) == ("TP401", {*saved.keys, *saved.rotary})
    assert "TP507" in refusal(model, saved.folder / "model.pt")


@pytest.mark.parametrize("how", ["assign", "to_empty"])
def test_optimizer_built_before(saved, how):
    checkpoint = saved.state_dict("model.pt")
    model = saved.on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"assign": True} if how == "assign" else {"device": "cpu"}
    assert "the optimizer would hold the old" in refusal(
        model, saved.folder / "model.pt", optimizer=optimizer, **options
    )
    with tp.materialize_audit(model, optimizer) as audit:
        if how == "to_empty":
            model.to_empty(device="cpu")
        model.load_state_dict(checkpoint, assign=how == "assign")
        model.tie_weights()
        recompute(model)
    assert found(audit) == [("TP405", "warning", saved.parameters)]
    report = tp.validate_state_dict_load(model, saved.state_dict("model.pt"), optimizer, assign=how == "assign")
    assert found(report) == [("TP405", "warning", saved.parameters)]
    after = torch.optim.AdamW(model.parameters())
    assert found(tp.materialize_audit(model, after)) == []
    assert saved.is_right(model)


def test_vocabulary_resized_after_the_optimizer(saved):
    # transformers puts longer data into the same parameter: the optimizer still has it.
    model = saved.fresh()
    optimizer = torch.optim.AdamW(model.parameters())
    with tp.materialize_audit(model, optimizer) as audit:
        model.resize_token_embeddings(70)
    assert {id(one) for one in model.parameters()} == {id(one) for one in optimizer.param_groups[0]["params"]}
    assert found(audit) == []
    report = tp.validate_state_dict_load(model, saved.state_dict("model.pt"), optimizer)
    assert found(report) == [("TP501", "error", saved.tie)]


@pytest.mark.parametrize("damage", ["missing", "cut", "lacks a tensor"])
def test_damaged_shard(saved, damage, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in (saved.folder / "shards").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    key = next(key for key in weights if key not in saved.tie)
    shard = tmp_path / weights[key]
    error: type[Exception] = TargetError
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-10])
    else:
        save_file({name: value for name, value in load_file(shard).items() if name != key}, shard)
        error = LoadRefused
    word = f"TP501 {key}" if error is LoadRefused else shard.name
    assert word in refusal(saved.on_meta(), tmp_path, error, device="cpu")
    assert word in refusal(saved.fresh(), tmp_path, error)


@pytest.mark.parametrize(
    "options", [{"device": "cpu"}, {"assign": True}, {"device": "cpu", "chunk_nbytes": 100}], ids=str
)
def test_a_hook_that_raises(saved, options):
    def fail(*_: object) -> None:
        raise KeyError

    for model in (saved.on_meta(), saved.fresh()):
        list(model.modules())[-1].register_load_state_dict_post_hook(fail)
        # In pieces no hook would be run: that is refused before.
        error = LoadRefused if "chunk_nbytes" in options else KeyError
        refusal(model, saved.folder / "model.pt", error, **options)
        assert model.get_parameter(saved.tie[0]) is model.get_parameter(saved.tie[1])


def test_built_in_inference_mode(saved):
    with torch.inference_mode():
        model = saved.library.AutoModelForCausalLM.from_config(saved.config)
    (finding,) = tp.validate_state_dict_load(model, saved.state_dict("model.pt")).findings
    assert (finding.code, finding.evidence["requires_grad_lost"]) == ("TP503", saved.keys)
    assert "backward refuses them" in finding.headline


def test_cut_file(saved, tmp_path):
    data = (saved.folder / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(data[: len(data) // 2])
    assert "cut off" in refusal(saved.fresh(), tmp_path / "model.pt", TargetError)


def test_nan_in_one_tensor(saved, tmp_path):
    checkpoint = saved.state_dict("model.pt")
    key = saved.keys[5]
    checkpoint[key].view(-1)[3] = float("nan")
    torch.save(checkpoint, tmp_path / "model.pt")
    report = tp.validate_state_dict_load(saved.model, checkpoint, values=True)
    assert found(report) == [("TP508", "warning", [key])]
    assert report.findings[0].evidence["nan"] == 1
    assert found(tp.validate_state_dict_load(saved.model, checkpoint)) == []
    assert f"TP508 {key}" in refusal(saved.fresh(), tmp_path / "model.pt", values=True)
    assert f"TP508 {key}" in refusal(saved.on_meta(), tmp_path / "model.pt", values=True, device="cpu")


def test_untied_values_for_a_tied_model(saved, tmp_path):
    checkpoint = {key: value.clone() for key, value in saved.state_dict("model.pt").items()}
    assert found(tp.validate_state_dict_load(saved.model, checkpoint)) == []
    checkpoint["lm_head.weight"] += 1
    torch.save(checkpoint, tmp_path / "model.pt")
    report = tp.validate_state_dict_load(saved.model, checkpoint)
    assert found(report) == [("TP505", "warning", saved.tie)]
    assert report.findings[0].evidence["last_write"] == "lm_head.weight"
    model = saved.fresh()
    report = tp.safe_load_state_dict(model, tmp_path / "model.pt", progress=False)
    assert found(report) == [("TP505", "warning", saved.tie)]
    assert torch.equal(model.get_parameter(saved.tie[0]), checkpoint["lm_head.weight"])
    assert found(tp.validate_state_dict_load(saved.model, checkpoint, assign=True))[-1] == (
        "TP403",
        "warning",
        saved.tie,
    )
    report = tp.safe_load_state_dict(saved.on_meta(), tmp_path / "model.pt", assign=True, progress=False)
    assert found(report) == [*left_on_meta(saved.rotary), ("TP403", "warning", saved.tie)]


@pytest.mark.parametrize("where", ["cpu", "disk"])
def test_offloaded_model(saved, where, tmp_path):
    need("accelerate", find_spec("accelerate") is not None, "it offloads models")
    from accelerate import cpu_offload, disk_offload

    model = saved.fresh()
    with tp.materialize_audit(model) as audit:
        if where == "cpu":
            cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
        answer = logits_of(model)
    assert torch.equal(answer, saved.logits)
    assert found(audit) == [("TP401", "info", saved.keys)]
    evidence = audit.findings[0].evidence
    assert (evidence["values_in_hooks"], evidence["hook_devices"]) == (len(saved.keys), [where])
    checkpoint = saved.state_dict("model.pt")
    assert found(tp.validate_state_dict_load(model, checkpoint)) == [("TP401", "info", saved.keys)]
    # What load_state_dict() writes into meta tensors is lost, and the hook keeps its values.
    model.load_state_dict({key: torch.zeros_like(value) for key, value in checkpoint.items()})
    assert torch.equal(logits_of(model), saved.logits)
    for options in ({}, {"device": "cpu"}, {"assign": True}):
        assert "offload hook" in refusal(model, saved.folder / "model.pt", **options)
    own = tp.validate_state_dict_load(saved.model, model.state_dict())
    assert found(own) == [("TP507", "error", saved.keys)]


def test_dispatched_by_accelerate(saved):
    need("accelerate", find_spec("accelerate") is not None, "it loads models")
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model = saved.library.AutoModelForCausalLM.from_config(saved.config)
    model.tie_weights()
    with tp.materialize_audit(model) as audit:
        load_checkpoint_and_dispatch(model, saved.folder / "shards", device_map={"": "cpu"})
    assert found(audit) == []
    assert found(tp.validate_state_dict_load(model, saved.state_dict("model.pt"))) == []
    assert saved.is_right(model)
