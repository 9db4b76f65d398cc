"""Every rule's page is complete, and its examples do what it says."""

from __future__ import annotations

import mmap
import re

import numpy
import pytest
import torch

import tensorplay as tp
from tensorplay.rules.registry import (
    all_codes,
    check_selectors,
    code_entry,
    load_rule,
    record_rules,
    rule_page,
    scene_rules,
    selects,
)

SECTIONS = ["What it checks", "Why it matters", "Known limits", "Example", "Use instead", "Fix safety", "Sources"]


_alive: list[dict] = []
"""The last example's variables: what it does not hand in lives on as a program's does."""


def example(code: str, section: str) -> dict:
    match = re.search(rf"## {section}\n+```python\n(.*?)```", rule_page(code), re.DOTALL)
    names: dict = {"torch": torch, "numpy": numpy, "mmap": mmap}
    exec(match[1], names)
    _alive[:] = [names]
    return {name: value for name, value in names.items() if isinstance(value, (torch.Tensor, numpy.ndarray))}


def codes(objs: dict, code: str) -> list[str]:
    """What is found, without facts that are no faults: but for the one asked about."""
    return [found.code for found in tp.check(objs).findings if found.severity != "info" or found.code == code]


@pytest.mark.parametrize("code", all_codes())
def test_page_has_every_section_in_order(code):
    assert re.findall(r"^## (.*)$", rule_page(code), re.MULTILINE) == SECTIONS


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("code", all_codes())
def test_example_fires_and_its_healthy_form_is_silent(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert codes(example(code, "Example"), code) == [code]
    assert codes(example(code, "Use instead"), code) == []


@pytest.mark.parametrize("code", all_codes())
def test_registry_and_rule_agree(code):
    rule = load_rule(code)

    assert rule.code == code
    assert rule in record_rules() or rule in scene_rules()
    assert code_entry(code).severity in ("error", "warning", "info")
    assert (type(rule).__doc__ or "").splitlines()[0].endswith(".")


def test_unknown_code_names_the_codes_there_are():
    with pytest.raises(tp.UnknownCode, match=r"TP999.*TP101"):
        code_entry("TP999")


def test_selector_of_a_family_without_rules_is_accepted():
    check_selectors(["TP5", "TP101", "ALL"])

    assert selects(["TP1"], "TP102")
    assert not selects(["TP2"], "TP102")
