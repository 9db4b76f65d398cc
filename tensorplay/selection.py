"""Which findings are shown: the configuration, the caller's choice, and comments in the code.

A comment ``# tensorplay: ignore[TP102] the reason`` on a line that a finding points at, or on the line that asked,
silences that code there. What was silenced is counted, and a comment that silenced nothing is reported.
"""

from __future__ import annotations

import itertools
import linecache
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tensorplay.callers import Caller, shorten
from tensorplay.errors import TargetError
from tensorplay.layers import Finding, Severity, Suppressed, UnusedIgnore
from tensorplay.rules.registry import check_selectors, selects

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Config", "Selection", "load_config", "select_findings"]

_IGNORE = re.compile(r"#\s*tensorplay:\s*ignore\[([^\]]*)\]\s*(.*)")


class Config(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """``[tool.tensorplay]`` in pyproject.toml."""

    select: tuple[str, ...] = ("ALL",)
    ignore: tuple[str, ...] = ()
    fail_on: Severity = "warning"


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
    try:
        folder = (start or Path.cwd()).resolve()
    except FileNotFoundError:  # the current folder was deleted
        return Config()
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
            hidden[code, f"{shorten(comment.file)}:{comment.line}", comment.reason] += 1
        else:
            shown.append(finding)
    unused = [
        UnusedIgnore(code=c.code, file=shorten(c.file), line=c.line)
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
