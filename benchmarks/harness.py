"""Time statements side by side in one process, and keep the figures.

Every round runs every case once, in turn (A, B, C, A, B, C, ...), so that what disturbs the machine disturbs all of
them; ratios are taken inside a round. The empty loop, timed in the same round, is subtracted. The clock is the
thread's CPU time unless a script says otherwise: the machine is shared, and a preempted thread would count twice.
A busy neighbour slows this core too, 1.8 x where it is the same core's other thread, and a virtual machine does not see
its neighbours: a round is run again, while patience lasts, when a fixed yardstick ran slowly before or after it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import random
import statistics
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BASELINE = Path(__file__).with_name("baseline.json")
ROUNDS = 41
QUICK_ROUNDS = 3
SAMPLE_MS = 4.0
RESAMPLES = 2000
# A round counts as quiet when the yardstick took no longer than this times the best known.
QUIET = 1.25


@dataclass(frozen=True)
class Case:
    """A statement, its names as local variables, and what one run of it may cost."""

    name: str
    statement: str
    names: Mapping[str, object]
    target_ns: float | None = None
    divide_by: int = 1  # a case that does n things is reported for one of them


def compile_loop(statement: str, names: Mapping[str, object], clock: Callable[[], int]) -> Callable[[int], int]:
    """Build a loop around the statement itself: a function call per turn would cost more than a field access does."""
    source = f"def loop(times, clock, {', '.join(names)}):\n    begin = clock()\n    for _ in times:\n"
    source += "".join(f"        {line}\n" for line in statement.splitlines())
    source += "    return clock() - begin\n"
    scope: dict[str, Any] = {}
    exec(compile(source, "<benchmark>", "exec"), scope)
    loop, values = scope["loop"], tuple(names.values())
    return lambda count: loop(range(count), clock, *values)


def measure(
    cases: Sequence[Case],
    *,
    rounds: int = ROUNDS,
    sample_ms: float = SAMPLE_MS,
    clock: Callable[[], int] = time.thread_time_ns,
    collector: bool = False,
) -> dict[str, list[float]]:
    """Answer, for every case, nanoseconds a run in each round.

    Args:
        cases: run in this order in every round; their names differ.
        rounds: how many alternations.
        sample_ms: how long one case runs in one round, at least one run.
        clock: nanoseconds.
        collector: whether Python's garbage collector may run in between, as it does for a user.
    """
    loops = [compile_loop(case.statement, case.names, clock) for case in cases]
    counts = [_enough(loop, sample_ms) for loop in loops]
    empty = compile_loop("pass", {}, clock)
    empty_count = _enough(empty, sample_ms)
    samples: dict[str, list[float]] = {case.name: [] for case in cases}
    gc.collect()
    if not collector:
        gc.freeze()
        gc.disable()
    yardstick = Yardstick()
    kept = 0
    try:
        while kept < rounds:
            idle = empty(empty_count) / empty_count
            round_ns = [
                (loop(count) / count - idle) / case.divide_by
                for case, loop, count in zip(cases, loops, counts, strict=True)
            ]
            if yardstick.accept():
                kept += 1
                for case, spent in zip(cases, round_ns, strict=True):
                    samples[case.name].append(spent)
            gc.collect()
    finally:
        gc.enable()
        gc.unfreeze()
    return samples


def _enough(loop: Callable[[int], int], sample_ms: float) -> int:
    """Find how often to run for a sample of this length; warms up on the way."""
    count = 1
    while (spent := max(loop(count), 1)) < sample_ms * 1e6 / 4:
        count *= 4
    return max(1, round(count * sample_ms * 1e6 / spent))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Answer the 95 % interval of the median, by bootstrap with a fixed seed."""
    choose = random.Random(0).choices
    medians = sorted(statistics.median(choose(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(RESAMPLES * 0.025)], medians[int(RESAMPLES * 0.975) - 1]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Answer median, its 95 % interval, quartiles, lowest and highest."""
    low, high = interval(values)
    first, _, third = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    found = {"median": statistics.median(values), "low": low, "high": high, "q1": first, "q3": third}
    return found | {"min": min(values), "max": max(values)}


class Yardstick:
    """How fast the machine is at the moment, by a statement that has nothing to do with what is measured."""

    patience_s = 60.0
    best_ns = float("inf")  # of a turn, in this process or as known from an earlier file of figures
    rounds = 0
    disturbed_rounds = 0  # kept, for want of quieter ones

    def __init__(self) -> None:
        names = {"sorted": sorted, "values": list(range(40, 0, -1))}
        self._loop = compile_loop("sorted(values)", names, time.thread_time_ns)
        self._deadline = time.monotonic() + self.patience_s
        for _ in range(100):
            self._measure()
        self._before = self._measure()

    def _measure(self) -> float:
        # The first turn after a sleep finds the core cold.
        spent = min(self._loop(1000) for _ in range(3)) / 1000
        Yardstick.best_ns = min(Yardstick.best_ns, spent)
        return spent

    @classmethod
    def learn(cls, path: Path) -> None:
        """Take over what figures of this machine say: a process that starts in a slow phase cannot know better."""
        document = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"topics": {}}
        here = header()
        for topic in document["topics"].values():
            known = topic["header"]
            if all(known[field] == here[field] for field in ("cpu", "cores", "python")):
                cls.best_ns = min(cls.best_ns, known["yardstick_ns"])

    def accept(self) -> bool:
        """Tell whether the round run since the last call counts."""
        before, self._before = self._before, self._measure()
        disturbed = max(before, self._before) > QUIET * Yardstick.best_ns
        if disturbed and time.monotonic() < self._deadline:
            time.sleep(0.1)
            self._before = self._measure()
            return False
        Yardstick.rounds += 1
        Yardstick.disturbed_rounds += disturbed
        return True


@dataclass
class Results:
    """The figures of one topic, on their way to the terminal and to JSON."""

    topic: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[dict[str, Any]] = field(default_factory=list)
    _samples: dict[str, Sequence[float]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        samples: Sequence[float],
        *,
        target: float | None = None,
        unit: str = "ns",
        note: str = "",
        detail: bool = False,
        exact: bool = False,
    ) -> None:
        """Keep one row.

        Args:
            name: its key in the topic.
            samples: one a round.
            target: the most that the median may be.
            unit: ns or count.
            note: printed behind it.
            detail: kept out of the terminal and the documentation.
            exact: a count that does not vary with the machine's mood.
        """
        row: dict[str, Any] = {"name": name, "unit": unit, "rounds": len(samples), **summary(samples)}
        if target is not None:
            row |= {"target": target, "met": row["median"] <= target}
        marks: dict[str, Any] = {"note": note, "detail": detail, "exact": exact}
        self.rows.append(row | {key: value for key, value in marks.items() if value})
        self._samples[name] = samples

    def add_cases(self, cases: Sequence[Case], samples: Mapping[str, Sequence[float]], *, detail: bool = False) -> None:
        for case in cases:
            self.add(case.name, samples[case.name], target=case.target_ns, detail=detail)

    def ratio(self, ours: str, peer: str, *, at_least: float | None = None) -> None:
        """Keep how many times the peer's cost is ours, from the pairs of each round."""
        pairs = [b / a for a, b in zip(self._samples[ours], self._samples[peer], strict=True)]
        found: dict[str, Any] = {"ours": ours, "peer": peer, **summary(pairs)}
        if at_least is not None:
            found |= {"target": at_least, "met": found["median"] >= at_least}
        self.ratios.append(found)

    def print(self) -> None:
        width = max(len(row["name"]) for row in self.rows) + 2
        for row in self.rows:
            if row.get("detail"):
                continue
            unit = row["unit"]
            limit = "" if "target" not in row else f"target <= {quantity(row['target'], unit)}: {verdict(row)}"
            spread = f"{quantity(row['q1'], unit)} .. {quantity(row['q3'], unit)}"
            extremes = f"{quantity(row['min'], unit)} .. {quantity(row['max'], unit)}"
            note = f"  ({row['note']})" if "note" in row else ""
            print(
                f"{row['name']:{width}}{quantity(row['median'], unit):>11}  quartiles {spread:24}"
                f"all {extremes:26}{limit}{note}"
            )
        for pair in self.ratios:
            limit = "" if "target" not in pair else f"  target >= {pair['target']:g}: {verdict(pair)}"
            print(
                f"{pair['peer']} costs {pair['median']:.3g} x {pair['ours']}  "
                f"95 % [{pair['low']:.3g}, {pair['high']:.3g}]  all [{pair['min']:.3g}, {pair['max']:.3g}]{limit}"
            )

    def save(self, path: Path) -> None:
        """Put this topic into a JSON file, beside the other topics already there."""
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        topics = known.get("topics", {})
        quiet = {
            "yardstick_ns": Yardstick.best_ns,
            "rounds": Yardstick.rounds,
            "disturbed_rounds": Yardstick.disturbed_rounds,
        }
        topics[self.topic] = {"header": header() | quiet, "rows": self.rows, "ratios": self.ratios}
        path.write_text(_dump(topics), encoding="utf-8")


def _dump(topics: Mapping[str, Any]) -> str:
    """Write JSON with a line for each figure, so that a change reads as one."""
    parts = []
    for name, topic in sorted(topics.items()):
        lists = [
            f' "{key}": [\n  '
            + ",\n  ".join(json.dumps(_rounded(row), ensure_ascii=False) for row in topic[key])
            + "\n ]"
            for key in ("rows", "ratios")
        ]
        parts.append(",\n".join([f'"{name}": {{\n "header": {json.dumps(_rounded(topic["header"]))}', *lists]) + "\n}")
    return '{"schema_version": 1, "topics": {\n' + ",\n".join(parts) + "\n}}\n"


def verdict(row: Mapping[str, Any]) -> str:
    return "met" if row["met"] else "MISSED"


def quantity(value: float, unit: str) -> str:
    """Write a figure for people: three digits, in the unit that fits."""
    if unit != "ns":
        return f"{value:,.1f}".removesuffix(".0")
    units = ((1e3, 1, "ns"), (1e6, 1e3, "µs"), (1e9, 1e6, "ms"), (float("inf"), 1e9, "s"))
    factor, name = next((factor, name) for limit, factor, name in units if abs(value) < limit * 0.9995)
    scaled = value / factor
    return f"{scaled:.{max(0, 3 - len(str(int(abs(scaled)))))}f} {name}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def header() -> dict[str, Any]:
    """Answer what the figures depend on."""
    import torch

    from tensorplay import __version__

    model = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return {
        "tensorplay": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cpu": model[0] if model else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def start(description: str) -> argparse.Namespace:
    """Read the command line that all benchmarks share, and print what the figures depend on."""
    import torch

    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="put the figures into this file, beside other topics")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"alternations (default {ROUNDS})")
    parser.add_argument(
        "--patience",
        type=float,
        default=Yardstick.patience_s,
        help="seconds that each group of cases may wait for quiet rounds (default %(default)g)",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_ROUNDS} rounds without patience, and less of what is large: that it runs, not what it costs",
    )
    arguments = parser.parse_args()
    if arguments.rounds < 2:
        parser.error("--rounds: at least 2")
    if arguments.quick:
        if arguments.json is not None:
            parser.error("--quick measures nothing that is worth keeping: leave out --json")
        arguments.rounds, arguments.patience = QUICK_ROUNDS, 0.0
    Yardstick.patience_s = arguments.patience
    for path in {BASELINE, arguments.json or BASELINE}:
        Yardstick.learn(path)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print(f"# {description}\n# " + "  ".join(f"{key} {value}" for key, value in header().items()))
    return arguments


def peer(module: str, package: str) -> types.ModuleType | None:
    """Import what is measured beside ours, or say that it is left out."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        print(f"# left out: {package} is not installed")
        return None


def finish(results: Results, arguments: argparse.Namespace) -> None:
    results.print()
    print(
        f"# {Yardstick.disturbed_rounds} of {Yardstick.rounds} rounds were disturbed; "
        f"yardstick {Yardstick.best_ns:.0f} ns"
    )
    if arguments.json is not None:
        results.save(arguments.json)
