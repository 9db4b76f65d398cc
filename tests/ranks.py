"""Tests that several processes go through together: a script starts itself once a rank, each leaves what it found."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.helpers import ROOT

Answers = list[dict[str, str]]
"""Of each rank, what became of each situation."""


def go_through(
    situations: Callable[[], Mapping[str, Callable[[], None]]], number: int, ranks: int, folder: Path
) -> None:
    """Be one rank; leave what became of each situation in a file. They are made once the ranks know each other."""
    store = dist.FileStore(str(folder / "store"), ranks)
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", rank=number, world_size=ranks, store=store, timeout=timeout)
    answers: dict[str, str] = {}
    try:
        for name, check in situations().items():
            dist.barrier()
            try:
                check()
                answers[name] = "right"
            except Exception:
                answers[name] = traceback.format_exc()
            (folder / f"{number}.json").write_text(json.dumps(answers))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_ranks(script: str, ranks: int, folder: Path, *arguments: str) -> Answers:
    """Run a script once a rank, with `arguments`, its number, how many there are, and the folder; to their end, or end
    them.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"{number}.log").open("w+") for number in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, *arguments, str(number), str(ranks), str(folder)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for number, log in enumerate(logs)
    ]
    deadline = time.monotonic() + 120
    try:
        for process in processes:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = []
    for number, log in enumerate(logs):
        log.seek(0)
        said.append(log.read()[-3000:])
        log.close()
        if not (folder / f"{number}.json").exists():
            pytest.fail(f"rank {number} left nothing:\n" + "\n".join(said))
    return [json.loads((folder / f"{number}.json").read_text()) for number in range(ranks)]


def judge(name: str, answers: Answers) -> None:
    """Fail with what a rank says of a situation that was not right."""
    for number, one in enumerate(answers):
        answer = one.get(name, "not reached")
        if answer != "right":
            pytest.fail(f"rank {number}: {answer}", pytrace=False)
