"""TP205, TP301, TP303, TP304, TP314: each fires, its healthy twin and near misses stay silent, random ones agree."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module, init_device_mesh
from torch.utils.checkpoint import checkpoint

import tensorplay as tp
from tests import helpers

LARGE = 100_000
"""Elements: 400 000 bytes."""


def found(objs, code: str) -> list[tp.Finding]:
    return [finding for finding in tp.check(objs).findings if finding.code == code]


def the_finding(objs, code: str) -> tp.Finding:
    (finding,) = found(objs, code)
    return finding


def codes(objs) -> list[str]:
    """What is said of storages, without layouts and views."""
    return [finding.code for finding in tp.check(objs).findings if finding.code[:3] == "TP3"]


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Write [tool.tensorplay] of the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> None:
        (tmp_path / "pyproject.toml").write_text(f"[tool.tensorplay]\n{text}\n")

    return write


# -- TP205 partial overlap


def test_tp205_slices_that_overlap_in_part_fire():
    x = torch.arange(10.0)
    a, b = x[:6], x[4:]

    finding = the_finding({"a": a, "b": b}, "TP205")

    assert (finding.severity, finding.evidence["shared_bytes"]) == ("info", 8)
    assert finding.evidence["tensors"] == ["a", "b"]
    assert finding.evidence["complete"]
    a.zero_()
    assert b[:2].eq(0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (x[:6], x[6:]),
        lambda x: (x, x[2:4]),
        lambda x: (x[:6], x[:6]),
        lambda x: (x[::2], x[1::2]),
        lambda x: (x[:6], x[4:].clone()),
        lambda x: (x[:0], x[4:]),
        lambda x: (x.view(10, 5)[:, 0], x.view(10, 5)[:, 1]),
    ],
)
def test_tp205_is_silent_for_disjoint_equal_and_contained(make):
    assert found({"both": make(torch.arange(50.0))}, "TP205") == []


def test_tp205_is_silent_for_empty_tensors_at_one_address():
    assert found({"a": torch.zeros(2, 0), "b": torch.zeros(0)}, "TP205") == []


def test_tp205_is_one_finding_a_storage():
    x, y = torch.arange(12.0), torch.arange(12.0)
    objs = {"x": [x[:5], x[4:8], x[7:]], "y": [y[:6], y[3:]]}

    first, second = found(objs, "TP205")

    assert [[pair[0], pair[1], pair[2]] for pair in first.evidence["pairs"]] == [["x[0]", "x[1]", 4],
                                                                              ["x[1]", "x[2]", 4]]  # fmt: skip
    assert "1 more pair" in first.subject
    assert second.evidence["tensors"] == ["y[0]", "y[1]"]


def test_tp205_says_where_there_are_more_pairs_than_it_compares():
    x = torch.arange(5_000.0)
    windows = [x[i : i + 100] for i in range(1_000)]

    finding = the_finding({"windows": windows}, "TP205")

    assert not finding.evidence["complete"]
    assert "at least" in finding.subject


def test_tp205_finds_the_one_pair_among_thousands_of_slices():
    x = torch.arange(20_000.0)
    slices = [x[i * 10 : i * 10 + 10] for i in range(1_990)]

    finding = the_finding({"slices": slices, "odd": x[19_895:19_905], "end": x[19_901:]}, "TP205")

    assert finding.evidence["pairs"] == [["slices[1989]", "odd", 20], ["odd", "end", 16]]


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(1, 3)), min_size=2, max_size=6, unique=True
    )
)
@settings(deadline=None)
def test_tp205_on_random_slices(pieces):
    x = torch.zeros(80)
    views = [x[begin : begin + length * step : step] for begin, length, step in pieces]
    reached = [helpers.cells(v.shape, v.stride(), v.storage_offset()) for v in views]

    pairs = [pair for finding in found({"v": views}, "TP205") for pair in finding.evidence["pairs"]]

    # Of equal ones the first stands for all.
    geometries = {(v.storage_offset(), v.shape, v.stride()): n for n, v in reversed(list(enumerate(views)))}
    numbers = sorted(geometries.values())
    partial = {
        (f"v[{a}]", f"v[{b}]", 4 * len(reached[a] & reached[b]))
        for a in numbers
        for b in numbers
        if a < b and reached[a] & reached[b] and reached[a] - reached[b] and reached[b] - reached[a]
    }
    assert {tuple(pair) for pair in pairs} == partial


# -- TP301 small view, large storage


def test_tp301_small_view_of_a_dropped_tensor_fires():
    x = torch.zeros(LARGE)[:10]

    finding = the_finding({"x": x}, "TP301")

    assert (finding.severity, finding.where.name) == ("warning", "x")
    evidence = finding.evidence
    assert (evidence["storage_nbytes"], evidence["view_nbytes"], evidence["ratio"]) == (400_000, 40, 0.0001)
    assert (evidence["retained_bytes"], evidence["visible_bytes"], evidence["pinned_nbytes"]) == (400_000, 40, 399_960)
    assert (evidence["is_view"], evidence["contiguous"], evidence["other_tensors"]) == (True, True, 0)
    assert finding.fix == "clone() it: copies 40 B, frees 390.6 KiB"


def under(mode, make):
    with mode():
        return make()


def freed_graph():
    h = torch.zeros(LARGE)
    loss = (h * torch.ones(LARGE, requires_grad=True)).sum()
    view = h.detach()[:10]
    loss.backward()
    return view, loss


def through_file(**options):
    file = io.BytesIO()
    torch.save(torch.zeros(LARGE)[:10], file)
    file.seek(0)
    return torch.load(file, **options)


def saved_before():
    """A view whose storage has a Python object, as torch.save makes one, that nobody holds."""
    x = torch.zeros(LARGE)[:10]
    torch.save(x, io.BytesIO())
    return x


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(LARGE)[:10].detach(),
        lambda: torch.zeros(LARGE, requires_grad=True)[:10].data,
        lambda: torch.zeros(LARGE, requires_grad=True)[:10],
        lambda: (torch.zeros(LARGE, requires_grad=True) * 1)[:10],
        lambda: under(torch.no_grad, lambda: torch.zeros(LARGE, requires_grad=True)[:10]),
        lambda: under(torch.inference_mode, lambda: torch.zeros(LARGE)[:10]),
        lambda: torch.zeros(LARGE)[:1].expand(50),
        lambda: torch.zeros(LARGE)[:0],
        lambda: (x := torch.zeros(LARGE), [x[:0], x[500:500]])[1],
        lambda: torch.zeros(LARGE)[::3],
        lambda: torch.zeros(300, 300)[:, 0],
        lambda: torch.zeros(300, 300).t()[0],
        lambda: torch.zeros(LARGE).as_strided((5,), (100,)),
        lambda: torch.zeros(LARGE).view(torch.int32)[:3],
        lambda: torch.zeros(LARGE)[:10][:5][2:],
        lambda: torch.zeros(LARGE, dtype=torch.complex64).imag[:3],
        lambda: torch.nested.nested_tensor([torch.zeros(3, 1000), torch.zeros(50, 1000)]).unbind()[0],
        lambda: nn.Parameter(torch.zeros(LARGE)[:10]),
        lambda: torch.zeros(LARGE).resize_(10),
        lambda: torch.quantize_per_tensor(torch.zeros(LARGE), 0.1, 0, torch.quint8)[:10],
        lambda: torch.sparse_coo_tensor([[0, 1]], torch.zeros(LARGE)[:2], (4,), check_invariants=False),
        lambda: pickle.loads(pickle.dumps(torch.zeros(LARGE)[:10])),
        lambda: copy.deepcopy(torch.zeros(LARGE)[:10]),
        lambda: helpers.Plain(torch.zeros(LARGE)[:10]),
        lambda: (lambda grown: grown.grad[:10])(with_gradient()),
        through_file,
        saved_before,
        freed_graph,
        lambda: torch.zeros(16 * 256 + 1)[:1],
    ],
)
def test_tp301_fires_where_nobody_else_sees_the_rest(make):
    assert codes({"x": make()}) == ["TP301"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.from_numpy(np.zeros(LARGE))[:10],
        lambda: torch.frombuffer(bytearray(LARGE), dtype=torch.uint8)[:10],
        lambda: torch.from_numpy(np.zeros((LARGE, 2))[1:, 0])[:10],
    ],
)
def test_tp301_array_that_only_a_view_keeps_fires(make):
    assert [f.code for f in tp.check({"x": make()}).findings if f.severity != "info"] == ["TP301"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(100, 1000)[:, 0].numpy(),
        lambda: torch.zeros(100, 1000, requires_grad=True)[:, 0].detach().numpy(),
        lambda: torch.zeros(100, 1000).numpy()[:, 0],
        lambda: torch.zeros(100, 1000).numpy()[::-1, 3][2:],
        lambda: np.asarray(torch.zeros(LARGE)[10:20]),
    ],
)
def test_tp301_array_of_a_dropped_tensor_fires(make):
    rows = [make() for _ in range(3)]

    finding = the_finding({"rows": rows}, "TP301")

    assert (finding.severity, finding.evidence["tensors"]) == ("warning", ["rows[0]", "rows[1]", "rows[2]"])
    assert (finding.evidence["view_nbytes"], finding.evidence["storage_nbytes"]) == (rows[0].nbytes, 400_000)
    assert (finding.evidence["storages"], finding.evidence["pinned_nbytes"]) == (3, 3 * (400_000 - rows[0].nbytes))
    assert (
        finding.fix == f"copy() each: copies {3 * rows[0].nbytes / 1024:.1f} KiB, frees 1.1 MiB" or rows[0].size == 10
    )
    assert codes({"rows": [row.copy() for row in rows]}) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: (x := torch.zeros(LARGE), (x, x[:10].numpy()))[1],
        lambda: torch.zeros(LARGE).numpy(),
        lambda: (array := torch.zeros(LARGE).numpy(), (array, array[:10]))[1],
        lambda: torch.zeros(LARGE)[: LARGE - 10].numpy(),
        lambda: torch.zeros(LARGE).share_memory_()[:10].numpy(),
        lambda: np.zeros(LARGE)[:10],
        lambda: torch.from_numpy(np.zeros(LARGE)[:10]).numpy(),
    ],
)
def test_tp301_is_silent_for_arrays_whose_memory_is_seen_or_not_ours(make):
    assert codes({"x": make()}) == []


@pytest.mark.parametrize(
    "hold", [lambda x: x, lambda x: x[:], lambda x: x.numpy(), lambda x: (x * x.requires_grad_()).sum()]
)
def test_tp301_is_silent_for_an_array_while_its_tensor_lives(hold):
    x = torch.zeros(LARGE)
    row, held = x[:10].detach().numpy(), hold(x)
    del x

    assert codes({"row": row}) == []
    del held
    gc.collect()
    assert codes({"row": row}) == ["TP301"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(LARGE),
        lambda: torch.zeros(LARGE).view(1000, 100),
        lambda: torch.zeros(1).expand(LARGE),
        lambda: torch.zeros(LARGE)[:10].clone(),
        lambda: torch.zeros(300, 300)[:, :2].contiguous(),
        lambda: torch.zeros(LARGE)[: LARGE - 10],
        lambda: torch.zeros(LARGE).chunk(2),
        lambda: (x := torch.zeros(LARGE), (x[::2], x[1::2]))[1],
        lambda: torch.zeros(15 * 256)[:1],
        lambda: torch.zeros(2, 0),
        lambda: torch.zeros(LARGE, device="meta")[:10],
        lambda: helpers.fake("cpu"),
        lambda: (array := np.zeros(LARGE), torch.from_numpy(array)[:10]),
        lambda: torch.from_numpy(np.zeros(LARGE)[:10]),
        lambda: (buffer := bytearray(LARGE), torch.frombuffer(buffer, dtype=torch.uint8)[:10]),
        lambda: torch.from_dlpack(torch.zeros(LARGE))[:10],
        lambda: torch.zeros(LARGE).share_memory_()[:10],
        lambda: torch._lazy_clone(torch.zeros(LARGE))[:10],
        lambda: torch.eye(500).to_sparse(),
        lambda: torch.eye(500).to_sparse_csr(),
        lambda: torch.zeros(LARGE).to_mkldnn(),
        lambda: torch.nested.nested_tensor([torch.zeros(300, 100), torch.zeros(500, 100)]),
        lambda: torch.nested.nested_tensor([torch.zeros(300, 100)], layout=torch.jagged),
        lambda: nn.LSTM(64, 64, 2),
        lambda: nn.Conv2d(64, 64, 3).to(memory_format=torch.channels_last),
        lambda: [nn.Parameter(part) for part in torch.zeros(LARGE).split(1000)],
    ],
)
def test_tp301_and_tp304_are_silent_where_all_is_seen_or_the_memory_is_not_ours(make):
    assert codes({"x": make()}) == []


@pytest.mark.parametrize("shared", [True, False])
def test_tp301_is_silent_for_mapped_files(tmp_path, shared):
    path = tmp_path / "weights"
    torch.save(torch.zeros(LARGE)[:10], path)
    plain = torch.from_file(str(tmp_path / "plain"), shared=shared, size=LARGE) if shared else None

    assert codes({"loaded": torch.load(path, mmap=True), "view": None if plain is None else plain[:10]}) == []


# Others that see the rest. Each answers the view and whatever keeps the rest alive.


def with_gradient() -> torch.Tensor:
    x = torch.zeros(LARGE, requires_grad=True)
    (x * torch.ones(LARGE)).sum().backward()
    return x


class Slots:
    __slots__ = ("tensor",)


def by_name(x):
    return x


def by_closure(x):
    return lambda: x


def by_slot(x):
    holder = Slots()
    holder.tensor = x
    return holder


def by_generator(x):
    def generate():
        yield 1
        yield x

    running = generate()
    next(running)
    return running


def by_cycle(x):
    cycle = [x]
    cycle.append(cycle)
    return cycle


def by_hook(x):
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: x)
    return module


def by_buffer(x):
    module = nn.Module()
    module.register_buffer("table", x)
    return module


def by_storage(x):
    return x.untyped_storage()


def by_array(x):
    return x.numpy()


def by_dlpack(x):
    return np.from_dlpack(x)


def by_capsule(x):
    return torch.utils.dlpack.to_dlpack(x)


def by_future(x):
    future = torch.futures.Future()
    future.set_result(x)
    return future


def by_script(x):
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", x)

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            return y + self.table

    return torch.jit.trace(Adds(), torch.zeros(LARGE))


def by_gradient(x):
    parameter = torch.zeros(LARGE, requires_grad=True)
    parameter.grad = x
    return parameter


def by_graph(x):
    return (x * torch.ones(LARGE, requires_grad=True)).sum()


def by_graph_alone(x):
    return (x[:] * torch.ones(LARGE, requires_grad=True)).sum()


def by_custom_function(x):
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y, kept):
            ctx.save_for_backward(kept)
            return y * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient, None

    return Keep.apply(torch.ones(3, requires_grad=True), x)


def by_packed(x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t,), lambda packed: packed[0]):
        return by_graph(x)


def by_checkpoint(x):
    y = torch.ones(LARGE, requires_grad=True)
    return checkpoint(lambda a, b: (a * b).sin(), y, x, use_reentrant=False)


def by_sparse(x):
    return torch.sparse_coo_tensor(torch.arange(LARGE)[None], x, (LARGE,), check_invariants=False)


HOLDERS = [
    by_name, by_closure, by_slot, by_generator, by_cycle, by_hook, by_buffer, by_storage, by_array, by_dlpack,
    by_capsule, by_future, by_gradient, by_graph, by_graph_alone, by_custom_function, by_packed, by_checkpoint,
    by_sparse,
]  # fmt: skip
VIEWS = {
    "view": lambda x: x[:10],
    "detached": lambda x: x[:10].detach(),
    "of detached": lambda x: x.detach()[:10],
    "data": lambda x: x.data[:10],
    "strided": lambda x: x[::100],
    "empty": lambda x: x[:0],
}


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("hold", [*HOLDERS, by_script])
def test_tp301_is_silent_while_another_owner_sees_the_rest(hold, view):
    def make():
        x = torch.zeros(LARGE)
        return VIEWS[view](x), hold(x)

    x, holder = make()
    if hold is by_cycle:
        gc.collect()

    assert codes({"x": x}) == ["TP304"]
    assert holder is not None


@pytest.mark.parametrize("hold", [hold for hold in HOLDERS if hold not in (by_cycle, by_hook)])
def test_tp301_fires_once_that_owner_is_gone(hold):
    def make():
        x = torch.zeros(LARGE)
        return x[:10].detach(), hold(x)

    x, holder = make()
    del holder

    assert codes({"x": x}) == ["TP301"]


def test_tp301_is_silent_for_a_base_that_only_frozen_objects_hold():
    def make():
        x = torch.zeros(LARGE)
        frozen = [x]
        gc.freeze()
        return x[:10], frozen

    try:
        x, frozen = make()
        assert codes({"x": x}) == ["TP304"]
    finally:
        gc.unfreeze()
    assert len(frozen) == 1


def test_tp301_is_silent_for_a_detached_part_of_a_live_gradient():
    parameter = with_gradient()
    rows = parameter.grad.detach()[:10]

    assert codes({"rows": rows}) == ["TP304"]


def test_tp301_passes_over_gradients_that_autograd_took_as_views():
    """With a batch of one, the gradient of a token that was concatenated is a slice of the whole gradient."""
    token, rest = nn.Parameter(torch.zeros(1, 1, 64)), torch.zeros(1, 196, 64)
    nn.Linear(64, 64)(torch.cat([token, rest], dim=1)).sum().backward()
    assert token.grad.untyped_storage().nbytes() > 16 * 1024

    assert codes({"token": token}) == []


def test_tp301_one_of_many_parameters_in_a_flat_buffer_is_silent_while_the_others_live():
    def make() -> list[nn.Parameter]:
        return [nn.Parameter(part) for part in torch.zeros(LARGE).split(1000)]

    parameters = make()
    first = parameters[0]
    assert codes({"first": first}) == ["TP304"]

    del parameters
    assert codes({"first": first}) == ["TP301"]


def test_tp301_batches_of_a_loader_are_silent_and_a_kept_slice_of_each_is_not():
    data = torch.utils.data.TensorDataset(torch.zeros(64, 2000))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    batches = [batch for (batch,) in loader]

    assert codes({"batches": batches, "data": data}) == []

    kept = [batch[:, 0] for (batch,) in loader]
    finding = the_finding({"kept": kept}, "TP301")
    assert finding.evidence["storages"] == 4
    assert finding.evidence["retained_bytes"] == 64 * 2000 * 4


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda p: torch.optim.Adam(p),
        lambda p: torch.optim.SGD(p, momentum=0.9),
        lambda p: torch.optim.Adam(p, foreach=True),
        lambda p: torch.optim.Adam(p, fused=True),
        lambda p: torch.optim.LBFGS(p),
        lambda p: torch.optim.Adafactor(p),
    ],
)
def test_tp301_optimizer_states_and_their_gradients_are_silent(make_optimizer):
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 10))
    optimizer = make_optimizer(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.randn(4, 200)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
        assert codes({"model": model, "optimizer": optimizer}) == []


@pytest.mark.parametrize("as_view", [True, False])
def test_tp301_gradients_in_buckets_are_silent_one_by_one(single_process_group, as_view):
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
    parallel = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        parallel(torch.randn(3, 100)).sum().backward()
        assert codes({"model": parallel, "optimizer": optimizer}) == []
        assert "TP301" not in codes({"gradient": model[0].weight.grad})
        assert "TP301" not in codes({"row": model[0].weight.grad.detach()[0]})
        optimizer.step()
        optimizer.zero_grad()
        assert codes({"model": parallel, "optimizer": optimizer}) == []


def test_tp301_is_one_finding_for_what_one_line_kept():
    features = [torch.zeros(8, 197, 16 + i)[:, 0].detach() for i in range(20)]
    named = {f"image {i}": torch.zeros(LARGE)[:10] for i in range(20)}

    first, second = found({"features": features, "named": named}, "TP301")

    assert len(first.evidence["tensors"]) == first.evidence["storages"] == 20
    assert first.evidence["retained_bytes"] == sum(x.untyped_storage().nbytes() for x in features)
    assert first.evidence["visible_bytes"] == sum(x.numel() * 4 for x in features)
    assert first.evidence["is_view"] is False
    assert second.evidence["retained_bytes"] == 20 * 400_000
    assert "20 tensors hold 7.6 MiB" in second.subject


def test_tp301_two_views_of_one_storage_are_one_finding_with_what_both_see():
    x = torch.zeros(LARGE)
    views = {"views": [x[:10], x[5:20]]}
    del x

    finding = the_finding(views, "TP301")

    assert (finding.evidence["view_nbytes"], finding.evidence["pinned_nbytes"]) == (80, 399_920)


def test_tp301_fix_names_the_others_that_keep_the_storage_too():
    x = torch.zeros(LARGE)
    view, other = x[:10], x[20:40]
    del x

    finding = the_finding({"view": view}, "TP301")

    assert finding.evidence["other_tensors"] == 1
    assert "clone() it and 1 other tensor over the storage: copies 120 B" in finding.fix
    assert len(other) == 20


def test_tp301_fix_drops_the_graph_that_leads_to_the_leaf():
    assert the_finding({"x": torch.zeros(LARGE, requires_grad=True)[:10]}, "TP301").fix.startswith("detach().clone()")


@pytest.mark.parametrize("fix", [lambda x: x.clone(), lambda x: x.detach().clone(), copy.copy])
def test_tp301_the_fix_is_silent(fix):
    x = torch.zeros(300, 300)[:, :2]
    fixed = fix(x)
    del x

    assert codes({"x": fixed}) == ([] if fix is not copy.copy else ["TP301"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["TP301"]),
        ("pinned-nbytes = 399960", ["TP301"]),
        ("pinned-nbytes = 399961", []),
        ("pinned-share = 0.9999", ["TP301"]),
        ("pinned-share = 0.99991", []),
        ("ignore = ['TP301']", []),
    ],
)
def test_tp301_thresholds_are_configured(configure, text, expected):
    configure(text)
    x = torch.zeros(LARGE)[:10]

    assert codes({"x": x}) == expected


def test_tp301_low_thresholds_reach_small_storages(configure):
    configure("pinned-nbytes = 4\npinned-share = 0.1")

    assert codes({"x": torch.zeros(10)[:9]}) == ["TP301"]


@given(
    pieces=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 30), st.integers(1, 3)), min_size=1, max_size=5),
    passed=st.integers(1, 5),
    keep=st.sampled_from(["nothing", "base", "graph", "storage"]),
    detach=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_tp301_on_random_views(pieces, passed, keep, detach):
    block = 1000

    def make() -> Iterator:
        x = torch.zeros(100 * block)
        for begin, length, step in pieces:
            view = x.view(100, block)[begin : begin + length : step]
            yield view.detach() if detach else view
        yield {
            "nothing": lambda: None,
            "base": lambda: x,
            "graph": lambda: (x * torch.ones(100 * block, requires_grad=True)).sum(),
            "storage": x.untyped_storage,
        }[keep]()

    *views, holder = make()
    seen = set().union(*(range(begin, min(100, begin + length), step) for begin, length, step in pieces))
    by_passed = set().union(*(range(b, min(100, b + n), step) for b, n, step in pieces[:passed]))

    kept = codes({"views": views[:passed]})

    if len(by_passed) > 50:
        assert kept == []
    elif holder is not None or len(seen) > 50:
        assert kept == ["TP304"]
    else:
        assert kept == ["TP301"]


@pytest.mark.parametrize("count", [5_000])
def test_many_views_and_many_tensors_take_no_longer_than_linear_time(count):
    def make() -> dict:
        flat = torch.zeros(count * 20)
        return {
            "views": [flat[i * 20 : i * 20 + 10] for i in range(count)],
            "flat": [nn.Parameter(part) for part in torch.zeros(count * 4).split(4)],
            "model": nn.ModuleList([nn.Sequential(layer) for layer in [nn.Linear(1, 1) for _ in range(2_000)] * 2]),
        }

    objs = make()
    objs["state"] = {str(number): parameter.detach() for number, parameter in enumerate(objs["flat"])}
    tp.check(torch.ones(3))
    begin = time.perf_counter()

    report = tp.check(objs, max_tensors=100_000)

    assert time.perf_counter() - begin < 5  # a second; what compares all pairs takes a minute
    assert sorted({finding.code for finding in report.findings}) == ["TP301", "TP303"]


# -- TP304 saving writes a whole storage


def test_tp304_slice_of_a_live_buffer_is_a_fact():
    buffer = torch.zeros(LARGE)
    x = buffer[:10]

    finding = the_finding({"x": x}, "TP304")

    assert finding.severity == "info"
    assert (finding.evidence["storage_nbytes"], finding.evidence["view_nbytes"]) == (400_000, 40)
    assert "other tensors that are alive see the rest" in finding.why
    file = io.BytesIO()
    torch.save(x, file)
    assert file.tell() > 400_000


@pytest.mark.parametrize(
    ("hold", "said"),
    [
        (by_name, "other tensors"),
        (by_storage, "the storage's own object"),
        (by_graph, "a live graph"),
        (by_future, "other tensors"),
        (by_capsule, "an owner in C++"),
    ],
)
def test_tp304_says_who_sees_the_rest(hold, said):
    def make():
        x = torch.zeros(LARGE)
        return x.detach()[:10].detach(), hold(x)

    x, holder = make()

    assert said in the_finding({"x": x}, "TP304").why
    assert holder is not None


@pytest.mark.parametrize("make", [lambda b: (b[:10], b), lambda b: b[:10].clone(), lambda b: b[: LARGE - 1]])
def test_tp304_is_silent_where_the_whole_is_passed_or_copied(make):
    buffer = torch.zeros(LARGE)

    assert codes({"x": make(buffer)}) == []


def test_tp304_is_one_finding_for_what_one_line_made():
    buffers = [torch.zeros(LARGE + i) for i in range(20)]
    rows = [buffer[:10] for buffer in buffers]

    finding = the_finding({"rows": rows}, "TP304")

    assert finding.evidence["storages"] == 20
    assert "and 19 more storages" in finding.subject


# -- TP303 shared parameters


class Tied(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        if tie:
            self.head.weight = self.emb.weight


def test_tp303_one_parameter_under_two_names():
    finding = the_finding({"model": Tied()}, "TP303")

    assert finding.severity == "info"
    evidence = finding.evidence
    assert (evidence["names"], evidence["shared_bytes"], evidence["same_object"]) == (
        ["emb.weight", "head.weight"], 48, True,
    )  # fmt: skip
    assert evidence["storage_nbytes"] == 48


def test_tp303_two_parameters_over_one_storage():
    model = Tied(tie=False)
    model.head.weight = nn.Parameter(model.emb.weight.data)

    finding = the_finding({"model": model}, "TP303")

    assert finding.evidence["same_object"] is False
    assert finding.evidence["names"] == ["emb.weight", "head.weight"]


def test_tp303_state_dict_that_holds_one_matrix_twice():
    matrix = torch.arange(12.0).reshape(4, 3)

    finding = the_finding({"state": {"emb.weight": matrix, "head.weight": matrix}}, "TP303")

    assert (finding.severity, finding.evidence["names"]) == ("info", ["emb.weight", "head.weight"])
    assert (finding.evidence["shared_bytes"], finding.evidence["storage_nbytes"]) == (48, 48)


def flat_parameters() -> nn.ParameterList:
    flat = torch.zeros(100)
    return nn.ParameterList([nn.Parameter(flat[i * 10 : i * 10 + 10]) for i in range(10)])


def a_model() -> nn.Module:
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"model": Tied(tie=False)},
        lambda: {"parameters": flat_parameters()},
        lambda: {"state": {"a.weight": torch.zeros(12)[:6], "b.weight": torch.zeros(12)[6:]}},
        lambda: (m := a_model(), {"model": m, "params": dict(m.named_parameters())})[1],
        lambda: (m := a_model(), {"model": m, "params": list(m.parameters())})[1],
        lambda: (m := a_model(), {"model": m, "weight": m[0].weight})[1],
        lambda: (m := a_model(), {"model": m, "optimizer": torch.optim.SGD(m.parameters(), lr=1)})[1],
        lambda: (m := a_model(), {"optimizer": torch.optim.SGD(m.parameters(), lr=1), "model": m})[1],
        lambda: (m := a_model(), {"model": m, "best": copy.deepcopy(m.state_dict()), "copy": copy.deepcopy(m)})[1],
        lambda: {"rnn": nn.LSTM(3, 3, 2)},
        lambda: {"pair": nn.Sequential(nn.Linear(2, 2), act := nn.ReLU(), nn.Linear(2, 2), act)},
        lambda: (b := nn.BatchNorm1d(3), {"one": b.state_dict()["running_mean"], "model": b})[1],
    ],
)
def test_tp303_is_silent_for_what_is_no_tie(make):
    assert found(make(), "TP303") == []


def test_tp303_a_tie_in_a_flat_buffer_names_only_those_that_are_tied():
    parameters = flat_parameters()
    parameters.append(parameters[3])
    parameters.append(nn.Parameter(parameters[7].data))

    one, other = found({"parameters": parameters}, "TP303")

    assert (one.evidence["names"], one.evidence["shared_bytes"]) == (["3", "10"], 40)
    assert (other.evidence["names"], other.evidence["same_object"]) == (["7", "11"], False)


def test_tp303_one_layer_under_six_names():
    layer = nn.Linear(4, 4)

    finding = the_finding({"model": nn.ModuleList([layer] * 6)}, "TP303")

    evidence = finding.evidence
    assert (evidence["modules"], evidence["distinct_modules"], evidence["distinct_storages"]) == (6, 1, 2)
    assert (evidence["parameter_names"], evidence["unique_parameters"], evidence["bytes"]) == (12, 2, 80)


def test_tp303_six_copies_of_a_layer_are_silent():
    assert found({"model": nn.ModuleList([copy.deepcopy(nn.Linear(4, 4)) for _ in range(6)])}, "TP303") == []


def test_tp303_a_shared_block_is_one_finding_not_one_for_each_part():
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    assert len(found({"model": nn.ModuleList([block] * 3)}, "TP303")) == 1


def test_tp303_two_stacks_of_the_same_layers_are_one_finding():
    layers = [nn.Linear(2, 2) for _ in range(20)]
    model = nn.ModuleList([nn.Sequential(layer) for layer in layers * 2])

    evidence = the_finding({"model": model}, "TP303").evidence

    assert (evidence["modules"], evidence["distinct_modules"], evidence["distinct_storages"]) == (40, 20, 40)
    assert (evidence["parameter_names"], evidence["unique_parameters"]) == (80, 40)


def test_tp303_a_repeated_layer_is_whole_although_its_weight_was_met_elsewhere():
    layer, first = nn.Linear(3, 3), nn.Module()
    first.weight = layer.weight

    tie, repeated = found({"first": first, "model": nn.ModuleList([layer] * 2)}, "TP303")

    assert tie.evidence["names"] == ["first.weight", "model.0.weight"]
    assert (repeated.evidence["distinct_storages"], repeated.evidence["bytes"]) == (2, 48)


def test_tp303_a_plain_object_that_has_the_model_too_is_no_second_name():
    class Trainer:
        def __init__(self, model) -> None:
            self.model = model

    model = a_model()

    assert found({"trainer": Trainer(model), "model": model}, "TP303") == []
    assert found({"model": model, "trainer": Trainer(model)}, "TP303") == []


def test_tp303_kept_state_dict_is_the_live_parameters():
    model = nn.Linear(2, 1)
    kept = model.state_dict()

    finding = the_finding({"model": model, "best": kept}, "TP303")

    assert finding.severity == "info"
    assert finding.evidence["aliases"] == ["weight", "bias"]
    assert finding.evidence["bytes_really_saved"] == 0
    assert finding.evidence["shared_bytes"] == 12


def test_tp303_bytes_that_a_kept_dict_really_has_are_counted():
    model = nn.Linear(2, 1)
    kept = {**model.state_dict(), "step": torch.zeros(5)}

    assert the_finding({"model": model, "best": kept}, "TP303").evidence["bytes_really_saved"] == 20


def test_tp303_a_loaded_state_dict_is_the_model_and_its_buffers_too():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(kept, assign=True)  # the parameters are made anew, the buffers are these very tensors

    for objs in ({"model": model, "kept": kept}, {"kept": kept, "model": model}):
        evidence = the_finding(objs, "TP303").evidence
        assert sorted(evidence["aliases"]) == sorted(kept)
        assert (evidence["containers"], evidence["bytes_really_saved"]) == (["kept"], 0)


def test_tp303_state_dicts_that_one_line_kept_are_one_finding():
    model = nn.Linear(2, 1)

    evidence = the_finding({"model": model, "history": [model.state_dict() for _ in range(5)]}, "TP303").evidence

    assert evidence["containers"] == [f"history[{n}]" for n in range(5)]
    assert (len(evidence["tensors"]), evidence["shared_bytes"]) == (10, 12)


def test_tp303_two_models_of_one_state_dict_are_one_finding():
    first, second = a_model(), a_model()
    second.load_state_dict(first.state_dict(), assign=True)

    finding = the_finding({"first": first, "second": second}, "TP303")

    assert finding.subject.startswith("first, second: 6 parameters are the same in each (first.0.weight, ")
    assert finding.subject.endswith(", 240 B shared")
    assert sorted(finding.evidence["names"]) == sorted(
        f"{model}.{name}" for model in ("first", "second") for name in first.state_dict()
    )
    assert (finding.evidence["ties"], finding.evidence["same_object"]) == (6, False)
    assert found({"first": first, "second": copy.deepcopy(second)}, "TP303") == []


def test_tp303_copy_of_a_module_is_one_finding_for_its_parts_and_parameters():
    model = nn.MultiheadAttention(4, 2)
    model.norm, model.gate = nn.LayerNorm(4), nn.Parameter(torch.ones(4))

    finding = the_finding({"model": model, "copied": copy.copy(model)}, "TP303")

    parameters = dict(model.named_parameters())
    assert finding.evidence["unique_parameters"] == len(parameters)
    assert {name.partition(".")[2] for name in finding.evidence["tensors"]} == set(parameters)
    assert ", and 3 parameters beside them" in finding.subject
    assert found({"model": model, "copied": copy.deepcopy(model)}, "TP303") == []


def test_tp303_copy_of_a_layer_is_one_finding_for_all_its_parameters():
    layer = nn.Linear(3, 3)

    assert the_finding({"layer": layer, "copied": copy.copy(layer)}, "TP303").evidence["names"] == [
        "layer.weight", "copied.weight", "layer.bias", "copied.bias",
    ]  # fmt: skip


def test_tp303_ties_between_other_pairs_of_layers_are_other_causes():
    layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)])
    for one, other in ((0, 1), (2, 3)):
        layers[other].weight, layers[other].bias = layers[one].weight, layers[one].bias

    assert [f.evidence["names"] for f in found({"layers": layers}, "TP303")] == [
        [f"{one}.weight", f"{other}.weight", f"{one}.bias", f"{other}.bias"] for one, other in ((0, 1), (2, 3))
    ]


def test_tp303_a_tie_inside_a_state_dict_names_the_dict():
    assert (
        "{emb.weight, head.weight} of best: one storage" in the_finding({"best": Tied().state_dict()}, "TP303").subject
    )


def of_dtensors() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return distribute_module(model, init_device_mesh("cpu", (1,)))


def sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    for part in (*model, model):
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    return model


def of_wrappers() -> nn.Module:
    model = nn.Linear(3, 3)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(Over(parameter.data)))
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [of_dtensors, sharded, of_wrappers])
def test_tp303_kept_state_dict_of_wrappers_is_what_they_hold(single_process_group, make):
    model = make()
    best = model.state_dict()

    finding = the_finding({"model": model, "best": best}, "TP303")

    assert (finding.evidence["aliases"], finding.evidence["bytes_really_saved"]) == (list(best), 0)
    assert finding.evidence["tensors"] == [f"best['{name}']" for name in best]
    assert finding.evidence["parameters"] == [f"model.{name}" for name in best]
    assert codes({"model": model, "best": copy.deepcopy(best) if make is not of_wrappers else {}}) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tie", [True, False])
def test_tp303_one_dtensor_under_two_names(single_process_group, tie):
    model = distribute_module(Tied(tie=False), init_device_mesh("cpu", (1,)))
    if tie:
        model.head.weight = model.emb.weight

    for objs in ({"model": model}, {"state": model.state_dict()}):
        assert [f.evidence["names"] for f in found(objs, "TP303")] == [["emb.weight", "head.weight"]] * tie
        assert codes(objs) == ["TP303"] * tie


@pytest.mark.parametrize(
    ("ties", "severities"),
    [
        (None, ["info"]),
        ("[]", ["warning"]),
        ("[['emb.weight', 'head.weight']]", []),
        ("[['head.weight', 'emb.weight', 'other']]", []),
        ("[['emb.weight', 'other'], ['head.weight', 'another']]", ["warning"]),
    ],
)
@pytest.mark.parametrize("as_state", [True, False])
def test_tp303_declared_ties_are_silent_and_others_are_warnings(configure, ties, severities, as_state):
    configure("" if ties is None else f"ties = {ties}")
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    objs = {"state": model.state_dict()} if as_state else {"model": model, "optimizer": optimizer}

    assert [finding.severity for finding in found(objs, "TP303")] == severities


def test_tp303_declared_ties_raise_no_alarm_for_lists_of_parameters(configure):
    configure("ties = []")
    model = a_model()

    assert codes({"model": model, "params": list(model.parameters()), "named": dict(model.named_parameters())}) == []


@given(tied=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=3), over=st.booleans())
@settings(deadline=None)
def test_tp303_on_random_ties(tied, over):
    layers = nn.ModuleList([nn.Linear(3, 3, bias=False) for _ in range(6)])
    for one, other in tied:
        weight = layers[one].weight
        layers[other].weight = nn.Parameter(weight.data) if over else weight
    by_storage: dict[int, set[str]] = {}
    for number, layer in enumerate(layers):
        by_storage.setdefault(layer.weight.untyped_storage().data_ptr(), set()).add(f"{number}.weight")

    findings = found({"layers": layers}, "TP303")

    assert sorted(sorted(f.evidence["names"]) for f in findings) == sorted(
        sorted(names) for names in by_storage.values() if len(names) > 1
    )


@given(
    slices=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6), st.integers(1, 3)), min_size=2, max_size=5),
    whole=st.booleans(),
)
@settings(deadline=None)
def test_tp303_counts_the_bytes_that_several_parameters_reach(slices, whole):
    flat = nn.Parameter(torch.zeros(16))
    reached = [range(begin, begin + length, step) for begin, length, step in slices]
    parameters = [nn.Parameter(flat.data[span.start : span.stop : span.step]) for span in reached]
    if whole:
        parameters.append(flat)
        reached.append(range(16))

    findings = found({f"p{n}": parameter for n, parameter in enumerate(parameters)}, "TP303")

    cells = Counter(cell for span in reached for cell in span)
    assert sum(f.evidence["shared_bytes"] for f in findings) == 4 * sum(count > 1 for count in cells.values())


def test_tp303_of_a_flat_buffer_and_its_slices_counts_all_bytes():
    flat = nn.Parameter(torch.zeros(512))
    parts = {f"part{n}": nn.Parameter(flat.data[256 * n : 256 * (n + 1)]) for n in range(2)}

    finding = the_finding({"flat": flat, **parts}, "TP303")

    assert finding.severity == "info"
    assert "one storage, 2.0 KiB of 2.0 KiB shared" in finding.subject
    assert found(parts, "TP303") == []


# -- TP314 two wrappers over one storage


class Over(torch.Tensor):
    """A wrapper whose operators run on what it holds, with something beside it."""

    @staticmethod
    def __new__(cls, local, scale=None):
        return torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype)

    def __init__(self, local, scale=None) -> None:
        self.local = local
        self.scale = scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrap(x):
            return x.local if isinstance(x, Over) else x

        return Over(func(*map(unwrap, args), **(kwargs or {})), args[0].scale)


def test_tp314_two_wrappers_over_one_tensor_fire():
    local = torch.ones(4)

    finding = the_finding({"a": helpers.Wrapper(local), "b": helpers.Wrapper(local)}, "TP314")

    assert finding.severity == "warning"
    assert (finding.evidence["local_nbytes"], finding.evidence["local_same"]) == (16, True)
    assert (finding.evidence["shared_bytes"], finding.evidence["tensors"]) == (16, ["a", "b"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: (helpers.Wrapper(torch.ones(4)), helpers.Wrapper(torch.ones(4))),
        lambda: (helpers.Wrapper(torch.ones(0)), helpers.Wrapper(torch.ones(0))),
        lambda: (flat := torch.ones(8), (helpers.Wrapper(flat[:4]), helpers.Wrapper(flat[4:])))[1],
        lambda: (w := Over(torch.ones(4)), (w, w))[1],
        lambda: (w := Over(torch.ones(4)), (w, w.detach()))[1],
        lambda: (w := Over(torch.ones(4)), (w, w.data, w.data.data, w.detach()))[1],
        lambda: (w := Over(torch.ones(8)[2:6]), (w, w.data))[1],
        lambda: (
            x := torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 3)], layout=torch.jagged),
            (x, x.data),
        )[1],
        lambda: (w := Over(torch.ones(4)), (w, w.view(2, 2), w.view(4, 1).detach()))[1],
        lambda: (w := Over(torch.ones(4)), (w, w.local))[1],
        lambda: (s := torch.ones(1), (Over(torch.ones(4), s), Over(torch.ones(4), s)))[1],
        lambda: (p := nn.Parameter(Over(torch.ones(4))), (p, p.detach(), p.data))[1],
        lambda: (
            x := torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(5, 3)], layout=torch.jagged),
            (x, x * 2, x.sin(), x.detach(), x.transpose(1, 2), x.chunk(2), x.unsqueeze(-1), x.values()),
        )[1],
    ],
)
def test_tp314_is_silent_for_memory_of_their_own_and_for_kin(make):
    assert found({"both": make()}, "TP314") == []


def test_tp314_two_kept_state_dicts_of_one_model_are_silent():
    model = nn.Linear(3, 3)
    for name, parameter in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(Over(parameter.data)))

    assert found({"model": model, "one": model.state_dict(), "two": model.state_dict()}, "TP314") == []
    assert found({"one": model.state_dict(), "two": model.state_dict()}, "TP314") == []


@pytest.mark.parametrize(
    "make",
    [
        lambda local: (Over(local), Over(local.data)),
        lambda local: (Over(local), Over(local[:])),
        lambda local: (nn.Parameter(Over(local)), nn.Parameter(Over(local.detach()))),
    ],
)
def test_tp314_wrappers_built_over_one_memory_are_not_taken_for_data(make):
    a, b = make(torch.ones(4))

    assert the_finding({"a": a, "b": b}, "TP314").evidence["tensors"] == ["a", "b"]


def test_tp314_two_parameters_over_one_tensor_fire_although_a_state_dict_is_beside_them():
    local = torch.ones(4)
    one, two = nn.Parameter(Over(local)), nn.Parameter(Over(local))

    finding = the_finding({"one": one, "two": two, "kept": one.detach()}, "TP314")

    assert finding.evidence["tensors"] == ["one", "two"]


def jagged(values: torch.Tensor, *ends: int) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, *ends]))


@pytest.mark.parametrize("other", [(2, 7), (3, 7)])
def test_tp314_two_jagged_tensors_over_one_buffer_fire(other):
    values = torch.ones(7, 3)

    finding = the_finding({"a": jagged(values, 2, 7), "b": jagged(values, *other)}, "TP314")

    assert (finding.evidence["shared_bytes"], finding.evidence["tensors"]) == (84, ["a", "b"])
    assert found({"a": jagged(values, 2, 7), "b": jagged(values.clone(), *other)}, "TP314") == []


def test_tp314_is_one_finding_for_what_one_line_made():
    locals_ = [torch.ones(4 + i) for i in range(10)]

    finding = the_finding({"a": [Over(x) for x in locals_], "b": [Over(x) for x in locals_]}, "TP314")

    assert finding.evidence["storages"] == 10
    assert len(finding.evidence["tensors"]) == 20


@given(spans=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4)), min_size=2, max_size=4))
@settings(deadline=None)
def test_tp314_on_random_slices_of_one_tensor(spans):
    flat = torch.ones(12)
    wrappers = [Over(flat[begin : begin + length]) for begin, length in spans]
    reached = [set(range(begin, begin + length)) for begin, length in spans]

    findings = found({"w": wrappers}, "TP314")

    together = [(a, b) for a in range(len(spans)) for b in range(a + 1, len(spans)) if reached[a] & reached[b]]
    assert len(findings) == bool(together)
    if findings:
        assert set(findings[0].evidence["tensors"]) == {f"w[{n}]" for pair in together for n in pair}


def test_a_copy_of_an_expanded_view_is_not_said_to_be_small():
    x = torch.zeros(100_000)[:1].expand(100_000)

    (found,) = tp.check(x, select=["TP301"]).findings

    assert found.fix == (
        "keep a copy of what is distinct, before it is expanded or unfolded: clone() or contiguous() of all its "
        "elements copies 390.6 KiB"
    )


def test_a_copy_of_an_overlapping_view_costs_its_elements():
    x = torch.zeros(100_000)[:100].unfold(0, 50, 1)

    (found,) = tp.check(x, select=["TP301"]).findings

    nbytes = x.clone().untyped_storage().nbytes()
    assert nbytes == 51 * 50 * 4
    assert found.fix == "clone() or contiguous() it: copies 10.0 KiB, frees 380.7 KiB"
