"""is_safe_view() and recommend_fix(): words, data, and that asking changes nothing."""

from __future__ import annotations

import gc
import json
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tensorplay as tp
from tensorplay._native import C
from tensorplay.callers import Caller
from tests import helpers
from tests.helpers import Same
from tests.unit.test_kinds import KINDS, NESTED
from tests.unit.test_observer import native_facts

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of"),
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
]


def leaf() -> torch.Tensor:
    return torch.ones(4, 4, requires_grad=True)


def inner() -> torch.Tensor:
    return leaf() * 1


def under(mode, make):
    with mode():
        return make()


# -- every error that PyTorch raises for an in-place write, raised for real


def saved_and_written() -> None:
    x = inner()
    y = x * x
    x.mul_(2)
    y.sum().backward()


def shift(x: torch.Tensor) -> None:
    x[1:].add_(x[:-1])


def sibling_written() -> None:
    x = inner()
    half, other = x.chunk(2)
    x.mul_(2)
    half.sum()
    other.sum()


ERRORS = {
    "leaf": (lambda: leaf().mul_(2), ["write under torch.no_grad()", "write out of place", "write to a copy"]),
    "view of a leaf": (lambda: leaf()[0].mul_(2), ["write under torch.no_grad()", "write to a copy"]),
    "multi output": (lambda: inner().chunk(2)[0].mul_(2), ["write out of place", "write to a copy"]),
    "custom": (lambda: Same.apply(inner()).mul_(2), ["write to a copy"]),
    "no_grad view": (lambda: under(torch.no_grad, lambda: inner_kept()[0]).mul_(2), ["write to a copy"]),
    "inference view": (lambda: under(torch.inference_mode, lambda: inner_kept()[0]).mul_(2), ["write to a copy"]),
    "inference": (lambda: helpers.inference().mul_(2), ["write inside inference_mode", "write to a copy"]),
    "expanded": (lambda: torch.ones(1).expand(3).mul_(2), ["write to a copy"]),
    "overlap": (
        lambda: shift(torch.ones(4)),
        ["copy the values before they are written over"],
    ),
    "zero tensor": (lambda: torch._efficientzerotensor(3).mul_(2), ["write to a copy"]),
    "saved": (saved_and_written, ["write out of place", "write to a copy", "wait for backward, then write"]),
    "stale": (sibling_written, ["go on with its values alone"]),
}
KEPT = inner()


def inner_kept() -> torch.Tensor:
    return KEPT


def error_of(action) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        action()
    return caught.value


@pytest.mark.parametrize("name", ERRORS)
def test_every_in_place_error_of_pytorch_is_recognised(name):
    action, titles = ERRORS[name]
    error = error_of(action)

    fixes = tp.recommend_fix(error)

    assert fixes.subject.startswith(str(error).partition("\n")[0])
    found = [fix.title for fix in fixes]
    assert [title for title in found if title in titles] == titles
    assert all(fix.code and fix.safety in ("safe", "copies", "changes gradient") for fix in fixes)
    assert str(fixes).startswith(fixes.subject)


def test_the_failing_statement_gives_the_names():
    weight = leaf()
    try:
        weight.mul_(
            2,
        )
    except RuntimeError as error:
        fixes = tp.recommend_fix(error)

    assert fixes[0].code == "with torch.no_grad():\n    weight.mul_(2)"
    assert fixes[1].code == "weight = weight.mul(2)"
    assert fixes[1].cost_nbytes is None


def test_a_write_inside_torch_is_told_by_the_call_of_the_user():
    weight = leaf()
    error = error_of(lambda: torch.nn.functional.relu(weight, inplace=True))

    assert "input" not in "".join(fix.code for fix in tp.recommend_fix(error))


AT_THE_WRITE = {
    "a.mul_(2); x.mul_(3)": "x.mul_(3)",
    "(a.zero_(), x.zero_())": "(a.zero_(), x.zero_())",
    "'é', a.zero_(), x.zero_()": "('é', a.zero_(), x.zero_())",
    "a.add_(1).add_(x.mul_(3))": "a.add_(1).add_(x.mul_(3))",
    "x.mul_(3).add_(a.mul_(2))": "x.mul_(3).add_(a.mul_(2))",
    "a += x.mul_(3)": "a += x.mul_(3)",
    "a[0] = x[0] = 1": "a[0] = x[0] = 1",
    "(a\n .add_(1))\n(x\n .mul_(\n  3))": "x.mul_(3)",
    "(a\n .add_(1)\n .add_(x\n  .mul_(3)))": "a.add_(1).add_(x.mul_(3))",
    "y = x.mul_(3)": "y = x.mul_(3)",
    "y = torch.relu_(x) * 3": "y = torch.relu_(x) * 3",
    "x.mul_(2).add_(1, alpha=.5)": "x.mul_(2).add_(1, alpha=0.5)",
    "if x.mul_(3).sum() > 0: a.mul_(2)": "x.mul_(3)",
    "[x.mul_(i) for i in (2, 3)]": "x.mul_(i)",
}


def error_of_source(source: str, path, names: dict) -> BaseException:
    path.write_text(f"{source}\n")
    return error_of(lambda: exec(compile(source, path, "exec"), names))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code knows no columns before Python 3.11")
@pytest.mark.parametrize("line", AT_THE_WRITE)
def test_of_several_writes_on_a_line_the_one_that_raised_is_told_with_its_statement(line, tmp_path):
    names = {"torch": torch, "a": torch.ones(4, 4), "x": leaf()}
    error = error_of_source(line, tmp_path / "program.py", names)

    fixes = tp.recommend_fix(error)

    assert fixes[0].code == f"with torch.no_grad():\n    {AT_THE_WRITE[line]}"
    assert fixes[-1].code == f"x = x.clone()\n{AT_THE_WRITE[line]}"
    assert "stands for" not in fixes.subject


def test_a_statement_that_goes_on_with_what_it_wrote_loses_its_gradient_under_no_grad(tmp_path):
    safety = {}
    for line in ("x.mul_(2).add_(1)", "y = x.mul_(2)", "y = torch.relu_(x) * 3"):
        error = error_of_source(line, tmp_path / f"{len(safety)}.py", {"torch": torch, "x": leaf()})
        safety[line] = tp.recommend_fix(error)[0].safety

    assert list(safety.values()) == ["safe", "safe", "changes gradient"]


@pytest.mark.parametrize("line", ["a.mul_(2); x.mul_(3)", "a[0] = x[0] = 1", "x.mul_(3).add_(a.mul_(2))"])
def test_of_several_writes_on_a_line_none_is_claimed_where_columns_are_not_known(line, tmp_path, monkeypatch):
    error = error_of_source(line, tmp_path / "program.py", {"a": torch.ones(4, 4), "x": leaf()})
    monkeypatch.setattr(Caller, "position", lambda self: None)

    fixes = tp.recommend_fix(error)

    assert fixes.subject.endswith("; x stands for the tensor that was written, and x.mul_(2) for the write")
    assert fixes[0].code == "with torch.no_grad():\n    x.mul_(2)"


def test_the_one_write_of_a_line_is_told_where_columns_are_not_known(tmp_path, monkeypatch):
    error = error_of_source("a.sum(); w.mul_(3)", tmp_path / "program.py", {"a": torch.ones(2), "w": leaf()})
    monkeypatch.setattr(Caller, "position", lambda self: None)

    assert tp.recommend_fix(error)[0].code == "with torch.no_grad():\n    w.mul_(3)"


def test_a_copy_of_what_was_expanded_is_written_where_the_expansion_is_part_of_the_write(tmp_path):
    x, line = torch.ones(3), "x.expand(4, 3).zero_(); x.expand(4, 3).mul_(2)"
    error = error_of_source(line, tmp_path / "program.py", {"x": x})

    codes = [fix.code for fix in tp.recommend_fix(error, write="x.expand(4, 3).mul_(2)")]

    assert codes == ["copied = x.expand(4, 3).mul(2)", "copied = x.expand(4, 3).clone()\ncopied.mul_(2)"]
    for code in codes:
        exec(code, {"x": x})


# What the function that raised could name, what it wrote, and the copies: nobody can see the names any more.
GONE = {
    "list": (lambda: {"it": [leaf()]}, "it[0] -= 0.1", "it[0] = it[0].clone()\nit[0] -= 0.1"),
    "dict": (lambda: {"it": {"w": leaf()}}, "it['w'].mul_(2)", "it['w'] = it['w'].clone()\nit['w'].mul_(2)"),
    "key": (lambda: {"it": {1: leaf()}, "k": 1}, "it[k].mul_(2)", "it[k] = it[k].clone()\nit[k].mul_(2)"),
    "attribute": (
        lambda: {"it": torch.nn.Linear(2, 2)},
        "it.weight.mul_(2)",
        "copied = it.weight.clone()\ncopied.mul_(2)",
    ),
    "method": (
        lambda: {"it": {"w": leaf()}},
        "it.get('w').mul_(2)",
        "copied = it.get('w').clone()\ncopied.mul_(2)",
    ),
    "views": (lambda: {"it": inner().chunk(2)}, "it[0].mul_(2)", "copied = it[0].clone()\ncopied.mul_(2)"),
    "row": (lambda: {"it": leaf()}, "it[0].mul_(2)", "copied = it[0].clone()\ncopied.mul_(2)"),
    "rows": (lambda: {"it": leaf()}, "it[1:, 0].mul_(2)", "it = it.clone()\nit[1:, 0].mul_(2)"),
    "item": (lambda: {"it": leaf()}, "it[0] = 2", "it = it.clone()\nit[0] = 2"),
}


@pytest.mark.parametrize("name", GONE)
def test_a_container_is_not_cloned_for_what_it_holds(name, tmp_path):
    make, write, code = GONE[name]
    error = error_of_source(write, tmp_path / "program.py", make())

    fixes = tp.recommend_fix(error)

    assert fixes[-1].code == code or fixes[-2].code == code
    for fix in fixes:
        if ".data" not in fix.code:
            exec(fix.code, {"torch": torch, **make()})


def test_a_tuple_that_is_known_is_not_cloned():
    it = (leaf(),)
    error = error_of(lambda: it[0].mul_(2))

    assert tp.recommend_fix(error)[-1].code == "copied = it[0].clone()\ncopied.mul_(2)"
    assert tp.recommend_fix(error, write="it[0].mul_(2)")[-1].code == "copied = it[0].clone()\ncopied.mul_(2)"


OVERLAPPING = {
    "x[1:].add_(x[:-1])": "x[1:].add_(x[:-1].clone())",
    "x[1:].add_(x[:-1], alpha=number)": "x[1:].add_(x[:-1].clone(), alpha=number)",
    "x[1:].lerp_(x[:-1], number)": "x[1:].lerp_(x[:-1].clone(), number)",
    "x[1:] += x[:-1]": "x[1:] += x[:-1].clone()",
    "torch.add(x[:-1], number, out=x[1:])": "x[1:].copy_(torch.add(x[:-1], number))",
    "torch.mul(x[1:], x[:-1] * 2, out=x[:-1])": "x[:-1].copy_(torch.mul(x[1:], x[:-1] * 2))",
    "torch.add(x, number, out=wide)": "wide = torch.add(x, number)",
    "wide += x": "wide = wide + x",
    "wide[:] = number": "wide = wide.clone()\nwide[:] = number",
    "wide[1:].add_(x[1:])": "wide = wide.clone()\nwide[1:].add_(x[1:])",
    "y = 1 * x[1:].add_(x[:-1])": "y = 1 * x[1:].add_(x[:-1].clone())",
    "x[1:].add_(x[:-1]).mul_(number)": "x[1:].add_(x[:-1].clone()).mul_(number)",
    "y = torch.add(x[:-1], number, out=x[1:]) * 2": "y = x[1:].copy_(torch.add(x[:-1], number)) * 2",
}


@pytest.mark.parametrize("write", OVERLAPPING)
def test_overlap_has_a_fix_that_runs(write, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"{write}\n")
    x, wide, number = torch.arange(4.0), torch.ones(1).expand(4), 2
    names = {"torch": torch, "x": x, "wide": wide, "number": number}
    error = error_of(lambda: exec(compile(program.read_text(), program, "exec"), names))

    fix = tp.recommend_fix(error)[0]

    assert (fix.code, fix.safety) == (OVERLAPPING[write], "copies")
    names = {"torch": torch, "x": x.clone(), "wide": wide.clone(), "number": number}
    expected = {"torch": torch, "x": x.clone(), "wide": wide.clone(), "number": number}
    exec(fix.code, names)
    for name in ("x[1:]", "x[:-1]"):
        expected["read"] = eval(name, expected).clone()
        written = write.replace(f"({name}", "(read").replace(f"= {name}", "= read")
        if written != write:
            break
    exec(written.replace("out=read", f"out={name}"), expected)
    assert torch.equal(names["x"], expected["x"])
    assert torch.equal(names["wide"], expected["wide"])


def test_a_backward_s_error_leads_to_the_tensor_and_its_write():
    hidden = inner()
    y = (hidden * 3).relu()
    loss = (y * hidden).sum()
    y.mul_(2)
    try:
        loss.backward()
    except RuntimeError as error:
        fixes = tp.recommend_fix(error)

    assert fixes.subject.endswith("; y, saved by ReluBackward0 (result), written by y.mul_(2)")
    assert [fix.code for fix in fixes] == [
        "y = y.mul(2)",
        "y = y.clone()\ny.mul_(2)",
        "# after .backward():\ny.mul_(2)",
    ]


def test_of_several_writes_that_may_be_the_cause_none_is_claimed():
    hidden = inner()
    loss = (hidden * hidden).sum()
    hidden[0] = 1
    hidden[1] = 1
    try:
        loss.backward()
    except RuntimeError as error:
        fixes, given = tp.recommend_fix(error), tp.recommend_fix(error, write="hidden[0] = 1")

    assert fixes.subject.endswith("; hidden, saved by MulBackward0 (other); hidden.mul_(2) stands for the write")
    assert fixes[0].code == "hidden = hidden.mul(2)"
    assert "stands for" not in given.subject


def test_a_write_that_was_not_given_is_said_to_be_a_pattern():
    x = leaf()

    assert tp.recommend_fix(x).subject.endswith("; x.mul_(2) stands for the write")
    assert "stands for" not in tp.recommend_fix(x, write="x.mul_(2)").subject
    assert "stands for" not in tp.recommend_fix(x.detach()).subject


def test_a_backward_s_error_about_a_view_leads_to_the_write_of_its_base():
    base = inner()
    row = base[1]
    y = row.sin()
    base[0] = 1
    try:
        y.sum().backward()
    except RuntimeError as error:
        fixes = tp.recommend_fix(error)

    assert fixes.subject.endswith("; base, saved by SinBackward0 (self), written by base[0] = 1")


def test_a_backward_s_error_of_a_graph_that_is_gone_leads_to_what_looks_like_it():
    y = inner()
    other = inner()
    error = RuntimeError(str(error_of(lambda: [y.sin().sum(), y.mul_(2)][0].backward())))
    gc.collect()  # what raised in tests keeps graphs alive

    fixes = tp.recommend_fix(error)

    named = "; y, which has the shape and the version that the error names"
    assert fixes.subject.endswith(f"{named}; y.mul_(2) stands for the write")
    assert fixes[0].code == "y = y.mul(2)"
    assert other._version == 0


def test_a_backward_s_error_that_two_tensors_fit_names_none():
    a, b = inner(), inner()
    losses = [(x * x).sum() for x in (a, b)]
    for x in (a, b):
        x.mul_(2)
    error = error_of(losses[0].backward)

    fixes = tp.recommend_fix(error)

    assert fixes.subject.endswith("; x stands for the tensor that was written, and x.mul_(2) for the write")


def test_a_backward_s_error_without_a_name_tells_the_saver():
    gc.collect()  # what raised in other tests keeps graphs alive
    kept = [inner()]
    loss = (kept[0] * kept[0]).sum()
    kept[0].mul_(2)
    error = error_of(loss.backward)

    fixes = tp.recommend_fix(error)

    assert "; a float32[4, 4] tensor, saved by MulBackward0 (other); x stands for" in fixes.subject


def test_a_write_of_another_variable_is_not_taken_for_the_cause():
    x, other = inner(), inner()
    y = x * x
    other.mul_(3)
    with torch.no_grad():
        x[0].mul_(2)
    try:
        y.sum().backward()
    except RuntimeError as error:
        fixes = tp.recommend_fix(error)

    assert fixes.subject.endswith("; x, saved by MulBackward0 (other), written by x[0].mul_(2)")


@pytest.mark.parametrize(
    "error", [ValueError("no"), RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError()]
)
def test_another_error_is_not_explained(error):
    fixes = tp.recommend_fix(error)

    assert not fixes
    assert len(fixes) == 0
    assert "not an error of an in-place write that is known here" in fixes.subject


def test_an_error_without_a_message_is_told_with_one_colon():
    assert tp.recommend_fix(RuntimeError()).subject.startswith("RuntimeError: not an error of an in-place write")


@pytest.mark.parametrize("write", ["import os", "print(1)", "", "x", "y = x", "for i in range(3): pass"])
def test_a_statement_that_writes_nothing_is_refused_in_one_line(write):
    x = leaf()

    with pytest.raises(ValueError, match=r"recommend_fix\(write=\) takes a statement that writes") as caught:
        tp.recommend_fix(x, write=write)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "write", ["x += 1", "x[0] = 1", "x.data = 1", "step(x)", "torch._foreach_mul_([x], 2)", "print(x.mul_(2))"]
)
def test_a_statement_that_may_write_is_taken(write):
    x = leaf()

    assert write in tp.recommend_fix(x, write=write)[0].code


@pytest.mark.parametrize(
    "write",
    ["x.mul(2)", "torch.mul(x, 2)", "x[0].mul(2)", "y = x.mul(2).add(1)", "held['x'].mul(2)", "sum(x.abs())"],
)
def test_a_statement_that_makes_new_tensors_alone_is_refused(write):
    x = leaf()
    held = {"x": x}

    with pytest.raises(ValueError, match="takes a statement that writes"):
        tp.recommend_fix(x, write=write)
    assert held


@pytest.mark.parametrize(
    "write",
    ["x.my_method()", "x.mul(2).add_(1)", "x.numpy().sort()", "torch.mul(x, 2, out=x)", "x.mul(step(x))", "it.add(x)"],
)
def test_a_method_that_may_write_is_taken(write):
    x = leaf()

    assert len(tp.recommend_fix(x, write=write)) > 0


# What is asked about has other names: the one that the write goes through is what has to be bound anew.
ALIASES = {
    "y.mul_(2)": ["y = h[:2]\ny.mul_(2)", "y = y.mul(2)", "y = y.clone()\ny.mul_(2)"],
    "d['k'].mul_(2)": ["d['k'] = h[:2]\nd['k'].mul_(2)", "d['k'] = d['k'].mul(2)"],
    "z = y.mul_(2)": ["y = h[:2]\nz = y.mul_(2)", "y = y.clone()\nz = y.mul_(2)"],
    "q.mul_(2)": ["q = h[:2]\nq.mul_(2)", "q = q.mul(2)", "q = q.clone()\nq.mul_(2)"],
}


@pytest.mark.parametrize("write", ALIASES)
def test_a_write_through_another_name_is_mended_under_this_name(write):
    h = inner()
    q = h.chunk(2)[0]
    y, d = q, {"k": q}

    codes = [fix.code for fix in tp.recommend_fix(q, write=write)]

    assert y is d["k"]
    assert codes[: len(ALIASES[write])] == ALIASES[write]
    for code in codes:
        again = inner()
        part = again.chunk(2)[0]
        exec(code, {"h": again, "q": part, "y": part, "d": {"k": part}})


def test_a_write_in_the_arguments_is_not_left_in_an_operator_out_of_place():
    x, other = leaf(), torch.ones(4, 4)

    codes = [fix.code for fix in tp.recommend_fix(x, write="x.mul_(x.add_(1))")]

    assert codes == [
        "with torch.no_grad():\n    x.mul_(x.add_(1))",
        "x = x.clone()\nx.mul_(x.add_(1))",
    ]
    for code in codes:
        exec(code, {"torch": torch, "x": leaf()})
    assert "x = x.mul(other.add_(1))" in [fix.code for fix in tp.recommend_fix(x, write="x.mul_(other.add_(1))")]
    assert other._version == 0


def test_a_write_by_out_that_grad_mode_refuses_is_not_recommended():
    x = inner()
    y = x * x
    found = tp.recommend_fix(x, write="torch.mul(x, 2, out=x)")

    assert [fix.code for fix in found] == ["x = torch.mul(x, 2)"]
    with torch.no_grad():
        off = tp.recommend_fix(x, write="torch.mul(x, 2, out=x)")
    assert "# after .backward():\ntorch.mul(x, 2, out=x)" in [fix.code for fix in off]
    del y


@pytest.mark.parametrize(
    ("write", "codes"),
    [
        ("torch.mul(x, 2, out=x)", ["x = torch.mul(x, 2)"]),
        ("torch.mul(x[1:], 2, out=x[1:])", ["x = x.clone()\nx[1:].copy_(torch.mul(x[1:], 2))"]),
    ],
)
def test_a_write_by_out_to_a_leaf_runs_under_no_grad_or_as_a_new_tensor(write, codes):
    x = leaf()
    fixes = tp.recommend_fix(x, write=write)

    assert [fix.code for fix in fixes] == [f"with torch.no_grad():\n    {write}", *codes]
    for fix in fixes:
        names = {"torch": torch, "x": leaf()}
        exec(fix.code, names)
        assert names["x"][1:].eq(2).all()
        assert names["x"].requires_grad


def test_a_copy_as_large_as_what_it_frees_is_not_offered():
    small, large = (torch.zeros(100_000)[:1].expand(n) for n in (50_000, 100_000))

    titles = [[fix.title for fix in tp.recommend_fix(x)] for x in (small, large)]

    assert [any(title.startswith("keep a copy") for title in found) for found in titles] == [True, False]
    assert tp.recommend_fix(small)[-1].cost_nbytes == small.clone().untyped_storage().nbytes()


@pytest.mark.parametrize("wrong", [{"select": 3}, {"ignore": 3}, {"grads": 3}, {"grads": None}])
def test_an_option_of_check_that_is_none_is_refused_by_its_name(wrong):
    (name,) = wrong

    with pytest.raises(TypeError, match=rf"^check\({name}=\) takes [^\n]*, got \w+$"):
        tp.check(leaf(), **wrong)


@pytest.mark.parametrize("right", [{"select": "TP102"}, {"ignore": ("TP1",)}, {"select": {"TP1"}}, {"grads": False}])
def test_an_option_of_check_that_is_one_is_taken(right):
    assert len(tp.check(leaf(), **right).records) == 1


@pytest.mark.parametrize("wrong", [None, 3, "x", [torch.ones(2)], torch.ones(2).untyped_storage()])
@pytest.mark.parametrize("ask", [tp.is_safe_view, tp.recommend_fix])
def test_what_is_no_tensor_is_refused_in_one_line(ask, wrong):
    with pytest.raises(TypeError, match=r"is_safe_view\(\)|recommend_fix\(\)") as caught:
        ask(wrong)

    assert "\n" not in str(caught.value)


# -- data


def test_verdict_and_fixes_are_json():
    qkv = inner()
    q, k = qkv.chunk(2)
    loss = (q * q).sum()

    verdict, fixes = tp.is_safe_view(q), tp.recommend_fix(q)

    data = json.loads(verdict.to_json())
    assert data == json.loads(json.dumps(verdict.to_dict()))
    assert set(data) == {"ok", "reasons", "report", "hazards", "later", "evidence"}
    assert data["ok"] is False
    assert [hazard["kind"] for hazard in data["hazards"]] == ["multi_output", "saved"]
    assert [hazard["kind"] for hazard in data["later"]] == ["other_view"]
    assert set(data["hazards"][0]) == {"kind", "raises", "reason"}
    assert data["evidence"]["creation_meta"] == "MULTI_OUTPUT_NODE"
    assert [entry["node"] for entry in data["evidence"]["saved_by"]] == ["MulBackward0", "MulBackward0"]
    assert data["evidence"]["version"] == 0
    data = json.loads(fixes.to_json())
    assert set(data) == {"subject", "fixes", "report"}
    assert set(data["fixes"][0]) == {"title", "code", "cost_nbytes", "safety", "note"}
    assert data["report"]["schema_version"] == fixes.report.document.schema_version
    del k, loss


@pytest.mark.parametrize("ask", [tp.is_safe_view, tp.recommend_fix, tp.verify_data_ptr_consistency])
def test_what_holds_a_report_is_not_taken_for_one(ask):
    answer = ask(inner())

    with pytest.raises(ValueError, match=r"^not a TensorPlay report: .* whose report is the value of 'report'$"):
        tp.Report.from_json(answer.to_json())
    again = tp.Report.from_json(json.dumps(answer.to_dict()["report"]))
    assert again.document == answer.report.document


def test_findings_of_the_hazards_are_warnings():
    x = leaf()[0]

    assert [(f.code, f.severity) for f in tp.is_safe_view(x).findings] == [("TP201", "warning")]
    with torch.no_grad():
        assert [(f.code, f.severity) for f in tp.is_safe_view(x).findings] == [("TP201", "info")]


def test_a_silenced_finding_is_a_hazard_all_the_same():
    x = torch.ones(1).expand(3)

    verdict = tp.is_safe_view(x)  # tensorplay: ignore[TP204] the verdict is what is asked

    assert not verdict
    assert verdict.findings == ()


def test_a_saver_is_named_once_it_is_alive_and_no_longer():
    x = inner()
    assert tp.is_safe_view(x)
    y = x.exp() * x

    assert [entry["node"] for entry in tp.is_safe_view(x).evidence["saved_by"]] == ["MulBackward0"]
    y.sum().backward()
    assert tp.is_safe_view(x)
    y = x * x
    del y
    assert tp.is_safe_view(x)


# -- memory of an object that may not be written


def not_writeable(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def in_lent(make, lend):
    """Answer a tensor over lent memory, and the bytes of that."""
    lender = make()
    return lend(lender), lambda: bytes(memoryview(lender))


def new_bytes() -> bytes:
    return bytes(bytearray(range(16)))


CONSTANT = {
    "bytes": (new_bytes, lambda b: torch.frombuffer(b, dtype=torch.uint8), "bytes"),
    "bytes, by NumPy": (new_bytes, lambda b: torch.from_numpy(np.frombuffer(b, "u1")), "bytes"),
    "memoryview of bytes": (new_bytes, lambda b: torch.frombuffer(memoryview(b), dtype=torch.uint8), "bytes"),
    "array": (lambda: not_writeable(np.arange(16.0)), torch.from_numpy, "ndarray"),
    "view of the tensor": (lambda: not_writeable(np.arange(16.0)), lambda a: torch.from_numpy(a)[1:], "ndarray"),
    "view of the array": (lambda: not_writeable(np.arange(16.0)), lambda a: torch.from_numpy(a[1:]), "ndarray"),
    "DLPack": (lambda: not_writeable(np.arange(16.0)), torch.from_dlpack, None),
}
LENT = {
    "bytearray": (lambda: bytearray(range(16)), lambda b: torch.frombuffer(b, dtype=torch.uint8)),
    "array": (lambda: np.arange(16.0), torch.from_numpy),
    "DLPack": (lambda: np.arange(16.0), torch.from_dlpack),
    # Nobody's constant: who has the array may write.
    "read-only view of an array": (lambda: np.arange(16.0), lambda a: torch.from_numpy(not_writeable(a[:]))),
    "tensor's own array": (lambda: torch.arange(16.0).numpy(), lambda a: torch.from_numpy(not_writeable(a[:]))),
    "nothing of bytes": (new_bytes, lambda b: torch.frombuffer(b, dtype=torch.uint8)[:0]),
}


@pytest.mark.filterwarnings("ignore:The given .* is not writable")
@pytest.mark.parametrize("name", CONSTANT)
def test_a_write_to_a_constant_is_unsafe(name):
    make, lend, producer = CONSTANT[name]
    x, memory = in_lent(make, lend)
    before = memory()

    verdict, fixes = tp.is_safe_view(x), tp.recommend_fix(x, write="x.add_(1)")

    assert [(hazard.kind, hazard.raises) for hazard in verdict.hazards] == [("read_only", False)]
    assert verdict.evidence["producer_type"] == producer
    assert {fix.safety for fix in fixes} == {"copies"}
    for fix in fixes:
        exec(fix.code, {"x": x})
    assert memory() == before
    x.add_(1)
    assert memory() != before


@pytest.mark.filterwarnings("ignore:The given .* is not writable")
@pytest.mark.parametrize("name", LENT)
def test_a_write_to_lent_memory_that_is_writeable_is_safe(name):
    x, _ = in_lent(*LENT[name])

    assert tp.is_safe_view(x)


def test_read_only_pages_are_one_hazard(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.from_numpy(np.load(tmp_path / "x.npy", mmap_mode="r"))

    (hazard,) = tp.is_safe_view(x).hazards

    assert (hazard.kind, hazard.reason[:5]) == ("read_only", "TP105")


# -- asking changes nothing


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        leaf,
        inner,
        lambda: leaf()[0],
        lambda: inner().chunk(2)[0],
        lambda: under(torch.no_grad, lambda: inner_kept()[0]),
        lambda: torch.ones(1).expand(3),
        lambda: torch.zeros(100_000)[:10],
        helpers.inference,
        lambda: torch._lazy_clone(torch.ones(3)),
    ],
)
def test_asking_leaves_counts_versions_and_memory_as_they_were(make):
    x = make()
    x.untyped_storage()  # once made, the wrapper stays: not the probe's doing
    before, grad_fn = native_facts(x), x.grad_fn

    for _ in range(2):
        str(tp.is_safe_view(x))
        tp.is_safe_view(x, value_requires_grad=True).to_json()
        tp.recommend_fix(x).to_json()

    assert native_facts(x) == before
    assert x.grad_fn is grad_fn


def test_a_stale_view_stays_stale():
    base = torch.ones(4, 4)
    view = base[0]
    base.mul_(leaf())
    assert C.read(view).impl.grad_fn_stale

    verdict = tp.is_safe_view(view)
    tp.recommend_fix(view)

    assert not verdict
    assert C.read(view).impl.grad_fn_stale
    assert error_of(lambda: view.mul_(2))
    (fix,) = [fix for fix in tp.recommend_fix(view) if fix.safety == "safe"]
    exec(fix.code)
    assert view[0] == 2


def test_stale_view_of_an_inner_tensor_is_written_by_its_real_history():
    base = inner()
    view = base[0]
    base.mul_(2)

    assert tp.is_safe_view(view)
    view.mul_(2)
    view.sum().backward()


def test_stale_chunk_raises_already_and_that_is_said():
    half = inner().chunk(2)[0]
    with torch.no_grad():
        half.mul_(2)
        verdict = tp.is_safe_view(half)

    assert verdict
    assert "raises already" in str(verdict)
    assert not tp.is_safe_view(half)


def test_no_operator_and_no_hook_runs():
    ran = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func)
            return func(*args, **(kwargs or {}))

    x = inner()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: ran.append("unpack") or t):
        y = x * x
    hostile = torch.ones(3).as_subclass(helpers.Hostile)
    with Count():
        for asked in (x, hostile, x[0], helpers.Wrapper(torch.ones(2))):
            del ran[:]
            tp.is_safe_view(asked)
            tp.recommend_fix(asked)
            assert ran == []
    del y


# -- wherever it is called


def test_verdict_is_that_of_the_grad_mode_of_the_moment():
    x = leaf()

    assert not tp.is_safe_view(x)
    with torch.no_grad():
        assert tp.is_safe_view(x)
    with torch.inference_mode():
        assert tp.is_safe_view(x)
        assert not tp.recommend_fix(x)


def test_inside_transforms():
    seen = []
    torch.func.vmap(lambda x: (seen.append((tp.is_safe_view(x), tp.recommend_fix(x))), x * 1)[1])(torch.ones(2, 3))
    torch.func.grad(lambda x: (seen.append((tp.is_safe_view(x), tp.recommend_fix(x))), x.sum())[1])(torch.ones(3))

    assert [(bool(verdict), bool(fixes)) for verdict, fixes in seen] == [(True, False), (False, True)]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler's own
def test_inside_compiled_code():
    seen = []

    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        seen.append(tp.is_safe_view(x))
        seen.append(tp.recommend_fix(x))
        return y

    function(leaf())

    verdict, fixes = seen
    assert [hazard.kind for hazard in verdict.hazards] == ["leaf"]
    assert fixes[0].safety == "safe"


def test_threads_ask_at_once_each_in_its_own_grad_mode():
    x = leaf()
    start = threading.Barrier(4)

    def ask(number: int) -> list[bool]:
        start.wait()
        with torch.set_grad_enabled(number % 2 == 0):
            return [bool(tp.is_safe_view(x)) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))

    assert answers == [[number % 2 == 1] * 5 for number in range(4)]


# -- every kind


@pytest.mark.parametrize("make", [kind[1] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_every_kind_is_answered(make):
    x = make()

    verdict, fixes = tp.is_safe_view(x), tp.recommend_fix(x)

    json.loads(verdict.to_json())
    json.loads(fixes.to_json())
    assert len(verdict.reasons) > 0
    assert bool(fixes) != bool(verdict) or verdict.hazards[0].kind == "uninitialized"


@pytest.mark.parametrize("layout", [kind[1] for kind in NESTED], ids=[kind[0] for kind in NESTED])
def test_nested_tensors_are_answered(layout):
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout, requires_grad=True)

    # PyTorch makes the jagged one as a view of itself under no_grad.
    assert [hazard.kind for hazard in tp.is_safe_view(x).hazards] == [
        "leaf" if layout is torch.strided else "no_grad_view"
    ]
    assert error_of(lambda: x.mul_(2))
    assert len(tp.recommend_fix(x)) > 0


def test_kinds_that_refuse_every_write_are_unsafe():
    zero = torch._efficientzerotensor(3)
    lazy = torch.nn.LazyLinear(3).weight

    with torch.no_grad():
        assert [hazard.kind for hazard in tp.is_safe_view(zero).hazards] == ["zerotensor"]
        assert [hazard.kind for hazard in tp.is_safe_view(lazy).hazards] == ["uninitialized"]
        assert error_of(lambda: zero.mul_(2))
        with pytest.raises(ValueError, match="uninitialized"):
            lazy.mul_(2)
    assert not tp.recommend_fix(lazy)


def test_a_module_s_full_backward_hook_is_named():
    linear = torch.nn.Linear(2, 2)
    linear.register_full_backward_hook(lambda *_: None)
    y = linear(torch.ones(1, 2))

    assert "a full backward hook on the module" in str(tp.is_safe_view(y))


# The same bytes under another version counter


def aliases_with_a_counter_of_their_own(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "data": x.data,
        "view of data": x.data[1:],
        "set_": torch.empty(0).set_(x.detach().untyped_storage(), 0, x.shape),
        "numpy": torch.from_numpy(x.detach().numpy()),
        "numpy of numpy": torch.from_numpy(x.detach().numpy()[1:][:1]),
    }


@pytest.mark.parametrize("name", aliases_with_a_counter_of_their_own(torch.ones(3)))
def test_what_is_saved_over_the_same_bytes_is_seen(name):
    x = torch.ones(3, requires_grad=True)
    h = x.exp()
    loss = h.sum()
    alias = aliases_with_a_counter_of_their_own(h)[name]

    verdict = tp.is_safe_view(alias)

    assert not verdict
    assert [hazard.kind for hazard in verdict.hazards] == ["saved_unseen"]
    assert verdict.hazards[0].raises is False
    alias.mul_(2)
    loss.backward()  # and nothing raises
    assert not torch.equal(x.grad, torch.ones(3).exp())
    assert tp.is_safe_view(alias), "the graph has given its tensors back"


def test_other_bytes_of_a_saved_storage_are_safe():
    x = torch.ones(6, requires_grad=True)
    base = torch.ones(6)
    loss = (x[:3] * base[:3]).sum()

    assert tp.is_safe_view(base.data[3:])
    assert not tp.is_safe_view(base.data[2:])
    loss.backward()


class Wrapper(torch.Tensor):
    """Computes with the tensor it holds, as DTensor does."""

    local: torch.Tensor

    @staticmethod
    def __new__(cls, local):
        return torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype)

    def __init__(self, local):
        self.local = local

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        made = function(*(arg.local if isinstance(arg, cls) else arg for arg in args), **(kwargs or {}))
        if function._schema.is_mutable:
            return args[0]
        return cls(made) if isinstance(made, torch.Tensor) else made


def wrapped_and_written() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Answer a tensor that wraps memory, and another tensor over this memory."""
    wrapper = Wrapper(torch.ones(3)).requires_grad_()
    again = Wrapper(torch.ones(3)).requires_grad_()
    jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged, requires_grad=True) * 1
    jagged.retain_grad()
    return {
        "attribute": (wrapper, wrapper.local),
        "view of it": (wrapper, wrapper.local[2:]),
        "wrapper of its own": (again, Wrapper(again.local)),
        "values of a jagged tensor": (jagged, jagged._values),
    }


@pytest.mark.parametrize("name", wrapped_and_written())
def test_what_a_saved_wrapper_consists_of_is_saved(name):
    wrapper, written = wrapped_and_written()[name]
    assert tp.is_safe_view(written), "no graph saved the wrapper"
    loss = (wrapper * wrapper).sum()

    verdict = tp.is_safe_view(written)

    assert [hazard.kind for hazard in verdict.hazards] == ["saved_unseen"]
    assert "MulBackward0 (self)" in str(verdict)
    assert tp.is_safe_view(written.clone())
    assert not tp.is_safe_view(wrapper)
    written.mul_(10)
    loss.backward()  # and nothing raises
    values = wrapper.grad.local if isinstance(wrapper.grad, Wrapper) else wrapper.grad.values()
    assert values[-1] == 20
    assert tp.is_safe_view(written), "the graph has given its tensors back"


def test_a_wrapper_that_shares_only_offsets_with_a_saved_one_is_safe():
    offsets = torch.tensor([0, 1, 3])
    saved = torch.nested.nested_tensor_from_jagged(torch.ones(3), offsets).requires_grad_()
    loss = (saved * saved).sum()

    assert tp.is_safe_view(torch.nested.nested_tensor_from_jagged(torch.ones(3), offsets))
    assert not tp.is_safe_view(offsets)
    loss.backward()


def test_a_saver_whose_backward_raises_already_is_not_endangered_again():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    y.add_(1)
    assert tp.is_safe_view(y), "nothing is left to endanger"
    later = y.sin()

    verdict = tp.is_safe_view(y)

    (hazard,) = verdict.hazards
    assert [entry["node"] for entry in hazard.evidence["saved_by"]] == ["SinBackward0"]
    assert "ExpBackward0 (result), and written since: that backward raises already" in str(verdict)
    assert later.grad_fn is not None


def test_a_saved_alias_whose_backward_raises_already_is_not_endangered_again():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    alias = y.data
    assert not tp.is_safe_view(alias)

    y.add_(1)

    assert tp.is_safe_view(alias)


def test_a_graph_behind_a_gradient_that_nobody_read_is_seen():
    x = torch.ones(3, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that create_graph keeps what it makes alive
        (x**3).sum().backward(create_graph=True)
    plain = torch.ones(3, requires_grad=True)
    (plain**3).sum().backward()

    with torch.no_grad():
        verdicts = [tp.is_safe_view(tensor) for tensor in (x, plain)]
        x.mul_(2)

    assert [hazard.kind for hazard in verdicts[0].hazards] == ["saved"]
    assert verdicts[1]
    error_of(lambda: x.grad.sum().backward())
    x.grad = None  # its graph holds x
