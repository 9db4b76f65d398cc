"""DTensors in words and as pictures: who points to what, what Python code says, what a repair checked and did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from tensorplay.layers import FAULTLESS, Document, DTensorLayers, RepairPlan, TensorRecord
from tensorplay.render.canvas import Arrow, Box, Picture, diagram, shortened
from tensorplay.render.parts import Phrase, Table
from tensorplay.words import bytes_text, describe, plural

__all__ = ["dtensors", "dtensors_summary", "relation_picture", "relations_drawn"]

_MOST_DRAWN = 3
_MOST_ROWS = 30

Names = Callable[..., str]
"""A letter and an address; and of whom, where what lies there is gone after the look at it."""


def dtensors(document: Document, name: Names) -> Iterator[Table | Phrase]:
    """Answer the pieces: a few DTensors layer by layer, many as a row each; then what a repair did."""
    records = {record.name: record for record in document.records}
    drawn = relations_drawn(document)
    for found in drawn:
        yield Phrase(_title(found), "strong")
        yield _relation(found, records, name)
        if words := _said(found):
            yield Phrase(words, "dim")
    if len(drawn) < len(document.dtensors):
        rest = [found for found in document.dtensors if found not in drawn]
        more = len(rest) - _MOST_ROWS
        yield Table(
            ("DTensor", "state", "body", "local tensor", "placements"),
            tuple(_row(found, records) for found in rest[:_MOST_ROWS]),
            rest=f"and {more} more: .states and to_json() have all" if more > 0 else None,
        )
    if document.repairs:
        yield from _repairs(document.repairs)


def dtensors_summary(document: Document) -> Iterator[Phrase]:
    """Answer the one line that counts: how many are in which state."""
    if document.repairs:
        yield Phrase(f"{_counted(plan.outcome for plan in document.repairs)}; now ")
    if [found.state for found in document.dtensors] == ["NO_LOCAL"] and not document.findings:
        yield Phrase(f"no DTensor: a {document.dtensors[0].type} that keeps no local tensor")
        return
    states = _counted(found.state for found in document.dtensors)
    yield Phrase(f"{plural(len(document.dtensors), 'DTensor')}" + (f", {states}" if states else ""))


def _counted(words: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).items())


def relations_drawn(document: Document) -> list[DTensorLayers]:
    """Choose what is shown layer by layer: those that are not in order, or all where there are few."""
    if len(document.dtensors) <= _MOST_DRAWN:
        return list(document.dtensors)
    seen: dict[str, DTensorLayers] = {}
    for found in document.dtensors:
        if found.state not in FAULTLESS:
            seen.setdefault(found.state, found)
    return list(seen.values())[:_MOST_DRAWN]


def _title(found: DTensorLayers) -> str:
    placed = f" {found.placements}" if found.placements else ""
    on = f" on a {found.mesh}" if found.mesh else ""
    beside = f" ({', '.join(found.states[1:])})" if len(found.states) > 1 else ""
    return f"{found.name}  {found.type}{placed}{on}: {found.state}{beside}"


def _holders(found: DTensorLayers) -> list[tuple[str, str]]:
    """Answer what points to an impl: its word, and its record's name."""
    rows = [("body", found.body), ("_local_tensor", found.local), (".data", found.alias)]
    rows += [("buffer", buffer.record) for buffer in found.buffers]
    return [(word, record) for word, record in rows if record is not None]


def _relation(found: DTensorLayers, records: dict[str, TensorRecord], name: Names) -> Table:
    rows = []
    for word, at in _holders(found):
        record = records[at]
        impl, storage = record.impl, record.storage
        rows.append(
            (
                word,
                f"-> {name('I', impl.address, _passing(word, at))}",
                describe(record),
                impl.device or "no device",
                f"offset {impl.storage_offset}",
                "no storage" if storage is None else f"-> {name('S', storage.address)}",
                _memory(found, record, name),
                "none" if impl.version_counter is None else name("V", impl.version_counter, _passing(word, at)),
            )
        )
    headings = ("", "impl", "tensor", "device", "", "storage", "memory", "version")
    return Table(headings, tuple(rows), first_width=14)


def _passing(word: str, at: str) -> str:
    """Answer whose impl it is where that is gone after the look at it, as each `.data` is; else nothing."""
    return at if word == ".data" else ""


def _memory(found: DTensorLayers, record: TensorRecord, name: Names) -> str:
    data, storage = record.data, record.storage
    if data is None or storage is None:
        return "none"
    if data.pointer:
        return f"{bytes_text(storage.nbytes)} at {name('D', data.pointer)}"
    if record.name == found.body and found.wrapper:
        return "none, by design"
    return "none: " + ("on meta" if record.impl.device == "meta" else f"{bytes_text(storage.nbytes)}, null pointer")


def _said(found: DTensorLayers) -> str:
    """Say what Python code answers, by who answers it."""
    by: dict[str, list[str]] = {}
    for said in found.says:
        value = said.attribute if said.value is None else f"{said.attribute} {said.value}"
        by.setdefault(said.by, []).append(value)
    parts = []
    for who, values in by.items():
        run = " (not run)" if who not in ("the body", "_local_tensor") else ""
        parts.append(f"{who}{run}: {', '.join(values)}")
    return f"Python is answered by {'; by '.join(parts)}" if parts else ""


def _row(found: DTensorLayers, records: dict[str, TensorRecord]) -> tuple[str, ...]:
    body = records[found.body]
    local = None if found.local is None else records[found.local]
    sides = [
        "none" if record is None else f"{describe(record)} {record.impl.device or 'no device'}"
        for record in (body, local)
    ]
    return (found.name, found.state, *sides, found.placements or "")


def _repairs(plans: Sequence[RepairPlan]) -> Iterator[Table | Phrase]:
    changed = [plan for plan in plans if plan.outcome != "unchanged"]
    if changed:
        yield Table(
            ("repair", "by", "before", "outcome", "after", "checks"),
            tuple(_plan_row(plan) for plan in changed[:_MOST_ROWS]),
            rest=f"and {len(changed) - _MOST_ROWS} more" if len(changed) > _MOST_ROWS else None,
        )
    for plan in changed[:_MOST_ROWS]:
        for check in plan.checks:
            if check.result in ("refused", "reported"):
                yield Phrase(
                    f"{plan.name}: {check.name} {check.result}: {check.reason}",
                    "error" if check.result == "refused" else "dim",
                )


def _plan_row(plan: RepairPlan) -> tuple[str, ...]:
    told = _counted(check.result for check in plan.checks)
    return (plan.name, plan.method, plan.state, plan.outcome, plan.after or "", told)


def relation_picture(document: Document, found: DTensorLayers, name: Names) -> Picture:
    """Draw which impl and which storage the body, the local tensor, `.data` and buffers point to."""
    records = {record.name: record for record in document.records}
    boxes: dict[str, Box] = {}
    arrows: dict[tuple[str, str], Arrow] = {}
    words = []
    fault = found.state not in FAULTLESS
    for word, at in _holders(found):
        record = records[at]
        impl, storage = record.impl, record.storage
        holder, key = f"H{at}", f"I{impl.address}"
        is_odd = fault and word == "body"
        boxes[holder] = _box(holder, 0, [word, *([found.type] if word == "body" else [])])
        boxes.setdefault(
            key,
            _box(
                key,
                1,
                [
                    f"{name('I', impl.address, _passing(word, at))} {describe(record)}",
                    f"{impl.device}, offset {impl.storage_offset}",
                    f"version {name('V', impl.version_counter, _passing(word, at))}",
                    "requires grad" if impl.requires_grad else "no grad",
                ],
                is_odd,
            ),
        )
        arrows[holder, key] = Arrow(holder, key)
        sentence = f"{word} is TensorImpl {name('I', impl.address, _passing(word, at))} on {impl.device}"
        if storage is not None:
            lies = f"S{storage.address}"
            memory = _memory(found, record, name)
            boxes.setdefault(
                lies,
                Box(
                    lies,
                    2,
                    (shortened(name("S", storage.address)), shortened(memory)),
                    "ghost" if memory.startswith("none") else "box",
                ),
            )
            arrows[key, lies] = Arrow(key, lies)
            sentence += f", over StorageImpl {name('S', storage.address)}: {memory}"
        words.append(sentence)
    title = f"{found.name}: {found.state}"
    return diagram(title, ("held as", "TensorImpl", "StorageImpl"), list(boxes.values()), list(arrows.values()), words)


def _box(key: str, column: int, lines: Sequence[str], is_fault: bool = False) -> Box:
    return Box(key, column, tuple(map(shortened, lines)), "fault" if is_fault else "box")
