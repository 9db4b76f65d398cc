"""Stock models in all their states: nothing above info."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import tensorplay as tp


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens)))


class ChunkedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.register_buffer("mask", torch.ones(8, 8).tril().expand(1, 1, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(2, 8, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        output = nn.functional.scaled_dot_product_attention(q, k, v, self.mask.bool())
        self.last = output.detach()
        return output


def recurrent(kind) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = kind(4, 8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.rnn(x)[0]

    return Net()


def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


def sequence() -> torch.Tensor:
    return torch.randn(2, 8, 16)


MODELS = {
    "linear": (lambda: nn.Linear(16, 4), sequence),
    "mlp in-place relu": (lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 2)), sequence),
    "conv": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), image),
    "conv channels last": (lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), image),
    "depthwise": (lambda: nn.Conv2d(3, 6, 3, groups=3), image),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 4, 3), image),
    "conv 3d": (lambda: nn.Conv3d(3, 4, 3), lambda: torch.randn(1, 3, 5, 5, 5)),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(1, 3), nn.Conv2d(3, 2, 1)), image),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True), image),
    "layer norm": (lambda: nn.LayerNorm(16), sequence),
    "rms norm": (lambda: nn.RMSNorm(16), sequence),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 4)), sequence),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4)), sequence),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(16, 4)), sequence),
    "lstm": (lambda: recurrent(nn.LSTM), lambda: torch.randn(2, 5, 4)),
    "gru": (lambda: recurrent(nn.GRU), lambda: torch.randn(2, 5, 4)),
    "rnn": (lambda: recurrent(nn.RNN), lambda: torch.randn(2, 5, 4)),
    "encoder": (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2), sequence),
    "decoder layer": (lambda: Decoder(), sequence),
    "multi-head": (lambda: Attention(), sequence),
    "tied language model": (TiedLanguageModel, lambda: torch.randint(32, (2, 8))),
    "chunked attention": (ChunkedAttention, sequence),
    "embedding bag": (lambda: nn.EmbeddingBag(32, 4), lambda: torch.randint(32, (2, 8))),
    "sparse embedding": (lambda: nn.Embedding(32, 4, sparse=True), lambda: torch.randint(32, (2, 8))),
    "bilinear": (lambda: Twice(nn.Bilinear(16, 16, 4)), sequence),
    "prelu": (lambda: nn.Sequential(nn.PReLU(), nn.Linear(16, 2)), sequence),
    "adaptive softmax": (lambda: Softmax(), lambda: torch.randn(6, 16)),
}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, x)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x)


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(16, 20, [5, 10])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.softmax(x, torch.arange(6)).output


def alarms(objs: dict) -> list[str]:
    return [f"{f.code} {f.where.name}: {f.headline}" for f in tp.check(objs).findings if f.severity != "info"]


@pytest.mark.parametrize("name", MODELS)
def test_healthy_model_is_silent_in_every_state(name):
    make, make_input = MODELS[name]
    model, batch = make(), make_input()
    sparse = name == "sparse embedding"
    optimizer = (torch.optim.SparseAdam if sparse else torch.optim.Adam)(model.parameters())
    objs = {"model": model, "optimizer": optimizer, "batch": batch}

    found = alarms(objs)
    for _ in range(2):
        output = model(batch)
        found += alarms({**objs, "output": output})
        output.square().mean().backward()
        found += alarms({**objs, "output": output})
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found += alarms({**objs, "state": model.state_dict(), "loaded": torch.load(file), "copy": copy.deepcopy(model)})
    found += alarms({"meta": copy.deepcopy(model).to("meta"), "half": copy.deepcopy(model).half()})

    assert found == []


@pytest.mark.filterwarnings("ignore")
def test_sharded_model_is_silent_from_meta_to_the_step(single_process_group):
    """FSDP2 releases storages by design; what a module shows is always whole."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)])
    for part in [*model, model]:
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    found = alarms({"meta": model})
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters())
    objs = {"model": model, "optimizer": optimizer}
    model[0].register_forward_hook(lambda *_: found.extend(alarms(objs)))
    model(torch.randn(4, 8)).sum().backward()
    found += alarms(objs)
    optimizer.step()
    found += alarms(objs)

    assert found == []


def test_there_are_enough_models():
    assert len(MODELS) >= 20
