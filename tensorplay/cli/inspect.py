"""``tensorplay inspect``: what the tensors of a checkpoint are, who shares storage, how many bytes are wasted."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from tensorplay.cli.reporting import ReportOptions, finish, prepare, report_options
from tensorplay.progress import bar

__all__ = ["inspect"]


def _path(context: click.Context, parameter: click.Parameter, value: str) -> Path:
    if not value:  # an empty shell variable: Path("") would be the current folder
        raise click.BadParameter("needs the name of a file or a folder")
    return Path(value)


@click.command()
@click.argument("path", metavar="FILE", callback=_path)
@report_options(max_tensors=250_000)
@click.option(
    "--sort",
    type=click.Choice(["file", "name", "bytes", "wasted"]),
    help="Order of the table's rows.  [default: file]",
)
@click.option("--filter", "filters", multiple=True, metavar="GLOB", help="Show only rows whose name matches one.")
@click.option("--limit", type=click.IntRange(min=1), help="Show at most so many rows.  [default: 1000]")
def inspect(
    asked: ReportOptions,
    path: Path,
    sort: Literal["file", "name", "bytes", "wasted"] | None,
    filters: tuple[str, ...],
    limit: int | None,
) -> None:
    """Inspect a checkpoint without loading it: its tensors, their storages, who shares them, what is wasted.

    FILE is a file of torch.save or safetensors, or a folder of them. No code in it is run, and the bytes of its tensors
    are not read: a large file takes no more memory than a small one.

    --sort, --filter and --limit choose the rows of the table; totals and findings are always of all tensors.
    """
    if asked.output_format != "text" and (sort or filters or limit):
        raise click.UsageError(
            f"--sort, --filter and --limit choose rows of the text: {asked.output_format} has all tensors"
        )
    config = prepare(asked)
    from tensorplay.checkpoints import inspect_checkpoint
    from tensorplay.render.checkpoint import Rows

    with bar() as step:
        report = inspect_checkpoint(path, step=step, **asked.chosen)
    rows = Rows()
    finish(report, asked, config, Rows(sort or rows.sort, filters, limit or rows.limit))
