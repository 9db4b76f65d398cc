"""Reports: one model, JSON that comes back equal, a published schema, text that people read."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re

import jsonschema
import pytest
import torch

import tensorplay as tp
from tensorplay.layers import SCHEMA_VERSION, json_schema
from tests import helpers


def normalised(text: str) -> str:
    """Replace what differs from run to run."""
    return re.sub(r"0x[0-9a-f]+", "0xADDRESS", text)


def sick() -> dict[str, torch.Tensor]:
    view, flat = helpers.released()
    return {"view": view, "flat": flat}


@pytest.mark.parametrize(
    "make",
    [
        lambda: tp.inspect(torch.ones(3), quiet=True),
        lambda: tp.inspect(torch.eye(3).to_sparse(), quiet=True),
        lambda: tp.inspect(helpers.symbolic_fake(), quiet=True),
        lambda: tp.inspect(torch.zeros(3).share_memory_(), quiet=True),
        lambda: tp.check(sick()),
        lambda: tp.check(sick(), ignore=["TP102"]),
        lambda: tp.inspect([torch.ones(1)] * 2, "label", quiet=True, max_tensors=1),
        lambda: tp.check({}),
    ],
)
def test_json_comes_back_equal_and_fits_the_schema(make):
    report = make()
    text = report.to_json()

    again = tp.Report.from_json(text)

    assert again.document == report.document
    assert again.to_json() == text
    assert str(again) == str(report)
    assert again.findings == report.findings
    jsonschema.validate(json.loads(text), json_schema())
    assert report.to_dict() == json.loads(text)


def test_addresses_are_integers_and_the_version_is_there():
    document = json.loads(tp.inspect(torch.ones(3), quiet=True).to_json())

    (record,) = document["records"]
    assert document["schema_version"] == SCHEMA_VERSION
    assert all(type(record[layer]["address"]) is int for layer in ("python", "impl", "storage"))
    assert type(record["data"]["pointer"]) is int
    assert {"tensorplay", "torch", "python", "host", "pid", "time"} <= document["provenance"].keys()


def test_unknown_fields_of_a_later_minor_are_passed_over():
    document = tp.inspect(torch.ones(3), quiet=True).to_dict() | {"new_field": 1}

    assert tp.Report.from_json(json.dumps(document)).records[0].impl.shape == (3,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a TensorPlay report"),
        ("[]", "not a TensorPlay report"),
        ("{}", "not a TensorPlay report"),
        ('{"schema_version": 1}', "not a TensorPlay report"),
        ('{"schema_version": 99}', "schema_version 99, this TensorPlay reads up to 1"),
    ],
)
def test_json_that_is_no_report_is_refused_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        tp.Report.from_json(text)

    assert "\n" not in str(caught.value)


def test_saved_report_is_read_back(tmp_path):
    report = tp.inspect(torch.ones(3), quiet=True)

    report.save(tmp_path / "report.json")

    assert tp.Report.from_json((tmp_path / "report.json").read_bytes()).document == report.document


def test_text_of_a_view(snapshot):
    view = torch.arange(24).view(4, 6).t()[1:, ::2]

    snapshot("view.txt", tp.inspect(view, quiet=True).text(width=100) + "\n")


def test_text_of_a_finding(snapshot):
    view, flat = helpers.released()

    text = tp.check({"view": view, "flat": flat}).text(width=100)

    snapshot("released.txt", re.sub(r"where .*\n", "where   PLACE\n", text) + "\n")


def test_text_in_ascii_and_with_addresses(snapshot):
    view = torch.arange(24).view(4, 6).t()[1:, ::2]

    text = tp.inspect(view, quiet=True).text(width=80, ascii=True, addresses=True)

    assert text.isascii()
    snapshot("view_ascii.txt", re.sub(r"0x[0-9a-f]+ *", "0xADDRESS ", text) + "\n")


def test_text_of_a_model_is_a_table(snapshot):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    snapshot("model.txt", tp.inspect(model, quiet=True).text(width=110) + "\n")


def test_text_of_wrapped_tensors(snapshot):
    texts = []
    torch.func.vmap(lambda row: (texts.append(tp.inspect(row, quiet=True)), row * 1)[1])(torch.ones(2, 3))

    text = texts[0].text(width=100)

    assert "this kind has no storage of its own" in text
    assert "row.value  Tensor float32[2, 3]  24 B" in text
    assert text.count("impl ") == 2


def test_names_are_text_and_never_markup():
    one = torch.ones
    names = ["opt.state[model.weight].step", "x[/b]", ":smile:", "a[red]b"]

    text = tp.check({name: one(1) for name in names}).text(width=120)

    for name in names:
        assert name in text
    assert "[s" in tp.inspect([helpers.symbolic_fake()] * 1 + [one(1), one(2), one(3)], quiet=True).text(width=120)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_text_keeps_to_its_width(width):
    view, flat = helpers.released()
    report = tp.check({"view": view, "flat": flat, "table": torch.arange(24).view(4, 6).t()[1:, ::2]})

    lines = report.text(width=width).splitlines()

    assert max(map(len, lines)) <= width


def test_colour_only_where_asked_for():
    view, _ = helpers.released()
    report = tp.check({"view": view})

    assert "\x1b[" not in report.text()
    assert "\x1b[" in report.text(color=True)


def test_inspect_prints_to_stderr_unless_quiet(capsys):
    x = torch.ones(3)

    tp.inspect(x)
    printed = capsys.readouterr()
    tp.inspect(x, quiet=True)

    assert printed.out == ""
    assert printed.err.startswith("x  Tensor float32[3]  12 B\n")
    assert capsys.readouterr() == ("", "")


def test_same_label_again_prints_only_what_changed(capsys):
    x = torch.ones(3)
    y = torch.ones(2)
    batch = {"x": x, "y": y}
    tp.inspect(batch, "step")
    capsys.readouterr()

    x.add_(1)
    batch["view"] = y[1:]
    report = tp.inspect(batch, "step")
    printed = capsys.readouterr().err

    changed = {(change.name, change.field) for change in report.document.changes}
    assert ("batch['x']", "impl.version") in changed
    assert ("batch['y']", "storage.use_count") in changed
    assert ("batch['view']", "record") in changed
    assert len({name for name, _ in changed}) == 3
    assert "float32[3]" not in printed
    assert "an equal address may be that of a new tensor" in printed


def test_same_label_with_nothing_new_says_so(capsys):
    x = torch.ones(3)
    tp.inspect(x, "still")
    tp.inspect(x, "still")

    assert "nothing changed since the last report with this label" in capsys.readouterr().err


def test_labels_without_end_are_forgotten_in_order():
    x = torch.ones(1)
    for step in range(600):
        tp.inspect(x, f"step {step}", quiet=True)

    assert tp.inspect(x, "step 599", quiet=True).document.changes == ()
    assert tp.inspect(x, "step 0", quiet=True).document.changes is None


def test_name_is_the_caller_s_expression():
    model = torch.nn.Linear(2, 2)

    assert tp.inspect(model.weight, quiet=True).records[0].name == "model.weight"
    assert tp.inspect(
        model.bias,
        quiet=True,
    ).records[0].name == "model.bias"  # fmt: skip
    assert tp.inspect(*[model.weight], quiet=True).records[0].name == "x"
    assert tp.check(model.weight).records[0].name == "model.weight"


def test_report_travels_between_processes():
    report = tp.check({"x": torch.ones(3)})

    again = pickle.loads(pickle.dumps(report))

    assert again.document == report.document
    assert copy.deepcopy(report).to_json() == report.to_json()


def test_everything_is_immutable():
    record = tp.inspect(torch.ones(3), quiet=True).records[0]

    with pytest.raises(AttributeError):
        record.impl.version = 7
    with pytest.raises(AttributeError):
        record.name = "y"


def test_worst_severity():
    view, _ = helpers.released()

    assert tp.check({"view": view}).worst == "error"
    assert tp.check({"x": torch.ones(1)}).worst is None


def test_text_fits_a_standard_output_that_has_no_marks(monkeypatch):
    report = tp.inspect(torch.arange(6.0).view(2, 3).t(), quiet=True)

    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print(report, flush=True)

    assert str(report).isascii()
    monkeypatch.setattr("sys.stdout", None)
    assert not str(report).isascii()


def test_names_that_utf8_cannot_write_do_not_break_the_json():
    x = torch.ones(1)

    for report in (tp.inspect(x, "\ud800", quiet=True), tp.check({"a": {"\udcff": x}})):
        assert tp.Report.from_json(report.to_json()).records[0].impl.dtype == "float32"
    assert tp.Report.from_json(tp.inspect(x, "\ud800", quiet=True).to_json()).document.label == r"\ud800"


class Broken(io.StringIO):
    def write(self, text):
        raise OSError("no space left on device")


def test_stderr_that_cannot_be_written_does_not_end_the_program(monkeypatch):
    monkeypatch.setattr("sys.stderr", Broken())
    with pytest.warns(UserWarning, match="tensorplay could not print to stderr: no space left"):
        tp.inspect(torch.ones(1))


def test_long_lists_of_findings_and_changes_are_cut_in_the_text():
    views = []
    for _ in range(60):
        flat = torch.zeros(4)
        views.append(flat[1:])
        flat.untyped_storage().resize_(0)
    xs = [torch.zeros(1) for _ in range(60)]
    tp.inspect(xs, "many", quiet=True)
    for x in xs:
        x.add_(1)

    report, changed = tp.check(views), tp.inspect(xs, "many", quiet=True)

    assert len(report.findings) == 60
    assert "... and 10 more findings: report.findings and to_json() have all" in str(report)
    assert "more changes: report.document.changes has all" in str(changed)


def test_narrow_text_keeps_its_facts():
    text = tp.inspect(torch.ones(3), quiet=True).text(width=1)

    assert "use_count 1" in text
    assert max(map(len, text.splitlines())) <= 40
