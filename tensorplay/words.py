"""Words for sizes, counts and tensors, the same in every output."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = [
    "UNSEEN",
    "bytes_text",
    "describe",
    "device_type",
    "is_state_name",
    "listed",
    "needs_ascii",
    "place_pattern",
    "plural",
    "same_device",
    "shape_text",
    "some_of",
    "time_text",
    "visible",
    "with_others",
]

UNSEEN = "[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
"""Matches the characters that are obeyed, or not allowed, where they should be shown: names may hold anything."""
_UNSEEN = re.compile(UNSEEN)


_INDEX = re.compile(r"\[[^\]]*\]|\.\d+\b|\{\d+\}")


def place_pattern(name: str) -> str:
    """Answer a tensor's name without indices and keys: the same for all that one line of code put in one place."""
    return _INDEX.sub("[]", name)


def is_state_name(name: str) -> bool:
    """Tell whether a path leads into a dict under the name of a parameter, as "layer.weight"."""
    return name.endswith("']") and "." in name.rpartition("['")[2]


def visible(text: str) -> str:
    """Write control characters, bidirectional overrides and lone surrogates out as escapes."""
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def needs_ascii(stream: object) -> bool:
    """Tell whether a stream's encoding lacks the characters that pictures are drawn with."""
    encoding = getattr(stream, "encoding", None)
    return isinstance(encoding, str) and bool(encoding) and not encoding.lower().startswith("utf")


def bytes_text(count: int | str | None) -> str:
    """Answer a byte count with a unit: 40 B, 1.5 KiB, 400.0 MiB."""
    if not isinstance(count, int):
        return "an unknown number of bytes" if count is None else f"{count} B"
    size = float(count)
    if abs(size) < 1024:
        return f"{count} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.1f} {unit}"
    raise AssertionError


def plural(count: int, noun: str) -> str:
    """Answer the count and its noun: 1 tensor, 3 tensors."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(words: list[str]) -> str:
    """Answer words as a sentence lists them: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def some_of(names: Sequence[str], most: int = 4) -> str:
    """Answer the first few names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def with_others(first: str, names: Sequence[str], most: int = 4) -> str:
    """Answer what is to be said of the first of some names, and the others after it."""
    return f"{first}, and {some_of(names[1:], most - 1)}" if len(names) > 1 else first


def device_type(device: str) -> str:
    """Answer a device without its number."""
    return device.partition(":")[0]


def same_device(one: str, other: str) -> bool:
    """Tell whether two names are of one device; one without a number may be any of its type."""
    return one == other or (device_type(one) == device_type(other) and (":" not in one or ":" not in other))


def time_text(seconds: float) -> str:
    """Answer a span of time in the unit that fits: 1.5 ms, 20 us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def shape_text(shape: tuple[int | str, ...] | None) -> str:
    """Answer a shape in brackets: [4, 6], [s0, 6]; [?] where the kind has none."""
    return "[?]" if shape is None else f"[{', '.join(map(str, shape))}]"


def describe(record: Any) -> str:
    """Answer a tensor's type and shape: float32[4, 6]."""
    return f"{record.impl.dtype}{shape_text(record.impl.shape)}"
