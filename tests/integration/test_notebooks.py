"""Every notebook runs from top to bottom: its claims are assertions."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import need
from tests.helpers import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def code_of(path: Path) -> list[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n\n".join(code_of(path))], capture_output=True, text=True, cwd=tmp_path
    )

    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]

    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    assert any("assert" in source for source in code_of(path))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_shows_reports_in_a_kernel(path, tmp_path):
    need(
        "jupyter", find_spec("nbclient") is not None and find_spec("ipykernel") is not None, "needs nbclient, ipykernel"
    )
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)

    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()

    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    assert len(shown) >= 3
    assert all("text/html" in data for data in shown)
