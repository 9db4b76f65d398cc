"""Which rules there are: codes.toml allots the codes, each names its rule."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import msgspec

from tensorplay.errors import UnknownCode
from tensorplay.layers import Finding, Severity, TensorRecord, Where

if TYPE_CHECKING:
    from tensorplay.backward import Graph
    from tensorplay.bodies import Body
    from tensorplay.growth import Surge
    from tensorplay.loading import ModelState
    from tensorplay.placement import Placement
    from tensorplay.scene import Scene

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "BodyRule",
    "CodeEntry",
    "DeviceRule",
    "GraphRule",
    "LeakRule",
    "PairRule",
    "Rule",
    "SceneRule",
    "StateRule",
    "all_codes",
    "body_rules",
    "check_selectors",
    "code_entry",
    "device_rules",
    "graph_rules",
    "leak_rules",
    "load_rule",
    "pair_rules",
    "record_rules",
    "scene_rules",
    "selects",
    "state_rules",
]


class CodeEntry(msgspec.Struct, frozen=True):
    """One line of codes.toml."""

    name: str
    severity: Severity
    since: str
    rule: str
    preview: bool = False


class _Coded:
    """What all rules have: a code, and findings that take their name and severity from its entry."""

    code: ClassVar[str]

    def finding(
        self,
        name: str,
        *,
        headline: str,
        subject: str,
        evidence: dict[str, Any],
        why: str,
        fix: str,
        source: str,
        severity: Severity | None = None,
    ) -> Finding:
        """Fill in what the code's entry decides: the severity where none is given."""
        entry = code_entry(self.code)
        return Finding(
            code=self.code,
            name=entry.name,
            severity=severity or entry.severity,
            headline=headline,
            subject=subject,
            where=Where(name=name),
            evidence=evidence,
            why=why,
            fix=fix,
            source=source,
        )


class Rule(_Coded):
    """A rule over single records.

    The docstring is the rule's page: what it checks, why it matters, known limits, an example that fires, the healthy
    form, the safety of the fix, the sources. ``tensorplay explain`` and docs/reference/rules show it.
    """

    def suspects(self, record: Any) -> bool:
        """Tell in constant time whether one record shows the fault.

        Args:
            record: a ``_C.TensorRecord`` or a TensorRecord: the attributes are the same.
        """
        raise NotImplementedError

    def findings(self, records: Sequence[TensorRecord]) -> Iterator[Finding]:
        """Explain the suspects of one report, one finding a cause."""
        raise NotImplementedError


class SceneRule(_Coded):
    """A rule over all that one check() gathered: several tensors, arrays, the process's memory map.

    inspect() does not ask it. The docstring is the rule's page, as for Rule.
    """

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain what is wrong, one finding a cause."""
        raise NotImplementedError


class LeakRule(_Coded):
    """A rule over the storages that came between two moments and are still there.

    leak_check() asks it. The docstring is the rule's page, as for Rule.
    """

    def leaked(self, surge: Surge) -> Iterator[Finding]:
        """Explain what keeps them, one finding a cause."""
        raise NotImplementedError


class GraphRule(_Coded):
    """A rule over the graph behind some tensors.

    check_graph() asks it. The docstring is the rule's page, as for Rule.
    """

    def in_graph(self, graph: Graph) -> Iterator[Finding]:
        """Explain what backward would stumble over, one finding a cause."""
        raise NotImplementedError


class DeviceRule(_Coded):
    """A rule over what lies on which device.

    audit_device_consistency() asks it, and check(). The docstring is the rule's page, as for Rule.
    """

    def in_placement(self, placement: Placement) -> Iterator[Finding]:
        """Explain what lies where it does not belong, one finding a cause."""
        raise NotImplementedError


class StateRule(_Coded):
    """A rule over what modules have registered: beside a state dict, beside themselves before, beside optimizers.

    check() asks it, and all that look at a load. The docstring is the rule's page, as for Rule.
    """

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain what has no values, or not those that it should have, one finding a cause."""
        raise NotImplementedError


class PairRule(_Coded):
    """A rule over two tensors beside each other.

    compare() asks it. The docstring is the rule's page, as for Rule.
    """

    def of_pair(self, a: TensorRecord, b: TensorRecord) -> Finding | None:
        """Explain what two records seem to be to each other; None where they are what they seem."""
        raise NotImplementedError


class BodyRule(_Coded):
    """A rule over DTensors: the body beside the local tensor.

    dtensor.verify() asks it, check() and audit_device_consistency(). The docstring is the rule's page, as for Rule.
    """

    def in_bodies(self, bodies: Sequence[Body]) -> Iterator[Finding]:
        """Explain what does not fit, one finding a cause."""
        raise NotImplementedError


@functools.cache
def _table() -> dict[str, CodeEntry]:
    text = resources.files("tensorplay.rules").joinpath("codes.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, CodeEntry])


def all_codes() -> list[str]:
    """Answer every code, sorted."""
    return sorted(_table())


def code_entry(code: str) -> CodeEntry:
    """Answer a code's entry.

    Raises:
        UnknownCode: no rule has it.
    """
    try:
        return _table()[code]
    except KeyError:
        raise UnknownCode(f"no rule has the code {code!r}; there are {', '.join(all_codes())}") from None


@functools.cache
def load_rule(code: str) -> _Coded:
    """Import a code's rule."""
    module, _, name = code_entry(code).rule.partition(":")
    rule = cast("type[_Coded]", getattr(importlib.import_module(module), name))
    if rule.code != code:
        raise RuntimeError(f"codes.toml names {rule.__qualname__} for {code}, the rule says {rule.code}")
    return rule()


_AnyRule = TypeVar("_AnyRule", bound=_Coded)


@functools.cache
def _rules_of(kind: type[_AnyRule]) -> tuple[_AnyRule, ...]:
    return tuple(rule for code in all_codes() if isinstance(rule := load_rule(code), kind))


def record_rules() -> tuple[Rule, ...]:
    """Answer the rules that look at one record in constant time: all that inspect() runs."""
    return _rules_of(Rule)


def scene_rules() -> tuple[SceneRule, ...]:
    """Answer the rules that check() runs beside them."""
    return _rules_of(SceneRule)


def leak_rules() -> tuple[LeakRule, ...]:
    """Answer the rules that leak_check() runs."""
    return _rules_of(LeakRule)


def graph_rules() -> tuple[GraphRule, ...]:
    """Answer the rules that check_graph() runs."""
    return _rules_of(GraphRule)


def device_rules() -> tuple[DeviceRule, ...]:
    """Answer the rules that audit_device_consistency() runs, and check() beside the others."""
    return _rules_of(DeviceRule)


def state_rules() -> tuple[StateRule, ...]:
    """Answer the rules on modules' state."""
    return _rules_of(StateRule)


def body_rules() -> tuple[BodyRule, ...]:
    """Answer the rules on DTensors."""
    return _rules_of(BodyRule)


def pair_rules() -> tuple[PairRule, ...]:
    """Answer the rules that compare() runs."""
    return _rules_of(PairRule)


_PAGES = "docs/reference/rules in the TensorPlay checkout"


def rule_page(code: str) -> str:
    """Answer a rule's page in Markdown, from its docstring."""
    entry = code_entry(code)
    body = inspect.getdoc(type(load_rule(code))) or f"No page: Python runs without docstrings (-OO). See {_PAGES}."
    preview = " · preview" if entry.preview else ""
    return f"# {code} {entry.name}\n\n*{entry.severity} · since {entry.since}{preview}*\n\n{body}\n"


def selects(selectors: Iterable[str], code: str) -> bool:
    """Tell whether one of the selectors (``TP102``, ``TP1``, ``ALL``, in any case) names the code."""
    return any(name == "ALL" or code.startswith(name) for name in map(str.upper, selectors))


def check_selectors(selectors: Iterable[str]) -> None:
    """Raise UnknownCode for a selector that names no code."""
    for selector in selectors:
        if not isinstance(selector, str):
            raise TypeError(f"a code is a str like 'TP102', got {type(selector).__name__}")
        # A family without rules yet (TP5) is a valid selector: a configuration may name it ahead.
        family = len(selector) == 3 and selector.upper().startswith("TP") and selector[2] in "0123456789"
        if selector and (family or any(selects([selector], code) for code in all_codes())):
            continue
        raise UnknownCode(f"{selector!r} names no rule; there are {', '.join(all_codes())}")
