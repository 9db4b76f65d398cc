"""The autograd graph before backward: ten thousand nodes looked through, against the loop over Python's getters.

The loop by hand goes over `next_functions` and reads every `_saved_*` attribute, as one would write it; it runs hooks,
and raises where a tensor was written.
"""

from __future__ import annotations

from argparse import Namespace

import torch
from harness import Case, Results, finish, measure, start

import tensorplay
from tensorplay._native import C

NODES, QUICK_NODES = 10_000, 1_000
TARGET_NS = 10_000_000


def graph(nodes: int) -> torch.Tensor:
    """Half of the nodes save an activation each, half a number."""
    x = torch.ones(50, requires_grad=True)
    for _ in range(nodes // 2):
        x = (x * 1.0001).sin()
    return x


def loop_by_hand(loss: torch.Tensor) -> tuple[int, int]:
    seen, open_nodes, storages = set(), [loss.grad_fn], {}
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        open_nodes += [function for function, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_") and isinstance(saved := getattr(node, name), torch.Tensor):
                storage = saved.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
    return len(seen), sum(storages.values())


def check(loss: torch.Tensor) -> None:
    """What is timed answers as the loop does."""
    found = tensorplay.check_graph(loss).graph
    assert (found.nodes, found.activation_bytes_held + found.parameter_bytes) == loop_by_hand(loss)


def run(results: Results, arguments: Namespace) -> None:
    nodes = QUICK_NODES if arguments.quick else NODES
    loss = graph(nodes)
    check(loss)
    known = {"tensorplay": tensorplay, "C": C, "loss": loss, "loop_by_hand": loop_by_hand}
    title = f"{nodes} nodes"
    cases = [
        Case(f"{title}: check_graph()", "tensorplay.check_graph(loss)", known, TARGET_NS),
        Case(f"{title}: its native part", "C.check_graph([loss])", known),
        Case(f"{title}: saved_for_backward()", "tensorplay.saved_for_backward(loss)", known),
        Case(f"{title}: loop by hand", "loop_by_hand(loss)", known),
    ]
    results.add_cases(cases, measure(cases, rounds=min(arguments.rounds, 15), sample_ms=1.0, collector=True))
    results.ratio(cases[0].name, cases[3].name)
    results.ratio(cases[2].name, cases[3].name)


def main() -> None:
    arguments = start("the graph before backward")
    results = Results("graph")
    run(results, arguments)
    finish(results, arguments)


if __name__ == "__main__":
    main()
