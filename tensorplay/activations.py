"""What modules keep outside parameters and buffers, and whether that looks like what a step computed."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from tensorplay._native import C
from tensorplay.classes import derives, mro, namespace
from tensorplay.paths import PathNames
from tensorplay.walk import records_in

import torch  # isort: skip
from torch import nn  # isort: skip

__all__ = ["attributes_over", "hooks_of", "is_suspect"]


def hooks_of(module: Any) -> int:
    """Count the forward hooks that a module has."""
    instance = C.instance_dict(module) or {}
    return sum(len(dict.get(instance, name) or ()) for name in ("_forward_hooks", "_forward_pre_hooks"))


def attributes_over(names: PathNames, modules: dict[int, list[str]], addresses: set[int]) -> Iterator[str]:
    """Name the attributes over some storages: also a second one over a storage that another module was met with."""
    for entry, wanted in modules.items():
        instance = C.instance_dict(names.object(entry)) or {}
        for name, value in list(dict.items(instance)):
            if name not in wanted and not derives(type(value), torch.Tensor):
                continue
            storages = (record.storage for record in records_in(value))
            if any(storage is not None and storage.address in addresses for storage in storages):
                yield f"{names.text(entry)}.{name}"


def is_suspect(module: Any, name: str, *, is_shared: bool) -> bool:
    """Tell whether an attribute holds what a step computed: it has a graph, or a hook may have put it there.

    Args:
        module: the module.
        name: of the attribute.
        is_shared: whether another module that holds new tensors has an attribute of that name.
    """
    instance = C.instance_dict(module) or {}
    value = dict.get(instance, name)
    tables = [dict.get(instance, table) or {} for table in ("_parameters", "_buffers")]
    if any(key.startswith(f"{name}_") for table in tables for key in table):
        return False  # torch.nn.utils computes it from these
    if any(record.impl.grad_fn is not None for record in records_in(value)):
        return True
    if not (is_shared or hooks_of(module)) or _is_named_in(type(module), name):
        return False
    return any(derives(type(value), kind) for kind in (torch.Tensor, list, tuple, dict))


def _is_named_in(cls: type, name: str) -> bool:
    """Tell whether the code of a class, beside nn.Module's own, names an attribute."""
    for base in mro(cls):
        if base is nn.Module or base is object:
            continue
        for value in namespace(base).values():
            function = value.__func__ if type(value) in (staticmethod, classmethod) else value
            getter = namespace(property)["fget"].__get__(function) if type(function) is property else function
            if type(getter) is types.FunctionType and _mentions(getter.__code__, name):
                return True
    return False


def _mentions(code: types.CodeType, name: str) -> bool:
    inner = (const for const in code.co_consts if type(const) is types.CodeType)
    return name in code.co_names or name in code.co_consts or any(_mentions(one, name) for one in inner)
