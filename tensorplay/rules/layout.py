"""TP108: facts of a layout that bite kernels which read raw memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tensorplay.layers import WITH_MEMORY, Finding
from tensorplay.rules.registry import SceneRule
from tensorplay.scene import Scene, Subject
from tensorplay.words import describe, is_state_name, plural, shape_text

__all__ = ["LayoutFacts"]

_FORMATS = {"channels_last", "channels_last_3d"}
_SOURCE = "read: c10/core/TensorImpl.h sizes_and_strides_, key_set_"


class LayoutFacts(SceneRule):
    """The bytes in memory are not what the shape says: order, size-1 strides, conjugate or negative bit.

    ## What it checks

    Three facts that `data_ptr()` alone does not tell: elements that do not lie row-major without gaps; images whose
    dimensions of size 1 have strides of another memory format; a conjugate or negative bit, whose work is still to be
    done. `compare(a, b)` says so, too, where strides differ in dimensions of size 1 alone.

    ## Why it matters

    A kernel that takes the pointer and reads densely gets other elements, or the conjugate of what was meant, without
    an error. Strides of size-1 dimensions are arbitrary, yet decide what memory format an operator chooses, and whether
    DistributedDataParallel warns of its buckets.

    ## Known limits

    Facts, hence info: PyTorch's own operators heed all of them. Only in `check` and `compare`. What ordinary models
    have is passed over: where parameters, or a state dict, are in a channels_last format, all tensors in that format;
    what has the shape and strides of a parameter, which is named itself, as its gradient and the optimizer's states;
    strides of size-1 dimensions in what has the shape of a parameter.

    ## Example

    ```python
    x = torch.ones(2, 3).t()
    ```

    ## Use instead

    ```python
    x = torch.ones(2, 3).t().contiguous()
    ```

    ## Fix safety

    `contiguous()` copies here; `resolve_conj()` and `resolve_neg()` copy where the bit is set.

    ## Sources

    c10/core/TensorImpl.h (`sizes_and_strides_`, `key_set_`), c10/core/MemoryFormat.h, torch 2.13 and 2.14.
    """

    code = "TP108"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding a fact, for all tensors that it holds of."""
        subjects = [s for s in scene.subjects if s.record.kind in WITH_MEMORY and s.record.extent is not None]
        subjects = [s for s in subjects if s.record.extent.nbytes and s.record.impl.stride is not None]
        of_models = [s for s in subjects if s.read.is_parameter or is_state_name(s.read.name)]
        formats = _FORMATS & {s.record.extent.memory_format for s in of_models}
        shapes = {s.record.impl.shape for s in of_models}
        laid_out = {(s.record.impl.shape, s.record.impl.stride) for s in of_models if s.read.is_parameter}
        kinds = (
            (
                [s for s in subjects if s.record.impl.is_conj or s.record.impl.is_neg],
                "a conjugate or negative bit is set",
                "what lies in memory is the conjugate or negative of the tensor: a reader of the raw bytes gets that",
                "resolve_conj() or resolve_neg() before a raw pointer is handed on",
            ),
            (
                [
                    s
                    for s in subjects
                    if s.record.extent.contiguous is False
                    and s.record.extent.memory_format not in formats
                    and (s.read.is_parameter or (s.record.impl.shape, s.record.impl.stride) not in laid_out)
                ],
                "not row-major in memory",
                "a kernel that reads it densely from its pointer gets other elements",
                "contiguous() before a raw pointer is handed on; nothing for PyTorch's own operators",
            ),
            (
                [s for s in subjects if s.record.impl.shape not in shapes and _has_odd_strides(s.record)],
                "dimensions of size 1 have strides of another format",
                "the bytes are row-major all the same; tests that read these strides choose another memory format",
                "nothing, or to(memory_format=...) again where the format matters",
            ),
        )
        for group, headline, why, fix in kinds:
            if group:
                yield self._fact(group, headline, why, fix)

    def _fact(self, group: Sequence[Subject], headline: str, why: str, fix: str) -> Finding:
        record = group[0].record
        more = f", and {plural(len(group) - 1, 'more tensor')}" if len(group) > 1 else ""
        return self.finding(
            group[0].read.name,
            headline=headline,
            subject=f"{describe(record)} stride {shape_text(record.impl.stride)}{more}",
            evidence={
                "stride": list(record.impl.stride),
                "memory_format": record.extent.memory_format,
                "is_conj": record.impl.is_conj,
                "is_neg": record.impl.is_neg,
                "contiguous": record.extent.contiguous,
                "tensors": [subject.read.name for subject in group],
            },
            why=why,
            fix=fix,
            source=_SOURCE,
        )

    def of_pair(self, a: Any, b: Any, *, gradient: bool = False) -> Finding | None:
        """Explain strides of two tensors of one shape that differ in dimensions of size 1 alone; None otherwise.

        Args:
            a: record of the first one.
            b: record of the second one.
            gradient: whether the second one is the gradient of the first.
        """
        one, two = a.impl, b.impl
        if one.stride is None or two.stride is None or one.shape != two.shape or one.stride == two.stride:
            return None
        steps = zip(one.shape, one.stride, two.stride, strict=True)
        if not all(size == 1 or first == second for size, first, second in steps):
            return None
        names = ("param_stride", "grad_stride") if gradient else ("stride_before", "stride_after")
        return self.finding(
            b.name,
            headline="strides differ in dimensions of size 1 alone",
            subject=f"{describe(b)} stride {shape_text(two.stride)} beside {shape_text(one.stride)}",
            evidence={
                names[0]: list(one.stride),
                names[1]: list(two.stride),
                "same_memory_order": True,
                "same_address": a.data is not None and b.data is not None and a.data.data_ptr == b.data.data_ptr,
                "tensors": [a.name, b.name],
            },
            why="the memory order is the same; tests that read these strides may choose another memory format, and "
            "DistributedDataParallel warns of its buckets",
            fix="nothing, or to(memory_format=...) again where the format matters",
            source=_SOURCE,
        )


def _has_odd_strides(record: Any) -> bool:
    """Tell whether an image is row-major, but for strides of dimensions of size 1 that say otherwise."""
    impl = record.impl
    if record.extent.contiguous is not True or impl.dim not in (4, 5) or 1 not in impl.shape:
        return False
    step = 1
    for size, stride in zip(reversed(impl.shape), reversed(impl.stride), strict=True):
        if size == 1 and stride != step:
            return True
        step *= size
    return False
