"""Load what a user names on the command line: ``package.module:factory`` or ``file.py:factory``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tensorplay.cli.output import message_of
from tensorplay.errors import TargetError

__all__ = ["call_target", "load_target"]


def load_target(target: str) -> Callable[[], Any]:
    """Import a target and answer its factory.

    Raises:
        TargetError: in one line, what does not load and what to write instead.
    """
    # Before the target's folder goes first: a rich.py may lie in it.
    importlib.import_module("tensorplay.inspection")
    importlib.import_module("tensorplay.render.text")
    location, colon, name = target.rpartition(":")
    if not colon or not location or not name:
        raise TargetError(f"{target!r} is no target: write package.module:factory or file.py:factory")
    module = _load_file(Path(location)) if location.endswith(".py") else _load_module(location)
    factory: Any = module
    for part in name.split("."):
        try:
            factory = getattr(factory, part)
        except AttributeError:
            functions = ", ".join(key for key, value in vars(module).items() if callable(value) and key[0] != "_")
            raise TargetError(f"{location} has no {name!r}; it has {functions or 'no functions'}") from None
        except Exception as error:
            raise TargetError(f"cannot read {name!r} of {location}: {_describe(error)}") from error
    if not callable(factory):
        raise TargetError(f"{target} is a {type(factory).__name__}: name a function without arguments that returns it")
    return factory  # type: ignore[no-any-return]


def call_target(target: str, factory: Callable[[], Any]) -> Any:
    """Call the factory.

    Raises:
        TargetError: it raised; the message names the exception and its line.
    """
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise TargetError(f"{target} cannot be called without arguments ({error}): name a function that can") from None
    except Exception:  # no signature to be had: the call itself will tell
        pass
    try:
        with _stdout_aside():
            made = factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TargetError(f"{target} raised {_describe(error)}") from error
    if inspect.iscoroutine(made):
        made.close()
        raise TargetError(f"{target} is an async function: name one that answers the object itself")
    return made


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """Send to stderr what users' code prints, from C as well: stdout is for the report."""
    try:
        kept, to = os.dup(1), sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # closed, or no files
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        os.dup2(to, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _load_module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script has its own folder there, not the current one
        sys.path.insert(0, folder)
    try:
        with _stdout_aside():
            return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TargetError(f"cannot import {name!r}: {_describe(error)}") from error


def _load_file(path: Path) -> ModuleType:
    try:
        present = path.is_file()
    except OSError as error:
        raise TargetError(f"cannot read {path}: {error.strerror}") from error
    if not present:
        raise TargetError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A file called typing.py must not take the place of the module of that name.
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of {folder}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with _stdout_aside():
            spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        del sys.modules[name]
        raise TargetError(f"cannot import {path}: {_describe(error)}") from error
    return module


def _describe(error: BaseException) -> str:
    words = message_of(error)
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or isinstance(error, ImportError):
        return words
    return f"{words} (at {place.tb_frame.f_code.co_filename}:{place.tb_lineno})"
