"""The HTML page as Chromium shows it: narrow and wide, light and dark, without a request or a complaint."""

from __future__ import annotations

import pytest
import torch

import tensorplay as tp
from tests import helpers

pytestmark = pytest.mark.long

# Contrast of a text with what it stands on, as WCAG defines it, for every element that holds text itself.
CONTRAST = """
() => {
  const rgb = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
  const light = c => c.slice(0, 3).map(linear)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const canvas = matchMedia('(prefers-color-scheme: dark)').matches ? [18, 18, 18] : [255, 255, 255];
  const behind = e => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return canvas; };
  let worst = 99;
  for (const e of document.querySelectorAll('main *')) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    const opacity = Number(getComputedStyle(e).opacity), back = behind(e);
    const ink = rgb(getComputedStyle(e).color).slice(0, 3).map((v, i) => v * opacity + back[i] * (1 - opacity));
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    worst = Math.min(worst, (a + 0.05) / (b + 0.05));
  }
  return worst;
}
"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """A page with everything on it: a finding, views, a wide picture, hostile names."""
    view, flat = helpers.released()
    table = torch.zeros(2000, 64)
    report = tp.check({"view": view, "flat": flat, "<b>x</b>" * 30: table[10:1000:3, ::5]})
    return report.html(tmp_path_factory.mktemp("page") / "report.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_page_is_readable(page_file, visit, screenshot, show, width, scheme):
    page, requests, errors = visit(page_file.as_uri(), width=width, scheme=scheme)

    picture = screenshot(page, f"page_{width}_{scheme}")

    assert requests == []
    assert errors == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 100)")
    assert page.get_by_text("TP102 the tensor reaches past its storage").is_visible()
    contrast = page.evaluate(CONTRAST)
    show(f"page at {width} px, {scheme}: {len(picture) / 1000:.0f} kB of picture, worst contrast {contrast:.1f}")
    assert contrast >= 4.5
    assert len(picture) > 50_000  # a blank page packs into a few kilobytes


def test_wide_pictures_scroll_inside(page_file, visit):
    page = visit(page_file.as_uri(), width=400).page

    scrolled = page.evaluate(
        "[...document.images].map(i => i.parentElement).filter(e => e.scrollWidth > e.clientWidth)"
        ".map(e => { e.scrollLeft = 50; return e.scrollLeft; })"
    )

    assert scrolled
    assert set(scrolled) == {50}


def test_table_of_many_tensors_scrolls_instead_of_breaking_words(tmp_path, visit, screenshot):
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    path = tp.check({"model": model, "a name that is long " * 9: torch.ones(3)}).html(tmp_path / "model.html")

    page = visit(path.as_uri(), width=400).page

    screenshot(page, "table_400_light")
    heights = page.evaluate("[...document.querySelectorAll('th')].map(e => e.clientHeight)")
    assert max(heights) < 30
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_words_of_a_picture_open_by_keyboard(page_file, visit):
    page = visit(page_file.as_uri()).page
    summary = page.locator("summary", has_text="the picture in words").last
    words = page.get_by_text("view: Python object P1, TensorImpl I1")

    assert not words.is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert words.is_visible()


def test_demo_page_is_shown(tmp_path, visit, screenshot, monkeypatch):
    from click.testing import CliRunner

    from tensorplay.cli import cli

    assert CliRunner().invoke(cli, ["demo", "-o", str(tmp_path / "report.html")]).exit_code == 0
    page, requests, errors = visit((tmp_path / "report.html").as_uri())

    screenshot(page, "demo")
    assert page.locator("h2").count() == 3
    assert (requests, errors) == ([], [])
