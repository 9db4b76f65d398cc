"""``%tensorplay`` in a real kernel and in JupyterLab: live, reopened, and in a notebook that is not trusted."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.long

CELLS = [
    "%load_ext tensorplay\nimport torch, tensorplay\ntable = torch.arange(24).reshape(4, 6)\nview = table.t()[1:, ::2]",
    "%tensorplay view",
]
MOST_BYTES = 60_000


def notebook(cells):
    import nbformat.v4 as v4

    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=[v4.new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel})


@pytest.fixture
def execute(jupyter_environment, tmp_path, monkeypatch):
    """Run cells in a real kernel; answer the executed notebook."""
    for name, value in jupyter_environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    from nbclient import NotebookClient

    def run(cells):
        book = notebook(cells)
        NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
        return book

    return run


def test_magic_in_a_kernel_answers_text_and_html_once(execute, show):
    book = execute([*CELLS, "tensorplay.inspect(view)", "%%tensorplay row\nrow = table[1]"])

    for cell in book.cells[1:]:
        (output,) = cell.outputs
        assert output.data.keys() == {"text/plain", "text/html"}
        html = output.data["text/html"]
        assert output.data["text/plain"].endswith(("no findings", " info"))
        assert "<script" not in html
        assert len(html.encode()) <= MOST_BYTES
    show(f"%tensorplay of one view: {len(book.cells[1].outputs[0].data['text/html']) / 1000:.1f} kB of HTML")


@pytest.mark.parametrize(
    ("cell", "error"),
    [
        ("%tensorplay 1 / 0", "ZeroDivisionError: division by zero"),
        ("%tensorplay 3", "no tensor in 3 \\(int\\)"),
        ("%%tensorplay\n1 / 0", "no report, the cell raised"),
    ],
)
def test_failing_magic_fails_its_cell(execute, cell, error):
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError):
        execute([CELLS[0], cell])


def open_notebook(visit, lab, name, **options):
    page, requests, _ = visit(f"{lab.url}/{name}?reset", **options)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    page.locator("#jp-main-statusbar", has_text="(ipykernel) | Idle").wait_for(timeout=60_000)
    return page, requests


def look_at_report(page):
    """Check what a person sees and does: pictures, the place of the view chain, its words by keyboard."""
    chain = page.get_by_text("Show View Chain", exact=True)
    chain.wait_for(timeout=60_000)
    pictures = page.locator(".jp-RenderedHTMLCommon img")
    assert pictures.count() == 3  # the third one is the chain's, folded away
    for number in range(2):
        assert pictures.nth(number).evaluate("i => i.complete && i.naturalWidth > 100")
        assert pictures.nth(number).get_attribute("alt")
    words = page.get_by_text("view chain of view", exact=False).first
    assert not words.is_visible()
    chain.click()
    words.wait_for(state="visible")
    chain.focus()
    page.keyboard.press("Enter")
    words.wait_for(state="hidden")
    assert page.locator(".jp-RenderedHTMLCommon").get_by_text("TP108").first.is_visible()


def test_report_in_jupyterlab_live_reopened_and_untrusted(lab, visit, screenshot, show):
    import nbformat

    path = lab.root / "look.ipynb"
    nbformat.write(notebook(CELLS), path)
    start = time.monotonic()

    page, requests = open_notebook(visit, lab, "look.ipynb")
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    look_at_report(page)
    screenshot(page, "lab_live")
    page.keyboard.press("Control+s")
    for _ in range(100):
        if "Show View Chain" in path.read_text():
            break
        time.sleep(0.1)
    assert requests == []
    show(f"JupyterLab from opening to the saved report: {time.monotonic() - start:.0f} s")

    lab.set("themes", theme="JupyterLab Dark")
    page, requests = open_notebook(visit, lab, "look.ipynb", scheme="dark")
    look_at_report(page)
    assert page.evaluate("document.body.dataset.jpThemeLight") == "false"
    screenshot(page, "lab_reopened_dark")
    assert requests == []

    book = nbformat.read(path, as_version=4)
    book.cells[1].outputs[0].data["text/html"] += "<p onclick='1'>cleaned</p>"  # so that it is not what was signed
    nbformat.write(book, lab.root / "untrusted.ipynb")
    page, requests = open_notebook(visit, lab, "untrusted.ipynb", width=800)
    look_at_report(page)
    assert page.get_by_text("cleaned", exact=True).get_attribute("onclick") is None
    scroller = page.locator(".jp-RenderedHTMLCommon div:has(> img)").last
    assert scroller.evaluate("e => getComputedStyle(e).overflowX") == "auto"
    assert scroller.evaluate("e => e.scrollWidth > e.clientWidth")
    screenshot(page, "lab_untrusted")
    assert requests == []
