"""compare(): what two tensors are to each other, and what differs between two reports."""

from __future__ import annotations

import os
import pickle

import msgspec
import numpy as np
import pytest
import torch
from torch.nested import nested_tensor_from_jagged

import tensorplay as tp
from tensorplay._native import C
from tensorplay.differences import compared
from tests import helpers


def of(a, b):
    return tp.compare(a, b).document.comparison


def record(x):
    return tp.inspect(x, quiet=True).records[0]


def facts(a, b) -> tuple:
    comparison = of(a, b)
    return comparison.same_object, comparison.same_impl, comparison.same_storage, comparison.same_version_counter


# -- the verdict of each relation -------------------------------------------------------------------------------------


def test_one_object():
    x = torch.zeros(4)

    assert of(x, x).verdict == "one tensor: the same Python object"
    assert facts(x, x) == (True, True, True, True)


def test_two_python_objects_over_one_impl():
    """Not to be made from Python: the records are."""
    one = record(torch.zeros(4))
    two = msgspec.structs.replace(one, python=msgspec.structs.replace(one.python, address=one.python.address + 64))

    comparison = compared(one, two)

    assert comparison.verdict == "two Python objects over one TensorImpl"
    assert (comparison.same_object, comparison.same_impl) == (False, True)


def test_base_and_view():
    x = torch.zeros(10)

    comparison = of(x, x[2:])

    assert (
        comparison.verdict
        == "a tensor and a view of it: views of one storage, 32 of 40 bytes in common, one version counter"
    )
    assert facts(x, x[2:]) == (False, False, True, True)
    assert (comparison.relation, comparison.shared_nbytes, comparison.same_pointer) == ("second_in_first", 32, False)


@pytest.mark.parametrize(
    ("a", "b", "common", "relation"),
    [
        (slice(0, 5), slice(5, 10), "no byte in common", "disjoint"),
        (slice(0, 6), slice(4, 10), "8 of 40 bytes in common", "partial"),
        (slice(0, 3), slice(0, 9), "12 of 40 bytes in common", "first_in_second"),
        (slice(0, 3), slice(0, 3), "12 of 40 bytes in common", "identical"),
        (slice(0, 10, 2), slice(1, 10, 2), "no byte in common", "disjoint"),
    ],
)  # fmt: skip
def test_two_views(a, b, common, relation):
    x = torch.zeros(10)

    comparison = of(x[a], x[b])

    assert comparison.verdict == f"two views of one storage, {common}, one version counter"
    assert comparison.relation == relation


def test_detached_shares_the_counter_and_data_does_not():
    x = torch.zeros(4, requires_grad=True)

    assert of(x, x.detach()).verdict == "two tensors of one storage, 16 of 16 bytes in common, one version counter"
    assert (
        of(x, x.data).verdict
        == "two tensors of one storage, 16 of 16 bytes in common, version counters of their own"
    )  # fmt: skip


def test_two_storages_over_one_buffer():
    buffer = np.zeros(4)
    one, two = torch.from_numpy(buffer), torch.from_numpy(buffer[1:])

    comparison = of(one, two)

    assert comparison.verdict == "two storages over one buffer, 24 bytes in common, version counters of their own"
    assert (comparison.same_storage, comparison.relation) == (False, "second_in_first")
    assert of(torch.from_numpy(buffer[:2]), torch.from_numpy(buffer[2:])).verdict == "two storages, no byte in common"


ONE_FILE = "two storages over one file, {} bytes in common{}, version counters of their own"
PRIVATE = " where no private page was written"


def reopened_handle():
    x = torch.zeros(8).share_memory_()
    fd, nbytes = x.untyped_storage()._share_fd_cpu_()
    again = torch.UntypedStorage._new_shared_fd_cpu(os.dup(fd), nbytes)
    return x, torch.empty(0).set_(again, 0, (8,))


@pytest.mark.parametrize(
    ("make", "nbytes", "private"),
    [
        (lambda path: [torch.from_file(path, shared=True, size=16) for _ in "ab"], 64, ""),
        (lambda path: [torch.from_file(path, shared=True, size=16)[at : at + 4] for at in (0, 3)], 4, ""),
        (lambda path: [torch.from_file(path, shared=shared, size=16) for shared in (True, False)], 64, PRIVATE),
        (lambda path: [torch.from_numpy(np.memmap(path, "f4", "r+", offset)) for offset in (0, 8)], 8184, ""),
        (lambda path: [torch.load(f"{path}.pt", mmap=True)["x"] for _ in "ab"], 400, PRIVATE),
        (lambda path: reopened_handle(), 32, ""),
    ],
)  # fmt: skip
def test_two_mappings_of_one_file_have_bytes_in_common(make, nbytes, private, tmp_path):
    path = tmp_path / "one.bin"
    path.write_bytes(bytes(8192))
    torch.save({"x": torch.zeros(100)}, f"{path}.pt")
    a, b = make(str(path))

    comparison = of(a, b)

    assert a.data_ptr() != b.data_ptr()
    assert (comparison.verdict, comparison.shared_nbytes) == (ONE_FILE.format(nbytes, private), nbytes)
    if not private:
        a.view(torch.uint8).fill_(7)
        assert (b.view(torch.uint8) == 7).sum() == nbytes


def test_mappings_that_do_not_meet_have_no_byte_in_common(tmp_path):
    one, two = tmp_path / "one.bin", tmp_path / "two.bin"
    one.write_bytes(bytes(64))
    two.write_bytes(bytes(64))
    a, b, other = (torch.from_file(str(path), shared=True, size=16) for path in (one, one, two))

    assert of(a, other).verdict == "two storages, no byte in common"
    assert of(a[:8], b[8:]).verdict == "two storages, no byte in common"
    assert of(a[::2], b[1::2]).verdict == "two storages, no byte in common"
    assert of(a[:0], b).verdict == "two storages, no byte in common"


def test_memory_map_is_read_only_where_both_may_be_mapped(tmp_path, monkeypatch):
    path = tmp_path / "one.bin"
    path.write_bytes(bytes(64))
    mapped = torch.from_file(str(path), shared=True, size=16)
    asked = []
    monkeypatch.setattr(C, "mapped_files", lambda spans: asked.append(spans) or [[] for _ in spans])

    of(mapped, torch.zeros(4))
    of(torch.zeros(4), torch.zeros(4))
    of(mapped, mapped[8:])
    assert asked == []
    of(mapped, torch.from_file(str(path), shared=True, size=16))
    assert len(asked) == 1


def test_lazy_clone_shares_bytes_until_one_is_written():
    x = torch.zeros(4)
    lazy = torch._lazy_clone(x)

    before = of(x, lazy).verdict
    lazy.add_(1)

    assert before.startswith("two storages over one buffer until one is written, 16 bytes in common")
    assert of(x, lazy).verdict == "two storages, no byte in common"


def test_copies_share_nothing():
    x = torch.zeros(4)

    assert of(x, x.clone()).verdict == "two storages, no byte in common"


def test_equal_null_pointers_prove_nothing():
    comparison = of(torch.empty(0), torch.empty(0))

    assert comparison.verdict == "two storages, no byte in common; null pointers, which prove nothing"
    assert (comparison.same_pointer, comparison.shared_nbytes) == (True, 0)


def test_empty_view_shares_no_byte():
    x = torch.zeros(4)

    assert of(x[:0], x).shared_nbytes == 0


def test_meta_tensors():
    x = torch.empty(4, device="meta")

    assert (
        of(x, torch.empty(4, device="meta")).verdict == "two tensors: a meta tensor has no memory of its own to share"
    )
    view = of(x, x[1:])
    assert view.verdict == "a tensor and a view of it: views of one storage, without memory, one version counter"
    assert (view.same_storage, view.shared_nbytes) == (True, None)


def test_wrappers_are_told_by_what_they_hold_not_by_their_null_pointers():
    x = torch.zeros(4)
    wrapper = helpers.Wrapper(x)

    for other, said in (
        (helpers.Wrapper(x), "; wrapper.elem and other.elem have bytes in common"),
        (helpers.Wrapper(x[3:]), "; wrapper.elem and other.elem have bytes in common"),
        (helpers.Wrapper(x.clone()), ""),
        (helpers.Wrapper(helpers.Wrapper(x)), "; wrapper.elem and other.elem.elem have bytes in common"),
    ):
        comparison = tp.compare(wrapper, other).document.comparison
        assert comparison.verdict == (f"two tensors: a wrapper subclass tensor has no memory of its own to share{said}")
        assert comparison.relation is None
    assert of(wrapper, x).verdict.endswith("; a.elem and b have bytes in common")


@pytest.mark.parametrize("call", [lambda a, b: tp.compare(a, b), lambda a, b: tp.inspect(a, b, quiet=True)])
def test_jagged_tensors_are_told_by_their_values(call):
    values, offsets = torch.ones(7, 3), torch.tensor([0, 2, 7])
    a, b, own = (nested_tensor_from_jagged(x, offsets) for x in (values, values[:], values.clone()))

    def said(one, two) -> str:
        return call(one, two).document.comparison.verdict.partition(" to share")[2]

    assert said(a, b) == "; a._values and b._values have bytes in common"
    assert said(a, a.transpose(1, 2)).startswith("; a._values and ")
    assert said(a, own) == said(a, a * 2) == ""
    assert call(a, a).document.comparison.verdict == "one tensor: the same Python object"


def test_sparse_tensors_are_told_by_what_they_are_made_of():
    x = torch.eye(3).to_sparse()

    assert of(x, x.clone()).verdict == "two tensors: a sparse coo tensor has no memory of its own to share"
    assert of(x, x.detach()).verdict == (
        "two tensors: a sparse coo tensor has no memory of its own to share; a.indices and b.indices, a.values and "
        "b.values have bytes in common"
    )
    assert of(x, x._values()).verdict.endswith("; a.values and b have bytes in common")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_kind_without_strides_is_not_called_disjoint():
    x = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])

    assert of(x, x.detach()).verdict == (
        "two tensors of one storage, a nested tensor has no strides: which bytes they have in common is not known, one "
        "version counter"
    )
    assert of(x, torch.ones(2)).verdict == (
        "two storages, a nested tensor has no strides: whether they have bytes in common is not known"
    )


def test_released_storage_has_none_of_the_bytes():
    view, flat = helpers.released()

    assert of(view, flat).verdict == (
        "a tensor and a view of it: views of one storage, the same 16 bytes reached, of which it has none, one version "
        "counter"
    )


def test_inference_tensors_have_no_counter():
    with torch.inference_mode():
        x = torch.ones(3)
        view = x[1:]

    assert of(x, view).verdict == "two tensors of one storage, 8 of 12 bytes in common, no version counter"
    assert of(x, view).same_version_counter is None


def test_type_of_elements_does_not_hide_common_bytes():
    x = torch.zeros(3, dtype=torch.complex64)

    assert of(x, torch.view_as_real(x)).shared_nbytes == 24
    assert of(x, x.conj()).relation == "identical"


# -- as a report ------------------------------------------------------------------------------------------------------


def test_report_has_both_records_and_prints_nothing(capsys):
    x = torch.zeros(10)
    view = x[2:]

    report = tp.compare(x, view)

    text = str(report)
    assert text.startswith("a tensor and a view of it")
    assert "second in first, 32 B in common" in text
    assert capsys.readouterr() == ("", "")
    assert tp.Report.from_json(report.to_json()).document == report.document
    assert "32 of 40 bytes in common" in report.html()


def test_strides_of_size_one_are_told_apart_from_an_order():
    x = torch.zeros(3, 1, 2)
    report = tp.compare(x, x.as_strided((3, 1, 2), (2, 77, 1)))

    assert [finding.code for finding in report.findings] == ["TP108"]
    assert "memory order" in str(report)
    assert report.document.comparison.same_memory_order
    assert not of(torch.zeros(2, 3), torch.zeros(3, 2).t()).same_memory_order


def test_inspect_of_two_appends_the_comparison(capsys):
    x = torch.zeros(10)
    view = x[2:]

    report = tp.inspect(x, view)

    assert report.document.comparison.verdict == of(x, view).verdict
    assert [r.name for r in report.records] == ["x", "view"]
    assert report.document.comparison.verdict in capsys.readouterr().err


@pytest.mark.parametrize(
    ("a", "b", "got"),
    [
        (torch.zeros(1), 3, "Tensor and int"),
        (None, torch.zeros(1), "NoneType and Tensor"),
        (torch.zeros(1), tp.check({"x": torch.zeros(1)}), "Tensor and Report"),
        (np.zeros(1), torch.zeros(1), "ndarray and Tensor"),
    ],
)
def test_other_things_are_refused_in_one_line(a, b, got):
    with pytest.raises(TypeError) as failure:
        tp.compare(a, b)

    assert str(failure.value) == f"compare() takes two tensors or two reports, got {got}"


# -- before and after -------------------------------------------------------------------------------------------------


def changed(report) -> list[tuple]:
    return [(change.field, change.before, change.after) for change in report.document.changes]


def test_reports_before_and_after_a_write():
    x = torch.zeros(4)
    before = tp.inspect(x, quiet=True)
    x.add_(1)
    after = tp.inspect(x, quiet=True)

    report = tp.compare(before, after)

    assert changed(report) == [("impl.version", 0, 1)]
    assert "the same tensor or a recycled address" in str(report)


def test_equal_reports_say_the_same():
    x = torch.zeros(4)
    before = tp.inspect(x, quiet=True)

    report = tp.compare(before, tp.inspect(x, quiet=True))

    assert changed(report) == []
    assert "the two reports say the same" in str(report)
    assert "the two reports say the same" in report.html()
    assert "the same tensor or a recycled address" in str(report)


def test_tensors_of_other_addresses_are_surely_others():
    x, y = torch.zeros(4), torch.zeros(4)

    report = tp.compare(tp.inspect(x, quiet=True), tp.inspect(y, quiet=True))

    assert "impl.address" in [field for field, _, _ in changed(report)]
    assert "an equal address" not in str(report)


def test_tensors_that_came_and_went():
    x, y, z = torch.zeros(1), torch.zeros(2), torch.zeros(3)

    report = tp.compare(tp.check({"x": x, "y": y}), tp.check({"x": x, "z": z}))

    assert changed(report) == [("record", None, "new"), ("record", "there", None)]
    assert [change.name for change in report.document.changes] == ["z", "y"]


def test_stored_reports_are_compared_as_well():
    x = torch.zeros(4)
    before = tp.Report.from_json(tp.inspect(x, quiet=True).to_json())
    x.resize_(2)

    report = tp.compare(before, tp.Report.from_json(tp.inspect(x, quiet=True).to_json()))

    assert ("impl.shape", [4], [2]) in changed(report)


def test_view_chains_are_compared_as_well():
    x = torch.zeros(4, 4)
    before = tp.show_view_chain(x[1], quiet=True)

    report = tp.compare(before, tp.show_view_chain(x[2], quiet=True))

    assert ("chains.steps", ["select(dim=0, index=1)"], ["select(dim=0, index=2)"]) in changed(report)
    same = tp.compare(before, before)
    assert changed(same) == []
    assert "the two reports say the same" in str(same)


def test_shared_storages_are_compared_as_well():
    x = torch.zeros(8)
    array = np.zeros(4)
    objs = {"x": x, "view": x[4:], "array": array, "over": torch.from_numpy(array)}
    before = tp.list_shared_storages(objs)
    objs["view"] = x[6:]
    del objs["over"]

    report = tp.compare(before, tp.list_shared_storages(objs))

    changes = changed(report)
    assert (
        "shared_storages.members",
        ["x, bytes 0 to 32", "view, bytes 16 to 32"],
        ["x, bytes 0 to 32", "view, bytes 24 to 32"],
    ) in changes
    assert ("shared_ranges", "there", None) in changes
    assert "shared_storages.members" in str(report)
    assert changed(tp.compare(before, before)) == []


@pytest.mark.parametrize(
    "make", [lambda x: tp.show_view_chain(x[1], quiet=True), lambda x: tp.list_shared_storages([x, x[1]])]
)
def test_special_reports_read_back_as_what_they_are(make):
    report = make(torch.zeros(4, 4))

    for again in (type(report).from_json(report.to_json()), pickle.loads(pickle.dumps(report))):
        assert type(again) is type(report)
        assert again.document == report.document
        assert str(again) == str(report)
