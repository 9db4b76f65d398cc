"""Finding tensors in what a user hands in."""

from __future__ import annotations

import collections
import dataclasses
import gc
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils import _pytree

import tensorplay as tp

A, B, D = torch.ones(1), torch.ones(2), torch.ones(3)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    meta: dict


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor


class Trainer:
    def __init__(self) -> None:
        self.running = A
        self.history = [B]
        self.other = Other()


class Other:
    def __init__(self) -> None:
        self.hidden = D


Point = collections.namedtuple("Point", "x y")


def names(obj) -> list[str]:
    return [record.name for record in tp.inspect(obj, quiet=True).records]


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: [A, (B, {"k": D})], ["obj[0]", "obj[1][0]", "obj[1][1]['k']"]),
        (lambda: Batch(A, B, {"n": D}), ["obj.x", "obj.y", "obj.meta['n']"]),
        (lambda: Slotted(A), ["obj.x"]),
        (lambda: Point(A, [B]), ["obj.x", "obj.y[0]"]),
        (lambda: collections.deque([A, B]), ["obj[0]", "obj[1]"]),
        (lambda: collections.OrderedDict(w=A), ["obj['w']"]),
        (lambda: collections.UserDict(w=A), ["obj['w']"]),
        (lambda: {1: A, ("a", 2): B}, ["obj[1]", "obj[('a', 2)]"]),
        (lambda: {A: B}, ["obj[<Tensor>]"]),
        (lambda: types.SimpleNamespace(x=A), ["obj.x"]),
        (lambda: frozenset({A}), ["obj{0}"]),
        # A plain object is opened, the plain object inside it is not.
        (lambda: Trainer(), ["obj.running", "obj.history[0]"]),
    ],
)
def test_container_gives_one_record_a_tensor_with_its_path(make, found):
    obj = make()

    assert names(obj) == found


def test_module_gives_parameters_buffers_and_plain_attributes():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
            self.table = torch.zeros(2)
            self.cache = [torch.zeros(1)]
            self.head = nn.Linear(3, 2)

    model = Model()

    assert [record.name for record in tp.inspect(model, quiet=True).records] == [
        "model.body.0.weight", "model.body.0.bias", "model.body.1.weight", "model.body.1.bias",
        "model.body.1.running_mean", "model.body.1.running_var", "model.body.1.num_batches_tracked",
        "model.head.weight", "model.head.bias", "model.table", "model.cache[0]",
    ]  # fmt: skip


def test_tied_parameter_is_one_record_with_both_paths():
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight

    (record,) = tp.inspect(model, quiet=True).records

    assert (record.name, record.also) == ("model.a.weight", ("model.b.weight",))


def test_optimizer_state_is_named_by_its_parameter():
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    both = [record.name for record in tp.check({"model": model, "opt": optimizer}).records]
    alone = names(optimizer)

    assert both == ["model.weight", "model.weight.grad", "opt.state[model.weight].step",
                    "opt.state[model.weight].exp_avg", "opt.state[model.weight].exp_avg_sq"]  # fmt: skip
    assert alone[0] == "obj.param_groups[0]['params'][0]"
    assert alone[2].endswith(".exp_avg")


def test_pytree_node_is_flattened_by_its_own_function():
    class Pair:
        def __init__(self, one, two):
            self.items = types.MappingProxyType({"one": one, "two": two})

    _pytree.register_pytree_node(
        Pair, lambda pair: (list(pair.items.values()), None), lambda items, _: Pair(*items),
        serialized_type_name="tests.Pair",
    )  # fmt: skip
    pair = Pair(A, [B])

    assert names(pair) == ["obj[0]", "obj[1][0]"]


def test_cycle_ends():
    loop: list = [A]
    loop.append(loop)
    twin = {"self": loop}
    loop.append(twin)

    assert names(loop) == ["obj[0]"]


def test_deep_nesting_needs_no_recursion():
    deep = A
    for _ in range(20_000):
        deep = [deep]

    assert len(tp.inspect(deep, quiet=True).records) == 1


def test_dictionary_of_names_is_check_s_way_to_name_things():
    assert [record.name for record in tp.check({"weights": A, "batch": [B]}).records] == ["weights", "batch[0]"]


@pytest.mark.parametrize("thing", [3, None, "text", object(), print, torch.float32, type, {}, [1, "a"]])
def test_check_passes_over_what_it_does_not_know(thing):
    assert tp.check({"thing": thing}).records == ()


@pytest.mark.parametrize("thing", [3, None, "text", object(), print, {}, [1, "a"]])
def test_inspect_of_nothing_says_what_to_pass(thing):
    with pytest.raises(TypeError, match=r"^inspect\(\) found no tensor in this \w+: pass a torch.Tensor, or a module"):
        tp.inspect(thing)


def test_inspect_of_a_storage_says_how_to_get_a_tensor():
    with pytest.raises(TypeError, match=r"set_\(storage\)"):
        tp.inspect(A.untyped_storage())


def test_bound_on_tensors_is_kept_and_said():
    many = [torch.zeros(1) for _ in range(10)]

    report = tp.inspect(many, quiet=True, max_tensors=4)

    assert len(report.records) == 4
    assert report.document.truncated.max_tensors == 4
    assert "cut after 4 tensors" in str(report)
    assert tp.inspect(many, quiet=True, max_tensors=10).document.truncated is None


def test_bound_counts_gradients_and_must_be_positive():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()

    assert len(tp.check(model, max_tensors=1).records) == 1
    with pytest.raises(ValueError, match="max_tensors must be 1 or more, got 0"):
        tp.inspect(model, quiet=True, max_tensors=0)


def test_class_with_slots_is_not_kept_alive():
    def look() -> weakref.ref:
        class Short:
            __slots__ = ("x",)

        short = Short()
        short.x = A
        assert names(short) == ["obj.x"]
        return weakref.ref(Short)

    gone = look()
    gc.collect()

    assert gone() is None


def test_attribute_that_raises_is_not_asked_for():
    class Thing:
        def __init__(self) -> None:
            self.x = A

        @property
        def bomb(self):
            raise AssertionError("the walk asked for a property")

        def __getattr__(self, name):
            raise AssertionError(f"the walk asked for {name}")

    thing = Thing()

    assert names(thing) == ["obj.x"]
