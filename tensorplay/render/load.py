"""A state dict beside a model in words: keys, types, devices, what loading wrote, and a line on the whole."""

from __future__ import annotations

from collections.abc import Iterator

from tensorplay.layers import LoadSummary
from tensorplay.render.parts import Phrase, Table
from tensorplay.words import bytes_text, plural, some_of

__all__ = ["load", "load_summary"]

_MOST_NAMES = 4


def load(found: LoadSummary) -> Iterator[Table | Phrase]:
    """Answer the pieces: one fact a row."""
    rows = [("tensors", f"{found.keys} persistent, {len(found.not_persistent)} not: {bytes_text(found.model_nbytes)}")]
    if found.state_dict:
        rows.append(("state dict", f"{found.state_dict}: {bytes_text(found.state_dict_nbytes)}"))
        rows.append(("matched", f"{found.matched} of {plural(found.keys, 'key')}"))
    for heading, names in (("missing", found.missing), ("unexpected", found.unexpected)):
        if names:
            rows.append((heading, some_of(names, _MOST_NAMES)))
    for heading, counts in (("types", found.dtypes), ("devices", found.devices), ("watched", found.seen)):
        if counts:
            rows.append((heading, ", ".join(f"{count} {name}" for name, count in counts.items())))
    if found.on_meta:
        rows.append(("on meta", plural(found.on_meta, "tensor")))
    if found.not_persistent:
        rows.append(("in no state dict", some_of(found.not_persistent, _MOST_NAMES)))
    if found.loaded is not None:
        rows.append(("written", _written(found)))
    if found.extra_nbytes is not None:
        rows.append(("memory", f"{bytes_text(found.extra_nbytes)} beside the model and the state dict, at the most"))
    yield Table(("what", "how much"), tuple(rows), first_width=16)
    if found.own_loading:
        yield Phrase(f"load in a way of their own, which may rename keys: {some_of(found.own_loading, 3)}", "dim")


def _written(found: LoadSummary) -> str:
    words = []
    if found.versions:
        steps = sorted({move.after - move.before for move in found.versions})
        by = f"{steps[0]}" if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
        words.append(f"{plural(len(found.versions), 'tensor')} in place, versions moved by {by}")
    if found.replaced:
        words.append(f"{plural(len(found.replaced), 'key')} with a new tensor")
    return ", ".join(words) or "nothing"


def load_summary(found: LoadSummary) -> Iterator[Phrase]:
    """Answer the one line that counts."""
    if found.state_dict:
        loaded = "loaded, " if found.loaded else "not loaded, " if found.loaded is False else ""
        yield Phrase(f"{loaded}{found.matched} of {plural(found.keys, 'key')} matched")
    else:
        yield Phrase(plural(found.keys + len(found.not_persistent), "registered tensor"))
