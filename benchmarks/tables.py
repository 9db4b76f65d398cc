"""Write the figures of a JSON file into a Markdown page, as tables.

    python benchmarks/tables.py benchmarks/baseline.json docs/benchmarks.md

The page marks the places: what is between <!-- figures: TOPIC --> and <!-- end --> is made anew.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import quantity

MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
HEAD = """
| what | median (quartiles) | peer | peer ÷ ours [95 % interval] | target | |
|---|---|---|---|---|---|
"""


def table(topic: Mapping[str, Any]) -> str:
    header = topic["header"]
    made = "; ".join(
        [
            f"torch {header['torch']}, Python {header['python']}, {header['cpu']}, {header['cores']} cores",
            f"{header['disturbed_rounds']} of {header['rounds']} rounds disturbed",
            f"yardstick {header['yardstick_ns']:.0f} ns",
        ]
    )
    return HEAD + "".join(f"| {' | '.join(cells)} |\n" for cells in lines(topic)) + f"\n{made}.\n\n{notes(topic)}"


def lines(topic: Mapping[str, Any]) -> Iterator[list[str]]:
    rows = {row["name"]: row for row in topic["rows"] if not row.get("detail")}
    peers = {pair["peer"] for pair in topic["ratios"]}
    for name, row in rows.items():
        if name in peers:
            continue
        unit = row["unit"]
        spread = "" if row.get("exact") else f" ({quantity(row['q1'], unit)} to {quantity(row['q3'], unit)})"
        limit = f"≤ {quantity(row['target'], unit)}" if "target" in row else ""
        yield [code(name), f"{quantity(row['median'], unit)}{spread}", "", "", limit, verdict(row)]
        for pair in topic["ratios"]:
            if pair["ours"] != name:
                continue
            peer = rows[pair["peer"]]
            cost = f"{pair['peer'].partition(': ')[2] or pair['peer']}: {quantity(peer['median'], peer['unit'])}"
            ratio = f"{times(pair['median'])} [{times(pair['low'])}, {times(pair['high'])}]"
            yield ["", "", cost, ratio, f"≥ {pair['target']:g}" if "target" in pair else "", verdict(pair)]


def notes(topic: Mapping[str, Any]) -> str:
    return "".join(f"- {row['name']}: {row['note']}\n" for row in topic["rows"] if "note" in row)


def times(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def code(name: str) -> str:
    kind, colon, call = name.rpartition(": ")
    return f"{kind}{colon}`{call}`" if "(" in call or "import" in call else name


def verdict(row: Mapping[str, Any]) -> str:
    return "" if "target" not in row else "met" if row["met"] else "**missed**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path)
    parser.add_argument("page", type=Path)
    arguments = parser.parse_args()
    topics = json.loads(arguments.figures.read_text(encoding="utf-8"))["topics"]
    page = arguments.page.read_text(encoding="utf-8")
    fresh = MARKED.sub(lambda mark: mark[1] + table(topics[mark[2]]) + mark[3] if mark[2] in topics else mark[0], page)
    arguments.page.write_text(fresh, encoding="utf-8")


if __name__ == "__main__":
    main()
