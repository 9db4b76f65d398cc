"""validate_state_dict_load(): what a load does, or did, beside what it says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch
from torch import nn

from tensorplay.callers import Caller
from tensorplay.checkpoints import open_state_dict
from tensorplay.classes import class_name, derives
from tensorplay.errors import TargetError
from tensorplay.history import provenance_of
from tensorplay.inspection import named_objects, outside_compiled_code
from tensorplay.layers import Finding, LoadSummary, Unread
from tensorplay.loading import Loading, ModelState
from tensorplay.modules import Modules, collection_paused
from tensorplay.placement import Placement
from tensorplay.progress import Step
from tensorplay.reports import Report
from tensorplay.rules.layers import ReachesPastStorage
from tensorplay.rules.registry import device_rules, state_rules
from tensorplay.selection import lenient_config, select_findings
from tensorplay.words import listed, some_of

__all__ = [
    "LoadReport",
    "compare_checkpoint",
    "named_optimizers",
    "need_model",
    "need_state_dict",
    "report_on",
    "state_dict_in",
    "validate_state_dict_load",
]


_PAST_STORAGE = ReachesPastStorage()


class LoadReport(Report):
    """A report of a state dict beside a model."""

    __slots__ = ()
    about = ("load",)

    @property
    def load(self) -> LoadSummary:
        """How many keys match, which do not, what types and devices they have."""
        load = self.document.load
        assert load is not None
        return load

    @property
    def missing_keys(self) -> list[str]:
        """Keys of the model that the state dict lacks."""
        return list(self.load.missing)

    @property
    def unexpected_keys(self) -> list[str]:
        """Keys of the state dict that the model has not."""
        return list(self.load.unexpected)

    def __repr__(self) -> str:
        load = self.load
        keys = f"{load.matched} of {load.keys} keys"
        return f"<tensorplay.{type(self).__name__}: {keys}, {len(self.findings)} findings>"


@outside_compiled_code
def validate_state_dict_load(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    optimizer: object = None,
    *,
    assign: bool = False,
    strict: bool = True,
    values: bool = False,
) -> LoadReport:
    """Find what loading a state dict into a model will do, or has done, and does not say.

    Asked before or after the load, with the same arguments. Looked at are keys, shapes, types and devices; what is on
    meta on either side; memory that both have in common; ties that only one side has; what no longer requires grad;
    parameters that the optimizer holds and the model no longer has.

    Args:
        model: the module; its own tables are read, no hook and no state_dict() is run.
        state_dict: what is to be loaded, or was: names and tensors.
        optimizer: whose parameters are looked for in the model; or several, as a list, or as a dict of name to one.
        assign: say True where it is loaded with ``assign=True``.
        strict: say False where it is loaded with ``strict=False``.
        values: read every element of the state dict, and name those that are NaN or infinite.

    Returns:
        The report: ``.findings``, ``.load``, ``.missing_keys``, ``.unexpected_keys``, ``str()``, ``.to_json()``. It
        prints nothing.

    Raises:
        TypeError: model is no module, state_dict no mapping, or optimizer no optimizer.

    Cost: 3 microseconds a key, without values; with values what it takes to read them once. Runs no operator, keeps no
        reference.

    Source: torch/nn/modules/module.py ``_load_from_state_dict``; c10/core/TensorImpl.h, c10/core/StorageImpl.h, torch
        2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    need_model(model, "validate_state_dict_load")
    need_state_dict(state_dict, "validate_state_dict_load")
    optimizers = named_optimizers(optimizer, caller, "validate_state_dict_load", 2)
    names = caller.argument("model", 0), caller.argument("state_dict", 1)

    def compared() -> LoadReport:
        loading = Loading(Modules(model), state_dict, assign=assign, strict=strict, values=values)
        written = provenance_of if C.track_is_on() else None
        state = ModelState([loading.modules], optimizers, loading=loading, written=written)
        return report_on(state, caller, *names, optimizers)

    with collection_paused():
        return compared()  # what it made is gone before anything is collected


def report_on(
    state: ModelState,
    caller: Caller | None,
    model: str,
    state_dict: str,
    optimizers: Sequence[tuple[str, Any]] = (),
    *,
    unread: Sequence[Unread] = (),
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    **fields: Any,
) -> LoadReport:
    """Ask the rules on modules' state, and those on devices, and make the report; fields go into its summary."""
    findings = ask(state, model, optimizers)
    chosen = {"config": lenient_config(caller)} if caller is not None else {"select": select, "ignore": ignore}
    selection = select_findings(findings, caller=caller, **chosen)
    return LoadReport(
        [],
        selection.findings,
        load=summary_of(state, model, state_dict, **fields),
        focus="load",
        unread=(*unread, *(() if state.loading is None else state.loading.unread)),
        **selection.fields(),
    )


def ask(state: ModelState, model: str, optimizers: Sequence[tuple[str, Any]]) -> list[Finding]:
    """Ask every rule on modules' state, and those on what lies where."""
    found = [finding for rule in state_rules() for finding in rule.in_state(state)]
    if state.loading is not None and state.loading.short:
        found += _PAST_STORAGE.findings(state.loading.records_of(state.loading.short))
    ahead = state.loading is not None and state.loading.ahead
    # Of tensors that are on one device there is nothing to be told.
    if optimizers or (not ahead and len(C.count_labels([slot.tensor for slot in state.slots])[1]) > 1):
        placement = Placement([(model, one.model) for one in state.modules], optimizers)
        found += [finding for rule in device_rules() for finding in rule.in_placement(placement)]
    return found


def summary_of(state: ModelState, model: str, state_dict: str, **fields: Any) -> LoadSummary:
    """Answer the comparison as plain data."""
    loading = state.loading
    ahead = loading is not None and loading.ahead  # on meta, to be compared: not a fact worth a word
    dtypes, devices = ({}, {}) if loading is None else loading.counted()
    keys = [slot for slot in state.slots if slot.is_persistent]
    own = [slot.tensor for slot in state.slots if ahead or not state.leftovers or slot.has_memory]
    return LoadSummary(
        model=model,
        state_dict=state_dict,
        keys=len(keys),
        matched=0 if loading is None else len(loading.pairs),
        missing=() if loading is None else tuple(loading.missing),
        unexpected=() if loading is None else tuple(loading.unexpected),
        not_persistent=tuple(slot.key for slot in state.slots if not slot.is_persistent),
        model_nbytes=C.storage_nbytes(own),
        state_dict_nbytes=0 if loading is None else C.storage_nbytes([entry.tensor for entry in loading.entries]),
        dtypes=dtypes,
        devices={} if ahead else devices,
        on_meta=0 if ahead else len(state.leftovers),
        own_loading=() if loading is None else tuple(loading.own_loading),
        read_values=loading is not None and loading.values,
        **fields,
    )


def state_dict_in(value: object, name: str, modules: Modules, key: str | None) -> tuple[Mapping[Any, Any], str | None]:
    """Answer the state dict in a checkpoint, by a key or the only one that could be the model's, and its key.

    Raises:
        TargetError: there is none, or there are several.
    """
    if key is not None:
        if not isinstance(value, Mapping) or key not in value:
            keys = some_of([repr(one) for one in value]) if isinstance(value, Mapping) else "no keys"
            raise TargetError(f"{name} has no key {key!r}: it has {keys}")
        value = value[key]
    elif isinstance(value, Mapping):
        loading = Loading(modules, value)
        if not loading.pairs and len(loading.nesting) > 1:
            found = listed([repr(one) for one in loading.nesting[:5]])
            raise TargetError(f"{name} has {found}, which could each be the model's: name one as the key")
        key = None if loading.pairs else loading.nested
        value = value if key is None else value[key]
    if not isinstance(value, Mapping):
        raise TargetError(f"{name} holds a {type(value).__name__}, and no state dict: say under which key it is")
    return value, key


def compare_checkpoint(
    path: str | os.PathLike[str],
    factory: Callable[[], Any],
    target: str,
    *,
    key: str | None = None,
    strict: bool = True,
    values: bool = False,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    step: Step | None = None,
) -> LoadReport:
    """Compare a checkpoint with a model that a factory builds on meta: neither's values are in memory.

    Raises:
        TargetError: the checkpoint cannot be read, or the factory builds no module.
    """
    stored = open_state_dict(path, step)
    with torch.device("meta"):
        made = factory()
    parts = made.values() if isinstance(made, Mapping) else made if isinstance(made, (list, tuple)) else [made]
    model = next((part for part in parts if derives(type(part), nn.Module)), None)
    if model is None:
        raise TargetError(f"{target} answers something of type {class_name(type(made))}, and no module")
    modules = Modules(model)
    state_dict, found = state_dict_in(stored.value, os.fspath(path), modules, key)
    name = os.fspath(path) if found is None else f"{os.fspath(path)}[{found!r}]"
    loading = Loading(modules, state_dict, strict=strict, ahead=True, values=values)
    state = ModelState([modules], loading=loading)
    try:
        return report_on(state, None, target, name, unread=stored.unread, select=select, ignore=ignore)
    except OSError as error:
        raise TargetError(f"{path} was cut while it was read: {error}") from error


def need_model(model: object, call: str) -> None:
    """Raise TypeError for what is no module."""
    if not derives(type(model), nn.Module):
        raise TypeError(f"{call}() takes an nn.Module, got {class_name(type(model))}")


def need_state_dict(state_dict: object, call: str) -> None:
    """Raise TypeError for what is no mapping."""
    if derives(type(state_dict), nn.Module):
        raise TypeError(f"{call}() takes a state dict after the model, got a module: pass its state_dict()")
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"{call}() takes a state dict, a mapping of name to tensor, got {class_name(type(state_dict))}")


def named_optimizers(asked: object, caller: Caller, call: str, index: int) -> list[tuple[str, Any]]:
    """Answer one optimizer, or several, with their names.

    Raises:
        TypeError: one is none.
    """
    if asked is None:
        return []
    if type(asked) is dict and not all(type(key) is str for key in list(asked)):
        raise TypeError(f"{call}() takes optimizers in a dict by their names, which are str")
    named = named_objects(asked)
    if named is None:
        name = caller.argument("optimizer", index)
        items: Any = asked if type(asked) in (list, tuple) else None
        named = [(name, asked)] if items is None else [(f"{name}[{n}]", one) for n, one in enumerate(items)]
    for name, one in named:
        if not derives(type(one), torch.optim.Optimizer):
            raise TypeError(f"{call}() takes an optimizer, or several; {name} is of type {class_name(type(one))}")
    return named
