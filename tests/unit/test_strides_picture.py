"""The picture of strides over the storage."""

from __future__ import annotations

import re

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorplay.render.strides import strides_picture


def picture(x: torch.Tensor, width: int = 60, **kwargs) -> list[str]:
    storage_cells = x.untyped_storage().nbytes() // x.element_size()
    return strides_picture(x.shape, x.stride(), x.storage_offset(), storage_cells, width=width, **kwargs)


def test_transposed_window_as_the_storage_lies():
    x = torch.arange(24).view(4, 6).t()[1:, ::2]

    assert picture(x) == [
        "0 ·     1 ▪0,0  2 ▪1,0  3 ▪2,0  4 ▪3,0  5 ▪4,0  …",
        "12 ·    13 ▪0,1 14 ▪1,1 15 ▪2,1 16 ▪3,1 17 ▪4,1 …",
    ]


def test_ascii():
    assert picture(torch.arange(6).view(2, 3)[:, ::2], ascii=True) == ["0 #0,0 1 .    2 #0,1", "3 #1,0 4 .    5 #1,1"]


def test_cell_reached_twice_is_marked():
    assert picture(torch.arange(4).unfold(0, 2, 1)) == ["0 ▪0,0  1 ▪0,1+ 2 ▪1,1+ 3 ▪2,1"]
    assert picture(torch.arange(2).unsqueeze(1).expand(2, 9)) == ["0 ▪0,0+ 1 ▪1,0+"]


def test_cells_past_the_storage_are_marked_outside():
    assert strides_picture([3], [2], 1, 4, width=60) == ["0 ·  1 ▪0", "2 ·  3 ▪1", "4 ·  5 ✗2"]


def test_many_rows_are_elided_and_counted():
    lines = picture(torch.zeros(100, 3)[:, :1])

    assert lines[4] == "… 95 more rows of 3"
    assert len(lines) == 6


def test_wide_rows_are_shown_from_the_first_column_reached():
    keys = torch.zeros(3, 288).chunk(3, -1)[1][:, :24].t()

    lines = picture(keys, width=80)

    assert lines[0].startswith("… 96 ▪0,0  97 ▪1,0  98 ▪2,0 ")
    assert lines[1].startswith("… 384 ▪0,1 385 ▪1,1 ")
    assert all(line.endswith("…") for line in lines)
    assert max(map(len, lines)) <= 80


def test_columns_at_the_end_of_a_wide_row_are_shown():
    lines = picture(torch.zeros(3, 288)[:, 287:], width=60)

    assert [line.split()[-1] for line in lines] == ["▪0,0", "▪1,0", "▪2,0"]


def test_huge_storage_costs_no_enumeration():
    lines = strides_picture([10**6, 10**6], [10**6, 1], 0, 10**12, width=60)

    assert lines[0].startswith("0 ▪0,0")
    assert lines[-1].startswith("999999000000 ▪999999,0")


@given(
    st.integers(1, 3).flatmap(
        lambda dims: st.tuples(
            st.lists(st.integers(1, 4), min_size=dims, max_size=dims),
            st.lists(st.integers(0, 6), min_size=dims, max_size=dims),
            st.integers(0, 5),
        )
    )
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_mark_is_true(geometry):
    shape, stride, offset = geometry
    reached: dict[int, list[tuple[int, ...]]] = {}
    for index in torch.cartesian_prod(*[torch.arange(n) for n in shape]).view(-1, len(shape)).tolist():
        cell = offset + sum(i * s for i, s in zip(index, stride, strict=True))
        reached.setdefault(cell, []).append(tuple(index))
    cells = max(reached) + 1

    text = " ".join(strides_picture(shape, stride, offset, cells, width=2000))

    for cell, mark, index, several in re.findall(r"(\d+) (·|▪)([\d,]*)(\+?)", text):
        indices = reached.get(int(cell))
        assert (mark == "▪") == (indices is not None)
        if indices is not None:
            assert tuple(map(int, index.split(","))) == min(indices)
            assert bool(several) == (len(indices) > 1)
