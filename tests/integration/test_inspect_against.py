"""``tensorplay inspect FILE --against TARGET``: a checkpoint beside a model that is built on meta."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorplay.cli import main

safetensors = pytest.importorskip("safetensors.torch")

MODELS = """
import torch
from torch import nn


def tied():
    model = nn.Sequential(nn.Embedding(50, 30), nn.BatchNorm1d(30), nn.Linear(30, 50, bias=False))
    model[2].weight = model[0].weight
    return model


def wider():
    return nn.Sequential(nn.Embedding(50, 31), nn.BatchNorm1d(30))


def with_batches():
    return tied(), [1, 2]


def named():
    return {"epochs": 3, "model": tied()}


def large():
    return nn.Linear(40_000, 30_000, bias=False)


def nothing():
    return 3


def raises():
    raise ValueError("no data here")


def computes():
    return nn.Linear(2, int(torch.ones(2).sum()))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "zoo.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "zoo", raising=False)
    names: dict = {}
    exec(MODELS, names)
    model = names["tied"]()
    torch.save({"model": model.state_dict(), "epoch": 1}, "step.pt")
    state_dict = {key: value.clone() for key, value in model.state_dict().items()}
    torch.save(model.state_dict(), "tied.pt")
    torch.save(state_dict | {"2.weight": state_dict["2.weight"] + 1}, "untied.pt")
    torch.save({f"module.{key}": value for key, value in state_dict.items()}, "wrapped.pt")
    torch.save(
        {key: value.double() if value.is_floating_point() else value for key, value in state_dict.items()}, "fp64.pt"
    )
    torch.save(state_dict | {"1.bias": torch.full((30,), float("nan"))}, "nan.pt")
    torch.save({key: value for key, value in state_dict.items() if not key.startswith("1")}, "part.pt")
    del state_dict["2.weight"]
    safetensors.save_file(state_dict, "tied.safetensors")
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capsys):
    def run_(*arguments: object, code: int = 0):
        monkeypatch.setattr(sys, "argv", ["tensorplay", "inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        result = capsys.readouterr()
        assert (stopped.value.code or 0) == code, result
        assert "Traceback" not in result.err
        return result

    return run_


def findings(result) -> list[tuple[str, str]]:
    return [(finding["code"], finding["severity"]) for finding in json.loads(result.out)["findings"]]


@pytest.mark.parametrize(
    ("file", "target", "code", "expected"),
    [
        ("tied.pt", "zoo:tied", 0, []),
        ("tied.pt", "zoo.py:tied", 0, []),
        ("tied.pt", "zoo:with_batches", 0, []),
        ("tied.pt", "zoo:named", 0, []),
        ("step.pt", "zoo:tied", 0, []),
        ("tied.safetensors", "zoo:tied", 0, [("TP501", "info")]),
        ("tied.pt", "zoo:wider", 1, [("TP501", "error"), ("TP501", "error")]),
        ("untied.pt", "zoo:tied", 1, [("TP505", "warning")]),
        ("wrapped.pt", "zoo:tied", 1, [("TP501", "error")]),
        ("fp64.pt", "zoo:tied", 1, [("TP502", "warning")]),
        ("nan.pt", "zoo:tied", 0, []),
    ],
)
def test_what_does_not_fit_is_told(run, file, target, code, expected):
    result = run(file, "--against", target, "--format", "json", code=code)
    assert [one for one in findings(result) if one[0] != "TP303"] == expected


def test_options(run):
    assert findings(run("part.pt", "--against", "zoo:tied", "--format", "json", code=1)) == [("TP501", "error")]
    part = run("part.pt", "--against", "zoo:tied", "--not-strict", "--format", "json", code=1)
    assert findings(part) == [("TP501", "warning")]
    run("part.pt", "--against", "zoo:tied", "--not-strict", "--fail-on", "error")
    assert findings(run("nan.pt", "--against", "zoo:tied", "--values", "--format", "json", code=1)) == [
        ("TP508", "warning")
    ]
    run("nan.pt", "--against", "zoo:tied", "--values", "--ignore", "TP508")
    run("step.pt", "--against", "zoo:tied", "--key", "model")
    assert (
        "has no key 'ema': it has 'model', 'epoch'"
        in run("step.pt", "--against", "zoo:tied", "--key", "ema", code=2).err
    )


def test_the_text_says_what_is_beside_what(run):
    text = run("tied.pt", "--against", "zoo:tied").out
    assert "state dict        tied.pt: 6.3 KiB" in text
    assert "7 of 7 keys matched: no findings" in text
    assert "on meta" not in text
    run("tied.pt", "--against", "zoo:wider", "--format", "html", "-o", "beside.html", code=1)
    assert "<title>TensorPlay: tied.pt beside zoo:wider</title>" in Path("beside.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tied.pt", "--against", "zoo:nothing"), "zoo:nothing answers something of type int"),
        (("tied.pt", "--against", "zoo:raises"), "no data here"),
        (("tied.pt", "--against", "zoo:missing"), "zoo has no 'missing'"),
        (("tied.pt", "--against", "zoo"), "is no target"),
        (("nowhere.pt", "--against", "zoo:tied"), "cannot read nowhere.pt"),
        (("zoo.py", "--against", "zoo:tied"), "zoo.py is no checkpoint"),
        (("tied.pt", "--against", "zoo:computes"), "meta"),
        (("tied.pt", "--values"), "belong to --against"),
        (("tied.pt", "--against", "zoo:tied", "--sort", "name"), "not with --against"),
    ],
)
def test_bad_input_is_one_line(run, arguments, words):
    result = run(*arguments, code=2)
    assert words in result.err
    assert result.out == ""


def test_neither_s_values_are_in_memory(folder):
    header = json.dumps(
        {"weight": {"dtype": "F32", "shape": [30_000, 40_000], "data_offsets": [0, 4_800_000_000]}}
    ).encode()
    with open("large.safetensors", "wb") as file:  # sparse: it takes no room on the disk
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + 4_800_000_000)
    script = (
        "import resource, sys\n"
        "from tensorplay.statedict import compare_checkpoint\n"
        "from zoo import large\n"
        "report = compare_checkpoint('large.safetensors', large, 'zoo:large')\n"
        "assert report.load.matched == 1 and not report.findings, report\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) << 10 < 2 << 30  # of 9.6 GB that they would take
    assert os.path.getsize("large.safetensors") > 4_800_000_000
