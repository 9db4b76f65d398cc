"""``tensorplay demo``: three tensors, one of them sick, and what the probe says of each."""

from __future__ import annotations

from pathlib import Path

import click

from tensorplay.cli.output import print_report, print_text
from tensorplay.errors import TargetError

__all__ = ["demo"]

_GENERATOR = "tensorplay demo"


@click.command()
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="report.html",
    show_default=True,
    help="Where the page goes; one that the demo wrote before is written anew.",
)
@click.option("--force", is_flag=True, help="Overwrite any other file, too.")
def demo(output: Path, force: bool) -> None:
    """Show what inspect() and check() say: a parameter, a view, and a view whose storage was released.

    The same goes into a page for the browser.
    """
    if str(output) in ("-", "."):  # standard output has the text; an empty name becomes the folder
        raise TargetError("-o needs the name of a file")
    if output.exists() and not force and not _is_ours(output):
        raise TargetError(f"{output} exists and is not the demo's: add --force to overwrite it, or -o another name")
    from tensorplay.inspection import check, inspect  # before torch: it says in one line what to do without it

    # isort: split
    import torch

    from tensorplay.render.html import page

    torch.manual_seed(0)
    weight = torch.nn.Linear(4, 3).weight
    parameter = inspect(weight, quiet=True)
    table = torch.arange(24).view(4, 6)
    view = table.t()[1:, ::2]
    strides = inspect(view, quiet=True)
    flat = torch.arange(8.0)
    shard = flat[2:6]
    flat.untyped_storage().resize_(0)
    fault = check({"shard": shard, "flat": flat})

    reports = {
        "1. A parameter: four layers of one tensor": parameter,
        "2. A view: the cells of its storage that it reaches": strides,
        "3. A fault: the storage was released while a view lives on": fault,
    }
    for heading, report in reports.items():
        print_text(f"{heading}\n")
        print_report(report)
        print_text("")
    print_text("Next: tensorplay explain TP102, tensorplay doctor, and tensorplay.inspect(x) in your own script.")
    sections = [(heading, report.document) for heading, report in reports.items()]
    try:
        output.write_text(page("TensorPlay demo", sections, generator=_GENERATOR), encoding="utf-8")
    except OSError as error:
        raise TargetError(f"cannot write {output}: {error.strerror}; name another place with -o") from error
    click.echo(f"wrote {output}: open it in a browser", err=True)


def _is_ours(path: Path) -> bool:
    """Answer whether a file is a page that the demo wrote."""
    try:
        with path.open("rb") as file:
            return f'<meta name="generator" content="{_GENERATOR}">'.encode() in file.read(1000)
    except OSError:
        return False
