"""check_graph() and saved_for_backward(): sums that add up, names, and what nobody runs."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import operator
import threading
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


def test_tp206_behind_a_view_whose_base_was_written():
    base = leaf(4) * 1
    view = base[:2]
    base.exp_()
    assert codes(tp.check_graph(view)) == []
    base.add_(1)
    assert codes(tp.check_graph(view)) == ["TP206"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        view.backward(torch.ones(2))


def test_what_backward_meets_first_comes_first():
    p, q = leaf() * 1, leaf() * 1
    older, younger = q.cos(), p.sin()
    p.add_(1)
    q.add_(1)
    loss = (younger + older).sum()
    assert [finding.where.name for finding in tp.check_graph(loss).findings] == ["p", "q"]


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


@pytest.mark.parametrize("saves", [True, False])
def test_tp208_of_a_custom_function_that_saved_something(saves):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if saves:
                ctx.save_for_backward(x)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad * (torch.ones_like(ctx.saved_tensors[0]) if saves else 1)

    y = Double.apply(leaf())
    y.sum().backward()
    assert codes(tp.check_graph(y)) == (["TP208"] if saves else [])
    again = y * 1.0
    assert codes(tp.check_graph(again)) == (["TP208"] if saves else [])
    if saves:
        with pytest.raises(RuntimeError, match="a second time"):
            again.sum().backward()
    else:
        again.sum().backward()


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
def test_the_graph_behind_a_gradient_is_not_the_losss():
    x = leaf(10)
    other = x.exp()
    x.grad = (other * other).detach() * other  # as create_graph leaves one
    loss = x.sin().sum()
    with torch.no_grad():
        other.add_(1)
    assert "TP206" not in codes(tp.check_graph(loss))
    assert {one.held_by for one in tp.saved_for_backward(loss).saved} == {"SinBackward0._saved_self"}


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


def test_a_storage_without_the_memory_is_found():
    x = leaf(100)
    y = x * 2
    loss = y.pow(2).sum()
    y.untyped_storage().resize_(0)
    (finding,) = tp.check_graph(loss).findings
    assert (finding.code, finding.where.name) == ("TP102", "PowBackward0._saved_self")


def summed(steps: int, *, backward: bool, step: bool = False, detach: bool = False) -> torch.Tensor:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total: Any = 0
    for _ in range(steps):
        loss = model(leaf(4, 10)).exp().mean()
        total = total + (loss.detach() if detach else loss)
        if backward:
            loss.backward()
        if step:
            optimizer.step()
    return total


def test_tp310_needs_a_proof_that_steps_lie_between():
    total = summed(3, backward=True, step=True)
    for report in (tp.check_graph(total), tp.check({"total": total}), tp.check_graph(total / 3)):
        found = {finding.code: finding for finding in report.findings}
        assert found["TP310"].severity == "warning"
        assert (found["TP310"].evidence["terms"], found["TP310"].evidence["weights_moved"]) == (3, True)
        assert "TP208" not in found  # one finding for one cause
    partly = summed(3, backward=True) + leaf(4, 10).exp().mean()
    (finding,) = tp.check_graph(partly).findings
    assert (finding.code, finding.evidence["released"], finding.evidence["terms"]) == ("TP310", 3, 4)
    (unproven,) = tp.check_graph(summed(3, backward=False) / 3).findings
    assert (unproven.code, unproven.severity) == ("TP310", "info")
    assert (unproven.evidence["terms"], unproven.evidence["released"]) == (3, 0)
    assert unproven.evidence["activation_bytes_held"] >= 3 * 4 * 4 * 10
    assert codes(tp.check({"total": summed(3, backward=False)})) == []


def losses_of(steps: int, *, step: bool, shape: str = "scalar") -> list[torch.Tensor]:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        out = model(leaf(4, 10)).exp()
        loss = out.mean() if shape == "scalar" else out.mean(1)
        if step:
            loss.sum().backward()
            optimizer.step()
        losses.append(loss)
    return losses


KEPT = {
    "a sum that begins at 0": sum,
    "a mean": lambda losses: sum(losses) / len(losses),
    "a difference": lambda losses: functools.reduce(operator.sub, losses, 0),
    "the other way round": lambda losses: functools.reduce(lambda total, loss: loss + total, losses),
    "a moving mean": lambda losses: functools.reduce(lambda mean, loss: 0.9 * mean + 0.1 * loss, losses),
    "lerp": lambda losses: functools.reduce(lambda mean, loss: mean.lerp(loss, 0.1), losses),
    "in place": lambda losses: functools.reduce(lambda total, loss: total.add_(loss), losses, torch.zeros(())),
    "another dtype": lambda losses: functools.reduce(lambda total, loss: total + loss.double(), losses, 0),
    "stack": torch.stack,
    "stack and mean": lambda losses: torch.stack(losses).mean(),
    "cat": lambda losses: torch.cat([loss.view(1) for loss in losses]).sum(),
    "two pairs": lambda losses: (losses[0] + losses[1]) + (losses[2] + losses[3]),
    "the list": lambda losses: losses,
    "a dict": lambda losses: {f"loss {number}": loss for number, loss in enumerate(losses)},
}


@pytest.mark.parametrize("way", KEPT)
def test_tp310_sees_each_way_to_keep_losses(way):
    kept = KEPT[way](losses_of(4, step=True))
    for report in (tp.check_graph(kept), tp.check({"kept": kept})):
        (finding,) = (one for one in report.findings if one.code == "TP310")
        assert (finding.evidence["terms"], finding.evidence["weights_moved"]) == (4, True)
    healthy = KEPT[way](losses_of(4, step=False))
    assert [one.code for one in tp.check_graph(healthy).findings if one.severity != "info"] == []
    assert codes(tp.check({"kept": healthy})) == []


def test_tp310_sees_sums_of_vectors_and_of_losses_of_several_kinds():
    (vectors,) = tp.check_graph(sum(losses_of(3, step=True, shape="vector"))).findings
    assert (vectors.code, vectors.evidence["terms"]) == ("TP310", 3)
    model = nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total: Any = 0
    for _ in range(3):
        loss = model(leaf(4, 10)).exp().mean() + 0.1 * sum(weight.pow(2).sum() for weight in model.parameters())
        loss.backward()
        optimizer.step()
        total = total + loss
    (mixed,) = tp.check_graph(total).findings
    assert (mixed.code, mixed.severity) == ("TP310", "warning")


def test_tp310_is_silent_on_losses_of_two_players():
    generator, judge = nn.Linear(4, 10), nn.Linear(10, 1)
    optimizers = [torch.optim.Adam(player.parameters()) for player in (generator, judge)]
    for _ in range(3):
        fake = generator(torch.randn(8, 4))
        real_loss, fake_loss = judge(torch.randn(8, 10)).mean(), judge(fake.detach()).mean()
        real_loss.backward()
        fake_loss.backward()
        optimizers[1].step()
        loss = judge(fake).mean()
        named = {"real": real_loss, "fake": fake_loss, "both": real_loss + fake_loss, "generator": loss}
        assert codes(tp.check(named)) == []
        loss.backward()
        optimizers[0].step()
        assert codes(tp.check(named)) == []


def test_tp310_is_silent_on_what_a_residual_net_adds_up():
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(20))
    x = leaf(4, 8)
    for block in blocks:
        x = x + block(x)
    assert codes(tp.check_graph(x)) == codes(tp.check_graph([x.mean(), x[0, 0]])) == []


def test_tp310_is_no_warning_for_buffers_that_are_filled_again_within_one_step():
    model, table, batch, place = nn.Linear(4, 4), nn.Embedding(9, 4), torch.randn(2, 4), torch.zeros(2).long()
    filled = read = torch.zeros(())
    for _ in range(4):
        filled = filled + model(batch).exp().mean()
        batch.normal_()
        read = read + table(place).exp().mean()
        place += 1
    for total in (filled, read):
        assert sorted({finding.code for finding in tp.check({"total": total}).findings}) == ["TP206"]
        assert {f.code: f.severity for f in tp.check_graph(total).findings} == {"TP206": "warning", "TP310": "info"}


def test_tp310_is_silent_on_the_norms_of_many_weights():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    assert codes(tp.check_graph(sum(weight.pow(2).sum() for weight in model.parameters()))) == []


def test_tp310_says_that_what_is_used_up_raises():
    total = sum(losses_of(3, step=True))
    (finding,) = tp.check_graph(total).findings
    assert "3 are used up: a backward through them raises" in finding.why
    with pytest.raises(RuntimeError, match="a second time") as raised, tp.guard_backward():
        total.backward()
    assert "TensorPlay: TP208" in str(raised.value)


def test_tp208_sees_an_in_place_write_on_a_view_that_was_used():
    x, y = leaf(4, 4), leaf(4)
    base = x + 1
    base[0].add_(y)
    base.sum().backward()
    (finding,) = tp.check_graph(base).findings
    assert (finding.code, finding.evidence["node"], finding.evidence["argument"]) == (
        "TP208",
        "torch::autograd::CopySlices",
        "fn",
    )
    with pytest.raises(RuntimeError, match="a second time"):
        base.sum().backward()
    other = x + 1
    other[0].add_(y)
    assert codes(tp.check_graph(other)) == []


def test_tp206_is_one_finding_for_all_parameters_that_a_step_wrote():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    loss = model(leaf(2, 4)).exp().mean()
    extra = loss.exp()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1)
        extra.add_(1)
    result, weights = tp.check_graph(extra.sum()).findings  # what backward meets first comes first
    assert (weights.where.name, len(weights.evidence["saved_by"])) == ("model.7.weight", 8)
    assert "and 7 more parameters: model.6.weight, model.5.weight" in weights.subject
    assert [saver["tensor"] for saver in weights.evidence["saved_by"]] == [
        f"model.{n}.weight" for n in range(7, -1, -1)
    ]
    assert result.where.name == "extra"


@pytest.mark.parametrize("terms", [2, 4])
def test_tp310_is_silent_on_one_step_whose_losses_are_added_up(terms):
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        loss = sum((model(torch.randn(4, 10)).pow(2).mean() for _ in range(terms)), torch.zeros(()))
        loss.backward()
        assert [f.code for f in tp.check({"model": model, "loss": loss}).findings if f.severity != "info"] == []
        optimizer.step()
        optimizer.zero_grad()
        assert [f.code for f in tp.check({"model": model, "loss": loss}).findings if f.severity != "info"] == []
    assert "TP208" in codes(tp.check_graph(loss))


def test_a_trunk_that_was_used_is_tp208_for_the_heads_on_it():
    trunk = leaf(4, 10).exp()
    trunk.sum().backward()
    loss = trunk.sin().mean() + trunk.cos().mean()
    assert codes(tp.check_graph(loss)) == ["TP208"]
    assert codes(tp.check({"loss": loss})) == []


def test_tp310_is_silent_on_sums_of_another_kind():
    model = nn.Linear(8, 8)
    x = model(leaf(4, 8))
    for _ in range(4):
        x = x + model(x)
    penalty = model.weight.pow(2).sum() + model(leaf(1, 8)).mean() + x.norm()
    for loss in (x.mean(), penalty, summed(3, backward=True, detach=True), summed(2, backward=False)):
        assert codes(tp.check_graph(loss)) == []


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
def test_tp311_needs_a_graph_that_leads_back():
    x = leaf(10)
    loss = x.exp().sum()
    loss.backward(create_graph=True)
    (finding,) = tp.check({"x": x}).findings
    assert (finding.code, finding.where.name, finding.evidence["leaves"]) == ("TP311", "x", 1)
    x.grad = None
    assert codes(tp.check({"x": x})) == []
    a, b = leaf(10), leaf(10)
    (a * b).sum().backward(create_graph=True)  # each leads to the other
    (mutual,) = tp.check({"a": a, "b": b}).findings
    assert (mutual.code, sorted(mutual.evidence["names"])) == ("TP311", ["a", "b"])
    a.grad = b.grad = None
    many = [leaf(2) for _ in range(200)]
    sum(one.exp().sum() for one in many).backward(create_graph=True)
    (all_of_them,) = tp.check_graph({str(number): one for number, one in enumerate(many)}).findings
    assert all_of_them.evidence["leaves"] == 200
    for one in many:
        one.grad = None
    linear = (leaf(10) * torch.ones(10)).sum()
    linear.backward(create_graph=True)  # the gradient has no graph
    (grad,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
    assert codes(tp.check_graph([grad, linear])) == []


def write_by_data(y: torch.Tensor) -> None:
    y.data.mul_(2)


def write_by_numpy(y: torch.Tensor) -> None:
    y.detach().numpy()[...] += 1


def write_by_dlpack(y: torch.Tensor) -> None:
    torch.from_dlpack(y.detach()).data.add_(1)


@pytest.mark.parametrize("write", [write_by_data, write_by_numpy, write_by_dlpack])
def test_tp207_a_write_that_moves_no_version(write):
    x = leaf(100)
    y = x.exp()
    loss = y.sum()
    before = tp.check_graph(loss, checksums=True)
    assert codes(tp.check_graph(loss, since=before)) == []
    write(y)
    (finding,) = tp.check_graph(loss, since=before).findings
    assert (finding.code, finding.severity, finding.where.name) == ("TP207", "warning", "y")
    assert finding.evidence["saved_by"] == [{"node": "ExpBackward0", "argument": "result"}]
    loss.backward()  # raises nothing
    assert x.grad is not None
    assert not torch.equal(x.grad, x.exp())


def test_tp207_names_what_is_alive_over_the_bytes():
    y = leaf(100).exp()
    before = tp.check_graph(y, checksums=True)
    alias = y.data
    alias.zero_()
    (finding,) = tp.check_graph(y, since=before).findings
    assert finding.evidence["aliases"] == ["alias float32[100] with its own version counter, at version 1"]


def test_tp207_names_arrays_and_tensors_over_other_storages():
    numpy = pytest.importorskip("numpy")
    array = numpy.ones(100, dtype=numpy.float32)
    x = torch.from_numpy(array)
    again = torch.from_numpy(array)  # a second storage over the same bytes
    loss = (x * leaf(100)).sum()
    before = tp.check_graph(loss, checksums=True)
    array += 1
    (finding,) = tp.check_graph(loss, since=before).findings
    assert finding.where.name == "x"
    assert sorted(finding.evidence["aliases"]) == [
        "NumPy array array float32[100]",
        "again float32[100] with its own version counter, at version 0",
    ]
    assert torch.equal(again, x)


def test_tp207_is_silent_on_writes_that_pytorch_sees_and_on_other_graphs():
    x = leaf(100)
    y = x.exp()
    before = tp.check_graph(y, checksums=True)
    with torch.no_grad():
        y.add_(1)
    assert codes(tp.check_graph(y, since=before)) == ["TP206"]
    for _ in range(20):  # nodes at the same addresses
        y = x.exp()
        x.data.add_(1)
        before = tp.check_graph(y, checksums=True)
        del y
        y = x.exp()
        assert codes(tp.check_graph(y, since=before)) == []


@pytest.mark.parametrize("training", [True, False])
def test_tp207_of_running_statistics_that_backward_reads(training):
    norm = nn.BatchNorm1d(4).train(training)
    loss = norm(leaf(8, 4)).pow(2).sum()
    before = tp.check_graph(loss, checksums=True)
    norm.train()(torch.randn(8, 4))
    assert codes(tp.check_graph(loss, since=before)) == ([] if training else ["TP207", "TP207"])


def test_tp207_tells_the_nodes_of_two_threads():
    made: list[torch.Tensor] = []
    for value in (1.0, 2.0):
        thread = threading.Thread(
            target=lambda value=value: made.append(torch.full((3,), value).requires_grad_().exp())
        )
        thread.start()
        thread.join()
    before = tp.check_graph(made, checksums=True)
    assert codes(tp.check_graph(made, since=before)) == []


def test_frozen_parameters_are_no_activations():
    frozen = nn.Linear(100, 100).requires_grad_(False)
    graph = tp.check_graph(frozen(leaf(1, 100)).sum()).graph
    assert (graph.activation_bytes_held, graph.parameter_bytes) == (0, 40_000)


@pytest.mark.parametrize("moved", [True, False])
def test_tp206_of_the_inputs_of_a_checkpointed_function(moved):
    x = leaf() * 1
    weight = leaf()
    loss = checkpoint(lambda t: (t * weight).exp().sin(), x, use_reentrant=False).sum()
    if moved:
        x.add_(1)
    found = tp.check_graph(loss).findings
    assert codes(tp.check({"loss": loss})) == [finding.code for finding in found] == (["TP206"] if moved else [])
    if not moved:
        loss.backward()
        return
    assert (found[0].where.name, found[0].evidence["node"]) == ("x", "torch.utils.checkpoint")
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised, tp.guard_backward():
        loss.backward()
    assert "TensorPlay: TP206 x" in str(raised.value)


def test_the_guard_says_nothing_that_the_error_contradicts():
    x, h = leaf(3) * 1, leaf(5) * 1
    loss = h.sin().sum() + checkpoint(lambda t: t.exp().sin(), x, use_reentrant=False).sum()
    x.add_(1)
    h.add_(1)
    with pytest.raises(RuntimeError) as raised, tp.guard_backward():
        loss.backward()
    message, _, said = str(raised.value).partition("TensorPlay: ")
    assert ("FloatTensor [5]" in message) == ("TP206 h" in said)
    assert ("FloatTensor [3]" in message) == ("TP206 x" in said)


def test_sums_are_of_the_elements_alone():
    x = torch.arange(24.0).reshape(4, 6)

    def sum_of(value: torch.Tensor) -> int:
        (entry,) = C.saved_checksums([torch.ones_like(value, requires_grad=True) * value])
        return entry[6]

    assert sum_of(x) == sum_of(x.clone()) == sum_of(torch.stack([x, x])[1])
    assert sum_of(x) != sum_of(x.t())
    assert sum_of(x) != sum_of(x + 1)
    for size in range(1, 40):
        values = torch.arange(size, dtype=torch.uint8).float()
        changed = values.clone()
        changed[size - 1] += 1
        assert sum_of(values) != sum_of(changed)
    gaps = torch.arange(48.0).reshape(4, 12)
    before = sum_of(gaps[:, ::2])
    gaps[:, 1::2] = -1
    assert sum_of(gaps[:, ::2]) == before


def test_sums_are_asked_for_in_the_right_way():
    y = leaf().exp()
    with pytest.raises(TypeError, match="takes True or False"):
        tp.check_graph(y, checksums=1)  # type: ignore[arg-type]
    for bad in (3, tp.check_graph(y)):
        with pytest.raises(TypeError, match="checksums=True"):
            tp.check_graph(y, since=bad)  # type: ignore[arg-type]
    nothing = tp.check_graph(torch.ones(3), checksums=True)
    assert codes(tp.check_graph(y, since=nothing)) == []
    report = tp.check_graph(y, checksums=True)
    assert Report.from_json(report.to_json()).document.checksums == report.document.checksums
    assert report.document.checksums


# -- the guard --------------------------------------------------------------------------------------------------------


def test_the_guard_adds_what_it_knows_to_pytorchs_own_error():
    x = leaf()
    y = x.exp()
    loss = y.sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as raised, tp.guard_backward() as guard:
        loss.backward()
    assert type(raised.value) is RuntimeError
    said = "TensorPlay: TP206 y: float32[3] saved by ExpBackward0 (result) at version 0, now at version 1"
    assert said in str(raised.value)
    assert codes(guard) == ["TP206"]
    assert json.loads(guard.to_json())["findings"][0]["code"] == "TP206"


def test_the_guard_names_the_tensor_that_the_error_is_on():
    x = leaf()
    a, b = x.exp(), (x * 1).sin()
    c = x * 3
    loss = (a * 2).sum() + c.pow(2).sum() + b.sum()
    with torch.no_grad():
        for _ in range(3):
            c.add_(1)
    with pytest.raises(RuntimeError, match="is at version 3; expected version 0") as raised, tp.guard_backward():
        torch.autograd.grad(loss, x)
    assert "TP206 c: float32[3] saved by PowBackward0 (self) at version 0, now at version 3" in str(raised.value)


def test_the_guard_tells_a_graph_that_was_used():
    hidden = leaf().exp()
    hidden.sum().backward()
    with pytest.raises(RuntimeError, match="a second time") as raised, tp.guard_backward() as guard:
        (hidden * 2).sum().backward()
    assert "TP208" in str(raised.value)
    assert "ExpBackward0 (result)" in str(raised.value)
    assert codes(guard) == ["TP208"]


def test_guards_within_guards_and_around_coroutines():
    def fail() -> None:
        y = leaf().exp()
        with torch.no_grad():
            y.add_(1)
        y.sum().backward()

    @tp.guard_backward()
    async def fail_later() -> None:
        fail()

    with pytest.raises(RuntimeError) as raised, tp.guard_backward(), tp.guard_backward():
        fail()
    assert str(raised.value).count("TensorPlay: ") == 1
    with pytest.raises(RuntimeError, match="TensorPlay: TP206"):
        asyncio.run(fail_later())


def test_the_guard_leaves_all_else_alone():
    @tp.guard_backward()
    def step() -> int:
        leaf().exp().sum().backward()
        return 3

    assert step() == 3
    with pytest.raises(ValueError, match=r"^mine$"), tp.guard_backward() as guard:
        raise ValueError("mine")
    assert (guard.report, guard.findings, guard.to_json()) == (None, (), "null")
    with pytest.raises(RuntimeError, match=r"^also mine$"), tp.guard_backward():
        raise RuntimeError("also mine")
    with pytest.raises(RuntimeError, match="grad can be implicitly created"), tp.guard_backward() as guard:
        leaf().exp().backward()
    assert codes(guard) == []


def test_many_findings_are_cut_and_said_to_be():
    kept = [leaf(2).exp() for _ in range(1200)]
    loss = torch.stack([one.sum() for one in kept]).sum()
    with torch.no_grad():
        for one in kept:
            one.add_(1)
    report = tp.check_graph(loss)
    assert report.graph.written == 1200
    assert "1200 saved tensors that were written: the first 1000 are explained" in str(report)
    with pytest.raises(RuntimeError) as raised, tp.guard_backward():
        loss.backward()
    assert len(str(raised.value)) < 3000


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


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
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
    assert "no findings" not in str(report)  # no rule was asked
    assert "<title>TensorPlay: the graph behind y</title>" in page
    assert "ExpBackward0._saved_result" in page
    assert repr(report) == "<tensorplay.GraphReport: 3 nodes, 0 findings>"


@pytest.mark.parametrize("bad", [3, None, "x", [torch.ones(2), "x"]])
def test_what_has_no_graph_is_refused(bad):
    with pytest.raises(TypeError, match=r"takes a tensor with a graph, .*; bad(\[1\])? is of type (int|str|NoneType)$"):
        tp.check_graph(bad)
    with pytest.raises(TypeError, match=r"^saved_for_backward\(\) takes a tensor"):
        tp.saved_for_backward([bad])


def test_an_edge_of_the_graph_stands_for_its_node():
    y = leaf(3).exp()
    edge = torch.autograd.graph.get_gradient_edge(y)
    assert tp.check_graph(edge).graph.nodes == tp.check_graph(y.grad_fn).graph.nodes == 2


def test_a_root_without_a_graph_is_said_to_raise():
    for loss in (torch.ones(3), leaf(3).detach().sum()):
        assert "loss needs no gradient: backward() through it raises" in str(tp.check_graph(loss))
        with pytest.raises(RuntimeError, match="does not require grad"):
            loss.sum().backward()
    assert "needs no gradient" not in str(tp.check_graph(leaf(3)))


def test_a_node_is_a_root_as_well():
    y = leaf().exp()
    assert tp.check_graph(y.grad_fn).graph.nodes == tp.check_graph(y).graph.nodes == 2


def test_messages_are_told_word_for_word():
    def raised(saved: torch.Tensor) -> None:
        result = (saved * leaf(3)) if saved.dtype != torch.bool else leaf(3).masked_fill(saved, 0.0)
        loss = result.abs().sum()
        with torch.no_grad():
            saved.fill_(0)
        found = {message["message"] for one in tp.check_graph(loss).findings for message in one.evidence["saved_by"]}
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        assert any(str(error.value).startswith(f"{message}.") for message in found), (found, error.value)

    for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.bool):
        raised(torch.ones(3).to(dtype))
    raised(leaf(3).exp())
    raised((leaf(4) * 1)[1:])
    raised(torch.ones(4)[1:])


def test_a_guard_names_tensors_of_the_frames_that_ended():
    def step() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        loss = model(leaf(2, 3)).sum()
        with torch.no_grad():
            model[1].weight.add_(1)
        loss.backward()

    @tp.guard_backward
    def decorated() -> None:
        step()

    with pytest.raises(RuntimeError) as raised:
        decorated()
    assert "TensorPlay: TP206 model.1.weight: float32[3, 1] saved by AddmmBackward0 (mat2)" in str(raised.value)
    with pytest.raises(TypeError, match="decorates a function, got int"):
        tp.guard_backward(3)  # type: ignore[call-overload]


def test_an_output_that_is_held_somewhere_is_not_said_to_be_unseen():
    class Holder:
        pass

    holder = Holder()
    holder.out = leaf(1000).exp()  # type: ignore[attr-defined]
    loss = holder.out.sum()  # type: ignore[attr-defined]
    (held,) = tp.saved_for_backward(loss).saved
    assert (held.in_python, held.name) == (True, None)
    (unseen,) = tp.saved_for_backward(leaf(1000).exp().sum()).saved
    assert not unseen.in_python
