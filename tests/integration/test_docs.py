"""Every page's blocks run, and what they print is what the page shows.

The python blocks of a page are one script, run block by block in an empty folder: joined by one empty line they are the
file that findings point into. A text block is all that was printed since the last one. In a console block, lines that
begin with ``$ `` are run by bash. ``pytest --snapshot-update`` writes the shown output anew.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "reference" not in page.parts]
PAGES.append(ROOT / "README.md")

# Runs in a process of its own: pages set filters, labels and default types.
RUN_PAGE = """
import contextlib, io, json, sys, types
script, blocks = sys.argv[1], json.load(sys.stdin)
sys.path.insert(0, "")
page = sys.modules["__main__"] = types.ModuleType("__main__")  # as if the page were the script that runs
names, line, outputs = vars(page), 0, []
for body in blocks:
    code = compile("\\n" * line + body, script, "exec")
    line += body.count("\\n") + 1
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        exec(code, names)
    outputs.append(out.getvalue())
json.dump(outputs, sys.stdout)
"""


def run_page(page: Path, folder: Path) -> list[str]:
    """Run a page; answer what its text and console blocks should show, in order."""
    import json
    import os

    text = page.read_text(encoding="utf-8")
    blocks = [(m[1], m[2], text[: m.start()].rstrip().rsplit("\n", 1)[-1]) for m in FENCE.finditer(text)]
    environment = {**os.environ, "COLUMNS": "100", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("NO_COLOR", None)
    code = [body for kind, body, _ in blocks if kind == "python"]
    script = page.stem.lower().replace("-", "_") + ".py"
    (folder / script).write_text("\n".join(code))
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGE, script],
        input=json.dumps(code),
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
    )
    assert done.returncode == 0, f"{page.name}: {done.stderr}"
    outputs = iter(json.loads(done.stdout))
    shown, printed = [], ""
    for kind, body, before in blocks:
        if kind == "python":
            printed += next(outputs)
            if match := re.match(r"# (\w+\.py)\n", body):
                (folder / match[1]).write_text(body)
        elif kind == "text":
            shown.append(printed)
            printed = ""
        elif kind == "toml" and before.endswith("`pyproject.toml`:"):
            (folder / "pyproject.toml").write_text(body)
        elif kind == "console":
            said = ""
            for command in (row for row in body.splitlines() if row.startswith("$ ")):
                result = subprocess.run(
                    ["bash", "-c", f"{command[2:]} 2>&1"], capture_output=True, text=True, cwd=folder, env=environment
                )
                said += f"{command}\n{result.stdout}"
            shown.append(said)
    assert printed == "", f"{page.name}: printed at the end and not shown:\n{printed}"
    return [text.rstrip() for text in shown]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_page_runs_and_prints_what_it_shows(page, tmp_path, request):
    shown = run_page(page, tmp_path)

    text = page.read_text(encoding="utf-8")
    fresh = iter(shown)
    written = FENCE.sub(lambda m: f"```{m[1]}\n{next(fresh)}\n```" if m[1] in ("text", "console") else m[0], text)
    if request.config.getoption("--snapshot-update"):
        page.write_text(written, encoding="utf-8")
    assert text == written


def test_links_between_pages_lead_somewhere():
    broken = []
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "examples" / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)}: {target}")

    assert broken == []
