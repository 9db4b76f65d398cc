"""Faults of views and sharing that people reported in public, each with its near-identical healthy twin.

Each through the call a person makes: before a write, on what is kept, on what was recorded before.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import tensorplay as tp
from tests.helpers import raises


def loud(report: tp.Report) -> list[str]:
    return [finding.code for finding in report.findings if finding.severity != "info"]


def the_finding(report: tp.Report, code: str) -> tp.Finding:
    (finding,) = [finding for finding in report.findings if finding.code == code]
    return finding


def assert_unsafe(verdict, code: str | None, said: str) -> None:
    """A falsy verdict whose finding is a warning: the write is about to be made."""
    assert not verdict
    assert said in " ".join(verdict.reasons)
    assert [f.severity for f in verdict.findings if f.code == code] == ([] if code is None else ["warning"])


# A column of a trained weight is edited in place.


@pytest.mark.parametrize("grad_mode", [True, False])
def test_editing_a_column_of_a_weight_is_unsafe_while_grad_mode_is_on(grad_mode):
    layer = nn.Linear(4, 3)
    with torch.set_grad_enabled(grad_mode):
        column = layer.weight[:, 1]
        verdict = tp.is_safe_view(column)
        assert raises(lambda: column.sub_(1.0)) is grad_mode

    if not grad_mode:
        assert verdict
        assert loud(verdict) == []
        return
    assert_unsafe(verdict, "TP201", "12 B of 48 B")
    evidence = verdict.evidence
    assert (evidence["storage_nbytes"], evidence["view_nbytes"], evidence["base_is_leaf"]) == (48, 12, True)
    assert "safe under no_grad" in verdict.reasons[0]
    assert tp.recommend_fix(column)[0].title == "write under torch.no_grad()"


# A full backward hook is registered on ReLU(inplace=True).


@pytest.mark.parametrize("hooked", [True, False])
def test_what_a_module_with_a_full_backward_hook_gets_must_not_be_written(hooked):
    verdicts = []

    class Activation(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            verdicts.append(tp.is_safe_view(x))
            return x.relu_()

    network = nn.Sequential(nn.Conv2d(1, 2, 3), Activation())
    if hooked:
        network[1].register_full_backward_hook(lambda *_: None)

    assert raises(lambda: network(torch.ones(1, 1, 5, 5))) is hooked

    (verdict,) = verdicts
    assert bool(verdict) is not hooked
    if hooked:
        assert_unsafe(verdict, "TP203", "a full backward hook on the module")
        assert verdict.evidence["creation_meta"] == "IN_CUSTOM_FUNCTION"
        assert verdict.evidence["grad_fn"] == "BackwardHookFunctionBackward"


# q, k = qkv.chunk(2), then q is scaled in place.


@pytest.mark.parametrize("chunked", [True, False])
def test_half_of_a_projection_may_be_scaled_where_it_was_sliced(chunked):
    projected = nn.Linear(4, 4)(torch.ones(2, 4))
    q, k = projected.chunk(2, dim=-1) if chunked else (projected[:, :2], projected[:, 2:])

    verdict = tp.is_safe_view(q)

    assert raises(lambda: q.mul_(0.5)) is chunked
    assert bool(verdict) is not chunked
    if chunked:
        assert_unsafe(verdict, "TP202", "not because of overlap")
        assert (verdict.evidence["creation_meta"], verdict.evidence["grad_fn"]) == ("MULTI_OUTPUT_NODE",
                                                                                  "SplitBackward0")  # fmt: skip
        comparison = tp.compare(q, k).document.comparison
        assert (comparison.same_storage, comparison.shared_nbytes) == (True, 0)


# A view is made under no_grad and written with grad mode on.


@pytest.mark.parametrize("write_inside", [True, False])
def test_view_made_under_no_grad_may_be_written_on_that_side_only(write_inside):
    x = torch.ones(3, requires_grad=True) * 1
    with torch.no_grad():
        view = x.view(-1)
    with torch.set_grad_enabled(not write_inside):
        verdict = tp.is_safe_view(view)
        assert raises(lambda: view.mul_(2)) is not write_inside

    assert bool(verdict) is write_inside
    if not write_inside:
        assert_unsafe(verdict, "TP203", "made under torch.no_grad()")
        assert verdict.evidence["creation_meta"] == "NO_GRAD_MODE"


# A loss summed up in inference mode is divided outside.


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
def test_loss_summed_in_inference_mode_is_not_divided_in_place_outside(guard):
    model, total = nn.Linear(3, 1), 0
    with guard():
        for _ in range(4):
            total += model(torch.ones(2, 3)).mean()

    verdict = tp.is_safe_view(total)

    inference = guard is torch.inference_mode
    assert raises(lambda: total.div_(4)) is inference
    assert bool(verdict) is not inference
    if inference:
        assert_unsafe(verdict, None, "no version counter")
        assert verdict.evidence["is_inference"] is True


# Embedding and head are one matrix in a state dict that a format without sharing is to hold.


def test_one_matrix_under_two_names_of_a_state_dict_is_stated():
    matrix = torch.arange(12.0).reshape(4, 3)

    report = tp.check({"state_dict": {"emb.weight": matrix, "head.weight": matrix}})

    finding = the_finding(report, "TP303")
    assert loud(report) == []
    assert (finding.evidence["shared_bytes"], finding.evidence["storage_nbytes"]) == (48, 48)
    assert "{emb.weight, head.weight} of state_dict: one storage, 48 B of 48 B shared" in finding.subject


def test_two_slices_of_one_flat_buffer_are_no_tie():
    flat = torch.arange(12.0)

    report = tp.check({"state_dict": {"a.weight": flat[:6].view(2, 3), "b.weight": flat[6:].view(2, 3)}})

    assert report.findings == ()


# torch.save of a slice writes the whole tensor.


def test_slice_whose_file_is_a_thousand_times_too_large():
    view = torch.zeros(1_000_000)[:1000]
    file = io.BytesIO()
    torch.save(view, file)
    assert file.tell() > 4_000_000

    report = tp.check({"view": view})

    assert loud(report) == ["TP301"]
    evidence = the_finding(report, "TP301").evidence
    assert (evidence["storage_nbytes"], evidence["view_nbytes"], evidence["ratio"]) == (4_000_000, 4000, 0.001)


def test_whole_tensor_seen_as_a_matrix_wastes_nothing():
    assert tp.check({"view": torch.zeros(1_000_000).view(1000, 1000)}).findings == ()


# Pickled, two tensors of one storage become two storages.


@pytest.mark.parametrize("pickled", [True, False])
def test_pickle_leaves_a_view_with_a_storage_of_its_own_where_torch_save_shares_it(pickled):
    x = torch.zeros(1_000_000)
    pair = [x, x[:10]]
    if pickled:
        loaded = pickle.loads(pickle.dumps(pair))
    else:
        file = io.BytesIO()
        torch.save(pair, file)
        file.seek(0)
        loaded = torch.load(file)

    report = tp.check({"before": pair, "after": loaded})

    assert loud(report) == (["TP301"] if pickled else [])
    if pickled:
        finding = the_finding(report, "TP301")
        assert finding.where.name == "after[1]"
        assert (finding.evidence["storage_nbytes"], finding.evidence["view_nbytes"]) == (4_000_000, 40)


# A LoRA delta merged into the head changes the embedding.


@pytest.mark.parametrize("untied", [True, False])
def test_merging_into_a_tied_head_reaches_the_embedding(untied):
    model = nn.ModuleDict({"emb": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["emb"].weight
    if untied:
        model["head"].weight = nn.Parameter(model["head"].weight.detach().clone())
    before = model["emb"].weight.detach().clone()
    model["head"].weight.data += 1
    assert torch.equal(before, model["emb"].weight) is untied

    report = tp.check({"model": model})

    assert loud(report) == []
    if untied:
        assert report.findings == ()
        return
    evidence = the_finding(report, "TP303").evidence
    assert evidence["names"] == ["emb.weight", "head.weight"]
    assert (evidence["shared_bytes"], evidence["same_object"]) == (48, True)


# A normalisation buffer made with expand() is updated.


@pytest.mark.parametrize("cloned", [True, False])
def test_expanded_buffer_must_be_cloned_before_it_is_updated(cloned):
    module = nn.Module()
    expanded = torch.eye(3).expand(2, 3, 3)
    module.register_buffer("whitening", expanded.clone() if cloned else expanded)

    verdict = tp.is_safe_view(module.whitening)

    assert raises(lambda: module.whitening.mul_(0.9)) is not cloned
    assert bool(verdict) is cloned
    if not cloned:
        assert_unsafe(verdict, "TP204", "18 elements on 9 cells")
        evidence = verdict.evidence
        assert (evidence["stride"], evidence["overlapping"], evidence["logical_bytes"]) == ([0, 3, 1], 9, 72)
        assert tp.recommend_fix(module.whitening)[-1].title == "write to a copy"


# The "best" weights turn out to be the last ones.


@pytest.mark.parametrize("copied", [True, False])
def test_best_weights_kept_with_state_dict_are_the_live_ones(copied):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    best = copy.deepcopy(model.state_dict()) if copied else model.state_dict()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(best["weight"], model.weight) is not copied

    report = tp.check({"model": model, "best": best})

    assert loud(report) == []
    aliases = [finding for finding in report.findings if finding.code == "TP303"]
    assert [(f.evidence["aliases"], f.evidence["bytes_really_saved"]) for f in aliases] == (
        [] if copied else [(["weight", "bias"], 0)]
    )


# ModuleList([layer for _ in range(6)]) trains as one layer.


@pytest.mark.parametrize("copied", [True, False])
def test_six_names_of_one_layer_are_said_to_be_one(copied):
    layer = nn.Linear(4, 4)
    model = nn.ModuleList([copy.deepcopy(layer) if copied else layer for _ in range(6)])

    report = tp.check({"model": model})

    assert loud(report) == []
    if copied:
        assert report.findings == ()
        return
    evidence = the_finding(report, "TP303").evidence
    assert (evidence["modules"], evidence["distinct_modules"], evidence["distinct_storages"]) == (6, 1, 2)
    assert (evidence["parameter_names"], evidence["unique_parameters"], evidence["bytes"]) == (12, 2, 80)


# Of each batch only the CLS token is kept.


@pytest.mark.parametrize("cloned", [True, False])
def test_class_token_of_each_batch_keeps_the_batch(cloned):
    kept = []
    for _ in range(4):
        token = torch.ones(8, 197, 64)[:, 0].detach()
        kept.append(token.clone() if cloned else token)
    del token

    report = tp.check({"features": kept})

    assert loud(report) == ([] if cloned else ["TP301"])
    if not cloned:
        evidence = the_finding(report, "TP301").evidence
        assert (evidence["storage_nbytes"], evidence["view_nbytes"], evidence["ratio"]) == (403_456, 2048, 0.005076)
        assert (evidence["retained_bytes"], evidence["visible_bytes"]) == (1_613_824, 8192)
        assert evidence["is_view"] is False


# A KV cache cut down to two heads needs as much memory as all eight.


@pytest.mark.parametrize("compact", [True, False])
def test_two_heads_of_a_cache_keep_all_eight(compact):
    keys = torch.ones(1, 64, 8, 16)[:, :, :2].detach()
    keys = keys.contiguous() if compact else keys

    report = tp.check({"cache": keys})

    assert loud(report) == ([] if compact else ["TP301"])
    if not compact:
        finding = the_finding(report, "TP301")
        assert (finding.evidence["storage_nbytes"], finding.evidence["view_nbytes"]) == (32_768, 8192)
        assert finding.evidence["contiguous"] is False
        assert "contiguous()" in finding.fix


# Overlapping windows are written in place: wrong numbers, no error.


@pytest.mark.parametrize("step", [1, 3])
def test_overlapping_windows_are_written_wrong_without_an_error(step):
    x = torch.arange(1.0, 7.0)
    windows = x.unfold(0, 3, step)
    wanted = windows * 2

    verdict = tp.is_safe_view(windows)

    windows.mul_(2)
    assert bool(verdict) is torch.equal(windows, wanted) is (step == 3)
    if step == 1:
        assert_unsafe(verdict, "TP204", "PyTorch raises nothing")
        evidence = verdict.evidence
        assert (evidence["elements"], evidence["distinct_cells"], evidence["aliased_elements"]) == (12, 6, 6)


# A cache keyed by data_ptr() answers for another tensor.


@pytest.mark.parametrize("kept_alive", [False, True])
def test_recycled_address_is_no_proof_of_the_same_tensor(kept_alive):
    a = torch.full((10_000_000,), 1.0)
    before = tp.inspect(a, quiet=True)
    address = before.records[0].data.pointer
    kept = [a] if kept_alive else []
    del a
    for _ in range(20):
        b = None
        b = torch.full((10_000_000,), 2.0)
        if b.data_ptr() == address:
            break
    recycled = b.data_ptr() == address

    report = tp.compare(before, tp.inspect(b, quiet=True))

    assert loud(report) == []
    assert report.records[0].extent.storage_nbytes == 40_000_000
    changed = {change.field for change in report.document.changes}
    assert ("data.pointer" in changed) is not recycled
    assert not (kept and recycled)
    # An equal address is told as such; that the tensor is another one shows in what else differs, or is said.
    assert changed & {"impl.address", "storage.address", "impl.version_counter"} or "may be" in str(report)


# Every DTensor answers data_ptr() 0, and looks like every other.


@pytest.mark.parametrize("tied", [False, True])
def test_dtensors_are_compared_by_what_they_hold(single_process_group, tied):
    mesh = init_device_mesh("cpu", (1,))
    local = torch.ones(4)
    a, b = (
        DTensor.from_local(x, mesh, [Shard(0)], run_check=False) for x in (local, local if tied else torch.zeros(4))
    )
    assert a.data_ptr() == b.data_ptr() == 0

    report = tp.check({"a": a, "b": b})

    assert loud(report) == (["TP314"] if tied else [])
    if tied:
        evidence = the_finding(report, "TP314").evidence
        assert (evidence["local_nbytes"], evidence["local_same"]) == (16, True)
    else:
        assert [record.extent.nbytes for record in report.records if record.name.endswith("_local_tensor")] == [16, 16]


# channels_last is lost in a reshape that moves nothing, for a batch of one.


@pytest.mark.parametrize("batch", [1, 2])
def test_reshape_of_a_batch_of_one_changes_strides_that_mean_nothing(batch):
    q = torch.randn(batch, 3, 4, 5).to(memory_format=torch.channels_last)
    r = q.reshape(q.shape)

    report = tp.compare(q, r)

    assert loud(report) == []
    facts = [finding for finding in report.findings if finding.code == "TP108"]
    assert len(facts) == (batch == 1)
    for finding in facts:
        assert finding.evidence["stride_before"] == [60, 1, 15, 3]
        assert finding.evidence["stride_after"] == [3, 1, 15, 3]
        assert (finding.evidence["same_address"], finding.evidence["same_memory_order"]) == (True, True)


# DistributedDataParallel warns of the strides of every 1x1 convolution's gradient.


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_stride_warning_of_a_1x1_convolution_is_harmless(single_process_group, memory_format):
    convolution = nn.Conv2d(6, 4, 1)
    network = nn.parallel.DistributedDataParallel(convolution)
    image = torch.ones(2, 6, 5, 5).to(memory_format=memory_format)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        network(image).sum().backward()
    warned = any("Grad strides" in str(warning.message) for warning in caught)

    report = tp.compare(convolution.weight, convolution.weight.grad)

    assert loud(report) == []
    facts = [finding for finding in report.findings if finding.code == "TP108"]
    differ = convolution.weight.stride() != convolution.weight.grad.stride()
    assert len(facts) == differ == (memory_format is torch.channels_last)
    assert not warned or differ  # PyTorch warns once a process
    for finding in facts:
        assert finding.evidence["param_stride"] == [6, 1, 1, 1]
        assert finding.evidence["grad_stride"] == [6, 1, 6, 6]
        assert finding.evidence["same_memory_order"]


# Two empty tensors have one address, 0, and nothing else in common.


def test_empty_tensors_share_nothing():
    report = tp.check({"a": torch.zeros(2, 0), "b": torch.zeros(2, 0)})

    assert report.findings == ()
    assert [record.extent.storage_nbytes for record in report.records] == [0, 0]
    assert tp.list_shared_storages({"a": torch.zeros(2, 0), "b": torch.zeros(2, 0)}).storages == ()


def test_empty_slices_keep_four_megabytes():
    x = torch.zeros(1_000_000)
    a, b = x[:0], x[500:500]
    del x

    report = tp.check({"a": a, "b": b})

    assert loud(report) == ["TP301"]
    evidence = the_finding(report, "TP301").evidence
    assert (evidence["storage_nbytes"], evidence["view_nbytes"]) == (4_000_000, 0)
    assert evidence["tensors"] == ["a", "b"]
