"""A view chain drawn: as a picture, for Mermaid and for Graphviz."""

from __future__ import annotations

from tensorplay.layers import ViewChain, ViewStep
from tensorplay.render.canvas import Arrow, Box, Picture, diagram
from tensorplay.render.steps import BEGINS, step_text
from tensorplay.words import shape_text, visible

__all__ = ["chain_picture", "dot", "mermaid"]


def chain_picture(chain: ViewChain) -> Picture:
    """Draw base, steps and tensor from left to right, aliases below."""
    boxes = [Box("0", 0, (chain.base, f"{chain.dtype}{shape_text(chain.shape)}", *_lines(chain)))]
    arrows = []
    headings: list[str] = [chain.begins]
    words = [f"{BEGINS[chain.begins]} {chain.base}: {chain.dtype}{shape_text(chain.shape)}"]
    for number, step in enumerate(chain.steps, 1):
        is_last = number == len(chain.steps)
        lines = (f"{step.dtype}{shape_text(step.shape)}", *_lines(step), step.source)
        boxes.append(Box(str(number), number, (step_text(step), *lines)))
        arrows.append(Arrow(str(number - 1), str(number)))
        headings.append(chain.name if is_last else f"step {number}")
        words.append(f"{step_text(step)}: {step.dtype}{shape_text(step.shape)}, {step.source}")
    for number, alias in enumerate(chain.aliases):
        boxes.append(Box(f"a{number}", 0, (alias.name, "alias, no view"), "ghost"))
        words.append(f"alias {alias.name}")
    return diagram(f"view chain of {chain.name}", headings, boxes, arrows, words)


def _lines(at: ViewChain | ViewStep) -> tuple[str, ...]:
    return f"stride {shape_text(at.stride)}", f"offset {at.storage_offset}"


def _nodes(chain: ViewChain) -> list[list[str]]:
    nodes = [[chain.base, f"{chain.dtype}{shape_text(chain.shape)}", " ".join(_lines(chain))]]
    for step in chain.steps:
        nodes.append([f"{step.dtype}{shape_text(step.shape)}", " ".join(_lines(step)), step.source])
    if chain.steps:
        nodes[-1].insert(0, chain.name)
    return nodes


def mermaid(chain: ViewChain) -> str:
    """Answer a flowchart for Mermaid; all names are quoted and escaped."""
    lines = ["flowchart LR"]
    nodes = _nodes(chain)
    for number, words in enumerate(nodes):
        lines.append(f'  n{number}["{"<br/>".join(map(_for_mermaid, words))}"]')
    for number, step in enumerate(chain.steps):
        lines.append(f'  n{number} -->|"{_for_mermaid(step_text(step))}"| n{number + 1}')
    for number, alias in enumerate(chain.aliases):
        lines.append(f'  a{number}["{_for_mermaid(alias.name)}"]')
        lines.append(f'  n0 -.-|"alias"| a{number}')
    return "\n".join(lines) + "\n"


def _for_mermaid(words: str) -> str:
    """Write what Mermaid would take for markup as character codes."""
    return "".join(c if c.isalnum() or c in " _.,=()-/:" else f"#{ord(c)};" for c in visible(words))


def dot(chain: ViewChain) -> str:
    """Answer a digraph for Graphviz; all names are quoted and escaped."""
    lines = ["digraph view_chain {", "  rankdir=LR;", "  node [shape=box, fontname=monospace];"]
    for number, words in enumerate(_nodes(chain)):
        lines.append(f'  n{number} [label="{_BREAK.join(map(_for_dot, words))}"];')
    for number, step in enumerate(chain.steps):
        lines.append(f'  n{number} -> n{number + 1} [label="{_for_dot(step_text(step))}"];')
    for number, alias in enumerate(chain.aliases):
        lines.append(f'  a{number} [label="{_for_dot(alias.name)}", style=dashed];')
        lines.append(f'  n0 -> a{number} [label="alias", style=dashed, dir=none];')
    return "\n".join([*lines, "}"]) + "\n"


_BREAK = "\\n"


def _for_dot(words: str) -> str:
    return visible(words).replace("\\", "\\\\").replace('"', '\\"')
