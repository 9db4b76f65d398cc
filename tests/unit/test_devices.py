"""audit_device_consistency(): everything that modules and optimizers hold, and nothing that is where it belongs."""

from __future__ import annotations

import asyncio
import collections
import functools
import gc
import json
import pickle
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

import tensorplay as tp
from tests.rules.test_false_alarms import MODELS


def codes(report: Any) -> list[str]:
    return [finding.code for finding in report.findings]


def moved(build: Any) -> nn.Module:
    """A linear layer with something more, moved to another device."""
    model = nn.Linear(2, 2)
    build(model)
    return model.to("meta")


class Helper:
    """A plain object that holds a tensor."""

    def __init__(self) -> None:
        self.table = torch.ones(2)


def hook_with(tensor: torch.Tensor) -> Any:
    def hook(module: nn.Module, inputs: Any) -> None:
        tensor.sum()

    return hook


LEFT = {
    "attribute": (lambda m: setattr(m, "scale", torch.ones(2)), "model.scale"),
    "list": (lambda m: setattr(m, "scales", [torch.ones(2)]), "model.scales[0]"),
    "tuple": (lambda m: setattr(m, "scales", (1, torch.ones(2))), "model.scales[1]"),
    "dict": (lambda m: setattr(m, "scales", {"a": torch.ones(2)}), "model.scales['a']"),
    "ordered dict": (lambda m: setattr(m, "scales", collections.OrderedDict(a=torch.ones(2))), "model.scales['a']"),
    "set": (lambda m: setattr(m, "scales", {torch.ones(2)}), "model.scales[0]"),
    "nested": (lambda m: setattr(m, "scales", [{"a": (torch.ones(2),)}]), "model.scales[0]['a'][0]"),
    "object": (lambda m: setattr(m, "helper", Helper()), "model.helper.table"),
    "namespace": (lambda m: setattr(m, "state", SimpleNamespace(mean=torch.ones(2))), "model.state.mean"),
    "module in a list": (lambda m: setattr(m, "extra", [nn.Linear(2, 2)]), "model.extra[0].weight"),
    "hook's closure": (
        lambda m: m.register_forward_pre_hook(hook_with(torch.ones(2))),
        "→ variable tensor",
    ),
    "hook of an object": (lambda m: m.register_forward_hook(Watcher().look), "table"),
    "deque": (lambda m: setattr(m, "scales", collections.deque([torch.ones(2)])), "model.scales[0]"),
    "object with slots": (lambda m: setattr(m, "helper", Slotted()), "model.helper.table"),
    "objects in a list of an object": (
        lambda m: setattr(m, "cache", SimpleNamespace(layers=[Helper(), Slotted()])),
        "model.cache.layers[0].table",
    ),
    "partial": (lambda m: setattr(m, "call", functools.partial(torch.add, torch.ones(2))), "model.call[0]"),
    "hook that is a partial": (
        lambda m: m.register_forward_pre_hook(functools.partial(lambda table, *_: None, torch.ones(2))),
        "_forward_pre_hooks",
    ),
    "forward that was replaced": (lambda m: setattr(m, "forward", hook_with(torch.ones(2))), "→ variable tensor"),
    "hook of a parameter": (
        lambda m: m.weight.register_post_accumulate_grad_hook(hook_with(torch.ones(2))),
        "model.weight → hook",
    ),
    "attribute of a parameter": (lambda m: setattr(m.weight, "main_copy", torch.ones(2)), "model.weight.main_copy"),
}


class Slotted:
    """The same without a dictionary."""

    __slots__ = ("table", "unset")

    def __init__(self) -> None:
        self.table = torch.ones(2)


class Watcher:
    def __init__(self) -> None:
        self.table = torch.ones(2)

    def look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self.table.sum()


@pytest.mark.parametrize("way", LEFT)
def test_tp404_whatever_a_module_holds_without_registering_it_is_left_behind(way):
    build, name = LEFT[way]
    if "of a parameter" in way:  # the move makes another parameter
        model = nn.Linear(2, 2).to("meta")
        build(model)
    else:
        model = moved(build)
    (finding,) = tp.audit_device_consistency(model).findings
    assert (finding.code, finding.severity) == ("TP404", "warning")
    assert name in finding.where.name
    assert finding.evidence["plain_attr_devices"] == ["cpu"] * len(finding.evidence["tensors"])
    several = {"module in a list": 24, "objects in a list of an object": 16}
    assert finding.evidence["left_bytes"] == several.get(way, 8)
    assert codes(tp.check({"model": model})) == ["TP401", "TP404"]  # it is on meta
    still = nn.Linear(2, 2)
    build(still)
    assert codes(tp.audit_device_consistency(still)) == []


RIGHT = {
    "a generator's state": lambda m: setattr(m, "rng", torch.get_rng_state()),
    "a hook of state dicts": lambda m: m.register_state_dict_post_hook(hook_with(torch.ones(2))),
    "data": lambda m: setattr(m, "data", TensorDataset(torch.ones(3))),
    "a loader": lambda m: setattr(m, "loader", DataLoader(TensorDataset(torch.ones(3)))),
    "registered too": lambda m: (m.register_buffer("b", torch.ones(2)), setattr(m, "again", [m.b]))[0],
    "a number": lambda m: setattr(m, "scale", torch.tensor(2.0)),
    "nothing": lambda m: setattr(m, "scales", [None, 1, "a", (), {}, torch.float32]),
    "a module twice": lambda m: (m.add_module("child", nn.Linear(2, 2)), setattr(m, "alias", [m.child])),
    "itself": lambda m: setattr(m, "me", [m]),
    "a function of the module": lambda m: setattr(m, "call", lambda: m.weight),
    "a weak reference": lambda m: setattr(m, "ref", weakref.ref(m)),
    "a class": lambda m: setattr(m, "kind", Helper),
}


@pytest.mark.parametrize("way", RIGHT)
def test_tp404_is_silent_on_what_need_not_move(way):
    model = nn.Linear(2, 2)
    RIGHT[way](model)
    kept = getattr(model, "again", None)
    model.to("meta")
    if kept is not None:
        model.again = [model.b]
    assert codes(tp.audit_device_consistency(model)) == []


def test_tp404_is_one_finding_for_one_line_of_code_in_many_layers():
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    for layer in layers:
        layer.mask = torch.ones(2)
    layers.to("meta")
    (finding,) = tp.audit_device_consistency(layers).findings
    assert finding.where.name == "layers.0.mask"
    assert len(finding.evidence["tensors"]) == 5


def test_tp404_a_tensor_that_the_class_has():
    class Scaled(nn.Linear):
        scale = torch.ones(2)

    model = nn.Sequential(Scaled(2, 2), Scaled(2, 2)).to("meta")
    (finding,) = tp.audit_device_consistency(model).findings
    assert (finding.code, finding.where.name) == ("TP404", "model.0.scale")


def test_a_module_in_a_list_that_is_handed_in_too_is_its_own_root():
    student, teacher = nn.Linear(2, 2).to("meta"), nn.Linear(2, 2)
    student.teacher = [teacher]
    assert codes(tp.audit_device_consistency([student, teacher])) == []
    for named in ({"s": student, "t": teacher}, {"t": teacher, "s": student}):
        assert "TP404" not in codes(tp.check(named))
    assert "TP404" in codes(tp.check({"s": student}))


def test_an_object_that_holds_nothing_is_left_as_it_is():
    class Empty:
        pass

    model = nn.Linear(2, 2)
    model.empty = Empty()
    model.empty.number = 3
    before = len(gc.get_referents(model.empty))
    tp.audit_device_consistency(model)
    assert len(gc.get_referents(model.empty)) == before


def test_tp404_names_what_has_the_same_shape():
    model = nn.Module()
    model.register_buffer("table", torch.ones(3))
    model.tables = [model.table]
    (finding,) = tp.audit_device_consistency(model.to("meta")).findings
    assert finding.evidence["same_shape_as"] == ["table"]
    assert "the module's table has their shape" in finding.subject


def test_a_result_that_was_kept_is_an_info():
    model = nn.Linear(2, 2)
    model.last = model(torch.ones(1, 2))
    (finding,) = tp.audit_device_consistency(model.to("meta")).findings
    assert (finding.code, finding.severity) == ("TP404", "info")


def test_a_part_without_memory_is_compared_with_the_rest():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).to("meta"))
    model[1].table = torch.ones(2)
    assert codes(tp.audit_device_consistency(model)) == ["TP401"]  # the part is told, and the table fits the rest


def test_offloaded_modules_are_named_and_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("meta")
    model[0]._hf_hook = SimpleNamespace(weights_map={"weight": torch.ones(2, 2)})
    model[0].table = torch.ones(2)
    audit = tp.audit_device_consistency(model)
    assert codes(audit) == []
    assert audit.placement.offloaded == 3
    assert "3 tensors of modules with an offload hook: moved as needed" in str(audit)


def stepped(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


def moved_in_place(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("amsgrad", [False, True])
def test_tp406_state_that_did_not_move(amsgrad):
    model = nn.Linear(2, 2)
    optimizer = stepped(model, amsgrad=amsgrad)
    assert codes(tp.audit_device_consistency(model, optimizer)) == []
    moved_in_place(model)
    (finding,) = tp.audit_device_consistency(model, optimizer).findings
    keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    assert (finding.code, finding.where.name) == ("TP406", "optimizer.state[model.weight].exp_avg")
    assert finding.evidence["wrong_device"] == keys * 2
    assert (finding.evidence["param_device"], finding.evidence["state_device"]) == ("meta", "cpu")
    assert codes(tp.check({"model": model, "optimizer": optimizer})) == ["TP401", "TP406"]  # it is on meta
    for parameter, state in optimizer.state.items():
        state.update({key: value.to(parameter.device) for key, value in state.items() if key != "step"})
    assert codes(tp.audit_device_consistency(model, optimizer)) == []


def test_tp406_looks_into_containers_and_groups():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moved_in_place(model)
    optimizer.state[model.weight]["history"] = [torch.ones(2), {"deep": torch.ones(3)}]
    optimizer.param_groups[0]["scale"] = torch.ones(4)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)  # a number
    (finding,) = tp.audit_device_consistency(model, optimizer).findings
    assert sorted(finding.evidence["tensors"]) == [
        "optimizer.param_groups[0].scale",
        "optimizer.state[model.weight].history[0]",
        "optimizer.state[model.weight].history[1].deep",
    ]


def test_tp408_a_module_of_two_devices():
    class OnGpu(torch.Tensor):
        __torch_dispatch__ = classmethod(lambda *args: NotImplemented)

        def __new__(cls, size: int) -> OnGpu:
            return torch.Tensor._make_wrapper_subclass(cls, (size,), device="cuda:0")

    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    for norm in model[:2]:
        norm.running_mean = OnGpu(2)
    (finding,) = tp.audit_device_consistency(model).findings
    assert (finding.code, finding.evidence["devices"]) == ("TP408", ["cpu", "cuda:0"])
    assert finding.evidence["modules"] == ["model.0", "model.1"]
    spread = nn.Sequential(nn.Linear(2, 2), nn.Module())
    spread[1].register_buffer("table", OnGpu(2))
    assert codes(tp.audit_device_consistency(spread)) == []  # layer by layer is how a model is spread
    assert codes(tp.audit_device_consistency(nn.Sequential(nn.BatchNorm1d(2)).to("meta"))) == []


def test_tp111_needs_real_tensors_beside_and_a_mode_that_has_ended():
    with FakeTensorMode():
        fake = nn.Linear(2, 2)
        cached = torch.ones(2)
    assert codes(tp.audit_device_consistency(fake)) == []
    model = nn.Linear(2, 2)
    model.cache = cached
    (finding,) = tp.audit_device_consistency(model).findings
    assert (finding.code, finding.evidence["fake"], finding.evidence["real"]) == ("TP111", 1, 2)
    with cached.fake_mode:
        assert codes(tp.audit_device_consistency(model)) == []


def test_tp410_a_body_beside_its_local_tensor():
    class Sharded(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            raise AssertionError("the audit asked")

    def build(device: str) -> nn.Module:
        local = torch.ones(4)
        body = torch.Tensor._make_subclass(Sharded, local if device == "cpu" else torch.ones(4, device=device))
        body._local_tensor = local
        module = nn.Module()
        module.weight = nn.Parameter(body, requires_grad=False)
        if not hasattr(module.weight, "_local_tensor"):
            module.weight._local_tensor = body._local_tensor
        return module

    audit = tp.audit_device_consistency(build("meta"))
    assert audit.placement.answering == 1
    assert "1 tensor of classes that answer .device in Python: not asked" in str(audit)
    assert tp.audit_device_consistency(nn.Linear(2, 2)).placement.answering == 0
    (finding,) = audit.findings
    assert finding.code == "TP410"
    assert (finding.evidence["outer_device"], finding.evidence["local_device"]) == ("meta", "cpu")
    assert codes(tp.audit_device_consistency(build("cpu"))) == []


def test_tp110_memory_that_a_producer_mislabels():
    import ctypes

    def exported(kind: int) -> torch.Tensor:
        capsule = torch.ones(4).__dlpack__()
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(address(capsule, b"dltensor") + 8).value = kind
        return torch.utils.dlpack.from_dlpack(capsule)

    x = exported(8)
    (finding,) = [one for one in tp.check({"x": x}).findings if one.severity != "info"]
    assert (finding.code, finding.evidence["driver"], finding.evidence["data_device"]) == ("TP110", "absent", "mps:0")
    assert "heap" in finding.evidence["mapping"] or "memory" in finding.evidence["mapping"]
    assert [one.code for one in tp.check({"x": exported(1)}).findings if one.severity != "info"] == []
    model = nn.Module()
    model.register_buffer("table", x)
    assert "TP110" in codes(tp.audit_device_consistency(model))


# -- the call -----------------------------------------------------------------------------------------------------


def test_the_table_counts_everything_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    audit = tp.audit_device_consistency(model, optimizer)
    rows = {(row.role, row.device): (row.tensors, row.nbytes) for row in audit.placement.rows}
    assert rows == {
        ("parameter", "cpu"): (4, 40),
        ("gradient", "cpu"): (4, 40),
        ("buffer", "cpu"): (3, 24),
        ("state", "cpu"): (12, 96),
    }
    assert audit.placement.modules == 3
    assert "3 modules, 23 tensors on cpu: no findings" in str(audit)
    assert json.loads(audit.to_json())["placement"]["modules"] == 3
    assert "<title>TensorPlay: what lies where in model" in audit.html()
    assert repr(audit) == "<tensorplay.DeviceAudit: 3 modules, 0 findings>"


def test_a_context_tells_what_the_code_within_brought_about():
    model = nn.Linear(2, 2)
    with tp.audit_device_consistency(model) as audit:
        assert codes(audit) == []
        model.table = torch.ones(2)
        model.to("meta")
    assert codes(audit) == ["TP404"]
    assert audit.before is not None
    assert codes(audit.before) == []


def test_the_calls_that_lead_there_are_told():
    def train() -> Any:
        return step()

    def step() -> Any:
        with tp.audit_device_consistency(nn.Linear(2, 2)) as audit:
            pass
        return audit

    stack = train().placement.stack
    assert [call.rpartition(" in ")[2] for call in stack[:3]] == [
        "step",
        "train",
        "test_the_calls_that_lead_there_are_told",
    ]
    assert stack[0].startswith("tests/unit/test_devices.py:")
    assert "asked in tests/unit/test_devices.py:" in str(train())


def test_a_context_keeps_what_was_wrong_before():
    model = nn.Linear(2, 2)
    model.table = torch.ones(2)
    model.to("meta")
    audit = tp.audit_device_consistency(model)
    for _ in range(2):
        with audit:
            model.table = None
        (finding,) = audit.findings
        assert finding.code == "TP404"
        assert finding.headline.endswith("are on meta (so before, not after)")


def test_an_audit_can_be_stored():
    model = nn.Linear(2, 2)
    model.table = torch.ones(2)
    audit = tp.audit_device_consistency(model.to("meta"))
    for copy in (pickle.loads(pickle.dumps(audit)), type(audit).from_json(audit.to_json())):
        assert codes(copy) == ["TP404"]
        assert copy.placement == audit.placement


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.table = [torch.ones(2)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y + self.table[0]


def test_an_error_of_devices_gets_told_where_it_came_from():
    model = nn.Sequential(nn.Identity(), Mixed()).to("meta")
    with pytest.raises(RuntimeError, match="device meta") as raised, tp.audit_device_consistency(model):
        model(torch.ones(1, 2, device="meta"))
    text = str(raised.value)
    assert "raised in model.1 (Mixed), " in text
    assert "y float32[1, 2] on meta" in text
    assert "TP404 model.1.table[0]" in text
    model[0].table = torch.ones(2)  # nothing to do with the error
    with pytest.raises(RuntimeError) as other, tp.audit_device_consistency(model):
        model(torch.ones(1, 2, device="meta"))
    assert "TP404 model.1.table[0]" in str(other.value)
    assert "model.0" not in str(other.value)
    assert "the audit has 1 more finding, of other modules" in str(other.value)
    with pytest.raises(RuntimeError, match=r"^mine$"), tp.audit_device_consistency(model):
        raise RuntimeError("mine")
    with pytest.raises(KeyError), tp.audit_device_consistency(model):
        raise KeyError(3)


def test_an_error_behind_another_is_told_too():
    class Odd(Mixed):
        def forward(this, x: torch.Tensor) -> torch.Tensor:
            y = this.inner(x)
            return y + this.table[0]

    model = nn.Sequential(Odd()).to("meta")

    def step() -> None:
        try:
            model(torch.ones(1, 2, device="meta"))
        except RuntimeError as error:
            raise ValueError("step 3 failed") from error

    with pytest.raises(ValueError, match=r"^step 3 failed$") as raised, tp.audit_device_consistency(model):
        step()
    cause = str(raised.value.__cause__)
    assert "raised in model.0 (Odd)" in cause or "Odd), " in cause
    assert "test_devices.py" in cause
    assert "TP404 model.0.table[0]" in cause


def test_a_decorator_looks_around_each_call():
    model = nn.Linear(2, 2)
    audit = tp.audit_device_consistency(model)

    @audit
    def step() -> int:
        model.table = torch.ones(2)
        model.to("meta")
        return 3

    @tp.audit_device_consistency(model)
    async def later() -> int:
        return 4

    assert step() == 3
    assert codes(audit) == ["TP404"]
    assert asyncio.run(later()) == 4
    with pytest.raises(TypeError, match="decorates a function"):
        audit(3)  # type: ignore[arg-type]


def test_several_models_and_optimizers():
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    b.table = torch.ones(2)
    b.to("meta")
    models = [a, b]
    (listed,) = tp.audit_device_consistency(models).findings
    (named,) = tp.audit_device_consistency({"first": a, "second": b}, {"opt": torch.optim.SGD(a.parameters())}).findings
    assert (listed.where.name, named.where.name) == ("models[1].table", "second.table")


@pytest.mark.parametrize("bad", [3, None, "x", [], {}, torch.ones(2), [nn.Linear(2, 2), 3]])
def test_what_is_no_module_is_refused(bad):
    with pytest.raises(TypeError, match=r"^audit_device_consistency\(\) (takes a Module|was given no module)"):
        tp.audit_device_consistency(bad)
    with pytest.raises(TypeError, match="takes an Optimizer"):
        tp.audit_device_consistency(nn.Linear(2, 2), 3)


def test_ways_that_are_not_known_are_refused_and_those_that_fail_are_said_to():
    for bad in ("keys", 3, ["nonsense"], [3]):
        with pytest.raises(ValueError, match=r"(takes a list of names|there is no way 'nonsense')"):
            tp.reproduce_device_mismatch(bad)  # type: ignore[arg-type]
    report = tp.reproduce_device_mismatch(["wrapper"], setup="import there_is_no_such_module")
    (way,) = report.mismatches
    assert way.error == "raised ModuleNotFoundError: No module named 'there_is_no_such_module'"
    assert "0 of 1 way made" in str(report)
    assert "Tensor._set_device does not exist" in str(report)


@pytest.mark.long
def test_ways_that_need_no_accelerator_are_made_without_one():
    shown = {one.name: one for one in tp.reproduce_device_mismatch().mismatches}
    if torch.cuda.is_available() or torch.xpu.is_available():
        pytest.skip("accelerator: here the others are made too")
    assert {name for name, one in shown.items() if one.error} == {"gradient", "view"}
    assert set(shown["local"].codes) == {"TP410"}
    assert set(shown["keys"].codes) == {"TP101"}
    assert set(shown["state"].codes) == {"TP406"}
    assert set(shown["dlpack"].codes) == {"TP104", "TP110"}
    assert shown["fake"].codes == shown["wrapper"].codes == shown["storage"].codes == ()


# -- the observer -------------------------------------------------------------------------------------------------


def test_nothing_is_run_and_nothing_is_kept():
    class Loud(nn.Module):
        @property
        def secret(self) -> None:
            raise AssertionError("the audit asked a property")

        def __getattribute__(self, name: str) -> Any:
            if object.__getattribute__(self, "__dict__").get("is_set_up"):
                raise AssertionError(f"the audit asked for {name}")
            return object.__getattribute__(self, name)

    model: Any = Loud()
    model.weight = nn.Parameter(torch.ones(2))
    model.helper = Helper()
    vars(model)["is_set_up"] = True
    own = object.__getattribute__(model, "__dict__")
    before = {name: id(value) for name, value in own.items()}
    audit = tp.audit_device_consistency(model)
    assert {name: id(value) for name, value in own.items()} == before
    del own
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None  # the report keeps nothing alive
    with audit:
        pass
    assert audit.placement.modules == 0


def test_cycles_and_depth_end():
    model = nn.Linear(2, 2)
    loop: list[Any] = []
    loop.append(loop)
    model.loop = loop
    model.deep = functools.reduce(lambda inner, _: [inner], range(5000), torch.ones(2))
    model.child = nn.Linear(2, 2)
    model.child.parents = [model]
    assert tp.audit_device_consistency(model).placement.modules == 2


@pytest.mark.parametrize("name", MODELS)
def test_stock_models_are_silent_on_the_cpu_and_on_meta(name):
    build, data = MODELS[name]
    model = build()
    optimizer = torch.optim.Adam(model.parameters()) if list(model.parameters()) else None
    assert codes(tp.audit_device_consistency(model, optimizer)) == []
    batch = data()
    with tp.audit_device_consistency(model, optimizer) as audit:
        model(batch)
    assert codes(audit) == []
    moved = build().to("meta")
    assert [one for one in tp.audit_device_consistency(moved).findings if one.severity != "info"] == []
