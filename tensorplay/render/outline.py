"""What a report says, part by part, in plain words: every output shows these, and decides only how they look."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tensorplay.layers import (
    SEVERITIES,
    WITH_MEMORY,
    ArrayRecord,
    Change,
    Comparison,
    Document,
    Finding,
    History,
    Mismatch,
    Severity,
    SharedMember,
    TensorRecord,
    field_of,
)
from tensorplay.render.cells import Geometry
from tensorplay.render.checkpoint import Rows, checkpoint, totals
from tensorplay.render.dtensor import dtensors, dtensors_summary
from tensorplay.render.graph import graph, graph_summary, saved
from tensorplay.render.growth import growth, growth_summary
from tensorplay.render.holders import holders, holders_summary
from tensorplay.render.load import load, load_summary
from tensorplay.render.parts import Phrase, Table
from tensorplay.render.placement import mismatches, placement, placement_summary
from tensorplay.render.steps import chain_notes, chain_table, chain_title
from tensorplay.render.track import tracked, tracked_summary
from tensorplay.words import bytes_text, describe, listed, plural, shape_text, time_text

__all__ = [
    "ChainPart",
    "ComparisonPart",
    "Diagnosis",
    "Layer",
    "Names",
    "Outline",
    "TensorPart",
    "claims_memory",
    "diagnosis",
    "flat",
    "outline",
]

_MOST_TREES = 3
_MOST_MEMBERS = 6
_PARTS = ("comparison", "chains", "sharing", "holders", "growth", "graph", "saved", "placement", "load", "dtensors",
          "tracked", "mismatches")  # fmt: skip
_MOST_ROWS = 50
_PACKED = ("quint4x2", "quint2x4")  # several elements a byte: no cell has one index
_ADDRESSES = {
    "python.address": "P",
    "impl.address": "I",
    "impl.base": "I",
    "impl.version_counter": "V",
    "storage.address": "S",
    "data.pointer": "D",
    "data.data_ptr": "D",
    "data.context": "C",
}


class Layer(NamedTuple):
    """One layer of a tensor: its name, its first line, its further lines."""

    word: str
    head: str
    lines: tuple[str, ...] = ()


class TensorPart(NamedTuple):
    """One tensor, layer by layer."""

    name: str
    title: str
    also: str
    """Further paths to it; empty where there are none."""
    layers: tuple[Layer, ...]
    geometry: Geometry | None = None
    """What there is to draw; None where a picture would say nothing."""
    inner: tuple[TensorPart, ...] = ()


class Diagnosis(NamedTuple):
    """One finding."""

    code: str
    headline: str
    severity: Severity
    rows: dict[str, str]
    evidence: dict[str, Any]


class ChainPart(NamedTuple):
    """One view chain."""

    title: Phrase
    table: Table | None
    """Base, steps and tensor; None where nothing is known."""
    notes: tuple[Phrase, ...]


class ComparisonPart(NamedTuple):
    """Two tensors beside each other."""

    verdict: Phrase
    table: Table


class Outline(NamedTuple):
    """A report in words, in the order in which it is read."""

    label: str | None
    changes: Table | None
    """None where there is nothing to compare with; no rows where nothing changed."""
    unchanged: str
    """What is said in their place then."""
    note: str | None
    """What the changes do not prove."""
    focus: tuple[TensorPart, ...]
    """The tensors with the facts of the one layer that was asked for."""
    tensors: tuple[TensorPart, ...]
    """The tensors, where they are few."""
    table: Table | None
    """The tensors, where they are many."""
    comparison: ComparisonPart | None
    """The two tensors beside each other, where that was asked."""
    chains: tuple[ChainPart, ...]
    """How tensors came to be views, where that was asked."""
    sharing: tuple[Table | Phrase, ...]
    """Storages and ranges that several lie in, or who keeps objects alive, where that was asked."""
    checkpoint: tuple[Table | Phrase, ...]
    """Files and their tensors, in place of both, where the report is on files."""
    arrays: Table | None
    """The NumPy arrays, where there are any."""
    diagnoses: tuple[Diagnosis, ...]
    """The findings, the gravest first."""
    more_diagnoses: str | None
    """What is said of findings that are left out."""
    summary: tuple[Phrase, ...]
    """The one line that counts."""
    remarks: tuple[Phrase, ...]
    """What was not read, not shown, or not needed."""
    names: Names
    """The short names used so far."""


def outline(document: Document, *, addresses: bool = False, rows: Rows | None = None) -> Outline:
    """Put a report into words.

    Args:
        document: the report.
        addresses: whether to print addresses in hex in place of short names (S1, I3).
        rows: which rows to show of a checkpoint.
    """
    return _Writer(document, addresses, rows or Rows()).outline()


def diagnosis(finding: Finding, about: str = "tensor") -> Diagnosis:
    """Put a finding into words; `about` is what kind of thing its subject is."""
    rows = {about: f"{finding.where.name}  {finding.subject}"}
    if finding.where.file is not None:
        rows["where"] = f"{finding.where}  ({finding.where.source})"
    rows |= {"why": finding.why, "fix": finding.fix, "source": finding.source}
    return Diagnosis(finding.code, finding.headline, finding.severity, rows, finding.evidence)


class Names:
    """Short names for addresses, in the order they are met: I1, I2, S1."""

    def __init__(self, hexadecimal: bool) -> None:
        self._hexadecimal = hexadecimal
        self._known: dict[tuple[str, int, str], str] = {}
        self._counts: dict[str, int] = {}

    def __call__(self, letter: str, address: int | None, of: str = "") -> str:
        """Answer the short name; the letter says what lies at the address.

        ``of`` tells apart what lay at one address one after the other.
        """
        if address is None:
            return "none"
        if self._hexadecimal:
            return f"{address:#x}"
        key = (letter, address, of)
        if key not in self._known:
            self._counts[letter] = self._counts.get(letter, 0) + 1
            self._known[key] = f"{letter}{self._counts[letter]}"
        return self._known[key]


class _Writer:
    def __init__(self, document: Document, addresses: bool, rows: Rows) -> None:
        self.document = document
        self.rows = rows
        self.name = Names(addresses)
        # Who in this report sits over which storage: the owners that can be named.
        self.over: dict[int, dict[int, str]] = {}
        self.views: dict[int, list[str]] = {}
        for record in flat(document.records):
            if record.impl.base is not None:
                self.views.setdefault(record.impl.base, []).append(record.name)
            if record.storage is not None:
                self.over.setdefault(record.storage.address, {}).setdefault(record.impl.address, record.name)

    def outline(self) -> Outline:
        document = self.document
        changes, note = None, None
        focus: list[TensorPart] = []
        tensors: list[TensorPart] = []
        table = None
        files: tuple[Table | Phrase, ...] = ()
        if document.changes is not None:
            changes = self.changes(document.changes)
            note = "; ".join(document.notes) or self.same_addresses(document.changes)
        elif document.focus in _PARTS:
            pass  # the part is all that was asked for
        elif document.focus is not None:
            focus = [self.focus(record, document.focus) for record in document.records]
        elif document.files:
            files = checkpoint(document, self.rows, self.name)
        elif len(document.records) <= _MOST_TREES:
            tensors = [self.tensor(record) for record in document.records]
        else:
            table = self.table(document.records)
        arrays = {array.name for array in document.arrays}
        findings = sorted(document.findings, key=lambda finding: SEVERITIES.index(finding.severity))
        return Outline(
            label=document.label,
            changes=changes,
            unchanged=(
                "the two reports say the same"
                if document.label is None
                else "nothing changed since the last report with this label"
            ),
            note=note,
            focus=tuple(focus),
            tensors=tuple(tensors),
            table=table,
            comparison=None if document.comparison is None else self.comparison(document.comparison),
            chains=tuple(
                ChainPart(chain_title(chain), chain_table(chain), tuple(chain_notes(chain)))
                for chain in document.chains
            ),
            sharing=(
                *(self.sharing() if document.focus == "sharing" else ()),
                *holders(document.held),
                *(() if document.growth is None else growth(document.growth)),
                *(() if document.graph is None else graph(document.graph)),
                *saved(document.saved),
                *(() if document.placement is None else placement(document.placement)),
                *(() if document.load is None else load(document.load)),
                *(dtensors(document, self.name) if document.focus == "dtensors" else ()),
                *(() if document.tracked is None else tracked(document.tracked)),
                *mismatches(document.mismatches),
            ),
            checkpoint=files,
            arrays=self.arrays(document.arrays) if document.arrays else None,
            diagnoses=tuple(
                diagnosis(finding, "array" if finding.where.name in arrays else "tensor")
                for finding in findings[:_MOST_ROWS]
            ),
            more_diagnoses=_rest(len(findings), "finding", "report.findings and to_json() have all"),
            summary=tuple(self.summary()),
            remarks=tuple(self.remarks()),
            names=self.name,
        )

    # -- one tensor ---------------------------------------------------------------------------------------------

    def tensor(self, record: TensorRecord) -> TensorPart:
        layers = [] if record.python is None else [self.python(record)]
        layers.append(self.impl(record))
        if record.storage is not None and record.data is not None:
            layers += [self.storage(record), self.data(record)]
        else:
            layers.append(Layer("storage", f"none: {record.absent.get('storage', 'this kind has none')}"))
        layers.append(self.extent(record))
        inner = tuple(self.tensor(inner.record) for inner in record.inner)
        return self.titled(record, layers, _geometry(record), inner)

    def titled(
        self,
        record: TensorRecord,
        layers: Iterable[Layer],
        geometry: Geometry | None = None,
        inner: tuple[TensorPart, ...] = (),
    ) -> TensorPart:
        kind = "" if record.kind == "strided" else f"{record.kind.replace('_', ' ')} "
        cls = "" if record.python is None else f"{record.python.type} "
        title = f"{kind}{cls}{describe(record)}"
        if record.extent is not None:
            title += f"  {bytes_text(record.extent.nbytes)}"
            if record.extent.storage_nbytes not in (None, record.extent.nbytes):
                title += f" of a storage of {bytes_text(record.extent.storage_nbytes)}"
        also = f"also {', '.join(record.also[:3])}{' ...' if len(record.also) > 3 else ''}" if record.also else ""
        return TensorPart(record.name, title, also, tuple(layers), geometry, inner)

    def python(self, record: TensorRecord) -> Layer:
        python = record.python
        assert python is not None
        module = f"{python.module}." if python.module else ""
        count = f"refcount {python.refcount}"
        if record.impl.use_count > 1 and python.slot_is_self and python.refcount > 0:
            count += ", one of them the impl's: its other owners keep this object alive"
        elif python.refcount == 0:
            count += ": a temporary, only this call held it"
        facts = [count]
        if python.has_weakrefs:
            facts.append("has weak references")
        if not python.slot_is_self:
            facts.append("the impl's PyObject slot names another object")
        return Layer("python", f"{self.name('P', python.address)} {module}{python.type}  {', '.join(facts)}")

    def impl(self, record: TensorRecord) -> Layer:
        impl = record.impl
        head = f"{self.name('I', impl.address)} {impl.type}"
        count = f"use_count {impl.use_count}: {self.impl_owners(record)}"
        if impl.weak_count:
            count += f", {plural(impl.weak_count, 'C++ weak reference')}"
        geometry = f"shape {shape_text(impl.shape)}  stride {shape_text(impl.stride)}  offset {impl.storage_offset}"
        if impl.shape is None:
            geometry = record.absent.get("impl.shape", "no shape")
        elif impl.stride is None:
            geometry = f"shape {shape_text(impl.shape)}; {record.absent.get('impl.stride', 'no strides')}"
        lines = [count, f"{geometry}  {impl.dtype} {impl.layout} on {self.device(record)}"]
        lines.append(f"keys {', '.join(impl.keys)}")
        lines.append("; ".join(self.autograd(record)))
        return Layer("impl", head, tuple(filter(None, lines)))

    def impl_owners(self, record: TensorRecord) -> str:
        impl = record.impl
        owners = ["the Python object"] if record.python is not None and record.python.slot_is_self else []
        views = [f"{name} (a view's base)" for name in self.views.get(impl.address, ())]
        owners += views if len(views) <= 3 else [*views[:2], f"{len(views) - 2} more views"]
        known = len(owners) if len(views) <= 3 else len(owners) - 3 + len(views)
        if impl.use_count > known:
            owners.append(plural(impl.use_count - known, "more owner" if owners else "owner in C++"))
        return listed(owners)

    def autograd(self, record: TensorRecord) -> Iterator[str]:
        impl = record.impl
        if impl.version is None:
            yield record.absent.get("impl.version", "no version counter")
        else:
            yield f"version {impl.version} (counter {self.name('V', impl.version_counter)})"
        if impl.is_view:
            made = "" if impl.creation_meta in (None, "DEFAULT") else f", made in {impl.creation_meta}"
            yield f"view of {self.name('I', impl.base)}{made}"
        if impl.grad_fn is not None:
            yield f"grad_fn {impl.grad_fn}" + (" (stale: rebuilt on the next read)" if impl.grad_fn_stale else "")
        if impl.requires_grad:
            yield "requires grad, leaf" if impl.is_leaf else "requires grad"
        if impl.is_inference:
            yield "inference tensor"
        if impl.is_conj:
            yield "conjugate bit set: a reader of the raw bytes gets the conjugate"
        if impl.is_neg:
            yield "negative bit set: a reader of the raw bytes gets the negative"
        if impl.dim == 0 and not impl.is_wrapped_number and record.kind == "strided":
            yield "0 dimensions, yet real memory: in type promotion it ranks below tensors with dimensions"
        if impl.python_decides_shape:
            yield "the subclass answers .shape itself and may say otherwise"

    def device(self, record: TensorRecord) -> str:
        impl = record.impl
        device = impl.device or impl.backend or "no device"
        label = record.data.device if record.data is not None else device
        type_of = device.partition(":")[0]
        if label == device and impl.backend in (None, type_of):
            return device
        data = "" if record.data is None else f", DataPtr {record.data.device}"
        return f"{impl.device} (key set {impl.backend}{data})"

    def storage(self, record: TensorRecord) -> Layer:
        storage = record.storage
        assert storage is not None
        facts = ["resizable" if storage.resizable else "not resizable", f"allocator {storage.allocator or 'none'}"]
        for flag, words in (
            (storage.copy_on_write, "copy-on-write: shared until the first write"),
            (storage.has_materializer and not storage.copy_on_write, "materialised on the first write"),
            (storage.throws_on_read, "data_ptr() raises"),
            (storage.throws_on_write, "mutable_data_ptr() raises"),
        ):
            if flag:
                facts.append(words)
        lines = [
            f"{bytes_text(storage.nbytes)}  use_count {storage.use_count}: {self.owners(record)}",
            ", ".join(facts),
        ]
        if (shared := storage.shared_memory) is not None:
            lines.append(f"mapped: {shared.handle}, {bytes_text(shared.mapped_nbytes)}")
        if record.history is not None:
            lines += _remembered(record.history)
        return Layer("storage", f"{self.name('S', storage.address)} {storage.type}", tuple(lines))

    def owners(self, record: TensorRecord) -> str:
        storage = record.storage
        assert storage is not None
        named = list(self.over.get(storage.address, {record.impl.address: record.name}).values())
        named.sort(key=lambda name: name != record.name)
        known = len(named)
        if len(named) > 4:
            named = [*named[:3], f"{len(named) - 3} more in this report"]
        if storage.has_python_wrapper:
            named.append("a live UntypedStorage object")
            known += 1
        if storage.use_count > known:
            named.append(plural(storage.use_count - known, "more owner"))
        return listed(named)

    def data(self, record: TensorRecord) -> Layer:
        data = record.data
        assert data is not None
        where = "null pointer" if data.pointer == 0 else f"{self.name('D', data.pointer)} on {data.device}"
        maker = f" of {data.maker}" if data.maker else ""
        origin = {
            "none": "though there are elements to read" if claims_memory(record) else "nothing to read",
            "cpu_allocator": "freed by PyTorch's CPU allocator",
            "borrowed": "borrowed: nobody here frees it",
            "callback": f"foreign memory{maker}, given back by a callback",
            "mapped": "mapped memory",
            "storage_slice": "part of another storage, which it keeps alive",
            "copy_on_write": "copy-on-write memory",
            "other": f"freed by {data.deleter}",
        }[data.origin]
        return Layer("data", f"{where}, {origin}")

    def extent(self, record: TensorRecord) -> Layer:
        extent = record.extent
        if extent is None:
            return Layer("extent", f"none: {record.absent.get('extent', 'not known')}")
        if extent.needed_nbytes is None:
            return Layer("extent", f"none: {record.absent.get('extent.needed_nbytes', 'not known')}")
        if extent.needed_nbytes == 0:
            return Layer("extent", "no elements: no byte is reached")
        visible = extent.visible_nbytes
        head = f"bytes {extent.first_byte} to {extent.needed_nbytes - 1}"
        if extent.storage_nbytes is not None:
            head += f" of {extent.storage_nbytes}"
        if extent.out_of_bounds:
            head += ": OUT OF BOUNDS"
        facts = []
        if visible is None:
            facts.append(record.absent.get("extent.visible_nbytes", "visible bytes not known"))
        elif extent.storage_nbytes:
            share = visible / extent.storage_nbytes
            facts.append(f"{bytes_text(visible)} visible" + (f" ({share:.3g} of the storage)" if share < 1 else ""))
        facts.append(_order(record))
        if extent.self_overlapping:
            steps = zip(record.impl.shape or (), record.impl.stride or (), strict=False)
            expanded = any(step == 0 and size != 1 for size, step in steps)
            facts.append(f"{'expanded' if expanded else 'indices overlap'}: several indices reach one element")
        return Layer("extent", head, ("; ".join(dict.fromkeys(facts)),))

    # -- parts --------------------------------------------------------------------------------------------------

    def focus(self, record: TensorRecord, focus: str) -> TensorPart:
        data, storage = record.data, record.storage
        if data is None or storage is None:
            none = record.absent.get("data", "this kind has no storage of its own")
            return self.titled(record, [Layer(focus, "none", (none,))])
        if focus == "devices":
            facts = {
                "impl": f"{record.impl.device}  (device_opt_)",
                "key set": f"{record.impl.backend}  ({', '.join(record.impl.keys)})",
                "DataPtr": data.device,
                "allocator": f"{storage.allocator_device or 'of no device'}  ({storage.allocator or 'no allocator'})",
            }
        else:
            facts = {
                "storage pointer": f"{data.pointer:#x}",
                "data_ptr": "none"
                if data.data_ptr is None
                else (f"{data.data_ptr:#x} = pointer + {record.impl.storage_offset} x {record.impl.itemsize}"),
                "device": data.device,
                "context": "none" if data.context is None else f"{data.context:#x}",
                "deleter": data.deleter or "none",
                "origin": data.origin.replace("_", " ") + (f" of {data.maker}" if data.maker else ""),
                "storage": f"{self.name('S', storage.address)}, {bytes_text(storage.nbytes)}",
            }
        return self.titled(record, [Layer(key, value) for key, value in facts.items()])

    def table(self, records: Iterable[TensorRecord]) -> Table:
        every = list(records)
        rows = []
        for record in every[:_MOST_ROWS]:
            impl, extent, storage = record.impl, record.extent, record.storage
            rows.append(
                (
                    record.name,
                    describe(record),
                    "?" if extent is None else bytes_text(extent.nbytes),
                    "none" if storage is None else f"{self.name('S', storage.address)} {bytes_text(storage.nbytes)}",
                    self.device(record),
                    "-" if impl.version is None else str(impl.version),
                    ", ".join(_notes(record)),
                )
            )
        rest = _rest(len(every), "tensor", "report.records and to_json() have all")
        headings = ("name", "tensor", "bytes", "storage", "device", "version", "notes")
        return Table(headings, tuple(rows), frozenset({"bytes", "version"}), rest)

    def changes(self, changes: Iterable[Change]) -> Table:
        rows = []
        for change in changes:
            before, after = (self.value(change.field, value) for value in (change.before, change.after))
            rows.append((change.name, change.field, before, after))
        rest = _rest(len(rows), "change", "report.document.changes has all")
        return Table(("name", "field", "before", "now"), tuple(rows[:_MOST_ROWS]), rest=rest)

    def arrays(self, arrays: Sequence[ArrayRecord]) -> Table:
        rows = []
        for array in arrays[:_MOST_ROWS]:
            notes = [] if array.writeable else ["not writeable"]
            if array.owner_type is not None:
                notes.append(f"borrowed from {array.owner_type}")
            notes += [f"also {path}" for path in array.also[:1]]
            kind = f"{array.type} {array.dtype}{shape_text(array.shape)}"
            rows.append((array.name, kind, self.name("D", array.pointer), ", ".join(notes)))
        rest = _rest(len(arrays), "array", "report.document.arrays has all")
        return Table(("array", "type", "address", "notes"), tuple(rows), rest=rest)

    def comparison(self, comparison: Comparison) -> ComparisonPart:
        by_name = {record.name: record for record in self.document.records}
        a, b = by_name.get(comparison.a), by_name.get(comparison.b)
        rows: list[tuple[str, str, str, str]] = []

        def row(fact: str, one: str, two: str, same: bool | None) -> None:
            rows.append((fact, one, two, {True: "same", False: "differs", None: "-"}[same]))

        if a is not None and b is not None:
            for fact, field, same in (
                ("object", "python.address", comparison.same_object),
                ("impl", "impl.address", comparison.same_impl),
                ("storage", "storage.address", comparison.same_storage),
                ("data pointer", "data.data_ptr", comparison.same_pointer),
                ("version counter", "impl.version_counter", comparison.same_version_counter),
            ):
                row(fact, self.value(field, field_of(a, field)), self.value(field, field_of(b, field)), same)
            for fact, field in (
                ("version", "impl.version"), ("dtype", "impl.dtype"), ("shape", "impl.shape"),
                ("stride", "impl.stride"), ("offset", "impl.storage_offset"), ("device", "impl.device"),
            ):  # fmt: skip
                one, two = field_of(a, field), field_of(b, field)
                row(fact, self.value(field, one), self.value(field, two), one == two)
            one, two = self.reached(a), self.reached(b)
            row("bytes reached", one, two, one == two)
        if comparison.same_memory_order and any(c.field == "impl.stride" for c in comparison.differences):
            rows.append(("memory order", "", "", "same: strides differ in dimensions of size 1 alone"))
        if comparison.relation is not None:
            shared = "" if comparison.shared_nbytes is None else f", {comparison.shared_nbytes} B in common"
            rows.append(("overlap", "", "", f"{comparison.relation.replace('_', ' ')}{shared}"))
        headings = ("", comparison.a, comparison.b, " ") if comparison.a != comparison.b else ("", "a", "b", " ")
        return ComparisonPart(Phrase(comparison.verdict, "strong"), Table(headings, tuple(rows)))

    def sharing(self) -> Iterator[Table | Phrase]:
        document = self.document
        if not document.shared_storages and not document.shared_ranges:
            empty = "; ".join(document.notes)
            yield Phrase(empty or "no storage is shared", "attention" if empty else "good")
            return
        if document.shared_storages:
            rows = [
                (
                    self.name("S", shared.storage),
                    bytes_text(shared.nbytes),
                    "?" if shared.dead_nbytes is None else bytes_text(shared.dead_nbytes),
                    shared.overlap.replace("_", " "),
                    _members(shared.members, shared.unreached_owners),
                )
                for shared in document.shared_storages[:_MOST_ROWS]
            ]
            rest = _rest(len(document.shared_storages), "storage", "report.storages has all")
            headings = ("storage", "bytes", "dead", "overlap", "members")
            yield Table(headings, tuple(rows), frozenset({"bytes", "dead"}), rest)
        if document.shared_ranges:
            ranges = [
                (
                    ", ".join(self.name("S", storage) for storage in shared.storages[:4]) or "arrays",
                    bytes_text(shared.nbytes),
                    shared.overlap.replace("_", " "),
                    _members(shared.members, 0) + (f"; mappings of {shared.handle}" if shared.handle else ""),
                )
                for shared in document.shared_ranges[:_MOST_ROWS]
            ]
            rest = _rest(len(document.shared_ranges), "range", "report.ranges has all")
            yield Phrase("several storages over one memory", "strong")
            yield Table(("storages", "bytes", "overlap", "members"), tuple(ranges), frozenset({"bytes"}), rest)

    def reached(self, record: TensorRecord) -> str:
        extent = record.extent
        if extent is None or not extent.needed_nbytes:
            return "none"
        return f"{extent.first_byte} to {extent.needed_nbytes - 1}"

    def same_addresses(self, changes: Iterable[Change]) -> str | None:
        """Say what an equal address does not prove, where one was compared and found equal."""
        other = {change.name for change in changes if change.field in ("impl.address", "record")}
        if all(record.name in other for record in self.document.records):
            return None
        return "an equal address may be that of a new tensor: freed memory is used again"

    def value(self, field: str, value: Any) -> str:
        if value is None:
            return "none"
        if field in _ADDRESSES:
            return "null pointer" if value == 0 else self.name(_ADDRESSES[field], value)
        if field.startswith("extent.") and type(value) is int and field.endswith("nbytes"):
            return bytes_text(value)
        if field in ("impl.shape", "impl.stride"):
            return shape_text(tuple(value))
        return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)

    def summary(self) -> Iterator[Phrase]:
        document = self.document
        storages = {r.storage.address: r for r in flat(document.records) if r.storage is not None}
        with_memory = [r.storage.nbytes for r in storages.values() if r.storage and r.data and r.data.pointer]
        total = sum(nbytes for nbytes in with_memory if isinstance(nbytes, int))
        counted = [plural(len(document.records), "tensor")]
        if with_memory or not storages:
            counted.append(f"{plural(len(with_memory), 'storage')}, {bytes_text(total)}")
        if others := len(storages) - len(with_memory):
            counted.append(f"{plural(others, 'storage')} without memory")
        if document.arrays:
            counted.append(plural(len(document.arrays), "array"))
        if document.focus == "sharing":
            yield Phrase(", ".join(counted))  # no rule was asked
            return
        if document.focus == "holders":
            yield from holders_summary(document.held)
            return
        if document.focus == "saved" and document.graph is not None:
            yield from graph_summary(document.graph)  # no rule was asked
            return
        if _has_part(document):
            yield from () if document.growth is None else growth_summary(document.growth)
            yield from () if document.graph is None else graph_summary(document.graph)
            yield from () if document.placement is None else placement_summary(document.placement)
            yield from () if document.load is None else load_summary(document.load)
            yield from dtensors_summary(document) if document.focus == "dtensors" else ()
            yield from () if document.tracked is None else tracked_summary(document.tracked)
            yield from (Phrase(_made(document.mismatches)),) if document.mismatches else ()
            yield Phrase(": ")
        else:
            yield Phrase(f"{totals(document) if document.files else ', '.join(counted)}: ")
        counts = [(s, sum(f.severity == s for f in document.findings)) for s in SEVERITIES]
        found = [Phrase(_counted(count, severity), severity) for severity, count in counts if count]
        for number, phrase in enumerate(found):
            if number:
                yield Phrase(", ")
            yield phrase
        if not found and not document.records and not document.arrays and not _has_part(document):
            yield Phrase("nothing was checked", "attention")
        elif not found:
            yield Phrase("no findings", "good")

    def remarks(self) -> Iterator[Phrase]:
        document = self.document
        if document.truncated is not None:
            cut = f"cut after {plural(document.truncated.max_tensors, 'tensor')}: raise max_tensors to read all"
            yield Phrase(cut, "attention")
        for note in document.notes if document.graph is not None or document.mismatches else ():
            yield Phrase(note, "attention")
        for unread in document.unread:
            yield Phrase(f"not looked into: {unread.name}: {unread.reason}", "attention")
        for entry in document.suppressed:
            reason = f" ({entry.reason})" if entry.reason else ""
            yield Phrase(f"suppressed {entry.count} {entry.code} by {entry.by}{reason}", "dim")
        for unused in document.unused_ignores:
            yield Phrase(f"unused ignore[{unused.code}] at {unused.file}:{unused.line}", "attention")


def _remembered(history: History) -> Iterator[str]:
    """Say where memory came from, and what wrote to it."""
    by = history.op or "no operator that was followed"
    at = f" at {history.where}{' (in its backward)' if history.backward else ''}" if history.where else ""
    yield f"made by {by}{at}, {time_text(history.age_seconds)} ago (recorded)"
    if history.writes and history.last_write_seconds is not None:
        at = f" at {history.last_write_where}" if history.last_write_where else ""
        times = f"written {plural(history.writes, 'time')}"
        yield f"{times}, last by {history.last_write_op}{at}, {time_text(history.last_write_seconds)} ago (recorded)"


def _has_part(document: Document) -> bool:
    """Tell whether the report is of something else than tensors, with a line of its own on the whole."""
    parts = (document.growth, document.graph, document.placement, document.load, document.tracked)
    return any(part is not None for part in parts) or bool(document.mismatches) or document.focus == "dtensors"


def _made(mismatches: Sequence[Mismatch]) -> str:
    made = sum(one.error is None for one in mismatches)
    return f"{made} of {plural(len(mismatches), 'way')} made"


def _counted(count: int, severity: Severity) -> str:
    return (
        f"{count} {severity}" if severity == "info" else plural(count, severity)
    )  # as "information", it has no plural


def _members(members: Sequence[SharedMember], unreached: int) -> str:
    named = [member for member in members if member.named]
    shown = [" = ".join((member.name, *member.also[:1])) for member in named[:_MOST_MEMBERS]]
    for more, word in ((len(named) - len(shown), "more"), (len(members) - len(named), "unnamed")):
        if more:
            shown.append(f"{more} {word}")
    if unreached:
        shown.append(f"{plural(unreached, 'owner')} that no path reaches")
    return ", ".join(shown)


def claims_memory(record: TensorRecord) -> bool:
    """Tell whether a tensor has elements that should lie in memory of its own."""
    return record.kind in WITH_MEMORY and record.extent is not None and bool(record.extent.nbytes)


def flat(records: Iterable[TensorRecord]) -> Iterator[TensorRecord]:
    """Answer every record, those inside another one after it."""
    for record in records:
        yield record
        yield from flat(inner.record for inner in record.inner)


def _geometry(record: TensorRecord) -> Geometry | None:
    impl, extent = record.impl, record.extent
    if extent is None or extent.storage_nbytes is None or record.data is None or record.data.pointer == 0:
        return None
    if extent.contiguous and extent.visible_nbytes == extent.storage_nbytes and not extent.out_of_bounds:
        return None
    offset, sizes, steps = impl.storage_offset, _integers(impl.shape), _integers(impl.stride)
    if not isinstance(impl.numel, int) or impl.numel == 0 or not isinstance(offset, int) or not impl.itemsize:
        return None
    if impl.dtype in _PACKED:
        return None
    if sizes is None or steps is None or len(sizes) != len(steps):
        return None
    return Geometry(sizes, steps, offset, extent.storage_nbytes // impl.itemsize)


def _rest(count: int, noun: str, where: str) -> str | None:
    return None if count <= _MOST_ROWS else f"... and {plural(count - _MOST_ROWS, f'more {noun}')}: {where}"


def _integers(values: tuple[int | str, ...] | None) -> list[int] | None:
    """Answer the values where all of them are numbers."""
    numbers = [value for value in values or () if isinstance(value, int)]
    return numbers if values is not None and len(numbers) == len(values) else None


def _order(record: TensorRecord) -> str:
    extent, impl = record.extent, record.impl
    assert extent is not None
    if extent.memory_format is None:
        return record.absent.get("extent.memory_format", "order not known")
    if extent.contiguous:
        return "row-major (contiguous)"
    order = {
        "channels_last": "channels last",
        "channels_last_3d": "channels last 3d",
        "permuted": "dense in another order of the dimensions",
        "strided": "with gaps or overlap",
    }[extent.memory_format]
    return f"stride {shape_text(impl.stride)}: not row-major, {order}"


def _notes(record: TensorRecord) -> Iterator[str]:
    if record.kind != "strided":
        yield record.kind.replace("_", " ")
    if record.impl.requires_grad:
        yield "grad"
    if record.impl.is_view:
        yield "view"
    if record.extent is not None and record.extent.contiguous is False:
        yield "not row-major"
    if record.data is not None and record.data.maker:
        yield record.data.maker
    others = [path for path in record.also if ".param_groups[" not in path]  # that an optimizer has it is no news
    if others:
        yield f"also {others[0]}" + (f" and {len(others) - 1} more" if len(others) > 1 else "")
