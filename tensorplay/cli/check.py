"""``tensorplay check``: run every rule over what a factory returns."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from tensorplay.cli.output import print_report, print_text
from tensorplay.cli.target import call_target, load_target
from tensorplay.errors import TargetError

__all__ = ["check"]


@click.command()
@click.argument("target", metavar="MODULE:FACTORY")
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--select", multiple=True, metavar="CODE", help="Show only these codes or families (TP102, TP1).")
@click.option("--ignore", multiple=True, metavar="CODE", help="Hide these codes or families.")
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning", "info"]),
    help="Least severity that makes the exit code 1.  [default: pyproject.toml's, else warning]",
)
@click.option("--exit-zero", is_flag=True, help="Answer exit code 0 whatever is found.")
@click.option(
    "--max-tensors", type=click.IntRange(min=1), default=10_000, show_default=True, help="Read at most so many."
)
@click.option("--addresses", is_flag=True, help="Print addresses in hex in place of short names.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write to a file; - is stdout.")
@click.option("--force", is_flag=True, help="Overwrite the output file.")
def check(
    target: str,
    output_format: str,
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    fail_on: str | None,
    exit_zero: bool,
    max_tensors: int,
    addresses: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Check what a factory returns: a model, an optimizer, a state dict, or a dict of name to object.

    MODULE:FACTORY is package.module:function or file.py:function; the function takes no argument.
    """
    to_file = output is not None and str(output) != "-"
    if to_file and output is not None and output.is_dir():  # click refuses folders, but not the empty name
        raise TargetError("-o needs the name of a file, or - for stdout")
    if to_file and output is not None and output.exists() and not force:
        raise TargetError(f"{output} exists: add --force to overwrite it")
    from tensorplay.callers import Caller
    from tensorplay.inspection import check_at
    from tensorplay.layers import SEVERITIES
    from tensorplay.rules.registry import all_codes, check_selectors, selects
    from tensorplay.selection import load_config

    config = load_config()
    check_selectors((*select, *ignore))
    chosen = select or config.select
    if not any(selects(chosen, code) for code in all_codes()):
        named = ", ".join(chosen) or "an empty select"
        click.echo(f"tensorplay: no rule is in {named} yet: nothing can be found", err=True)
    factory = load_target(target)
    objs: Any = call_target(target, factory)
    report = check_at(
        Caller.of_function(factory),
        objs,
        select=select or None,
        ignore=ignore or None,
        max_tensors=max_tensors,
        name=target.rpartition(":")[2],
    )
    if not report.records:
        raise TargetError(f"{target} returned a {type(objs).__name__} in which there is no tensor")
    if to_file and output is not None:
        text = report.to_json() if output_format == "json" else report.text(addresses=addresses)
        try:
            output.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise TargetError(f"cannot write {output}: {error.strerror}") from error
        click.echo(f"wrote {output}", err=True)
    elif output_format == "json":
        print_text(report.to_json().encode())  # UTF-8 whatever the terminal's
    else:
        print_report(report, addresses=addresses)
    limit = SEVERITIES.index(fail_on or config.fail_on)
    failed = any(SEVERITIES.index(finding.severity) <= limit for finding in report.findings)
    sys.exit(1 if failed and not exit_zero else 0)
