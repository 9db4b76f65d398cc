"""Where the question was asked, and what the user's code calls what it handed in."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os

import pytest
import torch

import tensorplay as tp
from tensorplay import callers
from tensorplay.callers import Caller

HEADS = """
import functools

def same(function):
    return function

@same
@functools.cache  # first
def decorated(
    x=(lambda: {1: 2})(),  # second
) -> dict[str, int]:  # third
    return {}  # body

async def waits(): pass

class Model:
    def __call__(self): pass

    @same
    def method(self): pass

short = lambda: 3  # def nothing():
partial = functools.partial(functools.partial(decorated.__wrapped__, 1))
"""


@pytest.fixture
def load(tmp_path):
    def load_(text: str, changed: float | None = None):
        path = tmp_path / "loaded.py"
        path.write_text(text)
        if changed is not None:
            os.utime(path, (changed, changed))
        linecache.checkcache(str(path))
        spec = importlib.util.spec_from_file_location("loaded", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_


@pytest.fixture(params=["columns", "lines"])
def _any_python(request, monkeypatch):
    """Python 3.10 knows no columns: there the call is looked for in the whole file."""
    if request.param == "lines":
        monkeypatch.setattr(Caller, "position", lambda self: None)


def name(report: tp.Report) -> str:
    return report.records[0].name


@pytest.mark.parametrize(
    ("of", "line", "span", "function"),
    [
        (lambda m: m.decorated, 9, (7, 11), "decorated"),
        (lambda m: m.partial, 9, (7, 11), "decorated"),
        (lambda m: m.waits, 14, (14, 14), "waits"),
        (lambda m: m.Model(), 17, (17, 17), "__call__"),
        (lambda m: m.Model().method, 20, (19, 20), "method"),
        (lambda m: m.short, 22, (22, 22), "<lambda>"),
        (lambda m: next(map(functools.partial, [m.waits])), 14, (14, 14), "waits"),
    ],
)
def test_definition_is_the_head_and_its_line_the_def(load, of, line, span, function):
    caller = Caller.of_function(of(load(HEADS)))

    assert (caller.where("x").line, caller.span(), caller.where("x").function) == (line, span, function)


@pytest.mark.parametrize("function", [len, functools.partial(len), torch.nn.Linear, 3])
def test_what_has_no_python_code_has_no_place(function):
    assert Caller.of_function(function) is None


def test_function_that_wraps_itself_has_no_place():
    def function(): ...

    function.__wrapped__ = function

    assert Caller.of_function(function) is None


@pytest.mark.usefixtures("_any_python")
def test_argument_names_the_tensor():
    batch = [torch.ones(2)]

    assert name(tp.inspect(batch[0], quiet=True)) == "batch[0]"
    assert name(tp.inspect_data_ptr(batch[0])) == "batch[0]"


@pytest.mark.usefixtures("_any_python")
def test_call_that_is_not_plainly_ours_names_nothing():
    xs = [torch.ones(2)]
    ask = functools.partial(tp.inspect, quiet=True)

    assert name(next(iter(map(tp.inspect, xs)))) == "x"
    assert name(ask(xs[0])) == "x"
    assert name(functools.reduce(tp.inspect, xs, xs[0])) == "x"
    assert (name(next(map(tp.inspect, xs))), name(tp.inspect(xs[0], quiet=True)))[0] == "x"


@pytest.mark.usefixtures("_any_python")
def test_file_changed_while_it_runs_names_nothing(load):
    text = "import tensorplay as tp\ndef ask(a, b):\n    return tp.inspect(a, quiet=True)\n"
    module = load(text, callers._PROCESS_START - 60)
    assert name(module.ask(torch.ones(2), 0)) == "a"

    load(text.replace("inspect(a", "inspect(b"))

    assert name(module.ask(torch.ones(2), 0)) == "x"


def test_file_is_parsed_once_for_all_calls(monkeypatch):
    monkeypatch.setattr(Caller, "position", lambda self: None)
    callers._mentions_of_ours.cache_clear()

    for _ in range(3):
        assert name(tp.inspect(torch.ones(2), quiet=True)) == "torch.ones(2)"

    assert callers._mentions_of_ours.cache_info().misses == 1
