"""The report's faces and the looks beyond one record: HTML, the memory map, foreign memory, checkpoint files.

Beside them: text against HTML of the same report; torch.load(mmap=True), which only opens what is inspected here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from harness import Case, Results, finish, measure, start

import tensorplay
from tensorplay._native import C
from tensorplay.checkpoints import inspect_checkpoint

TENSORS = (10, 100, 1_000)


def main() -> None:
    arguments = start("faces and foreign memory")
    results = Results("faces")

    view = tensorplay.check({"view": torch.arange(24).view(4, 6).t()[1:, ::2]})
    many = tensorplay.check({"many": [torch.zeros(4) for _ in range(1_000)]})
    known = {"view": view, "many": many, "C": C, "x": torch.ones(4), "tensorplay": tensorplay}
    cases = [
        Case("one view: _repr_html_()", "view._repr_html_()", known),
        Case("one view: str()", "str(view)", known),
        Case("1000 tensors: html()", "many.html()", known),
        Case("1000 tensors: str()", "str(many)", known),
        Case("memory map read, one address found", "C.find_mappings([(id(x), id(x) + 1)])", known),
        Case("verify_data_ptr_consistency(x)", "tensorplay.verify_data_ptr_consistency(x)", known),
    ]
    results.add_cases(cases, measure(cases, rounds=arguments.rounds, sample_ms=4.0, collector=True))
    results.ratio(cases[0].name, cases[1].name)
    results.ratio(cases[2].name, cases[3].name)

    for count in TENSORS:
        arrays = [np.zeros(4) for _ in range(count)]
        lent = {"own": [torch.zeros(4) for _ in range(count)]}
        borrowed = {"lent": [torch.from_numpy(array) for array in arrays], "arrays": arrays}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.pt")
            torch.save({f"layer.{number}.weight": torch.zeros(8, 8) for number in range(count)}, path)
            names = {"tensorplay": tensorplay, "lent": lent, "borrowed": borrowed, "torch": torch, "path": path,
                     "inspect_checkpoint": inspect_checkpoint}  # fmt: skip
            cases = [
                Case(f"{count} tensors: check() of own memory", "tensorplay.check(lent)", names, divide_by=count),
                Case(f"{count} tensors: check() beside their arrays", "tensorplay.check(borrowed)", names,
                     divide_by=count),
                Case(f"{count} tensors: inspect_checkpoint()", "inspect_checkpoint(path)", names, divide_by=count),
                Case(f"{count} tensors: torch.load(mmap=True)", "torch.load(path, mmap=True)", names, divide_by=count),
            ]  # fmt: skip
            results.add_cases(cases, measure(cases, rounds=arguments.rounds, sample_ms=4.0, collector=True))
            results.ratio(cases[2].name, cases[3].name)
    finish(results, arguments)


if __name__ == "__main__":
    main()
