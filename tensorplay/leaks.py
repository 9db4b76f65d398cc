"""snapshot() and leak_check(): what memory came, stayed and went between two moments, and what holds it."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

from tensorplay.callers import Caller
from tensorplay.decorating import decorated
from tensorplay.errors import LeakFound
from tensorplay.growth import Placed, Storages, Surge, growth_between
from tensorplay.inspection import outside_compiled_code, print_report
from tensorplay.layers import Finding, Growth
from tensorplay.reports import Report
from tensorplay.rules.registry import leak_rules
from tensorplay.selection import Config, lenient_config, select_findings
from tensorplay.slope import slope_of
from tensorplay.words import bytes_text, plural

__all__ = ["GrowthReport", "LeakCheck", "Snapshot", "leak_check", "snapshot"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class GrowthReport(Report):
    """A report whose text is what came and went between two moments."""

    __slots__ = ()
    about = ("growth",)

    @property
    def growth(self) -> Growth:
        """What came, stayed and went, and who holds it."""
        growth = self.document.growth
        assert growth is not None
        return growth

    def __repr__(self) -> str:
        came = plural(self.growth.new_storages, "new storage")
        return f"<tensorplay.GrowthReport: {came}, {plural(len(self.findings), 'finding')}>"


def _report(before: Storages, caller: Caller, steps: Sequence[int] = ()) -> GrowthReport:
    """Walk over the heap, and ask the rules about what is new."""
    config = lenient_config(caller)
    surge = Surge(before, config, slope_of(steps))
    findings = [finding for rule in leak_rules() for finding in rule.leaked(surge)]
    selection = select_findings(findings, caller=caller, config=config)
    return GrowthReport([], selection.findings, growth=surge.growth(), focus="growth", **selection.fields())


class Snapshot:
    """The storages of one moment: addresses and sizes, and no reference to any.

    ``diff()`` answers what came since, and who holds it.
    """

    __slots__ = ("__weakref__", "_placed", "_storages", "_time")

    def __init__(self) -> None:
        self._time = next(_clock)
        # Who holds what can be told now alone: of all that the oldest snapshot still in use lacks.
        oldest = min(_snapshots, key=lambda one: one._time, default=None)
        if oldest is None:
            self._storages = Storages.now()
            self._placed: tuple[Placed, ...] = ()
        else:
            surge = Surge(oldest._storages, Config())
            self._storages, self._placed = surge.after, tuple(surge.placed)
        _snapshots.add(self)

    @property
    def nbytes(self) -> int:
        """Bytes of all storages."""
        return self._storages.nbytes

    @property
    def storages(self) -> int:
        """How many there were."""
        return self._storages.total

    @outside_compiled_code
    def diff(self, other: Snapshot | None = None) -> GrowthReport:
        """Answer what came, stayed and went between two moments, and who held what came.

        Args:
            other: the other moment, the earlier or the later one: the order does not matter; now where None.

        Returns:
            The report: ``.growth``, ``str()``, ``.to_json()``; with ``.findings`` where the later moment is now.

        Raises:
            TypeError: other is no snapshot.

        Cost: now: one walk over the heap, and some 10 microseconds for each new storage. Else no walk.
        """
        caller = Caller.at(sys._getframe(1))
        if other is None:
            return _report(self._storages, caller)
        if not isinstance(other, Snapshot):
            raise TypeError(f"diff() takes a snapshot, got {type(other).__name__}: b = tp.snapshot(); a.diff(b)")
        first, last = sorted((self, other), key=lambda one: one._time)
        new = {address for address, _, _ in last._storages.keys - first._storages.keys}
        placed = [left for left in (some.among(new) for some in last._placed) if left.numbers]
        growth = growth_between(first._storages, last._storages, placed)
        return GrowthReport([], growth=growth, focus="growth")

    def __repr__(self) -> str:
        return f"<tensorplay.Snapshot: {plural(self.storages, 'storage')}, {bytes_text(self.nbytes)}>"


_clock = itertools.count()
_snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()


@outside_compiled_code
def snapshot() -> Snapshot:
    """Note which storages are alive now, with their bytes, to see later what came since.

    Returns:
        The snapshot: ``.diff()``, ``.nbytes``, ``.storages``. It holds no tensor and no storage, only addresses, sizes
        and, of what the oldest snapshot still in use lacks, paths.

    Cost: one walk over the heap: 0.1 s beside torch alone, half a second for 100 000 tensors among a million objects;
        32 bytes a storage. Some 10 microseconds for each storage that the oldest snapshot lacks. Other threads wait
        meanwhile.

    Source: as who_holds().
    """
    return Snapshot()


class LeakCheck:
    """What leak_check() answers: a context, a decorator, and after it the report.

    True where nothing was found. Before it has ended, asking for the report raises.
    """

    __slots__ = ("_before", "_caller", "_quiet", "_raises", "_report", "_steps")

    def __init__(self, caller: Caller, *, raises: bool, quiet: bool) -> None:
        self._caller = caller
        self._raises = raises
        self._quiet = quiet
        self._before: Storages | None = None
        self._report: GrowthReport | None = None
        self._steps: list[int] = []

    def __enter__(self) -> LeakCheck:
        if self._before is not None:
            raise RuntimeError("this leak_check() has been entered before: make one for each block")
        self._before = Storages.now()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._before is not None
        self._report = _report(self._before, self._caller, self._steps)
        if kind is not None:
            return  # what the frames of the error hold is no leak yet, and the error is what counts
        if self._raises and self.report.worst in ("error", "warning"):
            raise LeakFound(str(self.report))
        if self.report.findings and not self._quiet:
            print_report(self.report)

    def step(self) -> None:
        """Mark the end of a step: from six on, TP307 tells whether each step leaves memory behind.

        Cost: one walk over the heap.
        """
        if self._before is None or self._report is not None:
            raise RuntimeError("step() marks a step inside the block of leak_check()")
        self._steps.append(Storages.now().held_nbytes)

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Check each call of a function for what it leaves behind.

        Of a coroutine function the time it is awaited for, of a generator function that of its iteration.

        Raises:
            TypeError: it is an asynchronous generator function, or no function.
        """
        return decorated(
            function, lambda: LeakCheck(self._caller, raises=self._raises, quiet=self._quiet), "leak_check"
        )

    @property
    def report(self) -> GrowthReport:
        """The report.

        Raises:
            RuntimeError: the block has not ended yet.
        """
        if self._report is None:
            raise RuntimeError("leak_check() has its report when its block has ended")
        return self._report

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the rules found."""
        return self.report.findings

    @property
    def growth(self) -> Growth:
        """What came, stayed and went, and who holds it."""
        return self.report.growth

    def __bool__(self) -> bool:
        return not self.findings

    def to_json(self) -> str:
        """Answer the report as JSON."""
        return self.report.to_json()

    def to_dict(self) -> dict[str, Any]:
        """Answer the report as dicts and lists."""
        return self.report.to_dict()

    def html(self, path: str | Path | None = None) -> str | Path:
        """Answer the report as a whole HTML page, or write it and answer where it is."""
        return self.report.html(path)

    def text(self, **options: Any) -> str:
        """Answer the terminal text, as Report.text() does."""
        return self.report.text(**options)

    def __str__(self) -> str:
        return "leak_check(): running" if self._report is None else str(self._report)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        if self._report is None:
            return {"text/plain": str(self)}
        return self._report._repr_mimebundle_(include, exclude)

    def __repr__(self) -> str:
        if self._report is None:
            return "<tensorplay.LeakCheck: running>"
        return f"<tensorplay.LeakCheck: {plural(len(self.findings), 'finding')}>"


@overload
def leak_check(*, raises: bool = False, quiet: bool = False) -> LeakCheck: ...


@overload
def leak_check(
    function: Callable[[], object], *, steps: int = 10, warmup: int = 2, raises: bool = False, quiet: bool = False
) -> LeakCheck: ...


@outside_compiled_code
def leak_check(
    function: Callable[[], object] | None = None,
    *,
    steps: int = 10,
    warmup: int = 2,
    raises: bool = False,
    quiet: bool = False,
) -> LeakCheck:
    """Check a block, a function's calls or some steps for memory that they leave behind, and say what holds it.

    As a context, ``with tp.leak_check() as leaks:``, and a decorator, ``@tp.leak_check()``, it compares the storages
    before and after. ``leaks.step()`` marks steps in a block. ``tp.leak_check(train_step, steps=10)`` calls a function
    and marks each call as a step; what it returns is dropped. It does not collect garbage, and does not keep the
    collector from it: what that took meanwhile is not seen.

    Args:
        function: called without arguments, where given.
        steps: how often; from six on, TP307 tells whether each step leaves memory behind.
        warmup: calls before the first moment: they fill caches and make optimizer state.
        raises: whether errors and warnings raise LeakFound, as in a test.
        quiet: whether not to print the report where there are findings.

    Returns:
        The check: false where something was found; ``.findings``, ``.growth``, ``.report``, ``str()``.

    Raises:
        LeakFound: raises, and an error or a warning was found; an info does not count.
        TypeError: function cannot be called, steps and warmup are no int or come without one, raises or quiet no bool.
        ValueError: steps is below 1 or warmup below 0.

    Cost: two walks over the heap, of 0.1 s each beside torch alone, half a second for a million objects; one more for
        each step; some 10 microseconds for each new storage. Holds no tensor. Other threads wait meanwhile.

    Source: as who_holds().
    """
    for name, flag in (("raises", raises), ("quiet", quiet)):
        if not isinstance(flag, bool):
            raise TypeError(f"leak_check() takes {name} as True or False, got {type(flag).__name__}")
    check = LeakCheck(Caller.at(sys._getframe(1)), raises=raises, quiet=quiet)
    if function is None:
        if (steps, warmup) != (10, 2):
            raise TypeError("leak_check() takes steps and warmup with a function: leak_check(step, steps=10)")
        return check
    if not callable(function):
        raise TypeError(f"leak_check() takes a function without arguments, got {type(function).__name__}")
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"leak_check() takes {name} as an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"leak_check() takes {name} from {least} on, got {value}")
    for _ in range(warmup):
        function()
    with check:
        for _ in range(steps):
            function()
            check.step()
    return check
