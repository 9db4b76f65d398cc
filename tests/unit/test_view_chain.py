"""show_view_chain(): how a chain is told, in every form; what it is called with; record_views()."""

from __future__ import annotations

import re
import threading
from xml.etree import ElementTree

import msgspec
import pytest
import torch

import tensorplay as tp
from tensorplay.layers import ViewAlias
from tensorplay.render.chain import chain_picture, dot, mermaid
from tensorplay.render.outline import outline
from tensorplay.render.steps import chain_notes, step_text
from tests import helpers

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = 'x<b>&"\'\\[0] {|}\x1b[31m\u202e\n-->|"];\n]]>'


@pytest.fixture
def table() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6).clone()


@pytest.fixture
def hostile(table):
    chain = tp.show_view_chain(table[1:].t()).chain
    steps = (*chain.steps[:-1], msgspec.structs.replace(chain.steps[-1], op=HOSTILE, args={HOSTILE: HOSTILE}))
    alias = ViewAlias(name=HOSTILE, impl=1, shares_version=True)
    return msgspec.structs.replace(chain, name=HOSTILE, base=HOSTILE, steps=steps, aliases=(alias,))


# -- text -------------------------------------------------------------------------------------------------------------


def test_text(table):
    view = table[1:].t()

    assert str(tp.show_view_chain(view)) == (
        "view chain of view: 2 steps, inferred\n"
        "step                                tensor         stride  offset  known by\n"
        "base table                          float32[4, 6]  [6, 1]       0\n"
        "  narrow(dim=0, start=1, length=3)  float32[3, 6]  [6, 1]       6  inferred\n"
        "  t() = view                        float32[6, 3]  [1, 6]       6  inferred\n"
        "1 tensor, 1 storage, 96 B: no findings"
    )


def test_text_is_ascii(table):
    assert str(tp.show_view_chain(table[1:])).isascii()


def test_prints_once_unless_quiet(table, capsys):
    view = table[1:]

    report = tp.show_view_chain(view)
    printed = capsys.readouterr()
    tp.show_view_chain(view, quiet=True)

    assert printed == ("", f"{report}\n")
    assert capsys.readouterr() == ("", "")


def test_titles(table):
    same = table.view(4, 6)

    assert str(tp.show_view_chain(table)).startswith("view chain of table: it is no view\n")
    assert str(tp.show_view_chain(same)).startswith("view chain of same: the same geometry, inferred\n")
    assert str(tp.show_view_chain(table[1])).startswith("view chain of table[1]: 1 step, inferred\n")


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (lambda x: x.unfold(0, 2, 1), "unfold(dimension=0, size=2, step=1)"),
        (lambda x: x[:, ::2], "slice(dim=1, start=0, end=5, step=2)"),
        (lambda x: x.view(-1), "flatten(start_dim=0, end_dim=1)"),
        (lambda x: x.unsqueeze(0).expand(3, 4, 6), "expand(size=(3, 4, 6))"),
        (lambda x: x.view(torch.int32)[0], "select(dim=0, index=0)"),
    ],
)
def test_a_step_is_written_as_the_call_that_makes_it(table, view, text):
    made = view(table)

    assert step_text(tp.show_view_chain(made).chain.steps[-1]) == text


def test_a_step_without_a_bound_is_written_without_it(table):
    with tp.record_views():
        view = table[1:]

    assert step_text(tp.show_view_chain(view).chain.steps[0]) == "slice(dim=0, start=1)"


def test_one_of_several_outputs_is_written_with_its_number(table):
    x = table.clone().requires_grad_() * 1
    lower = x.chunk(2)[1]

    chain = tp.show_view_chain(lower).chain

    assert [step_text(step) for step in chain.steps] == ["split(split_size=2, dim=0)[1]"]
    assert chain.source == "autograd"


# -- notes and aliases ------------------------------------------------------------------------------------------------


def test_detached_alias_is_no_view(table):
    loose = table.detach()

    report = tp.show_view_chain(loose)

    assert report.chain.begins == "itself"
    assert [alias.name for alias in report.chain.aliases] == ["table"]
    assert "alias: table lies over the same storage, no view of it; one version counter" in str(report)


def test_data_has_a_counter_of_its_own(table):
    part = table.data[1]

    assert [(a.name, a.shares_version) for a in tp.show_view_chain(part).chain.aliases] == [("table", False)]
    assert "a version counter of its own" in str(tp.show_view_chain(part))


def test_part_that_was_detached_begins_with_what_it_was_taken_from(table):
    part = table[1].detach()

    chain = tp.show_view_chain(part).chain

    assert (chain.begins, chain.base) == ("alias", "table")
    assert [step.op for step in chain.steps] == ["detach", "select"]
    assert "alias of table" in str(tp.show_view_chain(part))


def test_part_of_what_is_gone_begins_with_the_storage():
    part = torch.zeros(100)[3:10].detach()

    report = tp.show_view_chain(part)

    assert (report.chain.begins, report.chain.note) == (
        "storage",
        "no live tensor is known that it came from: begun with the bytes of its storage",
    )
    assert "from its storage, float32[100]" in str(report)


def test_as_strided_where_no_named_operators_do():
    x = torch.zeros(5, 7)[1:, 1:]
    odd = x.as_strided((3, 2), (5, 3), 0)  # begins before x does

    chain = tp.show_view_chain(odd, base=x).chain

    assert [step.op for step in chain.steps] == ["as_strided"]
    assert chain.proven
    assert chain.note == "no chain of up to 4 named operators gives this geometry"


def test_a_node_that_a_write_put_there_is_not_taken_for_the_operator_that_was_run():
    base = torch.zeros(4, 6, requires_grad=True) * 1
    fresh = base.as_strided((3, 6), (6, 1), 6)
    view = base[1:]
    assert [(s.op, s.source) for s in tp.show_view_chain(fresh, quiet=True).chain.steps] == [("as_strided", "autograd")]
    assert tp.show_view_chain(view, quiet=True).chain.source == "autograd"

    view.mul_(2)

    chain = tp.show_view_chain(view, quiet=True).chain
    assert [(step.op, step.source) for step in chain.steps] == [("narrow", "inferred")]
    assert chain.source == "inferred"
    assert chain.note.startswith("autograd's node says as_strided: PyTorch writes that")


def test_as_strided_is_kept_where_named_operators_would_be_contrived():
    base = torch.zeros(6, 8, requires_grad=True) * 1
    odd = base.as_strided((3, 2), (5, 3), 0)

    odd.mul_(2)

    chain = tp.show_view_chain(odd, quiet=True).chain
    assert [(step.op, step.source) for step in chain.steps] == [("as_strided", "autograd")]
    assert chain.note.startswith("autograd's node says as_strided: PyTorch writes that")


def test_as_strided_of_a_chain_recorded_too_late_is_explained(table):
    early = table[1:]
    with tp.record_views():
        late = early.t()

    report = tp.show_view_chain(late)

    assert [step.op for step in report.chain.steps] == ["as_strided", "t"]
    assert "PyTorch writes as_strided for itself and for view operators without record_views()" in str(report)


def test_written_base_makes_the_nodes_stale():
    base = torch.zeros(4, requires_grad=True) * 1
    view = base[:2]
    before = tp.show_view_chain(view).chain.source
    base.add_(1)

    assert (before, tp.show_view_chain(view).chain.source) == ("autograd", "inferred")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.eye(3).to_sparse(), "a sparse tensor has no strides, see inner: values"),
        (lambda: torch.eye(3).to_mkldnn(), None),
        (helpers.symbolic_fake, "its sizes and strides are expressions, not numbers"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
            "a nested tensor has a shape for each component, see inner: sizes",
        ),
    ],
    ids=["sparse", "mkldnn", "symbolic", "nested"],
)
def test_kind_without_numbers_is_not_known_and_says_why(make, why):
    x = make()

    report = tp.show_view_chain(x)

    assert (report.chain.source, report.chain.steps, report.chain.proven) == ("unknown", (), False)
    assert report.chain.note
    assert why is None or report.chain.note == why
    assert str(report).splitlines()[:2] == ["view chain of x: not known", report.chain.note]


@pytest.mark.parametrize("make", [lambda: torch.empty(4, 6, device="meta"), lambda: helpers.fake("cuda")])
def test_kind_without_memory_has_a_chain(make):
    x = make()

    assert tp.show_view_chain(x).chain.begins == "itself"
    view = torch.empty(4, 6, device="meta").t()
    assert [step.op for step in tp.show_view_chain(view).chain.steps] == ["t"]


# -- base= ------------------------------------------------------------------------------------------------------------


def test_base_is_what_the_caller_says(table):
    rows = table[1:]
    row = rows[1]

    assert (tp.show_view_chain(row).chain.base, tp.show_view_chain(row).chain.steps[0].args) == (
        "table",
        {"dim": 0, "index": 2},
    )
    chain = tp.show_view_chain(row, base=rows).chain
    assert (chain.begins, chain.base, chain.steps[0].args) == ("base", "rows", {"dim": 0, "index": 1})
    unnamed = tp.show_view_chain(row, base=table[2:])
    assert unnamed.chain.base == "base"


def test_base_of_another_storage_is_refused(table):
    with pytest.raises(ValueError, match=r"^show_view_chain\(base=\) takes a tensor over the same storage as x$"):
        tp.show_view_chain(table[1], base=table.clone())


@pytest.mark.parametrize("wrong", [3, "x", [torch.zeros(1)]])
def test_other_things_are_refused_in_one_line(table, wrong):
    name = type(wrong).__name__
    with pytest.raises(TypeError) as failure:
        tp.show_view_chain(wrong)
    assert str(failure.value) == f"show_view_chain() takes a torch.Tensor, got {name}"
    with pytest.raises(TypeError) as failure:
        tp.show_view_chain(table, base=wrong)
    assert str(failure.value) == f"show_view_chain(base=) takes a torch.Tensor, got {name}"


# -- other forms ------------------------------------------------------------------------------------------------------


def test_json_reads_back_equal(table):
    report = tp.show_view_chain(table[1:, ::2].t())

    again = tp.Report.from_json(report.to_json())

    assert again.document == report.document
    assert str(again) == str(report)
    assert again.document.chains[0].steps == report.chain.steps


def test_json_of_a_replayed_chain_reads_back_equal(table):
    with tp.record_views():
        view = table.view(2, 2, 6).permute(1, 0, 2).unbind(0)[1]
    report = tp.show_view_chain(view)

    assert report.chain.source == "replayed"
    assert tp.Report.from_json(report.to_json()).document == report.document


def test_html_has_table_and_picture(table):
    page = tp.show_view_chain(table[1:].t()).html()

    assert "narrow(dim=0, start=1, length=3)" in page
    assert 'src="data:image/svg+xml;base64,' in page
    assert "<script" not in page


def test_html_escapes_names(hostile, table):
    report = tp.show_view_chain(table[1:])
    report.replace_document(chains=(hostile,))

    page = report.html()

    assert "<b>&" not in page
    assert "\x1b" not in page
    assert "\u202e" not in page


def test_text_escapes_names(hostile, table):
    report = tp.show_view_chain(table[1:])
    report.replace_document(chains=(hostile,))

    assert not re.search("[\x1b\u202e]", str(report))


def test_picture_is_well_formed_and_the_same_every_time(table, hostile):
    chain = tp.show_view_chain(table[1:].t()).chain

    svg = chain_picture(chain).svg

    assert svg == chain_picture(chain).svg
    texts = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "t()" in texts
    assert texts.count("inferred") == 2
    for evil in (hostile, msgspec.structs.replace(hostile, steps=())):
        ElementTree.fromstring(chain_picture(evil).svg)


def test_picture_has_its_facts_in_words(table):
    view = table[1:].t()

    assert chain_picture(tp.show_view_chain(view).chain).words == (
        "base table: float32[4, 6]",
        "narrow(dim=0, start=1, length=3): float32[3, 6], inferred",
        "t(): float32[6, 3], inferred",
    )


def test_mermaid(table):
    view = table[1:].t()

    assert tp.show_view_chain(view).mermaid() == (
        "flowchart LR\n"
        '  n0["table<br/>float32#91;4, 6#93;<br/>stride #91;6, 1#93; offset 0"]\n'
        '  n1["float32#91;3, 6#93;<br/>stride #91;6, 1#93; offset 6<br/>inferred"]\n'
        '  n2["view<br/>float32#91;6, 3#93;<br/>stride #91;1, 6#93; offset 6<br/>inferred"]\n'
        '  n0 -->|"narrow(dim=0, start=1, length=3)"| n1\n'
        '  n1 -->|"t()"| n2\n'
    )


MERMAID = re.compile(
    r'flowchart LR|  [na]\d+\["[^"\[\]{}\\]*"\]|  n\d+ -->\|"[^"\[\]{}|<>\\]*"\| n\d+|  n0 -\.-\|"alias"\| a\d+'
)
DOT = re.compile(
    r"digraph view_chain \{|  rankdir=LR;|  node \[shape=box, fontname=monospace\];|\}"
    r'|  [na]\d+ \[label="(?:[^"\\]|\\.)*"(?:, style=dashed)?\];'
    r'|  n\d+ -> [na]\d+ \[label="(?:[^"\\]|\\.)*"(?:, style=dashed, dir=none)?\];'
)


def test_mermaid_of_hostile_names_is_still_a_flowchart(hostile):
    lines = mermaid(hostile).splitlines()

    assert [line for line in lines if not MERMAID.fullmatch(line)] == []
    assert len(lines) == 1 + 3 + 2 + 2


def test_dot_of_hostile_names_is_still_a_graph(hostile):
    lines = dot(hostile).splitlines()

    assert [line for line in lines if not DOT.fullmatch(line)] == []
    assert len(lines) == 3 + 3 + 2 + 2 + 1


def test_dot(table):
    view = table[1:]

    assert tp.show_view_chain(view).dot() == (
        "digraph view_chain {\n"
        "  rankdir=LR;\n"
        "  node [shape=box, fontname=monospace];\n"
        '  n0 [label="table\\nfloat32[4, 6]\\nstride [6, 1] offset 0"];\n'
        '  n1 [label="view\\nfloat32[3, 6]\\nstride [6, 1] offset 6\\ninferred"];\n'
        '  n0 -> n1 [label="narrow(dim=0, start=1, length=3)"];\n'
        "}\n"
    )


def test_chain_that_is_not_known_is_drawn_as_one_box():
    x = torch.eye(3).to_sparse()
    report = tp.show_view_chain(x)

    assert "data:image/svg+xml" not in report.html()
    ElementTree.fromstring(report.svg())
    assert all(MERMAID.fullmatch(line) for line in report.mermaid().splitlines())
    assert [phrase.words for phrase in chain_notes(report.chain)] == [report.chain.note]
    assert outline(report.document).chains[0].table is None


# -- record_views() ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _records_nothing_afterwards():
    yield
    assert torch._C._is_view_replay_enabled() is False


def source(x: torch.Tensor) -> str:
    return tp.show_view_chain(x).chain.source


def test_record_views_as_a_context(table):
    with tp.record_views():
        inside = table[1:]
    after = table[1:]

    assert (source(inside), source(after)) == ("replayed", "inferred")


def test_record_views_as_a_function(table):
    tp.record_views()
    one = table[1:]
    tp.record_views(False)

    assert (source(one), source(table[1:])) == ("replayed", "inferred")


def test_record_views_nests(table):
    with tp.record_views():
        with tp.record_views(False):
            without = table[1:]
        again = table[1:]

    assert (source(without), source(again)) == ("inferred", "replayed")


def test_record_views_is_restored_when_the_block_raises():
    with pytest.raises(KeyError), tp.record_views():
        raise KeyError

    assert not torch._C._is_view_replay_enabled()


def test_record_views_is_the_switch_of_one_thread(table):
    made = []
    with tp.record_views():
        thread = threading.Thread(target=lambda: made.append(table[1:]))
        thread.start()
        thread.join()
        here = table[1:]

    assert (source(made[0]), source(here)) == ("inferred", "replayed")


@pytest.mark.parametrize("mode", [1, None, "yes"])
def test_record_views_takes_a_bool(mode):
    with pytest.raises(TypeError) as failure:
        tp.record_views(mode)

    assert str(failure.value) == f"record_views() takes True or False, got {type(mode).__name__}"


def test_recorded_view_keeps_what_it_was_made_from(table):
    with tp.record_views():
        view = table[1:].t()

    shared = tp.list_shared_storages().storages

    members = next(s.members for s in shared if any(m.name == "view" for m in s.members))
    assert {m.name for m in members} == {"table", "view", "an unnamed float32[3, 6]"}
    assert view.shape == (6, 3)
