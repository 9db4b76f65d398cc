"""TP201-TP204: each fires, its healthy twin and near misses stay silent, random ones agree with what PyTorch does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorplay as tp
from tests import helpers
from tests.helpers import Same, raises


def found(objs, code: str) -> list[tp.Finding]:
    return [finding for finding in tp.check(objs).findings if finding.code == code]


def the_finding(objs, code: str) -> tp.Finding:
    (finding,) = found(objs, code)
    return finding


def leaf(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, requires_grad=True)


def node(*shape: int) -> torch.Tensor:
    return leaf(*shape) * 1


# -- TP201 view of a leaf


def test_tp201_column_of_a_weight_fires():
    weight = torch.nn.Parameter(torch.ones(3, 4))
    column = weight[:, 1]

    finding = the_finding({"column": column}, "TP201")

    assert (finding.severity, finding.where.name) == ("info", "column")
    evidence = finding.evidence
    assert (evidence["base_is_leaf"], evidence["base_requires_grad"]) == (True, True)
    assert (evidence["storage_nbytes"], evidence["view_nbytes"], evidence["creation_meta"]) == (48, 12, "DEFAULT")
    assert raises(lambda: column.mul_(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: leaf(3, 4).detach()[:, 1],
        lambda: leaf(3, 4).data[:, 1],
        lambda: torch.ones(3, 4)[:, 1],
        lambda: node(3, 4)[:, 1],
        lambda: leaf(3, 4),
        lambda: leaf(3, 4)[:, 1].clone(),
    ],
)
def test_tp201_is_silent_where_the_base_is_no_leaf_that_requires_grad(make):
    assert found({"x": make()}, "TP201") == []


def test_tp201_is_one_finding_a_leaf_whatever_operators_made_the_views():
    weight = leaf(4, 4)

    finding = the_finding({"row": weight[0], "flat": weight.view(-1), "t": weight.t(), "rows": weight[:2]}, "TP201")

    assert finding.evidence["tensors"] == ["row", "flat", "t", "rows"]
    assert "and 3 more views of that base" in finding.subject


def test_tp201_is_one_finding_for_what_one_line_made_of_many_leaves():
    layers = [torch.nn.Linear(2, 2) for _ in range(30)]

    finding = the_finding({"rows": [layer.weight[0] for layer in layers]}, "TP201")

    assert len(finding.evidence["tensors"]) == 30
    assert "and 29 more views of 30 bases" in finding.subject


def test_tp201_two_places_are_two_findings():
    assert len(found({"a": leaf(2)[:1], "b": leaf(2)[:1]}, "TP201")) == 2


# -- TP202 one of several views


@pytest.mark.parametrize(
    ("operator", "made"),
    [
        (lambda x: x.chunk(2), "SplitBackward0"),
        (lambda x: x.split([1, 3]), "SplitWithSizesBackward0"),
        (lambda x: x.unbind(), "UnbindBackward0"),
        (lambda x: x.tensor_split(2), None),
        (lambda x: list(x), "UnbindBackward0"),
    ],
)
def test_tp202_one_of_several_views_fires(operator, made):
    parts = operator(node(4, 4))
    several = parts[0].grad_fn is not None and torch._C._autograd._get_creation_meta(parts[0]).name != "DEFAULT"

    findings = found({"part": parts[0]}, "TP202")

    assert len(findings) == several
    assert raises(lambda: parts[0].mul_(2)) == several
    if findings:
        assert findings[0].evidence["creation_meta"] == "MULTI_OUTPUT_NODE"
        assert findings[0].evidence["grad_fn"] == made
        assert findings[0].severity == "info"


@pytest.mark.parametrize(
    "make",
    [
        lambda: node(4, 4)[:2],
        lambda: torch.ones(4, 4).chunk(2)[0],
        lambda: node(4, 4).detach().chunk(2)[0],
        lambda: node(4, 4).chunk(2)[0].clone(),
    ],
)
def test_tp202_is_silent_for_slices_and_without_grad(make):
    x = make()

    assert found({"x": x}, "TP202") == []
    assert not raises(lambda: x.mul_(2))


def test_tp202_parts_of_one_operator_are_one_finding_and_so_are_those_of_all_layers():
    q, k, v = node(2, 6).chunk(3, dim=1)
    layers = [node(2, 4).chunk(2) for _ in range(12)]

    one, many = found({"q": q, "k": k, "v": v, "layers": layers}, "TP202")

    assert one.evidence["tensors"] == ["q", "k", "v"]
    assert len(many.evidence["tensors"]) == 24


# -- TP203 views that autograd did not see being made


def of_no_grad() -> torch.Tensor:
    x = node(3)
    with torch.no_grad():
        return x.view(-1)


def of_inference() -> torch.Tensor:
    x = node(3)
    with torch.inference_mode():
        return x.view(-1)


def of_function() -> torch.Tensor:
    return Same.apply(node(3))


def of_module_hook() -> torch.Tensor:
    seen = []
    module = torch.nn.Identity()
    module.register_full_backward_hook(lambda *_: None)
    module.register_forward_hook(lambda _, arguments, __: seen.append(arguments[0]))
    module(node(3))
    return seen[0]


@pytest.mark.parametrize(
    ("make", "creation_meta", "said"),
    [
        (of_no_grad, "NO_GRAD_MODE", "torch.no_grad()"),
        (of_inference, "INFERENCE_MODE", "torch.inference_mode()"),
        (of_function, "IN_CUSTOM_FUNCTION", "custom autograd.Function"),
        (of_module_hook, "IN_CUSTOM_FUNCTION", "a full backward hook on the module"),
    ],
)
def test_tp203_view_that_autograd_did_not_see_fires(make, creation_meta, said):
    x = make()

    finding = the_finding({"x": x}, "TP203")

    assert (finding.severity, finding.evidence["creation_meta"]) == ("info", creation_meta)
    assert said in finding.why
    assert raises(lambda: x.mul_(2))


@pytest.mark.parametrize(
    "make", [lambda: node(3).view(-1), lambda: of_no_grad().clone(), lambda: of_no_grad().detach()]
)
def test_tp203_is_silent_for_ordinary_views_and_copies(make):
    x = make()

    assert found({"x": x}, "TP203") == []
    assert not raises(lambda: x.mul_(2))


def test_tp203_is_silent_for_a_view_of_what_requires_no_grad():
    with torch.no_grad():
        x = torch.ones(3).view(-1)

    assert found({"x": x}, "TP203") == []


def test_tp203_is_one_finding_a_base_and_way():
    x = node(4)
    with torch.no_grad():
        views = [x[:2], x[2:]]

    finding = the_finding({"views": views}, "TP203")

    assert finding.evidence["tensors"] == ["views[0]", "views[1]"]


@given(
    requires=st.booleans(),
    product=st.booleans(),
    mode=st.sampled_from([torch.enable_grad, torch.no_grad]),
    operator=st.sampled_from(["slice", "view", "transpose", "chunk", "unbind", "copy"]),
    at=st.integers(0, 1),
)
@settings(deadline=None)
def test_one_of_the_rules_speaks_exactly_where_a_write_would_raise(requires, product, mode, operator, at):
    x = torch.ones(2, 4, requires_grad=requires)
    x = x * 1 if product else x
    with mode():
        views = {
            "slice": lambda: (x[:1], x[1:]),
            "view": lambda: (x.view(8), x.view(4, 2)),
            "transpose": lambda: (x.t(), x.transpose(0, 1)),
            "chunk": lambda: x.chunk(2),
            "unbind": lambda: x.unbind(),
            "copy": lambda: (x.clone(), x.mul(2)),
        }
        view = views[operator]()[at]

    codes = {finding.code for finding in tp.check({"view": view}).findings} & {"TP201", "TP202", "TP203"}

    assert bool(codes) == raises(lambda: view.mul_(2))
    assert len(codes) <= 1


# -- TP204 several indices reach one element


def test_tp204_overlapping_windows_fire_and_say_that_pytorch_is_silent():
    windows = torch.arange(6.0).unfold(0, 3, 1)

    finding = the_finding({"windows": windows}, "TP204")

    assert finding.severity == "info"
    evidence = finding.evidence
    assert (evidence["elements"], evidence["distinct_cells"], evidence["aliased_elements"]) == (12, 6, 6)
    assert (evidence["stride"], evidence["expanded"]) == ([1, 1], False)
    assert not raises(lambda: windows.mul_(2))


def test_tp204_expanded_buffer_fires_and_says_that_pytorch_refuses():
    buffer = torch.eye(3).expand(2, 3, 3)

    finding = the_finding({"buffer": buffer}, "TP204")

    evidence = finding.evidence
    assert (evidence["logical_bytes"], evidence["visible_nbytes"], evidence["overlapping"]) == (72, 36, 9)
    assert evidence["expanded"]
    assert raises(lambda: buffer.mul_(2))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).unfold(0, 3, 3),
        lambda: torch.eye(3).expand(1, 3, 3),
        lambda: torch.eye(3).expand(2, 3, 3).clone(),
        lambda: torch.ones(1).expand(1),
        lambda: torch.empty(0).expand(3, 0),
        lambda: torch.empty(3, device="meta").expand(4, 3),
        lambda: torch.ones(6).as_strided((2, 2), (1, 3)),
        lambda: torch.ones(2, 3).t(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    ],
)
def test_tp204_is_silent_where_each_index_has_a_cell(make):
    assert found({"x": make()}, "TP204") == []


def test_tp204_is_one_finding_for_the_masks_of_all_layers():
    masks = [torch.ones(1).expand(3) for _ in range(20)]

    finding = the_finding({"masks": masks, "also": masks[0].view(3)}, "TP204")

    assert len(finding.evidence["tensors"]) == 21


def test_tp204_another_geometry_is_another_finding():
    x = torch.ones(6)

    assert len(found({"a": x.unfold(0, 3, 1), "b": x.unfold(0, 2, 1)}, "TP204")) == 2


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    stride=st.lists(st.integers(0, 6), min_size=4, max_size=4),
)
@settings(deadline=None)
def test_tp204_on_random_geometries(shape, stride):
    stride = stride[: len(shape)]
    x = torch.zeros(200).as_strided(shape, stride)

    findings = found({"x": x}, "TP204")

    reached = len(helpers.cells(shape, stride))
    assert len(findings) == (reached < x.numel())
    if findings:
        assert findings[0].evidence["distinct_cells"] == reached
        assert findings[0].evidence["aliased_elements"] == x.numel() - reached
