"""DTensors of any library: what their layers are, beside each other, and the repair of a body that was left behind."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NamedTuple

import msgspec

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch
from torch import nn

from tensorplay.bodies import (
    Body,
    ShardingState,
    as_sharded,
    bodies_in,
    bodies_of,
    is_dtensor,
    is_sharding_state,
    sharding_states,
)
from tensorplay.callers import Caller
from tensorplay.classes import class_name, derives
from tensorplay.errors import Reason, RepairRefused
from tensorplay.inspection import outside_compiled_code
from tensorplay.layers import FAULTLESS, Document, DTensorLayers, Finding, RepairPlan
from tensorplay.modules import Modules, collection_paused, orphans_of
from tensorplay.repairs import GRAD, HOOKS, VERSION, Attempt, Method, Options, Places, reasons_of, undo
from tensorplay.reports import Read, Report
from tensorplay.rules.registry import body_rules
from tensorplay.selection import lenient_config, select_findings
from tensorplay.statedict import named_optimizers
from tensorplay.words import plural

__all__ = [
    "Repair",
    "RepairRefused",
    "Verification",
    "Verifications",
    "repair",
    "repair_context",
    "reset_sharded_param",
    "verify",
]

_LOG = logging.getLogger("tensorplay")
_REPAIRING = threading.RLock()


def _unlock_after_fork() -> None:
    global _REPAIRING
    _REPAIRING = threading.RLock()


os.register_at_fork(after_in_child=_unlock_after_fork)


class Verification(Report):
    """A report on the layers of one DTensor."""

    __slots__ = ()
    about = ("dtensors",)

    @classmethod
    def is_kind_of(cls, document: Document) -> bool:
        """Tell whether a stored document is one of such a report: about one DTensor, and no repair."""
        return super().is_kind_of(document) and len(document.dtensors) == 1 and not document.repairs

    @property
    def layers(self) -> DTensorLayers:
        """What was read, layer by layer."""
        return self.document.dtensors[0]

    @property
    def state(self) -> str:
        """The worst of the states: OK, PENDING, BODY_META, SPLIT, ... (docs/explanation/dtensor.md)."""
        return self.layers.state

    @property
    def states(self) -> tuple[str, ...]:
        """All that hold, the worst first."""
        return self.layers.states

    @property
    def svg(self) -> str:
        """The layers as a picture."""
        from tensorplay.render.dtensor import relation_picture
        from tensorplay.render.outline import Names

        return relation_picture(self.document, self.layers, Names(hexadecimal=False)).svg

    def __bool__(self) -> bool:
        return self.state in FAULTLESS

    def __repr__(self) -> str:
        return f"<tensorplay.Verification: {self.layers.name} {self.state}>"


class Verifications(Report, Mapping[str, Verification]):
    """A report on the DTensors of a model: a mapping of name to the report on each.

    Two of them are equal where they are one object, as other reports are.
    """

    __slots__ = ()
    about = ("dtensors",)
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @classmethod
    def is_kind_of(cls, document: Document) -> bool:
        """Tell whether a stored document is one of such a report, and not of a repair."""
        return super().is_kind_of(document) and not document.repairs

    @property
    def states(self) -> dict[str, str]:
        """The state of each, by name."""
        return {one.name: one.state for one in self.document.dtensors}

    def __getitem__(self, name: str) -> Verification:
        document = self.document
        found = next((one for one in document.dtensors if one.name == name), None)
        if found is None:
            raise KeyError(name)
        named = {found.body, found.local, found.alias, *(buffer.record for buffer in found.buffers)}
        return Verification.from_document(
            msgspec.structs.replace(
                document,
                dtensors=(found,),
                records=tuple(record for record in document.records if record.name in named),
                findings=tuple(one for one in self.findings if name in one.evidence.get("tensors", ())),
            )
        )

    def __iter__(self) -> Iterator[str]:
        return (one.name for one in self.document.dtensors)

    def __len__(self) -> int:
        return len(self.document.dtensors)

    def __bool__(self) -> bool:
        return all(one.state in FAULTLESS for one in self.document.dtensors)

    def __repr__(self) -> str:
        wrong = sum(one.state not in FAULTLESS for one in self.document.dtensors)
        return f"<tensorplay.Verifications: {plural(len(self), 'DTensor')}, {wrong} not OK>"


class Repair(Report):
    """A report on a repair: every check of every DTensor, and what was done."""

    __slots__ = ()
    about = ("dtensors",)

    @classmethod
    def is_kind_of(cls, document: Document) -> bool:
        """Tell whether a stored document is one of a repair; one of an empty model says no more than a look at it."""
        return super().is_kind_of(document) and len(document.repairs) == len(document.dtensors)

    @property
    def plans(self) -> tuple[RepairPlan, ...]:
        """What was to be done with each, every check with its result, and the outcome."""
        plans: tuple[RepairPlan, ...] = self._fields["repairs"] if self._document is None else self._document.repairs
        return plans

    @property
    def repaired(self) -> list[str]:
        """Names of those whose bodies were exchanged."""
        return [plan.name for plan in self.plans if plan.outcome == "repaired"]

    @property
    def refused(self) -> list[str]:
        """Names of those that were refused, or exchanged back."""
        return [plan.name for plan in self.plans if plan.outcome in ("refused", "taken back")]

    @property
    def reasons(self) -> list[Reason]:
        """Why, one line a check that did not hold, with the way out."""
        return reasons_of(self.plans)

    def __repr__(self) -> str:
        return f"<tensorplay.Repair: {len(self.repaired)} repaired, {len(self.refused)} refused of {len(self.plans)}>"


@outside_compiled_code
def verify(x: object, optimizer: object = None) -> Any:
    """Read the layers of a DTensor, or of all in a module, beside each other, and name their state.

    Looked at are the body (the tensor that C++ sees), ``_local_tensor``, the alias that ``.data`` is, the flat buffers
    that a framework gathers from, and what Python code answers from where. DTensors are recognised by their mechanism:
    torch's own, whose bodies are wrappers without memory, and those over an ordinary tensor, as HyperParallel's.

    Args:
        x: a tensor, or a module.
        optimizer: whose parameters are looked for in the module; or several, as a list, or as a dict of name to one.

    Returns:
        For a tensor a report with ``.state``, ``.states``, ``.findings``, ``str()``, ``.svg``, ``.to_json()``; true
        where the state is OK or PENDING. For a module such a report as a mapping of name to the one on each DTensor.

    Raises:
        TypeError: x is neither, or optimizer no optimizer.

    Cost: 15 microseconds a DTensor of a module; 150 for a single one, most of it for its name. Runs no operator,
        no hook and no property of a class, keeps no reference.

    Source: c10/core/TensorImpl.h ``storage_``, ``device_opt_``, ``version_counter_``; c10/core/StorageImpl.h; the
        object's dictionary and slots, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    is_one = C.is_tensor(x)
    bodies = _read(x, "verify", caller, named_optimizers(optimizer, caller, "dtensor.verify", 1)).bodies
    layers, reads = _layers(bodies)
    selection = select_findings(_findings(bodies), caller=caller, config=lenient_config(caller))
    kind = Verification if is_one else Verifications
    return kind(reads, selection.findings, dtensors=layers, focus="dtensors", **selection.fields())


def _findings(bodies: Sequence[Body]) -> list[Finding]:
    return [finding for rule in body_rules() for finding in rule.in_bodies(bodies)]


def _layers(bodies: Iterable[Body]) -> tuple[tuple[DTensorLayers, ...], list[Read]]:
    layers, reads = [], []
    known: dict[int, Any] = {}
    for body in bodies:
        found, records = body.layers(known)
        layers.append(found)
        reads += records
    return tuple(layers), reads


class _Found(NamedTuple):
    """The DTensors of what was handed in, and the modules they were found in."""

    bodies: list[Body]
    modules: Modules | None = None
    sharding: Sequence[ShardingState] = ()


def _read(
    x: object, call: str, caller: Caller, optimizers: Sequence[tuple[str, Any]] = (), name: str | None = None
) -> _Found:
    """Read the DTensors of what was handed in."""
    if C.is_tensor(x):
        name = name or caller.argument("x", 0)
        found = bodies_of([(name, x)])
        return _Found(found or [Body(name, x, C.read(x, 4), False, False, None, None, ("NO_LOCAL",), is_plain=True)])
    if not derives(type(x), nn.Module):
        raise TypeError(f"dtensor.{call}() takes a tensor or a module, got {class_name(type(x))}")
    modules = Modules(x)
    sharding = sharding_states([modules])
    orphans = orphans_of(optimizers, as_sharded(modules.slots, sharding)) if optimizers else []
    return _Found(bodies_in(modules, sharding, orphans), modules, sharding)


@outside_compiled_code
def repair(
    x: object,
    *,
    method: Method = "impl",
    optimizer: object = None,
    registered_in: object = (),
    requires_grad: bool | Literal["keep"] = "keep",
    migrate: Sequence[str] = (),
    partial: bool = False,
    dry_run: bool = False,
) -> Repair:
    """Give a DTensor's body the memory of its local tensor, in the same object, checked and reversible.

    ``method="impl"`` exchanges the body's TensorImpl for an alias of the local tensor, which shares its storage and
    version counter. ``method="public"`` exchanges all of the object for a donor of its class by
    ``torch.utils.swap_tensors``: what torch's own DTensor needs, whose body is a wrapper. All checks come first; after
    the exchange all is verified, and exchanged back where one thing is not as it has to be. A model's DTensors are
    repaired all or none. What is in order already, or still on meta altogether, is left alone. Within a function that
    torch.compile compiles it runs between the graphs, as code that is not compiled.

    Args:
        x: a tensor, or a module.
        method: impl or public.
        optimizer: told that holds them: its registrations are checked; or several, as a list, or as a dict of name
            to one.
        registered_in: a module that has the tensor, or several, as a list.
        requires_grad: of the new body: "keep" what the old one has, True or False.
        migrate: "hooks" and "grad": what the body has of these is moved, where it is refused otherwise; "version": the
            body gets the local tensor's version counter, also where nothing else is wrong.
        partial: repair those that can be, and report the rest, instead of all or none.
        dry_run: answer every check, and change nothing.

    Returns:
        The report: ``.plans`` with every check, ``.repaired``, ``.refused``, ``.reasons``, ``.findings`` of what is
        still wrong.

    Raises:
        RepairRefused: a check does not hold, and neither partial nor dry_run was asked; nothing is changed.
        TypeError: x is neither a DTensor nor a module, or an argument is of another type.
        ValueError: method or migrate names none there is.

    Cost: 4 microseconds a DTensor for the checks, the exchange and its verification; 40 with the report.

    Source: torch/csrc/Module.cpp ``_swap_tensor_impl``, torch/utils/__init__.py ``swap_tensors``, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    how = _Asked.of(
        caller,
        method=method,
        optimizer=optimizer,
        registered_in=registered_in,
        requires_grad=requires_grad,
        migrate=migrate,
        partial=partial,
        dry_run=dry_run,
    )
    return _repaired(x, how, caller)


def _options(method: str, requires_grad: object, migrate: object) -> Options:
    if method not in ("impl", "public"):
        raise ValueError(f"repair(method=) takes 'impl' or 'public', got {method!r}")
    if type(requires_grad) is not bool and not (type(requires_grad) is str and requires_grad == "keep"):
        got = repr(requires_grad) if type(requires_grad) in (str, int) else class_name(type(requires_grad))
        raise TypeError(f"repair(requires_grad=) takes 'keep', True or False, got {got}")
    if not isinstance(migrate, (str, list, tuple, set, frozenset)):
        got = class_name(type(migrate))
        raise TypeError(f"repair(migrate=) takes 'hooks', 'grad', 'version' or some in a tuple, got {got}")
    named = (migrate,) if isinstance(migrate, str) else tuple(migrate)
    moves = 0
    for name in named:
        if type(name) is not str or name not in _MOVES:
            raise ValueError(f"repair(migrate=) takes 'hooks', 'grad' and 'version', got {name!r}")
        moves |= _MOVES[name]
    return Options(method, requires_grad, moves)  # type: ignore[arg-type]


_MOVES = {"hooks": HOOKS, "grad": GRAD, "version": VERSION}


_OPTIONS = ("method", "optimizer", "registered_in", "requires_grad", "migrate", "partial", "dry_run")


class _Asked(NamedTuple):
    """What repair() was asked for."""

    options: Options
    optimizers: list[tuple[str, Any]]
    """With their names."""
    registered_in: list[nn.Module]
    partial: bool
    dry_run: bool

    @classmethod
    def of(
        cls,
        caller: Caller,
        *,
        method: str = "impl",
        optimizer: object = None,
        registered_in: object = (),
        requires_grad: object = "keep",
        migrate: object = (),
        partial: object = False,
        dry_run: object = False,
    ) -> _Asked:
        """Check what was asked, ahead of all that is done."""
        for name, value in (("partial", partial), ("dry_run", dry_run)):
            if type(value) is not bool:
                raise TypeError(f"repair({name}=) takes True or False, got {class_name(type(value))}")
        return cls(
            _options(method, requires_grad, migrate),
            named_optimizers(optimizer, caller, "dtensor.repair", 1),
            _modules_in(registered_in),
            partial is True,
            dry_run is True,
        )

    @classmethod
    def for_call(cls, call: str, options: dict[str, Any], caller: Caller) -> _Asked:
        """Check the same where it was handed in as keywords of another call."""
        if unknown := [name for name in options if name not in _OPTIONS]:
            raise TypeError(f"dtensor.{call}() has no argument {unknown[0]!r}; repair() has {', '.join(_OPTIONS)}")
        return cls.of(caller, **options)


def _repaired(x: object, how: _Asked, caller: Caller, name: str | None = None) -> Repair:
    # Two threads that repair one model would each see half of what the other does.
    with _REPAIRING, collection_paused():
        found = _read(x, "repair", caller, name=name)
        for body in found.bodies:
            if body.is_plain:
                kind = class_name(type(body.tensor))
                raise TypeError(f"dtensor.repair() takes a DTensor or a module, {body.path} is a {kind}")
        places = _Places(found, how.registered_in, how.optimizers)
        attempts = [Attempt(body, how.options, places.of(body)) for body in found.bodies]
        try:
            if not how.dry_run:
                _apply(attempts, how.partial)
            report = _report(attempts, caller)
        except BaseException:  # also KeyboardInterrupt: nobody would know what was done
            undo(attempts)
            raise
        finally:
            for attempt in attempts:
                attempt.close()
        if report.refused and not (how.partial or how.dry_run):
            raise RepairRefused(report.reasons, report)
        return report


def _apply(attempts: Sequence[Attempt], partial: bool) -> None:
    """Exchange all or none, or where it is partial those that can be."""
    if any(attempt.plan.outcome == "refused" for attempt in attempts) and not partial:
        return
    for attempt in attempts:
        if attempt.is_open:
            attempt.apply()
            if attempt.plan.outcome != "repaired" and not partial:
                undo(attempts)
                return


def _report(attempts: Sequence[Attempt], caller: Caller) -> Repair:
    """Read anew what was repaired, and say what is still wrong."""
    bodies = [attempt.body_now() for attempt in attempts]
    layers, reads = _layers(bodies)
    selection = select_findings(_findings(bodies), caller=caller, config=lenient_config(caller))
    return Repair(
        reads,
        selection.findings,
        dtensors=layers,
        repairs=tuple(attempt.plan for attempt in attempts),
        focus="dtensors",
        **selection.fields(),
    )


class _Places:
    """Where DTensors are registered in what was handed in."""

    def __init__(
        self, found: _Found, registered_in: Sequence[nn.Module], optimizers: Sequence[tuple[str, Any]]
    ) -> None:
        self._modules = registered_in
        self._tables: dict[int, list[tuple[Any, str | int]]] = {}
        self._is_model = found.modules is not None
        own = set() if found.modules is None else self._held_in(found.modules)
        self._in_module = [self._held_in(Modules(module)) for module in registered_in]
        self._strangers = tuple(
            class_name(type(module))
            for module, have in zip(registered_in, self._in_module, strict=True)
            if not have & own
        )
        for state in found.sharding:
            fields = C.instance_dict(state.state)
            if fields is not None and C.is_tensor(state.parameter):
                self._tables.setdefault(id(state.parameter), []).append((fields, "sharded_param"))
        self._optimizers = [(name, one, self._held_by(one)) for name, one in optimizers]

    def _held_in(self, modules: Modules) -> set[int]:
        have: set[int] = set()
        for module in modules.each():
            own = C.instance_dict(module) or {}
            for table in (own.get("_parameters"), own.get("_buffers")):
                for name, tensor in table.items() if isinstance(table, dict) else ():
                    if type(name) is str and is_dtensor(tensor):
                        have.add(id(tensor))
                        self._tables.setdefault(id(tensor), []).append((table, name))
        return have

    def _held_by(self, optimizer: Any) -> set[int]:
        have: set[int] = set()
        groups = (C.instance_dict(optimizer) or {}).get("param_groups")
        for group in groups if type(groups) is list else ():
            parameters = group.get("params") if type(group) is dict else None
            for index, tensor in enumerate(parameters if type(parameters) is list else ()):
                if C.is_tensor(tensor):
                    have.add(id(tensor))
                    self._tables.setdefault(id(tensor), []).append((parameters, index))
        return have

    def of(self, body: Body) -> Places:
        """Answer where one is."""
        number = id(body.tensor)
        missing = (
            self._strangers
            if self._is_model
            else tuple(
                class_name(type(module))
                for module, have in zip(self._modules, self._in_module, strict=True)
                if number not in have
            )
        )
        on_meta = [name for name, one, _ in self._optimizers if _has_meta_state(one, body.tensor)]
        return Places(
            registrations=tuple(self._tables.get(number, ())),
            missing_in=missing,
            checked_modules=self._is_model or bool(self._modules),
            checked_optimizers=bool(self._optimizers),
            not_held_by=tuple(name for name, _, have in self._optimizers if number not in have),
            state_on_meta=tuple(on_meta),
        )


def _has_meta_state(optimizer: Any, tensor: Any) -> bool:
    """Tell whether an optimizer keeps tensors on meta for a parameter."""
    states = (C.instance_dict(optimizer) or {}).get("state")
    if not isinstance(states, dict):
        return False
    # By identity: hashing the DTensor may run its class's code.
    state = next((value for key, value in list(dict.items(states)) if key is tensor), None)
    kept = [C.read(value).impl for value in state.values() if C.is_tensor(value)] if isinstance(state, dict) else []
    return any(impl.device == "meta" and impl.numel != 0 for impl in kept)


def _modules_in(registered_in: object) -> list[nn.Module]:
    several = registered_in if isinstance(registered_in, (list, tuple)) else [registered_in]
    for one in several:
        if not derives(type(one), nn.Module):
            raise TypeError(f"repair(registered_in=) takes a module, or a list of some, got {class_name(type(one))}")
    return list(several)


class repair_context:
    """Repair a model's DTensors when the code within has materialised them.

    ``with tensorplay.dtensor.repair_context(model): model.to_empty(device="cpu"); model.load_state_dict(state)``.
    Where the code within raises, nothing is repaired and its exception passes on.

    Args:
        model: a module, or a DTensor.
        options: as for repair().

    Raises:
        RepairRefused: at the end, as repair() does; nothing is changed then.
        TypeError, ValueError: at the beginning, as repair() does.
    """

    def __init__(self, model: object, **options: Any) -> None:
        self._model = model
        self._caller = Caller.at(sys._getframe(1))
        # A class of its own may get its local tensor within.
        may_become_one = C.is_tensor(model) and not any(type(model) is one for one in (torch.Tensor, nn.Parameter))
        if not (may_become_one or derives(type(model), nn.Module)):
            raise TypeError(f"dtensor.repair_context() takes a module or a DTensor, got {class_name(type(model))}")
        self._how = _Asked.for_call("repair_context", options, self._caller)
        self.report: Repair | None = None
        """What was done, after the end."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is still wrong, after the end."""
        return () if self.report is None else self.report.findings

    def to_json(self) -> str:
        """Answer the report as JSON, after the end.

        Raises:
            RuntimeError: the context has not ended.
        """
        if self.report is None:
            raise RuntimeError("the context has not ended: there is no report yet")
        return self.report.to_json()

    def __enter__(self) -> repair_context:
        self.report = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        try:
            self.report = _repaired(self._model, self._how, self._caller)
        except RepairRefused as refused:
            self.report = refused.report if isinstance(refused.report, Repair) else None
            raise


def reset_sharded_param(state: Any, reset: Callable[[], object] | None = None, **options: Any) -> Repair:
    """Have a framework take a parameter's local tensor anew, and repair the parameter's body after it.

    In place of ``state.reset_sharded_param()``, for one parameter, on this rank alone. It writes one line to the
    logger ``tensorplay``.

    Args:
        state: the framework's sharding state: it has ``sharded_param``, ``_sharded_param_data`` and
            ``reset_sharded_param()``.
        reset: what is called in place of the state's own method.
        options: as for repair().

    Raises:
        TypeError, ValueError: state is none, or an option is wrong; nothing is done then.
        RepairRefused: as repair() does; the framework's own reset has been done then.
    """
    if not is_sharding_state(state):
        raise TypeError(
            f"dtensor.reset_sharded_param() takes a framework's sharding state, with sharded_param and "
            f"_sharded_param_data; got {class_name(type(state))}"
        )
    caller = Caller.at(sys._getframe(1))
    how = _Asked.for_call("reset_sharded_param", options, caller)
    again = getattr(state, "reset_sharded_param", None) if reset is None else reset
    if not callable(again):
        raise TypeError(
            f"{class_name(type(state))} has no reset_sharded_param(): hand in what resets it, reset_sharded_param("
            "state, reset)"
            if reset is None
            else f"reset_sharded_param(reset=) takes what is called, got {class_name(type(reset))}"
        )
    if any(type(C.own_value(state, "sharded_param")) is one for one in (torch.Tensor, nn.Parameter, type(None))):
        raise TypeError(f"the sharded_param of {class_name(type(state))} is no DTensor")
    again()
    name = C.own_value(C.own_value(state, "_module_info"), "param_name")
    name = name if type(name) is str and name else "sharded_param"
    tensor = C.own_value(state, "sharded_param")
    found = bodies_of([(name, tensor)])
    if not found:
        raise TypeError(f"the sharded_param of {class_name(type(state))} is no DTensor")
    try:
        report = _repaired(tensor, how, caller, name)
    except RepairRefused as refused:
        _LOG.warning("%s: %s, not repaired: %s", name, found[0].state, refused)
        raise
    plan = report.plans[0]
    _LOG.info("%s: %s, %s%s", name, plan.state, plan.outcome, "" if plan.after is None else f", now {plan.after}")
    return report
