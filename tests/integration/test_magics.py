"""The magics in a real IPython shell, which runs in a process of its own: a shell changes what inspect() prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers import ROOT

CELLS = {
    "load": "%load_ext tensorplay",
    "set": "import torch, tensorplay\nx = torch.arange(24).reshape(4, 6).clone()\nname = 'value'",
    "line": "%tensorplay x",
    "spaces": "%tensorplay   {'a  b': x, '{name} $name': x[1:]}",
    "negative": "%tensorplay -x",
    "comment": "%tensorplay x[0]  # the first row",
    "assigned": "report = %tensorplay x",
    "kept": "repr(report)",
    "long": f"%tensorplay {'x' + '.t()' * 20}",
    "temporary": "%tensorplay torch.ones(3)",
    "bare": "tensorplay.inspect(x)",
    "pointer": "tensorplay.inspect_data_ptr(x)",
    "cell": "%%tensorplay\nrow = x[1]\nrow",
    "cell of a name": "%%tensorplay row\nrow = x[2]",
    "cell without value": "%%tensorplay\nrow = x[2]",
    "cell that raises": "%%tensorplay x\n1 / 0",
    "number": "%tensorplay 3",
    "empty": "%tensorplay",
    "raises": "%tensorplay 1 / 0",
    "syntax": "%tensorplay x +",
    "reload": "%reload_ext tensorplay",
    "again": "%tensorplay x",
    "help": "%tensorplay?",
    "history": "torch.full((5,), 7.0)",
    "who": "import re\nprint(tensorplay.who_holds(next(v for v in Out.values() if isinstance(v, torch.Tensor))))",
}
REFCOUNTS = {"line": "refcount 1\n", "temporary": "refcount 0: a temporary", "cell of a name": "refcount 1\n"}
RUN = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

shell, results = InteractiveShell.instance(colors="nocolor"), {}
for name, cell in json.load(sys.stdin).items():
    with capture_output() as captured:
        outcome = shell.run_cell(cell)
    error = outcome.error_in_exec
    shown = [output.data for output in captured.outputs]
    if outcome.result is not None:
        shown.append(shell.display_formatter.format(outcome.result)[0])
    results[name] = {
        "error": error and type(error).__name__, "out": captured.stdout, "err": captured.stderr, "shown": shown
    }
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ipython")
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(CELLS),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "IPYTHONDIR": str(folder), "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("line", "x"),
        ("again", "x"),
        ("bare", "x"),
        ("pointer", "x"),
        ("negative", "-x"),
        ("comment", "x[0]"),
        ("long", "x"),
        ("spaces", "a  b"),
        ("temporary", "torch.ones(3)"),
    ],
)
def test_report_shows_itself_once_under_its_name(ran, cell, name):
    (bundle,) = ran[cell]["shown"]

    assert bundle.keys() == {"text/plain", "text/html"}
    assert bundle["text/plain"].startswith(f"{name}  Tensor ")
    assert ran[cell]["out"].strip() == f"Out[0]: \n{bundle['text/plain']}"
    assert ran[cell]["err"] == ""


def test_references_of_the_magic_are_taken_off(ran):
    for cell, words in REFCOUNTS.items():
        assert words in ran[cell]["shown"][-1]["text/plain"], cell


def test_the_history_of_the_shell_is_a_holder(ran):
    said = ran["who"]["out"]
    assert re.search(r"Out\[\d+\]|_oh\[\d+\]|\['Out'\]", said), said
    assert "every reference is accounted for" in said


def test_names_in_braces_and_dollars_are_left_alone(ran):
    assert "{name} $name  Tensor int64[3, 6]" in ran["spaces"]["shown"][0]["text/plain"]


def test_assigned_report_is_not_shown(ran):
    assert ran["assigned"] == {"error": None, "out": "", "err": "", "shown": []}
    assert ran["kept"]["out"].strip() == "Out[0]: '<tensorplay.Report: 1 tensor, 0 findings>'"


def test_magics_have_a_place_for_the_view_chain(ran):
    assert "<summary>Show View Chain</summary>" in ran["line"]["shown"][0]["text/html"]
    assert "Show View Chain" not in ran["bare"]["shown"][0]["text/html"]


def test_cell_runs_shows_its_value_and_then_the_report(ran):
    assert ran["cell"]["out"] == "Out[0]: tensor([ 6,  7,  8,  9, 10, 11])\n"
    assert ran["cell"]["shown"][0]["text/plain"].startswith("_  Tensor int64[6]")
    assert ran["cell of a name"]["shown"][0]["text/plain"].startswith("row  Tensor int64[6]")


def test_what_raises_shows_the_user_s_traceback_alone(ran):
    for cell in ("raises", "cell that raises"):
        assert ran[cell]["out"].count("ZeroDivisionError: division by zero") == 1
        assert "----> 1 1 / 0" in ran[cell]["out"]
        assert "magics.py" not in ran[cell]["out"]
        assert ran[cell]["shown"] == []
    assert ran["raises"]["error"] == "ZeroDivisionError"
    assert ran["cell that raises"]["error"] == "CellFailed"


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("number", "no tensor in 3 (int): name a tensor, or a module, list or dict of some"),
        ("empty", "%tensorplay takes an expression: %tensorplay x"),
        ("syntax", "x + is no expression: invalid syntax"),
        ("cell without value", "%%tensorplay: the cell's last line has no value; name an expression, %%tensorplay x"),
    ],
)
def test_wrong_use_is_one_line(ran, cell, message):
    assert ran[cell] == {"error": "UsageError", "out": "", "err": f"UsageError: {message}\n", "shown": []}


def test_help_says_both_forms(ran):
    assert "%tensorplay EXPR" in ran["help"]["out"]
    assert "%%tensorplay" in ran["help"]["out"]
