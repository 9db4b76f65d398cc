"""Ten threads probe while others create, write and free tensors."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import tensorplay as tp
from tensorplay._native import C

PROBES = 10
MAKERS = 3


@pytest.mark.parametrize("rounds", [200, pytest.param(4_000, marks=pytest.mark.long)])
def test_probing_while_other_threads_create_write_and_free(rounds):
    shared = [torch.randn(4, 6, requires_grad=True) for _ in range(8)]
    bases = [x.clone() for x in shared]
    views = [base[1:] for base in bases]
    start = threading.Barrier(PROBES + MAKERS)
    errors: list[BaseException] = []
    done = [0] * PROBES

    def probe(number: int) -> None:
        start.wait()
        for round_ in range(rounds):
            x = (shared, bases, views)[round_ % 3][(number + round_) % 8]
            record = C.read(x)
            assert record.impl.numel in (24, 18)
            assert record.storage.nbytes == 96
            if round_ % 20 == 0:
                report = tp.check({"shared": shared, "views": views})
                assert not report.findings
                assert len(report.to_json()) > 1000
            done[number] += 1

    def make(number: int) -> None:
        start.wait()
        for round_ in range(rounds):
            index = (number + round_) % 8
            with torch.no_grad():
                bases[index].mul_(1.0)  # the views over it become stale
            views[index] = bases[index][1:]
            (shared[index] * torch.randn(4, 6)).sum().backward()

    def run(body, number: int) -> None:
        try:
            body(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(probe, n)) for n in range(PROBES)]
    threads += [threading.Thread(target=run, args=(make, n)) for n in range(MAKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert done == [rounds] * PROBES


def test_labels_asked_for_by_many_threads():
    errors: list[BaseException] = []
    x = torch.ones(2)

    def ask(number: int) -> None:
        try:
            for round_ in range(200):
                tp.inspect(x, f"label {number} {round_}", quiet=True)
                tp.inspect([x, x], "shared", quiet=True)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)

    assert errors == []


_TRAIN_AND_ASK = """
import threading
import torch
import tensorplay as tp

model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])
done = threading.Event()

def train():
    while not done.is_set():
        model(torch.randn(16, 64)).sum().backward()
        model.zero_grad()

thread = threading.Thread(target=train)
thread.start()
beside = torch.ones(3)
try:
    for _ in range(30):
        {call}
finally:
    done.set()
    thread.join()
print("alive")
"""


@pytest.mark.parametrize(
    "call", ["tp.snapshot()", "tp.who_holds(beside)", "tp.list_shared_storages()", "tp.check(model)"]
)
def test_asking_while_another_thread_lets_go_of_gradients(call):
    # PyTorch destroys a gradient with the GIL released and clears the pointer after that: a crash ends the process.
    source = _TRAIN_AND_ASK.replace("{call}", call)
    run = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "alive\n"), run.stderr[-2000:]
