"""TP104-TP109: foreign memory. Each fires, its healthy twin and its near misses stay silent."""

from __future__ import annotations

import array
import mmap
import subprocess
import sys
from multiprocessing import shared_memory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tensorplay as tp
from tensorplay.rules.foreign import first_missing
from tensorplay.scene import Mapping


def loud(objs) -> list[str]:
    return [finding.code for finding in tp.check(objs).findings if finding.severity != "info"]


def all_codes(objs) -> list[str]:
    return [finding.code for finding in tp.check(objs).findings]


def the_finding(objs, code: str) -> tp.Finding:
    (finding,) = [finding for finding in tp.check(objs).findings if finding.code == code]
    return finding


def read_only(values: np.ndarray) -> np.ndarray:
    values.flags.writeable = False
    return values


def saved(tmp_path) -> str:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((3, 4)))
    return str(path)


# -- TP104 borrowed memory


@pytest.mark.parametrize(
    ("make", "maker", "producer_type"),
    [
        (lambda: torch.from_numpy(np.zeros(4)), "numpy", "numpy.ndarray"),
        (lambda: torch.as_tensor(np.zeros(4)[1:]), "numpy", "numpy.ndarray"),
        (lambda: torch.frombuffer(bytearray(16), dtype=torch.float32), "frombuffer", "bytearray"),
        (lambda: torch.from_dlpack(np.zeros(4)), "dlpack", None),
        (lambda: torch.from_dlpack(torch.zeros(4)), "dlpack", None),
    ],
)
def test_tp104_names_the_way_in_and_who_keeps_the_memory(make, maker, producer_type):
    finding = the_finding({"x": make()}, "TP104")

    assert finding.severity == "info"
    assert (finding.evidence["maker"], finding.evidence["producer_type"]) == (maker, producer_type)
    assert finding.evidence["resizable"] is False


def test_tp104_memory_without_a_deleter_is_nobodys_promise():
    source = torch.zeros(4)
    storage = torch._C._construct_storage_from_data_pointer(source.data_ptr(), torch.device("cpu"), 16)

    finding = the_finding({"x": torch.empty(0).set_(storage, 0, (4,))}, "TP104")

    assert finding.evidence["origin"] == "borrowed"
    assert "nobody here keeps this memory alive" in finding.why


def test_tp104_is_one_finding_a_way_in():
    shared = np.zeros(8)
    objs = {"a": torch.from_numpy(shared), "b": torch.from_numpy(shared[2:]), "c": torch.from_dlpack(shared)}

    assert [(f.evidence["maker"], f.evidence["tensors"]) for f in tp.check(objs).findings] == [
        ("numpy", ["a", "b"]), ("dlpack", ["c"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4),
        lambda: torch.tensor(np.zeros(4)),
        lambda: torch.from_numpy(np.zeros(4)).clone(),
        lambda: torch.from_numpy(np.zeros(0)),
        lambda: torch.zeros(4).share_memory_(),
        lambda: torch.empty(4, device="meta"),
    ],
)
def test_tp104_is_silent_where_the_memory_is_pytorchs_own(make):
    assert all_codes({"x": make()}) == []


def test_tp104_storage_that_numpy_looks_at_is_still_pytorchs_own():
    x = torch.zeros(4)
    array = x.numpy()

    assert not tp.inspect(x, quiet=True).records[0].storage.resizable
    assert all_codes({"x": x, "array": array}) == []


def test_producer_is_the_very_object():
    values, buffer = np.zeros(4), bytearray(16)
    records = tp.check([torch.from_numpy(values), torch.frombuffer(buffer, dtype=torch.int32),
                        torch.from_dlpack(values)]).records  # fmt: skip

    assert [record.data.producer for record in records] == [id(values), id(buffer), id(values)]
    assert [record.data.read_only for record in records] == [None, None, False]


# -- TP105 mapped read-only


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_tp105_write_to_a_read_only_file_mapping_ends_the_process(tmp_path):
    path = saved(tmp_path)
    values = np.load(path, mmap_mode="r")
    x = torch.from_numpy(values)

    finding = the_finding({"x": x, "array": values}, "TP105")

    assert finding.severity == "warning"
    assert finding.evidence["map_permissions"] == "r--s"
    assert (finding.evidence["map_path"], finding.evidence["file_backed"]) == (path, True)
    assert finding.evidence["numpy_writeable"] is False
    assert loud({"x": x, "array": values}) == ["TP105"]  # one cause: not TP106 as well
    write = f"import numpy as np, torch; torch.from_numpy(np.load({path!r}, mmap_mode='r'))[0, 0] = 1"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", write], check=False).returncode == -11


@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")
@pytest.mark.parametrize("mode", ["r+", "c"])
def test_tp105_is_silent_where_writing_is_fine(tmp_path, mode):
    values = np.load(saved(tmp_path), mmap_mode=mode)

    assert loud({"x": torch.from_numpy(values), "array": values}) == []


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_tp105_by_the_map_alone_without_numpy():
    with mmap.mmap(-1, 4096, prot=mmap.PROT_READ) as memory:
        x = torch.frombuffer(memory, dtype=torch.float32, count=8)

        assert loud({"x": x}) == ["TP105"]
        del x


def test_checkpoints_loaded_by_mapping_are_healthy(tmp_path):
    model = torch.nn.Linear(4, 4)
    torch.save(model.state_dict(), tmp_path / "a.pt")

    loaded = torch.load(tmp_path / "a.pt", mmap=True)

    assert loud({"loaded": loaded}) == []


# -- TP106 the producer is not writeable


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    "make", [torch.from_dlpack, torch.from_numpy, torch.as_tensor, lambda a: torch.from_numpy(a[1:])]
)
def test_tp106_constant_array_beside_its_tensor_fires(make):
    values = read_only(np.arange(4.0))
    x = make(values)

    finding = the_finding({"x": x, "array": values}, "TP106")

    assert finding.severity == "warning"
    assert finding.evidence["producer_writeable"] is False
    assert finding.evidence["producer_name"] == "array"
    assert finding.evidence["same_address"] is (x.numel() == 4)


def _copies(values):
    return torch.from_dlpack(values, copy=True)


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    "make",
    [
        lambda: (_copies(values := read_only(np.arange(4.0))), values),
        lambda: (torch.tensor(values := read_only(np.arange(4.0))), values),
        lambda: (torch.from_numpy(values := np.arange(4.0)), values),
        # A constant view of the tensor's own memory is not its producer.
        lambda: (torch.from_numpy(values := np.arange(4.0)), np.broadcast_to(values, (3, 4))),
        # The producer is a constant view that nobody handed in; what was handed in may be written.
        lambda: (torch.from_numpy(read_only((values := np.arange(4.0)).view())), values),
        lambda: (torch.zeros(4), read_only(np.arange(4.0))),
    ],
)
def test_tp106_is_silent_where_nothing_constant_is_shared(make):
    x, values = make()

    assert loud({"x": x, "array": values}) == []


@pytest.mark.filterwarnings("ignore:The given (buffer|NumPy array) is not writable")
@pytest.mark.parametrize(
    "borrow",
    [
        lambda values: torch.from_dlpack(values[1:]),
        lambda values: torch.from_dlpack(values.T),
        lambda values: torch.frombuffer(memoryview(values), dtype=torch.float64),
        lambda values: torch.from_numpy(torch.from_numpy(values).numpy()),
    ],
)
def test_tp106_is_found_through_views_and_hands(borrow):
    values = read_only(np.zeros((4, 4)))

    assert loud({"x": borrow(values), "values": values}) == ["TP106"]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_tp106_needs_the_array_among_the_objects():
    values = read_only(np.arange(4.0))

    assert loud({"x": torch.from_numpy(values)}) == []
    assert loud({"x": torch.from_numpy(values), "batch": {"deep": [values]}}) == ["TP106"]


# -- TP107 address in no mapping


def test_tp107_memory_unmapped_under_the_tensor_fires():
    memory = mmap.mmap(-1, 4096)
    x = torch.frombuffer(memory, dtype=torch.float32, count=8)
    assert loud({"x": x}) == []
    memory.close()

    finding = the_finding({"x": x, "mmap": memory}, "TP107")

    assert finding.severity == "error"
    assert finding.evidence["mapped_now"] is False
    assert finding.evidence["storage_nbytes"] == 32
    assert loud({"x": x}) == ["TP107"]  # one cause: not TP109 as well
    verdict = tp.verify_data_ptr_consistency(x)
    assert not verdict
    assert "no readable mapping" in verdict.reasons[0]
    assert [f.code for f in verdict.findings if f.severity == "error"] == ["TP107"]


def test_tp107_numpy_holds_the_buffer_s_export():
    memory = mmap.mmap(-1, 4096)
    x = torch.from_numpy(np.frombuffer(memory, dtype=np.float32, count=8))

    with pytest.raises(BufferError):
        memory.close()
    assert loud({"x": x}) == []


def test_tp107_closed_shared_memory_fires():
    block = shared_memory.SharedMemory(create=True, size=4096)
    try:
        x = torch.frombuffer(block.buf, dtype=torch.float32, count=8)
        assert loud({"x": x}) == []
        block.close()

        assert loud({"x": x}) == ["TP107"]
    finally:
        block.unlink()


def test_tp107_pages_without_permission_are_not_readable():
    # What PROT_NONE leaves: an address that is taken and that nobody may read.
    mappings = [Mapping(0, 100, "rw-p", ""), Mapping(100, 200, "---p", "")]

    assert first_missing((50, 150), mappings) == 100


@given(
    span=st.tuples(st.integers(0, 60), st.integers(1, 40)),
    parts=st.lists(st.tuples(st.integers(1, 20), st.sampled_from(["rw-p", "r--p", "---p", None])), max_size=8),
)
@settings(deadline=None)
def test_tp107_first_missing_address_agrees_with_a_walk_over_all_of_them(span, parts):
    readable, mappings, at = set(), [], 0
    for size, permissions in parts:
        if permissions is not None:
            mappings.append(Mapping(at, at + size, permissions, ""))
            readable |= set(range(at, at + size)) if permissions[0] == "r" else set()
        at += size
    begin, end = span[0], span[0] + span[1]
    overlapping = [m for m in mappings if m.begin < end and begin < m.end]

    expected = next((address for address in range(begin, end) if address not in readable), None)

    assert first_missing((begin, end), overlapping) == expected


# -- TP109 the owner moved


def test_tp109_array_left_behind_by_shared_memory_fires():
    x = torch.full((8,), 3.0)
    values = x.numpy()
    assert loud({"x": x, "array": values}) == []
    x.share_memory_()

    finding = the_finding({"x": x, "array": values}, "TP109")

    assert finding.severity == "error"
    assert finding.where.name == "array"
    assert finding.evidence["array_points_at_tensor"] is False
    assert finding.evidence["storage_nbytes"] == 32
    assert finding.evidence["owner_is_shared"] is True
    assert loud({"array": values}) == ["TP109"]  # the array itself names its owner
    assert loud({"view": values[2:]}) == ["TP109"]


def test_tp109_shared_first_is_healthy():
    x = torch.full((8,), 3.0).share_memory_()

    assert loud({"x": x, "array": x.numpy(), "part": x[2:].numpy()}) == []


def test_tp109_tensor_behind_an_array_behind_a_tensor_fires():
    x = torch.full((8,), 3.0)
    again = torch.from_numpy(x.numpy())
    assert loud({"x": x, "again": again}) == []
    x.share_memory_()

    assert loud({"x": x, "again": again}) == ["TP109"]


def test_tp109_data_replaced_beside_an_array_is_healthy():
    x = torch.full((8,), 3.0)
    values = x.numpy()
    x.data = torch.zeros(8)

    assert loud({"x": x, "array": values}) == []  # the array keeps an alias of its own over the old storage
    assert values[0] == 3.0


def test_tp109_names_who_has_the_bytes_now():
    x = torch.full((8,), 3.0)
    values = x.numpy()
    stranger = torch.zeros(0).set_(x.untyped_storage())
    values.base.set_(torch.zeros(8))

    finding = the_finding({"array": values, "stranger": stranger}, "TP109")

    assert finding.evidence["belongs_now_to"] == ["stranger"]
    assert "these bytes belong to stranger now: a write goes there" in finding.subject


def _grown(values: np.ndarray) -> bool:
    """Whether growing the array moved it."""
    before = values.__array_interface__["data"][0]
    values.resize(1 << 20, refcheck=False)
    return values.__array_interface__["data"][0] != before


@pytest.mark.parametrize(
    "borrow",
    [
        lambda values: torch.from_numpy(values[1:]),
        lambda values: torch.from_numpy(values).numpy(),
        lambda values: torch.from_numpy(torch.from_numpy(values).numpy()),
        lambda values: torch.from_numpy(torch.from_numpy(values)[2:].numpy()[1:])[1:].numpy(),
    ],
)
def test_tp109_is_found_through_any_number_of_hands(borrow):
    values = np.zeros(8)
    last = borrow(values)
    assert loud({"last": last, "values": values}) == []

    assert _grown(values)

    assert loud({"last": last, "values": values}) == ["TP109"]
    assert loud({"last": last}) == ["TP109"]


def test_tp109_through_a_tensor_that_moved():
    x = torch.zeros(8)
    last = torch.from_numpy(x.numpy()[2:])[1:].numpy()
    x.share_memory_()

    assert loud({"x": x, "last": last}) == ["TP109"]


def test_tp109_array_over_a_tensor_over_a_buffer():
    buffer = bytearray(64)
    last = torch.frombuffer(buffer, dtype=torch.float32)[2:4].numpy()
    assert loud({"last": last}) == []
    buffer.clear()

    assert loud({"last": last}) == ["TP109"]


def test_tp109_subclass_of_a_buffer_is_known_by_its_base():
    class Buffer(bytearray):
        pass

    buffer = Buffer(64)
    x = torch.frombuffer(buffer, dtype=torch.float32)
    assert loud({"x": x}) == []
    buffer.clear()

    assert loud({"x": x}) == ["TP109"]


def test_tp109_says_shrank_where_nothing_moved():
    buffer = bytearray(64)
    x = torch.frombuffer(buffer, dtype=torch.uint8)
    buffer.pop()

    assert the_finding({"x": x}, "TP109").headline.endswith("a bytearray, shrank")


def test_tp109_strides_of_the_owner_say_nothing_about_its_block():
    values = np.zeros(8)
    x = torch.from_numpy(values)
    values.shape = (2, 4)
    other = np.lib.stride_tricks.as_strided(values, (3,), (0,))

    assert loud({"x": x, "values": values, "other": other}) == []


def test_tp109_array_resized_under_the_tensor_fires():
    values = np.zeros(8)
    x = torch.from_numpy(values)
    assert loud({"x": x}) == []
    before = values.__array_interface__["data"][0]
    values.resize(1 << 20, refcheck=False)
    moved = values.__array_interface__["data"][0] != before

    assert loud({"x": x}) == (["TP109"] if moved else [])


@pytest.mark.parametrize("make", [lambda: bytearray(64), lambda: array.array("f", [0.0] * 16)])
def test_tp109_buffer_grown_under_the_tensor_fires(make):
    buffer = make()
    x = torch.frombuffer(buffer, dtype=torch.float32)
    assert loud({"x": x}) == []
    address = x.data_ptr()
    buffer.extend(buffer * (1 << 16))
    moved = torch.frombuffer(buffer, dtype=torch.float32).data_ptr() != address

    assert loud({"x": x}) == (["TP109"] if moved else [])


def test_tp109_shrunk_in_place_is_found():
    buffer = bytearray(64)
    x = torch.frombuffer(buffer, dtype=torch.float32)
    del buffer[:]

    assert loud({"x": x}) == ["TP109"]


@given(
    count=st.integers(1, 64), start=st.integers(0, 8), step=st.integers(1, 4), share=st.booleans(), late=st.booleans()
)
@settings(deadline=None, max_examples=40)
def test_tp109_on_random_arrays(count, start, step, share, late):
    x = torch.zeros(count + start)
    if share and not late:
        x.share_memory_()
    values = x.numpy()[start::step]
    if share and late:
        x.share_memory_()

    assert loud({"x": x, "array": values}) == (["TP109"] if share and late else [])


def test_nested_tensor_whose_sizes_are_unmapped_is_not_read():
    memory = mmap.mmap(-1, 4096)
    numbers = torch.frombuffer(memory, dtype=torch.int64)
    numbers[:4], numbers[10:14], numbers[20:22] = 2, 1, torch.tensor([0, 4])
    sizes, strides, offsets = numbers[:4].view(2, 2), numbers[10:14].view(2, 2), numbers[20:22]
    nested = torch._nested_view_from_buffer(torch.zeros(8), sizes, strides, offsets)
    del numbers, sizes, strides, offsets
    memory.close()

    assert loud({"nested": nested}) == ["TP107"]
    assert tp.inspect(nested, quiet=True).records[0].extent is None


# -- the observer


def test_arrays_and_buffers_are_left_as_they_are():
    values, buffer = np.zeros(4), bytearray(16)
    objs = {"x": torch.from_numpy(values), "y": torch.frombuffer(buffer, dtype=torch.int32), "values": values}
    before = sys.getrefcount(values), sys.getrefcount(buffer), values.flags.writeable

    tp.check(objs)

    assert (sys.getrefcount(values), sys.getrefcount(buffer), values.flags.writeable) == before
    buffer.extend(b"more")  # refused while an export is open


def test_subclass_of_array_is_read_without_its_code():
    class Touchy(np.ndarray):
        def __getattribute__(self, name):
            raise AssertionError(f"the probe asked for {name}")

        def __array_finalize__(self, other):
            pass

    values = np.zeros((2, 3)).view(Touchy)

    (record,) = tp.check({"values": values}).document.arrays

    assert (record.type, record.shape, record.stride_bytes, record.dtype) == ("Touchy", (2, 3), (24, 8), "float64")


def test_array_record_says_where_it_lies_and_whose_memory_it_is():
    base = np.arange(24.0).reshape(4, 6)
    part = base[::-1, ::2]

    records = {record.name: record for record in tp.check({"base": base, "part": part}).document.arrays}

    assert records["part"].begin == records["base"].begin
    assert records["part"].end == records["base"].end - 8
    assert records["part"].owner_type == "ndarray"
    assert tp.Report.from_json(tp.check({"part": part}).to_json()).document.arrays[0].name == "part"
