"""Print which medians changed between two files of figures, beyond their spread.

    python benchmarks/compare.py benchmarks/baseline.json new.json

A time has changed when the quartiles of the two do not overlap and the medians differ by more than --least; a count
when it differs at all. Always ends with 0, unless a file cannot be read: figures inform, they do not gate.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import quantity

Key = tuple[str, str]
FIXED = ("tensorplay", "torch", "python", "cpu", "cores")


def rows_of(document: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    return {(name, row["name"]): row for name, topic in document["topics"].items() for row in topic["rows"]}


def has_changed(old: Mapping[str, Any], new: Mapping[str, Any], least: float) -> bool:
    if old.get("exact"):
        return old["median"] != new["median"]
    apart = new["q1"] > old["q3"] or new["q3"] < old["q1"]
    return apart and abs(new["median"] - old["median"]) > least * abs(old["median"])


def changes(old: Mapping[Key, Any], new: Mapping[Key, Any], least: float) -> Iterator[str]:
    for key in sorted(old.keys() & new.keys()):
        before, after = old[key], new[key]
        if has_changed(before, after, least):
            unit = before["unit"]
            times = f"{after['median'] / before['median']:.2f} x" if before["median"] else "from none"
            yield (
                f"{key[0]:10} {key[1]:52} {quantity(before['median'], unit):>9} -> "
                f"{quantity(after['median'], unit):>9}  {times}"
            )


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Say where the two do not speak of the same machine and versions."""
    for name in sorted(old["topics"].keys() & new["topics"].keys()):
        before, after = old["topics"][name]["header"], new["topics"][name]["header"]
        for field in FIXED:
            if before[field] != after[field]:
                yield f"{name}: {field} {before[field]} -> {after[field]}"
        speed = after["yardstick_ns"] / before["yardstick_ns"]
        if not 0.87 < speed < 1.15:
            yield f"{name}: the yardstick took {speed:.2f} x as long: another machine, or one with busier neighbours"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("baseline", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument(
        "--least", type=float, default=0.1, help="smallest change of a median that counts (default 0.1)"
    )
    arguments = parser.parse_args()
    try:
        old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (arguments.baseline, arguments.new))
        before, after = rows_of(old), rows_of(new)
    except (OSError, ValueError, KeyError) as error:
        parser.error(f"not a file of figures: {error}")
    for line in differences(old, new):
        print(f"# {line}")
    found = list(changes(before, after, arguments.least))
    print("\n".join(found) if found else "nothing changed beyond the spread")
    for title, keys in (("gone", before.keys() - after.keys()), ("new", after.keys() - before.keys())):
        for topic, name in sorted(keys):
            print(f"{topic:10} {name:52} {title}")
    print(f"# {len(found)} of {len(before.keys() & after.keys())} figures changed")


if __name__ == "__main__":
    main()
