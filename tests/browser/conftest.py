"""A real Chromium and a real JupyterLab; nothing may leave this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import need

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]


class Visit(NamedTuple):
    """A page and what it should not have done."""

    page: object
    requests: list[str]
    """Addresses asked for beyond this machine."""
    errors: list[str]
    """What its console and its scripts complained about."""


@pytest.fixture(scope="session")
def browser():
    need("chromium", CHROMIUM is not None and find_spec("playwright") is not None, "needs chromium and playwright")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser) -> Iterator[Callable[..., Visit]]:
    """Open a page in a window of its own."""
    contexts = []

    def open_(url: str, *, width: int = 1400, scheme: str = "light") -> Visit:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        result = Visit(page, [], [])
        here = ("http://127.0.0.1", "ws://127.0.0.1", "data:", "blob:", "file:")
        page.on("request", lambda r: None if r.url.startswith(here) else result.requests.append(r.url))
        page.on("console", lambda m: result.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: result.errors.append(str(error)))
        page.goto(url)
        return result

    yield open_
    for context in contexts:
        context.close()


@pytest.fixture
def screenshot(tmp_path) -> Callable[[object, str], bytes]:
    """Take a picture of a page; TENSORPLAY_SHOTS names a folder in which they are kept to be looked at."""
    folder = Path(os.environ.get("TENSORPLAY_SHOTS") or tmp_path)

    def take(page, name: str) -> bytes:
        return page.screenshot(path=str(folder / f"{name}.png"), full_page=True)

    return take


class Lab(NamedTuple):
    """A running JupyterLab."""

    url: str
    root: Path
    """The folder it shows."""
    settings: Path

    def set(self, name: str, **values: str) -> None:
        """Write one of its settings, which the next page reads."""
        file = self.settings / "@jupyterlab" / "apputils-extension" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))


@pytest.fixture
def jupyter_environment(tmp_path) -> dict[str, str]:
    parts = find_spec("jupyterlab"), find_spec("nbclient"), find_spec("ipykernel")
    need("jupyter", None not in parts, "needs jupyterlab, nbclient and ipykernel")
    folders = {f"JUPYTER_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    return {**os.environ, **folders, "IPYTHONDIR": str(tmp_path / "ipython")}


@pytest.fixture
def lab(tmp_path, jupyter_environment) -> Iterator[Lab]:
    root = tmp_path / "notebooks"
    root.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=", f"--ServerApp.root_dir={root}",
        "--LabApp.extension_manager=readonly",
    ]  # fmt: skip
    log = tmp_path / "lab.log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=jupyter_environment, cwd=root, start_new_session=True
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/api", server, log)
        lab = Lab(f"http://127.0.0.1:{port}/lab/tree", root, tmp_path / "config" / "lab" / "user-settings")
        lab.set("notification", fetchNews="false")
        yield lab
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # kernels are in its group, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(8)


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if server.poll() is not None:
            break
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=2).close()
            return
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab does not answer: {log.read_text()[-2000:]}")
