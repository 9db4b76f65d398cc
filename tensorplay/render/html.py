"""A report as HTML that needs nothing: no script, no style sheet, no id, no network.

The fragment for a notebook is styled by attributes alone, because a notebook that is not trusted keeps nothing else.
Text has the colour of its surroundings; what has a colour of its own has its own background too.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import msgspec

from tensorplay.layers import Document, TensorRecord, ViewChain
from tensorplay.render.canvas import Picture
from tensorplay.render.chain import chain_picture
from tensorplay.render.dtensor import relation_picture, relations_drawn
from tensorplay.render.outline import ChainPart, Diagnosis, Layer, Outline, TensorPart, flat, outline
from tensorplay.render.parts import Phrase, Table
from tensorplay.render.svg import cells_picture, layers_picture
from tensorplay.render.tree import growth_picture, holders_picture
from tensorplay.words import plural, visible

__all__ = ["fragment", "page", "title_of"]

_MOST_DRAWN = 12
_LONGEST_VALUE = 2_000
_LONGEST_TITLE = 200
_MONO = "font-family:ui-monospace,Menlo,Consolas,monospace;font-size:12px"
_CELL = "text-align:left;vertical-align:top;padding:2px 12px 2px 0;border:0;white-space:"
_BADGES = {
    "plain": "",
    "strong": "font-weight:bold",
    "dim": "opacity:0.8",
    "attention": "font-weight:bold",
    "good": "background:#1a7f37;color:#ffffff;padding:1px 7px;border-radius:4px",
    "error": "background:#b3261e;color:#ffffff;padding:1px 7px;border-radius:4px",
    "warning": "background:#7a4f00;color:#ffffff;padding:1px 7px;border-radius:4px",
    "info": "background:#0b5394;color:#ffffff;padding:1px 7px;border-radius:4px",
}
_EDGES = {"error": "#d1242f", "warning": "#bf8700", "info": "#218bff"}
_PAGE_STYLE = """
:root{color-scheme:light dark}
body{margin:0 auto;max-width:1100px;padding:12px 16px;font:14px/1.5 system-ui,sans-serif}
h1{font-size:20px;overflow-wrap:anywhere}h2{font-size:17px;margin-top:32px}summary{cursor:pointer}
"""


def fragment(document: Document, *, view_chain: bool = False) -> str:
    """Answer a report as a piece of HTML that any notebook shows.

    Args:
        document: the report.
        view_chain: whether the view chains are folded away, to be opened.
    """
    report = outline(document)
    parts = [
        "" if report.label is None else f'<p style="margin:4px 0"><b>{_text(report.label)}</b></p>',
        _summary(report.summary),
        *map(_diagnosis, report.diagnoses),
        "" if report.more_diagnoses is None else f'<p style="{_BADGES["dim"]}">{_text(report.more_diagnoses)}</p>',
        *_changes(report),
        *(_tensor(tensor) for tensor in (*report.focus, *report.tensors)),
    ]
    if report.table is not None:
        parts.append(_table(report.table))
    if report.comparison is not None:
        parts += [_verdict(report.comparison.verdict), _table(report.comparison.table)]
    if not view_chain:
        parts += [_chain(chain, report.chains[number]) for number, chain in enumerate(document.chains)]
    parts += [_piece(piece) for piece in (*report.sharing, *report.checkpoint)]
    parts += [_picture(holders_picture(held)) for held in document.held if held.holders or held.cycle]
    if document.growth is not None and document.growth.grown:
        parts.append(_picture(growth_picture(document.growth)))
    if document.focus == "dtensors":
        parts += [_picture(relation_picture(document, found, report.names)) for found in relations_drawn(document)]
    if report.arrays is not None:
        parts.append(_table(report.arrays))
    if report.table is not None or report.tensors:
        parts.append(_layers(document.records, report))
    if view_chain and document.chains:
        chains = [_chain(chain, report.chains[number]) for number, chain in enumerate(document.chains)]
        parts.append(_details("Show View Chain", "\n".join(chains), is_open=False))
    parts += [f'<p style="margin:4px 0;{_BADGES[remark.tone]}">{_text(remark.words)}</p>' for remark in report.remarks]
    parts.append(_provenance(document))
    style = "font-size:14px;line-height:1.5;overflow-wrap:anywhere"
    return f'<div style="{style}">\n' + "\n".join(filter(None, parts)) + "\n</div>"


def page(title: str, sections: Sequence[tuple[str | None, Document]], *, generator: str = "TensorPlay") -> str:
    """Answer a whole page of reports.

    Args:
        title: what the page is called.
        sections: reports with their headings.
        generator: what the page says it was made by.
    """
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    body = []
    for heading, document in sections:
        body += ["" if heading is None else f"<h2>{_text(heading)}</h2>", fragment(document)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="generator" content="{_text(generator)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{_PAGE_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<h1>{_text(title)}</h1>\n" + "\n".join(filter(None, body)) + "\n</main>\n</body>\n</html>\n"
    )


def title_of(document: Document) -> str:
    """Say in a few words what a report is on."""
    title = document.label or _subject(document)
    return title if len(title) <= _LONGEST_TITLE else f"{title[: _LONGEST_TITLE - 3]}..."


def _subject(document: Document) -> str:
    names = [record.name for record in document.records]
    some = ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
    if document.held:
        return f"who holds {', '.join(held.name for held in document.held)}"
    if document.growth is not None:
        return "memory that came and stayed"
    if document.mismatches:
        return "how device facts come to disagree"
    if document.repairs:
        return f"repair of {', '.join(plan.name for plan in document.repairs[:3])}"
    if document.dtensors:
        return f"the layers of {', '.join(found.name for found in document.dtensors[:3])}"
    if document.load is not None:
        beside = f"{document.load.state_dict} beside " if document.load.state_dict else "the state of "
        return f"{beside}{document.load.model}"
    if document.placement is not None:
        return f"what lies where in {', '.join(document.placement.roots[:3])}"
    if document.graph is not None:
        return f"the graph behind {', '.join(document.graph.roots[:3])}"
    if document.focus == "sharing":
        return f"storages that {some} share" if some else "shared storages"
    if document.chains:
        return f"view chain of {', '.join(chain.name for chain in document.chains)}"
    return some or ", ".join(file.path for file in document.files) or "no tensors"


def _verdict(phrase: Phrase) -> str:
    return f'<p style="margin:8px 0 4px 0">{_phrase(phrase)}</p>'


def _chain(chain: ViewChain, part: ChainPart) -> str:
    pieces = [_verdict(part.title)]
    if part.table is not None:
        pieces.append(_table(part.table))
        if chain.steps:
            pieces.append(_picture(chain_picture(chain)))
    pieces += [f'<p style="margin:4px 0">{_phrase(note)}</p>' for note in part.notes]
    return "\n".join(pieces)


def _text(words: str) -> str:
    return escape(visible(words))


def _phrase(phrase: Phrase) -> str:
    style = _BADGES[phrase.tone]
    return f'<span style="{style}">{_text(phrase.words)}</span>' if style else _text(phrase.words)


def _summary(phrases: Iterable[Phrase]) -> str:
    return f'<p style="margin:4px 0 8px 0">{"".join(map(_phrase, phrases))}</p>'


def _details(summary: str, body: str, *, is_open: bool) -> str:
    """Answer something that opens and closes; its summary is HTML already."""
    state = " open" if is_open else ""
    return f'<details{state} style="margin:4px 0"><summary>{summary}</summary>\n{body}\n</details>'


def _scrolling(body: str) -> str:
    return f'<div style="overflow-x:auto;max-width:100%">{body}</div>'


def _changes(report: Outline) -> Iterable[str]:
    if report.changes is not None:
        yield _table(report.changes) if report.changes.rows else f"<p>{_text(report.unchanged)}</p>"
    if report.note is not None:
        yield f'<p style="{_BADGES["dim"]}">{_text(report.note)}</p>'


def _piece(piece: Table | Phrase) -> str:
    if isinstance(piece, Table):
        return _table(piece)
    return f'<p style="margin:4px 0;{_BADGES[piece.tone]}">{_text(piece.words)}</p>' if piece.words else ""


def _tensor(tensor: TensorPart) -> str:
    title = f"<b>{_text(tensor.name)}</b> &nbsp;{_text(tensor.title)}"
    if tensor.also:
        title += f' &nbsp;<span style="{_BADGES["dim"]}">{_text(tensor.also)}</span>'
    rows = "\n".join(map(_layer, tensor.layers))
    parts = [f'<table style="border-collapse:collapse;border:0;margin:0;{_MONO}">\n{rows}\n</table>']
    if tensor.geometry is not None:
        parts.append(_picture(cells_picture(tensor.name, tensor.geometry)))
    parts += [_tensor(inner) for inner in tensor.inner]
    body = (
        '<div style="margin-left:6px;padding-left:12px;border-left:1px solid #80808080">' + "\n".join(parts) + "</div>"
    )
    return _details(title, body, is_open=True)


def _layer(layer: Layer) -> str:
    lines = "<br>".join(map(_text, (layer.head, *layer.lines)))
    head = f'<th scope="row" style="{_CELL}nowrap;font-weight:bold">{_text(layer.word)}</th>'
    return f'<tr>{head}<td style="{_CELL}pre-wrap">{lines}</td></tr>'


def _table(table: Table) -> str:
    align = ["right" if heading in table.numbers else "left" for heading in table.headings]

    def row(tag: str, values: Iterable[str]) -> str:
        return "<tr>" + "".join(_cell(tag, value, side) for value, side in zip(values, align, strict=True)) + "</tr>"

    body = "\n".join([row('th scope="col"', table.headings), *(row("td", values) for values in table.rows)])
    html = f'<table style="border-collapse:collapse;border:0;margin:0;{_MONO}">\n{body}\n</table>'
    rest = "" if table.rest is None else f'<p style="{_BADGES["dim"]}">{_text(table.rest)}</p>'
    return _scrolling(html) + rest


def _cell(tag: str, value: str, align: str) -> str:
    # On a narrow page columns would be slivers: short cells stay whole, and the table scrolls.
    width = "white-space:nowrap" if len(value) <= 40 else "min-width:280px"
    style = f"text-align:{align};vertical-align:top;padding:2px 16px 2px 0;{width}"
    return f'<{tag} style="{style}">{_text(value)}</{tag.split()[0]}>'


def _diagnosis(diagnosis: Diagnosis) -> str:
    head = (
        f"{_phrase(Phrase(diagnosis.severity, diagnosis.severity))} <b>{diagnosis.code} {_text(diagnosis.headline)}</b>"
    )
    rows = _rows(diagnosis.rows)
    evidence = _details(
        "evidence", _rows({key: _value(value) for key, value in diagnosis.evidence.items()}), is_open=False
    )
    edge = f"border-left:4px solid {_EDGES[diagnosis.severity]};padding:2px 0 2px 12px;margin:8px 0"
    return f'<div style="{edge}"><p style="margin:0 0 4px 0">{head}</p>\n{rows}\n{evidence}</div>'


def _rows(values: dict[str, str]) -> str:
    rows = "\n".join(_layer(Layer(key, value)) for key, value in values.items())
    return f'<table style="border-collapse:collapse;border:0;margin:0">\n{rows}\n</table>'


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]} ... to_json() has all"


def _layers(records: Sequence[TensorRecord], report: Outline) -> str:
    drawn = _drawn(records)
    if not drawn:
        return ""
    note = (
        "" if len(drawn) == len(records) else f": {plural(len(drawn), 'tensor')} of {len(records)} that share storages"
    )
    return _details(f"<b>Layers in memory</b>{note}", _picture(layers_picture(drawn, report.names)), is_open=True)


def _drawn(records: Sequence[TensorRecord]) -> Sequence[TensorRecord]:
    """Choose what is drawn: everything, or of many tensors the first ones that share a storage with another."""
    if len(list(flat(records))) <= _MOST_DRAWN:
        return records
    over: dict[int, list[TensorRecord]] = {}
    for record in records:
        if record.storage is not None and record.storage.nbytes:
            over.setdefault(record.storage.address, []).append(record)
    return [record for group in over.values() if len(group) > 1 for record in group][:_MOST_DRAWN]


def _picture(picture: Picture) -> str:
    """Answer a picture with its words beside it."""
    data = base64.b64encode(picture.svg.encode()).decode()
    size = f'width="{picture.width}" height="{picture.height}"'
    style = "display:block;max-width:none"  # a wide one scrolls: made narrower, nobody could read it
    image = f'<img alt="{_text(picture.title)}" {size} style="{style}" src="data:image/svg+xml;base64,{data}">'
    items = "\n".join(f"<li>{_text(words)}</li>" for words in picture.words)
    in_words = _details("the picture in words", f"<ol>\n{items}\n</ol>", is_open=False)
    return f"{_scrolling(image)}\n{in_words}"


def _provenance(document: Document) -> str:
    made = document.provenance
    versions = f"tensorplay {made.tensorplay}, torch {made.torch}, Python {made.python}, {made.platform}, {made.time}"
    return f'<p style="font-size:12px;margin:8px 0 0 0;{_BADGES["dim"]}">{_text(versions)}</p>'
