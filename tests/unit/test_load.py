"""Loading refuses what does not fit, in one line with both versions and the way out."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tensorplay
from tensorplay import _load
from tensorplay._native import C

PACKAGE = Path(tensorplay.__file__).parent


@pytest.fixture
def copy(tmp_path):
    """A copy of the package that a test may break."""
    shutil.copytree(PACKAGE, tmp_path / "tensorplay", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "tensorplay"


def run(copy: Path, *command: str, code: int) -> str:
    """Run Python over the broken copy; answer its one line of stderr."""
    # An editable installation's finder would fill the gaps of the copy from the sources.
    start = (
        f"import sys; sys.path.insert(0, {str(copy.parent)!r}); "
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]; "
    )
    result = subprocess.run(
        [sys.executable, "-c", start + command[0], *command[1:]], capture_output=True, text=True, cwd=copy.parent
    )
    assert result.returncode == code, result.stderr
    return result.stderr.strip() or result.stdout.strip()


CATCH = "import tensorplay\ntry: tensorplay.inspect\nexcept ImportError as e: print(e); raise SystemExit(3)"
COMMAND = "from tensorplay.cli import main; sys.argv = ['tensorplay', *sys.argv[1:]]; main()"
INFO = "BUILD_INFO = {info!r}\n"


def message(copy: Path) -> str:
    text = run(copy, CATCH, code=3)
    assert "\n" not in text
    assert text.startswith("tensorplay: ")
    return text


def break_info(copy: Path, **changes) -> None:
    (copy / "_build_info.py").write_text(INFO.format(info={**dict(C.BUILD_INFO), **changes}))


def test_other_torch_minor_names_both_versions_why_and_the_command(copy):
    break_info(copy, torch="2.99.0+cpu")

    text = message(copy)

    assert f"built for torch 2.99.0+cpu, running on torch {torch.__version__}" in text
    assert "layout" in text
    assert _load.REBUILD_COMMAND in text


def test_other_local_tag_is_refused(copy):
    break_info(copy, torch=str(torch.__version__).split("+")[0] + "+cu999")

    assert "+cu999, running on torch" in message(copy)


def test_other_abi_is_refused(copy):
    break_info(copy, cxx11_abi=0)

    assert "running on torch" in message(copy)


def test_info_of_another_build_is_refused(copy):
    break_info(copy, compiler="another compiler")

    assert "come from different builds" in message(copy)


def test_patch_release_of_the_same_minor_is_accepted():
    version = str(torch.__version__)
    major, minor, _ = version.split(".", 2)
    local = version.partition("+")[2]
    other = f"{major}.{minor}.9{'+' + local if local else ''}"

    assert other != version
    _load._check_build({**dict(C.BUILD_INFO), "torch": other})


def test_sources_that_were_not_built_say_how_to_build(copy):
    (copy / "_build_info.py").unlink()

    text = message(copy)

    assert "the native extension is not built" in text
    assert text.endswith("Run in the TensorPlay checkout: pip install -e .")


def test_extension_that_is_missing_is_named(copy):
    for file in copy.glob("_C*.so"):
        file.unlink()

    assert "does not load" in message(copy)


def test_extension_that_is_broken_is_one_line_without_the_linker_s(copy):
    for file in copy.glob("_C*.so"):
        file.write_bytes(b"not a library")

    text = message(copy)

    assert "does not load" in text
    assert _load.REBUILD_COMMAND in text


@pytest.mark.parametrize("left", [63, -1])
def test_extension_that_was_cut_is_not_loaded(copy, left):
    (file,) = copy.glob("_C*.so")
    file.write_bytes(file.read_bytes()[:left])

    assert f"{file.name} was cut to {file.stat().st_size} bytes" in message(copy)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("BUILD_INFO = {", "was never closed"),
        ("", "has no attribute 'BUILD_INFO'"),
        ("BUILD_INFO = ['2.13']", "has no attribute 'keys'"),
        ("BUILD_INFO = {'torch': '2.13.0', 'python': '3.11'}", "no compiler, cxx11_abi, cxx_standard"),
    ],
)
def test_info_that_cannot_be_read_is_one_line(copy, text, why):
    (copy / "_build_info.py").write_text(text)

    said = message(copy)

    assert "_build_info.py cannot be read" in said
    assert why in said


HALF_TORCH = """
class Finder:
    @staticmethod
    def find_spec(name, *_):
        if name == "torch": raise OSError("libcudart.so.12: cannot open shared object file")
sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("command", [["check", "m:f"], ["demo"], ["doctor"]])
def test_torch_that_misses_a_library_is_one_line(copy, command):
    text = run(copy, HALF_TORCH + COMMAND, *command, code=2)

    assert "torch does not import in this environment (libcudart.so.12: cannot open shared object file)" in text
    assert "Run: pip install torch==2.13.0" in text
    assert len([line for line in text.splitlines() if not line.startswith("ok ")]) == 1


def test_environment_without_torch_says_how_to_install_it(copy):
    hide = "import sys; sys.modules['torch'] = None; "

    text = run(copy, hide + CATCH, code=3)

    assert "torch does not import" in text
    assert "pip install torch==2.13.0" in text


@pytest.mark.parametrize("command", [["check", "m:f"], ["explain", "TP102"], ["demo"]])
def test_commands_answer_a_broken_extension_in_one_line(copy, command):
    break_info(copy, torch="2.99.0+cpu")
    if command[0] == "explain":
        assert run(copy, COMMAND, *command, code=0).startswith("# TP102")  # needs no extension
        return

    text = run(copy, COMMAND, *command, code=2)

    assert "\n" not in text
    assert "Traceback" not in text


def test_doctor_says_what_is_broken(copy):
    break_info(copy, torch="2.99.0+cpu")

    text = run(copy, COMMAND, "doctor", code=2)

    assert "FAIL extension" in text
    assert "2.99.0+cpu" in text


def test_unsupported_torch_is_one_line(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.1.0")

    with pytest.raises(tensorplay.LoadError, match=r"torch 2.1.0 is not supported, only 2.13 and 2.14") as caught:
        _load.load()

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"), [("python_implementation", "PyPy"), ("system", "Darwin"), ("machine", "arm")]
)
def test_unsupported_platform_is_one_line(monkeypatch, field, value):
    monkeypatch.setattr(_load.platform, field, lambda: value)

    with pytest.raises(tensorplay.LoadError, match=f"only CPython 3.10-3.13 on Linux x86-64 is supported.*{value}"):
        _load.load()


def test_python_without_the_lock_is_refused(monkeypatch):
    monkeypatch.setattr(_load.sysconfig, "get_config_var", lambda name: 1)

    with pytest.raises(tensorplay.LoadError, match=r"is supported, this is CPython 3\.\d+\.\d+ free-threaded on Linux"):
        _load.load()


def test_canary_finds_a_reader_that_reads_wrong():
    class Wrong:
        BUILD_INFO = C.BUILD_INFO

        @staticmethod
        def read(x):
            return C.read(x.clone())

    assert _load.canary(Wrong) is not None
    assert _load.canary(C) is None


@pytest.mark.parametrize(
    "around",
    [
        "with torch.device('meta'):",
        "with torch.inference_mode():",
        "from torch._subclasses import FakeTensorMode\nwith FakeTensorMode():",
        "torch.set_default_dtype(torch.float64)\nif True:",
        "torch.use_deterministic_algorithms(True)\nif True:",
    ],
)
def test_first_use_may_be_inside_any_mode(around):
    code = f"import torch\n{around}\n    import tensorplay\n    tensorplay.inspect\nprint('fine')"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (result.returncode, result.stdout) == (0, "fine\n"), result.stderr


@pytest.mark.parametrize("transform", ["grad", "vmap", "functionalize"])
def test_first_use_may_be_inside_a_transform(transform):
    code = (
        "import torch, tensorplay\n"
        "def f(x):\n    tensorplay.inspect(x, quiet=True)\n    return x.sum()\n"
        f"torch.func.{transform}(f)(torch.ones(2, 2))\nprint('fine')"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (result.returncode, result.stdout) == (0, "fine\n"), result.stderr


def test_build_info_and_extension_carry_the_same():
    from tensorplay._build_info import BUILD_INFO

    assert dict(C.BUILD_INFO) == BUILD_INFO
    assert BUILD_INFO["torch"] == str(torch.__version__)
    assert BUILD_INFO.keys() == {"torch", "cxx11_abi", "python", "compiler", "cxx_standard"}
    with pytest.raises(TypeError):
        C.BUILD_INFO["torch"] = "other"


def test_dir_lists_the_public_names():
    assert dir(tensorplay) == sorted([*tensorplay.__all__, *tensorplay._ROOMS])


def test_import_alone_loads_nothing():
    code = "import sys, tensorplay; print('torch' in sys.modules, 'rich' in sys.modules)"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout == "False False\n"
