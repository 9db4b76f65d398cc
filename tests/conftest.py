"""What all tests share: declared skips, figures shown at the end, snapshots."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.extensions import built
from tests.npu import load as load_npu

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
    """C++ code that owns tensors, storages and objects."""
    return built("cpp_owners", [TESTS / "extensions" / "cpp_owners.cpp"])


@pytest.fixture(scope="session")
def npu():
    """A device that is none (tests/npu). Loaded by the first test that asks: it becomes what torch.accelerator is."""
    return load_npu()


@pytest.fixture(autouse=True)
def _backward_where_the_engine_can(request):
    """The autograd engine counts devices once, at its first backward; a device that came later has no thread there."""
    late = "npu" in request.fixturenames and not request.getfixturevalue("npu").has_engine_threads
    with torch.autograd.set_multithreading_enabled(False) if late else nullcontext():
        yield
