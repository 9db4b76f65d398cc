"""Every operator's sample inputs and results: the probe's answers equal Python's."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tensorplay._native import C
from tests.conftest import need

pytestmark = [pytest.mark.filterwarnings("ignore")]  # the samples themselves warn, in many ways

PARTS = 4


def compare(x: torch.Tensor) -> None:
    record = C.read(x)
    impl, storage, data, extent = record.impl, record.storage, record.data, record.extent
    assert impl.address == x._cdata
    assert impl.shape == tuple(x.shape)
    assert impl.numel == x.numel()
    assert f"torch.{impl.dtype}" == str(x.dtype)
    assert impl.device == str(x.device)
    assert f"torch.{impl.layout}" == str(x.layout)
    assert impl.is_inference == x.is_inference()
    assert impl.version == (None if x.is_inference() else x._version)
    assert impl.is_view == x._is_view()
    assert impl.base == (x._base._cdata if x._is_view() else None)
    assert impl.requires_grad == x.requires_grad
    assert impl.is_leaf == x.is_leaf
    assert impl.grad_fn == (None if x.grad_fn is None else x.grad_fn.name().rpartition("::")[2])
    assert (impl.is_conj, impl.is_neg) == (x.is_conj(), x.is_neg())
    assert impl.keys == tuple(str(torch._C._dispatch_keys(x)).removeprefix("DispatchKeySet(")[:-1].split(", "))
    if x.layout is not torch.strided:
        return
    assert impl.stride == x.stride()
    assert impl.storage_offset == x.storage_offset()
    assert extent.nbytes == x.numel() * x.element_size() == x.nbytes
    assert extent.contiguous == x.is_contiguous()
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    if channels_last is not None and x.numel() > 0 and not x.is_contiguous() and min(x.shape) > 1:
        assert extent.memory_format.startswith("channels_last") == x.is_contiguous(memory_format=channels_last)
    assert extent.non_overlapping_and_dense == torch.ops.aten.is_non_overlapping_and_dense(x) or x.numel() == 0
    assert data.data_ptr == x.data_ptr()
    typed = x.untyped_storage()
    assert storage.address == typed._cdata
    assert storage.nbytes == extent.storage_nbytes == typed.nbytes()
    assert storage.resizable == typed.resizable()
    assert data.pointer == typed.data_ptr()
    assert data.device == str(typed.device)
    assert (storage.shared_memory is not None) == typed.is_shared()
    assert not extent.out_of_bounds


@pytest.mark.parametrize("part", range(PARTS))
def test_op_db_samples_read_as_python_reads_them(part, show):
    need("expecttest", find_spec("expecttest") is not None, "op_db imports it")
    from torch.testing._internal.common_methods_invocations import op_db

    operators = [op for op in op_db if torch.float32 in op.dtypesIfCUDA | op.dtypes][part::PARTS]
    used = tensors = failed = 0
    for op in operators:
        found = []
        for sample in op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd):
            found += tree_leaves((sample.input, sample.args, sample.kwargs))
            try:
                found += tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
            except Exception:  # a sample may be for another machine; its inputs are compared all the same
                failed += 1
        found = [x for x in found if isinstance(x, torch.Tensor)]
        for x in found:
            compare(x)
        used += bool(found)
        tensors += len(found)

    show(
        f"op_db part {part + 1} of {PARTS}: {used} operators, {tensors} tensors compared, {failed} samples did not run"
    )
    assert used > 100
    assert tensors > 1_000
    assert failed < 0.02 * tensors
