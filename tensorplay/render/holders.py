"""Who keeps an object alive, in words: a table of paths, the counts as sums, and a line on the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tensorplay.layers import Held, Holder
from tensorplay.render.parts import Phrase, Table
from tensorplay.words import bytes_text, plural

__all__ = ["holders", "holders_summary", "how_text"]

_MOST_ROWS = 50
_HOW = {
    "reference": "reference",
    "base": "view of it",
    "storage": "over its storage",
    "grad": "gradient of",
    "variable": "accumulates into it",
}
_OBJECT = {"object": "its C++ object", "impl": "holds its TensorImpl", "storage": "storage object"}


def holders(helds: Iterable[Held]) -> Iterator[Table | Phrase]:
    """Answer the pieces for some objects."""
    for held in helds:
        nbytes = "" if held.nbytes is None else f"  {bytes_text(held.nbytes)}"
        yield Phrase(f"{held.name}  {held.description}{nbytes}", "strong")
        if held.cycle is not None:
            yield Phrase(f"  garbage that is not collected yet: {held.cycle}", "attention")
        if held.holders:
            rows = tuple((how_text(holder), holder.path) for holder in held.holders[:_MOST_ROWS])
            left = len(held.holders) - len(rows)
            rest = f"{plural(left, 'more holder')}: report.holders has all" if left else None
            yield Table(("held as", "by"), rows, rest=rest, first_width=24)
        else:
            yield Phrase("  nobody refers to it but the call that asks")
        for ledger in held.ledgers:
            yield Phrase(f"  {ledger.equation}", "attention" if ledger.unaccounted else "dim")


def how_text(holder: Holder) -> str:
    """Say what a holder is to the object."""
    word = _OBJECT[holder.of] if holder.how == "Python object" else _HOW.get(holder.how, holder.how)
    return word if holder.count == 1 else f"{word} ({holder.count} times)"


def holders_summary(helds: Iterable[Held]) -> Iterator[Phrase]:
    """Answer the one line that counts."""
    for held in helds:
        yield Phrase(f"{plural(len(held.holders), 'holder')}, ")
        unaccounted = sum(ledger.unaccounted for ledger in held.ledgers)
        if unaccounted:
            yield Phrase(f"{plural(unaccounted, 'C++-only reference')}", "attention")
        else:
            yield Phrase("every reference is accounted for", "good")
