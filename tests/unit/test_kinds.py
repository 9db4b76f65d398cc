"""Every kind of tensor gives a record, and what a kind lacks is None with the reason."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

import tensorplay as tp
from tensorplay._native import C
from tensorplay.layers import TensorRecord
from tests import helpers

# Making some kinds warns that they are in beta or will go.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of"),
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
]

X = torch.arange(24.0).view(4, 6)

# name, how to make it, and facts: dotted field -> value.
KINDS = [
    ("strided", lambda: X.clone(), {"kind": "strided", "impl.shape": (4, 6), "data.origin": "cpu_allocator"}),
    ("parameter", lambda: torch.nn.Parameter(X.clone()), {"kind": "strided", "python.type": "Parameter"}),
    ("view", lambda: X[1:, ::2], {"impl.is_view": True, "impl.stride": (6, 2), "extent.first_byte": 24}),
    ("expanded", lambda: X[:, :1].expand(4, 9), {"impl.stride": (6, 0), "extent.self_overlapping": True}),
    ("conj", lambda: torch.ones(2, dtype=torch.cfloat).conj(), {"impl.is_conj": True, "impl.is_neg": False}),
    ("neg", lambda: torch.ones(2, dtype=torch.cfloat).conj().imag, {"impl.is_neg": True, "impl.is_conj": False}),
    ("numpy", helpers.numpy_tensor, {"data.origin": "callback", "data.maker": "numpy", "storage.resizable": False}),
    ("frombuffer", lambda: torch.frombuffer(bytearray(8), dtype=torch.int32), {"data.maker": "frombuffer"}),
    ("dlpack", lambda: torch.from_dlpack(np.zeros(4)), {"data.maker": "dlpack"}),
    (
        "shared",
        lambda: torch.zeros(3).share_memory_(),
        {"data.origin": "mapped", "storage.shared_memory.mapped_nbytes": 12},
    ),
    ("cow", lambda: torch._lazy_clone(X), {"storage.copy_on_write": True, "data.origin": "copy_on_write"}),
    ("empty", lambda: torch.empty(0), {"kind": "strided", "data.pointer": 0, "extent.needed_nbytes": 0}),
    ("meta", lambda: torch.empty(3, 4, device="meta"), {"kind": "meta", "data.pointer": 0, "storage.nbytes": 48}),
    ("zerotensor", lambda: torch._efficientzerotensor(3), {"kind": "zerotensor", "data.pointer": 0}),
    ("fake cpu", lambda: helpers.fake("cpu"), {"kind": "fake", "impl.device": "meta", "impl.backend": "cpu"}),
    ("fake cuda", lambda: helpers.fake("cuda"), {"kind": "fake", "impl.backend": "cuda", "data.device": "meta"}),
    ("fake meta", lambda: helpers.fake("meta"), {"kind": "fake", "impl.backend": "meta"}),
    ("fake symbolic", helpers.symbolic_fake, {"kind": "fake", "impl.is_symbolic": True, "impl.dim": 2, "extent": None}),
    ("sparse coo", lambda: torch.eye(3).to_sparse(), {"kind": "sparse_coo", "impl.stride": None, "storage": None}),
    ("sparse csr", lambda: torch.eye(4).to_sparse_csr(), {"kind": "sparse_compressed", "impl.layout": "sparse_csr"}),
    ("sparse csc", lambda: torch.eye(4).to_sparse_csc(), {"impl.layout": "sparse_csc", "storage": None}),
    ("sparse bsr", lambda: torch.eye(4).to_sparse_bsr((2, 2)), {"impl.layout": "sparse_bsr", "impl.stride": None}),
    ("sparse bsc", lambda: torch.eye(4).to_sparse_bsc((2, 2)), {"impl.layout": "sparse_bsc", "impl.stride": None}),
    (
        "mkldnn",
        lambda: X.to_mkldnn(),
        {"kind": "mkldnn", "impl.layout": "_mkldnn", "impl.stride": None, "storage": None},
    ),
    (
        "quantized",
        lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),
        {"kind": "quantized", "impl.itemsize": 1},
    ),
    ("inference", helpers.inference, {"impl.is_inference": True, "impl.version": None, "impl.version_counter": None}),
    ("subclass", lambda: X.as_subclass(helpers.Plain), {"kind": "strided", "python.type": "Plain"}),
    ("wrapper", lambda: helpers.Wrapper(X), {"kind": "wrapper_subclass", "data.pointer": 0, "storage.nbytes": 96}),
    ("two tensors", lambda: TwoTensor(X, X.clone()), {"kind": "wrapper_subclass", "python.type": "TwoTensor"}),
    ("functional", lambda: torch._to_functional_tensor(X), {"kind": "functional", "data.pointer": 0}),
    ("uninitialized", lambda: torch.nn.LazyLinear(3).weight, {"kind": "uninitialized", "impl.numel": None}),
    ("0 dimensions", lambda: torch.tensor(3.0), {"impl.dim": 0, "impl.shape": (), "extent.nbytes": 4}),
    ("9 dimensions", lambda: torch.ones([1] * 8 + [2]), {"impl.dim": 9, "impl.numel": 2}),
    ("scalar type", lambda: torch.empty(2, dtype=torch.float8_e4m3fn), {"impl.dtype": "float8_e4m3fn"}),
]
NESTED = [
    (
        "nested",
        torch.strided,
        {
            "kind": "nested",
            "impl.shape": None,
            "impl.stride": None,
            "storage.nbytes": 72,
            "extent.nbytes": 72,
            "extent.first_byte": 0,
            "extent.needed_nbytes": 72,
            "extent.contiguous": None,
        },
    ),
    ("jagged", torch.jagged, {"kind": "nested_jagged", "impl.is_symbolic": True, "data.pointer": 0}),
]


def get(record, path: str):
    for part in path.split("."):
        record = getattr(record, part)
    return record


def check_record(tensor: torch.Tensor, facts: dict[str, object]) -> None:
    native = C.read(tensor)
    record = tp.inspect(tensor, quiet=True).records[0]
    for field, value in facts.items():
        assert get(record, field) == value, field
    assert native.kind == record.kind
    check_absences(record)


# Fields whose None is an answer by itself: there is none.
MAY_BE_NONE = {"impl.base", "impl.base_requires_grad", "impl.base_is_leaf", "impl.creation_meta", "impl.grad_fn",
               "python.module", "storage.shared_memory", "data.context", "data.deleter", "data.maker", "data.producer",
               "data.producer_type", "data.read_only", "python"}  # fmt: skip


def check_absences(record: TensorRecord) -> None:
    """Each None has its reason, and each reason is about a None."""
    missing = set()
    for layer in ("python", "impl", "storage", "data", "extent"):
        value = getattr(record, layer)
        if value is None:
            missing.add(layer)
            continue
        missing |= {f"{layer}.{f}" for f in value.__struct_fields__ if getattr(value, f) is None}
    assert not missing - MAY_BE_NONE - set(record.absent)
    assert not [field for field in record.absent if field.count(".") == 1 and field not in missing]
    assert all(record.absent.values())
    for inner in record.inner:
        check_absences(inner.record)


@pytest.mark.parametrize(("make", "facts"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_kind_gives_its_record(make, facts):
    check_record(make(), facts)


@pytest.mark.parametrize(("layout", "facts"), [kind[1:] for kind in NESTED], ids=[kind[0] for kind in NESTED])
def test_nested_tensor_gives_its_record(layout, facts):
    check_record(torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=layout), facts)


def test_masked_tensor_is_a_wrapper_and_shows_both_its_tensors():
    masked = masked_tensor(X, X > 0)

    report = tp.inspect(masked, quiet=True)

    assert report.records[0].kind == "wrapper_subclass"
    assert {record.name.rpartition(".")[2] for record in report.records[1:]} == {"_masked_data", "_masked_mask"}


@pytest.mark.parametrize(
    ("transform", "kind"),
    [(torch.func.vmap, "batched"), (torch.func.grad, "functorch_wrapper"), (torch.func.functionalize, "functional")],
)
def test_transform_shows_its_wrapper_and_the_tensor_inside(transform, kind):
    x = torch.ones(2, 3)
    seen = []
    helpers.inside(
        transform,
        x,
        lambda t: seen.append(
            (tp.inspect(t, quiet=True), torch._C._functorch.get_unwrapped(t))
            if kind != "functional"
            else (tp.inspect(t, quiet=True), None)
        ),
    )

    ((report, unwrapped),) = seen
    record = report.records[0]

    assert record.kind == kind
    (inner,) = record.inner
    assert inner.role == "value"
    assert inner.record.impl.shape == (2, 3)
    assert inner.record.extent.nbytes == 24
    if unwrapped is not None:
        assert inner.record.impl.address == unwrapped._cdata
    check_absences(record)


def test_transforms_nested_in_each_other_are_unwrapped_to_the_end():
    seen = []
    inner = torch.func.vmap(lambda r: (seen.append(tp.inspect(r, quiet=True).records[0]), r * 1)[1])
    torch.func.vmap(inner)(torch.ones(2, 3, 4))

    (record,) = seen
    shapes = []
    while True:
        shapes.append(record.impl.shape)
        if not record.inner:
            break
        record = record.inner[0].record

    assert shapes == [(4,), (3, 4), (2, 3, 4)]


def test_zero_tensor_s_dangling_allocator_is_not_followed():
    """The allocator it names lived on the stack of the function that made it."""
    for _ in range(3):
        record = C.read(torch._efficientzerotensor((2, 3)))
        assert record.storage.allocator is None


def test_file_mapping_names_its_file(tmp_path):
    path = tmp_path / "values.bin"
    path.write_bytes(bytes(64))

    record = tp.inspect(torch.from_file(str(path), shared=True, size=16), quiet=True).records[0]

    assert record.data.origin == "mapped"
    assert record.storage.shared_memory.handle == str(path)
    assert record.storage.shared_memory.mapped_nbytes == 64


def test_checkpoint_mapping_is_read(tmp_path):
    torch.save(X, tmp_path / "x.pt")

    record = tp.inspect(torch.load(tmp_path / "x.pt", mmap=True), quiet=True).records[0]

    assert (record.storage.nbytes, record.storage.resizable, record.data.origin) == (96, False, "storage_slice")
    assert record.storage.shared_memory.handle == str(tmp_path / "x.pt")


def test_file_system_sharing_names_its_manager():
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        shared = tp.inspect(torch.zeros(3).share_memory_(), quiet=True).records[0].storage.shared_memory
    finally:
        torch.multiprocessing.set_sharing_strategy(before)

    assert shared.counted
    assert shared.handle.startswith("/torch_")
    assert shared.manager is not None


def test_dtensor_is_a_wrapper_and_its_local_tensor_is_read(single_process_group):
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    tensor = distribute_tensor(X, init_device_mesh("cpu", (1,)), [Replicate()])

    wrapper, local = tp.inspect(tensor, quiet=True).records

    assert (wrapper.kind, wrapper.python.type, wrapper.data.pointer) == ("wrapper_subclass", "DTensor", 0)
    assert (local.kind, local.impl.address) == ("strided", tensor._local_tensor._cdata)


def test_async_collective_tensor_is_a_wrapper(single_process_group):
    from torch.distributed._functional_collectives import all_reduce
    from torch.distributed.tensor import init_device_mesh

    result = all_reduce(X.clone(), "sum", init_device_mesh("cpu", (1,)).get_group())

    assert tp.inspect(result, quiet=True).records[0].kind == "wrapper_subclass"
    result.wait()


def test_tensordict_like_mapping_is_no_tensor():
    from collections import UserDict

    report = tp.inspect(UserDict(a=X, b={"c": X[0]}), quiet=True)

    assert [record.impl.shape for record in report.records] == [(4, 6), (6,)]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrapped_parameter_state_is_msgspec_data(count):
    """Records are plain data: they compare, and survive a JSON round trip."""
    record = tp.inspect([X] * (count + 1), quiet=True).records[0]

    again = msgspec.json.decode(msgspec.json.encode(record), type=TensorRecord)

    assert again == record


def test_layout_is_read_from_the_keys_of_wrappers_too():
    with FakeTensorMode() as mode:
        sparse = mode.from_tensor(torch.eye(3).to_sparse())
    opaque = torch.eye(3).to_mkldnn()
    functional = torch._to_functional_tensor(torch.eye(3).to_sparse())

    layouts = [tp.inspect(x, quiet=True).records[0].impl.layout for x in (sparse, opaque, functional)]

    assert [f"torch.{layout}" for layout in layouts] == [str(sparse.layout), str(opaque.layout), "torch.sparse_coo"]


def test_wrapper_that_stores_itself_as_a_fake_tensor_does_is_none():
    class Meta(helpers.Wrapper):
        @staticmethod
        def __new__(cls, elem):
            return torch.Tensor._make_subclass(cls, elem, device_for_backend_keys=torch.device("cpu"))

    assert C.read(Meta(torch.empty(3, device="meta"))).kind == "wrapper_subclass"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_batched_over_nested_has_no_shape_of_its_own():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    found = []

    def look(x):
        found.append(tp.inspect(x, quiet=True).records[0])
        return x

    torch.func.vmap(look)(nested)

    assert (found[0].kind, found[0].impl.shape) == ("batched", None)
    assert found[0].absent["impl.shape"].startswith("a nested tensor has a shape for each component")
    check_absences(found[0])
