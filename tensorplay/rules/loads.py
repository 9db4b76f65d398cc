"""Rules on a state dict beside the modules it is for: what loading says, and what it accepts without a word."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tensorplay.layers import WRAPPERS
from tensorplay.rules.registry import StateRule
from tensorplay.rules.state import MOST_NAMES
from tensorplay.words import bytes_text, describe, listed, plural, shape_text, some_of, with_others

if TYPE_CHECKING:
    from tensorplay.layers import Finding
    from tensorplay.loading import Loading, ModelState, Pair

__all__ = [
    "AmbiguousTie",
    "CheckpointAliases",
    "KeysOrShapes",
    "LoadWithoutEffect",
    "NonFiniteValues",
    "RequiresGradLost",
    "TypeNarrowed",
    "WastefulCheckpoint",
]

# Bits of the fraction and of the exponent; of integers without a sign bit and None.
_FLOATS = {
    "float64": (52, 11),
    "float32": (23, 8),
    "bfloat16": (7, 8),
    "float16": (10, 5),
    "float8_e5m2": (2, 5),
    "float8_e5m2fnuz": (2, 5),
    "float8_e4m3fn": (3, 4),
    "float8_e4m3fnuz": (3, 4),
    "float8_e8m0fnu": (0, 8),
}
_INTEGERS = {
    "bool": 1,
    "uint8": 8,
    "int8": 7,
    "int16": 15,
    "uint16": 16,
    "int32": 31,
    "uint32": 32,
    "int64": 63,
    "uint64": 64,
}
_WITHOUT_INFINITY = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz")
_COMPLEX = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


class KeysOrShapes(StateRule):
    """The state dict's keys or shapes are not the model's.

    ## What it checks

    The keys that load_state_dict() goes through, with each module's own tables: what the state dict lacks, what it has
    too much, shapes that differ, values that are no tensors, DTensors beside plain tensors, sparse or quantized ones
    beside dense ones. A prefix that all keys have (`module.` of DistributedDataParallel, `_orig_mod.` of torch.compile)
    is one finding; so is a state dict under a key of a larger checkpoint. A missing key whose tensor the state dict has
    under another name of a tie is an info. Keys below a module that is None are accepted by load_state_dict() without a
    word, and named here.

    ## Why it matters

    With `strict=True` loading raises, after it has copied all that fits: the model is neither as before nor loaded.
    With `strict=False` it says nothing, and what is missing keeps its random values.

    ## Known limits

    Modules with their own `_load_from_state_dict()`, or with a hook before loading, may rename keys, and a hook after
    loading may forgive them: what does not fit there is an info.

    ## Example

    ```python
    model = torch.nn.Linear(2, 2)
    checkpoint = torch.nn.DataParallel(torch.nn.Linear(2, 2)).state_dict()
    tp.validate_state_dict_load(model, checkpoint)
    ```

    ## Use instead

    ```python
    model = torch.nn.Linear(2, 2)
    checkpoint = torch.nn.DataParallel(torch.nn.Linear(2, 2)).state_dict()
    torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(checkpoint, "module.")
    tp.validate_state_dict_load(model, checkpoint)
    ```

    ## Fix safety

    Renaming keys changes no value. `strict=False` hides every other mismatch too.

    ## Sources

    torch/nn/modules/module.py (`_load_from_state_dict`), torch 2.13 and 2.14.
    """

    code = "TP501"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding a cause."""
        loading = state.loading
        if loading is None:
            return
        if loading.nesting and not loading.pairs:
            yield self._nested(loading, loading.nesting)
            return
        if loading.prefix is not None:
            yield self._prefixed(loading, *loading.prefix)
            return
        missing = [key for key in loading.missing if key not in loading.tied_to]
        if missing:
            yield self._missing(loading, missing)
        if loading.tied_to:
            yield self._tied(loading)
        accepted = loading.accepted
        unexpected = [key for key in loading.unexpected if key not in set(accepted)]
        if unexpected:
            yield self._unexpected(loading, unexpected)
        if accepted:
            yield self._accepted(loading, accepted)
        if loading.misshapen:
            yield self._misshapen(loading.misshapen)
        if loading.not_tensors:
            yield self._not_tensors(loading.not_tensors)
        mixed = [pair for pair in loading.mixed if not loading.assign or pair.slot.record.python.type == "DTensor"]
        for pairs in (
            [pair for pair in mixed if pair.slot.record.kind in WRAPPERS],
            [pair for pair in mixed if pair.slot.record.kind not in WRAPPERS],
        ):
            if pairs:
                yield self._mixed(loading, pairs)

    def _nested(self, loading: Loading, keys: Sequence[str]) -> Finding:
        key = keys[0]
        quoted = [repr(one) for one in keys]
        return self.finding(
            key,
            headline=f"the model's state dict is under the key {listed(quoted[:4])} of what was given"
            if len(keys) == 1
            else f"state dicts that could be the model's are under the keys {listed(quoted[:4])} of what was given",
            subject=f"keys {some_of([str(name) for name, _ in loading.items], 4)}",
            evidence={"nested_under": key, "matched": 0, "missing": loading.missing[:MOST_NAMES]},
            why="it is a checkpoint of more than the model: none of its own keys is a parameter's",
            fix=f"checkpoint[{key!r}]",
            source=_SOURCE,
        )

    def _prefixed(self, loading: Loading, whose: str, prefix: str) -> Finding:
        theirs = whose == "state dict"
        fix = (
            f"torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, {prefix!r})"
            if theirs and all(key.startswith(prefix) for key in loading.unexpected)
            else f"{{key.replace({prefix!r}, ''): value for key, value in state_dict.items()}}"
            if theirs
            else f"{{{prefix!r} + key: value for key, value in state_dict.items()}}, or load into the module below"
        )
        return self.finding(
            loading.unexpected[0],
            headline=f"the keys of the {whose} have {prefix!r} in them, those of the "
            f"{'model' if theirs else 'state dict'} do not",
            subject=f"{plural(len(loading.missing), 'key')} missing, {len(loading.unexpected)} unexpected",
            evidence={
                "prefix": prefix,
                "prefix_of": whose,
                "missing": loading.missing[:MOST_NAMES],
                "unexpected": loading.unexpected[:MOST_NAMES],
            },
            why="it was saved from the module around the one that is loaded, as DistributedDataParallel and "
            "torch.compile make one",
            fix=fix,
            source=_SOURCE,
        )

    def _missing(self, loading: Loading, missing: Sequence[str]) -> Finding:
        unsure = loading.is_decided_elsewhere(missing)
        return self.finding(
            missing[0],
            headline=f"{plural(len(missing), 'key')} of the model {'is' if len(missing) == 1 else 'are'} not in the "
            "state dict",
            subject=with_others(_of(loading, missing[0]), missing),
            evidence={"missing": list(missing[:MOST_NAMES]), "matched": len(loading.pairs), "strict": loading.strict},
            why=(
                "load_state_dict() raises for it, after it has copied what fits"
                if loading.strict
                else "with strict=False it is left as it is, without a word"
            )
            + ("; code of the model, a hook or a loading of its own, may fill it in or forgive it" if unsure else ""),
            fix="save the state dict from the same class of model, or initialise what is new and say strict=False",
            source=_SOURCE,
            severity="info" if unsure else None if loading.strict else "warning",
        )

    def _tied(self, loading: Loading) -> Finding:
        keys = list(loading.tied_to)
        return self.finding(
            keys[0],
            headline=f"{plural(len(keys), 'key')} not in the state dict, but under another name of the same tensor",
            subject=with_others(f"is {loading.tied_to[keys[0]]}", [f"{key} is {loading.tied_to[key]}" for key in keys]),
            evidence={"tied": loading.tied_to, "strict": loading.strict},
            why="the model has one tensor under both names, and safetensors keeps one of them; load_state_dict() "
            "raises for the other unless strict=False",
            fix="safe_load_state_dict(), which takes it as there; or strict=False",
            source=_SOURCE,
            severity="info",
        )

    def _unexpected(self, loading: Loading, unexpected: Sequence[str]) -> Finding:
        unsure = loading.is_decided_elsewhere(unexpected)
        return self.finding(
            unexpected[0],
            headline=f"{plural(len(unexpected), 'key')} of the state dict "
            f"{'is' if len(unexpected) == 1 else 'are'} not the model's",
            subject=with_others(_of(loading, unexpected[0]), unexpected),
            evidence={
                "unexpected": list(unexpected[:MOST_NAMES]),
                "matched": len(loading.pairs),
                "strict": loading.strict,
            },
            why="load_state_dict() raises for it, after it has copied what fits"
            if loading.strict
            else "with strict=False it is left out, without a word",
            fix="load into the class of model that it was saved from, or drop the keys",
            source=_SOURCE,
            severity=None if loading.strict and not unsure else "info",
        )

    def _accepted(self, loading: Loading, accepted: Sequence[str]) -> Finding:
        return self.finding(
            accepted[0],
            headline=f"{plural(len(accepted), 'key')} below a module that is None: load_state_dict() drops "
            f"{'it' if len(accepted) == 1 else 'them'} without a word",
            subject=with_others(_of(loading, accepted[0]), accepted),
            evidence={"accepted_unexpected": list(accepted[:MOST_NAMES])},
            why="strict loading asks whether the name is among the submodules, and not whether one is there",
            fix="build the model with that module, or drop the keys",
            source=_SOURCE,
            severity="warning",
        )

    def _misshapen(self, pairs: Sequence[Pair]) -> Finding:
        some = [
            f"{shape_text(pair.slot.record.impl.shape)} in the model, "
            f"{shape_text(pair.entry.record.impl.shape)} in the state dict"
            for pair in pairs[:3]
        ]
        some[1:] = [f"{pair.slot.key} {words}" for pair, words in zip(pairs[1:], some[1:], strict=False)]
        return self.finding(
            pairs[0].slot.key,
            headline=f"{plural(len(pairs), 'key')} of another shape than the model's",
            subject=with_others(some[0], some + [""] * (len(pairs) - len(some)), 3),
            evidence={
                "misshapen": [pair.slot.key for pair in pairs[:MOST_NAMES]],
                "model_shapes": [list(pair.slot.record.impl.shape or ()) for pair in pairs[:MOST_NAMES]],
                "state_dict_shapes": [list(pair.entry.record.impl.shape or ()) for pair in pairs[:MOST_NAMES]],
            },
            why="load_state_dict() raises for it, with strict=False too, after it has copied what fits",
            fix="build the model with the state dict's sizes, or drop the keys and initialise them",
            source=_SOURCE,
        )

    def _not_tensors(self, found: Sequence[tuple[str, str]]) -> Finding:
        return self.finding(
            found[0][0],
            headline=f"{plural(len(found), 'key')} whose value is no tensor",
            subject=with_others(f"of type {found[0][1]}", [f"{key} of type {kind}" for key, kind in found]),
            evidence={"not_tensors": dict(found[:MOST_NAMES])},
            why="load_state_dict() takes tensors",
            fix="torch.as_tensor(value)",
            source=_SOURCE,
        )

    def _mixed(self, loading: Loading, pairs: Sequence[Pair]) -> Finding:
        first = pairs[0]
        if not any(one.record.kind in WRAPPERS for one in first):
            return self._other_layouts(pairs)
        is_whole = first.entry.record.kind not in WRAPPERS  # the state dict's side; the model's is the opposite
        kind = (first.slot if is_whole else first.entry).record.python.type
        # FSDP2 puts whole parameters in for a forward, and its hook takes them out again before loading.
        unsure = not is_whole and all(loading.loads_itself(pair.slot.key) for pair in pairs)
        why = "copying one into the other raises"
        if unsure:
            why += "; a hook before loading may put the model's own back first, as FSDP2's does after a forward"
        elif is_whole and loading.assign:
            why = (
                "assign=True puts the whole tensor in its place: FSDP2 raises then, others keep all of it on each rank"
            )
        if kind != "DTensor":
            fix = f"convert the state dict, or the model, so that both have {kind}, or neither"
        elif is_whole:
            fix = (
                "torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
                "options=StateDictOptions(full_state_dict=True))"
            )
        elif unsure:
            fix = "model.reshard() first, where it is FSDP2's"
        else:
            fix = "on each rank value.full_tensor() of each of them; or shard the model first"
        return self.finding(
            first.slot.key,
            headline=f"{plural(len(pairs), 'key')} that the {'model' if is_whole else 'state dict'} has as {kind}, and "
            f"the {'state dict' if is_whole else 'model'} as a plain tensor",
            subject=with_others(describe(first.slot.record), [pair.slot.key for pair in pairs]),
            evidence={
                "mixed": [pair.slot.key for pair in pairs[:MOST_NAMES]],
                "types": [one.record.python.type for one in first],
            },
            why=why,
            fix=fix,
            source=_SOURCE,
            severity="info" if unsure else None,
        )

    def _other_layouts(self, pairs: Sequence[Pair]) -> Finding:
        first = pairs[0]
        kinds = [one.record.kind for one in first]
        return self.finding(
            first.slot.key,
            headline=f"{plural(len(pairs), 'key')} that the model has as {kinds[0]}, and the state dict as {kinds[1]}",
            subject=with_others(describe(first.slot.record), [pair.slot.key for pair in pairs]),
            evidence={"mixed": [pair.slot.key for pair in pairs[:MOST_NAMES]], "types": kinds},
            why="copy_() refuses to copy between such tensors",
            fix="convert the state dict's tensors first: to_dense(), to_sparse(), dequantize()",
            source=_SOURCE,
        )


class TypeNarrowed(StateRule):
    """Loading drops bits: the model's type holds less than the state dict's.

    ## What it checks

    The data types of each key: floats with fewer bits of fraction or exponent, complex numbers into real ones, floats
    into integers, integers into fewer bits; and integers into floats, which is how quantised weights look without their
    scale. With `assign=True` no value changes, and the model takes the state dict's type, which is an info.

    ## Why it matters

    load_state_dict() copies by `copy_`, which converts without a word: `float64` rounds to `float32`, `float32` above
    65504 becomes infinity in `float16`, and `int8` becomes whole numbers.

    ## Known limits

    Values are not looked at: they may all fit. A model that was made narrower on purpose, by `model.half()`, before a
    wider checkpoint is loaded, looks alike.

    ## Example

    ```python
    model = torch.nn.Linear(2, 2)
    checkpoint = torch.nn.Linear(2, 2, dtype=torch.float64).state_dict()
    tp.validate_state_dict_load(model, checkpoint)
    ```

    ## Use instead

    ```python
    model = torch.nn.Linear(2, 2, dtype=torch.float64)
    checkpoint = torch.nn.Linear(2, 2, dtype=torch.float64).state_dict()
    tp.validate_state_dict_load(model, checkpoint)
    ```

    ## Fix safety

    `model.to(dtype)` before loading keeps all bits, and takes the memory of the wider type.

    ## Sources

    torch/nn/modules/module.py (`_load_from_state_dict`: `param.copy_`), torch 2.13 and 2.14.
    """

    code = "TP502"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for all keys that go from one type to another."""
        loading = state.loading
        if loading is None:
            return
        by_types: dict[tuple[str, str], list[Pair]] = {}
        for pair in loading.retyped:
            have, want = pair.entry.record.impl.dtype, pair.slot.record.impl.dtype
            by_types.setdefault((have, want), []).append(pair)
        for (have, want), pairs in by_types.items():
            lost = _lost(have, want)
            if lost is not None or loading.assign:
                yield self._explained(loading, have, want, pairs, lost)

    def _explained(self, loading: Loading, have: str, want: str, pairs: Sequence[Pair], lost: str | None) -> Finding:
        names = [pair.slot.key for pair in pairs]
        elements = sum(pair.slot.record.impl.numel for pair in pairs if isinstance(pair.slot.record.impl.numel, int))
        assigned = loading.assign
        raises = assigned and have in _INTEGERS and any(pair.slot.record.impl.requires_grad for pair in pairs)
        return self.finding(
            names[0],
            headline=f"{plural(len(names), 'key')} of {have} in the state dict, {want} in the model: "
            + (
                "assign=True raises, only floats can require grad"
                if raises
                else "assign=True makes the model's type the state dict's"
                if assigned
                else str(lost)
            ),
            subject=with_others(plural(elements, "element"), names),
            evidence={
                "state_dict_dtype": have,
                "model_dtype": want,
                "narrowed": [] if assigned else names[:MOST_NAMES],
                "tensors": names[:MOST_NAMES],
                "elements": elements,
            },
            why="assign=True puts the state dict's own tensors into the model"
            if assigned
            else "load_state_dict() copies with copy_(), which converts without a word",
            fix=f"model.to(torch.{want}) after loading, if that type is wanted"
            if assigned
            else _FIX_OF_INTEGERS
            if have in _INTEGERS and want in _FLOATS
            else f"model.to(torch.{have}) before loading, or convert the state dict yourself where less is wanted",
            source="read: c10/core/TensorImpl.h data_type_ of both sides; no value",
            severity="error" if raises else "info" if assigned else None,
        )


_FIX_OF_INTEGERS = "dequantise first: multiply by the scale that was saved with it"


def _lost(have: str, want: str) -> str | None:
    """Say what a conversion drops; None where each value has its like."""
    if have in _COMPLEX:
        if want not in _COMPLEX:
            return "the imaginary part is dropped"
        have, want = _COMPLEX[have], _COMPLEX[want]
    elif want in _COMPLEX:
        want = _COMPLEX[want]
    if have in _FLOATS and want in _FLOATS:
        fraction, exponent = (a - b for a, b in zip(_FLOATS[have], _FLOATS[want], strict=True))
        words = []
        if fraction > 0:
            words.append(f"{plural(fraction, 'bit')} of the fraction dropped")
        if exponent > 0:
            words.append(f"what is too large becomes {'NaN' if want in _WITHOUT_INFINITY else 'infinity'}")
        return ", ".join(words) or None
    if want == "bool":
        if have == "uint8":
            return None  # as masks were once
        return "all but zero becomes True"
    if have in _FLOATS and want in _INTEGERS:
        return "cut to whole numbers"
    if have in _INTEGERS and want in _FLOATS:
        return (
            None
            if have not in ("int8", "uint8")
            else "whole numbers in the place of floats, as quantised weights without a scale"
        )
    if have in _INTEGERS and want in _INTEGERS and _INTEGERS[have] > _INTEGERS[want]:
        return "what is too large wraps around"
    if have in _INTEGERS and want.startswith("uint") and not have.startswith(("uint", "bool")):
        return "what is negative wraps around"
    return None


class RequiresGradLost(StateRule):
    """A parameter no longer requires grad, or cannot be trained, after it was replaced.

    ## What it checks

    Where the modules were seen before (`materialize_audit()`, `safe_load_state_dict()`): parameters that required grad
    then, and do not now, under the same key. Beside a state dict: parameters that do not require grad where the state
    dict's do, as those of `state_dict(keep_vars=True)`; and parameters that require grad and are inference tensors,
    which backward refuses.

    ## Why it matters

    Such a parameter is left out of backward without a word: it keeps its values, and the loss goes down more slowly.

    ## Known limits

    What is frozen on purpose between the two moments looks alike.

    ## Example

    ```python
    model = torch.nn.Linear(2, 2)
    with tp.materialize_audit(model) as audit:
        model.weight = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    audit
    ```

    ## Use instead

    ```python
    model = torch.nn.Linear(2, 2)
    with tp.materialize_audit(model) as audit:
        model.weight = torch.nn.Parameter(torch.ones(2, 2), requires_grad=model.weight.requires_grad)
    audit
    ```

    ## Fix safety

    `requires_grad_(True)` changes no value; an optimizer has to be given the parameter.

    ## Sources

    torch/csrc/autograd/variable.h (`requires_grad_`), torch/nn/modules/module.py (`_load_from_state_dict`), torch 2.13
    and 2.14.
    """

    code = "TP503"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for all parameters that were frozen, and one for inference tensors."""
        loading, before = state.loading, state.before
        frozen = []
        if before is not None:
            frozen = [
                slot.key
                for slot in state.slots
                if slot.is_parameter and before.requires_grad.get(slot.key) and not slot.record.impl.requires_grad
            ]
        elif loading is not None:
            frozen = loading.frozen
        if frozen:
            whose = "it did before" if before is not None else "the state dict's does"
            yield self._explained(
                frozen, f"{plural(len(frozen), 'parameter')} no longer requiring grad: {whose}", "requires_grad_(True)"
            )
        if loading is not None and loading.assign and loading.refused:
            yield self._explained(
                loading.refused,
                f"{plural(len(loading.refused), 'key')} of the state dict made in inference mode: assign=True raises "
                "for what requires grad",
                "clone the state dict's tensors outside torch.inference_mode()",
            )
        looked_at = state.inference if before is not None or loading is not None else []
        trained = [slot.key for slot in looked_at if slot.is_parameter and slot.record.impl.requires_grad]
        if trained:
            yield self._explained(
                trained,
                f"{plural(len(trained), 'parameter')} that should be trained, made in inference mode: backward refuses "
                f"{'it' if len(trained) == 1 else 'them'}",
                "load outside torch.inference_mode(), or assign clones made outside it",
            )

    def _explained(self, names: Sequence[str], headline: str, fix: str) -> Finding:
        return self.finding(
            names[0],
            headline=headline,
            subject=with_others("a parameter", names),
            evidence={"requires_grad_lost": list(names[:MOST_NAMES])},
            why="backward leaves it out, or raises, and its optimizer never moves it",
            fix=fix,
            source="read: AutogradMeta::requires_grad_, the key set's inference bit",
        )


class CheckpointAliases(StateRule):
    """The state dict's tensors lie over the model's own memory.

    ## What it checks

    Whether what a key has in the state dict, and in the model, are the same bytes: after `assign=True`, or where the
    state dict is the model's own. That is an info. It is a warning where bytes are shared only in part, and where the
    value for one key lies over the parameter of another that is loaded before it: copying then reads what it has
    overwritten.

    ## Why it matters

    Training changes the checkpoint that is kept in a variable, and whoever changes the checkpoint changes the model.
    Exchanging two parameters through `state_dict()` gives both the same values.

    ## Known limits

    Memory of other devices is compared by its storages alone.

    ## Example

    ```python
    model = torch.nn.Linear(2, 2)
    model.load_state_dict(checkpoint := torch.nn.Linear(2, 2).state_dict(), assign=True)
    tp.validate_state_dict_load(model, checkpoint)
    ```

    ## Use instead

    ```python
    model = torch.nn.Linear(2, 2)
    model.load_state_dict(checkpoint := torch.nn.Linear(2, 2).state_dict())
    tp.validate_state_dict_load(model, checkpoint)
    ```

    ## Fix safety

    `copy.deepcopy(state_dict)` takes the memory once more.

    ## Sources

    torch/nn/modules/module.py (`_load_from_state_dict`: `setattr`), c10/core/StorageImpl.h (`data_ptr_`), torch 2.13
    and 2.14.
    """

    code = "TP504"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for whole aliases, one for parts, and one for those of another key."""
        loading = state.loading
        if loading is None:
            return
        whole = [pair for pair, how in loading.aliases if how == "identical"]
        parts = [] if loading.assign else [pair for pair, how in loading.aliases if how != "identical"]
        crossed = [] if loading.assign else loading.strangers_sharing
        if whole:
            yield self._explained(
                [pair.slot.key for pair in whole],
                headline=f"{plural(len(whole), 'key')} of the state dict {'is' if len(whole) == 1 else 'are'} the "
                "model's own memory",
                nbytes=sum(pair.slot.nbytes for pair in whole),
                why="assign=True made them the model's, or state_dict() answered the model's own: a step of the "
                "optimizer changes both",
                fix="copy.deepcopy(state_dict) where it is to be kept",
                is_info=True,
            )
        if parts:
            yield self._explained(
                [pair.slot.key for pair in parts],
                headline=f"{plural(len(parts), 'key')} of the state dict "
                f"{'shares' if len(parts) == 1 else 'share'} some bytes with the parameter that is loaded",
                nbytes=sum(pair.slot.nbytes for pair in parts),
                why="copying reads what it has just written, or PyTorch refuses to copy between such tensors",
                fix="clone the state dict's tensors before loading",
            )
        if crossed:
            yield self._explained(
                [key for key, _ in crossed],
                headline=f"{crossed[0][0]} of the state dict lies over the model's {crossed[0][1]}"
                + (f", and {plural(len(crossed) - 1, 'more key')} over others" if len(crossed) > 1 else ""),
                nbytes=sum(
                    one.impl.numel * one.impl.itemsize for one in (loading.by_key[key].record for key, _ in crossed)
                ),
                why="loading overwrites one parameter and then reads it for the other: both get the same values",
                fix="copy.deepcopy(state_dict) before it is changed and loaded",
                over=dict(crossed[:MOST_NAMES]),
            )

    def _explained(
        self,
        names: Sequence[str],
        *,
        headline: str,
        nbytes: int,
        why: str,
        fix: str,
        over: dict[str, str] | None = None,
        is_info: bool = False,
    ) -> Finding:
        return self.finding(
            names[0],
            headline=headline,
            subject=with_others(bytes_text(nbytes), names),
            evidence={"aliases": list(names[:MOST_NAMES]), "aliased_bytes": nbytes, "over": over or {}},
            why=why,
            fix=fix,
            source="read: c10/core/StorageImpl.h data_ptr_; geometry of both sides compared exactly",
            severity="info" if is_info else "warning",
        )


class AmbiguousTie(StateRule):
    """The state dict has different values for one parameter: the last one written wins.

    ## What it checks

    Parameters that the model has under several names, where the state dict has several tensors for them: their bytes
    are compared, and equal ones are no finding. Parameters that overlap in part, each with a tensor of its own, are
    named too.

    ## Why it matters

    load_state_dict() copies each in turn into the same memory. Which values remain depends on the order of the modules,
    and the others are lost without a word.

    ## Known limits

    Tensors on other devices are not compared, and then told as different for all that is known.

    ## Example

    ```python
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    checkpoint = model.state_dict()
    model[1].weight = model[0].weight
    tp.validate_state_dict_load(model, {key: value.clone() for key, value in checkpoint.items()})
    ```

    ## Use instead

    ```python
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    tp.validate_state_dict_load(model, {key: value.clone() for key, value in model.state_dict().items()})
    ```

    ## Fix safety

    Dropping one of the keys decides which values are loaded: look which model the state dict is of.

    ## Sources

    torch/nn/modules/module.py (`_load_from_state_dict`: `param.copy_`), torch 2.13 and 2.14.
    """

    code = "TP505"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for all ties whose values differ, and one for parts that overlap."""
        loading = state.loading
        if loading is None:
            return
        theirs = {key: number for number, tie in enumerate(loading.ties) for key in tie.keys}
        found: list[tuple[list[str], bool]] = []
        for keys in itertools.chain.from_iterable(map(loading.written_together, state.ties)):
            # One of each of the state dict's own ties.
            apart = list({theirs.get(key, key): key for key in keys}.values())
            if len(apart) < 2:
                continue
            same = [loading.same_values(apart[0], other) for other in apart[1:]]
            if False in same or None in same:
                found.append((keys, False in same))
        if found:
            yield self._explained(loading, found)
        if loading.overlapping and not loading.assign:
            yield self._overlapping(loading)

    def _explained(self, loading: Loading, found: Sequence[tuple[list[str], bool]]) -> Finding:
        keys, is_known = found[0]
        winner = [key for key in loading.order if key in set(keys)][-1]
        how = "different values" if is_known else "values that could not be compared"
        more = f", and {plural(len(found) - 1, 'more tie')}" if len(found) > 1 else ""
        return self.finding(
            keys[0],
            headline=f"{listed(keys[:4])} are one tensor, for which the state dict has {how}{more}: {winner} wins",
            subject=f"{describe(loading.by_key[winner].record)}, written {len(keys)} times",
            evidence={
                "names": [key for names, _ in found for key in names][:MOST_NAMES],
                "last_write": winner,
                "compared": is_known,
            },
            why="load_state_dict() copies each in turn into the same memory",
            fix="drop the key whose values are not wanted, or untie the model before loading",
            source="read: storages and geometry of the model's side; bytes of the state dict's side",
        )

    def _overlapping(self, loading: Loading) -> Finding:
        first, second, nbytes = loading.overlapping[0]
        return self.finding(
            first,
            headline=f"{first} and {second} have {bytes_text(nbytes)} in common: the later one overwrites the other's",
            subject=plural(len(loading.overlapping), "pair") + " of keys",
            evidence={
                "names": [name for one in loading.overlapping[:MOST_NAMES] for name in one[:2]],
                "overlapping_bytes": nbytes,
            },
            why="they are views of one memory, and load_state_dict() copies each in turn",
            fix="give each its own memory: module.weight = nn.Parameter(module.weight.detach().clone())",
            source="read: geometry of both, compared exactly",
        )


class WastefulCheckpoint(StateRule):
    """A small tensor of the state dict keeps a large storage.

    ## What it checks

    The storages of the state dict's tensors: bytes that no tensor of it reaches, if they are half of the storage or
    more, and 4 KiB at least.

    ## Why it matters

    torch.save() writes whole storages, and `assign=True` keeps them for as long as the model lives.

    ## Known limits

    Tensors outside the state dict that reach the rest are not looked for.

    ## Example

    ```python
    model = torch.nn.Linear(4, 4, bias=False)
    tp.validate_state_dict_load(model, {"weight": torch.zeros(4000)[:16].view(4, 4)})
    ```

    ## Use instead

    ```python
    model = torch.nn.Linear(4, 4, bias=False)
    tp.validate_state_dict_load(model, {"weight": torch.zeros(4000)[:16].view(4, 4).clone()})
    ```

    ## Fix safety

    A clone has memory of its own: what was one memory under two names is two then.

    ## Sources

    c10/core/StorageImpl.h (`size_bytes_`), torch/serialization.py, torch 2.13 and 2.14.
    """

    code = "TP506"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for all storages."""
        loading = state.loading
        if loading is None or not loading.wasteful:
            return
        found = loading.wasteful
        unseen = sum(one[2] for one in found)
        entries, nbytes, _ = max(found, key=lambda one: one[2])
        names = [entry.key for members, _, _ in found for entry in members]
        used = sum(entry.record.impl.numel * entry.record.impl.itemsize for entry in entries)
        yield self.finding(
            entries[0].key,
            headline=f"{listed([entry.key for entry in entries[:3]])} {'is' if len(entries) == 1 else 'are'} "
            f"{bytes_text(used)} of a storage of {bytes_text(nbytes)}"
            + (f", and {plural(len(found) - 1, 'more storage')} are kept for little" if len(found) > 1 else ""),
            subject=with_others(f"{bytes_text(unseen)} that no key reaches", names),
            evidence={
                "tensors": names[:MOST_NAMES],
                "used_bytes": used,
                "storage_nbytes": nbytes,
                "wasted_bytes": unseen,
            },
            why="a tensor keeps the whole storage that it is a view of: in memory, and in the file that torch.save "
            "writes" + (", and with assign=True in the model" if loading.assign else ""),
            fix="{key: value.clone() for key, value in state_dict.items()} before it is saved or assigned",
            source="read: c10/core/StorageImpl.h size_bytes_; geometry of all tensors over it",
        )


class LoadWithoutEffect(StateRule):
    """Loading has no effect: the model is on meta, or the state dict is.

    ## What it checks

    Keys that are on meta in the model and have values in the state dict, where `assign=True` is not said: `copy_` into
    a meta tensor does nothing. And keys that are on meta in the state dict: they have no values, which `assign=True`
    takes without a word. What an offload hook has the value of is passed over.

    ## Why it matters

    load_state_dict() answers that all keys matched, and warns once for each key; nothing was loaded.

    ## Known limits

    Before the load it cannot be known how the state dict will be loaded: say `assign=True` here too.

    ## Example

    ```python
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    checkpoint = torch.nn.Linear(2, 2).state_dict()
    tp.validate_state_dict_load(model, checkpoint)
    ```

    ## Use instead

    ```python
    with torch.device("meta"):
        model = torch.nn.Linear(2, 2)
    checkpoint = torch.nn.Linear(2, 2).state_dict()
    model.to_empty(device="cpu").load_state_dict(checkpoint)
    tp.validate_state_dict_load(model, checkpoint)
    ```

    ## Fix safety

    With `assign=True` the model and the state dict share memory, and an optimizer has to be built afterwards.

    ## Sources

    torch/nn/modules/module.py (`_load_from_state_dict`), torch 2.13 and 2.14.
    """

    code = "TP507"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for each side that is on meta."""
        loading = state.loading
        if loading is None:
            return
        if loading.without_values:
            yield self._empty(loading, loading.without_values)
        if loading.assign or loading.ahead:
            return
        lost = [pair for pair in loading.without_memory if not state.has_value(pair.slot)]
        if lost:
            yield self._lost(loading, lost)

    def _lost(self, loading: Loading, pairs: Sequence[Pair]) -> Finding:
        names = [pair.slot.key for pair in pairs]
        return self.finding(
            names[0],
            headline=f"loading has no effect on {some_of(names, 3)}: {len(loading.pairs)} of {len(loading.slots)} keys "
            f"match, {len(names)} on meta",
            subject=f"{plural(len(names), 'tensor')} of {bytes_text(sum(pair.slot.nbytes for pair in pairs))} without "
            "values",
            evidence={
                "meta_after": names[:MOST_NAMES],
                "matched": len(loading.pairs),
                "keys": len(loading.slots),
            },
            why="copy_() into a meta tensor does nothing; load_state_dict() warns, and answers that all keys matched",
            fix="load_state_dict(state_dict, assign=True), or model.to_empty(device=...) first",
            source="read: c10/core/TensorImpl.h device_opt_ of both sides",
        )

    def _empty(self, loading: Loading, pairs: Sequence[Pair]) -> Finding:
        names = [pair.slot.key for pair in pairs]
        return self.finding(
            names[0],
            headline=f"{plural(len(names), 'key')} of the state dict on meta: it has no values for "
            f"{'it' if len(names) == 1 else 'them'}",
            subject=with_others(_of(loading, names[0]), names),
            evidence={"meta_in_state_dict": names[:MOST_NAMES], "keys": len(loading.slots)},
            why="it was taken from a model that was built on meta, or that is offloaded; copying from it raises, and "
            "assign=True takes it without a word",
            fix="take the state dict of the model with values; of an offloaded one, by accelerate's get_state_dict()",
            source="read: c10/core/TensorImpl.h device_opt_ of both sides",
        )


class NonFiniteValues(StateRule):
    """The state dict has values that are NaN or infinite.

    ## What it checks

    Every element of every floating tensor of the state dict, where `values=True` asked for it: the bytes are read in
    pieces, natively, and nothing is kept. Files that are mapped are read so that one which is cut meanwhile is told.

    ## Why it matters

    One NaN spreads through every layer after it.

    ## Known limits

    Tensors on other devices, sparse and quantized ones, DTensors and other wrappers are not read.

    ## Example

    ```python
    model = torch.nn.Linear(2, 2, bias=False)
    tp.validate_state_dict_load(model, {"weight": torch.tensor([[1.0, float("nan")], [0.0, 1.0]])}, values=True)
    ```

    ## Use instead

    ```python
    model = torch.nn.Linear(2, 2, bias=False)
    tp.validate_state_dict_load(model, {"weight": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}, values=True)
    ```

    ## Fix safety

    `nan_to_num_()` hides where they came from: take an earlier checkpoint.

    ## Sources

    IEEE 754; torch/headeronly/util/BFloat16.h, Float8_e5m2.h, torch 2.13 and 2.14.
    """

    code = "TP508"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for all keys."""
        loading = state.loading
        if loading is None or not loading.nonfinite:
            return
        found = loading.nonfinite
        names = [one.key for one in found]
        nans, infinities = sum(one.nans for one in found), sum(one.infinities for one in found)
        some = [f"{one.nans} NaN and {one.infinities} infinite of {one.elements}" for one in found[:3]]
        some[1:] = [f"{one.key} {words}" for one, words in zip(found[1:], some[1:], strict=False)]
        yield self.finding(
            names[0],
            headline=f"{plural(len(names), 'key')} with values that are no numbers: {nans} NaN, {infinities} infinite",
            subject=with_others(some[0], some + [""] * (len(found) - len(some)), 3),
            evidence={
                "nonfinite": names[:MOST_NAMES],
                "nan": nans,
                "infinite": infinities,
            },
            why="the run that saved it had diverged, or a type was too narrow for the values",
            fix="take an earlier checkpoint; where a narrower type was the cause, save in a wider one",
            source="read: every element of the state dict's floating tensors",
        )


def _of(loading: Loading, key: str) -> str:
    """Say what has a key: the state dict's tensor, or else the model's."""
    known = loading.by_key.get(key) or next((slot for slot in loading.modules.slots if slot.key == key), None)
    return "no tensor" if known is None else describe(known.record)


_SOURCE = "walked: the modules' _parameters, _buffers and _modules, as load_state_dict() does; compared by key"
