"""State dicts beside models: comparing keys, reading values, loading all or nothing, watching what gets its values.

Beside each stands what one would write by hand. Files are read from the page cache: every case has read them before.
Memory is anonymous memory at its highest, beside the model and what Python and torch had, sampled from outside while
a process of its own loads: pages of mapped files, which the kernel can drop, do not count.
"""

from __future__ import annotations

import copy
import select
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import torch
from harness import Case, Results, finish, measure, peer, start
from torch import nn

import tensorplay

KEYS, QUICK_KEYS = 10_000, 500
KEYS_TARGET_NS = 50_000_000
VALUES_NBYTES, QUICK_VALUES_NBYTES = 256 << 20, 8 << 20
FILE_NBYTES, QUICK_FILE_NBYTES = 1 << 30, 16 << 20
LAYERS = 16
BLOCKS, QUICK_BLOCKS = 333, 20
CHUNK_NBYTES = 16 << 20
LOADS = {
    "safe_load_state_dict()": "tp.safe_load_state_dict(model, path, progress=False)",
    "safe_load_state_dict(undo=False)": "tp.safe_load_state_dict(model, path, progress=False, undo=False)",
    "safe_load_state_dict(chunk_nbytes=16 MiB)": (
        f"tp.safe_load_state_dict(model, path, progress=False, chunk_nbytes={CHUNK_NBYTES})"
    ),
    "safe_load_state_dict(chunk_nbytes=16 MiB, undo=False)": (
        f"tp.safe_load_state_dict(model, path, progress=False, chunk_nbytes={CHUNK_NBYTES}, undo=False)"
    ),
}
PEERS = {
    ".pt": ("torch.load() and load_state_dict()", "model.load_state_dict(torch.load(path, weights_only=True))"),
    ".safetensors": ("load_file() and load_state_dict()", "model.load_state_dict(load_file(path))"),
}
ALONE = """
import sys, torch, tensorplay as tp
from torch import nn
torch.set_num_threads(1)
try:
    from safetensors.torch import load_file
except ModuleNotFoundError:
    pass
path, side, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(layers)))
print("ready", flush=True)
sys.stdin.readline()
{load}
print("done", flush=True)
sys.stdin.readline()
"""


def network(nbytes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(side_of(nbytes), side_of(nbytes), bias=False) for _ in range(LAYERS)))


def side_of(nbytes: int) -> int:
    return int((nbytes / LAYERS / 4) ** 0.5)


def compared_by_hand(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> list[str]:
    own = model.state_dict()
    wrong = [key for key in own if key not in state_dict]
    wrong += [key for key in state_dict if key not in own]
    for key, value in own.items():
        other = state_dict.get(key)
        if other is not None and (other.shape != value.shape or other.dtype != value.dtype):
            wrong.append(key)
    return wrong


def finite_by_hand(state_dict: Mapping[str, torch.Tensor]) -> list[str]:
    return [key for key, value in state_dict.items() if not torch.isfinite(value).all()]


def run_keys(results: Results, keys: int, rounds: int) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(keys // 2)))
    state_dict = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    report = tensorplay.validate_state_dict_load(model, state_dict)
    assert (report.load.matched, report.findings, compared_by_hand(model, state_dict)) == (keys, (), [])
    known = {"tp": tensorplay, "model": model, "state_dict": state_dict, "optimizer": optimizer}
    known["compared_by_hand"] = compared_by_hand
    title = f"{keys} keys"
    ours = "tp.validate_state_dict_load(model, state_dict)"
    cases = [
        Case(f"{title}: validate_state_dict_load()", ours, known, KEYS_TARGET_NS),
        Case(f"{title}: with an optimizer", "tp.validate_state_dict_load(model, state_dict, optimizer)", known),
        Case(f"{title}: state_dict() and a loop by hand", "compared_by_hand(model, state_dict)", known),
    ]
    results.add_cases(cases, measure(cases, rounds=min(rounds, 15), sample_ms=1.0, collector=True))
    results.ratio(cases[0].name, cases[2].name)


def run_values(results: Results, nbytes: int, rounds: int) -> None:
    model = network(nbytes)
    state_dict = copy.deepcopy(model.state_dict())
    nbytes = sum(value.nbytes for value in state_dict.values())
    assert tensorplay.validate_state_dict_load(model, state_dict, values=True).findings == ()
    known = {"tp": tensorplay, "model": model, "state_dict": state_dict, "finite_by_hand": finite_by_hand}
    title = f"values of {nbytes >> 20} MiB float32"
    cases = [
        Case(
            f"{title}: validate_state_dict_load(values=True)",
            "tp.validate_state_dict_load(model, state_dict, values=True)",
            known,
        ),
        Case(f"{title}: torch.isfinite() in a loop", "finite_by_hand(state_dict)", known),
    ]
    samples = measure(cases, rounds=min(rounds, 15), sample_ms=1.0)
    results.add_cases(cases, samples)
    for case in cases:
        results.add(f"{case.name}, GB/s", [nbytes / spent for spent in samples[case.name]], unit="count")
    results.ratio(cases[0].name, cases[1].name)


def run_files(results: Results, nbytes: int, rounds: int) -> None:
    model = network(nbytes)
    state_dict = {key: value + 1 for key, value in model.state_dict().items()}
    safetensors = peer("safetensors.torch", "safetensors")
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "model.pt"]
        torch.save(state_dict, paths[0])
        if safetensors:
            paths.append(Path(folder) / "model.safetensors")
            safetensors.save_file(state_dict, paths[1])
        del state_dict
        for path in paths:
            name, statement = PEERS[path.suffix]
            known = {"tp": tensorplay, "torch": torch, "model": model, "path": str(path)}
            known |= {"load_file": safetensors.load_file} if safetensors else {}
            title = f"{path.stat().st_size >> 20} MiB {path.suffix}"
            cases = [Case(f"{title}: {ours}", load, known) for ours, load in LOADS.items()]
            cases.append(Case(f"{title}: {name}", statement, known))
            # A run is seconds.
            results.add_cases(cases, measure(cases, rounds=min(rounds, 7), sample_ms=1.0))
            for case in cases:
                peak = peak_of(case.statement, path, side_of(nbytes))
                results.add(f"{case.name}, most extra MiB", [peak / (1 << 20)], unit="count")
            for case in cases[:-1]:
                results.ratio(case.name, cases[-1].name)


def peak_of(load: str, path: Path, side: int) -> float:
    """Answer how much anonymous memory a load takes at its highest, beside what was there before."""
    command = [sys.executable, "-c", ALONE.format(load=load), str(path), str(side), str(LAYERS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        status = Path(f"/proc/{process.pid}/status")
        assert process.stdout.readline() == b"ready\n"
        before = highest = anonymous_nbytes(status)
        process.stdin.write(b"\n")
        process.stdin.flush()
        while True:
            highest = max(highest, anonymous_nbytes(status))
            if select.select([process.stdout], [], [], 0.0005)[0]:  # it is done, and waits
                break
        assert process.stdout.readline() == b"done\n"
    return highest - before


def anonymous_nbytes(status: Path) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def fill(model: nn.Module) -> None:
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def fill_audited(model: nn.Module) -> None:
    with tensorplay.materialize_audit(model) as audit:
        fill(model)
    assert audit.findings == ()


def run_audit(results: Results, blocks: int, rounds: int) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(blocks)))
    known = {"model": model, "fill": fill, "fill_audited": fill_audited}
    title = f"{len(list(model.modules()))} modules, to_empty() and reset_parameters()"
    cases = [
        Case(f"{title}: under materialize_audit()", "fill_audited(model)", known),
        Case(f"{title}: alone", "fill(model)", known),
    ]
    results.add_cases(cases, measure(cases, rounds=min(rounds, 15), sample_ms=1.0, collector=True))
    results.ratio(cases[0].name, cases[1].name)


def run(results: Results, arguments: Namespace) -> None:
    quick = arguments.quick
    run_keys(results, QUICK_KEYS if quick else KEYS, arguments.rounds)
    run_values(results, QUICK_VALUES_NBYTES if quick else VALUES_NBYTES, arguments.rounds)
    run_audit(results, QUICK_BLOCKS if quick else BLOCKS, arguments.rounds)
    run_files(results, QUICK_FILE_NBYTES if quick else FILE_NBYTES, arguments.rounds)


def main() -> None:
    arguments = start("state dicts beside models")
    results = Results("statedict")
    run(results, arguments)
    finish(results, arguments)


if __name__ == "__main__":
    main()
