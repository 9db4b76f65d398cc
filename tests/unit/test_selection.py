"""Choosing what is shown: select, ignore, pyproject.toml, comments."""

from __future__ import annotations

import pytest

import tensorplay as tp
from tests import helpers


@pytest.fixture(autouse=True)
def _empty_project(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sick():
    view, flat = helpers.released()
    return {"view": view, "flat": flat, "null": helpers.null_pointer()}


def codes(report: tp.Report) -> list[str]:
    return [finding.code for finding in report.findings]


@pytest.mark.parametrize(
    ("kwargs", "shown"),
    [
        ({}, ["TP102", "TP103"]),
        ({"select": ["TP103"]}, ["TP103"]),
        ({"select": ["TP1"]}, ["TP102", "TP103"]),
        ({"select": ["ALL"], "ignore": ["TP102"]}, ["TP103"]),
        ({"ignore": ["TP1"]}, []),
        ({"select": ["TP5"]}, []),
        ({"select": "TP103"}, ["TP103"]),
    ],
)
def test_codes_and_families_choose(sick, kwargs, shown):
    report = tp.check(sick, **kwargs)

    assert codes(report) == shown
    assert sum(entry.count for entry in report.document.suppressed) == 2 - len(shown)


def test_codes_may_be_written_in_lower_case(sick, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.tensorplay]\nignore = ["tp103"]\n')

    assert codes(tp.check(sick, select=["tp1"])) == ["TP102"]
    assert codes(tp.check(sick, ignore=["tp102"])) == ["TP103"]
    assert codes(tp.check(sick, select=["all"], ignore=["tp5"])) == ["TP102", "TP103"]
    assert codes(tp.check(sick)) == []  # tensorplay: ignore[tp102]


@pytest.mark.parametrize("selector", ["TP999", "XX", "", "102", "tp102x"])
def test_unknown_code_is_refused_with_the_list(sick, selector):
    with pytest.raises(tp.UnknownCode, match="names no rule; there are TP101, TP102"):
        tp.check(sick, ignore=[selector])


def test_project_file_counts_where_the_call_says_nothing(sick, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.tensorplay]\nignore = ["TP102"]\n')

    assert codes(tp.check(sick)) == ["TP103"]
    assert codes(tp.check(sick, ignore=[])) == ["TP102", "TP103"]
    assert tp.check(sick).document.suppressed[0].by == "ignore"


def test_project_file_is_found_above_the_folder(sick, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[tool.tensorplay]\nselect = ["TP103"]\n')
    (tmp_path / "deep" / "er").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "deep" / "er")

    assert codes(tp.check(sick)) == ["TP103"]


def test_project_file_without_our_table_changes_nothing(sick, tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.other]\nx = 1\n")

    assert codes(tp.check(sick)) == ["TP102", "TP103"]


@pytest.mark.parametrize(
    "text",
    ["[tool.tensorplay]\nignor = []\n", '[tool.tensorplay]\nignore = ["TP999"]\n', "[tool.tensorplay\n",
     '[tool.tensorplay]\nfail-on = "never"\n', '[tool.tensorplay]\nignore = "TP102"\n', "tool = 3\n"],
)  # fmt: skip
def test_project_file_that_is_wrong_is_named(sick, tmp_path, text):
    (tmp_path / "pyproject.toml").write_text(text)

    with pytest.raises(tp.TargetError, match=r"pyproject.toml: \[tool.tensorplay\] is not valid") as caught:
        tp.check(sick)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[tool.tensorplay\n", "[tool.tensorplay]\nignor = []\n", "x = " + "[" * 5000, "\xff"])
def test_inspect_goes_on_without_a_project_file_that_is_wrong(sick, tmp_path, recwarn, text):
    (tmp_path / "pyproject.toml").write_text(text, encoding="latin-1")

    report = tp.inspect(sick["view"])
    tp.inspect(sick["view"], quiet=True)
    tp.inspect_data_ptr(sick["view"])
    tp.verify_data_ptr_consistency(sick["view"])

    assert codes(report) == ["TP102"]
    (warning,) = recwarn
    assert "pyproject.toml: [tool.tensorplay] is not valid" in str(warning.message)
    assert "\n" not in str(warning.message)
    assert warning.filename == __file__


def test_comment_on_the_line_that_asks_silences_its_code_there(sick):
    report = tp.check(sick)  # tensorplay: ignore[TP102] released on purpose

    assert codes(report) == ["TP103"]
    (entry,) = report.document.suppressed
    assert (entry.code, entry.count, entry.reason) == ("TP102", 1, "released on purpose")
    assert "test_selection.py:" in entry.by
    assert "suppressed 1 TP102 by" in str(report)


def test_comment_counts_on_every_line_of_the_call(sick):
    report = tp.check(
        sick,
        select=["ALL"],
    )  # tensorplay: ignore[TP102, TP103]

    assert codes(report) == []
    assert len(report.document.suppressed) == 2


def test_comment_that_silences_nothing_is_reported():
    report = tp.check({"x": helpers.numpy_tensor()})  # tensorplay: ignore[TP102] was needed once

    (unused,) = report.document.unused_ignores
    assert unused.code == "TP102"
    assert "unused ignore[TP102] at" in str(report)


def test_comment_without_a_code_silences_nothing_and_is_reported(sick):
    report = tp.check(sick)  # tensorplay: ignore

    assert codes(report) == ["TP102", "TP103"]
    assert [unused.code for unused in report.document.unused_ignores] == ["no code"]


def test_text_in_a_string_is_no_comment(sick):
    report = tp.check(sick, select="TP102 # tensorplay: ignore[TP102]"[:5])

    assert codes(report) == ["TP102"]
    assert report.document.unused_ignores == ()


def test_finding_says_which_line_asked(sick):
    def ask():
        return tp.check(sick)

    where = ask().findings[0].where

    assert where.function == "ask"
    assert where.source == "call"
    assert str(where).startswith(f"{where.file}:{where.line}")


def test_comment_that_is_needed_is_not_called_unused_where_an_option_hides_its_code(sick):
    by_select = tp.check(sick, select=["TP103"])  # tensorplay: ignore[TP102] refilled before it is read
    by_ignore = tp.check(sick, ignore=["TP102"])  # TensorPlay: ignore[tp102] refilled before it is read

    assert by_select.document.unused_ignores == by_ignore.document.unused_ignores == ()
    assert [entry.by for entry in by_select.document.suppressed] == ["select"]


def test_code_of_another_type_is_refused_in_words(sick):
    with pytest.raises(TypeError, match="a code is a str like 'TP102', got int"):
        tp.check(sick, select=[1])
