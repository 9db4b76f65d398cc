"""C++ that only tests use: compiled by whichever process of the tests comes first."""

from __future__ import annotations

import fcntl
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

BUILT = Path(__file__).parent.parent.parent / "build" / "test-extensions"


def built(name: str, sources: Sequence[Path], flags: Sequence[str] = ("-O0", "-g0")) -> ModuleType:
    """Answer the extension module, compiled if its sources changed. One folder for each Python and torch."""
    from torch.utils.cpp_extension import load

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for ninja
    versions = f"{platform.python_implementation()}-{platform.python_version()}-torch-{torch.__version__}"
    folder = BUILT / versions / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "held", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # of a process that was ended while it compiled
        return load(name, [str(source) for source in sources], build_directory=str(folder), extra_cflags=list(flags))
