"""Every rule's page is complete, and its examples do what it says."""

from __future__ import annotations

import gc
import mmap
import re

import numpy
import pytest
import torch

import tensorplay as tp
from tensorplay.rules.registry import (
    all_codes,
    body_rules,
    check_selectors,
    code_entry,
    device_rules,
    graph_rules,
    leak_rules,
    load_rule,
    pair_rules,
    record_rules,
    rule_page,
    scene_rules,
    selects,
    state_rules,
)

SECTIONS = ["What it checks", "Why it matters", "Known limits", "Example", "Use instead", "Fix safety", "Sources"]


_alive: list[dict] = []
"""The last example's variables: what it does not hand in lives on as a program's does."""


class Asked:
    """The package to an example that asks by itself; what was answered is kept."""

    def __init__(self) -> None:
        self.answers: list = []

    def leak_check(self, *args, **options):
        self.answers.append(tp.leak_check(*args, quiet=True, **options))
        return self.answers[-1]

    def check(self, objs):
        self.answers.append(tp.check(objs))

    def audit_device_consistency(self, model, optimizer=None):
        self.answers.append(tp.audit_device_consistency(model, optimizer))

    def check_graph(self, loss, **options):
        answer = tp.check_graph(loss, **options)
        self.answers += [] if options.get("checksums") else [answer]
        return answer

    def validate_state_dict_load(self, *args, **options):
        self.answers.append(tp.validate_state_dict_load(*args, **options))

    def compare(self, *args):
        self.answers.append(tp.compare(*args))

    @property
    def dtensor(self):
        return AskedOfDTensors(self.answers)

    def materialize_audit(self, *args, **options):
        self.answers.append(tp.materialize_audit(*args, **options))  # a context: the report once it has ended
        return self.answers[-1]


class AskedOfDTensors:
    """tensorplay.dtensor for the examples."""

    repair = staticmethod(tp.dtensor.repair)
    reset_sharded_param = staticmethod(tp.dtensor.reset_sharded_param)

    def __init__(self, answers):
        self.answers = answers

    def verify(self, x):
        self.answers.append(tp.dtensor.verify(x))


def found_in_example(code: str, section: str) -> list[str]:
    """What is found, without facts that are no faults: but for the one asked about."""
    match = re.search(rf"## {section}\n+```python\n(.*?)```", rule_page(code), re.DOTALL)
    asked = Asked()
    names: dict = {"torch": torch, "numpy": numpy, "mmap": mmap, "tp": asked}
    gc.collect()
    exec(match[1], names)
    _alive[:] = [names]
    if not asked.answers:
        asked.check({name: value for name, value in names.items() if isinstance(value, (torch.Tensor, numpy.ndarray))})
    (answer,) = asked.answers
    return [found.code for found in answer.findings if found.severity != "info" or found.code == code]


@pytest.mark.parametrize("code", all_codes())
def test_page_has_every_section_in_order(code):
    assert re.findall(r"^## (.*)$", rule_page(code), re.MULTILINE) == SECTIONS


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph")
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("code", all_codes())
def test_example_fires_and_its_healthy_form_is_silent(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert found_in_example(code, "Example") == [code]
    assert found_in_example(code, "Use instead") == []


@pytest.mark.parametrize("code", all_codes())
def test_registry_and_rule_agree(code):
    rule = load_rule(code)

    assert rule.code == code
    kinds = (record_rules, scene_rules, leak_rules, graph_rules, device_rules, state_rules, body_rules, pair_rules)
    assert any(rule in rules() for rules in kinds)
    assert code_entry(code).severity in ("error", "warning", "info")
    assert (type(rule).__doc__ or "").splitlines()[0].endswith(".")


def test_unknown_code_names_the_codes_there_are():
    with pytest.raises(tp.UnknownCode, match=r"TP999.*TP101"):
        code_entry("TP999")


def test_selector_of_a_family_without_rules_is_accepted():
    check_selectors(["TP5", "TP101", "ALL"])

    assert selects(["TP1"], "TP102")
    assert not selects(["TP2"], "TP102")
