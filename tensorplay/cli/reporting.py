"""What the commands that answer with a report have in common: options, output, exit code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tensorplay.cli.output import print_report, print_text
from tensorplay.errors import TargetError

if TYPE_CHECKING:  # they take time to import, and a command with wrong options has no use for them
    from tensorplay.render.checkpoint import Rows
    from tensorplay.reports import Report
    from tensorplay.selection import Config

__all__ = ["ReportOptions", "finish", "prepare", "report_options"]


class ReportOptions(NamedTuple):
    """What a person asked of the report."""

    output_format: str
    select: tuple[str, ...]
    ignore: tuple[str, ...]
    fail_on: str | None
    exit_zero: bool
    max_tensors: int
    addresses: bool
    output: Path | None
    force: bool

    @property
    def chosen(self) -> dict[str, Any]:
        """What a check takes of them."""
        return {"select": self.select or None, "ignore": self.ignore or None, "max_tensors": self.max_tensors}


def report_options(max_tensors: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a report, as its first argument."""
    options = (
        click.option(
            "--format", "output_format", type=click.Choice(["text", "json", "html"]), default="text", show_default=True
        ),
        click.option("--select", multiple=True, metavar="CODE", help="Show only these codes or families (TP102, TP1)."),
        click.option("--ignore", multiple=True, metavar="CODE", help="Hide these codes or families."),
        click.option(
            "--fail-on",
            type=click.Choice(["error", "warning", "info"]),
            help="Least severity that makes the exit code 1.  [default: pyproject.toml's, else warning]",
        ),
        click.option("--exit-zero", is_flag=True, help="Answer exit code 0 whatever is found."),
        click.option(
            "--max-tensors",
            type=click.IntRange(min=1),
            default=max_tensors,
            show_default=True,
            help="Read at most so many.",
        ),
        click.option("--addresses", is_flag=True, help="Print addresses in hex in place of short names."),
        click.option(
            "-o",
            "--output",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write to a file; - is stdout.",
        ),
        click.option("--force", is_flag=True, help="Overwrite the output file."),
    )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**values: Any) -> None:
            asked = ReportOptions(**{field: values.pop(field) for field in ReportOptions._fields})
            function(asked, **values)

        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def prepare(asked: ReportOptions) -> Config:
    """Refuse before any work what could not be written or chosen; answer the project's configuration.

    Raises:
        TargetError: the output file exists, or the configuration is not valid.
        UnknownCode: a selector names no rule.
    """
    output = asked.output
    to_file = output is not None and str(output) != "-"
    if to_file and output is not None and output.is_dir():  # click refuses folders, but not the empty name
        raise TargetError("-o needs the name of a file, or - for stdout")
    try:
        present = to_file and output is not None and output.exists()
    except OSError as error:
        raise TargetError(f"cannot write {output}: {error.strerror}") from error
    if present and not asked.force:
        raise TargetError(f"{output} exists: add --force to overwrite it")
    from tensorplay.rules.registry import all_codes, check_selectors, selects
    from tensorplay.selection import load_config

    config = load_config()
    check_selectors((*asked.select, *asked.ignore))
    chosen = asked.select or config.select
    if not any(selects(chosen, code) for code in all_codes()):
        named = ", ".join(chosen) or "an empty select"
        click.echo(f"tensorplay: no rule is in {named} yet: nothing can be found", err=True)
    return config


def finish(report: Report, asked: ReportOptions, config: Config, rows: Rows | None = None) -> None:
    """Write a report where it is to go and end with the exit code of its findings.

    Raises:
        TargetError: the file cannot be written.
    """
    from tensorplay.layers import SEVERITIES

    document, output = _rendered(report, asked.output_format), asked.output
    if output is not None and str(output) != "-":
        text = _text(report, asked.addresses, rows) if document is None else document
        try:
            output.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise TargetError(f"cannot write {output}: {error.strerror}") from error
        click.echo(f"wrote {output}", err=True)
    elif document is not None:
        print_text(document.encode("utf-8", "backslashreplace"))  # UTF-8 whatever the terminal's
    else:
        print_report(report, addresses=asked.addresses, rows=rows)
    limit = SEVERITIES.index(asked.fail_on or config.fail_on)
    failed = any(SEVERITIES.index(finding.severity) <= limit for finding in report.findings)
    sys.exit(1 if failed and not asked.exit_zero else 0)


def _rendered(report: Report, output_format: str) -> str | None:
    """Answer a report in a format that does not depend on the terminal; None for text."""
    if output_format == "json":
        return report.to_json()
    return report.html() if output_format == "html" else None


def _text(report: Report, addresses: bool, rows: Rows | None) -> str:
    from tensorplay.render.text import render

    return render(report.document, addresses=addresses, rows=rows)
