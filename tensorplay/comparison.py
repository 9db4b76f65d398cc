"""compare(): two tensors beside each other, or two reports, before and after."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch

from tensorplay.callers import Caller
from tensorplay.classes import class_name
from tensorplay.differences import changes_between
from tensorplay.inspection import CALL_REFS, compare_two, outside_compiled_code, report_of
from tensorplay.layers import (
    Change,
    Document,
    SharedMember,
    TensorRecord,
    ViewChain,
    ViewStep,
    field_of,
)
from tensorplay.reports import ROOTS, Read, Report
from tensorplay.rules.layout import LayoutFacts
from tensorplay.rules.registry import pair_rules
from tensorplay.selection import lenient_config, select_findings
from tensorplay.words import listed

__all__ = ["compare"]

_LAYOUT = LayoutFacts()


@outside_compiled_code
def compare(a: torch.Tensor | Report, b: torch.Tensor | Report) -> Report:
    """Put two tensors beside each other, or two reports: before and after.

    Of two tensors: whether object, impl, StorageImpl, pointer, version counter are the same, the exact bytes that both
    reach, and a verdict in one line, which never rests on equal pointers alone. Of two reports: which fields of which
    tensor differ, and of the chains and shared storages that they have; an equal address may then be a new tensor's,
    which the report says.

    Args:
        a: a tensor, or the earlier report.
        b: a tensor, or the later report.

    Returns:
        A report with both records and ``.document.comparison``; of reports, the later one's records and
        ``.document.changes``. It prints nothing.

    Raises:
        TypeError: they are not two tensors or two reports.
        RuntimeError: both may be mapped from files, and /proc/self/maps cannot be read.

    Cost: constant; half a millisecond for the memory map where both lie in memory that PyTorch did not allocate; up to
        tens of milliseconds where two geometries of many dimensions interleave. Reads no element.

    Source: as for inspect(); the bytes in common are computed from sizes, strides and offsets, and /proc/self/maps.
    """
    caller = Caller.at(sys._getframe(1))
    if issubclass(type(a), Report) and issubclass(type(b), Report):
        return _compare_reports(a, b)
    if not C.is_tensor(a) or not C.is_tensor(b):
        given = f"{class_name(type(a))} and {class_name(type(b))}"
        raise TypeError(f"compare() takes two tensors or two reports, got {given}")
    refs = Counter((id(a), id(b)))
    reads = [
        Read(name, C.read(x, 1 + CALL_REFS * refs[id(x)] + (refs[id(x)] - 1)))
        for name, x in zip(ROOTS, (a, b), strict=True)
    ]  # fmt: skip
    report = report_of(reads, caller, report_unused=False)
    compare_two(report, a, b, 1)
    found = [
        _LAYOUT.of_pair(*report.records, gradient=C.grad_object(a) is b),
        *(rule.of_pair(*report.records) for rule in pair_rules()),
    ]
    if findings := [finding for finding in found if finding is not None]:
        report.add_findings(select_findings(findings, caller=caller, config=lenient_config(caller)).findings)
    report.replace_document(focus="comparison")
    return report


def _compare_reports(before: Report, after: Report) -> Report:
    """Match tensors by name where both reports use the same names, else by their order; chains and storages as well."""
    earlier, later = before.document, after.document
    one, two = _matched({r.name: r for r in earlier.records}, {r.name: r for r in later.records})
    report = Report.from_document(later)
    notes = (_same_addresses(one[name], record) for name, record in two.items() if name in one)
    changes = (*changes_between(one, two), *_changes_of_lists(earlier, later))
    report.replace_document(changes=changes, notes=tuple(filter(None, notes)), label=None, focus=None)
    return report


_Part = TypeVar("_Part")


def _matched(one: dict[str, _Part], two: dict[str, _Part]) -> tuple[dict[str, _Part], dict[str, _Part]]:
    """Call the earlier parts as the later ones, where no name is in both and there are equally many."""
    if not one.keys() & two.keys() and len(one) == len(two):
        one = dict(zip(two, one.values(), strict=True))
    return one, two


_LISTS = ("chains", "shared_storages", "shared_ranges")
# Numbers of one process, which two reports need not have in common.
_OWN_NUMBERS = frozenset({"name", "storage", "storages", "begin", "aliases"})


def _changes_of_lists(earlier: Document, later: Document) -> Iterator[Change]:
    """Compare what show_view_chain() and list_shared_storages() asked for."""
    for field in _LISTS:
        one, two = _matched(_by_name(getattr(earlier, field)), _by_name(getattr(later, field)))
        for name, part in two.items():
            if name not in one:
                yield Change(name=name, field=field, before=None, after="new")
                continue
            for key in part.__struct_fields__:
                was, now = _in_words(getattr(one[name], key)), _in_words(getattr(part, key))
                if was != now and key not in _OWN_NUMBERS:
                    yield Change(name=name, field=f"{field}.{key}", before=was, after=now)
        for name in [name for name in one if name not in two]:
            yield Change(name=name, field=field, before="there", after=None)


def _by_name(parts: Sequence[Any]) -> dict[str, Any]:
    """Call each part after its tensor; those that have no path may be called the same, and are numbered."""
    found: dict[str, Any] = {}
    seen: Counter[str] = Counter()
    for part in parts:
        name = part.name if isinstance(part, ViewChain) else part.members[0].name
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} ({seen[name]})"] = part
    return found


def _in_words(value: Any) -> Any:
    if isinstance(value, SharedMember):
        return f"{value.name}, bytes {value.first_byte} to {value.needed_nbytes}"
    if isinstance(value, ViewStep):
        return f"{value.op}({', '.join(f'{name}={argument}' for name, argument in value.args.items())})"
    return [_in_words(item) for item in value] if isinstance(value, tuple) else value


_ADDRESSES = {"TensorImpl": "impl.address", "StorageImpl": "storage.address", "data": "data.pointer"}


def _same_addresses(before: TensorRecord, after: TensorRecord) -> str | None:
    """Say what equal addresses in two reports do not prove."""
    same = [
        word for word, field in _ADDRESSES.items() if (one := field_of(before, field)) and one == field_of(after, field)
    ]
    if not same:
        return None
    return f"{after.name}: equal address of {listed(same)}: the same tensor or a recycled address: not known"
