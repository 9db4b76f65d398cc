"""TP407: plain tensors among the DTensors of one module; what forward itself does with them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import tensorplay as tp

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks for data by two for tensors, of which this process is the first; collectives answer at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def mixed(model: nn.Module) -> list[tp.Finding]:
    return list(tp.check({"model": model}, select=["TP407"], grads=False).findings)


def error_of(action: Callable[[], object]) -> str:
    """What PyTorch says where it refuses, or nothing."""
    try:
        action()
    except Exception as error:
        return str(error)
    return ""


def distributed(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor.detach(), mesh, [Replicate()] * mesh.ndim)


class Scaled(nn.Module):
    """All of its tensors meet in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.v = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("index", torch.arange(4))
        self.register_buffer("steps", torch.tensor(1))
        self.register_buffer("one", torch.ones(1))
        self.register_buffer("absent", None)

    def forward(self) -> torch.Tensor:
        return self.w * self.mask * self.v * self.index * self.steps * self.one

    def distribute(self, names: list[str], mesh: DeviceMesh) -> Scaled:
        for name in names:
            if name in self._parameters:
                self._parameters[name] = nn.Parameter(distributed(getattr(self, name), mesh))
            else:
                self._buffers[name] = distributed(getattr(self, name), mesh)
        return self


ALL = ["w", "v", "mask", "index"]

# -- fires


def test_tp407_plain_buffer_fires(mesh):
    model = nn.Sequential(nn.Linear(2, 2), Scaled().distribute(["w", "v", "index"], mesh["tp"]))

    (finding,) = mixed(model)

    assert (finding.code, finding.severity, finding.where.name) == ("TP407", "warning", "model.1.mask")
    assert finding.headline == "w, v, index are DTensors, mask a plain Tensor: distribute mask"
    assert finding.evidence == {
        "kinds": {"w": "DTensor", "v": "DTensor", "index": "DTensor", "mask": "Tensor"},
        "placements": dict.fromkeys(["w", "v", "index"], "(Replicate(),)"),
        "devices": ["cpu"],
        "modules": ["model.1"],
    }
    assert "distribute_tensor(mask, mesh, [Replicate()])" in finding.fix
    assert "got mixed torch.Tensor and DTensor" in finding.why


def test_tp407_several_dimensions_of_the_mesh(mesh):
    model = Scaled()
    model.w = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Replicate(), Shard(0)], run_check=False))
    model.distribute(["v", "index"], mesh)

    (finding,) = mixed(model)

    assert finding.evidence["placements"]["w"] == str(model.w.placements) == "(Replicate(), Shard(dim=0))"
    assert "distribute_tensor(mask, mesh, [Replicate(), Replicate()])" in finding.fix


def test_tp407_plain_parameters_fire_too(mesh):
    model = Scaled().distribute(["w"], mesh["tp"])

    (finding,) = mixed(model)

    assert finding.headline == "w is a DTensor Replicate(), v, mask, index plain Tensors: distribute v, mask, index"


def test_tp407_is_one_finding_for_modules_alike(mesh):
    layers = [Scaled().distribute(["w", "v", "index"], mesh["tp"]) for _ in range(3)]

    (finding,) = mixed(nn.Sequential(*layers, layers[0]))

    assert finding.evidence["modules"] == ["model.0", "model.1", "model.2"]
    assert "the same in model.1, model.2" in finding.subject


def test_tp407_on_meta_fires(mesh):
    model = Scaled().distribute(["w", "v", "index"], mesh["tp"]).to("meta")

    assert [finding.evidence["devices"] for finding in mixed(model)] == [["meta"]]


def test_tp407_is_told_once_a_load_is_over(mesh):
    model = Scaled().distribute(["w", "v", "index"], mesh["tp"])

    ahead = tp.validate_state_dict_load(model, model.state_dict())

    assert "TP407" not in [finding.code for finding in ahead.findings]


# -- silent


def test_tp407_nothing_of_the_users_is_run(mesh):
    class Guarded(Scaled):
        def __getattr__(self, name: str):
            if armed:
                raise AssertionError(f"asked for {name}")
            return super().__getattr__(name)

    def hook(*_: object) -> None:
        raise AssertionError("a hook was called")

    armed = False
    model = Guarded().distribute(["w", "v", "index"], mesh["tp"])
    model.register_load_state_dict_post_hook(hook)
    model.register_forward_pre_hook(hook)
    armed = True

    (finding,) = mixed(model)
    armed = False

    assert finding.evidence["placements"]["w"] == "(Replicate(),)"


@pytest.mark.parametrize("names", [[], ALL, [*ALL, "steps"], [*ALL, "steps", "one"]])
def test_tp407_tensors_of_one_element_may_be_plain(mesh, names):
    model = Scaled().distribute(names, mesh["tp"])

    assert mixed(model) == []
    model()


def test_tp407_children_are_judged_for_themselves(mesh):
    model = Scaled()
    model.inner = Scaled().distribute(ALL, mesh["tp"])

    assert mixed(model) == []


def test_tp407_a_property_of_the_class_answers_for_the_table(mesh):
    class Unwrapping(Scaled):
        w = property(lambda self: self._parameters["w"].to_local())

    model = Scaled().distribute(["w"], mesh["tp"])
    assert len(mixed(model)) == 1
    model.__class__ = Unwrapping  # as libraries do that gather in a property

    assert mixed(model) == []
    model()


class Foreign(torch.Tensor):
    """A DTensor over the memory of its local tensor."""

    _local_tensor: torch.Tensor

    def __new__(cls, local: torch.Tensor) -> Foreign:
        return torch.Tensor._make_subclass(cls, local)

    def __init__(self, local: torch.Tensor) -> None:
        self._local_tensor = local
        self._placements = (ForeignShard(1),)

    @property
    def placements(self) -> None:
        raise AssertionError("a property was run")


class ForeignShard:
    def __init__(self, dim: int) -> None:
        self._dim = dim

    @property
    def dim(self) -> int:
        raise AssertionError("a property was run")

    def __repr__(self) -> str:
        raise AssertionError("a method was run")


def test_tp407_of_another_library_is_an_info():
    model = nn.Module()
    model.w = nn.Parameter(Foreign(torch.ones(2)), requires_grad=False)
    model.w._local_tensor, model.w._placements = torch.ones(2), (ForeignShard(1),)
    model.register_buffer("mask", torch.ones(2))

    (finding,) = mixed(model)

    assert finding.severity == "info"
    assert finding.headline == "w is a DTensor ForeignShard(1), mask a plain Tensor: distribute mask"
    assert finding.evidence["placements"] == {"w": "(ForeignShard(dim=1),)"}


class Sharding:
    """What a library's own fully_shard() has of each parameter, as the hook after loading refers to it."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module_info = Place(module, name)
        self.sharded_param = module._parameters[name]
        self._sharded_param_data = self.sharded_param._local_tensor.view(-1)
        module.register_load_state_dict_post_hook(lambda *_: self.reset())

    def reset(self) -> None:
        raise AssertionError("a hook was called")


class Place:
    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.param_name = module, name
        self.shared_modules: list[nn.Module] = []
        self.shared_param_names: list[str] = []


@pytest.mark.parametrize("sharded", [True, False])
def test_tp407_what_another_library_shards_is_gathered(sharded):
    model = nn.Module()
    model.w = nn.Parameter(Foreign(torch.ones(2)), requires_grad=False)
    model.w._local_tensor = torch.ones(2)
    model.register_buffer("mask", torch.ones(2))
    if sharded:
        Sharding(model, "w")

    assert len(mixed(model)) == (not sharded)


# -- fully_shard()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Scaled(), Scaled()
        self.b.w = self.a.w

    def forward(self) -> torch.Tensor:
        return self.a() + self.b()


FLOWS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "sharded": lambda mesh: fully_shard(Scaled(), mesh=mesh["dp"]),
    "sharded, not again after forward": lambda mesh: fully_shard(
        Scaled(), mesh=mesh["dp"], reshard_after_forward=False
    ),
    "sharded and replicated": lambda mesh: fully_shard(Scaled(), mesh=mesh),
    "within": lambda mesh: fully_shard(Inside(), mesh=mesh["dp"]),
    "with an ignored parameter": lambda mesh: fully_shard(model := Scaled(), mesh=mesh["dp"], ignored_params={model.v}),
    "tied": lambda mesh: fully_shard(Tied(), mesh=mesh["dp"]),
    "distributed before": lambda mesh: fully_shard(Scaled().distribute(ALL, mesh["tp"]), mesh=mesh["dp"]),
}


class Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scaled()

    def forward(self) -> torch.Tensor:
        return self.inner()


@pytest.mark.parametrize("name", FLOWS)
def test_tp407_fully_shard_is_silent_throughout(mesh, name):
    model = FLOWS[name](mesh)
    asked: list[list[tp.Finding]] = [mixed(model)]
    for module in model.modules():
        module.register_forward_pre_hook(lambda *_: asked.append(mixed(model)))

    out = model()
    asked.append(mixed(model))
    out.sum().backward()
    asked.append(mixed(model))

    assert len(asked) > 3
    assert asked == [[]] * len(asked)


def test_tp407_fully_shard_of_a_model_on_meta_and_assigned(mesh):
    with torch.device("meta"):
        model = Scaled()
    fully_shard(model, mesh=mesh["dp"])
    assert mixed(model) == []
    model.to_empty(device="cpu")
    assert mixed(model) == []
    model.load_state_dict(model.state_dict(), assign=True)
    assert mixed(model) == []
    assert mixed(nn.ModuleList([model])) == []


def test_tp407_a_tied_parameter_is_gathered_though_its_first_module_is_elsewhere(mesh):
    model = fully_shard(Tied(), mesh=mesh["dp"])

    assert mixed(model.b) == []


def test_tp407_what_was_distributed_before_is_gathered_to_a_dtensor(mesh):
    model = fully_shard(Scaled().distribute(["w", "v", "index"], mesh["tp"]), mesh=mesh["dp"])

    (finding,) = mixed(model)

    assert finding.evidence["kinds"] == {"w": "DTensor", "v": "DTensor", "index": "DTensor", "mask": "Tensor"}
    assert "got mixed" in error_of(model)


# -- Tensor parallelism


def tokens() -> torch.Tensor:
    return torch.randint(16, (2, 4))


def features() -> torch.Tensor:
    return torch.randn(2, 4, 8)


def into_replicated(module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> list[DTensor]:
    return [DTensor.from_local(one, mesh, [Replicate()], run_check=False) for one in inputs]


STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "columns": ColwiseParallel,
    "rows": RowwiseParallel,
    "sequence": SequenceParallel,
    "input": lambda: PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "output": lambda: PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
    "both": lambda: PrepareModuleInputOutput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        output_layouts=Replicate(),
        desired_output_layouts=Shard(1),
    ),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(8, 8),
    "embedding": lambda: nn.Embedding(16, 8),
    "layer norm": lambda: nn.LayerNorm(8),
    "rms norm": lambda: nn.RMSNorm(8),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "dropout": nn.Dropout,
}


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("layer", LAYERS)
def test_tp407_stock_styles_distribute_all_of_a_module(mesh, layer, style, shard):
    made = LAYERS[layer]()
    if style in ("columns", "rows") and layer not in ("linear", "embedding"):
        with pytest.raises(NotImplementedError):
            parallelize_module(made, mesh["tp"], STYLES[style]())
        return
    model: nn.Module = nn.Sequential(parallelize_module(made, mesh["tp"], STYLES[style]()))
    if shard:
        fully_shard(model, mesh=mesh["dp"])

    assert mixed(model) == []
    error_of(lambda: model(tokens() if layer == "embedding" else features()))  # an input may be what does not fit
    assert mixed(model) == []


@pytest.mark.parametrize("layer", LAYERS)
def test_tp407_distribute_module_replicates_the_rest(mesh, layer):
    model = distribute_module(LAYERS[layer](), mesh["tp"], input_fn=into_replicated)

    assert mixed(model) == []


# -- Random modules


class Product(nn.Module):
    """A random table, all of which meets in forward."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        for number in range(rng.randint(2, 6)):
            tensor = torch.ones(rng.choice([(3, 4), (4,), (1, 4), (), (1,)]))
            if rng.random() < 0.5:
                self.register_parameter(f"p{number}", nn.Parameter(tensor))
            else:
                self.register_buffer(f"b{number}", tensor.long() if rng.random() < 0.3 else tensor)

    def forward(self) -> torch.Tensor:
        out: torch.Tensor | None = None
        for tensor in [*self._parameters.values(), *self._buffers.values()]:
            out = tensor if out is None else out * tensor
        assert out is not None
        return out


@pytest.mark.parametrize("seed", range(60))
def test_tp407_random_modules_agree_with_forward(mesh, seed):
    rng = random.Random(seed)
    models: list[nn.Module] = []
    for _ in range(rng.randint(1, 4)):
        model = Product(rng)
        share = rng.choice([0, 0.5, 0.8, 1])
        for table in (model._parameters, model._buffers):
            for name, tensor in list(table.items()):
                if rng.random() < share:
                    made = distributed(tensor, mesh["tp"])
                    table[name] = nn.Parameter(made) if table is model._parameters else made
        models.append(model)

    told = {path for finding in mixed(nn.ModuleList(models)) for path in finding.evidence["modules"]}

    fails = {f"model.{number}" for number, model in enumerate(models) if "got mixed" in error_of(model)}
    assert told == fails
