"""What kept exceptions hold: the variables of frames that ended, and the tensors that hang on these."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tensorplay._native import C
from tensorplay.classes import class_name
from tensorplay.live import OWN_FILES
from tensorplay.walk import records_in, tracebacks_of, variables_of

__all__ = ["Frame", "KeptError", "kept_by", "kept_errors", "variable_of"]


_INDEX = re.compile(r"\[\d+\]")


class KeptError(NamedTuple):
    """An exception, or some that were kept alike, and what nothing but their tracebacks hold."""

    path: str
    kind: str
    """Name of its class."""
    nbytes: int
    storages: int
    variables: tuple[str, ...]
    """``function.name`` of each that leads there."""
    errors: int = 1
    """How many there are."""


class Frame(NamedTuple):
    """A local variable of a frame that ended, and what hangs on it."""

    variable: str
    """``function.name``."""
    storages: list[tuple[int, int]]
    """Address and bytes of each."""


_Errors = Sequence[tuple[str, str, BaseException, Sequence[Frame]]]


def kept_errors(errors: Iterable[tuple[str, BaseException]], least: int) -> list[KeptError]:
    """Answer what some exceptions hold, by their paths."""
    found = []
    for path, error in errors:
        frames = [frame for traceback in tracebacks_of(error) for frame in _variables(traceback.tb_frame)]
        found.append((path, _INDEX.sub("[*]", path), error, frames))
    return kept_by(found, least)


def kept_by(errors: _Errors, least: int) -> list[KeptError]:
    """Answer what nothing but the tracebacks of some exceptions hold, of what hangs on frames.

    One walk over the heap for all, where so many bytes at least hang on them at all; else none. Exceptions of one class
    whose paths differ in an index alone are one.

    Args:
        errors: path, path without its indices, exception, and the frames in its traceback.
        least: bytes below which nobody asks.
    """
    storages = {address: nbytes for *_, frames in errors for frame in frames for address, nbytes in frame.storages}
    if not storages or sum(storages.values()) < least:
        return []
    closed = [id(traceback) for _, _, error, _ in errors for traceback in tracebacks_of(error)]
    watched = [("storage", address) for address in storages]
    _, answers, _, _ = C.find_holders(watched, OWN_FILES, closed)
    alone = {address for (_, address), answer in zip(watched, answers, strict=True) if answer[3] != "reached"}
    alike: dict[tuple[str, str], list[tuple[str, Sequence[Frame]]]] = {}
    for path, pattern, error, frames in errors:
        alike.setdefault((pattern, class_name(type(error))), []).append((path, frames))
    found = []
    for (pattern, kind), members in alike.items():
        held = [frame for _, frames in members for frame in frames]
        mine = alone & {address for frame in held for address, _ in frame.storages}
        variables = {frame.variable for frame in held if mine & {address for address, _ in frame.storages}}
        nbytes = sum(storages[address] for address in mine)
        path = pattern if len(members) > 1 else members[0][0]
        found.append(KeptError(path, kind, nbytes, len(mine), tuple(sorted(variables)), len(members)))
    return found


def _variables(frame: types.FrameType) -> Iterator[Frame]:
    """Answer the variables of a frame that ended, with the storages that hang on each."""
    for name, value in variables_of(frame):
        storages = {
            record.storage.address: record.storage.nbytes
            for record in records_in(value)
            if record.storage is not None and isinstance(record.storage.nbytes, int)
        }
        if storages:
            yield Frame(f"{frame.f_code.co_name}.{name}", list(storages.items()))


def variable_of(frame: types.FrameType, value: object) -> str:
    """Name the variable of a frame that ended which holds an object: ``function.name``."""
    names = (name for name, held in variables_of(frame) if held is value)
    return f"{frame.f_code.co_name}.{next(names, '?')}"
