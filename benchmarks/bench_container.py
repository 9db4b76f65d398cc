"""Whole models: inspect(model, quiet=True) and check(model) over 10 to 10 000 parameters, in time per tensor.

Beside them the least that any walk must do, list(model.named_parameters()), and the 31 fields that Python reaches, for
each parameter. Garbage collection stays on, as it is for a user.
"""

from __future__ import annotations

import torch
from bench_inspect import read_in_python
from harness import Case, Results, finish, measure, start

import tensorplay

SIZES = (10, 100, 1_000, 10_000)


def model_of(parameters: int) -> torch.nn.Module:
    """Blocks of ten small layers, a weight and a bias each."""
    layers = [torch.nn.Linear(4, 4) for _ in range(parameters // 2)]
    blocks = [torch.nn.Sequential(*layers[start : start + 10]) for start in range(0, len(layers), 10)]
    return torch.nn.Sequential(*blocks)


def read_each(model: torch.nn.Module) -> list[dict[str, object]]:
    return [read_in_python(parameter) for _, parameter in model.named_parameters()]


def main() -> None:
    arguments = start("whole models")
    results = Results("container")
    for size in SIZES:
        model = model_of(size)
        assert sum(1 for _ in model.parameters()) == size
        known = {
            "inspect": tensorplay.inspect,
            "check": tensorplay.check,
            "read_each": read_each,
            "list": list,
            "model": model,
        }
        cases = [
            Case(f"{size} parameters: {title}", statement, known, divide_by=size)
            for title, statement in (
                ("inspect(model, quiet=True)", "inspect(model, quiet=True)"),
                ("check(model)", "check(model)"),
                ("31 fields in Python", "read_each(model)"),
                ("named_parameters()", "list(model.named_parameters())"),
            )
        ]
        samples = measure(cases, rounds=arguments.rounds, sample_ms=2.0, collector=True)
        results.add_cases(cases, samples)
        for case in cases[:2]:
            results.ratio(case.name, cases[2].name)
    finish(results, arguments)


if __name__ == "__main__":
    main()
