"""The line of the user's code that asked: where it is, and what it calls what it handed in."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import linecache
import os
import sys
import time
import tokenize
import types
from pathlib import Path
from typing import Literal

import msgspec

from tensorplay.layers import Where

__all__ = ["Caller", "shorten", "stack_of"]

_LONGEST_NAME = 48
# Written out in the call: their text would only make every path longer.
_NAMELESS = (
    ast.Constant,
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
_MOST_CALLS = 20
_OWN = str(Path(__file__).parent) + os.sep
_ASKING = ("inspect", "inspect_tensor_memory", "inspect_data_ptr", "inspect_storage_device", "check", "compare",
           "verify_data_ptr_consistency", "is_safe_view", "recommend_fix", "show_view_chain",
           "list_shared_storages", "who_holds", "leak_check", "check_graph", "saved_for_backward",
           "audit_device_consistency", "validate_state_dict_load", "safe_load_state_dict", "materialize_audit",
           "guard_backward", "verify", "repair")  # fmt: skip


def _process_start() -> float:
    """Answer when this process began, by the clock of file times, or now where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) + 1
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


_PROCESS_START = _process_start()


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
        code = _code_of(function)
        return None if code is None else cls(code, 0, _head(code)[0], "definition")

    @property
    def file(self) -> str:
        """The source file, as the code object names it."""
        return self.code.co_filename

    def span(self) -> tuple[int, int]:
        """Answer the first and the last line of the call, or of the head of the definition."""
        if self.source == "definition":
            return self.code.co_firstlineno, _head(self.code)[1]
        found = self.position()
        if found is not None:
            return found[0], found[1]
        call = self._call()
        return (self.line, self.line) if call is None else (call.lineno, call.end_lineno or call.lineno)

    def position(self) -> tuple[int, int, int | None, int | None] | None:
        """Answer first and last line, first and last column (UTF-8 bytes) of the call, where the code knows them."""
        if self.source == "definition" or sys.version_info < (3, 11):
            return None
        found = next(itertools.islice(self.code.co_positions(), max(self.lasti, 0) // 2, None), None)
        if found is None or found[0] is None or found[1] is None:
            return None
        return found[0], found[1], found[2], found[3]

    def _call(self) -> ast.Call | None:
        """Find the call in its source, where there is source and it is plainly a call of one of our functions."""
        position = self.position()
        try:
            if position is None or position[2] is None:
                mentions = _mentions_of_ours(tuple(linecache.getlines(self.file)))
                around = [node for node in mentions if node.lineno <= self.line <= (node.end_lineno or node.lineno)]
                return around[0] if len(around) == 1 and isinstance(around[0], ast.Call) else None
            first, last, start, end = position
            raw = [linecache.getline(self.file, number).encode() for number in range(first, last + 1)]
            raw[-1] = raw[-1][:end]
            raw[0] = raw[0][start:]
            expression = ast.parse(b"".join(raw).decode(errors="replace").strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, SystemError):
            return None  # SystemError: CPython 3.11 parses in one thread at a time only, and raises it otherwise
        return expression if isinstance(expression, ast.Call) and _is_ours(expression.func) else None

    def where(self, name: str) -> Where:
        """Answer the place, for a finding about one of the tensors handed in there."""
        function = None if self.code.co_name == "<module>" else self.code.co_name
        line = self.line if self.source == "definition" else self.span()[0]
        return Where(name=name, file=shorten(self.file), line=line, function=function, source=self.source)

    def argument(self, fallback: str, index: int = 0) -> str:
        """Answer the source text of one of the call's arguments, or the fallback where it is not plain to see."""
        call = self._call()
        if call is None or index >= len(call.args) or _edited(self.file):
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


def _code_of(function: object) -> types.CodeType | None:
    """Find the Python code that runs when an object is called; None where it is not plain to see."""
    try:
        function = inspect.unwrap(function)  # type: ignore[arg-type]
        while isinstance(function, functools.partial):
            function = inspect.unwrap(function.func)
    except Exception:  # it wraps itself, or its attributes are code that raises
        return None
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _head(code: types.CodeType) -> tuple[int, int]:
    """Answer the line of a function's `def`, which decorators precede, and that of the colon after it."""
    first = code.co_firstlineno
    if not linecache.getline(code.co_filename, first).lstrip().startswith(("@", "def ", "async ")):
        return first, first  # a lambda, or the file is gone
    lines = iter(linecache.getlines(code.co_filename)[first - 1 :])
    defined, depth = 0, 0
    try:
        for token in tokenize.generate_tokens(lambda: next(lines, "")):
            if token.type == tokenize.OP:
                depth += (token.string in "([{") - (token.string in ")]}")
            if token.string == "def" and not defined:
                defined = first + token.start[0] - 1
            elif token.string == ":" and defined and not depth:
                return defined, first + token.start[0] - 1
    except (tokenize.TokenError, SyntaxError):
        pass
    return first, first


def _edited(file: str) -> bool:
    """Tell whether a file was changed after this process began: what runs may have been another text."""
    entry = linecache.cache.get(file)
    return entry is not None and len(entry) == 4 and entry[1] is not None and entry[1] > _PROCESS_START


@functools.lru_cache(maxsize=32)
def _mentions_of_ours(lines: tuple[str, ...]) -> list[ast.expr]:
    """Find the calls of our functions in a file, and where one is named without being called."""
    nodes = list(ast.walk(ast.parse("".join(lines))))
    calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
    return [calls.get(id(node), node) for node in nodes if isinstance(node, ast.expr) and _is_ours(node)]


def _is_ours(node: ast.expr) -> bool:
    """Tell whether an expression names one of our functions; a name it was imported under goes unseen."""
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)) in _ASKING


def stack_of(frame: types.FrameType | None) -> tuple[str, ...]:
    """Name the calls on the way to a frame, the innermost first, without those of this package. Reads no locals."""
    found: list[str] = []
    while frame is not None and len(found) < _MOST_CALLS:
        code = frame.f_code
        if not code.co_filename.startswith((_OWN, "<string>", "<frozen")):
            found.append(f"{shorten(code.co_filename)}:{frame.f_lineno} in {code.co_name}")
        frame = frame.f_back
    return tuple(found)


def shorten(file: str) -> str:
    """Answer a path below the current folder relative to it, any other as it is."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the current folder is gone
        return file
