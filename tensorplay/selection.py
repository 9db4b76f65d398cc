"""Which findings are shown: the configuration, the caller's choice, and comments in the code.

A comment ``# tensorplay: ignore[TP102] the reason`` on a line that a finding points at, or on the line that asked,
silences that code there. What was silenced is counted, and a comment that silenced nothing is reported: so is one that
names no code.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import re
import sys
import tokenize
import warnings
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

__all__ = ["Config", "Selection", "lenient_config", "load_config", "select_findings"]

_IGNORE = re.compile(r"#\s*tensorplay:\s*ignore\b\s*(?:\[([^\]]*)\])?\s*(.*)", re.IGNORECASE)
_NO_CODE = "no code"


class Config(msgspec.Struct, frozen=True, rename="kebab", forbid_unknown_fields=True):
    """``[tool.tensorplay]`` in pyproject.toml."""

    select: tuple[str, ...] = ("ALL",)
    ignore: tuple[str, ...] = ()
    fail_on: Severity = "warning"
    pinned_nbytes: int = 16 * 1024
    """TP301, TP304: a storage counts where so many of its bytes are seen by nobody else."""
    pinned_share: float = 0.5
    """TP301, TP304: and such a share of it."""
    ties: tuple[tuple[str, ...], ...] | None = None
    """TP303: the parameters that are meant to share a storage, by name; others are then warned of."""


class _Tools(msgspec.Struct, frozen=True):
    tensorplay: Config = Config()


class _Project(msgspec.Struct, frozen=True):
    tool: _Tools = _Tools()


_configs: dict[Path, tuple[float, Config]] = {}
_warned: set[str] = set()


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
        if os.path.isfile(path):  # False, too, where the folder may not be read
            return _read_config(path)
    return Config()


def lenient_config(caller: Caller) -> Config:
    """Read the configuration for a call that must not fail for it: where it is wrong, warn once and use none."""
    try:
        return load_config()
    except TargetError as error:
        if str(error) not in _warned:
            _warned.add(str(error))
            warnings.warn_explicit(f"{error}; the defaults count", UserWarning, caller.file, caller.line)
        return Config()


def _read_config(path: Path) -> Config:
    try:
        changed = path.stat().st_mtime
        known = _configs.get(path)
        if known is not None and known[0] == changed:
            return known[1]
        project = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        config = msgspec.convert(project, _Project).tool.tensorplay
        check_selectors((*config.select, *config.ignore))
    except (ValueError, OSError, RecursionError) as error:  # of TOML, of UTF-8 and of msgspec: all are ValueErrors
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
    config: Config | None = None,
) -> Selection:
    """Sort findings into shown and suppressed.

    Args:
        findings: what the rules found.
        select: codes or families to show, in place of the configuration's.
        ignore: codes or families to hide, in place of the configuration's.
        caller: the line that asked; its comment counts for every finding without a line of its own.
        config: the configuration; the project's where None.

    Raises:
        UnknownCode: a selector names no rule.
        TargetError: pyproject.toml is not valid and no configuration was given.
    """
    chosen = [[s] if isinstance(s, str) else s for s in (select, ignore) if s is not None]
    check_selectors(itertools.chain(*chosen))
    if config is None:
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
        if comment is not None:  # needed, whatever else hides the finding as well
            used.add((comment.file, comment.line, comment.code))
        if not selects(select, code):
            hidden[code, "select", None] += 1
        elif selects(ignore, code):
            hidden[code, "ignore", None] += 1
        elif comment is not None:
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
    lines = linecache.getlines(file)
    if not any(_IGNORE.search(line) for line in lines[first - 1 : last]):
        return []
    comments = _real_comments(tuple(lines))
    found = []
    for line in range(first, last + 1):
        match = _IGNORE.search(comments.get(line, ""))
        if match:
            reason = match[2].strip() or None
            codes = [code.strip().upper() for code in (match[1] or "").split(",") if code.strip()]
            found += [_Comment(code, file, line, reason) for code in codes or [_NO_CODE]]
    return found


@functools.lru_cache(maxsize=32)
def _real_comments(lines: tuple[str, ...]) -> dict[int, str]:
    """Find a file's comments by line; text inside a string is none."""
    found = {}
    rest = iter(lines)
    try:
        for token in tokenize.generate_tokens(lambda: next(rest, "")):
            if token.type == tokenize.COMMENT:
                found[token.start[0]] = token.string
    except (tokenize.TokenError, SyntaxError):  # what comes before is known
        pass
    return found
