"""Read what torch.save wrote: no code is run, and the bytes of its tensors are mapped or left alone, never read.

torch's own weights-only unpickler builds the objects. The archive around the pickle is read here: torch's reader would
unpack a compressed entry of any size, and give a storage that claims more than its entry the bytes of the next one.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickletools
import re
import resource
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import torch
from torch import _weights_only_unpickler, serialization

from tensorplay.words import bytes_text, plural

__all__ = ["LEGACY_HEAD", "Loaded", "NotAllowed", "Progress", "Unreadable", "bounded_memory", "read_legacy", "read_zip"]

Progress = Callable[[int, int], None]
"""Told how many storages or tensors of a file are there, and of how many."""

LEGACY_HEAD = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""What a file of torch.save before torch 1.6 begins with: MAGIC_NUMBER in torch/serialization.py, pickled."""

_MOST_PICKLE_BYTES = 128 << 20
_MOST_DIRECTORY_BYTES = 256 << 20
# Python hashes a tuple of tuples by recursion in C, without a check of its stack.
_MOST_TUPLES_DEEP = 5_000
# What objects may take beside the file itself: a pickle of 20 bytes can ask for a bytearray of any size.
_MEMORY_MARGIN = 4 << 30
_FILLED_BYTES = 64 << 10
_LOCAL_HEADER = struct.Struct("<4s22xHH")


class Unreadable(Exception):
    """A file is damaged, or no checkpoint; the message goes on where its name ends."""


class NotAllowed(Unreadable):
    """A pickle asks for what weights_only does not allow."""


class Loaded(NamedTuple):
    """What is in a file, and what is to be said of it."""

    value: object
    notes: tuple[str, ...] = ()
    data_nbytes: int | None = None
    """Bytes of all entries that hold tensors' data, where there are entries."""


class _Bounded(io.FileIO):
    """A file that no single read takes into memory at the size that its own fields claim."""

    def read(self, size: int | None = -1, /) -> bytes:
        left = os.fstat(self.fileno()).st_size - self.tell()
        if (left if size is None or size < 0 else min(size, left)) > _MOST_DIRECTORY_BYTES:
            raise Unreadable(f"is damaged: its zip directory claims more than {bytes_text(_MOST_DIRECTORY_BYTES)}")
        return super().read(-1 if size is None else size)


@contextlib.contextmanager
def bounded_memory(nbytes: int) -> Iterator[None]:
    """Let this process take so many more bytes, and a margin for objects.

    Raises:
        Unreadable: what is read asks for more.
    """
    with open("/proc/self/status", encoding="utf-8") as status:
        taken = next(int(line.split()[1]) for line in status if line.startswith("VmData:")) << 10
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = (taken + nbytes + _MEMORY_MARGIN, soft, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (min(limit for limit in limits if limit != resource.RLIM_INFINITY), hard))
    try:
        yield
    except MemoryError as error:
        raise Unreadable(f"asks for more memory than its size and {bytes_text(_MEMORY_MARGIN)}: not read on") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def read_zip(file: IO[bytes], progress: Progress) -> Loaded:
    """Build the objects of a zip archive over the mapped file.

    Raises:
        Unreadable: it is damaged, packed, or not one of torch.save's.
        NotAllowed: its pickle asks for what weights_only does not allow.
    """
    try:
        return _read_zip(file, progress)
    except (Unreadable, MemoryError):
        raise
    except Exception as error:  # zipfile raises anything for a directory that lies
        words = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise Unreadable(
            f"is damaged: its zip directory is missing or wrong, as in a file cut off ({words})"
        ) from error


def _read_zip(file: IO[bytes], progress: Progress) -> Loaded:
    size = os.fstat(file.fileno()).st_size
    with _Bounded(file.fileno(), closefd=False) as raw, zipfile.ZipFile(raw) as archive:
        entries: dict[str, zipfile.ZipInfo] = {}
        for entry in archive.infolist():
            if entry.filename in entries:
                raise Unreadable(f"is damaged: it has two entries {_quoted(entry.filename)}")
            entries[entry.filename] = entry
        root = _root(entries)
        if any(entry.flag_bits & 1 for entry in entries.values()):
            raise Unreadable("is encrypted: decrypt it first")
        packed = [
            e for e in entries.values() if e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size
        ]
        if packed:
            largest = max(packed, key=lambda entry: entry.file_size)
            raise Unreadable(
                f"is compressed, and torch.save stores: {_quoted(largest.filename)} claims "
                f"{bytes_text(largest.file_size)} in {bytes_text(largest.compress_size)}; unpack it and torch.save it "
                "again, if you trust the file"
            )
        pickled = entries[f"{root}data.pkl"]
        if pickled.file_size > _MOST_PICKLE_BYTES:
            most = bytes_text(_MOST_PICKLE_BYTES)
            raise Unreadable(f"has a pickle of {bytes_text(pickled.file_size)}; more than {most} is not read")
        try:
            data = archive.read(pickled)
        except zipfile.BadZipFile as error:
            raise Unreadable(f"is damaged: its data.pkl is not what was written ({str(error)[:100]})") from error
        notes = []
        order = entries.get(f"{root}byteorder")
        if order is not None and order.file_size < 16 and archive.read(order) == b"big":
            notes.append("its elements are big-endian: torch.load swaps their bytes")
    whole = torch.UntypedStorage.from_file(f"/proc/self/fd/{file.fileno()}", False, size)
    stored = [entry.file_size for name, entry in entries.items() if name.startswith(f"{root}data/")]
    total = len(stored)
    storages: dict[str, torch.TypedStorage] = {}

    def persistent_load(saved: Any) -> torch.TypedStorage:
        key, dtype, nbytes = _claim(saved, fields=5)
        if key in storages:
            return storages[key]
        entry = entries.get(f"{root}data/{key}")
        if entry is None:
            raise Unreadable(
                f"is damaged: its pickle names the storage {_quoted(key)}, which the archive does not have"
            )
        if nbytes > entry.file_size:
            raise Unreadable(
                f"is damaged: the storage {_quoted(key)} claims {bytes_text(nbytes)}, its entry has "
                f"{bytes_text(entry.file_size)}"
            )
        begin = _data_offset(file, entry)
        if begin + entry.file_size > size:
            raise Unreadable(f"is damaged: the storage {_quoted(key)} reaches past the end of the file")
        storages[key] = _typed(whole[begin : begin + nbytes], dtype)
        progress(len(storages), total)
        return storages[key]

    return Loaded(_unpickle(io.BytesIO(data), persistent_load), tuple(notes), sum(stored))


def _root(entries: dict[str, zipfile.ZipInfo]) -> str:
    """Answer the folder that torch.save put everything in, with its slash."""
    roots = [name.removesuffix("data.pkl") for name in entries if re.fullmatch(r"[^/]+/data\.pkl", name)]
    if any(re.fullmatch(r"[^/]+/(constants\.pkl|code/.*)", name) for name in entries):
        raise Unreadable(
            "is a TorchScript archive, which holds code: torch.jit.load it in your own script where you trust it, and "
            "pass the module to tensorplay.check"
        )
    if not roots:
        raise Unreadable("is a zip archive that torch.save did not write: it has no data.pkl")
    if len(roots) > 1:
        raise Unreadable(f"is damaged: it has {len(roots)} files data.pkl")
    return roots[0]


def _data_offset(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Answer where an entry's bytes begin, behind its own header in front of them."""
    begin = entry.header_offset + _LOCAL_HEADER.size
    mark, length, extra = _LOCAL_HEADER.unpack(os.pread(file.fileno(), _LOCAL_HEADER.size, entry.header_offset))
    name = entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437")
    # By its name: two entries of the directory may point at one header, and their storages would be one memory.
    if mark != b"PK\x03\x04" or os.pread(file.fileno(), length, begin) != name:
        raise Unreadable(f"is damaged: {_quoted(entry.filename)} is not where the zip directory says")
    return begin + int(length) + int(extra)


def _quoted(name: str) -> str:
    """Answer a name of a file as it goes into a message; it may have any length."""
    return repr(name if len(name) <= 80 else f"{name[:60]}...{name[-17:]}")


def read_legacy(file: IO[bytes], progress: Progress) -> Loaded:
    """Build the objects of a file without an archive, over memory as torch.load takes it, but only small ones filled.

    The pickle comes before the list that says where each storage lies: it is gone through twice.

    Raises:
        Unreadable: it is damaged, or cut off.
        NotAllowed: its pickle asks for what weights_only does not allow.
    """
    size = os.fstat(file.fileno()).st_size
    claims: dict[str, _Claim] = {}
    with mmap.mmap(file.fileno(), min(size, _MOST_PICKLE_BYTES), access=mmap.ACCESS_READ) as stream:
        for _ in range(3):  # the magic number, the protocol, the machine's type sizes
            _unpickle(stream, _LegacyStorages(size, claims, {}))
        begin = stream.tell()
        _unpickle(stream, _LegacyStorages(size, claims, {}))
        keys = _unpickle(stream, _LegacyStorages(size, claims, {}))
        offset = stream.tell()
        if not isinstance(keys, list) or not all(type(key) is str and key in claims for key in keys):
            raise Unreadable("is damaged: its list of storages is wrong")
        small = {}
        for number, key in enumerate(keys):
            _, dtype, nbytes = claims[key]
            length = os.pread(file.fileno(), 8, offset)
            if len(length) < 8 or offset + 8 + nbytes > size:
                raise Unreadable(f"is cut off: the storage {_quoted(key)} of {bytes_text(nbytes)} is not all there")
            if int.from_bytes(length, "little") * torch._utils._element_size(dtype) != nbytes:
                raise Unreadable(f"is damaged: the storage {_quoted(key)} has another length than its pickle claims")
            if nbytes <= _FILLED_BYTES:
                small[key] = os.pread(file.fileno(), nbytes, offset + 8)
            offset += 8 + nbytes
            progress(number + 1, len(keys))
        stream.seek(begin)
        return Loaded(_unpickle(stream, _LegacyStorages(size, {}, small)))


class _LegacyStorages:
    """Memory for the storages that a pickle claims, not more than the file is large."""

    def __init__(self, most_nbytes: int, claims: dict[str, _Claim], small: dict[str, bytes]) -> None:
        self._left = most_nbytes
        self._claims = claims
        self._small = small
        self._storages: dict[str, torch.TypedStorage] = {}
        self._views: dict[str, torch.TypedStorage] = {}

    def __call__(self, saved: Any) -> torch.TypedStorage:
        key, dtype, nbytes = claim = _claim(saved, fields=6)
        if key not in self._storages:
            self._left -= nbytes
            if self._left < 0:
                raise Unreadable("is damaged or cut off: its storages claim more bytes than it has")
            self._claims[key] = claim
            self._storages[key] = _typed(self._memory(key, nbytes), dtype)
        if saved[5] is None:
            return self._storages[key]
        view, offset, length = saved[5]
        if type(view) is not str or type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
            raise Unreadable("is damaged: its pickle names a storage wrongly")
        if view not in self._views:
            step = torch._utils._element_size(dtype)
            part = self._storages[key]._untyped_storage[offset * step : (offset + length) * step]
            self._views[view] = _typed(part, dtype)
        return self._views[view]

    def _memory(self, key: str, nbytes: int) -> torch.UntypedStorage:
        memory = torch.UntypedStorage(nbytes)
        if 0 < nbytes <= _FILLED_BYTES:  # a nested tensor's sizes are read as it is built
            content = bytearray(self._small.get(key) or bytes(nbytes))
            memory.copy_(torch.frombuffer(content, dtype=torch.uint8).untyped_storage())
        return memory


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


class _Claim(NamedTuple):
    key: str
    dtype: torch.dtype
    nbytes: int


def _claim(saved: Any, fields: int) -> _Claim:
    """Answer what a pickle says of a storage: its key, type and size."""
    if type(saved) is not tuple or len(saved) != fields:
        raise Unreadable("is damaged: its pickle names a storage wrongly")
    kind, key, numel = saved[1], saved[2], saved[4]
    dtype = torch.uint8 if kind is torch.UntypedStorage else getattr(kind, "dtype", None)
    if type(key) is not str or type(numel) is not int or numel < 0 or not isinstance(dtype, torch.dtype):
        raise Unreadable("is damaged: its pickle names a storage wrongly")
    return _Claim(key, dtype, numel * torch._utils._element_size(dtype))


def _unpickle(stream: Any, persistent_load: Callable[[Any], torch.TypedStorage]) -> object:
    """Let torch's weights-only unpickler read one pickle of a stream."""
    unpickler = _weights_only_unpickler.Unpickler(stream, encoding="utf-8")
    unpickler.persistent_load = persistent_load
    local = serialization._serialization_tls
    before, local.map_location = local.map_location, "cpu"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of protocols and of kinds in beta: nothing that the reader can change
            _check_tuples(stream)
            return unpickler.load()
    except (Unreadable, MemoryError):
        raise
    except Exception as error:
        raise _refusal(error) from error
    finally:
        local.map_location = before
        torch._utils._sparse_tensors_to_validate.clear()  # their indices would be read, and they would be kept


def _refusal(error: Exception) -> Unreadable:
    """Say in one line what the unpickler refused."""
    lines = str(error).strip().splitlines()
    words = lines[0] if lines else ""
    if match := re.search(r"GLOBAL (\S+) whose module \S+ is blocked", words):
        return NotAllowed(
            f"holds code: its pickle asks for {match[1]}, which torch never loads; do not trust this file"
        )
    if match := re.search(r"GLOBAL (\S+) was not an allowed global", words):
        name = match[1][:100]
    elif match := re.search(r"`(torch\.[\w.]+)`.* must be imported", words):
        return NotAllowed(
            f"needs {match[1]}: import it in your own script, torch.load the file there and pass what it holds to "
            "tensorplay.check"
        )
    elif "Unsupported operand" in words:
        return NotAllowed(
            "has a pickle of a newer protocol than weights_only reads: where you trust the file, torch.load it with "
            "weights_only=False, which runs its code, and torch.save it again with the default pickle_protocol"
        )
    else:
        kind = type(error).__name__
        return Unreadable(f"is damaged: its pickle does not load ({kind}{': ' + words[:200] if words else ''})")
    return NotAllowed(
        f"holds more than tensors: weights_only refuses {name}. If you trust the file, name that class to "
        "torch.serialization.add_safe_globals in your own script, torch.load the file and pass what it holds to "
        "tensorplay.check"
    )


def _check_tuples(stream: Any) -> None:
    """Refuse a pickle whose tuples are nested too deep to be hashed, before anything is built; leave the stream there.

    Follows the depth of what lies on the unpickler's stack. A tuple is never changed, so that its depth is exact.
    """
    begin = stream.tell()
    stack: list[int | None] = []  # None is a mark
    memo: dict[int, int] = {}

    def pop(count: int | None) -> int:
        """Take so many off, or all down to the mark; answer the greatest depth among them."""
        deepest = 0
        while count is None or count > 0:
            depth = stack.pop()
            if depth is None:
                break
            deepest = max(deepest, depth)
            count = None if count is None else count - 1
        return deepest

    try:
        for op, argument, _ in pickletools.genops(stream):
            if (taken := _TUPLES.get(op.name)) is not None:
                depth = 1 + pop(taken[0])
                if depth > _MOST_TUPLES_DEEP:
                    raise Unreadable(f"nests tuples more than {plural(_MOST_TUPLES_DEEP, 'level')} deep: not read")
                stack.append(depth)
            elif op.name in ("BINGET", "LONG_BINGET"):
                stack.append(memo.get(argument, 0))  # type: ignore[arg-type]
            elif op.name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1] or 0  # type: ignore[index]
            elif op.name in ("APPENDS", "SETITEMS"):
                pop(None)
            elif op.name in ("APPEND", "BUILD"):
                pop(1)
            elif op.name == "SETITEM":
                pop(2)
            elif op.name == "MARK":
                stack.append(None)
            elif op.name not in ("PROTO", "STOP"):
                pop(len(op.stack_before))
                stack += [0] * len(op.stack_after)
    except (ValueError, IndexError) as error:
        words = (str(error).splitlines() or ["it ends too early"])[0]
        raise Unreadable(f"is damaged: its pickle does not load ({words[:200]})") from error
    stream.seek(begin)


# How many objects an operation makes one of; None: all down to the mark.
_TUPLES: dict[str, tuple[int | None]] = {
    "TUPLE": (None,),
    "TUPLE1": (1,),
    "TUPLE2": (2,),
    "TUPLE3": (3,),
    "REDUCE": (2,),
    "NEWOBJ": (2,),
}
