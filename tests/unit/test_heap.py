"""What is alive: every tensor of the heap, the variables of executing frames, who shares a storage."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import types
import weakref
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tensorplay._native import C
from tests import helpers
from tests.helpers import ROOT


class Thing:
    pass


def own_frame(frames: list, name: str) -> dict[str, object]:
    """The variables of the innermost frame of a function of this file."""
    return next(dict(named) for filename, function, _, named in frames if filename == __file__ and name in function)


# Tensors


def test_every_tensor_is_found_once_and_nothing_else():
    made = [torch.ones(1), torch.nn.Parameter(torch.ones(1)), torch.ones(1).as_subclass(helpers.Plain)]
    made += [torch.ones(4)[1:], torch.ones(2).to_sparse(), torch.ones(1, device="meta")]

    found = C.live_graph()[0]

    assert len({id(x) for x in found}) == len(found)
    assert {id(x) for x in made} <= {id(x) for x in found}
    assert all(issubclass(type(x), torch.Tensor) for x in found)
    assert {id(x) for x in gc.get_objects() if issubclass(type(x), torch.Tensor)} <= {id(x) for x in found}


def test_tensor_that_was_deleted_is_not_found():
    x = torch.ones(1)
    before = len(C.live_graph()[0])

    del x

    assert len(C.live_graph()[0]) == before - 1


def test_frozen_tensors_are_found():
    script = (
        "import gc, torch\n"
        "from tensorplay._native import C\n"
        "old = [torch.ones(1) for _ in range(3)]\n"
        "gc.freeze()\n"
        "new = torch.ones(1)\n"
        "ids = {id(x) for x in C.live_graph()[0]}\n"
        "assert {id(x) for x in old} | {id(new)} <= ids\n"
        "assert not {id(x) for x in old} & {id(x) for x in gc.get_objects()}\n"
        "print(gc.get_freeze_count() > 0)\n"
    )

    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)

    assert (result.stdout, result.returncode) == ("True\n", 0), result.stderr


def test_tensor_whose_object_only_cpp_keeps_is_found():
    weight = torch.ones(3, requires_grad=True)
    weight.note = Thing()
    note = weakref.ref(weight.note)
    product = torch.ones(3) * weight

    del weight

    assert note() is not None, "autograd keeps the object"
    assert any(vars(x).get("note") is note() for x in C.live_graph()[0] if type(x) is torch.Tensor)
    del product


def test_tensor_in_a_garbage_cycle_is_found_until_it_is_collected():
    gc.collect()
    before = len(C.live_graph()[0])
    cycle = [torch.ones(1)]
    cycle.append(cycle)

    del cycle

    assert len(C.live_graph()[0]) == before + 1
    gc.collect()
    assert len(C.live_graph()[0]) == before


def test_tensor_being_destroyed_is_not_found():
    seen = []
    x = torch.ones(1)
    watched = weakref.ref(x, lambda _: seen.append([id(y) for y in C.live_graph()[0]]))
    address = id(x)

    del x

    assert watched() is None
    assert len(seen) == 1
    assert address not in seen[0]


def test_looking_is_possible_while_the_collector_is_at_work():
    seen = []

    class Dying:
        def __del__(self):
            seen.append(C.live_graph()[0])
            seen.append(C.frame_locals())

    def callback(phase, info):
        seen.append(C.live_graph()[0])

    x = torch.ones(1)
    cycle = [Dying(), torch.ones(2)]
    cycle.append(cycle)
    del cycle
    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)

    assert len(seen) == 4
    assert all(any(y is x for y in found) for found in (seen[0], seen[1], seen[3]))


def test_liars_and_proxies_are_not_tensors():
    class Liar:
        @property
        def __class__(self):
            raise AssertionError("asked for its class")

    class Meta(type):
        def __instancecheck__(cls, instance):
            raise AssertionError("asked about an instance")

        def __subclasscheck__(cls, subclass):
            raise AssertionError("asked about a class")

        def mro(cls):
            return [*type.mro(cls)]

    class Claims(metaclass=Meta):
        __class__ = torch.Tensor

    x = torch.ones(1)
    liars = [Liar(), Claims(), weakref.proxy(x), types.SimpleNamespace(x=x)]

    found = {id(y) for y in C.live_graph()[0]}

    assert id(x) in found
    assert not found & {id(liar) for liar in liars}
    with pytest.raises(AssertionError, match="asked for its class"):
        _ = liars[0].__class__


def test_no_code_of_a_tensor_class_runs():
    class Evil(torch.Tensor):
        def __getattribute__(self, name):
            raise AssertionError(f"asked for {name}")

        @classmethod
        def __torch_function__(cls, *_args, **_kwargs):
            raise AssertionError("ran a function")

    evil = torch.Tensor._make_subclass(Evil, torch.ones(1))

    hostile = torch.ones(3).as_subclass(helpers.Hostile)

    found = {id(x) for x in C.live_graph()[0]}

    assert found >= {id(evil), id(hostile)}
    assert len(C.group_by_storage([evil, hostile])[1]) == 2


def test_looking_changes_no_count_and_leaves_the_collector_as_it_was():
    x = torch.ones(3)
    counts = sys.getrefcount(x), x._use_count(), len(weakref.getweakrefs(x))
    collections = [generation["collections"] for generation in gc.get_stats()]

    for switch in (gc.disable, gc.enable):
        switch()
        for _ in range(50):
            C.live_graph()[0]
            C.frame_locals()
            C.group_by_storage([x])
        assert gc.isenabled() is (switch is gc.enable)

    assert (sys.getrefcount(x), x._use_count(), len(weakref.getweakrefs(x))) == counts
    assert [generation["collections"] for generation in gc.get_stats()][2] == collections[2]


def test_answer_keeps_tensors_alive_only_while_it_lives():
    x = torch.ones(1)
    x.note = Thing()
    note = weakref.ref(x.note)

    found = C.live_graph()[0]
    del x

    assert note() is not None
    del found
    assert note() is None


def test_tensors_come_and_go_in_other_threads_while_looking():
    stop = threading.Event()

    def churn():
        while not stop.is_set():
            [torch.ones(1)[:] for _ in range(50)]

    threads = [threading.Thread(target=churn) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            found = C.live_graph()[0]
            C.group_by_storage(found)
            for frame in C.frame_locals():
                assert len(frame) == 4
    finally:
        stop.set()
        for thread in threads:
            thread.join()


# Frames


def test_frames_are_innermost_first_with_their_lines():
    def inner(argument):
        local = [argument]
        return C.frame_locals(), sys._getframe().f_lineno, local

    (frames, line, local) = inner(argument="a")

    filename, function, where, named = frames[0]
    assert filename == __file__
    assert function.endswith("inner")
    assert where == line
    assert dict(named) == {"argument": "a", "local": local}
    assert frames[1][1].endswith("test_frames_are_innermost_first_with_their_lines")
    assert [name for name, _ in frames[1][3]] == ["inner"]


def test_deleted_local_does_not_stay_alive():
    thing = Thing()
    gone = weakref.ref(thing)

    assert own_frame(C.frame_locals(), "test_deleted_local")["thing"] is thing
    del thing

    assert gone() is None
    assert "thing" not in own_frame(C.frame_locals(), "test_deleted_local")


def test_no_reference_stays_behind():
    thing = Thing()
    before = sys.getrefcount(thing)

    frames = C.frame_locals()
    during = sys.getrefcount(thing)
    del frames

    assert during == before + 1
    assert sys.getrefcount(thing) == before


@pytest.mark.skipif(sys.version_info < (3, 11), reason="every frame is an object before Python 3.11")
def test_no_frame_object_is_made():
    def walk():
        frame = sys._getframe()
        while frame is not None:
            frame = frame.f_back

    def blocks_after(look, depth):
        if depth > 0:
            return blocks_after(look, depth - 1)
        before = sys.getallocatedblocks()
        look()
        return sys.getallocatedblocks() - before

    blocks_after(C.frame_locals, 200)

    assert blocks_after(C.frame_locals, 200) < 100
    assert blocks_after(walk, 200) >= 200, "what making them costs"


def test_cells_of_closures_are_looked_into():
    thing = Thing()

    def closure(argument):
        def innermost():
            return argument, thing

        return C.frame_locals(), innermost

    cell = types.CellType(1)
    frames, _ = closure(cell)

    assert own_frame(frames, "closure")["thing"] is thing
    assert own_frame(frames, "closure")["argument"] is cell
    assert own_frame(frames, "test_cells")["thing"] is thing


def test_unset_variables_and_empty_cells_are_left_out():
    def use():
        return later

    found = own_frame(C.frame_locals(), "test_unset")
    later = 1

    assert set(found) == {"use"}
    assert use() == 1


def test_class_body_gives_its_names():
    class Body:
        inside = Thing()
        frames = C.frame_locals()

    found = own_frame(Body.frames, "Body")

    assert found["inside"] is Body.inside


def test_module_names_are_left_to_their_module():
    space = {"C": C}
    exec(compile("found = C.frame_locals()", "<module names>", "exec"), space)

    assert space["found"][0][:3] == ("<module names>", "<module>", 1)
    assert space["found"][0][3] == []


def test_variable_of_a_comprehension_is_seen():
    frames = [C.frame_locals() for element in ["e"]][0]  # noqa: RUF015

    assert "e" in [value for _, _, _, named in frames[:2] for name, value in named if name == "element"]


def test_other_threads_are_read_and_can_be_chosen():
    ready, stop = threading.Event(), threading.Event()
    thing = Thing()

    def wait_here(held):
        ready.set()
        stop.wait()

    thread = threading.Thread(target=wait_here, args=(thing,))
    thread.start()
    ready.wait()
    try:
        everything = C.frame_locals()
        theirs = C.frame_locals(thread.ident)
        ours = C.frame_locals(threading.get_ident())
    finally:
        stop.set()
        thread.join()

    assert own_frame(everything, "wait_here")["held"] is thing
    assert own_frame(theirs, "wait_here")["held"] is thing
    assert len([function for _, function, _, _ in everything if "wait_here" in function]) == 1
    assert not [
        named
        for _, _, _, named in theirs
        if "ready" in dict(named) and "stop" in dict(named) and "held" not in dict(named)
    ]
    assert "test_other_threads" in ours[0][1]
    assert [function for _, function, _, _ in ours if "wait_here" in function] == []
    assert C.frame_locals(thread.ident) == []


def test_frames_of_a_folder_are_skipped():
    folder = str(Path(__file__).parent)

    frames = C.frame_locals(None, folder)

    assert frames
    assert not [filename for filename, _, _, _ in frames if filename.startswith(folder)]


def test_running_generator_is_a_frame():
    def generate(held):
        yield C.frame_locals()

    frames = next(generate("held"))

    assert frames[0][1].endswith("generate")
    assert dict(frames[0][3]) == {"held": "held"}


def test_suspended_generator_gives_its_variables():
    def generate(held):
        inside = [held]
        yield inside
        del inside
        yield

    generator = generate("h")
    _, function, line, named = C.generator_locals(generator)
    assert dict(named) == {"held": "h"}
    inside = next(generator)

    filename, function, line, named = C.generator_locals(generator)

    assert filename == __file__
    assert function.endswith("generate")
    assert line == generate.__code__.co_firstlineno + 2
    assert dict(named) == {"held": "h", "inside": inside}
    next(generator)
    assert set(dict(C.generator_locals(generator)[3])) == {"held"}
    generator.close()
    assert C.generator_locals(generator) is None


def test_suspended_coroutines_give_their_variables():
    thing = Thing()

    async def work(held):
        await asyncio.sleep(60)

    async def stream(held):
        yield held

    async def main():
        coroutine = work(thing)
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0)
        found = C.generator_locals(coroutine)
        task.cancel()
        flow = stream(thing)
        await flow.__anext__()
        other = C.generator_locals(flow)
        await flow.aclose()
        return found, other

    for found in asyncio.run(main()):
        assert dict(found[3]) == {"held": thing}


def test_wrong_arguments_are_refused():
    for call in (
        lambda: C.generator_locals([]),
        lambda: C.frame_locals("main"),
        lambda: C.frame_locals(None, 3),
        lambda: C.frame_locals(None, None, None),
        lambda: C.group_by_storage(torch.ones(2)),
        lambda: C.group_by_storage(iter(())),
        lambda: C.group_by_storage([torch.ones(1), 3]),
    ):
        with pytest.raises(TypeError):
            call()


# Groups


def in_python(tensors: list) -> tuple[list[int], list[int]]:
    numbers: dict[int, int] = defaultdict(lambda: len(numbers))
    ids = [numbers[x.untyped_storage()._cdata] for x in tensors]
    return ids, list(numbers)


def test_nothing_is_grouped():
    ids, storages = C.group_by_storage([])

    assert (list(ids), list(storages)) == ([], [])


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 31, 32, 33, 511, 513, 3000])
def test_groups_are_python_s_own(count):
    choose = random.Random(count)
    bases = [torch.empty(4) for _ in range(max(1, count // 3))]
    tensors = [choose.choice(bases)[choose.randrange(4) :] for _ in range(count)]

    ids, storages = C.group_by_storage(tensors)

    assert (ids.format, storages.format) == ("I", "Q")
    assert (list(ids), list(storages)) == in_python(tensors)
    assert [list(part) for part in C.group_by_storage(tuple(tensors))] == [list(ids), list(storages)]


def test_tensors_without_a_storage_are_each_a_group():
    sparse = torch.ones(2).to_sparse()
    plain = torch.ones(2)

    ids, storages = C.group_by_storage([sparse, plain, sparse, plain[1:], torch.ones(1).to_sparse()])

    assert list(ids) == [0, 1, 2, 1, 3]
    assert list(storages) == [0, plain.untyped_storage()._cdata, 0, 0]


def test_groups_of_every_live_tensor():
    view = torch.ones(3)[1:]
    found = C.live_graph()[0]

    ids, storages = C.group_by_storage(found)

    assert view.untyped_storage()._cdata in list(storages)
    assert len(ids) == len(found)
    assert max(ids) == len(storages) - 1
