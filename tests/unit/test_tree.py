"""The paths of holders, drawn: every path in the picture and in its words, boxes that do not lie over one another."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from tensorplay.layers import Grown, Growth, Held, Holder, Ledger
from tensorplay.render.canvas import Picture
from tensorplay.render.tree import growth_picture, holders_picture

BOX = re.compile(r"M(\S+) (\S+)h(\S+)v(\S+)h")


def holder(*steps: str, of: Any = "object", how: str = "reference", count: int = 1) -> Holder:
    return Holder(of=of, how=how, path="".join(steps), steps=steps, root="module", count=count)


def held(*holders: Holder, unaccounted: int = 0, **more: Any) -> Held:
    ledgers = tuple(
        Ledger(of=of, counter=counter, count=3, terms=((3, "references"),), unaccounted=unaccounted)
        for of, counter in (("object", "refcount"), ("impl", "use_count"), ("storage", "storage use_count"))
    )
    return Held(
        name="x", description="float32[3]", nbytes=12, state="reached", holders=holders, ledgers=ledgers, **more
    )


def grown(*steps: str, cycle: str | None = None, **more: Any) -> Grown:
    values = {"storages": 2, "nbytes": 64, "indirect_storages": 0, "indirect_nbytes": 0, "places": 2, **more}
    return Grown(
        path="".join(steps), steps=steps, root="module", file=None, line=None, devices=("cpu",), cycle=cycle, **values
    )


def growth(*rows: Grown) -> Growth:
    zeros = dict.fromkeys(("nbytes_before", "storages_before", "gone_storages", "gone_nbytes"), 0)
    return Growth(grown=rows, new_storages=2, new_nbytes=64, nbytes_after=64, storages_after=2, **zeros)


def texts(picture: Picture) -> list[str]:
    """All that is written in it; it is well formed."""
    root = ElementTree.fromstring(picture.svg)
    return [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]


def boxes(picture: Picture) -> list[tuple[float, float, float, float]]:
    root = ElementTree.fromstring(picture.svg)
    paths = (path for path in root.iter("{http://www.w3.org/2000/svg}path") if path.get("class") in ("box", "fault"))
    found = []
    for path in paths:
        match = BOX.match(path.get("d") or "")
        assert match is not None
        left, top, width, height = map(float, match.groups())
        found.append((left, top, left + width, top + height))
    return found


def lie_apart(picture: Picture) -> bool:
    """Whether no box lies over another one and all lie in the picture."""
    found = boxes(picture)
    inside = all(a >= 0 and b >= 0 and c <= picture.width and d <= picture.height for a, b, c, d in found)
    pairs = ((a, b) for n, a in enumerate(found) for b in found[n + 1 :])
    return inside and all(a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1] for a, b in pairs)


def test_paths_that_begin_alike_share_their_beginning():
    picture = holders_picture(held(holder("__main__", ".cache", "['x']"), holder("__main__", ".cache", "['y']", "[0]")))
    assert [line for line in texts(picture) if "cache" in line] == ["__main__.cache"]
    assert {"['x']", "['y'][0]", "Python object", "TensorImpl", "StorageImpl", "12 B"} <= set(texts(picture))
    assert lie_apart(picture)
    assert picture.words[:2] == ("__main__.cache['x']: reference", "__main__.cache['y'][0]: reference")
    assert picture.title == "who holds x: 2 holders"


def test_a_holder_on_the_way_to_another_one_has_its_own_box():
    picture = holders_picture(
        held(holder("f: ", "view", of="impl", how="base"), holder("f: ", "view", ".grad_fn", of="impl", how="variable"))
    )
    assert {"f: view", "itself", "view of it", ".grad_fn", "accumulates into it"} <= set(texts(picture))
    assert lie_apart(picture)


def test_what_nobody_can_name_is_drawn_too():
    picture = holders_picture(held(holder("a", ".b"), unaccounted=2))
    assert texts(picture).count("2 C++-only references") == 3
    assert lie_apart(picture)


def test_a_cycle_is_drawn_with_a_step_a_line():
    steps = ("a Recorder", "._hooks[0]", " → a Recorder again")
    picture = holders_picture(held(cycle="".join(steps), cycle_steps=steps))
    lines = [line.strip() for line in texts(picture)]
    assert lines[: len(steps)] == [step.strip() for step in steps]
    assert lie_apart(picture)


def test_what_came_is_drawn_with_its_bytes():
    picture = growth_picture(
        growth(
            grown("__main__", ".losses", "[*]", indirect_storages=3, indirect_nbytes=4096),
            grown("__main__", ".cache", "['x']"),
            grown("a list", "[0]", " → a list again", cycle="a list[0] → a list again"),
        )
    )
    assert {"__main__", ".losses[*]", "2 storages, 64 B, 4.0 KiB behind", ".cache['x']"} <= set(texts(picture))
    assert "garbage: a list[0] → a list again: 2 storages, 64 B" in picture.words
    assert lie_apart(picture)


@pytest.mark.parametrize("count", [0, 1, 24, 25, 300])
def test_many_paths_are_cut_and_the_words_say_so(count):
    rows = [grown("__main__", f".name{number}", "[0]", f".x{number}") for number in range(count)]
    holders = [holder("__main__", f".name{number}", "[0]") for number in range(count)]
    for picture in (growth_picture(growth(*rows)), holders_picture(held(*holders))):
        assert lie_apart(picture)
        assert len(boxes(picture)) < 60
        assert any("not drawn" in line for line in picture.words) == (count > 24)


def test_names_are_escaped_and_long_ones_cut():
    picture = holders_picture(held(holder("__main__", ".d['</svg><script>']", "." + "n" * 500, ".\u202e")))
    assert "<script>" not in picture.svg
    assert "\\u202e" in "".join(texts(picture))
    assert picture.width < 1500
    assert lie_apart(picture)


def test_a_report_of_an_older_version_has_no_steps_and_is_drawn_by_its_paths():
    old = Holder(of="object", how="reference", path="__main__.x", root="module")
    assert "__main__.x" in texts(holders_picture(held(old)))
