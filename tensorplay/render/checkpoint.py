"""The part of a report that a checkpoint alone has: its files, and a row for each tensor with what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from tensorplay.layers import CheckpointFile, Document, TensorRecord
from tensorplay.render.parts import Phrase, Table
from tensorplay.storages import StorageUse, parts, storages_of
from tensorplay.words import bytes_text, describe, plural, visible

__all__ = ["Rows", "checkpoint", "totals"]

_NAME_COLUMNS = 44
"""What a name gets before the notes do."""

_Name = Callable[[str, int], str]


class Rows(NamedTuple):
    """Which rows of the table are shown, and in what order."""

    sort: Literal["file", "name", "bytes", "wasted"] = "file"
    filters: tuple[str, ...] = ()
    limit: int = 1_000


class _Row(NamedTuple):
    record: TensorRecord
    nbytes: int
    storages: list[StorageUse]
    wasted_nbytes: int | None
    exact: bool


def checkpoint(document: Document, rows: Rows, name: _Name) -> tuple[Table | Phrase, ...]:
    """Answer the files and the table of tensors.

    Args:
        document: a report with files.
        rows: what to show of the table.
        name: answers the short name of a storage by its address.
    """
    files = document.files
    shown: list[Table | Phrase] = [_files(files) if len(files) > 1 else _file(files[0])]
    shown += [
        Phrase(f"note: {visible(file.path)}: {note}" if len(files) > 1 else f"note: {note}", "attention")
        for file in files
        for note in file.notes
    ]
    uses = storages_of(document.records)
    for address in uses:
        name("S", address)  # numbered as they lie in the files, whatever the order of the rows
    chosen = [_row(record, file, uses) for file, record in _by_file(document) if _matches(record, file, rows.filters)]
    if rows.sort == "name":
        chosen.sort(key=lambda row: row.record.name)
    elif rows.sort == "bytes":
        chosen.sort(key=lambda row: -row.nbytes)
    elif rows.sort == "wasted":
        chosen.sort(key=lambda row: -(row.wasted_nbytes or 0))
    shown += [Phrase(""), _table(chosen[: rows.limit], name)]
    if not chosen:
        shown.append(Phrase(f"no tensor's name matches {' or '.join(rows.filters)}", "attention"))
    elif len(chosen) > rows.limit:
        rest = f"... and {plural(len(chosen) - rows.limit, 'more tensor')}: raise --limit, or choose with --filter"
        shown.append(Phrase(rest, "dim"))
    if rows.filters and chosen:
        shown.append(Phrase(f"{len(chosen)} of {plural(len(document.records), 'tensor')} match", "dim"))
    shown += [Phrase(""), Phrase(_bytes_of(files))]
    if any(file.wasted_nbytes and file.format != "safetensors" for file in files):
        shown.append(Phrase("torch.save writes the whole storage of a view: save its clone() instead", "dim"))
    return tuple(shown)


def totals(document: Document) -> str:
    """Answer what all files hold, in numbers."""
    files = document.files
    return (
        f"{plural(len(files), 'file')}, {plural(len(document.records), 'tensor')}, "
        f"{plural(sum(file.storages for file in files), 'storage')}"
    )


def _bytes_of(files: tuple[CheckpointFile, ...]) -> str:
    stored = sum(file.storage_nbytes for file in files)
    wasted = sum(file.wasted_nbytes or 0 for file in files)
    share = f" ({100 * wasted / stored:.3g} %)" if wasted else ""
    words = f"{bytes_text(wasted)} wasted{share}"
    if any(file.wasted_nbytes is None for file in files):
        words = "wasted bytes not known"
    elif not all(file.wasted_exact for file in files):
        words = f"at least {words}"
    words = f"{bytes_text(sum(file.tensor_nbytes for file in files))} in tensors, {bytes_text(stored)} stored, {words}"
    rest = sum(
        max(0, (file.data_nbytes or 0) - file.storage_nbytes) for file in files if file.wasted_nbytes is not None
    )
    return words + (f"; {bytes_text(rest)} more belong to no tensor found" if rest else "")


def _file(file: CheckpointFile) -> Phrase:
    return Phrase(f"{visible(file.path)}  {file.format}, {bytes_text(file.nbytes)}", "strong")


def _files(files: tuple[CheckpointFile, ...]) -> Table:
    rows = [
        (
            visible(file.path),
            file.format,
            bytes_text(file.nbytes),
            str(file.tensors),
            str(file.storages),
            bytes_text(file.storage_nbytes),
            _wasted_text(file.wasted_nbytes, file.wasted_exact),
        )
        for file in files
    ]
    headings = ("file", "format", "bytes", "tensors", "storages", "stored", "wasted")
    return Table(headings, tuple(rows), frozenset(headings[2:]))


def _table(rows: list[_Row], name: _Name) -> Table:
    cells = []
    for row in rows:
        storages = [f"{name('S', storage.address)} {bytes_text(storage.nbytes)}" for storage in row.storages[:3]]
        if len(row.storages) > 3:
            storages.append(f"and {len(row.storages) - 3} more")
        cells.append(
            (
                visible(row.record.name),
                describe(row.record),
                bytes_text(row.nbytes),
                ", ".join(storages) or "none",
                _wasted_text(row.wasted_nbytes, row.exact),
                ", ".join(_notes(row, name)),
            )
        )
    width = min(_NAME_COLUMNS, max((len(row.record.name) for row in rows), default=0))
    headings = ("name", "tensor", "bytes", "storage", "wasted", "notes")
    return Table(headings, tuple(cells), frozenset({"bytes", "wasted"}), first_width=width)


def _wasted_text(nbytes: int | None, exact: bool) -> str:
    if nbytes is None:
        return "?"
    if not nbytes:
        return "-"
    return f"{'' if exact else '>= '}{bytes_text(nbytes)}"


def _by_file(document: Document) -> Iterator[tuple[CheckpointFile, TensorRecord]]:
    records = iter(document.records)
    for file in document.files:
        for _, record in zip(range(file.tensors), records, strict=False):
            yield file, record


def _matches(record: TensorRecord, file: CheckpointFile, filters: tuple[str, ...]) -> bool:
    """Answer whether a name of the tensor fits, with or without the file in front of it."""
    names = (record.name, *record.also)
    return not filters or any(
        fnmatchcase(name, pattern) or (":" in name and fnmatchcase(_bare(name, file), pattern))
        for name in names
        for pattern in filters
    )


def _bare(name: str, file: CheckpointFile) -> str:
    return name.removeprefix(f"{file.path.rpartition('/')[2]}:")


def _row(record: TensorRecord, file: CheckpointFile, uses: dict[int, StorageUse]) -> _Row:
    found: dict[int, StorageUse] = {}
    nbytes = 0
    for _, part in parts(record):
        nbytes += (part.extent.nbytes if part.extent is not None else None) or 0
        if part.storage is not None and part.storage.address in uses:
            found[part.storage.address] = uses[part.storage.address]
    wasted = [storage.wasted() for storage in found.values()]
    total = None if file.wasted_nbytes is None else sum(wasted_nbytes for wasted_nbytes, _ in wasted)
    return _Row(record, nbytes, list(found.values()), total, all(exact for _, exact in wasted))


def _notes(row: _Row, name: _Name) -> Iterator[str]:
    record = row.record
    if record.kind != "strided":
        yield record.kind.replace("_", " ")
    extent = record.extent
    partial = extent is not None and record.kind != "nested" and extent.nbytes != extent.storage_nbytes
    if extent is not None and partial and row.storages and extent.needed_nbytes:
        yield f"view of bytes {extent.first_byte} to {extent.needed_nbytes - 1}"
    if extent is not None and extent.contiguous is False:
        yield "not row-major"
    for storage in row.storages:
        other = next((other for other in storage.names if other != record.name), None)
        if other is not None and len(row.storages) == 1:
            more = len(storage.names) - (1 if record.name in storage.names else 0) - 1
            rest = f" and {more} more" if more else ""
            yield f"shares {name('S', storage.address)} with {other}{rest}"
    if record.also:
        yield f"also {record.also[0]}" + (f" and {len(record.also) - 1} more" if len(record.also) > 1 else "")
