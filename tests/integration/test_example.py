"""The example program trains on real text and checks itself."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.helpers import ROOT


def test_example_trains_inspects_and_checks(tmp_path):
    report = tmp_path / "report.json"

    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "train_text.py"), "--steps", "30", "--report", str(report)],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    first, last = (float(number) for number in done.stdout.split("\nloss ")[1].split(" bits")[0].split(" -> "))
    assert last < first - 1
    assert "▪0,0" in done.stderr
    document = json.loads(report.read_text())
    assert len(document["records"]) > 50
    # Inputs and targets are two slices of one text, a byte apart: facts.
    assert [finding["code"] for finding in document["findings"]] == ["TP108", "TP205"]
    assert {finding["severity"] for finding in document["findings"]} == {"info"}
