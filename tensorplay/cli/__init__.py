"""The command line. Results go to stdout, everything else to stderr.

Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 wrong usage or an error of the tool.
"""

from __future__ import annotations

import os
import sys

import click

from tensorplay import __version__
from tensorplay.cli.check import check
from tensorplay.cli.demo import demo
from tensorplay.cli.doctor import doctor
from tensorplay.cli.explain import explain
from tensorplay.errors import TensorPlayError

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tensorplay")
def cli() -> None:
    """AddressSanitizer for tensors: what they really are, who shares their memory, what is wrong with them."""


for command in (check, explain, doctor, demo):
    cli.add_command(command)


def main() -> None:
    """Run the command line; every error of ours is one line and exit code 2."""
    try:
        cli(standalone_mode=True)
    except TensorPlayError as error:
        click.echo(str(error) if str(error).startswith("tensorplay:") else f"tensorplay: {error}", err=True)
        sys.exit(2)
    except Exception as error:
        if os.environ.get("TENSORPLAY_DEBUG"):
            raise
        click.echo(
            f"tensorplay: internal error in version {__version__}, {type(error).__name__}: {error}. This is a "
            "bug of the tool: run again with TENSORPLAY_DEBUG=1 and report the traceback",
            err=True,
        )
        sys.exit(2)
