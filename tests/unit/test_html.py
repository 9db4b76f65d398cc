"""Reports as HTML: nothing but markup that every notebook keeps, everything that the text says, in any name's spite."""

from __future__ import annotations

import base64
import contextlib
import io
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import msgspec
import pytest
import torch

import tensorplay as tp
from tensorplay.render.html import fragment
from tensorplay.words import describe
from tests import helpers

VOID = {"br", "img", "meta"}
HOSTILE = "<script>alert(1)</script>&\"'\x1b\u202e\n</details>"


def named(name: str, x: torch.Tensor) -> tp.Report:
    """A report in which a tensor has a name that check() itself would write out."""
    document = tp.check({"x": x}).document
    return tp.Report.from_document(
        msgspec.structs.replace(document, records=(msgspec.structs.replace(document.records[0], name=name),))
    )


class Reader(HTMLParser):
    """Collects tags, attributes and text; every tag must be closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text += data if data.strip() else " "


def reports() -> dict[str, tp.Report]:
    view, flat = helpers.released()
    x = torch.arange(24).view(4, 6)
    label = tp.inspect(x, "step of <b>", quiet=True)
    x.add_(1)
    with contextlib.redirect_stderr(io.StringIO()):
        pointer = tp.inspect_data_ptr(x)
        nothing = tp.inspect_storage_device(torch.eye(3).to_sparse())
    many = {f"layer {i}": torch.ones(i + 1) for i in range(60)} | {"twice": x, "row": x[0]}
    return {
        "one": tp.inspect(x, quiet=True),
        "view": tp.inspect(x.t()[1:, ::2], quiet=True),
        "sparse": tp.inspect(torch.eye(3).to_sparse(), quiet=True),
        "fake": tp.inspect(helpers.symbolic_fake(), quiet=True),
        "sick": tp.check({"view": view, "flat": flat}),
        "hidden": tp.check({"view": view}, ignore=["TP102"]),
        "cut": tp.inspect([torch.ones(1), torch.ones(2)], quiet=True, max_tensors=1),
        "label": label,
        "changed": tp.inspect(x, "step of <b>", quiet=True),
        "same": tp.inspect(x, "step of <b>", quiet=True),
        "many": tp.check(many),
        "hostile": named(HOSTILE, x[1:]),
        "none": tp.check({}),
        "focus": pointer,
        "no focus": nothing,
    }


REPORTS = reports()


@pytest.mark.parametrize("name", REPORTS)
def test_fragment_is_markup_that_an_untrusted_notebook_keeps(name):
    read = Reader(REPORTS[name]._repr_html_())

    assert {tag for tag, _ in read.tags} <= {
        "div", "p", "b", "span", "br", "details", "summary", "table", "tr", "th", "td", "img", "ol", "li",
    }  # fmt: skip
    assert {key for _, attributes in read.tags for key in attributes} <= {
        "style", "open", "scope", "alt", "width", "height", "src",
    }  # fmt: skip
    for tag, attributes in read.tags:
        if tag == "img":
            assert (attributes["alt"] or "").strip()
            assert (attributes["src"] or "").startswith("data:image/svg+xml;base64,")


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("name", REPORTS)
def test_fragment_says_all_that_the_text_says(name):
    report = REPORTS[name]

    html = squeezed(Reader(report._repr_html_()).text)

    drawn = re.compile(r"^[\s─│└├]*(-?\d+ [·▪✗?]|▫|… |[·▪▫]+  each)")
    for line in report.text(width=2000).splitlines():
        if not drawn.match(line):
            for words in filter(None, re.split(r"  +", line.strip("─│└├ "))):
                assert squeezed(words) in html, words


@pytest.mark.parametrize("name", REPORTS)
def test_pictures_are_well_formed_and_stand_beside_their_words(name):
    html = REPORTS[name]._repr_html_()

    pictures = re.findall(r'base64,([^"]+)"', html)

    assert html.count("<ol>") == len(pictures)
    for data in pictures:
        ElementTree.fromstring(base64.b64decode(data))


def test_findings_show_their_evidence():
    text = Reader(REPORTS["sick"]._repr_html_()).text

    for key, value in REPORTS["sick"].findings[0].evidence.items():
        assert key in text
        if not isinstance(value, (list, dict)):
            assert str(value).lower() in text.lower()


def test_names_are_text_whatever_they_hold():
    html = REPORTS["hostile"]._repr_html_()

    assert "<script" not in html
    assert "\x1b" not in html
    assert r"&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;\x1b\u202e\n&lt;/details&gt;" in html


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        lambda: torch.zeros(100_000, 64)[10:5000:3, ::5],
        lambda: torch.randn(50, 50, 2).to_sparse(),
        lambda: torch.randn(20, 20, 20, 20).permute(3, 1, 0, 2)[::2, :, 1:],
        lambda: torch.arange(4000).unfold(0, 99, 1),
    ],
)
def test_one_tensor_takes_at_most_60_kb(make, show):
    report = tp.inspect(make(), quiet=True)

    html = report._repr_html_()

    show(f"HTML of {describe(report.records[0])}: {len(html.encode()) / 1000:.1f} kB")
    assert len(html.encode()) <= 60_000


def test_ten_thousand_tensors_stay_small():
    storage = torch.zeros(10_000)

    html = tp.inspect([storage[i:] for i in range(9_999)], quiet=True)._repr_html_()

    assert len(html.encode()) <= 60_000
    assert "12 tensors of 9999 that share storages" in html
    assert "... and 9949 more tensors" in html


def test_mime_bundle_has_text_and_html_and_nothing_else():
    report = REPORTS["view"]

    assert report._repr_mimebundle_() == {"text/plain": str(report), "text/html": report._repr_html_()}


def test_page_is_written_and_allows_nothing_from_outside(tmp_path):
    report = REPORTS["sick"]

    path = report.html(tmp_path / "report.html")

    text = path.read_text(encoding="utf-8")
    assert text == report.html()
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in text
    assert "<title>TensorPlay: view, flat</title>" in text
    assert "<script" not in text
    assert [tag for tag, attributes in Reader(text.partition("\n")[2]).tags if "id" in attributes] == []


def test_html_of_a_report_read_back_is_the_same():
    report = REPORTS["sick"]

    assert tp.Report.from_json(report.to_json()).html() == report.html()


def test_view_chains_are_folded_away_only_where_asked_for():
    document = tp.show_view_chain(torch.arange(8.0)[2:5], quiet=True).document

    assert "Show View Chain" in fragment(document, view_chain=True)
    assert "Show View Chain" not in fragment(document)
    assert "narrow(dim=0, start=2, length=3)" in fragment(document)


def test_long_evidence_is_cut_and_says_so():
    flat = torch.arange(8.0)
    views = [flat[i:] for i in range(8) for _ in range(30)]
    flat.untyped_storage().resize_(0)

    report = tp.check({f"a view with a long name, number {i}": view for i, view in enumerate(views)})

    assert "... to_json() has all" in report._repr_html_()
    assert len(report._repr_html_().encode()) <= 60_000
