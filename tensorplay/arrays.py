"""What NumPy says of an array, read through its own descriptors: no code of a subclass runs, no byte is read.

NumPy is never imported here: where nobody did, there is no array.
"""

from __future__ import annotations

import mmap
import sys
from array import array as array_type
from typing import Any, NamedTuple

from tensorplay._native import C
from tensorplay.classes import class_name, derives, mro, namespace
from tensorplay.layers import ArrayRecord

__all__ = ["Lender", "Owner", "is_array_class", "owner_of", "producer_of", "read_array"]


class Lender(NamedTuple):
    """One that has a block of memory of its own, and where that is now."""

    type: str
    """Its class."""
    begin: int | None
    """Where its bytes begin; None where it has none any more."""
    end: int | None
    """Where they end."""
    tensor: Any = None
    """Its native record, where it is a tensor."""

    def holds(self, span: tuple[int, int]) -> bool:
        """Tell whether the block holds these addresses."""
        return self.begin is not None and self.end is not None and self.begin <= span[0] and span[1] <= self.end


class Owner(NamedTuple):
    """Who lends memory, however many hands it goes through: array, tensor, array, buffer."""

    ids: tuple[int, ...]
    """``id()`` of every array and buffer on the way."""
    lenders: tuple[Lender, ...]
    """Those with a block of their own, the nearest first."""
    sole: bool = False
    """Whether nobody but the borrower, and each hand on the way for the next, refers to any of them."""
    constant: str | None = None
    """Class of the one that the memory is of in the end, where it may not be written."""

    def lost(self, span: tuple[int, int]) -> Lender | None:
        """Answer the first lender whose block does not hold these addresses."""
        return next((lender for lender in self.lenders if not lender.holds(span)), None)


_MOST_HANDS = 100
# What sys.getrefcount() counts of an argument that nobody but the call has: one more before Python 3.11.
_REFS_OF_ARGUMENT = (lambda argument: sys.getrefcount(argument))(object())
# Their buffers are C code; a memoryview holds an export of what is behind it, so that this cannot move.
_BUFFERS = (bytearray, bytes, mmap.mmap, array_type)


def _array_class() -> type | None:
    """Answer ``numpy.ndarray`` where NumPy is imported."""
    numpy = sys.modules.get("numpy")
    found = None if numpy is None else vars(numpy).get("ndarray")
    return found if type(found) is type else None


def is_array_class(cls: type) -> bool:
    """Tell whether objects of a class are NumPy arrays."""
    ndarray = _array_class()
    return ndarray is not None and derives(cls, ndarray)


def _ask(array: object, name: str) -> Any:
    cls = _array_class()
    assert cls is not None
    return vars(cls)[name].__get__(array, cls)


def _address(array: object) -> int:
    """Answer where the first element lies; an empty array has an address too."""
    address: int = _ask(array, "__array_interface__")["data"][0]
    return address


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:180]}...{text[-17:]}"


def _bounds(array: object) -> tuple[int, int]:
    """Answer the half-open range of addresses that the elements lie in."""
    start = _address(array)
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
        dtype=_short(str(_ask(array, "dtype"))),
        shape=tuple(_ask(array, "shape")),
        stride_bytes=tuple(_ask(array, "strides")),
        pointer=_address(array),
        begin=begin,
        end=end,
        writeable=bool(flags.writeable),
        owns_data=bool(flags.owndata),
        owner=None if base is None else id(base),
        owner_type=None if base is None else class_name(type(base)),
        also=also,
    )


def _last_base(array: object) -> object | None:
    """Answer what lends an array its memory, past all arrays that are views themselves."""
    last: object | None = _ask(array, "base")
    while last is not None and is_array_class(type(last)) and (base := _ask(last, "base")) is not None:
        last = base
    return last


def owner_of(array: object) -> Owner | None:
    """Answer who lends an array its memory; None for one that owns it, or whose owner is not known."""
    return _owner(_ask(array, "base"))


def producer_of(tensor: Any) -> Owner | None:
    """Answer who lends a tensor its memory, where the tensor's own deleter names a Python object."""
    return _owner(C.producer(tensor))


def _owner(obj: Any) -> Owner | None:
    """Follow memory from hand to hand: to the base of an array, the producer of a tensor, what a memoryview shows."""
    ids: list[int] = []
    lenders: list[Lender] = []
    sole, constant = True, False
    name = ""
    while obj is not None and len(ids) < _MOST_HANDS:
        # The hand before it is one more, and the only one where nobody else has it.
        sole = sole and sys.getrefcount(obj) <= 1 + (2 if ids else _REFS_OF_ARGUMENT)
        name = class_name(type(obj))
        ids.append(id(obj))
        if is_array_class(type(obj)):
            base = _ask(obj, "base")
            constant = not _ask(obj, "flags").writeable
            if base is None:  # its own block, whatever strides say
                begin = _address(obj)
                lenders.append(Lender(name, begin, begin + _ask(obj, "nbytes")))
            obj, base = base, None
        elif C.is_tensor(obj):
            record = C.read(obj, 1)
            if record.data is None or record.storage is None or not isinstance(record.storage.nbytes, int):
                break
            begin = record.data.pointer
            lenders.append(Lender(name, begin, begin + record.storage.nbytes, record))
            obj, constant = C.producer(obj), False
        elif type(obj) is memoryview:
            try:
                obj, constant = obj.obj, obj.readonly
            except ValueError:  # released: it no longer says whose memory it showed
                break
        elif _is_buffer(type(obj)):
            found = C.buffer_of(obj)
            constant = derives(type(obj), bytes)
            lenders.append(Lender(name, *((None, None) if found is None else (found[0], sum(found)))))
            break
        else:
            break
    return Owner(tuple(ids), tuple(lenders), sole, name if constant else None) if ids else None


def _is_buffer(cls: type) -> bool:
    """Tell whether the buffer of such objects is C code: a class of Python 3.12 may bring its own."""
    for base in mro(cls):
        if any(base is buffer for buffer in _BUFFERS):
            return True
        if "__buffer__" in namespace(base):
            return False
    return False
