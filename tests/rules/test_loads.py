"""TP401 to TP405 and TP501 to TP508: random models with one fault, or none; what load_state_dict() itself does."""

from __future__ import annotations

import contextlib
import copy
import io
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tensorplay as tp

SEEDS = range(25)

# -- Random models


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Odd(nn.Module):
    """What tables may hold beside matrices."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.ones(0, 3))
        self.register_parameter("absent", None)
        self.register_buffer("also_absent", None)
        self.register_buffer("steps", torch.arange(rng.randint(1, 4)))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.none: nn.Module | None
        self.register_module("none", None)


class Stateful(nn.Module):
    """Keeps something beside its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.count = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def lazy(rng: random.Random) -> nn.Module:
    layer = nn.LazyLinear(rng.randint(2, 4))
    if rng.random() < 0.8:
        layer.initialize_parameters(torch.ones(1, 3))
    return layer


def parametrized() -> nn.Module:
    layer = nn.Linear(3, 2)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(3, 2))


LEAVES: list[Callable[[random.Random], nn.Module]] = [
    lambda rng: nn.Linear(rng.randint(2, 5), rng.randint(2, 5), bias=rng.random() < 0.7),
    lambda rng: nn.Linear(3, 3),
    lambda rng: nn.BatchNorm1d(rng.randint(2, 4), affine=rng.random() < 0.7),
    lambda rng: nn.BatchNorm2d(3, track_running_stats=rng.random() < 0.5),
    lambda rng: nn.LayerNorm(rng.randint(2, 4)),
    lambda rng: nn.Embedding(4, 3),
    lambda rng: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    lambda rng: old_weight_norm(),
    lambda rng: parametrized(),
    lambda rng: nn.Dropout(),
    Odd,
    lambda rng: Stateful(),
    lazy,
]


def grow(rng: random.Random, depth: int = 0, leaves: list[Callable[[random.Random], nn.Module]] = LEAVES) -> nn.Module:
    """A tree of containers, with a submodule under two names now and then."""
    if depth > 0 and (depth > 2 or rng.random() < 0.6):
        return rng.choice(leaves)(rng)
    children = [grow(rng, depth + 1, leaves) for _ in range(rng.randint(2, 3))]
    if rng.random() < 0.3:
        children.append(rng.choice(children))
    kind = rng.randrange(4)
    if kind == 0:
        return nn.Sequential(*children)
    if kind == 1:
        return nn.ModuleList(children)
    named = {f"part{number}": child for number, child in enumerate(children)}
    if kind == 2:
        return nn.ModuleDict(named)
    block = nn.Module()
    for name, child in named.items():
        block.add_module(name, child)
    block.register_module("none", None)
    return block


PLAIN = [leaf for leaf in LEAVES if leaf is not lazy]


def grown(seed: int, leaves: list[Callable[[random.Random], nn.Module]] = PLAIN) -> tuple[random.Random, nn.Module]:
    """A random model that has two matrices of a shape at least; its values are all different."""
    rng = random.Random(seed)
    model = nn.Module()
    model.add_module("first", nn.Linear(3, 3))
    model.add_module("grown", grow(rng, 0, leaves))
    model.add_module("last", nn.Linear(3, 3))
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, tensor in entries(model):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape) + 1)
            else:
                tensor.add_(rng.randint(1, 1_000_000))
    return rng, model


def entries(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Everything registered with values, by each of its names."""
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and not torch.nn.parameter.is_lazy(tensor):
                yield f"{path}.{name}".lstrip("."), tensor


def names_of(model: nn.Module, tensor: torch.Tensor) -> set[str]:
    return {name for name, one in entries(model) if one is tensor}


def all_names(model: nn.Module, keys: set[str]) -> set[str]:
    """Names, and the others that the same tensors have in a shared module."""
    of = dict(entries(model))
    return {name for key in keys for name in names_of(model, of[key])}


def table_of(model: nn.Module, key: str) -> tuple[dict[str, Any], str]:
    path, _, name = key.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if name in module._parameters else module._buffers), name


def put(model: nn.Module, key: str, tensor: torch.Tensor) -> None:
    table, name = table_of(model, key)
    table[name] = tensor


def tie(rng: random.Random, model: nn.Module) -> set[str]:
    """Make one parameter of two of a shape, in different modules; answer its names."""
    first, last = rng.sample(["first.weight", "last.weight"], 2)
    put(model, last, model.get_parameter(first))
    return {first, last}


def saved(rng: random.Random, model: nn.Module) -> dict[str, Any]:
    """What a checkpoint of the model holds, in one of the ways in which it comes."""
    way = 0 if any(map(torch.nn.parameter.is_lazy, model.parameters())) else rng.randrange(3)
    if way == 0:
        return copy.deepcopy(model.state_dict())
    if way == 1:
        return {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in model.state_dict().items()
        }
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def zeros_for(model: nn.Module) -> dict[str, Any]:
    return {
        key: torch.zeros_like(value, device="cpu") if isinstance(value, torch.Tensor) else value
        for key, value in model.state_dict().items()
    }


def tensors_in(state_dict: dict[str, Any]) -> list[str]:
    return [key for key, value in state_dict.items() if isinstance(value, torch.Tensor)]


NAMES = {
    "TP401": ["tensors"],
    "TP402": ["never_written", "partly_written"],
    "TP403": ["names"],
    "TP405": ["tensors"],
    "TP501": ["missing", "unexpected", "accepted_unexpected", "misshapen", "not_tensors", "tied", "mixed"],
    "TP502": ["narrowed"],
    "TP503": ["requires_grad_lost"],
    "TP504": ["aliases"],
    "TP505": ["names"],
    "TP506": ["tensors"],
    "TP507": ["meta_after", "meta_in_state_dict"],
    "TP508": ["nonfinite"],
}


def told(report: Any, *infos: str) -> dict[str, set[str]]:
    """The names in each rule's findings; of those that are infos where they are asked for."""
    found: dict[str, set[str]] = {}
    for finding in report.findings:
        if finding.severity != "info" or finding.code in infos:
            names = found.setdefault(finding.code, set())
            for field in NAMES.get(finding.code, ()):
                names.update(finding.evidence.get(field, ()))
    return found


def some(rng: random.Random, names: list[str]) -> set[str]:
    return set(rng.sample(names, rng.randint(1, min(3, len(names)))))


# -- Healthy neighbours


@pytest.mark.parametrize("seed", range(60))
def test_healthy_model_and_its_own_checkpoint_are_silent(seed):
    rng, model = grown(seed, LEAVES)
    if seed % 3 == 0:
        tie(rng, model)
    state_dict = saved(rng, model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if not torch.nn.parameter.is_lazy(p)], lr=0.1)

    assert told(tp.validate_state_dict_load(model, state_dict, optimizer, values=True)) == {}
    with tp.materialize_audit(model, optimizer) as audit:
        model.load_state_dict(state_dict)
    assert told(audit) == {}
    report = tp.validate_state_dict_load(model, state_dict, optimizer, values=True)
    assert told(report, *NAMES) == {}
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    assert not {"TP401", "TP405"} & told(tp.check({"model": model, "optimizer": optimizer})).keys()


@pytest.mark.parametrize("seed", SEEDS)
def test_healthy_model_is_loaded_by_assignment_and_by_all_or_nothing(seed):
    rng, model = grown(seed)
    if seed % 3 == 0:
        tie(rng, model)
    state_dict = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    assert told(tp.safe_load_state_dict(model, state_dict, optimizer=optimizer)) == {}
    assert told(tp.safe_load_state_dict(model, copy.deepcopy(state_dict), assign=True)) == {}
    assert told(tp.validate_state_dict_load(model, state_dict, assign=True)) == {}
    assert told(tp.validate_state_dict_load(model, state_dict)) == {}


# -- TP401, TP402, TP403, TP405


def to_meta(model: nn.Module, key: str) -> set[str]:
    """Leave one tensor on meta, under all its names."""
    table, name = table_of(model, key)
    tensor = table[name]
    names = names_of(model, tensor)
    left = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        left = nn.Parameter(left, requires_grad=tensor.requires_grad)
    for one in names:
        put(model, one, left)
    return names


@pytest.mark.parametrize("seed", SEEDS)
def test_tp401_names_what_is_left_on_meta(seed):
    rng, model = grown(seed)
    if rng.random() < 0.3:
        tie(rng, model)
    keys = [key for key, _ in entries(model)]
    planted: set[str] = set()
    with tp.materialize_audit(model) as audit:
        for key in some(rng, keys):
            planted |= to_meta(model, key)

    assert told(audit) == {"TP401": planted}
    assert told(tp.materialize_audit(model)) == {"TP401": planted}
    by_check = told(tp.check({"model": model}))
    assert by_check["TP401"] == {f"model.{key}" for key in planted}
    kept_out = planted - set(model.state_dict())
    told_of_load = told(tp.validate_state_dict_load(model, zeros_for(model)))
    assert told_of_load.get("TP401", set()) == kept_out
    assert told_of_load.get("TP507", set()) == planted - kept_out


def materialized(model: nn.Module) -> None:
    """to_empty(), and what was one parameter is one again."""
    before: dict[int, list[str]] = {}
    for key, tensor in entries(model):
        before.setdefault(id(tensor), []).append(key)
    model.to_empty(device="cpu")
    for keys in before.values():
        table, name = table_of(model, keys[0])
        for key in keys[1:]:
            put(model, key, table[name])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("healthy", [False, True])
def test_tp402_names_what_nobody_wrote(seed, healthy):
    rng, model = grown(seed)
    if rng.random() < 0.3:
        tie(rng, model)
    filled = [(key, tensor) for key, tensor in entries(model) if tensor.numel()]
    planted: set[str] = set()
    for key in [] if healthy else some(rng, [key for key, _ in filled]):
        table, name = table_of(model, key)
        planted |= names_of(model, table[name])
    partly: set[str] = set()
    with tp.materialize_audit(model) as audit:
        materialized(model)
        with torch.no_grad():
            for key, tensor in entries(model):
                if key not in planted:
                    rng.choice([torch.Tensor.zero_, lambda t: t.fill_(1), lambda t: t.copy_(torch.ones(t.shape))])(
                        tensor
                    )
                elif tensor.dim() and len(tensor) > 1 and rng.random() < 0.3:
                    tensor[:1].fill_(1)
                    partly |= names_of(model, tensor)

    assert told(audit) == ({"TP402": planted} if planted else {})
    assert partly == {name for f in audit.findings for name in f.evidence.get("partly_written", ())}
    if not planted:
        with tp.materialize_audit(model) as audit:
            materialized(model)
            model.load_state_dict(zeros_for(model))
        kept_out = {key for key, tensor in entries(model) if key not in model.state_dict() and tensor.numel()}
        assert told(audit) == ({"TP402": kept_out} if kept_out else {})


@pytest.mark.parametrize("seed", SEEDS)
def test_tp403_names_ties_that_are_lost(seed):
    rng, model = grown(seed)
    names = tie(rng, model)
    tied = copy.deepcopy(model.state_dict())
    untied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in tied.items()}
    with tp.materialize_audit(model) as audit:
        model.load_state_dict(tied)
    assert told(audit) == {}
    assert told(tp.validate_state_dict_load(model, untied, assign=True)) == {"TP403": names}  # shared modules stay so
    assert told(tp.validate_state_dict_load(model, tied, assign=True)) == {}

    with tp.materialize_audit(model) as audit:
        one = rng.choice(sorted(names))
        put(model, one, nn.Parameter(model.get_parameter(one).detach().clone()))
    assert told(audit) == {"TP403": names}
    assert told(tp.validate_state_dict_load(model, tied)) == {"TP403": names}
    assert told(tp.validate_state_dict_load(model, untied)) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_tp405_names_what_only_the_optimizer_holds(seed):
    rng, model = grown(seed)
    parameters = list(model.parameters())
    cut = rng.randint(1, len(parameters) - 1)
    kind = rng.choice([torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
    optimizer = kind([{"params": parameters[:cut]}, {"params": parameters[cut:], "lr": 0.01}], lr=0.1)
    if rng.random() < 0.5:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert told(tp.materialize_audit(model, optimizer)) == {}

    everything = rng.random() < 0.4
    numbers = range(len(parameters)) if everything else sorted(rng.sample(range(len(parameters)), rng.randint(1, 3)))
    planted = {
        f"optimizer.param_groups[0].params[{n}]" if n < cut else f"optimizer.param_groups[1].params[{n - cut}]"
        for n in numbers
    }
    for number in numbers:
        parameter = parameters[number]
        new = nn.Parameter(parameter.detach().clone())
        for name in names_of(model, parameter):
            put(model, name, new)
    del parameters, parameter, new

    assert told(tp.materialize_audit(model, optimizer)) == {"TP405": planted}
    assert told(tp.check({"model": model, "optimizer": optimizer}))["TP405"] == planted
    state_dict = copy.deepcopy(model.state_dict())
    assert told(tp.validate_state_dict_load(model, state_dict, optimizer)) == {"TP405": planted}
    assert told(tp.materialize_audit(model, torch.optim.SGD(model.parameters()))) == {}


# -- TP501


def mutate(rng: random.Random, model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Do to a state dict what happens to them."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    absent = [
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for name, child in module._modules.items()
        if child is None
    ]
    for _ in range(rng.randint(0, 4)):
        keys = list(state_dict)
        key = rng.choice(keys) if keys else "none"
        tensors = tensors_in(state_dict)
        what = rng.randrange(9)
        if what == 0 and keys:
            del state_dict[key]
        elif what == 1:
            state_dict[f"{rng.choice(paths)}.stranger".lstrip(".")] = torch.ones(2)
        elif what == 2:
            state_dict[f"{rng.choice(paths)}._extra_state".lstrip(".")] = {"count": 4}
        elif what == 3 and absent:
            state_dict[rng.choice(absent) + rng.choice([".weight", ".a.b", "", "thing"])] = torch.ones(2)
        elif what == 4 and tensors:
            one = rng.choice(tensors)
            state_dict[one] = rng.choice([torch.ones(7), torch.ones(1), torch.tensor(1.0), torch.ones(2, 3, 1)])
        elif what == 5 and tensors and not any(map(torch.nn.parameter.is_lazy, model.parameters())):
            state_dict[rng.choice(tensors)] = rng.choice([None, 3, "text", [torch.ones(1)]])
        elif what == 6:
            state_dict[rng.choice([key + ".more", "more", key + "x", "first.weight.data"])] = torch.ones(1)
        elif what == 7:
            for one in [one for one in keys if one.endswith("num_batches_tracked")]:
                del state_dict[one]
        elif what == 8 and rng.random() < 0.3:
            prefix = rng.choice(["module.", "_orig_mod."])
            for one in keys:
                state_dict[prefix + one] = state_dict.pop(one)


def said_by_torch(model: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> dict[str, set[str]]:
    """What load_state_dict() answers or raises, as it says it."""
    try:
        answer = model.load_state_dict(state_dict, strict=strict)
    except RuntimeError as error:
        text = str(error)
        lines = {field: re.search(rf"{field} key.*?: (.*)", text) for field in ("Missing", "Unexpected")}
        listed = {field.lower(): set(re.findall(r'"([^"]*)"', line[1])) for field, line in lines.items() if line}
        return (
            {"missing": set(), "unexpected": set()}
            | listed
            | {
                "misshapen": set(re.findall(r"size mismatch for (\S+):", text)),
                "not_tensors": set(re.findall(r'named "([^"]*)", expected torch.Tensor', text)),
            }
        )
    return {
        "missing": set(answer.missing_keys),
        "unexpected": set(answer.unexpected_keys),
        "misshapen": set(),
        "not_tensors": set(),
    }


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_tp501_says_what_load_state_dict_itself_says(first):
    seen = set()
    for seed in range(first, first + 100):
        rng, model = grown(seed, LEAVES)
        state_dict = saved(rng, model)
        if rng.random() < 0.3:
            state_dict = dict(state_dict)
        mutate(rng, model, state_dict)

        report = tp.validate_state_dict_load(model, state_dict)
        findings = [finding for finding in report.findings if finding.code == "TP501"]
        accepted = {key for f in findings for key in f.evidence.get("accepted_unexpected", ())}
        mine = {
            "missing": set(report.missing_keys),
            "unexpected": set(report.unexpected_keys) - accepted,
            "misshapen": {key for f in findings for key in f.evidence.get("misshapen", ())},
            "not_tensors": {key for f in findings for key in f.evidence.get("not_tensors", ())},
        }
        said = said_by_torch(copy.deepcopy(model) if not has_graph(model) else model, state_dict)
        assert mine == said, seed
        assert bool(findings) == any([*said.values(), accepted]), seed
        sure = [key for names in said.values() for key in names if not is_excused(key, findings, report)]
        if sure:
            assert any(f.severity == "error" for f in findings), seed
        if not any(said.values()):
            assert all(f.severity != "error" for f in findings), seed
        seen |= {field for field, names in said.items() if names} | ({"accepted"} if accepted else set())
    assert seen >= {"missing", "unexpected", "misshapen", "not_tensors", "accepted"}


def is_excused(key: str, findings: list[tp.Finding], report: Any) -> bool:
    """Whether it is there under another name, or below a module that loads in a way of its own."""
    tied = {name for finding in findings for name in finding.evidence.get("tied", ())}
    return key in tied or any(key.startswith(one.partition(":")[0]) for one in report.load.own_loading)


def has_graph(model: nn.Module) -> bool:
    """Whether it keeps a tensor with a graph, which deepcopy refuses: the old weight_norm's weight."""
    return any(
        isinstance(hook, nn.utils.weight_norm.__globals__["WeightNorm"])
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["missing", "unexpected", "accepted", "misshapen", "not tensors", "prefix", "nested"])
def test_tp501_names_the_one_fault(kind, seed):
    rng, model = grown(seed)
    state_dict = dict(saved(rng, model))
    keys = tensors_in(state_dict)
    model.register_module("gone", None)
    planted = some(rng, [key for key in keys if not key.endswith("num_batches_tracked")])
    optional: set[str] = set()
    if kind == "missing":
        for key in planted:
            del state_dict[key]
    elif kind == "unexpected":
        planted = {f"{key}.more" for key in planted}
        state_dict |= dict.fromkeys(planted, torch.ones(1))
    elif kind == "accepted":
        planted = {f"gone.{number}.weight" for number in range(len(planted))}
        state_dict |= dict.fromkeys(planted, torch.ones(1))
    elif kind == "misshapen":
        state_dict |= {key: torch.ones(*state_dict[key].shape, 2) for key in planted}
    elif kind == "not tensors":
        state_dict |= {key: rng.choice([None, 3, [1.0]]) for key in planted}
    elif kind == "prefix":
        state_dict = {f"module.{key}": value for key, value in state_dict.items()}
        planted = set(state_dict) | set(model.state_dict())
        optional = {key for key in model.state_dict() if key.endswith("num_batches_tracked")}
    else:
        state_dict = {"model": state_dict, "epoch": 3, "optimizer": {"state": {}, "param_groups": []}}
        planted = set(model.state_dict())
        optional = {key for key in planted if key.endswith("num_batches_tracked")}

    report = tp.validate_state_dict_load(model, state_dict)
    found = told(report, "TP501")

    assert set(found) == {"TP501"}
    assert found["TP501"] - optional == planted - optional
    causes = [finding for finding in report.findings if finding.code == "TP501" and "tied" not in finding.evidence]
    assert len(causes) <= 1
    assert [field in finding.evidence for finding in causes for field in FIELDS.get(kind, ())] in ([], [True])


FIELDS = {"prefix": ["prefix"], "nested": ["nested_under"]}


# -- TP502, TP503


@pytest.mark.parametrize("seed", SEEDS)
def test_tp502_names_what_loses_bits(seed):
    rng, model = grown(seed)
    state_dict = dict(saved(rng, model))
    floats = [key for key in tensors_in(state_dict) if state_dict[key].is_floating_point()]
    wider, narrower = rng.choice(
        [(torch.float64, torch.float16), (torch.float64, torch.bfloat16), (torch.int8, torch.bool)]
    )

    healthy = state_dict | {key: state_dict[key].to(narrower) for key in all_names(model, some(rng, floats))}
    assert told(tp.validate_state_dict_load(model, healthy)) == {}
    planted = all_names(model, some(rng, floats))
    wide = state_dict | {key: state_dict[key].to(wider) for key in planted}
    assert told(tp.validate_state_dict_load(model, wide)) == {"TP502": planted}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        half = copy.deepcopy(model).half() if not has_graph(model) else model
    if half is not model:
        assert told(tp.validate_state_dict_load(half, state_dict)) == {"TP502": set(floats)}


@pytest.mark.parametrize("seed", SEEDS)
def test_tp503_names_what_was_frozen(seed):
    rng, model = grown(seed)
    model.first.requires_grad_(rng.random() < 0.5)  # on purpose, and before
    planted = all_names(model, some(rng, [key for key, p in model.named_parameters() if p.requires_grad]))
    kept = model.state_dict(keep_vars=True)
    given = {key: copy.deepcopy(value) if isinstance(value, nn.Parameter) else value for key, value in kept.items()}
    with tp.materialize_audit(model) as audit:
        model.load_state_dict({key: given[key] for key in model.state_dict()})
    assert told(audit) == {}
    with tp.materialize_audit(model) as audit:
        for key in planted:
            model.get_parameter(key).requires_grad_(False)
    assert told(audit) == {"TP503": planted}
    assert told(tp.validate_state_dict_load(model, given)) == {"TP503": planted}
    assert told(tp.validate_state_dict_load(model, saved(rng, model))) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_tp503_names_parameters_that_are_inference_tensors(seed):
    rng, model = grown(seed)
    planted = all_names(model, some(rng, [key for key, _ in model.named_parameters()]))
    with torch.inference_mode():
        state_dict = {key: model.get_parameter(key).clone() for key in planted}
        model.load_state_dict(state_dict, assign=True, strict=False)

    report = tp.validate_state_dict_load(model, saved(rng, model))
    assert told(report) == {"TP503": planted}


# -- TP504, TP505, TP507: what the real load makes of it


@pytest.mark.parametrize("seed", SEEDS)
def test_tp504_tells_a_fact_of_whole_aliases_and_a_fault_of_parts(seed):
    rng, model = grown(seed)
    own = model.state_dict()
    planted = {key for key in all_names(model, some(rng, tensors_in(own))) if key in own and own[key].numel()}
    state_dict = saved(rng, model) | {key: own[key] for key in planted}

    found = told(tp.validate_state_dict_load(model, state_dict), "TP504")
    assert found == ({"TP504": planted} if planted else {})
    assert told(tp.validate_state_dict_load(model, state_dict)) == {}
    assert told(tp.safe_load_state_dict(model, state_dict)) == {}
    assert told(tp.validate_state_dict_load(model, copy.deepcopy(state_dict)), "TP504") == {}

    wide = torch.rand(3, 4)
    model.first.weight = nn.Parameter(wide[:, :3])
    report = tp.validate_state_dict_load(model, state_dict | {"first.weight": wide[:, 1:]})
    assert told(report) == {"TP504": {"first.weight"}}


def plant(rng: random.Random, model: nn.Module, state_dict: dict[str, Any]) -> None:
    """Do what may lose a value on the way into the model, or not."""
    own = model.state_dict()
    for _ in range(rng.randint(1, 3)):
        keys = [key for key in tensors_in(state_dict) if key in own and state_dict[key].numel()]
        key = rng.choice(keys)
        alike = [one for one in keys if own[one].shape == own[key].shape and own[one].dtype == own[key].dtype]
        other = rng.choice(alike)
        what = rng.randrange(8)
        if what == 0:
            state_dict[key] = own[other]
        elif what == 1:
            state_dict[key], state_dict[other] = own[other], own[key]
        elif what == 2:
            state_dict[key] = state_dict[other]
        elif what == 3 and own[key].is_floating_point():
            state_dict[key] = torch.rand(own[key].shape)
        elif what == 4:
            to_meta(model, key)
        elif what == 5:
            state_dict[key] = state_dict[key].to("meta")
        elif what == 6:
            tie(rng, model)
        elif what == 7 and own[key].dim() == 2 and own[key].shape[0] == own[key].shape[1]:
            state_dict[key] = own[other].t()


@pytest.mark.parametrize("first", range(0, 400, 40))
def test_no_finding_means_that_every_key_has_its_value_and_a_finding_that_one_has_not(first):
    seen = set()
    for seed in range(first, first + 40):
        rng, model = grown(seed)
        state_dict = {k: v + 1 if isinstance(v, torch.Tensor) else v for k, v in saved(rng, model).items()}
        plant(rng, model, state_dict)
        before = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in state_dict.items()}

        found = told(tp.validate_state_dict_load(model, state_dict))
        found.pop("TP403", None)  # a tie that the state dict has is another matter
        assert set(found) <= {"TP504", "TP505", "TP507"}, seed
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(RuntimeError):
                model.load_state_dict(state_dict)
        now = dict(entries(model))
        unlike = {key for key in tensors_in(before) if is_unlike(now[key], before[key])}
        assert bool(found) == bool(unlike), (seed, found, unlike)
        assert unlike <= set().union(*found.values()), seed
        assert all(names & unlike for names in found.values()), seed
        seen |= set(found)
    assert seen == {"TP504", "TP505", "TP507"}


def is_unlike(have: torch.Tensor, want: torch.Tensor) -> bool:
    if have.is_meta or want.is_meta:
        return True
    return not torch.equal(have.detach(), want.to(have.dtype))


# -- TP506, TP508


@pytest.mark.parametrize("seed", SEEDS)
def test_tp506_names_what_keeps_a_large_storage(seed):
    rng, model = grown(seed)
    state_dict = dict(saved(rng, model))
    planted = some(rng, [key for key in tensors_in(state_dict) if state_dict[key].numel()])
    for key in planted:
        value = state_dict[key]
        memory = value.new_zeros(rng.randint(10_000, 20_000))
        begin = rng.randint(0, 1000)
        state_dict[key] = memory[begin : begin + value.numel()].view(value.shape).copy_(value)

    assert told(tp.validate_state_dict_load(model, state_dict)) == {"TP506": planted}
    assert told(tp.validate_state_dict_load(model, copy.deepcopy(state_dict)))["TP506"] == planted
    healthy = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in state_dict.items()}
    assert told(tp.validate_state_dict_load(model, healthy)) == {}


@pytest.mark.parametrize("seed", SEEDS)
def test_tp508_names_what_is_no_number(seed):
    rng, model = grown(seed)
    state_dict = dict(saved(rng, model))
    floats = [k for k in tensors_in(state_dict) if state_dict[k].is_floating_point() and state_dict[k].numel()]
    planted = all_names(model, some(rng, floats))
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    for key in planted:
        state_dict[key] = value = state_dict[key].to(dtype)
        flat = value.view(-1)
        flat[rng.randrange(len(flat))] = rng.choice([float("nan"), float("inf"), float("-inf")])

    report = tp.validate_state_dict_load(model, state_dict, values=True)
    assert {code: names for code, names in told(report).items() if code != "TP505"} == {"TP508": planted}
    (finding,) = [finding for finding in report.findings if finding.code == "TP508"]
    values = torch.cat([state_dict[key].float().flatten() for key in planted])
    assert (finding.evidence["nan"], finding.evidence["infinite"]) == (values.isnan().sum(), values.isinf().sum())
    assert "TP508" not in told(tp.validate_state_dict_load(model, state_dict))
    with pytest.raises(tp.LoadRefused):
        tp.safe_load_state_dict(model, state_dict, values=True)
