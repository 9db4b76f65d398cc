"""Open a checkpoint, a file or a folder of them, and read what its tensors are.

Runs no code of the file and reads no tensor's bytes: a checkpoint of any size takes the memory of its names. What a
file is, its content says, not its name. Whatever is wrong with it is one line.
"""

from __future__ import annotations

import gc
import itertools
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import msgspec
import torch

from tensorplay.errors import TargetError
from tensorplay.inspection import check_groups
from tensorplay.layers import CheckpointFile, TensorRecord, Unread
from tensorplay.pickles import LEGACY_HEAD, Loaded, NotAllowed, Unreadable, bounded_memory, read_legacy, read_zip
from tensorplay.progress import Step
from tensorplay.reports import Report
from tensorplay.storages import parts, storages_of
from tensorplay.walk import attributes
from tensorplay.words import bytes_text, plural

__all__ = ["MAX_TENSORS", "Stored", "inspect_checkpoint", "open_state_dict"]

MAX_TENSORS = 250_000
"""How many tensors of a checkpoint are read unless told otherwise."""

_Format = Literal["torch zip", "torch legacy", "safetensors"]

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_INDEXES = tuple(f"{suffix}.index.json" for suffix in _SUFFIXES)
_MOST_INDEX_BYTES = 256 << 20
_LONGEST_NAME = 200
# The walk writes a path for every place of a tensor: what it may take in depth, and in characters altogether.
_MOST_LEVELS = 1_000
_MOST_PATH_CHARS = 256 << 20
_OTHERS = (
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x1f\x8b", "packed with gzip: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "packed with zstd: unpack it first"),
    (b"version https://git-lfs", "a pointer of Git LFS: git lfs pull fetches the file"),
    (b"BZh", "packed with bzip2: unpack it first"),
    (b"\xfd7zXZ", "packed with xz: unpack it first"),
)


class _Opened(NamedTuple):
    """A file and its objects by name, which lie over the mapped file."""

    path: Path
    format: _Format
    nbytes: int
    objs: dict[str, object]
    notes: tuple[str, ...]
    data_nbytes: int | None
    value: object
    """What was saved, of which the objects are the parts."""


class Stored(NamedTuple):
    """What the files of a checkpoint hold, over the mapped files."""

    value: object
    files: tuple[Path, ...]
    unread: tuple[Unread, ...]


def inspect_checkpoint(
    path: str | os.PathLike[str],
    *,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    max_tensors: int = MAX_TENSORS,
    step: Step | None = None,
) -> Report:
    """Read a checkpoint and run every rule over its tensors.

    Args:
        path: a file that torch.save or safetensors wrote, or a folder of them.
        select: codes or families to show, in place of the configuration's.
        ignore: codes or families to hide, in place of the configuration's.
        max_tensors: read at most so many; the report says when it cut.
        step: called as parts of a file are read.

    Returns:
        The report; its document has ``files``.

    Raises:
        TargetError: it cannot be read, or needs code to be: in one line.
        UnknownCode: a selector names no rule.

    Cost: O(n) for n tensors, and their names in memory; the tensors' bytes are not read.
    """
    target = Path(path)
    step = step or (lambda *_: None)
    unread: list[Unread] = []
    try:
        opened = _open_folder(target, unread, step) if target.is_dir() else [_open(target, step)]
    except OSError as error:
        raise TargetError(f"cannot read {error.filename or target}: {error.strerror or error}") from error
    several = target.is_dir()
    # All are kept until all are read: the addresses of storages tell them apart.
    report, sizes = check_groups(
        (_prefixed(one, target) if several else one.objs for one in opened),
        select=select,
        ignore=ignore,
        max_tensors=max_tensors,
    )
    records = iter(report.records)
    left = None if report.document.truncated is None else max_tensors  # the file that takes the last is not complete
    files = []
    for one, size in zip(opened, sizes, strict=True):
        left = None if left is None else left - size
        files.append(_describe(one, list(itertools.islice(records, size)), complete=left is None or left > 0))
    if not report.records:
        refused = "".join(f"; {entry.name}: {entry.reason}" for entry in unread[:1])
        raise TargetError(f"{target}: there is no tensor in it{refused}")
    report.replace_document(files=tuple(files), unread=(*report.document.unread, *unread))
    return report


def open_state_dict(path: str | os.PathLike[str], step: Step | None = None) -> Stored:
    """Open a checkpoint for its values: the tensors lie over the mapped files, and none of their bytes is read yet.

    Of a folder with an index, or with several files, all tensors are one state dict. What torch.save wrote before torch
    1.6 cannot be mapped: it is read.

    Raises:
        TargetError: it cannot be read, needs code to be, or two of its files have the same key: in one line.
    """
    target = Path(path)
    if not os.fspath(path) or "\0" in os.fspath(path):
        raise TargetError(f"{os.fspath(path)!r} is the name of no file")
    step = step or (lambda *_: None)
    unread: list[Unread] = []
    try:
        index = target.name if target.name.endswith(_INDEXES) and target.is_file() else None
        if index is not None:
            target = target.parent
        if target.is_dir():
            opened = _open_folder(target, unread, step, index, one_format=True)
        else:
            opened = [_open(target, step)]
        files = tuple(one.path for one in opened)
        if len(opened) == 1 and not target.is_dir():
            return Stored(_value_of(opened[0]), files, tuple(unread))
        merged: dict[Any, object] = {}
        for one in opened:
            value = _value_of(one)
            if not isinstance(value, Mapping):
                raise TargetError(f"{one.path} holds a {type(value).__name__}, and no names with tensors")
            twice = next((key for key in value if key in merged), None)
            if twice is not None:
                raise TargetError(f"{target}: {one.path.name} and a file before it both have {str(twice)[:80]!r}")
            merged.update(value)
        return Stored(merged, files, tuple(unread))
    except OSError as error:
        raise TargetError(f"cannot read {error.filename or target}: {error.strerror or error}") from error


def _value_of(opened: _Opened) -> object:
    if opened.format != "torch legacy":
        return opened.value
    return torch.load(opened.path, map_location="cpu", weights_only=True)


def _prefixed(opened: _Opened, folder: Path) -> dict[str, object]:
    return {f"{opened.path.relative_to(folder)}:{name}": obj for name, obj in opened.objs.items()}


def _describe(opened: _Opened, records: Sequence[TensorRecord], complete: bool) -> CheckpointFile:
    storages = storages_of(records, C.coverage_of).values()
    wasted = [storage.wasted() for storage in storages]
    reached = (part.extent.nbytes for record in records for _, part in parts(record) if part.extent is not None)
    return CheckpointFile(
        path=str(opened.path),
        format=opened.format,
        nbytes=opened.nbytes,
        tensors=len(records),
        storages=len(storages),
        tensor_nbytes=sum(filter(None, reached)),
        storage_nbytes=sum(storage.nbytes for storage in storages),
        wasted_nbytes=sum(nbytes for nbytes, _ in wasted) if complete else None,
        wasted_exact=complete and all(exact for _, exact in wasted),
        data_nbytes=opened.data_nbytes,
        notes=opened.notes,
    )


def _open(path: Path, step: Step) -> _Opened:
    """Open one file.

    Raises:
        TargetError: it cannot be read, in one line.
        OSError: the system refuses it.
    """
    try:
        return _open_file(path, step)
    except Unreadable as error:
        raise TargetError(f"{path} {error}") from error


def _open_file(path: Path, step: Step) -> _Opened:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait
        raise Unreadable("is neither a file nor a folder")
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        kind = _format_of(file, nbytes)

        def progress(done: int, total: int) -> None:
            step(str(path), done, total)

        with bounded_memory(nbytes):
            if kind == "safetensors":
                loaded = _read_safetensors(path, progress)
            else:
                loaded = (read_zip if kind == "torch zip" else read_legacy)(file, progress)
    objs = _named(loaded.value, path.stem)
    _check_paths(objs)
    notes = loaded.notes
    if path.suffix in _SUFFIXES and (path.suffix == ".safetensors") != (kind == "safetensors"):
        notes += (f"its name ends in {path.suffix}, its content is {kind}",)
    return _Opened(path, kind, nbytes, objs, notes, loaded.data_nbytes, loaded.value)


def _format_of(file: IO[bytes], nbytes: int) -> _Format:
    """Tell what a file is by how it begins.

    Raises:
        Unreadable: it is nothing that can be read here.
    """
    head = os.pread(file.fileno(), 512, 0)
    if nbytes == 0:
        raise Unreadable("is empty: 0 bytes")
    # By its length too: the first bytes of a header's length may be those of a pickle.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") + 8 <= nbytes:
        return "safetensors"
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return "torch zip"
    if head.startswith(LEGACY_HEAD):
        return "torch legacy"
    if head[257:262] == b"ustar":
        raise Unreadable(
            "is a tar archive of torch 0.1, which weights_only refuses: torch.save it again where you trust it"
        )
    if LEGACY_HEAD.startswith(head):
        raise Unreadable(f"is cut off after {plural(nbytes, 'byte')}")
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise Unreadable(
            f"is a bare pickle of protocol {head[1]}, not as torch.save writes by default: loading it runs its code"
        )
    for begin, words in _OTHERS:
        if head.startswith(begin):
            raise Unreadable(f"is {words}")
    if head[8:9] == b"{":
        return "safetensors"
    raise Unreadable("is no checkpoint: it begins neither as torch.save nor as safetensors writes")


def _read_safetensors(path: Path, progress: Callable[[int, int], None]) -> Loaded:
    try:
        import safetensors
    except ImportError:
        raise Unreadable("is a safetensors file: pip install 'tensorplay-probe[safetensors]' to read it") from None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            names = getattr(file, "offset_keys", file.keys)()  # as they lie in the file, since safetensors 0.6
            tensors = {}
            for number, name in enumerate(names):
                tensors[name] = file.get_tensor(name)
                progress(number + 1, len(names))
            return Loaded(tensors)
    except OSError:
        raise
    except Exception as error:  # SafetensorError, and what torch says to a size that it cannot have
        lines = str(error).strip().splitlines()
        words = lines[0].removeprefix("Error while deserializing header: ") if lines else type(error).__name__
        raise Unreadable(f"is damaged, or no safetensors file: {words[:200]}") from error


def _named(value: object, stem: str) -> dict[str, object]:
    """Answer a file's objects by their keys, where these can be names; otherwise all under the file's own name."""
    if issubclass(type(value), dict):
        items: list[tuple[Any, object]] = list(dict.items(value))  # type: ignore[arg-type]
        if all(type(key) is str and key.isprintable() and 0 < len(key) <= _LONGEST_NAME for key, _ in items):
            return dict(items)
    return {stem: value}


def _check_paths(objs: dict[str, object]) -> None:
    """Refuse objects nested so that writing the paths of their tensors would take all memory.

    Goes through them as the walk does, which opens each container once.

    Raises:
        Unreadable: they are nested too deep, or a tensor is in too many places.
    """
    opened: set[int] = set()
    chars = 0
    stack: list[tuple[int, Iterator[tuple[object, object]]]] = [(0, iter(objs.items()))]
    while stack:
        outer, children = stack[-1]
        child = next(children, None)
        if child is None:
            stack.pop()
            continue
        key, obj = child
        length = outer + (min(len(key), 120) if isinstance(key, str) else 120) + 4
        inner: Iterable[tuple[object, object]] | None
        if C.is_tensor(obj):
            chars += length
            inner = attributes(obj).items() if len(gc.get_referents(obj)) > 1 else None
        else:
            inner = _children(obj)
        if inner is not None and id(obj) not in opened:
            opened.add(id(obj))
            stack.append((length, iter(inner)))
        if len(stack) > _MOST_LEVELS:
            raise Unreadable(f"nests objects more than {plural(_MOST_LEVELS, 'level')} deep: not read")
        if chars > _MOST_PATH_CHARS:
            raise Unreadable(f"has tensors whose paths take more than {bytes_text(_MOST_PATH_CHARS)}: not read")


def _children(obj: object) -> Iterable[tuple[object, object]] | None:
    if isinstance(obj, dict):
        return obj.items()
    if isinstance(obj, (list, tuple)):
        return (("0000", value) for value in obj)
    if isinstance(obj, (set, frozenset)):
        return (("0000", value) for value in obj)
    return None


def _open_folder(
    folder: Path, unread: list[Unread], step: Step, index: str | None = None, *, one_format: bool = False
) -> list[_Opened]:
    """Open the checkpoint files of a folder: those its index names, else all; what holds code is passed over.

    Raises:
        TargetError: there are none, one is missing or damaged, or all of them hold code.
        OSError: the system refuses the folder or a file.
    """
    names = sorted(os.listdir(folder))
    if ".metadata" in names:
        raise TargetError(
            f"{folder} is a distributed checkpoint: make one file of it, python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE.pt, and inspect that"
        )
    indexes = [index] if index is not None else [name for name in names if name.endswith(_INDEXES)]
    if one_format and len(indexes) > 1:  # the same tensors in two formats, as the hub has them
        indexes = [name for name in indexes if name.endswith(".safetensors.index.json")][:1] or indexes
    wanted: dict[str, list[str]] = {}
    for index in indexes:
        for shard, tensors in _read_index(folder / index).items():
            wanted.setdefault(shard, []).extend(tensors)
    missing = [shard for shard in wanted if not (folder / shard).is_file()]
    if missing:
        rest = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise TargetError(f"{folder} lacks {', '.join(missing[:5])}{rest}, which {' and '.join(indexes)} names")
    files = sorted(wanted) or [name for name in names if name.endswith(_SUFFIXES) and (folder / name).is_file()]
    if one_format and not wanted:
        files = [name for name in files if name.endswith(".safetensors")] or files
    if not files:
        raise TargetError(f"{folder} has no checkpoint in it: no file that ends in {', '.join(_SUFFIXES)}")
    opened = []
    for name in files:
        try:
            one = _open_file(folder / name, step)
        except NotAllowed as error:
            if wanted:
                raise TargetError(f"{folder / name} {error}") from error
            unread.append(Unread(name=name, reason=f"it {error}"))
            continue
        except Unreadable as error:
            raise TargetError(f"{folder / name} {error}") from error
        opened.append(one)
        unread += [
            Unread(name=f"{name}:{tensor}", reason="the index names it, the file does not have it")
            for tensor in wanted.get(name, ())
            if tensor not in one.objs
        ]
    return opened


def _read_index(path: Path) -> dict[str, list[str]]:
    """Answer the files that an index of shards names, each with its tensors.

    Raises:
        TargetError: it is none.
    """
    try:
        if path.stat().st_size > _MOST_INDEX_BYTES:
            raise TargetError(f"{path} is larger than {bytes_text(_MOST_INDEX_BYTES)}: not read")
        shards: dict[str, list[str]] = {}
        for tensor, shard in msgspec.json.decode(path.read_bytes(), type=_Index).weight_map.items():
            shards.setdefault(shard, []).append(tensor)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TargetError(f"{path} is no index of shards: {error}") from error
    outside = [shard for shard in shards if not shard or shard in (".", "..") or "/" in shard or "\0" in shard]
    if outside:
        raise TargetError(f"{path} names {outside[0]!r}, which is no file of its folder: not read")
    return shards


class _Index(msgspec.Struct):
    weight_map: dict[str, str]
