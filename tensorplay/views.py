"""View chains: by which operators a tensor came from its base.

Three passive sources, best first: the view function that PyTorch kept is replayed on a meta tensor; the nodes between
the view and its base are read; the operators are solved from the geometry alone. No operator runs on a user's tensor;
the meta tensors are this module's own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import msgspec
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tensorplay.callers import Caller
from tensorplay.inspection import in_ipython, outside_compiled_code, print_report, read_one, report_of
from tensorplay.layers import TensorRecord, ViewAlias, ViewChain, ViewSource, ViewStep
from tensorplay.live import Live, scope_names
from tensorplay.reports import Read, Report
from tensorplay.walk import find_tensors
from tensorplay.words import describe

__all__ = ["ChainReport", "chain_of", "chains_below", "record_views", "show_view_chain", "view_code"]

_MOST_ALIASES = 8
_PATIENT_NODES = 3_000_000
"""Geometries looked at, half a second at most, for the one view in five hundred whose chain is not found at once."""


class record_views:
    """Make PyTorch keep the function of every view made from now on, so that their chains are exact.

    Called as a function it holds until it is called with False; as a context manager until the block ends. It is the
    switch of one thread, as grad mode is.

    Args:
        mode: whether to keep them.

    Raises:
        TypeError: mode is no bool.

    Cost: 0.1-0.4 microseconds a view, and the memory of a small object. PyTorch then keeps the tensors that a view was
        made from, one operator after the other, as long as the view.

    Source: torch/csrc/autograd/variable.h ``ViewFunc``; torch/csrc/autograd/autograd_not_implemented_fallback.cpp; the
        switch is that of ``torch.autograd.grad_mode._force_original_view_tracking``, torch 2.13 and 2.14.
    """

    def __init__(self, mode: bool = True) -> None:
        if type(mode) is not bool:
            raise TypeError(f"record_views() takes True or False, got {type(mode).__name__}")
        self._before = torch._C._is_view_replay_enabled()
        torch._C._set_view_replay_enabled(mode)

    def __enter__(self) -> None:
        """Keep them until the block ends."""

    def __exit__(self, *_: object) -> None:
        """Go back to what was set before."""
        torch._C._set_view_replay_enabled(self._before)


class ChainReport(Report):
    """A report whose text is the view chain; ``mermaid()`` and ``dot()`` draw it for other tools."""

    __slots__ = ()
    about = ("chains",)

    @property
    def chain(self) -> ViewChain:
        """The chain: ``.base``, ``.steps``, ``.source``, ``.aliases``."""
        return self.document.chains[0]

    def mermaid(self) -> str:
        """Answer the chain as a Mermaid flowchart."""
        from tensorplay.render.chain import mermaid

        return mermaid(self.chain)

    def dot(self) -> str:
        """Answer the chain as a graph for Graphviz."""
        from tensorplay.render.chain import dot

        return dot(self.chain)

    def svg(self) -> str:
        """Answer the chain as an SVG picture."""
        from tensorplay.render.chain import chain_picture

        return chain_picture(self.chain).svg


@outside_compiled_code
def show_view_chain(x: torch.Tensor, *, base: torch.Tensor | None = None, quiet: bool = False) -> ChainReport:
    """Show by which operators a tensor came from its base: base, each step, tensor.

    Each step says how it is known: *replayed* (PyTorch kept the view function, as ``record_views()`` makes it),
    *autograd* (a node and its saved arguments), or *inferred* (solved from the geometry, and checked to reproduce size,
    stride and offset exactly; the shortest chain, ``as_strided`` only where no chain of up to 4 named operators
    exists). Detached aliases, which PyTorch calls no view, are shown as aliases.

    Args:
        x: a tensor of any kind.
        base: what to begin with, in place of autograd's base, the best alias, or the bare storage.
        quiet: print nothing. Inside IPython nothing is printed either: the report shows itself.

    Returns:
        The report: ``.chain``, ``str()``, ``.to_json()``, ``.html()``, ``.svg()``, ``.mermaid()``, ``.dot()``.

    Raises:
        TypeError: x or base is no tensor.
        ValueError: base lies in another storage.

    Cost: a scan of the process's objects, some 15 ms beside torch alone; half a second where a chain is hard to
        find; a second for the first view that is replayed, which makes PyTorch import its meta operators. Runs the
        recorded view operators on meta tensors of its own, and nothing on x.

    Source: torch/csrc/autograd/variable.h ``ViewInfo``, ``DifferentiableViewMeta``; torch/csrc/autograd/generated/
        Functions.h; c10/core/TensorImpl.h ``sizes_and_strides_``, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    read = read_one(x, "show_view_chain", calls=2)
    start = None
    if base is not None:
        if not C.is_tensor(base):
            raise TypeError(f"show_view_chain(base=) takes a torch.Tensor, got {type(base).__name__}")
        start = C.read(base)
        if start.storage is None or read.record.storage is None or (
            start.storage.address != read.record.storage.address
        ):  # fmt: skip
            raise ValueError("show_view_chain(base=) takes a tensor over the same storage as x")
    report = report_of([read], caller, report_unused=False)
    record = report.records[0]
    over = Neighbours(scope_names())
    chain = chain_of(x, record, over, None if start is None else ("base", start))
    shown = ChainReport.from_document(report.document)
    shown.replace_document(chains=(chain,), focus="chains")
    if not quiet and not in_ipython():
        print_report(shown)
    return shown


_MOST_CHAINS = 3
"""So many tensors of one object are asked for their chains."""


def chains_below(name: str, value: object) -> tuple[ViewChain, ...]:
    """Answer the chains of the tensors in an object; none where they are many."""
    found = find_tensors([(name, value)], most=_MOST_CHAINS)
    if found.cut:
        return ()
    over = Neighbours(scope_names())
    chains = []
    for place in found.places:
        if place.tensor is not None:
            record = Read(place.path, C.read(place.tensor)).model()
            chains.append(chain_of(place.tensor, record, over))
    return tuple(chains)


_METHODS = frozenset(
    ["as_strided", "diagonal", "expand", "permute", "squeeze", "transpose", "unflatten", "unfold", "unsqueeze", "view"]
)


def view_code(x: torch.Tensor, name_of: Callable[[Any], str | None]) -> str | None:
    """Answer an expression that makes a view again from its base, by what name_of() calls that; None where none does.

    Slices and methods alone, each of which makes one view.
    """
    view = C.view_of(x)
    base = None if view is None or view[1] is None else name_of(view[1])
    if view is None or base is None:
        return None
    start, target = _Geometry.of(view[0]), _Geometry.of(C.read(x))
    if start is None or target is None:
        return None
    code = base
    for step in _inferred(start, target).steps:
        args = step.args
        if step.op in ("narrow", "slice", "select"):
            if step.op == "select":
                index = str(args["index"])
            else:
                end = args["start"] + args["length"] if step.op == "narrow" else args["end"]
                index = f"{args['start'] or ''}:{end}" + (f":{args['step']}" if step.op == "slice" else "")
            code += f"[{':, ' * args['dim']}{index}]"
        elif step.op in _METHODS:
            code += f".{step.op}({', '.join(f'{name}={value}' for name, value in args.items())})"
        else:
            return None
    return f"{base}[:]" if code == base else code


class Neighbour(NamedTuple):
    """Another live tensor over a storage."""

    name: str
    named: bool
    """Whether that is a name, or what it is."""
    record: Any


class Neighbours:
    """Finds the other live tensors over a storage, and what they are called. Made for one call."""

    def __init__(self, names: Iterable[tuple[str, Any]]) -> None:
        self._live = Live()
        self._names: dict[int, str] = {}
        for name, value in names:
            if C.is_tensor(value):
                self._names.setdefault(id(value), name)

    def __call__(self, x: torch.Tensor, storage: int) -> list[Neighbour]:
        """Answer the live tensors over a storage, other than one; those with a name first."""
        found = []
        for tensor, record in self._live.over([storage])[storage]:
            if tensor is not x:
                name = self._names.get(id(tensor))
                found.append(Neighbour(name or f"an unnamed {describe(record)}", name is not None, record))
        return sorted(found, key=lambda neighbour: not neighbour.named)


class _Geometry(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    itemsize: int
    is_complex: bool
    is_conj: bool
    is_neg: bool
    dtype: str

    @classmethod
    def of(cls, record: Any) -> _Geometry | None:
        """Answer a record's geometry where it is made of numbers."""
        impl = record.impl
        if impl.stride is None or impl.shape is None or impl.is_symbolic or not impl.itemsize:
            return None
        is_complex = impl.dtype.startswith("complex")
        flags = (impl.itemsize, is_complex, impl.is_conj, impl.is_neg, impl.dtype)
        return cls(tuple(impl.shape), tuple(impl.stride), impl.storage_offset, *flags)

    @classmethod
    def flat(cls, record: Any) -> _Geometry | None:
        """Answer the whole storage as one row of elements of a record's type."""
        impl, extent = record.impl, record.extent
        if extent is None or not extent.storage_nbytes or not impl.itemsize:
            return None
        is_complex = impl.dtype.startswith("complex")
        return cls(
            (extent.storage_nbytes // impl.itemsize,), (1,), 0, impl.itemsize, is_complex, False, False, impl.dtype
        )

    @classmethod
    def of_meta(cls, tensor: torch.Tensor) -> _Geometry:
        """Answer the geometry of a meta tensor of ours."""
        flags = (tensor.element_size(), tensor.is_complex(), tensor.is_conj(), tensor.is_neg())
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), *flags, dtype)

    def meta(self) -> torch.Tensor:
        """Make a meta tensor of this geometry."""
        cells = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True) if size)
        dtype: torch.dtype = getattr(torch, self.dtype)
        tensor = torch.empty(self.offset + cells, dtype=dtype, device="meta")
        tensor = torch.as_strided(tensor, self.shape, self.stride, self.offset)
        tensor = torch._conj(tensor) if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor

    def step(self, op: str, args: dict[str, Any], source: ViewSource, output: int | None = None) -> ViewStep:
        """Answer the step that made this."""
        return ViewStep(
            op=op,
            args=args,
            output=output,
            shape=self.shape,
            stride=self.stride,
            storage_offset=self.offset,
            dtype=self.dtype,
            source=source,
        )


class _Solved(NamedTuple):
    steps: tuple[ViewStep, ...]
    source: ViewSource
    proven: bool = True
    note: str | None = None
    plainer: tuple[ViewStep, ...] = ()


def chain_of(
    x: torch.Tensor, record: TensorRecord, over: Callable[[torch.Tensor, int], list[Neighbour]],
    base: tuple[str, Any] | None = None,
) -> ViewChain:  # fmt: skip
    """Answer how a tensor came to be a view.

    Args:
        x: the tensor.
        record: what was read of it.
        over: finds the other tensors over its storage.
        base: what it is to begin with: a name, where no variable has one, and the native record.
    """
    target = _Geometry.of(record)
    if target is None:
        if record.impl.is_symbolic:
            return _unknown(record, "its sizes and strides are expressions, not numbers")
        reasons = (record.absent.get(field) for field in ("impl.shape", "impl.stride"))
        return _unknown(record, next(filter(None, reasons), f"a {record.kind} tensor has no strides of its own"))
    others = [] if record.storage is None else over(x, record.storage.address)
    if base is not None:
        name = next((o.name for o in others if o.named and o.record.impl.address == base[1].impl.address), base[0])
        return _from(record, target, "base", name, base[1], others)
    view = C.view_of(x)
    moved = None
    if view is not None and record.storage is not None:
        its = view[0].storage
        if its is None or its.address != record.storage.address:  # set_() or .data gave it other memory
            moved, view = "autograd's base has another storage since", None
    if view is not None:
        root = view[0]
        named = next((o.name for o in others if o.named and o.record.impl.address == root.impl.address), None)
        name = named or f"its base, {describe(root)}"
        start = _Geometry.of(root)
        solved = None
        if start is not None:
            solved = (None if view[2] is None else _replayed(x, start, target)) or _from_nodes(x, start, target)
            if solved is not None and record.impl.version:
                solved = _before_the_write(solved, start, target)
        return _from(record, target, "base", name, root, others, solved)
    chosen = _best_alias(record, others)
    if chosen is not None:
        found = _from(record, target, "alias", chosen.name, chosen.record, others)
        return found if moved is None else msgspec.structs.replace(found, note=moved)
    flat = _Geometry.flat(record)
    extent = record.extent
    if flat is None or extent is None or extent.visible_nbytes == extent.storage_nbytes or record.data is None:
        aliases = _aliases(record, record.impl.address, others)
        return _chain(record, "itself", record.name, target, _Solved((), "inferred"), aliases)
    note = moved or "no live tensor is known that it came from: begun with the bytes of its storage"
    solved = _inferred(flat, target)
    return _chain(record, "storage", f"its storage, {flat.dtype}[{flat.shape[0]}]", flat, solved, (), note)


def _from(
    record: TensorRecord, target: _Geometry, begins: Any, name: str, root: Any, others: list[Neighbour],
    solved: _Solved | None = None,
) -> ViewChain:  # fmt: skip
    start = _Geometry.of(root)
    if start is None:
        return _unknown(record, "its base has no strides of its own")
    solved = solved or _inferred(start, target)
    if begins == "alias":
        counter = record.impl.version_counter
        shares = counter is not None and counter == root.impl.version_counter
        detach = start.step("detach" if shares else ".data", {}, "inferred")
        solved = solved._replace(steps=(detach, *solved.steps))
    return _chain(record, begins, name, start, solved, _aliases(record, root.impl.address, others))


def _chain(
    record: TensorRecord, begins: Any, base: str, start: _Geometry, solved: _Solved, aliases: tuple[ViewAlias, ...],
    note: str | None = None,
) -> ViewChain:  # fmt: skip
    return ViewChain(
        name=record.name,
        begins=begins,
        base=base,
        shape=start.shape,
        stride=start.stride,
        storage_offset=start.offset,
        dtype=start.dtype,
        steps=solved.steps,
        source=solved.source,
        proven=solved.proven,
        aliases=aliases,
        note="; ".join(filter(None, (note, solved.note))) or None,
        plainer=solved.plainer,
    )


def _unknown(record: TensorRecord, why: str) -> ViewChain:
    return ViewChain(
        name=record.name,
        begins="itself",
        base=record.name,
        shape=(),
        stride=(),
        storage_offset=0,
        dtype=record.impl.dtype,
        steps=(),
        source="unknown",
        proven=False,
        note=why,
    )


def _root(impl: Any) -> int:
    """Answer the TensorImpl that autograd calls the root of a tensor's views: its base, or itself."""
    root: int = impl.address if impl.base is None else impl.base
    return root


def _best_alias(record: TensorRecord, others: Iterable[Neighbour]) -> Neighbour | None:
    """Choose what a tensor that is no view was taken from: the one that reaches more than it does, and most."""
    extent = record.extent
    if extent is None or extent.storage_nbytes is None:
        return None
    reach = extent.visible_nbytes or 0

    def covers(other: Any) -> bool:
        its = other.extent
        if its is None or its.visible_nbytes is None or other.impl.stride is None or its.visible_nbytes <= reach:
            return False
        return bool(its.first_byte <= extent.first_byte and extent.needed_nbytes <= its.needed_nbytes)

    fitting = [o for o in others if (o.named or o.record.impl.base is None) and covers(o.record)]
    return max(fitting, key=lambda o: (o.record.extent.visible_nbytes, o.named), default=None)


def _aliases(record: TensorRecord, root: int, others: Iterable[Neighbour]) -> tuple[ViewAlias, ...]:
    """Answer the tensors over the storage that autograd connects with neither the tensor nor its base by a view."""
    connected = {root, _root(record.impl)}
    counter = record.impl.version_counter
    found = [
        ViewAlias(
            name=other.name,
            impl=other.record.impl.address,
            shares_version=counter is not None and other.record.impl.version_counter == counter,
        )
        for other in others
        if _root(other.record.impl) not in connected and other.record.impl.base is None
    ]
    return tuple(found[:_MOST_ALIASES])


# -- replayed ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keep the modes of the user's code, and autograd, from our meta tensors."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


class _Call(NamedTuple):
    func: Any
    on: Any
    args: dict[str, Any]
    result: Any


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Notes the operators that run on our meta tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        self.calls.append(_Call(func, given.pop(names[0], None), given, result))
        return result


def _replayed(x: torch.Tensor, start: _Geometry, target: _Geometry) -> _Solved | None:
    """Replay PyTorch's own view function on a meta tensor, and note the operators."""
    with _alone():
        meta = start.meta()
        with _Recorder() as recorder:
            try:
                last = torch._C.TensorBase._view_func_unsafe(x, meta)
            except Exception:  # an operator without a meta kernel; the other sources remain
                return None
        if last is None or _Geometry.of_meta(last) != target:
            return None
        steps = []
        for call, goes_on in zip(recorder.calls, [*(call.on for call in recorder.calls[1:]), last], strict=True):
            output, result = None, call.result
            if isinstance(result, (list, tuple)):
                # The objects outlive the call, so that the next one gets the same.
                output = next((number for number, item in enumerate(result) if item is goes_on), None)
                if output is None:
                    return None
                result = result[output]
            if not isinstance(result, torch.Tensor):
                return None
            name = call.func._schema.name.partition("::")[2]
            steps.append(_Geometry.of_meta(result).step(_plain_name(name), _plain(call.args), "replayed", output))
    strided = any(step.op == "as_strided" for step in steps)
    note = "PyTorch writes as_strided for itself and for view operators without record_views()" if strided else None
    return _Solved(tuple(steps), "replayed", True, note)


def _plain_name(op: str) -> str:
    return {"_conj": "conj", "_neg_view": "neg_view", "_reshape_alias": "reshape"}.get(op, op)


def _plain(args: dict[str, Any]) -> dict[str, Any]:
    """Answer arguments as JSON has them."""
    return {name: _plain_value(value) for name, value in args.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain_value(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value).removeprefix("torch.")


# -- autograd ---------------------------------------------------------------------------------------------------------


def _names(*names: str) -> Callable[[dict[str, Any], tuple[int, ...], int], tuple[dict[str, Any], int | None]]:
    return lambda args, shape, output: ({name: args[name] for name in names}, None)


def _one_of(*names: str) -> Callable[[dict[str, Any], tuple[int, ...], int], tuple[dict[str, Any], int | None]]:
    return lambda args, shape, output: ({name: args[name] for name in names}, output)


# Operator and arguments of each node that autograd makes for a view (tools/autograd/derivatives.yaml). What a node does
# not keep is the shape of its output.
_NODES: dict[str, tuple[str, Callable[[dict[str, Any], tuple[int, ...], int], tuple[dict[str, Any], int | None]]]] = {
    "AliasBackward0": ("alias", _names()),
    "AsStridedBackward0": ("as_strided", _names("size", "stride", "storage_offset")),
    "ConjBackward0": ("_conj", _names()),
    "DiagonalBackward0": ("diagonal", _names("offset", "dim1", "dim2")),
    "ExpandBackward0": ("expand", lambda args, shape, output: ({"size": shape}, None)),
    "NegViewBackward0": ("_neg_view", _names()),
    "PermuteBackward0": ("permute", _names("dims")),
    "SelectBackward0": ("select", _names("dim", "index")),
    "SliceBackward0": ("slice", _names("dim", "start", "end", "step")),
    "SplitBackward0": ("split", _one_of("split_size", "dim")),
    "SplitWithSizesBackward0": ("split_with_sizes", _one_of("split_sizes", "dim")),
    "SqueezeBackward0": ("squeeze", _names()),
    "SqueezeBackward1": ("squeeze", _names("dim")),
    "SqueezeBackward2": ("squeeze", _names("dim")),
    "TBackward0": ("t", _names()),
    "TransposeBackward0": ("transpose", _names("dim0", "dim1")),
    "UnbindBackward0": ("unbind", _one_of("dim")),
    "UnfoldBackward0": ("unfold", _names("dimension", "size", "step")),
    "UnsqueezeBackward0": ("unsqueeze", _names("dim")),
    "ViewAsComplexBackward0": ("view_as_complex", _names()),
    "ViewAsRealBackward0": ("view_as_real", _names()),
    "ViewBackward0": ("view", lambda args, shape, output: ({"size": shape}, None)),
}


def _from_nodes(x: torch.Tensor, start: _Geometry, target: _Geometry) -> _Solved | None:
    """Read the nodes between base and view; each operator is checked on a meta tensor."""
    nodes = C.view_nodes(x)
    if not nodes:
        return None
    steps = []
    with _alone():
        meta = start.meta()
        for node, output, saved, shape in nodes:
            entry = _NODES.get(node)
            if entry is None or shape is None:
                return None
            op, arguments = entry
            try:
                args, taken = arguments(saved, shape, output)
                result = getattr(torch.ops.aten, op)(meta, **args)
            except (KeyError, RuntimeError, ValueError, IndexError, TypeError):  # the node kept something else
                return None
            meta = result if taken is None else result[taken]
            geometry = _Geometry.of_meta(meta)
            if geometry.shape != shape:
                return None
            steps.append(geometry.step(_plain_name(op), _plain(args), "autograd", taken))
    return _Solved(tuple(steps), "autograd") if geometry == target else None


def _before_the_write(solved: _Solved, start: _Geometry, target: _Geometry) -> _Solved:
    """Answer named operators in place of the node that PyTorch gives a view once it or its base was written."""
    if solved.source != "autograd" or [step.op for step in solved.steps] != ["as_strided"]:
        return solved
    note = "autograd's node says as_strided: PyTorch writes that, whatever was run, once a view or its base was written"
    named = _inferred(start, target)
    ops = [step.op for step in named.steps]
    if not ops or "as_strided" in ops or (len(ops) > 1 and "unfold" in ops):  # nothing that is more likely to be run
        return solved._replace(note=note)
    return named._replace(note="; ".join(filter(None, (named.note, note))))


# -- inferred ---------------------------------------------------------------------------------------------------------


def _inferred(start: _Geometry, target: _Geometry) -> _Solved:
    """Solve the operators from the two geometries."""
    answer = C.infer_chain(start, target)
    if not answer["complete"] and answer["steps"][-1][0] == "as_strided":
        answer = C.infer_chain(start, target, max_nodes=_PATIENT_NODES)
    steps = _steps(start, answer)
    note = None
    plainer: tuple[ViewStep, ...] = ()
    if len(steps) > 1 and any(step.op in ("unfold", "diagonal") for step in steps):
        longer = _steps(start, C.infer_chain(start, target, plain=True))
        if longer[-1].op != "as_strided" and len(longer) <= len(steps):
            steps = longer
        elif longer[-1].op != "as_strided":
            plainer = longer
    if steps and steps[-1].op == "as_strided":
        tried = answer["ruled_out"]
        note = (
            "no chain of up to 4 named operators gives this geometry"
            if answer["complete"]
            else f"no chain of named operators was found; those of up to {max(0, tried)} were all tried"
        )
    return _Solved(steps, "inferred", bool(answer["complete"]), note, plainer)


def _steps(start: _Geometry, answer: Any) -> tuple[ViewStep, ...]:
    steps = []
    for op, args, shape, stride, offset, dtype in answer["steps"]:
        start = start._replace(shape=shape, stride=stride, offset=offset, dtype=dtype or start.dtype)
        steps.append(start.step(op, _plain(args), "inferred"))
    return tuple(steps)
