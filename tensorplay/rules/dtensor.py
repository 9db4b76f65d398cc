"""Rules on DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tensorplay.rules.registry import StateRule
from tensorplay.words import describe, some_of

if TYPE_CHECKING:
    from tensorplay.layers import Finding
    from tensorplay.loading import ModelState
    from tensorplay.mixed import Distributed, Mixture
    from tensorplay.modules import Slot

__all__ = ["MixedWithPlain"]

MOST_NAMES = 1_000
"""How many names a finding's evidence lists."""


class MixedWithPlain(StateRule):
    """Plain tensors stand among the DTensors of one module.

    ## What it checks

    The parameters and buffers that a module has registered itself: its children are judged for themselves. DTensors
    are recognised by what they hold, not by their import: torch's own, which keep their local tensor in a slot, and
    those of other libraries, over the memory of their local tensor. Beside torch's own it is a warning; beside others
    an info, as libraries differ in what they do with a plain tensor.

    Passed over are tensors of one element, which torch takes as replicated (`num_batches_tracked`); what
    `fully_shard()` of torch or of HyperParallel gathers to plain tensors before forward, so that plain buffers and
    `ignored_params` are right beside it; and parameters under whose name the class has a property.

    ## Why it matters

    An operator that gets a DTensor and a plain tensor raises "got mixed torch.Tensor and DTensor". All of it may be on
    one device, so that a look at devices shows nothing.

    ## Known limits

    Only an operator that gets both raises. A plain tensor that forward keeps apart from the module's DTensors is told
    too: a statistic, an index into what another module has, what meets them after `to_local()`, or under
    `implicit_replication()`. Tensors that meet in forward only, of two modules or an input, are not seen.

    ## Example

    ```python
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    model.register_buffer("mask", torch.ones(4, 4))
    tp.check({"model": model})
    dist.destroy_process_group()
    ```

    ## Use instead

    ```python
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    model.register_buffer("mask", distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    tp.check({"model": model})
    dist.destroy_process_group()
    ```

    ## Fix safety

    `distribute_tensor()` is a collective, which sends the first rank's values to all: every rank has to call it, in the
    same order. A parameter that is replaced is another object: build the optimizer afterwards.

    ## Sources

    torch/distributed/tensor/_dispatch.py (`unwrap_to_op_info`, `_try_replicate_spec_for_scalar_tensor`),
    torch/distributed/fsdp/_fully_shard/_fsdp_param.py, torch 2.13.
    """

    code = "TP407"

    def in_state(self, state: ModelState) -> Iterator[Finding]:
        """Explain one finding for what is alike in modules of one class."""
        if state.loading is not None and state.before is None:
            return  # asked about a load that is still to come
        by_form: dict[object, list[Mixture]] = {}
        for mixture in state.mixtures:
            by_form.setdefault(mixture.form, []).append(mixture)
        for alike in by_form.values():
            yield self._explained(alike)

    def _explained(self, alike: Sequence[Mixture]) -> Finding:
        first = alike[0]
        names = [_name(slot) for slot in first.plain]
        slots = [*(one.slot for one in first.distributed), *first.plain]
        devices = sorted({str(slot.record.impl.device) for slot in slots})
        own = first.distributed[0].is_torchs
        others = [one.path for one in alike[1:]]
        more = f"; the same in {some_of(others, 3)}" if others else ""
        mesh_dims = len(first.distributed[0].placements) or 1
        replicated = f"distribute_tensor({names[0]}, mesh, [{', '.join(['Replicate()'] * mesh_dims)}])"
        return self.finding(
            first.plain[0].key,
            headline=f"{_distributed_words(first.distributed)}, {_plain_words(names)}: distribute {some_of(names, 3)}",
            subject=f"{first.path or 'the module'} ({first.kind}): {_name(slots[0])} {describe(slots[0].record)}, "
            f"{names[0]} {describe(first.plain[0].record)}{more}",
            evidence={
                "kinds": {
                    **dict.fromkeys(map(_name, slots[: len(first.distributed)][:MOST_NAMES]), "DTensor"),
                    **dict.fromkeys(names[:MOST_NAMES], "Tensor"),
                },
                "placements": {_name(one.slot): _tuple_text(one.placements) for one in first.distributed[:MOST_NAMES]},
                "devices": devices,
                "modules": [one.path for one in alike[:MOST_NAMES]],
            },
            why=_why(own, len(devices) == 1),
            fix=f"put {replicated} in its place, with the mesh of {_name(slots[0])}"
            if own
            else "distribute it over the same mesh, with the library's own function",
            source="read: the module's _parameters and _buffers; of each DTensor its own placements",
            severity=None if own else "info",
        )


def _why(own: bool, on_one_device: bool) -> str:
    if not own:
        return "an operator of their library may refuse a plain tensor, or take it for this rank's part"
    alike = "; all are on one device, so that a look at devices shows nothing" if on_one_device else ""
    return f'an operator that gets both raises "got mixed torch.Tensor and DTensor"{alike}'


def _name(slot: Slot) -> str:
    return slot.key.rpartition(".")[2]


def _tuple_text(placements: Sequence[str]) -> str:
    """Answer placements as str() says the tuple of them."""
    return f"({', '.join(placements)}{',' if len(placements) == 1 else ''})"


def _distributed_words(found: Sequence[Distributed]) -> str:
    if len(found) > 1:
        return f"{some_of([_name(one.slot) for one in found], 3)} are DTensors"
    placements = [one.replace("dim=", "", 1) for one in found[0].placements]
    words = f" {placements[0]}" if len(placements) == 1 else f" [{', '.join(placements)}]" if placements else ""
    return f"{_name(found[0].slot)} is a DTensor{words}"


def _plain_words(names: Sequence[str]) -> str:
    return f"{names[0]} a plain Tensor" if len(names) == 1 else f"{some_of(names, 3)} plain Tensors"
