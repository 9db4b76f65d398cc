"""Many tensors: which share a storage, in time for one tensor, and which are alive at all, in time for the whole heap.

The peers are accelerate, safetensors, huggingface_hub and pytorch_memlab, each left out with a line where it is not
installed, and the loops one would write by hand. The slow ones get fewer tensors.
"""

from __future__ import annotations

import gc
import random
from argparse import Namespace
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from harness import Case, Results, finish, measure, peer, start

from tensorplay._native import C

MANY, FEW = 1_000_000, 100_000
QUICK_MANY, QUICK_FEW = 50_000, 5_000
VIEWS = 4  # of each storage, where tensors share one
ORDERED_TARGET_NS = 30
SHUFFLED_TARGET_NS = 55
SCAN_RATIO = 1 / 1.7  # gc.get_objects() may cost that little of a scan


def separate(count: int) -> list[torch.Tensor]:
    """Two floats each, one storage each."""
    return [torch.empty(2) for _ in range(count)]


def views(count: int) -> list[torch.Tensor]:
    """Neighbours share a storage; no two reach the same bytes, but for the whole ones."""
    bases = [torch.empty(4 * (VIEWS - 1)) for _ in range(count // VIEWS)]
    return [x for base in bases for x in (base, *base.split(4))]


def shuffled(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return random.Random(0).sample(tensors, len(tensors))


def loop_by_hand(tensors: Iterable[torch.Tensor]) -> Mapping[int, list[int]]:
    groups = defaultdict(list)
    for index, x in enumerate(tensors):
        groups[x.untyped_storage()._cdata].append(index)
    return groups


def loop_over(identity: Any, tensors: Iterable[torch.Tensor]) -> Mapping[Hashable, list[int]]:
    groups = defaultdict(list)
    for index, x in enumerate(tensors):
        groups[identity(x)].append(index)
    return groups


def check(tensors: list[torch.Tensor]) -> None:
    """What is timed answers as the loop does."""
    ids, storages = C.group_by_storage(tensors)
    groups = loop_by_hand(tensors)
    assert list(storages) == list(groups)
    assert all(ids[index] == number for number, group in enumerate(groups.values()) for index in group)


def run_many(results: Results, title: str, tensors: list[torch.Tensor], target_ns: float, rounds: int) -> None:
    check(tensors)
    known = {"C": C, "tensors": tensors, "loop_by_hand": loop_by_hand}
    cases = [
        Case(f"{title}: group_by_storage()", "C.group_by_storage(tensors)", known, target_ns, len(tensors)),
        Case(f"{title}: Python loop", "loop_by_hand(tensors)", known, None, len(tensors)),
    ]
    results.add_cases(cases, measure(cases, rounds=rounds, sample_ms=1.0))
    results.ratio(cases[0].name, cases[1].name)


def run_peers(results: Results, tensors: list[torch.Tensor], rounds: int) -> None:
    title = f"{len(tensors)} views, {VIEWS} of a storage"
    known: dict[str, object] = {"C": C, "tensors": tensors, "loop_by_hand": loop_by_hand, "loop_over": loop_over}
    statements = {"group_by_storage()": "C.group_by_storage(tensors)", "Python loop": "loop_by_hand(tensors)"}
    if accelerate := peer("accelerate.utils.modeling", "accelerate"):
        known["id_tensor_storage"] = accelerate.id_tensor_storage
        statements["accelerate id_tensor_storage"] = "loop_over(id_tensor_storage, tensors)"
    if safetensors := peer("safetensors.torch", "safetensors"):
        known["find"] = safetensors._find_shared_tensors
        known["named"] = {str(number): x for number, x in enumerate(tensors)}
        statements["safetensors _find_shared_tensors"] = "find(named)"
    if hub := peer("huggingface_hub.serialization._torch", "huggingface_hub"):
        known["get_torch_storage_id"] = hub.get_torch_storage_id
        statements["huggingface_hub get_torch_storage_id"] = "loop_over(get_torch_storage_id, tensors)"
    cases = [
        Case(f"{title}: {name}", statement, known, divide_by=len(tensors)) for name, statement in statements.items()
    ]
    results.add_cases(cases, measure(cases, rounds=rounds, sample_ms=1.0))
    for case in cases[1:]:
        results.ratio(cases[0].name, case.name)


class Node:
    __slots__ = ("__weakref__", "value")


def run_scan(results: Results, tensors: int, others: int, rounds: int) -> None:
    held: list[object] = [torch.empty(1) for _ in range(tensors)]
    for number in range(others // 4):
        node = Node()
        node.value = number
        held += [[number], {"k": number}, node, {number}]
    gc.collect()
    title = f"{tensors} tensors and {others} containers"
    known: dict[str, object] = {"C": C, "gc": gc, "Tensor": torch.Tensor}
    statements = {
        "live_graph()": "C.live_graph()[0]",
        "gc.get_objects()": "gc.get_objects()",
        "isinstance in a loop": "[x for x in gc.get_objects() if isinstance(x, Tensor)]",
    }
    if memlab := peer("pytorch_memlab", "pytorch_memlab"):
        known["reporter"] = memlab.MemReporter()
        statements["pytorch_memlab"] = "reporter.device_mapping.clear()\nreporter.collect_tensor()"
    assert {id(x) for x in held[:tensors]} <= {id(x) for x in C.live_graph()[0]}
    cases = [Case(f"{title}: {name}", statement, known) for name, statement in statements.items()]
    # What is frozen, gc.get_objects() would not list.
    results.add_cases(cases, measure(cases, rounds=rounds, sample_ms=1.0, collector=True))
    results.ratio(cases[0].name, cases[1].name, at_least=round(SCAN_RATIO, 2))
    for case in cases[2:]:
        results.ratio(cases[0].name, case.name)


def run(results: Results, arguments: Namespace) -> None:
    many, few = (QUICK_MANY, QUICK_FEW) if arguments.quick else (MANY, FEW)
    rounds = arguments.rounds
    tensors = separate(many)  # first: afterwards the allocator hands out what was freed, in any order
    run_many(results, f"{many} in creation order", tensors, ORDERED_TARGET_NS, rounds)
    run_many(results, f"{many} shuffled", shuffled(tensors), SHUFFLED_TARGET_NS, rounds)
    del tensors
    title = f"{many} views, {VIEWS} of a storage, shuffled"
    run_many(results, title, shuffled(views(many)), SHUFFLED_TARGET_NS, rounds)
    run_peers(results, views(few), rounds)
    run_scan(results, many // 10, many, rounds)


def main() -> None:
    arguments = start("many tensors")
    results = Results("sharing")
    run(results, arguments)
    finish(results, arguments)


if __name__ == "__main__":
    main()
