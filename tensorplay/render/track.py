"""What happened to memory in words: figures of the whole, and who made how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tensorplay.layers import LifetimeRange, TrackedSite, TrackSummary
from tensorplay.render.parts import Phrase, Table
from tensorplay.words import bytes_text, plural, time_text

__all__ = ["tracked", "tracked_summary"]

_MOST_SITES = 12
_NUMBERS = frozenset({"blocks", "bytes", "alive", "at the peak", "copies", "copied", "took", "longest"})


def tracked(found: TrackSummary) -> Iterator[Table | Phrase]:
    """Answer the pieces: the whole, then who made what was alive at the peak, then copies."""
    yield Table(("what", "how much"), tuple(_rows(found)), first_width=12)
    yield from _sites(found)
    yield from _copies(found)
    if found.lifetimes:
        yield Phrase(_lifetimes(found.lifetimes), "dim")
    if found.lost:
        yield Phrase(f"{plural(found.lost, 'event')} found no room: the figures are lower bounds", "attention")
    if found.not_told_apart:
        yield Phrase(f"{plural(found.not_told_apart, 'event')} found no row of its own in full tables", "attention")


def _rows(found: TrackSummary) -> Iterator[tuple[str, str]]:
    seconds = max(found.seconds, 1e-9)
    yield "time", f"{found.seconds:.3g} s{', running' if found.running else ''}"
    yield (
        "came",
        f"{plural(found.allocs, 'block')}, {bytes_text(found.alloc_nbytes)}: {found.allocs / seconds:,.0f} a second",
    )
    yield "went", f"{plural(found.frees, 'block')}, {bytes_text(found.freed_nbytes)}"
    yield "alive", f"{plural(found.live_blocks, 'block')}, {bytes_text(found.live_nbytes)}"
    if found.peak_seconds is not None:
        yield "peak", f"{bytes_text(found.peak_nbytes)} after {found.peak_seconds:.3g} s"
    if found.reused is not None:
        yield "tensors", f"{found.tensors:,}, {found.reused:.0%} over memory that was there within 5 s before"
    if found.copies:
        yield (
            "copies",
            f"{found.copies:,} by operators, {bytes_text(found.copied_nbytes)} in {time_text(found.copying_seconds)}",
        )


def _sites(found: TrackSummary) -> Iterator[Table]:
    made = [site for site in found.sites if site.allocs]
    yield from _by_line(
        made,
        ("made by", "where", "blocks", "bytes", "alive", "at the peak"),
        lambda site: (
            f"{site.allocs:,}",
            bytes_text(site.alloc_nbytes),
            bytes_text(site.live_nbytes),
            bytes_text(site.nbytes_at_peak),
        ),
    )


def _copies(found: TrackSummary) -> Iterator[Table]:
    copying = sorted((site for site in found.sites if site.copies), key=lambda site: -site.copying_seconds)
    yield from _by_line(
        copying,
        ("copied by", "where", "copies", "copied", "took", "longest"),
        lambda site: (
            f"{site.copies:,}",
            bytes_text(site.copied_nbytes),
            time_text(site.copying_seconds),
            time_text(site.longest_copy_seconds),
        ),
    )


def _by_line(
    sites: Sequence[TrackedSite], headings: tuple[str, ...], figures: Callable[[TrackedSite], tuple[str, ...]]
) -> Iterator[Table]:
    """Answer a row for each operator and line, where there is any."""
    if not sites:
        return
    rows = (
        (f"{site.op or 'no operator'}{' (backward)' if site.backward else ''}", site.where, *figures(site))
        for site in sites[:_MOST_SITES]
    )
    left = len(sites) - _MOST_SITES
    rest = f"and {left} more: report.sites has all" if left > 0 else None
    yield Table(headings, tuple(rows), numbers=_NUMBERS, rest=rest)


def _lifetimes(ranges: Sequence[LifetimeRange]) -> str:
    """Say how long half of the blocks lived, and nine of ten."""
    total = sum(one.blocks for one in ranges)
    words = []
    for share, name in ((0.5, "half"), (0.9, "nine of ten"), (1.0, "all")):
        seen = 0
        for one in ranges:
            seen += one.blocks
            if seen >= share * total:
                words.append(f"{name} under {time_text(2 * one.from_seconds)}")
                break
    return f"what came and went lived: {', '.join(words)}"


def tracked_summary(found: TrackSummary) -> Iterator[Phrase]:
    """Answer the one line that counts."""
    yield Phrase(f"{plural(found.allocs, 'block')} came, {plural(found.live_blocks, 'block')} alive, peak ")
    yield Phrase(bytes_text(found.peak_nbytes), "strong")
