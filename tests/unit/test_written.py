"""WriteWatch: which memory operators made, and which of its bytes they wrote."""

from __future__ import annotations

import inspect
import io
import random
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn import functional as F

from tensorplay import written
from tensorplay._native import C
from tensorplay.callers import shorten
from tensorplay.written import WriteWatch
from tests import helpers

HERE = shorten(__file__)


@pytest.fixture
def watch():
    with WriteWatch() as watch:
        yield watch


def here() -> str:
    """Answer the line that calls this, as a site reads."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{HERE}:{frame.f_back.f_lineno}"


def told(watch: WriteWatch, tensor: torch.Tensor) -> tuple[str, int | None, int | None]:
    """Answer state and numbers; they are exact."""
    answer = watch.of(tensor)
    assert answer.exact
    return answer[:3]


class Local(torch.Tensor):
    """Computes with the tensor in its dictionary, as DTensor and others do."""

    @staticmethod
    def __new__(cls, local):
        return torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype, device=local.device)

    def __init__(self, local) -> None:
        self._local_tensor = local

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [arg._local_tensor if type(arg) is cls else arg for arg in args]
        result = func(*plain, **(kwargs or {}))
        if func._schema.name.endswith("_"):
            return args[0]
        return cls(result) if isinstance(result, torch.Tensor) else result


# -- memory without values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "origin"),
    [
        (lambda: torch.empty(2, 3), "aten::empty"),
        (lambda: torch.empty_like(torch.ones(2, 3)), "aten::empty_like"),
        (lambda: torch.ones(1).new_empty(2, 3), "aten::empty aten::new_empty"),
        (lambda: torch.empty_strided((2, 3), (3, 1)), "aten::empty_strided"),
        (lambda: torch.ones(1).new_empty_strided((2, 3), (1, 2)), "aten::new_empty_strided"),
        (lambda: torch.empty_permuted((2, 3), (1, 0)), "aten::empty_permuted"),
        (lambda: torch.Tensor(2, 3), "aten::empty"),
        (lambda: torch.Tensor().resize_(2, 3), "aten::resize_"),
        (lambda: torch.empty(0).resize_as_(torch.ones(2, 3)), "aten::resize_as_"),
        (lambda: torch.empty(2, 3, out=torch.empty(0)), "aten::empty aten::resize_"),
        (lambda: torch.nn.Parameter(torch.empty(2, 3)), "aten::empty"),
        (lambda: torch.nn.utils.skip_init(torch.nn.Linear, 3, 2).weight, "aten::empty_like"),
        (lambda: torch.empty(2, 3).detach(), "aten::empty"),
        (lambda: torch.empty(2, 3).requires_grad_().t(), "aten::empty"),
        (lambda: torch.empty(3, 2).t_(), "aten::empty"),
        (lambda: torch.empty(2, 3).unsqueeze_(0).squeeze_(0).transpose_(0, 1).detach_(), "aten::empty"),
        (lambda: torch.empty(6).as_strided_((2, 3), (3, 1)), "aten::empty"),
        (lambda: torch.empty(0).set_(torch.empty(2, 3)), "aten::empty"),
        (lambda: torch.empty(2, 3).share_memory_(), "aten::empty"),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_memory_without_values(watch, make, origin, mode):
    with mode():
        tensor = make()

    answer = watch.of(tensor)
    assert (answer.state, answer.written_nbytes, answer.nbytes) == ("never", 0, 24)
    assert (answer.last_write, answer.copied_from) == (None, None)
    assert answer.origin in origin.split()
    assert (answer.site or "").startswith(HERE)


def test_the_line_is_the_users(watch):
    layer, line = torch.nn.utils.skip_init(torch.nn.Linear, 2, 2), here()
    torch.nn.init.ones_(layer.weight), (wrote := here())

    answer = watch.of(layer.weight)
    assert answer[3:] == ("aten::empty_like", line, f"aten::fill_ at {wrote}", None, True)


def test_deterministic_fill_is_no_write(watch):
    torch.use_deterministic_algorithms(True)
    try:
        tensor = torch.empty(3)
    finally:
        torch.use_deterministic_algorithms(False)

    assert tensor.isnan().all()
    assert told(watch, tensor) == ("never", 0, 12)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.zeros_like(x),
        lambda x: x + 1,
        lambda x: torch.tensor([1.0] * 6),
        lambda x: torch.ones(6).t(),
        lambda x: torch.arange(6.0).view(2, 3).t().contiguous(),
        lambda x: torch.randn(2, 3),
        lambda x: F.pad(x, (1, 1))[:, :3],
        lambda x: torch.stack([x[0], x[1]]),
        lambda x: torch.vmap(lambda row: row * 2)(x),
        lambda x: torch.func.grad(lambda y: (y * y).sum())(x),
        lambda x: torch.cond(torch.tensor(True), lambda y: y + 1, lambda y: y - 1, (x,)),
        lambda x: torch.eye(3).to_sparse().to_dense()[:2],
    ],
)
def test_what_other_operators_answer_is_written(watch, make):
    tensor = make(torch.empty(2, 3))

    assert told(watch, tensor) == ("written", 24, 24)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, 3, device="meta"),
        lambda: torch.empty(0),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch._efficientzerotensor((2, 3)),
    ],
)
def test_without_memory_of_its_own(watch, make):
    assert told(watch, make()) == ("unseen", None, None)


def test_fake_tensors_are_passed_over(watch):
    with FakeTensorMode():
        inside = torch.empty(3).fill_(1) + 1
    with FakeTensorMode(), WriteWatch() as inner:
        outside = torch.empty(3).fill_(1) + 1

    assert watch.of(inside).state == inner.of(outside).state == "unseen"


def test_meta_device_context(watch):
    with torch.device("meta"):
        layer = torch.nn.Linear(2, 3)
    layer.to_empty(device="cpu")
    before = told(watch, layer.weight)

    layer.reset_parameters()

    assert before == ("never", 0, 24)
    assert told(watch, layer.weight) == ("written", 24, 24)
    assert told(watch, layer.bias) == ("written", 12, 12)


# -- writes -----------------------------------------------------------------------------------------------------------


def _set_item(x):
    x[:] = 1


def _by_mask(x):
    x[torch.ones(4, 4, dtype=torch.bool)] = 1


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.fill_(1),
        lambda x: x.zero_(),
        lambda x: x.copy_(torch.ones(4, 4)),
        lambda x: x.copy_(1 * torch.ones(())),
        _set_item,
        _by_mask,
        lambda x: x.data.fill_(1),
        lambda x: x.detach().copy_(torch.ones(4, 4)),
        lambda x: x.t().normal_(),
        lambda x: x.view(torch.int32).fill_(1),
        lambda x: torch.add(torch.ones(4, 4), 1, out=x),
        lambda x: torch.stack([torch.ones(4)] * 4, out=x),
        lambda x: torch.max(torch.ones(4, 4, 2), 2, out=(x, torch.empty(4, 4, dtype=torch.int64))),
        lambda x: torch._foreach_copy_([x, torch.ones(1)], [torch.ones(4, 4), torch.ones(1)]),
        lambda x: torch.nn.init.kaiming_uniform_(x),
        lambda x: torch.nn.init.orthogonal_(x),
        lambda x: torch.nn.init.trunc_normal_(x),
        lambda x: [x[i].fill_(i) for i in (2, 0, 3, 1)],
        lambda x: [x[:, i].fill_(i) for i in range(4)],
        lambda x: [x[:, i].fill_(i) for i in (2, 0, 3, 1)],
        lambda x: [x[::2].fill_(1), x[1::2].fill_(1)],
    ],
)
def test_writes(watch, write):
    x = torch.empty(4, 4)

    write(x)

    assert told(watch, x) == ("written", 64, 64)
    assert watch.of(x).origin == "aten::empty"


@pytest.mark.parametrize(
    "compute", [lambda x: x.mul_(2), lambda x: x.add_(1), lambda x: torch._foreach_add_([x], 1), lambda x: x.relu_()]
)
def test_computing_in_place_makes_garbage_of_garbage(compute):
    with WriteWatch() as watch:
        x = torch.empty(4, 4)
        compute(x)
        y = torch.empty(4, 4)
        y.fill_(1)
        compute(y)
    assert watch.of(x).state == "never"
    assert watch.of(y).state == "written"


@pytest.mark.parametrize(
    ("write", "nbytes"),
    [
        (lambda x: x[0].fill_(1), 16),
        (lambda x: x[:, 1].fill_(1), 16),
        (lambda x: x[1:3, 1:3].fill_(1), 16),
        (lambda x: [x[0].fill_(1), x[:, 0].fill_(1)], 28),
        (lambda x: [x[:, i].fill_(1) for i in (0, 1, 3)], 48),
        (lambda x: x.diagonal().fill_(1), 16),
        (lambda x: x[0, :0].fill_(1), 0),
        (lambda x: x[3, 3].fill_(1), 4),
        (lambda x: x.view(torch.int16)[0, :1].fill_(1), 2),
        (lambda x: x.requires_grad_().retain_grad(), 0),
        (lambda x: x.sum().item(), 0),
    ],
)
def test_bytes_are_counted(watch, write, nbytes):
    x = torch.empty(4, 4)

    write(x)

    assert told(watch, x) == ("partly" if nbytes else "never", nbytes, 64)


def test_a_view_is_told_for_itself(watch):
    x = torch.empty(4, 4)
    x[:2] = 1
    x[3, 0] = 1

    assert told(watch, x[0]) == ("written", 16, 16)
    assert told(watch, x[2]) == ("never", 0, 16)
    assert told(watch, x[3]) == ("partly", 4, 16)
    assert told(watch, x[:, 0]) == ("partly", 12, 16)
    assert told(watch, x[:, 1].expand(3, 4)) == ("partly", 8, 16)


def test_memory_that_was_there():
    x = torch.ones(4)
    y = torch.ones(4)
    with WriteWatch() as watch:
        view, alias = x.view(2, 2), torch.ops.aten._unsafe_view(y, (2, 2))
        before = watch.of(view)
        x[0].fill_(2), (line := here())

    assert before == ("unseen", None, 16, None, None, None, None, True)
    assert watch.of(alias).state == "unseen"
    answer = watch.of(x)
    assert answer[:6] == ("partly", 4, 16, None, None, f"aten::fill_ at {line}")


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_training(watch, kind, foreach):
    layer = torch.nn.Linear(2, 3)
    optimizer = kind(layer.parameters(), lr=0.1, foreach=foreach)
    layer(torch.ones(4, 2)).sum().backward()
    optimizer.step()

    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    tensors = [layer.weight, layer.bias, layer.weight.grad, layer.bias.grad, *states]
    assert {watch.of(tensor).state for tensor in tensors} == {"written"}


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict(watch, assign):
    state = torch.nn.Linear(2, 3).state_dict()
    del state["bias"]
    layer = torch.nn.Linear(2, 3, device="meta").to_empty(device="cpu")

    layer.load_state_dict(state, strict=False, assign=assign)

    assert told(watch, layer.weight) == ("written", 24, 24)
    assert told(watch, layer.bias) == ("never", 0, 12)


def test_resize(watch):
    x = torch.empty(2).fill_(1)

    x.resize_(5)

    assert told(watch, x) == ("partly", 8, 20)
    assert told(watch, x[:2]) == ("written", 8, 8)
    assert watch.of(x).origin == "aten::resize_"
    assert told(watch, x.resize_(1).resize_(2)) == ("written", 8, 8)


def test_resize_of_memory_that_was_there():
    x = torch.ones(2)
    with WriteWatch() as watch:
        x.resize_(3)

    assert told(watch, x) == ("partly", 8, 12)


def test_a_storage_may_be_resized_by_itself(watch):
    x = torch.ones(2)

    x.untyped_storage().resize_(16)

    assert told(watch, x.as_strided((4,), (1,))) == ("partly", 8, 16)


def test_outputs_that_grow(watch):
    x = torch.stack([torch.ones(2), torch.ones(2)], out=torch.empty(0))

    assert told(watch, x) == ("written", 16, 16)


def test_memory_copied_on_write(watch):
    x = torch.ones(3)
    y = x._lazy_clone()
    z = torch.empty(3)._lazy_clone()
    y[0] = z[0] = 2

    assert told(watch, y) == ("written", 12, 12)
    assert told(watch, z) == ("partly", 4, 12)


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.clone(),
        lambda x: x.to(torch.float64),
        lambda x: x.bfloat16(),
        lambda x: x.t().contiguous(),
        lambda x: x.t().reshape(6),
        lambda x: x.detach().clone().float(),
        lambda x: torch.ones(2, 3).copy_(x),
        lambda x: torch.empty(2, 3).copy_(x),
        lambda x: torch.empty(4, 2, 3).copy_(x),
        lambda x: torch.ops.aten.clone.out(x, out=torch.ones(2, 3)),
        lambda x: torch._foreach_copy_([torch.ones(2, 3)], [x])[0],
        lambda x: torch.nn.Parameter(x).data.to("cpu", torch.float16),
        lambda x: torch.ones(3, 2).t().copy_(x),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_copies_of_memory_without_values(watch, copy, mode):
    with mode():
        x, line = torch.empty(2, 3), here()
        copied = copy(x)

    answer = watch.of(copied)
    assert (answer.state, answer.written_nbytes, answer.exact) == ("never", 0, True)
    assert answer.copied_from == f"aten::empty at {line}"


def test_a_later_write_counts(watch):
    x = torch.empty(4).clone()
    x[:2] = 1
    partly = watch.of(x)
    x[2:] = 1

    assert (partly.state, partly.written_nbytes, partly.copied_from is None) == ("partly", 8, False)
    assert (watch.of(x).state, watch.of(x).copied_from) == ("written", None)


def test_a_copy_into_a_part(watch):
    x = torch.ones(4, 4)
    x[1] = torch.empty(4)

    assert told(watch, x) == ("partly", 48, 64)
    assert told(watch, x[1]) == ("never", 0, 16)
    assert told(watch, x[2:]) == ("written", 32, 32)
    assert watch.of(x[2:]).copied_from is None


def test_a_copy_into_memory_that_was_there():
    x = torch.ones(4, 4)
    with WriteWatch() as watch:
        x[1] = torch.empty(4)

    assert told(watch, x) == ("partly", 48, 64)
    assert watch.of(x).origin is None


@pytest.mark.parametrize(
    ("copy", "nbytes", "of"),
    [
        (lambda x: x.clone(), 16, 64),
        (lambda x: x.double(), 32, 128),
        (lambda x: x.half(), 8, 32),
        (lambda x: torch.ones(4, 4).copy_(x), 16, 64),
        (lambda x: x[:2].clone(), 16, 32),
        (lambda x: x[0].clone(), 16, 16),
        (lambda x: x[2:].clone(), 0, 32),
    ],
)
def test_copies_of_a_part(watch, copy, nbytes, of):
    x = torch.empty(4, 4)
    x[0] = 1

    copied = copy(x)

    assert told(watch, copied) == ("never" if nbytes == 0 else "written" if nbytes == of else "partly", nbytes, of)


def test_copies_of_a_part_to_other_places(watch):
    x = torch.empty(4, 4)
    x[0] = 1

    answer = watch.of(x.t().contiguous())

    assert (answer.state, answer.written_nbytes, answer.exact) == ("partly", 0, False)


def test_copies_of_what_was_there_are_written():
    x = torch.ones(4)
    y = torch.ones(4)
    with WriteWatch() as watch:
        x[0] = 1
        assert told(watch, x.clone()) == told(watch, y.clone()) == ("written", 16, 16)


def test_a_copy_onto_itself(watch):
    x = torch.empty(4)
    x[:2] = 1
    x.copy_(x)

    assert told(watch, x) == ("partly", 8, 16)


def test_what_is_made_without_operators_is_unseen(watch):
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    file.seek(0)

    assert watch.of(torch.load(file)).state == "unseen"
    assert watch.of(torch.frombuffer(bytearray(12), dtype=torch.float32)).state == "unseen"
    assert watch.of(torch.ones(1).new_tensor([])).state == "unseen"


# -- wrappers ---------------------------------------------------------------------------------------------------------


def test_wrapper(watch):
    x = Local(torch.ones(2, 3))
    made = torch.empty_like(x)
    copied = made.clone()
    before = [told(watch, tensor) for tensor in (x, made, made._local_tensor, copied)]
    made.fill_(1)

    assert before == [("written", 24, 24)] + [("never", 0, 24)] * 3
    assert told(watch, made) == told(watch, made._local_tensor) == ("written", 24, 24)
    assert told(watch, copied.copy_(made)) == told(watch, x + 1) == ("written", 24, 24)
    assert told(watch, copied.copy_(torch.empty_like(x))) == ("never", 0, 24)


@pytest.mark.filterwarnings("ignore")
def test_dtensor(watch, single_process_group):
    mesh = init_device_mesh("cpu", (1,))
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    made = torch.empty_like(x)
    states = [told(watch, tensor)[0] for tensor in (x, made, made.to_local(), made.clone(), made.full_tensor())]

    assert states == ["written", "never", "never", "never", "never"]
    other = torch.empty_like(x).copy_(made)
    assert told(watch, other) == ("never", 0, 64)
    with torch.no_grad():
        made.normal_()
    assert told(watch, made) == told(watch, other.copy_(made)) == ("written", 64, 64)


def test_module_of_dtensors(watch, single_process_group):
    mesh = init_device_mesh("cpu", (1,))
    with torch.device("meta"):
        layer = torch.nn.Linear(2, 3)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, torch.nn.Parameter(distribute_tensor(parameter, mesh, [Replicate()])))
    layer.to_empty(device="cpu")
    before = told(watch, layer.weight)
    torch.nn.init.ones_(layer.weight)

    assert (before[0], watch.of(layer.bias).state) == ("never", "never")
    assert told(watch, layer.weight) == ("written", 24, 24)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: dist.all_reduce(x),
        lambda x: dist.all_gather_into_tensor(x, torch.ones(4)),
        lambda x: dist.all_gather([x], torch.ones(4)),
        lambda x: dist.scatter(x, [torch.ones(4)]),
        lambda x: dist.gather(torch.ones(4), [x]),
        lambda x: dist.reduce(x, 0),
        lambda x: dist.reduce_scatter_tensor(x, torch.ones(4)),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_collectives_write(watch, single_process_group, run):
    x = torch.empty(4)

    run(x)

    assert told(watch, x) == ("written", 16, 16)


def test_a_broadcast_writes_elsewhere(watch, single_process_group, monkeypatch):
    x = torch.empty(4)
    dist.broadcast(x, 0)
    sent = watch.of(x).state
    monkeypatch.setattr(written, "_is_source", lambda args: False)
    dist.broadcast(x, 0)

    assert (sent, watch.of(x).state) == ("never", "written")


def test_a_gather_only_reads_what_it_sends(watch, single_process_group):
    x = torch.empty(4)
    dist.all_gather([torch.empty(4)], x)

    assert watch.of(x).state == "never"


def test_custom_operators_go_by_their_schema(watch):
    with torch.library._scoped_library("tensorplay_written", "DEF") as library:
        library.define("fill(Tensor(a!) x, Tensor y) -> ()")
        library.impl("fill", lambda x, y: None, "CPU")
        x, y = torch.empty(2), torch.empty(2)
        torch.ops.tensorplay_written.fill(x, y)

    assert (watch.of(x).state, watch.of(y).state) == ("written", "never")
    assert (watch.of(x).last_write or "").startswith("tensorplay_written::fill at ")


# -- the watch itself -------------------------------------------------------------------------------------------------


def test_keeps_nothing_alive(watch):
    x = torch.empty(1000)
    y = x.clone()
    x[:10] = y[:10]
    gone = [weakref.ref(tensor) for tensor in (x, y)]
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in (x, y)]
    use_counts = [C.read(tensor).storage.use_count for tensor in (x, y)]
    with helpers.collected_by_hand():
        del x, y
        alive = [ref() for ref in gone + storages]

    assert alive == [None] * 4
    assert use_counts == [2, 2]  # the tensor and its storage's object, which the line before asked for


def test_recycled_addresses_are_not_mixed_up(watch):
    for number in range(200):
        torch.empty(100)
        loaded = torch.frombuffer(bytearray(400), dtype=torch.float32)
        storage = torch.UntypedStorage(400)
        plain = torch.tensor([0.0]).set_(storage, 0, (100,))
        assert watch.of(loaded).state == watch.of(plain).state == "unseen", number


def test_forgets_what_is_gone(watch):
    kept = torch.empty(4)
    for _ in range(5000):
        torch.empty(4)

    assert len(watch._ledger._memories) <= written._FIRST_SWEEP
    assert watch.of(kept).state == "never"


def test_after_the_block():
    with WriteWatch() as watch:
        x = torch.empty(4)
    x.fill_(1)

    assert watch.of(x).state == "never"  # out of its sight
    with watch:
        x.fill_(1)
    assert watch.of(x).state == "written"


def test_watches_nest(watch):
    with WriteWatch() as inner:
        x = torch.empty(4)

    assert told(watch, x) == told(inner, x) == ("never", 0, 16)


def test_errors_of_operators_are_the_users(watch):
    x = torch.empty(4)
    with pytest.raises(RuntimeError, match="size of tensor"):
        x.add_(torch.ones(3))
    with pytest.raises(NotImplementedError, match="meta"):
        x.copy_(torch.empty(4, device="meta"))

    assert watch.of(x).state == "never"


def test_a_failure_of_ours_is_not(watch, monkeypatch):
    monkeypatch.setattr(written, "_parts", lambda tensor: 1 / 0)

    assert (torch.empty(4).fill_(1) + 1).sum() == 8


def test_plain_subclass(watch):
    x = torch.empty(4).as_subclass(helpers.Plain)
    x.fill_(1)

    assert watch.of(x).state == "written"


def test_other_threads_are_out_of_sight(watch):
    x = torch.empty(4)
    thread = threading.Thread(target=lambda: x.fill_(1))
    thread.start()
    thread.join()

    assert watch.of(x).state == "never"


def test_backward_of_views_and_checkpoints(watch):
    x = torch.ones(4, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda t: t.view(2, 2).exp()[0], x, use_reentrant=False)
    y.sum().backward()

    assert told(watch, x.grad) == ("written", 16, 16)


def test_many_pieces(watch):
    x = torch.empty(3000, 3)
    order = list(range(3000))
    random.Random(0).shuffle(order)
    for row in order:
        x[row, :2] = 1
    partly = watch.of(x)
    x.fill_(1)

    assert (partly.state, partly.nbytes, partly.exact) == ("partly", 36000, False)
    assert written._MOST_PIECES * 8 <= (partly.written_nbytes or 0) < 24000
    assert told(watch, x) == ("written", 36000, 36000)


def test_rows_in_order_are_one_piece(watch):
    x = torch.empty(2000, 3)
    for row in range(2000):
        x[row] = 1

    assert told(watch, x) == ("written", 24000, 24000)


def test_columns_in_order_are_one_piece(watch):
    x = torch.empty(3, 2000)
    for column in range(1999):
        x[:, column] = 1

    assert told(watch, x) == ("partly", 23988, 24000)
    x[:, 1999] = 1
    assert told(watch, x) == ("written", 24000, 24000)


def test_random_writes_are_counted_byte_by_byte(watch):
    chance = random.Random(0)
    for _ in range(40):
        x = torch.empty(6, 8, dtype=torch.int16)
        truth = bytearray(96)
        for _ in range(chance.randrange(1, 7)):
            rows, columns = sorted(chance.sample(range(7), 2)), sorted(chance.sample(range(9), 2))
            step = chance.randrange(1, 4)
            x[rows[0] : rows[1], columns[0] : columns[1] : step] = 1
            for row in range(*rows):
                for column in range(*columns, step):
                    truth[row * 16 + column * 2 : row * 16 + column * 2 + 2] = b"\1\1"
        for view, seen in ((x, truth), (x[1], truth[16:32]), (x.view(-1)[3:40], truth[6:80])):
            assert told(watch, view)[1:] == (sum(seen), len(seen))


@pytest.mark.parametrize("when", ["before", "within"])
def test_compiled_code_stays_compiled(watch, when):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: (x + 1).relu(), backend=backend, fullgraph=True)
    if when == "before":
        with torch.utils._python_dispatch._disable_current_modes():
            compiled(torch.ones(3))

    assert told(watch, compiled(torch.ones(3))) == ("written", 12, 12)
    assert len(graphs) == 1


def test_what_generated_code_allocates_is_written(watch):
    code = compile("x = torch.empty_strided((3,), (1,))", "/tmp/torchinductor_me/ab/cab.py", "exec")
    names = {"torch": torch}
    exec(code, names)

    assert told(watch, names["x"]) == ("written", 12, 12)


def test_paths_of_torch_are_known():
    assert torch.__file__.startswith(written._INTERNAL)
    assert not str(Path(__file__)).startswith(written._INTERNAL)
