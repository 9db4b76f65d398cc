"""Finding tensors in what a user hands in."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import threading
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
        (lambda: {A: B}, ["obj[<Tensor>]", "obj.keys()[0]"]),
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


class Spy(type):
    """A metaclass that must not be asked."""

    def __getattribute__(cls, name):
        raise AssertionError(f"the walk asked a metaclass for {name}")

    def __eq__(cls, other):
        raise AssertionError("the walk compared classes by ==")

    __hash__ = None

    def __subclasscheck__(cls, sub):
        raise AssertionError("the walk asked a metaclass whether it is a subclass")

    def __instancecheck__(cls, obj):
        raise AssertionError("the walk asked a metaclass whether it is an instance")


class Spied(metaclass=Spy):
    def __init__(self) -> None:
        self.x = A


class Disguised:
    """Its class and its dictionary are properties."""

    def __init__(self) -> None:
        object.__setattr__(self, "x", A)

    @property
    def __class__(self):
        raise AssertionError("the walk asked for __class__")

    @property
    def __dict__(self):
        raise AssertionError("the walk asked for __dict__")


class Key(str):
    __slots__ = ()

    def __repr__(self):
        raise AssertionError("the walk asked a key for its repr")

    __str__ = __repr__


class SlottedDict(collections.UserDict):
    __slots__ = ("extra",)


class OtherSlot:
    __slots__ = ("x",)


class Borrowing:
    stolen = OtherSlot.x  # a member descriptor of another class

    def __init__(self) -> None:
        self.y = A


def _slotted_dict():
    both = SlottedDict(w=A)
    both.extra = B
    return both


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda: Spied(), ["obj.x"]),
        (lambda: [Spied(), {"k": Spied()}], ["obj[0].x"]),  # one tensor, found at both
        (lambda: Disguised(), ["obj.x"]),
        (lambda: {Key("w"): A}, ["obj['w']"]),
        (lambda: {(1, Key("w")): A, (D,): B}, ["obj[(1, 'w')]", "obj[(<Tensor>,)]"]),
        (lambda: {Key: A, Spied(): B}, ["obj[<type>]", "obj[<Spied>]"]),
        (lambda: {"\ud800\x1b[31m": A}, [r"obj['\ud800\x1b[31m']"]),
        (lambda: {10**5000: A}, ["obj[<int>]"]),
        (_slotted_dict, ["obj.extra", "obj['w']"]),
        (Borrowing, ["obj.y"]),
        (lambda: types.MappingProxyType({"w": A}), ["obj['w']"]),
        (lambda: {"w": A}.values(), ["obj[0]"]),
        (lambda: {"w": A}.items(), ["obj[0][1]"]),
        (lambda: functools.partial(print, A, end=B), ["obj.args[0]", "obj.keywords['end']"]),
        (lambda: dict.fromkeys(["w" * 1000], A), [f"obj['{'w' * 98}...{'w' * 17}']"]),
    ],
)
def test_walk_runs_no_code_of_what_it_looks_at(make, found):
    obj = make()
    report = tp.check({"obj": obj})

    assert [record.name for record in report.records] == found
    assert report.document.unread == ()


def test_attributes_of_a_plain_tensor_are_followed_and_make_no_dictionary():
    bare, tagged = torch.ones(1), torch.ones(1)
    tagged.cache = [B]
    referents = gc.get_referents(bare)

    assert names([bare, tagged]) == ["obj[0]", "obj[1]", "obj[1].cache[0]"]
    assert gc.get_referents(bare) == referents


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (lambda o: o.state.__setitem__("step", 3), 2),
        (lambda o: o.state.__setitem__("buffer", D), 3),
        (lambda o: o.state.__setitem__(Key, {"x": D}), 3),
        (lambda o: setattr(o, "state", None), 2),
        (lambda o: setattr(o, "param_groups", None), 0),
        (lambda o: setattr(o, "param_groups", (D,)), 1),
        (lambda o: o.param_groups.append(3), 2),
        (lambda o: o.param_groups[0].__setitem__("params", D), 1),
        (lambda o: setattr(o, "ema", [D]), 3),
    ],
)
def test_optimizer_in_any_state_is_read(break_it, found):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)])
    break_it(optimizer)

    report = tp.check(optimizer)

    assert len(report.records) == found
    assert report.document.unread == ()


def test_wrapped_optimizer_is_looked_through():
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner

        @property
        def param_groups(self):
            return self.inner.param_groups

        @property
        def state(self):
            return self.inner.state

    wrapped = Wrapped(torch.optim.SGD([torch.zeros(1)]))

    assert names(wrapped) == ["obj.inner.param_groups[0]['params'][0]"]


def test_module_with_tables_of_another_type_is_read():
    module = nn.Linear(2, 2)
    module._parameters = [A]
    module._buffers = None

    assert names(module) == ["module._parameters[0]".replace("module", "obj")]


def test_what_raises_while_it_is_opened_is_named_and_the_rest_is_read():
    class Node:
        pass

    def flatten(node):
        raise ValueError("no")

    _pytree.register_pytree_node(Node, flatten, lambda items, _: Node(), serialized_type_name="tests.Node")

    report = tp.check({"bad": Node(), "good": A})

    assert [record.name for record in report.records] == ["good"]
    assert [(unread.name, unread.reason) for unread in report.document.unread] == [
        ("bad", "opening it raised ValueError")
    ]
    assert "not looked into: bad: opening it raised ValueError" in str(report)


def test_pytree_node_with_keys_is_named_by_them():
    class Keyed:
        pass

    _pytree.register_pytree_node(
        Keyed,
        lambda _: ([A, B, D], None),
        lambda items, _: Keyed(),
        serialized_type_name="tests.Keyed",
        flatten_with_keys_fn=lambda _: (
            [(_pytree.GetAttrKey("a"), A), (_pytree.MappingKey("k"), B), (_pytree.SequenceKey(2), D)],
            None,
        ),
    )

    assert names(Keyed()) == ["obj.a", "obj['k']", "obj[2]"]


def test_dictionary_changed_by_another_thread_is_read():
    table = {f"k{i}": A for i in range(10)}
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            table[f"n{number % 1000}"] = [B]
            table.pop(f"n{(number + 500) % 1000}", None)
            number += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(300):
            assert tp.check({"table": table}).document.unread == ()
    finally:
        stop.set()
        thread.join()


def test_gradient_of_a_wrapper_subclass_is_opened():
    inner, flat = torch.ones(2), torch.ones(2)
    flat.untyped_storage().resize_(0)
    weight = nn.Parameter(torch.ones(2))
    weight.grad = TwoInOne(inner, flat)

    report = tp.check({"weight": weight})
    without = tp.check({"weight": weight}, grads=False)

    assert [record.name for record in report.records] == ["weight", "weight.grad", "weight.grad.one", "weight.grad.two"]
    assert [finding.where.name for finding in report.findings] == ["weight.grad.two"]
    assert [record.name for record in without.records] == ["weight"]


class TwoInOne(torch.Tensor):
    @staticmethod
    def __new__(cls, one, two):
        return torch.Tensor._make_wrapper_subclass(cls, one.shape)

    def __init__(self, one, two):
        self.one, self.two = one, two

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # Setting .grad asks for a detached alias.
        if func is torch.ops.aten.detach.default:
            return cls(args[0].one, args[0].two)
        raise AssertionError(f"the probe ran {func}")


def test_argument_s_name_reaches_the_names_inside_a_path():
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    pair = (model, optimizer)
    both = {"pair": pair}

    assert [record.name for record in tp.inspect(both, quiet=True).records] == [
        "both['pair'][0].weight",
        "both['pair'][1].state[both['pair'][0].weight].momentum_buffer",
    ]


class Plain:
    pass


def test_order_of_the_arguments_does_not_matter():
    model, trainer = nn.Module(), Plain()
    model.cache = Plain()
    model.cache.k = A
    trainer.model = model

    assert len(tp.check({"model": model, "trainer": trainer}).records) == 1
    assert len(tp.check({"trainer": trainer, "model": model}).records) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, 2))])
def test_torchscript_modules_are_read(make):
    module = make(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))

    assert [record.name for record in tp.check({"m": module}).records] == [
        "m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias",
        "m.1.running_mean", "m.1.running_var", "m.1.num_batches_tracked",
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
def test_quantized_module_names_what_it_keeps_in_cpp():
    module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)))

    (unread,) = tp.check({"m": module}).document.unread

    assert unread.name == "m.0._packed_params._packed_params"
    assert unread.reason.startswith("a C++ object of TorchScript")


@pytest.mark.parametrize("make", [nn.Linear(2, 2).parameters, lambda: zip([A], [B], strict=True), lambda: iter([A])])
def test_iterator_is_named_and_not_used_up(make):
    iterator = make()

    report = tp.check({"it": iterator})

    assert report.records == ()
    assert [unread.name for unread in report.document.unread] == ["it"]
    assert "nothing was checked" in str(report)
    assert next(iterator) is not None


def test_tensor_that_is_a_key_is_read():
    assert [record.name for record in tp.check({"table": {A: B}}).records] == ["table[<Tensor>]", "table.keys()[0]"]


def test_names_in_deep_nests_are_bounded():
    deep = A
    for _ in range(5_000):
        deep = [deep]

    (record,) = tp.check({"deep": deep}).records

    assert len(record.name) < 2_100
    assert record.name.startswith("deep[0][0]")


def test_root_name_that_would_break_the_text_is_written_out():
    assert [record.name for record in tp.check({"a\nb": A, "": B}).records] == [r"'a\nb'", "''"]


@pytest.mark.parametrize("bound", ["5", None, 1.5, True])
def test_bound_of_another_type_is_refused_in_words(bound):
    with pytest.raises(TypeError, match="max_tensors must be an int, got"):
        tp.check([A], max_tensors=bound)
