"""track(): every figure exact on scripts with known answers, beside the profiler's events, and in odd surroundings."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import tensorplay as tp
from tensorplay._native import C
from tensorplay.tracking import Tracker, TrackReport


@pytest.fixture(autouse=True)
def _nothing_goes_on():
    yield
    went_on = C.track_is_on()
    C.track_stop()
    assert not went_on


def site_of(report: TrackReport, op: str) -> Any:
    (found,) = [site for site in report.sites if site.op == op]
    return found


# -- what came and went -------------------------------------------------------------------------------------------


def test_blocks_bytes_and_lines_are_exact():
    with tp.track() as tracker:
        kept = [torch.empty(100) for _ in range(3)]
        gone = torch.ones(50, dtype=torch.float64)
        del gone

    found = tracker.report().tracked
    assert (found.allocs, found.alloc_nbytes) == (4, 3 * 400 + 400)
    assert (found.frees, found.freed_nbytes) == (1, 400)
    assert (found.live_blocks, found.live_nbytes) == (3, 1200)
    assert (found.peak_nbytes, found.lost, found.running) == (1600, 0, False)
    empty = site_of(tracker.report(), "aten::empty")
    assert (empty.allocs, empty.tensors, empty.nbytes_at_peak) == (3, 3, 1200)
    assert empty.where.startswith(f"{os.path.relpath(__file__)}:")
    assert empty.where.endswith(" in test_blocks_bytes_and_lines_are_exact") or "<listcomp>" in empty.where
    assert site_of(tracker.report(), "aten::ones").live_nbytes == 0
    assert len(kept) == 3


def test_the_peak_says_who_had_what():
    with tp.track() as tracker:
        first = torch.empty(1000)
        second = torch.zeros(500)
        del first
        third = torch.full((100,), 1.0)

    report = tracker.report()
    assert report.peak_nbytes == 6000
    at_peak = {site.op: site.nbytes_at_peak for site in report.sites}
    assert at_peak == {"aten::empty": 4000, "aten::zeros": 2000, "aten::full": 0}
    assert report.live_nbytes == second.nbytes + third.nbytes
    assert [site.op for site in report.sites] == ["aten::empty", "aten::zeros", "aten::full"]


def test_views_make_tensors_and_no_blocks():
    base = torch.ones(10)
    with tp.track() as tracker:
        views = [base[1:], base.view(2, 5), base.t()]

    found = tracker.report().tracked
    assert (found.allocs, found.tensors, found.reused) == (0, 3, 1.0)
    assert len(views) == 3


def test_what_was_there_before_is_told_apart():
    before = torch.ones(100)
    with tp.track():
        held = torch.ones(100)
    with tp.track() as tracker:
        del before, held

    found = tracker.report().tracked
    assert (found.allocs, found.frees, found.frees_of_older) == (0, 0, 1)  # of the one that was seen to come


def test_a_training_step_equals_the_profilers_memory_events():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(8, 16), torch.randn(8, 4)

    def steps() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, tp.track() as tracker:
        steps()
    events = [event.nbytes() for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    found = tracker.report().tracked

    assert found.alloc_nbytes == sum(nbytes for nbytes in events if nbytes > 0)
    assert found.allocs == sum(nbytes > 0 for nbytes in events)
    # Gradients of before the window are none here: all frees are of blocks that came in it.
    assert found.freed_nbytes == -sum(nbytes for nbytes in events if nbytes < 0)
    assert sum(site.alloc_nbytes for site in found.sites) == found.alloc_nbytes
    assert sum(site.live_nbytes for site in found.sites) == found.live_nbytes
    assert sum(site.nbytes_at_peak for site in found.sites) == found.peak_nbytes


def test_lifetimes_add_up():
    with tp.track() as tracker:
        for _ in range(20):
            torch.ones(10)

    found = tracker.report().tracked
    assert sum(one.blocks for one in found.lifetimes) == found.frees == 20
    assert sum(one.nbytes for one in found.lifetimes) == 20 * 40
    assert all(0 < one.from_seconds < found.seconds for one in found.lifetimes)


# -- writes and copies --------------------------------------------------------------------------------------------


def test_writes_in_place():
    x = torch.ones(10)
    with tp.track() as tracker:
        x.add_(1)
        x[2:4].mul_(2)
        torch.nn.init.zeros_(x)
        torch._foreach_add_([x, x.clone()], 1.0)

    report = tracker.report()
    writes = {site.op: site.writes for site in report.sites if site.writes}
    assert writes == {"aten::add_": 1, "aten::mul_": 1, "aten::zero_": 1, "aten::_foreach_add_": 2}
    assert report.tracked.writes == 5


def test_copies_and_what_copies_nothing():
    x = torch.ones(10, 10)
    with tp.track() as tracker:
        x.contiguous()  # is contiguous
        x.to(torch.float32)  # is of that type
        x.reshape(100)  # a view
        x.t().contiguous()
        x.to(torch.float64)
        x.clone()
        torch.cat([x, x])
        torch.empty(10, 10).copy_(x)

    found = tracker.report().tracked
    copies = {site.op: (site.copies, site.copied_nbytes) for site in found.sites if site.copies}
    assert copies == {
        "aten::contiguous": (1, 400),
        "aten::to": (1, 800),
        "aten::clone": (1, 400),
        "aten::cat": (1, 800),
        "aten::copy_": (1, 400),
    }
    assert (found.copies, found.copied_nbytes) == (5, 2800)
    assert 0 < found.copying_seconds < found.seconds
    assert all(0 < site.longest_copy_seconds <= site.copying_seconds for site in found.sites if site.copies)


def test_an_operator_that_raises_leaves_no_trace():
    x = torch.ones(3)
    with tp.track() as tracker:
        with pytest.raises(RuntimeError):
            x.add_(torch.ones(4))
        x.mul_(2)

    report = tracker.report()
    assert {site.op: site.writes for site in report.sites if site.writes} == {"aten::mul_": 1}
    assert site_of(report, "aten::ones").allocs == 1


# -- surroundings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes(mode):
    one = torch.ones(10)
    with tp.track() as tracker:
        with mode():
            kept = [torch.ones(10) + one]
        kept.append(torch.zeros(5))  # leaving the mode puts back what the thread's keys were

    report = tracker.report()
    assert {site.op: site.allocs for site in report.sites} == {"aten::ones": 1, "aten::add": 1, "aten::zeros": 1}
    assert len(kept) == 2


def test_transforms_and_compiled_functions():
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() ** 2).sum()

    plain = [torch.func.grad(f)(torch.ones(5)), torch.func.vmap(f)(torch.ones(2, 5))]
    compiled = torch.compile(f, backend="eager")
    with tp.track() as tracker:
        tracked = [torch.func.grad(f)(torch.ones(5)), torch.func.vmap(f)(torch.ones(2, 5))]
        result = compiled(torch.ones(5))

    assert all(torch.equal(one, other) for one, other in zip(plain, tracked, strict=True))
    assert torch.equal(result, f(torch.ones(5)))
    assert tracker.report().tracked.allocs > 5


def test_every_threads_blocks_are_seen():
    one = torch.ones(10)

    def work() -> None:
        for _ in range(200):
            torch.ones(10) + one

    with tp.track() as tracker:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = tracker.report().tracked
    assert (found.allocs, found.frees, found.live_blocks, found.lost) == (1600, 1600, 0, 0)
    # A thread's first block comes before the thread is followed: it has no operator.
    adds = sum(site.allocs for site in found.sites if site.op == "aten::add")
    assert 796 <= adds <= 800


def test_blocks_that_other_threads_let_go_of():
    made: list[torch.Tensor] = []
    with tp.track() as tracker:
        thread = threading.Thread(target=lambda: made.extend(torch.ones(10) for _ in range(50)))
        thread.start()
        thread.join()
        made.clear()

    found = tracker.report().tracked
    assert (found.allocs, found.frees, found.live_nbytes) == (50, 50, 0)


def test_workers_of_a_data_loader():
    data = DataLoader(TensorDataset(torch.arange(64.0).reshape(16, 4)), batch_size=4, num_workers=2)
    with tp.track() as tracker:
        total = sum(float(batch.sum()) for (batch,) in data)
        kept = torch.ones(100)

    assert total == sum(range(64))
    found = tracker.report().tracked
    assert found.lost == 0
    assert found.live_nbytes >= kept.nbytes


def test_a_forked_child_tracks_on_its_own():
    with tp.track() as tracker:
        before = torch.ones(100)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                mine = torch.ones(50)
                found = tracker.report().tracked
                code = 0 if (found.allocs, found.live_nbytes) == (2, before.nbytes + mine.nbytes) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert tracker.report().tracked.allocs == 1


def test_inspect_reads_tracked_memory_as_any_other():
    before = torch.ones(8)
    with tp.track():
        during = torch.ones(8)
    after = torch.ones(8)

    layers = [tp.inspect(one, quiet=True).to_dict()["records"][0] for one in (before, during, after)]
    for layer in ("storage", "data", "impl"):
        told = [{key: value for key, value in one[layer].items() if type(value) is not int} for one in layers]
        assert told[0] == told[1] == told[2]
    assert layers[1]["data"]["origin"] == "cpu_allocator"
    assert not tp.check([before, during, after]).findings


def test_blocks_outlive_the_tracking():
    with tp.track():
        kept = [torch.ones(1000) for _ in range(10)]
    kept[0].resize_(4000)
    kept[1].untyped_storage().resize_(0)
    assert torch.equal(kept[2], torch.ones(1000))
    del kept
    gc.collect()
    with tp.track() as again:
        torch.ones(5)
    assert (again.report().tracked.allocs, again.report().tracked.frees) == (1, 1)


def test_convolutions_give_their_scratch_memory_back():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        expected = model(x)
        with tp.track() as tracker:
            result = model(x)
            got = torch.equal(result, expected)
            del result
        # What was got while nobody watched is given back while somebody does, and the other way round.
        C.track_start(True, 30)
        again = model(x)
        C.track_stop()

    assert got
    assert torch.equal(again, expected)
    assert tracker.report().tracked.live_nbytes == 0


# -- the call -----------------------------------------------------------------------------------------------------


def test_one_at_a_time():
    with tp.track(), pytest.raises(RuntimeError, match="one track\\(\\) in a process at a time"):
        tp.track().start()
    tracker = tp.track()
    with pytest.raises(RuntimeError, match="nothing was tracked yet"):
        tracker.report()
    with pytest.raises(RuntimeError, match="nothing was tracked yet"):
        tracker.stop()
    assert repr(tracker) == "<tensorplay.Tracker: not started>"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"stacks": 1}, TypeError, "stacks=\\) takes True or False, got int"),
        ({"depth": "9"}, TypeError, "depth=\\) takes a number of frames, got str"),
        ({"depth": 0}, ValueError, "takes 1 to 64 frames, got 0"),
        ({"depth": 65}, ValueError, "takes 1 to 64 frames, got 65"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        tp.track(**options)


def test_start_stop_and_report_between():
    tracker = tp.track().start()
    kept = torch.ones(10)
    running = tracker.report()
    assert (running.tracked.running, running.tracked.allocs) == (True, 1)
    more = torch.ones(10)
    ended = tracker.stop()

    assert (ended.tracked.running, ended.tracked.allocs, tracker.stop() is ended) == (False, 2, True)
    assert tracker.findings == ()
    assert kept.shape == more.shape
    again = tracker.start()
    assert again is tracker
    assert tracker.stop().tracked.allocs == 0


def test_as_a_decorator():
    reports = []

    @tp.track
    def plain() -> int:
        torch.ones(3)
        return 4

    tracker = tp.track(stacks=False)

    @tracker
    async def later() -> None:
        torch.ones(3)
        await asyncio.sleep(0)
        torch.ones(3)

    assert plain() == 4
    asyncio.run(later())
    reports.append(tracker.report())
    assert reports[0].tracked.allocs == 2
    with pytest.raises(ZeroDivisionError), tp.track() as failed:
        raise ZeroDivisionError
    assert failed.report().tracked.allocs == 0


def test_without_stacks():
    with tp.track(stacks=False) as tracker:
        torch.ones(3)

    (site,) = tracker.report().sites
    assert (site.op, site.where, site.stack) == ("aten::ones", "", ())


def test_depth_bounds_the_stack():
    def deep(n: int) -> torch.Tensor:
        return torch.ones(3) if n == 0 else deep(n - 1)

    with tp.track(depth=4) as tracker:
        deep(20)

    (site,) = tracker.report().sites
    assert len(site.stack) == 4
    assert all(" in test_depth_bounds_the_stack.<locals>.deep" in line or " in deep" in line for line in site.stack)


def test_stacks_name_code_that_is_gone():
    source = "import torch\ndef made():\n    return torch.ones(7)\n"
    with tp.track() as tracker:
        for number in range(30):
            space: dict[str, Any] = {}
            exec(compile(source, f"<made {number}>", "exec"), space)
            space["made"]()
            del space

    lines = {site.stack[0] for site in tracker.report().sites}
    assert lines == {f"<made {number}>:3 in made" for number in range(30)}


def test_reports_are_kept_as_others_are():
    with tp.track() as tracker:
        kept = torch.ones(100)
    report = tracker.report()

    assert repr(report) == "<tensorplay.TrackReport: 1 block, peak 400 B>"
    assert "aten::ones" in str(report)
    assert str(report).splitlines()[-1] == "1 block came, 1 block alive, peak 400 B: no findings"
    for again in (TrackReport.from_json(report.to_json()), pickle.loads(pickle.dumps(report))):
        assert again.tracked == report.tracked
    assert "aten::ones" in report.html()
    assert kept.nbytes == 400


def test_a_thousand_starts_leave_nothing():
    for _ in range(20):
        with tp.track():
            torch.ones(3)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(1000):
        C.track_start(True, 30)
        torch.ones(3)
        C.track_stop()
    gc.collect()

    assert len(gc.get_objects()) - before < 100
    assert threading.active_count() < 20


ALONE = """
import torch
import tensorplay as tp
from tensorplay._native import C
x = torch.ones(3)
tp.inspect(x, quiet=True)
tp.check(x)
before = torch._C._dispatch_has_kernel_for_dispatch_key("aten::add.Tensor", "CPU")
assert not C.track_is_on()
assert "TESTING_ONLY_GenericMode" not in str(torch._C._dispatch_tls_local_include_set())
with tp.track():
    assert "TESTING_ONLY_GenericMode" in str(torch._C._dispatch_tls_local_include_set())
    y = x + 1
assert "TESTING_ONLY_GenericMode" not in str(torch._C._dispatch_tls_local_include_set())
print("fine")
"""


def test_nothing_is_registered_before_the_first_use_and_nothing_left_in_the_threads_keys():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "fine", "")


def test_it_ends_with_the_process_while_it_runs():
    code = (
        "import torch, threading, tensorplay as tp\n"
        "t = tp.track().start()\n"
        "keep = [torch.ones(10) for _ in range(100)]\n"
        "made, never = threading.Event(), threading.Event()\n"
        "work = lambda: ([torch.ones(10) for _ in range(1000)], made.set(), never.wait())\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "made.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_tracker_is_one_of_the_public_names():
    assert type(tp.track()) is Tracker


# -- backward -----------------------------------------------------------------------------------------------------


def test_what_backward_does_is_told_of_the_forward_line():
    weight = torch.ones(10, 10, requires_grad=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sigmoid()

    with tp.track() as tracker:
        hidden = forward(torch.ones(4, 10))
        hidden.sum().backward()

    sites = tracker.report().sites
    backward = [site for site in sites if site.backward]
    assert {site.op for site in backward} >= {"aten::mm", "aten::sigmoid_backward"}
    product = next(site for site in backward if site.op == "aten::mm")
    assert product.where.endswith("in test_what_backward_does_is_told_of_the_forward_line.<locals>.forward")
    assert product.where == next(site for site in sites if site.op == "aten::matmul").where
    assert product.live_nbytes == weight.grad.nbytes
    # What belongs to no node is of the line that called backward.
    assert not any("_engine_run_backward" in site.stack[0] for site in backward)


def test_a_backward_of_a_graph_from_before_is_of_the_line_that_runs_it():
    weight = torch.ones(10, requires_grad=True)
    loss = weight.sigmoid().sum()
    with tp.track() as tracker:
        loss.backward()

    sites = [site for site in tracker.report().sites if site.allocs]
    assert not any(site.backward for site in sites)
    assert all("in test_a_backward_of_a_graph_from_before" in site.where for site in sites if site.stack)


def test_a_second_backward_and_a_recomputed_forward():
    weight = torch.ones(10, requires_grad=True)
    with tp.track() as tracker:
        (grad,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        grad.sum().backward()
        torch.utils.checkpoint.checkpoint(torch.sigmoid, weight, use_reentrant=False).sum().backward()

    found = tracker.report().tracked
    assert found.lost == 0
    assert torch.allclose(weight.grad, 6 * torch.ones(10) + torch.sigmoid(weight) * (1 - torch.sigmoid(weight)))
    assert sum(site.alloc_nbytes for site in found.sites) == found.alloc_nbytes


# -- what is recorded ---------------------------------------------------------------------------------------------


def test_inspect_says_where_memory_came_from_and_what_wrote_to_it():
    before = torch.ones(4)
    with tp.track():
        x = torch.ones(4)
        x.add_(1)
        view = x[1:]
        report = tp.inspect(view, quiet=True)
        old = tp.inspect(before, quiet=True).records[0].history
        several = tp.inspect({"x": x, "before": before}, quiet=True)

    history = report.records[0].history
    assert (history.op, history.writes, history.last_write_op, history.tensors) == ("aten::ones", 1, "aten::add_", 2)
    assert history.where.endswith("in test_inspect_says_where_memory_came_from_and_what_wrote_to_it")
    assert 0 < history.last_write_seconds < history.age_seconds < 60
    assert "made by aten::ones at " in str(report)
    assert "written 1 time, last by aten::add_ at " in str(report)
    assert "(recorded)" in str(report)
    assert old is None
    assert [record.history is None for record in several.records] == [False, True]
    assert tp.inspect(x, quiet=True).records[0].history is None  # nobody watches now: it may be another block's
    assert tp.Report.from_json(report.to_json()).records[0].history == history


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("frequency", self.computed(), persistent=False)

    @staticmethod
    def computed() -> torch.Tensor:
        return 1.0 / torch.arange(1, 5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_buffer_that_nothing_wrote_is_told_of_while_it_is_tracked(deterministic):
    state = Rotary().state_dict()
    torch.use_deterministic_algorithms(deterministic)  # then empty() fills what it makes, which writes no value
    try:
        with tp.track():
            with torch.device("meta"):
                model = Rotary()
            model.to_empty(device="cpu")
            ahead = tp.validate_state_dict_load(model, state)
            model.load_state_dict(state)
            (finding,) = tp.validate_state_dict_load(model, state).findings
            model.frequency.copy_(Rotary.computed())
            assert not tp.validate_state_dict_load(model, state).findings
    finally:
        torch.use_deterministic_algorithms(False)

    assert (finding.code, finding.where.name) == ("TP402", "frequency")
    assert finding.evidence["non_persistent"] == ["frequency"]
    assert finding.evidence["in_checkpoint"] is False
    assert finding.evidence["allocated_by"] == "aten::empty_like"
    # What a load that is still to come will write is nothing to tell.
    assert [one.evidence["never_written"] for one in ahead.findings if one.code == "TP402"] == [["frequency"]]


def test_memory_from_before_or_with_values_is_never_unwritten():
    before = nn.Linear(2, 2)
    with tp.track():
        built = nn.Linear(2, 2)
        copied = nn.Linear(2, 2).to(torch.float64)
        for model in (before, built, copied):
            found = tp.validate_state_dict_load(model, {}, strict=False).findings
            assert "TP402" not in {one.code for one in found}
