"""Inferred chains of view operators, replayed with the real ones."""

from __future__ import annotations

import random

import pytest
import torch

from tensorplay._native import C


def described(x: torch.Tensor) -> tuple:
    return (
        tuple(x.shape),
        x.stride(),
        x.storage_offset(),
        x.element_size(),
        x.is_complex(),
        x.is_conj(),
        x.is_neg(),
        str(x.dtype).removeprefix("torch."),
    )


def infer(base: torch.Tensor, target: torch.Tensor, **limits: int) -> dict:
    return C.infer_chain(described(base), described(target), **limits)


def applied(x: torch.Tensor, op: str, args: dict) -> torch.Tensor:
    if op == "slice":
        return torch.ops.aten.slice.Tensor(x, args["dim"], args["start"], args["end"], args["step"])
    if op == "view_dtype":
        return x.view(getattr(torch, args["dtype"]))
    if op in ("real", "imag"):
        return getattr(x, op)
    if op in ("view_as_real", "view_as_complex", "conj"):
        return getattr(torch, op)(x)
    return getattr(x, op)(**args)


def replayed(base: torch.Tensor, target: torch.Tensor, answer: dict) -> torch.Tensor:
    """Apply the steps to an alias of the base; each must give what it says."""
    x = base
    for op, args, shape, stride, offset, dtype in answer["steps"]:
        before = x.dtype
        x = applied(x, op, args)
        assert (tuple(x.shape), x.stride(), x.storage_offset()) == (shape, stride, offset), (op, args)
        assert (None if x.dtype == before else str(x.dtype).removeprefix("torch.")) == dtype
    assert described(x) == described(target)
    assert x.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    return x


def named(base: torch.Tensor, target: torch.Tensor) -> list[tuple[str, dict]]:
    answer = infer(base, target)
    replayed(base, target, answer)
    assert answer["complete"]
    return [(step[0], step[1]) for step in answer["steps"]]


F = torch.zeros(4, 6, 5)
Z = torch.zeros(4, 6, dtype=torch.complex64)

ONE_OP = [
    (F, F[:], []),
    (F, F[2], [("select", {"dim": 0, "index": 2})]),
    (F, F[:, :, 3], [("select", {"dim": 2, "index": 3})]),
    (F, F[1:3], [("narrow", {"dim": 0, "start": 1, "length": 2})]),
    (F, F[:, 1::2], [("slice", {"dim": 1, "start": 1, "end": 6, "step": 2})]),
    (F, F.transpose(0, 2), [("transpose", {"dim0": 0, "dim1": 2})]),
    (F[0], F[0].t(), [("t", {})]),
    (F, F.permute(2, 0, 1), [("permute", {"dims": (2, 0, 1)})]),
    (F, F.view(3, 8, 5), [("view", {"size": (3, 8, 5)})]),
    (F, F.view(-1), [("flatten", {"start_dim": 0, "end_dim": 2})]),
    (F, F.flatten(1), [("flatten", {"start_dim": 1, "end_dim": 2})]),
    (F, F.unflatten(1, (2, 3)), [("unflatten", {"dim": 1, "sizes": (2, 3)})]),
    (F, F.unsqueeze(1), [("unsqueeze", {"dim": 1})]),
    (F[:1], F[:1].squeeze(0), [("select", {"dim": 0, "index": 0})]),
    (torch.zeros(1, 3, 1, 2, 1), torch.zeros(1, 3, 1, 2, 1).squeeze(), None),
    (F[:1], F[:1].expand(7, 6, 5), [("expand", {"size": (7, 6, 5)})]),
    (F, F.expand(2, 4, 6, 5), [("expand", {"size": (2, 4, 6, 5)})]),
    (F, F.diagonal(1, 0, 2), [("diagonal", {"offset": 1, "dim1": 0, "dim2": 2})]),
    (F, F.diagonal(-2), [("diagonal", {"offset": -2, "dim1": 0, "dim2": 1})]),
    (F, F.unfold(1, 3, 2), [("unfold", {"dimension": 1, "size": 3, "step": 2})]),
    (Z, Z.real, [("real", {})]),
    (Z, Z.imag, [("imag", {})]),
    (Z, Z.conj(), [("conj", {})]),
    (Z.conj(), Z.conj().imag, [("imag", {})]),
    (Z, torch.view_as_real(Z), [("view_as_real", {})]),
    (F.view(3, 20, 2), torch.view_as_complex(F.view(3, 20, 2)), [("view_as_complex", {})]),
    (F, F.view(torch.int32), [("view_dtype", {"dtype": "int32"})]),
    (F, F.view(torch.uint8), [("view_dtype", {"dtype": "uint8"})]),
    (Z, Z.view(torch.complex128), [("view_dtype", {"dtype": "complex128"})]),
]


@pytest.mark.parametrize(("base", "target", "steps"), ONE_OP)
def test_one_operator_is_named(base, target, steps):
    if steps is None or target.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
        target = base.squeeze()
        steps = [("squeeze", {})]

    found = named(base, target)

    assert len(found) <= 1
    if found != steps:  # an equally plain name
        assert found[0][0] in ("squeeze", "view", "flatten", "select", "unsqueeze", "unflatten")


@pytest.mark.parametrize(
    ("target", "most"),
    [
        (lambda x: x[:, 1].transpose(0, 1), 2),
        (lambda x: x.permute(0, 2, 3, 1).flatten(1, 2), 2),
        (lambda x: x.unfold(2, 3, 3).unfold(3, 3, 3), 2),
        (lambda x: x.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5), 3),
        (lambda x: x[:, :, 10:200, 10:200], 2),
        (lambda x: x[3:9].view(3, 2, 3, 224, 224)[:, 1], 3),
        (lambda x: x.view(32, 3, 7, 32, 7, 32).permute(0, 2, 4, 1, 3, 5), 2),
        (lambda x: x[0, 0].diagonal(), 3),
        (lambda x: x[:, :1].expand(-1, 5, -1, -1)[2], 3),
        (lambda x: x[None, 3, :, 5], 3),
        (lambda x: x[4:, :, ::2, ::2].transpose(1, 3), 4),
    ],
)
def test_large_batch_finds_what_people_write(target, most):
    base = torch.empty(32, 3, 224, 224, device="meta")
    answer = infer(base, target(base))
    assert "as_strided" not in [step[0] for step in answer["steps"]]
    assert len(answer["steps"]) <= most
    assert answer["complete"] or most > 3


def test_what_no_operator_makes_is_as_strided_and_proven():
    base = torch.zeros(2, 2)
    target = base.as_strided((2, 2, 3), (1, 1, 0))

    answer = infer(base, target)

    assert [step[0] for step in answer["steps"]] == ["as_strided"]
    assert answer["complete"]
    assert answer["ruled_out"] == 4
    replayed(base, target, answer)


def test_cell_outside_of_the_base_is_ruled_out_at_once():
    whole = torch.zeros(1000, 1000)

    answer = infer(whole[100:200], whole[150:250])

    assert answer["complete"]
    assert answer["ruled_out"] == 4
    assert answer["nodes"] < 10


def test_cut_search_says_so():
    base = torch.zeros(4, 4)

    answer = infer(base, base.as_strided((2, 2), (3, 5)), max_nodes=20)

    assert not answer["complete"]
    assert answer["ruled_out"] < 4


def test_as_many_dimensions_as_torch_takes():
    base = torch.zeros([1] * 60)

    answer = infer(base, base.as_strided([1] * 40, [3] * 40))

    assert not answer["complete"]
    assert answer["ruled_out"] == -1


@pytest.mark.parametrize(
    "bad",
    [
        ((2,), (1, 1), 0, 4, False, False, False, "float32"),
        ((-2,), (1,), 0, 4, False, False, False, "float32"),
        ((2,), (1,), 0, 0, False, False, False, "float32"),
    ],
)
def test_bad_geometry_is_refused(bad):
    with pytest.raises(ValueError, match=r"need|bytes"):
        C.infer_chain(bad, bad)


# -- Random compositions of real operators

BASES = [
    lambda: torch.zeros(()),
    lambda: torch.zeros(7),
    lambda: torch.zeros(12),
    lambda: torch.zeros(4, 5),
    lambda: torch.zeros(6, 6),
    lambda: torch.zeros(3, 4, 2),
    lambda: torch.zeros(2, 3, 4, 2),
    lambda: torch.zeros(8, 3, 16, 16),
    lambda: torch.zeros(2, 3, 2, 3, 2),
    lambda: torch.zeros(3, 0, 2),
    lambda: torch.zeros(1, 4, 1),
    lambda: torch.zeros(4, 6, dtype=torch.complex64),
    lambda: torch.zeros(3, 4, 2, dtype=torch.complex128).conj(),
    lambda: torch.zeros(5, 8, dtype=torch.int16),
    lambda: torch.zeros(10).unfold(0, 4, 2),
    lambda: torch.zeros(3, 1).expand(3, 4),
    lambda: torch.zeros(4, 6).t(),
    lambda: torch.zeros(6, 8)[1:5, ::2],
    lambda: torch.zeros(128, 256),
    lambda: torch.zeros(24, 36).t(),
]


KINDS = ["select", "narrow", "step", "transpose", "permute", "view", "flatten", "unflatten"]
KINDS += ["unsqueeze", "squeeze", "squeeze_all", "expand", "diagonal", "unfold", "type"]


def random_op(x: torch.Tensor, rng: random.Random) -> torch.Tensor:
    dims = x.dim()
    dim = rng.randrange(dims) if dims else 0
    size = x.shape[dim] if dims else 1
    kind = rng.choice(KINDS)
    if kind == "select":
        return x.select(dim, rng.randrange(size))
    if kind == "narrow":
        start = rng.randrange(size)
        return x.narrow(dim, start, rng.randint(1 if rng.random() < 0.9 else 0, size - start))
    if kind == "step":
        start = rng.randrange(size)
        return torch.ops.aten.slice.Tensor(x, dim, start, size, rng.randint(1, 3))
    if kind == "transpose":
        return x.transpose(dim, rng.randrange(dims))
    if kind == "permute":
        return x.permute(rng.sample(range(dims), dims))
    if kind in ("view", "unflatten"):
        count, parts = (x.numel(), []) if kind == "view" else (size, [])
        while count > 1 and len(parts) < 3:
            parts.append(rng.choice([n for n in range(1, count + 1) if count % n == 0]))
            count //= parts[-1]
        return x.view([*parts, count]) if kind == "view" else x.unflatten(dim, [*parts, count])
    if kind == "flatten":
        end = rng.randrange(dim, dims)
        return x.view([*x.shape[:dim], -1, *x.shape[end + 1 :]])
    if kind == "unsqueeze":
        return x.unsqueeze(rng.randint(0, dims))
    if kind == "squeeze":
        return x.squeeze(dim)
    if kind == "squeeze_all":
        return x.squeeze()
    if kind == "expand":
        sizes = [rng.randint(1, 4) if n == 1 else n for n in x.shape]
        return x.expand([*[rng.randint(1, 3) for _ in range(rng.randint(0, 1))], *sizes])
    if kind == "diagonal":
        first, second = rng.sample(range(dims), 2)
        return x.diagonal(rng.randint(-2, 2), first, second)
    if kind == "unfold":
        return x.unfold(dim, rng.randint(1, size), rng.randint(1, 3))
    if x.is_complex():
        return rng.choice([lambda: x.real, lambda: x.imag, x.conj, lambda: torch.view_as_real(x)])()
    return rng.choice([lambda: torch.view_as_complex(x), lambda: x.view(torch.int32), lambda: x.view(torch.uint8)])()


def random_chain(base: torch.Tensor, length: int, rng: random.Random) -> torch.Tensor:
    x = base
    made = 0
    while made < length:
        try:
            grown = random_op(x, rng)
        except (RuntimeError, IndexError, ValueError):
            continue
        if grown.dim() <= 5:
            x, made = grown, made + 1
    return x


def test_random_compositions_replay_and_are_never_longer():
    rng = random.Random(20)
    for _ in range(2_500):
        base = rng.choice(BASES)()
        length = rng.randint(1, 5)
        target = random_chain(base, length, rng)

        answer = infer(base, target)

        replayed(base, target, answer)
        assert len(answer["steps"]) <= length
        if length <= 4 and answer["complete"]:
            assert "as_strided" not in [step[0] for step in answer["steps"]]
