"""TP205, TP301, TP303, TP304, TP314: tensors that share a storage, and what that costs or ties together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tensorplay.layers import Finding
from tensorplay.reports import Read
from tensorplay.rules.registry import SceneRule
from tensorplay.scene import Beyond, Scene, StorageGroup, Subject
from tensorplay.words import bytes_text, describe, place_pattern, plural

__all__ = ["PartialOverlap", "PinnedStorage", "SavesWholeStorage", "SharedParameters", "WrappersOverOne"]

_READ = "read: c10/core/StorageImpl.h size_bytes_, refcount; c10/core/TensorImpl.h storage_, sizes_and_strides_"
_MOST_NAMED = 4
_MOST_PAIRS = 2_000
"""So many pairs of wrappers over one storage are compared."""


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
    compared by `list_shared_storages`, not here. At most 2 000 pairs of a storage are compared, of tensors with one
    geometry the first.

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
            pairs, complete = scene.pairs(group.members)
            found = [(a, b, shared) for a, b, relation, shared in pairs if relation == "partial"]
            if not found:
                continue
            a, b, shared = found[0]
            least = "" if complete else "at least "
            more = f", and {least}{plural(len(found) - 1, 'more pair')} over this storage" if len(found) > 1 else ""
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
                    "complete": complete,
                    "tensors": [a.read.name, b.read.name],
                },
                why="a write through one changes part of the other",
                fix="nothing, if that is meant; else clone() one of them",
                source=f"computed: sizes, strides, offsets; {_READ}",
            )


def _cause(group: StorageGroup) -> tuple[Any, ...]:
    """Answer what storages have in common that one line of code kept: the place, and the form."""
    record = group.members[0].record
    return place_pattern(group.members[0].read.name), record.impl.dtype, record.impl.dim


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

    Where an owner in C++ may see the rest (a gradient's slot, a future, a DLPack capsule), it counts as seen. Foreign
    memory (NumPy, DLPack), mapped files, memory that other processes share, storages that are copied on their first
    write, and gradients that autograd keeps are passed over. The base that a view names is no other tensor: it lives
    through the view.

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
        causes: dict[tuple[Any, ...], list[_Pinned]] = {}
        for address, pinned in scene.pinned.items():
            group = scene.groups[address]
            causes.setdefault(_cause(group), []).append(_Pinned(group, pinned, scene.unseen[address]))
        for storages in causes.values():
            yield self._explain(scene, storages)

    def _explain(self, scene: Scene, storages: Sequence[_Pinned]) -> Finding:
        group = storages[0].group
        subject = group.members[0]
        pinned = sum(storage.nbytes for storage in storages)
        retained = sum(storage.group.nbytes for storage in storages)
        members = [member for storage in storages for member in storage.group.members]
        seen = scene.reached_by_members(group)
        several = len(members) > 1
        also = f"; {plural(len(members), 'tensor')} hold {bytes_text(retained)} in this way" if several else ""
        contiguous = subject.record.extent.contiguous
        how = "clone()" if contiguous else "clone() or contiguous()"
        if subject.record.impl.requires_grad and subject.record.impl.base_is_leaf:  # its graph leads to the base
            how = "detach().clone()"
        others = sum(len(storage.beyond.records) for storage in storages)
        # Those see nothing of the rest, and keep it all the same.
        and_others = f" and {plural(others, 'other tensor')} over the storage" if others else ""
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
                "storages": len(storages),
                "other_tensors": others,
                "is_view": subject.record.impl.is_view,
                "contiguous": contiguous,
                "tensors": [member.read.name for member in members],
            },
            why="the storage is freed only with its last tensor, and no other tensor sees the rest; torch.save and "
            "pickle write all of it",
            fix=f"{how} {'each' if several else 'it'}{and_others}: copies {bytes_text(retained - pinned)}, frees "
            f"{bytes_text(pinned)}",
            source=_READ,
        )


class _Pinned(NamedTuple):
    group: StorageGroup
    nbytes: int
    beyond: Beyond


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
        causes: dict[tuple[Any, ...], list[tuple[StorageGroup, Beyond]]] = {}
        for address, beyond in scene.unseen.items():
            if address not in scene.pinned:
                group = scene.groups[address]
                causes.setdefault(_cause(group), []).append((group, beyond))
        for storages in causes.values():
            group, beyond = storages[0]
            subject = group.members[0]
            seen = scene.reached_by_members(group)
            more = f", and {plural(len(storages) - 1, 'more storage')} in this way" if len(storages) > 1 else ""
            yield self.finding(
                subject.read.name,
                headline="saving this writes a whole storage",
                subject=f"{describe(subject.record)}  {bytes_text(seen)} of {bytes_text(group.nbytes)}{more}",
                evidence={
                    "storage": group.address,
                    "storage_nbytes": group.nbytes,
                    "view_nbytes": seen,
                    "storages": len(storages),
                    "tensors": [member.read.name for group, _ in storages for member in group.members],
                },
                why=f"torch.save, pickle and deepcopy take whole storages; {_who_sees(beyond)}",
                fix=f"nothing, as long as it is not saved alone; else save x.clone(): {bytes_text(seen)}",
                source=_READ,
            )


def _who_sees(beyond: Beyond) -> str:
    if beyond.tensors:
        return "other tensors that are alive see the rest"
    if beyond.storage_held:
        return "the storage's own object is held, and shows the rest"
    if beyond.saved:
        return "a live graph saved the rest for backward"
    return "an owner in C++ (a graph, a gradient, a future) may see the rest"


class SharedParameters(SceneRule):
    """Parameters share a storage: a tie, one module under several names, or a state dict over live parameters.

    ## What it checks

    Parameters that reach the same bytes: one Parameter under two names in modules, or two over one storage; tensors of
    a state dict that do; modules that are one object under several names; tensors outside a model, as those of
    `state_dict()`, that are its parameters' memory. Parameters that share a storage but no byte, as slices of a flat
    buffer, are no tie, nor is one that a list or an optimizer has as well.

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
        for group in scene.groups.values():
            yield from self._ties(scene, group)
        yield from self._repeated(scene)
        yield from self._aliases(scene)

    def _ties(self, scene: Scene, group: StorageGroup) -> Iterator[Finding]:
        """Explain each set of parameters that reach the same bytes."""
        parameters = [subject for subject in group.members if _is_parameter(subject)]
        is_state = not parameters
        if is_state:
            parameters = [
                subject
                for subject in group.members
                if subject.record is subject.read.record
                and any(map(_is_state_name, (subject.read.name, *subject.read.also)))
            ]
        for together, shared in _overlapping(scene, parameters):
            names = [name for subject in together for name in _names(scene, subject)]
            if is_state:
                names = [name for name in _of_one_container(names) if _is_state_name(name)]
            short = [name.rpartition("['")[2].removesuffix("']") for name in names] if is_state else _relative(names)
            ties = scene.config.ties
            if len(names) < 2 or (ties is not None and any(set(short) <= set(tie) for tie in ties)):
                continue
            record = together[0].record
            finding = self.finding(
                names[0],
                headline="parameters share a storage",
                subject=f"{describe(record)}  {{{_named(short)}}}: one storage, {shared} shared bytes of "
                f"{group.nbytes}",
                evidence={
                    "names": short,
                    "shared_bytes": shared,
                    "storage": group.address,
                    "storage_nbytes": group.nbytes,
                    "same_object": len(together) == 1,
                    "tensors": names,
                },
                why="a change through one name reaches all of them; a format without sharing wants one name",
                fix="nothing, if they are tied on purpose; else nn.Parameter(weight.detach().clone()) under one name",
                source=_READ,
            )
            yield finding if ties is None else msgspec.structs.replace(finding, severity="warning")

    def _repeated(self, scene: Scene) -> Iterator[Finding]:
        """Explain modules that have several paths, those in one place of a model together."""
        inside: dict[str, list[Subject]] = {paths[0]: [] for paths in scene.repeated_modules}
        for subject in scene.subjects if inside else ():
            if subject.record is not subject.read.record or subject.record.storage is None:
                continue
            for module in _modules_around(subject) & inside.keys():
                inside[module].append(subject)
        causes: dict[tuple[str, ...], list[Sequence[str]]] = {}
        for paths in scene.repeated_modules:
            if inside[paths[0]]:
                causes.setdefault(tuple(sorted(set(map(place_pattern, paths)))), []).append(paths)
        for modules in causes.values():
            yield self._explain_repeated(modules, [inside[paths[0]] for paths in modules])

    def _explain_repeated(self, modules: Sequence[Sequence[str]], parts: Sequence[Sequence[Subject]]) -> Finding:
        inside = [subject for part in parts for subject in part]
        parameters = [sum(map(_is_parameter, part)) for part in parts]
        names = [path for paths in modules for path in paths]
        storages = {s.record.storage.address: s.record.storage.nbytes for s in inside}
        nbytes = sum(n for n in storages.values() if isinstance(n, int))
        return self.finding(
            inside[0].read.name,
            headline="one module under several names",
            subject=f"{{{_named(_relative(names))}}}: {len(names)} modules are {plural(len(modules), 'object')}, "
            f"{plural(len(storages), 'storage')}, {bytes_text(nbytes)}",
            evidence={
                "names": _relative(names),
                "modules": len(names),
                "distinct_modules": len(modules),
                "parameter_names": sum(len(paths) * n for paths, n in zip(modules, parameters, strict=True)),
                "unique_parameters": sum(parameters),
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
            parameters: dict[tuple[Any, ...], Subject] = {}
            for subject in group.members:
                if _is_parameter(subject) or _is_buffer(scene, subject):
                    parameters.setdefault(_geometry(subject.record), subject)
            for subject in group.members if parameters else ():
                if not _is_plain(subject) or subject.read.name.endswith((".data", ".grad")):
                    continue
                if _is_buffer(scene, subject):
                    continue
                same = parameters.get(_geometry(subject.record))
                container = _container(subject.read.name)
                if same is not None and container and _container(same.read.name) != container:
                    containers.setdefault(container, []).append((subject, same))
        inside_of: dict[str, list[Any]] = {container: [] for container in containers}
        for subject in scene.subjects if containers else ():
            found = inside_of.get(_container(subject.read.name))
            if found is not None and subject.record.storage is not None:
                found.append(subject.record.storage)
        for container, pairs in containers.items():
            shared = {subject.record.storage.address for subject, _ in pairs}
            own = {storage.address: storage.nbytes for storage in inside_of[container] if storage.address not in shared}
            aliases = [_key(subject.read.name[len(container) :]) for subject, _ in pairs]
            first, parameter = pairs[0]
            yield self.finding(
                first.read.name,
                headline="kept tensors are the live parameters and buffers",
                subject=f"{plural(len(aliases), 'tensor')} of {container} are the memory of the module's own "
                f"({parameter.read.name}): {sum(own.values())} bytes really kept",
                evidence={
                    "aliases": aliases,
                    "bytes_really_saved": sum(own.values()),
                    "shared_bytes": sum(subject.record.storage.nbytes for subject, _ in pairs),
                    "tensors": [subject.read.name for subject, _ in pairs],
                    "parameters": [parameter.read.name for _, parameter in pairs],
                },
                why="state_dict() answers the live memory of parameters and buffers: the next step changes these too",
                fix="copy.deepcopy(model.state_dict()) where the values are to be kept",
                source=_READ,
            )


def _is_parameter(subject: Subject) -> bool:
    return bool(subject.record is subject.read.record and subject.read.is_parameter)


def _is_buffer(scene: Scene, subject: Subject) -> bool:
    """Tell whether a tensor is a module's own, but no parameter."""
    return subject.record is subject.read.record and subject.read.name.rpartition(".")[0] in scene.modules


def _is_plain(subject: Subject) -> bool:
    record = subject.record
    return record is subject.read.record and not subject.read.is_parameter and not record.impl.is_view


def _modules_around(subject: Subject) -> set[str]:
    """Answer the paths that lead to a tensor's, of attributes alone: its modules are among them."""
    found = set()
    for path in (subject.read.name, *subject.read.also):
        while path := path.rpartition(".")[0]:
            found.add(path)
    return found


def _geometry(record: Any) -> tuple[Any, ...]:
    impl = record.impl
    return impl.shape, impl.stride, impl.storage_offset, impl.dtype


def _container(name: str) -> str:
    """Answer the name of the list or dict that has a tensor at this path; nothing for an attribute's."""
    return name.rpartition("[")[0] if name.endswith("]") else ""


def _names(scene: Scene, subject: Subject) -> list[str]:
    """Answer the names a tensor has in modules, each module counted once; elsewhere, those of one container.

    That a list of parameters or an optimizer has it as well, or that it is handed in twice, gives it no second name.
    """
    paths = [subject.read.name, *subject.read.also]
    slots: dict[tuple[int, str], str] = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        if module in scene.modules and not name.endswith("]"):
            slots.setdefault((scene.modules[module], name), path)
    if slots:
        return list(slots.values())
    return _of_one_container([path for path in paths if ".param_groups[" not in path] or paths[:1])


def _of_one_container(paths: Sequence[str]) -> list[str]:
    """Answer those of some paths that lead into the container with the most of them; variables are one."""
    by_container: dict[str, list[str]] = {}
    for path in paths:
        outer = _container(path) or path.rpartition(".")[0]
        by_container.setdefault(outer, []).append(path)
    return max(by_container.values(), key=len)


def _is_state_name(name: str) -> bool:
    """Tell whether a path leads into a dict under the name of a parameter, as "layer.weight"."""
    return name.endswith("']") and "." in name.rpartition("['")[2]


def _overlapping(scene: Scene, subjects: Sequence[Subject]) -> Iterator[tuple[list[Subject], int]]:
    """Answer which of some tensors over one storage reach the same bytes, each with how many at most two share."""
    sets = {id(subject): [subject] for subject in subjects}
    most: dict[int, int] = {}
    for a, b, _, shared in scene.pairs(subjects).found if len(subjects) > 1 else ():
        one, two = sets[id(a)], sets[id(b)]
        if one is not two:
            one += two
            for subject in two:
                sets[id(subject)] = one
        most[id(one)] = max(most.get(id(one), 0), most.get(id(two), 0), shared or 0)
    for together in {id(found): found for found in sets.values()}.values():
        alone = together[0].record.extent.visible_nbytes if len(together) == 1 else 0
        yield together, max(most.get(id(together), 0), alone or 0)


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
    attributes are compared instead, by the bytes they reach. Views of one wrapper, what `detach()` made of it, copies
    of a parameter in a state dict, and parts beside the main one, as offsets and scales, are passed over.

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
        causes: dict[tuple[str, ...], list[_Tie]] = {}
        wrappers = _wrappers(scene)
        for group in scene.groups.values() if wrappers else ():
            tie = self._tie(scene, group, wrappers)
            if tie is not None:
                causes.setdefault(tuple(sorted({place_pattern(name) for name in tie.names})), []).append(tie)
        for ties in causes.values():
            one, two, local, shared, _ = ties[0]
            group = scene.groups[local.record.storage.address]
            more = f", and {plural(len(ties) - 1, 'more storage')} in this way" if len(ties) > 1 else ""
            yield self.finding(
                one.name,
                headline="two wrapper tensors over one local storage",
                subject=f"{one.record.python.type} {describe(one.record)} and {two.name}: {shared} bytes in common"
                f"{more}",
                evidence={
                    "storage": group.address,
                    "storage_nbytes": group.nbytes,
                    "local_nbytes": local.record.extent.nbytes,
                    "local_same": True,
                    "shared_bytes": shared,
                    "storages": len(ties),
                    "tensors": [name for tie in ties for name in tie.names],
                },
                why="their own pointers are null and prove nothing; the tensors they hold are one memory, so that a "
                "write through one changes the other",
                fix="clone() the local tensor for one of them, unless the tie is meant",
                source=_READ,
            )

    def _tie(self, scene: Scene, group: StorageGroup, wrappers: dict[str, _Wrapper]) -> _Tie | None:
        """Answer two wrappers that hold the same bytes, with the names of all that do."""
        held: dict[int, tuple[Read, Subject]] = {}
        for subject in group.members:
            for path in (subject.read.name, *subject.read.also):
                outer, _, attribute = path.rpartition(".")
                wrapper = wrappers.get(outer)
                if wrapper is not None and wrapper.consists_of(attribute, subject.record):
                    held.setdefault(wrapper.read.record.impl.address, (wrapper.read, subject))
        if any(wrapper.is_parameter for wrapper, _ in held.values()):  # others are its copies, as in a state dict
            held = {address: pair for address, pair in held.items() if pair[0].is_parameter}
        pairs = [
            (one, two, shared)
            for one, two in itertools.islice(itertools.combinations(held.values(), 2), _MOST_PAIRS)
            if not _is_kin(one[0].record.impl, two[0].record.impl)
            for relation, shared in [scene.overlap(one[1].record, two[1].record)]
            if relation not in ("disjoint", "too_hard")
        ]
        if not pairs:
            return None
        (one, local), (two, _), shared = pairs[0]
        names = list(dict.fromkeys(wrapper.name for a, b, _ in pairs for wrapper, _ in (a, b)))
        return _Tie(one, two, local, shared, names)


class _Tie(NamedTuple):
    one: Read
    two: Read
    local: Subject
    shared: int | None
    names: list[str]


class _Wrapper(NamedTuple):
    """A tensor without memory of its own, and the size of the largest tensor in its attributes."""

    read: Read
    largest: int

    def consists_of(self, attribute: str, inner: Any) -> bool:
        """Tell whether an inner tensor is what it consists of, and not its offsets or scales, which many may share."""
        if self.read.record.kind == "nested_jagged":
            return attribute == "_values"
        return inner.impl.address != self.read.record.impl.address and 2 * (inner.extent.nbytes or 0) >= self.largest


def _wrappers(scene: Scene) -> dict[str, _Wrapper]:
    """Answer the tensors by name that hold their memory in attributes."""
    found = {
        read.name: _Wrapper(read, 0)
        for read in scene.reads
        if read.record.kind in ("wrapper_subclass", "nested_jagged")
    }
    for subject in scene.subjects if found else ():
        extent = subject.record.extent
        for path in (subject.read.name, *subject.read.also):
            wrapper = found.get(path.rpartition(".")[0])
            if wrapper is not None and extent is not None and (extent.nbytes or 0) > wrapper.largest:
                found[wrapper.read.name] = wrapper._replace(largest=extent.nbytes)
    return found


def _is_kin(one: Any, two: Any) -> bool:
    """Tell whether one wrapper is a view of the other, of the same base, or what detach() made of it."""
    if one.version_counter is not None and one.version_counter == two.version_counter:
        return True
    return len({one.base or one.address, two.base or two.address}) == 1
