"""One read of the fixed fields in C++: time, allocations, instructions. Builds and runs native_read, without Python.

Instructions are counted by callgrind where valgrind is installed: (I(2N) - I(N)) / N, so that starting libtorch, which
costs a thousand times more than a read, drops out.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import BASELINE, QUIET, Results, Yardstick, finish, header, start

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "benchmarks"
READ_TARGET_NS = 15
KINDS = ("plain", "view", "grad view", "parameter", "1024 parameters in turn")
EMPTY = "empty loop"
COUNTED_READS = 200_000
ROUNDS_A_PROCESS = 20


def build() -> Path:
    command = [
        "make",
        "-C",
        str(HERE),
        f"-j{os.cpu_count()}",
        "native_read",
        f"PYTHON={sys.executable}",
        f"BUILD={BUILD}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return BUILD / "native_read"


def run(*command: str | Path) -> str:
    # One process in all: no thread pools to start.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run(command, check=True, text=True, env=environment, **piped).stdout


def time_reads(results: Results, binary: Path, rounds: int) -> None:
    """Keep the rounds whose empty loop, and the next one's, ran quickly: it is the yardstick here."""
    kept: list[dict[str, float]] = []
    best = known_best()
    deadline = time.monotonic() + Yardstick.patience_s
    while len(kept) < rounds:
        fresh = sample_rounds(binary)
        best = min([best, *(found[EMPTY] for found in fresh)])
        patient = time.monotonic() < deadline
        for now, after in itertools.pairwise(fresh):
            disturbed = max(now[EMPTY], after[EMPTY]) > QUIET * best
            if not (disturbed and patient) and len(kept) < rounds:
                kept.append(now)
                Yardstick.rounds += 1
                Yardstick.disturbed_rounds += disturbed
    results.add(EMPTY, [found[EMPTY] for found in kept], detail=True)
    for kind in KINDS:
        spent = [found[kind] - found[EMPTY] for found in kept]
        results.add(f"{kind}: read_tensor()", spent, target=READ_TARGET_NS)
    Yardstick()  # notes how fast the machine is, for comparison with other files


def known_best() -> float:
    """Answer how quickly the empty loop has run on this machine, by the committed figures."""
    if not BASELINE.exists():
        return float("inf")
    topic = json.loads(BASELINE.read_text(encoding="utf-8"))["topics"].get("native", {"header": {}, "rows": []})
    same = topic["header"].get("cpu") == header()["cpu"]
    return min([row["min"] for row in topic["rows"] if row["name"] == EMPTY and same], default=float("inf"))


def sample_rounds(binary: Path) -> list[dict[str, float]]:
    lines = [line.split("\t") for line in run(binary, "--samples", str(ROUNDS_A_PROCESS)).splitlines()]
    names = len(lines) // ROUNDS_A_PROCESS
    return [
        {name: float(spent) for name, spent in lines[start : start + names]} for start in range(0, len(lines), names)
    ]


def count_allocations(results: Results, binary: Path) -> None:
    for line in run(binary, "--count").splitlines():
        name, news, mallocs = line.split("\t")
        if name in KINDS:
            total = float(int(news) + int(mallocs))
            results.add(f"{name}: allocations in 100 000 reads", [total], target=0, unit="count", exact=True)


def count_instructions(results: Results, binary: Path) -> None:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        print("# left out: instructions (valgrind is not installed)")
        return
    runs = [(kind, reads) for kind in KINDS[:4] for reads in (COUNTED_READS, 2 * COUNTED_READS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # counts do not mind company
        collected = dict(zip(runs, pool.map(lambda run: _collected(valgrind, binary, *run), runs), strict=True))
    for kind in KINDS[:4]:
        more = collected[kind, 2 * COUNTED_READS] - collected[kind, COUNTED_READS]
        results.add(f"{kind}: instructions a read", [float(round(more / COUNTED_READS))], unit="count", exact=True)


def _collected(valgrind: str, binary: Path, kind: str, reads: int) -> int:
    said = run(valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null", binary, "--reads", str(reads), kind)
    found = re.search(r"Collected : (\d+)", said)
    if found is None:
        raise RuntimeError(f"callgrind did not say how many instructions it saw:\n{said}")
    return int(found[1])


def main() -> None:
    arguments = start("one native read, without Python")
    binary = build()
    results = Results("native")
    time_reads(results, binary, arguments.rounds)
    count_allocations(results, binary)
    count_instructions(results, binary)
    finish(results, arguments)


if __name__ == "__main__":
    main()
