"""``tensorplay demo``: three tensors, one of them sick, and what the probe says of each."""

from __future__ import annotations

import click

from tensorplay.cli.output import print_report, print_text

__all__ = ["demo"]


@click.command()
def demo() -> None:
    """Show what inspect() and check() say: a parameter, a view, and a view whose storage was released."""
    from tensorplay.inspection import check, inspect  # before torch: it says in one line what to do without it

    # isort: split
    import torch

    torch.manual_seed(0)
    print_text("1. A parameter: four layers of one tensor\n")
    weight = torch.nn.Linear(4, 3).weight
    print_report(inspect(weight, quiet=True))

    print_text("\n2. A view: the cells of its storage that it reaches\n")
    table = torch.arange(24).view(4, 6)
    view = table.t()[1:, ::2]
    print_report(inspect(view, quiet=True))

    print_text("\n3. A fault: the storage was released while a view lives on\n")
    flat = torch.arange(8.0)
    shard = flat[2:6]
    flat.untyped_storage().resize_(0)
    report = check({"shard": shard, "flat": flat})
    print_report(report)
    print_text("\nNext: tensorplay explain TP102, tensorplay doctor, and tensorplay.inspect(x) in your own script.")
