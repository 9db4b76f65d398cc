"""Faults of backward, as people reported them in public, each with its near-identical healthy twin."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import tensorplay as tp
from tests.helpers import raises

# In a GAN's loop the discriminator steps between its own loss and the generator's.


@pytest.mark.parametrize("early", [True, False])
def test_step_between_two_losses_of_one_graph(early):
    discriminator = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    score = discriminator(torch.ones(4, 3, requires_grad=True))
    own, generators = score.mean(), -score.mean()
    own.backward(retain_graph=True)
    if early:
        optimizer.step()
    report = tp.check({"weight": discriminator.weight, "loss": generators})

    assert raises(lambda: generators.backward()) is early
    if not early:
        optimizer.step()
        assert not report.findings
        assert not tp.check({"weight": discriminator.weight, "loss": generators}).findings  # the graph is used up
        return
    (finding,) = report.findings
    assert (finding.code, finding.evidence["node"]) == ("TP206", "AddmmBackward0")
    assert (finding.evidence["saved_version"], finding.evidence["version_now"]) == (1, 2)


# The losses of an evaluation are summed with their graphs.


@pytest.mark.parametrize("item", [True, False])
def test_running_loss_keeps_the_graph_of_each_step(item):
    linear = nn.Linear(100, 100)
    total = 0.0
    for _ in range(5):
        loss = linear(torch.ones(50, 100)).exp().mean()
        total = total + (loss.item() if item else loss)
    del loss
    report = tp.saved_for_backward([total] if isinstance(total, torch.Tensor) else [])

    held = report.graph
    assert (held.activation_bytes_held, held.activations_held) == ((0, 0) if item else (200_000, 10))
    if not item:
        assert held.nodes == 27
        (finding,) = tp.check_graph(total).findings
        assert (finding.code, finding.severity, finding.evidence["terms"]) == ("TP310", "info", 5)


# A saved output is in memory, and the garbage collector knows no tensor for it.


@pytest.mark.parametrize("graph", [True, False])
def test_saved_output_that_no_python_object_shows(graph):
    x = torch.zeros(1000, 1000, requires_grad=True)
    with nullcontext() if graph else torch.no_grad():
        y = x.exp()
        z = y.sum()
        u = x * 2
        v = (u**3).sum()
    addresses = [y.untyped_storage()._cdata, u.untyped_storage()._cdata]
    del y, u
    gc.collect()

    saved = {one.storage: one for one in tp.saved_for_backward([z, v]).saved}

    if not graph:
        assert saved == {}
        return
    hidden, shown = (saved[address] for address in addresses)
    assert (hidden.held_by, hidden.held_bytes, hidden.in_python) == ("ExpBackward0._saved_result", 4_000_000, False)
    assert (shown.held_by, shown.held_bytes, shown.in_python) == ("PowBackward0._saved_self", 4_000_000, True)
