"""Load what a user names on the command line: ``package.module:factory`` or ``file.py:factory``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
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
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the report
            return factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TargetError(f"{target} raised {_describe(error)}") from error


def _load_module(name: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:  # a console script has its own folder there, not the current one
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise TargetError(f"cannot import {name!r}: {_describe(error)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        del sys.modules[path.stem]
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
