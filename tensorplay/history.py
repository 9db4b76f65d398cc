"""What a running tracker knows of a tensor's memory: which line made it, and what wrote to it since."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch

from tensorplay.callers import shorten
from tensorplay.layers import History
from tensorplay.written import Provenance

__all__ = ["IN_BACKWARD", "history_of", "line_text", "own_line", "provenance_of", "stack_lines"]

IN_BACKWARD = 1 << 31
"""Set in a stack's number where an operator ran in the backward of what that stack called."""
_NS = 1e-9
_OF_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(__file__) + os.sep
_WITHOUT_VALUES = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)

Line = tuple[str, str, int]
"""File, function, line."""


class _Block(NamedTuple):
    """What _C.track_block() answers."""

    address: int
    nbytes: int
    born: int
    number: int
    op: str
    site: int
    written: int
    writes: int
    writer_op: str
    writer_site: int
    tensors: int


def _block_of(record: Any) -> _Block | None:
    """Answer the block that a record's storage is, where it came while it was tracked."""
    if record.data is None or not record.data.pointer or not C.track_is_on():
        return None
    row = C.track_block(record.data.pointer)
    return None if row is None else _Block(*row)


def history_of(record: Any) -> History | None:
    """Answer what is known of a tensor's memory; None where nothing is tracked, or it was there before."""
    block = _block_of(record)
    if block is None:
        return None
    now = time.monotonic_ns()
    return History(
        op=block.op,
        where=own_line(stack_lines(block.site)),
        stack=tuple(map(line_text, stack_lines(block.site))),
        backward=bool(block.site & IN_BACKWARD),
        age_seconds=max(now - block.born, 0) * _NS,
        number=block.number,
        writes=block.writes,
        last_write_op=block.writer_op if block.writes else None,
        last_write_where=own_line(stack_lines(block.writer_site)) if block.writes else None,
        last_write_seconds=max(now - block.written, 0) * _NS if block.writes else None,
        tensors=block.tensors,
    )


def provenance_of(tensor: Any) -> Provenance:
    """Answer how a tensor's memory came to its values, as far as operators by their schemas say."""
    record = C.read(tensor)
    block = _block_of(record)
    nbytes = None if record.extent is None else record.extent.nbytes
    if block is None or not nbytes:
        return Provenance("unseen", None, nbytes, None, None, None, None)
    is_never = block.op in _WITHOUT_VALUES and block.writes == 0
    wrote = f"{block.writer_op} at {own_line(stack_lines(block.writer_site))}" if block.writes else None
    return Provenance(
        state="never" if is_never else "written",
        written_nbytes=0 if is_never else nbytes,
        nbytes=nbytes,
        origin=block.op,
        site=own_line(stack_lines(block.site)) or None,
        last_write=wrote,
        copied_from=None,
        exact=is_never,
    )


@functools.lru_cache(maxsize=4096)
def stack_lines(site: int) -> tuple[Line, ...]:
    """Answer the lines of a stack by its number, innermost first."""
    return tuple(C.track_stack(site)) if site else ()


def own_line(stack: Iterable[Line]) -> str:
    """Answer the innermost line that is neither torch's nor ours."""
    lines = list(stack)
    own = (line for line in lines if not line[0].startswith((_OF_TORCH, _OWN, "<frozen")))
    line = next(own, lines[0] if lines else None)
    return "" if line is None else line_text(line)


def line_text(line: Line) -> str:
    """Answer a line as words: file:line in function."""
    file, function, number = line
    return f"{shorten(file)}:{number} in {function}"
