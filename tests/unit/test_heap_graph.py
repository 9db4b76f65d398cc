"""The graph of the heap: every count of references is the number of references that were found."""

from __future__ import annotations

import collections
import gc
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tensorplay._native import C
from tests.situations import SITUATIONS

NOBODY = "no file begins so"


def watched_by(tensors: list[torch.Tensor]) -> list[tuple[str, int]]:
    """What is asked about some tensors."""
    found: list[tuple[str, int]] = []
    for x in tensors:
        record = C.read(x, 0)
        found += [("object", id(x)), ("impl", record.impl.address)]
        if record.storage is not None:
            found.append(("storage", record.storage.address))
    return found


def made_since(before: set[int]) -> list[tuple[str, int]]:
    """Ask about the tensors that came up. No reference to them is left."""
    return watched_by([x for x in C.live_graph()[0] if id(x) not in before])


# A function that PyTorch kept for a view holds the base out of sight: who_holds() says how many there may be.
@pytest.mark.parametrize("name", [name for name in SITUATIONS if name != "by_functions_of_views"])
def test_every_reference_is_accounted_for(name):
    gc.collect()
    before = {id(x) for x in C.live_graph()[0]}
    kept = SITUATIONS[name]()
    watched = made_since(before)
    if name not in ("by_storage_alone", "over_array"):  # there the object is gone, or is made by the call
        assert watched

    _, answers, busy, _ = C.find_holders(watched, NOBODY)

    assert busy == 0
    for what, (count, references, _, state, cycle) in zip(watched, answers, strict=True):
        assert count == len(references) > 0, (what, references)
        assert state == "reached"
        assert cycle is None
    del kept


def entry_path(entries: list[Any], number: int) -> list[Any]:
    path = []
    while number >= 0:
        path.append(entries[number])
        number = entries[number][5]
    return path[::-1]


def holders_of(x: torch.Tensor) -> tuple[list[Any], Any]:
    entries, (answer,), _, _ = C.find_holders([("object", id(x))], NOBODY)
    return entries, answer


def test_a_path_begins_at_a_root_and_names_each_step():
    x = torch.ones(3)
    box = {"a": [0, x]}

    entries, (_, references, _, _, _) = holders_of(x)

    in_list = next(link for link in references if link[1] == ("nth", 1))
    steps = entry_path(entries, in_list[0])
    assert steps[0][0] == "frame"
    assert steps[0][3][1].endswith("test_a_path_begins_at_a_root_and_names_each_step")
    assert [step[4] for step in steps[1:]] == [("variable", "box"), ("key", "a")]
    assert steps[2][1] is box["a"]


def test_what_c_owns_is_unknown():
    future = torch.futures.Future()
    future.set_result(torch.ones(3))
    x = future.value()
    watched = watched_by([x])
    del x

    _, answers, _, _ = C.find_holders(watched, NOBODY)

    count, references, _, state, _ = answers[0]
    assert (count, references, state) == (1, [], "unknown")


def test_garbage_shows_its_cycle():
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(3)
        box: list[Any] = []
        box.append({"again": box, "x": [x]})
        watched = watched_by([x])
        del box, x
        entries, answers, _, _ = C.find_holders(watched, NOBODY)
    finally:
        gc.enable()
    count, references, _, state, (around, way) = answers[0]
    assert state == "cycle"
    assert count == len(references) == 1
    assert [how for _, how, _ in around] in ([("nth", 0), ("key", "again")], [("key", "again"), ("nth", 0)])
    assert way[-1][1] == ("nth", 0)
    assert type(entries[way[-1][2]][1]) is torch.Tensor


def test_garbage_through_c_shows_its_cycle():
    from tests.helpers import KeepsOutput

    gc.collect()
    gc.disable()
    try:
        y = KeepsOutput.apply(torch.ones(3, requires_grad=True))
        watched = watched_by([y])
        del y
        _, answers, _, _ = C.find_holders(watched, NOBODY)
    finally:
        gc.enable()
    for count, references, _, state, cycle in answers:
        assert state == "cycle"
        assert count == len(references)
        assert cycle is not None
    assert ("owns", "grad_fn") in [how for _, how, _ in answers[0][4][0]]


def test_own_frames_are_told_apart():
    x = torch.ones(3)

    entries, (answer,), _, _ = C.find_holders([("object", id(x))], __file__)

    assert [entries[number][0] for number, _ in answer[1]] == ["own"]


def test_frames_of_all_threads_are_roots():
    ready, done = threading.Event(), threading.Event()
    found: list[int] = []

    def run() -> None:
        x = torch.ones(3)
        found.append(id(x))
        ready.set()
        done.wait()

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait()
    entries, (answer,), _, _ = C.find_holders([("object", found[0])], NOBODY)
    done.set()
    thread.join()
    (number, how), *others = answer[1]
    assert how == ("variable", "x")
    assert entries[number][3][3] == thread.ident
    assert not others


def test_storages_have_their_holder():
    box = [torch.ones(7)]
    address = C.read(box[0], 0).storage.address

    _, entries, groups, *_ = C.find_storages(NOBODY, b"")

    (numbers, device, held, state, cycle, place, places) = next(one for one in groups if address in one[0][::2])
    assert (numbers.tolist(), device, state, cycle, places) == ([address, 28], "cpu", "reached", None, 1)
    assert held == place
    assert entries[held][1] is box[0]
    assert entries[held][4] == ("nth", 0)
    assert entries[entries[held][5]][1] is box


def test_storages_are_tallied():
    box = [torch.ones(7)]
    storage = C.read(box[0], 0).storage

    numbers, entries, groups, crowded, _ = C.find_storages(NOBODY)
    tallied = {numbers[i]: numbers[i + 1 : i + 4].tolist() for i in range(0, len(numbers), 4)}

    assert tallied[storage.address] == [box[0].data_ptr(), 28, 0]
    assert entries == groups == crowded == []
    found = [address for one in C.find_storages(NOBODY, b"")[2] for address in one[0][::2]]
    assert sorted(found) == sorted(tallied)


def test_storages_that_a_tally_lacks_are_found():
    box = [torch.ones(7)]
    known = C.find_storages(NOBODY)[0]
    box.append(torch.ones(8))

    _, entries, groups, *_ = C.find_storages(NOBODY, known)

    assert [entries[one[2]][1] is box[1] for one in groups] == [True]
    with pytest.raises(ValueError, match="four numbers"):
        C.find_storages(NOBODY, b"12345")


class _Cell:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("kept", "count"),
    [
        (lambda: [torch.ones(2) for _ in range(17)], 1),
        (lambda: collections.deque(torch.ones(2) for _ in range(17)), 1),
        (lambda: {torch.ones(2) for _ in range(17)}, 1),
        (lambda: {n: torch.ones(2) for n in range(17)}, 1),
        (lambda: [[{5: (torch.ones(2),)}] for _ in range(17)], 1),
        (lambda: [_Cell(torch.ones(2)) for _ in range(17)], 1),
        (lambda: [torch.ones(2) for _ in range(16)], 16),
        (lambda: [torch.ones(2) if n % 2 else nn.Parameter(torch.ones(2)) for n in range(34)], 2),
        (lambda: [torch.ones(2), _Cell(torch.ones(2)), (torch.ones(2),), [torch.ones(2)]], 4),
        (lambda: {"a": torch.ones(2), "b": torch.ones(2)}, 2),
        (lambda: {f"k{n}": torch.ones(2) for n in range(16)}, 16),
        (lambda: {f"k{n}": torch.ones(2) for n in range(17)}, 1),
    ],
)
def test_storages_that_are_held_alike_are_one_group(kept, count):
    known = C.find_storages(NOBODY)[0]
    things = kept()
    groups = C.find_storages(NOBODY, known, (), (collections.deque,))[2]
    assert len(groups) == count
    assert sum(one[6] for one in groups) == sum(len(one[0]) // 2 for one in groups) >= len(things)


def test_objects_of_classes_apart_are_never_taken_for_one_another():
    known = C.find_storages(NOBODY)[0]
    cells = [_Cell([torch.ones(2) for _ in range(17)]) for _ in range(5)]
    assert len(C.find_storages(NOBODY, known)[2]) == 1
    assert len(C.find_storages(NOBODY, known, (_Cell,))[2]) == len(cells)
    for bad in [(1,), [_Cell]]:
        with pytest.raises(TypeError, match="tuple"):
            C.find_storages(NOBODY, known, bad)


def test_what_lives_behind_a_new_tensor_is_told_from_it():
    known = C.find_storages(NOBODY)[0]
    losses = [torch.ones(3, requires_grad=True).exp() for _ in range(20)]
    _, entries, groups, *_ = C.find_storages(NOBODY, known)
    (direct,) = [one for one in groups if one[2] == one[5]]
    (behind,) = [one for one in groups if one[2] != one[5]]
    assert entries[direct[2]][1] is losses[0]
    assert behind[5] == direct[5]
    assert (direct[6], behind[6]) == (20, 20)


def test_crowded_dictionaries_are_named():
    known = C.find_storages(NOBODY)[0]
    cache = {f"k{n}": torch.ones(2) for n in range(100)}
    _, entries, groups, crowded, _ = C.find_storages(NOBODY, known)
    assert [entries[one][1] is cache for one in crowded] == [True]
    assert [one[6] for one in groups] == [100]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([("thing", 1)], ""), ValueError),
        (([("object",)], ""), TypeError),
        ((1, ""), TypeError),
        (([], 1), TypeError),
    ],
)
def test_bad_arguments_raise(arguments, error):
    with pytest.raises(error):
        C.find_holders(*arguments)


def test_a_walk_changes_no_count():
    x = torch.ones(3, requires_grad=True)
    y = (x * x).sum()
    kept = [x, y, y.grad_fn]

    def counts() -> list[Any]:
        records = [C.read(each, 0) for each in (x, y)]
        return [(r.python.refcount, r.impl.use_count, r.storage.use_count, r.impl.version) for r in records]

    before = counts()
    C.find_holders(watched_by([x]), NOBODY)
    C.find_storages(NOBODY)
    assert counts() == before
    del kept


def test_nothing_is_reached_through_what_is_closed():
    only, also = torch.ones(3), torch.ones(3)
    box = [only, also]
    watched = [("object", id(only)), ("object", id(also))]
    del only

    _, answers, _, _ = C.find_holders(watched, NOBODY, [id(box)])

    assert [(answer[0], len(answer[1]), answer[3]) for answer in answers] == [
        (1, 0, "unknown"),
        (2, 1, "reached"),
    ]


def raising() -> None:
    x = torch.ones(3)
    raise ValueError(x.shape)


def test_variables_of_a_frame_that_ended_are_read_without_keeping_them():
    try:
        raising()
    except ValueError as error:
        kept = error
    frame = kept.__traceback__.tb_next.tb_frame

    file, function, line, variables = C.frame_object_locals(frame)

    assert (file, function, line) == (__file__, "raising", raising.__code__.co_firstlineno + 2)
    assert [name for name, _ in variables] == ["x"]
    address = id(variables[0][1])
    del variables
    frame.clear()
    assert address not in {id(x) for x in C.live_graph()[0]}


def test_a_frame_that_executes_answers_for_itself():
    assert C.frame_object_locals(sys._getframe()) is None
    with pytest.raises(TypeError, match="expected a frame"):
        C.frame_object_locals(1)
