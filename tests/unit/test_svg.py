"""Pictures as SVG: the same text every time, well-formed whatever a name holds, and saying what is true."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorplay as tp
from tensorplay.render.canvas import Arrow, Box, diagram
from tensorplay.render.cells import Geometry
from tensorplay.render.outline import outline
from tensorplay.render.svg import cells_picture, layers_picture
from tests import helpers

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "x<b>&\"'\x1b[31m\u202e\ud800\n]]>"


def layers(objs: dict[str, object]):
    document = tp.check(objs).document
    return layers_picture(document.records, outline(document).names)


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_layers_of_views_over_one_storage(snapshot):
    table = torch.arange(24).reshape(4, 6).clone()

    picture = layers({"table": table, "view": table.t()[1:, ::2], "other": torch.ones(3)})

    snapshot("layers.svg", picture.svg)
    assert picture.words == (
        "table: Python object P1, TensorImpl I1, StorageImpl S1 of 192 B, DataPtr D1 on cpu",
        "view: Python object P2, TensorImpl I2, a view of I1, StorageImpl S1 of 192 B, DataPtr D1 on cpu",
        "other: Python object P3, TensorImpl I3, StorageImpl S2 of 12 B, DataPtr D2 on cpu",
    )


def test_cells_of_a_view(snapshot):
    snapshot("cells.svg", cells_picture("view", Geometry((5, 2), (1, 12), 1, 24)).svg)


def test_cells_outside_twice_reached_and_left_out(snapshot):
    snapshot("cells_rare.svg", cells_picture("rare", Geometry((1000, 3, 2), (64, 1, 1), 700, 60_000)).svg)


def test_base_outside_the_report_is_drawn_and_said_to_be_elsewhere():
    picture = layers({"row": torch.ones(2, 3)[0]})

    assert "I2, not in this report" in texts(picture.svg)


def test_tensor_out_of_bounds_and_null_pointer_are_faults():
    view, flat = helpers.released()

    svg = layers({"view": view, "flat": flat}).svg

    assert len(re.findall('class="fault"', svg)) == 3


def test_tensors_a_tensor_is_made_of_are_drawn():
    shown = texts(layers({"eye": torch.eye(3).to_sparse()}).svg)

    assert {"eye", "eye.indices", "eye.values"} <= set(shown)


@pytest.mark.parametrize("make", [helpers.symbolic_fake, lambda: torch.empty(3, device="meta"), helpers.numpy_tensor])
def test_other_kinds_are_drawn(make):
    picture = layers({"x": make()})

    assert ElementTree.fromstring(picture.svg).get("width") == str(picture.width)


def test_names_are_escaped_and_control_characters_shown():
    document = tp.check({"x": torch.ones(3)}).document
    record = msgspec.structs.replace(document.records[0], name=HOSTILE)
    picture = layers_picture((record,), outline(document).names)

    assert "x<b>&\"'\\x1b[31m\\u202e\\ud800…" in texts(picture.svg)
    assert HOSTILE not in picture.svg
    assert r"\x1b[31m\u202e\ud800\n]]>" in picture.words[0]
    ElementTree.fromstring(cells_picture(HOSTILE, Geometry((3,), (2,), 1, 4)).svg)


@pytest.mark.parametrize(
    "svg", [layers({"x": torch.ones(3)[1:]}).svg, cells_picture("x", Geometry((3,), (2,), 1, 4)).svg]
)
def test_picture_asks_for_nothing_and_runs_nothing(svg):
    assert re.findall(r"https?://[^\"]+", svg) == ["http://www.w3.org/2000/svg"]
    assert not re.search(r"script|href|url\(|import|\bid=|\bon\w+=", svg)
    assert "prefers-color-scheme:dark" in svg


def boxes(data: str) -> list[tuple[float, float, float, float]]:
    found = re.findall(r"M([-\d.]+) ([-\d.]+)h([-\d.]+)v([-\d.]+)", data)
    return [tuple(map(float, box)) for box in found]


def test_chain_of_any_boxes_is_laid_out_without_overlap():
    steps = [Box(f"b{i}", i % 3, tuple(f"line {n}" for n in range(i % 4 + 1))) for i in range(12)]
    arrows = [Arrow(f"b{i}", f"b{i + 1}", label="step") for i in range(0, 11, 3)]
    picture = diagram("chain", ("base", "views", "tensor"), steps, arrows, ["base to tensor"])

    drawn = boxes("".join(re.findall(r'class="box" d="([^"]+)"', picture.svg)))
    assert texts(picture.svg).count("step") == 4
    assert (picture.title, picture.words) == ("chain", ("base to tensor",))

    assert len(drawn) == 12
    for number, (x, y, width, height) in enumerate(drawn):
        for u, v, w, h in drawn[number + 1 :]:
            assert x + width <= u or u + w <= x or y + height <= v or v + h <= y


geometries = st.lists(st.tuples(st.integers(1, 6), st.integers(-9, 40)), max_size=4).flatmap(
    lambda dims: st.builds(
        lambda offset, cells: Geometry([d[0] for d in dims], [d[1] for d in dims], offset, cells),
        st.integers(0, 200),
        st.integers(0, 3000),
    )
)


@settings(deadline=None, max_examples=60)
@given(geometries)
def test_cells_stay_on_the_paper_and_say_only_what_is_reached(geometry):
    picture = cells_picture("x", geometry)

    for data in re.findall(r'<path class="\w+" d="([^"]+)"', picture.svg):
        for x, y, width, height in boxes(data):
            assert x >= 0
            assert y >= 0
            assert x + width <= picture.width
            assert y + height <= picture.height
    assert len(picture.svg) < 16_000
    said = {
        int(number)
        for words in picture.words
        if words.startswith("cells") and "none reached" not in words
        for number in re.findall(r"[:;] (-?\d+)", words)
    }
    assert said <= helpers.cells(geometry.shape, geometry.stride, geometry.offset)
