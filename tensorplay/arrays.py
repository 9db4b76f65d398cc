"""What NumPy says of an array, read through its own descriptors: no code of a subclass runs, no byte is read.

NumPy is never imported here: where nobody did, there is no array.
"""

from __future__ import annotations

import mmap
import sys
from array import array as array_type
from typing import Any, NamedTuple

from tensorplay._native import C
from tensorplay.classes import class_name, mro
from tensorplay.layers import ArrayRecord

__all__ = ["Owner", "array_class", "is_array", "owner_of", "producer_of", "read_array"]


class Owner(NamedTuple):
    """Who lends memory: what it is, and where its bytes are now."""

    type: str
    """Its class."""
    ids: tuple[int, ...]
    """``id()`` of it and of what it borrows from itself, arrays only."""
    writeable: bool | None
    """Whether it says that it may be written; None for what is no array."""
    begin: int | None
    """Where its bytes begin now; None where it has none any more."""
    end: int | None
    """Where they end."""
    tensor: Any = None
    """The native record of a tensor that lends the memory."""


# Their buffers are C code; a memoryview holds an export of what is behind it, so that this cannot move.
_BUFFERS = (bytearray, bytes, mmap.mmap, array_type)


def array_class() -> type | None:
    """Answer ``numpy.ndarray`` where NumPy is imported."""
    numpy = sys.modules.get("numpy")
    found = None if numpy is None else vars(numpy).get("ndarray")
    return found if type(found) is type else None


def is_array(obj: object) -> bool:
    """Tell by type alone whether this is a NumPy array."""
    cls = array_class()
    return cls is not None and any(base is cls for base in mro(type(obj)))


def _ask(array: object, name: str) -> Any:
    cls = array_class()
    assert cls is not None
    return vars(cls)[name].__get__(array, cls)


def _bounds(array: object) -> tuple[int, int]:
    """Answer the half-open range of addresses that the elements lie in."""
    start, _ = _ask(array, "__array_interface__")["data"]
    shape, strides, itemsize = _ask(array, "shape"), _ask(array, "strides"), _ask(array, "itemsize")
    if 0 in shape:
        return start, start
    steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    low = start + sum(step for step in steps if step < 0)
    high = start + sum(step for step in steps if step > 0)
    return low, high + itemsize


def read_array(name: str, array: object, also: tuple[str, ...] = ()) -> ArrayRecord:
    """Read one array: shape, strides, address, flags, and whose memory it is."""
    begin, end = _bounds(array)
    flags = _ask(array, "flags")
    base = _last_base(array)
    return ArrayRecord(
        name=name,
        address=id(array),
        type=class_name(type(array)),
        dtype=str(_ask(array, "dtype")),
        shape=tuple(_ask(array, "shape")),
        stride_bytes=tuple(_ask(array, "strides")),
        pointer=_ask(array, "__array_interface__")["data"][0],
        begin=begin,
        end=end,
        writeable=bool(flags.writeable),
        owns_data=bool(flags.owndata),
        owner=None if base is None else id(base),
        owner_type=None if base is None else class_name(type(base)),
        also=also,
    )


def _chain(array: object) -> list[object]:
    """Answer the array, the arrays it is a view of, and what lends the last one its memory."""
    chain = [array]
    while is_array(chain[-1]) and (base := _ask(chain[-1], "base")) is not None:
        chain.append(base)
    return chain


def _last_base(array: object) -> object | None:
    chain = _chain(array)
    return None if len(chain) == 1 else chain[-1]


def owner_of(array: object) -> Owner | None:
    """Answer who lends an array its memory; None for one that owns it, or whose owner is not known."""
    base = _last_base(array)
    return None if base is None else _owner(base)


def producer_of(tensor: Any) -> Owner | None:
    """Answer who lends a tensor its memory, where the tensor's own deleter names a Python object."""
    producer = C.producer(tensor)
    return None if producer is None else _owner(producer)


def _owner(obj: object) -> Owner | None:
    name = class_name(type(obj))
    if is_array(obj):
        chain = _chain(obj)
        begin, end = _bounds(obj)
        last = _owner(chain[-1]) if len(chain) > 1 and not is_array(chain[-1]) else None
        ids = tuple(id(array) for array in chain if is_array(array))
        return Owner(name, ids, bool(_ask(obj, "flags").writeable), begin, end, None if last is None else last.tensor)
    if C.is_tensor(obj):
        record = C.read(obj, 1)
        if record.data is None or record.storage is None or not isinstance(record.storage.nbytes, int):
            return None
        return Owner(name, (), None, record.data.pointer, record.data.pointer + record.storage.nbytes, record)
    if any(type(obj) is buffer for buffer in _BUFFERS):
        found = C.buffer_of(obj)
        return Owner(name, (), None, None, None) if found is None else Owner(name, (), None, found[0], sum(found))
    return None
