"""Rules turn records into findings. A rule never probes and never prints."""

from __future__ import annotations

from tensorplay.rules.registry import CodeEntry, Rule, all_codes, code_entry, load_rule, record_rules, selects

__all__ = ["CodeEntry", "Rule", "all_codes", "code_entry", "load_rule", "record_rules", "selects"]
