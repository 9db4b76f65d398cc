"""The in-place write: a part of a weight is written, PyTorch raises, and each call says its share of why.

``docs/tutorial/an-in-place-write.md`` tells the same story with the same names, so that what is printed here is
compared with what stands there.
"""

from __future__ import annotations

import re

import pytest
import torch

import tensorplay
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "tutorial" / "an-in-place-write.md").read_text(encoding="utf-8")
PLACE = re.compile(r"^  where   .*$", re.MULTILINE)  # the line that asked: another one here


def stands_on_the_page(printed: str) -> bool:
    return PLACE.sub("", printed).strip() in PLACE.sub("", PAGE)


@pytest.fixture
def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(24.0).reshape(4, 6))


def test_a_write_into_part_of_a_weight(weight, capsys):
    part = weight.narrow(1, 2, 3).transpose(0, 1)

    # PyTorch refuses, and says what, but not why.
    with pytest.raises(RuntimeError) as failure:
        part.add_(1)
    assert stands_on_the_page(str(failure.value))

    # What it is: a view with a storage that is not its own.
    report = tensorplay.inspect(part)
    printed = capsys.readouterr().err
    assert "48 B of a storage of 96 B" in printed
    assert "view of I2; grad_fn TransposeBackward0; requires grad" in printed
    assert [finding.code for finding in report.findings] == ["TP201"]
    assert stands_on_the_page(printed)

    # How it came to be: autograd has a node for each operator.
    chain = tensorplay.show_view_chain(part).chain
    printed = capsys.readouterr().err
    assert "base weight" in printed
    assert "slice(dim=1, start=2, end=5)" in printed
    assert "transpose(dim0=0, dim1=1) = part" in printed
    assert (chain.begins, chain.base, chain.source) == ("base", "weight", "autograd")
    assert [(step.op, step.source) for step in chain.steps] == [("slice", "autograd"), ("transpose", "autograd")]
    assert stands_on_the_page(printed)

    # Whether a write would do what it says.
    verdict = tensorplay.is_safe_view(part)
    assert not verdict
    assert verdict.reasons == (
        "view of a leaf that requires grad, 48 B of 96 B: raises while grad mode is on, safe under no_grad",
    )
    assert [(finding.code, finding.severity) for finding in verdict.findings] == [("TP201", "warning")]
    assert stands_on_the_page(str(verdict))

    # What to write instead: the statement is the one that raised.
    fixes = tensorplay.recommend_fix(failure.value)
    assert fixes[0].code == "with torch.no_grad():\n    part.add_(1)"
    assert (fixes[0].cost_nbytes, fixes[0].safety) == (0, "safe")
    assert stands_on_the_page(str(fixes))

    # The fix is run as it stands, and reaches the weight.
    expected = weight.detach().clone()
    expected[:, 2:5] += 1
    exec(fixes[0].code, {"torch": torch, "part": part})
    assert torch.equal(weight, expected)
    assert stands_on_the_page(str(weight))

    # Training goes on with the new values.
    (weight * weight).sum().backward()
    assert torch.equal(weight.grad, 2 * weight)


@pytest.mark.parametrize("number", [1, 2], ids=["out of place", "a copy"])
def test_the_other_fixes_leave_the_weight_alone_and_keep_the_gradient(weight, number):
    part = weight.narrow(1, 2, 3).transpose(0, 1)
    before = weight.detach().clone()
    fix = tensorplay.recommend_fix(part, write="part.add_(1)")[number]
    assert (fix.cost_nbytes, fix.safety) == (48, "copies")

    names = {"torch": torch, "part": part}
    exec(fix.code, names)

    assert torch.equal(weight, before)
    assert torch.equal(names["part"], before[:, 2:5].t() + 1)
    names["part"].sum().backward()
    assert weight.grad.sum() == 12


def test_a_graph_that_waits_for_its_backward(weight):
    part = weight.narrow(1, 2, 3).transpose(0, 1)
    loss = (weight * weight).sum()

    with torch.no_grad():
        verdict = tensorplay.is_safe_view(part)
        part.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()

    assert not verdict
    assert "saved for backward by MulBackward0 (other), MulBackward0 (self)" in verdict.reasons[0]
    del loss
    with torch.no_grad():
        assert tensorplay.is_safe_view(part)


def test_under_no_grad_the_view_of_a_weight_is_safe(weight):
    part = weight.narrow(1, 2, 3).transpose(0, 1)

    with torch.no_grad():
        verdict = tensorplay.is_safe_view(part)
        fixes = tensorplay.recommend_fix(part)
        part.add_(1)

    assert verdict
    assert verdict.reasons == ("grad mode is off, the gradient is not touched; no live node saved the tensor",)
    assert not fixes


def test_a_view_made_under_no_grad(weight, capsys):
    with torch.no_grad():
        unseen = weight.narrow(1, 2, 3).transpose(0, 1)

    # Autograd made no node: the chain is solved from the geometry.
    chain = tensorplay.show_view_chain(unseen).chain
    printed = capsys.readouterr().err
    assert [(step.op, step.source) for step in chain.steps] == [("narrow", "inferred"), ("t", "inferred")]
    assert chain.proven
    assert stands_on_the_page(printed)

    # With grad mode on it raises, for another reason than before.
    verdict = tensorplay.is_safe_view(unseen)
    assert verdict.reasons == ("view made under torch.no_grad(); raises while grad mode is on",)
    assert stands_on_the_page(str(verdict))
    with pytest.raises(RuntimeError, match="created in no_grad mode"):
        unseen.add_(1)

    # With grad mode off it does what it says.
    with torch.no_grad():
        verdict = tensorplay.is_safe_view(unseen)
        unseen.sub_(2)
    assert verdict
    assert stands_on_the_page(str(verdict))
    assert weight[0].tolist() == [0, 1, 0, 1, 2, 5]


@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_recorded_view_is_replayed(weight, capsys, grad_mode):
    with torch.set_grad_enabled(grad_mode), tensorplay.record_views():
        recorded = weight.narrow(1, 2, 3).transpose(0, 1)

    chain = tensorplay.show_view_chain(recorded).chain

    printed = capsys.readouterr().err
    assert chain.source == "replayed"
    assert [(step.op, step.args) for step in chain.steps] == [
        ("slice", {"dim": 1, "start": 2, "end": 5}),
        ("transpose", {"dim0": 0, "dim1": 1}),
    ]
    assert [(step.shape, step.stride, step.storage_offset) for step in chain.steps] == [
        ((4, 3), (6, 1), 2),
        ((3, 4), (1, 6), 2),
    ]
    assert grad_mode or stands_on_the_page(printed)
