"""The NPU without an NPU: a PyTorch backend of its own, renamed "npu", for tests on a machine that has only a CPU.

Two devices, npu:0 and npu:1, whose memory is host RAM and whose kernels are the CPU's. What differs from a CPU
differs as on a real device: an allocator of its own that knows its blocks, tensor and storage classes of its own,
copies that are counted and can be given a latency, and tensors of two devices that no operator takes together.

    npu = load()
    x = torch.ones(3, device="npu:1")
    npu.owner_of(x.data_ptr())  # 1

Known not to work:
- pinned memory (pin_memory, DataLoader(pin_memory=True)): there is no host allocator, and
  torch.accelerator.empty_host_cache() ends the process
- DLPack, numpy() without cpu(), sharing with other processes
- layouts other than strided: sparse, nested, mkldnn; quantized tensors
- LSTM and GRU layers: PyTorch gives an unknown device the fused CUDA kernels for their cells
- process groups find their backend for it only by name: init_process_group("cpu:fake,npu:fake")
- asynchrony: work is done when it is asked for, so streams and events only keep order and time
- two lives in one process: PyTorch renames and registers once; what was loaded stays
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from tests.extensions import built

DIRECTIONS = ("host_to_device", "device_to_host", "device_to_device")


class Copies(NamedTuple):
    """Copies of one direction."""

    count: int
    bytes: int


class Memory(NamedTuple):
    """Allocations of one device."""

    allocations: int
    frees: int
    live_blocks: int
    live_bytes: int


class Description(NamedTuple):
    """What a storage was made for."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    resizes: int


@dataclass(frozen=True)
class Figures:
    """All counters at one moment; the difference of two moments is what happened between them."""

    host_to_device: Copies
    device_to_host: Copies
    device_to_device: Copies
    memory: tuple[Memory, ...]

    def __sub__(self, before: Figures) -> Figures:
        def minus(a: tuple[int, ...], b: tuple[int, ...]) -> list[int]:
            return [x - y for x, y in zip(a, b, strict=True)]

        copies = (Copies(*minus(getattr(self, name), getattr(before, name))) for name in DIRECTIONS)
        return Figures(*copies, tuple(Memory(*minus(a, b)) for a, b in zip(self.memory, before.memory, strict=True)))


@dataclass(frozen=True)
class Npu:
    """The handle: counters and controls that a real device does not have."""

    native: ModuleType
    has_engine_threads: bool  # whether the autograd engine runs the backward of this device in threads of its own

    def figures(self) -> Figures:
        """Answer all counters."""
        copies = (Copies(*self.native.transfers(direction)) for direction in range(len(DIRECTIONS)))
        return Figures(*copies, tuple(Memory(*self.native.memory(index)) for index in range(self.native.DEVICES)))

    @contextmanager
    def copy_latency(
        self, fixed_ns: int = 0, ns_per_byte: float = 0, directions: tuple[str, ...] = DIRECTIONS
    ) -> Iterator[None]:
        """Make each copy take that long, in all directions or in those named."""
        used = [DIRECTIONS.index(name) for name in directions]
        for direction in used:
            self.native.set_latency(direction, fixed_ns, ns_per_byte)
        try:
            yield
        finally:
            for direction in used:
                self.native.set_latency(direction, 0, 0)

    @contextmanager
    def fail_next_allocation(self, n: int = 1) -> Iterator[None]:
        """Make the n-th allocation from now on raise torch.OutOfMemoryError, once, if it comes within the block."""
        if n < 1:
            raise ValueError(f"the first allocation is number 1, not {n}")
        self.native.fail_next_allocation(n)
        try:
            yield
        finally:
            self.native.fail_next_allocation(0)

    def owner_of(self, address: int) -> int | None:
        """Answer the index of the device whose live block holds the address, or None."""
        return self.native.owner_of(address)

    def device_of_pointer(self, address: int) -> str:
        """Answer the device of a live block as PyTorch's hooks do, which raise for any other address."""
        return self.native.device_of_pointer(address)

    def has_context(self, index: int) -> bool:
        """Answer whether the device was ever used."""
        return self.native.has_context(index)

    def impl_class(self, x: torch.Tensor) -> str:
        """Answer the C++ class of the tensor's impl: NpuTensorImpl or other."""
        return self.native.impl_class(x)

    def describe_storage(self, x: torch.Tensor) -> Description | None:
        """Answer what the tensor's NpuStorageImpl was made for; None if it has none."""
        said = self.native.describe_storage(x)
        return None if said is None else Description(*said)


def _engine_has_threads() -> bool:
    """Try a backward: an engine that started without the device refuses it before it runs anything."""
    x = torch.ones(1, device="npu", requires_grad=True)
    try:
        (x * 2).backward()
    except RuntimeError as error:
        if "device_ready_queues_" not in str(error):
            raise
        return False
    return True


@functools.cache
def load() -> Npu:
    """Compile where needed, register the backend in this process, and answer its handle."""
    folder = Path(__file__).parent
    native = built("tensorplay_test_npu", sorted(folder.glob("*.cpp")), ["-O1", "-g0"])
    from tests.npu import device

    device.register(native)
    return Npu(native, _engine_has_threads())
