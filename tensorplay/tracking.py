"""track(): what happens to memory over time: blocks that come and go, by operator and line, the peak, copies, reuse."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
from tensorplay.decorating import decorated
from tensorplay.history import IN_BACKWARD, line_text, own_line, stack_lines
from tensorplay.inspection import outside_compiled_code
from tensorplay.layers import Finding, LifetimeRange, TrackedSite, TrackSummary
from tensorplay.reports import Report
from tensorplay.words import bytes_text, plural

__all__ = ["Tracker", "TrackReport", "track"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NS = 1e-9
_MOST_DEPTH = 64


class TrackReport(Report):
    """A report whose text is what happened to memory while it was tracked."""

    __slots__ = ()
    about = ("tracked",)

    @property
    def tracked(self) -> TrackSummary:
        """What came, went and stayed, by operator and line."""
        tracked = self.document.tracked
        assert tracked is not None
        return tracked

    @property
    def sites(self) -> tuple[TrackedSite, ...]:
        """By operator and stack, those with the most bytes at the peak first."""
        return self.tracked.sites

    @property
    def peak_nbytes(self) -> int:
        """The most bytes alive at once, of those that came since."""
        return self.tracked.peak_nbytes

    @property
    def live_nbytes(self) -> int:
        """Bytes that came and are alive."""
        return self.tracked.live_nbytes

    def __repr__(self) -> str:
        found = self.tracked
        return f"<tensorplay.TrackReport: {plural(found.allocs, 'block')}, peak {bytes_text(found.peak_nbytes)}>"


class _Row(NamedTuple):
    """What _C.track_origins() answers for one operator and stack."""

    op: str
    site: int
    allocs: int
    alloc_nbytes: int
    frees: int
    freed_nbytes: int
    live_blocks: int
    live_nbytes: int
    nbytes_at_peak: int
    tensors: int
    writes: int
    copies: int
    copied_nbytes: int
    copying: int
    longest_copy: int


class _Figures(NamedTuple):
    """What was followed until a moment, as _C answers it."""

    totals: dict[str, Any]
    rows: list[tuple[Any, ...]]

    @classmethod
    def now(cls) -> _Figures:
        return cls(C.track_totals(), C.track_origins())


class Tracker:
    """Follows memory between start() and stop(), as a context or a decorator too; report() answers at any time.

    One in a process at a time: what it follows is the process's allocator.
    """

    def __init__(self, *, stacks: bool = True, depth: int = 30) -> None:
        if type(stacks) is not bool:
            raise TypeError(f"track(stacks=) takes True or False, got {type(stacks).__name__}")
        if type(depth) is not int:
            raise TypeError(f"track(depth=) takes a number of frames, got {type(depth).__name__}")
        if not 1 <= depth <= _MOST_DEPTH:
            raise ValueError(f"track(depth=) takes 1 to {_MOST_DEPTH} frames, got {depth}")
        self._stacks = stacks
        self._depth = depth
        self._began: int | None = None
        self._ended: _Figures | None = None
        self._report: TrackReport | None = None

    def start(self) -> Tracker:
        """Follow memory from now on; what was followed before is forgotten.

        Raises:
            RuntimeError: something is tracked already, or the process's CPU allocator cannot be followed.
        """
        if C.track_is_on():
            raise RuntimeError("memory is tracked already: one track() in a process at a time; stop() the other first")
        self._ended = self._report = None
        C.track_start(self._stacks, self._depth)
        self._began = time.monotonic_ns()
        return self

    def stop(self) -> TrackReport:
        """Follow no more, and answer the report.

        Raises:
            RuntimeError: it was not started.
        """
        self._end()
        return self.report()

    def _end(self) -> None:
        if self._ended is not None:
            return
        self._need_start()
        C.track_stop()
        self._ended = _Figures.now()

    def report(self) -> TrackReport:
        """Answer what happened until now, or until stop().

        Raises:
            RuntimeError: it was not started.

        Cost: 2 microseconds a line of code that did anything, and 70 ns an event that was not read yet.
        """
        self._need_start()
        if self._ended is None:
            return self._made(_Figures.now(), running=True)
        if self._report is None:
            self._report = self._made(self._ended, running=False)
        return self._report

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found, after the end."""
        return () if self._ended is None else self.report().findings

    def to_json(self) -> str:
        """Answer the report as JSON.

        Raises:
            RuntimeError: it was not started.
        """
        return self.report().to_json()

    def _need_start(self) -> None:
        if self._began is None:
            raise RuntimeError("nothing was tracked yet: use it as a context, or start() it first")

    def _made(self, figures: _Figures, *, running: bool) -> TrackReport:
        assert self._began is not None
        return TrackReport([], tracked=_summary(figures, self._began, running, self._stacks), focus="tracked")

    def __enter__(self) -> Tracker:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()  # words are made for whoever asks

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Decorate a function: each of its calls is tracked anew; the report is that of the last one."""
        return decorated(function, lambda: self, "track")

    def __repr__(self) -> str:
        if self._ended is not None:
            return f"<tensorplay.Tracker: ended, {self.report()!r}>"
        return f"<tensorplay.Tracker: {'not started' if self._began is None else 'running'}>"


@overload
def track(function: None = None, *, stacks: bool = True, depth: int = 30) -> Tracker: ...
@overload
def track(function: Callable[_P, _T], *, stacks: bool = True, depth: int = 30) -> Callable[_P, _T]: ...
@outside_compiled_code
def track(function: Callable[..., Any] | None = None, *, stacks: bool = True, depth: int = 30) -> Any:
    """Follow what happens to the memory of CPU tensors: who makes blocks, how long they live, the peak, copies, reuse.

    ``with tensorplay.track() as tracker: train_step()``; then ``print(tracker.report())``.

    Args:
        function: where it is used as a decorator without arguments.
        stacks: whether the Python lines are taken that call operators.
        depth: how many frames of them, 1 to 64.

    Returns:
        A tracker: a context, ``.start()``, ``.stop()``, ``.report()``.

    Raises:
        TypeError, ValueError: an argument is of another type, or out of range.

    Cost: half a microsecond an operator, with stacks or without; memory for what was written, 55 MiB at the most. After
        the end one look at a flag for each block: the allocator that watches stays in front of PyTorch's.

    Source: c10/core/Allocator.h ``SetAllocator``, ATen/core/dispatch/Dispatcher.h, torch 2.13 and 2.14.
    """
    tracker = Tracker(stacks=stacks, depth=depth)
    return tracker if function is None else tracker(function)


def _summary(figures: _Figures, began: int, running: bool, stacks: bool) -> TrackSummary:
    totals = figures.totals
    now = totals["now"]
    tensors, recent = totals["tensors"], totals["recent_tensors"]
    rows = [_Row(*row) for row in figures.rows]
    rows.sort(key=lambda row: (-row.nbytes_at_peak, -row.alloc_nbytes, -row.tensors, row.op, row.site))
    return TrackSummary(
        seconds=(now - began) * _NS,
        running=running,
        stacks=stacks,
        allocs=totals["allocs"],
        alloc_nbytes=totals["alloc_bytes"],
        frees=totals["frees"],
        freed_nbytes=totals["freed_bytes"],
        frees_of_older=totals["frees_of_older"],
        live_blocks=totals["live_blocks"],
        live_nbytes=totals["live_bytes"],
        peak_nbytes=totals["peak_bytes"],
        peak_seconds=max(totals["peak_time"] - began, 0) * _NS if totals["peak_time"] else None,
        tensors=tensors,
        reused=totals["tensors_reusing"] / tensors if tensors else None,
        recent_tensors=recent,
        recent_reused=totals["recent_reusing"] / recent if recent else None,
        writes=totals["writes"],
        copies=totals["copies"],
        copied_nbytes=totals["copied_bytes"],
        copying_seconds=totals["copying"] * _NS,
        sites=tuple(_site(row) for row in rows),
        lifetimes=tuple(
            LifetimeRange(from_seconds=2**bits * _NS, blocks=blocks, nbytes=nbytes)
            for bits, (blocks, nbytes) in enumerate(totals["lifetimes"])
            if blocks
        ),
        lost=totals["lost_full"] + totals["lost_crowded"] + totals["lost_ended"] + totals["frees_missed"],
        not_told_apart=totals["blocks_missed"] + totals["origins_missed"] + totals["sites_missed"],
        own_nbytes=totals["nbytes"],
    )


def _site(row: _Row) -> TrackedSite:
    stack = stack_lines(row.site)
    return TrackedSite(
        op=row.op,
        where=own_line(stack),
        stack=tuple(map(line_text, stack)),
        backward=bool(row.site & IN_BACKWARD),
        allocs=row.allocs,
        alloc_nbytes=row.alloc_nbytes,
        frees=row.frees,
        freed_nbytes=row.freed_nbytes,
        live_blocks=row.live_blocks,
        live_nbytes=row.live_nbytes,
        nbytes_at_peak=row.nbytes_at_peak,
        tensors=row.tensors,
        writes=row.writes,
        copies=row.copies,
        copied_nbytes=row.copied_nbytes,
        copying_seconds=row.copying * _NS,
        longest_copy_seconds=row.longest_copy * _NS,
    )
