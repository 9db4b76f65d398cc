"""The commands as a person runs them: output, exit codes, one clear line for what is wrong."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest

from tensorplay.cli import main
from tensorplay.layers import json_schema

FACTORIES = """
import functools
import sys
import torch

def healthy():
    print("building")
    return torch.nn.Linear(3, 4)

def sick():  # tensorplay: ignore[TP103] was here once
    flat = torch.arange(8.0)
    view = flat[2:6]
    flat.untyped_storage().resize_(0)
    return {"view": view, "flat": flat}

def silenced():  # tensorplay: ignore[TP102] released on purpose
    return sick()

def raises():
    raise ValueError("no data\\nsecond line")

def exits():
    sys.exit(5)

def nothing():
    return 3

def needs(argument):
    return argument

class Bag:
    @staticmethod
    def model():
        return healthy()

value = 4

class Own(BaseException):
    pass

class Mute(Exception):
    def __str__(self):
        raise RuntimeError

def own():
    raise Own("stops all")

def mute():
    raise Mute

def generator():
    raise GeneratorExit

def red():
    raise ValueError("\\x1b[31mred\\rover")

def interrupted():
    raise KeyboardInterrupt

async def later():
    return healthy()

class Hostile:
    def __getattr__(self, name):
        raise RuntimeError("not asked")
    def __call__(self):
        return healthy()

hostile = Hostile()

@functools.cache
def decorated(
    kind=None,
):  # tensorplay: ignore[tp102] the head ends here
    return sick()

def __getattr__(name):
    if name == "lazy":
        raise RuntimeError("not today")
    raise AttributeError(name)
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    return tmp_path


class Result(NamedTuple):
    stdout: str
    stderr: str


@pytest.fixture
def run(project, monkeypatch, capsys):
    """Run the command line in this process (importing torch anew would take most of the time)."""

    def run_(*arguments: str, code: int = 0) -> Result:
        for name in ("factories", "broken", "syntax"):
            sys.modules.pop(name, None)
        monkeypatch.setattr(sys, "argv", ["tensorplay", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        result = Result(*capsys.readouterr())
        assert (stopped.value.code or 0) == code, result
        assert "Traceback" not in result.stderr
        return result

    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return run_


def run_process(project: Path, *arguments: str, code: int = 0, **environment: str) -> Result:
    result = subprocess.run(
        [sys.executable, "-m", "tensorplay", *arguments],
        capture_output=True,
        text=True,
        cwd=project,
        env={**os.environ, **environment},
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return Result(result.stdout, result.stderr)


@pytest.mark.parametrize(
    "target", ["factories:healthy", "factories.py:healthy", "factories:Bag.model", "factories:hostile"]
)
def test_check_of_a_healthy_model_is_0(run, project, target):
    assert "2 tensors, 2 storages, 64 B: no findings" in run("check", target).stdout


def test_check_of_a_sick_one_is_1_and_names_the_factory_s_line(run, project):
    result = run("check", "factories:sick", code=1)

    assert "TP102 the tensor reaches past its storage  error" in result.stdout
    assert "factories.py:10 in sick  (definition)" in result.stdout
    assert "unused ignore[TP103] at factories.py:10" in result.stdout


def test_comment_on_the_factory_silences(run, project):
    result = run("check", "factories:silenced")

    assert "suppressed 1 TP102 by factories.py:16 (released on purpose)" in result.stdout


def test_comment_on_the_last_line_of_a_decorated_head_silences(run):
    assert "suppressed 1 TP102 by factories.py:74 (the head ends here)" in run("check", "factories:decorated").stdout


def test_interruption_is_one_line_and_130(run):
    assert run("check", "factories:interrupted", code=130).stderr.strip() == "tensorplay: interrupted"


def test_family_without_rules_is_said_to_find_nothing(run, project):
    warning = "tensorplay: no rule is in TP9 yet: nothing can be found\n"
    assert run("check", "factories:sick", "--select", "TP9").stderr == warning
    assert run("check", "factories:sick", "--select", "tp9", "--select", "tp1", code=1).stderr == ""

    (project / "pyproject.toml").write_text('[tool.tensorplay]\nselect = ["TP9"]\n')
    assert run("check", "factories:sick").stderr == warning


def test_empty_output_name_is_one_line_and_2(run):
    result = run("check", "factories:healthy", "-o", "", "--force", code=2)

    assert result.stderr == "tensorplay: -o needs the name of a file, or - for stdout\n"


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    ("opened", "redirected", "why"),
    [
        (lambda: os.open("/dev/full", os.O_WRONLY), "", "No space left on device"),
        (closed_pipe, "", "Broken pipe"),
        (lambda: os.open(os.devnull, os.O_WRONLY), ">&-", "it is closed"),
    ],
)
@pytest.mark.parametrize("arguments", ["explain", "explain TP102"])
def test_output_that_nobody_takes_is_one_line_and_2(tmp_path, opened, redirected, why, arguments):
    command = f"{shlex.quote(sys.executable)} -m tensorplay {arguments} {redirected}"
    stdout = opened()
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, stdout=stdout, stderr=subprocess.PIPE, text=True)
    os.close(stdout)

    assert done.stderr == f"tensorplay: cannot write to standard output: {why}\n"
    assert done.returncode == 2


def test_names_that_the_terminal_cannot_show_are_escaped(project):
    (project / "name.py").write_text("import torch\ndef f(): return {'gr\u00f6\u00dfe': torch.ones(1)}\n")

    assert "gr\\xf6\\xdfe" in run_process(project, "check", "name.py:f", PYTHONIOENCODING="ascii").stdout
    document = run_process(project, "check", "name.py:f", "--format", "json", PYTHONIOENCODING="ascii").stdout
    assert json.loads(document)["records"][0]["name"] == "gr\u00f6\u00dfe"


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--fail-on", "error"], 1),
        (["--exit-zero"], 0),
        (["--ignore", "TP102"], 0),
        (["--select", "TP101"], 0),
        (["--select", "TP101", "--select", "TP102"], 1),
    ],
)
def test_exit_code_follows_the_options(run, project, options, code):
    run("check", "factories:sick", *options, code=code)


def test_project_file_decides_where_the_options_say_nothing(run, project):
    (project / "pyproject.toml").write_text('[tool.tensorplay]\nignore = ["TP102"]\n')

    run("check", "factories:sick")


def test_json_is_alone_on_stdout_and_fits_the_schema(run, project):
    result = run("check", "factories:sick", "--format", "json", code=1)

    document = json.loads(result.stdout)
    jsonschema.validate(document, json_schema())
    assert [finding["code"] for finding in document["findings"]] == ["TP102"]
    assert result.stderr == ""


def test_output_file_is_not_overwritten_without_force(run, project):
    run("check", "factories:healthy", "-o", "out.txt")
    before = (project / "out.txt").read_text()

    refused = run("check", "factories:healthy", "-o", "out.txt", "--format", "json", code=2)
    assert refused.stderr == "tensorplay: out.txt exists: add --force to overwrite it\n"
    assert (project / "out.txt").read_text() == before

    run("check", "factories:healthy", "-o", "out.txt", "--format", "json", "--force")
    assert json.loads((project / "out.txt").read_text())["findings"] == []


def test_what_the_factory_prints_goes_to_stderr(run):
    result = run("check", "factories:healthy", "--format", "json")

    assert json.loads(result.stdout)["findings"] == []
    assert result.stderr == "building\n"


def test_output_that_cannot_be_written_is_one_line_and_2(run):
    result = run("check", "factories:healthy", "-o", "no/such/folder/x.json", code=2)

    assert result.stderr.splitlines()[-1] == "tensorplay: cannot write no/such/folder/x.json: No such file or directory"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("factories", "'factories' is no target: write package.module:factory or file.py:factory"),
        (":f", "':f' is no target"),
        ("factories:absent", "factories has no 'absent'; it has healthy, sick"),
        ("factories:value", "is a int: name a function without arguments"),
        ("factories:raises", "factories:raises raised ValueError: no data (at "),
        ("factories:exits", "factories:exits raised SystemExit: 5"),
        ("factories:own", "factories:own raised Own: stops all (at "),
        ("factories:mute", "factories:mute raised Mute (at "),
        ("factories:generator", "factories:generator raised GeneratorExit (at "),
        ("factories:red", "factories:red raised ValueError: \\x1b[31mred (at "),
        ("factories:lazy", "cannot read 'lazy' of factories: RuntimeError: not today (at "),
        ("factories:needs", "cannot be called without arguments (missing a required argument: "),
        ("factories:later", "factories:later is an async function: name one that answers the object itself"),
        ("factories:nothing", "returned a int in which there is no tensor"),
        ("absent:f", "cannot import 'absent': ModuleNotFoundError: No module named 'absent'"),
        ("absent.py:f", "there is no file absent.py"),
        ("broken:f", "cannot import 'broken': ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("broken.py:f", "cannot import broken.py: ModuleNotFoundError"),
        ("syntax:f", "cannot import 'syntax': SyntaxError: "),
    ],
)
def test_bad_target_is_one_line_and_2(run, project, target, message):
    result = run("check", target, code=2)

    assert message in result.stderr
    assert result.stderr.startswith("tensorplay: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["check"],
        ["check", "factories:sick", "--ignore", "TP9999"],
        ["check", "x:y", "--format", "xml"],
        ["explain", "TP999"],
        ["no-such-command"],
        ["check", "factories:sick", "--max-tensors", "0"],
    ],
)
def test_wrong_usage_is_2(run, project, arguments):
    assert run(*arguments, code=2).stderr.count("\n") == 1


def test_wrong_project_file_is_one_line_and_2(run, project):
    (project / "pyproject.toml").write_text("[tool.tensorplay]\nfail_on = 3\n")

    assert run("check", "factories:healthy", code=2).stderr.count("\n") == 1


def test_what_users_code_prints_is_not_in_the_report(project):
    (project / "loud.py").write_text(
        "import os, torch\nprint('at import')\nos.write(1, b'from C\\n')\n"
        "def build():\n    print('in call')\n    os.write(1, b'from C\\n')\n    return torch.nn.Linear(2, 2)\n"
    )

    for target in ("loud.py:build", "loud:build"):
        result = run_process(project, "check", target, "--format", "json")
        json.loads(result.stdout)
        assert result.stderr.count("from C") == 2
        assert "at import" in result.stderr


def test_file_named_like_a_module_takes_nobodys_place(project):
    source = "import torch\ndef build():\n    return torch.nn.Linear(2, 2)\n"
    for name in ("typing.py", "tensorplay.py", "rich.py"):
        folder = project / f"of_{name.removesuffix('.py')}"
        folder.mkdir()
        (folder / name).write_text(source)
        assert "no findings" in run_process(project, "check", f"{folder.name}/{name}:build").stdout


def test_explain_lists_codes_and_shows_pages(run, project):
    assert "TP102  error    reaches-past-storage" in run("explain").stdout
    assert run("explain", "tp102").stdout.startswith("# TP102 reaches-past-storage\n")


def test_doctor_of_a_working_installation_is_0(project):
    text = run_process(project, "doctor").stdout

    for word in ("tensorplay", "python", "torch", "extension", "test read", "GPU part", "registered"):
        assert f"ok   {word}" in text
    assert "nothing: no hook, no callback, no allocator" in text


def test_demo_shows_a_healthy_tensor_a_picture_and_a_fault(run, project):
    result = run("demo")

    assert "▪0,0" in result.stdout
    assert "TP102" in result.stdout
    assert result.stderr == "wrote report.html: open it in a browser\n"
    page = (project / "report.html").read_text()
    assert page.count("<h2>") == 3
    assert "TP102" in page


def test_demo_writes_its_page_anew_and_leaves_other_files_alone(run, project):
    run("demo")
    run("demo")
    (project / "mine.html").write_text("mine")

    refused = run("demo", "-o", "mine.html", code=2)
    assert refused.stderr == (
        "tensorplay: mine.html exists and is not the demo's: add --force to overwrite it, or -o another name\n"
    )
    assert refused.stdout == ""
    assert (project / "mine.html").read_text() == "mine"

    run("demo", "-o", "mine.html", "--force")
    assert "tensorplay demo" in (project / "mine.html").read_text()


@pytest.mark.parametrize("name", ["", "-"])
def test_demo_page_needs_a_name(run, name):
    assert run("demo", "-o", name, code=2).stderr == "tensorplay: -o needs the name of a file\n"


def test_demo_page_that_cannot_be_written_is_one_line_and_2(run):
    message = "tensorplay: cannot write no/such.html: No such file or directory; name another place with -o\n"
    assert run("demo", "-o", "no/such.html", code=2).stderr == message


def test_terminal_that_cannot_draw_gets_ascii(project):
    result = run_process(project, "demo", PYTHONIOENCODING="ascii", PYTHONUTF8="0")

    assert result.stdout.isascii()


def test_version_and_help(run, project):
    assert run("--version").stdout == "tensorplay, version 0.1.0\n"
    for command in ("check", "explain", "doctor", "demo"):
        assert command in run("-h").stdout
