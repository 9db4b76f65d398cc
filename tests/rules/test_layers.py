"""TP101-TP103: each fires, its healthy twin and its near misses stay silent, random ones agree with their truth."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.masked import masked_tensor

import tensorplay as tp
from tensorplay.rules.registry import load_rule
from tests import helpers


def loud(objs) -> list[str]:
    return [finding.code for finding in tp.check(objs).findings if finding.severity != "info"]


def the_finding(objs) -> tp.Finding:
    (finding,) = tp.check(objs).findings
    return finding


# -- TP101 devices disagree


def test_tp101_key_set_of_another_device_fires():
    finding = the_finding({"x": helpers.key_set_of_another_device()})

    assert (finding.code, finding.severity) == ("TP101", "error")
    assert finding.headline == "device facts disagree: the key set computes on meta, the impl says cpu"
    assert finding.evidence["impl_device"] == "cpu"
    assert finding.evidence["key_device"] == "meta"
    assert finding.evidence["data_device"] == "cpu"
    assert finding.evidence["allocator_device"] == "cpu"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3).as_subclass(helpers.Plain),
        lambda: torch.Tensor._make_subclass(helpers.Plain, torch.ones(3)),
        lambda: torch.empty(3, device="meta"),
        lambda: helpers.fake("cpu"),
        lambda: helpers.fake("cuda"),
        helpers.symbolic_fake,
        lambda: helpers.Wrapper(torch.ones(3)),
        lambda: torch._to_functional_tensor(torch.ones(3)),
        lambda: torch._efficientzerotensor(3),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.ones(2, 2).to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.nn.LazyLinear(3).weight,
        lambda: torch.zeros(3).share_memory_(),
        helpers.numpy_tensor,
        lambda: torch.empty(0, device="meta"),
        lambda: helpers.Wrapper(torch.ones(0, 4)),
        lambda: helpers.Wrapper(torch.ones(3), storage_size=0),
        lambda: masked_tensor(torch.ones(0), torch.ones(0, dtype=torch.bool)),
        lambda: torch.ones(0).as_subclass(helpers.Plain),
    ],
)
def test_kind_that_carries_two_devices_by_design_is_silent(make):
    assert loud({"x": make()}) == []


PLAIN = tp.inspect(torch.ones(3), quiet=True).records[0]


def with_devices(device, backend, label, allocator) -> tp.TensorRecord:
    """A record as a C++ extension could make it true: labels cannot be set from Python."""
    replace = msgspec.structs.replace
    return replace(
        PLAIN,
        impl=replace(PLAIN.impl, device=device, backend=backend),
        data=replace(PLAIN.data, device=label),
        storage=replace(PLAIN.storage, allocator_device=allocator),
    )


@pytest.mark.parametrize(
    ("devices", "headline"),
    [
        (("cpu", "cpu", "cuda:0", None), "the impl says cpu, its DataPtr cuda:0"),
        (("cuda:0", "cuda", "cpu", "cpu"), "the impl says cuda:0, its DataPtr cpu"),
        (("cuda:0", "cuda", "cuda:1", "cuda"), "the impl says cuda:0, its DataPtr cuda:1"),
        (("cuda:0", "cpu", "cuda:0", "cuda"), "the key set computes on cpu, the impl says cuda:0"),
        (("npu:0", "npu", "npu:0", "cpu"), "the DataPtr says npu:0, its allocator serves cpu"),
        (("cpu", "cpu", "cpu", "meta"), "the DataPtr says cpu, its allocator serves meta"),
    ],
)
def test_tp101_fires_on_each_pair_of_facts(devices, headline):
    record = with_devices(*devices)
    rule = load_rule("TP101")

    assert rule.suspects(record)
    (finding,) = rule.findings([record])
    assert finding.headline == f"device facts disagree: {headline}"


@pytest.mark.parametrize(
    "devices",
    [
        ("cpu", "cpu", "cpu", "cpu"),
        ("cpu", "cpu", "cpu", None),  # pinned or foreign memory: its allocator is registered for no device
        ("cuda:0", "cuda", "cuda:0", "cuda"),
        ("cuda:1", "cuda", "cuda", None),  # a label without an index
        ("cpu", None, "cpu", "cpu"),
        (None, None, "cpu", "cpu"),
    ],
)
def test_tp101_is_silent_where_the_facts_agree(devices):
    assert not load_rule("TP101").suspects(with_devices(*devices))


@given(
    types=st.tuples(*[st.sampled_from(["cpu", "cuda", "meta"])] * 4),
    index=st.sampled_from(["", ":0"]),
    registered=st.booleans(),
)
@settings(deadline=None)
def test_tp101_on_random_labels(types, index, registered):
    device, backend, label, allocator = types
    named = {kind: kind if kind == "cpu" else kind + index for kind in types}
    record = with_devices(named[device], backend, named[label], allocator if registered else None)
    facts = {device, backend, label} | ({allocator} if registered else set())

    assert load_rule("TP101").suspects(record) == (len(facts) > 1)


def test_tp101_is_one_finding_for_what_disagrees_in_one_way():
    objs = {
        "a": helpers.key_set_of_another_device(), "b": helpers.key_set_of_another_device(), "healthy": torch.ones(3),
    }  # fmt: skip

    finding = the_finding(objs)

    assert finding.evidence["tensors"] == ["a", "b"]
    assert finding.subject == "float32[3], and 1 more tensor in the same way"


def test_tp101_is_silent_in_transforms():
    found = []
    for transform in (torch.func.vmap, torch.func.grad, torch.func.functionalize):
        helpers.inside(transform, torch.ones(2, 3), lambda x: found.append(loud({"x": x})))

    assert found == [[], [], []]


# -- TP102 reaches past its storage


def test_tp102_released_storage_is_one_finding_for_all_its_views():
    view, flat = helpers.released()
    other = view.detach()  # a third impl over the same storage

    finding = the_finding({"view": view, "flat": flat, "other": other})

    assert (finding.code, finding.severity) == ("TP102", "error")
    assert finding.evidence["storage_nbytes"] == 0
    assert finding.evidence["needed_nbytes"] == 24
    assert finding.evidence["out_of_bounds"] is True
    assert finding.evidence["data_ptr"] == 8
    assert [entry["name"] for entry in finding.evidence["tensors"]] == ["view", "flat", "other"]
    assert "unsharded" in finding.fix


def test_tp102_storage_that_shrank_below_a_view_fires():
    flat = torch.arange(8.0)
    view, low = flat[6:], flat[:2]
    flat.untyped_storage().resize_(16)

    finding = the_finding({"view": view, "low": low})

    assert finding.evidence["needed_nbytes"] == 32
    assert [entry["name"] for entry in finding.evidence["tensors"]] == ["view"]
    assert "resize_(32)" in finding.fix


def test_tp102_fires_for_the_values_inside_a_sparse_tensor():
    values = torch.ones(3)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), values, (3,), check_invariants=True)
    sparse._values().untyped_storage().resize_(4)

    finding = the_finding({"sparse": sparse})

    assert finding.code == "TP102"
    assert finding.where.name == "sparse.values"


def test_tp102_fires_for_a_gradient():
    x = torch.ones(4, requires_grad=True)
    x.sum().backward()
    x.grad.untyped_storage().resize_(0)

    assert the_finding({"x": x}).where.name == "x.grad"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(8.0)[2:6],  # the whole storage is there
        lambda: torch.zeros(8)[8:],  # begins at the very end, reaches nothing
        lambda: torch.zeros(0, 5),
        lambda: torch.zeros(3).expand(4, 3),  # more elements than cells
        lambda: torch.zeros(6).unfold(0, 3, 1),
        lambda: torch.empty(4, device="meta"),
        lambda: torch.zeros(5).as_strided((2, 2), (3, 1), 0),  # its last element is the last cell
        lambda: torch._empty_affine_quantized([4, 6], scale=1.0, zero_point=0, dtype=torch.quint4x2),  # two a byte
        lambda: torch.zeros(1).expand(2**62),  # more bytes than 64 bits count
    ],
)
def test_tp102_neighbour_is_silent(make):
    assert loud({"x": make()}) == []


def test_tp102_refilled_storage_is_silent():
    view, flat = helpers.released()
    flat.untyped_storage().resize_(32)
    flat.copy_(torch.arange(8.0))

    assert loud({"view": view, "flat": flat}) == []


@given(st.integers(0, 12), st.integers(0, 8), st.integers(0, 4), st.integers(0, 3))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_tp102_random_storage_and_view_agree_with_the_bytes(keep, start, size, step):
    flat = torch.zeros(24)
    view = flat.as_strided((size,), (step,), start)
    flat.untyped_storage().resize_(keep * 4)
    reaches = start + (size - 1) * step + 1 if size else 0

    assert loud({"view": view}) == (["TP102"] if reaches > keep else [])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tp102_nested_tensor_over_a_shrunk_storage_fires():
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    assert loud({"nested": nested}) == []
    nested.untyped_storage().resize_(16)

    finding = the_finding({"nested": nested})

    assert (finding.code, finding.evidence["needed_nbytes"], finding.evidence["storage_nbytes"]) == ("TP102", 72, 16)


# -- TP103 null pointer with bytes


def test_tp103_null_pointer_fires():
    finding = the_finding({"x": helpers.null_pointer()})

    assert (finding.code, finding.severity) == ("TP103", "error")
    assert finding.evidence["storage_pointer"] == 0
    assert finding.evidence["storage_nbytes"] == 16
    assert finding.evidence["needed_nbytes"] == 16


@given(claimed=st.integers(0, 64), first=st.integers(0, 4), count=st.integers(0, 8), null=st.booleans())
@settings(deadline=None)
def test_tp103_on_random_storages(claimed, first, count, null):
    source = torch.zeros(16)
    pointer = 0 if null else source.data_ptr()
    storage = torch._C._construct_storage_from_data_pointer(pointer, torch.device("cpu"), claimed)
    needed = 4 * (first + count) if count else 0
    # set_() refuses a geometry that reaches past its storage, and a bare shrink takes the pointer's claim away.
    x = torch.empty(0).set_(storage, first, (count,)) if needed <= claimed else torch.empty(0)

    assert loud({"x": x}) == (["TP103"] if null and count and needed <= claimed else [])


def test_tp103_in_a_subclass_that_carries_its_data():
    class Carrier(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(f"the probe ran {func}")

    x = torch.Tensor._make_subclass(Carrier, helpers.null_pointer())

    assert loud({"x": x}) == ["TP103"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 0),
        lambda: torch.empty(4, device="meta"),
        lambda: torch._efficientzerotensor(3),
        lambda: helpers.fake("cpu"),
        lambda: helpers.Wrapper(torch.ones(3)),
        lambda: helpers.null_pointer()[4:],  # nothing to read
        lambda: torch.nn.LazyLinear(3).weight,
        lambda: torch.from_numpy(__import__("numpy").zeros(0)),
    ],
)
def test_tp103_null_pointer_by_design_is_silent(make):
    assert "TP103" not in loud({"x": make()})


def test_tp103_real_pointer_of_the_same_making_is_silent():
    source = torch.zeros(4)
    storage = torch._C._construct_storage_from_data_pointer(source.data_ptr(), torch.device("cpu"), 16)

    assert loud({"x": torch.empty(0).set_(storage, 0, (4,))}) == []
