"""TP206 and TP208: what backward would stumble over in the graph behind some tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensorplay.backward import Graph, SavedAt
from tensorplay.layers import Finding
from tensorplay.rules.registry import GraphRule, SceneRule
from tensorplay.scene import Scene
from tensorplay.words import describe, plural, some_of

__all__ = ["GraphFreed", "SavedTensorWritten"]

_TYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
    "bool": "Bool",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
}


class SavedTensorWritten(SceneRule, GraphRule):
    """A tensor that a node saved for backward was written since: backward will raise.

    ## What it checks

    For each tensor that the nodes behind the given ones saved, the version it had then against the version it has now.
    That is PyTorch's own check, made before backward makes it. `saved_version` and `version_now` are the two.

    ## Why it matters

    `backward()` raises "one of the variables needed for gradient computation has been modified by an inplace
    operation", far from the line that wrote, and names neither the node's argument nor the tensor.

    ## Known limits

    What a hook packed has no version that PyTorch checks, and neither has this. A custom Function's saved tensors raise
    when its backward reads them: one that does not raises nothing. Writes through `.data` and NumPy move no version.
    Whether anybody will call backward is not known.

    ## Example

    ```python
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    score = model(torch.ones(4, 3, requires_grad=True))
    score.mean().backward(retain_graph=True)
    optimizer.step()
    tp.check_graph(score)
    ```

    ## Use instead

    ```python
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    score = model(torch.ones(4, 3, requires_grad=True))
    score.mean().backward(retain_graph=True)
    tp.check_graph(score)
    optimizer.step()
    ```

    ## Fix safety

    To call backward before the write changes no number. A clone of what is written, `x = x.clone()`, costs its bytes.
    To compute the loss again after the step costs a forward pass, and is another loss.

    ## Sources

    torch/csrc/autograd/saved_variable.cpp (`unpack`), torch 2.13 and 2.14.
    """

    code = "TP206"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding a tensor, of the graphs behind the objects."""
        return iter(()) if scene.graph is None else self.in_graph(scene.graph)

    def in_graph(self, graph: Graph) -> Iterator[Finding]:
        """Explain one finding a version counter: a tensor and its views were written by one write."""
        by_counter: dict[Any, list[SavedAt]] = {}
        for at in graph.written:
            by_counter.setdefault(at.record.impl.version_counter, []).append(at)
        for members in by_counter.values():
            yield self._explained(graph, members)

    def _explained(self, graph: Graph, members: Sequence[SavedAt]) -> Finding:
        first = members[0]
        record = first.record
        name = graph.name_of(record)
        savers = list(dict.fromkeys(f"{at.node} ({at.slot})" for at in members))
        weight = name is not None and record.impl.is_leaf is not False and record.impl.requires_grad
        return self.finding(
            name or f"a saved {describe(record)}",
            headline="a tensor saved for backward was written since: backward will raise",
            subject=f"{describe(record)} saved by {some_of(savers)} at version {first.expected_version}, "
            f"now at version {record.impl.version}",
            evidence={
                "saved_version": first.expected_version,
                "version_now": record.impl.version,
                "node": first.node,
                "argument": first.slot,
                "shape": list(record.impl.shape or ()),
                "saved_by": [
                    {"node": at.node, "argument": at.slot, "saved_version": at.expected_version} for at in members
                ],
                "root": graph.roots[first.root],
                "message": raised_message(first),
            },
            why=f"backward through {graph.roots[first.root]} raises: {raised_message(first)}",
            fix="call backward() before the optimizer's step, or compute this loss again after it"
            if weight
            else "write to a clone, or call backward() before the write",
            source="read: SavedVariable's saved_version_ and the tensor's version counter "
            "(torch/csrc/autograd/saved_variable.h)",
        )


def raised_message(at: SavedAt) -> str:
    """Answer the beginning of what PyTorch will raise, as far as it is known before."""
    impl = at.record.impl
    device = "" if impl.device in (None, "cpu") else f"{impl.device.partition(':')[0]}."
    kind = f"torch.{device}{_TYPES.get(impl.dtype, impl.dtype)}Tensor"
    versions = f"is at version {impl.version}; expected version {at.expected_version} instead"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{kind} {list(impl.shape or ())}] {versions}"
    )


class GraphFreed(GraphRule):
    """The graph behind a tensor was used up by a backward: a second one will raise.

    ## What it checks

    Whether nodes behind the given tensors gave back what they saved. check() does not ask: a used graph is where every
    training step ends.

    ## Why it matters

    A second `backward()` raises "Trying to backward through the graph a second time". Often only a part of the graph is
    used up: a hidden state that is carried from step to step, or a part that two losses share.

    ## Known limits

    Nodes that save nothing, as those of additions, do not tell: backward goes through them a second time.

    ## Example

    ```python
    weight = torch.ones(3, requires_grad=True)
    hidden = weight.exp()
    hidden.sum().backward()
    tp.check_graph(hidden.prod())
    ```

    ## Use instead

    ```python
    weight = torch.ones(3, requires_grad=True)
    hidden = weight.exp()
    hidden.sum().backward(retain_graph=True)
    tp.check_graph(hidden.prod())
    ```

    ## Fix safety

    `retain_graph=True` keeps the memory of the whole graph. `detach()` cuts the part that was used, and with it its
    gradient.

    ## Sources

    torch/csrc/autograd/saved_variable.cpp (`ERR_BACKWARD_TWICE`), torch 2.13 and 2.14.
    """

    code = "TP208"

    def in_graph(self, graph: Graph) -> Iterator[Finding]:
        """Explain the one finding."""
        if not graph.released:
            return
        nodes = list(dict.fromkeys(at.address for at in graph.released))
        first = graph.released[0]
        partly = graph.counts[1] < graph.total.saved
        yield self.finding(
            graph.roots[first.root],
            headline="a part of the graph was used up by a backward"
            if partly
            else "the graph was used up by a backward",
            subject=f"{plural(len(nodes), 'node')} gave back what they saved, as {first.node} ({first.slot})",
            evidence={
                "released": graph.counts[1],
                "saved": graph.total.saved,
                "nodes": len(nodes),
                "node": first.node,
                "argument": first.slot,
            },
            why="a second backward() raises: Trying to backward through the graph a second time",
            fix="retain_graph=True in the first backward(), or detach() what is carried over",
            source="read: SavedVariable's data_ and was_default_constructed_ (torch/csrc/autograd/saved_variable.h)",
        )
