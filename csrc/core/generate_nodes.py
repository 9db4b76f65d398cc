"""Lists the fields of PyTorch's generated autograd nodes, from the header of the torch that is built against.

python generate_nodes.py TORCH_INCLUDE OUTPUT writes one line a field, which nodes.cpp gives its meaning:

    TENSORPLAY_NODE(MulBackward0)
    TENSORPLAY_FIELD(MulBackward0, other_)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HEADER = "torch/csrc/autograd/generated/Functions.h"
_STRUCT = re.compile(r"^struct TORCH_API (\w+) : public (?:Node|TraceableFunction) \{$")
# A member that holds a value: no parentheses, as functions have, and no keyword before its type.
_FIELD = re.compile(r"^  (?!using |return |virtual )[\w:<>, ]+? (\w+)(?: = [^;()]*)?;$")


def node_fields(header: str) -> list[tuple[str, list[str]]]:
    """Answer every node and the names of its fields, in the order of the header."""
    nodes: list[tuple[str, list[str]]] = []
    for line in header.splitlines():
        if found := _STRUCT.match(line):
            nodes.append((found[1], []))
        elif nodes and (found := _FIELD.match(line)):
            nodes[-1][1].append(found[1])
    return nodes


def generate(include: Path) -> str:
    """Answer the lines for a torch whose headers lie in a folder."""
    nodes = node_fields((include / HEADER).read_text(encoding="utf-8"))
    if len(nodes) < 300:
        raise SystemExit(f"{HEADER} declares {len(nodes)} autograd nodes: not the header of a torch this reads")
    lines = []
    for node, fields in nodes:
        lines.append(f"TENSORPLAY_NODE({node})")
        lines += [f"TENSORPLAY_FIELD({node}, {field})" for field in fields]
    return "\n".join(lines) + "\n"


def write(include: Path, output: Path) -> None:
    """Write the lines; left alone where they are equal, so that nothing is compiled again."""
    text = generate(include)
    if not output.exists() or output.read_text(encoding="utf-8") != text:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
