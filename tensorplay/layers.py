"""The data model: records of tensors, findings, and the report that carries both.

One model feeds every output. The native probe's records (``tensorplay._C.TensorRecord``) have the attributes declared
here and are copied into these classes when somebody looks; what is read from JSON is these classes from the start.
"""

from __future__ import annotations

import datetime
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from tensorplay.selection import Caller

__all__ = [
    "SCHEMA_VERSION",
    "Change",
    "DataLayer",
    "Document",
    "Extent",
    "Finding",
    "ImplLayer",
    "InnerRecord",
    "Provenance",
    "PythonLayer",
    "Report",
    "Severity",
    "SharedMemory",
    "StorageLayer",
    "Suppressed",
    "TensorRecord",
    "Truncated",
    "UnusedIgnore",
    "Verdict",
    "Where",
    "json_schema",
]

SCHEMA_VERSION = 1
"""Raised when a field is removed or changes its meaning; new fields do not raise it."""

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


class PythonLayer(msgspec.Struct, frozen=True, kw_only=True):
    """The Python object."""

    address: int
    """``id()`` of the object."""
    type: str
    """Name of its class."""
    module: str | None
    """Module of its class."""
    refcount: int
    """References to the object, the probe's own taken off."""
    has_weakrefs: bool
    """Whether Python weak references point at it."""
    slot_is_self: bool
    """Whether the impl's PyObject slot names this very object."""


class ImplLayer(msgspec.Struct, frozen=True, kw_only=True):
    """The ``c10::TensorImpl``: shape, strides, types, autograd's own fields."""

    address: int
    """Address of the TensorImpl."""
    type: str
    """Dynamic C++ type."""
    use_count: int
    """Owners; the Python object is one of them."""
    weak_count: int
    """C++ weak references."""
    shape: tuple[int | str, ...] | None
    """Sizes as the impl holds them; expressions (str) where symbolic."""
    stride: tuple[int | str, ...] | None
    """Strides in elements."""
    storage_offset: int | str | None
    """Offset into the storage in elements."""
    numel: int | str | None
    """Number of elements."""
    dim: int | None
    """Number of dimensions."""
    dtype: str
    """Data type, as torch names it without the ``torch.``."""
    itemsize: int
    """Bytes an element."""
    device: str | None
    """The impl's own device label, ``device_opt_``."""
    backend: str | None
    """Device type whose kernels the key set selects."""
    layout: str
    """strided, sparse_coo, sparse_csr, ..., mkldnn, jagged."""
    keys: tuple[str, ...]
    """Dispatch keys by name."""
    requires_grad: bool
    """As AutogradMeta answers."""
    is_leaf: bool | None
    """Whether there is no grad_fn; None while grad_fn is stale."""
    grad_fn: str | None
    """Name of the node in AutogradMeta's field."""
    grad_fn_stale: bool
    """Whether the version moved since grad_fn was made, so that PyTorch rebuilds it on its next read."""
    output_nr: int
    """Which output of grad_fn this is."""
    version: int | None
    """In-place writes counted so far."""
    version_counter: int | None
    """Address of the counter; equal for tensors that share it."""
    is_view: bool
    """Whether autograd tracks it as a view."""
    base: int | None
    """Address of the root base's TensorImpl."""
    creation_meta: str | None
    """How the view was made, ``torch::autograd::CreationMeta``."""
    is_conj: bool
    """Conjugate bit: the bytes hold the conjugate."""
    is_neg: bool
    """Negative bit: the bytes hold the negative."""
    is_inference: bool
    """Made in inference mode."""
    is_zerotensor: bool
    """All zeros without memory, as forward-mode AD makes them."""
    is_functional: bool
    """functionalization's wrapper."""
    is_python_dispatch: bool
    """Whether operators on it go to a ``__torch_dispatch__``."""
    is_wrapped_number: bool
    """A Python number that became a tensor for one call."""
    is_symbolic: bool
    """Whether shape, strides and offset are expressions."""
    python_decides_shape: bool
    """Whether the Python subclass answers ``.shape`` itself and may say otherwise."""


class SharedMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The mapping behind a storage that other processes can open, or that a file backs."""

    handle: str
    """Name of the mapped file or object."""
    manager: str | None
    """Socket of torch_shm_manager (file_system strategy)."""
    fd: int | None
    """Open descriptor (file_descriptor strategy)."""
    mapped_nbytes: int
    """Bytes mapped."""
    counted: bool
    """Whether the mapping carries a reference count of its own."""


class StorageLayer(msgspec.Struct, frozen=True, kw_only=True):
    """The ``c10::StorageImpl``: the bytes that views share."""

    address: int
    """Address of the StorageImpl."""
    type: str
    """Dynamic C++ type."""
    nbytes: int | str
    """Bytes it says it has; an expression (str) where symbolic."""
    use_count: int
    """Owners; each TensorImpl over it is one."""
    weak_count: int
    """C++ weak references."""
    resizable: bool
    """Whether ``resize_`` may reallocate it."""
    allocator: str | None
    """Dynamic type of its allocator."""
    allocator_device: str | None
    """Device type this allocator is registered for."""
    copy_on_write: bool
    """Whether the bytes are shared until the first write."""
    has_materializer: bool
    """Whether a function runs before the first write."""
    throws_on_read: bool
    """Whether ``data_ptr()`` raises."""
    throws_on_write: bool
    """Whether ``mutable_data_ptr()`` raises."""
    has_python_wrapper: bool
    """Whether a live ``torch.UntypedStorage`` object is one of the owners."""
    shared_memory: SharedMemory | None
    """The mapping behind it, where there is one."""


class DataLayer(msgspec.Struct, frozen=True, kw_only=True):
    """The ``at::DataPtr``: where the bytes are and who frees them."""

    pointer: int
    """Where the storage begins; 0 is a null pointer."""
    data_ptr: int | None
    """pointer + offset x itemsize: what ``Tensor.data_ptr()`` answers (0 without elements)."""
    context: int | None
    """What the deleter gets."""
    device: str
    """The DataPtr's device label."""
    deleter: str | None
    """The function that frees the memory."""
    origin: str
    """none, cpu_allocator, borrowed, callback, mapped, storage_slice, copy_on_write or other."""
    maker: str | None
    """Whose memory it is, by the callable that frees it: numpy, frombuffer, dlpack, or its C++ type."""


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """Which bytes of its storage the tensor reaches. Offsets count from the storage's first byte."""

    nbytes: int
    """numel x itemsize."""
    first_byte: int | None
    """First byte reached."""
    needed_nbytes: int | None
    """Bytes from the storage's start to the end of the last element reached; 0 without elements."""
    storage_nbytes: int | None
    """Bytes the storage has."""
    visible_nbytes: int | None
    """Different bytes reached, exact."""
    out_of_bounds: bool | None
    """Whether it reaches past the storage."""
    contiguous: bool
    """Whether the elements lie row-major without gaps."""
    memory_format: str
    """contiguous, channels_last, channels_last_3d, permuted (dense in another order) or strided."""
    self_overlapping: bool | None
    """Whether two indices reach one element."""
    non_overlapping_and_dense: bool
    """Whether it fills its range, each element once."""


class InnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that another one is made of."""

    role: str
    """What it is to the outer one: value, indices, values, or the attribute's name."""
    record: TensorRecord


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one probe read of one tensor, layer by layer."""

    name: str
    """Where it was found: an expression or a path in the object that was handed in."""
    kind: str
    """strided, meta, fake, wrapper_subclass, batched, sparse_coo, ...: docs/explanation/kinds.md."""
    python: PythonLayer | None
    impl: ImplLayer
    storage: StorageLayer | None
    data: DataLayer | None
    extent: Extent | None
    absent: dict[str, str]
    """Path of a field that is None to the reason why."""
    inner: tuple[InnerRecord, ...] = ()
    """The tensors it is made of."""
    also: tuple[str, ...] = ()
    """Further paths to the same Python object."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The place a finding is about."""

    name: str
    """Path of the tensor."""
    file: str | None = None
    line: int | None = None
    function: str | None = None
    source: str | None = None
    """How the line is known: ``call`` is the line that asked."""

    def __str__(self) -> str:
        if self.file is None:
            return self.name
        place = f"{self.file}:{self.line}"
        return f"{place} in {self.function}" if self.function else place


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One diagnosis."""

    code: str
    """Permanent: ``TP102``."""
    name: str
    """The rule's name: ``reaches-past-storage``."""
    severity: Severity
    headline: str
    """One line that stands alone."""
    subject: str
    """The thing it is about, in its sizes and units."""
    where: Where
    evidence: dict[str, Any]
    """The measured facts it rests on; sizes in bytes, addresses as integers."""
    why: str
    fix: str
    source: str
    """Where the evidence was read, with the header that defines it."""


class Suppressed(msgspec.Struct, frozen=True, kw_only=True):
    """Findings that were found and not shown."""

    code: str
    count: int
    by: str
    """``select``, ``ignore``, or the place of the inline comment."""
    reason: str | None = None


class UnusedIgnore(msgspec.Struct, frozen=True, kw_only=True):
    """An inline ignore on the line that asked, which suppressed nothing."""

    code: str
    file: str
    line: int


class Truncated(msgspec.Struct, frozen=True, kw_only=True):
    """Says that not all tensors were read."""

    max_tensors: int
    """The bound; one record a tensor up to it."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One field that differs from the last report with the same label."""

    name: str
    field: str
    before: Any
    after: Any


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What made this report."""

    tensorplay: str
    torch: str
    python: str
    platform: str
    host: str
    pid: int
    time: str
    """When it was read: UTC, ISO 8601."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A report as it is stored: this is the published JSON schema."""

    schema_version: int
    provenance: Provenance
    records: tuple[TensorRecord, ...]
    findings: tuple[Finding, ...]
    suppressed: tuple[Suppressed, ...] = ()
    unused_ignores: tuple[UnusedIgnore, ...] = ()
    truncated: Truncated | None = None
    label: str | None = None
    changes: tuple[Change, ...] | None = None
    """What changed since the last report with this label; None where there was none."""
    focus: str | None = None
    """The one layer the caller asked for; the others are recorded all the same."""


class Read:
    """A native record on its way into a report, with the paths it was found under."""

    __slots__ = ("also", "name", "record")

    def __init__(self, name: str, record: Any) -> None:
        self.name = name
        self.record = record
        self.also: list[str] = []

    def model(self) -> TensorRecord:
        """Copy the native record into the model."""
        return _model(self.record, self.name, tuple(self.also))


ROOTS = ("x", "y")
"""What the arguments of a call are called until somebody asks for their names in the caller's source."""


def name_roots(reads: Iterable[Read], caller: Caller) -> None:
    """Call every path after the expression that was handed in: ``x[0]`` becomes ``batch[0]``."""
    names = {root: caller.argument(root, index) for index, root in enumerate(ROOTS)}
    for read in reads:
        read.name = names[read.name[0]] + read.name[1:]
        read.also = [names[path[0]] + path[1:] for path in read.also]


def _model(native: Any, name: str, also: tuple[str, ...] = ()) -> TensorRecord:
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

    __slots__ = ("_caller", "_document", "_fields", "_reads", "_time", "findings")

    def __init__(
        self,
        reads: list[Read],
        findings: tuple[Finding, ...] = (),
        *,
        caller: Caller | None = None,
        **fields: Any,
    ) -> None:
        self._reads = reads
        self._caller = caller
        self._fields = fields
        self._time = time.time()
        self._document: Document | None = None
        self.findings = findings

    @classmethod
    def from_document(cls, document: Document) -> Report:
        """Wrap a stored document."""
        report = cls([], document.findings)
        report._document = document
        return report

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Read a report back from its JSON.

        Raises:
            ValueError: the text is no report, or one of a newer schema.
        """
        try:
            version = msgspec.json.decode(text, type=_Version).schema_version
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a TensorPlay report: {error}") from error
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"this report has schema_version {version}, this TensorPlay reads up to {SCHEMA_VERSION}: "
                "pip install --upgrade tensorplay-probe"
            )
        try:
            return cls.from_document(msgspec.json.decode(text, type=Document))
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a TensorPlay report: {error}") from error

    @property
    def document(self) -> Document:
        """The report as plain immutable data, made on first use."""
        if self._document is None:
            if self._caller is not None:
                name_roots(self._reads, self._caller)
            self._document = Document(
                schema_version=SCHEMA_VERSION,
                provenance=_provenance(self._time),
                records=tuple(read.model() for read in self._reads),
                findings=self.findings,
                **self._fields,
            )
            self._reads = []
        return self._document

    def replace_document(self, **fields: Any) -> None:
        """Set fields of the document, which stays immutable for whoever has it already."""
        self._document = msgspec.structs.replace(self.document, **fields)

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
        return msgspec.json.encode(self.document).decode()

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

    def __str__(self) -> str:
        return self.text()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))  # what IPython shows for a cell's last line

    def __reduce__(self) -> tuple[Any, ...]:
        return Report.from_document, (self.document,)

    def __repr__(self) -> str:
        return f"<tensorplay.Report: {len(self.records)} tensors, {len(self.findings)} findings>"

    def save(self, path: str | Path) -> None:
        """Write the JSON to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


class Verdict:
    """A yes or no with its reasons; true when the answer is yes."""

    __slots__ = ("ok", "reasons", "report")

    def __init__(self, ok: bool, reasons: Iterable[str], report: Report) -> None:
        self.ok = ok
        self.reasons = tuple(reasons)
        self.report = report

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The report's findings."""
        return self.report.findings

    def __bool__(self) -> bool:
        return self.ok

    def to_dict(self) -> dict[str, Any]:
        """Answer the verdict and its report as dicts and lists."""
        return {"ok": self.ok, "reasons": list(self.reasons), "report": self.report.to_dict()}

    def to_json(self) -> str:
        """Answer the verdict and its report as JSON."""
        return msgspec.json.encode(self.to_dict()).decode()

    def __str__(self) -> str:
        return "\n".join(["consistent" if self.ok else "not consistent", *(f"  {reason}" for reason in self.reasons)])

    def __repr__(self) -> str:
        return f"<tensorplay.Verdict: {self.ok}, {'; '.join(self.reasons)}>"


class _Version(msgspec.Struct):
    schema_version: int


def _provenance(moment: float) -> Provenance:
    import torch

    from tensorplay import __version__

    return Provenance(
        tensorplay=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=f"{sys.platform}-{platform.machine()}",
        host=socket.gethostname(),
        pid=os.getpid(),
        time=datetime.datetime.fromtimestamp(moment, datetime.timezone.utc).isoformat(timespec="milliseconds"),
    )


def json_schema() -> dict[str, Any]:
    """Answer the JSON Schema of a stored report."""
    schema = msgspec.json.schema(Document)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "TensorPlay report", **schema}
