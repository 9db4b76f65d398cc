"""The data model: records of tensors, findings, and the document that carries both.

One model feeds every output. The native probe's records (``tensorplay._C.TensorRecord``) have the attributes declared
here and are copied into these classes when somebody looks; what is read from JSON is these classes from the start.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

__all__ = [
    "SCHEMA_VERSION",
    "ArrayRecord",
    "Change",
    "CheckResult",
    "CheckpointFile",
    "CommunicationBuffer",
    "Comparison",
    "DTensorLayers",
    "DataLayer",
    "Document",
    "Extent",
    "Finding",
    "GraphSummary",
    "Held",
    "History",
    "Holder",
    "ImplLayer",
    "InnerRecord",
    "Ledger",
    "LifetimeRange",
    "Provenance",
    "PythonLayer",
    "RepairCheck",
    "RepairPlan",
    "Said",
    "SavedChecksum",
    "SavedSum",
    "SavedTensor",
    "Severity",
    "SharedMember",
    "SharedMemory",
    "SharedRange",
    "SharedStorage",
    "StorageLayer",
    "Suppressed",
    "TensorRecord",
    "TrackSummary",
    "TrackedSite",
    "Truncated",
    "Unread",
    "UnusedIgnore",
    "VersionMove",
    "ViewAlias",
    "ViewChain",
    "ViewStep",
    "Where",
    "field_of",
    "json_schema",
]

SCHEMA_VERSION = 1
"""Raised when a field is removed or changes its meaning; new fields do not raise it."""

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")

WITH_MEMORY = frozenset({"strided", "quantized", "nested"})
"""Kinds whose elements lie in their own storage; the others are made of other tensors or have no memory by design."""

WRAPPERS = frozenset({"wrapper_subclass", "nested_jagged"})
"""Kinds whose elements lie in tensors that their attributes name."""


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
    """strided, sparse_coo, sparse_csr, ..., _mkldnn, jagged; unknown for a wrapper that has the keys alone."""
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
    base_requires_grad: bool | None
    """Whether the base requires grad; None for no view."""
    base_is_leaf: bool | None
    """Whether the base has no grad_fn; None for no view."""
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
    producer: int | None
    """``id()`` of the object whose memory it is and that the callable keeps alive; DLPack's own word for dlpack."""
    producer_type: str | None
    """Class of that object; None for dlpack, where it need not be a Python object."""
    read_only: bool | None
    """Whether a DLPack producer forbids writing; None where nobody says."""


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """Which bytes of its storage the tensor reaches. Offsets count from the storage's first byte."""

    nbytes: int | None
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
    contiguous: bool | None
    """Whether the elements lie row-major without gaps."""
    memory_format: str | None
    """contiguous, channels_last, channels_last_3d, permuted (dense in another order) or strided."""
    self_overlapping: bool | None
    """Whether two indices reach one element."""
    non_overlapping_and_dense: bool | None
    """Whether it fills its range, each element once."""


class InnerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that another one is made of."""

    role: str
    """What it is to the outer one: value, indices, values, compressed_indices, plain_indices, sizes."""
    record: TensorRecord
    """What was read of it."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What a running tracker saw of a tensor's memory: ``recorded``, not concluded."""

    op: str
    """The operator that made it; empty where none was followed."""
    where: str
    """The innermost line that is not torch's own."""
    stack: tuple[str, ...]
    """All lines, innermost first."""
    backward: bool
    """Whether it was made in the backward of what these lines called."""
    age_seconds: float
    """How long ago."""
    number: int
    """Which block since the tracking began: tells it from another one at its address."""
    writes: int
    """How often operators wrote in place to it."""
    last_write_op: str | None
    """Which one did last."""
    last_write_where: str | None
    """Called from which line."""
    last_write_seconds: float | None
    """How long ago."""
    tensors: int
    """How many tensors operators answered over it, views included."""


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one probe read of one tensor, layer by layer."""

    name: str
    """Where it was found: an expression or a path in the object that was handed in."""
    kind: str
    """strided, meta, fake, wrapper_subclass, batched, sparse_coo, ...: docs/explanation/kinds.md."""
    python: PythonLayer | None
    """The Python object; None for a tensor that C++ alone holds."""
    impl: ImplLayer
    """The TensorImpl."""
    storage: StorageLayer | None
    """The StorageImpl; None for a kind without one."""
    data: DataLayer | None
    """The DataPtr; None where there is no storage."""
    extent: Extent | None
    """The bytes reached; None where shape or strides are not numbers."""
    absent: dict[str, str]
    """Path of a field that is None to the reason why. No entry where None is the answer, as for the grad_fn of a
    leaf."""
    inner: tuple[InnerRecord, ...] = ()
    """The tensors it is made of."""
    also: tuple[str, ...] = ()
    """Further paths to the same Python object."""
    history: History | None = None
    """How its memory came about, where inspect() asked while track() ran."""


def field_of(record: TensorRecord, path: str) -> Any:
    """Answer a field by its path, as ``impl.version``; None where the record has no such layer."""
    layer, _, name = path.partition(".")
    return getattr(getattr(record, layer), name, None)


class ArrayRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What NumPy says of one array handed to check()."""

    name: str
    """Where it was found."""
    address: int
    """``id()`` of the array."""
    type: str
    """Its class."""
    dtype: str
    """NumPy's name of its data type."""
    shape: tuple[int, ...]
    """Sizes."""
    stride_bytes: tuple[int, ...]
    """Strides in bytes."""
    pointer: int
    """Address of its first element."""
    begin: int
    """Lowest address it reaches."""
    end: int
    """One past the highest address it reaches."""
    writeable: bool
    """NumPy's own flag."""
    owns_data: bool
    """Whether it allocated its memory."""
    owner: int | None
    """``id()`` of what lends it its memory, past all arrays that are views themselves."""
    owner_type: str | None
    """Class of that."""
    also: tuple[str, ...] = ()
    """Further paths to the same array."""


class Where(msgspec.Struct, frozen=True, kw_only=True):
    """The place a finding is about."""

    name: str
    """Path of the tensor."""
    file: str | None = None
    """Source file, relative where it lies below the current folder."""
    line: int | None = None
    """Line in it."""
    function: str | None = None
    """Function the line is in; None at module level."""
    source: str | None = None
    """How the line is known: ``call`` is the line that asked, ``definition`` that of the factory."""

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
    """error: proven; warning: will bite in the state observed; info: a fact or a hazard nobody has touched."""
    headline: str
    """One line that stands alone."""
    subject: str
    """The thing it is about, in its sizes and units."""
    where: Where
    """Where to act."""
    evidence: dict[str, Any]
    """The measured facts it rests on; sizes in bytes, addresses as integers."""
    why: str
    """What makes it a fault."""
    fix: str
    """What to do."""
    source: str
    """Where the evidence was read, with the header that defines it."""


class Suppressed(msgspec.Struct, frozen=True, kw_only=True):
    """Findings that were found and not shown."""

    code: str
    """Code of the rule."""
    count: int
    """How many findings."""
    by: str
    """``select``, ``ignore``, or the place of the inline comment."""
    reason: str | None = None
    """What the comment says."""


class UnusedIgnore(msgspec.Struct, frozen=True, kw_only=True):
    """An inline ignore on the line that asked, which suppressed nothing."""

    code: str
    """The code it names; ``no code`` for a comment that names none, which suppresses nothing."""
    file: str
    """Where it stands."""
    line: int
    """Its line."""


class Truncated(msgspec.Struct, frozen=True, kw_only=True):
    """Says that not all tensors were read."""

    max_tensors: int
    """The bound; one record a tensor up to it."""


class Unread(msgspec.Struct, frozen=True, kw_only=True):
    """Something that could not be looked into."""

    name: str
    """Its path."""
    reason: str
    """What happened."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One field that differs from the last report with the same label."""

    name: str
    """The tensor."""
    field: str
    """Path of the field: impl.version; ``record`` for a tensor that came or went."""
    before: Any
    """Its value in the last report."""
    after: Any
    """Its value in this one."""


class CheckpointFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that records were read from; the records are in the order of the files."""

    path: str
    """As it was named, or found in the folder that was named."""
    format: Literal["torch zip", "torch legacy", "safetensors"]
    """Decided by its content."""
    nbytes: int
    """Its size."""
    tensors: int
    """How many records are of this file."""
    storages: int
    """How many storages they lie in."""
    tensor_nbytes: int
    """numel x itemsize of all of them."""
    storage_nbytes: int
    """Bytes of the storages, which is what is written for the tensors."""
    wasted_nbytes: int | None
    """Bytes of the storages that none of the tensors reaches; None where not all of its tensors were read."""
    wasted_exact: bool
    """Whether that is exact; otherwise it is at least so many: tensors with gaps lie over one another."""
    data_nbytes: int | None
    """Bytes of tensor data in the file, as a zip archive lists them; more than storage_nbytes where some belong to no
    tensor that was found: bare storages, scales of quantized tensors, leftovers. None where the format does not say."""
    notes: tuple[str, ...] = ()
    """What else is to be said of the file."""


ViewSource = Literal["recorded", "replayed", "autograd", "inferred", "unknown"]
"""How a step of a view chain is known, best first."""


class ViewStep(msgspec.Struct, frozen=True, kw_only=True):
    """One operator of a view chain, and what it made."""

    op: str
    """Operator, as ATen names it: select, slice, transpose, view, ...; ``detach`` between a tensor and its alias."""
    args: dict[str, Any]
    """Its arguments by name."""
    output: int | None = None
    """Which of several outputs."""
    shape: tuple[int, ...]
    """Sizes of what it made."""
    stride: tuple[int, ...]
    """Strides in elements."""
    storage_offset: int
    """Offset into the storage in elements."""
    dtype: str
    """Data type."""
    source: ViewSource
    """How the step is known: replayed (PyTorch's own view function), autograd (a node and its saved arguments),
    inferred (solved from the geometry, and checked to reproduce it)."""


class ViewAlias(msgspec.Struct, frozen=True, kw_only=True):
    """A live tensor over the same storage that autograd connects by no view."""

    name: str
    """What it is called, or what it is."""
    impl: int
    """Address of its TensorImpl."""
    shares_version: bool
    """Whether it shares the version counter: what detach() makes does, what .data makes does not."""


class ViewChain(msgspec.Struct, frozen=True, kw_only=True):
    """How a tensor came to be a view: base, operators, tensor."""

    name: str
    """The tensor."""
    begins: Literal["base", "alias", "storage", "itself"]
    """What it begins with: autograd's base; another live tensor over the storage; the bytes of the storage, where no
    tensor is known; the tensor itself, which is no view."""
    base: str
    """What that is called, or what it is."""
    shape: tuple[int, ...]
    """Sizes of what it begins with."""
    stride: tuple[int, ...]
    """Its strides in elements."""
    storage_offset: int
    """Its offset in elements."""
    dtype: str
    """Its data type."""
    steps: tuple[ViewStep, ...]
    """From the base to the tensor; none where they have the same geometry, and where the chain is not known."""
    source: ViewSource
    """How the chain is known: as its least known step is."""
    proven: bool
    """Whether a step as_strided was proven to be needed: all chains of up to 4 named operators were tried."""
    plainer: tuple[ViewStep, ...] = ()
    """A longer chain without unfold and diagonal, where the shortest has them and there is one."""
    aliases: tuple[ViewAlias, ...] = ()
    """Live tensors over the same storage that autograd connects by no view, as detach() makes them."""
    note: str | None = None
    """What else is to be said, as why a chain is not known."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two tensors beside each other."""

    a: str
    """The first one."""
    b: str
    """The second one."""
    verdict: str
    """What they are to each other, in one line."""
    same_object: bool
    """One Python object."""
    same_impl: bool
    """One TensorImpl."""
    same_storage: bool | None
    """One StorageImpl; None where one of them has none."""
    same_pointer: bool | None
    """Equal data_ptr(), which proves nothing by itself; None where one of them has none."""
    same_version_counter: bool | None
    """One version counter; None where one of them has none."""
    same_memory_order: bool | None
    """Equal shape, and equal strides wherever a dimension has more than one index: they differ in no byte's place."""
    relation: str | None
    """Their bytes: disjoint, identical, first_in_second, second_in_first, partial, overlapping (which of these is too
    hard to say), too_hard; None where one of them has no memory."""
    shared_nbytes: int | None
    """Bytes that both reach; None where that is too hard to say, or one of them has no memory."""
    differences: tuple[Change, ...]
    """The fields that differ, the first one's value as before and the second one's as after."""


SharedOverlap = Literal["disjoint", "identical", "nested", "partial", "too_hard"]
"""How the members of a group lie to each other: no byte in common; the same bytes; one within another; two that share
some and have others of their own; not known."""


class SharedMember(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor or array of a group."""

    name: str
    """Its path, or what it is where no path was found."""
    named: bool
    """Whether that is a path."""
    role: Literal["tensor", "array", "saved", "gradient"]
    """A tensor of Python; a NumPy array; one that a node saved for backward; a gradient without a Python object."""
    dtype: str
    """Data type."""
    shape: tuple[int, ...]
    """Sizes."""
    first_byte: int
    """First byte reached, counted from the group's beginning."""
    needed_nbytes: int
    """Bytes from there to the end of the last element reached."""
    visible_nbytes: int | None
    """Different bytes reached."""
    impl: int | None = None
    """Address of the TensorImpl; None for an array."""
    also: tuple[str, ...] = ()
    """Further paths to the same object."""


class SharedStorage(msgspec.Struct, frozen=True, kw_only=True):
    """A storage that several tensors lie in, or that owners keep whom no path reaches."""

    storage: int
    """Address of the StorageImpl."""
    device: str
    """Where its bytes are."""
    nbytes: int
    """Bytes it has."""
    visible_nbytes: int | None
    """Bytes that the members reach together; None where that is too hard to count."""
    dead_nbytes: int | None
    """Bytes that none of them reaches."""
    overlap: SharedOverlap
    """How the members lie to each other."""
    members: tuple[SharedMember, ...]
    """Who lies in it."""
    use_count: int
    """Owners of the StorageImpl."""
    unreached_owners: int
    """Of those, the ones that no Python path and no graph reaches: C++ code's, or of views without a Python object."""


class SharedRange(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that several storages or arrays lie over: NumPy, DLPack, two mappings of one shared block."""

    storages: tuple[int, ...]
    """Addresses of the StorageImpls."""
    begin: int
    """First address; 0 where it is one shared block that is mapped at several."""
    nbytes: int
    """Bytes from there to the last one's end."""
    handle: str | None
    """Name of the shared block, where the storages are mappings of one."""
    overlap: SharedOverlap
    """How the members lie to each other."""
    members: tuple[SharedMember, ...]
    """Who lies over it."""


RootKind = Literal["module", "frame", "thread", "cycle", "unknown", "probe"]


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """One that keeps a tensor alive, or several that have one name."""

    of: Literal["object", "impl", "storage"]
    """Which layer it refers to."""
    how: str
    """reference, base, saved self, grad, variable, storage, ...: PyTorch's own names where C++ holds it."""
    path: str
    """How a program would name it, from a module, a variable of a frame, or a cycle on."""
    steps: tuple[str, ...] = ()
    """What each step on the way adds to the path; of a long one the first and the last steps."""
    root: RootKind
    """Where the path begins; unknown: C or C++ code that nobody can name; probe: the call that asks."""
    file: str | None = None
    """The frame's, where it begins at one."""
    line: int | None = None
    """The line it executes."""
    count: int = 1
    """References."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """A count of references and all that were found: what is left is held by C or C++ code alone."""

    of: Literal["object", "impl", "storage"]
    """The layer that is counted."""
    counter: str
    """PyTorch's name of the count."""
    count: int
    """What the counter says."""
    terms: tuple[tuple[int, str], ...]
    """How many references are of which kind."""
    unaccounted: int
    """References that nothing explains."""

    @property
    def equation(self) -> str:
        """The count as a sum: ``refcount 3 = 2 references + 1 of the probe``."""
        terms = [f"{count} {what}" for count, what in self.terms]
        if self.unaccounted:
            terms.append(f"{self.unaccounted} C++-only reference{'s' if self.unaccounted > 1 else ''}")
        return f"{self.counter} {self.count} = {' + '.join(terms) or '0'}"


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Who keeps one object alive."""

    name: str
    """What the caller calls it."""
    description: str
    """Its kind, dtype and shape."""
    nbytes: int | None
    """Bytes of its storage; None for what has none."""
    state: Literal["reached", "cycle", "unknown", "unseen", "probe"]
    """Whether a root leads to it; cycle: it is garbage that is not collected yet; unknown: only C or C++ has it; probe:
    only the call that asks has it."""
    holders: tuple[Holder, ...]
    """All who refer to one of its layers, the shortest paths first; not the probe."""
    ledgers: tuple[Ledger, ...]
    """Of the Python object, the TensorImpl and the StorageImpl."""
    cycle: str | None = None
    """The cycle it hangs on, in one line."""
    cycle_steps: tuple[str, ...] = ()
    """What each step around the cycle adds to that line."""


class Grown(msgspec.Struct, frozen=True, kw_only=True):
    """Storages that one place holds, and that were not there before."""

    path: str
    """How a program would name the place; several places that differ in an index alone are one: ``log[*]``."""
    steps: tuple[str, ...] = ()
    """What each step on the way adds to the path; of a long one the first and the last steps."""
    root: RootKind
    """Where the path begins."""
    file: str | None
    """The frame's, where it begins at one."""
    line: int | None
    """The line it executes."""
    devices: tuple[str, ...]
    """Where their bytes are."""
    storages: int
    """Storages of the tensors at the place itself."""
    nbytes: int
    """Their bytes."""
    indirect_storages: int
    """Further storages that were met behind these tensors first: their graphs, their gradients. Another place may lead
    to them too."""
    indirect_nbytes: int
    """Their bytes."""
    places: int
    """So many places have this path."""
    cycle: str | None = None
    """Of garbage that is not collected yet: the steps of the cycle that it hangs on."""


class Slope(msgspec.Struct, frozen=True, kw_only=True):
    """How the bytes of all storages that something holds went over some steps: a line through their middle."""

    nbytes: tuple[int, ...]
    """The bytes after each step."""
    nbytes_per_step: float
    """The median of the slopes between every two steps (Theil and Sen)."""
    low: float
    """So much at least, with that confidence."""
    high: float
    """So much at most."""
    confidence: float
    """Of low and high: 0.99."""
    p_value: float
    """How likely steps in random order would rise as steadily (Mann and Kendall, one-sided)."""


class Growth(msgspec.Struct, frozen=True, kw_only=True):
    """What storages came, stayed and went between two moments."""

    nbytes_before: int
    """Bytes of all storages at the first moment."""
    nbytes_after: int
    """At the second."""
    storages_before: int
    """Storages at the first moment."""
    storages_after: int
    """At the second."""
    new_storages: int
    """Storages that were not there before."""
    new_nbytes: int
    """Their bytes."""
    gone_storages: int
    """Storages that are not there any more."""
    gone_nbytes: int
    """Their bytes."""
    grown: tuple[Grown, ...]
    """Who holds the new ones; those with the most bytes, with what lies behind them, come first."""
    slope: Slope | None = None
    """How the bytes went over the steps, where steps were marked."""


class TrackedSite(msgspec.Struct, frozen=True, kw_only=True):
    """What one operator did, called from one stack."""

    op: str
    """The operator that a program called; empty for memory that came outside of any."""
    where: str
    """The innermost line that is not torch's own: file:line in function; empty where no Python frame called."""
    stack: tuple[str, ...]
    """All lines, innermost first."""
    backward: bool
    """Whether it ran in the backward of what these lines called."""
    allocs: int
    """Blocks that came."""
    alloc_nbytes: int
    """Their bytes."""
    frees: int
    """How many of them went."""
    freed_nbytes: int
    """Their bytes."""
    live_blocks: int
    """How many are alive."""
    live_nbytes: int
    """Their bytes."""
    nbytes_at_peak: int
    """Bytes that were alive at the peak of all."""
    tensors: int
    """Tensors that the operator answered: TensorImpls that were made."""
    writes: int
    """Tensors that it wrote in place."""
    copies: int
    """Copies that it made."""
    copied_nbytes: int
    """Their bytes."""
    copying_seconds: float
    """How long they took."""
    longest_copy_seconds: float
    """How long the longest one took."""


class LifetimeRange(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that lived about as long."""

    from_seconds: float
    """They lived as long, and less than twice as long."""
    blocks: int
    """How many."""
    nbytes: int
    """Their bytes."""


class TrackSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What happened to memory while it was tracked."""

    seconds: float
    """How long that was."""
    running: bool
    """Whether it goes on."""
    stacks: bool
    """Whether stacks were taken."""
    allocs: int
    """Blocks that came from the CPU allocator."""
    alloc_nbytes: int
    """Their bytes, as they were asked for."""
    frees: int
    """How many of these went."""
    freed_nbytes: int
    """Their bytes."""
    frees_of_older: int
    """Frees of blocks from before: they are at least as old as the tracking."""
    live_blocks: int
    """Blocks that came and are alive."""
    live_nbytes: int
    """Their bytes."""
    peak_nbytes: int
    """The most bytes of them alive at once."""
    peak_seconds: float | None
    """When that was, from the start; None where nothing came."""
    tensors: int
    """Tensors that operators answered."""
    reused: float | None
    """The share of these whose memory was there within the five seconds before; None where there was none."""
    recent_tensors: int
    """The same of the last second."""
    recent_reused: float | None
    """The share of these."""
    writes: int
    """Tensors that operators wrote in place."""
    copies: int
    """Copies by operators; what NumPy or C++ copies by itself is not seen."""
    copied_nbytes: int
    """Their bytes."""
    copying_seconds: float
    """How long they took."""
    sites: tuple[TrackedSite, ...]
    """By operator and stack, those with the most bytes at the peak first."""
    lifetimes: tuple[LifetimeRange, ...]
    """How long the blocks lived that came and went, the shortest first."""
    lost: int
    """Events that found no room: the figures are lower bounds then."""
    not_told_apart: int
    """Blocks, operators and stacks that found no room in the tables."""
    own_nbytes: int
    """Memory of the tracker itself."""


class SavedSum(msgspec.Struct, frozen=True, kw_only=True):
    """What some nodes saved for backward."""

    name: str
    """Their kind, or the module whose parameter they work with."""
    nodes: int
    """How many there are."""
    saved: int
    """Tensors that they saved; one saved twice counts twice."""
    storages: int
    """Storages that backward alone needs, each counted where it was met first; not those of parameters."""
    nbytes: int
    """Bytes of these."""
    packed: int
    """Saved tensors that a hook packed: how many bytes it keeps is not known."""


class GraphSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The graph behind some tensors, before backward."""

    roots: tuple[str, ...]
    """What they are called."""
    nodes: int
    """Nodes."""
    saved: int
    """Tensors saved; one saved twice counts twice."""
    activations_held: int
    """Storages that were saved and are none of a leaf's."""
    activation_bytes_held: int
    """Their bytes."""
    parameter_storages: int
    """Storages of leaves that were saved: they would be there anyway."""
    parameter_bytes: int
    """Their bytes."""
    packed: int
    """Saved tensors that a hook packed: how many bytes it keeps is not known."""
    busy: int
    """Nodes that another thread held, as while backward runs: what they saved is not counted."""
    written: int
    """Saved tensors whose version moved since: backward will raise."""
    released: int
    """Saved tensors that a backward gave back: a second one will raise."""
    memoryless: int
    """Saved tensors whose storage has no memory now."""
    by_kind: tuple[SavedSum, ...]
    """The same by the kind of the node; the most bytes first."""
    by_module: tuple[SavedSum, ...]
    """By the module whose parameter a node works with, directly or through a node of one input: inferred."""


class SavedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a node saved for backward."""

    held_by: str
    """Node and argument, as PyTorch calls the attribute: ``ExpBackward0._saved_result``."""
    node: int
    """Address of the node."""
    state: Literal["held", "packed_by_hook", "released"]
    """Whether it is there; packed by a hook, n bytes unknown; given back."""
    expected_version: int | None
    """Its version when it was saved."""
    version: int | None
    """Its version now."""
    name: str | None
    """What Python calls it; None where no path was found."""
    in_python: bool
    """Whether a Python object stands for it: the garbage collector sees none of the others."""
    dtype: str | None
    """Data type."""
    shape: tuple[int | str, ...] | None
    """Sizes."""
    storage: int | None
    """Address of its storage."""
    held_bytes: int | None
    """Bytes of that storage."""
    also_held_by: tuple[str, ...] = ()
    """Other nodes that saved a tensor over the same storage."""


class SavedChecksum(msgspec.Struct, frozen=True, kw_only=True):
    """A sum over the bytes of a tensor that a node saved."""

    node: str
    """Name of the node."""
    thread: int
    """Number of the thread that made it."""
    sequence_nr: int
    """Its number among that thread's nodes."""
    argument: str
    """Of the operator, with the index in a list."""
    version: int | None
    """Version of the tensor at that moment."""
    checksum: int
    """The sum."""


class Lying(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that are held in one way and lie on one device."""

    role: str
    """parameter, buffer; attribute: held by a module and not registered; hook; gradient; local: what a wrapper computes
    with; base: of a view; state: of an optimizer; own attribute: of a tensor; tensor."""
    device: str
    """What the impl says."""
    tensors: int
    """How many they are."""
    nbytes: int
    """Bytes of their storages, each counted once."""


class PlacementSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What lies on which device."""

    roots: tuple[str, ...]
    """What was handed in."""
    stack: tuple[str, ...]
    """Where it was asked: file, line and function of each call on the way, the innermost first."""
    modules: int
    """How many modules there are."""
    rows: tuple[Lying, ...]
    """How many tensors of each role are on each device."""
    asked: int
    """Tensors of which a driver was asked whose memory it is."""
    answering: int
    """Tensors whose class answers ``.device`` in Python, and may say something else: it was not asked."""
    offloaded: int
    """Tensors of modules that a hook moves from device to device as it needs them: nothing is said of where they
    are."""


class VersionMove(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose version counter moved, as each write in place moves it."""

    name: str
    """Key of the tensor."""
    before: int
    """What the counter was."""
    after: int
    """What it is."""


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A state dict beside the modules it is for."""

    model: str
    """Name of the model, as the caller wrote it."""
    state_dict: str
    """Name of the state dict, or the file it is from; empty where there is none."""
    keys: int
    """Keys that a state dict of the model has."""
    matched: int
    """Of these, how many the state dict has a tensor for."""
    missing: tuple[str, ...]
    """Keys that it lacks."""
    unexpected: tuple[str, ...]
    """Keys that it has and the model has not."""
    not_persistent: tuple[str, ...]
    """Buffers that no state dict has."""
    model_nbytes: int
    """Bytes of the storages of all that is registered, each counted once."""
    state_dict_nbytes: int
    """Bytes of the storages of the state dict, each counted once."""
    dtypes: dict[str, int]
    """How many keys go from which type to which: `float32 -> bfloat16`, or one type where it stays."""
    devices: dict[str, int]
    """How many keys go from which device to which."""
    on_meta: int
    """Registered tensors on meta."""
    own_loading: tuple[str, ...]
    """Modules that load in a way of their own, with it: names may be changed there."""
    read_values: bool
    """Whether the values were looked at."""
    loaded: bool | None = None
    """Whether safe_load_state_dict() has loaded it; None where it was compared only."""
    versions: tuple[VersionMove, ...] = ()
    """What loading wrote in place."""
    replaced: tuple[str, ...] = ()
    """Keys whose tensor is another object than before."""
    extra_nbytes: int | None = None
    """The most memory that loading took beside the model and the state dict."""
    seen: dict[str, int] = {}
    """How many tensors were written, never written, partly written, not seen, where that was watched."""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which device facts come to disagree, as it was made in a process of its own."""

    name: str
    """Of the way."""
    title: str
    """What it is, in a few words."""
    disagrees: str
    """Which facts."""
    by_design: bool
    """Whether PyTorch means it so: nothing is found then."""
    source: str
    """What made it."""
    effect: str
    """What PyTorch says and does."""
    codes: tuple[str, ...]
    """Of what was found."""
    error: str | None = None
    """Why it could not be shown here."""


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """What made this report."""

    tensorplay: str
    """Version of this package."""
    torch: str
    """Full version of torch."""
    python: str
    """Version of Python."""
    platform: str
    """Operating system and machine."""
    host: str
    """Name of the machine."""
    pid: int
    """Process."""
    time: str
    """When it was read: UTC, ISO 8601."""


FAULTLESS = ("OK", "PENDING")
"""States of a DTensor in which nothing is wrong."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a DTensor's class answers when it is asked; known without asking it."""

    attribute: str
    """device, dtype, shape, is_meta, requires_grad, data_ptr."""
    value: str | None
    """What Python code gets; None where code would have to be run to know."""
    by: str
    """Who answers: the body, ``_local_tensor``, or a property, method or ``__torch_function__`` of the class."""


class CommunicationBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """The flat memory that a framework gathers a sharded parameter from."""

    record: str
    """Name of its record."""
    aliases_local: bool
    """Whether it lies over the local tensor's storage."""
    ready: bool
    """Whether the framework has begun to work; before, it takes the buffer anew."""


class DTensorLayers(msgspec.Struct, frozen=True, kw_only=True):
    """The layers of one DTensor beside each other. Records are named; they are among the document's."""

    name: str
    """Its path."""
    type: str
    """Its class."""
    wrapper: bool
    """Whether its class keeps the local tensor in a slot, so that the body has no memory by design."""
    state: str
    """The worst of the states."""
    states: tuple[str, ...]
    """All that hold, the worst first."""
    placements: str | None
    """How it lies on its mesh."""
    mesh: str | None
    """Class of the mesh."""
    body: str
    """Record of the tensor that C++ sees."""
    local: str | None
    """Record of ``_local_tensor``."""
    alias: str | None
    """Record of what ``.data`` is, for a body that is no wrapper."""
    buffers: tuple[CommunicationBuffer, ...] = ()
    """What frameworks gather it from, where they were found."""
    says: tuple[Said, ...] = ()
    """What Python code is told."""


CheckResult = Literal["passed", "refused", "reported", "not checked"]


class RepairCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One check of a repair."""

    name: str
    """Of the check."""
    result: CheckResult
    """passed, refused, reported (worth a word, no obstacle) or not checked."""
    found: str = ""
    """What was read."""
    reason: str | None = None
    """What is wrong, and the way out; None where it passed."""


class RepairPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done with one DTensor, and what was done."""

    name: str
    """Its path."""
    method: str
    """impl: the body's TensorImpl is exchanged; public: ``torch.utils.swap_tensors`` with a whole donor."""
    state: str
    """Its state before."""
    checks: tuple[RepairCheck, ...]
    """Every check, with its result."""
    outcome: str
    """repaired; planned; unchanged (nothing is wrong that an exchange mends); pending (both on meta); refused; taken
    back (exchanged, found wrong, exchanged back)."""
    after: str | None = None
    """Its state afterwards, where it was repaired."""


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A report as it is stored: this is the published JSON schema."""

    schema_version: int
    """Raised when a field goes or changes its meaning."""
    provenance: Provenance
    """What made the report, where and when."""
    records: tuple[TensorRecord, ...]
    """One record a tensor, in the order they were found."""
    findings: tuple[Finding, ...]
    """What the rules found."""
    suppressed: tuple[Suppressed, ...] = ()
    """What they found and was not to be shown."""
    unused_ignores: tuple[UnusedIgnore, ...] = ()
    """Comments that suppressed nothing."""
    truncated: Truncated | None = None
    """Set where not all tensors were read."""
    arrays: tuple[ArrayRecord, ...] = ()
    """NumPy arrays among what check() was given."""
    unread: tuple[Unread, ...] = ()
    """What could not be looked into."""
    label: str | None = None
    """The title the caller gave."""
    changes: tuple[Change, ...] | None = None
    """What changed since the last report with this label, or between two reports; None where there was none."""
    notes: tuple[str, ...] = ()
    """What two reports cannot tell: whether equal addresses are one tensor's."""
    comparison: Comparison | None = None
    """The two tensors of the report beside each other."""
    focus: str | None = None
    """The one layer the caller asked for; the others are recorded all the same."""
    chains: tuple[ViewChain, ...] = ()
    """How tensors came to be views, where show_view_chain() asked."""
    shared_storages: tuple[SharedStorage, ...] = ()
    """Storages that several tensors lie in, where list_shared_storages() asked; the largest first."""
    shared_ranges: tuple[SharedRange, ...] = ()
    """Memory that several storages or arrays lie over, where it asked."""
    held: tuple[Held, ...] = ()
    """Who keeps objects alive, where who_holds() asked."""
    growth: Growth | None = None
    """What came and went between two moments, where leak_check() or a snapshot asked."""
    graph: GraphSummary | None = None
    """The graph behind some tensors, where check_graph() or saved_for_backward() asked."""
    saved: tuple[SavedTensor, ...] = ()
    """What was saved for backward, where saved_for_backward() asked; the largest first."""
    checksums: tuple[SavedChecksum, ...] | None = None
    """Sums over what was saved for backward, where check_graph() was asked for them."""
    placement: PlacementSummary | None = None
    """What lies on which device, where audit_device_consistency() asked."""
    load: LoadSummary | None = None
    """A state dict beside a model, where a load was looked at."""
    dtensors: tuple[DTensorLayers, ...] = ()
    """DTensors, layer by layer, where dtensor.verify() or a repair asked."""
    repairs: tuple[RepairPlan, ...] = ()
    """What dtensor.repair() did, or would do."""
    tracked: TrackSummary | None = None
    """What happened to memory, where track() asked."""
    mismatches: tuple[Mismatch, ...] = ()
    """How device facts come to disagree, where reproduce_device_mismatch() showed it."""
    files: tuple[CheckpointFile, ...] = ()
    """The files of the checkpoint that was read."""


def json_schema() -> dict[str, Any]:
    """Answer the JSON Schema of a stored report."""
    schema = msgspec.json.schema(Document)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "TensorPlay report", **schema}
