"""What kept exceptions hold: the variables of frames that ended, and the tensors that hang on these."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tensorplay._native import C
from tensorplay.classes import class_name
from tensorplay.live import OWN_FILES
from tensorplay.walk import records_in, tracebacks_of, variables_of

__all__ = ["Frame", "KeptError", "kept_error", "kept_errors", "variable_of"]


class KeptError(NamedTuple):
    """An exception, and what nothing but its traceback holds."""

    path: str
    kind: str
    """Name of its class."""
    nbytes: int
    storages: int
    variables: tuple[str, ...]
    """``function.name`` of each that leads there."""


class Frame(NamedTuple):
    """A local variable of a frame that ended, and what hangs on it."""

    variable: str
    """``function.name``."""
    storages: list[tuple[int, int]]
    """Address and bytes of each."""


def kept_errors(errors: Iterable[tuple[str, BaseException]], least: int) -> list[KeptError]:
    """Answer what some exceptions hold, by their paths."""
    found = []
    for path, error in errors:
        frames = [frame for traceback in tracebacks_of(error) for frame in _variables(traceback.tb_frame)]
        found.append(kept_error(path, error, frames, least))
    return found


def kept_error(path: str, error: BaseException, frames: Sequence[Frame], least: int) -> KeptError:
    """Answer what nothing but an exception's traceback holds, of what hangs on frames.

    One walk over the heap, where so many bytes at least hang on them at all; else nothing.
    """
    kind = class_name(type(error))
    storages = {address: nbytes for frame in frames for address, nbytes in frame.storages}
    if not storages or sum(storages.values()) < least:
        return KeptError(path, kind, 0, 0, ())
    watched = [("storage", address) for address in storages]
    _, answers, _, _ = C.find_holders(watched, OWN_FILES, [id(traceback) for traceback in tracebacks_of(error)])
    alone = {address for (_, address), answer in zip(watched, answers, strict=True) if answer[3] != "reached"}
    variables = {frame.variable for frame in frames if alone & {address for address, _ in frame.storages}}
    nbytes = sum(storages[address] for address in alone)
    return KeptError(path, kind, nbytes, len(alone), tuple(sorted(variables)))


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
