"""The NPU without an NPU (tests/npu): it behaves as a device of its own, and its controls say what happened."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import time
import unittest
from importlib.util import find_spec
from itertools import islice

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.conftest import need
from tests.helpers import ROOT
from tests.npu import Copies

pytestmark = [pytest.mark.usefixtures("npu")]

DEVICES = ("npu:0", "npu:1")
FIRST, SECOND = (torch.device("privateuseone", i) for i in range(2))  # npu is no name yet where this is collected


def on(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    return x.detach().to(device).requires_grad_(x.requires_grad)


# Making tensors.


@pytest.mark.parametrize("device", DEVICES)
def test_memory_that_nobody_wrote_holds_the_fresh_byte(device):
    x = torch.empty(3, 5, dtype=torch.uint8, device=device)

    assert x.device == torch.device(device)
    assert set(x.flatten().tolist()) == {0x5A}


@pytest.mark.parametrize(
    "make",
    [
        lambda **where: torch.arange(12, **where),
        lambda **where: torch.linspace(0, 1, 7, **where),
        lambda **where: torch.full((2, 3), 1.5, **where),
        lambda **where: torch.eye(3, **where),
        lambda **where: torch.tensor([[1, 2], [3, 4]], **where),
        lambda **where: torch.tril_indices(3, 3, **where),
        lambda **where: torch.zeros(2, 0, 3, **where),
        lambda **where: torch.rand(5, **where),
        lambda **where: torch.randn(5, **where),
        lambda **where: torch.randint(9, (5,), **where),
        lambda **where: torch.randperm(9, **where),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_factories_make_what_they_make_on_the_cpu(make, device):
    x = make(device=device)  # each generator was seeded with 0

    assert x.device == torch.device(device)
    torch.testing.assert_close(x.cpu(), make())


def test_tensors_are_made_on_the_current_device():
    with torch.npu.device(1):
        inside = torch.empty(1, device="npu")
    with torch.device("npu:1"):
        default = torch.empty(1)

    assert (inside.device, default.device) == (SECOND, SECOND)
    assert torch.empty(1, device="npu").device == FIRST
    assert torch.npu.current_device() == 0


def test_device_that_does_not_exist_is_refused():
    with pytest.raises(RuntimeError, match="invalid npu device ordinal 2"):
        torch.empty(1, device="npu:2")


def test_tensors_print_with_their_device():
    assert repr(torch.arange(3, device="npu:1")) == "tensor([0, 1, 2], device='npu:1')"
    assert "device='npu:0'" in repr(torch.nn.Parameter(torch.randn(2, 2, device="npu")))
    assert str(torch.tensor(1.5, device="npu").item()) == "1.5"


# Classes of its own.


def test_tensors_and_storages_are_of_classes_of_their_own(npu):
    x = torch.empty_strided((2, 3), (1, 2), device="npu", dtype=torch.float64)

    assert npu.impl_class(x) == "NpuTensorImpl"
    assert npu.describe_storage(x) == ((2, 3), (1, 2), "Double", 0)
    assert npu.impl_class(torch.ones(2)) == "other"
    assert npu.describe_storage(torch.ones(2)) is None


def test_copies_of_a_tensor_object_keep_its_class(npu):
    x = torch.ones(2, 3, device="npu", requires_grad=True)
    holder = torch.empty(0, device="npu")
    holder.data = x

    for same in (x.detach(), x.data, holder, nn.Parameter(x), torch.ops.aten.alias(x)):
        assert npu.impl_class(same) == "NpuTensorImpl"
        assert same.data_ptr() == x.data_ptr()


def test_storage_of_its_own_is_described_in_bytes(npu):
    storage = torch.UntypedStorage(12, device="npu:1")

    x = torch.empty(0, device="npu:1").set_(storage, 0, (3,))

    assert npu.owner_of(storage.data_ptr()) == 1
    assert npu.describe_storage(x) == ((12,), (1,), "Byte", 0)


# Views.

VIEWS = {
    "view": lambda x: x.view(6, 4),
    "as_strided": lambda x: x.as_strided((2, 3), (1, 4), 5),
    "t": lambda x: x.t(),
    "slice": lambda x: x[1:, ::2],
    "select": lambda x: x[2],
    "expand": lambda x: x[:1].expand(5, 6),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "diagonal": lambda x: x.diagonal(),
    "permute": lambda x: x.view(2, 2, 6).permute(2, 0, 1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(),
    "split": lambda x: x.split(2)[1],
    "unbind": lambda x: x.unbind()[3],
    "chunk": lambda x: x.chunk(3, 1)[2],
    "view_as_complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
    "view_as_real": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2))),
    "conj": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj(),
    "neg": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().imag,
    "real": lambda x: torch.view_as_complex(x.view(4, 3, 2)).real,
    "view_dtype": lambda x: x.view(torch.int32),
    "view_smaller_dtype": lambda x: x.view(torch.uint8),
    "detach": lambda x: x.detach(),
    "reshape_alias": lambda x: x.reshape(3, 8),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_views(npu, name):
    x = torch.randn(4, 6)
    there = x.to("npu:1")

    before = npu.figures()
    view = VIEWS[name](there)

    assert (npu.figures() - before).memory[1].allocations == 0
    assert view.untyped_storage()._cdata == there.untyped_storage()._cdata
    assert (view.stride(), view.storage_offset()) == (VIEWS[name](x).stride(), VIEWS[name](x).storage_offset())
    assert npu.impl_class(view) == "NpuTensorImpl"
    assert torch.equal(view.cpu(), VIEWS[name](x))


def test_writes_go_through_views():
    x = torch.zeros(3, 4, device="npu")

    x.t()[1].add_(2)
    x[2] = 5
    x.view(-1).masked_fill_(x.view(-1) == 0, -1)

    assert x.tolist() == [[-1, 2, -1, -1], [-1, 2, -1, -1], [5, 5, 5, 5]]
    assert x._version == 3


def test_views_of_inference_tensors_are_inference_tensors():
    with torch.inference_mode():
        x = torch.ones(2, 3, device="npu")

    assert x.is_inference()
    assert x.view(6).is_inference()
    assert x.t()[0].is_inference()


def test_operators_that_change_the_geometry_in_place_do(npu):
    x = torch.arange(6.0, device="npu").view(2, 3)
    where = x.data_ptr()

    x.t_()
    x.unsqueeze_(0)
    x.squeeze_()

    assert x.data_ptr() == where
    assert x.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_out_arguments_are_resized(npu):
    x = torch.arange(6.0, device="npu:1")
    out = torch.empty(0, device="npu:1")

    torch.add(x, 1, out=out)

    assert out.tolist() == [1, 2, 3, 4, 5, 6]
    assert npu.owner_of(out.data_ptr()) == 1


# Copies.


@pytest.mark.parametrize(
    ("source", "target", "direction"),
    [
        ("cpu", "npu:0", "host_to_device"),
        ("npu:1", "cpu", "device_to_host"),
        ("npu:0", "npu:1", "device_to_device"),
        ("npu:1", "npu:1", "device_to_device"),
    ],
)
@pytest.mark.parametrize("form", [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2]])
def test_copies_are_counted_by_direction(npu, source, target, direction, form):
    x = form(torch.arange(12.0).view(3, 4).to(source))
    dst = torch.empty(x.shape, device=target)

    before = npu.figures()
    dst.copy_(x)
    found = npu.figures() - before

    counts = {name: getattr(found, name) for name in ("host_to_device", "device_to_host", "device_to_device")}
    assert counts.pop(direction) == Copies(1, x.numel() * 4)
    assert set(counts.values()) == {Copies(0, 0)}
    assert torch.equal(dst.cpu(), x.cpu())


def test_copies_convert_and_broadcast():
    dst = torch.empty(2, 3, dtype=torch.int64, device="npu:1")

    dst.copy_(torch.tensor([1.5, 2.5, -3.5]))

    assert dst.tolist() == [[1, 2, -3], [1, 2, -3]]


def test_item_is_a_copy_to_the_host_and_kernels_are_none(npu):
    x = torch.randn(4, 4, device="npu")

    before = npu.figures()
    y = torch.nn.functional.softmax((x @ x.t()).relu_(), -1).sum()
    computed = npu.figures()
    y.item()
    read = npu.figures()

    assert (computed - before).host_to_device == (computed - before).device_to_host == Copies(0, 0)
    assert (read - computed).device_to_host == Copies(1, 4)


def test_to_another_device_is_one_copy_and_one_allocation(npu):
    x = torch.ones(8, device="npu:0")

    before = npu.figures()
    y = x.to("npu:1")
    found = npu.figures() - before

    assert y.device == SECOND
    assert found.device_to_device == Copies(1, 32)
    assert (found.memory[0].allocations, found.memory[1].allocations) == (0, 1)


def test_latency_passes_in_the_directions_named_only(npu):
    x = torch.ones(1000)

    with npu.copy_latency(fixed_ns=2_000_000, ns_per_byte=1_000, directions=("host_to_device",)):
        start = time.monotonic_ns()
        y = x.to("npu")
        there = time.monotonic_ns() - start
    with npu.copy_latency(fixed_ns=1 << 60, directions=("device_to_device",)):
        y.cpu()  # would not come back
    y.clone()

    assert there >= 2_000_000 + 4_000 * 1_000


def test_numpy_needs_the_cpu():
    with pytest.raises(TypeError, match="can't convert npu:0 device type tensor to numpy"):
        torch.ones(1, device="npu").numpy()


# Devices do not mix.


@pytest.mark.parametrize(
    ("combine", "others"),
    [
        (lambda a, b, c: a + b, ("npu:0", "npu:1")),
        (lambda a, b, c: a @ b, ("npu:1", "npu:0")),
        (lambda a, b, c: a @ c, ("cpu", "npu:0")),
        (lambda a, b, c: c @ a, ("cpu", "npu:0")),
        (lambda a, b, c: c + a, ("cpu", "npu:0")),
        (lambda a, b, c: a.add_(c), ("cpu", "npu:0")),
        (lambda a, b, c: torch.cat([a, b]), ("npu:1", "npu:0")),
        (lambda a, b, c: torch.where(a > 0, a, c), ("cpu", "npu:0")),
        (lambda a, b, c: torch.add(a, a, out=c), ("cpu", "npu:0")),
        (lambda a, b, c: a.masked_fill_(c > 0, 1), ("cpu", "npu:0")),
        (lambda a, b, c: a.index_select(0, torch.tensor([0])), ("cpu", "npu:0")),
        (lambda a, b, c: nn.functional.linear(a, c), ("cpu", "npu:0")),
        (lambda a, b, c: nn.functional.conv2d(a[None, None], b[None, None]), ("npu:1", "npu:0")),
        (lambda a, b, c: torch.addcmul(a, a, b), ("npu:0", "npu:1")),
        (lambda a, b, c: torch._foreach_add([a], [c]), ("cpu", "npu:0")),
    ],
)
def test_tensors_of_two_devices_are_refused(combine, others):
    a, b, c = torch.ones(2, 2, device="npu:0"), torch.ones(2, 2, device="npu:1"), torch.ones(2, 2)

    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as refusal:
        combine(a, b, c)

    assert all(name in str(refusal.value) for name in others)


def test_cpu_numbers_and_cpu_indices_may_stand_beside():
    x = torch.arange(4.0, device="npu:1")

    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert (torch.tensor(2.0) * x).device == SECOND
    assert x[torch.tensor([0, 3])].tolist() == [0, 3]
    assert x[torch.arange(4) > 1].tolist() == [2, 3]
    x[torch.tensor([1])] = 9
    assert x.tolist() == [0, 9, 2, 3]


# Random numbers.


def test_generators_draw_what_a_cpu_generator_of_that_seed_draws():
    there = torch.randn(7, device="npu:1", generator=torch.Generator("npu:1").manual_seed(3))

    assert torch.equal(there.cpu(), torch.randn(7, generator=torch.Generator().manual_seed(3)))


def test_each_device_has_a_state_of_its_own():
    torch.manual_seed(1)
    state = torch.npu.get_rng_state(1)
    host = torch.get_rng_state()

    first = torch.rand(3, device="npu:1")
    dropped = nn.functional.dropout(torch.ones(20, device="npu:1"))
    torch.npu.set_rng_state(state, 1)

    assert torch.equal(torch.rand(3, device="npu:1"), first)
    assert torch.equal(nn.functional.dropout(torch.ones(20, device="npu:1")), dropped)
    assert torch.equal(torch.rand(3, device="npu:0").cpu(), first.cpu())
    assert torch.equal(torch.get_rng_state(), host)


def test_fork_rng_keeps_the_state():
    before = torch.npu.get_rng_state()
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        torch.rand(3, device="npu")

    assert torch.equal(torch.npu.get_rng_state(), before)


def test_generator_of_the_cpu_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
        torch.randn(3, device="npu", generator=torch.Generator())


# Training.


# In double precision: Adam makes a step of the rounding error of a gradient that is none.
def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).double(), (5, 6)


def conv_net():
    body = (nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2))
    head = (nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Flatten(), nn.Linear(256, 3))
    return nn.Sequential(*body, *head).double(), (2, 3, 8, 8)


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double(), (2, 5, 8)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=False),
    "sgd-foreach": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, foreach=False),
    "adam-foreach": lambda p: torch.optim.Adam(p, 0.01, foreach=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, 0.01),
}


def train(model, optimizer, shape, device):
    torch.manual_seed(1)
    for _ in range(3):
        x = torch.randn(shape, dtype=torch.float64).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("make", [mlp, conv_net, encoder])
def test_training_comes_to_what_it_comes_to_on_the_cpu(make, name):
    model, shape = make()
    moved = copy.deepcopy(model).to("npu:1")

    expected = train(model, OPTIMIZERS[name](model.parameters()), shape, "cpu")
    optimizer = OPTIMIZERS[name](moved.parameters())
    found = train(moved, optimizer, shape, "npu:1")

    assert found == pytest.approx(expected)
    for a, b in zip(model.parameters(), moved.parameters(), strict=True):
        assert b.device == b.grad.device == SECOND
        torch.testing.assert_close(b.cpu(), a)
    moments = [x for x in tree_leaves(optimizer.state_dict()["state"]) if isinstance(x, torch.Tensor) and x.dim()]
    assert {x.device for x in moments} == {SECOND}


def test_encoder_takes_the_fast_path_in_evaluation():
    model, shape = encoder()
    x = torch.randn(shape, dtype=torch.float64)
    model.eval()

    with torch.no_grad():
        torch.testing.assert_close(copy.deepcopy(model).to("npu")(x.to("npu")).cpu(), model(x))


def test_module_to_keeps_the_parameter_objects(npu):
    model, _ = mlp()
    before = list(model.parameters())

    model.to("npu:1")
    assert all(a is b and a.device == SECOND for a, b in zip(model.parameters(), before, strict=True))
    assert {npu.owner_of(p.data_ptr()) for p in before} == {1}
    assert {npu.impl_class(p) for p in before} == {"other"}  # only the fields came over

    model.npu(0)
    model.cpu()
    assert all(a is b and a.is_cpu for a, b in zip(model.parameters(), before, strict=True))


def test_meta_module_gets_memory_by_to_empty(npu):
    with torch.device("meta"):
        model = nn.Linear(3, 2)

    model.to_empty(device="npu:1")
    model.reset_parameters()

    assert npu.owner_of(model.weight.data_ptr()) == 1
    assert model(torch.ones(1, 3, device="npu:1")).isfinite().all()


def test_autocast_lowers_products_and_keeps_losses():
    layer = nn.Linear(3, 4, device="npu")

    with torch.autocast("npu", dtype=torch.bfloat16):
        y = layer(torch.randn(2, 3, device="npu"))
        loss = nn.functional.mse_loss(y, torch.zeros_like(y))
    loss.backward()

    assert (y.dtype, loss.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    assert layer(torch.randn(2, 3, device="npu")).dtype == torch.float32


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_draws_the_same_dropout_again(use_reentrant):
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5)).to("npu")
    x = torch.randn(3, 4, device="npu", requires_grad=True)

    torch.npu.manual_seed_all(5)
    model(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.npu.manual_seed_all(5)
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()

    assert torch.equal(x.grad, expected)


def test_loader_batches_are_moved_over(npu):
    data = TensorDataset(torch.arange(8.0).view(4, 2), torch.arange(4))

    before = npu.figures()
    batches = [tuple(part.to("npu", non_blocking=True) for part in batch) for batch in DataLoader(data, batch_size=2)]

    assert (npu.figures() - before).host_to_device == Copies(4, 2 * (16 + 16))
    assert [x.tolist() for x, _ in batches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


# Saving and loading.


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_load_across_devices(assign):
    source, _ = mlp()
    target = copy.deepcopy(source).to("npu:1")
    state = source.to("npu:0").state_dict()
    with torch.no_grad():
        source[0].weight.fill_(3)

    target.load_state_dict(state, assign=assign)

    assert target[0].weight.device == (FIRST if assign else SECOND)
    assert torch.equal(target[0].weight.cpu(), source[0].weight.cpu())


@pytest.mark.parametrize(
    ("saved_on", "map_location", "loaded_on"),
    [
        ("cpu", "npu", "npu:0"),
        ("cpu", "npu:1", "npu:1"),
        ("npu:1", "cpu", "cpu"),
        ("npu:1", None, "npu:1"),
        ("npu:0", {"npu:0": "npu:1"}, "npu:1"),
        ("npu:0", lambda storage, location: storage.npu(1), "npu:1"),
    ],
)
def test_saved_tensors_load_where_they_are_mapped(saved_on, map_location, loaded_on):
    x = torch.arange(6.0).view(2, 3).to(saved_on)
    file = io.BytesIO()
    torch.save({"x": x, "view": x.t()}, file)

    file.seek(0)
    loaded = torch.load(file, map_location=map_location)

    assert loaded["x"].device == torch.device(loaded_on)
    assert torch.equal(loaded["view"].cpu(), x.t().cpu())
    assert loaded["view"].data_ptr() == loaded["x"].data_ptr()


def test_pickle_and_deepcopy_keep_the_device():
    x = nn.Parameter(torch.arange(3.0, device="npu:1"))

    for same in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert type(same) is nn.Parameter
        assert same.device == SECOND
        assert same.tolist() == x.tolist()
        assert same.data_ptr() != x.data_ptr()


# What is made of a tensor without its memory.


def test_fake_tensors_move_no_memory(npu):
    x = torch.ones(3, 3, device="npu:1")

    before = npu.figures()
    with FakeTensorMode() as mode:
        y = (mode.from_tensor(x) @ torch.empty(3, 3, device="npu:1")).relu().detach()

    assert y.device == SECOND
    assert npu.figures() == before


def test_modules_are_exported():
    layer = nn.Linear(3, 2, device="npu")
    x = torch.ones(1, 3, device="npu")

    program = torch.export.export(layer, (x,))

    assert torch.equal(program.module()(x).cpu(), layer(x).cpu())


def test_functions_are_transformed():
    x = torch.linspace(0, 1, 4, device="npu:1")

    assert torch.func.grad(lambda x: x.square().sum())(x).tolist() == (2 * x).tolist()
    assert torch.vmap(lambda x: x * 2)(x).device == SECOND


def test_zero_tensors_need_no_memory():
    x = torch.linspace(-1, 1, 4, device="npu:1", requires_grad=True)

    torch.sgn(x).sum().backward()  # the gradient is a torch._efficientzerotensor

    assert x.grad.device == SECOND
    assert x.grad.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "action",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_mkldnn(),
        lambda x: torch.from_dlpack(x),
        lambda x: x.cpu().pin_memory(),
        lambda x: nn.LSTM(3, 3, device="npu")(x),
        lambda x: torch.empty(1, device="npu", pin_memory=True),
    ],
)
def test_what_does_not_work_is_refused(action):
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        action(torch.ones(3, 3, device="npu"))


# Storages.


def test_storages_are_resized_on_their_own_device(npu):
    x = torch.arange(4.0, device="npu:1")
    storage = x.untyped_storage()

    storage.resize_(64)
    assert npu.owner_of(x.data_ptr()) == 1
    assert x.tolist() == [0, 1, 2, 3]

    storage.resize_(0)
    assert (storage.nbytes(), storage.data_ptr()) == (0, 0)
    assert storage.device == SECOND
    assert npu.describe_storage(x).resizes >= 2


def test_resize_grows_the_storage_and_never_shrinks_it():
    x = torch.arange(4.0, device="npu:1")

    x.resize_(2, 4)
    assert x.untyped_storage().nbytes() == 32
    assert x.flatten()[:4].tolist() == [0, 1, 2, 3]

    x.resize_(2)
    assert x.untyped_storage().nbytes() == 32


def test_set_exchanges_the_storage():
    x, y = torch.arange(6.0, device="npu"), torch.zeros(2, device="npu")

    y.set_(x.untyped_storage(), 1, (2, 2), (3, 1))
    assert y.tolist() == [[1, 2], [4, 5]]
    y.set_(x)
    assert y.data_ptr() == x.data_ptr()
    y.set_()
    assert (y.numel(), y.device) == (0, FIRST)
    with pytest.raises(RuntimeError, match="Attempted to set the storage of a tensor on device"):
        y.set_(torch.ones(3, device="npu:1"))
    with pytest.raises(RuntimeError, match="Attempted to set the storage of a tensor on device"):
        y.set_(torch.ones(3).untyped_storage())


def test_tensors_swap_across_devices():
    a, b = torch.ones(2, device="npu:1"), torch.zeros(3)

    torch.utils.swap_tensors(a, b)

    assert (a.device.type, b.device) == ("cpu", SECOND)
    assert (a.tolist(), b.tolist()) == ([0, 0, 0], [1, 1])


# The device module and torch.accelerator.


def test_accelerator_is_this_device():
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.device_count() == torch.npu.device_count() == 2
    with torch.npu.device(1):
        assert torch.accelerator.current_device_index() == 1
    torch.accelerator.synchronize()
    torch.npu.synchronize(1)
    assert torch.npu.is_available()
    assert torch.ones(1, device="npu").is_npu
    assert torch.get_device_module("npu") is torch.npu
    with pytest.raises(RuntimeError, match="invalid npu device ordinal 7"):
        torch.npu.set_device(7)


def test_memory_figures_of_pytorch_are_those_of_the_handle(npu):
    torch.npu.reset_peak_memory_stats(1)
    before = torch.npu.memory_allocated(1)

    x = torch.empty(1000, device="npu:1")
    inside = torch.npu.memory_allocated(1)
    del x

    assert inside - before == 4_000
    assert torch.npu.memory_allocated(1) == before == npu.figures().memory[1].live_bytes
    assert torch.npu.max_memory_allocated(1) == inside
    assert torch.npu.memory_stats(1)["allocated_bytes.all.peak"] == inside
    assert torch.npu.memory_reserved(1) >= before
    free, total = torch.npu.mem_get_info(1)
    assert free <= total
    torch.npu.empty_cache()


def test_streams_and_events_keep_order_and_time():
    stream, start, end = torch.npu.Stream(), *(torch.npu.Event(enable_timing=True) for _ in range(2))

    start.record()
    with stream:
        assert torch.npu.current_stream() == stream
        end.record(stream)
        stream.wait_event(start)
    x = torch.ones(3, device="npu")
    x.record_stream(stream)
    stream.synchronize()
    end.synchronize()

    assert stream.device == FIRST
    assert torch.npu.current_stream() != stream
    assert stream.query()
    assert end.query()
    assert start.elapsed_time(end) >= 0


# The controls.


def test_counters_know_what_lives(npu):
    before = npu.figures()

    x = torch.empty(100, dtype=torch.uint8, device="npu:1")
    made = npu.figures() - before
    del x
    gone = npu.figures() - before

    assert made.memory[1] == (1, 0, 1, 100)
    assert gone.memory[1] == (1, 1, 0, 0)
    assert made.memory[0] == gone.memory[0] == (0, 0, 0, 0)


def test_owner_of_an_address_is_its_live_block(npu):
    x = torch.empty(100, dtype=torch.uint8, device="npu:1")
    y = torch.empty(1, device="npu:0")
    first = x.data_ptr()

    assert [npu.owner_of(first + i) for i in (0, 50, 99, 100)] == [1, 1, 1, None]
    assert npu.owner_of(y.data_ptr()) == 0
    assert npu.owner_of(torch.ones(1).data_ptr()) is None
    assert npu.owner_of(0) is None
    assert npu.device_of_pointer(x[99:].data_ptr()) == "npu:1"
    with pytest.raises(RuntimeError, match="in no live block of an npu device"):
        npu.device_of_pointer(torch.ones(1).data_ptr())
    assert npu.has_context(0)
    assert npu.has_context(1)

    del x
    assert npu.owner_of(first) is None


def test_allocation_fails_when_it_is_told_to(npu):
    x = torch.ones(4, device="npu:1")

    with npu.fail_next_allocation(2):
        y = x + 1
        with pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory\. Tried to allocate 16 bytes on npu:1"):
            y + 1
        y + 1  # once
    with npu.fail_next_allocation():
        pass
    y + 1

    assert y.tolist() == [2, 2, 2, 2]


def test_failed_allocation_in_the_middle_of_a_module_leaves_it_usable(npu):
    model, shape = mlp()

    with npu.fail_next_allocation(3), pytest.raises(torch.OutOfMemoryError):
        model.to("npu:1")
    model.to("npu:1")

    assert model(torch.randn(shape, dtype=torch.float64, device="npu:1")).device == SECOND


@pytest.mark.parametrize("order", [0, -1])
def test_order_that_means_no_allocation_is_refused(npu, order):
    with pytest.raises(ValueError, match="the first allocation is number 1"), npu.fail_next_allocation(order):
        pass


# A process of its own.


@pytest.mark.parametrize(
    ("first", "threads"),
    [("load()", True), ("torch.ones(1, requires_grad=True).sum().backward()", False)],
    ids=["loaded-first", "loaded-late"],
)
def test_backward_runs_whenever_it_was_loaded(first, threads):
    # Not through Python's own end: a thread of the engine that asks for the GIL there ends the process by SIGABRT.
    program = f"""
import os
import torch
from tests.npu import load
{first}
npu = load()
kept = torch.ones(3, device="npu:1", requires_grad=True)
with torch.autograd.set_multithreading_enabled(npu.has_engine_threads):
    (kept * 2).sum().backward()
print(npu.has_engine_threads, kept.grad.tolist(), load() is npu, flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{threads} [2.0, 2.0, 2.0] True"


# PyTorch's own generic tests and operators.


@pytest.mark.filterwarnings("ignore")
def test_generic_device_tests_pass(show):
    need("expecttest", find_spec("expecttest") is not None, "PyTorch's test classes import it")
    from tests.npu.generic_cases import instantiated

    report = io.StringIO()
    result = unittest.TextTestRunner(report).run(instantiated())

    show(f"npu: {result.testsRun} generic device tests")
    assert result.wasSuccessful(), report.getvalue()
    assert result.testsRun >= 25
    assert not result.skipped


# What op_db has that says nothing of this device.
NOT_COMPARED = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",  # nobody wrote it
    "as_strided.partial_views",  # its samples need storages larger than the tensors
    "tensor_split",  # takes tensors of the CPU on any device
    "to",  # its samples ask for pinned memory
    "sparse.sampled_addmm", "sparse.mm.reduce",
}  # fmt: skip
# PyTorch itself chooses the kernels by the device: results are the same, strides need not be.
OTHER_KERNELS = {"nn.functional.scaled_dot_product_attention"}
SAMPLES, PARTS = 3, 2  # taking a sample is what takes time, under pytest


def outcome(op, sample):
    """Results and gradients of one sample."""
    torch.manual_seed(3)
    leaves = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
    results = [x for x in leaves if isinstance(x, torch.Tensor)]
    inputs = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    inputs = [x for x in inputs if x.requires_grad]
    outputs = [x for x in results if x.requires_grad]
    if inputs and outputs:
        ones = [torch.ones_like(x) for x in outputs]
        results += torch.autograd.grad(outputs, inputs, ones, allow_unused=True)
    return results


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.long)])
def test_operators_come_to_what_they_come_to_on_the_cpu(part, show):
    need("expecttest", find_spec("expecttest") is not None, "op_db imports it")
    from torch.testing._internal.common_methods_invocations import op_db

    def moved(value):
        if isinstance(value, torch.Tensor):
            return on(value, "npu:1")
        return SECOND if isinstance(value, torch.device) or value == "cpu" else value

    operators = compared = gradients = 0
    wrong = []
    for op in op_db[part::PARTS]:
        if torch.float32 not in op.dtypes or op.full_name in NOT_COMPARED:
            continue
        ran = 0
        samples = op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd)
        for sample in islice(samples, SAMPLES):
            try:
                expected = outcome(op, sample)
            except Exception:  # some samples are for another machine
                continue
            ran += 1
            try:
                there = copy.copy(sample)
                there.input, there.args, there.kwargs = tree_map(moved, (sample.input, sample.args, sample.kwargs))
                found = outcome(op, there)
                assert len(found) == len(expected)
                for a, b in zip(found, expected, strict=True):
                    if b is None:
                        assert a is None
                        continue
                    assert a.stride() == b.stride() or op.full_name in OTHER_KERNELS
                    torch.testing.assert_close(a.cpu(), b, equal_nan=True, rtol=1e-4, atol=1e-3)
                    gradients += b.grad_fn is None and op.supports_autograd
            except Exception as error:
                wrong.append(f"{op.full_name}: {type(error).__name__}: {str(error)[:200]}")
        operators += ran > 0
        compared += ran

    show(f"npu, op_db part {part + 1} of {PARTS}: {operators} operators, {compared} samples as on the CPU")
    assert not wrong, "\n".join(wrong)
    assert operators > 60
    assert gradients > 60
