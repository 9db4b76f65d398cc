"""snapshot() and leak_check(): what came, stayed and went, and who holds it."""

from __future__ import annotations

import asyncio
import collections
import gc
import io
import re
import sys
import weakref
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tensorplay as tp
from tensorplay._native import C
from tensorplay.errors import LeakFound
from tensorplay.reports import Report

KEPT: list[Any] = []
NAME = f"{__name__}.KEPT"


@pytest.fixture(autouse=True)
def _nothing_is_kept() -> Iterator[None]:
    gc.collect()
    KEPT.clear()
    yield
    KEPT.clear()


def rows(report: Any) -> dict[str, tuple[int, int, int, int]]:
    """Path to storages, bytes, indirect storages, indirect bytes."""
    return {
        row.path: (row.storages, row.nbytes, row.indirect_storages, row.indirect_nbytes) for row in report.growth.grown
    }


# -- snapshots --------------------------------------------------------------------------------------------------------


def test_what_came_is_listed_with_its_holder():
    before = tp.snapshot()
    KEPT.append(torch.ones(1000))

    report = before.diff()

    assert rows(report) == {f"{NAME}[0]": (1, 4000, 0, 0)}
    growth = report.growth
    assert (growth.new_storages, growth.new_nbytes, growth.gone_storages, growth.gone_nbytes) == (1, 4000, 0, 0)
    assert growth.nbytes_after - growth.nbytes_before == 4000
    assert "1 storage came and stayed, 3.9 KiB" in str(report)


def test_what_went_is_counted():
    KEPT.append(torch.ones(1000))
    before = tp.snapshot()
    KEPT.clear()

    growth = before.diff().growth

    assert (growth.new_storages, growth.gone_storages, growth.gone_nbytes) == (0, 1, 4000)


def test_places_that_differ_in_an_index_alone_are_one_row():
    before = tp.snapshot()
    KEPT.extend(torch.ones(10) for _ in range(5))

    (row,) = before.diff().growth.grown

    assert (row.path, row.places, row.storages, row.nbytes) == (f"{NAME}[*]", 5, 5, 200)
    assert (row.root, row.devices, row.cycle) == ("module", ("cpu",), None)


def test_what_a_graph_saved_hangs_on_the_tensor_it_belongs_to():
    before = tp.snapshot()
    KEPT.append((torch.ones(1000, requires_grad=True) * 2).exp().sum())

    found = rows(before.diff())

    # The sum's own bytes; behind it what exp() saved, the leaf that the gradient goes to, and the factor.
    assert found == {f"{NAME}[0]": (1, 4, 3, 8008)}


def test_a_gradient_is_a_place_of_its_own():
    KEPT.append(torch.ones(1000, requires_grad=True))
    before = tp.snapshot()
    KEPT[0].sum().backward()

    assert rows(before.diff()) == {f"{NAME}[0].grad": (1, 4000, 0, 0)}


def test_a_variable_of_a_frame_has_its_file_and_line():
    before = tp.snapshot()
    mine = torch.ones(10)

    (row,) = before.diff().growth.grown

    assert (row.root, row.file) == ("frame", __file__)
    assert row.path.endswith(": mine")
    assert re.match(r"test_leaks\.py:\d+ in test_a_variable_of_a_frame", row.path)
    assert mine is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.ones(1) for _ in range(40)],
        lambda: collections.deque(torch.ones(1) for _ in range(40)),
        lambda: {torch.ones(1) for _ in range(40)},
        lambda: {f"k{n}": torch.ones(1) for n in range(40)},
        lambda: {("k", n): torch.ones(1) for n in range(40)},
    ],
)
def test_many_places_alike_are_one_row(make):
    before = tp.snapshot()
    KEPT.append(make())

    (row,) = before.diff().growth.grown

    assert (row.places, row.storages, row.nbytes) == (40, 40, 160)
    assert row.path in (f"{NAME}[*][*]", f"{NAME}[*]{{...}}")
    assert "".join(row.steps) == row.path


def test_few_places_are_named_each_in_a_diff_of_the_past():
    before = tp.snapshot()
    KEPT.extend(torch.ones(1) for _ in range(15))
    between = tp.snapshot()
    KEPT.append(torch.ones(1))
    after = tp.snapshot()
    assert list(rows(between.diff(after))) == [f"{NAME}[15]"]
    assert list(rows(before.diff(between))) == [f"{NAME}[*]"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(10**9, device="meta"),
        lambda: FakeTensorMode().from_tensor(torch.empty(10, device="meta")),
        lambda: torch.nn.Linear(1000, 1000, device="meta"),
    ],
)
def test_what_has_no_memory_is_no_growth(make):
    before = tp.snapshot()
    KEPT.append(make())
    assert before.diff().growth.new_storages == 0


def test_two_snapshots_of_the_past_tell_who_held_what():
    first = tp.snapshot()
    KEPT.append(torch.ones(1000))
    second = tp.snapshot()
    KEPT.append(torch.ones(500))
    third = tp.snapshot()
    KEPT.clear()

    assert rows(first.diff(second)) == {f"{NAME}[0]": (1, 4000, 0, 0)}
    assert rows(third.diff(second)) == {f"{NAME}[1]": (1, 2000, 0, 0)}
    assert first.diff(third).growth.new_nbytes == 6000
    assert not first.diff(first).growth.new_storages
    assert third.diff().growth.gone_nbytes == 6000


def test_a_snapshot_holds_nothing():
    KEPT.append(torch.ones(1000))
    gone = weakref.ref(KEPT[0])
    storage = C.read(KEPT[0], 0).storage.use_count

    first = tp.snapshot()
    KEPT.append(nn.Linear(3, 3))
    module = weakref.ref(KEPT[1])
    second = tp.snapshot()
    second.diff(first)

    assert C.read(KEPT[0], 0).storage.use_count == storage
    KEPT.clear()
    assert gone() is None
    assert module() is None
    assert "storages, " in repr(second)


def test_a_storage_that_was_resized_came():
    KEPT.append(torch.ones(10))
    before = tp.snapshot()
    KEPT[0].resize_(5000)

    growth = before.diff().growth

    assert (growth.new_nbytes, growth.gone_nbytes) == (20000, 40)


def test_diff_takes_a_snapshot():
    with pytest.raises(TypeError, match=r"takes a snapshot, got int: b = tp\.snapshot\(\)"):
        tp.snapshot().diff(3)


# -- the check --------------------------------------------------------------------------------------------------------


def test_a_block_that_leaves_nothing_is_silent():
    with tp.leak_check(raises=True) as check:
        torch.ones(100_000).exp()

    assert check
    assert not check.findings
    assert not check.growth.new_storages
    assert "nothing came that is still there" in str(check)


def test_garbage_is_found_and_printed():
    gc.disable()
    try:
        with redirect_stderr(io.StringIO()) as printed, tp.leak_check() as check:
            loop: list[Any] = [torch.ones(10_000)]
            loop.append(loop)
            del loop
    finally:
        gc.enable()

    (finding,) = check.findings
    assert finding.code == "TP306"
    assert finding.evidence["cycle"] == "a list[1] → a list again"
    assert finding.evidence["indirect_bytes"] == 40_000
    assert "TP306" in printed.getvalue()
    assert not check
    assert Report.from_json(check.to_json()).document.growth == check.growth


def test_quiet_prints_nothing_and_raises_raises():
    def leave() -> None:
        loop: list[Any] = [torch.ones(10_000)]
        loop.append(loop)

    gc.disable()
    try:
        with redirect_stderr(io.StringIO()) as printed, tp.leak_check(quiet=True):
            leave()
        with pytest.raises(tp.LeakFound, match="TP306"), tp.leak_check(raises=True):
            leave()
    finally:
        gc.enable()
    assert printed.getvalue() == ""


def test_an_error_in_the_block_comes_out_as_it_is():
    check = tp.leak_check(raises=True)

    def fail() -> None:
        with check:
            KEPT.append(torch.ones(100_000))
            raise KeyError(1)

    with pytest.raises(KeyError):
        fail()
    assert check.growth.new_nbytes == 400_000


def test_a_decorated_function_is_checked_at_each_call():
    @tp.leak_check(raises=True)
    def double(x: int, *, leak: bool = False) -> int:
        """Double it."""
        if leak:
            loop: list[Any] = [torch.ones(10_000)]
            loop.append(loop)
        return 2 * x

    gc.disable()
    try:
        assert double(2) == 4
        with pytest.raises(tp.LeakFound):
            double(2, leak=True)
        gc.collect()
        assert double(3) == 6
    finally:
        gc.enable()
    assert (double.__name__, double.__doc__) == ("double", "Double it.")


def leak() -> torch.Tensor:
    """Leave a cycle behind."""
    values = [torch.ones(10_000)]
    values.append(values)  # type: ignore[arg-type]
    return torch.ones(3)


async def leak_later() -> torch.Tensor:
    return leak()


def leak_while_iterated() -> Iterator[torch.Tensor]:
    yield leak()


@pytest.mark.parametrize(
    ("function", "run"),
    [
        (leak, lambda call: call()),
        (leak_later, lambda call: asyncio.run(call())),
        (leak_while_iterated, lambda call: list(call())),
    ],
)
def test_functions_of_every_kind_are_decorated(function, run):
    gc.disable()
    try:
        checked = tp.leak_check(raises=True)(function)
        assert checked.__name__ == function.__name__
        with pytest.raises(LeakFound, match="TP306"):
            run(checked)
    finally:
        gc.enable()


def test_what_cannot_be_checked_is_refused():
    async def rows_later() -> Any:
        yield 1

    for function in (rows_later, 3):
        with pytest.raises(TypeError, match="leak_check"):
            tp.leak_check()(function)  # type: ignore[arg-type]


def test_what_a_block_returns_is_no_leak():
    @tp.leak_check(raises=True, quiet=True)
    def made() -> torch.Tensor:
        return torch.ones(100_000)

    def returned_from_block() -> dict[str, torch.Tensor]:
        with tp.leak_check(raises=True, quiet=True):
            return {"y": torch.ones(100_000)}

    assert made().shape == returned_from_block()["y"].shape


def test_steps_that_leave_something_have_a_slope():
    def step() -> None:
        x = torch.ones(10_000, requires_grad=True)
        KEPT.append((x * x).sum())

    check = tp.leak_check(step, steps=8, quiet=True)

    (finding,) = check.findings
    assert finding.code == "TP307"
    assert finding.evidence["bytes_per_step"] == finding.evidence["low"] == 40_004
    assert [held["path"] for held in finding.evidence["held"]] == [f"{NAME}[*]"]
    assert "detach()" in finding.fix
    assert len(KEPT) == 10  # two calls to warm up


def test_marks_in_a_block_count_as_steps():
    with tp.leak_check(quiet=True) as check:
        for _ in range(6):
            KEPT.append(torch.ones(100))
            check.step()

    assert [finding.code for finding in check.findings] == ["TP307"]
    assert check.growth.slope.nbytes_per_step == 400


@pytest.mark.parametrize("steps", [1, 5])
def test_few_steps_have_no_slope(steps):
    check = tp.leak_check(lambda: KEPT.append(torch.ones(100)), steps=steps)

    assert check
    assert check.growth.slope is None
    assert check.growth.new_storages == steps


def test_garbage_that_waits_is_no_slope():
    def step() -> None:
        loop: list[Any] = [torch.ones(10_000)]
        loop.append(loop)

    gc.disable()
    try:
        check = tp.leak_check(step, steps=8, quiet=True)
    finally:
        gc.enable()

    (finding,) = check.findings
    assert (finding.code, finding.evidence["cycles"]) == ("TP306", 8)


@pytest.mark.parametrize(
    ("ask", "error", "said"),
    [
        (lambda: tp.leak_check(3), TypeError, "a function without arguments, got int"),
        (lambda: tp.leak_check(print, steps=0), ValueError, "steps from 1 on, got 0"),
        (lambda: tp.leak_check(print, steps=2.5), TypeError, "steps as an int, got float"),
        (lambda: tp.leak_check(print, warmup=-1), ValueError, "warmup from 0 on, got -1"),
        (lambda: tp.leak_check().findings, RuntimeError, "when its block has ended"),
        (lambda: tp.leak_check().step(), RuntimeError, "inside the block"),
    ],
)
def test_wrong_use_says_what_is_right(ask, error, said):
    with pytest.raises(error, match=said):
        ask()


def test_a_check_is_for_one_block():
    check = tp.leak_check()
    with check:
        assert "running" in repr(check)
        assert "running" in str(check)

    with pytest.raises(RuntimeError, match="one for each block"), check:
        pass


def test_the_check_holds_nothing_and_changes_no_count():
    x = torch.ones(3, requires_grad=True)
    y = (x * x).sum()
    KEPT.extend([x, y])

    def counts() -> list[Any]:
        records = [C.read(each, 0) for each in (x, y)]
        return [(r.python.refcount, r.impl.use_count, r.storage.use_count, r.impl.version) for r in records]

    before = counts()
    with tp.leak_check() as check:
        inner = torch.ones(5)
        gone = weakref.ref(inner)
    assert counts() == before
    del inner
    assert gone() is None
    assert check.growth.new_storages == 1


def test_a_page_and_a_notebook_show_it(tmp_path):
    with tp.leak_check() as check:
        mine = torch.ones(10)

    page = check.html(tmp_path / "page.html")

    assert "came and stayed" in page.read_text()
    assert "came and stayed" in check._repr_mimebundle_()["text/html"]
    assert mine is not None
    assert sys.getrefcount(mine) == 2
