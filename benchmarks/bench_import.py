"""What `import tensorplay; tensorplay.inspect` adds to a program that has imported torch, in fresh processes.

The peers' imports run beside it. CPU time of the process, as elsewhere: the files come from the page cache, so that an
import waits for nothing, and on a quiet machine this is the wall time.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from harness import Results, Yardstick, finish, start

IMPORT_TARGET_NS = 60e6
MOST_ROUNDS = 25  # a round starts a process for each statement
OURS = "import tensorplay; tensorplay.inspect"
STATEMENTS = {
    OURS: "tensorplay",
    "import lovely_tensors": "lovely_tensors",
    "import treescope": "treescope",
}
PROGRAM = """
import time
import torch
begin = time.process_time_ns()
{statement}
print(time.process_time_ns() - begin)
"""


def import_ns(statement: str) -> float:
    command = [sys.executable, "-c", PROGRAM.format(statement=statement)]
    # -c puts the current folder first on the path: this one has no package of those names.
    folder = Path(__file__).parent
    return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout)


def main() -> None:
    arguments = start("import on top of torch")
    statements = []
    for statement, module in STATEMENTS.items():
        if importlib.util.find_spec(module) is None:
            print(f"# left out: {module} is not installed")
        else:
            statements.append(statement)
    for statement in statements:
        import_ns(statement)  # writes the bytecode caches
    samples: dict[str, list[float]] = {statement: [] for statement in statements}
    yardstick = Yardstick()
    while len(samples[OURS]) < min(arguments.rounds, MOST_ROUNDS):
        spent = [import_ns(statement) for statement in statements]
        if yardstick.accept():
            for statement, took in zip(statements, spent, strict=True):
                samples[statement].append(took)
    results = Results("import")
    for statement in statements:
        results.add(statement, samples[statement], target=IMPORT_TARGET_NS if statement == OURS else None)
    for statement in statements:
        if statement != OURS:
            results.ratio(OURS, statement)
    finish(results, arguments)


if __name__ == "__main__":
    main()
