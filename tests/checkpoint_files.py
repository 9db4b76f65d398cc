"""Checkpoint files for tests: healthy, made by hand, and damaged at random."""

from __future__ import annotations

import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch._subclasses import FakeTensorMode

CANARY = "code-was-run"


class Code:
    """Pickled, it is a call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


def rich_objects() -> dict[str, Any]:
    """A state dict of a training run, and a tensor of every kind that weights_only takes."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    table = torch.arange(24.0).view(4, 6)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "views": [table, table.t(), table[1], (table[:, ::2], {"again": table})],
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "empty": torch.empty(0),
        "bfloat16": torch.ones(3, dtype=torch.bfloat16),
        "complex": torch.ones(3, dtype=torch.complex64),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


def saved(objs: Any, *, legacy: bool = False, **options: Any) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(objs, buffer, _use_new_zipfile_serialization=not legacy, **options)
    return buffer.getvalue()


def entries_of(archive: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def zipped(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as opened:
        for name, content in entries.items():
            opened.writestr(name, content)
    return buffer.getvalue()


def with_pickle(pickle: bytes) -> bytes:
    """An archive with a pickle made by hand."""
    return zipped({"archive/data.pkl": pickle, "archive/version": b"3\n", "archive/byteorder": b"little"})


def safetensors_of(header: dict[str, Any] | bytes, nbytes: int) -> bytes:
    """A file with a header made by hand and so many bytes of data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(nbytes)


def write_sparse_zip(path: Path, gibibytes: int) -> None:
    """A file of torch.save with storages of 1 GiB, which take no room on the disk."""
    with FakeTensorMode():
        objs = {f"layer{number}.weight": torch.empty(1 << 28) for number in range(gibibytes)}
        objs["view"] = objs["layer0.weight"][5:10]
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(objs, path)


def write_sparse_safetensors(path: Path, gibibytes: int) -> None:
    """The same as safetensors."""
    header = {
        f"layer{number}.weight": {
            "dtype": "F32",
            "shape": [1 << 28],
            "data_offsets": [number << 30, (number + 1) << 30],
        }
        for number in range(gibibytes)
    }
    begin = safetensors_of(header, 0)
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(len(begin) + (gibibytes << 30))


def peak_since_now() -> Callable[[], int]:
    """Begin to measure this process's memory; answer what tells by how many bytes it has grown at its peak."""

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10

    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS:")
    return lambda: status("VmHWM:") - before


def seeds() -> dict[str, bytes]:
    """The healthy files that are damaged."""
    small = {"weight": torch.ones(3, 4), "view": torch.arange(9.0)[2:5], "nested": [(torch.ones(2), {"step": 1})]}
    tensors = {"a": torch.ones(3, 4), "b": torch.arange(10), "empty": torch.empty(0)}
    return {
        "zip": saved(rich_objects()),
        "small zip": saved(small),
        "legacy": saved(rich_objects(), legacy=True),
        "small legacy": saved(small, legacy=True),
        "code": saved({"code": Code(), "weight": torch.ones(2)}),
        "legacy code": saved({"code": Code(), "weight": torch.ones(2)}, legacy=True),
        "safetensors": safetensors.torch.save(tensors, metadata={"format": "pt"}),
    }


def damaged(name: str, content: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Damage a file: its bytes, its length, its pickle inside a sound archive, the numbers of its header."""
    if name.endswith("zip") or name == "code":
        if chance.random() < 0.6:
            entries = entries_of(content)
            target = "archive/data.pkl" if chance.random() < 0.8 else chance.choice(sorted(entries))
            entries[target] = _damaged_bytes(entries[target], others, chance)
            if chance.random() < 0.2:
                entries.pop(chance.choice(sorted(entries)))
            return zipped(entries, chance.choice([zipfile.ZIP_STORED] * 9 + [zipfile.ZIP_DEFLATED]))
    elif name == "safetensors" and chance.random() < 0.6:
        (length,) = struct.unpack("<Q", content[:8])
        header = _damaged_bytes(content[8 : 8 + length], others, chance)
        claimed = len(header) if chance.random() < 0.9 else chance.choice([0, 1, len(content), 1 << 40, (1 << 64) - 1])
        return struct.pack("<Q", claimed) + header + content[8 + length :]
    elif chance.random() < 0.5:
        end = content.find(b".", 400) + 1 or len(content)  # about where the pickles are
        return _damaged_bytes(content[: end * 2], others, chance) + content[end * 2 :]
    return _damaged_bytes(content, others, chance)


def _damaged_bytes(content: bytes, others: list[bytes], chance: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 4, 16])):
        place = chance.randrange(len(data) + 1)
        action = chance.randrange(8)
        if action == 0 and place < len(data):
            data[place] ^= 1 << chance.randrange(8)
        elif action == 1 and place < len(data):
            data[place] = chance.randrange(256)
        elif action == 2:
            del data[place:]
        elif action == 3:
            del data[place : place + chance.randrange(1, 20)]
        elif action == 4:
            other = chance.choice(others)
            begin = chance.randrange(len(other))
            data[place:place] = other[begin : begin + chance.randrange(1, 200)]
        elif action == 5:
            data[place : place + 4] = struct.pack("<I", chance.choice([0, 1, 0x7F, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF]))
        elif action == 6:
            begin = chance.randrange(len(data) + 1)
            data[place:place] = data[begin : begin + chance.randrange(1, 100)]
        else:
            # Operations of a pickle, among them those that take any number and any depth.
            operations = [
                b"\x85" * 500,
                b"(",
                b"t",
                b"}",
                b"]",
                b"s",
                b"u",
                b"R",
                b"b",
                b"Q",
                b"0",
                b"h\x00",
                b"\x8a\x08",
            ]
            data[place:place] = chance.choice(operations) + bytes(chance.choice([b"", b"\xff" * 8]))
    return bytes(data)


def fuzz(first_seed: int, cases: int, seconds: float, folder: Path) -> int:
    """Inspect damaged files until there were enough; answer how many. Prints each seed first: the last one crashed."""
    import resource
    import sys
    import time

    from tensorplay.checkpoints import inspect_checkpoint
    from tensorplay.cli.output import escaped
    from tensorplay.errors import TargetError

    os.chdir(folder)
    files = seeds()
    contents = list(files.values())
    with open("/proc/self/status", encoding="utf-8") as status:
        taken = next(int(line.split()[1]) for line in status if line.startswith("VmSize:")) << 10
    resource.setrlimit(resource.RLIMIT_AS, (taken + (8 << 30), resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    peak = peak_since_now()
    begin = time.monotonic()
    reports = done = 0
    for seed in range(first_seed, first_seed + cases):
        if time.monotonic() - begin > seconds:
            break
        chance = random.Random(seed)
        name = chance.choice(sorted(files))
        Path("case.pt").write_bytes(damaged(name, files[name], contents, chance))
        print("seed", seed, name, file=sys.stderr, flush=True)
        try:
            assert inspect_checkpoint("case.pt").text()
            reports += 1
            message = ""
        except TargetError as error:
            message = escaped(str(error))
        assert "\n" not in message
        assert len(message) < 1000
        assert not Path(CANARY).exists()
        done += 1
    grown = peak() >> 20
    assert grown < 1024, f"{grown} MiB taken"
    print(f"{done} damaged files: {reports} reports, {done - reports} refused in one line, {grown} MiB taken")
    return done


if __name__ == "__main__":
    import sys

    fuzz(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]))
