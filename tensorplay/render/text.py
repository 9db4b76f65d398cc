"""A report as terminal text."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Iterable, Iterator
from typing import IO, Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from tensorplay.layers import SEVERITIES, WITH_MEMORY, Change, Document, Finding, TensorRecord
from tensorplay.render.checkpoint import Rows, checkpoint, totals
from tensorplay.render.strides import strides_picture
from tensorplay.words import bytes_text, describe, plural, shape_text

__all__ = ["print_report", "render", "render_finding"]

_MOST_TREES = 3
_MOST_ROWS = 50
# What a terminal would act on instead of showing it: names may hold anything.
_CONTROL = re.compile("(\x1b\\[[0-9;]*m)|[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
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
_COLORS = {"error": "bold red", "warning": "bold yellow", "info": "bold cyan"}


class _AsciiBuffer(io.StringIO):
    """A string buffer that tells rich to draw with ASCII characters."""

    encoding = "ascii"


def render(
    document: Document,
    *,
    width: int | None = None,
    color: bool = False,
    ascii: bool = False,
    addresses: bool = False,
    rows: Rows | None = None,
) -> str:
    """Answer a report as text; arguments as for Report.text(), and the rows to show of a checkpoint."""
    buffer = _AsciiBuffer() if ascii else io.StringIO()
    columns = width or shutil.get_terminal_size((100, 24)).columns
    _console(buffer, columns, color).print(_Writer(document, columns, ascii, addresses, rows or Rows()).all())
    return _finish(buffer.getvalue(), color)


def print_report(document: Document, file: IO[str]) -> None:
    """Write a report to a stream: colours where it is a terminal and NO_COLOR is not set."""
    ascii = not str(getattr(file, "encoding", None) or "utf-8").lower().startswith("utf")
    terminal = Console(file=file)
    color = terminal.is_terminal and not terminal.no_color
    file.write(
        render(document, width=terminal.width if terminal.is_terminal else None, color=color, ascii=ascii) + "\n"
    )
    file.flush()


def render_finding(finding: Finding, *, width: int = 100) -> str:
    """Answer one finding as text."""
    buffer = io.StringIO()
    _console(buffer, width, color=False).print(_finding(finding))
    return _finish(buffer.getvalue(), color=False)


def _console(file: IO[str], width: int, color: bool) -> Console:
    # Names hold brackets and colons: nothing in them is markup.
    return Console(
        file=file,
        width=width,
        force_terminal=color,
        no_color=not color,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )


def _finish(text: str, color: bool) -> str:
    """Write control characters and lone surrogates out, trim the lines."""

    def shown(match: re.Match[str]) -> str:
        return match[0] if color and match[1] else match[0].encode("unicode_escape").decode()

    return "\n".join(line.rstrip() for line in _CONTROL.sub(shown, text).rstrip("\n").split("\n"))


class _Names:
    """Short names for addresses, in the order they are met: I1, I2, S1."""

    def __init__(self, hexadecimal: bool) -> None:
        self._hexadecimal = hexadecimal
        self._known: dict[tuple[str, int], str] = {}
        self._counts: dict[str, int] = {}

    def __call__(self, letter: str, address: int | None) -> str:
        if address is None:
            return "none"
        if self._hexadecimal:
            return f"{address:#x}"
        key = (letter, address)
        if key not in self._known:
            self._counts[letter] = self._counts.get(letter, 0) + 1
            self._known[key] = f"{letter}{self._counts[letter]}"
        return self._known[key]


class _Picture:
    """The strides picture, as wide as the place it is put: a record inside another one stands further right."""

    def __init__(self, shape: list[int], stride: list[int], offset: int, storage_cells: int, ascii: bool) -> None:
        self.geometry = (shape, stride, offset, storage_cells)
        self.ascii = ascii

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = strides_picture(*self.geometry, width=options.max_width, ascii=self.ascii)
        yield Text("\n".join(lines), no_wrap=True, overflow="crop")


class _Writer:
    def __init__(self, document: Document, width: int, ascii: bool, addresses: bool, rows: Rows) -> None:
        self.document = document
        self.rows = rows
        self.width = width
        self.ascii = ascii
        self.name = _Names(addresses)
        # Who in this report sits over which storage: the owners that can be named.
        self.over: dict[int, dict[int, str]] = {}
        self.views: dict[int, list[str]] = {}
        for record in _flat(document.records):
            if record.impl.base is not None:
                self.views.setdefault(record.impl.base, []).append(record.name)
            if record.storage is not None:
                self.over.setdefault(record.storage.address, {}).setdefault(record.impl.address, record.name)

    def all(self) -> RenderableType:
        document = self.document
        parts: list[RenderableType] = []
        if document.label is not None:
            parts.append(Text(document.label, style="bold"))
        if document.changes is not None:
            parts.append(self.changes(document.changes))
            if note := self.same_addresses(document.changes):
                parts.append(Text(note, style="dim"))
        elif document.focus is not None:
            parts += [self.focus(record, document.focus) for record in document.records]
        elif document.files:
            parts.append(checkpoint(document, self.rows, self.name))
        elif len(document.records) <= _MOST_TREES:
            parts += [self.tree(record) for record in document.records]
        else:
            parts.append(self.table(document.records))
        parts += [Group("", _finding(finding)) for finding in _sorted(document.findings)]
        parts.append(self.summary())
        return Group(*parts)

    # -- one tensor ---------------------------------------------------------------------------------------------

    def tree(self, record: TensorRecord) -> Tree:
        tree = Tree(self.title(record), guide_style="dim")
        if record.python is not None:
            tree.add(self.python(record))
        tree.add(self.impl(record))
        if record.storage is not None and record.data is not None:
            tree.add(self.storage(record))
            tree.add(self.data(record))
        else:
            tree.add(_layer("storage", f"none: {record.absent.get('storage', 'this kind has none')}"))
        node = tree.add(self.extent(record))
        if picture := self.picture(record):
            node.add(picture)
        for inner in record.inner:
            tree.add(self.tree(inner.record))
        return tree

    def title(self, record: TensorRecord) -> Text:
        text = Text.assemble((record.name, "bold"), "  ")
        kind = "" if record.kind == "strided" else f"{record.kind.replace('_', ' ')} "
        cls = "" if record.python is None else f"{record.python.type} "
        text.append(f"{kind}{cls}{describe(record)}")
        if record.extent is not None:
            text.append(f"  {bytes_text(record.extent.nbytes)}")
            if record.extent.storage_nbytes not in (None, record.extent.nbytes):
                text.append(f" of a storage of {bytes_text(record.extent.storage_nbytes)}")
        if record.also:
            text.append(f"  also {', '.join(record.also[:3])}{' ...' if len(record.also) > 3 else ''}", style="dim")
        return text

    def python(self, record: TensorRecord) -> Table:
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
        return _layer("python", f"{self.name('P', python.address)} {module}{python.type}  {', '.join(facts)}")

    def impl(self, record: TensorRecord) -> Table:
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
        return _layer("impl", head, lines)

    def impl_owners(self, record: TensorRecord) -> str:
        impl = record.impl
        owners = ["the Python object"] if record.python is not None and record.python.slot_is_self else []
        views = [f"{name} (a view's base)" for name in self.views.get(impl.address, ())]
        owners += views if len(views) <= 3 else [*views[:2], f"{len(views) - 2} more views"]
        known = len(owners) if len(views) <= 3 else len(owners) - 3 + len(views)
        if impl.use_count > known:
            owners.append(plural(impl.use_count - known, "more owner" if owners else "owner in C++"))
        return _listed(owners)

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
        labels = {impl.device, impl.backend, record.data.device if record.data is not None else impl.device}
        if len(labels - {None}) <= 1:
            return impl.device or impl.backend or "no device"
        data = "" if record.data is None else f", DataPtr {record.data.device}"
        return f"{impl.device} (key set {impl.backend}{data})"

    def storage(self, record: TensorRecord) -> Table:
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
        return _layer("storage", f"{self.name('S', storage.address)} {storage.type}", lines)

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
        return _listed(named)

    def data(self, record: TensorRecord) -> Table:
        data = record.data
        assert data is not None
        where = "null pointer" if data.pointer == 0 else f"{self.name('D', data.pointer)} on {data.device}"
        extent = record.extent
        claims = record.kind in WITH_MEMORY and extent is not None and bool(extent.nbytes)
        maker = f" of {data.maker}" if data.maker else ""
        origin = {
            "none": "though there are elements to read" if claims else "nothing to read",
            "cpu_allocator": "freed by PyTorch's CPU allocator",
            "borrowed": "borrowed: nobody here frees it",
            "callback": f"foreign memory{maker}, given back by a callback",
            "mapped": "mapped memory",
            "storage_slice": "part of another storage, which it keeps alive",
            "copy_on_write": "copy-on-write memory",
            "other": f"freed by {data.deleter}",
        }[data.origin]
        return _layer("data", f"{where}, {origin}")

    def extent(self, record: TensorRecord) -> Table:
        extent = record.extent
        if extent is None:
            return _layer("extent", f"none: {record.absent.get('extent', 'not known')}")
        if extent.needed_nbytes is None:
            return _layer("extent", f"none: {record.absent.get('extent.needed_nbytes', 'not known')}")
        if extent.needed_nbytes == 0:
            return _layer("extent", "no elements: no byte is reached")
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
        return _layer("extent", head, ["; ".join(dict.fromkeys(facts))])

    def picture(self, record: TensorRecord) -> _Picture | None:
        impl, extent = record.impl, record.extent
        if extent is None or extent.storage_nbytes is None or record.data is None or record.data.pointer == 0:
            return None
        if extent.contiguous and extent.visible_nbytes == extent.storage_nbytes and not extent.out_of_bounds:
            return None
        offset, sizes, steps = impl.storage_offset, _integers(impl.shape), _integers(impl.stride)
        if not isinstance(impl.numel, int) or impl.numel == 0 or not isinstance(offset, int) or not impl.itemsize:
            return None
        if sizes is None or steps is None or len(sizes) != len(steps):
            return None
        return _Picture(sizes, steps, offset, extent.storage_nbytes // impl.itemsize, self.ascii)

    # -- parts --------------------------------------------------------------------------------------------------

    def focus(self, record: TensorRecord, focus: str) -> RenderableType:
        tree = Tree(self.title(record), guide_style="dim")
        data, storage = record.data, record.storage
        if data is None or storage is None:
            tree.add(_layer(focus, "none", [record.absent.get("data", "this kind has no storage of its own")]))
            return tree
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
        for key, value in facts.items():
            tree.add(Text.assemble((f"{key:<16}", "bold"), value))
        return tree

    def table(self, records: Iterable[TensorRecord]) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for header in ("name", "tensor", "bytes", "storage", "device", "version", "notes"):
            table.add_column(header, justify="right" if header in ("bytes", "version") else "left", overflow="fold")
        rows = list(records)
        for record in rows[:_MOST_ROWS]:
            impl, extent, storage = record.impl, record.extent, record.storage
            table.add_row(
                record.name,
                describe(record),
                "?" if extent is None else bytes_text(extent.nbytes),
                "none" if storage is None else f"{self.name('S', storage.address)} {bytes_text(storage.nbytes)}",
                self.device(record),
                "-" if impl.version is None else str(impl.version),
                ", ".join(_notes(record)),
            )
        if len(rows) <= _MOST_ROWS:
            return table
        rest = f"... and {plural(len(rows) - _MOST_ROWS, 'more tensor')}: report.records and to_json() have all"
        return Group(table, Text(rest, style="dim"))

    def changes(self, changes: Iterable[Change]) -> RenderableType:
        rows = list(changes)
        if not rows:
            return Text("nothing changed since the last report with this label")
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for header in ("name", "field", "before", "now"):
            table.add_column(header, overflow="fold")
        for change in rows:
            before, after = (self.value(change.field, value) for value in (change.before, change.after))
            table.add_row(change.name, change.field, before, after)
        return table

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

    def summary(self) -> RenderableType:
        document = self.document
        storages = {r.storage.address: r for r in _flat(document.records) if r.storage is not None}
        with_memory = [r.storage.nbytes for r in storages.values() if r.storage and r.data and r.data.pointer]
        total = sum(nbytes for nbytes in with_memory if isinstance(nbytes, int))
        counted = [plural(len(document.records), "tensor")]
        if with_memory or not storages:
            counted.append(f"{plural(len(with_memory), 'storage')}, {bytes_text(total)}")
        if others := len(storages) - len(with_memory):
            counted.append(f"{plural(others, 'storage')} without memory")
        text = Text(f"{totals(document) if document.files else ', '.join(counted)}: ")
        counts = [(s, sum(f.severity == s for f in document.findings)) for s in SEVERITIES]
        found = [(f"{count} {severity}", _COLORS[severity]) for severity, count in counts if count]
        for number, (words, style) in enumerate(found):
            text.append(", " if number else "").append(words, style=style)
        if not found:
            text.append("no findings", style="green")
        lines: list[RenderableType] = [text]
        if document.truncated is not None:
            cut = f"cut after {plural(document.truncated.max_tensors, 'tensor')}: raise max_tensors to read all"
            lines.append(Text(cut, style="yellow"))
        for unread in document.unread:
            lines.append(Text(f"not looked into: {unread.name}: {unread.reason}", style="yellow"))
        for entry in document.suppressed:
            reason = f" ({entry.reason})" if entry.reason else ""
            lines.append(Text(f"suppressed {entry.count} {entry.code} by {entry.by}{reason}", style="dim"))
        for unused in document.unused_ignores:
            lines.append(Text(f"unused ignore[{unused.code}] at {unused.file}:{unused.line}", style="yellow"))
        return Group(*lines)


def _flat(records: Iterable[TensorRecord]) -> Iterator[TensorRecord]:
    for record in records:
        yield record
        yield from _flat(inner.record for inner in record.inner)


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def _layer(word: str, head: str, lines: Iterable[str] = ()) -> Table:
    # A grid, so that long lines wrap under their own beginning.
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(width=8, no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    grid.add_row(word, Text("\n".join([head, *filter(None, lines)])))
    return grid


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


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


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


def _finding(finding: Finding) -> RenderableType:
    style = _COLORS[finding.severity]
    head = Text.assemble((finding.code, style), " ", (finding.headline, "bold"), "  ", (finding.severity, style))
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows = {"tensor": f"{finding.where.name}  {finding.subject}"}
    if finding.where.file is not None:
        rows["where"] = f"{finding.where}  ({finding.where.source})"
    rows |= {"why": finding.why, "fix": finding.fix, "source": finding.source}
    for key, value in rows.items():
        table.add_row(key, Text(value))
    return Group(head, Padding(table, (0, 0, 0, 2)))
