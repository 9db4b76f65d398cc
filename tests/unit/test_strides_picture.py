"""The picture of strides over the storage."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorplay as tp
from tensorplay.render import reach as reach_module
from tensorplay.render.reach import MOST_STEPS, Found, Reach
from tensorplay.render.strides import strides_picture

CELL = re.compile(r"(-?\d+) ([·▪✗?])(@\d+|[\d,]*)([+?]?)")
BAR = re.compile(r"^([·▫▪✗?]+)(?:  |\n)each mark is (\d+) cells$", re.MULTILINE)


def picture(x: torch.Tensor, width: int = 60, **kwargs) -> list[str]:
    storage_cells = x.untyped_storage().nbytes() // x.element_size()
    return strides_picture(x.shape, x.stride(), x.storage_offset(), storage_cells, width=width, **kwargs)


def brute_force(shape, stride, offset) -> dict[int, list[tuple[int, ...]]]:
    """Every cell reached, with all its indices in row-major order."""
    reached: dict[int, list[tuple[int, ...]]] = {}
    for index in itertools.product(*map(range, shape)):
        reached.setdefault(offset + sum(i * s for i, s in zip(index, stride, strict=True)), []).append(index)
    return reached


# -- rows -------------------------------------------------------------------------------------------------------


def test_transposed_window_as_the_storage_lies():
    x = torch.arange(24).view(4, 6).t()[1:, ::2]

    assert picture(x) == [
        "0 ·     1 ▪0,0  2 ▪1,0  3 ▪2,0  4 ▪3,0  5 ▪4,0  …",
        "12 ·    13 ▪0,1 14 ▪1,1 15 ▪2,1 16 ▪3,1 17 ▪4,1 …",
    ]


def test_ascii():
    assert picture(torch.arange(6).view(2, 3)[:, ::2], ascii=True) == ["0 #0,0 1 .    2 #0,1", "3 #1,0 4 .    5 #1,1"]


def test_no_dimensions_reach_one_cell():
    assert picture(torch.arange(6)[5]) == ["0 · 1 · 2 · 3 · 4 · 5 ▪"]
    assert picture(torch.arange(100)[50], width=80) == [
        "… 4 rows of 12 before",
        "48 · 49 · 50 ▪ 51 · 52 · 53 · 54 · 55 · 56 · 57 · 58 · 59 ·",
        "… 4 rows of 12 after, to cell 99",
        "·························▫························  each mark is 2 cells",
        "▫ partly reached",
    ]


def test_cell_reached_twice_is_marked():
    legend = "+ reached by more than one index"

    assert picture(torch.arange(4).unfold(0, 2, 1)) == ["0 ▪0,0  1 ▪0,1+ 2 ▪1,1+ 3 ▪2,1", legend]
    assert picture(torch.arange(2).unsqueeze(1).expand(2, 9)) == ["0 ▪0,0+ 1 ▪1,0+", legend]


def test_cells_past_the_storage_are_marked_outside():
    assert strides_picture([3], [2], 1, 4, width=60) == ["0 ·  1 ▪0", "2 ·  3 ▪1", "4 ·  5 ✗2", "✗ outside the storage"]


def test_cells_before_the_storage_are_marked_outside():
    assert strides_picture([3], [-2], 2, 4, width=60) == [
        "-2 ✗2 -1 ·",
        "0 ▪1  1 ·",
        "2 ▪0  3 ·",
        "✗ outside the storage",
    ]


def test_many_rows_are_elided_and_counted():
    lines = picture(torch.zeros(100, 3)[:, :1])

    assert [line.split()[0] for line in lines[:4]] == ["0", "3", "6", "9"]
    assert lines[4:6] == ["… 95 more rows of 3", "297 ▪99,0 298 ·     299 ·"]


def test_view_in_the_middle_is_in_its_picture():
    lines = picture(torch.zeros(100, 3)[50:52, :1], width=80)

    assert lines == [
        "… 50 rows of 3 before",
        "150 ▪0,0 151 ·    152 ·",
        "153 ▪1,0 154 ·    155 ·",
        "… 48 rows of 3 after, to cell 299",
        "·························▫························  each mark is 6 cells",
        "▫ partly reached",
    ]


def test_wide_rows_are_shown_from_the_first_column_reached():
    keys = torch.zeros(3, 288).chunk(3, -1)[1][:, :24].t()

    lines = picture(keys, width=80)

    assert lines[0].startswith("… 96 ▪0,0  97 ▪1,0  98 ▪2,0 ")
    assert lines[1].startswith("… 384 ▪0,1 385 ▪1,1 ")
    assert all(line.endswith("…") for line in lines[:3])
    assert lines[3:] == [
        "······▪▫················▪▫················▪▫··········  each mark is 16 cells",
        "▫ partly reached",
    ]


def test_columns_at_the_end_of_a_wide_row_are_shown():
    lines = picture(torch.zeros(3, 288)[:, 287:], width=60)

    assert [line.split()[-1] for line in lines[:3]] == ["▪0,0", "▪1,0", "▪2,0"]


def test_long_index_is_the_number_of_the_element():
    lines = picture(torch.arange(16).view([1] * 60 + [4, 4]).transpose(-1, -2), width=60)

    assert lines == [
        "0 ▪@0   1 ▪@4   2 ▪@8   3 ▪@12",
        "4 ▪@1   5 ▪@5   6 ▪@9   7 ▪@13",
        "8 ▪@2   9 ▪@6   10 ▪@10 11 ▪@14",
        "12 ▪@3  13 ▪@7  14 ▪@11 15 ▪@15",
        "@ element in row-major order",
    ]


def test_index_without_room_is_left_out():
    lines = strides_picture([10**9, 2], [1, 10**18], 10**17, 2 * 10**18, width=26)

    assert lines[0] == "… 100000000000000000 ▪  …"
    assert max(map(len, lines)) <= 26


# -- the bar ----------------------------------------------------------------------------------------------------


def test_huge_storage_costs_no_enumeration():
    lines = strides_picture([10**6, 10**6], [10**6, 1], 0, 10**12, width=60)

    assert lines[0].startswith("0 ▪0,0")
    assert lines[5].startswith("999999000000 ▪999999,0")
    assert lines[6:] == ["▪" * 60, "each mark is 16667000000 cells"]


def test_bar_tells_outside_from_inside():
    lines = strides_picture([200], [1], 100, 200, width=100)

    assert BAR.search("\n".join(lines))[1] == "·" * 20 + "▪" * 20 + "✗" * 20


def test_bar_in_ascii():
    lines = strides_picture([10, 9], [40, 1], 0, 300, width=100, ascii=True)

    assert lines[-2] == "#:...#:...#:...#:...#:...#:...#:...#:...!!...!!  each mark is 8 cells"
    assert lines[-1] == ": partly reached, ! outside the storage"
    assert "\n".join(lines).isascii()


def test_small_storage_has_no_bar():
    assert not BAR.search("\n".join(picture(torch.zeros(8, 8)[2:4, ::2])))
    assert BAR.search("\n".join(picture(torch.zeros(8, 9)[2:4, ::2])))


# -- bounds -----------------------------------------------------------------------------------------------------

RANDOM = random.Random(5)
HARD = {
    "window as long as half the storage": ([1 << 19, (1 << 19) + 1], [1, 1], 1 << 20),
    "windows over an image, permuted": ([5, 510, 5, 510], [1, 2, 1024, 2048], 1 << 20),
    "steps of three that overlap": ([1 << 20] * 3, [7, 11, 13], 1 << 30),
    "powers that are none": ([9] * 18, [3**i + i for i in range(18)], 1 << 45),
    "subset sums": ([2] * 40, [RANDOM.randrange(1 << 40) for _ in range(40)], 1 << 45),
    "subset sums in a small storage": ([2] * 40, [RANDOM.randrange(1 << 15) for _ in range(40)], 1 << 20),
}


@pytest.mark.parametrize("name", HARD)
def test_steps_are_bounded(name, monkeypatch):
    shape, stride, storage_cells = HARD[name]
    made: list[Reach] = []
    monkeypatch.setattr("tensorplay.render.cells.Reach", lambda *a: made.append(Reach(*a)) or made[0])

    lines = strides_picture(shape, stride, 0, storage_cells, width=90)

    assert made[0].steps <= MOST_STEPS
    assert lines[0].startswith("0 ▪")
    assert len(lines) < 12


def test_windows_are_worked_out():
    assert "?" not in "\n".join(picture(torch.zeros(1 << 20).unfold(0, 1 << 19, 1).t()))
    assert "?" not in "\n".join(picture(torch.zeros(64, 512).unfold(0, 5, 2).unfold(1, 5, 2).permute(3, 1, 2, 0)))
    assert "?" not in "\n".join(picture(torch.zeros(1 << 20).unfold(0, 400, 160)[:, ::3]))


def test_what_takes_too_long_is_unknown():
    shape, stride, storage_cells = HARD["subset sums"]

    lines = strides_picture(shape, stride, 0, storage_cells, width=90)

    assert lines[-1] == "? not worked out, @ element in row-major order"
    assert set(BAR.search("\n".join(lines))[1]) == {"·", "?"}


# -- against brute force ----------------------------------------------------------------------------------------

GEOMETRIES = st.integers(0, 4).flatmap(
    lambda dims: st.tuples(
        st.lists(st.integers(1, 5), min_size=dims, max_size=dims),
        st.lists(st.one_of(st.integers(0, 6), st.integers(-9, 40)), min_size=dims, max_size=dims),
        st.integers(-4, 60),
    )
)
# Small limits, so that small geometries meet them.
LIMITS = st.tuples(st.sampled_from([1, 3, 9, 400]), st.sampled_from([1, 8, 1 << 23]))


def limited(limits: tuple[int, int]):
    patch = pytest.MonkeyPatch()
    patch.setattr(reach_module, "_MOST_CELL_STEPS", limits[0])
    patch.setattr(reach_module, "_MOST_BITS", limits[1])
    return patch


@given(GEOMETRIES)
@settings(max_examples=250, deadline=None, derandomize=True)
def test_cells_and_counts_equal_brute_force(geometry):
    reached = brute_force(*geometry)
    reach = Reach(*geometry)

    assert (reach.first, reach.last) == (min(reached), max(reached))
    cells = range(reach.first - 2, reach.last + 3)
    for cell in cells[:: 1 + len(cells) // 60]:
        indices = reached.get(cell)
        expected = Found(True, indices[0], len(indices) > 1) if indices else Found(False, None, False)
        assert reach.find(cell) == expected
    for begin in cells[:: 1 + len(cells) // 12]:
        for end in (begin, begin + 1, begin + 7, begin + 40):
            assert reach.count(begin, end) == sum(begin <= cell < end for cell in reached)


@given(GEOMETRIES, st.integers(0, 300), st.integers(50, 150), LIMITS)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_every_mark_is_true_or_unknown(geometry, storage_cells, width, limits):
    reached = brute_force(*geometry)
    patch = limited(limits)
    try:
        lines = strides_picture(*geometry, storage_cells, width=width)
    finally:
        patch.undo()
    text = "\n".join(lines)

    assert max(map(len, lines)) <= width
    marks = CELL.findall(text)
    assert any(mark in "▪✗" for _, mark, _, _ in marks)
    for cell, mark, index, several in ((int(cell), *rest) for cell, *rest in marks):
        if mark == "·":
            assert cell not in reached
        elif mark != "?":
            assert mark == ("▪" if 0 <= cell < storage_cells else "✗")
            first, *others = reached[cell]
            if index or several != "?":
                assert index == ",".join(map(str, first))
                assert several == "?" or bool(several) == bool(others)

    begin, end = min(0, *reached), max(storage_cells, max(reached) + 1)
    if bar := BAR.search(text):
        each = int(bar[2])
        assert len(bar[1]) == -(-(end - begin) // each) <= 64
        for number, mark in enumerate(bar[1]):
            cells = range(begin + number * each, min(begin + (number + 1) * each, end))
            inside = [cell in reached for cell in cells if 0 <= cell < storage_cells]
            outside = any(cell in reached for cell in cells if not 0 <= cell < storage_cells)
            true = "✗" if outside else "·" if not any(inside) else "▪" if all(inside) else "▫"
            assert mark in (true, "?")
            assert mark != "?" or limits[1] < 1 << 23
    elif end - begin > 64:
        assert {int(cell) for cell, *_ in marks} == set(range(begin, end))
    for mark in "▫✗+?@":
        assert (re.search(rf"(^|, ){re.escape(mark)} [a-z]", text, re.MULTILINE) is not None) == (
            mark in re.sub(r"(^|, )[▫✗+?@] [a-z].*$", "", text, flags=re.MULTILINE)
        )


@given(GEOMETRIES, st.integers(0, 300), st.integers(1, 40), st.booleans())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_lines_are_never_wider_than_asked(geometry, storage_cells, width, ascii):
    lines = strides_picture(*geometry, storage_cells, width=width, ascii=ascii)

    assert max(map(len, lines)) <= width


# -- in a report ------------------------------------------------------------------------------------------------


def report(x: torch.Tensor, width: int = 80) -> str:
    text = tp.inspect(x, quiet=True).text(width=width)
    assert max(map(len, text.split("\n"))) <= width
    return text


def test_contiguous_tensor_has_no_picture_unless_at_an_offset():
    assert "▪" not in report(torch.arange(6))
    assert "0 ·  1 ·  2 ▪0 3 ▪1" in report(torch.arange(4)[2:])


def test_contiguous_view_past_a_storage_of_its_size_has_a_picture():
    view = torch.arange(6)[2:]
    view.untyped_storage().resize_(32)

    assert "2 ▪0 3 ▪1 4 ✗2 5 ✗3" in report(view)


def test_storage_that_is_no_multiple_of_the_item():
    x = torch.empty(0, dtype=torch.float32).set_(torch.zeros(11, dtype=torch.uint8).untyped_storage(), 0, (2,), (1,))

    assert "0 ▪0 1 ▪1" in report(x)


@pytest.mark.parametrize("name", ["bits8", "bits16", "float8_e5m2", "float4_e2m1fn_x2", "complex64"])
def test_types_of_other_sizes(name):
    x = torch.zeros(64, dtype=torch.uint8).view(getattr(torch, name))[1::2]

    assert "1 ▪0" in report(x)


def test_picture_of_a_tensor_inside_another_is_narrower():
    indices, values = torch.zeros(40, 1, dtype=torch.int64).t(), torch.ones(40, 80)[:, ::2]
    x = torch.sparse_coo_tensor(indices, values, (3, 40), check_invariants=False, is_coalesced=True)

    lines = [line for line in report(x, width=60).split("\n") if "0 ▪0,0" in line]

    assert lines
    assert lines[0].endswith("…")
