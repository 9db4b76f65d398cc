"""TP302, TP306 to TP309: each fires on its fault and is silent on what looks like it."""

from __future__ import annotations

import gc
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import tensorplay as tp
from tensorplay.selection import Config
from tests.helpers import KeepsOutput, collected_by_hand

LARGE = 10_000
KEPT: list[Any] = []


@pytest.fixture(autouse=True)
def _collected_by_hand() -> Iterator[None]:
    KEPT.clear()
    with collected_by_hand():
        yield
    KEPT.clear()


def left_by(make: Callable[[], Any]) -> list[Any]:
    with tp.leak_check(quiet=True) as check:
        make()
    return list(check.findings)


def loud(objs: Any) -> list[Any]:
    return [finding for finding in tp.check(objs).findings if finding.severity != "info"]


# -- TP302 ------------------------------------------------------------------------------------------------------------


def test_tp302_what_an_extension_keeps(cpp_owners):
    def make(way: str) -> None:
        getattr(cpp_owners, way)(torch.ones(LARGE))

    try:
        for way in ("hold_tensor", "hold_object"):
            (finding,) = left_by(lambda way=way: make(way))
            assert finding.code == "TP302"
            assert (finding.evidence["bytes"], finding.evidence["storages"]) == (4 * LARGE, 1)
    finally:
        cpp_owners.release()


def test_tp302_is_silent_on_what_c_code_is_making():
    begun, done = threading.Event(), threading.Event()

    def load(number: int) -> torch.Tensor:
        if number == 9:
            begun.set()
            done.wait()
        return torch.ones(LARGE)

    thread = threading.Thread(target=lambda: list(map(load, range(10))))
    with tp.leak_check(quiet=True) as check:
        thread.start()
        begun.wait()
    done.set()
    thread.join()
    assert check.growth.new_storages == 9
    assert not check.findings


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace")
def test_tp302_is_an_info_where_torchscript_hides_what_it_holds():
    with tp.leak_check(quiet=True) as check:
        KEPT.append(torch.jit.trace(nn.Linear(100, 100), torch.ones(1, 100)))
    assert {finding.severity for finding in check.findings} <= {"info"}


def test_tp302_is_silent_where_python_has_it_too(cpp_owners):
    def make() -> None:
        KEPT.append(torch.ones(LARGE))
        cpp_owners.hold_tensor(KEPT[0])

    try:
        assert left_by(make) == []
    finally:
        cpp_owners.release()


# -- TP306 ------------------------------------------------------------------------------------------------------------


class Linked:
    pass


class InputOnCtx(KeepsOutput):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.y = x
        return x.exp()


class Hooked(nn.Module):
    def __init__(self, refer: Callable[[Any], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(100, 100)
        me = refer(self)
        self.register_forward_hook(lambda *_: me.inner)


def by_list() -> None:
    loop: list[Any] = [torch.ones(LARGE)]
    loop.append(loop)


def by_attributes() -> None:
    a, b = Linked(), Linked()
    a.other, b.other = b, a  # type: ignore[attr-defined]
    a.x = torch.ones(LARGE)  # type: ignore[attr-defined]


def by_closure() -> None:
    x = torch.ones(LARGE)

    def again() -> Any:
        return x, again


def by_own_exception() -> None:
    x = torch.ones(LARGE)
    try:
        raise ValueError(x.shape)
    except ValueError as error:
        kept = error
    assert kept is not None


def by_tensor_attribute() -> None:
    x = torch.ones(LARGE)
    x.me = [x]  # type: ignore[attr-defined]


def by_gradient_of_gradient() -> None:
    x = torch.ones(LARGE, requires_grad=True)
    (x**3).sum().backward(create_graph=True)


@pytest.mark.parametrize(
    ("make", "cycle", "fix"),
    [
        (by_list, "a list[1] → a list again", "weak reference"),
        (by_attributes, "a Linked.other.other → a Linked again", "weak reference"),
        (by_closure, "function by_closure.<locals>.again → closure variable again → function", "weak reference"),
        (by_own_exception, "a ValueError → kept in by_own_exception", "delete the variable"),
        (by_tensor_attribute, "a list[0].me → a list again", "weak reference"),
        (
            lambda: KeepsOutput.apply(torch.ones(LARGE, requires_grad=True)),
            "a KeepsOutputBackward.y.grad_fn",
            "save_for_backward",
        ),
        (lambda: Hooked(lambda module: module), "_forward_hooks[", "weakref.proxy(self)"),
    ],
    ids=["list", "attributes", "closure", "exception", "tensor", "ctx", "hook"],
)
def test_tp306_prints_the_cycle_and_the_way_out(make, cycle, fix):
    (finding,) = left_by(make)

    assert finding.code == "TP306"
    assert cycle in finding.evidence["cycle"]
    assert fix in finding.fix
    assert finding.evidence["bytes"] + finding.evidence["indirect_bytes"] >= 4 * LARGE
    gc.collect()


def test_tp306_tells_direct_indirect_and_parameter_bytes():
    (on_ctx,) = left_by(lambda: KeepsOutput.apply(torch.ones(LARGE, requires_grad=True)))
    (hooked,) = left_by(lambda: Hooked(lambda module: module))

    assert (on_ctx.evidence["bytes"], on_ctx.evidence["indirect_bytes"]) == (4 * LARGE, 4 * LARGE)
    assert (hooked.evidence["bytes"], hooked.evidence["parameter_bytes"]) == (0, 4 * (100 * 100 + 100))


def test_tp306_counts_equal_cycles_as_one_finding():
    (finding,) = left_by(lambda: [by_list() for _ in range(5)])

    assert (finding.evidence["cycles"], finding.evidence["storages"]) == (5, 5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: InputOnCtx.apply(torch.ones(LARGE, requires_grad=True)),
        lambda: Hooked(weakref.proxy),
        lambda: [torch.ones(LARGE)],
        lambda: torch.ones(LARGE, requires_grad=True).exp().sum().backward(),
        lambda: nn.Sequential(nn.Linear(100, 100), nn.ReLU()),
    ],
    ids=["input on ctx", "weak hook", "list", "backward", "module"],
)
def test_tp306_is_silent_where_the_last_name_frees_all(make):
    assert [finding.code for finding in left_by(make) if finding.code == "TP306"] == []


# -- TP307, and training that is as it should be ----------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


def trained(loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor], **options: Any) -> Callable[[], None]:
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters())
    KEPT.append((model, optimizer))

    def step() -> None:
        loss_of(model, torch.ones(32, 64, **options)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_autocast(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).sum()


def offloaded(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        return model(x).sum()


def packed(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return model(x).sum()


HEALTHY: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "plain": lambda model, x: model(x).sum(),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False).sum(),
    "reentrant checkpoint": lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True).sum(),
    "autocast": with_autocast,
    "save_on_cpu": offloaded,
    "packed by hooks": packed,
}


@pytest.mark.parametrize("way", HEALTHY)
def test_healthy_training_is_silent(way):
    assert tp.leak_check(trained(HEALTHY[way]), steps=8, raises=True)


@pytest.mark.parametrize("way", HEALTHY)
def test_tp307_kept_losses_are_growth(way):
    def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = HEALTHY[way](model, x)
        KEPT.append(loss)
        return loss

    check = tp.leak_check(trained(loss_of), steps=8, quiet=True)

    assert [finding.code for finding in check.findings] == ["TP307"]


def test_tp307_is_an_info_where_one_tensor_gets_larger():
    def run() -> Any:
        with tp.leak_check(quiet=True) as check:
            for n in range(8):
                batch = torch.ones(1000, n + 1)
                check.step()
        return batch, check

    (finding,) = run()[1].findings
    assert (finding.code, finding.severity) == ("TP307", "info")
    assert finding.headline == "one tensor gets larger by 3.9 KiB each step"


def test_tp307_is_an_info_where_a_thousand_steps_stay_small_and_raises_nothing():
    check = tp.leak_check(lambda: KEPT.append(torch.ones(1)), steps=8, quiet=True, raises=True)
    (finding,) = check.findings
    assert (finding.code, finding.severity) == ("TP307", "info")
    assert finding.fix.startswith("keep .item() there")


def test_accumulation_and_averages_are_silent():
    model = Network()
    average = [parameter.detach().clone() for parameter in model.parameters()]
    KEPT.append((model, average))

    def step() -> None:
        for _ in range(2):
            model(torch.ones(8, 64)).sum().backward()
        with torch.no_grad():
            for mine, parameter in zip(average, model.parameters(), strict=True):
                mine.lerp_(parameter, 0.1)
        model.zero_grad(set_to_none=False)

    assert tp.leak_check(step, steps=8, raises=True)


def test_a_bounded_cache_is_silent():
    cache: dict[int, torch.Tensor] = {}
    KEPT.append(cache)
    calls = iter(range(1000))

    def step() -> None:
        cache[next(calls) % 3] = torch.ones(LARGE)

    assert tp.leak_check(step, steps=12, warmup=3, raises=True)


# -- TP308 ------------------------------------------------------------------------------------------------------------


def fail(values: Any) -> None:
    big = values
    raise RuntimeError(f"out of memory: {len(big)}")


def caught(call: Callable[..., Any], *args: Any) -> BaseException:
    try:
        call(*args)
    except RuntimeError as error:
        return error
    raise AssertionError


def fail_with(make: Callable[[], Any]) -> None:
    fail(make())


def test_tp308_names_the_frame_and_the_variable():
    log = [caught(fail_with, lambda: torch.ones(LARGE))]

    (finding,) = loud({"log": log})

    assert finding.code == "TP308"
    assert finding.evidence["bytes"] == 4 * LARGE
    assert finding.evidence["held_through"] == ["fail.big", "fail.values"]
    assert (finding.evidence["log_type"], finding.evidence["error"]) == ("RuntimeError", "log[0]")


def test_tp308_looks_into_containers_and_modules():
    error = caught(fail_with, lambda: [nn.Linear(100, 100), {"x": torch.ones(LARGE)}])

    (finding,) = loud([error])

    assert finding.evidence["storages"] == 3


def test_tp308_is_found_by_the_leak_check_too():
    (finding,) = left_by(lambda: KEPT.append(caught(fail_with, lambda: torch.ones(LARGE))))

    assert (finding.code, finding.evidence["held_through"]) == ("TP308", ["fail.values"]) or finding.evidence[
        "held_through"
    ] == ["fail.big"]


def chained() -> None:
    try:
        fail(torch.ones(LARGE))
    except RuntimeError:
        raise ValueError("retry") from None


def test_tp308_follows_what_an_exception_came_from():
    try:
        chained()
    except ValueError as error:
        KEPT.append(error)

    findings = [finding for finding in loud(KEPT) if finding.code == "TP308"]

    assert [finding.evidence["log_type"] for finding in findings] == ["RuntimeError"]


def test_tp308_counts_exceptions_kept_alike_as_one_finding():
    def run() -> None:
        KEPT.extend(caught(fail_with, lambda: torch.ones(LARGE)) for _ in range(20))

    found = [finding for finding in left_by(run) if finding.code == "TP308"]
    assert [(finding.evidence["errors"], finding.evidence["bytes"]) for finding in found] == [(20, 20 * 4 * LARGE)]
    (by_check,) = loud(KEPT)
    assert by_check.evidence["errors"] == 20


@pytest.mark.parametrize("code", ["TP308", "TP309"])
def test_nothing_found_is_no_finding_even_with_no_bytes_asked_for(code, monkeypatch):
    monkeypatch.setattr("tensorplay.leaks.lenient_config", lambda caller: Config(pinned_nbytes=0))
    error = caught(lambda: fail([3]))
    findings = left_by(lambda: KEPT.extend([error, torch.ones(3)]))
    assert code not in {finding.code for finding in findings}


def test_tp308_is_silent_while_others_have_the_tensors():
    mine = torch.ones(LARGE)

    assert loud([caught(fail, mine)]) == []


def test_tp308_is_silent_on_frames_that_run():
    batch = torch.ones(LARGE)
    try:
        raise RuntimeError(len(batch))
    except RuntimeError as error:
        found = loud([error])
    assert found == []
    assert len(batch) == LARGE


@pytest.mark.parametrize(
    "kept",
    [
        str,
        lambda error: error.with_traceback(None),
        lambda error: (traceback.clear_frames(error.__traceback__), error)[1],
        traceback.TracebackException.from_exception,
        lambda error: RuntimeError(str(error)),
    ],
    ids=["text", "no traceback", "cleared", "formatted", "anew"],
)
def test_tp308_is_silent_on_what_holds_no_frames(kept):
    log = [kept(caught(fail_with, lambda: torch.ones(LARGE)))]

    assert loud({"log": log}) == []
    assert left_by(lambda: KEPT.append(kept(caught(fail_with, lambda: torch.ones(LARGE))))) == []


def test_check_lists_what_an_exception_holds():
    error = caught(fail_with, lambda: torch.ones(LARGE))

    report = tp.check({"error": error})

    assert [record.name for record in report.records] == [report.records[0].name]
    assert (
        "error → big in fail (test_holding.py:" in " ".join([report.records[0].name, *report.records[0].also])
        or "error → values in fail (test_holding.py:" in report.records[0].name
    )
    assert sys.exc_info() == (None, None, None)


# -- TP309 ------------------------------------------------------------------------------------------------------------


def keep_outputs(model: nn.Module, *, remove: bool, detach: bool = True, clean: bool = False) -> None:
    def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        module.input = inputs[0].detach() if detach else inputs[0]
        module.output = output.detach() if detach else output

    hooks = [module.register_forward_hook(keep) for module in model]  # type: ignore[attr-defined]
    model(torch.ones(32, 64))
    for hook in hooks if remove else ():
        hook.remove()
    for module in model if clean else ():  # type: ignore[attr-defined]
        del module.input, module.output


@pytest.mark.parametrize("detach", [True, False])
@pytest.mark.parametrize("remove", [True, False])
def test_tp309_names_the_attributes_and_counts_the_hooks(remove, detach):
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    findings = left_by(lambda: keep_outputs(model, remove=remove, detach=detach))

    (finding,) = [finding for finding in findings if finding.code == "TP309"]
    assert finding.evidence["distinct_storages"] == 4
    assert finding.evidence["held_bytes"] == 4 * 32 * (64 + 256 + 256 + 8)
    assert finding.evidence["hooks_left"] == (0 if remove else 3)
    assert [name.rpartition("model")[2] for name in finding.evidence["tensor_attributes"]] == [
        f".{number}.{name}" for number in range(3) for name in ("input", "output")
    ]


class _Average:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: value.clone() for name, value in model.state_dict().items()}


def test_tp309_is_silent_on_what_is_set_on_one_module():
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    KEPT.append(model)

    def run() -> None:
        model.average = _Average(model)  # type: ignore[assignment]
        model[0].scale = torch.ones(LARGE)

    assert left_by(run) == []


def test_tp309_is_silent_where_the_attributes_are_deleted():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    assert left_by(lambda: keep_outputs(model, remove=True, clean=True)) == []


class Caching(nn.Module):
    """Keeps what its own code wants to keep."""

    def __init__(self, *, graph: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 256)
        self.graph = graph

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        self.last = out if self.graph else out.detach()
        return out


@pytest.mark.parametrize("graph", [True, False])
def test_tp309_what_a_class_keeps_by_its_own_code_counts_with_a_graph_alone(graph):
    model = Caching(graph=graph)

    found = left_by(lambda: model(torch.ones(32, 64)))

    assert [finding.code for finding in found] == (["TP309"] if graph else [])
    assert not found or found[0].evidence["tensor_attributes"][0].endswith("model.last")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.weight_norm(nn.Linear(64, 256)),
        lambda: nn.utils.spectral_norm(nn.Linear(64, 256)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 256)),
        lambda: nn.BatchNorm1d(64),
        lambda: nn.Linear(64, 256),
    ],
    ids=["weight_norm", "spectral_norm", "parametrized", "batch_norm", "linear"],
)
def test_tp309_is_silent_on_what_modules_are_made_of(make):
    def run() -> None:
        KEPT.append(make())
        KEPT[0](torch.ones(32, 64))

    assert left_by(run) == []
