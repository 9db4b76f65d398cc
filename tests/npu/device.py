"""The module torch.npu: what PyTorch looks up there, and what users of a device know from torch.cuda."""

from __future__ import annotations

import sys
from types import ModuleType

import torch

_native: ModuleType

_initialized = True  # else checkpoint does not keep the generators' states

Device = torch.device | str | int | None


def register(native: ModuleType) -> None:
    """Rename the backend and make this module torch.npu."""
    global _native
    _native = native
    torch.utils.rename_privateuse1_backend("npu")
    torch._register_device_module("npu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _index(device: Device) -> int:
    if device is None:
        return current_device()
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != "npu":
            raise ValueError(f"expected an npu device, not {device}")
        device = current_device() if device.index is None else device.index
    _native.check_device(device)
    return device


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _native.DEVICES


def current_device() -> int:
    return _native.current_device()


def set_device(device: Device) -> None:
    _native.exchange_device(_index(device))


def get_device_name(device: Device = None) -> str:
    return f"test NPU {_index(device)}"


def synchronize(device: Device = None) -> None:
    _index(device)  # work is done when it is asked for


class device:
    """Make a device current for the time of a with block; None leaves the current one."""

    def __init__(self, device: Device) -> None:
        self.idx = None if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        if self.idx is not None:
            self.prev_idx = _native.exchange_device(self.idx)

    def __exit__(self, *exception: object) -> None:
        if self.idx is not None:
            _native.exchange_device(self.prev_idx)


# Random numbers.


def manual_seed(seed: int) -> None:
    _native.seed(current_device(), seed & 0xFFFF_FFFF_FFFF_FFFF)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _native.seed(index, seed & 0xFFFF_FFFF_FFFF_FFFF)


def get_rng_state(device: Device = "npu") -> torch.Tensor:
    return _native.rng_state(_index(device))


def set_rng_state(new_state: torch.Tensor, device: Device = "npu") -> None:
    _native.set_rng_state(_index(device), new_state)


# Memory.


def memory_allocated(device: Device = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: Device = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: Device = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: Device = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def memory_stats(device: Device = None) -> dict[str, int]:
    return torch.accelerator.memory_stats(_index(device))


def reset_peak_memory_stats(device: Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    return _native.mem_get_info(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


# Streams and events are PyTorch's own, which takes no subclass of its events. Without a device they are of the current
# accelerator.
Stream, Event = torch.Stream, torch.Event


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    return stream  # a context manager itself


# Automatic mixed precision.


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True
