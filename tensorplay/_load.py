"""Find the native extension, prove that it fits the running torch, and hand it out.

A binary built for another torch loads without any error and then reads the wrong bytes. So the versions are compared
before the extension is imported, and one tensor is read and compared with Python's own answers after it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tensorplay.errors import LoadError


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


try:
    import torch
except Exception as error:  # absent: ImportError; a library of its own missing: OSError; half installed: any
    raise LoadError(
        f"tensorplay: torch does not import in this environment ({_first_line(error)}). "
        "Run: pip install torch==2.13.0, then build tensorplay-probe again"
    ) from error

__all__ = ["BUILD_INFO", "REBUILD_COMMAND", "SUPPORTED_TORCH", "canary", "load"]

SUPPORTED_TORCH = ("2.13", "2.14")
REBUILD_COMMAND = "pip install --force-reinstall --no-deps --no-cache-dir ."

BUILD_INFO: dict[str, Any] = {}
_BUILD_FACTS = {"torch", "cxx11_abi", "python", "compiler", "cxx_standard"}


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _local(version: str) -> str:
    return version.partition("+")[2]


def _fail(problem: str, why: str, command: str = REBUILD_COMMAND) -> LoadError:
    return LoadError(f"tensorplay: {problem}; {why}. Run in the TensorPlay checkout: {command}")


def _check_platform() -> None:
    version = sys.version_info[:2]
    fits = platform.system() == "Linux" and platform.machine() == "x86_64" and (3, 10) <= version <= (3, 13)
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    if not fits or free_threaded or platform.python_implementation() != "CPython":
        raise LoadError(
            "tensorplay: only CPython 3.10-3.13 on Linux x86-64 is supported, this is "
            f"{platform.python_implementation()} {platform.python_version()}{' free-threaded' * free_threaded} on "
            f"{platform.system()} {platform.machine()}"
        )
    if _minor(torch.__version__) not in SUPPORTED_TORCH:
        raise LoadError(
            f"tensorplay: torch {torch.__version__} is not supported, only {' and '.join(SUPPORTED_TORCH)}. "
            "Run: pip install torch==2.13.0"
        )


def _read_build_info() -> dict[str, Any]:
    try:
        info = importlib.import_module("tensorplay._build_info").BUILD_INFO
        missing = _BUILD_FACTS - info.keys()
    except ImportError as error:
        raise _fail(
            "the native extension is not built", "this folder holds the sources only", "pip install -e ."
        ) from error
    except Exception as error:
        raise _broken_info(_first_line(error)) from error
    if missing:
        raise _broken_info(f"no {', '.join(sorted(missing))}")
    return dict(info)


def _broken_info(what: str) -> LoadError:
    return _fail(f"_build_info.py cannot be read ({what})", "without it nobody knows what torch _C was built for")


def _check_whole() -> None:
    """Raise ImportError for a library that was cut: loading it would end the process."""
    spec = importlib.util.find_spec("tensorplay._C")
    if spec is None or spec.origin is None:
        return
    with Path(spec.origin).open("rb") as file:
        head = file.read(64)
        size = file.seek(0, io.SEEK_END)
    # Of ELF64: where the section headers begin, how long each is, how many; nothing comes after them.
    offset, each, count = (int.from_bytes(head[start:end], "little") for start, end in ((40, 48), (58, 60), (60, 62)))
    if len(head) < 64 or offset + each * count > size:
        raise ImportError(f"{Path(spec.origin).name} was cut to {size} bytes")


def _check_build(info: dict[str, Any]) -> None:
    built, running = str(info["torch"]), str(torch.__version__)
    same = (
        _minor(built) == _minor(running)
        and _local(built) == _local(running)
        and bool(info["cxx11_abi"]) == torch.compiled_with_cxx11_abi()
    )
    if not same:
        raise _fail(
            f"built for torch {built}, running on torch {running}",
            "c10::TensorImpl has another layout in each torch, so that every field would be read from the wrong place",
        )


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make plain CPU tensors here, even under a device context, a fake mode or inference mode."""
    from torch.utils._python_dispatch import _disable_current_modes

    with contextlib.ExitStack() as left:
        if torch._C._functorch.peek_interpreter_stack() is not None:  # inside torch.func.grad, jvp or vmap
            from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

            left.enter_context(temporarily_clear_interpreter_stack())
        left.enter_context(torch.inference_mode(False))
        left.enter_context(torch._C.DisableTorchFunction())
        left.enter_context(_disable_current_modes())
        yield


def canary(extension: ModuleType) -> str | None:
    """Read one tensor natively and by Python, and name the first answer that differs, if any."""
    with _plain_tensors():
        sample = torch.empty(4, 6, dtype=torch.float64, device="cpu")[1:, ::2]
        record = extension.read(sample)
        answers = {
            "impl address": (record.impl.address, sample._cdata),
            "storage address": (record.storage.address, sample.untyped_storage()._cdata),
            "data_ptr": (record.data.data_ptr, sample.data_ptr()),
            "storage bytes": (record.storage.nbytes, sample.untyped_storage().nbytes()),
            "shape": (record.impl.shape, tuple(sample.shape)),
            "stride": (record.impl.stride, sample.stride()),
            "offset": (record.impl.storage_offset, sample.storage_offset()),
            "version": (record.impl.version, sample._version),
            "dtype": (f"torch.{record.impl.dtype}", str(sample.dtype)),
            "device": (record.impl.device, str(sample.device)),
            "view": (record.impl.is_view, sample._is_view()),
        }
    for name, (native, python) in answers.items():
        if native != python:
            return f"{name}: read {native!r}, Python says {python!r}"
    return None


def load() -> Any:
    """Import ``tensorplay._C`` after every check; raise LoadError in one line where one fails."""
    _check_platform()
    info = _read_build_info()
    _check_build(info)
    try:
        _check_whole()
        extension = importlib.import_module("tensorplay._C")
    except (ImportError, OSError) as error:
        raise _fail(
            f"the extension built for torch {info['torch']} and Python {info['python']} does not load on torch "
            f"{torch.__version__} and Python {platform.python_version()} ({_first_line(error)})",
            "the file is missing, broken or from another build",
        ) from error
    carried = dict(extension.BUILD_INFO)
    if carried != info:
        raise _fail(
            f"_C was built for torch {carried['torch']}, its _build_info.py says {info['torch']}",
            "the two files come from different builds",
        )
    if differs := canary(extension):
        raise _fail(
            f"built for torch {info['torch']}, running on torch {torch.__version__}, but a read failed ({differs})",
            "this torch is not the one its version number says, and nothing read from it could be trusted",
        )
    with _plain_tensors():
        whole = torch.UntypedStorage(2, device="cpu")
        extension.learn_storage_slice(torch.empty(0, dtype=torch.uint8, device="cpu").set_(whole[0:1]))
    BUILD_INFO.update(info)
    return extension
