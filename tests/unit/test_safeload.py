"""safe_load_state_dict(): all of a state dict, or the model as it was: whatever raises, wherever."""

from __future__ import annotations

import copy
import os
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import tensorplay as tp
from tensorplay import progress
from tensorplay._native import C

safetensors = pytest.importorskip("safetensors.torch")


class Net(nn.Module):
    """A tie, buffers of both kinds, two types, a parameter without elements, one that is laid out by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.small = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.columns = nn.Parameter(torch.randn(3, 5).t())
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("frequencies", torch.arange(4.0), persistent=False)
        self.register_buffer("nothing", None)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def other_values() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        key: torch.randn(value.shape).to(value.dtype) if value.is_floating_point() else value + 3
        for key, value in Net().state_dict().items()
    } | {"head.weight": None}  # type: ignore[dict-item]


def saved(folder: Path, form: str) -> Path:
    """Write other values for a Net to a file, tied as they are."""
    values = other_values()
    values["head.weight"] = values["embed.weight"]
    path = folder / f"net.{form}"
    if form == "safetensors":
        del values["head.weight"]
        safetensors.save_file({key: value.contiguous() for key, value in values.items()}, path)
    else:
        torch.save(values, path, _use_new_zipfile_serialization=form == "pt")
    return path


def trained() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model.norm(model.embed(torch.tensor([1, 2]))).sum().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
    """All that must be as it was: objects, memory, bytes, versions, ties, what the optimizer has."""
    found: list = []
    for key, tensor in tensors_of(model):
        bits = None if tensor.is_meta else tensor.detach().contiguous().view(-1).view(torch.uint8).tolist()
        found.append((
            key,
            id(tensor),
            tensor.untyped_storage()._cdata,
            tensor.stride(),
            tensor._version,
            tensor.requires_grad,
            id(tensor.grad) if tensor.is_leaf and tensor.grad is not None else None,
            bits,
        ))  # fmt: skip
    for module in model.modules():
        found.append([list(module._parameters), list(module._buffers), sorted(module._non_persistent_buffers_set)])
    found.append([id(one) for group in optimizer.param_groups for one in group["params"]])
    for parameter, state in optimizer.state.items():
        found.append((id(parameter), [(key, id(value), value.clone().tolist()) for key, value in state.items()]))
    return found


class Fault(Exception):
    """What is injected."""


class RaiseAt(TorchDispatchMode):
    """Raise once, at one operator: each copy and each allocation is one."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.at, self.error, self.count = at, error, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise self.error("injected")
        return func(*args, **(kwargs or {}))


def error_of(call) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


WAYS = {
    "a file": {},
    "in chunks": {"chunk_nbytes": 16},
    "assign": {"assign": True},
    "on meta": {"device": "cpu"},
}


def prepared(way: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    if way == "on meta":
        with torch.device("meta"):
            model = Net()
    return model, optimizer


@pytest.mark.parametrize(
    ("way", "error"), [*((way, Fault) for way in WAYS), ("assign", KeyboardInterrupt), ("assign", MemoryError)]
)
def test_raising_at_any_operator_leaves_everything_as_it_was(way, error, tmp_path):
    path = saved(tmp_path, "pt")
    points = 0
    for at in range(1, 400):
        model, optimizer = prepared(way)
        before = everything(model, optimizer)
        mode = RaiseAt(at, error)
        with mode:
            raised = error_of(lambda: tp.safe_load_state_dict(model, path, progress=False, **WAYS[way]))  # noqa: B023
        if raised is None:
            break
        # load_state_dict() makes a RuntimeError of what its copies raise, and opening a file one line.
        assert isinstance(raised, (error, RuntimeError, tp.TargetError))
        assert everything(model, optimizer) == before
        points += 1
    assert mode.count < at  # the last one ran to its end
    assert points >= {"a file": 20, "in chunks": 20, "assign": 8, "on meta": 20}[way]


@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_a_read_that_fails_writes_nothing(form, tmp_path, monkeypatch):
    path = saved(tmp_path, form)
    copy_bytes, calls = C.copy_bytes, []
    reads = 0

    def failing(source, target):
        calls.append(1)
        if len(calls) == wanted:
            raise OSError(14, "the file mapped behind it was cut")
        return copy_bytes(source, target)

    monkeypatch.setattr(C, "copy_bytes", failing)
    for wanted in range(1, 100):  # noqa: B007
        calls.clear()
        model, optimizer = trained()
        before = everything(model, optimizer)
        raised = error_of(lambda: tp.safe_load_state_dict(model, path))  # noqa: B023
        if raised is None:
            break
        assert isinstance(raised, tp.LoadRefused)
        assert "was cut while" in str(raised)
        assert everything(model, optimizer) == before
        reads += 1
    assert reads >= 10


@pytest.mark.parametrize("at", range(24))
def test_a_progress_that_raises_is_undone(at, tmp_path):
    path = saved(tmp_path, "pt")
    model, optimizer = trained()
    before = everything(model, optimizer)
    calls = []

    def step(name, done, total):
        calls.append(name)
        if len(calls) == at + 1:  # of both passes
            raise Fault("injected")

    with pytest.raises(Fault):
        tp.safe_load_state_dict(model, path, chunk_nbytes=64, progress=step)

    assert everything(model, optimizer) == before


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.steps = 7

    def get_extra_state(self):
        return {"steps": self.steps}

    def set_extra_state(self, state):
        self.steps = state["steps"]


class Raises(Stateful):
    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        raise Fault("injected")


def test_extra_state_is_put_back_and_loaded():
    model = nn.Sequential(Stateful(), Raises())
    state_dict = copy.deepcopy(model.state_dict())
    state_dict["0._extra_state"] = {"steps": 9}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = everything(model, optimizer)

    with pytest.raises(Fault) as raised:
        tp.safe_load_state_dict(model, state_dict)

    assert model[0].steps == 7
    assert everything(model, optimizer) == before
    if hasattr(raised.value, "__notes__"):
        assert raised.value.__notes__ == [
            "TensorPlay: what the model has registered is as it was: objects, ties, bytes and versions; what 1: "
            "Raises._load_from_state_dict() keeps elsewhere is not known"
        ]

    model[1] = Stateful()
    tp.safe_load_state_dict(model, state_dict)
    assert model[0].steps == 9


def test_a_hook_that_raises_after_loading_is_undone():
    model, optimizer = trained()
    model.register_load_state_dict_post_hook(lambda module, keys: 1 / 0)
    before = everything(model, optimizer)

    with pytest.raises(ZeroDivisionError):
        tp.safe_load_state_dict(model, copy.deepcopy(model.state_dict()))

    assert everything(model, optimizer) == before


def test_what_the_model_has_after_a_hook_changed_its_tables_is_undone():
    model, optimizer = trained()

    def replaces(module, *_):
        module.norm.weight = nn.Parameter(torch.zeros(4))
        del module.norm._buffers["running_mean"]
        module.norm.register_buffer("late", torch.zeros(1), persistent=False)
        raise Fault

    model.register_load_state_dict_pre_hook(replaces)
    before = everything(model, optimizer)

    with pytest.raises(Fault):
        tp.safe_load_state_dict(model, copy.deepcopy(model.state_dict()))

    assert everything(model, optimizer) == before


def test_whatever_a_hook_did_to_what_is_registered_is_undone():
    model, optimizer = trained()

    def meddles(module, *_):
        module.frequencies.fill_(7)
        module.norm.weight.requires_grad_(False)
        module.eval()
        module.late = nn.Linear(1, 1)
        del module._modules["small"]
        module.columns.data = torch.zeros(9)
        module.norm.running_mean.resize_(40)
        module.norm.running_var.untyped_storage().resize_(0)
        raise Fault

    model.register_load_state_dict_pre_hook(meddles)
    before = everything(model, optimizer)

    with pytest.raises(Fault):
        tp.safe_load_state_dict(model, copy.deepcopy(model.state_dict()))

    assert everything(model, optimizer) == before
    assert model.training
    assert all(module.training for module in model.modules())


def test_a_graph_that_waits_for_backward_survives_what_is_undone():
    model, _ = trained()
    model.register_load_state_dict_post_hook(lambda module, keys: 1 / 0)
    loss = model.small(torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)).sum()
    values = copy.deepcopy(model.state_dict())

    with pytest.raises(ZeroDivisionError):
        tp.safe_load_state_dict(model, values, allow_live_graph=True)

    loss.backward()


@pytest.mark.parametrize("form", ["pt", "legacy", "safetensors"])
@pytest.mark.parametrize("way", WAYS)
def test_every_value_is_the_file_s(form, way, tmp_path):
    path = saved(tmp_path, form)
    model, _ = prepared(way)
    ids = [id(tensor) for _, tensor in tensors_of(model)]

    report = tp.safe_load_state_dict(model, path, **WAYS[way])

    wanted = other_values()
    wanted["head.weight"] = wanted["embed.weight"]
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key]), key
    assert model.head.weight is model.embed.weight
    assert isinstance(model.embed.weight, nn.Parameter)
    assert not model.scale.requires_grad
    assert model.embed.weight.requires_grad
    assert report.load.loaded
    assert (ids == [id(tensor) for _, tensor in tensors_of(model)]) is (way in ("a file", "in chunks"))
    codes = {finding.code for finding in report.findings if finding.severity != "info"}
    assert codes == ({"TP402"} if way == "on meta" else set())  # the buffer that no file has
    if way == "on meta":
        (finding,) = [one for one in report.findings if one.severity != "info"]
        assert finding.evidence["never_written"] == ["frequencies"]


def test_versions_that_moved_are_reported(tmp_path):
    path = saved(tmp_path, "pt")
    model, _ = trained()
    before = {key: tensor._version for key, tensor in tensors_of(model)}

    report = tp.safe_load_state_dict(model, path)

    moved = {move.name: (move.before, move.after) for move in report.load.versions}
    assert moved == {
        key: (before[key], tensor._version) for key, tensor in tensors_of(model) if tensor._version != before[key]
    }
    assert {"embed.weight", "head.weight", "norm.running_mean"} <= moved.keys()
    assert report.load.replaced == ()


def test_the_memory_that_it_takes_is_said(tmp_path):
    path = saved(tmp_path, "pt")
    nbytes = sum(value.nbytes for key, value in other_values().items() if value is not None)

    whole = tp.safe_load_state_dict(trained()[0], path).load.extra_nbytes
    without = tp.safe_load_state_dict(trained()[0], path, undo=False).load.extra_nbytes
    chunked = tp.safe_load_state_dict(trained()[0], path, chunk_nbytes=100).load.extra_nbytes

    assert without == nbytes
    assert whole == 2 * nbytes + 16  # the buffer that no file has is kept too: a hook may write it
    assert chunked == nbytes + 16 + 100


def refusal(*args, **kwargs) -> str:
    with pytest.raises(tp.LoadRefused) as refused:
        tp.safe_load_state_dict(*args, **kwargs)
    assert refused.value.reasons
    return str(refused.value)


def test_what_does_not_fit_is_refused_before_anything_is_written():
    model, optimizer = trained()
    before = everything(model, optimizer)
    fits = copy.deepcopy(model.state_dict())

    assert "TP501 embed.weight: 1 key of another shape" in refusal(model, fits | {"embed.weight": torch.zeros(8, 4)})
    assert "TP501 norm.bias: 1 key of the model is not" in refusal(
        model, {key: value for key, value in fits.items() if key != "norm.bias"}
    )
    assert "TP501 more: 1 key of the state dict is not" in refusal(model, fits | {"more": torch.zeros(1)})
    assert "no tensor" in refusal(model, fits | {"scale": 2.0})
    assert "TP508" in refusal(model, fits | {"scale": torch.tensor(float("nan"))}, values=True)
    assert "the keys of the state dict have 'module.' in them" in refusal(
        model, {f"module.{key}": value for key, value in fits.items()}
    )
    assert "on meta" in refusal(model, {key: value.to("meta") for key, value in fits.items()}, assign=True)
    assert everything(model, optimizer) == before


def test_what_is_missing_may_be_with_strict_false():
    model, _ = trained()
    bias = model.norm.bias.detach().clone()
    values = {key: value for key, value in other_values().items() if key not in ("norm.bias", "head.weight")}

    report = tp.safe_load_state_dict(model, values | {"more": torch.zeros(1)}, strict=False)

    assert torch.equal(model.norm.bias, bias)
    assert torch.equal(model.norm.weight, values["norm.weight"])
    assert [(one.code, one.severity) for one in report.findings if one.code == "TP501"] == [
        ("TP501", "warning"),
        ("TP501", "info"),  # the tie
        ("TP501", "info"),
    ]


def test_a_model_on_meta_needs_memory_or_assign():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    values = nn.Linear(2, 2).state_dict()

    assert "say device= to give it memory, or assign=True" in refusal(model, values)
    assert model.weight.is_meta
    tp.safe_load_state_dict(model, values, device="cpu")
    assert torch.equal(model.weight, values["weight"])


def test_a_graph_that_waits_for_backward_is_not_written_through():
    model = nn.Linear(2, 2)
    values = copy.deepcopy(nn.Linear(2, 2).state_dict())
    loss = model(torch.ones(1, 2, requires_grad=True)).sum()

    said = refusal(model, values)
    assert "has saved weight (by AddmmBackward0" in said
    assert "allow_live_graph=True" in said
    tp.safe_load_state_dict(model, values, allow_live_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss
    tp.safe_load_state_dict(model, values)


def test_weights_that_hooks_make_before_each_forward_are_no_graph_that_waits():
    model = nn.Sequential(nn.Linear(3, 3))
    prune.l1_unstructured(model[0], "weight", 0.3)
    values = copy.deepcopy(prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.3).state_dict())
    tp.safe_load_state_dict(model, {f"0.{key}": value for key, value in values.items()})
    assert torch.equal(model[0].weight_orig, values["weight_orig"])


def test_what_was_made_in_inference_mode_is_written_there_alone():
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    values = copy.deepcopy(nn.Linear(2, 2).state_dict())
    assert "load within torch.inference_mode()" in refusal(model, values)
    with torch.inference_mode():
        tp.safe_load_state_dict(model, values)
    assert torch.equal(model.weight, values["weight"])


@pytest.mark.parametrize("options", [{}, {"chunk_nbytes": 8}, {"assign": True}])
def test_what_is_conjugated_or_negated_when_it_is_read(options, tmp_path):
    z = torch.randn(3, dtype=torch.cfloat)
    y = z.clone()
    torch.save({"a": z.conj(), "b": y.conj().imag}, tmp_path / "z.pt")
    model = nn.Module()
    for name, value in (("a", z), ("b", z.imag)):
        model.register_buffer(name, torch.zeros_like(value))
    report = tp.safe_load_state_dict(model, tmp_path / "z.pt", **options)
    assert torch.equal(model.a, z.conj())
    assert torch.equal(model.b, z.conj().imag)
    assert {one.severity for one in report.findings} <= {"info"}


def test_what_modules_keep_of_extra_state_is_in_memory(tmp_path):
    class Keeps(nn.Module):
        kept = torch.zeros(1)

        def get_extra_state(self):
            return {"t": self.kept}

        def set_extra_state(self, state):
            self.kept = state["t"]

    model = Keeps()
    torch.save({"_extra_state": {"t": torch.arange(5000.0)}}, tmp_path / "e.pt")
    tp.safe_load_state_dict(model, tmp_path / "e.pt")
    os.truncate(tmp_path / "e.pt", 10)
    assert torch.equal(model.kept, torch.arange(5000.0))


@pytest.mark.parametrize("length", [640, 896, 1152, 1408])
def test_a_header_whose_length_looks_like_a_pickle(length, tmp_path):
    model = nn.Linear(2, 2)
    path = tmp_path / "h.safetensors"
    for padding in range(2_000):
        safetensors.save_file(nn.Linear(2, 2).state_dict(), path, metadata={"p": "x" * padding})
        if int.from_bytes(path.read_bytes()[:8], "little") == length:
            break
    tp.safe_load_state_dict(model, path)


def test_one_of_several_state_dicts_is_not_picked(tmp_path):
    values = nn.Linear(2, 2).state_dict()
    torch.save({"generator": values, "discriminator": values}, tmp_path / "gan.pt")
    with pytest.raises(tp.TargetError, match="'generator' and 'discriminator', which could each be the model's"):
        tp.safe_load_state_dict(nn.Linear(2, 2), tmp_path / "gan.pt")
    report = tp.safe_load_state_dict(nn.Linear(2, 2), tmp_path / "gan.pt", key="generator")
    assert report.load.state_dict.endswith("gan.pt['generator']")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_scripted_modules_are_refused():
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
    values = nn.Sequential(nn.Linear(2, 2)).state_dict()
    assert "scripted" in refusal(model, values)
    assert {one.severity for one in tp.validate_state_dict_load(model, values).findings} == {"info"}


def test_memory_on_meta_is_none():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert "has no memory" in refusal(model, nn.Linear(2, 2).state_dict(), device="meta")


def test_an_optimizer_is_not_left_with_orphans():
    model, optimizer = trained()
    values = copy.deepcopy(model.state_dict())

    assert "build the optimizer then" in refusal(model, values, assign=True, optimizer=optimizer)
    report = tp.safe_load_state_dict(model, values, optimizer=optimizer)
    assert not [finding for finding in report.findings if finding.code == "TP405"]


def test_exchanging_two_parameters_through_a_state_dict_is_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    values = model.state_dict()
    values["0.weight"], values["1.weight"] = values["1.weight"], values["0.weight"]

    assert "TP504" in refusal(model, values)
    tp.safe_load_state_dict(model, copy.deepcopy(values))


def test_the_model_s_own_state_dict_may_be_loaded():
    model, _ = trained()
    values = copy.deepcopy(model.state_dict())
    tp.safe_load_state_dict(model, model.state_dict())

    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("to", [0, 300, -1, -100, -800])
@pytest.mark.parametrize("form", ["pt", "safetensors", "legacy"])
def test_a_file_cut_before_it_is_opened_is_one_line(form, to, tmp_path):
    path = saved(tmp_path, form)
    os.truncate(path, to if to >= 0 else path.stat().st_size + to)
    model, optimizer = trained()
    before = everything(model, optimizer)

    with pytest.raises(tp.TensorPlayError) as raised:
        tp.safe_load_state_dict(model, path)

    assert "\n" not in str(raised.value)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("chunk_nbytes", [None, 1000])
@pytest.mark.parametrize("form", ["pt", "safetensors"])
@pytest.mark.parametrize("what", ["cut", "grown", "rewritten", "replaced"])
def test_a_file_that_changes_while_it_is_read_is_noticed(what, form, chunk_nbytes, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    path = tmp_path / f"net.{form}"
    (safetensors.save_file if form == "safetensors" else torch.save)(
        {key: torch.randn(value.shape) for key, value in model.state_dict().items()}, path
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = everything(model, optimizer)
    calls = []

    def step(name, done, total):
        calls.append(name)
        if len(calls) != (8 if chunk_nbytes else 2):  # in chunks: in the second pass, when some are written
            return
        if what == "cut":
            os.truncate(path, 4096)
        elif what == "grown":
            with path.open("ab") as file:
                file.write(b"more")
        elif what == "rewritten":
            path.write_bytes(path.read_bytes())
            os.utime(path, ns=(1, 1))
        else:
            beside = tmp_path / "beside"
            beside.write_bytes(path.read_bytes())
            beside.replace(path)

    with pytest.raises(tp.LoadRefused, match=r"was cut while|was changed or replaced"):
        tp.safe_load_state_dict(model, path, chunk_nbytes=chunk_nbytes, progress=step)

    assert everything(model, optimizer) == before


def test_a_mapped_state_dict_whose_file_is_cut_is_noticed(tmp_path):
    model = nn.Linear(64, 64)
    path = tmp_path / "net.pt"
    torch.save(model.state_dict(), path)
    mapped = torch.load(path, mmap=True, weights_only=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = everything(model, optimizer)
    os.truncate(path, 100)

    with pytest.raises(tp.LoadRefused, match="was cut while"):
        tp.safe_load_state_dict(model, mapped)

    assert everything(model, optimizer) == before


def test_a_folder_of_shards_is_one_state_dict(tmp_path):
    values = {key: value for key, value in other_values().items() if value is not None}
    keys = list(values)
    weight_map = {}
    for number, part in enumerate((keys[:4], keys[4:])):
        name = f"model-{number}.safetensors"
        safetensors.save_file({key: values[key].contiguous() for key in part}, tmp_path / name)
        weight_map |= dict.fromkeys(part, name)
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {weight_map}}}'.replace("'", '"'))
    model, optimizer = trained()

    tp.safe_load_state_dict(model, tmp_path)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in values.items())

    before = everything(model, optimizer)
    os.truncate(tmp_path / "model-1.safetensors", 40)
    with pytest.raises(tp.TargetError, match=r"model-1\.safetensors"):
        tp.safe_load_state_dict(model, tmp_path)
    assert everything(model, optimizer) == before


def test_a_folder_as_trainers_write_it(tmp_path):
    model, optimizer = trained()
    values = {key: value.contiguous() for key, value in other_values().items() if value is not None}
    safetensors.save_file(values, tmp_path / "model.safetensors")
    torch.save(values, tmp_path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    tp.safe_load_state_dict(model, tmp_path)
    assert torch.equal(model.norm.weight, values["norm.weight"])

    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {' + ", ".join(f'"{key}": "model.safetensors"' for key in values) + "}}"
    )
    tp.safe_load_state_dict(model, tmp_path / "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_names_of_no_file(name):
    with pytest.raises(tp.TargetError, match="is the name of no file"):
        tp.safe_load_state_dict(nn.Linear(2, 2), name)


def test_the_state_dict_in_a_training_checkpoint_is_found(tmp_path):
    model, optimizer = trained()
    path = tmp_path / "step.pt"
    values = OrderedDict(model.state_dict())
    torch.save({"epoch": 3, "model": values, "optimizer": optimizer.state_dict()}, path)
    fresh = Net()
    tp.safe_load_state_dict(fresh, path)
    torch.save({"epoch": 3, "model": values, "ema": values, "optimizer": optimizer.state_dict()}, path)
    assert torch.equal(fresh.norm.weight, model.norm.weight)
    tp.safe_load_state_dict(fresh, path, key="ema")
    with pytest.raises(tp.TargetError, match="has no key 'best': it has 'epoch', 'model'"):
        tp.safe_load_state_dict(fresh, path, key="best")


def test_what_holds_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, ("exit 1",))

    path = tmp_path / "evil.pt"
    torch.save({"weight": Evil()}, path)
    with pytest.raises(tp.TargetError):
        tp.safe_load_state_dict(nn.Linear(2, 2), path)


@pytest.mark.parametrize("form", ["pt", "safetensors", "legacy"])
def test_a_default_device_makes_no_difference(form, tmp_path):
    path = saved(tmp_path, form)
    model, _ = trained()
    with torch.device("meta"):
        tp.safe_load_state_dict(model, path)
        tp.safe_load_state_dict(model, path, chunk_nbytes=16)
    assert torch.equal(model.norm.weight, other_values()["norm.weight"])


def test_a_bar_is_shown_on_a_terminal_when_it_takes_long(tmp_path, monkeypatch, capsys):
    path = saved(tmp_path, "pt")
    tp.safe_load_state_dict(trained()[0], path)
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "_SECONDS_WITHOUT_BAR", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    tp.safe_load_state_dict(trained()[0], path)
    assert "━" in capsys.readouterr().err
    tp.safe_load_state_dict(trained()[0], path, progress=False)
    assert capsys.readouterr().err == ""


def test_bad_arguments_are_one_line():
    model = nn.Linear(2, 2)
    for call in (
        lambda: tp.safe_load_state_dict([model], {}),
        lambda: tp.safe_load_state_dict(model, 3),
        lambda: tp.safe_load_state_dict(model, model),
        lambda: tp.safe_load_state_dict(model, {}, chunk_nbytes=0),
        lambda: tp.safe_load_state_dict(model, {}, optimizer=model),
    ):
        with pytest.raises(TypeError) as raised:
            call()
        assert "\n" not in str(raised.value)
    with pytest.raises(tp.TargetError, match="cannot read"):
        tp.safe_load_state_dict(model, "nowhere.pt")


def test_exchanging_insides_of_tensors_is_refused():
    model = nn.Linear(2, 2)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert "set it to False" in refusal(model, copy.deepcopy(model.state_dict()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_chunks_are_refused_where_they_would_go_past_a_module_s_own_loading():
    assert "loads in a way of its own" in refusal(
        nn.Sequential(Raises()), nn.Sequential(Stateful()).state_dict(), chunk_nbytes=8
    )
    assert "copies nothing" in refusal(nn.Linear(2, 2), nn.Linear(2, 2).state_dict(), chunk_nbytes=8, assign=True)
