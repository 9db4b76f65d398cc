"""TP206 against PyTorch: every saved tensor of every operator's samples is written, and backward really runs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import tensorplay as tp
from tensorplay._native import C
from tests.conftest import need

pytestmark = [pytest.mark.filterwarnings("ignore")]  # the samples themselves warn, in many ways

PARTS = 4
RAISES = "has been modified by an inplace operation"


def leaves_of(sample: Any) -> list[torch.Tensor]:
    """The sample's tensors."""
    found = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    return [x for x in found if x.layout == torch.strided]


def run(op: Any, sample: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Answer results with a graph, and the tensors that were handed in: one of them may be written."""
    inputs = leaves_of(sample)
    result = op(sample.input, *sample.args, **sample.kwargs)
    results = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    return results, inputs


def backward(results: list[torch.Tensor]) -> str | None:
    """Run it; answer what it raises."""
    try:
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    except RuntimeError as error:
        return str(error)
    return None


def written(x: torch.Tensor) -> bool:
    """Write to a tensor in place; False where PyTorch does not let one."""
    try:
        with torch.no_grad():
            x.mul_(1)
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize("part", range(PARTS))
def test_every_saved_tensor_that_is_written_is_predicted(part, show):
    need("expecttest", find_spec("expecttest") is not None, "op_db imports it")
    from torch.testing._internal.common_methods_invocations import op_db

    tried = raised = silent = slots = word_for_word = 0
    operators = set()
    for op in op_db[part::PARTS]:
        if torch.float32 not in op.supported_dtypes("cpu") or not op.supports_autograd:
            continue
        try:
            samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=True))[:2]
        except Exception:  # a sample that needs what this build lacks
            continue
        for sample in samples:
            for number in range(len(leaves_of(sample)) + 1):
                results, inputs = run_or_nothing(op, sample)
                if not results:
                    break
                targets = [*inputs, results[0]]
                if number >= len(targets) or not written(targets[number]):
                    continue
                report = tp.check_graph(results)
                found = [finding for finding in report.findings if finding.code == "TP206"]
                error = backward(results)
                if error is not None and RAISES not in error:
                    continue  # a second derivative that is not implemented, and the like
                tried += 1
                slots += sum(len(finding.evidence["saved_by"]) for finding in found)
                assert bool(found) == (error is not None), (op.name, number, error, report)
                if error is None:
                    silent += 1
                    continue
                raised += 1
                operators.add(op.name)
                versions = {
                    (saver["saved_version"], finding.evidence["version_now"])
                    for finding in found
                    for saver in finding.evidence["saved_by"]
                }
                assert any(f"is at version {now}; expected version {then} instead" in error for then, now in versions)
                said = [saver["message"] for finding in found for saver in finding.evidence["saved_by"]]
                word_for_word += any(error.startswith(f"{message}.") for message in said)
                named = {saver["node"] for finding in found for saver in finding.evidence["saved_by"]}
                assert named <= {kind.name for kind in report.graph.by_kind}
    show(
        f"{tried} writes with backward run: {raised} raised and were predicted, of {len(operators)} operators and "
        f"{slots} saved arguments; {silent} went through and were not predicted; {word_for_word} messages word for word"
    )
    assert raised > 50
    assert word_for_word > 0.95 * raised  # the others are raised for another of several that were written


def run_or_nothing(op: Any, sample: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    try:
        return run(op, sample)
    except Exception:  # a sample that this build cannot run
        return [], []


def test_the_hooks_of_packed_tensors_do_not_run():
    calls: list[Any] = []
    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: calls.append(t) or t):
        y = x.exp().sin()
    report = tp.check_graph(y)
    tp.saved_for_backward(y)
    assert calls == []
    assert report.graph.packed == 2
    assert "2 saved tensors packed by a hook: n bytes unknown" in str(report)
    assert C.check_graph([y])[0][4] == 2
