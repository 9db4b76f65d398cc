"""Extents against brute force, over random shapes, strides, offsets and types."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorplay as tp
from tensorplay._native import C
from tests.helpers import cells

DTYPES = [torch.uint8, torch.bool, torch.float16, torch.bfloat16, torch.int32, torch.float64, torch.complex128]

small_geometries = st.integers(0, 4).flatmap(
    lambda dims: st.tuples(
        st.lists(st.integers(0, 5), min_size=dims, max_size=dims),
        st.lists(st.integers(0, 9), min_size=dims, max_size=dims),
        st.integers(0, 11),
    )
)


@given(small_geometries)
@settings(max_examples=600, deadline=None, derandomize=True)
def test_geometry_alone_equals_enumeration(geometry):
    shape, stride, offset = geometry

    found = C.extent_of(shape, stride, offset)

    reached = cells(shape, stride, offset)
    assert found["distinct"] == len(reached)
    assert (found["begin"], found["end"]) == ((min(reached), max(reached) + 1) if reached else (offset, offset))


@given(small_geometries, st.sampled_from(DTYPES))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_tensor_equals_enumeration_and_torch(geometry, dtype):
    shape, stride, offset = geometry
    reached = cells(shape, stride, offset)
    x = torch.empty(max(reached, default=offset) + 1 + offset, dtype=dtype).as_strided(shape, stride, offset)

    extent = tp.inspect(x, quiet=True).records[0].extent

    size = x.element_size()
    assert extent.visible_nbytes == len(reached) * size
    assert extent.needed_nbytes == (max(reached) + 1 if reached else 0) * size
    assert extent.first_byte == (min(reached) if reached else offset) * size
    assert extent.self_overlapping == (len(reached) < x.numel())
    assert extent.contiguous == x.is_contiguous()
    assert not extent.out_of_bounds
    dense = bool(reached) and len(reached) == x.numel() == max(reached) - min(reached) + 1
    assert extent.non_overlapping_and_dense == (dense or x.numel() == 0)


@pytest.mark.long
@given(
    st.integers(0, 6).flatmap(
        lambda dims: st.tuples(
            st.lists(st.integers(0, 7), min_size=dims, max_size=dims),
            st.lists(st.integers(0, 40), min_size=dims, max_size=dims),
            st.integers(0, 100),
        )
    )
)
@settings(max_examples=20_000, deadline=None, derandomize=True)
def test_many_larger_geometries_equal_enumeration(geometry):
    shape, stride, offset = geometry
    if math.prod(shape) > 3_000:
        return

    found = C.extent_of(shape, stride, offset)

    reached = cells(shape, stride, offset)
    assert found["distinct"] == len(reached)
    assert (found["begin"], found["end"]) == ((min(reached), max(reached) + 1) if reached else (offset, offset))


@pytest.mark.parametrize(
    ("shape", "stride", "distinct"),
    [
        ([10**6, 10**6], [10**6, 1], 10**12),  # dense: no enumeration
        ([10**6, 512], [1, 1], 10**6 + 511),  # unfold with step 1
        ([10**6, 512], [256, 1], 256 * (10**6 - 1) + 512),  # windows that overlap by half
        ([10**9], [0], 1),  # expanded
        ([1000, 1000, 3], [3000, 3, 1], 3_000_000),
        ([4, 5], [2, 3], 17),  # neither nested nor dense: by bitmap; 1 and 17 of 0..18 stay out
    ],
)
def test_distinct_cells_of_large_geometry_is_exact(shape, stride, distinct):
    assert C.extent_of(shape, stride, 0)["distinct"] == distinct


def test_what_cannot_be_counted_is_said_to_be_too_hard():
    # Interleaved and far apart: only an enumeration of 6.8 x 10^12 cells would tell.
    x = torch.empty(0, device="meta").as_strided((1000, 1000), (10**9 + 7, 700_000_703), 0)

    record = tp.inspect(x, quiet=True).records[0]

    assert record.extent.visible_nbytes is None
    assert record.extent.self_overlapping is None
    assert record.absent["extent.visible_nbytes"].startswith("too hard")


def test_size_that_leaves_64_bits_is_absent_with_the_reason():
    record = tp.inspect(torch.zeros(1).expand(2**62), quiet=True).records[0]

    assert record.extent.nbytes is None
    assert record.extent.visible_nbytes == record.extent.needed_nbytes == 4
    assert record.absent["extent.nbytes"] == "does not fit 64 bits"


def test_extent_that_leaves_64_bits_is_absent_with_the_reason():
    x = torch.empty(0, device="meta").as_strided((2, 2), (2**62, 2**62), 0)

    record = tp.inspect(x, quiet=True).records[0]

    assert record.extent.needed_nbytes is None
    assert record.absent["extent.needed_nbytes"] == "does not fit 64 bits"


@pytest.mark.parametrize("bad", [([1], [1, 2], 0), ([-1], [1], 0)])
def test_geometry_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="shape and stride need one length"):
        C.extent_of(*bad)


def test_channels_last_is_named():
    x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    z = torch.empty(2, 3, 4).permute(2, 0, 1)

    formats = [record.extent.memory_format for record in tp.inspect([x, y, z], quiet=True).records]

    assert formats == ["channels_last", "channels_last_3d", "permuted"]
