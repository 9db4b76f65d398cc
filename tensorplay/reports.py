"""Reports: what was read on its way into the model, and the objects that calls answer with."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

import msgspec

from tensorplay.callers import Caller
from tensorplay.classes import class_name
from tensorplay.layers import (
    SCHEMA_VERSION,
    SEVERITIES,
    DataLayer,
    Document,
    Extent,
    Finding,
    History,
    ImplLayer,
    InnerRecord,
    Provenance,
    PythonLayer,
    Severity,
    StorageLayer,
    TensorRecord,
)
from tensorplay.words import needs_ascii, plural

if TYPE_CHECKING:
    from tensorplay.arrays import Owner
    from tensorplay.selection import Selection

__all__ = ["ROOTS", "Answer", "Read", "Report", "Verdict", "inner_model", "name_roots"]


_AnyReport = TypeVar("_AnyReport", bound="Report")


class Read:
    """A native record on its way into a report, with the paths it was found under."""

    __slots__ = ("also", "history", "is_parameter", "name", "producer", "record")

    def __init__(
        self,
        name: str,
        record: Any,
        also: Sequence[str] = (),
        producer: Owner | None = None,
        is_parameter: bool = False,
    ) -> None:
        self.name = name
        self.record = record
        self.also = also
        self.history: History | None = None
        """What a running tracker knows of its memory, where that was asked."""
        self.producer = producer
        """Who lends the tensor its memory, where its deleter says so and check() asked."""
        self.is_parameter = is_parameter
        """Whether it is an ``nn.Parameter``."""

    def lenders(self, record: Any) -> tuple[int, ...]:
        """Answer the ``id()`` of the objects that lend a record's memory: of this one, or of one inside it."""
        if self.producer is not None and record is self.record:
            return self.producer.ids
        producer = None if record.data is None else record.data.producer
        return () if producer is None else (producer,)

    def model(self) -> TensorRecord:
        """Copy the native record into the model."""
        return _model(self.record, self.name, tuple(self.also), self.history)


ROOTS = ("\0x", "\0y")
"""What the arguments of a call are called until somebody asks for their names in the caller's source. No path of the
walk holds a control character."""


def name_roots(reads: Iterable[Read], caller: Caller) -> list[Read]:
    """Call every path after the expression that was handed in: ``x[0]`` becomes ``batch[0]``."""
    names = {root: caller.argument(root[1:], index) for index, root in enumerate(ROOTS)}

    def rename(path: str) -> str:
        for root, name in names.items():
            path = path.replace(root, name)  # anywhere in it: state[model.weight].step
        return path

    renamed = []
    for read in reads:
        also = [rename(path) for path in read.also]
        one = Read(rename(read.name), read.record, also, read.producer, read.is_parameter)
        one.history = read.history
        renamed.append(one)
    return renamed


def _model(native: Any, name: str, also: tuple[str, ...] = (), history: History | None = None) -> TensorRecord:
    inner = (InnerRecord(role=role, record=_model(record, f"{name}.{role}")) for role, record in native.inner)
    return TensorRecord(
        name=name,
        kind=native.kind,
        python=_copy(native.python, PythonLayer),
        impl=msgspec.convert(native.impl, ImplLayer, from_attributes=True),
        storage=_copy(native.storage, StorageLayer),
        data=_copy(native.data, DataLayer),
        extent=_copy(native.extent, Extent),
        absent=native.absent,
        inner=tuple(inner),
        also=also,
        history=history,
    )


def inner_model(read: Read, native: Any) -> TensorRecord:
    """Copy a record found inside another one, under the path of the outer one."""
    paths = [(read.name, read.record)]
    for path, record in paths:
        if record is native:
            return _model(native, path)
        paths += [(f"{path}.{role}", inner) for role, inner in record.inner]
    raise ValueError("the record is not part of this read")


def _copy(native: Any, model: type[Any]) -> Any:
    return None if native is None else msgspec.convert(native, model, from_attributes=True)


class Report:
    """Records, findings and provenance of one question.

    Holds no reference to any tensor. ``str(report)`` is the terminal text; ``to_json()`` the published schema.
    """

    __slots__ = ("_caller", "_document", "_fields", "_findings", "_made", "_pending", "_reads")

    about: ClassVar[tuple[str, ...]] = ()
    """What the documents of such reports are about, ``Document.focus``; empty where that may be anything."""

    def __init__(
        self,
        reads: list[Read],
        findings: tuple[Finding, ...] = (),
        *,
        caller: Caller | None = None,
        pending: Callable[[list[Read]], tuple[list[Read], Selection]] | None = None,
        **fields: Any,
    ) -> None:
        self._reads = reads
        # Explaining takes names from the source: left until somebody looks.
        self._pending = pending
        self._caller = caller
        self._fields = fields
        self._made = (time.time(), os.getpid())
        self._document: Document | None = None
        self._findings = findings

    @classmethod
    def from_document(cls: type[_AnyReport], document: Document) -> _AnyReport:
        """Wrap a stored document."""
        report = cls([], document.findings)
        report._document = document
        return report

    @classmethod
    def from_json(cls: type[_AnyReport], text: str | bytes) -> _AnyReport:
        """Read a report back from its JSON; call it on the class of a special report to get one of those.

        Raises:
            TypeError: it is no text.
            ValueError: the text is no report, or one of a newer schema; a verdict or fixes, which hold a report; a
                report on something else than this class is about.
        """
        if not isinstance(text, (str, bytes, bytearray, memoryview)):
            raise TypeError(f"{cls.__name__}.from_json() takes JSON as str or bytes, got {class_name(type(text))}")
        try:
            version = msgspec.json.decode(text, type=_Version).schema_version
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a TensorPlay report: {_what_else(text) or error}") from error
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"this report has schema_version {version}, this TensorPlay reads up to {SCHEMA_VERSION}: "
                "pip install --upgrade tensorplay-probe"
            )
        try:
            document = msgspec.json.decode(text, type=Document)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a TensorPlay report: {error}") from error
        if not cls.is_kind_of(document):
            raise ValueError(f"this report is not what {cls.__name__} holds: tensorplay.Report.from_json() reads any")
        return cls.from_document(document)

    @classmethod
    def is_kind_of(cls, document: Document) -> bool:
        """Tell whether a stored document is one of such a report."""
        return not cls.about or document.focus in cls.about

    @property
    def document(self) -> Document:
        """The report as plain immutable data, made on first use."""
        self._settle()
        if self._document is None:
            # Two threads may both come here: each makes the same document, and nothing else is changed.
            reads = self._reads if self._caller is None else name_roots(self._reads, self._caller)
            self._document = Document(
                schema_version=SCHEMA_VERSION,
                provenance=_provenance(*self._made),
                records=tuple(read.model() for read in reads),
                findings=self._findings,
                **self._fields,
            )
        return self._document

    def replace_document(self, **fields: Any) -> None:
        """Set fields of the document, which stays immutable for whoever has it already."""
        self._document = msgspec.structs.replace(self.document, **fields)

    def _settle(self) -> None:
        """Explain what was suspected, if nobody looked before. Two threads may both do it, with the same result."""
        pending = self._pending
        if pending is not None:
            reads, selection = pending(self._reads)
            self._findings = selection.findings
            self._fields = {**self._fields, **selection.fields()}
            self._reads, self._caller = reads, None
            self._pending = None

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the rules found."""
        self._settle()
        return self._findings

    def add_findings(self, findings: Iterable[Finding]) -> None:
        """Add what a call found beside the rules over its records."""
        self._findings = (*self.findings, *findings)
        if self._document is not None:
            self.replace_document(findings=self._findings)

    def raise_severity(self, codes: Iterable[str], severity: Severity) -> None:
        """Give the findings of some rules another severity: what is a hazard to most is a fault where it was tried."""
        codes = frozenset(codes)
        self._findings = tuple(
            msgspec.structs.replace(finding, severity=severity) if finding.code in codes else finding
            for finding in self.findings
        )
        if self._document is not None:
            self.replace_document(findings=self._findings)

    @property
    def records(self) -> tuple[TensorRecord, ...]:
        """One record a tensor."""
        return self.document.records

    @property
    def worst(self) -> Severity | None:
        """The gravest severity among the findings, or None."""
        return min((f.severity for f in self.findings), key=SEVERITIES.index, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Answer the document as dicts and lists."""
        result: dict[str, Any] = msgspec.json.decode(self.to_json())  # tuples become lists, as in the file
        return result

    def to_json(self) -> str:
        """Answer the document as JSON."""
        try:
            return msgspec.json.encode(self.document).decode()
        except UnicodeEncodeError:  # names may hold lone surrogates, which JSON's UTF-8 cannot
            return msgspec.json.encode(_without_surrogates(msgspec.to_builtins(self.document))).decode()

    def text(
        self, *, width: int | None = None, color: bool = False, ascii: bool = False, addresses: bool = False
    ) -> str:
        """Answer the terminal text.

        Args:
            width: columns; the terminal's where None.
            color: whether to write ANSI colours.
            ascii: whether to draw with ASCII characters only.
            addresses: whether to print addresses in hex in place of short names (S1, I3).
        """
        from tensorplay.render.text import render

        return render(self.document, width=width, color=color, ascii=ascii, addresses=addresses)

    @overload
    def html(self, path: None = None) -> str: ...

    @overload
    def html(self, path: str | Path) -> Path: ...

    def html(self, path: str | Path | None = None) -> str | Path:
        """Answer the report as a whole HTML page, or write it and answer where it is.

        The page is one file without script that asks nothing from the network.

        Args:
            path: the file to write.
        """
        from tensorplay.render.html import page, title_of

        text = page(f"TensorPlay: {title_of(self.document)}", [(None, self.document)])
        if path is None:
            return text
        path = Path(path)
        path.write_text(text, encoding="utf-8")
        return path

    def __str__(self) -> str:
        # print() encodes for standard output, and raises for a character that it does not have.
        return self.text(ascii=needs_ascii(sys.stdout))

    def _repr_html_(self) -> str:
        """Answer the report as a piece of HTML for a notebook."""
        from tensorplay.render.html import fragment

        return fragment(self.document)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        """Answer what IPython shows for a cell's last line, once: text in a terminal, HTML in a notebook."""
        return {"text/plain": str(self), "text/html": self._repr_html_()}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_document, (self.document,)

    def __repr__(self) -> str:
        return f"<tensorplay.Report: {plural(len(self.records), 'tensor')}, {plural(len(self.findings), 'finding')}>"

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


class Answer:
    """What a call answers beside its report."""

    __slots__ = ("report",)

    def __init__(self, report: Report) -> None:
        self.report = report

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The report's findings."""
        return self.report.findings

    def facts(self) -> dict[str, Any]:
        """Answer all but the report as dicts and lists."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Answer all, the report too, as dicts and lists."""
        return {**self.facts(), "report": self.report.to_dict()}

    def to_json(self) -> str:
        """Answer all, the report too, as JSON."""
        return msgspec.json.encode({**self.facts(), "report": msgspec.Raw(self.report.to_json().encode())}).decode()


class Verdict(Answer):
    """A yes or no with its reasons; true when the answer is yes."""

    __slots__ = ("ok", "reasons")

    def __init__(self, ok: bool, reasons: Iterable[str], report: Report) -> None:
        super().__init__(report)
        self.ok = ok
        self.reasons = tuple(reasons)

    def __bool__(self) -> bool:
        return self.ok

    def facts(self) -> dict[str, Any]:
        """Answer the verdict as dicts and lists, without its report."""
        return {"ok": self.ok, "reasons": list(self.reasons)}

    def __str__(self) -> str:
        return "\n".join(["consistent" if self.ok else "not consistent", *(f"  {reason}" for reason in self.reasons)])

    def __repr__(self) -> str:
        return f"<tensorplay.Verdict: {self.ok}, {'; '.join(self.reasons)}>"


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Version(msgspec.Struct):
    schema_version: int


class _Answer(msgspec.Struct):
    report: _Version


def _what_else(text: str | bytes) -> str | None:
    """Say what a text is that holds a report and is none."""
    try:
        msgspec.json.decode(text, type=_Answer)
    except msgspec.MsgspecError:
        return None
    return "a verdict or fixes, whose report is the value of 'report'"


def _provenance(moment: float, pid: int) -> Provenance:
    import torch

    from tensorplay import __version__

    return Provenance(
        tensorplay=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=f"{sys.platform}-{platform.machine()}",
        host=socket.gethostname(),
        pid=pid,
        time=datetime.datetime.fromtimestamp(moment, datetime.timezone.utc).isoformat(timespec="milliseconds"),
    )
