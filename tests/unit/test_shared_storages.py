"""list_shared_storages(): who lies in which memory, of some objects and of the whole process."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import tensorplay as tp
from tensorplay._native import C
from tests import helpers


def only(report):
    (shared,) = report.storages
    return shared


def names(shared) -> list[str]:
    return [member.name for member in shared.members]


def over(report, x: torch.Tensor):
    """The shared storage that a tensor lies in, or None."""
    address = tp.inspect(x, quiet=True).records[0].storage.address
    return next((shared for shared in report.storages if shared.storage == address), None)


# -- of given objects -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "overlap", "dead"),
    [
        (slice(0, 5), slice(5, 10), "disjoint", 0),
        (slice(0, 10, 2), slice(1, 10, 2), "disjoint", 0),
        (slice(0, 5), slice(0, 5), "identical", 20),
        (slice(0, 2), slice(0, 5), "nested", 20),
        (slice(0, 6), slice(4, 9), "partial", 4),
    ],
)
def test_overlap_and_dead_bytes_of_two_views(a, b, overlap, dead):
    x = torch.zeros(10)

    shared = only(tp.list_shared_storages({"a": x[a], "b": x[b]}))

    assert (shared.overlap, shared.nbytes, shared.dead_nbytes, names(shared)) == (overlap, 40, dead, ["a", "b"])


def test_members_have_their_bytes():
    x = torch.zeros(4, 6)

    shared = only(tp.list_shared_storages({"x": x, "column": x[:, 2]}))

    column = shared.members[1]
    assert (column.dtype, column.shape, column.role) == ("float32", (4,), "tensor")
    assert (column.first_byte, column.needed_nbytes, column.visible_nbytes) == (8, 84, 16)


def test_many_that_interleave_are_still_exact():
    x = torch.zeros(1000)

    shared = only(tp.list_shared_storages([x[n::50] for n in range(50)]))

    assert (shared.overlap, shared.visible_nbytes, shared.dead_nbytes) == ("disjoint", 4000, 0)


def test_too_many_pairs_are_said_to_be_too_hard():
    x = torch.zeros(400)

    # Two families, each nested in itself: no sum tells them.
    few, many = (
        only(tp.list_shared_storages([x[begin : begin + n] for begin in (0, 200) for n in range(1, most)]))
        for most in (25, 150)
    )

    assert (few.overlap, many.overlap) == ("nested", "too_hard")
    assert (many.visible_nbytes, many.dead_nbytes) == (2 * 596, 1600 - 2 * 596)


def test_one_tensor_under_two_names():
    x = torch.zeros(4)

    report = tp.list_shared_storages({"embedding": x, "head": x})

    assert (names(only(report)), only(report).members[0].also) == (["embedding"], ("head",))
    assert "embedding = head" in str(report)


def test_list_is_named_after_the_argument():
    x = torch.zeros(4)
    pair = [x, x[1:]]

    assert names(only(tp.list_shared_storages(pair))) == ["pair[0]", "pair[1]"]


def test_the_largest_storage_comes_first():
    small, large = torch.zeros(4), torch.zeros(400)

    report = tp.list_shared_storages({"a": small, "b": small[1:], "c": large, "d": large[1:]})

    assert [shared.nbytes for shared in report.storages] == [1600, 16]


def test_model_and_its_state_dict_are_one_memory():
    model = torch.nn.Linear(3, 2)

    report = tp.list_shared_storages({"model": model, "kept": model.state_dict()})

    assert {tuple(names(shared)) for shared in report.storages} == {
        ("model.weight", "kept['weight']"),
        ("model.bias", "kept['bias']"),
    }


def test_sparse_tensors_are_listed_by_what_they_are_made_of():
    x = torch.eye(3).to_sparse()

    report = tp.list_shared_storages({"x": x, "values": x._values()})

    assert ["x.values", "values"] in [names(shared) for shared in report.storages]


@pytest.mark.parametrize(
    "objs",
    [
        {"a": torch.empty(4, device="meta"), "b": torch.empty(4, device="meta")},
        {"a": (m := torch.empty(4, device="meta")), "b": m[1:]},
        {"a": torch.empty(0), "b": torch.empty(0)},
        {"a": (e := torch.zeros(0)), "b": e.view(0, 3)},
        {"a": helpers.null_pointer(), "b": helpers.null_pointer()},
        {"a": torch.zeros(4), "b": torch.zeros(4)},
    ],
    ids=["meta", "meta and its view", "empty", "empty and its view", "null pointers", "copies"],
)
def test_what_shares_no_byte_is_not_shared(objs):
    report = tp.list_shared_storages(objs)

    assert (report.storages, report.ranges) == ((), ())
    assert str(report).splitlines()[0] == "no storage is shared"


def test_base_without_a_name_is_no_member():
    view = torch.zeros(1000)[:10]

    assert tp.list_shared_storages({"view": view}).storages == ()


def test_owner_that_no_path_reaches_is_counted(cpp_owners):
    x = torch.ones(16)
    cpp_owners.hold_alias(x)

    try:
        for report in (tp.list_shared_storages({"x": x}), tp.list_shared_storages()):
            (shared,) = (storage for storage in report.storages if "x" in [member.name for member in storage.members])
            assert (shared.use_count, shared.unreached_owners) == (2, 1)
    finally:
        cpp_owners.release()
    assert not tp.list_shared_storages({"x": x}).storages


def test_gradient_without_an_object_is_a_member():
    """Backward makes the gradient as a view of what it was given, in C++: no Python object stands for it."""
    weight, given = torch.zeros(16, requires_grad=True), torch.ones(2, 8)
    weight.view(2, 8).backward(given)

    assert not tp.list_shared_storages({"given": given}).storages  # who holds the rest is known, and was not asked for
    (shared,) = (s for s in tp.list_shared_storages().storages if s.storage == C.read(given).storage.address)

    assert [(member.name, member.role) for member in shared.members] == [
        ("weight.grad", "gradient"),
        ("given", "tensor"),
    ]
    assert shared.unreached_owners == 0


def test_gradient_of_a_leaf_without_a_name_is_a_member():
    given = torch.ones(2, 8)

    class Hidden:
        __slots__ = ("weight",)

    def make():
        hidden = Hidden()
        hidden.weight = torch.zeros(16, requires_grad=True)
        hidden.weight.view(2, 8).backward(given)
        return lambda: hidden

    kept = make()
    (shared,) = (s for s in tp.list_shared_storages().storages if s.storage == C.read(given).storage.address)

    assert [member.role for member in shared.members] == ["tensor", "gradient"]
    assert shared.members[1].name.endswith(".grad")
    assert kept().weight.grad is not None


def test_live_storage_object_is_an_owner_that_is_known():
    x = torch.zeros(4)
    storage = x.untyped_storage()

    assert tp.list_shared_storages({"x": x}).storages == ()
    assert storage.nbytes() == 16


def test_saved_tensors_are_named_by_node_and_argument():
    x = torch.ones(8, requires_grad=True)
    result = x.exp()

    shared = over(tp.list_shared_storages({"result": result}), result)

    assert [(m.name, m.role) for m in shared.members] == [
        ("result", "tensor"),
        ("saved by ExpBackward0 (result)", "saved"),
    ]


def test_tensor_packed_by_a_hook_is_said_not_to_be_known():
    x, called = torch.ones(8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, called.append):
        result = x.exp()

    report = tp.list_shared_storages({"result": result})

    assert (report.storages, called) == ((), [])
    assert "not looked into: 1 saved tensor: packed by a hook, which is not run" in str(report)


# -- several storages over one memory ---------------------------------------------------------------------------------


def test_numpy_array_and_tensors_over_it():
    array = np.zeros(8)
    whole, part = torch.from_numpy(array), torch.from_numpy(array[2:])

    report = tp.list_shared_storages({"array": array, "whole": whole, "part": part})

    (found,) = report.ranges
    assert report.storages == ()
    assert (len(found.storages), found.nbytes, found.overlap, found.handle) == (2, 64, "nested", None)
    assert {(m.name, m.role, m.first_byte, m.visible_nbytes) for m in found.members} == {
        ("array", "array", 0, 64),
        ("whole", "tensor", 0, 64),
        ("part", "tensor", 16, 48),
    }
    assert "several storages over one memory" in str(report)


def test_array_with_gaps_is_exact():
    array = np.zeros((4, 4))
    even, odd = torch.from_numpy(array[:, ::2]), torch.from_numpy(array[:, 1::2])

    (found,) = tp.list_shared_storages({"even": even, "odd": odd}).ranges

    assert (found.overlap, [m.visible_nbytes for m in found.members]) == ("disjoint", [64, 64])


def test_array_backwards():
    array = np.zeros(6)

    (found,) = tp.list_shared_storages({"array": array, "backwards": array[::-1][:3]}).ranges

    assert (found.overlap, found.storages) == ("nested", ())


def test_one_file_mapped_twice(tmp_path):
    path = tmp_path / "shared.bin"
    path.write_bytes(bytes(64))
    one = torch.from_file(str(path), shared=True, size=16)
    two = torch.from_file(str(path), shared=True, size=16)

    report = tp.list_shared_storages({"one": one, "half": two[:8]})

    (found,) = report.ranges
    assert one.data_ptr() != two.data_ptr()
    assert (found.handle, found.begin, found.nbytes, found.overlap) == (str(path), 0, 64, "nested")
    assert "mappings of" in str(report)


def test_parts_of_one_file_meet_by_their_offsets(tmp_path):
    path = tmp_path / "shared.bin"
    path.write_bytes(bytes(64))
    whole = torch.from_file(str(path), shared=True, size=16)
    array = np.memmap(path, dtype="f4", mode="r+", offset=16)

    (found,) = tp.list_shared_storages({"whole": whole, "array": array}).ranges

    assert (found.handle, found.nbytes, found.overlap) == (str(path), 64, "nested")
    assert [(m.name, m.first_byte, m.needed_nbytes) for m in found.members] == [("whole", 0, 64), ("array", 16, 64)]


def test_private_mappings_say_how_long_they_are_one(tmp_path):
    torch.save({"x": torch.arange(1000.0), "y": torch.zeros(10)}, tmp_path / "saved.pt")
    one, two = (torch.load(tmp_path / "saved.pt", mmap=True) for _ in range(2))

    found = tp.list_shared_storages({"one": one, "two": two}).ranges

    assert sorted(sorted(m.name for m in shared.members) for shared in found) == [
        ["one['x']", "two['x']"],
        ["one['y']", "two['y']"],
    ]
    assert all(shared.handle.endswith("saved.pt (where no private page was written)") for shared in found)


def test_mappings_that_do_not_meet_are_not_listed(tmp_path):
    path, other = tmp_path / "one.bin", tmp_path / "two.bin"
    path.write_bytes(bytes(64))
    other.write_bytes(bytes(64))
    first, last = (np.memmap(path, dtype="f4", mode="r+", offset=offset, shape=4) for offset in (0, 16))
    elsewhere = torch.from_file(str(other), shared=True, size=16)

    assert tp.list_shared_storages({"first": first, "last": last, "elsewhere": elsewhere}).ranges == ()


def test_one_mapping_is_not_listed_as_two(tmp_path):
    torch.save({"x": torch.arange(1000.0), "y": torch.zeros(10)}, tmp_path / "saved.pt")
    loaded = torch.load(tmp_path / "saved.pt", mmap=True)

    assert tp.list_shared_storages(loaded).ranges == ()


# -- of the process ---------------------------------------------------------------------------------------------------


def test_process_names_what_a_variable_has():
    x = torch.zeros(1003)
    view = x[3:]

    shared = over(tp.list_shared_storages(), x)

    assert {(m.name, m.named) for m in shared.members} == {("x", True), ("view", True)}
    assert view.numel() == 1000


def test_process_counts_what_has_no_name():
    x = torch.zeros(1003)
    kept = [[[x[number:]]] for number in range(3)]
    kept.append(object())
    hidden = iter(kept)
    del kept

    report = tp.list_shared_storages()

    assert [m.name for m in over(report, x).members if m.named] == ["x"]
    assert sum(not m.named for m in over(report, x).members) == 3
    assert next(hidden)


def test_process_names_what_the_graph_alone_keeps():
    x = torch.ones(1003, requires_grad=True)
    out = (x.exp() * x).sum()

    shared = [s for s in tp.list_shared_storages().storages if any("ExpBackward0" in name for name in names(s))]

    assert [sorted(names(s)) for s in shared] == [["saved by ExpBackward0 (result)", "saved by MulBackward0 (self)"]]
    assert out.requires_grad


def test_process_looks_at_frozen_objects():
    program = """
import gc, torch, tensorplay
x = torch.zeros(1003)
view = x[3:]
gc.collect(); gc.freeze()
assert gc.get_freeze_count() > 0
report = tensorplay.list_shared_storages()
(shared,) = [s for s in report.storages if s.nbytes == 4012]
print(*sorted(m.name for m in shared.members), shared.unreached_owners)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=helpers.ROOT)

    assert done.stdout == "view x 0\n", done.stderr


def test_process_holds_only_what_is_shared():
    alone = torch.zeros(1003)

    report = tp.list_shared_storages()

    assert over(report, alone) is None
    assert tp.inspect(alone, quiet=True).records[0].impl.address not in {r.impl.address for r in report.records}


# -- the report -------------------------------------------------------------------------------------------------------


def test_text():
    x = torch.zeros(100)
    report = tp.list_shared_storages({"x": x, "head": x[:10]})

    assert str(report) == (
        "storage  bytes  dead  overlap  members\nS1       400 B   0 B  nested   x, head\n2 tensors, 1 storage, 400 B"
    )


def test_text_where_nothing_is_shared():
    report = tp.list_shared_storages({"x": torch.zeros(4)})

    assert str(report) == "no storage is shared\n1 tensor, 1 storage, 16 B"


def test_report_prints_nothing_and_reads_back_equal(capsys):
    x, array = torch.zeros(4), np.zeros(4)
    report = tp.list_shared_storages({"x": x, "y": x[1:], "array": array, "tensor": torch.from_numpy(array)})

    again = tp.Report.from_json(report.to_json())

    assert again.document == report.document
    assert str(again) == str(report)
    assert "x, y" in report.html()
    assert capsys.readouterr() == ("", "")


def test_cut_is_said():
    x = torch.zeros(100)

    report = tp.list_shared_storages([x[n:] for n in range(10)], max_tensors=3)

    assert len(only(report).members) == 3
    assert "cut after 3 tensors" in str(report)


@pytest.mark.parametrize("most", [0, -1, True, 2.0, "3"])
@pytest.mark.parametrize("call", [tp.list_shared_storages, tp.check])
def test_bound_is_checked(call, most):
    with pytest.raises(ValueError if type(most) is int else TypeError, match=r"^max_tensors must be ") as failure:
        call({}, max_tensors=most)

    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("key", ["", "two\nlines", "\u202e"])
def test_keys_that_cannot_be_printed_are_written_out_as_check_does(key):
    x = torch.zeros(4)

    shared = only(tp.list_shared_storages({key: x, "tail": x[1:]}))

    assert names(shared) == [repr(key), "tail"] == [record.name for record in tp.check({key: x, "tail": x[1:]}).records]


@pytest.mark.parametrize("objs", [{"a": 3}, {}, [], object(), {"m": torch.nn.ReLU()}])
def test_objects_without_a_tensor_are_said_to_have_none(objs):
    assert str(tp.list_shared_storages(objs)).splitlines()[0] == "nothing among the objects holds a tensor or an array"
    for some in ({"x": torch.zeros(2)}, {"array": np.zeros(2)}, {"not looked into": iter([torch.zeros(2)])}):
        assert str(tp.list_shared_storages(some)).splitlines()[0] == "no storage is shared"


def test_nothing_is_kept():
    x = torch.zeros(4)
    before = sys.getrefcount(x)

    report = tp.list_shared_storages({"x": x, "y": x[1:]})

    assert sys.getrefcount(x) == before
    assert tp.inspect(x, quiet=True).records[0].impl.use_count == 1
    assert report.storages
