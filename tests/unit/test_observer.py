"""The observer changes nothing: every promise of docs/explanation/the-observer-changes-nothing.md."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tensorplay as tp
from tensorplay._native import C
from tests import helpers


def probe(x: torch.Tensor) -> None:
    """Every public probe, every field."""
    C.read(x)
    C.read_grad(x)
    C.impl_data_address(x)
    tp.inspect(x, quiet=True).to_json()
    tp.check({"x": x}).to_json()
    tp.check([x, {"again": x}])
    tp.verify_data_ptr_consistency(x)
    tp.is_safe_view(x).to_json()
    tp.recommend_fix(x).to_json()
    tp.compare(x, x).to_json()
    tp.list_shared_storages({"x": x}).to_json()
    tp.list_shared_storages().to_json()
    tp.dtensor.verify(x).to_json()


def ask_everything(x: torch.Tensor) -> None:
    """Every public probe, every field, every output."""
    probe(x)
    tp.inspect(x, quiet=True).text()
    str(tp.verify_data_ptr_consistency(x))
    str(tp.compare(x, x))
    str(tp.list_shared_storages({"x": x}))


def ask_for_the_chain(x: torch.Tensor) -> None:
    """The one probe that runs operators: on meta tensors of its own."""
    chain = tp.show_view_chain(x, quiet=True)
    chain.to_json()
    chain.text()


def native_facts(x: torch.Tensor) -> tuple:
    """What the probe could move, read by PyTorch's own accessors."""
    with torch._C.DisableTorchFunctionSubclass():
        storage = x.untyped_storage()._cdata
        return (
            x._use_count(),
            torch._C._storage_Use_Count(storage),
            None if x.is_inference() else x._version,
            sys.getrefcount(x),
            x.data_ptr(),
            torch._C._is_cow_tensor(x),
            len(weakref.getweakrefs(x)),
            gc.is_tracked(x),
        )


def make_view() -> torch.Tensor:
    return torch.randn(4, 6).t()[1:]


def make_non_leaf() -> torch.Tensor:
    return torch.randn(3, requires_grad=True) * 2


def make_leaf_with_grad() -> torch.Tensor:
    x = torch.randn(3, requires_grad=True)
    (x * x).sum().backward()
    return x


class Sharded(torch.Tensor):
    """A DTensor over an ordinary body."""


def make_dtensor() -> torch.Tensor:
    local = torch.randn(3)
    x = torch.Tensor._make_subclass(Sharded, local)
    x._local_tensor = local
    return x


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3),
        make_dtensor,
        make_view,
        make_non_leaf,
        make_leaf_with_grad,
        lambda: torch.nn.Parameter(torch.randn(3)),
        helpers.numpy_tensor,
        helpers.inference,
        lambda: torch.randn(3).as_subclass(helpers.Plain),
        lambda: torch._lazy_clone(torch.randn(3)),
    ],
)
def test_probe_leaves_counts_versions_and_memory_as_they_were(make):
    x = make()
    x.untyped_storage()  # once made, the wrapper stays: not the probe's doing
    before = native_facts(x)

    ask_everything(x)
    ask_for_the_chain(x)

    assert native_facts(x) == before


def test_native_read_makes_no_storage_wrapper():
    x = torch.randn(3)

    ask_everything(x)

    assert C.read(x).storage.use_count == 1
    assert not C.read(x).storage.has_python_wrapper


def test_no_operator_runs():
    x = torch.randn(4, 6)
    view = x.t()
    ran = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func)
            return func(*args, **(kwargs or {}))

    with tp.record_views():
        recorded = x[1:].t()
    with Count():
        ask_everything(x)
        ask_everything(view)
        for y in (x, view, recorded):
            ask_for_the_chain(y)
    with torch.profiler.profile() as profile:
        ask_everything(x)
        ask_everything(view)

    assert ran == []
    assert [event.key for event in profile.key_averages() if event.key.startswith("aten::")] == []


def test_no_python_of_the_tensor_class_runs():
    """Not __torch_function__, not __getattribute__, not __torch_dispatch__."""
    hostile = torch.randn(3).as_subclass(helpers.Hostile)
    wrapper = helpers.Wrapper(torch.randn(3))

    ask_everything(hostile)
    ask_everything(wrapper)

    assert C.read(hostile).python.type == "Hostile"


def test_subclass_that_answers_its_shape_in_python_is_not_asked():
    class Shaped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"the probe ran {func}")

    shaped = torch.Tensor._make_subclass(Shaped, torch.ones(3), dispatch_sizes_strides_policy="sizes")

    ask_everything(shaped)

    record = C.read(shaped)
    assert record.impl.python_decides_shape
    assert record.impl.shape == (3,)


def test_object_that_fakes_its_class_is_no_tensor_and_is_not_asked():
    class Liar:
        @property
        def __class__(self):
            raise AssertionError("the probe asked for __class__")

    proxied = torch.randn(3)

    assert not C.is_tensor(Liar())
    assert not C.is_tensor(weakref.proxy(proxied))
    assert tp.check({"liar": Liar(), "proxy": weakref.proxy(proxied)}).records == ()


def test_copy_on_write_storage_is_not_materialised():
    source = torch.randn(8)
    lazy = torch._lazy_clone(source)

    ask_everything(lazy)
    ask_everything(source)

    assert torch._C._is_cow_tensor(lazy)
    assert torch._C._is_cow_tensor(source)
    assert C.read(lazy).data.pointer == C.read(source).data.pointer


def test_stale_grad_fn_is_reported_and_not_rebuilt():
    base = torch.randn(4, requires_grad=True).clone()
    view = base[1:]
    base.mul_(2)

    before = C.read(view).impl
    ask_everything(view)
    after = C.read(view).impl

    assert (before.grad_fn, before.grad_fn_stale, before.is_leaf) == ("SliceBackward0", True, None)
    assert (after.grad_fn, after.grad_fn_stale) == ("SliceBackward0", True)
    assert view.grad_fn.name() == "AsStridedBackward0"  # PyTorch rebuilds it when Python asks
    assert C.read(view).impl.grad_fn_stale is False


def test_no_gradient_accumulator_is_made():
    x = torch.randn(3, requires_grad=True)
    before = C.read(x).impl

    ask_everything(x)

    # An AccumulateGrad node would hold the leaf as one more owner.
    assert C.read(x).impl.use_count == before.use_count == 1


def test_saved_tensor_hooks_are_not_unpacked():
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: (unpacked.append(t), t)[1]):
        x = torch.randn(3, requires_grad=True)
        y = (x * x).sum()

    ask_everything(y)
    ask_everything(x)

    assert unpacked == []
    y.backward()
    assert unpacked


def test_gradient_gets_no_python_object():
    x = make_leaf_with_grad()

    grad = C.read_grad(x)

    assert grad.python is None
    assert grad.impl.use_count == 1
    assert C.read_grad(x).python is None


def test_report_keeps_no_tensor_alive():
    x = torch.randn(3)
    gone = weakref.ref(x)
    report = tp.inspect(x, "a label", quiet=True)
    checked = tp.check({"x": x})

    del x

    assert gone() is None
    assert report.records[0].impl.shape == checked.records[0].impl.shape == (3,)


def test_report_made_late_describes_the_moment_of_the_call():
    x = torch.zeros(3)
    report = tp.inspect(x, quiet=True)

    x.add_(1)
    x.resize_(5)

    assert report.records[0].impl.version == 0
    assert report.records[0].impl.shape == (3,)


def test_profiler_starts_and_swapping_the_impl_still_works_after_a_probe():
    x, y = torch.randn(3), torch.randn(3)
    ask_everything(x)

    with torch.profiler.profile():
        x.add(1)
    torch.utils.swap_tensors(x, y)  # refuses while anybody holds a weak reference


def allocated_blocks() -> int:
    """What is allocated, without garbage and without the names that CPython's cache of methods keeps."""
    gc.collect()
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()
    return sys.getallocatedblocks()


def test_nothing_grows():
    x = torch.randn(4, 6).t()
    grown = []
    ask_everything(x)
    # Without text: what renders it keeps the widths of thousands of words. What leaks grows in every round; msgspec's
    # cache of keys grows and is emptied again.
    while len(grown) < 25:
        before = allocated_blocks()
        for _ in range(20):
            probe(x)
        grown.append(allocated_blocks() - before)
        if grown[-1] < 20:  # less than one a round
            return

    raise AssertionError(f"grew in every round: {grown}")


def test_memory_of_released_storage_is_not_touched():
    """Reading an element would end this process."""
    view, flat = helpers.released()

    ask_everything(view)
    ask_everything(flat)
    ask_everything(helpers.null_pointer())

    assert C.read(view).data.data_ptr == 8


def test_compiled_code_breaks_at_a_probe_and_is_read_as_it_is():
    found = []

    @torch.compile(backend="eager")
    def step(x):
        y = x * 2
        found.append(tp.inspect(y, quiet=True).records[0])
        found.append(tp.check({"y": y}).records[0])
        return y + 1

    torch._dynamo.reset()
    step(torch.ones(3))

    breaks = torch._dynamo.utils.counters["graph_break"]
    assert breaks
    assert all("tensorplay reads live tensors" in reason for reason in breaks)
    assert all(record.kind == "strided" and record.impl.use_count == 1 for record in found)
    torch._dynamo.reset()
