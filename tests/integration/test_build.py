"""Building: what is missing is named in one line, and nothing is asked from the network without need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT

WITHOUT_LOCK = """
import runpy, sysconfig
real = sysconfig.get_config_var
sysconfig.get_config_var = lambda name: 1 if name == "Py_GIL_DISABLED" else real(name)
runpy.run_path("setup.py")
"""


@pytest.fixture
def setup(tmp_path):
    """Run setup.py in an empty checkout."""

    def run(*command: str, code: int, **environment: str) -> str:
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tmp_path)
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        # A torch with CUDA logs a line of its own where there is no GPU.
        own = [line for line in done.stderr.splitlines() if "torch/utils/cpp_extension.py" not in line]
        return "\n".join(own).strip() or done.stdout.strip()

    return run


def test_compiler_may_have_arguments(setup):
    assert setup("setup.py", "--version", code=0, CXX="env c++").endswith("0.1.0")


@pytest.mark.parametrize("command", ["no-such-compiler -m64", "", "false", "'"])
def test_compiler_that_is_missing_is_one_line(setup, command):
    text = setup("setup.py", "--version", code=1, CXX=command)

    assert text.startswith(f"tensorplay-probe: no C++ compiler ({command}): apt install g++")
    assert "\n" not in text


def test_python_without_the_lock_is_one_line(setup):
    text = setup("-c", WITHOUT_LOCK, code=1)

    assert "only CPython 3.10-3.13 on Linux x86-64 is supported" in text
    assert " free-threaded on Linux x86_64" in text
    assert "\n" not in text


def test_python_without_its_headers_is_one_line(setup):
    hide = "import runpy, sysconfig; sysconfig.get_path = lambda name: '/nowhere'; runpy.run_path('setup.py')"

    assert setup("-c", hide, code=1).startswith("tensorplay-probe: no Python.h: apt install python3-dev")


@pytest.mark.parametrize(("changed", "asks"), [("setup.py", False), ("pyproject.toml", True)])
def test_dependencies_are_asked_for_only_when_they_may_have_changed(tmp_path, changed, asks):
    for stamp in (".torch-torch==2.13.0", ".installed"):
        (tmp_path / stamp).touch()

    plan = subprocess.run(
        ["make", "-n", "-W", changed, f"VENV={tmp_path}", "TORCH_SPEC=torch==2.13.0", f"{tmp_path}/.installed"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert "-e '.[test]'" in plan
    assert ("--no-deps" not in plan) is asks
