"""Rules on what modules have registered: leftovers on meta, memory nobody wrote, ties, what optimizers still hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tensorplay.rules.registry import StateRule
from tensorplay.words import bytes_text, describe, listed, plural, some_of, with_others

if TYPE_CHECKING:
    from tensorplay.layers import Finding
    from tensorplay.loading import ModelState, Tie
    from tensorplay.modules import Orphans, Slot
    from tensorplay.written import Provenance

__all__ = ["MetaLeftover", "NeverWritten", "OptimizerOrphan", "TieBroken"]

MOST_NAMES = 1_000
"""How many names a finding's evidence lists."""


class MetaLeftover(StateRule):
    """Parameters or buffers are still on meta: they have a shape and no values.

    ## What it checks

    Every registered parameter and buffer. One whose value an offload hook has (accelerate's `cpu_offload`,
    `disk_offload`, `dispatch_model`) is on meta by design: the hook's own tables are read, no hook is called, and the
    finding is an info that says where the values are. `audit_device_consistency()` speaks of leftovers among real
    tensors only, `check()` of modules that are altogether on meta too: these have no values either.

    ## Why it matters

    A module built under `torch.device("meta")` has no values until each of its tensors is replaced. What is left there
    fails late: at the first operator that needs a value, or when the model is saved.

    ## Known limits

    Where another library keeps the values, and moves them in by a hook that has no `weights_map`, leftovers are told
    as missing. A module that is still to be loaded looks like one that was never loaded.

    ## Example

    ```python
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.ones(2, 2))
    tp.check(model)
    ```

    ## Use instead

    ```python
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    model.load_state_dict(torch.nn.Linear(2, 2).state_dict(), assign=True)
    tp.check(model)
    ```

    ## Fix safety

    `load_state_dict(assign=True)` makes the checkpoint's tensors the model's own: an optimizer built before then holds
    the old ones. `to_empty()` gives memory without values, and unties what was tied: load, and tie again.

    ## Sources

    torch/nn/modules/module.py (`_parameters`, `_buffers`, `to_empty`), c10/core/TensorImpl.h (`device_opt_`), torch
    2.13 and 2.14; accelerate/hooks.py (`AlignDevicesHook.weights_map`), accelerate 1.15.
    """

    code = "TP401"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for what is missing, and one for what is offloaded."""
        leftovers = state.leftovers
        loading = state.loading
        if loading is not None and leftovers:
            if loading.ahead:
                return
            told = {pair.slot.key for pair in loading.pairs} | (set(loading.missing) - loading.tied_to.keys())
            leftovers = [slot for slot in leftovers if slot.key not in told or state.has_value(slot)]
        if not leftovers or not (state.whole or len(state.leftovers) < len(state.slots)):
            return
        offloaded = [slot for slot in leftovers if state.has_value(slot)]
        missing = [slot for slot in leftovers if not state.has_value(slot)]
        if missing:
            yield self._missing(state, missing, len(offloaded))
        if offloaded:
            yield self._offloaded(state, offloaded)

    def _missing(self, state: ModelState, slots: Sequence[Slot], in_hooks: int) -> Finding:
        parameters = sum(slot.is_parameter for slot in slots)
        kept_out = [slot.key for slot in slots if not slot.is_persistent]
        everything = len(slots) == len(state.slots)
        of = "all " if everything else ""
        buffers = f", {some_of(kept_out, 3)} in no checkpoint (persistent=False)" if kept_out else ""
        return self.finding(
            slots[0].key,
            headline=f"{of}{_counted(slots)} on meta: {'they have' if len(slots) > 1 else 'it has'} no values",
            subject=f"{_described(slots)}{buffers}",
            evidence={
                "meta_params": parameters,
                "meta_buffers": len(slots) - parameters,
                "values_in_hooks": in_hooks,
                "tensors": [slot.key for slot in slots[:MOST_NAMES]],
                "non_persistent": kept_out[:MOST_NAMES],
                "registered": len(state.slots),
            },
            why="what is built on meta has a shape and no memory; nothing replaced "
            + ("it" if len(slots) == 1 else "them")
            + (", and no offload hook has a value" if not in_hooks else ""),
            fix="load_state_dict(assign=True), or to_empty(device=...) and then load"
            + (", and compute the buffers anew, as their __init__ does" if kept_out else ""),
            source="walked: the modules' _parameters and _buffers, hooks' weights_map; read: c10/core/TensorImpl.h "
            "device_opt_",
        )

    def _offloaded(self, state: ModelState, slots: Sequence[Slot]) -> Finding:
        places = sorted({place for slot in slots if (place := state.has_value(slot))})
        parameters = sum(slot.is_parameter for slot in slots)
        return self.finding(
            slots[0].key,
            headline=f"{_counted(slots)} on meta, each with its value in an offload hook ({listed(places)}): "
            "offloaded, not missing",
            subject=_described(slots),
            evidence={
                "meta_params": parameters,
                "meta_buffers": len(slots) - parameters,
                "values_in_hooks": len(slots),
                "hook_devices": places,
                "tensors": [slot.key for slot in slots[:MOST_NAMES]],
            },
            why="the hook puts the values in before forward() and takes them out after it",
            fix="nothing is to be repaired; to save or to move the model, take the values from the hook's weights_map, "
            "or remove the hooks first (accelerate.hooks.remove_hook_from_submodules)",
            source="walked: the hooks' weights_map; read: c10/core/TensorImpl.h device_opt_",
            severity="info",
        )


class NeverWritten(StateRule):
    """A parameter or buffer has memory that no operator has written since it was allocated.

    ## What it checks

    `materialize_audit()` watches which operators allocate memory without values (`empty`, `empty_like`, as `to_empty()`
    calls them) and which write to it, byte by byte. What is left at the end is named, with the line that allocated it;
    a copy of memory that was never written counts as never written. `safe_load_state_dict(device=...)` watches itself
    in the same way; `validate_state_dict_load()` says it while `track()` runs, of whole blocks that no
    operator has written in place. Values are not looked at: that memory holds zeros, or NaN, proves nothing.

    ## Why it matters

    Such memory holds what was there before. Most often it is a buffer with `persistent=False`, as rotary frequencies
    are: no checkpoint has it, so that loading says that all keys matched.

    ## Known limits

    Writes that pass by the operators are not seen: through NumPy or DLPack, by C++ code that takes the pointer, by
    other threads, inside compiled regions. What ranks send each other counts as written: end the audit before the first
    forward of FSDP2, after which the outermost module holds what was gathered.

    ## Example

    ```python
    with torch.device("meta"):
        model = torch.nn.BatchNorm1d(2)
    with tp.materialize_audit(model) as audit:
        model.to_empty(device="cpu")
        torch.nn.init.ones_(model.weight)
    audit
    ```

    ## Use instead

    ```python
    with torch.device("meta"):
        model = torch.nn.BatchNorm1d(2)
    with tp.materialize_audit(model) as audit:
        model.to_empty(device="cpu")
        model.reset_running_stats()
        model.reset_parameters()
    audit
    ```

    ## Fix safety

    Computing a buffer anew gives what `__init__` gave. A parameter that is initialised anew has other values than the
    checkpoint's.

    ## Sources

    torch/nn/modules/module.py (`to_empty`), aten/src/ATen/native/native_functions.yaml (which arguments operators
    write), torch 2.13 and 2.14.
    """

    code = "TP402"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for what was made in one place."""
        by_site: dict[str, list[tuple[Slot, Provenance]]] = {}
        for slot, known in state.unwritten:
            by_site.setdefault(_made_by(known), []).append((slot, known))
        for made_by, found in by_site.items():
            slots = [slot for slot, _ in found]
            partly = [(slot, known) for slot, known in found if known.state == "partly"]
            kept_out = [slot.key for slot in slots if not slot.is_parameter and not slot.is_persistent]
            unwritten = sum((known.nbytes or 0) - (known.written_nbytes or 0) for _, known in found)
            more = "".join(
                f"; {slot.key} has {bytes_text(known.written_nbytes)} of {bytes_text(known.nbytes)} written"
                for slot, known in partly[:3]
            )
            where = f" by {made_by}" if made_by else ""
            yield self.finding(
                slots[0].key,
                headline=f"{_counted(slots)} never written since the memory was allocated"
                if not partly
                else f"{_counted(slots)} not wholly written since the memory was allocated",
                subject=f"{_described(slots)}, allocated{where}{more}",
                evidence={
                    "never_written": [slot.key for slot, known in found if known.state == "never"][:MOST_NAMES],
                    "partly_written": [slot.key for slot, _ in partly][:MOST_NAMES],
                    "unwritten_bytes": unwritten,
                    "non_persistent": kept_out[:MOST_NAMES],
                    "in_checkpoint": None
                    if state.loading is None
                    else any(slot.key in state.loading.by_key for slot in slots),
                    "allocated_by": made_by.partition(" at ")[0],
                    "site": made_by.partition(" at ")[2],
                    "copies": [slot.key for slot, known in found if known.copied_from][:MOST_NAMES],
                },
                why="such memory holds what was there before"
                + (f"; {some_of(kept_out, 3)}: persistent=False, so no checkpoint has it" if kept_out else ""),
                fix="compute it anew after to_empty(), as __init__ does, or build it outside torch.device('meta')"
                if kept_out
                else "load it, or call the module's reset_parameters()",
                source="recorded: each operator that allocated or wrote, by its schema",
            )


class TieBroken(StateRule):
    """What was one parameter under several names is now several.

    ## What it checks

    Which names lie over the same bytes: in the modules, in the state dict that is compared with, and, where
    `materialize_audit()` or `safe_load_state_dict()` saw them, in the modules before. With `assign=True` also what the
    load would untie. Names that still share their memory, but are parameters of their own since, are told too: as a
    warning where they were one object before, as an info beside a state dict, which cannot tell.

    ## Why it matters

    Each name has its own values from then on: they are loaded alike, and drift apart as soon as one is trained. The
    memory is spent twice. Most often `to_empty()` did it, which makes a new parameter for every name, or
    `load_state_dict(assign=True)`.

    ## Known limits

    A model that is not tied on purpose, and a checkpoint of one that is, look alike.

    ## Example

    ```python
    def build():
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    tp.validate_state_dict_load(model, build().state_dict())
    ```

    ## Use instead

    ```python
    def build():
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
        model[1].weight = model[0].weight
        return model

    with torch.device("meta"):
        model = build()
    model.to_empty(device="cpu")
    model[1].weight = model[0].weight
    tp.validate_state_dict_load(model, build().state_dict())
    ```

    ## Fix safety

    Tying again drops one of two values: do it before the optimizer is built, and check that both are the same.

    ## Sources

    torch/nn/modules/module.py (`_apply`, `_load_from_state_dict`), c10/core/StorageImpl.h, torch 2.13 and 2.14.
    """

    code = "TP403"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for all ties that are lost."""
        loading = state.loading
        if loading is not None and loading.assign and state.before is None:
            theirs = {key: number for number, tie in enumerate(loading.ties) for key in tie.keys}
            lost = [
                tie
                for tie in state.ties
                if len({theirs.get(keys[-1], keys[-1]) for keys in loading.written_together(tie)}) > 1
            ]
            if lost:
                yield self._explained(state, lost, "the checkpoint does not tie them, so that assign=True unties", 0)
        ties = state.before.ties if state.before is not None else [] if loading is None else loading.ties
        lost, apart, copies, extra = [], [], 0, 0
        by_key = {slot.key: slot for slot in state.slots} if ties else {}
        for tie in ties:
            slots = [by_key[key] for key in tie.keys if key in by_key]
            if state.before is None or not any(slot.is_parameter for slot in slots):
                slots = [slot for slot in slots if slot.is_parameter]  # buffers that are alike are shared by accident
            slots = [slot for slot in slots if not state.has_value(slot)]  # a hook makes one on meta for every name
            storages = {slot.record.storage.address for slot in slots if slot.record.storage is not None}
            if len(storages) > 1:
                if loading is not None and loading.assign and state.before is None:
                    continue  # assign=True will tie them, or has
                lost.append(tie)
                copies += len(storages)
                extra += (len(storages) - 1) * tie.nbytes
            elif len({slot.record.impl.address for slot in slots}) > 1 and tie.is_one_object is not False:
                apart.append(tie)
        whose = "before" if state.before is not None else "in the checkpoint"
        if lost:
            yield self._explained(state, lost, f"one parameter {whose}, now {plural(copies, 'storage')}", extra)
        if apart:
            yield self._apart(state, apart)

    def _apart(self, state: ModelState, ties: Sequence[Tie]) -> Finding:
        names = [key for tie in ties for key in tie.keys]
        more = f", and {plural(len(ties) - 1, 'more tie')}" if len(ties) > 1 else ""
        return self.finding(
            names[0],
            headline=f"{listed(list(ties[0].keys[:4]))}{more} are parameters of their own over one memory",
            subject=f"{bytes_text(ties[0].nbytes)} under {plural(len(ties[0].keys), 'name')}",
            evidence={
                "names": names[:MOST_NAMES],
                "ties": [list(tie.keys) for tie in ties[:MOST_NAMES]],
                "distinct_storages": len(ties),
                "parameter_bytes": sum(state.parameter_bytes.values()),
            },
            why="assign=True makes a parameter for every name; each gets a gradient of its own, and an optimizer moves "
            "the memory once for each",
            fix="tie again: module.weight = other.weight, or the model's tie_weights(), before the optimizer is built",
            source="read: identity of the impls, c10/core/TensorImpl.h storage_",
            severity=None if state.before is not None else "info",
        )

    def _explained(self, state: ModelState, lost: Sequence[Tie], how: str, extra: int) -> Finding:
        names = [key for tie in lost for key in tie.keys]
        total = sum(state.parameter_bytes.values())
        wanted = set(names)
        storages = {
            slot.record.storage.address
            for slot in state.slots
            if slot.key in wanted and slot.record.storage is not None
        }
        instead = f"; {bytes_text(total)} of parameters instead of {bytes_text(total - extra)}" if extra else ""
        more = f", and {plural(len(lost) - 1, 'more tie')}" if len(lost) > 1 else ""
        return self.finding(
            names[0],
            headline=f"tie lost: {listed(list(lost[0].keys[:4]))}{more}: {how}",
            subject=f"{bytes_text(lost[0].nbytes)} under {plural(len(lost[0].keys), 'name')}{instead}",
            evidence={
                "names": names[:MOST_NAMES],
                "ties": [list(tie.keys) for tie in lost[:MOST_NAMES]],
                "distinct_storages": len(storages),
                "parameter_bytes": total,
                "tied_parameter_bytes": total - extra,
            },
            why="to_empty() makes a new parameter for every name, and load_state_dict(assign=True) puts in what the "
            "checkpoint has for each; from then on the names are trained apart",
            fix="tie again: module.weight = other.weight, or the model's tie_weights(), before the optimizer is built",
            source="read: c10/core/TensorImpl.h storage_, storage_offset_, sizes and strides of both sides",
        )


class OptimizerOrphan(StateRule):
    """An optimizer holds parameters that the model no longer has.

    ## What it checks

    Each parameter in an optimizer's `param_groups`, by identity, against all that is registered in the modules among
    the objects, and in every other module that is alive. One that no module has is an orphan if nothing but optimizers
    holds it, or if for each parameter of the optimizer another one of its shape and type stands in the model, which no
    optimizer has. With `assign=True`, before the load, also what the load would make one.

    ## Why it matters

    `step()` then moves tensors that nobody computes with: training runs, and nothing changes. Most often
    `load_state_dict(assign=True)`, `to_empty()` or a resized embedding put new parameters into the model after the
    optimizer was built.

    ## Known limits

    Parameters that a script keeps beside its modules are passed over, also where they are of no use any more. An
    optimizer among whose objects there is no module is not looked at.

    ## Example

    ```python
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    tp.check({"model": model, "optimizer": optimizer})
    ```

    ## Use instead

    ```python
    model = torch.nn.Linear(3, 1)
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tp.check({"model": model, "optimizer": optimizer})
    ```

    ## Fix safety

    A new optimizer begins without momentum and step counts: load the old one's state dict into it, which goes by the
    parameters' order.

    ## Sources

    torch/optim/optimizer.py (`param_groups`), torch/nn/modules/module.py (`_parameters`), torch 2.13 and 2.14.
    """

    code = "TP405"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for each optimizer."""
        for found in state.orphans:
            yield self._explained(found)
        loading = state.loading
        if loading is not None and loading.assign and state.before is None:
            loaded = {pair.slot.key for pair, _ in loading.aliases}
            lost = [
                pair.slot
                for pair in loading.pairs
                if id(pair.slot.tensor) in state.held and pair.slot.is_parameter and pair.slot.key not in loaded
            ]
            if lost:
                yield self._ahead(lost, len(state.held))

    def _ahead(self, slots: Sequence[Slot], held: int) -> Finding:
        return self.finding(
            slots[0].key,
            headline=f"assign=True puts new tensors in the place of {plural(len(slots), 'parameter')} that the "
            "optimizer holds",
            subject=_described(slots),
            evidence={
                "optimizer_params": held,
                "to_be_orphans": [slot.key for slot in slots[:MOST_NAMES]],
                "orphan_bytes": sum(slot.nbytes for slot in slots),
            },
            why="step() goes on with the old ones, which nobody computes with",
            fix="load first, and build the optimizer then; or load without assign=True",
            source="walked: optimizer.param_groups; compared by identity with the modules' _parameters",
        )

    def _explained(self, found: Orphans) -> Finding:
        paths = [path for path, _ in found.parameters]
        first = found.parameters[0][1]
        model = f"; the model has {some_of(found.replaced_by, 3)} instead" if found.replaced_by else ""
        return self.finding(
            found.optimizer,
            headline=f"the optimizer holds {plural(found.held, 'parameter')}, {found.shared} of them in the model, and "
            f"{plural(len(paths), 'orphan')}",
            subject=f"{describe(first)} and others: {bytes_text(found.nbytes)} that no module has{model}"
            if len(paths) > 1
            else f"{describe(first)}: {bytes_text(found.nbytes)} that no module has{model}",
            evidence={
                "optimizer_params": found.held,
                "shared_objects": found.shared,
                "shared_storages": found.sharing_storage,
                "orphans": len(paths),
                "orphan_bytes": found.nbytes,
                "tensors": paths[:MOST_NAMES],
                "replaced_by": found.replaced_by[:MOST_NAMES],
            },
            why="step() changes tensors that nobody computes with, and the model's own stay as they are",
            fix="build the optimizer after loading, and load its state dict then",
            source="walked: optimizer.param_groups, the modules' _parameters; compared by identity",
        )


def _made_by(known: Provenance) -> str:
    """Say which operator allocated the memory, and where; of a copy, what it is copied from."""
    return known.copied_from or " at ".join(filter(None, (known.origin, known.site)))


def _counted(slots: Sequence[Slot]) -> str:
    parameters = sum(slot.is_parameter for slot in slots)
    words = []
    if parameters:
        words.append(plural(parameters, "parameter"))
    if len(slots) > parameters:
        words.append(plural(len(slots) - parameters, "buffer"))
    return listed(words)


def _described(slots: Sequence[Slot]) -> str:
    some = [f"{slot.key} {describe(slot.record)}" for slot in slots[:3]]
    return with_others(describe(slots[0].record), some + [""] * (len(slots) - len(some)), 3)
