"""Kinds and pointers on a CUDA device; tests/gpu/run.sh runs these."""

from __future__ import annotations

import pytest
import torch

import tensorplay as tp
from tensorplay._native import C

pytestmark = pytest.mark.needs_cuda


def test_plain_tensor_and_view_read_as_python_reads_them():
    x = torch.arange(24.0, device="cuda").view(4, 6)
    view = x.t()[1:, ::2]

    for tensor in (x, view):
        record = C.read(tensor)
        assert (record.impl.device, record.impl.backend, record.data.device) == ("cuda:0", "cuda", "cuda:0")
        assert record.data.data_ptr == tensor.data_ptr()
        assert record.storage.nbytes == tensor.untyped_storage().nbytes()
        assert record.storage.allocator_device == "cuda"
        assert record.extent.contiguous == tensor.is_contiguous()
    assert tp.verify_data_ptr_consistency(view)


def test_pinned_memory_is_cpu_by_label_and_silent():
    x = torch.ones(8).pin_memory()

    record = C.read(x)

    assert (record.impl.device, record.data.device) == ("cpu", "cpu")
    assert tp.check({"x": x}).findings == ()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3, device="cuda").to_sparse(),
        lambda: torch.eye(3, device="cuda").to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="cuda"),
        lambda: torch.ones(3, dtype=torch.cfloat, device="cuda").conj(),
        lambda: torch.empty(0, device="cuda"),
        lambda: torch.ones(3, device="cuda").expand(2, 3),
        lambda: torch.ones(3, dtype=torch.float8_e4m3fn, device="cuda"),
    ],
)
def test_kind_on_cuda_gives_a_silent_record(make):
    report = tp.check({"x": make()})

    assert report.records[0].impl.device == "cuda:0"
    assert report.findings == ()


def test_probe_neither_synchronises_nor_allocates():
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]

    torch.cuda.set_sync_debug_mode("error")
    try:
        tp.inspect(x, quiet=True).to_json()
        tp.check({"x": x})
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_released_storage_on_cuda_fires():
    flat = torch.arange(8.0, device="cuda")
    view = flat[2:6]
    flat.untyped_storage().resize_(0)

    assert [finding.code for finding in tp.check({"view": view}).findings] == ["TP102"]


def test_model_on_cuda_is_silent():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8, device="cuda")).sum().backward()
    optimizer.step()

    assert tp.check({"model": model, "optimizer": optimizer}).findings == ()


def test_device_memory_is_not_looked_up_in_the_process_map():
    x = torch.ones(8, device="cuda")
    lent = torch.from_dlpack(x)

    report = tp.check({"x": x, "lent": lent})

    assert [finding.code for finding in report.findings] == ["TP104"]
    assert tp.verify_data_ptr_consistency(x)


def test_array_of_a_pinned_tensor_is_healthy():
    x = torch.ones(8).pin_memory()

    assert tp.check({"x": x, "array": x.numpy()}).findings == ()
