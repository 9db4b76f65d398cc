"""``tensorplay explain``: what a code means, why it matters, how to put it right."""

from __future__ import annotations

import sys

import click

from tensorplay.cli.output import print_text

__all__ = ["explain"]


@click.command()
@click.argument("code", required=False)
def explain(code: str | None) -> None:
    """Show a rule's page, or the list of all codes."""
    from tensorplay.rules.registry import all_codes, code_entry, rule_page

    if code is None:
        for known in all_codes():
            entry = code_entry(known)
            print_text(f"{known}  {entry.severity:<8} {entry.name}")
        return
    page = rule_page(code.upper())
    if sys.stdout is None or not sys.stdout.isatty():
        print_text(page.rstrip("\n"))
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(page))
