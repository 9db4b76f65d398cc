"""The repair of a DTensor's body: every check in words, the plan, the exchange, and its way back."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import msgspec

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch

from tensorplay.bodies import Body, dimension_of, is_torchs_own, placements_in, reread
from tensorplay.classes import class_name
from tensorplay.errors import Reason
from tensorplay.layers import FAULTLESS, CheckResult, RepairCheck, RepairPlan
from tensorplay.walk import slots_of

__all__ = ["GRAD", "HOOKS", "REASONS", "VERSION", "Attempt", "Method", "Options", "plan_of", "reasons_of", "undo"]

Method = Literal["impl", "public"]

REASONS: dict[str, tuple[str, str]] = {
    "local-present": ("it has no local tensor", "set _local_tensor first"),
    "local-own": (
        "its local tensor is its class's attribute, not its own",
        "set p._local_tensor on the object itself",
    ),
    "local-not-body": ("its local tensor is the DTensor itself", "set _local_tensor to a plain tensor"),
    "local-not-dtensor": ("its local tensor is a DTensor too", "set _local_tensor to the shard, a plain tensor"),
    "body-without-key": (
        "operators reach its class by the Python key of its body, a {found}: an exchange of the impl would drop it",
        "use method='public'; in a model with bodies of both kinds partial=True, once with each method",
    ),
    "body-dense": (
        "its body is {found}, not an ordinary strided tensor",
        "make the DTensor anew from its local tensor",
    ),
    "not-inference": (
        "the {found} is an inference tensor, which has no version counter",
        "make it outside torch.inference_mode(), or clone() it outside",
    ),
    "local-not-fake": (
        "the local tensor is a FakeTensor: it has no memory",
        "repair outside FakeTensorMode, after loading",
    ),
    "local-dense": ("the local tensor is {found}, not an ordinary strided one", "convert it to a strided tensor first"),
    "slot": (
        "the impl names another Python object as its own",
        "nothing can be done with this object: make the DTensor anew",
    ),
    "no-grad-fn": ("the body has a grad_fn", "detach it: what was computed is no parameter"),
    "no-graph": (
        "backward is pending, or DistributedDataParallel has taken the parameter: an AccumulateGrad node of the "
        "body is alive, use_count {found}",
        "repair after backward, or drop the graph; with DDP repair before wrapping",
    ),
    "not-held": (
        "somebody beside the Python object holds the body's impl, use_count {found}: a view of it, a graph that saved "
        "it, or C++ code",
        "delete the views and drop the graph; tensorplay.who_holds(p) names holders",
    ),
    "no-weak-references": (
        "C++ code has weak references to the body's impl ({found})",
        "end what watches the tensor from C++ first",
    ),
    "not-view": ("the body is a view that autograd tracks", "make the DTensor from a tensor that is no view"),
    "no-hooks": ("{found} are registered on the body", "remove them, or migrate=('hooks',)"),
    "no-native-hooks": ("C++ hooks are registered on the body, or it retains its gradient", "remove them first"),
    "no-grad": ("the body itself has a gradient", "set it to None, or migrate=('grad',)"),
    "grad-fits": (
        "the body's gradient is on {found}, or its shape or type are not the local tensor's: it cannot be migrated",
        "set it to None first: torch.Tensor.grad.__set__(p, None)",
    ),
    "no-grad-dtype": (
        "the body has a grad_dtype of its own, which the new one would not have",
        "set p.grad_dtype = p.dtype before the repair, and what you want after it",
    ),
    "no-forward-grad": ("the body has a forward-mode tangent", "leave the forward AD level first"),
    "storage-alone": (
        "{found} owners have the body's old storage: aliases of the body keep showing the old memory",
        "make them anew after the repair",
    ),
    "local-materialized": ("the local tensor is on meta", "materialise it first: to_empty(device=...), then load"),
    "local-leaf": ("the local tensor was computed, it is no leaf", "p._local_tensor = p._local_tensor.detach()"),
    "local-in-storage": (
        "the local tensor reaches past its storage, {found} bytes",
        "give its storage the bytes back, untyped_storage().resize_()",
    ),
    "local-pointer": ("the local tensor has elements and a null pointer", "give it memory first"),
    "conjugate-negative": (
        "body and local tensor differ in a pending conjugation or negation",
        "p._local_tensor = p._local_tensor.resolve_conj().resolve_neg()",
    ),
    "keys": ("body and local tensor are dispatched differently", "make the DTensor anew from its local tensor"),
    "shape": (
        "the local tensor has another shape than the body",
        "give it the shape it was sharded to, or make the DTensor anew",
    ),
    "dtype": (
        "the local tensor has another data type than the body",
        "convert it, or make the DTensor anew as model.to() does",
    ),
    "requires-grad-type": (
        "only floating point and complex tensors can require grad",
        "leave requires_grad as it is, or False",
    ),
    "inference-mode": ("inference mode is on here", "repair outside torch.inference_mode()"),
    "dispatch-mode": (
        "a dispatch mode is active",
        "leave the mode first: FakeTensorMode, a TorchDispatchMode, tracing",
    ),
    "functorch": ("a torch.func transform is running", "repair outside vmap, grad and functionalize"),
    "backward": ("backward is running in this thread", "repair after it"),
    "compile": ("it is being compiled or traced", "repair outside torch.compile and torch.jit.trace"),
    "exchange-known": (
        "this torch has no _swap_tensor_impl, or it is not one that is known",
        "use method='public', or torch 2.13 or 2.14",
    ),
    "placements": (
        "its placements do not fit its mesh or its shape: {found}",
        "make the DTensor anew with from_local()",
    ),
    "registered": (
        "it is not registered in {found}",
        "hand in the module that has it, or leave registered_in out",
    ),
    "optimizer": (
        "it is not held by {found}",
        "build the optimizer from the model's parameters, where it is to be trained",
    ),
    "optimizer-state": (
        "{found} keeps state of it on meta, which raises at the next step",
        "optimizer.state.pop(p), or load the optimizer's state after the repair",
    ),
    "buffer": (
        "the framework gathers it from other memory than the local tensor's",
        "call the framework's reset_sharded_param(), or tensorplay.dtensor.reset_sharded_param(state)",
    ),
    "weak-references": (
        "Python weak references point at it ({found}), which torch.utils.swap_tensors does not allow",
        "use method='impl' where its body is no wrapper, or drop the references",
    ),
    "global-shape": (
        "its global shape was lost with the Python key of its body",
        "make the DTensor anew from its local tensor",
    ),
    "mends": (
        "{found} alone is not what a body is exchanged for",
        "the finding on it says what puts it right",
    ),
    "donor": ("no donor of its class could be made: {found}", "make the DTensor anew"),
    "exchange": ("the exchange was refused: {found}", "try the other method, or make the DTensor anew"),
    "plan": ("what the plan rests on changed meanwhile", "repair again"),
    "hooks": (
        "its hooks could not be attached to the new body",
        "remove the hooks, and register them after the repair",
    ),
}
"""What is wrong where a check does not hold, and the way out."""

_AFTER = "after the exchange {found} was not as it has to be, and it was exchanged back"
_AFTER_WAY = "repair where no other thread works with it, or make the DTensor anew from its local tensor"


HOOKS, GRAD, VERSION = 1, 2, 4


class Options(NamedTuple):
    """How a repair is to be done."""

    method: Method = "impl"
    requires_grad: bool | Literal["keep"] = "keep"
    moves: int = 0
    """Bits of what the new body gets: HOOKS, GRAD; VERSION where that alone is a reason to exchange it."""

    @property
    def wanted(self) -> bool | None:
        """What the new body's requires_grad is to be; None for what it is."""
        return None if self.requires_grad == "keep" else self.requires_grad


class Places(NamedTuple):
    """Where a DTensor was found, or looked for, in what was handed in."""

    registrations: tuple[tuple[Any, str | int], ...] = ()
    """Tables and lists that have it, each with its key there."""
    missing_in: tuple[str, ...] = ()
    """Modules that were said to have it, and have not."""
    checked_modules: bool = False
    checked_optimizers: bool = False
    not_held_by: tuple[str, ...] = ()
    """Optimizers without it."""
    state_on_meta: tuple[str, ...] = ()
    """Optimizers that keep state of it on meta."""


class Attempt:
    """One DTensor on its way through a repair; refers to it, so it lives no longer than the call."""

    def __init__(self, body: Body, options: Options, places: Places) -> None:
        self.body = body
        self.options = options
        self.places = places
        self.plan = plan_of(body, options, places)
        self._journal: list[Any] = []
        """The donor, from before the exchange on."""
        self._whole: _Whole | None = None
        self._now: Body | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is something to do, and nothing against it."""
        return self.plan.outcome == "planned"

    def apply(self, trip: str = "") -> None:
        """Exchange and verify; on failure everything is as before, and the plan says so."""
        options = self.options
        if options.method == "impl":
            end, failed, said = C.apply_repair(
                self.body.tensor,
                options.wanted,
                options.moves,
                self.places.registrations,
                self._journal,
                trip,
            )
        else:
            self._whole = _Whole(self.body, options, self.places)
            end, failed, said = self._whole.exchange(self._journal, trip)
        if end == "done":
            self._now = reread(self.body)
            self.plan = msgspec.structs.replace(self.plan, outcome="repaired", after=self._now.state)
            return
        self._journal.clear()
        check = RepairCheck(name=failed, result="refused", found=said, reason=_failed(end, failed, said))
        outcome = "refused" if end == "refused" else "taken back"
        self.plan = msgspec.structs.replace(self.plan, outcome=outcome, checks=(*self.plan.checks, check))

    @property
    def exchanged(self) -> list[tuple[Any, Any, int]]:
        """The object, the one that may have its old body, and the address of that; empty where nothing was begun."""
        return [(self.body.tensor, donor, self.body.record.impl.address) for donor in self._journal[:1]]

    def put_back(self) -> None:
        """Exchange a whole DTensor back, where it was exchanged."""
        if self._whole is not None:
            for donor in self._journal[:1]:
                self._whole.put_back(donor)

    def mark_taken_back(self) -> None:
        """Say in the plan that it was exchanged back."""
        if self.plan.outcome == "repaired":
            self.plan = msgspec.structs.replace(self.plan, outcome="taken back", after=None)

    def body_now(self) -> Body:
        """Read the body anew, where it was exchanged; what is around it is as it was."""
        return self._now if self._now is not None and self.plan.outcome == "repaired" else self.body

    def close(self) -> None:
        """Let the old body go."""
        self._journal.clear()


def undo(attempts: Sequence[Attempt]) -> None:
    """Exchange back all that was exchanged."""
    options = attempts[0].options if attempts else Options()
    if options.method == "impl":
        C.undo_repairs([entry for attempt in attempts for entry in attempt.exchanged])
    else:
        for attempt in reversed(attempts):
            attempt.put_back()
    for attempt in attempts:
        attempt.mark_taken_back()


def plan_of(body: Body, options: Options, places: Places) -> RepairPlan:
    """Answer every check of a repair, and what would be done. Changes nothing."""
    checks: list[RepairCheck] = []

    def check(name: str, result: CheckResult, found: str = "") -> None:
        checks.append(_CHECKS[name, result, found])

    def holds(name: str, fact: bool, found: str = "", otherwise: CheckResult = "refused") -> None:
        checks.append(_CHECKS[(name, "passed", "") if fact else (name, otherwise, found)])

    holds("local-present", body.local is not None)
    is_needed = False
    if body.local is not None:
        whole = options.method == "public"
        _, is_needed, native = C.plan_repair(body.tensor, options.wanted, options.moves, whole)
        checks += map(_CHECKS.__getitem__, cast("list[tuple[str, CheckResult, str]]", native))
    if options.method == "impl":
        holds("exchange-known", C.KNOWS_EXCHANGE)
    else:
        count = weakref.getweakrefcount(body.tensor)
        holds("weak-references", count == 0, str(count))
        holds("global-shape", "NO_PYTHON_KEY" not in body.states or is_torchs_own(type(body.tensor)))
    holds("compile", not torch.compiler.is_compiling() and torch._C._get_tracing_state() is None)
    wrong_placement = _wrong_placement(body)
    check(
        "placements",
        "not checked" if wrong_placement is None else "refused" if wrong_placement else "passed",
        wrong_placement or "",
    )
    if places.checked_modules:
        holds("registered", not places.missing_in, ", ".join(places.missing_in))
    else:
        check("registered", "not checked")
    if places.checked_optimizers:
        holds("optimizer", not places.not_held_by, ", ".join(places.not_held_by), "reported")
        holds("optimizer-state", not places.state_on_meta, ", ".join(places.state_on_meta), "reported")
    else:
        check("optimizer", "not checked")
    if body.sharding:
        holds("buffer", "COMM_STALE" not in body.states, "", "reported")
    else:
        check("buffer", "not checked")
    if body.local is not None and not is_needed and body.state not in FAULTLESS:
        check("mends", "reported", body.state)
    refused = any(one.result == "refused" for one in checks)
    if not is_needed and body.local is not None:
        outcome = "pending" if body.state == "PENDING" else "unchanged"
    else:
        outcome = "refused" if refused else "planned"
    return RepairPlan(name=body.path, method=options.method, state=body.state, checks=tuple(checks), outcome=outcome)


def reasons_of(plans: Sequence[RepairPlan]) -> list[Reason]:
    """Answer why plans were refused or taken back: each check that did not hold, with the way out."""
    return [
        Reason(f"{plan.name}: {check.reason}", name=check.name, tensor=plan.name, way_out=_way_out(plan, check))
        for plan in plans
        if plan.outcome in ("refused", "taken back")
        for check in plan.checks
        if check.result == "refused"
    ]


class _Checks(dict[tuple[str, CheckResult, str], RepairCheck]):
    """Checks by name, result and what was read: most are the same for every DTensor."""

    def __missing__(self, key: tuple[str, CheckResult, str]) -> RepairCheck:
        name, result, found = key
        wrong = result in ("refused", "reported")
        check = RepairCheck(name=name, result=result, found=found, reason=_reason(name, found) if wrong else None)
        if not wrong:
            self[key] = check
        return check


_CHECKS = _Checks()


def _reason(name: str, found: str) -> str:
    wrong, way_out = REASONS[name]
    return f"{wrong.format(found=found)}: {way_out}"


def _failed(end: str, name: str, said: str) -> str:
    """Say what did not hold: of the checks before the exchange, or of those after it."""
    if (end == "refused" or name == "hooks") and name in REASONS:
        return _reason(name, said)
    return f"{_AFTER.format(found=name)}: {_AFTER_WAY}"


def _way_out(plan: RepairPlan, check: RepairCheck) -> str:
    is_after = plan.outcome == "taken back" and check is plan.checks[-1] and check.name != "hooks"
    return _AFTER_WAY if is_after or check.name not in REASONS else REASONS[check.name][1]


_DIMENSIONS = ("_mesh_shape", "mesh_shape", "_shape", "shape", "_ndim", "ndim")


def _wrong_placement(body: Body) -> str | None:
    """Say what of the placements does not fit; empty where all does, None where it cannot be known."""
    placements = placements_in(body.tensor)
    if not placements or body.local_record is None:
        return None
    if body.is_wrapper and "SHAPE" in body.states:
        whole, part = (list(record.impl.shape) for record in (body.record, body.local_record))
        return f"{part} is no part of {whole}, {body.placements}"
    dims = len(body.local_record.impl.shape or ())
    for placement in placements:
        dim = dimension_of(placement)
        if dim is not None and not -max(dims, 1) <= dim < max(dims, 1):
            return f"{class_name(type(placement))}({dim}) of a tensor with {dims} dimensions"
    mesh = _mesh_dimensions(body.mesh)
    if mesh is None:
        return None
    return "" if mesh == len(placements) else f"{len(placements)} placements on a mesh of {mesh} dimensions"


def _mesh_dimensions(mesh: Any) -> int | None:
    known = sys.modules.get("torch.distributed.device_mesh")
    if known is not None and type(mesh) is known.DeviceMesh:
        return int(mesh.ndim)
    for name in _DIMENSIONS:
        value = C.own_value(mesh, name)
        if type(value) is int:
            return value
        if type(value) in (tuple, list, torch.Size):
            return len(value)
    names = C.own_value(mesh, "_mesh_dim_names") or C.own_value(mesh, "mesh_dim_names")
    return len(names) if type(names) in (tuple, list) else None


# The public way: a whole donor.


def _donor_of(body: Body, requires_grad: bool) -> Any:
    """Make a DTensor of the same class over the same local tensor, with all that the object has."""
    cls, local, record = type(body.tensor), body.local, body.record
    if is_torchs_own(cls):
        donor = cls(local, C.own_value(body.tensor, "_spec"), requires_grad=requires_grad)
    elif body.is_wrapper:
        donor = torch.Tensor._make_wrapper_subclass(
            cls,
            record.impl.shape,
            strides=record.impl.stride,
            storage_offset=record.impl.storage_offset,
            dtype=getattr(torch, record.impl.dtype),
            device=torch.device(body.local_record.impl.device),
            requires_grad=requires_grad,
        )
    else:
        donor = torch.Tensor._make_subclass(cls, local, requires_grad)
    own = C.instance_dict(body.tensor)
    if own is not None:
        _DICT.__get__(donor).update(own)
    for name, slot in slots_of(cls).items():
        value = C.own_value(body.tensor, name)
        if value is not None:
            slot.__set__(donor, value)
    return donor


_DICT = torch.Tensor.__dict__["__dict__"]
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class _Whole:
    """A DTensor that is exchanged for a whole donor, and back; refers to it, so it lives no longer than the call."""

    def __init__(self, body: Body, options: Options, places: Places) -> None:
        p = body.tensor
        self._body = body
        self._options = options
        self._places = places
        self._cls = type(p)
        self._dict = C.instance_dict(p)
        self._items = dict(self._dict or {})
        self._slots = {name: C.own_value(p, name) for name in slots_of(self._cls)}
        self._record: Any = C.read(p)
        self._local: Any = C.read(body.local)
        self._form = C.dispatch_form(p)
        self._wanted = self._record.impl.requires_grad if options.wanted is None else options.wanted

    def exchange(self, journal: list[Any], trip: str) -> tuple[str, str, str]:
        """Exchange, verify, and exchange back where a check does not hold; answer how it ended, which one, and why."""
        p = self._body.tensor
        grad = C.grad_object(p) if self._options.moves & GRAD else None
        with torch.no_grad(), torch._C.DisableTorchFunction():
            hooks = {name: getattr(torch._C.TensorBase, name).__get__(p) for name in _HOOKS}
            try:
                donor = _donor_of(self._body, self._wanted)
            except Exception as error:  # of the class's own code
                return "refused", "donor", _told(error)
            device = C.read(donor).impl.device
            if type(donor) is not self._cls or device != self._local.impl.device or trip == "donor":
                return "refused", "donor", f"what was made is a {class_name(type(donor))} on {device}"
            journal.append(donor)
            try:
                if trip == "exchange":
                    raise RuntimeError
                torch.utils.swap_tensors(p, donor)
                self._give(p)  # its own dictionary, in which others may look
            except BaseException as error:
                # A class's __setattr__ raised, or a signal's handler, with some of it exchanged.
                self.put_back(donor)
                if not isinstance(error, Exception):
                    raise
                return "refused", "exchange", _told(error)
            if grad is not None:
                torch._C.TensorBase.grad.__set__(p, grad)
            for name, registered in hooks.items():
                if registered is not None:  # an empty list, too: hooks registered in it later have to fire
                    getattr(torch._C.TensorBase, name).__set__(p, registered)
        checks = self._checks(donor)
        failed = next((name for name, is_held in checks.items() if trip == name or not is_held()), None)
        if failed is None:
            return "done", "", ""
        self.put_back(donor)  # the old impl has its hooks as before
        return "taken back", failed, failed

    def put_back(self, donor: Any) -> None:
        """Give the object all that it had, as far as it was exchanged."""
        p = self._body.tensor
        self._give(p)
        if C.read(donor).impl.address == self._record.impl.address:
            with torch._C.DisableTorchFunction():
                if C.KNOWS_EXCHANGE:
                    torch._C._swap_tensor_impl(p, donor)
                else:
                    torch.utils.swap_tensors(p, donor)
                    self._give(p)

    def _give(self, p: Any) -> None:
        """Give the object its own dictionary and slots, without code of its class."""
        if self._dict is not None and C.instance_dict(p) is not self._dict:
            _DICT.__set__(p, self._dict)
        for name, slot in slots_of(self._cls).items():
            value = self._slots[name]
            if C.own_value(p, name) is value:
                continue
            if value is None:
                slot.__delete__(p)
            else:
                slot.__set__(p, value)

    def _checks(self, donor: Any) -> dict[str, Callable[[], bool]]:
        body, before, local_before, wanted = self._body, self._record, self._local, self._wanted
        p = body.tensor
        now: Any = C.read(p)
        old: Any = C.read(donor)
        local: Any = C.read(body.local)
        is_wrapper = body.is_wrapper
        had_key = "NO_PYTHON_KEY" not in body.states
        # Torch's own class takes its keys from the local tensor.
        has_form = had_key and not is_torchs_own(self._cls)
        return {
            "object": lambda: type(p) is self._cls and self._has_items(C.instance_dict(p)),
            "slots": lambda: all(C.own_value(p, name) is value for name, value in self._slots.items()),
            "registrations": lambda: all(container[key] is p for container, key in self._places.registrations),
            "new-impl": lambda: now.impl.address != before.impl.address and now.python.slot_is_self,
            "old-impl": lambda: old.impl.address == before.impl.address,
            "shape": lambda: not had_key or now.impl.shape == before.impl.shape,
            "dtype": lambda: now.impl.dtype == before.impl.dtype,
            "device": lambda: now.impl.device == local.impl.device,
            "keys": lambda: C.dispatch_form(p) == self._form if has_form else "Python" in now.impl.keys,
            "leaf": lambda: now.impl.is_leaf is True,
            "requires-grad": lambda: now.impl.requires_grad is wanted,
            "storage": lambda: is_wrapper or now.storage.address == local.storage.address,
            "version": lambda: is_wrapper or now.impl.version_counter == local.impl.version_counter,
            "use-counts": lambda: now.impl.use_count == 1 and local.impl.use_count == local_before.impl.use_count,
            "state": lambda: C.dtensor_states(p)[0] in ("OK", "REQUIRES_GRAD"),
        }

    def _has_items(self, own: dict[Any, Any] | None) -> bool:
        if self._dict is not None and own is not self._dict:
            return False
        own = own or {}
        return own.keys() == self._items.keys() and all(value is self._items[key] for key, value in own.items())


def _told(error: Exception) -> str:
    name = class_name(type(error))
    return f"{name}: {text}" if (text := str(error)) else name
