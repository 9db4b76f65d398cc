"""What elements hold: counts, comparisons and copies against PyTorch's own, and files that are cut under their map."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorplay._native import C
from tests import helpers
from tests.unit.test_kinds import KINDS
from tests.unit.test_observer import native_facts
from tests.unit.test_overlap import take_view

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of"),
    pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

FLOAT8 = [
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e5m2fnuz,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
]
PLAIN = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64]
PAGE = os.sysconf("SC_PAGESIZE")


def expected(x: torch.Tensor) -> tuple[int, int, int]:
    if x.dtype in FLOAT8:
        x = x.to(torch.float32)
    elif x.dtype == torch.complex32:
        x = x.to(torch.complex64)
    return int(x.isnan().sum()), int(x.isinf().sum()), x.numel()


def random_bits(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every second part of an element has an exponent of ones."""
    dice = np.random.default_rng(seed)
    parts = dice.integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    bits = torch.from_numpy(parts)
    part = dtype.to_real() if dtype.is_complex else dtype
    width = part.itemsize
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    if not part.is_floating_point:
        return (bits % 2 == 0) if dtype == torch.bool else bits.view(dtype)
    words = bits.view(as_int)
    if part not in FLOAT8:
        infinite = torch.tensor(float("inf"), dtype=part).view(as_int)
        words[::2] |= infinite
        words[::6] = infinite
    return words.view(part).view(dtype)


def as_bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of its elements, copied."""
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8)


@pytest.mark.parametrize("dtype", [*PLAIN, torch.complex32, *FLOAT8], ids=str)
def test_count_agrees_with_brute_force_on_random_views(dtype):
    dice = random.Random(f"{dtype}")
    for seed in range(40):
        shape = [dice.randint(1, 7) for _ in range(dice.randint(1, 4))]
        whole = random_bits(int(np.prod(shape)), dtype, seed).view(shape)
        for x in (whole, whole.clone()):  # memory of NumPy, and PyTorch's own
            for _ in range(dice.randint(0, 5)):
                x = take_view(x, dice)
            assert C.count_nonfinite(x) == expected(x), (x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("dtype", [*PLAIN, torch.complex32, *FLOAT8], ids=str)
def test_every_bit_pattern_is_judged_as_pytorch_does(dtype):
    if dtype.itemsize > 2:
        x = random_bits(70_001, dtype, 3)
    else:
        x = torch.arange(256**dtype.itemsize, dtype=torch.int64)
        x = x.to(torch.uint8 if dtype.itemsize == 1 else torch.uint16).view(dtype)
    nans, infinities, _ = C.count_nonfinite(x)

    assert C.count_nonfinite(x) == expected(x)
    assert nans > 0
    assert (infinities > 0) == (dtype not in FLOAT8[1:])
    for one in x[:: max(1, x.numel() // 300)]:
        assert C.count_nonfinite(one) == expected(one)


@pytest.mark.parametrize("dtype", [*WHOLE, torch.float4_e2m1fn_x2], ids=str)
def test_types_without_such_values_have_none(dtype):
    x = torch.full((4, 8), 255, dtype=torch.uint8).view(torch.uint8 if dtype.itemsize > 4 else dtype)

    assert C.count_nonfinite(x) == (0, 0, x.numel())
    if dtype is not torch.float4_e2m1fn_x2:
        assert C.count_nonfinite(torch.zeros(3, 4, dtype=dtype)) == (0, 0, 12)


def test_complex_element_is_what_one_of_its_parts_is():
    nan, inf = float("nan"), float("inf")
    parts = torch.tensor([[1.0, 2.0], [nan, 1.0], [1.0, nan], [inf, 0.0], [nan, -inf], [nan, nan]])

    assert C.count_nonfinite(torch.view_as_complex(parts)) == (4, 2, 6)


def test_pending_conjugation_and_negation_change_nothing():
    x = random_bits(500, torch.complex64, 1)

    assert C.count_nonfinite(x.conj()) == C.count_nonfinite(x)
    assert C.count_nonfinite(x.conj().imag) == expected(x.imag)
    assert C.count_nonfinite(torch._neg_view(x)) == C.count_nonfinite(x)


def test_expanded_elements_count_once_for_each_index():
    x = torch.tensor([float("nan"), 1.0, float("inf")])

    assert C.count_nonfinite(x.expand(10**12, 3)) == (10**12, 10**12, 3 * 10**12)
    assert C.count_nonfinite(x[0].expand(5, 7)) == (35, 0, 35)
    assert C.count_nonfinite(x.as_strided((3, 2), (0, 2))) == (3, 3, 6)
    assert C.same_values(x.expand(10**12, 3), x.clone().expand(10**12, 3)) is True
    assert C.same_values(x[1].expand(5), torch.ones(5)) is True


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 5)])
def test_nothing_is_read_of_no_elements(shape):
    x = torch.empty(shape)

    assert C.count_nonfinite(x) == (0, 0, 0)
    assert C.same_values(x, torch.ones(shape)) is True
    assert C.copy_bytes(x, torch.empty(0, dtype=torch.uint8)) is True
    assert C.count_nonfinite(torch.ones(())) == (0, 0, 1)


@pytest.mark.parametrize("dtype", [*PLAIN, *FLOAT8, *WHOLE], ids=str)
def test_comparison_agrees_with_the_bytes_on_random_views(dtype):
    dice = random.Random(f"{dtype}")
    for seed in range(40):
        shape = [dice.randint(1, 7) for _ in range(dice.randint(1, 4))]
        x = random_bits(int(np.prod(shape)), dtype, seed).view(shape)
        for _ in range(dice.randint(0, 4)):
            x = take_view(x, dice)
        order = dice.sample(range(x.dim()), x.dim())
        other = x.permute(order).clone(memory_format=torch.contiguous_format).permute(np.argsort(order).tolist())
        assert torch.equal(as_bits(x), as_bits(other))
        assert C.same_values(x, other) is C.same_values(other, x) is True
        assert C.same_values(x, x) is True
        if x.numel() == 0:
            continue

        changed = as_bits(x)
        changed[dice.randrange(len(changed))] ^= 1
        changed = changed.view(dtype).view(x.shape)
        assert C.same_values(x, changed) is C.same_values(changed, x) is C.same_values(other, changed) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_long_runs_are_read_in_parts(dtype):
    foreign = random_bits(1_200_000, dtype, 9)
    own = foreign.clone()
    for take in (
        lambda x: x,
        lambda x: x[1:],
        lambda x: x[2::3],
        lambda x: x[::70_001],
        lambda x: x.view(1200, 1000).t(),
        lambda x: x.view(1200, 1000)[:, 3:11],
        lambda x: x.unfold(0, 5, 200_000),
        lambda x: x.view(2, 600_000)[:, :1].expand(2, 9),
    ):
        x, y = take(foreign), take(own)
        assert C.count_nonfinite(x) == C.count_nonfinite(y) == expected(y)
        z = y.clone(memory_format=torch.contiguous_format)
        assert C.same_values(x, y) is C.same_values(x, z) is C.same_values(z, x) is C.same_values(y, z) is True
        last = z.view(-1).view(torch.uint8)[-1:]
        last ^= 1
        assert C.same_values(x, z) is C.same_values(z, x) is C.same_values(y, z) is False


def test_bytes_are_compared_not_values():
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)

    assert C.same_values(quiet[:1], torch.tensor([float("nan")])) is True
    assert C.same_values(quiet[:1], quiet[1:]) is False
    assert C.same_values(torch.tensor([0.0]), torch.tensor([-0.0])) is False


def test_what_cannot_be_compared_has_no_answer():
    x = torch.ones(2, 3, dtype=torch.complex64)

    assert C.same_values(x, x.to(torch.complex128)) is None
    assert C.same_values(x, x.t()) is None
    assert C.same_values(x, x.view(6)) is None
    assert C.same_values(x, x.conj()) is None
    assert C.same_values(x.conj(), x.conj()) is True
    assert C.same_values(x, torch._neg_view(x)) is None
    assert C.same_values(x, x.to("meta")) is None


def test_copy_has_the_bytes_between_the_first_and_the_last():
    x = torch.arange(60, dtype=torch.int16)
    for view in (x, x[7:], x[3:50:4], x[10].expand(9), x.view(6, 10).t()[2:5, 1:4], x.as_strided((2, 3), (5, 1), 30)):
        first = view.storage_offset() * 2
        span = sum((size - 1) * step for size, step in zip(view.shape, view.stride(), strict=True)) * 2 + 2
        target = torch.empty(span, dtype=torch.uint8)
        assert C.copy_bytes(view, target) is True
        assert torch.equal(target, x.view(torch.uint8)[first : first + span])
        wider = torch.zeros(span + 8, dtype=torch.uint8)
        assert C.copy_bytes(torch.from_numpy(x.numpy())[0:1], wider[3:5]) is True  # a part of a storage
        assert wider.tolist() == [0] * (span + 8)
        assert C.copy_bytes(view, wider) is False
        assert C.copy_bytes(view, target[:-1]) is False


def test_only_own_memory_is_copied_to():
    source = torch.ones(4, dtype=torch.uint8)
    for target in (
        torch.zeros(4, dtype=torch.uint8).share_memory_(),
        torch.from_numpy(np.zeros(4, dtype=np.uint8)),
        torch._lazy_clone(torch.zeros(4, dtype=torch.uint8)),
        torch.zeros(4, dtype=torch.int8),
        torch.zeros(1),
        torch.zeros(8, dtype=torch.uint8)[::2],
        torch.zeros(4, dtype=torch.uint8, device="meta"),
    ):
        assert C.copy_bytes(source, target) is False
        assert target.is_meta or not target.any()


@pytest.mark.parametrize(("make", "facts"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
def test_kinds_without_bytes_of_their_own_have_no_answer(make, facts):
    x = make()
    x = x[0] if isinstance(x, tuple) else x
    record = C.read(x)
    answer = C.count_nonfinite(x)

    if record.kind == "uninitialized":
        assert answer == (0, 0, 0)
    elif record.kind == "strided" and (record.data.pointer != 0 or record.impl.numel == 0):
        assert answer is not None
        assert answer[2] == record.impl.numel
    else:
        assert answer is None
        assert C.copy_bytes(x, torch.empty(0, dtype=torch.uint8)) is False
    assert C.same_values(x, x) is (None if answer is None else True)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_have_no_answer(layout):
    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)

    assert C.count_nonfinite(x) is None
    assert C.same_values(x, x) is None


def test_memory_that_is_gone_has_no_answer():
    view, flat = helpers.released()

    assert C.count_nonfinite(view) is None
    assert C.same_values(flat, flat) is None
    assert C.count_nonfinite(helpers.null_pointer()) is None
    assert C.copy_bytes(view, torch.empty(16, dtype=torch.uint8)) is False


def test_wrong_arguments_are_errors():
    for call in (
        lambda: C.count_nonfinite(3),
        lambda: C.same_values(torch.ones(1), None),
        lambda: C.copy_bytes([], torch.ones(1)),
        lambda: C.same_values(torch.ones(1)),
        lambda: C.copy_bytes(torch.ones(1)),
    ):
        with pytest.raises(TypeError):
            call()


# Each answers tensors over a file of the bytes of 24 pages of float32.


def load_checkpoint(path: Path, values: torch.Tensor) -> torch.Tensor:
    torch.save({"small": torch.ones(3), "x": values}, path)
    return torch.load(path, mmap=True)["x"]


def load_from_file(path: Path, values: torch.Tensor) -> torch.Tensor:
    path.write_bytes(values.numpy().tobytes())
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=values.nbytes)
    return torch.empty(0).set_(storage, 0, values.shape)


def load_shared(path: Path, values: torch.Tensor) -> torch.Tensor:
    path.write_bytes(values.numpy().tobytes())
    return torch.from_file(str(path), shared=True, size=values.numel())


def load_slice(path: Path, values: torch.Tensor) -> torch.Tensor:
    path.write_bytes(b"head" + values.numpy().tobytes())
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=values.nbytes + 4)
    return torch.empty(0).set_(storage[4:], 0, values.shape)


def load_memmap(path: Path, values: torch.Tensor) -> torch.Tensor:
    path.write_bytes(values.numpy().tobytes())
    return torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r+"))


def load_misaligned(path: Path, values: torch.Tensor) -> torch.Tensor:
    path.write_bytes(b"odd" + values.numpy().tobytes())
    return torch.from_numpy(np.memmap(path, dtype=np.float32, mode="r+", offset=3))


def load_safetensors(path: Path, values: torch.Tensor) -> torch.Tensor:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({"a": torch.ones(1, dtype=torch.uint8), "x": values}, path)
    return safetensors.load_file(path)["x"]


MAPPED = [
    load_checkpoint,
    load_from_file,
    load_shared,
    load_slice,
    load_memmap,
    load_misaligned,
    load_safetensors,
]


def values_for_a_file() -> torch.Tensor:
    return random_bits(24 * PAGE // 4, torch.float32, 5).clone()


def error_of(call: Callable[[], object]) -> OSError:
    with pytest.raises(OSError, match="the file mapped behind it was cut") as caught:
        call()
    assert caught.value.errno in (errno.EFAULT, errno.EIO)
    return caught.value


@pytest.mark.parametrize("load", MAPPED)
def test_mapped_files_are_read(load, tmp_path):
    values = values_for_a_file()
    x = load(tmp_path / "file", values)
    target = torch.empty(x.nbytes, dtype=torch.uint8)

    assert C.count_nonfinite(x) == expected(values)
    assert C.count_nonfinite(x[5::3]) == expected(values[5::3])
    assert C.count_nonfinite(x.view(24, -1).t()) == expected(values)
    assert C.same_values(x, values) is C.same_values(values, x) is C.same_values(x, x) is True
    assert C.same_values(x.view(24, -1).t(), values.view(24, -1).t().contiguous()) is True
    assert C.same_values(x[:-1], values[1:]) is False
    assert C.copy_bytes(x, target) is True
    assert torch.equal(target, values.view(torch.uint8))


@pytest.mark.parametrize("load", MAPPED)
@pytest.mark.parametrize("kept", [0.0, 0.3, 0.5, 0.9])
def test_file_cut_under_its_map_is_an_error(load, kept, tmp_path):
    values = values_for_a_file()
    path = tmp_path / "file"
    x = load(path, values)
    if load is load_safetensors and C.read(x).data.origin == "cpu_allocator":
        pytest.skip("this safetensors reads into memory of its own")
    target = torch.zeros(x.nbytes, dtype=torch.uint8)
    os.truncate(path, int(path.stat().st_size * kept))

    for _ in range(2):
        error_of(lambda: C.count_nonfinite(x))
        error_of(lambda: C.count_nonfinite(x[::2]))
        error_of(lambda: C.count_nonfinite(x.view(24, -1)[:, 1]))
        error_of(lambda: C.count_nonfinite(x[-1]))
        error_of(lambda: C.same_values(x, values))
        error_of(lambda: C.same_values(values, x))
        error_of(lambda: C.same_values(x.view(24, -1).t(), values.view(24, -1).t()))
        error_of(lambda: C.copy_bytes(x, target))
        error_of(lambda: C.copy_bytes(x[-5:], target[:20]))
    assert C.count_nonfinite(x[:0]) == (0, 0, 0)
    if kept >= 0.3:
        assert C.count_nonfinite(x[:PAGE]) == expected(values[:PAGE])
        assert C.same_values(x[:PAGE], values[:PAGE]) is True
        assert C.copy_bytes(x[:PAGE], target[: 4 * PAGE]) is True


def test_file_that_is_cut_meanwhile_ends_no_process(tmp_path):
    values = torch.zeros(1 << 21)
    path = tmp_path / "file"
    x = load_shared(path, values)
    target = torch.empty(x.nbytes, dtype=torch.uint8)
    codes = set()
    stop = threading.Event()

    def cut_and_grow() -> None:
        while not stop.is_set():
            os.truncate(path, 0)
            os.truncate(path, values.nbytes)
            time.sleep(0.0003)

    thread = threading.Thread(target=cut_and_grow)
    thread.start()
    try:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            for call in (
                lambda: C.count_nonfinite(x),
                lambda: C.same_values(x, values),
                lambda: C.copy_bytes(x, target),
            ):
                try:
                    call()
                except OSError as error:
                    codes.add(error.errno)
    finally:
        stop.set()
        thread.join()
    assert codes <= {errno.EFAULT, errno.EIO}


def test_forked_child_reads_its_own_memory(tmp_path):
    x = load_shared(tmp_path / "file", torch.zeros(100))
    C.count_nonfinite(x)
    y = torch.from_numpy(np.zeros(3, dtype=np.float32))
    child = os.fork()
    if child == 0:
        y.numpy()[0] = np.nan  # a page of the child alone
        os._exit(0 if C.count_nonfinite(y) == (1, 0, 3) and C.count_nonfinite(x) == (0, 0, 100) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert C.count_nonfinite(y) == (0, 0, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3),
        lambda: torch.randn(4, 6).t()[1:],
        lambda: torch.randn(3, requires_grad=True) * 2,
        lambda: torch.nn.Parameter(torch.randn(100_000)),
        helpers.numpy_tensor,
        helpers.inference,
        lambda: torch.randn(3).as_subclass(helpers.Plain),
        lambda: torch._lazy_clone(torch.randn(3)),
        lambda: torch.zeros(3).share_memory_(),
    ],
)
def test_reading_leaves_counts_versions_and_memory_as_they_were(make):
    x = make()
    x.untyped_storage()  # once made, the wrapper stays: not the probe's doing
    record = C.read(x)
    target = torch.empty(record.extent.needed_nbytes - record.extent.first_byte, dtype=torch.uint8)
    files = len(os.listdir("/proc/self/fd"))
    before = native_facts(x), native_facts(target)
    ran = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func)
            return func(*args, **(kwargs or {}))

    with Count():
        C.count_nonfinite(x)
        C.same_values(x, x)
        assert C.copy_bytes(x, target)

    assert (native_facts(x), native_facts(target)) == before
    assert len(os.listdir("/proc/self/fd")) == files
    assert ran == []


def test_other_threads_run_meanwhile():
    x = torch.zeros(1 << 26)
    seen = []
    running = threading.Event()

    def tick() -> None:
        running.set()
        while not seen or seen[-1] < end:
            seen.append(time.perf_counter())
            time.sleep(0.0001)

    end = float("inf")
    thread = threading.Thread(target=tick)
    thread.start()
    running.wait()
    begin = time.perf_counter()
    C.count_nonfinite(x)
    end = time.perf_counter()
    thread.join()

    assert any(begin < at < end for at in seen)
