"""One tensor: the record, its fields, inspect(), and what other tools need for the same tensor.

Needs the package installed in this environment; the peers are lovely-tensors and treescope, each left out with a
line where it is not installed.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping

import torch
from harness import Case, Results, finish, measure, peer, quantity, start
from torch._subclasses.meta_utils import MetaTensorDescriber

import tensorplay
from tensorplay._native import C

LAYERS = ("python", "impl", "storage", "data", "extent")
RECORD_TARGET_NS = 400
FIELD_TARGET_NS = 80
ALL_FIELDS_TARGET_NS = 5_000
INSPECT_TARGET_NS = 5_000
PYTHON_RATIO = 8


def sample_tensors() -> dict[str, torch.Tensor]:
    plain = torch.randn(64, 64)
    leaf = torch.randn(64, 64, requires_grad=True)
    return {
        "plain": plain,
        "view": plain[3:9].unsqueeze(0).transpose(1, 2),
        "grad view": (leaf * 2)[3:9].unsqueeze(0).transpose(1, 2),
    }


def read_in_python(x: torch.Tensor) -> dict[str, object]:
    """The facts of a record that Python can reach by itself: 31 of them."""
    storage = x.untyped_storage()
    storage_address = storage._cdata
    base = x._base
    return {
        "address": id(x),
        "refcount": sys.getrefcount(x),
        "impl": x._cdata,
        "use_count": x._use_count(),
        "shape": tuple(x.size()),
        "stride": x.stride(),
        "offset": x.storage_offset(),
        "numel": x.numel(),
        "itemsize": x.element_size(),
        "dtype": x.dtype,
        "device": x.device,
        "layout": x.layout,
        "keys": torch._C._dispatch_keys(x),
        "requires_grad": x.requires_grad,
        "is_leaf": x.is_leaf,
        "grad_fn": x.grad_fn,
        "version": x._version,
        "is_view": x._is_view(),
        "base": None if base is None else base._cdata,
        "is_inference": x.is_inference(),
        "is_conj": x.is_conj(),
        "is_neg": x.is_neg(),
        "contiguous": x.is_contiguous(),
        "storage": storage_address,
        "storage_use_count": torch._C._storage_Use_Count(storage_address),
        "storage_nbytes": storage.nbytes(),
        "storage_pointer": storage.data_ptr(),
        "storage_device": storage.device,
        "resizable": storage.resizable(),
        "shared": storage.is_shared(),
        "data_ptr": x.data_ptr(),
    }


def read_natively(x: torch.Tensor) -> dict[str, object]:
    """The same 31 facts from a record, each turned into a Python object."""
    record = C.read(x)
    python, impl, storage, data = record.python, record.impl, record.storage, record.data
    return {
        "address": python.address,
        "refcount": python.refcount,
        "impl": impl.address,
        "use_count": impl.use_count,
        "shape": impl.shape,
        "stride": impl.stride,
        "offset": impl.storage_offset,
        "numel": impl.numel,
        "itemsize": impl.itemsize,
        "dtype": impl.dtype,
        "device": impl.device,
        "layout": impl.layout,
        "keys": impl.keys,
        "requires_grad": impl.requires_grad,
        "is_leaf": impl.is_leaf,
        "grad_fn": impl.grad_fn,
        "version": impl.version,
        "is_view": impl.is_view,
        "base": impl.base,
        "is_inference": impl.is_inference,
        "is_conj": impl.is_conj,
        "is_neg": impl.is_neg,
        "contiguous": record.extent.contiguous,
        "storage": storage.address,
        "storage_use_count": storage.use_count,
        "storage_nbytes": storage.nbytes,
        "storage_pointer": data.pointer,
        "storage_device": data.device,
        "resizable": storage.resizable,
        "shared": storage.shared_memory,
        "data_ptr": data.data_ptr,
    }


def fields_of(layer: object) -> list[str]:
    return [name for name, member in vars(type(layer)).items() if isinstance(member, types.GetSetDescriptorType)]


def all_fields_statement(record: object) -> str:
    """Every field of every layer, and the record's own, without a loop around them."""
    lines = []
    for name in fields_of(record):
        if name in LAYERS:
            lines += [f"layer = record.{name}", *(f"layer.{field}" for field in fields_of(getattr(record, name)))]
        else:
            lines.append(f"record.{name}")
    return "\n".join(lines)


def peer_cases(kind: str, x: torch.Tensor) -> list[Case]:
    cases = [
        Case(f"{kind}: 31 fields in Python", "read(x)", {"read": read_in_python, "x": x}),
        Case(
            f"{kind}: MetaTensorDescriber",
            "Describer().describe_tensor(x)",
            {"Describer": MetaTensorDescriber, "x": x},
        ),
        Case(f"{kind}: repr(x)", "repr(x)", {"repr": repr, "x": x}),
    ]
    if lovely := peer("lovely_tensors", "lovely-tensors"):
        cases.append(Case(f"{kind}: lovely_tensors", "str(lovely(x))", {"lovely": lovely.lovely, "x": x}))
    if treescope := peer("treescope", "treescope"):
        if not hasattr(torch.Tensor, "names"):
            # treescope 0.1.10 reads the names of named tensors, which torch 2.13 no longer has.
            torch.Tensor.names = property(lambda tensor: (None,) * tensor.dim())  # type: ignore[attr-defined]
        cases.append(Case(f"{kind}: treescope", "render(x)", {"render": treescope.render_to_text, "x": x}))
    return cases


def run_whole(results: Results, kind: str, x: torch.Tensor, rounds: int) -> None:
    record = C.read(x)
    ours = [
        Case(f"{kind}: C.read(x)", "C.read(x)", {"C": C, "x": x}, RECORD_TARGET_NS),
        Case(f"{kind}: read and all fields", f"record = C.read(x)\n{all_fields_statement(record)}", {"C": C, "x": x}),
        Case(f"{kind}: all fields", all_fields_statement(record), {"record": record}, ALL_FIELDS_TARGET_NS),
        Case(f"{kind}: read and the same 31 fields", "read(x)", {"read": read_natively, "x": x}),
        Case(
            f"{kind}: inspect(x, quiet=True)",
            "inspect(x, quiet=True)",
            {"inspect": tensorplay.inspect, "x": x},
            INSPECT_TARGET_NS,
        ),
    ]
    peers = peer_cases(kind, x)
    results.add_cases([*ours, *peers], measure([*ours, *peers], rounds=rounds))
    results.ratio(ours[0].name, peers[0].name, at_least=PYTHON_RATIO)
    results.ratio(ours[3].name, peers[0].name)
    for other in peers:
        results.ratio(ours[4].name, other.name)


def run_fields(results: Results, kind: str, x: torch.Tensor, rounds: int) -> dict[str, tuple[float, float]]:
    """Time each field with its layer in hand, and through the record."""
    record = C.read(x)
    own = [name for name in fields_of(record) if name not in LAYERS]
    held = [Case(f"{kind}: record.{name}", f"record.{name}", {"record": record}) for name in own]
    reached = []
    for layer in LAYERS:
        window = getattr(record, layer)
        for name in fields_of(window):
            held.append(Case(f"{kind}: {layer}.{name}", f"layer.{name}", {"layer": window}))
            reached.append(Case(f"{kind}: record.{layer}.{name}", f"record.{layer}.{name}", {"record": record}))
    samples = measure([*held, *reached], rounds=rounds, sample_ms=0.5)
    results.add_cases([*held, *reached], samples, detail=True)
    rows = {row["name"]: row["median"] for row in results.rows}
    for title, cases in (("layer in hand", held), ("through the record", reached)):
        worst = max(cases, key=lambda case: rows[case.name])
        above = sorted(case.name.partition(": ")[2] for case in cases if rows[case.name] > FIELD_TARGET_NS)
        results.add(
            f"{kind}: worst field, {title}",
            samples[worst.name],
            target=FIELD_TARGET_NS,
            note=f"{worst.name.partition(': ')[2]}; {len(above)} of {len(cases)} above the target"
            + (f": {', '.join(above)}" if above else ""),
        )
    return {
        name.removeprefix(f"{kind}: "): (rows[name], rows.get(name.replace(": ", ": record.", 1), float("nan")))
        for name in (case.name for case in held)
    }


def print_fields(table: Mapping[str, Mapping[str, tuple[float, float]]]) -> None:
    print(f"{'field: layer in hand / through the record':42}" + "".join(f"{kind:>22}" for kind in table))
    names = dict.fromkeys(name for fields in table.values() for name in fields)
    for name in names:
        cells = []
        for fields in table.values():
            held, reached = fields.get(name, (float("nan"),) * 2)
            cells.append(f"{quantity(held, 'ns')} / {quantity(reached, 'ns') if reached == reached else '-'}")
        print(f"{name:42}" + "".join(f"{cell:>22}" for cell in cells))


def main() -> None:
    arguments = start("one tensor")
    results = Results("inspect")
    tensors = sample_tensors()
    for kind, x in tensors.items():
        run_whole(results, kind, x, arguments.rounds)
    print_fields({kind: run_fields(results, kind, x, arguments.rounds) for kind, x in tensors.items()})
    finish(results, arguments)


if __name__ == "__main__":
    main()
