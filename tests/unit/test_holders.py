"""who_holds(): paths that a program would use, and counts that add up."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import gc
import json
import re
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import tensorplay
from tensorplay._native import C
from tensorplay.reports import Report
from tests.situations import SITUATIONS


def paths(report: Any) -> list[str]:
    return [holder.path for holder in report.holders]


# Where the situation's own name for the tensor is told, the path must hold it.
NAMED = {
    "in_list": r"kept\[0\]",
    "twice_in_dict": r"kept\['b'\]",
    "key_of_dict": r"kept\.keys\(\)",
    "in_set": r"kept\{\.\.\.\}",
    "in_deque": r"kept\[0\]",
    "in_slot": r"kept\.x",
    "in_attribute": r"kept\.x",
    "in_materialised_dict": r"kept\[0\]\.x|kept\[1\]\['x'\]",
    "in_class_attribute": r"kept\.x",
    "in_property": r"closure variable x",
    "in_closure": r"kept → closure variable x",
    "in_defaults": r"kept\.__defaults__\[0\]",
    "in_partial": r"kept\.args\[0\]",
    "in_bound_method": r"kept\.__self__",
    "in_lru_cache": r"kept \(a cached result\)",
    "in_generator": r"kept → x in .*generate \(situations\.py:\d+\)",
    "in_coroutine": r"kept → x in .*run \(situations\.py:\d+\)",
    "in_exception": r"kept → x in .*fail \(situations\.py:\d+\)",
    "in_exception_arguments": r"kept\.args\[0\]",
    "in_other_thread": r"situations\.py:\d+ in .*run \(thread Thread-.*\): x",
    "in_thread_local": r"kept of one thread\.x",
    "in_context_variable": r"thread MainThread: context variable",
    "in_queue": r"kept\.queue\[0\]",
    "by_node_alone": r"kept",
    "by_custom_function": r"kept\.grad_fn \(ExponentialBackward\)",
    "by_gradient_object": r"kept\[0\]\.grad|kept\[1\]",
    "by_model_and_optimizer": r"kept\[0\]\.0\.weight",
    "inside_subclass_attribute": r"kept\.extra",
    "by_array": r"kept\.base",
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_nothing_is_unaccounted_for(name):
    gc.collect()
    before = {id(x) for x in C.live_graph()[0]}
    kept = SITUATIONS[name]()
    found = []
    # One at a time: a list of them would be a holder.
    for x in C.live_graph()[0]:
        if id(x) not in before:
            report = tensorplay.who_holds(x)
            assert report.unaccounted == 0, report
            assert report.state == "reached"
            found += paths(report)
    if name in NAMED:
        assert any(re.search(NAMED[name], path) for path in found), found
    del kept


def test_views_saves_and_gradients_are_holders():
    x = torch.ones(4, requires_grad=True)
    y = x.exp()
    view = x[1:]
    report = tensorplay.who_holds(x)

    found = {(holder.how, holder.path.rpartition(": ")[2]) for holder in report.holders}
    assert ("base", "view") in found
    assert ("reference", "x") in found
    assert any(how == "variable" and "AccumulateGrad" in path for how, path in found)
    del y, view


def test_a_view_is_one_holder():
    x = torch.ones(4)
    view = x[1:]

    report = tensorplay.who_holds(x)

    assert [holder.how for holder in report.holders].count("base") == 1
    assert "storage" not in [holder.how for holder in report.holders]
    assert report.ledgers[2].equation == "storage use_count 2 = 1 its TensorImpl + 1 other TensorImpl"
    del view


def test_a_frame_is_named_with_its_line():
    x = torch.ones(4)

    (holder,) = tensorplay.who_holds(x).holders

    assert (holder.root, holder.file) == ("frame", __file__)
    assert holder.line == test_a_frame_is_named_with_its_line.__code__.co_firstlineno + 3
    assert holder.path.endswith("test_a_frame_is_named_with_its_line: x")


def test_an_argument_nobody_else_has_is_held_by_the_call_alone():
    report = tensorplay.who_holds(torch.ones(3))

    assert not report.holders
    # Before Python 3.11 the caller's evaluation stack keeps the argument meanwhile.
    terms = {"refcount 1 = 1 of this call", "refcount 2 = 1 of this call + 1 on the evaluation stack of a frame"}
    assert report.ledgers[0].equation in terms
    assert "nobody refers to it" in str(report)
    assert Report.from_json(report.to_json()).document.held == report.document.held


def test_c_owners_are_counted():
    future = torch.futures.Future()
    x = torch.ones(3)
    future.set_result(x)

    report = tensorplay.who_holds(x)

    assert report.unaccounted == 1
    assert "1 C++-only reference" in str(report)


def test_garbage_is_told():
    gc.collect()
    gc.disable()
    try:
        box: dict[str, Any] = {"x": torch.ones(3)}
        box["self"] = box
        address = id(box["x"])
        del box
        x = next(x for x in C.live_graph()[0] if id(x) == address)
        report = tensorplay.who_holds(x)
    finally:
        gc.enable()
    # What asks holds it too: it is reached, and the garbage is one of its holders.
    assert report.unaccounted == 0
    assert "cycle" in [holder.root for holder in report.holders]


def test_other_objects_have_their_references():
    model = nn.Linear(2, 2)
    box = [model]

    report = tensorplay.who_holds(model)

    assert [ledger.of for ledger in report.ledgers] == ["object"]
    assert report.unaccounted == 0
    assert any(path.endswith("box[0]") for path in paths(report))
    assert box[0] is model


@pytest.mark.parametrize("thing", [1, "x", None, 1.5, b""])
def test_what_has_no_references_is_refused(thing):
    with pytest.raises(TypeError, match="takes a tensor or an object that the garbage collector knows"):
        tensorplay.who_holds(thing)


def test_asking_changes_nothing():
    x = torch.ones(4, requires_grad=True)
    y = (x * x).sum()
    box = [x, x[1:]]

    def state() -> list[Any]:
        records = [C.read(each, 0) for each in (x, y, box[1])]
        return [(r.python.refcount, r.impl.use_count, r.storage.use_count, r.impl.version) for r in records]

    before = state()
    tensorplay.who_holds(x)
    assert state() == before
    y.backward()


def test_a_report_is_read_back():
    x = torch.ones(4)
    report = tensorplay.who_holds(x)

    again = Report.from_json(report.to_json())

    assert again.document.held == report.document.held
    assert str(again) == str(report)


def test_many_threads_wait_no_longer_than_the_walk():
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [torch.ones(2)[1:] for _ in iter(stop.is_set, True)])
    thread.start()
    x = torch.ones(3)
    try:
        for _ in range(5):
            assert tensorplay.who_holds(x).unaccounted == 0
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize(
    ("way", "layer"),
    [("hold_tensor", "impl"), ("hold_alias", "storage"), ("hold_storage", "storage"), ("hold_object", "object")],
)
def test_owners_in_cpp_alone_are_counted(cpp_owners, way, layer):
    x = torch.ones(3)
    clean = tensorplay.who_holds(x)

    for _ in range(2):
        getattr(cpp_owners, way)(x)
    report = tensorplay.who_holds(x)
    cpp_owners.release()

    assert clean.unaccounted == 0
    assert {ledger.of: ledger.unaccounted for ledger in report.ledgers if ledger.unaccounted} == {layer: 2}
    assert "2 C++-only references" in report.text()


def test_tensor_that_cpp_alone_keeps_is_found_from_its_storage(cpp_owners):
    x = torch.ones(3)
    cpp_owners.hold_tensor(x)
    address = C.read(x).storage.address
    del x

    _, _, groups, *_ = C.find_storages("no file begins so", b"")
    (state,) = (group[3] for group in groups if address in group[0][::2])
    cpp_owners.release()

    assert state == "unknown"


class _Key:
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("a key was compared")


@pytest.mark.parametrize("make", [lambda x: {"base": x}, lambda x: {_Key(): x}, lambda x: {"view function": x}])
def test_keys_are_taken_for_no_word_of_autograd(make):
    x = torch.ones(3)
    held = make(x)
    report = tensorplay.who_holds(x)
    assert (len(report.holders), report.unaccounted) == (2, 0)
    assert held


def test_an_executing_generator_is_counted_once():
    def ask() -> Iterator[Any]:
        x = torch.ones(3)
        yield tensorplay.who_holds(x)

    async def ask_later() -> Any:
        x = torch.ones(3)

        async def inner() -> Any:
            return tensorplay.who_holds(x)

        return await inner()

    (report,) = ask()
    for ledger in (report.ledgers[0], asyncio.run(ask_later()).ledgers[0]):
        terms = {what: count for count, what in ledger.terms}
        terms.pop("on the evaluation stack of a frame", None)  # Python 3.10 has the arguments there
        assert terms == {"reference": 1, "of this call": 1}
        assert sum(count for count, _ in ledger.terms) == ledger.count


def test_a_generator_hides_no_owner_in_cpp():
    future = torch.futures.Future()  # type: ignore[var-annotated]

    def ask() -> Iterator[Any]:
        x = torch.ones(3)
        future.set_result(x)
        yield tensorplay.who_holds(x)

    (report,) = ask()
    assert report.unaccounted == 1


def test_a_module_is_counted_once():
    report = tensorplay.who_holds(json)
    (ledger,) = report.ledgers
    assert sum(count for count, _ in ledger.terms) == ledger.count
    assert ledger.count >= sys.getrefcount(json)
    assert ledger.unaccounted == 0
    assert "sys.modules['json']" in paths(report)


@pytest.mark.parametrize("cls", [int, type, Exception, collections.OrderedDict])
def test_classes_made_in_c_are_refused(cls):
    with pytest.raises(TypeError, match=f"got class {cls.__name__}"):
        tensorplay.who_holds(cls)
    with pytest.raises(TypeError, match="got tuple"):
        tensorplay.who_holds(())


def test_many_references_alike_are_one_holder_and_few_are_listed_in_order():
    x = torch.ones(3)
    box = [[x] for _ in range(12)]
    listed = [path.rpartition(": ")[2] for path in paths(tensorplay.who_holds(x))]
    assert listed == ["x", *(f"box[{n}][0]" for n in range(12))]
    box += [[x] for _ in range(12)]
    (_, many) = tensorplay.who_holds(x).holders
    assert (many.path.rpartition(": ")[2], many.count) == ("box[*][*]", 24)
    assert "".join(many.steps) == many.path


def test_a_long_way_is_walked_once_and_told_in_short():
    x = torch.ones(3)
    chain: Any = x
    for _ in range(5_000):
        chain = [chain]
    paths_to_x = [holder for holder in tensorplay.who_holds(x).holders if "chain" in holder.path]
    assert len(paths_to_x) == 1
    assert len(paths_to_x[0].path) < 300
    assert len(paths_to_x[0].steps) == 17
    assert " ... " in paths_to_x[0].steps
    while isinstance(chain, list):
        chain = chain.pop()


def test_steps_of_every_path_add_up_to_it():
    x = torch.ones(3, requires_grad=True)
    y = ((x * x).exp() * 2).sum()
    box = {"a": [x], "b": types.SimpleNamespace(value=(x,))}
    report = tensorplay.who_holds(x)
    assert [holder.path for holder in report.holders] == ["".join(holder.steps) for holder in report.holders]
    assert {y, len(box)}


def test_a_jagged_tensor_is_accounted_for():
    values, offsets = torch.ones(6, 3), torch.tensor([0, 2, 6])
    jagged = torch.nested.nested_tensor_from_jagged(values, offsets)
    assert tensorplay.who_holds(values).unaccounted == 0
    assert tensorplay.who_holds(offsets).unaccounted == 0
    assert jagged.is_nested


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x: torch.utils.dlpack.to_dlpack(x), "holds its TensorImpl"),
        (lambda x: x.untyped_storage(), "storage object"),
    ],
)
def test_what_holds_a_layer_below_is_called_so(make, words):
    x = torch.ones(3)
    held = make(x)
    assert words in str(tensorplay.who_holds(x))
    assert held is not None
    assert repr(tensorplay.who_holds(x)).startswith("<tensorplay.HoldersReport: x, ")


def test_a_context_variable_is_named():
    rate, other = contextvars.ContextVar[Any]("rate"), contextvars.ContextVar[Any]("other")
    x, y = torch.ones(3), torch.ones(4)
    context = contextvars.copy_context()
    context.run(rate.set, [x])
    context.run(other.set, y)
    assert any(path.endswith("context rate[0]") for path in paths(tensorplay.who_holds(x)))
    assert any(path.endswith("context other") for path in paths(tensorplay.who_holds(y)))
