"""Which findings are shown: the configuration, the caller's choice, and comments in the code.

A comment ``# tensorplay: ignore[TP102] the reason`` on a line that a finding points at, or on the line that asked,
silences that code there. What was silenced is counted, and a comment that silenced nothing is reported.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import re
import sys
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tensorplay.errors import TargetError
from tensorplay.layers import Finding, Severity, Suppressed, UnusedIgnore, Where
from tensorplay.rules.registry import check_selectors, selects

if TYPE_CHECKING:
    from typing import TypeGuard

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Caller", "Config", "Selection", "load_config", "select_findings"]

_LONGEST_NAME = 48
_ASKING = ("inspect", "inspect_tensor_memory", "inspect_data_ptr", "inspect_storage_device", "check",
           "verify_data_ptr_consistency")  # fmt: skip
_IGNORE = re.compile(r"#\s*tensorplay:\s*ignore\[([^\]]*)\]\s*(.*)")


class Config(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """``[tool.tensorplay]`` in pyproject.toml."""

    select: tuple[str, ...] = ("ALL",)
    ignore: tuple[str, ...] = ()
    fail_on: Severity = "warning"


def _is_call_of_ours(node: ast.AST) -> TypeGuard[ast.Call]:
    """Tell whether a node calls one of our functions; a name it was imported under goes unseen."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    return name in _ASKING


class _Tools(msgspec.Struct, frozen=True):
    tensorplay: Config = Config()


class _Project(msgspec.Struct, frozen=True):
    tool: _Tools = _Tools()


_configs: dict[Path, tuple[float, Config]] = {}


def load_config(start: Path | None = None) -> Config:
    """Read the nearest pyproject.toml at or above a folder, the current one by default.

    Raises:
        TargetError: the file or its ``[tool.tensorplay]`` is not valid.
    """
    folder = (start or Path.cwd()).resolve()
    for candidate in (folder, *folder.parents):
        path = candidate / "pyproject.toml"
        if path.is_file():
            return _read_config(path)
    return Config()


def _read_config(path: Path) -> Config:
    changed = path.stat().st_mtime
    known = _configs.get(path)
    if known is not None and known[0] == changed:
        return known[1]
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))
        config = msgspec.convert(project, _Project).tool.tensorplay
        check_selectors((*config.select, *config.ignore))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError, ValueError, OSError) as error:
        raise TargetError(f"{path}: [tool.tensorplay] is not valid: {error}") from error
    _configs[path] = (changed, config)
    return config


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
        except SyntaxError:
            return None
        return expression if isinstance(expression, ast.Call) else None

    def where(self, name: str) -> Where:
        """Answer the place, for a finding about one of the tensors handed in there."""
        function = None if self.code.co_name == "<module>" else self.code.co_name
        return Where(name=name, file=_shorten(self.file), line=self.span()[0], function=function, source=self.source)

    def argument(self, fallback: str, index: int = 0) -> str:
        """Answer the source text of one of the call's arguments, or the fallback where it is not plain to see."""
        call = self._call()
        if call is None or index >= len(call.args):
            return fallback
        if any(isinstance(argument, ast.Starred) for argument in call.args[: index + 1]):
            return fallback
        name = ast.unparse(call.args[index])
        return name if len(name) <= _LONGEST_NAME else fallback


def _shorten(file: str) -> str:
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file


class Selection(msgspec.Struct, frozen=True):
    """The findings to show, and what became of the others."""

    findings: tuple[Finding, ...]
    suppressed: tuple[Suppressed, ...] = ()
    unused_ignores: tuple[UnusedIgnore, ...] = ()

    def fields(self) -> dict[str, Any]:
        """Answer what a Report takes beside the findings."""
        return {"suppressed": self.suppressed, "unused_ignores": self.unused_ignores}


def select_findings(
    findings: Sequence[Finding],
    *,
    select: Sequence[str] | None = None,
    ignore: Sequence[str] | None = None,
    caller: Caller | None = None,
    report_unused: bool = True,
) -> Selection:
    """Sort findings into shown and suppressed.

    Args:
        findings: what the rules found.
        select: codes or families to show, in place of the configuration's.
        ignore: codes or families to hide, in place of the configuration's.
        caller: the line that asked; its comment counts for every finding without a line of its own.
        report_unused: whether to read the caller's comment even when there is no finding.

    Raises:
        UnknownCode: a selector names no rule.
        TargetError: pyproject.toml is not valid.
    """
    chosen = [[s] if isinstance(s, str) else s for s in (select, ignore) if s is not None]
    check_selectors(itertools.chain(*chosen))
    if not findings and not report_unused:
        return Selection(())
    config = load_config() if select is None or ignore is None else Config()
    select = config.select if select is None else [select] if isinstance(select, str) else select
    ignore = config.ignore if ignore is None else [ignore] if isinstance(ignore, str) else ignore
    placed = [_placed(finding, caller) for finding in findings]

    shown: list[Finding] = []
    hidden: Counter[tuple[str, str, str | None]] = Counter()
    used: set[tuple[str, int, str]] = set()
    for finding, comments in placed:
        code = finding.code
        comment = next((c for c in comments if selects([c.code], code)), None)
        if not selects(select, code):
            hidden[code, "select", None] += 1
        elif selects(ignore, code):
            hidden[code, "ignore", None] += 1
        elif comment is not None:
            used.add((comment.file, comment.line, comment.code))
            hidden[code, f"{_shorten(comment.file)}:{comment.line}", comment.reason] += 1
        else:
            shown.append(finding)
    unused = [
        UnusedIgnore(code=c.code, file=_shorten(c.file), line=c.line)
        for c in _comments(caller)
        if (c.file, c.line, c.code) not in used
    ]
    suppressed = [Suppressed(code=c, count=n, by=by, reason=why) for (c, by, why), n in hidden.items()]
    return Selection(tuple(shown), tuple(suppressed), tuple(unused))


class _Comment(msgspec.Struct, frozen=True):
    code: str
    file: str
    line: int
    reason: str | None


def _placed(finding: Finding, caller: Caller | None) -> tuple[Finding, list[_Comment]]:
    if caller is None or finding.where.file is not None:
        return finding, _comments_at(finding.where.file, finding.where.line, finding.where.line)
    where = caller.where(finding.where.name)
    return msgspec.structs.replace(finding, where=where), _comments(caller)


def _comments(caller: Caller | None) -> list[_Comment]:
    return [] if caller is None else _comments_at(caller.file, *caller.span())


def _comments_at(file: str | None, first: int | None, last: int | None) -> list[_Comment]:
    if file is None or first is None or last is None:
        return []
    found = []
    for line in range(first, last + 1):
        match = _IGNORE.search(linecache.getline(file, line))
        if match:
            reason = match[2].strip() or None
            codes = [code.strip() for code in match[1].split(",") if code.strip()]
            found += [_Comment(code, file, line, reason) for code in codes]
    return found
