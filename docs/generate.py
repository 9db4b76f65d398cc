"""Write everything that is generated: stubs, JSON schema, rule pages, API and command reference.

``python docs/generate.py`` writes the files, ``--check`` only compares and names those that are old (exit code 1).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import sys
import types
import typing
from pathlib import Path

import click
import msgspec

import tensorplay
from tensorplay import layers
from tensorplay._native import C
from tensorplay.cli import cli
from tensorplay.layers import json_schema
from tensorplay.rules.registry import all_codes, code_entry, rule_page

ROOT = Path(__file__).parent.parent

# What the extension's functions take and answer; the names and docstrings are the extension's own.
SIGNATURES = {
    "read": "(tensor: object, observer_refs: int = 1, /) -> TensorRecord",
    "read_grad": "(tensor: object, /) -> TensorRecord | None",
    "grad_object": "(tensor: object, /) -> Any",
    "instance_dict": "(object: object, /) -> dict[Any, Any] | None",
    "find_mappings": "(ranges: Sequence[tuple[int, int]], /) -> list[list[tuple[int, int, str, str]]]",
    "producer": "(tensor: object, /) -> Any",
    "buffer_of": "(object: object, /) -> tuple[int, int] | None",
    "is_node": "(object: object, /) -> bool",
    "is_tensor": "(object: object, /) -> TypeGuard[torch.Tensor]",
    "impl_data_address": "(tensor: object, /) -> int | None",
    "saved_tensors": (
        "(roots: Sequence[Any], sharing_counter_with: torch.Tensor | None = None, "
        "storages: Sequence[int] | None = None, gradients: bool = True, /) -> "
        "tuple[list[tuple[str, int, str, int | None, str, int | None, TensorRecord | None, int]], int, int]"
    ),
    "view_nodes": ("(tensor: torch.Tensor, /) -> list[tuple[str, int, dict[str, Any], tuple[int, ...] | None]]"),
    "view_of": "(tensor: torch.Tensor, /) -> tuple[TensorRecord, Any, str | None] | None",
    "learn_storage_slice": "(tensor: object, /) -> None",
    "overlap_of": "(a: _Region, b: _Region, /) -> tuple[str, int | None]",
    "coverage_of": "(regions: Sequence[_Region], nbytes: int, /) -> tuple[int | None, int, int]",
    "exclusive_of": "(regions: Sequence[_Region], index: int, nbytes: int, /) -> int | None",
    "live_graph": "() -> tuple[list[torch.Tensor], list[Any], list[Any]]",
    "mapped_files": ("(ranges: Sequence[tuple[int, int]], /) -> list[list[tuple[int, int, int, str, str, bool]]]"),
    "frame_locals": "(thread: int | None = None, skip: str | None = None, /) -> list[FrameLocals]",
    "generator_locals": "(generator: object, /) -> FrameLocals | None",
    "frame_object_locals": "(frame: types.FrameType, /) -> FrameLocals | None",
    "find_holders": (
        "(watched: list[tuple[str, int]], own: str, closed: list[int] = [], /) -> "
        "tuple[list[HeapEntry], list[tuple[int, list[tuple[int, HeapLink]], int, str, HeapCycle]], int, int]"
    ),
    "find_owners": "(kind: str, addresses: list[int], /) -> list[tuple[int, list[str]]]",
    "check_graph": (
        "(roots: Sequence[object], parameters: Sequence[int] = (), /) -> "
        "tuple[SavedSum, int, int, int, int, int, int, list[SavedAt], list[SavedAt], "
        "list[SavedAt], list[tuple[str, SavedSum]], list[tuple[int | None, SavedSum]], "
        "list[tuple[list[int], int, int, bool, bool]], list[int]]"
    ),
    "placement": (
        "(module_class: type, roots: Sequence[object], optimizers: Sequence[object], gradients: bool = True, "
        "passed_over: tuple[type, ...] = (), most: int = 0, wanted: Sequence[int] | None = None, /) -> "
        "tuple[int, list[Any]]"
    ),
    "registered": (
        "(module: object, slot_class: type[_Slot], prefix: str, /) -> tuple[list[_Slot], list[tuple[str, Any, bool]]]"
    ),
    "read_entries": (
        "(items: list[tuple[Any, Any]], entry_class: type[_Slot], /) -> tuple[list[_Slot], list[tuple[Any, Any]]]"
    ),
    "differences_of": "(ours: list[Any], theirs: list[Any], /) -> bytes",
    "meetings_of": "(ours: list[Any], theirs: list[Any], most: int, /) -> list[tuple[int, int]]",
    "storage_nbytes": "(tensors: list[Any], /) -> int",
    "marks_of": "(tensors: list[Any], least_nbytes: int, /) -> bytes",
    "count_labels": "(tensors: list[Any], /) -> tuple[dict[str, int], dict[str, int]]",
    "pair_up": "(slots: list[Any], entries: dict[str, Any], pair_class: type[_Slot], /) -> list[_Slot]",
    "packed_objects": "(roots: Sequence[object], /) -> list[Any]",
    "saved_checksums": (
        "(roots: Sequence[object], /) -> list[tuple[str, int, int, str, int | None, int | None, int, TensorRecord]]"
    ),
    "find_storages": (
        "(own: str, known: memoryview | bytes | None = None, apart: tuple[type, ...] = (), "
        "indexed: tuple[type, ...] = (), /) -> "
        "tuple[memoryview, list[HeapEntry], list[tuple[memoryview, str, int, str, HeapCycle, int, int]], "
        "list[int], bool]"
    ),
    "local_tensor": "(object: object, /) -> tuple[bool, bool, torch.Tensor | None] | None",
    "data_alias": "(tensor: torch.Tensor, /) -> TensorRecord | None",
    "own_value": "(object: object, name: str, /) -> Any",
    "dtensor_states": "(tensor: torch.Tensor, /) -> tuple[str, ...]",
    "plan_repair": (
        "(tensor: torch.Tensor, requires_grad: bool | None, moves: int, whole: bool, /) -> "
        "tuple[tuple[str, ...], bool, list[tuple[str, str, str]]]"
    ),
    "dispatch_form": "(tensor: torch.Tensor, /) -> tuple[int, bool, bool, bool, bool]",
    "track_start": "(stacks: bool, depth: int, /) -> None",
    "track_stop": "() -> None",
    "track_is_on": "() -> bool",
    "track_totals": "() -> dict[str, Any]",
    "track_origins": "() -> list[tuple[Any, ...]]",
    "track_stack": "(number: int, /) -> list[tuple[str, str, int]]",
    "track_block": "(address: int, /) -> tuple[Any, ...] | None",
    "track_blocks": "(most: int, /) -> list[tuple[Any, ...]]",
    "apply_repair": (
        "(tensor: torch.Tensor, requires_grad: bool | None, moves: int, "
        "registrations: tuple[tuple[Any, str | int], ...], journal: list[Any], trip: str = '', /) "
        "-> tuple[str, str, str]"
    ),
    "undo_repairs": "(done: list[tuple[Any, Any, int]], /) -> bool",
    "repair_checks": "() -> list[str]",
    "count_nonfinite": "(tensor: torch.Tensor, /) -> tuple[int, int, int] | None",
    "same_values": "(a: torch.Tensor, b: torch.Tensor, /) -> bool | None",
    "copy_bytes": "(source: torch.Tensor, target: torch.Tensor, /) -> bool",
    "group_by_storage": "(tensors: list[Any] | tuple[Any, ...], /) -> tuple[memoryview, memoryview]",
    "infer_chain": (
        "(base: Geometry, target: Geometry, max_ops: int = 4, max_nodes: int = 150_000, "
        "plain: bool = False) -> ChainAnswer"
    ),
    "extent_of": "(shape: Sequence[int], stride: Sequence[int], storage_offset: int, /) -> dict[str, Any]",
}
# Fields of the model that the native records do not have, and the one they have in another form.
NOT_NATIVE = {"TensorRecord": {"name", "also", "history"}}
# Classes that exist for the type checker alone.
STUB_TYPES = '''
Geometry: TypeAlias = tuple[Sequence[int], Sequence[int], int, int, bool, bool, bool, str]
"""shape, stride, storage_offset, itemsize, is_complex, is_conj, is_neg, dtype."""

ChainStep: TypeAlias = tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...], int, str | None]
"""Operator, its arguments by PyTorch's names, then shape, stride, storage_offset and new dtype of what comes out."""

class ChainAnswer(TypedDict):
    """How one geometry comes from another."""

    steps: list[ChainStep]
    complete: bool
    """No shorter chain exists; with as_strided: none exists. False: the search left something out."""
    ruled_out: int
    """No chain of up to this many operators exists; -1: unknown."""
    nodes: int
    """Geometries looked at."""
'''.strip()
NATIVE_TYPES = {("TensorRecord", "inner"): "tuple[tuple[str, TensorRecord], ...]"}


def native_stubs() -> str:
    """Answer ``_C.pyi``: the records' fields take their types from the model they are copied into."""
    lines = [
        '"""Native probes of TensorPlay. Generated by docs/generate.py."""',
        "",
        "import types",
        "from collections.abc import Mapping, Sequence",
        "from typing import Any, TypeAlias, TypedDict, TypeGuard, TypeVar, final",
        "",
        "import torch",
        "",
        "# shape, stride, storage_offset, itemsize and, where storages are compared, the byte the storage begins at",
        '_Slot = TypeVar("_Slot", bound=tuple[Any, ...])',
        "_Region = tuple[Sequence[int], Sequence[int], int, int] | tuple[Sequence[int], Sequence[int], int, int, int]",
        "",
        "BUILD_INFO: Mapping[str, Any]",
        "DTENSOR_STATES: tuple[str, ...]",
        "KNOWS_EXCHANGE: bool",
        "",
        "FrameLocals: TypeAlias = tuple[str, str, int, list[tuple[str, Any]]]",
        "HeapLink: TypeAlias = tuple[str, Any] | None",
        "SavedSum: TypeAlias = tuple[int, int, int, int, int]",
        "SavedAt: TypeAlias = tuple[str, int, str, int | None, int, TensorRecord | None, int, tuple[str, int] | None]",
        "HeapEntry: TypeAlias = tuple[str, Any, int | None, Any, HeapLink, int]",
        "HeapReference: TypeAlias = tuple[int, HeapLink, int]",
        "HeapCycle: TypeAlias = tuple[list[HeapReference], list[HeapReference]] | None",
        STUB_TYPES,
    ]
    classes = {name: value for name, value in vars(C).items() if isinstance(value, type)}
    functions = {name: value for name, value in vars(C).items() if isinstance(value, types.BuiltinFunctionType)}
    if functions.keys() != SIGNATURES.keys():
        raise SystemExit(f"SIGNATURES and the extension differ: {functions.keys() ^ SIGNATURES.keys()}")
    for name, cls in sorted(classes.items()):
        model = getattr(layers, name)
        native = {key for key, value in vars(cls).items() if isinstance(value, types.GetSetDescriptorType)}
        expected = set(model.__struct_fields__) - NOT_NATIVE.get(name, set())
        if native != expected:
            raise SystemExit(f"{name}: the native record and the model differ in {native ^ expected}")
        hints = typing.get_type_hints(model)
        lines += ["", "@final", f"class {name}:", f'    """{cls.__doc__}"""']
        for field in model.__struct_fields__:
            if field in expected:
                hint = NATIVE_TYPES.get((name, field)) or type_text(hints[field])
                lines += [
                    "",
                    "    @property",
                    f"    def {field}(self) -> {hint}:",
                    f'        """{vars(cls)[field].__doc__}"""',
                ]
    for name, function in sorted(functions.items()):
        lines += ["", f"def {name}{SIGNATURES[name]}:", f'    """{function.__doc__}"""']
    return "\n".join(lines) + "\n"


def type_text(hint: object) -> str:
    """Answer a type as source text, classes by their bare name."""
    if isinstance(hint, type) and not typing.get_args(hint):
        return "None" if hint is type(None) else hint.__name__
    if hint is typing.Any:
        return "Any"
    args = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(args)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(type_text(arg) for arg in args)
    inside = ", ".join("..." if arg is Ellipsis else type_text(arg) for arg in args)
    return f"{typing.get_origin(hint).__name__}[{inside}]"  # type: ignore[union-attr]


def field_docs() -> dict[str, dict[str, str]]:
    """Answer the docstring under each field of the model's classes, which Python itself does not keep."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(layers)).body:
        if isinstance(node, ast.ClassDef):
            texts = found.setdefault(node.name, {})
            for field, text in itertools.pairwise(node.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    texts[field.target.id] = inspect.cleandoc(text.value.value)  # type: ignore[union-attr]
    return found


def schema_text() -> str:
    """Answer the JSON Schema, each field with its meaning."""
    schema = json_schema()
    for name, texts in field_docs().items():
        properties = schema["$defs"].get(name, {}).get("properties", {})
        for field, text in texts.items():
            if field in properties:
                properties[field] = {"description": text, **properties[field]}
    return json.dumps(schema, indent=1) + "\n"


def report_page() -> str:
    """Answer the reference of a stored report: a table for each class of the model."""
    docs = field_docs()
    parts = [
        "# The report\n",
        "Generated from the data model. `Report.to_json()` and the option `--format json` write a Document. Its",
        "JSON Schema is `tensorplay/report.schema.json` in the package. Addresses are integers. Fields that a reader",
        "does not know are to be passed over.\n",
    ]
    models = [value for value in vars(layers).values() if isinstance(value, type) and issubclass(value, msgspec.Struct)]
    for model in sorted(models, key=lambda cls: (cls is not layers.Document, cls is not layers.TensorRecord)):
        hints = typing.get_type_hints(model)
        parts.append(f"## {model.__name__}\n\n{inspect.getdoc(model)}\n\n| field | type | meaning |\n|---|---|---|")
        for field in model.__struct_fields__:
            kind = type_text(hints[field]).replace("|", "\\|")
            parts.append(f"| `{field}` | {kind} | {' '.join(docs[model.__name__][field].split())} |")
        parts.append("")
    return "\n".join(parts)


def rules_index() -> str:
    """Answer the list of codes."""
    rows = [
        f"| [{code}]({code}.md) | {code_entry(code).name} | {code_entry(code).severity} | {code_entry(code).since} |"
        for code in all_codes()
    ]
    head = "# Rules\n\nGenerated from the rules' docstrings. `tensorplay explain CODE` shows the same page.\n\n"
    return head + "\n".join(["| code | name | severity | since |", "|---|---|---|---|", *rows]) + "\n"


def api_page() -> str:
    """Answer the reference of the public names, from their docstrings."""
    parts = ["# Python API\n", "Generated from the docstrings. `import tensorplay as tp`.\n"]
    for name in tensorplay.__all__:
        parts += api_entry(name, getattr(tensorplay, name))
    for room in tensorplay._ROOMS:
        module = getattr(tensorplay, room)
        for name in module.__all__:
            if name not in tensorplay.__all__:
                parts += api_entry(f"{room}.{name}", getattr(module, name))
    return "\n".join(parts)


def api_entry(name: str, value: object) -> list[str]:
    """Answer what is said of one public name."""
    if isinstance(value, str):
        return []
    signature = "" if isinstance(value, type) else str(inspect.signature(value)).replace("'", "")
    if name == "inspect_tensor_memory":
        return [f"## `{name}`\n\nThe same function as `inspect`.\n"]
    parts = [f"## `{name}{signature}`\n\n{docstring(value)}\n"]
    if isinstance(value, type) and issubclass(value, msgspec.Struct):
        parts.append("Fields: " + ", ".join(f"`{field}`" for field in value.__struct_fields__) + ".\n")
    elif isinstance(value, type):
        for key, member in vars(value).items():
            text = inspect.getdoc(member)
            if not key.startswith("_") and text and (callable(member) or isinstance(member, (property, classmethod))):
                kind = "" if isinstance(member, property) else "()"
                parts.append(f"- `.{key}{kind}`: {text.splitlines()[0]}")
        parts.append("")
    return parts


def docstring(value: object) -> str:
    """Answer a Google-style docstring as Markdown: its sections become bold words and lists."""
    lines = (inspect.getdoc(value) or "").splitlines()
    out = []
    in_section = False
    for line in lines:
        if line in ("Args:", "Returns:", "Raises:"):
            out.append(f"**{line[:-1]}**\n")
            in_section = True
        elif in_section and line.startswith("    ") and not line.startswith("     "):
            name, colon, text = line.strip().partition(": ")
            out.append(f"- `{name}`: {text}" if colon and " " not in name else f"- {line.strip()}")
        else:
            in_section = in_section and (not line or line.startswith(" "))
            out.append(line.strip() if in_section else line)
    return "\n".join(out)


def cli_page() -> str:
    """Answer the reference of the commands, from their help."""
    exits = "Exit codes: 0 nothing at or above `--fail-on`, 1 findings, 2 wrong usage or an error of the tool,"
    parts = ["# Commands\n", f"Generated from `--help`. {exits}\n130 interrupted.\n"]
    context = click.Context(cli, info_name="tensorplay", terminal_width=100)
    for name, command in sorted(cli.commands.items()):
        sub = click.Context(command, info_name=name, parent=context, terminal_width=100)
        parts.append(f"## tensorplay {name}\n\n```text\n{command.get_help(sub)}\n```\n")
    return "\n".join(parts)


def files() -> dict[str, str]:
    """Answer every generated file: path and text."""
    pages = {f"docs/reference/rules/{code}.md": rule_page(code) for code in all_codes()}
    return {
        "tensorplay/_C.pyi": native_stubs(),
        "tensorplay/report.schema.json": schema_text(),
        "docs/reference/report.md": report_page(),
        "docs/reference/rules/README.md": rules_index(),
        "docs/reference/api.md": api_page(),
        "docs/reference/commands.md": cli_page(),
        **pages,
    }


def main() -> int:
    """Write or compare."""
    check = "--check" in sys.argv[1:]
    old = []
    for name, text in files().items():
        path = ROOT / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        old.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(f"{'old' if check else 'written'}: {', '.join(old) or 'none'}")
    return 1 if check and old else 0


if __name__ == "__main__":
    sys.exit(main())
