"""A view chain in words: its title, a table of base, steps and tensor, and what else there is to say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensorplay.layers import ViewChain, ViewStep
from tensorplay.render.parts import Phrase, Table
from tensorplay.words import plural, shape_text

__all__ = ["BEGINS", "chain_notes", "chain_table", "chain_title", "step_text"]

_FOREVER = 2**63 - 1
BEGINS = {
    "base": "base",
    "alias": "alias of",
    "storage": "from",
    "itself": "no view",
}


def step_text(step: ViewStep) -> str:
    """Answer a step as it would be called: ``narrow(dim=0, start=2, length=3)``."""
    args = ", ".join(
        f"{name}={_value(value)}"
        for name, value in step.args.items()
        if not (step.op == "slice" and (name, value) in (("end", _FOREVER), ("step", 1)))
    )
    taken = "" if step.output is None else f"[{step.output}]"
    return f"{step.op}({args}){taken}"


def _value(value: Any) -> str:
    return f"({', '.join(map(str, value))}{',' if len(value) == 1 else ''})" if isinstance(value, list) else str(value)


def chain_title(chain: ViewChain) -> Phrase:
    """Answer one line on the whole: how it is known, and how many steps."""
    if chain.source == "unknown":
        return Phrase(f"view chain of {chain.name}: not known")
    if chain.begins == "itself":
        return Phrase(f"view chain of {chain.name}: it is no view")
    steps = plural(len(chain.steps), "step") if chain.steps else "the same geometry"
    return Phrase(f"view chain of {chain.name}: {steps}, {chain.source}", "strong")


def chain_table(chain: ViewChain) -> Table | None:
    """Answer base, steps and tensor, one a row; None where nothing is known."""
    if chain.source == "unknown":
        return None
    rows = [
        (
            f"{BEGINS[chain.begins]} {chain.base}" if chain.begins != "itself" else chain.name,
            f"{chain.dtype}{shape_text(chain.shape)}",
            shape_text(chain.stride),
            str(chain.storage_offset),
            "",
        )
    ]
    for step in chain.steps:
        tensor = f"{step.dtype}{shape_text(step.shape)}"
        rows.append((f"  {step_text(step)}", tensor, shape_text(step.stride), str(step.storage_offset), step.source))
    if chain.steps:
        rows[-1] = (f"{rows[-1][0]} = {chain.name}", *rows[-1][1:])
    return Table(("step", "tensor", "stride", "offset", "known by"), tuple(rows), frozenset({"offset"}))


def chain_notes(chain: ViewChain) -> Iterator[Phrase]:
    """Answer what else there is to say."""
    if chain.note:
        yield Phrase(chain.note, "dim")
    if chain.plainer:
        calls = ", ".join(map(step_text, chain.plainer))
        yield Phrase(f"the same in {len(chain.plainer)} plainer steps: {calls}", "dim")
    for alias in chain.aliases:
        counter = "one version counter" if alias.shares_version else "a version counter of its own"
        yield Phrase(f"alias: {alias.name} lies over the same storage, no view of it; {counter}", "dim")
