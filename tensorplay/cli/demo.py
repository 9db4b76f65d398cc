"""``tensorplay demo``: three tensors, one of them sick, and what the probe says of each."""

from __future__ import annotations

import click

from tensorplay.cli.output import stdout_text

__all__ = ["demo"]


@click.command()
def demo() -> None:
    """Show what inspect() and check() say: a parameter, a view, and a view whose storage was released."""
    import torch

    from tensorplay.inspection import check, inspect

    torch.manual_seed(0)
    click.echo("1. A parameter: four layers of one tensor\n")
    weight = torch.nn.Linear(4, 3).weight
    click.echo(stdout_text(inspect(weight, quiet=True)))

    click.echo("\n2. A view: the cells of its storage that it reaches\n")
    table = torch.arange(24).view(4, 6)
    view = table.t()[1:, ::2]
    click.echo(stdout_text(inspect(view, quiet=True)))

    click.echo("\n3. A fault: the storage was released while a view lives on\n")
    flat = torch.arange(8.0)
    shard = flat[2:6]
    flat.untyped_storage().resize_(0)
    report = check({"shard": shard, "flat": flat})
    click.echo(stdout_text(report))
    click.echo("\nNext: tensorplay explain TP102, tensorplay doctor, and tensorplay.inspect(x) in your own script.")
