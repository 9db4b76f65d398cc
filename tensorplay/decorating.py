"""Contexts as decorators of any function: of a coroutine function they last while it is awaited."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar, cast

__all__ = ["decorated"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def decorated(
    function: Callable[_P, _T], context: Callable[[], AbstractContextManager[object]], call: str
) -> Callable[_P, _T]:
    """Answer a function that runs in a new context each time it is called, awaited or iterated.

    Args:
        function: what is decorated.
        context: makes the context.
        call: what the decorator is called, for errors.

    Raises:
        TypeError: it is an asynchronous generator function, or no function.
    """
    if not callable(function):
        raise TypeError(f"{call}() decorates a function, got {type(function).__name__}")
    if inspect.isasyncgenfunction(function):
        raise TypeError(f"{call}() cannot decorate an asynchronous generator: put `with {call}():` in it")

    async def awaited(*args: Any, **kwargs: Any) -> Any:
        with context():
            return await function(*args, **kwargs)  # type: ignore[misc]

    def iterated(*args: Any, **kwargs: Any) -> Any:
        with context():
            return (yield from function(*args, **kwargs))  # type: ignore[misc]

    def called(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    if inspect.iscoroutinefunction(function):
        return cast("Callable[_P, _T]", functools.wraps(function)(awaited))
    if inspect.isgeneratorfunction(function):
        return cast("Callable[_P, _T]", functools.wraps(function)(iterated))
    return cast("Callable[_P, _T]", functools.wraps(function)(called))
