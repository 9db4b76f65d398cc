"""Which cells a shape, its strides and an offset reach: exact or said to be unknown, in bounded time and memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

__all__ = ["MOST_STEPS", "Found", "Reach"]

MOST_STEPS = 8_000
"""Candidates tried over the life of a Reach."""
_MOST_CELL_STEPS = 400
_MOST_BITS = 1 << 23
_CHUNK = 1 << 10


class Found(NamedTuple):
    """What is known of a cell; None where that was not worked out."""

    reached: bool | None
    first_index: tuple[int, ...] | None
    """The first one, in row-major order, that reaches it."""
    several: bool | None
    """Whether another index reaches it too."""


_NOT_REACHED = Found(False, None, False)


class _Dim(NamedTuple):
    position: int
    size: int
    step: int


class _Group:
    """Dimensions whose steps overlap, so that one sum may be made in several ways.

    The sums lie on multiples of ``base``, from 0 to ``top`` of them: steps below 0 count from the far end.
    """

    def __init__(self, dims: tuple[_Dim, ...], base: int, top: int, full: bool) -> None:
        self.dims = dims
        self.base = base
        self.top = top
        self.full = full
        """Whether every multiple is reached."""

    @property
    def span(self) -> int:
        return self.base * self.top

    def joined(self, upper: _Group) -> _Group:
        dims = self.dims + upper.dims
        if self.full and upper.full and upper.base % self.base == 0 and upper.base // self.base <= self.top + 1:
            return _Group(dims, self.base, self.top + upper.top * (upper.base // self.base), True)
        base = math.gcd(self.base, upper.base)
        return _Group(dims, base, (self.span + upper.span) // base, False)

    @cached_property
    def bits(self) -> bytes | None:
        """One bit for each multiple; None where they are too many."""
        if self.top >= _MOST_BITS:
            return None
        bits = 1
        for dim in self.dims:
            step, done = abs(dim.step) // self.base, 1
            while done < dim.size:
                more = min(done, dim.size - done)
                bits |= bits << more * step
                done += more
        return bits.to_bytes(self.top // 8 + 1, "little")

    @cached_property
    def _sums(self) -> list[int]:
        assert self.bits is not None
        chunks = (self.bits[start : start + _CHUNK] for start in range(0, len(self.bits), _CHUNK))
        return list(itertools.accumulate((int.from_bytes(c, "little").bit_count() for c in chunks), initial=0))

    def has(self, multiple: int) -> bool | None:
        if not 0 <= multiple <= self.top:
            return False
        if self.full or multiple in (0, self.top):
            return True
        return None if self.bits is None else bool(self.bits[multiple // 8] >> multiple % 8 & 1)

    def below(self, multiple: int) -> int | None:
        """Count the multiples reached before one."""
        multiple = min(max(multiple, 0), self.top + 1)
        if self.full or multiple <= 1:
            return multiple
        if self.bits is None:
            return None
        chunk, rest = divmod(multiple, 8 * _CHUNK)
        tail = int.from_bytes(self.bits[chunk * _CHUNK : chunk * _CHUNK + rest // 8 + 1], "little")
        return self._sums[chunk] + (tail & (1 << rest) - 1).bit_count()


class _Level:
    """One dimension of a search: which of its places leave a rest that the dimensions after it may make up."""

    def __init__(self, dim: _Dim, after: Sequence[_Dim]) -> None:
        self.size, self.step = dim.size, dim.step
        self.low = sum(min(0, (d.size - 1) * d.step) for d in after)
        self.high = sum(max(0, (d.size - 1) * d.step) for d in after)
        common = math.gcd(*(d.step for d in after))
        self.shared = math.gcd(self.step, common)
        self.period = common // self.shared
        self.inverse = pow(self.step // self.shared, -1, self.period) if self.period else 0

    def places(self, rest: int) -> range:
        if rest % self.shared:
            return range(0)
        low, high = (rest - self.high, rest - self.low) if self.step > 0 else (self.low - rest, self.high - rest)
        step = abs(self.step)
        begin, end = max(0, -(-low // step)), min(self.size - 1, high // step) + 1
        if not self.period:
            return range(begin, end)
        begin += (rest // self.shared * self.inverse - begin) % self.period
        return range(begin, end, self.period)


class Reach:
    """The cells that a geometry reaches.

    Dimensions are put into groups, so that the groups nest: what one makes up lies between two multiples of the next.
    A cell then has one sum for each group, and only inside of a group is there anything to search.
    """

    def __init__(self, shape: Sequence[int], stride: Sequence[int], offset: int) -> None:
        dims = [_Dim(i, size, step) for i, (size, step) in enumerate(zip(shape, stride, strict=True)) if size > 1]
        self.dims = len(shape)
        self.first = offset + sum(min(0, (d.size - 1) * d.step) for d in dims)
        self.last = offset + sum(max(0, (d.size - 1) * d.step) for d in dims)
        self.steps = 0
        """Candidates tried so far."""
        self._repeated = any(d.step == 0 for d in dims)
        self._groups: list[_Group] = []
        span = 0
        for dim in sorted((d for d in dims if d.step), key=lambda d: abs(d.step)):
            group = _Group((dim,), abs(dim.step), dim.size - 1, True)
            while self._groups and group.base <= span:
                below = self._groups.pop()
                span -= below.span
                group = below.joined(group)
            self._groups.append(group)
            span += group.span
        self._plans = [self._plan(group) for group in self._groups]

    @staticmethod
    def _plan(group: _Group) -> list[tuple[int, _Level]]:
        dims = sorted(group.dims)
        return [(dim.position, _Level(dim, dims[i + 1 :])) for i, dim in enumerate(dims)]

    def find(self, cell: int) -> Found:
        """Find the first index that reaches a cell, and whether another one does too."""
        rest = cell - self.first
        sums = []
        for group in reversed(self._groups):
            multiple, rest = divmod(rest, group.base)
            if group.has(multiple) is False:
                return _NOT_REACHED
            sums.append(multiple)
        if rest:
            return _NOT_REACHED
        index = [0] * self.dims
        reached: bool | None = True
        several: bool | None = self._repeated
        whole = True
        end = min(self.steps + _MOST_CELL_STEPS, MOST_STEPS)
        for group, plan, multiple in zip(self._groups, self._plans, reversed(sums), strict=True):
            low = sum(min(0, (dim.size - 1) * dim.step) for dim in group.dims)
            ways = self._ways(plan, multiple * group.base + low, end)
            first = next(ways, ())
            if first == ():
                return _NOT_REACHED
            if first is None:
                whole = False
                reached = reached and group.has(multiple)
                continue
            for (position, _), place in zip(plan, first, strict=True):
                index[position] = place
            second = () if several else next(ways, ())
            several = True if several or second else several if second == () else None
        if not whole:
            return Found(reached, None, True if several and reached else None)
        return Found(True, tuple(index), several)

    def _ways(self, plan: list[tuple[int, _Level]], total: int, end: int) -> Iterator[tuple[int, ...] | None]:
        """Iterate over the ways to make up a sum, in row-major order; None ends them where the steps are used up."""
        if len(plan) == 1:
            yield from ((place,) for place in plan[0][1].places(total))
            return
        index: list[int] = []
        rests = [total]
        stack = [iter(plan[0][1].places(total))]
        while stack:
            if self.steps >= end:
                yield None
                return
            self.steps += 1
            depth = len(stack) - 1
            del index[depth:], rests[depth + 1 :]
            place = next(stack[-1], None)
            if place is None:
                stack.pop()
                continue
            index.append(place)
            rests.append(rests[depth] - place * plan[depth][1].step)
            if depth + 1 == len(plan):
                yield tuple(index)
            else:
                stack.append(iter(plan[depth + 1][1].places(rests[-1])))

    def count(self, begin: int, end: int) -> int | None:
        """Count the cells reached from one up to another; None where that is not worked out."""
        begin, end = max(begin, self.first), min(end, self.last + 1)
        if begin >= end or self._below(begin, bound=True) == self._below(end, bound=True):
            return 0
        before, upto = self._below(begin), self._below(end)
        return None if before is None or upto is None else upto - before

    def _below(self, cell: int, bound: bool = False) -> int | None:
        """Count the cells reached before one; ``bound`` takes every multiple in a group for reached."""
        rest = cell - self.first
        count, each = 0, 1
        parts: list[tuple[_Group, int]] = []
        for group in self._groups:
            parts.append((group, each))
            total = group.top + 1 if bound else group.below(group.top + 1)
            if total is None:
                return None
            each *= total
        for group, each in reversed(parts):
            multiple, rest = divmod(rest, group.base)
            if not bound:
                count += each * (group.below(multiple) or 0)
                if not group.has(multiple):
                    return count
            elif multiple > group.top:
                return count + each * (group.top + 1)
            else:
                count += each * multiple
        return count + (rest > 0)
