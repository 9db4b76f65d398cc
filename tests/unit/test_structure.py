"""The rooms keep to themselves, and generated files are up to date."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.helpers import ROOT

PYTHON_HEADERS = re.compile(r"#include *[<\"](Python\.h|pybind11|torch/extension\.h|torch/csrc/utils/pybind\.h)")


def test_core_knows_no_python():
    core = [*(ROOT / "csrc" / "core").glob("*"), ROOT / "csrc" / "compat.h"]

    assert len(core) > 5
    assert [str(path) for path in core if PYTHON_HEADERS.search(path.read_text())] == []


def test_core_includes_nothing_of_python_s_room():
    core = "".join(path.read_text() for path in (ROOT / "csrc" / "core").glob("*"))

    assert "../python/" not in core


def test_one_file_of_the_tracker_knows_python():
    track = (ROOT / "csrc" / "track").glob("*")

    assert {path.name for path in track if PYTHON_HEADERS.search(path.read_text())} == {"stacks.cpp"}


def test_extent_needs_neither_torch_nor_python():
    text = "".join(path.read_text() for path in (ROOT / "csrc" / "core").glob("extent.*"))

    assert re.findall(r"#include [<\"](?:ATen|c10|torch|Python)", text) == []


@pytest.mark.parametrize("room", ["render", "rules"])
def test_renderers_and_rules_do_not_probe(room):
    for path in (ROOT / "tensorplay" / room).glob("*.py"):
        names = {
            alias.name if isinstance(node, ast.Import) else node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        assert not names & {"torch", "tensorplay._native", "tensorplay.inspection", "tensorplay.walk"}, path


def test_generated_files_are_up_to_date():
    result = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"], capture_output=True, text=True, cwd=ROOT
    )

    assert result.returncode == 0, f"{result.stdout}{result.stderr}\nrun: make generate"


def test_public_names_are_typed_and_documented():
    import inspect

    import tensorplay

    for name in tensorplay.__all__:
        value = getattr(tensorplay, name)
        assert isinstance(value, str) or (inspect.getdoc(value) or "").strip(), name
    assert set(tensorplay.__all__) <= set(dir(tensorplay))
    assert set(tensorplay.__all__) == {*tensorplay._PUBLIC, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tensorplay.nothing


TEXTS = {".py", ".md", ".toml", ".h", ".cpp", ".txt", ".json", ".sh", ".pyi"}


def test_no_path_of_a_machine_is_committed():
    if (ROOT / ".git").exists():
        files = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split()
    else:  # a copy of what is committed, with what was built in it
        files = [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.suffix in TEXTS and path.is_file()]
        files = [name for name in files if not name.startswith(("build/", ".venv")) and "_build_info" not in name]
    pattern = re.compile(r"(^|[^A-Za-z0-9_.])/(work|root|home)/", re.MULTILINE)

    found = [name for name in files if (ROOT / name).is_file() and pattern.search((ROOT / name).read_text("utf-8"))]

    assert "README.md" in files
    assert [name for name in found if name != "tests/unit/test_structure.py"] == []
