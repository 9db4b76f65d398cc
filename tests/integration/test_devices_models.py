"""Audits of transformers' models, and of what accelerate makes of them: nothing is left behind, nothing alarms."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import tensorplay as tp
from tests.conftest import need

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64}
GROUPED = {**SIZES, "num_key_value_heads": 2}
CAUSAL, PLAIN = "AutoModelForCausalLM", "AutoModel"
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertConfig", SIZES, PLAIN),
    "roberta": ("RobertaConfig", SIZES, PLAIN),
    "albert": ("AlbertConfig", {**SIZES, "embedding_size": 16}, PLAIN),
    "electra": ("ElectraConfig", {**SIZES, "embedding_size": 32}, PLAIN),
    "deberta": ("DebertaV2Config", SIZES, PLAIN),
    "distilbert": (
        "DistilBertConfig",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 64},
        PLAIN,
    ),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64}, CAUSAL),
    "neox": ("GPTNeoXConfig", SIZES, CAUSAL),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}, CAUSAL),
    "llama": ("LlamaConfig", GROUPED, CAUSAL),
    "llama, dynamic rope": (
        "LlamaConfig",
        {**GROUPED, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        CAUSAL,
    ),
    "qwen2": ("Qwen2Config", GROUPED, CAUSAL),
    "mistral": ("MistralConfig", GROUPED, CAUSAL),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}, CAUSAL),
    "gemma": ("GemmaConfig", {**GROUPED, "head_dim": 8}, CAUSAL),
    "phi": ("PhiConfig", SIZES, CAUSAL),
    "opt": (
        "OPTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
        },
        CAUSAL,
    ),
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "state_size": 4}, CAUSAL),
    "clip": ("CLIPTextConfig", SIZES, PLAIN),
    "t5": (
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64},
        PLAIN,
    ),
    "vit": (
        "ViTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 8,
        },
        PLAIN,
    ),
}
NO_TEXT = ("t5", "vit")


def alarms(report: Any) -> list[tuple[str, str]]:
    return [(finding.code, finding.where.name) for finding in report.findings if finding.severity != "info"]


@pytest.fixture(scope="module")
def library() -> Any:
    need("transformers", find_spec("transformers") is not None, "models of other people's making")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def made(library: Any, name: str) -> torch.nn.Module:
    config, options, auto = CONFIGS[name]
    return getattr(library, auto).from_config(getattr(library, config)(**options))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_silent_on_each_device(library, npu, name):
    model = made(library, name)
    optimizer = torch.optim.AdamW(model.parameters())
    assert alarms(tp.audit_device_consistency(model, optimizer)) == []
    if name not in NO_TEXT:
        with tp.audit_device_consistency(model) as audit:
            model(input_ids=torch.randint(0, 64, (2, 8)))
        assert alarms(audit) == []
    for device in ("npu:1", "cpu"):
        assert alarms(tp.audit_device_consistency(model.to(device), optimizer)) == []
    assert alarms(tp.audit_device_consistency(made(library, name).to("meta"))) == []
    with torch.device("meta"):
        empty = made(library, name)
    assert alarms(tp.audit_device_consistency(empty)) == []


def test_there_are_enough_models():
    assert len(CONFIGS) >= 20


def test_offloaded_and_empty_models_are_named(library):
    need("accelerate", find_spec("accelerate") is not None, "it offloads models")
    from accelerate import cpu_offload, init_empty_weights

    with init_empty_weights():
        empty = made(library, "llama")
    assert alarms(tp.audit_device_consistency(empty)) == []
    model = made(library, "llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    with tp.audit_device_consistency(model) as audit:
        model(input_ids=torch.randint(0, 64, (2, 8)))
    assert alarms(audit) == []
    assert audit.placement.offloaded > 0
    assert "moved as needed" in str(audit)
