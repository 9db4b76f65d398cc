"""TP206, TP208, TP310, TP311: what backward would stumble over, and what keeps graphs alive."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from tensorplay.backward import Changed, Graph, SavedAt
from tensorplay.layers import Finding
from tensorplay.rules.registry import GraphRule, SceneRule
from tensorplay.scene import Scene
from tensorplay.words import bytes_text, describe, place_pattern, plural, some_of

__all__ = ["GradientLeadsBack", "GraphFreed", "GraphsOfStepsKept", "SavedTensorWritten", "UnseenWrite"]

_MANY_TERMS = 3
_END = re.compile(r"Backward\d*$")
_LEGACY_TYPES = {
    "float32": "Float",
    "float64": "Double",
    "float16": "Half",
    "int64": "Long",
    "int32": "Int",
    "int16": "Short",
    "int8": "Char",
    "uint8": "Byte",
}
_TYPES = _LEGACY_TYPES | {
    "bfloat16": "BFloat16",
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

    What a hook packed has no version that PyTorch checks, and neither has this, but for the inputs of checkpointed
    functions. A custom Function's saved tensors raise when its backward reads them: one that does not raises nothing.
    `backward(inputs=...)` and `torch.autograd.grad()` run the nodes on the way to these inputs alone: what others saved
    does not matter then. Of a jagged tensor PyTorch fails to write its own message: NotImplementedError is raised.
    Writes through `.data` and NumPy move no version. Whether anybody will call backward is not known.

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
        """Explain one finding a version counter, as of a tensor and its views, and one for all parameters of a root."""
        causes: dict[Any, list[SavedAt]] = {}
        for at in graph.written:
            impl = at.record.impl
            causes.setdefault(at.root if _is_weight(impl) else (impl.version_counter,), []).append(at)
        for members in causes.values():
            yield self._explained(graph, members)

    def _explained(self, graph: Graph, members: Sequence[SavedAt]) -> Finding:
        first = members[0]
        record = first.record
        name = graph.name_of(record)
        alike = [at for at in members if at.record.impl.version_counter == record.impl.version_counter]
        savers = list(dict.fromkeys(f"{at.node} ({at.slot})" for at in alike))
        versions = sorted({at.expected_version for at in alike})
        then = f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"
        others = {at.record.impl.version_counter: graph.name_of(at.record) or describe(at.record) for at in members}
        others.pop(record.impl.version_counter)
        more = f"; and {plural(len(others), 'more parameter')}: {some_of(list(others.values()))}" if others else ""
        unread = all(at.argument == "saved_tensors" for at in members)
        weight = _is_weight(record.impl)
        what = "parameters" if others else "a tensor"
        was = "were" if others else "was"
        return self.finding(
            name or f"a saved {describe(record)}",
            headline=f"{what} that a custom Function saved {was} written since: its backward raises if it reads "
            f"{'them' if others else 'it'}"
            if unread
            else f"{what} saved for backward {was} written since: backward will raise",
            subject=f"{'' if name is None else describe(record) + ' '}saved by {some_of(savers)} at {then}, now at "
            f"version {record.impl.version}{more}",
            evidence={
                "saved_version": first.expected_version,
                "version_now": record.impl.version,
                "node": first.node,
                "argument": first.slot,
                "shape": list(record.impl.shape or ()),
                "saved_by": [
                    {
                        "tensor": graph.name_of(at.record),
                        "node": at.node,
                        "argument": at.slot,
                        "saved_version": at.expected_version,
                        "version_now": at.record.impl.version,
                        "message": raised_message(at),
                    }
                    for at in members
                ],
                "root": graph.roots[first.root],
                "message": raised_message(first),
            },
            why=f"backward through {graph.roots[first.root]} raises{', where it reads it' if unread else ''}: "
            f"{raised_message(first)}",
            fix="call backward() before the optimizer's step, or compute this loss again after it"
            if weight
            else "write to a clone, or call backward() before the write",
            source="read: SavedVariable's saved_version_ and the tensor's version counter "
            "(torch/csrc/autograd/saved_variable.h)",
        )


def one_name(names: Sequence[str]) -> str:
    """Answer one name for several: ``losses[]`` where they differ by numbers alone."""
    patterns = {place_pattern(name) for name in names}
    return patterns.pop() if len(names) > 1 and len(patterns) == 1 else some_of(names, 2)


def _is_weight(impl: Any) -> bool:
    """Tell whether it is a parameter, or a view of one."""
    return (impl.is_leaf and impl.requires_grad) or bool(impl.base_is_leaf and impl.base_requires_grad)


def raised_message(at: SavedAt) -> str:
    """Answer what PyTorch will raise, without its hint."""
    impl = at.record.impl
    origin = "" if at.origin is None else f", which is output {at.origin[1]} of {_END.sub('', at.origin[0])},"
    versions = f"is at version {impl.version}; expected version {at.expected_version} instead"
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{_type_text(impl)} {list(impl.shape or ())}]{origin} {versions}"
    )


def _type_text(impl: Any) -> str:
    """Answer a tensor's type as PyTorch calls it in its messages: ``torch.FloatTensor``, ``CPUBoolType``."""
    device = (impl.device or "cpu").partition(":")[0]
    kind = _LEGACY_TYPES.get(impl.dtype)
    if impl.layout in ("sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"):
        prefix = "".join(part.capitalize() for part in impl.layout.split("_"))
        return f"{prefix}torch.{kind}Tensor" if kind else f"{prefix}{device.upper()}{_TYPES.get(impl.dtype)}Type"
    sparse = impl.layout == "sparse_coo"
    if kind is None:
        return f"{'Sparse' if sparse else ''}{device.upper()}{_TYPES.get(impl.dtype, impl.dtype)}Type"
    return f"torch.{'' if device == 'cpu' else device + '.'}{'sparse.' if sparse else ''}{kind}Tensor"


class UnseenWrite(GraphRule):
    """The bytes of a saved tensor changed and its version did not: backward will compute wrong numbers in silence.

    ## What it checks

    Between two calls of check_graph(), the first with `checksums=True` and the second with `since=` its report: each
    saved tensor that is still held, at the same version, and whose bytes give another sum. The report names live
    tensors and arrays over these bytes that have another version counter.

    ## Why it matters

    Writes through `.data`, `.numpy()`, DLPack or a pointer move no version. Backward takes the new values for those of
    the forward pass, raises nothing, and the gradient is wrong.

    ## Known limits

    Whether backward reads all that a node saved is not known: the bias that a layer norm saved is not read, nor an
    input that is saved for a weight that needs no gradient. It sees writes between the two calls alone, in memory of
    this process, and not those to the inner tensors of wrappers. The running statistics that a batch norm in training
    saved are passed over: its backward does not read them.

    ## Example

    ```python
    weight = torch.ones(3, requires_grad=True)
    y = weight.exp()
    before = tp.check_graph(y, checksums=True)
    y.data.mul_(2)
    tp.check_graph(y, since=before)
    ```

    ## Use instead

    ```python
    weight = torch.ones(3, requires_grad=True)
    y = weight.exp()
    before = tp.check_graph(y, checksums=True)
    z = y.detach() * 2
    tp.check_graph(y, since=before)
    ```

    ## Fix safety

    A clone costs the bytes of the tensor. `with torch.no_grad(): y.mul_(2)` in place of `.data` lets PyTorch notice,
    and backward raise.

    ## Sources

    The tensors' bytes; c10/core/TensorImpl.h (`VariableVersion`), torch 2.13 and 2.14.
    """

    code = "TP207"

    def in_graph(self, graph: Graph) -> Iterator[Finding]:
        """Explain one finding a version counter."""
        by_counter: dict[Any, list[Changed]] = {}
        for one in graph.changed:
            by_counter.setdefault(one.record.impl.version_counter, []).append(one)
        for members in by_counter.values():
            first = members[0]
            savers = list(dict.fromkeys(f"{one.node} ({one.slot})" for one in members))
            over = f"; over the same bytes: {some_of(first.aliases)}" if first.aliases else ""
            yield self.finding(
                graph.name_of(first.record) or f"a saved {describe(first.record)}",
                headline="the bytes of a saved tensor changed, and its version did not",
                subject=f"{describe(first.record)} saved by {some_of(savers)}, at version {first.record.impl.version} "
                f"as before{over}",
                evidence={
                    "version": first.record.impl.version,
                    "saved_by": [{"node": one.node, "argument": one.slot} for one in members],
                    "aliases": list(first.aliases),
                },
                why="backward takes the new values for those of the forward pass where it reads them: then the "
                "gradient is wrong, and nothing raises",
                fix="write to a clone; or under torch.no_grad() to the tensor itself, so that PyTorch notices",
                source="computed: a sum over the tensor's bytes, twice; read: its version counter",
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

    Nodes that save nothing, as those of additions, do not tell: backward goes through them a second time. A custom
    Function raises when its backward reads `ctx.saved_tensors`: one that does not raises nothing, and one that saved
    nothing and reads it all the same raises and is not seen.

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
        if not graph.released or any(found.released and found.spans_steps for found in graph.accumulations):
            return  # what a sum keeps of several steps is TP310
        own = [at for at in graph.released if at.argument != "saved_tensors"]
        first = own[0] if own else graph.released[0]
        partly = graph.counts[1] < graph.total.saved
        yield self.finding(
            graph.roots[first.root],
            headline="a part of the graph was used up by a backward"
            if partly
            else "the graph was used up by a backward",
            subject=f"{graph.counts[1]} of {plural(graph.total.saved, 'saved tensor')} given back, as those of "
            f"{first.node} ({first.slot})",
            evidence={
                "released": graph.counts[1],
                "saved": graph.total.saved,
                "node": first.node,
                "argument": first.slot,
            },
            why=f"a second backward() raises{'' if own else ', if that Function reads what it saved'}: Trying to "
            "backward through the graph a second time",
            fix="retain_graph=True in the first backward(), or detach() what is carried over",
            source="read: SavedVariable's data_ and was_default_constructed_ (torch/csrc/autograd/saved_variable.h)",
        )


class GraphsOfStepsKept(SceneRule, GraphRule):
    """Losses of several steps are added up, or kept, with their graphs: each step's graph stays alive.

    ## What it checks

    Whether a tensor was made by adding up terms of one kind, each with a graph of its own, and the terms come from
    several steps: a backward ran through some of three or more already and not through others, or one place in the
    model saved another version of its parameter in each, so that an optimizer stepped in between. Additions,
    subtractions, weights, as in `0.9 * running + 0.1 * loss`, `torch.stack()` and means are looked through. So are
    several given scalars of one kind, as the items of a list: there the versions alone prove it. `terms`, `released`
    and `activation_bytes_held` say how much hangs on it. Three scalar terms and more that come from the same places in
    a model, and for which neither is proven, are an info of check_graph().

    ## Why it matters

    `total += loss` keeps every step's graph: its nodes, and all activations of steps without a backward, as in an
    evaluation. Memory grows step by step until it is full, and a backward of the sum raises.

    ## Known limits

    Losses of one step that are added up for one backward look alike as long as no optimizer steps: they are the info.
    Terms that share most of their graphs, as when each step's begins at the one before, are judged as far as four times
    the graph's nodes reach. Losses that are put into a buffer, `history[step] = loss`, and maxima of losses are not
    looked through.

    ## Example

    ```python
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0
    for _ in range(3):
        loss = model(torch.ones(50, 100)).exp().mean()
        loss.backward()
        optimizer.step()
        total = total + loss
    tp.check({"total": total})
    ```

    ## Use instead

    ```python
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0
    for _ in range(3):
        loss = model(torch.ones(50, 100)).exp().mean()
        loss.backward()
        optimizer.step()
        total = total + loss.detach()
    tp.check({"total": total})
    ```

    ## Fix safety

    `item()` and `detach()` change no number of the sum. With them no backward can run through it: that is the point.

    ## Sources

    torch/csrc/autograd/generated/Functions.h (`AddBackward0`), torch/csrc/autograd/saved_variable.h, torch 2.13 and
    2.14.
    """

    code = "TP310"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain those that are proven, of the graphs behind the objects."""
        for finding in () if scene.graph is None else self.in_graph(scene.graph):
            if finding.severity != "info":
                yield finding

    def in_graph(self, graph: Graph) -> Iterator[Finding]:
        """Explain one finding a root."""
        for found in graph.accumulations:
            if not found.spans_steps and found.terms < _MANY_TERMS:
                continue
            held = f"{bytes_text(graph.total.nbytes)} in {plural(graph.total.storages, 'storage')}"
            proof = (
                "one place in the model saved another version of its parameter in each: it was written in between, as "
                "an optimizer does"
                if found.weights_moved
                else f"a backward ran through {found.released} of them"
            )
            used_up = f"; {found.released} are used up: a backward through them raises" if found.released else ""
            is_sum = len(found.roots) == 1
            yield self.finding(
                one_name([graph.roots[root] for root in found.roots]),
                headline="a sum of losses keeps the graph of each"
                if not found.spans_steps
                else f"{'a sum of losses keeps' if is_sum else 'kept losses keep'} the graphs of several steps alive",
                subject=f"{found.terms} terms with a graph each; {plural(graph.total.nodes, 'node')} hold {held}",
                evidence={
                    "terms": found.terms,
                    "released": found.released,
                    "weights_moved": found.weights_moved,
                    "graph_nodes": graph.total.nodes,
                    "activations_held": graph.total.storages,
                    "activation_bytes_held": graph.total.nbytes,
                },
                why=f"the terms come from several steps: {proof}{used_up if found.weights_moved else ''}"
                if found.spans_steps
                else "one backward needs them all",
                fix=f"{'add up' if is_sum else 'keep'} loss.item() or loss.detach()"
                if found.spans_steps
                else "if no backward runs through the sum, add up loss.item() or loss.detach()",
                source="read: the additions behind it, what their terms saved, and at which versions "
                "(torch/csrc/autograd/saved_variable.h)",
                severity=None if found.spans_steps else "info",
            )


class GradientLeadsBack(SceneRule, GraphRule):
    """A gradient has a graph that leads back to its own parameter: the two keep each other alive.

    ## What it checks

    Whether the graph behind a leaf's `.grad`, which `backward(create_graph=True)` makes, reaches the node that
    accumulates into this leaf, directly or over the gradients of other leaves.

    ## Why it matters

    The cycle runs through C++, where the garbage collector does not see it: parameter, gradient and all that the graph
    saved stay in memory when the last name is gone.

    ## Known limits

    Between such a backward and the next reset of the gradients the cycle is there by design: the finding says that it
    must be broken, not that it was forgotten.

    ## Example

    ```python
    weight = torch.ones(1000, requires_grad=True)
    loss = weight.exp().sum()
    loss.backward(create_graph=True)
    tp.check_graph(weight.grad)
    ```

    ## Use instead

    ```python
    weight = torch.ones(1000, requires_grad=True)
    loss = weight.exp().sum()
    (gradient,) = torch.autograd.grad(loss, weight, create_graph=True)
    tp.check_graph(gradient)
    ```

    ## Fix safety

    `torch.autograd.grad(..., create_graph=True)` answers the gradient without putting it into `.grad`: what is to be
    accumulated is accumulated by hand. `zero_grad(set_to_none=True)` breaks the cycle after use.

    ## Sources

    torch/csrc/autograd/functions/accumulate_grad.h, torch/csrc/autograd/variable.h, torch 2.13 and 2.14.
    """

    code = "TP311"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain the finding, of the graphs behind the objects."""
        return iter(()) if scene.graph is None else self.in_graph(scene.graph)

    def in_graph(self, graph: Graph) -> Iterator[Finding]:
        """Explain one finding for all leaves."""
        if not graph.cycles:
            return
        names = [graph.names.get(leaf, "a leaf") for leaf in graph.cycles]
        yield self.finding(
            names[0],
            headline="a gradient's graph leads back to its own parameter",
            subject=f"{plural(len(names), 'leaf')} of which the gradient has such a graph: {some_of(names)}"
            if len(names) == 1
            else f"{len(names)} leaves of which the gradients have such graphs: {some_of(names)}",
            evidence={
                "leaves": len(names),
                "names": names,
                "graph_nodes": graph.total.nodes,
                "activation_bytes_held": graph.total.nbytes,
            },
            why="the cycle runs through C++, where the garbage collector does not see it",
            fix="torch.autograd.grad(..., create_graph=True) in place of backward(), or zero_grad() after use",
            source="walked: the graph behind .grad to AccumulateGrad (torch/csrc/autograd/functions/accumulate_grad.h)",
        )
