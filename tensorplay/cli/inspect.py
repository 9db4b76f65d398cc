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
@click.option(
    "--against",
    metavar="TARGET",
    help="Compare with the model that module:factory or file.py:factory answers, built on meta: no values in memory.",
)
@click.option("--key", help="With --against: where in the checkpoint the state dict is, as 'model'.")
@click.option("--not-strict", is_flag=True, help="With --against: as load_state_dict(strict=False) takes it.")
@click.option("--values", is_flag=True, help="With --against: read every element, and name NaN and infinities.")
@click.option("--limit", type=click.IntRange(min=1), help="Show at most so many rows.  [default: 1000]")
def inspect(
    asked: ReportOptions,
    path: Path,
    sort: Literal["file", "name", "bytes", "wasted"] | None,
    filters: tuple[str, ...],
    limit: int | None,
    against: str | None,
    key: str | None,
    not_strict: bool,
    values: bool,
) -> None:
    """Inspect a checkpoint without loading it: its tensors, their storages, who shares them, what is wasted.

    FILE is a file of torch.save or safetensors, or a folder of them. No code in it is run, and the bytes of its tensors
    are not read: a large file takes no more memory than a small one.

    --sort, --filter and --limit choose the rows of the table; totals and findings are always of all tensors.

    With --against the keys, shapes, types and ties of a model are compared with the checkpoint's.
    """
    if against is None and (key or not_strict or values):
        raise click.UsageError("--key, --not-strict and --values belong to --against: name the model to compare with")
    if against is not None and (sort or filters or limit):
        raise click.UsageError("--sort, --filter and --limit choose rows of the table of tensors: not with --against")
    if asked.output_format != "text" and (sort or filters or limit):
        raise click.UsageError(
            f"--sort, --filter and --limit choose rows of the text: {asked.output_format} has all tensors"
        )
    config = prepare(asked)
    if against is not None:
        from tensorplay.cli.target import call_target, load_target
        from tensorplay.statedict import compare_checkpoint

        factory = load_target(against)
        chosen = {name: codes for name, codes in asked.chosen.items() if name != "max_tensors"}
        with bar() as step:
            compared = compare_checkpoint(
                path,
                lambda: call_target(against, factory),
                against,
                key=key,
                strict=not not_strict,
                values=values,
                step=step,
                **chosen,
            )
        finish(compared, asked, config)
        return
    from tensorplay.checkpoints import inspect_checkpoint
    from tensorplay.render.checkpoint import Rows

    with bar() as step:
        report = inspect_checkpoint(path, step=step, **asked.chosen)
    rows = Rows()
    finish(report, asked, config, Rows(sort or rows.sort, filters, limit or rows.limit))
