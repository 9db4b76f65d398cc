"""Counts mean what they say: the probe's own references are taken off."""

from __future__ import annotations

import sys

import torch

import tensorplay as tp
from tensorplay._native import C


def _seen_from_a_call(x: object) -> int:
    return sys.getrefcount(x)


_SAMPLE = object()
_CALLS_OWN = _seen_from_a_call(_SAMPLE) - 1  # how many a call and getrefcount() add differs by Python version


def refcount(x: object) -> int:
    """References to x beside this call's and getrefcount's own."""
    return sys.getrefcount(x) - _CALLS_OWN


def record_of(report: tp.Report, name: str = "") -> tp.TensorRecord:
    return next(record for record in report.records if record.name.endswith(name))


def test_refcount_is_the_users_alone_through_every_call():
    x = torch.ones(3)
    expected = refcount(x)

    assert expected == 1
    assert C.read(x).python.refcount == expected
    assert tp.inspect(x, quiet=True).records[0].python.refcount == expected
    assert tp.inspect(x, "label", quiet=True).records[0].python.refcount == expected
    assert tp.check(x).records[0].python.refcount == expected
    assert tp.verify_data_ptr_consistency(x).report.records[0].python.refcount == expected


def test_refcount_through_the_printing_calls(capsys):
    x = torch.ones(3)

    assert tp.inspect(x).records[0].python.refcount == 1
    assert tp.inspect_data_ptr(x).records[0].python.refcount == 1
    assert tp.inspect_storage_device(x).records[0].python.refcount == 1
    assert "refcount 1" in capsys.readouterr().err


def test_refcount_in_containers_counts_the_containers():
    x, y = torch.ones(3), torch.ones(2)
    parameter = torch.nn.Parameter(torch.ones(2))
    nested = [{"a": x}, (y, parameter)]
    objs = {"x": x}

    found = tp.inspect(nested, quiet=True)
    checked = tp.check(objs)

    assert [record.python.refcount for record in found.records] == [refcount(x), refcount(y), refcount(parameter)]
    assert checked.records[0].python.refcount == refcount(x)


def test_refcount_of_a_subclass_goes_the_longer_way():
    x = torch.ones(3).as_subclass(type("Tagged", (torch.Tensor,), {}))

    assert tp.inspect(x, quiet=True).records[0].python.refcount == refcount(x)


def test_two_tensors_are_read_into_one_report():
    x = torch.ones(4, 6)
    view = x.t()

    report = tp.inspect(x, view, quiet=True)

    assert [record.python.refcount for record in report.records] == [refcount(x), refcount(view)]
    assert report.records[0].storage.address == report.records[1].storage.address
    assert "use_count 2: x and view" in str(report)


def test_temporary_has_no_reference_but_the_call():
    assert tp.inspect(torch.ones(3), quiet=True).records[0].python.refcount == 0


def test_storage_owners_are_named_and_the_rest_is_counted():
    x = torch.ones(4)
    views = [x[1:], x[2:]]

    alone = str(tp.inspect(x, quiet=True))
    together = tp.inspect({"x": x, "a": views[0]}, quiet=True).text(width=200)

    assert "use_count 3: x and 2 more owners" in alone
    assert "use_count 3: the Python object and 2 more owners" in alone
    assert "use_count 3: x['x'], x['a'] and 1 more owner\n" in together


def test_storage_wrapper_is_counted_as_the_owner_it_is():
    x = torch.ones(4)
    storage = x.untyped_storage()

    record = tp.inspect(x, quiet=True).records[0]

    assert record.storage.use_count == 2
    assert record.storage.has_python_wrapper
    assert "use_count 2: x and a live UntypedStorage object" in str(tp.inspect(x, quiet=True))
    del storage


def test_weak_references_are_counted():
    import weakref

    x = torch.ones(3)
    assert not C.read(x).python.has_weakrefs
    reference = weakref.ref(x)

    assert C.read(x).python.has_weakrefs
    assert C.read(x).impl.weak_count == 0
    weak = torch._C._WeakTensorRef(x)
    assert C.read(x).impl.weak_count == 1
    del reference, weak
    assert C.read(x).impl.weak_count == 0


def test_reference_counts_hold_for_what_is_reached_twice():
    x, y = torch.ones(3), torch.ones(2)
    twice = tp.inspect(x, x, quiet=True)
    alone = refcount(x)
    pair = [x, (x, y)]
    listed = tp.inspect(pair, quiet=True)
    names = {"one": x, "two": x}
    named = tp.check(names)

    assert twice.records[0].python.refcount == alone
    assert [record.python.refcount for record in listed.records] == [alone + 2, refcount(y)]
    assert named.records[0].python.refcount == refcount(x) == alone + 4


def test_reference_counts_hold_for_what_pytree_hands_out():
    from torch.utils import _pytree

    class Holder:
        def __init__(self, x):
            self.x = x

    _pytree.register_pytree_node(
        Holder, lambda holder: ([holder.x], None), lambda items, _: Holder(*items), serialized_type_name="tests.Holder"
    )
    x = torch.ones(3)
    holder = Holder(x)

    assert tp.inspect(holder, quiet=True).records[0].python.refcount == refcount(x)
