"""Holders: who keeps one tensor of a large heap alive, and what all storages are, against objgraph's search.

The tensor is a parameter: its module, the optimizer's groups and the optimizer's state hold it. who_holds() answers a
path for each holder, and counts that none is missing. objgraph answers one chain from a module to one object: for the
same answer it is asked for each referrer. It is left out with a line where it is not installed.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from typing import Any

import torch
from harness import Case, Results, finish, measure, peer, start

import tensorplay

OBJECTS, TENSORS = 700_000, 100_000
QUICK_OBJECTS, QUICK_TENSORS = 50_000, 5_000
SNAPSHOT_TARGET_NS = 500_000_000
WHO_HOLDS_TARGET_NS = 400_000_000
OBJGRAPH_RATIO = 5

MODEL = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())


class Node:
    __slots__ = ("__weakref__", "value")


def heap(objects: int, tensors: int) -> list[object]:
    """Lists, dicts, objects with slots and sets that the collector tracks, each beside a tensor or a number."""
    held: list[object] = [torch.empty(1) for _ in range(tensors)]
    for number in range(objects // 4):
        node = Node()
        node.value = number
        held += [[number], {"k": node}, node, {number}]
    return held


def needle() -> torch.Tensor:
    return MODEL[3].weight


def chain_of_each(objgraph: Any) -> list[list[object]]:
    return [objgraph.find_backref_chain(holder, objgraph.is_proper_module) for holder in gc.get_referrers(needle())]


def check(report: tensorplay.Report) -> None:
    """What is timed answers right: the paths there are, and no reference that nothing explains."""
    found = {holder.path.rpartition("__main__.")[2] for holder in report.document.held[0].holders}
    assert {"MODEL.3.weight", "OPTIMIZER.state.keys()", "OPTIMIZER.param_groups[0]['params'][6]"} <= found, found
    assert all(not ledger.unaccounted for ledger in report.document.held[0].ledgers)


def run(results: Results, arguments: Namespace) -> None:
    objects, tensors = (QUICK_OBJECTS, QUICK_TENSORS) if arguments.quick else (OBJECTS, TENSORS)
    older = tensorplay.snapshot()  # what it lacks, all of the heap, a later one names
    held = heap(objects, tensors)
    OPTIMIZER.zero_grad()
    sum(layer(torch.ones(1, 8)).sum() for layer in MODEL).backward()
    OPTIMIZER.step()
    gc.collect()
    title = f"{len(gc.get_objects())} objects, {tensors} tensors"
    known: dict[str, object] = {"tensorplay": tensorplay, "needle": needle}
    check(tensorplay.who_holds(needle()))
    cases = [
        Case(f"{title}: who_holds()", "tensorplay.who_holds(needle())", known, WHO_HOLDS_TARGET_NS),
        Case(f"{title}: snapshot() beside an older one", "tensorplay.snapshot()", known, SNAPSHOT_TARGET_NS),
    ]
    if objgraph := peer("objgraph", "objgraph"):
        known["objgraph"] = objgraph
        known["chain_of_each"] = chain_of_each
        cases += [
            Case(f"{title}: objgraph, a chain of each referrer", "chain_of_each(objgraph)", known),
            Case(
                f"{title}: objgraph, one chain",
                "objgraph.find_backref_chain(needle(), objgraph.is_proper_module)",
                known,
            ),
        ]
    # As in a program: the collector is on. Few rounds: one is seconds.
    results.add_cases(cases, measure(cases, rounds=min(arguments.rounds, 7), sample_ms=1.0, collector=True))
    for case, ratio in zip(cases[2:], (OBJGRAPH_RATIO, None), strict=False):
        results.ratio(cases[0].name, case.name, at_least=ratio)
    del held, older


def main() -> None:
    arguments = start("who holds a tensor")
    results = Results("holders")
    run(results, arguments)
    finish(results, arguments)


if __name__ == "__main__":
    main()
