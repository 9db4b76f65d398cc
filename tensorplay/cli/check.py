"""``tensorplay check``: run every rule over what a factory returns."""

from __future__ import annotations

from typing import Any

import click

from tensorplay.cli.reporting import ReportOptions, finish, prepare, report_options
from tensorplay.cli.target import call_target, load_target
from tensorplay.errors import TargetError

__all__ = ["check"]


@click.command()
@click.argument("target", metavar="MODULE:FACTORY")
@report_options(max_tensors=10_000)
def check(asked: ReportOptions, target: str) -> None:
    """Check what a factory returns: a model, an optimizer, a state dict, or a dict of name to object.

    MODULE:FACTORY is package.module:function or file.py:function; the function takes no argument.
    """
    config = prepare(asked)
    from tensorplay.callers import Caller
    from tensorplay.inspection import check_at

    factory = load_target(target)
    objs: Any = call_target(target, factory)
    report = check_at(Caller.of_function(factory), objs, name=target.rpartition(":")[2], **asked.chosen)
    if not report.records and not report.document.arrays:
        raise TargetError(f"{target} returned a {type(objs).__name__} in which there is no tensor and no array")
    finish(report, asked, config)
