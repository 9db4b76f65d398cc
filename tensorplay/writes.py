"""In-place writes: what one would do now, and what to write instead."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import msgspec
import torch

from tensorplay.callers import Caller
from tensorplay.classes import class_name
from tensorplay.inspection import outside_compiled_code, read_one, report_of
from tensorplay.layers import WITH_MEMORY, Finding, TensorRecord
from tensorplay.live import live_roots
from tensorplay.reports import Report, Verdict
from tensorplay.rules.foreign import MappedReadOnly, NotMapped
from tensorplay.words import bytes_text, describe, plural

__all__ = ["Fix", "Fixes", "SafeView", "is_safe_view", "recommend_fix"]

_MOST_SAVERS = 5
"""So many nodes are named that saved a tensor; the rest is counted."""

_RULES = (MappedReadOnly(), NotMapped())
# Findings that say what an in-place write does; others that a report has do not make it unsafe.
_UNSAFE = frozenset({"TP102", "TP103", "TP105", "TP107"})
# What is a hazard as long as nobody writes will bite the write that is asked about.
_CODES = {
    "leaf_view": "TP201",
    "multi_output": "TP202",
    "custom_function": "TP203",
    "no_grad_view": "TP203",
    "inference_view": "TP203",
    "expanded": "TP204",
    "self_overlapping": "TP204",
}


class Hazard(NamedTuple):
    """One thing that an in-place write would run into."""

    kind: Literal[
        "leaf", "leaf_view", "multi_output", "custom_function", "no_grad_view", "inference_view", "inference_tensor",
        "expanded", "self_overlapping", "saved", "read_only", "memory", "no_memory",
    ]  # fmt: skip
    reason: str
    evidence: dict[str, Any]
    raises: bool | None
    """Whether the write itself raises; None where nobody can promise what happens."""


class SafeView(Verdict):
    """Whether an in-place write now would do what it says; true when it would."""

    __slots__ = ("evidence", "hazards")

    def __init__(self, hazards: Iterable[Hazard], notes: Iterable[str], report: Report) -> None:
        self.hazards = tuple(hazards)
        reasons = [hazard.reason for hazard in self.hazards] + list(notes)
        super().__init__(not self.hazards, reasons, report)
        self.evidence: dict[str, Any] = {}
        for hazard in self.hazards:
            self.evidence |= hazard.evidence

    def to_dict(self) -> dict[str, Any]:
        """Answer the verdict, its evidence and its report as dicts and lists."""
        hazards = [{"kind": h.kind, "raises": h.raises, "reason": h.reason} for h in self.hazards]
        return {**super().to_dict(), "hazards": hazards, "evidence": msgspec.to_builtins(self.evidence)}

    def __str__(self) -> str:
        return "\n".join([f"{'safe' if self.ok else 'unsafe'} in place", *(f"  {reason}" for reason in self.reasons)])

    def __repr__(self) -> str:
        return f"<tensorplay.SafeView: {self.ok}, {'; '.join(self.reasons)}>"


@outside_compiled_code
def is_safe_view(x: torch.Tensor, *, value_requires_grad: bool = False) -> SafeView:
    """Tell what an in-place write on a tensor would do now, in the grad mode of this moment.

    Unsafe is a write that raises, that makes a backward raise which would have run, that gives wrong numbers, or that
    ends the process: on a leaf that requires grad or a view of one; on a view that autograd did not see being made, or
    that is one of several; on an inference tensor outside inference mode; where several indices reach one element;
    where a live node saved the tensor for backward; in memory that is mapped read-only or gone.

    Args:
        x: a tensor of any kind; that it is a view is not needed.
        value_requires_grad: whether what is written requires grad, as ``weight`` in ``x.mul_(weight)`` does.

    Returns:
        A verdict, true when the write is safe, with ``.reasons``, ``.hazards``, ``.evidence``, ``.findings``.

    Raises:
        TypeError: x is no tensor.

    Cost: half a millisecond for the memory map, and a walk of the graphs behind all live tensors: about a microsecond a
        node. Runs no operator, no hook, and unpacks nothing.

    Source: torch/csrc/autograd/VariableTypeUtils.h ``check_inplace``; torch/csrc/autograd/variable.cpp
        ``handle_view_on_rebase``; torch/csrc/autograd/saved_variable.h; ATen/MemoryOverlap.h, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    read = read_one(x, "is_safe_view", calls=2)
    report = report_of([read], caller, report_unused=False, rules=_RULES)
    return _judge(x, report, value_requires_grad)


def _judge(x: torch.Tensor, report: Report, value_requires_grad: bool) -> SafeView:
    record = report.records[0]
    hazards = [*_of_autograd(record, value_requires_grad), *_of_memory(record, report.findings)]
    savers, notes = _savers(x, record)
    report.raise_severity((_CODES[hazard.kind] for hazard in hazards if hazard.kind in _CODES), "warning")
    return SafeView([*hazards, *savers], notes or ([] if hazards or savers else [_why_safe(record)]), report)


def _why_safe(record: TensorRecord) -> str:
    impl = record.impl
    if impl.requires_grad:
        mode = "autograd records it" if torch.is_grad_enabled() else "grad mode is off, the gradient is not touched"
        return f"{mode}; no live node saved the tensor"
    return "nothing that autograd or memory would object to; no live node saved the tensor"


def _visible(record: TensorRecord) -> str:
    extent = record.extent
    if extent is None or extent.visible_nbytes is None or extent.storage_nbytes is None:
        return ""
    return f", {extent.visible_nbytes} of {bytes_text(extent.storage_nbytes)}"


def _of_autograd(record: TensorRecord, value_requires_grad: bool) -> Iterator[Hazard]:
    """Repeat the checks that PyTorch makes before an in-place operator, in its order."""
    impl = record.impl
    if impl.is_inference and not torch.is_inference_mode_enabled():
        yield Hazard(
            "inference_tensor",
            "inference tensor: it has no version counter, in-place only inside inference_mode",
            {"is_inference": True},
            True,
        )
        return
    if not torch.is_grad_enabled() or not (impl.requires_grad or value_requires_grad):
        return
    evidence: dict[str, Any] = {"grad_mode": True, "creation_meta": impl.creation_meta, "grad_fn": impl.grad_fn}
    if impl.is_view:
        evidence |= {"base_is_leaf": impl.base_is_leaf, "base_requires_grad": impl.base_requires_grad}
        if record.extent is not None:
            evidence |= {
                "storage_nbytes": record.extent.storage_nbytes,
                "view_nbytes": record.extent.visible_nbytes,
            }
        made = f" ({impl.grad_fn})" if impl.grad_fn else ""
        known: dict[str, tuple[Any, str]] = {
            "MULTI_OUTPUT_NODE": (
                "multi_output",
                f"one of several views that one operator returned{made}: autograd cannot rewrite the history of one; "
                "not because of overlap",
            ),
            "IN_CUSTOM_FUNCTION": (
                "custom_function",
                f"view made inside a custom autograd.Function{made}"
                + (": a full backward hook on the module" if made.startswith(" (BackwardHookFunction") else ""),
            ),
            "NO_GRAD_MODE": (
                "no_grad_view",
                "view made under torch.no_grad(), written with grad mode on, and the base requires grad",
            ),
            "INFERENCE_MODE": ("inference_view", "view made in inference mode, written outside it with grad mode on"),
        }
        if impl.creation_meta in known:
            kind, reason = known[impl.creation_meta]
            yield Hazard(kind, reason, evidence, True)
            return
        if impl.requires_grad and impl.base_is_leaf:
            reason = (
                f"view of a leaf that requires grad{_visible(record)}: raises while grad mode is on, safe under no_grad"
            )
            yield Hazard("leaf_view", reason, evidence, True)
            return
    if impl.requires_grad and impl.is_leaf:
        reason = "leaf that requires grad: raises while grad mode is on, safe under no_grad"
        yield Hazard("leaf", reason, evidence | {"is_leaf": True}, True)


def _of_memory(record: TensorRecord, findings: Iterable[Finding]) -> Iterator[Hazard]:
    for finding in findings:
        if finding.code == "TP204":
            evidence = finding.evidence
            reason = (
                f"{evidence['elements']} elements on {evidence['distinct_cells']} cells (stride {evidence['stride']}): "
            )
            if evidence["expanded"]:
                yield Hazard("expanded", reason + "expanded, most in-place operators raise", evidence, True)
            else:
                reason += "self-overlapping, PyTorch raises nothing and writes wrong numbers"
                yield Hazard("self_overlapping", reason, evidence, False)
        elif finding.code in _UNSAFE:
            kind: Any = "read_only" if finding.code == "TP105" else "memory"
            yield Hazard(kind, f"{finding.code} {finding.headline}: {finding.why}", finding.evidence, None)
    storage = record.storage
    if storage is not None and storage.throws_on_write and record.kind in WITH_MEMORY:
        yield Hazard("no_memory", "its storage refuses to be written", {"throws_on_write": True}, True)


def _savers(x: torch.Tensor, record: TensorRecord) -> tuple[list[Hazard], list[str]]:
    """Find the live nodes that saved the tensor, or one that shares its version counter."""
    if record.impl.version_counter is None:
        return [], []
    saved, _, busy = C.saved_tensors(live_roots(), x)
    held = [
        {
            "node": node,
            "argument": argument if index is None else f"{argument}[{index}]",
            "expected_version": expected,
            "shape": None if kept is None else kept.impl.shape,
        }
        for node, _, argument, index, _, expected, kept, _ in saved
    ]
    notes = [] if not busy else [f"{plural(busy, 'node')} of the graph is held by another thread: not known"]
    if not held:
        return [], notes
    named = ", ".join(f"{entry['node']} ({entry['argument']})" for entry in held[:_MOST_SAVERS])
    more = f" and {len(held) - _MOST_SAVERS} more" if len(held) > _MOST_SAVERS else ""
    version = record.impl.version
    evidence = {"saved_by": held, "version": version}
    if all(entry["expected_version"] != version for entry in held):
        return [], [*notes, f"saved for backward by {named}{more}, and written since: that backward raises already"]
    reason = (
        f"saved for backward by {named}{more}: the write moves its version past {version}, and that backward will raise"
    )
    return [Hazard("saved", reason, evidence, False)], notes


# -- what to do instead -----------------------------------------------------------------------------------------------

Safety = Literal["safe", "changes gradient", "copies"]


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """Something to write instead, and what it costs."""

    title: str
    """What it does."""
    code: str
    """Python that does it, with the names of the call and the write that was asked about."""
    cost_nbytes: int | None
    """Bytes it copies; None where only the error is known, and not the tensor."""
    safety: Safety
    """safe: same values, same gradient, nothing copied; copies: the same, at the cost; changes gradient: what is
    written is not recorded, or backward sees other values."""
    note: str = ""
    """What else to know."""


class Fixes:
    """What to do, best first, with the findings it rests on."""

    __slots__ = ("fixes", "report", "subject")

    def __init__(self, subject: str, fixes: Iterable[Fix], report: Report) -> None:
        self.subject = subject
        self.fixes = tuple(fixes)
        self.report = report

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The report's findings."""
        return self.report.findings

    def __bool__(self) -> bool:
        return bool(self.fixes)

    def __len__(self) -> int:
        return len(self.fixes)

    def __iter__(self) -> Iterator[Fix]:
        return iter(self.fixes)

    def __getitem__(self, index: int) -> Fix:
        return self.fixes[index]

    def to_dict(self) -> dict[str, Any]:
        """Answer the fixes and their report as dicts and lists."""
        return {
            "subject": self.subject,
            "fixes": msgspec.to_builtins(self.fixes),
            "report": self.report.to_dict(),
        }

    def to_json(self) -> str:
        """Answer the fixes and their report as JSON."""
        return msgspec.json.encode(self.to_dict()).decode()

    def __str__(self) -> str:
        lines = [self.subject]
        if not self.fixes:
            lines.append("  nothing to do")
        for number, fix in enumerate(self.fixes, 1):
            cost = "copies nothing" if fix.cost_nbytes == 0 else f"copies {bytes_text(fix.cost_nbytes)}"
            lines.append(f"{number}. {fix.title}  ({fix.safety}, {cost})")
            lines += [f"     {line}" for line in fix.code.splitlines()]
            if fix.note:
                lines.append(f"   {fix.note}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<tensorplay.Fixes: {self.subject}: {'; '.join(fix.title for fix in self.fixes) or 'nothing to do'}>"


@outside_compiled_code
def recommend_fix(x: torch.Tensor | BaseException, *, write: str | None = None) -> Fixes:
    """Tell what to write in place of an in-place write that is not safe, best first.

    Args:
        x: the tensor to be written, or the exception that the write raised.
        write: the statement that writes, as ``"x[0].mul_(2)"``; the one on the line that raised, or doubling the
            tensor, where it is not given.

    Returns:
        The fixes: ``.code`` is Python to run, ``.cost_nbytes`` what it copies, ``.safety`` whether the gradient stays
        what it would have been. None where nothing is wrong.

    Raises:
        TypeError: x is neither a tensor nor an exception.

    Cost: as for is_safe_view().

    Source: as for is_safe_view().
    """
    caller = Caller.at(sys._getframe(1))
    if issubclass(type(x), BaseException):
        return _fixes_of_error(x, write)
    read = read_one(x, "recommend_fix", calls=2)
    report = report_of([read], caller, report_unused=False, rules=_RULES)
    verdict = _judge(x, report, False)
    name = caller.argument("x")
    name = name if name.isidentifier() else "x"
    record = report.records[0]
    size = record.extent.nbytes or 0 if record.extent is not None else 0
    situation = _Situation(name, write or f"{name}.mul_(2)", frozenset(h.kind for h in verdict.hazards), size)
    if verdict.ok:
        return Fixes(f"{describe(record)}: safe in place", (), report)
    return Fixes("; ".join(hazard.reason for hazard in verdict.hazards), _fixes(situation), report)


class _Situation(NamedTuple):
    name: str
    write: str
    kinds: frozenset[str]
    nbytes: int | None


_AUTOGRAD = frozenset({"leaf", "leaf_view", "multi_output", "custom_function", "no_grad_view", "inference_view"})
_ONLY_IN_PLACE = frozenset(
    [
        "zero",
        "copy",
        "normal",
        "uniform",
        "random",
        "set",
        "resize",
        "requires_grad",
        "bernoulli",
        "exponential",
        "geometric",
        "log_normal",
        "cauchy",
    ]
)
_OUT_OF_PLACE = re.compile(r"(?P<target>[A-Za-z_]\w*)\.(?P<op>[a-z]\w*)_\((?P<args>.*)\)")


def _fixes(situation: _Situation) -> Iterator[Fix]:
    """Answer the fixes that clear every hazard there is."""
    name, write, kinds, nbytes = situation
    if "memory" in kinds:
        return  # there is nothing to read any more
    if kinds <= {"leaf", "leaf_view"}:
        yield Fix(
            title="write under torch.no_grad()",
            code=f"with torch.no_grad():\n    {write}",
            cost_nbytes=0,
            safety="safe",
            note="as an optimizer does: the write is not recorded, and backward sees the new values",
        )
    if kinds == {"inference_tensor"}:
        yield Fix(
            title="write inside inference_mode",
            code=f"with torch.inference_mode():\n    {write}",
            cost_nbytes=0,
            safety="safe",
        )
    copied = "what shares its memory keeps its values"
    found = _OUT_OF_PLACE.fullmatch(write)
    if found is not None and found["target"] == name and found["op"] not in _ONLY_IN_PLACE:
        yield Fix(
            title="write out of place",
            code=f"{name} = {name}.{found['op']}({found['args']})",
            cost_nbytes=nbytes,
            safety="copies",
            note=copied,
        )
    yield Fix(
        title="write to a copy",
        code=f"{name} = {name}.clone()\n{write}",
        cost_nbytes=nbytes,
        safety="copies",
        note=copied,
    )
    if kinds & _AUTOGRAD and not kinds <= {"leaf", "leaf_view"} and kinds <= _AUTOGRAD:
        yield Fix(
            title="write under torch.no_grad()",
            code=f"with torch.no_grad():\n    {write}",
            cost_nbytes=0,
            safety="changes gradient",
            note="autograd does not see the write: the gradient is that of the values before it",
        )
    if "saved" in kinds:
        yield Fix(
            title="write after backward",
            code=f"# after .backward():\n{write}",
            cost_nbytes=0,
            safety="safe",
            note="a graph that ran gives its saved tensors back, unless retain_graph=True",
        )


# What PyTorch says (torch/csrc/autograd/VariableTypeUtils.h, variable.cpp, saved_variable.cpp; ATen/MemoryOverlap.cpp;
# c10/core/TensorImpl.h), and what is the matter then.
_MESSAGES: tuple[tuple[str, str], ...] = (
    ("a view of a leaf Variable that requires grad is being used in an in-place operation", "leaf_view"),
    ("a leaf Variable that requires grad is being used in an in-place operation", "leaf"),
    ("function that returns multiple views", "multi_output"),
    ("was created inside a custom Function", "custom_function"),
    ("was created in no_grad mode", "no_grad_view"),
    ("was created in inference mode", "inference_view"),
    ("Inplace update to inference tensor outside InferenceMode", "inference_tensor"),
    ("more than one element of the written-to tensor refers to a single memory location", "expanded"),
    ("has been modified by an inplace operation", "saved"),
)


def _fixes_of_error(error: BaseException, write: str | None) -> Fixes:
    """Recognise what PyTorch raised for an in-place write, and find the statement that wrote."""
    message = BaseException.__str__(error)
    kind = next((kind for text, kind in _MESSAGES if text in message), None)
    report = Report([], ())
    if kind is None:
        head = message.partition("\n")[0]
        return Fixes(
            f"{class_name(type(error))}: {head}: not an error of an in-place write that is known here", (), report
        )
    found = None if kind == "saved" else _failing_write(error)
    name, statement = found or ("x", write or "x.mul_(2)")
    fixes = _fixes(_Situation(name, write or statement, frozenset({kind}), None))
    return Fixes(message.partition("\n")[0], fixes, report)


_IN_PLACE = re.compile(r"\b(?P<target>[A-Za-z_]\w*)(?:\[[^\]]*\])?\.[a-z]\w*_\(")


def _failing_write(error: BaseException) -> tuple[str, str] | None:
    """Answer target and text of the in-place call on the innermost line of the traceback that has one."""
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        line = linecache.getline(traceback.tb_frame.f_code.co_filename, traceback.tb_lineno)
        if (call := _IN_PLACE.search(line)) is not None:
            found = call["target"], _to_closing(line[call.start() :])
        traceback = traceback.tb_next
    return found


def _to_closing(text: str) -> str:
    """Cut a call's text after the parenthesis that closes it."""
    depth = 0
    for end, character in enumerate(text, 1):
        depth += (character == "(") - (character == ")")
        if depth == 0 and character == ")":
            return text[:end]
    return text.strip()
