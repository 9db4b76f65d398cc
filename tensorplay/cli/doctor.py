"""``tensorplay doctor``: does this installation work, and what has it registered?"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator

import click

from tensorplay import __version__
from tensorplay.cli.output import escaped, print_text

__all__ = ["doctor"]


@click.command()
def doctor() -> None:
    """Report versions, the build, the test read, the GPU part, and what is registered in this process."""
    healthy = True
    for ok, name, value in _examine():
        healthy = healthy and ok
        print_text(f"{'ok  ' if ok else 'FAIL'} {name:<12} {escaped(value)}")
    sys.exit(0 if healthy else 2)


def _examine() -> Iterator[tuple[bool, str, str]]:
    yield True, "tensorplay", __version__
    yield True, "python", f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    try:
        from tensorplay import _load
    except ImportError as error:
        yield False, "torch", str(error).removeprefix("tensorplay: ")
        return
    import torch

    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield True, "torch", f"{torch.__version__} ({cuda})"
    try:
        _load.load()
    except ImportError as error:
        yield False, "extension", str(error).removeprefix("tensorplay: ")
        return
    info = _load.BUILD_INFO
    yield (
        True,
        "extension",
        (
            f"built for torch {info['torch']}, Python {info['python']}, by {info['compiler']}, "
            f"C++ {info['cxx_standard']}, CXX11 ABI {info['cxx11_abi']}"
        ),
    )
    yield True, "test read", "eleven native answers equal Python's"
    yield True, "GPU part", _gpu_part(torch.version.cuda is not None)
    yield True, "registered", "nothing: no hook, no callback, no allocator, no dispatch mode; cost 0"


def _gpu_part(torch_has_cuda: bool) -> str:
    if not torch_has_cuda:
        return "absent: this torch has no CUDA; CUDA tensors cannot exist here"
    return "absent: not part of this version; CUDA tensors are read by the same probe, allocator snapshots are not"
