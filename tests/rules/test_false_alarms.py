"""Stock models in all their states: nothing above info."""

from __future__ import annotations

import copy
import io
import warnings

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
    "vision transformer": (lambda: VisionTransformer(), image),
    "vision transformer, one image": (lambda: VisionTransformer(), lambda: torch.randn(1, 3, 8, 8)),
    "rotary grouped attention": (lambda: Rotary(), sequence),
    "mixture of experts": (lambda: Experts(), sequence),
    "u-net": (lambda: UNet(), image),
    "old weight norm": (lambda: old_weight_norm(), sequence),
    "parametrized": (lambda: parametrized(), sequence),
    "one layer thrice": (lambda: (layer := nn.Linear(16, 16), nn.Sequential(*[layer, nn.GELU()] * 3))[1], sequence),
    "flat parameters": (lambda: Flat(), sequence),
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


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 16))
        self.position = nn.Parameter(torch.zeros(1, 5, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.block(x)[:, 0])


class Rotary(nn.Module):
    """Grouped queries, rotary position, a cache that is filled slice by slice."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16)
        angles = torch.outer(torch.arange(32.0), 100 ** -torch.arange(0, 1, 0.5))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("cache", torch.zeros(2, 2, 32, 4), persistent=False)

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns[: x.shape[-2]]).flatten(-2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.turn(self.q(x).unflatten(-1, (4, 4)).transpose(1, 2))
        k, v = self.kv(x).chunk(2, dim=-1)
        k, v = self.turn(k[:, None]), v[:, None]
        with torch.no_grad():
            self.cache[:, :, : x.shape[1]] = torch.cat([k, v], dim=1)
        heads = nn.functional.scaled_dot_product_attention(q, k.expand(-1, 4, -1, -1), v.expand(-1, 4, -1, -1))
        return self.out(heads.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        output = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            output = output.index_add(0, row, expert(x[row]) * weights[row, slot, None])
        return output


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.middle = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(16, 3, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.up(torch.cat([self.middle(skip), skip], dim=1)) + x


class Flat(nn.Module):
    """Parameters that are slices of one buffer, with gradients that are slices of another."""

    def __init__(self) -> None:
        super().__init__()
        weight, bias = torch.randn(16 * 4 + 4).mul(0.1).split([64, 4])
        self.weight, self.bias = nn.Parameter(weight.view(4, 16)), nn.Parameter(bias)
        self.weight.grad, self.bias.grad = (
            part.view_as(p) for part, p in zip(torch.zeros(68).split([64, 4]), (self.weight, self.bias), strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


def parametrized() -> nn.Module:
    layer = nn.Linear(16, 16)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(16, 4))


def alarms_beside(objs: dict, name: str) -> list[str]:
    """What is found beside the one thing that is so: the model of that name is on meta, and has no values."""
    told = [f for f in tp.check(objs).findings if f.severity != "info"]
    on_meta = [f for f in told if f.code == "TP401"]
    entries = [
        (f"{name}.{path}.{key}" if path else f"{name}.{key}", isinstance(tensor, nn.Parameter))
        for path, module in objs[name].named_modules(remove_duplicate=False)
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    ]

    assert [sorted(f.evidence["tensors"]) for f in on_meta] == [sorted(entry for entry, _ in entries)]
    assert on_meta[0].evidence["meta_params"] == sum(is_parameter for _, is_parameter in entries)
    return [f"{f.code} {f.where.name}: {f.headline}" for f in told if f.code != "TP401"]


def alarms(objs: dict) -> list[str]:
    return [f"{f.code} {f.where.name}: {f.headline}" for f in tp.check(objs).findings if f.severity != "info"]


@pytest.fixture(params=["as configured", "every byte counts"])
def thresholds(request, tmp_path, monkeypatch):
    """These models are small: once, what they keep alive counts from the first bytes on."""
    if request.param == "every byte counts":
        (tmp_path / "pyproject.toml").write_text("[tool.tensorplay]\npinned-nbytes = 64\n")
        monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_healthy_model_is_silent_in_every_state(name, thresholds):
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
    if name != "old weight norm":  # its weight is a tensor with a graph, which deepcopy refuses
        moved = copy.deepcopy(model)
        if isinstance(moved, ChunkedAttention):
            del moved.last  # what forward kept stays behind when the model moves: TP404 says so
        found += alarms_beside({**objs, "copy": copy.deepcopy(model), "meta": moved.to("meta")}, "meta")
        found += alarms({"half": copy.deepcopy(model).half(), "empty": copy.deepcopy(model).to_empty(device="cpu")})
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found += alarms({**objs, "state": model.state_dict(), "loaded": torch.load(file)})

    assert found == []


@pytest.mark.parametrize("name", MODELS)
def test_model_and_all_that_a_training_script_keeps_of_it_is_silent_and_has_few_facts(name, thresholds):
    make, make_input = MODELS[name]
    model, batch = make(), make_input()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.0 if name == "sparse embedding" else 0.9)
    activations: list = []
    for module in model.modules():
        module.register_forward_hook(lambda _, inputs, output: activations.append((inputs, output)))
    best = model.state_dict()
    average = {key: value.clone() for key, value in best.items()}
    objs = {
        "model": model, "optimizer": optimizer, "activations": activations, "best": best, "average": average,
        "parameters": dict(model.named_parameters()), "buffers": list(model.buffers()),
    }  # fmt: skip

    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            objs["output"] = output = model(batch)
        reports = [tp.check(objs)]
        if training:
            output.square().mean().backward()
            reports.append(tp.check(objs))
            optimizer.step()
            reports.append(tp.check(objs))
        for report in reports:
            assert [f"{f.code} {f.where.name}" for f in report.findings if f.severity != "info"] == []
            assert len(report.findings) <= 8
        assert all(alarms({"one": one}) == [] for one in [*activations, *model.parameters()])
        activations.clear()


def test_facts_of_a_deep_model_are_no_more_than_those_of_one_layer():
    """What every layer does is one cause."""

    def facts(layers: int) -> list[str]:
        model = nn.Sequential(*[ChunkedAttention() for _ in range(layers)])
        kept: list = []
        for layer in model:
            layer.qkv.register_forward_hook(lambda _, __, output: kept.append(output.chunk(3, dim=-1)))
        for layer in model:
            layer(sequence())
        rows = [layer.qkv.weight[0] for layer in model]
        return [f.code for f in tp.check({"model": model, "kept": kept, "rows": rows}).findings]

    assert facts(12) == facts(1)


@pytest.mark.filterwarnings("ignore")
def test_sharded_model_is_silent_from_meta_to_the_step(single_process_group):
    """FSDP2 releases storages by design; what a module shows is always whole."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)])
    for part in [*model, model]:
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    found = alarms_beside({"meta": model}, "meta")
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
    for part in model:  # the module has gathered parameters then, the optimizer the sharded ones
        part.unshard()
        found += alarms(objs)
    for part in model:
        part.reshard()
        found += alarms(objs)

    assert found == []
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    assert [text.split()[0] for text in alarms(objs)] == ["TP405"]
    model[0].unshard()
    states = tp.dtensor.verify(model, optimizer).states
    assert len(states) == 8
    assert set(states.values()) == {"DETACHED"}


@pytest.mark.filterwarnings("ignore")
def test_hooks_of_a_parallelised_model_hold_no_tensor_left_behind(single_process_group):
    from torch.distributed.tensor import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8))
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    assert model[0]._forward_hooks  # which have the mesh, and in it the ranks

    assert {finding.code for finding in tp.check(model).findings} == {"TP401"}
    assert "TP404" not in {finding.code for finding in tp.audit_device_consistency(model).findings}


def test_there_are_enough_models():
    assert len(MODELS) >= 20
