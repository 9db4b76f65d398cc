"""The line of the user's code that asked: where it is, and what it calls what it handed in."""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from tensorplay.layers import Where

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["Caller", "shorten"]

_LONGEST_NAME = 48
# Written out in the call: their text would only make every path longer.
_NAMELESS = (
    ast.Dict,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Lambda,
    ast.ListComp,
    ast.DictComp,
    ast.SetComp,
    ast.GeneratorExp,
)
_ASKING = ("inspect", "inspect_tensor_memory", "inspect_data_ptr", "inspect_storage_device", "check",
           "verify_data_ptr_consistency")  # fmt: skip


class Caller(msgspec.Struct, frozen=True):
    """The line of the user's code that asked. Keeps the code object and numbers, never the frame."""

    code: types.CodeType
    lasti: int
    line: int
    source: Literal["call", "definition"] = "call"

    @classmethod
    def at(cls, frame: types.FrameType) -> Caller:
        """Describe a frame's current call. Reads no locals."""
        return cls(frame.f_code, frame.f_lasti, frame.f_lineno)

    @classmethod
    def of_function(cls, function: object) -> Caller | None:
        """Describe where a function is defined; None for a callable without Python code."""
        code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
        return None if code is None else cls(code, 0, code.co_firstlineno, "definition")

    @property
    def file(self) -> str:
        """The source file, as the code object names it."""
        return self.code.co_filename

    def span(self) -> tuple[int, int]:
        """Answer the first and the last line of the call, or of the head of the definition."""
        if self.source == "definition":
            return self.line, self.line
        found = self._position()
        if found is not None:
            return found[0], found[1]
        call = self._call()
        return (self.line, self.line) if call is None else (call.lineno, call.end_lineno or call.lineno)

    def _position(self) -> tuple[int, int, int | None, int | None] | None:
        """Answer first and last line, first and last column (UTF-8 bytes) of the call, where the code knows them."""
        if self.source == "definition" or sys.version_info < (3, 11):
            return None
        found = next(itertools.islice(self.code.co_positions(), max(self.lasti, 0) // 2, None), None)
        if found is None or found[0] is None or found[1] is None:
            return None
        return found[0], found[1], found[2], found[3]

    def _call(self) -> ast.Call | None:
        """Find the call in its source, where there is source."""
        position = self._position()
        try:
            if position is None or position[2] is None:
                tree = ast.parse("".join(linecache.getlines(self.file)))
                calls = [node for node in ast.walk(tree) if _is_call_of_ours(node)]
                around = [call for call in calls if call.lineno <= self.line <= (call.end_lineno or call.lineno)]
                return around[0] if len(around) == 1 else None
            first, last, start, end = position
            raw = [linecache.getline(self.file, number).encode() for number in range(first, last + 1)]
            raw[-1] = raw[-1][:end]
            raw[0] = raw[0][start:]
            expression = ast.parse(b"".join(raw).decode(errors="replace").strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError):
            return None
        return expression if isinstance(expression, ast.Call) else None

    def where(self, name: str) -> Where:
        """Answer the place, for a finding about one of the tensors handed in there."""
        function = None if self.code.co_name == "<module>" else self.code.co_name
        return Where(name=name, file=shorten(self.file), line=self.span()[0], function=function, source=self.source)

    def argument(self, fallback: str, index: int = 0) -> str:
        """Answer the source text of one of the call's arguments, or the fallback where it is not plain to see."""
        call = self._call()
        if call is None or index >= len(call.args):
            return fallback
        if any(isinstance(argument, ast.Starred) for argument in call.args[: index + 1]):
            return fallback
        if isinstance(call.args[index], _NAMELESS):
            return fallback
        try:
            name = ast.unparse(call.args[index])
        except RecursionError:
            return fallback
        return name if len(name) <= _LONGEST_NAME else fallback


def _is_call_of_ours(node: ast.AST) -> TypeGuard[ast.Call]:
    """Tell whether a node calls one of our functions; a name it was imported under goes unseen."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    return name in _ASKING


def shorten(file: str) -> str:
    """Answer a path below the current folder relative to it, any other as it is."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the current folder is gone
        return file
