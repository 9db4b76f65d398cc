"""Ways in which tensors are kept alive, each made by one function that answers what keeps them."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import queue
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.helpers import KeepsOutput

SITUATIONS: dict[str, Callable[[], Any]] = {}


def situation(make: Callable[[], Any]) -> Callable[[], Any]:
    SITUATIONS[make.__name__] = make
    return make


def tensor() -> torch.Tensor:
    return torch.ones(5)


def leaf() -> torch.Tensor:
    return torch.ones(5, requires_grad=True)


# Python's containers and attributes


@situation
def in_list():
    return [tensor()]


@situation
def in_tuple():
    return (tensor(), (tensor(),))


@situation
def twice_in_dict():
    x = tensor()
    return {"a": x, "b": x}


@situation
def key_of_dict():
    return {tensor(): 1}


@situation
def in_set():
    return {tensor()}


@situation
def in_frozenset():
    return frozenset([tensor()])


@situation
def in_deque():
    return collections.deque([tensor()])


@situation
def in_dict_subclasses():
    return (
        collections.OrderedDict(a=tensor()),
        collections.defaultdict(list, {"b": [tensor()]}),
        collections.ChainMap({"a": tensor()}),
        collections.Counter(),
    )


@situation
def in_proxy():
    return types.MappingProxyType({"a": tensor()})


class Slotted:
    __slots__ = ("x", "y")


@situation
def in_slot():
    made = Slotted()
    made.x = tensor()
    return made


class Plain:
    pass


@situation
def in_attribute():
    made = Plain()
    made.x = tensor()
    return made


@situation
def in_materialised_dict():
    made = Plain()
    made.__dict__["x"] = tensor()
    return made, made.__dict__


@situation
def in_class_attribute():
    class Holder:
        x = tensor()

    return Holder


@situation
def in_property():
    x = tensor()

    class Holder:
        value = property(lambda self: x)

    return Holder()


@situation
def in_dataclass():
    @dataclasses.dataclass(slots=True)
    class Holder:
        x: object

    return Holder(tensor())


@situation
def in_namespace():
    return types.SimpleNamespace(x=tensor())


# functions and what they remember


@situation
def in_closure():
    x = tensor()
    return lambda: x


@situation
def in_defaults():
    def function(a=tensor(), *, b=tensor()):  # noqa: B008
        pass

    return function


@situation
def in_partial():
    return functools.partial(print, tensor(), key=tensor())


@situation
def in_bound_method():
    return tensor().add_


@situation
def in_lru_cache():
    @functools.lru_cache
    def cached(n):
        return torch.ones(n)

    cached(3), cached(4)
    return cached


@situation
def in_unbounded_cache():
    @functools.cache
    def cached(n):
        return torch.ones(n)

    cached(3), cached(4)
    return cached


@situation
def in_cached_property():
    class Holder:
        @functools.cached_property
        def x(self):
            return tensor()

    made = Holder()
    assert made.x is made.x
    return made


@situation
def in_iterators():
    one = [tensor()]
    return iter([tensor()]), zip(one, one, strict=True), map(abs, one), enumerate(one), reversed([tensor()])


# suspended and executing code


@situation
def in_generator():
    def generate():
        x = tensor()
        yield 1
        print(x)

    made = generate()
    next(made)
    return made


@situation
def in_coroutine():
    @types.coroutine
    def wait():
        yield 1

    async def run():
        x = tensor()
        await wait()
        print(x)

    made = run()
    made.send(None)
    return made


@situation
def in_exception():
    def fail():
        x = tensor()
        raise ValueError(x.shape)

    try:
        fail()
    except ValueError as error:
        return error


@situation
def in_exception_arguments():
    return ValueError(tensor())


class Parked:
    """A thread that waits with a tensor among its variables."""

    def __init__(self) -> None:
        go_on, running = threading.Event(), threading.Event()

        def run() -> None:
            x = tensor()
            running.set()
            go_on.wait()
            del x

        self.go_on = go_on
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        running.wait()

    def __del__(self) -> None:
        self.go_on.set()
        self.thread.join()


@situation
def in_other_thread():
    return Parked()


@situation
def in_thread_local():
    made = threading.local()
    made.x = tensor()
    return made


@situation
def in_context_variable():
    made = contextvars.ContextVar("made")
    made.set(tensor())
    return made


@situation
def in_context():
    context, made = contextvars.copy_context(), contextvars.ContextVar("made")
    context.run(made.set, tensor())
    return context


@situation
def in_queue():
    made = queue.Queue()
    made.put(tensor())
    return made


@situation
def in_simple_queue():
    made = queue.SimpleQueue()
    made.put(tensor())
    return made


@situation
def in_data_loader_queue():
    loader = torch.utils.data.DataLoader([torch.ones(2) for _ in range(4)], batch_size=2)
    batches = iter(loader)
    return loader, batches, next(batches)


class _Outstanding:
    """What a loader with workers has of batches that came before their turn."""

    def __init__(self) -> None:
        self._task_info = {0: (0,), 1: (1, [tensor(), {"label": tensor()}])}
        self._data_queue: queue.Queue[Any] = queue.Queue()
        self._data_queue.put((2, [tensor()]))


@situation
def in_outstanding_batches():
    return _Outstanding()


# weak references hold nothing


@situation
def weakly_too():
    x, callback = tensor(), tensor()
    values = weakref.WeakValueDictionary({1: x})
    return x, weakref.ref(x), weakref.ref(x, lambda _, y=callback: None), weakref.proxy(x), values


@situation
def in_weak_key_dictionary():
    x = tensor()
    return weakref.WeakKeyDictionary({Plain: x})


# memory that several see


@situation
def by_view():
    return tensor()[1:]


@situation
def by_view_of_view():
    x = tensor()
    return x, x[1:][1:]


@situation
def by_detached_alias():
    x = leaf()
    return x, x.detach(), x.data


@situation
def by_storage():
    x = tensor()
    return x, x.untyped_storage()


@situation
def by_storage_alone():
    return tensor().untyped_storage()


@situation
def by_array():
    return tensor().numpy()


@situation
def by_array_of_array():
    return tensor().numpy()[1:][1:], memoryview(tensor().numpy())


@situation
def over_array():
    return torch.from_numpy(np.ones(3))


@situation
def in_object_array():
    made = np.empty((2, 2), dtype=object)
    made[1, 1] = tensor()
    return made, made[1:]


@situation
def by_dlpack():
    return torch.from_dlpack(tensor())


@situation
def by_legacy_dlpack():
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor()))


@situation
def by_capsule():
    return torch.utils.dlpack.to_dlpack(tensor())


# autograd


@situation
def by_graph():
    x = leaf()
    return (x.exp() * x).sum()


@situation
def by_node_alone():
    x = leaf()
    return (x * x).grad_fn


@situation
def by_gradient():
    x = leaf()
    (x * x).sum().backward()
    return x


@situation
def by_gradient_object():
    x = leaf()
    (x * x).sum().backward()
    return x, x.grad


@situation
def by_hooks():
    x, y = leaf(), tensor()
    x.register_hook(lambda grad: grad * y)
    z = x * 2
    z.register_hook(lambda grad: grad + y)
    z.retain_grad()
    x.register_post_accumulate_grad_hook(lambda _: y)
    return z


@situation
def by_node_hooks():
    y = tensor()
    z = leaf() * 2
    z.grad_fn.register_hook(lambda *_: y)
    z.grad_fn.register_prehook(lambda *_: y)
    return z


class Exponential(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.further = x.clone()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


@situation
def by_custom_function():
    return Exponential.apply(leaf())


@situation
def by_own_context():
    return KeepsOutput.apply(leaf())


@situation
def by_saved_tensors_hooks():
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (x.clone(), 1), lambda packed: packed[0]):
        x = leaf()
        return x * x


@situation
def by_save_on_cpu():
    with torch.autograd.graph.save_on_cpu():
        x = leaf()
        return x.exp()


@situation
def by_checkpoint():
    return checkpoint(lambda x: x.exp().sin(), leaf(), use_reentrant=False)


@situation
def by_reentrant_checkpoint():
    return checkpoint(lambda x: x.exp().sin(), leaf(), use_reentrant=True)


@situation
def by_functions_of_views():
    x = torch.zeros(6, dtype=torch.complex64)
    return x, x.imag[:3], x.imag, x[1:]


@situation
def by_write_on_view():
    y = leaf() * 1
    view = y[1:]
    view.mul_(2)
    return y, view


@situation
def by_dual():
    level = forward_ad.dual_level()
    level.__enter__()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch loads its decompositions through torch.jit
        dual = forward_ad.make_dual(tensor(), tensor())
    return Leaving(level), dual


class Leaving:
    def __init__(self, context) -> None:
        self.context = context

    def __del__(self) -> None:
        self.context.__exit__(None, None, None)


# torch.nn, torch.optim, other kinds of tensors


@situation
def by_model_and_optimizer():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@situation
def by_module_hook():
    model, y = nn.Linear(2, 2), tensor()
    model.register_forward_hook(lambda *_: y and None)
    return model


@situation
def by_parameter_dict():
    return nn.ParameterDict({"a": nn.Parameter(tensor())})


@situation
def by_state_dict():
    return nn.Linear(2, 2).state_dict()


@situation
def inside_sparse():
    return torch.eye(3).to_sparse()


@situation
def inside_compressed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "in beta state"
        return torch.eye(3).to_sparse_csc()


@situation
def inside_subclass_attribute():
    x = nn.Parameter(tensor())
    x.extra = tensor()
    return x
