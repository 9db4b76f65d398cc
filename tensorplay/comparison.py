"""compare(): two tensors beside each other, or two reports, before and after."""

from __future__ import annotations

import sys
from collections import Counter

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch

from tensorplay.callers import Caller
from tensorplay.classes import class_name
from tensorplay.differences import changes_between
from tensorplay.inspection import CALL_REFS, compare_two, outside_compiled_code, report_of
from tensorplay.layers import Document, TensorRecord, field_of
from tensorplay.reports import ROOTS, Read, Report
from tensorplay.rules.layout import LayoutFacts
from tensorplay.selection import lenient_config, select_findings
from tensorplay.words import listed

__all__ = ["compare"]

_LAYOUT = LayoutFacts()


@outside_compiled_code
def compare(a: torch.Tensor | Report, b: torch.Tensor | Report) -> Report:
    """Put two tensors beside each other, or two reports: before and after.

    Of two tensors: whether object, impl, StorageImpl, pointer, version counter are the same, the exact bytes that both
    reach, and a verdict in one line, which never rests on equal pointers alone. Of two reports: which fields of which
    tensor differ; an equal address may then be a new tensor's, which the report says.

    Args:
        a: a tensor, or the earlier report.
        b: a tensor, or the later report.

    Returns:
        A report with both records and ``.document.comparison``; of reports, the later one's records and
        ``.document.changes``. It prints nothing.

    Raises:
        TypeError: they are not two tensors or two reports.

    Cost: constant; up to tens of milliseconds where two geometries of many dimensions interleave. Reads no element.

    Source: as for inspect(); the bytes in common are computed from sizes, strides and offsets.
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
    finding = _LAYOUT.of_pair(*report.records, gradient=C.grad_object(a) is b)
    if finding is not None:
        report.add_findings(select_findings([finding], caller=caller, config=lenient_config(caller)).findings)
    report.replace_document(focus="comparison")
    return report


def _compare_reports(before: Report, after: Report) -> Report:
    """Match tensors by name where both reports use the same names, else by their order."""
    earlier, later = before.document, after.document
    one, two = _by_name(earlier), _by_name(later)
    if not one.keys() & two.keys() and len(one) == len(two):
        one = dict(zip(two, one.values(), strict=True))
    report = Report.from_document(later)
    notes = (_same_addresses(one[name], record) for name, record in two.items() if name in one)
    report.replace_document(
        changes=tuple(changes_between(one, two)), notes=tuple(filter(None, notes)), label=None, focus=None
    )
    return report


_ADDRESSES = {"TensorImpl": "impl.address", "StorageImpl": "storage.address", "data": "data.pointer"}


def _same_addresses(before: TensorRecord, after: TensorRecord) -> str | None:
    """Say what equal addresses in two reports do not prove."""
    same = [
        word for word, field in _ADDRESSES.items() if (one := field_of(before, field)) and one == field_of(after, field)
    ]
    if not same:
        return None
    return f"{after.name}: equal address of {listed(same)}: the same tensor or a recycled address: not known"


def _by_name(document: Document) -> dict[str, TensorRecord]:
    return {record.name: record for record in document.records}
