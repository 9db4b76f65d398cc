"""The command line. Results go to stdout, everything else to stderr.

Exit codes: 0 nothing at or above --fail-on, 1 findings, 2 wrong usage or an error of the tool, 130 interrupted.
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
from tensorplay.cli.inspect import inspect
from tensorplay.cli.output import escaped, message_of
from tensorplay.errors import TensorPlayError

__all__ = ["main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tensorplay")
def cli() -> None:
    """AddressSanitizer for tensors: what they really are, who shares their memory, what is wrong with them."""


for command in (inspect, check, explain, doctor, demo):
    cli.add_command(command)


def main() -> None:
    """Run the command line; whatever ends it early is one line."""
    try:
        sys.exit(cli.main(standalone_mode=False))
    except click.Abort:
        _stop("interrupted", 130)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        help_call = f" (see {context.command_path} --help)" if context is not None else ""
        _stop(f"{error.format_message()}{help_call}")
    except TensorPlayError as error:
        _stop(str(error))
    except Exception as error:
        if os.environ.get("TENSORPLAY_DEBUG"):
            raise
        _stop(
            f"internal error in version {__version__}, {message_of(error)}. This is a bug of the tool: run again with "
            "TENSORPLAY_DEBUG=1 and report the traceback"
        )


def _stop(message: str, code: int = 2) -> None:
    click.echo(f"tensorplay: {escaped(message.removeprefix('tensorplay: '))}", err=True)
    sys.exit(code)
