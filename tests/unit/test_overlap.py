"""Overlap and coverage of real views, against brute force over bytes and against NumPy's exact answer."""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import pytest
import torch

from tensorplay._native import C

DTYPES = [torch.int8, torch.int16, torch.float32, torch.float64, torch.complex64, torch.complex128]


def region(x: torch.Tensor, origin: int = 0) -> tuple[tuple[int, ...], tuple[int, ...], int, int, int]:
    return tuple(x.shape), x.stride(), x.storage_offset(), x.element_size(), origin


def reached(x: torch.Tensor, nbytes: int) -> np.ndarray:
    """A flag for each byte of the storage."""
    at = np.full((1,) * x.dim(), x.storage_offset())
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        at = at + (np.arange(size) * stride).reshape([-1 if i == dim else 1 for i in range(x.dim())])
    flags = np.zeros((nbytes // x.element_size(), x.element_size()), dtype=bool)
    flags[at.ravel()] = True
    return flags.ravel()


def relation(a: np.ndarray, b: np.ndarray) -> tuple[str, int]:
    shared = int((a & b).sum())
    all_a, all_b = shared == a.sum(), shared == b.sum()
    if shared == 0:
        return "disjoint", 0
    if all_a:
        return ("identical" if all_b else "first_in_second"), shared
    return ("second_in_first" if all_b else "partial"), shared


def take_view(x: torch.Tensor, dice: random.Random) -> torch.Tensor:
    if x.dim() == 0:
        return x[None]
    dim = dice.randrange(x.dim())
    size = x.shape[dim]
    match dice.randrange(8):
        case 0 | 1:
            start = dice.randint(0, max(size - 1, 0))
            return x.narrow(dim, start, dice.randint(min(1, size - start), size - start))
        case 2:
            index = [slice(None)] * x.dim()
            index[dim] = slice(dice.randint(0, max(size - 1, 0)), None, dice.randint(1, 3))
            return x[tuple(index)]
        case 3:
            return x.select(dim, dice.randrange(size)) if size else x
        case 4:
            return x.transpose(dim, dice.randrange(x.dim()))
        case 5 if size and x.dim() < 5:
            return x.unfold(dim, dice.randint(1, size), dice.randint(1, 3))
        case 6 if x.dim() > 1:
            other = (dim + 1) % x.dim()
            return x.diagonal(dice.randint(0, 1), dim, other)
        case 7 if x.dim() < 5:
            return x.unsqueeze(dim).expand(*x.shape[:dim], dice.randint(1, 3), *x.shape[dim:])
    return x


def random_views(dice: random.Random, count: int) -> list[torch.Tensor]:
    """Views of one storage, of several types."""
    shape = [dice.randint(1, 7) for _ in range(dice.randint(1, 4))]
    base = torch.empty(shape, dtype=dice.choice(DTYPES))
    views = []
    for _ in range(count):
        x = base
        if dice.random() < 0.3:
            x = torch.empty(0, dtype=torch.int8).set_(base.untyped_storage())
            dtype = dice.choice([dtype for dtype in DTYPES if x.numel() % dtype.itemsize == 0])
            x = x.view(dtype)[: dice.randint(1, 60)]
        for _ in range(dice.randint(0, 5)):
            x = take_view(x, dice)
        views.append(x)
    return views


def test_random_views_agree_with_brute_force_and_numpy():
    dice = random.Random(20281)
    pairs = disjoint = 0
    for _ in range(1_200):
        views = random_views(dice, 8)
        nbytes = views[0].untyped_storage().nbytes()
        flags = [reached(x, nbytes) for x in views]
        arrays = [x.numpy() for x in views]
        for i, j in itertools.combinations(range(len(views)), 2):
            found = C.overlap_of(region(views[i]), region(views[j]))

            assert found == relation(flags[i], flags[j]), (region(views[i]), region(views[j]))
            assert (found[0] != "disjoint") == np.shares_memory(arrays[i], arrays[j], max_work=-1)
            pairs += 1
            disjoint += found[0] == "disjoint"
    assert pairs > 30_000
    assert pairs // 10 < disjoint < pairs * 9 // 10


def test_random_coverage_agrees_with_brute_force():
    dice = random.Random(20282)
    for _ in range(500):
        views = random_views(dice, dice.randint(1, 8))
        nbytes = views[0].untyped_storage().nbytes()
        flags = np.array([reached(x, nbytes) for x in views])
        regions = [region(x) for x in views]
        total = int(flags.any(0).sum())

        assert C.coverage_of(regions, nbytes) == (total, total, total)
        for index in range(len(views)):
            alone = flags[index] & ~np.delete(flags, index, 0).any(0)
            assert C.exclusive_of(regions, index, nbytes) == alone.sum()


def test_numpy_arrays_with_negative_strides_agree_with_numpy():
    base = np.zeros((6, 8), dtype=np.float32)
    views = [base[::-1], base[:, ::-2], base[4:1:-2, 1::3], base[::-1, 5], base.T[::-3], base[:0]]
    start = base.__array_interface__["data"][0]

    def as_region(x: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...], int, int, int]:
        at = x.__array_interface__["data"][0] - start
        return x.shape, tuple(step // 4 for step in x.strides), 0, 4, at

    def flags(x: np.ndarray) -> np.ndarray:
        base.fill(0)
        x[...] = 1
        return base.ravel().astype(bool).repeat(4)

    for a, b in itertools.product(views, repeat=2):
        assert C.overlap_of(as_region(a), as_region(b)) == relation(flags(a), flags(b))


X = torch.empty(10)
SQUARE = torch.empty(5, 5)
COMPLEX = torch.empty(6, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (*torch.empty(8, 4).chunk(2), ("disjoint", 0)),
        (*torch.empty(8, 4).chunk(2, dim=1), ("disjoint", 0)),
        (X[:6], X[4:], ("partial", 8)),
        (X[::2], X[1::2], ("disjoint", 0)),
        (X, X, ("identical", 40)),
        (SQUARE, SQUARE.t(), ("identical", 100)),
        (SQUARE.diagonal(), SQUARE, ("first_in_second", 20)),
        (SQUARE.diagonal(), SQUARE.diagonal(1), ("disjoint", 0)),
        (SQUARE.diagonal(), SQUARE[::2], ("partial", 12)),
        (SQUARE[1], SQUARE[:, 1], ("partial", 4)),
        (X.expand(7, 10), X, ("identical", 40)),
        (X.unfold(0, 3, 1), X, ("identical", 40)),
        (X.unfold(0, 3, 2), X, ("first_in_second", 36)),
        (X.unfold(0, 2, 4), X[2:4], ("disjoint", 0)),
        (torch.view_as_real(COMPLEX)[:, 0], torch.view_as_real(COMPLEX)[:, 1], ("disjoint", 0)),
        (COMPLEX.real, COMPLEX, ("first_in_second", 24)),
        (X.view(torch.int8)[3:6], X[:1], ("partial", 1)),
        (X[3], X[2:], ("first_in_second", 4)),
        (X[:0], X, ("disjoint", 0)),
    ],
)
def test_classic_pair(a, b, expected):
    assert C.overlap_of(region(a), region(b)) == expected
    mirrored = {"first_in_second": "second_in_first", "second_in_first": "first_in_second"}
    assert C.overlap_of(region(b), region(a)) == (mirrored.get(expected[0], expected[0]), expected[1])


def test_large_tensors_are_exact_without_enumeration():
    huge = torch.empty(1_000_000, 4096, device="meta")  # 16 GB

    assert C.overlap_of(region(huge[:, :3000]), region(huge[:, 2000:])) == ("partial", 4_000_000_000)
    assert C.overlap_of(region(huge[::2]), region(huge[1::2])) == ("disjoint", 0)
    assert C.overlap_of(region(huge[::2]), region(huge[::3])) == ("partial", 166_667 * 4096 * 4)
    assert C.overlap_of(region(huge.view(-1)[::3]), region(huge[:, 7])) == ("partial", 333_333 * 4)
    assert C.overlap_of(region(huge), region(huge.t())) == ("identical", 16_384_000_000)
    columns = [region(block) for block in huge.split(1000, dim=1)]
    assert C.coverage_of(columns, huge.nbytes) == (huge.nbytes,) * 3
    assert C.exclusive_of([*columns, region(huge[10:20])], 0, huge.nbytes) == (1_000_000 - 10) * 4000


def test_storages_over_one_buffer_are_compared_by_their_distance():
    a = ((8,), (1,), 0, 4)
    b = ((8,), (1,), 0, 4, 16)

    assert C.overlap_of(a, b) == ("partial", 16)
    assert C.overlap_of(a, ((8,), (1,), 0, 4, 32)) == ("disjoint", 0)
    assert C.overlap_of(a, ((2,), (1,), 0, 2, 7)) == ("second_in_first", 4)
    assert C.overlap_of(a, ((8,), (1,), 0, 4, -4)) == ("partial", 28)


def test_what_is_too_hard_is_said():
    far = 1_000_003
    folded = ((1000, 1000, 1000), (far * 6, far * 10, far * 15), 0, 4)

    assert C.overlap_of(folded, ((2,), (1,), far * 31, 4)) == ("overlapping", None)
    assert C.overlap_of(folded, ((2,), (1,), far * 31 + 2, 4)) == ("disjoint", 0)
    assert C.overlap_of(((2,), (2**62,), 0, 4), ((1,), (1,), 0, 4)) == ("too_hard", None)
    reached, least, most = C.coverage_of([((2,), (2**62,), 0, 4), ((5,), (1,), 0, 4)], 100)
    assert (reached, least, most) == (None, 20, 100)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (((1,), (1, 2), 0, 4), ValueError),
        (((-1,), (1,), 0, 4), ValueError),
        (((1,), (1,), 0, 0), ValueError),
        (((1,), (1,), 0), TypeError),
        (((1,), (1,), 0, 4, 0, 0), TypeError),
        (((1.5,), (1,), 0, 4), TypeError),
        (((2**64,), (1,), 0, 4), OverflowError),
        ([(1,), (1,), 0, 4], TypeError),
        (None, TypeError),
    ],
)
def test_what_is_no_region_is_refused(bad, error):
    good = ((1,), (1,), 0, 4)

    with pytest.raises(error):
        C.overlap_of(good, bad)
    with pytest.raises(error):
        C.coverage_of([good, bad], 10)
    with pytest.raises(error):
        C.exclusive_of([good, bad], 0, 10)


def test_index_and_size_that_are_none_are_refused():
    good = ((1,), (1,), 0, 4)

    with pytest.raises(IndexError):
        C.exclusive_of([good], 1, 10)
    with pytest.raises(IndexError):
        C.exclusive_of([good], -1, 10)
    with pytest.raises(ValueError, match="negative"):
        C.coverage_of([good], -1)
    with pytest.raises(TypeError):
        C.overlap_of(good)


def test_threads_agree():
    regions = [region(x) for x in torch.empty(64, 64, 64).unfold(2, 3, 2).unbind(1)]
    answers = []

    def ask() -> None:
        answers.append([C.coverage_of(regions, 64**3 * 4), C.overlap_of(regions[0], regions[1])])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == [[(64 * 64 * 63 * 4,) * 3, ("disjoint", 0)]] * 4
