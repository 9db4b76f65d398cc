"""``tensorplay inspect`` as a person runs it: the table, the formats, and one clear line for every bad file."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import jsonschema
import pytest
import safetensors.torch
import torch

from tensorplay import progress
from tensorplay.cli import main
from tensorplay.layers import json_schema
from tensorplay.reports import Report
from tests.checkpoint_files import CANARY, Code, entries_of, safetensors_of, saved, zipped
from tests.helpers import ROOT


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the command line in this process."""

    def run_(*arguments: object, code: int = 0):
        monkeypatch.setattr(sys, "argv", ["tensorplay", "inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        result = capsys.readouterr()
        assert (stopped.value.code or 0) == code, result
        assert "Traceback" not in result.err
        return result

    monkeypatch.chdir(tmp_path)
    return run_


@pytest.fixture
def checkpoint(tmp_path):
    """Weights that are tied, a small view of a large tensor, one that is a tensor of its own."""
    weight = torch.zeros(8, 4)
    objs = {"embed.weight": weight, "head.weight": weight.t(), "cache": torch.zeros(1_000_000)[:1_000]}
    torch.save({**objs, "bias": torch.ones(4)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def names(text: str) -> list[str]:
    known = ("embed.weight", "head.weight", "cache", "bias")
    return [line.split()[0] for line in text.splitlines() if line.startswith(known)]


def test_table_shows_storages_sharing_and_waste(run, checkpoint, snapshot):
    result = run("model.pt")

    snapshot("inspect_checkpoint.txt", result.out)
    assert result.err == ""


def test_table_of_a_folder_names_the_files(run, checkpoint, tmp_path, snapshot):
    safetensors.torch.save_file({"bias": torch.ones(4)}, tmp_path / "more.safetensors")

    snapshot("inspect_folder.txt", run(".").out)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["embed.weight", "head.weight", "cache", "bias"]),
        (["--sort", "name"], ["bias", "cache", "embed.weight", "head.weight"]),
        (["--sort", "bytes"], ["cache", "embed.weight", "head.weight", "bias"]),
        (["--sort", "wasted", "--limit", "1"], ["cache"]),
        (["--filter", "*.weight"], ["embed.weight", "head.weight"]),
        (["--filter", "bias", "--filter", "ca*"], ["cache", "bias"]),
        (["--filter", "BIAS"], []),
    ],
)
def test_rows_are_chosen_and_totals_are_of_all(run, checkpoint, options, expected):
    text = run("model.pt", *options).out

    assert names(text) == expected
    assert "1 file, 4 tensors, 3 storages: no findings" in text


def test_rows_left_out_are_counted(run, checkpoint):
    assert "... and 3 more tensors: raise --limit, or choose with --filter" in run("model.pt", "--limit", 1).out
    assert "2 of 4 tensors match" in run("model.pt", "--filter", "*.weight").out
    assert "no tensor's name matches x or y" in run("model.pt", "--filter", "x", "--filter", "y").out


def test_filter_fits_a_name_with_and_without_its_file(run, checkpoint):
    for pattern in ("bias", "model.pt:bias"):
        assert "1 of 4 tensors match" in run(".", "--filter", pattern).out


def test_json_is_alone_on_stdout_and_fits_the_schema(run, checkpoint):
    result = run("model.pt", "--format", "json")

    document = json.loads(result.out)
    jsonschema.validate(document, json_schema())
    assert result.err == ""
    assert [record["name"] for record in document["records"]] == ["embed.weight", "head.weight", "cache", "bias"]
    file = document["files"][0]
    assert (file["path"], file["format"], file["tensors"], file["storages"]) == ("model.pt", "torch zip", 4, 3)
    assert (file["wasted_nbytes"], file["wasted_exact"]) == (3_996_000, True)


def test_json_reads_back_as_the_same_table(run, checkpoint):
    document = run("model.pt", "--format", "json").out

    assert f"{Report.from_json(document)}\n" == run("model.pt").out


def test_rows_are_not_chosen_for_json(run, checkpoint):
    assert "json has all tensors" in run("model.pt", "--format", "json", "--limit", 3, code=2).err


def test_html_shows_the_same_table(run, checkpoint):
    page = run("model.pt", "--format", "html").out

    assert page.startswith("<!doctype html>")
    for words in ("wasted", "view of bytes 0 to 3999", "shares S1 with", "in tensors"):
        assert words in page


def test_output_goes_to_a_file_that_is_not_overwritten(run, checkpoint, tmp_path):
    run("model.pt", "-o", "out.txt")
    assert "3.8 MiB wasted" in (tmp_path / "out.txt").read_text()
    assert run("model.pt", "-o", "out.txt", code=2).err == "tensorplay: out.txt exists: add --force to overwrite it\n"


def test_finding_decides_the_exit_code(run, tmp_path, monkeypatch):
    # No file gives a tensor that reaches past its storage, torch refuses to build it: one is put in its place.
    flat = torch.arange(8.0)
    view = flat[2:6]
    flat.untyped_storage().resize_(0)
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    monkeypatch.setattr("tensorplay.checkpoints._named", lambda *_: {"view": view})

    assert "TP102 the tensor reaches past its storage" in run("a.pt", code=1).out
    run("a.pt", "--exit-zero")
    run("a.pt", "--ignore", "TP102")


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def lying(**changes: object) -> bytes:
    return safetensors_of({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}, 16)


def bomb() -> bytes:
    import zipfile

    return zipped(entries_of(saved({"a": torch.ones(2)})) | {"archive/data/0": bytes(50 << 20)}, zipfile.ZIP_DEFLATED)


def sound() -> bytes:
    return saved({"a": torch.ones(100)})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("half.pt", half(sound()), "is damaged: its zip directory is missing or wrong, as in a file cut off"),
        (
            "half_legacy.pt",
            half(saved({"a": torch.ones(1000)}, legacy=True)),
            "is damaged or cut off: its storages claim more bytes",
        ),
        ("half.safetensors", half(safetensors.torch.save({"a": torch.ones(100)})), "not fully covered"),
        ("code.pt", saved({"a": Code()}), "holds code: its pickle asks for posix.system, which torch never loads"),
        ("code_legacy.pt", saved({"a": Code()}, legacy=True), "holds code: its pickle asks for posix.system"),
        ("code.pkl", pickle.dumps(Code()), "is a bare pickle of protocol 4, not as torch.save writes"),
        ("module.pt", saved(torch.nn.Linear(1, 1)), "weights_only refuses torch.nn.modules.linear.Linear"),
        ("bomb.pt", bomb(), "is compressed, and torch.save stores: 'archive/data/0' claims 50.0 MiB"),
        ("empty.pt", b"", "is empty: 0 bytes"),
        ("text.pt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS"),
        ("page.bin", b"<!DOCTYPE html>\n<html>", "is no checkpoint: it begins neither as torch.save nor"),
        ("archive.pt", zipped({"readme.txt": b"hello"}), "is a zip archive that torch.save did not write"),
        ("script.pt", zipped({"m/constants.pkl": b"", "m/data.pkl": b""}), "is a TorchScript archive"),
        ("packed.pt", b"\x1f\x8b" + bytes(50), "is packed with gzip: unpack it first"),
        ("offsets.safetensors", lying(data_offsets=[0, 10**15]), "invalid"),
        ("shape.safetensors", lying(shape=[5]), "invalid shape"),
        ("long.safetensors", b"\xff" * 7 + b"\x7f{", "header too large"),
        ("numbers.pt", saved({"epoch": 3}), "there is no tensor in it"),
        (
            "newer.pt",
            saved({"a": torch.ones(1)}, pickle_protocol=4),
            "has a pickle of a newer protocol than weights_only",
        ),
        ("begun.pt", saved({"a": torch.ones(1)}, legacy=True)[:12], "is cut off after 12 bytes"),
    ],
)
def test_bad_file_is_one_line_and_2(run, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)

    result = run(name, code=2)

    assert words in result.err
    assert result.err.startswith(f"tensorplay: {name}")
    assert result.err.count("\n") == 1
    assert result.out == ""
    assert not (tmp_path / CANARY).exists()


def test_path_that_is_no_readable_file_is_one_line_and_2(run, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret.pt").write_bytes(sound())
    (tmp_path / "secret.pt").chmod(0)

    assert run("absent.pt", code=2).err == "tensorplay: cannot read absent.pt: No such file or directory\n"
    assert "folder has no checkpoint in it: no file that ends in .pt, .pth" in run("folder", code=2).err
    assert run("pipe", code=2).err == "tensorplay: pipe is neither a file nor a folder\n"
    assert run("/dev/zero", code=2).err == "tensorplay: /dev/zero is neither a file nor a folder\n"
    as_somebody(run, "secret.pt")


def as_somebody(run, name: str) -> None:
    """Read a file that only root may read."""
    if os.geteuid() != 0:
        assert run(name, code=2).err == f"tensorplay: cannot read {name}: Permission denied\n"
        return
    os.seteuid(65534)
    try:
        assert run(name, code=2).err == f"tensorplay: cannot read {name}: Permission denied\n"
    finally:
        os.seteuid(0)


def test_safetensors_without_the_library_says_what_to_install(run, tmp_path, monkeypatch):
    safetensors.torch.save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)

    assert run("a.safetensors", code=2).err == (
        "tensorplay: a.safetensors is a safetensors file: pip install 'tensorplay-probe[safetensors]' to read it\n"
    )


def test_progress_is_shown_on_a_terminal_when_it_takes_long(run, checkpoint, monkeypatch):
    assert "━" not in run("model.pt").err

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run("model.pt").err == ""
    monkeypatch.setattr(progress, "_SECONDS_WITHOUT_BAR", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = run("model.pt")
    assert "model.pt" in result.err
    assert "3/3" in result.err
    assert names(result.out) == ["embed.weight", "head.weight", "cache", "bias"]


def damage(first_seed: int, cases: int, seconds: float, folder) -> str:
    """Inspect damaged files in a process of its own, so that a crash is seen; answer its last line."""
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-m",
            "tests.checkpoint_files",
            *map(str, (first_seed, cases, seconds, folder)),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    seed = [line for line in done.stderr.splitlines() if line.startswith("seed ")][-1:]
    assert done.returncode == 0, f"exit code {done.returncode}, {seed}, file {folder}/case.pt: {done.stderr[-2000:]}"
    assert not (folder / CANARY).exists()
    return done.stdout.strip()


def test_damaged_files_end_in_a_report_or_one_line(tmp_path, show):
    show(damage(first_seed=1, cases=400, seconds=60, folder=tmp_path))


@pytest.mark.long
def test_damaged_files_of_half_a_minute_end_in_a_report_or_one_line(tmp_path, show):
    import time

    show(damage(first_seed=int(time.time()), cases=1_000_000, seconds=30, folder=tmp_path))


def test_bytes_of_no_tensor_are_said(run, tmp_path):
    torch.save({"w": torch.zeros(4), "bare": torch.zeros(1000).untyped_storage()}, tmp_path / "bare.pt")

    assert "16 B stored, 0 B wasted; 3.9 KiB more belong to no tensor found" in run("bare.pt").out


def test_empty_name_is_no_folder(run):
    assert "needs the name of a file or a folder" in run("", code=2).err


def test_views_without_number_over_one_storage_are_listed_fast(run, tmp_path):
    torch.save(dict(enumerate(torch.zeros(20_000).split(1))), tmp_path / "split.pt")

    text = run("split.pt", "--limit", "2").out

    assert "split[1] and 19998 more" in " ".join(text.split())
