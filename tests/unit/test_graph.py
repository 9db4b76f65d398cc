"""check_graph() and saved_for_backward(): sums that add up, names, and what nobody runs."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import tensorplay as tp
from tensorplay._native import C
from tensorplay.reports import Report


def codes(report: Any) -> list[str]:
    return [finding.code for finding in report.findings]


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(*shape or (3,), requires_grad=True)


# -- sums -------------------------------------------------------------------------------------------------------------


def test_each_storage_is_counted_once_and_parameters_beside():
    model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 10))
    x = torch.ones(50, 100)
    loss = model(x).exp().mean()

    graph = tp.check_graph(loss).graph

    # The batch, ReLU's result, which the second layer saved too, and exp's result.
    assert (graph.activations_held, graph.activation_bytes_held) == (3, 4 * 50 * (100 + 200 + 10))
    assert (graph.parameter_storages, graph.parameter_bytes) == (1, 4 * 200 * 10)
    assert sum(one.nbytes for one in graph.by_kind) == graph.activation_bytes_held
    assert sum(one.nbytes for one in graph.by_module) == graph.activation_bytes_held
    assert {one.name for one in graph.by_module} == {"model.0", "model.2", "no parameters"}
    assert graph.roots == ("loss",)
    assert (graph.written, graph.released, graph.memoryless, graph.packed, graph.busy) == (0, 0, 0, 0, 0)


def test_modules_of_an_object_are_named_too():
    class Trainer:
        def __init__(self) -> None:
            self.model = nn.Linear(3, 2)

        def look(self) -> Any:
            return tp.check_graph(self.model(leaf(4, 3)).sum())

    assert [one.name for one in Trainer().look().graph.by_module] == ["self.model"]


def test_everything_saved_is_listed_the_largest_first():
    x = leaf(1000)
    y = x.exp()
    z = (y * 2).pow(3).sum()
    del y
    report = tp.saved_for_backward([z])

    held = {one.held_by: one for one in report.saved}
    assert held["ExpBackward0._saved_result"].held_bytes == 4000
    assert not held["ExpBackward0._saved_result"].in_python
    assert held["PowBackward0._saved_self"].held_bytes == 4000
    sizes = [one.held_bytes for one in report.saved]
    assert sizes == sorted(sizes, reverse=True)
    assert "nothing: no Python object shows it" in str(report)
    assert json.loads(report.to_json())["saved"][0]["held_bytes"] == 4000


def test_two_savers_of_one_storage_are_one_entry():
    x = leaf(10)
    y = x.exp()
    z = (y * y).sum()
    (one,) = [one for one in tp.saved_for_backward(z).saved if one.held_bytes == 40]
    assert {one.held_by, *one.also_held_by} == {
        "ExpBackward0._saved_result",
        "MulBackward0._saved_self",
        "MulBackward0._saved_other",
    }
    assert one.name == "y"


def test_what_is_alive_anywhere_is_found():
    gc.collect()
    before = tp.saved_for_backward().graph
    kept = [leaf(500).exp()]
    after = tp.saved_for_backward().graph
    assert after.activation_bytes_held - before.activation_bytes_held == 2000
    assert kept[0].requires_grad
    assert after.roots == ("everything alive",)


def test_no_graph_is_nothing():
    for loss in (torch.ones(3), leaf(), [], {}):
        report = tp.check_graph(loss)
        assert codes(report) == []
        assert report.graph.activation_bytes_held == 0
        assert report.graph.saved == 0


def test_a_long_graph_needs_no_recursion():
    x = leaf()
    for _ in range(100_000):
        x = x + 1
    assert tp.check_graph(x).graph.nodes == 100_001


# -- what backward would stumble over ---------------------------------------------------------------------------------


def test_tp206_names_the_tensor_both_versions_and_the_message():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(leaf(4, 3)).mean()
    loss.backward(retain_graph=True)
    optimizer.step()

    (finding,) = tp.check_graph(loss).findings

    assert finding.code == "TP206"
    assert finding.where.name == "model.weight"
    assert finding.evidence["version_now"] == finding.evidence["saved_version"] + 1
    assert (finding.evidence["node"], finding.evidence["argument"]) == ("AddmmBackward0", "mat2")
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    said = str(raised.value)
    beginning, _, versions = finding.evidence["message"].partition("] ")
    assert said.startswith(beginning)
    assert versions in said
    assert [one.code for one in tp.check({"model": model, "loss": loss}).findings] == ["TP206"]


def test_tp206_is_one_finding_a_version_counter():
    x = leaf(4, 4)
    y = x * 1
    loss = (y[0].exp() * y[1] * y.sum()).sum() + (y * y).sum()
    with torch.no_grad():
        y.add_(1)
    (finding,) = tp.check_graph(loss).findings
    assert len(finding.evidence["saved_by"]) >= 3


def test_tp206_of_a_custom_function():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    x = leaf()
    y = x * 1
    loss = Square.apply(y)
    with torch.no_grad():
        y.mul_(2)
    (finding,) = tp.check_graph(loss).findings
    assert (finding.evidence["node"], finding.evidence["argument"]) == ("SquareBackward", "saved_tensors[0]")


def test_tp208_tells_a_used_graph_and_a_used_part():
    hidden = leaf().exp()
    hidden.sum().backward()
    (finding,) = tp.check_graph(hidden).findings
    assert (finding.code, finding.evidence["node"]) == ("TP208", "ExpBackward0")
    assert "the graph was used up" in finding.headline
    loss = hidden.sin().prod()
    (part,) = tp.check_graph(loss).findings
    assert "a part of the graph" in part.headline
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    assert codes(tp.check({"hidden": hidden, "loss": loss})) == []


# -- what is healthy --------------------------------------------------------------------------------------------------


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8))


def plain(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def with_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(model, x)


def packed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return plain(model, x)


def offloaded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        return plain(model, x)


def compiled(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.compile(model, backend="aot_eager")(x).pow(2).mean()


def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    loss = plain(model, x)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.pow(2).sum()


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "plain": plain,
    "autocast": with_autocast,
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False).pow(2).mean(),
    "reentrant checkpoint": lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True).pow(2).mean(),
    "packed by hooks": packed,
    "save_on_cpu": offloaded,
    "compiled": compiled,
    "double backward": penalised,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_healthy_training_has_no_finding_before_backward(way, accumulate):
    model = block()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        for _ in range(accumulate):
            loss = WAYS[way](model, torch.randn(4, 8))
            assert codes(tp.check_graph(loss)) == []
            assert [f.code for f in tp.check({"model": model, "loss": loss}).findings if f.severity != "info"] == []
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [f.code for f in tp.check({"model": model, "loss": loss}).findings if f.severity != "info"] == []


def test_a_graph_that_is_kept_is_healthy_until_something_is_written():
    model = block()
    loss = plain(model, torch.randn(4, 8))
    for _ in range(3):
        assert codes(tp.check_graph(loss)) == []
        loss.backward(retain_graph=True)
    assert codes(tp.check_graph(loss)) == []


# -- the observer -----------------------------------------------------------------------------------------------------


def test_asking_changes_nothing():
    x = leaf()
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: pytest.fail("a hook ran")):
        packed_one = (x * 2).exp()
    y = (x * x).sum() + packed_one.sum()
    things = [x, y, packed_one]

    def counts() -> list[Any]:
        records = [C.read(each, 0) for each in things]
        return [(r.python.refcount, r.impl.use_count, r.storage.use_count, r.impl.version) for r in records]

    before = counts()
    kept = [tp.check_graph(y), tp.saved_for_backward(y), tp.saved_for_backward(), tp.check({"y": y})]
    assert counts() == before
    assert len(kept) == 4


def test_a_report_is_read_back_and_shown():
    y = leaf(10).exp().sum()
    report = tp.saved_for_backward(y)
    again = Report.from_json(report.to_json())
    assert again.document == report.document
    assert str(again) == str(report)
    page = report.html()
    assert "<title>TensorPlay: the graph behind y</title>" in page
    assert "ExpBackward0._saved_result" in page
    assert repr(report) == "<tensorplay.GraphReport: 3 nodes, 0 findings>"


@pytest.mark.parametrize("bad", [3, None, "x", [torch.ones(2), "x"]])
def test_what_has_no_graph_is_refused(bad):
    with pytest.raises(TypeError, match=r"expected a torch\.Tensor or a node of autograd, got"):
        tp.check_graph(bad)


def test_a_node_is_a_root_as_well():
    y = leaf().exp()
    assert tp.check_graph(y.grad_fn).graph.nodes == tp.check_graph(y).graph.nodes == 2
