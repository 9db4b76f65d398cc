"""Loads into models of DTensors: two ranks over gloo, FSDP2, and what torch.distributed.checkpoint writes.

Run by pytest it starts two processes of itself, which go through every situation together; each rank has to find the
same in its own part.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor

import tensorplay as tp
from tensorplay.errors import LoadRefused
from tests.ranks import Answers, go_through, judge, run_ranks

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

RANKS = 2
PARAMETERS = ["emb.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "head.weight"]
KEYS = ["scale", *PARAMETERS]
ALL = ["inv_freq", *KEYS]
LACKING = "layers.1.bias"
TOKENS = torch.arange(6)[None]
FREQUENCIES = 1.0 / torch.arange(1, 7)


class Small(nn.Module):
    """Has rows that two ranks cannot share evenly, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 9, bias=False)
        self.register_buffer("inv_freq", 1.0 / torch.arange(1, 7), persistent=False)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens) * self.inv_freq
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale.sum()


def found(report: Any) -> list[tuple[str, str, Any]]:
    """Answer each finding's code and severity, and what it names."""
    names = {
        "TP401": "tensors",
        "TP402": "never_written",
        "TP403": "names",
        "TP405": "replaced_by",
        "TP502": "narrowed",
        "TP504": "aliases",
    }
    answers = []
    for finding in report.findings:
        fields = (names.get(finding.code), "mixed", "missing", "unexpected", "meta_after", "meta_in_state_dict")
        answers.append(
            (finding.code, finding.severity, next(finding.evidence[one] for one in fields if finding.evidence.get(one)))
        )
    return answers


def same(answer: object, expected: object) -> None:
    """Fail with both: what runs in the ranks is not pytest's."""
    if answer != expected:
        raise AssertionError(f"{answer!r}\nand not {expected!r}")


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Rank:
    """What every situation begins from: a model with values, its state dict in parts and whole, a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.number = dist.get_rank()
        self.mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        self.plain = Small()
        torch.manual_seed(0)
        self.parts = self.sharded(Small()).state_dict()
        self.saved = folder / "whole"
        self.partly_saved = folder / "partly"
        dcp.save(dict(self.parts), checkpoint_id=self.saved)
        dcp.save(self.without(self.parts), checkpoint_id=self.partly_saved)

    @property
    def whole(self) -> dict[str, torch.Tensor]:
        return {key: value.clone() for key, value in self.plain.state_dict().items()}

    def without(self, state_dict: Any) -> dict[str, torch.Tensor]:
        return {key: value for key, value in state_dict.items() if key != LACKING}

    def sharded(self, model: nn.Module) -> Any:
        for layer in model.layers:
            fully_shard(layer, mesh=self.mesh)
        return fully_shard(model, mesh=self.mesh)

    def on_meta(self) -> Any:
        with torch.device("meta"):
            model = Small()
        return self.sharded(model)

    def empty(self) -> Any:
        model = self.on_meta().to_empty(device="cpu")
        recompute(model)
        return model

    def broadcast(self, model: nn.Module, state_dict: dict[str, torch.Tensor], strict: bool = True) -> None:
        """Load what rank 0 has."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
        set_model_state_dict(model, state_dict if self.number == 0 else {}, options=options)

    def load(self, how: str, model: nn.Module) -> None:
        """Load all, in one of the ways there are."""
        if how == "broadcast":
            self.broadcast(model, self.whole)
        elif how == "whole on each rank":
            set_model_state_dict(model, self.whole, options=StateDictOptions(full_state_dict=True))
        else:
            state_dict = model.state_dict()
            dcp.load(state_dict, checkpoint_id=self.saved)
            model.load_state_dict(state_dict)

    def is_right(self, model: Any) -> None:
        assert torch.equal(model(TOKENS), self.plain(TOKENS))


def recompute(model: Any) -> None:
    model.inv_freq = FREQUENCIES.clone()


SITUATIONS: dict[str, Callable[[Rank], None]] = {}
WAYS = ("checkpoint", "broadcast", "whole on each rank")


def situation(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
    SITUATIONS[function.__name__] = function
    return function


@situation
def loaded_in_each_way(rank: Rank) -> None:
    for how in WAYS:
        model = rank.on_meta()
        with tp.materialize_audit(model) as audit:
            model.to_empty(device="cpu")
            recompute(model)
            rank.load(how, model)
        same((how, found(audit)), (how, []))
        same(audit.load.seen, {"written": len(ALL)})
        same(found(tp.validate_state_dict_load(model, rank.parts)), [])
        # A buffer is no DTensor: state_dict() answers the model's own.
        for own in (model.state_dict(), get_model_state_dict(model)):
            same(found(tp.validate_state_dict_load(model, own)), [("TP504", "info", ["scale"])])
        rank.is_right(model)


@situation
def buffer_not_recomputed(rank: Rank) -> None:
    for how in WAYS:
        model = rank.on_meta()
        with tp.materialize_audit(model) as audit:
            model.to_empty(device="cpu")
            rank.load(how, model)
        same((how, found(audit)), (how, [("TP402", "warning", ["inv_freq"])]))
        same(audit.findings[0].evidence["non_persistent"], ["inv_freq"])


@situation
def never_loaded(rank: Rank) -> None:
    model = rank.on_meta()
    with tp.materialize_audit(model) as audit:
        model.to_empty(device="cpu")
    # One finding, also on the rank whose part FSDP2 pads with a copy.
    same(found(audit), [("TP402", "warning", ALL)])
    same(audit.findings[0].evidence["allocated_by"], "aten::empty_like")
    nbytes = sum(local(one).numel() * 4 for one in [*model.parameters(), *model.buffers()])
    same(audit.findings[0].evidence["unwritten_bytes"], nbytes)


@situation
def a_key_is_lacking(rank: Rank) -> None:
    for how in ("broadcast", "checkpoint"):
        model = rank.on_meta()
        with tp.materialize_audit(model) as audit:
            model.to_empty(device="cpu")
            recompute(model)
            if how == "broadcast":
                rank.broadcast(model, rank.without(rank.whole), strict=False)
            else:
                state_dict = model.state_dict()
                planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
                dcp.load(state_dict, checkpoint_id=rank.partly_saved, planner=planner)
                model.load_state_dict(state_dict)
        same((how, found(audit)), (how, [("TP402", "warning", [LACKING])]))
    for strict, severity in ((True, "error"), (False, "warning")):
        report = tp.validate_state_dict_load(model, rank.without(rank.parts), strict=strict)
        same(found(report), [("TP501", severity, [LACKING])])


@situation
def into_meta(rank: Rank) -> None:
    # torch 2.13 assigns what it gets for parameters on meta.
    for how in ("broadcast", "whole on each rank"):
        model = rank.on_meta()
        optimizer = torch.optim.AdamW(model.parameters())
        with tp.materialize_audit(model, optimizer) as audit:
            rank.load(how, model)
        same(found(audit), [("TP401", "warning", ["inv_freq"]), ("TP405", "warning", PARAMETERS)])
        same(found(tp.validate_state_dict_load(model, rank.parts)), [("TP401", "warning", ["inv_freq"])])
        recompute(model)
        rank.is_right(model)
    model = rank.on_meta()
    same(
        found(tp.validate_state_dict_load(model, rank.parts)),
        [("TP401", "warning", ["inv_freq"]), ("TP507", "error", KEYS)],
    )
    with tp.materialize_audit(model) as audit, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.load_state_dict(rank.parts)
    same(found(audit), [("TP401", "warning", ALL)])
    own = tp.validate_state_dict_load(rank.empty(), model.state_dict())
    same(found(own), [("TP507", "error", KEYS)])


@situation
def optimizer_before_to_empty(rank: Rank) -> None:
    # to_empty() exchanges the insides of DTensors: the objects stay, and the optimizer has them.
    model = rank.on_meta()
    optimizer = torch.optim.AdamW(model.parameters())
    with tp.materialize_audit(model, optimizer) as audit:
        model.to_empty(device="cpu")
        recompute(model)
        rank.load("broadcast", model)
    same(found(audit), [])
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    same(held, {id(one) for one in model.parameters()})


@situation
def whole_tensors_for_dtensors(rank: Rank) -> None:
    model = rank.empty()
    rank.load("broadcast", model)
    for assign in (False, True):
        report = tp.validate_state_dict_load(model, rank.whole, assign=assign)
        same(found(report), [("TP501", "error", PARAMETERS)])
        assert "set_model_state_dict" in report.findings[0].fix
        assert "the model has as DTensor" in report.findings[0].headline
        with pytest.raises(LoadRefused, match="set_model_state_dict"):
            tp.safe_load_state_dict(model, rank.whole, assign=assign)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.load_state_dict(rank.whole)
    rank.is_right(model)


@situation
def dtensors_for_whole_tensors(rank: Rank) -> None:
    model = Small()
    report = tp.validate_state_dict_load(model, rank.parts)
    same(found(report), [("TP501", "error", PARAMETERS)])
    assert "full_tensor()" in report.findings[0].fix
    assert "the state dict has as DTensor" in report.findings[0].headline
    full = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in rank.parts.items()}
    report = tp.safe_load_state_dict(model, full)
    same(found(report), [])
    rank.is_right(model)


@situation
def after_a_forward(rank: Rank) -> None:
    model = rank.empty()
    rank.load("broadcast", model)
    rank.is_right(model)
    # The outermost module keeps its parameters whole; FSDP2's hook takes them out before loading.
    report = tp.validate_state_dict_load(model, rank.parts)
    same(found(report), [("TP501", "info", ["emb.weight", "head.weight"])])
    with pytest.raises(LoadRefused, match=r"reshard\(\)"):
        tp.safe_load_state_dict(model, rank.parts)
    model.reshard()
    same(found(tp.validate_state_dict_load(model, rank.parts)), [])
    same(found(tp.safe_load_state_dict(model, rank.parts)), [])
    rank.is_right(model)
    model.load_state_dict(rank.parts)
    rank.is_right(model)


@situation
def loaded_safely(rank: Rank) -> None:
    model = rank.on_meta()
    report = tp.safe_load_state_dict(model, rank.parts, device="cpu")
    same(found(report), [("TP402", "warning", ["inv_freq"])])
    recompute(model)
    rank.is_right(model)
    model = rank.on_meta()
    report = tp.safe_load_state_dict(model, {key: value.clone() for key, value in rank.parts.items()}, assign=True)
    same(found(report)[:1], [("TP401", "warning", ["inv_freq"])])
    recompute(model)
    rank.is_right(model)


class _Raised(Exception):
    pass


@situation
def put_back(rank: Rank) -> None:
    def fail(*_: object) -> None:
        raise _Raised

    for on_meta in (False, True):
        model = rank.on_meta() if on_meta else rank.sharded(Small())
        model.layers[1].register_load_state_dict_post_hook(fail)
        tensors = dict(model.named_parameters())
        before = [
            (id(one), one._version, one.is_meta, None if one.is_meta else local(one).detach().numpy().tobytes())
            for one in tensors.values()
        ]
        with pytest.raises(_Raised):
            tp.safe_load_state_dict(model, rank.parts, device="cpu" if on_meta else None)
        after = [
            (id(one), one._version, one.is_meta, None if one.is_meta else local(one).detach().numpy().tobytes())
            for one in dict(model.named_parameters()).values()
        ]
        same(after, before)


@situation
def types_narrowed(rank: Rank) -> None:
    model = rank.empty()
    wide = {key: value.double() for key, value in rank.parts.items()}
    same(found(tp.validate_state_dict_load(model, wide)), [("TP502", "warning", KEYS)])


@situation
def tensor_parallel(rank: Rank) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for how in WAYS:
        with torch.device("meta"):
            model = Small()
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel(), "head": ColwiseParallel()}
        parallelize_module(model, rank.mesh, plan)
        with tp.materialize_audit(model) as audit:
            model.to_empty(device="cpu")
            recompute(model)
            rank.load(how, model)
        same((how, found(audit)), (how, []))
        # The embedding is on each rank whole.
        report = tp.validate_state_dict_load(model, rank.parts)
        same(found(report), [("TP501", "error", ["emb.weight"])])
        report = tp.validate_state_dict_load(model, rank.whole)
        same(found(report), [("TP501", "error", PARAMETERS[1:])])
        for key, value in model.state_dict().items():
            assert torch.equal(value.full_tensor() if isinstance(value, DTensor) else value, rank.whole[key])


@situation
def a_forward_within(rank: Rank) -> None:
    model = rank.on_meta()
    with tp.materialize_audit(model) as audit:
        model.to_empty(device="cpu")
        recompute(model)
        rank.load("broadcast", model)
        optimizer = torch.optim.AdamW(model.parameters())
        model(TOKENS).sum().backward()
        optimizer.step()
    same(found(audit), [])
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    same(found(tp.safe_load_state_dict(Small(), whole)), [])


@situation
def tied(rank: Rank) -> None:
    for forgotten in (False, True):
        with torch.device("meta"):
            model: Any = Small()
            if not forgotten:
                model.head.weight = model.emb.weight
        model = rank.sharded(model)
        with tp.materialize_audit(model) as audit:
            model.to_empty(device="cpu")
            recompute(model)
            with torch.no_grad():
                for one in [*model.parameters(), model.scale]:
                    one.fill_(1.0)
        same(found(audit), [])
        same(model.head.weight is model.emb.weight, not forgotten)


def main(number: int, ranks: int, folder: Path) -> None:
    """Be one rank."""
    torch.set_num_threads(1)

    def situations() -> dict[str, Callable[[], None]]:
        rank = Rank(folder)
        return {name: functools.partial(check, rank) for name, check in SITUATIONS.items()}

    go_through(situations, number, ranks, folder)


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> Answers:
    return run_ranks(__file__, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_rank_finds_the_same(name, answers):
    judge(name, answers)


def test_one_process(single_process_group):
    mesh = init_device_mesh("cpu", (1,))
    full = Small().state_dict()
    for recomputed in (True, False):
        with torch.device("meta"):
            model = distribute_module(Small(), mesh)
        assert isinstance(model.emb.weight, DTensor)
        with tp.materialize_audit(model) as audit:
            model.to_empty(device="cpu")
            if recomputed:  # as the rest of it is: forward would refuse a plain one among DTensors
                model.inv_freq = distribute_tensor(FREQUENCIES.clone(), mesh, [Replicate()])
            options = StateDictOptions(full_state_dict=True)
            set_model_state_dict(model, {key: value.clone() for key, value in full.items()}, options=options)
        assert found(audit) == ([] if recomputed else [("TP402", "warning", ["inv_freq"])])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
