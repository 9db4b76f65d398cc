"""Build the native probes: find torch, list the sources. Everything else is in pyproject.toml."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
SUPPORTED = ("2.13", "2.14")


def import_torch():
    """Import the torch this build is for: the build environment's, else the target environment's."""
    # pip's isolated build keeps the target's prefix: appended, so that the build environment goes first.
    target = sysconfig.get_path("purelib")
    if target not in sys.path:
        sys.path.append(target)
    try:
        import torch
    except ImportError as error:
        sys.exit(
            f"tensorplay-probe: no torch to build against ({error}).\n"
            "  Install it in this environment first: pip install torch==2.13.0\n"
            "  With uv or poetry, build without isolation: uv pip install --no-build-isolation ."
        )
    version = ".".join(torch.__version__.split(".")[:2])
    if version not in SUPPORTED:
        sys.exit(
            f"tensorplay-probe: torch {torch.__version__} is not supported, "
            f"only {' and '.join(SUPPORTED)}: pip install torch==2.13.0"
        )
    return torch


FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
if (
    platform.system() != "Linux"
    or platform.machine() != "x86_64"
    or not (3, 10) <= sys.version_info[:2] <= (3, 13)
    or FREE_THREADED
):
    sys.exit(
        "tensorplay-probe: only CPython 3.10-3.13 on Linux x86-64 is supported, this is "
        f"{platform.python_implementation()} {platform.python_version()}{' free-threaded' * FREE_THREADED} on "
        f"{platform.system()} {platform.machine()}"
    )
if not Path(sysconfig.get_path("include"), "Python.h").exists():
    sys.exit("tensorplay-probe: no Python.h: apt install python3-dev, or use a Python that comes with its headers")
torch = import_torch()
if (ccache := shutil.which("ccache")) and "CXX" not in os.environ:
    # Under a compiler's name ccache acts as that compiler; torch takes CXX for one word.
    masquerade = ROOT / "build" / "ccache" / "c++"
    masquerade.parent.mkdir(parents=True, exist_ok=True)
    masquerade.unlink(missing_ok=True)
    masquerade.symlink_to(ccache)
    os.environ["CXX"] = str(masquerade)
    os.environ["TORCH_DONT_CHECK_COMPILER_ABI"] = "1"  # its check follows the link and finds ccache
elif " " in os.environ.get("CXX", ""):
    os.environ["TORCH_DONT_CHECK_COMPILER_ABI"] = "1"  # its check takes "ccache g++" for one word

from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths  # noqa: E402


def compiler_name() -> str:
    command = os.environ.get("CXX", "c++")
    try:
        answer = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True, check=True)
        return answer.stdout.splitlines()[0]
    except (OSError, ValueError, IndexError, subprocess.CalledProcessError):
        sys.exit(f"tensorplay-probe: no C++ compiler ({command}): apt install g++, or conda install gxx, or set CXX")


CXX_STANDARD = 202002
BUILD_INFO = {
    "torch": torch.__version__,
    "cxx11_abi": int(torch.compiled_with_cxx11_abi()),
    "python": platform.python_version(),
    "compiler": compiler_name(),
    "cxx_standard": CXX_STANDARD,
}


def write_node_fields() -> None:
    """List the fields of the autograd nodes of this torch, for core/nodes.cpp."""
    sys.path.insert(0, str(ROOT / "csrc" / "core"))
    from generate_nodes import write

    write(Path(include_paths()[0]), ROOT / "build" / "generated" / "tensorplay_nodes.inc")


class BuildWithInfo(BuildExtension):
    """Write beside the extension the same facts that it carries inside."""

    def run(self) -> None:
        write_node_fields()
        super().run()
        path = Path(self.get_ext_fullpath("tensorplay._C")).parent / "_build_info.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""What _C was built for; written by setup.py."""\n\nBUILD_INFO = {BUILD_INFO!r}\n')


def write_build_header() -> Path:
    """Put the facts where module.cpp includes them; left alone when equal, so that nothing is compiled again."""
    path = ROOT / "build" / "generated" / "tensorplay_build_info.h"
    quoted = {key: f'"{value}"' if isinstance(value, str) else value for key, value in BUILD_INFO.items()}
    text = "#pragma once\n" + "".join(
        f"#define TENSORPLAY_BUILT_{key.upper()} {value}\n" for key, value in quoted.items()
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return path


flags = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
# The same folders again as system ones: warnings are for our own code.
flags += [f"-isystem{path}" for path in [*include_paths(), sysconfig.get_path("include")]]
# In every command line: torch's headers are system ones, nothing else makes ninja compile anew for another torch.
flags.append(f"-DTENSORPLAY_TORCH_{re.sub(r'[^0-9A-Za-z]', '_', torch.__version__)}")
if os.environ.get("TENSORPLAY_WERROR") == "1":
    flags.append("-Werror")
if sanitize := os.environ.get("TENSORPLAY_SANITIZE"):
    flags += [f"-fsanitize={sanitize}", "-fno-sanitize=vptr", "-fno-omit-frame-pointer", "-g1"]

setup(
    ext_modules=[
        CppExtension(
            "tensorplay._C",
            sources=sorted(
                str(path.relative_to(ROOT))
                for room in ("core", "device", "repair", "track", "python")
                for path in (ROOT / "csrc" / room).glob("*.cpp")
            ),
            depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.h")),
            include_dirs=[str(write_build_header().parent)],
            libraries=["shm"],
            extra_compile_args=flags,
            extra_link_args=["-Wl,--as-needed", *([f"-fsanitize={sanitize}"] if sanitize else [])],
        )
    ],
    cmdclass={"build_ext": BuildWithInfo},
)
