"""TP205, TP301, TP303, TP304, TP314: tensors that share a storage, and what that costs or ties together."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tensorplay.layers import Finding
from tensorplay.rules.registry import SceneRule
from tensorplay.scene import Beyond, Scene, StorageGroup, Subject
from tensorplay.words import bytes_text, describe, plural

__all__ = ["PartialOverlap", "PinnedStorage", "SavesWholeStorage", "SharedParameters", "WrappersOverOne"]

_READ = "read: c10/core/StorageImpl.h size_bytes_, refcount; c10/core/TensorImpl.h storage_, sizes_and_strides_"
_MOST_NAMED = 4
_MOST_PAIRS = 2_000
"""Pairs of tensors of one storage that are compared; a storage with more says so."""


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


class PartialOverlap(SceneRule):
    """Two live tensors share some of their bytes, and each has others of its own.

    ## What it checks

    The exact bytes of every two tensors over one storage: those that share bytes without one containing the other.
    Bytes are computed from sizes and strides, never from the range between first and last.

    ## Why it matters

    A write through one changes part of the other. `x[:6]` and `x[4:]` look like two tensors; after `a.zero_()` two
    elements of `b` are zero too. Kernels that read one and write the other give results that depend on the order.

    ## Known limits

    A hazard that nobody has touched, hence info. Tensors over one buffer but of two storages (NumPy, DLPack) are
    compared by `list_shared_storages`, not here. At most 2 000 pairs of a storage are compared.

    ## Example

    ```python
    x = torch.arange(10.0)
    a, b = x[:6], x[4:]
    del x
    ```

    ## Use instead

    ```python
    x = torch.arange(10.0)
    a, b = x[:6], x[6:]
    del x
    ```

    ## Fix safety

    `clone()` of one of them copies it; writes no longer reach the other.

    ## Sources

    c10/core/TensorImpl.h (`storage_`, `sizes_and_strides_`), torch 2.13 and 2.14.
    """

    code = "TP205"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding a storage."""
        for group in scene.groups.values():
            pairs = itertools.islice(itertools.combinations(group.members, 2), _MOST_PAIRS)
            found = [
                (a, b, shared) for a, b in pairs for relation, shared in [scene.overlap(a.record, b.record)]
                if relation == "partial"
            ]  # fmt: skip
            if not found:
                continue
            a, b, shared = found[0]
            more = f", and {plural(len(found) - 1, 'more pair')} over this storage" if len(found) > 1 else ""
            yield self.finding(
                a.read.name,
                headline="two live tensors overlap in part",
                subject=f"{describe(a.record)} and {b.read.name}  {describe(b.record)}: "
                f"{'some' if shared is None else shared} bytes in common{more}",
                evidence={
                    "storage": group.address,
                    "storage_nbytes": group.nbytes,
                    "shared_bytes": shared,
                    "pairs": [[a.read.name, b.read.name, shared] for a, b, shared in found],
                    "tensors": [a.read.name, b.read.name],
                },
                why="a write through one changes part of the other",
                fix="nothing, if that is meant; else clone() one of them",
                source=f"computed: sizes, strides, offsets; {_READ}",
            )


def _pinned(scene: Scene, group: StorageGroup, beyond: Beyond) -> int | None:
    """Answer how many bytes of a storage nobody can see but through the members; None where that is not known."""
    if beyond.unexplained:
        return None  # an owner in C++ may see the rest
    records = [subject.record for subject in group.members]
    _, _, most = scene.coverage([*records, *beyond.tensors, *beyond.saved], group.nbytes)
    return group.nbytes - most


_INDEX = re.compile(r"\[\d+\]|\.\d+\b|\{\d+\}")


def _cause(group: StorageGroup) -> tuple[Any, ...]:
    """Answer what the storages that one line of code pinned have in common: their place and their form."""
    record = group.members[0].record
    place = _INDEX.sub("[]", group.members[0].read.name)
    return place, record.impl.dtype, record.impl.shape, record.impl.stride, len(group.members), group.nbytes


class PinnedStorage(SceneRule):
    """A small view keeps a large storage alive that nobody else can see.

    ## What it checks

    Of each storage, the bytes that the tensors handed in reach, those that any other live tensor of the process
    reaches, and those that the autograd graphs behind live tensors saved. What is left is memory that only the views
    keep. It counts from 16 KiB and half of the storage on (`pinned-nbytes` and `pinned-share` in
    `[tool.tensorplay]`).

    ## Why it matters

    A view shares its base's storage, and a storage is freed only with its last tensor. `detach()` drops the graph, not
    the storage; `h[:, 0].detach()` of every batch keeps every batch. `torch.save` and `pickle` write the whole storage
    for such a view.

    ## Known limits

    Where the storage has an owner that no path explains, as a node held by C++ alone, nothing is said: that owner may
    see the rest. Foreign memory (NumPy, DLPack) and mapped files are passed over. The base that a view names is no
    other tensor: it lives through the view.

    ## Example

    ```python
    x = torch.zeros(100_000)[:10]
    ```

    ## Use instead

    ```python
    x = torch.zeros(100_000)[:10].clone()
    ```

    ## Fix safety

    `clone()` copies the visible bytes and frees the rest; writes to it no longer reach the storage.

    ## Sources

    c10/core/StorageImpl.h (`size_bytes_`), c10/util/intrusive_ptr.h, torch/csrc/autograd/saved_variable.h, torch 2.13
    and 2.14.
    """

    code = "TP301"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding a place and form: what one line of code kept."""
        causes: dict[tuple[Any, ...], list[tuple[StorageGroup, int]]] = {}
        beyond = scene.unseen
        for address in beyond:
            group = scene.groups[address]
            pinned = _pinned(scene, group, beyond[address])
            if pinned is not None and scene.counts_as_waste(pinned, group.nbytes):
                causes.setdefault(_cause(group), []).append((group, pinned))
        for storages in causes.values():
            yield self._explain(scene, storages)

    def _explain(self, scene: Scene, storages: Sequence[tuple[StorageGroup, int]]) -> Finding:
        group, _ = storages[0]
        subject = group.members[0]
        pinned = sum(nbytes for _, nbytes in storages)
        retained = sum(group.nbytes for group, _ in storages)
        members = [member for group, _ in storages for member in group.members]
        visible, _, most = scene.coverage([member.record for member in group.members], group.nbytes)
        seen = most if visible is None else visible
        several = len(storages) > 1 or len(members) > 1
        also = f"; {plural(len(members), 'tensor')} hold {bytes_text(retained)} in this way" if several else ""
        contiguous = subject.record.extent.contiguous
        how = "clone()" if contiguous else "clone() or contiguous()"
        return self.finding(
            subject.read.name,
            headline="small view keeps a large storage alive",
            subject=(
                f"{describe(subject.record)}  {bytes_text(seen)} used of a storage of {bytes_text(group.nbytes)} "
                f"({_share(seen, group.nbytes)}){also}"
            ),
            evidence={
                "storage": group.address,
                "storage_nbytes": group.nbytes,
                "view_nbytes": seen,
                "ratio": round(seen / group.nbytes, 6),
                "pinned_nbytes": pinned,
                "retained_bytes": retained,
                "visible_bytes": retained - pinned,
                "is_view": subject.record.impl.is_view,
                "contiguous": contiguous,
                "tensors": [member.read.name for member in members],
            },
            why="the storage is freed only with its last tensor, and no other tensor sees the rest; torch.save and "
            "pickle write all of it",
            fix=f"{how} it: copies {bytes_text(retained - pinned)}, frees {bytes_text(pinned)}",
            source=_READ,
        )


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2g} %" if part else "nothing of it"


class SavesWholeStorage(SceneRule):
    """Saving this tensor alone writes a storage that is much larger than it.

    ## What it checks

    The bytes of a storage that none of the tensors handed in reaches, while other tensors of the process do: from 16
    KiB and half of the storage on, as for TP301.

    ## Why it matters

    `torch.save`, `pickle`, `copy.deepcopy` and queues of `torch.multiprocessing` take whole storages, to keep what
    shares them together. A slice of a buffer that is alive anyway costs nothing, until it is saved without it.

    ## Known limits

    A fact, hence info. TP301 is said instead where nobody else sees the rest.

    ## Example

    ```python
    buffer = torch.zeros(100_000)
    rows = {"x": buffer[:10]}
    x = rows["x"]
    others = [buffer]
    del buffer
    ```

    ## Use instead

    ```python
    buffer = torch.zeros(100_000)
    x = buffer[:10].clone()
    others = [buffer]
    del buffer
    ```

    ## Fix safety

    `clone()` before saving copies the visible bytes.

    ## Sources

    torch/serialization.py (`persistent_id`), torch/csrc/StorageMethods.cpp, torch 2.13 and 2.14.
    """

    code = "TP304"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding a place and form."""
        causes: dict[tuple[Any, ...], list[StorageGroup]] = {}
        for address, beyond in scene.unseen.items():
            group = scene.groups[address]
            pinned = _pinned(scene, group, beyond)
            if pinned is None or not scene.counts_as_waste(pinned, group.nbytes):
                causes.setdefault(_cause(group), []).append(group)
        for groups in causes.values():
            group = groups[0]
            subject = group.members[0]
            visible, _, most = scene.coverage([member.record for member in group.members], group.nbytes)
            seen = most if visible is None else visible
            more = f", and {plural(len(groups) - 1, 'more storage')} in this way" if len(groups) > 1 else ""
            yield self.finding(
                subject.read.name,
                headline="saving this writes a whole storage",
                subject=f"{describe(subject.record)}  {bytes_text(seen)} of {bytes_text(group.nbytes)}{more}",
                evidence={
                    "storage": group.address,
                    "storage_nbytes": group.nbytes,
                    "view_nbytes": seen,
                    "tensors": [member.read.name for group in groups for member in group.members],
                },
                why="torch.save, pickle and deepcopy take whole storages; other tensors that are alive see the rest",
                fix=f"nothing, as long as it is not saved alone; else save x.clone(): {bytes_text(seen)}",
                source=_READ,
            )


class SharedParameters(SceneRule):
    """Parameters share a storage: a tie, one module under several names, or a state dict over live parameters.

    ## What it checks

    Parameters that reach the same bytes: one Parameter under two names, or two over one storage; modules that are one
    object under several names; tensors outside a model, as those of `state_dict()`, that are its parameters' memory.
    Parameters that share a storage but no byte, as slices of a flat buffer, are no tie.

    ## Why it matters

    A write through one name reaches the other: merging LoRA weights into a tied head changes the embedding, six names
    of one layer train as one, "best weights" kept with `state_dict()` are the last ones. Saving formats without
    sharing refuse or duplicate them.

    ## Known limits

    A fact, hence info: ties are what most language models are built with. With `ties` in `[tool.tensorplay]` (a list
    of lists of names) those declared are passed over and all others are warnings.

    ## Example

    ```python
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    a, b = model[0].weight, model[1].weight
    ```

    ## Use instead

    ```python
    model = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    a, b = model[0].weight, model[1].weight
    ```

    ## Fix safety

    `copy.deepcopy(model.state_dict())` keeps a copy. `nn.Parameter(weight.detach().clone())` unties, and makes a new
    parameter that the optimizer must be told of.

    ## Sources

    c10/core/TensorImpl.h (`storage_`), torch/nn/modules/module.py (`state_dict`), torch 2.13 and 2.14.
    """

    code = "TP303"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding a group of names, one a repeated module, one a container of aliases."""
        repeated = scene.repeated_modules
        below = tuple(f"{path}." for paths in repeated for path in paths)
        for group in scene.groups.values():
            found = self._tie(scene, group, below)
            if found is not None:
                yield found
        for paths in repeated:
            found = self._repeated(scene, paths)
            if found is not None:
                yield found
        yield from self._aliases(scene)

    def _tie(self, scene: Scene, group: StorageGroup, repeated: tuple[str, ...]) -> Finding | None:
        parameters = [subject for subject in group.members if _is_parameter(subject)]
        names = [name for subject in parameters for name in _paths(subject) if not name.startswith(repeated)]
        if len(names) < 2:
            return None
        shared = 0
        if len(parameters) > 1:
            for a, b in itertools.islice(itertools.combinations(parameters, 2), _MOST_PAIRS):
                shared = max(shared, scene.overlap(a.record, b.record)[1] or 0)
            if shared == 0:
                return None
        else:
            shared = parameters[0].record.extent.visible_nbytes or 0
        short = _relative(names)
        ties = scene.config.ties
        if ties is not None and any(set(short) <= set(tie) for tie in ties):
            return None
        record = parameters[0].record
        finding = self.finding(
            names[0],
            headline="parameters share a storage",
            subject=f"{describe(record)}  {{{_named(short)}}}: one storage, {shared} shared bytes of {group.nbytes}",
            evidence={
                "names": short,
                "shared_bytes": shared,
                "storage": group.address,
                "storage_nbytes": group.nbytes,
                "same_object": len(parameters) == 1,
                "tensors": names,
            },
            why="a change through one name reaches all of them; a format without sharing wants one name",
            fix="nothing, if they are tied on purpose; else nn.Parameter(weight.detach().clone()) under one name",
            source=_READ,
        )
        return finding if ties is None else msgspec.structs.replace(finding, severity="warning")

    def _repeated(self, scene: Scene, paths: Sequence[str]) -> Finding | None:
        prefix = f"{paths[0]}."
        inside = [s for s in scene.subjects if s.read.name.startswith(prefix) and s.record.storage is not None]
        inside = [s for s in inside if s.record is s.read.record]
        if not inside:
            return None
        storages = {s.record.storage.address: s.record.storage.nbytes for s in inside}
        nbytes = sum(n for n in storages.values() if isinstance(n, int))
        parameters = [s for s in inside if _is_parameter(s)]
        return self.finding(
            inside[0].read.name,
            headline="one module under several names",
            subject=f"{{{_named(_relative(list(paths)))}}}: {len(paths)} modules are 1 object, "
            f"{plural(len(storages), 'storage')}, {bytes_text(nbytes)}",
            evidence={
                "names": _relative(list(paths)),
                "modules": len(paths),
                "distinct_modules": 1,
                "parameter_names": len(paths) * len(parameters),
                "unique_parameters": len(parameters),
                "distinct_storages": len(storages),
                "bytes": nbytes,
                "tensors": [s.read.name for s in inside],
            },
            why="they train as one: [layer] * n and [layer for _ in range(n)] repeat one object",
            fix="nothing, if that is meant; else copy.deepcopy(layer) for each, or build each anew",
            source="read: instance dictionaries of nn.Module; " + _READ.removeprefix("read: "),
        )

    def _aliases(self, scene: Scene) -> Iterator[Finding]:
        containers: dict[str, list[tuple[Subject, Subject]]] = {}
        for group in scene.groups.values():
            parameters = [subject for subject in group.members if _is_parameter(subject)]
            for subject in group.members:
                if not parameters or not _is_plain(subject) or subject.read.name.endswith((".data", ".grad")):
                    continue
                same = next((p for p in parameters if _is_alias(p.record, subject.record)), None)
                container, dot, _ = subject.read.name.rpartition("[")
                if same is not None and dot and not same.read.name.startswith(f"{container}["):
                    containers.setdefault(container, []).append((subject, same))
        for container, pairs in containers.items():
            inside = [
                s.record.storage for s in scene.subjects
                if s.read.name.startswith(f"{container}[") and s.record.storage is not None
            ]  # fmt: skip
            shared = {subject.record.storage.address for subject, _ in pairs}
            own = {storage.address: storage.nbytes for storage in inside if storage.address not in shared}
            aliases = [_key(subject.read.name[len(container) :]) for subject, _ in pairs]
            first, parameter = pairs[0]
            yield self.finding(
                first.read.name,
                headline="kept tensors are the live parameters",
                subject=f"{plural(len(aliases), 'tensor')} of {container} are the memory of parameters "
                f"({parameter.read.name}): {sum(own.values())} bytes really kept",
                evidence={
                    "aliases": aliases,
                    "bytes_really_saved": sum(own.values()),
                    "shared_bytes": sum(subject.record.storage.nbytes for subject, _ in pairs),
                    "tensors": [subject.read.name for subject, _ in pairs],
                    "parameters": [parameter.read.name for _, parameter in pairs],
                },
                why="state_dict() answers the live parameters' memory: the next optimizer step changes these too",
                fix="copy.deepcopy(model.state_dict()) where the values are to be kept",
                source=_READ,
            )


def _is_parameter(subject: Subject) -> bool:
    return bool(subject.record is subject.read.record and subject.read.is_parameter)


def _is_plain(subject: Subject) -> bool:
    record = subject.record
    return record is subject.read.record and not subject.read.is_parameter and not record.impl.is_view


def _is_alias(parameter: Any, record: Any) -> bool:
    one, two = parameter.impl, record.impl
    return (one.shape, one.stride, one.storage_offset, one.dtype) == (
        two.shape,
        two.stride,
        two.storage_offset,
        two.dtype,
    )


def _paths(subject: Subject) -> list[str]:
    """Answer the names a parameter has in modules: that an optimizer has it too is no name."""
    paths = [subject.read.name, *subject.read.also]
    return [path for path in paths if ".param_groups[" not in path and ".state[" not in path]


def _relative(names: list[str]) -> list[str]:
    """Drop the root that all names begin with."""
    heads = {name.partition(".")[0] for name in names}
    return (
        [name.partition(".")[2] for name in names] if len(heads) == 1 and all("." in name for name in names) else names
    )


def _key(rest: str) -> str:
    """Answer ``weight`` of ``['weight']``."""
    return rest.removeprefix("[").removesuffix("]").strip("'\"")


class WrappersOverOne(SceneRule):
    """Two wrapper tensors, as DTensors, hold one local storage.

    ## What it checks

    Wrapper subclasses have no memory of their own: their pointer is null and says nothing. The tensors they hold in
    attributes are compared instead, by the bytes they reach. Views of one wrapper, and a parameter beside its detached
    copy in a state dict, are passed over.

    ## Why it matters

    They look like two tensors to every check that compares storages or pointers, and are one memory: a write through
    one changes the other, an optimizer that has both updates it twice.

    ## Known limits

    Only tensors that attributes or slots of the wrapper name are compared.

    ## Example

    ```python
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, local):
            return torch.Tensor._make_wrapper_subclass(cls, local.shape)

        def __init__(self, local):
            self.local = local

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    local = torch.ones(4)
    a, b = Wrapper(local), Wrapper(local.view(2, 2))
    ```

    ## Use instead

    ```python
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, local):
            return torch.Tensor._make_wrapper_subclass(cls, local.shape)

        def __init__(self, local):
            self.local = local

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    local = torch.ones(4)
    a, b = Wrapper(local), Wrapper(local.clone())
    ```

    ## Fix safety

    `clone()` of the local tensor for one of them copies it.

    ## Sources

    c10/core/StorageImpl.h (`data_ptr_`), c10/core/TensorImpl.h (`storage_`), torch 2.13 and 2.14.
    """

    code = "TP314"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding a storage."""
        outer = {read.name: read for read in scene.reads}
        for group in scene.groups.values():
            held: dict[int, tuple[Any, Subject]] = {}
            for subject in group.members:
                for path in (subject.read.name, *subject.read.also):
                    wrapper = outer.get(path.rpartition(".")[0])
                    if wrapper is not None and _holds_its_memory_elsewhere(wrapper.record, subject.record):
                        held.setdefault(wrapper.record.impl.address, (wrapper, subject))
            pairs = [
                (one, two, shared)
                for one, two in itertools.islice(itertools.combinations(held.values(), 2), _MOST_PAIRS)
                if not _is_kin(one[0], two[0])
                for relation, shared in [scene.overlap(one[1].record, two[1].record)]
                if relation not in ("disjoint", "too_hard")
            ]
            if not pairs:
                continue
            (one, local), (two, _), shared = pairs[0]
            names = list(dict.fromkeys(w.name for pair in pairs for w in (pair[0][0], pair[1][0])))
            yield self.finding(
                one.name,
                headline="two wrapper tensors over one local storage",
                subject=f"{one.record.python.type} {describe(one.record)} and {two.name}: {shared} bytes in common",
                evidence={
                    "storage": group.address,
                    "storage_nbytes": group.nbytes,
                    "local_nbytes": local.record.extent.nbytes,
                    "local_same": True,
                    "shared_bytes": shared,
                    "tensors": names,
                },
                why="their own pointers are null and prove nothing; the tensors they hold are one memory, so that a "
                "write through one changes the other",
                fix="clone() the local tensor for one of them, unless the tie is meant",
                source=_READ,
            )


def _holds_its_memory_elsewhere(outer: Any, inner: Any) -> bool:
    """Tell whether a tensor that has another in an attribute is a wrapper: no memory, or a body that is not it."""
    return outer.kind in ("wrapper_subclass", "nested_jagged") and inner.impl.address != outer.impl.address


def _is_kin(a: Any, b: Any) -> bool:
    """Tell whether one wrapper is a view of the other, of the same base, or a parameter's detached copy."""
    one, two = a.record.impl, b.record.impl
    roots = {one.base or one.address, two.base or two.address}
    return len(roots) == 1 or a.is_parameter != b.is_parameter
