"""What all tests share: declared skips, figures shown at the end, snapshots."""

from __future__ import annotations

import fcntl
import os
import platform
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# What tests read and start is the same on every terminal.
os.environ.update(TERM="xterm-256color", COLUMNS="100")
for name in ("NO_COLOR", "FORCE_COLOR"):
    os.environ.pop(name, None)

TESTS = Path(__file__).parent
SNAPSHOTS = TESTS / "snapshots"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--snapshot-update", action="store_true", help="write the golden files anew")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_cuda") is not None:
        need("cuda", torch.cuda.is_available(), "no CUDA device here: tests/gpu/run.sh runs this")


def need(part: str, present: bool, why: str) -> None:
    """Skip a test whose part is missing, or fail it where TENSORPLAY_REQUIRE names the part."""
    if present:
        return
    if part in os.environ.get("TENSORPLAY_REQUIRE", "").split(","):
        pytest.fail(f"TENSORPLAY_REQUIRE asks for {part}: {why}")
    pytest.skip(f"{part}: {why}")


@pytest.fixture
def show(record_property):
    """Print a line in the summary; user properties also travel from pytest-xdist's workers."""
    return lambda line: record_property("shown", line)


def pytest_terminal_summary(terminalreporter) -> None:
    lines = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for key, value in getattr(report, "user_properties", ())
        if key == "shown" and getattr(report, "when", None) == "call"
    ]
    if lines:
        terminalreporter.section("figures")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def snapshot(request):
    """Compare a text with its golden file; only --snapshot-update changes the file."""

    def compare(name: str, text: str) -> None:
        path = SNAPSHOTS / name
        if request.config.getoption("--snapshot-update"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden file {name}: look at the text, then run pytest --snapshot-update"
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture
def single_process_group(tmp_path):
    """One rank over gloo; the store is a file, so that no port is taken."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def cpp_owners():
    """C++ code that owns tensors, storages and objects: compiled by whichever process of the tests comes first."""
    from torch.utils.cpp_extension import load

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for ninja
    name = f"{platform.python_implementation()}-{platform.python_version()}-torch-{torch.__version__}"
    folder = TESTS.parent / "build" / "test-extensions" / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "held", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # of a process that was ended while it compiled
        source = str(TESTS / "extensions" / "cpp_owners.cpp")
        return load("cpp_owners", [source], build_directory=str(folder), extra_cflags=["-O0", "-g0"])
