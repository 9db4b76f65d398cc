"""A checkpoint is read as torch would load it, without its bytes, without its code, and with little memory."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import subprocess
import sys
import zipfile

import pytest
import safetensors.torch
import torch

import tensorplay
from tensorplay import pickles
from tensorplay.checkpoints import inspect_checkpoint
from tensorplay.errors import TargetError
from tests.checkpoint_files import (
    entries_of,
    peak_since_now,
    rich_objects,
    safetensors_of,
    saved,
    with_pickle,
    write_sparse_safetensors,
    write_sparse_zip,
    zipped,
)
from tests.helpers import ROOT


def geometry(records):
    return [
        (
            r.name,
            r.kind,
            r.impl.dtype,
            r.impl.shape,
            r.impl.stride,
            r.impl.storage_offset,
            r.storage and r.storage.nbytes,
        )
        for record in records
        for r in (record, *(inner.record for inner in record.inner))
    ]


def sharing(records):
    first = {}
    return [first.setdefault(r.storage.address, r.name) for r in records if r.storage is not None]


@pytest.fixture
def write(tmp_path):
    def write_(content: bytes, name: str = "case.pt"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write_


def refusal(path) -> str:
    with pytest.raises(TargetError) as refused:
        inspect_checkpoint(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # torch.load's own
@pytest.mark.parametrize("legacy", [False, True])
def test_records_are_those_of_what_torch_loads(write, legacy):
    path = write(saved(rich_objects(), legacy=legacy))

    report = inspect_checkpoint(path)

    loaded = torch.load(path, weights_only=True)
    expected = tensorplay.check(loaded, grads=False).records
    assert geometry(report.records) == geometry(expected)
    assert sharing(report.records) == sharing(expected)
    assert report.findings == ()
    assert report.document.files[0].format == ("torch legacy" if legacy else "torch zip")


def test_records_of_safetensors_are_those_of_what_it_loads(write):
    tensors = {"a": torch.ones(3, 4), "b": torch.arange(10), "empty": torch.empty(0), "half": torch.ones(3).half()}
    path = write(safetensors.torch.save(tensors), "case.safetensors")

    report = inspect_checkpoint(path)

    expected = tensorplay.check(safetensors.torch.load_file(path)).records
    assert sorted(geometry(report.records)) == sorted(geometry(expected))
    assert report.document.files[0].format == "safetensors"


def test_elements_of_a_zip_lie_where_they_are_mapped(write):
    path = write(saved({"a": torch.arange(6.0), "b": torch.arange(7)}))

    records = inspect_checkpoint(path).records

    content = path.read_bytes()
    begin = content.index(torch.arange(6.0).numpy().tobytes())
    distance = content.index(torch.arange(7).numpy().tobytes()) - begin
    assert records[1].data.pointer - records[0].data.pointer == distance
    assert {record.data.origin for record in records} == {"storage_slice"}


@pytest.mark.parametrize("legacy", [False, True])
def test_bytes_of_a_small_view_s_storage_are_wasted_and_a_reshape_s_are_not(write, legacy):
    flat = torch.zeros(1_000_000)

    small = inspect_checkpoint(write(saved({"view": flat[:1000]}, legacy=legacy))).document.files[0]
    whole = inspect_checkpoint(write(saved({"view": flat.view(1000, 1000)}, legacy=legacy))).document.files[0]

    assert (small.tensor_nbytes, small.storage_nbytes, small.wasted_nbytes) == (4_000, 4_000_000, 3_996_000)
    assert (whole.tensor_nbytes, whole.storage_nbytes, whole.wasted_nbytes) == (4_000_000, 4_000_000, 0)
    assert small.wasted_exact
    assert whole.wasted_exact


@pytest.mark.parametrize(
    ("views", "wasted", "exact"),
    [
        (lambda x: [x[:10], x[5:20]], 80 * 4, True),
        (lambda x: [x[:10], x[90:]], 80 * 4, True),
        (lambda x: [x[:10], x[:10].view(2, 5), x[3:4]], 90 * 4, True),
        (lambda x: [x[::2]], 50 * 4, True),
        (lambda x: [x[::2], x[:10]], 45 * 4, True),
        (lambda x: [x.view(10, 10).t(), x[50:]], 0, True),
        (lambda x: [x[:0]], 100 * 4, True),
    ],
)
def test_wasted_bytes_are_those_that_no_tensor_reaches(write, views, wasted, exact):
    file = inspect_checkpoint(write(saved(views(torch.zeros(100))))).document.files[0]

    assert (file.wasted_nbytes, file.wasted_exact) == (wasted, exact)


def test_wasted_bytes_are_never_more_than_those_that_no_tensor_reaches(write):
    chance = random.Random(0)
    for _ in range(30):
        x = torch.zeros(60, dtype=torch.uint8)
        views = [
            x[chance.randrange(60) :: chance.randrange(1, 4)][: chance.randrange(1, 20)]
            for _ in range(chance.randrange(1, 5))
        ]
        reached = torch.zeros(60, dtype=torch.bool)
        for view in views:
            reached.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        file = inspect_checkpoint(write(saved(views))).document.files[0]

        unreached = 60 - int(reached.sum())
        assert file.wasted_nbytes == unreached if file.wasted_exact else file.wasted_nbytes <= unreached


def test_object_that_is_no_dictionary_is_called_after_its_file(write):
    assert [r.name for r in inspect_checkpoint(write(saved(torch.ones(2)), "bare.pt")).records] == ["bare"]
    odd = {"a": torch.ones(2), 3: torch.ones(1)}
    assert [r.name for r in inspect_checkpoint(write(saved(odd), "odd.pt")).records] == ["odd['a']", "odd[3]"]


@pytest.mark.parametrize(
    ("content", "name", "note"),
    [
        (saved(torch.ones(2)), "x.safetensors", "its name ends in .safetensors, its content is torch zip"),
        (safetensors.torch.save({"a": torch.ones(2)}), "x.pt", "its name ends in .pt, its content is safetensors"),
        (saved(torch.ones(2)), "x.dat", None),
        (saved(torch.ones(2), legacy=True), "x.bin", None),
    ],
)
def test_content_decides_and_a_wrong_extension_is_noted(write, content, name, note):
    report = inspect_checkpoint(write(content, name))

    assert report.document.files[0].notes == ((note,) if note else ())
    assert note is None or f"note: {note}" in report.text()


def test_big_endian_file_is_noted(write):
    entries = entries_of(saved(torch.ones(2)))
    entries["archive/byteorder"] = b"big"

    assert "big-endian" in inspect_checkpoint(write(zipped(entries))).document.files[0].notes[0]


def test_report_is_cut_after_max_tensors_and_says_so(write):
    report = inspect_checkpoint(write(saved([torch.ones(1) for _ in range(5)])), max_tensors=3)

    assert len(report.records) == report.document.files[0].tensors == 3
    assert report.document.truncated.max_tensors == 3


# -- damaged and hostile files ----------------------------------------------------------------------------------


def test_storage_that_claims_more_than_its_entry_is_refused(write):
    entries = entries_of(saved({"a": torch.ones(4), "b": torch.ones(4)}))
    entries["archive/data/0"] = entries["archive/data/0"][:-1]

    assert "the storage '0' claims 16 B, its entry has 15 B" in refusal(write(zipped(entries)))


def test_storage_that_is_not_there_is_named(write):
    entries = entries_of(saved({"a": torch.ones(4)}))
    del entries["archive/data/0"]

    assert "names the storage '0', which the archive does not have" in refusal(write(zipped(entries)))


def test_packed_archive_is_refused_before_anything_is_unpacked(write):
    entries = entries_of(saved({"a": torch.ones(4)}))
    entries["archive/data/0"] = bytes(200 << 20)
    path = write(zipped(entries, zipfile.ZIP_DEFLATED))
    taken = peak_since_now()

    assert path.stat().st_size < 1 << 20
    assert "is compressed, and torch.save stores" in refusal(path)
    assert taken() < 100 << 20


def test_entry_that_is_there_twice_is_refused(write):
    path = write(saved(torch.ones(2)))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("archive/data.pkl", b"x")

    assert "two entries" in refusal(path)


def test_two_storages_in_one_place_are_refused(write):
    content = bytearray(saved({"a": torch.ones(4), "b": torch.ones(4)}))
    first, second = (content.rindex(b"archive/data/" + digit) - 46 for digit in (b"0", b"1"))
    content[second + 42 : second + 46] = content[first + 42 : first + 46]  # where the directory says that it begins

    assert "'archive/data/1' is not where the zip directory says" in refusal(write(bytes(content)))


def test_long_name_is_cut_in_the_message(write):
    entries = entries_of(saved({"a": torch.ones(4)})) | {"archive/" + "x" * 60_000: bytes(1_000)}

    assert len(refusal(write(zipped(entries, zipfile.ZIP_DEFLATED)))) < 400


def test_zip_directory_that_claims_gigabytes_is_not_read(write):
    content = bytearray(saved(torch.ones(2)))
    end = content.rindex(b"PK\x05\x06")
    content[end + 12 : end + 16] = (3 << 30).to_bytes(4, "little")
    path = write(bytes(content))
    with path.open("r+b") as file:  # 4 GiB of nothing before the directory
        file.truncate(4 << 30)
        file.seek(0, os.SEEK_END)
        file.write(content[end:])

    assert "is damaged" in refusal(path)


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        (b"c__builtin__\nbytearray\n(\x8a\x06\0\0\0\0\0\x01tR.", "asks for more memory"),
        (b"c__builtin__\nbytearray\n(\x8a\x05\0\0\0\0\x02tR.", "asks for more memory"),
        (b"}" + b")" + b"\x85" * 500_000 + b"Ns.", "nests tuples more than 5000 levels deep"),
        (b"]" * 5_000 + b"a" * 4_999 + b".", "nests objects more than 1000 levels deep"),
        (b"cos\nsystem\n(X\x02\0\0\0lstR.", "holds code: its pickle asks for os.system, which torch never loads"),
        (b"cbuiltins\neval\n(X\x01\0\0\x001tR.", "weights_only refuses eval"),
        (b"c__main__\nModel\n)\x81.", "weights_only refuses __main__.Model"),
        (b"N.", "there is no tensor in it"),
        (b"]q\0h\0a.", "there is no tensor in it"),
        (b"", "its pickle does not load"),
    ],
)
def test_hostile_pickle_is_refused_in_one_line(write, operations, words):
    limits = resource.getrlimit(resource.RLIMIT_DATA)

    assert words in refusal(write(with_pickle(b"\x80\x02" + operations)))
    assert resource.getrlimit(resource.RLIMIT_DATA) == limits


class Expanded:
    """Pickled, it is a conversion of one element that stands for 2**33."""

    def __reduce__(self):
        arguments = (torch.zeros(1).expand(1 << 33), torch.float64, "cpu", False)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, arguments


def test_conversion_to_more_memory_than_there_is_is_refused(write):
    assert "can't allocate memory" in refusal(write(saved({"a": Expanded()})))


def test_encrypted_archive_is_refused(write):
    content = bytearray(saved(torch.ones(2)))
    entry = content.index(b"PK\x01\x02")
    content[entry + 8] |= 1

    assert refusal(write(bytes(content))).endswith("is encrypted: decrypt it first")


def test_module_that_must_be_imported_is_named():
    message = "``torch.distributed.tensor`` must be imported to load DTensors"

    assert "needs torch.distributed.tensor: import it" in str(pickles._refusal(pickle.UnpicklingError(message)))


def test_refused_class_is_named_with_the_way_out(write):
    words = refusal(write(saved(torch.nn.Linear(2, 2))))

    assert "weights_only refuses torch.nn.modules.linear.Linear" in words
    assert "torch.serialization.add_safe_globals" in words
    assert "tensorplay.check" in words


def test_tensor_in_very_many_places_is_refused_before_its_paths_are_written(write, monkeypatch):
    monkeypatch.setattr("tensorplay.checkpoints._MOST_PATH_CHARS", 10_000)
    tensor = torch.ones(1)
    path = write(saved({"a": [tensor] * 1_000}))

    assert "paths take more than" in refusal(path)


def test_pickle_larger_than_the_bound_is_not_read(write, monkeypatch):
    monkeypatch.setattr(pickles, "_MOST_PICKLE_BYTES", 100)

    assert "has a pickle of" in refusal(write(saved({"a": torch.ones(3)})))
    assert "is damaged" in refusal(write(saved({"a": torch.ones(3)}, legacy=True)))


@pytest.mark.parametrize(
    ("header", "nbytes", "words"),
    [
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, 12, "not fully covered"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 60]}}, 16, "invalid"),
        ({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 16]}}, 16, "invalid shape"),
        (
            {n: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for n in "ab"},
            16,
            "invalid offset",
        ),
        ({"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}, 16, "F99"),
        (b"{", 0, "invalid JSON"),
    ],
)
def test_safetensors_header_that_lies_is_refused_in_one_line(write, header, nbytes, words):
    assert words in refusal(write(safetensors_of(header, nbytes), "x.safetensors"))


# -- folders ----------------------------------------------------------------------------------------------------


def shards(folder, **files):
    for name, tensors in files.items():
        safetensors.torch.save_file(tensors, folder / f"{name}.safetensors")


def index(folder, **weight_map):
    text = json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def test_shards_of_an_index_are_read_and_storages_of_two_files_are_not_one(tmp_path):
    shards(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.ones(3)}, other={"c": torch.ones(4)})
    index(tmp_path, a="one.safetensors", b="two.safetensors")

    report = inspect_checkpoint(tmp_path)

    assert [record.name for record in report.records] == ["one.safetensors:a", "two.safetensors:b"]
    assert [(file.tensors, file.storage_nbytes) for file in report.document.files] == [(1, 8), (1, 12)]
    assert len({record.storage.address for record in report.records}) == 2


def test_missing_shards_are_named(tmp_path):
    shards(tmp_path, one={"a": torch.ones(2)})
    index(tmp_path, a="one.safetensors", b="two.safetensors", c="three.safetensors")

    assert "lacks two.safetensors, three.safetensors, which model.safetensors.index.json names" in refusal(tmp_path)


def test_files_behind_max_tensors_are_listed_without_tensors(tmp_path):
    shards(tmp_path, one={"a": torch.ones(2), "b": torch.ones(2)}, two={"c": torch.ones(3)})

    document = inspect_checkpoint(tmp_path, max_tensors=2).document

    assert [file.tensors for file in document.files] == [2, 0]
    assert document.truncated.max_tensors == 2


def test_wasted_bytes_are_not_known_where_tensors_were_left_out(tmp_path):
    shards(tmp_path, one={"a": torch.ones(2)}, two={"b": torch.ones(2), "c": torch.ones(3)})

    report = inspect_checkpoint(tmp_path, max_tensors=2)

    assert [file.wasted_nbytes for file in report.document.files] == [0, None]
    assert "wasted bytes not known" in report.text()


def test_tensor_that_only_the_index_has_is_named(tmp_path):
    shards(tmp_path, one={"a": torch.ones(2)})
    index(tmp_path, a="one.safetensors", b="one.safetensors")

    unread = inspect_checkpoint(tmp_path).document.unread
    assert [(entry.name, entry.reason) for entry in unread] == [
        ("one.safetensors:b", "the index names it, the file does not have it")
    ]


@pytest.mark.parametrize("shard", ["../secret.pt", "/etc/passwd", "", "..", "a/b.pt"])
def test_index_that_leads_out_of_its_folder_is_refused(tmp_path, shard):
    index(tmp_path, a=shard)

    assert "is no file of its folder" in refusal(tmp_path)


def test_file_of_a_folder_that_holds_code_is_passed_over_and_named(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "model.pt")
    torch.save(torch.nn.Linear(1, 1), tmp_path / "training_args.bin")

    document = inspect_checkpoint(tmp_path).document

    assert [file.path for file in document.files] == [str(tmp_path / "model.pt")]
    assert document.unread[0].name == "training_args.bin"
    assert "weights_only refuses torch.nn.modules.linear.Linear" in document.unread[0].reason


def test_damaged_file_of_a_folder_is_an_error(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(saved({"a": torch.ones(2)})[:500])

    assert refusal(tmp_path).startswith(f"{tmp_path / 'b.pt'} is damaged")


def test_distributed_checkpoint_is_refused_with_the_way_out(tmp_path):
    (tmp_path / ".metadata").write_bytes(b"")

    assert "dcp_to_torch" in refusal(tmp_path)


# -- memory -----------------------------------------------------------------------------------------------------

MEASURE = """
import sys
import torch, safetensors, tensorplay.checkpoints
from tests.checkpoint_files import peak_since_now
taken = peak_since_now()
report = tensorplay.checkpoints.inspect_checkpoint(sys.argv[1])
text = report.text()
print(taken(), report.document.files[0].storage_nbytes)
"""


@pytest.mark.parametrize("write_file", [write_sparse_zip, write_sparse_safetensors])
def test_ten_gigabytes_take_no_memory(tmp_path, show, write_file):
    path = tmp_path / "large"
    write_file(path, 10)
    assert path.stat().st_blocks * 512 < 1 << 20  # nothing of it on the disk, so that this test costs nothing

    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, cwd=ROOT, check=True
    )

    taken, stored = map(int, measured.stdout.split())
    assert stored == 10 << 30
    assert taken < 200 << 20
    show(f"{write_file.__name__}: 10 GiB inspected, memory grew by {taken / 2**20:.1f} MiB at its peak")


def test_pickles_of_other_programs_are_not_opened(write):
    assert "is a bare pickle of protocol 4, not as torch.save writes" in refusal(write(pickle.dumps({"a": 1})))
