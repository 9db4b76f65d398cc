"""What to write in place of an in-place write that is not safe, and of a view that keeps too much alive."""

from __future__ import annotations

import ast
import builtins
import linecache
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any, Literal, NamedTuple, TypeGuard

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import msgspec
import torch

from tensorplay.callers import Caller
from tensorplay.classes import class_name
from tensorplay.inspection import explained, outside_compiled_code, read_one
from tensorplay.layers import Finding, TensorRecord
from tensorplay.live import Live, caller_names
from tensorplay.reports import Answer, Report
from tensorplay.rules.sharing import PinnedStorage
from tensorplay.views import view_code
from tensorplay.words import bytes_text, describe
from tensorplay.writes import RULES, Surroundings, judge

__all__ = ["Fix", "Fixes", "recommend_fix"]

Safety = Literal["safe", "changes gradient", "copies"]


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """Something to write instead, and what it costs."""

    title: str
    """What it does."""
    code: str
    """Python that does it, with the names of the call and the write that was asked about."""
    cost_nbytes: int | None
    """Bytes it copies; None where that is not known, as where only the error is known, and not the tensor."""
    safety: Safety
    """safe: the write stays in place, copies nothing, and no gradient is lost: earlier graphs give what they would have
    given, later ones the gradient at the values written. Of a leaf written under no_grad that is the gradient of its
    new values, not one through the write. copies: a new tensor is written, and the old one keeps its values; with grad
    mode on the write is recorded, so that the gradient goes through it to the old values. changes gradient: a gradient
    that would have flowed is left out, or one flows that did not."""
    note: str = ""
    """What else to know."""


class Fixes(Answer):
    """What to do, best first, with the findings it rests on."""

    __slots__ = ("fixes", "subject")

    def __init__(self, subject: str, fixes: Iterable[Fix], report: Report) -> None:
        super().__init__(report)
        self.subject = subject
        self.fixes = tuple(fixes)

    def __bool__(self) -> bool:
        return bool(self.fixes)

    def __len__(self) -> int:
        return len(self.fixes)

    def __iter__(self) -> Iterator[Fix]:
        return iter(self.fixes)

    def __getitem__(self, index: int) -> Fix:
        return self.fixes[index]

    def facts(self) -> dict[str, Any]:
        """Answer the fixes as dicts and lists, without their report."""
        return {"subject": self.subject, "fixes": msgspec.to_builtins(self.fixes, str_keys=True)}

    def __str__(self) -> str:
        lines = [self.subject]
        if not self.fixes:
            lines.append("  nothing to do")
        for number, fix in enumerate(self.fixes, 1):
            copied = "the tensor" if fix.cost_nbytes is None else bytes_text(fix.cost_nbytes)
            words = f"copies {'nothing' if fix.cost_nbytes == 0 else copied}"
            if fix.safety != "copies" or fix.cost_nbytes == 0:
                words = f"{fix.safety}, {words}"
            lines.append(f"{number}. {fix.title}  ({words})")
            lines += [f"     {line}" for line in fix.code.splitlines()]
            if fix.note:
                lines.append(f"   {fix.note}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<tensorplay.Fixes: {self.subject}: {'; '.join(fix.title for fix in self.fixes) or 'nothing to do'}>"


@outside_compiled_code
def recommend_fix(
    x: torch.Tensor | BaseException, *, write: str | None = None, value_requires_grad: bool = False
) -> Fixes:
    """Tell what to write in place of an in-place write that is not safe, best first.

    A tensor that keeps a much larger storage alive, of which nobody sees the rest (TP301), gets the copy that frees it.

    Args:
        x: the tensor to be written, or the exception that the write raised.
        write: the statement that writes, as ``"x[0].mul_(2)"``; the one on the line that raised, or doubling the
            tensor, where it is not given.
        value_requires_grad: whether what is written requires grad, as for is_safe_view().

    Returns:
        The fixes: ``.code`` is Python to run in the grad mode of this moment, ``.cost_nbytes`` what it copies,
        ``.safety`` what becomes of the gradient, as Fix says. None where nothing is wrong.

    Raises:
        TypeError: x is neither a tensor nor an exception, or write is no str.
        ValueError: write is no Python, or writes nothing.

    Cost: as for is_safe_view().

    Source: as for is_safe_view().
    """
    frame = sys._getframe(1)
    caller, scope, code = Caller.at(frame), frame.f_globals, frame.f_code
    del frame
    variables = caller_names(scope)
    if issubclass(type(x), BaseException):  # isinstance() would run code of the tensor's class
        _check_write(write, {})  # what only reads raises as well, where a view is used after the write
        return _fixes_of_error(x, write, variables, code)
    _check_write(write, variables)
    read = read_one(x, "recommend_fix", calls=2)
    report, findings = explained([read], caller, (*RULES, _PINNED))
    record = report.records[0]
    around = Surroundings(x, record, value_requires_grad)
    verdict = judge(report, findings, around)
    through = (name for name in _all_written(write or "", variables) if _named_value(name, variables) is x)
    asked = caller.argument("x")
    target = _target_of(next(through, asked), variables, record)
    kinds = frozenset(hazard.kind for hazard in (*verdict.hazards, *verdict.later))
    in_place = _in_place(x, record, around, kinds, target, variables)
    extent = record.extent
    nbytes = None if extent is None else extent.nbytes
    unreadable = record.impl.grad_fn_stale and bool(kinds & _UNTRACKED)
    value_recorded = value_requires_grad and torch.is_grad_enabled()
    unseen: Safety = "safe"
    if around.recorded and (value_recorded or not _is_cut_off(record.impl)):
        unseen = "changes gradient"
    situation = _Situation(target, write, kinds, nbytes, in_place, unreadable, value_recorded, unseen, variables)
    fixes = [] if verdict.ok else list(_fixes(situation))
    subject = f"{describe(record)}: safe in place" if verdict.ok else "; ".join(h.reason for h in verdict.hazards)
    if fixes and write is None:
        subject += f"; {_pattern(target)} stands for the write"
    fixes += _to_free(record, _target_of(asked, variables, record), report.findings)
    return Fixes(subject, fixes, report)


def _check_write(write: object, variables: Mapping[str, Any]) -> None:
    if write is None:
        return
    if type(write) is not str:
        raise TypeError(f"recommend_fix(write=) takes a statement (str), got {class_name(type(write))}")
    try:
        tree = ast.parse(write)
    except (SyntaxError, ValueError):
        raise ValueError(f"recommend_fix(write=) takes a Python statement, got {write!r}") from None
    if not any(_may_write(node, variables) for node in ast.walk(tree)):
        raise ValueError(f"recommend_fix(write=) takes a statement that writes to a tensor, got {write!r}")


# Left out are those that run what they are handed.
_HARMLESS = frozenset(vars(builtins)) - {"eval", "exec", "filter", "list", "map", "next", "setattr", "tuple"}


# numpy() hands out what has methods of the same names that write, as sort().
_READING = frozenset(name for name in vars(torch._C.TensorBase) if not name.endswith("_")) - {"numpy"}
# By identity, as a metaclass may compare; subclasses may have methods of their own.
_TENSORS = frozenset(map(id, (torch.Tensor, torch.nn.Parameter)))


def _may_write(node: ast.AST, variables: Mapping[str, Any]) -> bool:
    """Tell whether a tensor may be written there: any call may do that but one of Python's own or one that reads."""
    if isinstance(node, ast.Call):
        is_harmless = isinstance(node.func, ast.Name) and node.func.id in _HARMLESS
        return not is_harmless and not _only_reads(node, variables)
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.AugAssign)


def _only_reads(expression: ast.expr, variables: Mapping[str, Any]) -> bool:
    """Tell whether a call is seen to be one of PyTorch's own operators on a tensor that makes a new one."""
    if not _is_method_call(expression) or expression.func.attr not in _READING:
        return False
    if any(keyword.arg in (None, "out") for keyword in expression.keywords):
        return False
    receiver = expression.func.value
    while isinstance(receiver, ast.Subscript) and not C.is_tensor(_value_of(receiver, variables)):
        receiver = receiver.value
    value = _value_of(receiver, variables)
    return value is torch or id(type(value)) in _TENSORS or _only_reads(receiver, variables)


_PINNED = PinnedStorage()


class _Target(NamedTuple):
    """What the code of a fix writes to."""

    name: str
    """The expression of the caller."""
    assigned: str
    """What a copy of it is bound to: the expression where it can be assigned to, else a new variable."""


def _target_of(name: str, variables: Mapping[str, Any], record: TensorRecord | None) -> _Target:
    is_parameter = record is not None and record.python is not None and record.python.type.endswith("Parameter")
    return _Target(name, name if _is_assignable(name, variables, is_parameter) else "copied")


_CONTAINERS = frozenset({dict, list})


def _is_assignable(name: str, variables: Mapping[str, Any], is_parameter: bool) -> bool:
    """Tell whether assigning to an expression rebinds it: ``x[0] = ...`` of a tensor would write to the tensor."""
    try:
        expression = ast.parse(name, mode="eval").body
    except SyntaxError:
        return False
    if isinstance(expression, ast.Name):
        return True
    if isinstance(expression, ast.Attribute):
        # A module refuses to have a parameter's name bound to another tensor.
        return not is_parameter and _is_path(expression) and not C.is_tensor(_value_of(expression.value, variables))
    if isinstance(expression, ast.Subscript) and _is_path(expression.value):
        owner = _value_of(expression.value, variables)
        if owner is not None:
            return type(owner) in _CONTAINERS
        return isinstance(expression.slice, ast.Constant) and isinstance(expression.slice.value, str)
    return False


def _is_path(expression: ast.expr) -> bool:
    while isinstance(expression, (ast.Attribute, ast.Subscript)):
        expression = expression.value
    return isinstance(expression, ast.Name)


def _value_of(expression: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Answer what an expression names, without running code of any class; None where that is not plain to see."""
    if isinstance(expression, ast.Name):
        return variables.get(expression.id)
    if isinstance(expression, ast.Attribute):
        fields = C.instance_dict(_value_of(expression.value, variables))
        return None if fields is None else fields.get(expression.attr)
    if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        owner = _value_of(expression.value, variables)
        try:
            return owner[expression.slice.value] if type(owner) in _CONTAINERS else None
        except (KeyError, IndexError, TypeError):
            return None
    return None


class _InPlace(NamedTuple):
    """What has to be around a write that stays in place."""

    before: str
    """Statements that make views again."""
    under_no_grad: bool
    connects: bool = False
    """Whether gradients flow to a base from then on that did not before."""


class _Situation(NamedTuple):
    target: _Target
    write: str | None
    kinds: frozenset[str]
    nbytes: int | None
    in_place: _InPlace | None
    unreadable: bool = False
    """Whether any operator with grad mode on raises: a view that autograd cannot follow, and its base was written."""
    value_recorded: bool = False
    """Whether a gradient is to flow to what is written."""
    unseen: Safety = "changes gradient"
    """What a write that autograd does not see is."""
    variables: Mapping[str, Any] = MappingProxyType({})
    """What the names in the write are."""


_LEAVES = frozenset({"leaf", "leaf_view"})
_REMADE = frozenset({"multi_output", "no_grad_view", "inference_view", "other_view"})
_UNTRACKED = frozenset({"multi_output", "no_grad_view", "inference_view", "custom_function"})
_REFRESHED = frozenset({"unrefreshed_view"})
_AUTOGRAD = _LEAVES | _REMADE | {"custom_function"}
_NOTHING_TO_READ = frozenset({"memory", "no_memory", "uninitialized"})
# They have no twin without the underscore, or one that does something else, or no bytes are written.
_ONLY_IN_PLACE = frozenset(
    ["bernoulli", "cauchy", "copy", "exponential", "fill", "fill_diagonal", "geometric", "log_normal", "normal",
     "random", "requires_grad", "resize", "resize_as", "set", "squeeze", "swapaxes", "swapdims", "t", "transpose",
     "uniform", "unsqueeze", "zero"]
)  # fmt: skip
_NO_GRADIENT = "no gradient flows to what is written"
_KEEPS = "what shares its memory keeps its values"


def _in_place(
    x: torch.Tensor, record: TensorRecord, around: Surroundings, kinds: frozenset[str], target: _Target,
    variables: Mapping[str, Any],
) -> _InPlace | None:  # fmt: skip
    """Answer how the write can stay in place; None where it cannot."""
    grad_mode, impl = torch.is_grad_enabled(), record.impl
    if kinds - _LEAVES - _REMADE - _REFRESHED - {"saved"} or (kinds & _REMADE and torch.is_inference_mode_enabled()):
        return None
    under_no_grad = bool(kinds & _LEAVES)
    lines = []
    names = {id(value): name for name, value in variables.items()}
    remade = [(entry.tensor, names.get(id(entry.tensor))) for entry in around.other_views]
    connects = _is_cut_off(impl) or any(_is_cut_off(entry.record.impl) for entry in around.other_views)
    if kinds & (_REMADE - {"other_view"}):
        remade.insert(0, (x, target.assigned if target.assigned == target.name else None))
        under_no_grad = grad_mode and bool(impl.base_is_leaf and impl.base_requires_grad)
    for view, name in remade:
        code = None if name is None else view_code(view, lambda base: names.get(id(base)))
        if code is None:
            return None
        lines.append(f"{name} = {code}")
    if kinds & _REFRESHED:
        lines.append(f"{target.name}.grad_fn")
    before = "\n".join(lines)
    if remade and not grad_mode:
        before = "with torch.enable_grad():\n" + _indented(before)
    return _InPlace(before, under_no_grad, connects)


def _pattern(target: _Target) -> str:
    """Answer what stands for a write that is not known."""
    return f"{target.name}.mul_(2)"


def _is_cut_off(impl: Any) -> bool:
    """Tell whether no gradient flows from a view to its base until it is made again, or the version moves."""
    return bool(impl.is_view and impl.requires_grad and impl.grad_fn is None and not impl.grad_fn_stale)


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" for line in code.splitlines())


def _fixes(situation: _Situation) -> Iterator[Fix]:
    """Answer the fixes that clear every hazard there is."""
    target, kinds, in_place = situation.target, situation.kinds, situation.in_place
    if kinds & _NOTHING_TO_READ:
        return
    write = situation.write or _pattern(target)
    if in_place is not None and not in_place.under_no_grad and _is_refused_out(write):
        in_place = None
    if in_place is not None and "saved" not in kinds:
        yield _stay(situation, in_place, write)
    if kinds == {"inference_tensor"}:
        yield Fix(
            title="write inside inference_mode",
            code=f"with torch.inference_mode():\n{_indented(write)}",
            cost_nbytes=0,
            safety="changes gradient" if situation.value_recorded else "safe",
            note=_NO_GRADIENT if situation.value_recorded else "",
        )
    if kinds == {"partial_overlap"}:
        yield from _copy_values(situation.write or "", situation.variables)
        return
    if kinds == {"stale_view"}:
        yield Fix(
            title="go on with its values alone",
            code=f"{target.assigned} = {target.name}.detach()",
            cost_nbytes=0,
            safety="changes gradient",
            note="no gradient flows back from it; to keep the gradient make the view again from its base, after the "
            "write",
        )
        return
    yield from _copies(situation, write)
    if in_place is not None and "saved" in kinds:
        yield _stay(situation, in_place, write, after_backward=True)
    call = _call_on(write, target.name, situation.variables)
    if call is not None and kinds & (_UNTRACKED | {"other_view"}) and kinds <= _AUTOGRAD and not situation.unreadable:
        yield Fix(
            title="write behind autograd's back",
            code=f"{target.name}.data.{call.op}_({call.arguments})",
            cost_nbytes=0,
            safety=situation.unseen,
            note="through .data no version moves and nothing is recorded: backward leaves the write out",
        )


def _stay(situation: _Situation, in_place: _InPlace, write: str, after_backward: bool = False) -> Fix:
    value_recorded = situation.value_recorded
    does_more = in_place.under_no_grad and _does_more(write, situation)
    steps, titles, notes = [], [], []
    if after_backward:
        steps.append("# after .backward():")
        titles.append("wait for backward")
        notes.append("a graph that ran gives its saved tensors back, unless retain_graph=True")
    if in_place.before.endswith(".grad_fn"):
        steps.append(in_place.before)
        titles.append("read its grad_fn")
        notes.append("PyTorch makes the grad_fn of a view whose base was written when it is read")
    elif in_place.before:
        steps.append(in_place.before)
        titles.append("make the view again")
        notes.append("autograd rewrites the history of a view that one operator made with grad mode on")
    if in_place.under_no_grad:
        titles.append("write under torch.no_grad()")
        notes.append("as an optimizer does: the write is not recorded, and backward sees the new values")
        notes += [_NO_GRADIENT] if value_recorded else []
        notes += ["nor is what else the statement computes"] if does_more else []
    elif in_place.before or after_backward:
        titles.append("write")
    steps.append(f"with torch.no_grad():\n{_indented(write)}" if in_place.under_no_grad else write)
    if in_place.connects:
        notes.append("the view was not connected with its base: from then on gradients flow back to it")
    changes = in_place.connects or does_more or (in_place.under_no_grad and value_recorded)
    return Fix(
        title=", then ".join(titles),
        code="\n".join(steps),
        cost_nbytes=0,
        safety="changes gradient" if changes else "safe",
        note="; ".join(notes),
    )


def _does_more(write: str, situation: _Situation) -> bool:
    """Tell whether a statement does more than to write, and to name what it wrote to."""
    name, variables, statement = situation.target.name, situation.variables, _parsed(write)
    value = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
    wrote = (_written(write, variables), value and _written(ast.unparse(value), variables))
    return name in _all_written(write, variables) and name not in wrote


def _copies(situation: _Situation, write: str) -> Iterator[Fix]:
    target, nbytes = situation.target, situation.nbytes
    written = _replaced(_into_place(write) if _is_refused_out(write) else write, target)
    if situation.unreadable:
        yield Fix(
            title="write to a copy of its values",
            code=f"{target.assigned} = {target.name}.detach().clone()\n{written}",
            cost_nbytes=nbytes,
            safety="changes gradient",
            note="its base was written since it was made: no gradient flows to what it was made from",
        )
        return
    # Of an inference tensor autograd saves nothing, of a zero tensor the product is one again.
    fresh = situation.kinds & {"zerotensor", "inference_tensor"}
    out_of_place = None if fresh else _out_of_place(write, target, situation.variables)
    if out_of_place is not None:
        yield Fix(title="write out of place", code=out_of_place, cost_nbytes=nbytes, safety="copies", note=_KEEPS)
        if _is_refused_out(write):
            return  # the copy would be all that it makes
    yield Fix(
        title="write to a copy",
        code=f"{target.assigned} = {target.name}.clone()\n{written}",
        cost_nbytes=nbytes,
        safety="copies",
        note=_KEEPS,
    )


def _copy_values(write: str, variables: Mapping[str, Any]) -> Iterator[Fix]:
    """Copy what is read where it overlaps what is written."""
    title, code = "copy the values before they are written over", ""
    statement = _parsed(write)
    if any(_has_out(node) for node in _calls(statement)):
        title, code = "compute it, then write", _into_place(write)
    elif statement is not None:
        for node in ast.walk(statement):
            if isinstance(node, ast.AugAssign):
                node.value = _cloned(node.value, variables)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_in_place(node.func.attr):
                node.args = [_cloned(argument, variables) for argument in node.args]
        code = ast.unparse(statement)
    note = "what is read and what is written share some bytes"
    if not any(copying in code for copying in (".clone()", ".copy_(")):
        code = "x[1:].mul_(x[:-1].clone())"
        note += "; x[1:].mul_(x[:-1]) stands for the write"
    yield Fix(
        title=title,
        code=code,
        cost_nbytes=None,
        safety="copies",
        note=note,
    )


def _cloned(argument: ast.expr, variables: Mapping[str, Any]) -> ast.expr:
    """Let a copy be read in place of what a path names, unless that is seen to be no tensor."""
    value = _value_of(argument, variables)
    if not _is_path(argument) or (value is not None and not C.is_tensor(value)):
        return argument
    return ast.parse(f"{ast.unparse(argument)}.clone()", mode="eval").body


def _taken_out(call: ast.Call) -> ast.expr | None:
    """Take the argument ``out=`` from a call, where it has one."""
    found = next((keyword for keyword in call.keywords if keyword.arg == "out"), None)
    if found is None:
        return None
    call.keywords.remove(found)
    return found.value


def _calls(statement: ast.AST | None) -> list[ast.Call]:
    return [] if statement is None else [node for node in ast.walk(statement) if isinstance(node, ast.Call)]


def _has_out(call: ast.Call) -> bool:
    return any(keyword.arg == "out" for keyword in call.keywords)


def _is_refused_out(write: str) -> bool:
    """Tell whether a write is one by ``out=``, which PyTorch refuses in grad mode where anything requires grad."""
    return torch.is_grad_enabled() and any(map(_has_out, _calls(_parsed(write))))


class _IntoPlace(ast.NodeTransformer):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Compute, then copy."""
        self.generic_visit(node)
        out = _taken_out(node)
        return node if out is None else ast.Call(ast.Attribute(out, "copy_", ast.Load()), [node], [])


def _into_place(write: str) -> str:
    """Answer a write by ``out=`` as one that autograd records."""
    statement = _parsed(write)
    return write if statement is None else ast.unparse(_IntoPlace().visit(statement))


def _to_free(record: TensorRecord, target: _Target, findings: Iterable[Finding]) -> Iterator[Fix]:
    """Copy what is used of a large storage that only this tensor keeps alive."""
    finding = next((finding for finding in findings if finding.code == "TP301"), None)
    nbytes = None if record.extent is None else record.extent.nbytes
    if finding is None or not isinstance(nbytes, int) or nbytes >= finding.evidence["pinned_nbytes"]:
        return
    impl, note = record.impl, "writes to it no longer reach the storage"
    safety: Safety = "copies"
    code = f"{target.assigned} = {target.name}.clone()"
    if _is_cut_off(impl):
        # Autograd takes it for a leaf: the copy's graph would keep it, and with it the storage.
        code = f"{target.assigned} = {target.name}.detach().clone()"
        safety, note = "changes gradient", "the copy does not require grad"
    elif impl.requires_grad and impl.is_leaf:
        code = f"{target.name}.data = {target.name}.data.clone()"
        note = "it stays the same parameter"
    elif target.assigned != target.name:
        note += f"; the storage is freed once {target.name} is gone, too"
    yield Fix(
        title=f"keep a copy of what is used: frees {bytes_text(finding.evidence['pinned_nbytes'])}",
        code=code,
        cost_nbytes=nbytes,
        safety=safety,
        note=note,
    )


# -- code -------------------------------------------------------------------------------------------------------------


def _parsed(code: str) -> ast.stmt | None:
    try:
        (statement,) = ast.parse(code.strip()).body
    except (SyntaxError, ValueError):
        return None
    return statement


def _parsed_call(code: str) -> ast.Call | None:
    statement = _parsed(code)
    return statement.value if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) else None


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


class _WriteCall(NamedTuple):
    op: str
    arguments: str


def _call_on(write: str, name: str, variables: Mapping[str, Any]) -> _WriteCall | None:
    """Read ``x.mul_(2)``, where x is the very expression that a fix is about, and no argument writes to it as well."""
    call = _parsed_call(write)
    if call is None or not isinstance(call.func, ast.Attribute) or not _is_in_place(call.func.attr):
        return None
    if not _is_same(call.func.value, name):
        return None
    arguments = [ast.unparse(argument) for argument in call.args]
    arguments += [ast.unparse(keyword) for keyword in call.keywords]
    if name in _all_written(f"f({', '.join(arguments)})", variables):
        return None
    return _WriteCall(call.func.attr[:-1], ", ".join(arguments))


def _is_same(expression: ast.expr, name: str) -> bool:
    # Unparsed, so that reading and writing the same expression compare equal.
    try:
        return ast.unparse(expression) == ast.unparse(ast.parse(name, mode="eval"))
    except SyntaxError:
        return False


def _out_of_place(write: str, target: _Target, variables: Mapping[str, Any]) -> str | None:
    """Answer a write as an operator that makes a new tensor, where it has one and that is all it writes to."""
    statement = _parsed(write)
    whole, call = _parsed_call(write), _call_on(write, target.name, variables)
    if isinstance(statement, ast.AugAssign) and _is_same(statement.target, target.name):
        made = ast.unparse(ast.BinOp(ast.parse(target.name, mode="eval").body, statement.op, statement.value))
    elif whole is not None and (out := _taken_out(whole)) is not None and _is_same(out, target.name):
        made = ast.unparse(whole)
    elif call is not None and call.op not in _ONLY_IN_PLACE:
        made = f"{target.name}.{call.op}({call.arguments})"
    else:
        return None
    return None if target.name in _all_written(made, variables) else f"{target.assigned} = {made}"


class _MethodCall(ast.Call):
    """A call of a method, for the type checker."""

    func: ast.Attribute


class _Rename(ast.NodeTransformer):
    def __init__(self, target: _Target) -> None:
        self._target = target

    def visit(self, node: ast.AST) -> Any:
        """Put the new variable in the place of the expression."""
        if isinstance(node, ast.expr) and _is_same(node, self._target.name):
            return ast.copy_location(ast.Name(self._target.assigned, getattr(node, "ctx", ast.Load())), node)
        return self.generic_visit(node)


def _replaced(write: str, target: _Target) -> str:
    """Let a write go to what the copy was bound to."""
    statement = _parsed(write)
    if target.assigned == target.name or statement is None:
        return write
    return ast.unparse(_Rename(target).visit(statement))


# -- from an exception ------------------------------------------------------------------------------------------------

# What PyTorch says (torch/csrc/autograd/VariableTypeUtils.h, variable.cpp, saved_variable.cpp; ATen/MemoryOverlap.cpp;
# c10/core/TensorImpl.h), and what is the matter then; the first that fits counts.
_MESSAGES: tuple[tuple[str, str], ...] = (
    ("and its base or another view of its base has been modified inplace", "stale_view"),
    ("a view of a leaf Variable that requires grad is being used in an in-place operation", "leaf_view"),
    ("a leaf Variable that requires grad is being used in an in-place operation", "leaf"),
    ("function that returns multiple views", "multi_output"),
    ("was created inside a custom Function", "custom_function"),
    ("was created in no_grad mode", "no_grad_view"),
    ("was created in inference mode", "inference_view"),
    ("Inplace update to inference tensor outside InferenceMode", "inference_tensor"),
    ("more than one element of the written-to tensor refers to a single memory location", "expanded"),
    (
        "some elements of the input tensor and the written-to tensor refer to a single memory location",
        "partial_overlap",
    ),
    ("ZeroTensors are immutable", "zerotensor"),
    ("has been modified by an inplace operation", "saved"),
)
_TORCH = f"{Path(torch.__file__).parent}/"
# What a saved tensor says that was written (torch/csrc/autograd/saved_variable.cpp, torch 2.13 and 2.14).
_SAVED = re.compile(
    r"\[[^\[\]]* \[(?P<shape>[\d, ]*)\]\].* is at version (?P<version>\d+); expected version (?P<expected>\d+)"
)


def _fixes_of_error(error: BaseException, write: str | None, variables: Mapping[str, Any], code: CodeType) -> Fixes:
    """Recognise what PyTorch raised for an in-place write, and find the statement that wrote."""
    message = BaseException.__str__(error)
    head = message.partition("\n")[0]
    kind = next((kind for text, kind in _MESSAGES if text in message), None)
    report = Report([], ())
    if kind is None:
        said = f"{class_name(type(error))}: {head}" if head else class_name(type(error))
        text = f"{said}: not an error of an in-place write that is known here"
        return Fixes(text, (), report)
    found, saver = None, None
    if kind == "saved":
        found, saver = _saved_and_written(error, variables, code)
    elif kind != "stale_view":
        found = _failing_write(error, variables)
    value = None if found is None else _named_value(found[0], variables)
    if value is not None and not C.is_tensor(value):  # a module, a number
        found = None
    name, statement = found or ("x", None)
    if write is not None:
        name = next(iter(_all_written(write, variables)), name)
    if saver is not None:
        head += f"; {saver}"
    if found is None and write is None:
        head += "; x stands for the tensor that was written"
    in_place = None
    if kind in _LEAVES or kind == "saved":
        in_place = _InPlace("", kind in _LEAVES)
    target = _target_of(name, variables, None)
    if _named_value(name, variables) is None:
        if kind == "leaf" and _is_item_of_unknown(name, variables):
            target = _Target(name, name)  # no item of a tensor is a leaf: a container holds it
        elif kind in _LEAVES and "." in name:
            target = _Target(name, "copied")  # perhaps a module's parameter, which cannot be rebound
    situation = _Situation(target, write or statement, frozenset({kind}), None, in_place, variables=variables)
    if situation.write is None and kind not in ("stale_view", "partial_overlap"):
        head += (
            f"{', and' if found is None else ';'} {_pattern(target)}{'' if found is None else ' stands'} for the write"
        )
    return Fixes(head, _fixes(situation), report)


def _saved_and_written(
    error: BaseException, variables: Mapping[str, Any], code: CodeType
) -> tuple[tuple[str, str | None] | None, str | None]:
    """Look for the tensor that a node saved and that was written: its name, the write, and what is known of them.

    The graph that raised is asked, while something holds it; else the caller's variables, by shape and version.
    """
    said = _SAVED.search(BaseException.__str__(error))
    if said is None:
        return None, None
    shape = tuple(int(size) for size in said["shape"].split(",") if size.strip())
    version, expected = int(said["version"]), int(said["expected"])
    slots = [
        (f"{node} ({argument if index is None else f'{argument}[{index}]'})", kept)
        for node, _, argument, index, state, saved, kept, _ in C.saved_tensors(Live().roots)[0]
        if state == "held" and kept is not None and saved == expected
        if (kept.impl.version, kept.impl.shape) == (version, shape)
    ]
    savers = {kept.impl.version_counter: (slot, kept) for slot, kept in reversed(slots)}
    impls = {name: C.read(value).impl for name, value in variables.items() if C.is_tensor(value)}
    if savers:
        named = {name: impl for name, impl in impls.items() if impl.version_counter in savers}
    else:
        named = {name: impl for name, impl in impls.items() if (impl.version, impl.shape) == (version, shape)}
    counters = {impl.version_counter for impl in named.values()} or set(savers)
    if len(counters) != 1:
        return None, None  # none, or it could be any of several tensors
    slot, kept = savers.get(counters.pop(), ("", None))
    known = f"saved by {slot}" if savers else "which has the shape and the version that the error names"
    if not named:
        return None, f"a {describe(kept)} tensor, {known}"
    # A view of it may have been saved, or written; the one of the same shape is what the error is about.
    writes = _writes_to(error, named, variables, code)
    found = writes[0] if len(writes) == 1 else (min(named, key=lambda name: named[name].shape != shape), None)
    return found, f"{found[0]}, {known}" + (f", written by {found[1]}" if found[1] else "")


def _writes_to(
    error: BaseException, names: Iterable[str], variables: Mapping[str, Any], code: CodeType
) -> list[tuple[str, str | None]]:
    """Answer the writes to some variables in the function that the caller runs, where the error went through it."""
    traceback = error.__traceback__
    tree = _tree(linecache.getlines(code.co_filename))
    if traceback is None or traceback.tb_frame.f_code is not code or tree is None:
        return []
    functions = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if node.lineno <= traceback.tb_lineno <= (node.end_lineno or node.lineno)
    ]
    written = _named_writes(_writes_in(functions[-1] if functions else tree), variables)
    return [(name, text) for name, text in written if name in names]


def _named_value(name: str, variables: Mapping[str, Any]) -> Any:
    """Answer what an expression names, or None."""
    try:
        return _value_of(ast.parse(name, mode="eval").body, variables)
    except SyntaxError:
        return None


def _is_item_of_unknown(name: str, variables: Mapping[str, Any]) -> bool:
    expression = ast.parse(name, mode="eval").body
    return isinstance(expression, ast.Subscript) and _value_of(expression.value, variables) is None


def _failing_write(error: BaseException, variables: Mapping[str, Any]) -> tuple[str, str] | None:
    """Answer target and text of the write that raised: of the innermost frame that stands at one.

    None as well where the line holds several, and the code does not know at which of them it was.
    """
    found: list[tuple[str, str]] = []
    traceback = error.__traceback__
    while traceback is not None:
        at = Caller(traceback.tb_frame.f_code, traceback.tb_lasti, traceback.tb_lineno)
        if not at.file.startswith(_TORCH):
            found = _writes_at(at, variables) or found
        traceback = traceback.tb_next
    return found[0] if len(found) == 1 else None


def _tree(lines: Sequence[str]) -> ast.Module | None:
    try:
        return ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _writes_at(at: Caller, variables: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Answer target and text of what was written where a frame stands; of its whole line where only that is known."""
    tree, position = _tree(linecache.getlines(at.file)), at.position()
    if tree is None:
        return []
    writes = _writes_in(tree)
    if position is not None and any(_is_at(node, position) for node in ast.walk(tree)):
        writes = [write for write in writes if any(_is_at(place, position) for place in write.places)]
    else:
        writes = [write for write in writes if _is_on(write.places[0], at.line)]
    return _named_writes(writes, variables)


_Code = ast.expr | ast.stmt


class _Write(NamedTuple):
    node: _Code
    """What writes."""
    places: Sequence[_Code]
    """The nodes that code stands at when it does."""
    statement: _Code
    """The whole statement, so that nothing else that it does gets lost; what writes, where no other is run once."""


_SIMPLE = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Expressions in which names are others than beside them."""


def _writes_in(tree: ast.AST) -> list[_Write]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.expr, ast.stmt))]
    statements = {id(part): node for node in nodes if isinstance(node, _SIMPLE) for part in _in_one_scope(node)}
    return [
        _Write(node, places, statements.get(id(places[0]), node))
        for found in nodes
        for node, *places in _writes_of(found)
    ]


def _in_one_scope(statement: ast.AST) -> list[ast.AST]:
    found = [statement]
    for node in found:
        found += [child for child in ast.iter_child_nodes(node) if not isinstance(child, _SCOPES)]
    return found


def _named_writes(writes: Iterable[_Write], variables: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Answer target and statement of those writes whose target has a name, each once."""
    written = ((_written(ast.unparse(write.node), variables), ast.unparse(write.statement)) for write in writes)
    return list(dict.fromkeys((name, text) for name, text in written if name is not None))


def _all_written(code: str, variables: Mapping[str, Any]) -> list[str]:
    """Answer the tensors that a statement, or what is part of it, writes to."""
    return [name for name, _ in _named_writes(_writes_in(ast.parse(code)), variables)]


def _writes_of(node: _Code) -> Iterator[tuple[_Code, ...]]:
    """Answer what may write, and the nodes that code stands at when it does."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield ast.Assign([target], node.value, lineno=node.lineno), target
    elif isinstance(node, ast.AugAssign):
        yield node, node, node.target
    elif isinstance(node, ast.Call):
        yield node, node


def _is_on(node: _Code, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _is_at(node: ast.AST, position: tuple[int, int, int | None, int | None]) -> bool:
    """Tell whether code is at a node: at all of it, or at the method's name where a call takes several lines."""
    first, last, start, end = position
    if not isinstance(node, (ast.expr, ast.stmt)):
        return False
    if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == (first, last, start, end):
        return True
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.end_col_offset is None:
        return False
    return (node.func.end_lineno, node.func.end_col_offset - len(node.func.attr.encode())) == (first, start)


def _written(write: str, variables: Mapping[str, Any]) -> str | None:
    """Answer the tensor that a statement writes to: x of ``x[0].mul_(2)``, ``x += 1``, ``x[0] = 1``."""
    statement = _parsed(write)
    target: ast.expr
    if isinstance(statement, ast.AugAssign):
        target = statement.target
    elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
        target = statement.targets[0].value
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        wrote = _written_by(statement.value)
        if wrote is None:
            return None
        target = wrote
    else:
        return None
    while True:
        if isinstance(target, ast.Call) and (wrote := _written_by(target)) is not None:
            target = wrote  # which is what it returns
        elif _is_view_call(target, variables):
            target = target.func.value  # x.view(2).mul_(3)
        elif _is_view_index(target, variables):
            target = target.value
        else:
            break
    expression = target.func.value if _is_method_call(target) else target
    return ast.unparse(target) if _is_path(expression) else None


def _written_by(call: ast.Call) -> ast.expr | None:
    """Answer what a call writes to: x of ``x.mul_(2)``, ``torch.relu_(x)`` and ``torch.mul(a, 2, out=x)``."""
    out = next((keyword.value for keyword in call.keywords if keyword.arg == "out"), None)
    if out is not None or not _is_method_call(call) or not _is_in_place(call.func.attr):
        return out
    is_function = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch" and bool(call.args)
    return call.args[0] if is_function else call.func.value


# Several indices of what they make reach one element: a copy of the tensor would not help.
_OVERLAPPING = frozenset({"as_strided", "broadcast_to", "expand", "expand_as", "unfold"})


def _is_method_call(expression: ast.expr) -> TypeGuard[_MethodCall]:
    return isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute)


def _is_view_call(expression: ast.expr, variables: Mapping[str, Any]) -> TypeGuard[_MethodCall]:
    if not _is_method_call(expression) or expression.func.attr in _OVERLAPPING:
        return False
    return _is_tensor(expression.func.value, variables)


def _is_view_index(expression: ast.expr, variables: Mapping[str, Any]) -> TypeGuard[ast.Subscript]:
    """Tell whether a subscript is one of a tensor: what it is of is known for one, or is asked for a slice."""
    if not isinstance(expression, ast.Subscript):
        return False
    if _is_tensor(expression.value, variables):
        return True
    slices = expression.slice.elts if isinstance(expression.slice, ast.Tuple) else [expression.slice]
    is_slice = any(isinstance(part, ast.Slice) for part in slices)  # no tensor where it is one of a list
    return is_slice and _value_of(expression.value, variables) is None


def _is_tensor(expression: ast.expr, variables: Mapping[str, Any]) -> bool:
    """Tell whether an expression is known to be a tensor, or made of one."""
    if C.is_tensor(_value_of(expression, variables)):
        return True
    if _is_method_call(expression):
        return _is_tensor(expression.func.value, variables)
    return _is_view_index(expression, variables)
