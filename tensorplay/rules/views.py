"""TP201-TP204: views that an in-place write would not do well by. Hazards: nobody wrote yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tensorplay.layers import WITH_MEMORY, Finding, TensorRecord
from tensorplay.rules.registry import Rule
from tensorplay.words import bytes_text, describe, place_pattern, plural

__all__ = ["LeafView", "MultiOutputView", "SelfOverlapping", "UntrackedView"]

_VARIABLE = "torch/csrc/autograd/variable.h"


def _by_cause(
    records: Sequence[TensorRecord], one_of: Callable[[TensorRecord], Any], form: Callable[[TensorRecord], Any]
) -> list[list[TensorRecord]]:
    """Group what is one cause: the views of one base, and of several bases in one place of a container or model.

    Args:
        records: the suspects.
        one_of: answers what views of one thing have in common.
        form: answers what those of several things must have in common, beside the place.
    """
    things: dict[Any, list[TensorRecord]] = {}
    for record in records:
        things.setdefault(one_of(record), []).append(record)
    causes: dict[Any, list[TensorRecord]] = {}
    for group in things.values():
        causes.setdefault((place_pattern(group[0].name), form(group[0])), []).extend(group)
    return list(causes.values())


def _subject(group: Sequence[TensorRecord]) -> str:
    record = group[0]
    extent = record.extent
    sizes = ""
    if extent is not None and extent.visible_nbytes is not None and extent.storage_nbytes is not None:
        sizes = f"  {bytes_text(extent.visible_nbytes)} of {bytes_text(extent.storage_nbytes)}"
    bases = len({record.impl.base for record in group})
    of = "that base" if bases == 1 else f"{bases} bases"
    also = f", and {plural(len(group) - 1, 'more view')} of {of}" if len(group) > 1 else ""
    return f"{describe(record)}{sizes}{also}"


def _evidence(group: Sequence[TensorRecord]) -> dict[str, Any]:
    record = group[0]
    impl, extent = record.impl, record.extent
    return {
        "creation_meta": impl.creation_meta,
        "grad_fn": impl.grad_fn,
        "requires_grad": impl.requires_grad,
        "base": impl.base,
        "base_is_leaf": impl.base_is_leaf,
        "base_requires_grad": impl.base_requires_grad,
        "version": impl.version,
        "storage_nbytes": None if extent is None else extent.storage_nbytes,
        "view_nbytes": None if extent is None else extent.visible_nbytes,
        "tensors": [r.name for r in group],
    }


class LeafView(Rule):
    """A view of a leaf that requires grad: an in-place write on it raises while grad mode is on.

    ## What it checks

    Autograd's own fields of the view: its base has no grad_fn and requires grad, and the view was made in the ordinary
    way. `tensorplay.is_safe_view(x)` asks the same of the grad mode of the moment.

    ## Why it matters

    `weight[:, 0].mul_(2)` raises "a view of a leaf Variable that requires grad is being used in an in-place
    operation". A leaf has no history that the write could be recorded in. Under `torch.no_grad()` the same write is
    legal, and is how weights are edited.

    ## Known limits

    A hazard that nobody has touched, hence info. Writes through `.data`, which autograd does not see, do not raise.

    ## Example

    ```python
    weight = torch.nn.Parameter(torch.ones(3, 4))
    x = weight[:, 0]
    ```

    ## Use instead

    ```python
    weight = torch.nn.Parameter(torch.ones(3, 4))
    x = weight.detach()[:, 0]
    ```

    ## Fix safety

    Writing under `torch.no_grad()` is safe: the gradient is computed of the new values. `clone()` writes to a copy and
    leaves the weight as it is.

    ## Sources

    torch/csrc/autograd/VariableTypeUtils.h (`check_inplace`), torch/csrc/autograd/variable.h
    (`DifferentiableViewMeta`), torch 2.13 and 2.14.
    """

    code = "TP201"

    def suspects(self, record: Any) -> bool:
        """Ask autograd's fields of the base."""
        impl = record.impl
        return bool(impl.is_view and impl.base_is_leaf and impl.base_requires_grad and impl.creation_meta == "DEFAULT")

    def findings(self, records: Sequence[TensorRecord]) -> Iterator[Finding]:
        """Explain one finding a base, or place of several."""
        for group in _by_cause(records, lambda r: r.impl.base, lambda _: None):
            yield self.finding(
                group[0].name,
                headline="view of a leaf that requires grad",
                subject=_subject(group),
                evidence=_evidence(group),
                why="an in-place write on it raises while grad mode is on: a leaf has no history to record it in",
                fix="write under torch.no_grad(), or to a clone()",
                source=f"read: {_VARIABLE} DifferentiableViewMeta",
            )


class MultiOutputView(Rule):
    """One of several views that one operator returned: an in-place write on it raises while grad mode is on.

    ## What it checks

    `creation_meta` MULTI_OUTPUT_NODE of a view that requires grad: `chunk`, `split`, `unbind`, `tensor_split` and
    iterating over a tensor return several views from one autograd node.

    ## Why it matters

    `q, k = qkv.chunk(2)` and then `q.mul_(2)` raises, although the halves do not overlap: autograd cannot rewrite the
    history of one output of a node that has several. The same slices written as `qkv[:, :2]` may be written in place.
    Under `torch.no_grad()` the write goes through, and so does a write to `qkv` itself in any mode; what raises then is
    the next use of `q`, and of `k`, with grad mode on.

    ## Known limits

    A hazard that nobody has touched, hence info. `tensorplay.is_safe_view(x)` answers for the grad mode of the moment.

    ## Example

    ```python
    qkv = torch.ones(2, 4, requires_grad=True) * 1
    q, k = qkv.chunk(2, dim=1)
    ```

    ## Use instead

    ```python
    qkv = torch.ones(2, 4, requires_grad=True) * 1
    q, k = qkv[:, :2], qkv[:, 2:]
    ```

    ## Fix safety

    Slicing makes the same views with the same gradient, and costs nothing; all of the views that are used later have to
    be sliced. An operator that does not write in place copies.

    ## Sources

    torch/csrc/autograd/variable.h (`CreationMeta`), torch/csrc/autograd/variable.cpp (`handle_view_on_rebase`),
    torch 2.13 and 2.14.
    """

    code = "TP202"

    def suspects(self, record: Any) -> bool:
        """Look at how the view was made."""
        return record.impl.creation_meta == "MULTI_OUTPUT_NODE" and bool(record.impl.requires_grad)

    def findings(self, records: Sequence[TensorRecord]) -> Iterator[Finding]:
        """Explain one finding a base and operator, or place of several."""
        for group in _by_cause(records, lambda r: (r.impl.base, r.impl.grad_fn), lambda r: r.impl.grad_fn):
            made = group[0].impl.grad_fn or "an operator that returns several views"
            yield self.finding(
                group[0].name,
                headline="one of several views of one operator",
                subject=_subject(group),
                evidence=_evidence(group),
                why=f"an in-place write on it raises while grad mode is on, because of how it was made ({made}), not "
                "because of overlap",
                fix="slice the base where chunk, split or unbind is called (x[:, :2]), or write out of place",
                source=f"read: {_VARIABLE} CreationMeta",
            )


_HOW = {
    "NO_GRAD_MODE": ("view made under no_grad", "made under torch.no_grad() of a tensor that requires grad"),
    "INFERENCE_MODE": (
        "view made in inference mode",
        "made in torch.inference_mode() of a tensor that requires grad",
    ),
    "IN_CUSTOM_FUNCTION": (
        "view made inside a custom Function",
        "made inside a custom autograd.Function, or an input of one that was returned as it is",
    ),
}


def _way(record: TensorRecord) -> tuple[str | None, ...]:
    return record.impl.creation_meta, record.impl.grad_fn


class UntrackedView(Rule):
    """A view that autograd did not see being made: an in-place write on it raises while grad mode is on.

    ## What it checks

    `creation_meta` NO_GRAD_MODE, INFERENCE_MODE or IN_CUSTOM_FUNCTION of a view that requires grad.

    ## Why it matters

    The write would have to be recorded on the base, and autograd does not know how the view came from it. The view
    and the write belong on the same side of `no_grad`. A full backward hook on a module passes the module's input
    through a custom Function: `ReLU(inplace=True)` then stops working.

    ## Known limits

    A hazard that nobody has touched, hence info. With grad mode off the write goes through, and the next use of the
    view with grad mode on raises; `tensorplay.is_safe_view(x)` answers for the grad mode of the moment.

    ## Example

    ```python
    weight = torch.ones(3, 4, requires_grad=True) * 1
    with torch.no_grad():
        x = weight[0]
    ```

    ## Use instead

    ```python
    weight = torch.ones(3, 4, requires_grad=True) * 1
    x = weight[0]
    ```

    ## Fix safety

    Making the view with grad mode on connects it with its base: gradients flow that did not before. `clone()` copies.

    ## Sources

    torch/csrc/autograd/variable.h (`CreationMeta`), torch/csrc/autograd/variable.cpp (`handle_view_on_rebase`),
    torch/csrc/autograd/custom_function.cpp, torch 2.13 and 2.14.
    """

    code = "TP203"

    def suspects(self, record: Any) -> bool:
        """Look at how the view was made."""
        return record.impl.creation_meta in _HOW and bool(record.impl.requires_grad)

    def findings(self, records: Sequence[TensorRecord]) -> Iterator[Finding]:
        """Explain one finding a base and way, or place of several."""
        for group in _by_cause(records, lambda r: (r.impl.base, *_way(r)), _way):
            impl = group[0].impl
            headline, how = _HOW[impl.creation_meta or ""]
            hook = ""
            if impl.grad_fn is not None and impl.grad_fn.startswith("BackwardHookFunction"):
                hook = ": a full backward hook on the module passes its tensors through one"
            yield self.finding(
                group[0].name,
                headline=headline,
                subject=_subject(group),
                evidence=_evidence(group),
                why=f"an in-place write on it raises while grad mode is on: it was {how}{hook}",
                fix=(
                    "use inplace=False, a tensor hook on the output in place of the module's hook, or clone() first"
                    if impl.creation_meta == "IN_CUSTOM_FUNCTION"
                    else "make the view and write to it on the same side of no_grad, or clone() it"
                ),
                source=f"read: {_VARIABLE} CreationMeta",
            )


def _geometry(record: TensorRecord) -> tuple[Any, ...]:
    return record.impl.shape, record.impl.stride


class SelfOverlapping(Rule):
    """Several indices of the tensor reach one element: an in-place write on it raises or goes wrong.

    ## What it checks

    Whether the tensor reaches fewer different cells than it has elements: exact, from sizes and strides.

    ## Why it matters

    `expand()` gives stride 0: PyTorch refuses most in-place operators then; `fill_`, `zero_`, `masked_fill_` and
    `index_fill_` go through, and so do `tril_`, `triu_` and `fill_diagonal_`, which write wrong numbers. Overlapping
    windows (`unfold`, `as_strided`) are "too hard" for its check, so every write goes through: each cell is written
    several times, in an order nobody promises. `mul_`, `add_`, `copy_` give wrong numbers without an error; `fill_`,
    `clamp_`, `relu_`, which do the same once and twice, are right.

    ## Known limits

    A hazard that nobody has touched, hence info. Geometries with more than 16 million cells that are neither views,
    windows nor expanded are not counted.

    ## Example

    ```python
    x = torch.zeros(6).unfold(0, 3, 1)
    ```

    ## Use instead

    ```python
    x = torch.zeros(6).unfold(0, 3, 3)
    ```

    ## Fix safety

    `clone()` gives each element a cell of its own and copies all of them.

    ## Sources

    ATen/MemoryOverlap.h (`has_internal_overlap`), c10/core/TensorImpl.h (`sizes_and_strides_`), torch 2.13 and 2.14.
    """

    code = "TP204"

    def suspects(self, record: Any) -> bool:
        """Compare cells with elements."""
        extent = record.extent
        return extent is not None and bool(extent.self_overlapping) and record.kind in WITH_MEMORY

    def findings(self, records: Sequence[TensorRecord]) -> Iterator[Finding]:
        """Explain one finding a storage and geometry, or place of several."""
        for group in _by_cause(records, lambda r: (r.storage and r.storage.address, *_geometry(r)), _geometry):
            record = group[0]
            impl, extent = record.impl, record.extent
            assert extent is not None and isinstance(impl.numel, int) and impl.stride is not None
            cells = None if extent.visible_nbytes is None else extent.visible_nbytes // impl.itemsize
            expanded = any(step == 0 and size != 1 for size, step in zip(impl.shape or (), impl.stride, strict=True))
            also = f", and {plural(len(group) - 1, 'more tensor')} of this geometry" if len(group) > 1 else ""
            yield self.finding(
                record.name,
                headline="several indices reach one element",
                subject=f"{describe(record)} stride {list(impl.stride)}: {impl.numel} elements on {cells} cells{also}",
                evidence={
                    "elements": impl.numel,
                    "distinct_cells": cells,
                    "aliased_elements": None if cells is None else impl.numel - cells,
                    "overlapping": None if cells is None else impl.numel - cells,
                    "stride": list(impl.stride),
                    "logical_bytes": extent.nbytes,
                    "visible_nbytes": extent.visible_nbytes,
                    "storage_nbytes": extent.storage_nbytes,
                    "expanded": expanded,
                    "tensors": [r.name for r in group],
                },
                why=(
                    "expanded: PyTorch refuses most in-place operators on it, and what it does not refuse is written "
                    "several times"
                    if expanded
                    else "PyTorch's own check calls this too hard and raises nothing: an in-place write goes to each "
                    "shared cell several times; mul_, add_ and copy_ give wrong numbers"
                ),
                fix=f"clone() it before writing: copies {bytes_text(extent.nbytes)}",
                source="computed: sizes_and_strides_, c10/core/TensorImpl.h",
            )
