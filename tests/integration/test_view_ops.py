"""Every view operator of op_db, and random compositions: chains by replay, from autograd, and by inference alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tensorplay as tp
from tensorplay._native import C
from tensorplay.layers import ViewChain
from tensorplay.reports import Read
from tensorplay.views import chain_of
from tests.conftest import need

pytestmark = [pytest.mark.filterwarnings("ignore")]  # the samples themselves warn, in many ways

# What a chain calls an operator.
PLAIN = {"_conj": "conj", "_neg_view": "neg_view", "_reshape_alias": "reshape"}


class Called(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        self.names.append(PLAIN.get(name, name))
        return func(*args, **(kwargs or {}))


def geometry(x: torch.Tensor) -> tuple:
    return tuple(x.shape), x.stride(), x.storage_offset(), str(x.dtype).removeprefix("torch.")


def chain(x: torch.Tensor) -> ViewChain:
    """The chain of a view of autograd's; without a scan for other tensors, which takes longer than all the rest."""
    return chain_of(x, Read("x", C.read(x)).model(), lambda *_: [])


def end(found: ViewChain) -> tuple:
    if not found.steps:
        return found.shape, found.stride, found.storage_offset, found.dtype
    last = found.steps[-1]
    return last.shape, last.stride, last.storage_offset, last.dtype


def views_of(base: torch.Tensor, result: object) -> Iterator[torch.Tensor]:
    for x in tree_leaves(result):
        if isinstance(x, torch.Tensor) and x._is_view() and x._base is base and x.layout is torch.strided:
            yield x


def call(op, base: torch.Tensor, sample) -> object:
    try:
        return op(base, *sample.args, **sample.kwargs)
    except Exception:  # a sample that does not run without its own input
        return None


# Of an operator so many samples are tried that give no view before the next one's turn comes.
PATIENCE = 4
# Operators found to make none, so that they are not tried again.
_WITHOUT_VIEWS: set[str] = set()


def all_views(requires_grad: bool) -> Iterator[tuple[str, torch.Tensor, list[str]]]:
    """Name of the operator, a view that it made of a base of its own, and the names of all operators that ran."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        dtype = next((dtype for dtype in (torch.float32, torch.complex64) if dtype in op.dtypes), None)
        if dtype is None or (requires_grad and not op.supports_autograd) or op.name in _WITHOUT_VIEWS:
            continue
        fruitless = 0
        for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
            if not isinstance(sample.input, torch.Tensor) or sample.input.layout is not torch.strided:
                continue
            leaf = sample.input.detach().clone().requires_grad_(requires_grad)
            base = leaf * 1 if requires_grad else leaf
            with Called() as called:
                result = call(op, base, sample)
            views = list(views_of(base, result))
            yield from ((op.name, view, called.names) for view in views)
            fruitless = 0 if views else fruitless + 1
            if fruitless == PATIENCE:
                _WITHOUT_VIEWS.add(op.name)
                break


def test_replayed_operators_are_those_that_were_called(show):
    need("expecttest", find_spec("expecttest") is not None, "op_db imports it")
    compared, operators = 0, set()

    with tp.record_views():
        for name, view, called in all_views(requires_grad=False):
            found = chain(view)
            assert found.source == "replayed", (name, found)
            assert end(found) == geometry(view), name
            # Of what ran, the operators of this very view: others made other outputs.
            steps, ran = [step.op for step in found.steps], iter(called)
            assert all(step in ran for step in steps), (name, steps, called)
            compared += 1
            operators.add(name)

    show(f"op_db: {compared} views of {len(operators)} operators replayed as they were called")
    assert len(operators) > 40
    assert compared > 300


@pytest.mark.parametrize("requires_grad", [True, False])
def test_chains_reproduce_the_geometry_without_recording(requires_grad, show):
    need("expecttest", find_spec("expecttest") is not None, "op_db imports it")
    sources: Counter[str] = Counter()
    strided, operators = 0, set()

    for name, view, _ in all_views(requires_grad):
        found = chain(view)
        sources[found.source] += 1
        assert end(found) == geometry(view), name
        if any(step.op == "as_strided" for step in found.steps) and name != "as_strided":
            assert found.proven or found.note, name
            strided += 1
        operators.add(name)

    total = sum(sources.values())
    grad = "with grad" if requires_grad else "without grad"
    show(f"op_db {grad}: {total} views of {len(operators)} operators, {dict(sources)}, {strided} as_strided")
    assert total > 300
    assert strided <= 0.05 * total
    if requires_grad:
        assert sources["autograd"] > 0.8 * total


# -- random compositions ----------------------------------------------------------------------------------------------


KINDS = ("select", "slice", "narrow", "transpose", "permute", "t", "view", "unflatten", "flatten", "squeeze",
         "unsqueeze", "expand", "diagonal", "unfold", "real", "imag", "view_as_real", "dtype", "chunk",
         "unbind")  # fmt: skip


def random_view(x: torch.Tensor, choose: random.Random) -> torch.Tensor:
    """One view operator with arguments that fit; the tensor itself where none of that kind does."""
    dims = x.dim()
    kind = choose.choice(KINDS)
    dim = choose.randrange(dims) if dims else 0
    size = x.shape[dim] if dims else 0
    if kind == "unsqueeze" and dims < 6:
        return x.unsqueeze(choose.randint(0, dims))
    if kind == "expand" and dims < 6:
        sizes = [choose.randint(2, 3) if n == 1 else n for n in x.shape]
        return x.expand([choose.randint(1, 3)] * choose.randint(0, 1) + sizes)
    if kind in ("real", "imag", "view_as_real") and x.is_complex() and not x.is_conj():
        return getattr(torch, kind)(x)
    if kind == "dtype" and x.dtype is torch.float32:
        return x.view(torch.int32)
    if not dims or not size:
        return x
    if kind == "select":
        return x.select(dim, choose.randrange(size))
    if kind == "slice":
        start = choose.randrange(size)
        return x[(slice(None),) * dim + (slice(start, choose.randint(start + 1, size), choose.randint(1, 3)),)]
    if kind == "narrow":
        start = choose.randrange(size)
        return x.narrow(dim, start, choose.randint(1, size - start))
    if kind == "transpose":
        return x.transpose(dim, choose.randrange(dims))
    if kind == "permute":
        return x.permute(choose.sample(range(dims), dims))
    if kind == "t" and dims == 2:
        return x.t()
    if kind == "unflatten":
        factor = choose.choice([n for n in range(1, size + 1) if size % n == 0])
        return x.unflatten(dim, (factor, size // factor)) if dims < 6 else x
    if kind in ("view", "flatten") and x.is_contiguous():
        return x.view(-1)
    if kind == "squeeze":
        return x.squeeze()
    if kind == "diagonal" and dims >= 2:
        one, two = choose.sample(range(dims), 2)
        offset = choose.randint(-1, 1)
        taken = x.diagonal(offset, one, two)
        return taken if taken.numel() else x
    if kind == "unfold" and dims < 6:
        length = choose.randint(1, size)
        return x.unfold(dim, length, choose.randint(1, 3))
    if kind == "chunk":
        return choose.choice(x.chunk(2, dim))
    if kind == "unbind":
        return choose.choice(x.unbind(dim))
    return x


BASES = [(), (6,), (4, 6), (2, 3, 4), (1, 5, 1), (2, 2, 3, 2), (8, 197, 64), (64, 48)]


@pytest.mark.parametrize("how", ["grad", "no grad", "recorded"])
def test_random_compositions_reproduce(how, show):
    choose = random.Random(7)
    sources: Counter[str] = Counter()
    strided = unproven = total = 0

    while total < 4_000:
        dtype = choose.choice([torch.float32, torch.float32, torch.complex64])
        base = torch.zeros(choose.choice(BASES), dtype=dtype, requires_grad=how == "grad") * 1
        with tp.record_views(how == "recorded"):
            view = base
            for _ in range(choose.randint(1, 5)):
                view = random_view(view, choose)
        if not view._is_view() or view._base is not base:
            continue
        found = chain(view)
        total += 1
        sources[found.source] += 1
        assert end(found) == geometry(view), found
        if found.source == "inferred":
            if found.plainer:
                last = found.plainer[-1]
                assert (last.shape, last.stride, last.storage_offset, last.dtype) == geometry(view)
                assert not {step.op for step in found.plainer} & {"unfold", "diagonal", "as_strided"}
                assert len(found.plainer) > len(found.steps)
            if found.steps and found.steps[-1].op == "as_strided":
                strided += 1
                unproven += not found.proven
                assert found.note

    show(
        f"random compositions, {how}: {total} views, {dict(sources)}; as_strided {strided} "
        f"({100 * strided / total:.2f} %), of these not proven to be needed {unproven}"
    )
    assert strided <= 0.02 * total
    assert sources[{"grad": "autograd", "no grad": "inferred", "recorded": "replayed"}[how]] > 0.7 * total
