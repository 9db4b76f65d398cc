"""audit_device_consistency(): what lies on which device, before and after the code that runs between."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import msgspec

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch
from torch import nn

from tensorplay.bodies import bodies_in, sharding_states
from tensorplay.callers import Caller, shorten, stack_of
from tensorplay.classes import class_name, derives
from tensorplay.decorating import decorated
from tensorplay.inspection import named_objects, outside_compiled_code
from tensorplay.layers import Document, Finding, PlacementSummary
from tensorplay.loading import ModelState
from tensorplay.modules import Modules
from tensorplay.placement import Placement
from tensorplay.reports import Report
from tensorplay.rules.layers import DevicesDisagree, device_conflicts
from tensorplay.rules.registry import body_rules, device_rules
from tensorplay.rules.state import MetaLeftover
from tensorplay.selection import lenient_config, select_findings
from tensorplay.walk import tracebacks_of, variables_of
from tensorplay.words import describe, plural, some_of

__all__ = ["DeviceAudit", "audit_device_consistency"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SAID = "\n\nTensorPlay: "
_ERRORS = (
    "same device",
    "on device meta",
    "Expected object of device type",
    "is on a different device",
    "expected device",
    "meta tensor",
)
_FACTS = DevicesDisagree()
_META = MetaLeftover()
_MOST_ERRORS = 100
_MOST_TOLD = 3


class DeviceAudit(Report):
    """A report of what lies where. As a context, or a decorator, it looks again when the code within has ended.

    Then its findings are those of both moments: what was wrong before, and what the code within brought about. Where
    the code raises because of devices, the error gets told which module it came from, and what lies where.
    """

    __slots__ = ("_audits", "_optimizers", "_roots", "before")

    def __init__(
        self,
        roots: list[tuple[str, Any]],
        optimizers: list[tuple[str, Any]],
        caller: Caller,
        stack: tuple[str, ...] = (),
    ) -> None:
        # A report keeps nothing alive.
        self._roots = [(name, weakref.ref(root)) for name, root in roots]
        self._optimizers = [(name, weakref.ref(one)) for name, one in optimizers]
        self._audits = caller
        self.before: Report | None = None
        """As a context: what was so at its beginning, once it has ended."""
        self._look((), stack)

    def _look(self, before: tuple[Finding, ...], stack: tuple[str, ...] = ()) -> None:
        placement = Placement(_alive(self._roots), _alive(self._optimizers))
        found = [*_facts(placement), *(finding for rule in device_rules() for finding in rule.in_placement(placement))]
        found += _leftovers(placement, _alive(self._roots))
        found += _of_bodies(_alive(self._roots))
        known = {_cause(finding) for finding in found}
        found += [_healed(finding) for finding in before if _cause(finding) not in known]
        selection = select_findings(found, caller=self._audits, config=lenient_config(self._audits))
        super().__init__(
            [], selection.findings, placement=placement.summary(stack), focus="placement", **selection.fields()
        )

    @property
    def placement(self) -> PlacementSummary:
        """How many tensors of each role are on each device."""
        placement = self.document.placement
        assert placement is not None
        return placement

    def __enter__(self) -> DeviceAudit:
        return self

    @outside_compiled_code
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.before = Report([], self.findings, placement=self.placement, focus="placement")
        self._look(self.findings, stack_of(sys._getframe(1)))
        cause = None if error is None else _of_devices(error)
        if cause is not None:
            told = list(self._explanation(cause))
            if told:
                cause.args = (_SAID.join((cause.args[0], "\n".join(told))), *cause.args[1:])

    def _explanation(self, error: BaseException) -> Iterator[str]:
        """Say where an error came from, and what was found of the module there; the rest is counted."""
        place = _place_of(error, _alive(self._roots))
        alarming = [finding for finding in self.findings if finding.severity != "info"]
        if place is not None:
            yield place.text
            own = [finding for finding in alarming if _is_of(finding, place.path)]
        else:
            own = alarming
        yield from map(_told, own[:_MOST_TOLD])
        if rest := len(alarming) - min(len(own), _MOST_TOLD):
            of = ", of other modules" if len(own) <= _MOST_TOLD else ""
            yield f"the audit has {plural(rest, 'more finding')}{of}"

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Look before and after each call of a function; of a coroutine function around the time it is awaited for.

        Raises:
            TypeError: it is an asynchronous generator function, or no function.
        """
        return decorated(function, self._again, "audit_device_consistency")

    def _again(self) -> DeviceAudit:
        self._look(self.findings, stack_of(sys._getframe(1)))
        return self

    @classmethod
    def from_document(cls, document: Document) -> DeviceAudit:
        """Wrap a stored document: it looks at nothing any more."""
        audit = cls([], [], Caller.at(sys._getframe()))
        Report.__init__(audit, [], document.findings)
        audit._document = document
        return audit

    def __repr__(self) -> str:
        modules = plural(self.placement.modules, "module")
        return f"<tensorplay.DeviceAudit: {modules}, {plural(len(self.findings), 'finding')}>"


@outside_compiled_code
def audit_device_consistency(model: object, optimizer: object = None) -> DeviceAudit:
    """Find what lies on another device than it says, or than what it works with.

    Looked at are parameters, buffers, gradients, tensors that modules hold without registering them (in attributes,
    lists, dicts, objects, modules in plain lists, hooks' closures), and the optimizer's state. As a context,
    ``with tp.audit_device_consistency(model): model(x)``, or as a decorator of a function, it looks before and after.

    Args:
        model: a module; or several, as a list, or as a dict of name to module.
        optimizer: whose state is looked at too; or several, in the same way.

    Returns:
        The report: ``.findings``, ``.placement`` with how many tensors of each role are on each device, ``str()``,
        ``.to_json()``. It prints nothing.

    Raises:
        TypeError: model is no module, or optimizer no optimizer.

    Cost: 2 microseconds a module with its tensors, and half a microsecond for each gradient and each tensor of an
        optimizer; a millisecond beside. Runs no operator, no hook and no property, starts no driver, reads no element.

    Source: torch/nn/modules/module.py ``__dict__``; c10/core/TensorImpl.h ``device_opt_``, ``key_set_``;
        c10/core/StorageImpl.h ``data_ptr_``, ``allocator_``; ATen/detail/AcceleratorHooksInterface.h, torch 2.13 and
        2.14.
    """
    caller = Caller.at(sys._getframe(1))
    roots = _named(model, nn.Module, "module", caller, 0)
    optimizers = [] if optimizer is None else _named(optimizer, torch.optim.Optimizer, "optimizer", caller, 1)
    return DeviceAudit(roots, optimizers, caller, stack_of(sys._getframe(1)))


def _alive(named: list[tuple[str, weakref.ref[Any]]]) -> list[tuple[str, Any]]:
    return [(name, one) for name, ref in named if (one := ref()) is not None]


def _named(asked: object, kind: type, what: str, caller: Caller, index: int) -> list[tuple[str, Any]]:
    named = named_objects(asked)
    if named is None:
        name = caller.argument("model" if index == 0 else "optimizer", index)
        several = type(asked) in (list, tuple)
        items: Any = asked if several else (asked,)
        named = [(f"{name}[{number}]" if several else name, one) for number, one in enumerate(items)]
    for name, one in named:
        if not derives(type(one), kind):
            article = "an" if what == "optimizer" else "a"
            raise TypeError(
                f"audit_device_consistency() takes {article} {kind.__name__}, or a list or dict of some; {name} is of "
                f"type {class_name(type(one))}"
            )
    if not named:
        raise TypeError(f"audit_device_consistency() was given no {what}")
    return named


def _facts(placement: Placement) -> Iterator[Finding]:
    """Explain the tensors of which the four facts disagree."""
    groups = [
        group
        for group in placement.groups
        if group.label is not None
        and device_conflicts(group.kind, group.device, group.backend, group.label, group.allocator)
    ]
    if groups:
        yield from _FACTS.findings([one.record for one in placement.members(groups) if one.record is not None])


def _leftovers(placement: Placement, roots: list[tuple[str, Any]]) -> Iterator[Finding]:
    """Explain what is on meta among parameters that are not: a model that has none but there is still to be loaded."""
    held = [(group.role, group.device) for group in placement.of("parameter", "buffer") if group.kind != "fake"]
    is_loaded = any(role == "parameter" and device != "meta" for role, device in held)
    if is_loaded and any(device == "meta" for _, device in held):
        for name, root in roots:
            yield from _META.in_state(ModelState([Modules(root, f"{name}.")], whole=False))


def _of_bodies(roots: list[tuple[str, Any]]) -> Iterator[Finding]:
    """Explain the DTensors whose bodies are not what their local tensors are."""
    for name, root in roots:
        modules = Modules(root, f"{name}.")
        bodies = bodies_in(modules, sharding_states([modules]))
        yield from (finding for rule in body_rules() for finding in rule.in_bodies(bodies))


_SO_BEFORE = " (so before, not after)"


def _healed(finding: Finding) -> Finding:
    """Mark what was so at the beginning alone."""
    if finding.headline.endswith(_SO_BEFORE):
        return finding
    return msgspec.structs.replace(finding, headline=f"{finding.headline}{_SO_BEFORE}")


def _of_devices(error: BaseException) -> BaseException | None:
    """Answer the error of devices: this one, one behind it, or one in a group."""
    open_errors: list[BaseException | None] = [error]
    for one in open_errors:
        if one is None or len(open_errors) > _MOST_ERRORS:
            continue
        message = one.args[0] if one.args else None
        if isinstance(one, RuntimeError) and isinstance(message, str) and any(word in message for word in _ERRORS):
            return None if _SAID in message else one
        open_errors += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
    return None


def _is_of(finding: Finding, path: str) -> bool:
    """Tell whether a finding is of a module, or of one around it or in it."""
    modules = finding.evidence.get("modules") or [finding.evidence.get("module") or finding.where.name]
    return any(
        f"{one}.".startswith(f"{path}.") or f"{path}.".startswith(f"{one}.") for one in modules if type(one) is str
    )


def _cause(finding: Finding) -> tuple[str, str]:
    return finding.code, finding.where.name


def _told(finding: Finding) -> str:
    return f"{finding.code} {finding.where.name}: {finding.headline}\n  fix: {finding.fix}"


class _Place(NamedTuple):
    """Where an error came from."""

    path: str
    text: str


def _place_of(error: BaseException, roots: list[tuple[str, Any]]) -> _Place | None:
    """Say which module's own code an error came from, and on which devices the tensors are that it worked with."""
    paths: dict[int, str] = {}
    for name, root in roots:
        for path, module in nn.Module.named_modules(root):
            paths.setdefault(id(module), f"{name}.{path}" if path else name)
    for traceback in reversed(tracebacks_of(error)):
        code = traceback.tb_frame.f_code
        variables = dict(variables_of(traceback.tb_frame))
        first = variables.get(code.co_varnames[0]) if code.co_varnames else None
        if id(first) not in paths or code.co_filename == nn.modules.module.__file__:
            continue
        path, module = paths[id(first)], cast("nn.Module", first)
        lying = [_lying(name, value) for name, value in variables.items() if C.is_tensor(value)]
        own = C.instance_dict(module) or {}
        for table in (own.get("_parameters"), own.get("_buffers")):
            lying += [_lying(f"self.{name}", one) for name, one in (table or {}).items() if C.is_tensor(one)]
        beside = f", with {some_of(lying, 8)}" if lying else ""
        line = f"{shorten(code.co_filename)}:{traceback.tb_lineno}"
        return _Place(path, f"raised in {path} ({class_name(type(module))}), {line}{beside}")
    return None


def _lying(name: str, tensor: Any) -> str:
    record = C.read(tensor)
    return f"{name} {describe(record)} on {record.impl.device}"
