"""TP205, TP301, TP303, TP304, TP314: tensors that share a storage, and what that costs or ties together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from tensorplay.layers import WRAPPERS, Finding
from tensorplay.reports import Read
from tensorplay.rules.registry import SceneRule
from tensorplay.scene import Beyond, Scene, StorageGroup, Subject
from tensorplay.words import bytes_text, describe, is_state_name, place_pattern, plural, shape_text, some_of

__all__ = ["PartialOverlap", "PinnedStorage", "SavesWholeStorage", "SharedParameters", "WrappersOverOne"]

_READ = "read: c10/core/StorageImpl.h size_bytes_, refcount; c10/core/TensorImpl.h storage_, sizes_and_strides_"
_MOST_PAIRS = 2_000
"""So many pairs of wrappers over one storage are compared."""


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
    first = group.members[0]
    form = (first.record.impl.dtype, first.record.impl.dim) if first.array is None else len(first.array.shape)
    return place_pattern(first.read.name), form


class PinnedStorage(SceneRule):
    """A small view keeps a large storage alive that nobody else can see.

    ## What it checks

    Of each storage, the bytes that the tensors handed in reach, those that any other live tensor of the process
    reaches, and those that the autograd graphs behind live tensors saved. What is left is memory that only the views
    keep. It counts from 16 KiB and half of the storage on (`pinned-nbytes` and `pinned-share` in
    `[tool.tensorplay]`). A NumPy array that alone keeps a tensor, as `x[:10].numpy()` does, is a view as well.

    ## Why it matters

    A view shares its base's storage, and a storage is freed only with its last tensor. `detach()` drops the graph, not
    the storage; `h[:, 0].detach()` of every batch keeps every batch. `torch.save` and `pickle` write the whole storage
    for such a view.

    ## Known limits

    Where an owner in C++ may see the rest (a gradient's slot, a future, a DLPack capsule), it counts as seen. Foreign
    memory (NumPy, DLPack), mapped files, memory that other processes share, storages that are copied on their first
    write, and gradients that autograd keeps are passed over, and so are arrays that lend their memory on or share a
    lender. The base that a view names is no other tensor: it lives
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
            group = scene.storages[address]
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
        array = subject.array
        noun = "tensor" if array is None else "array"
        also = f"; {plural(len(members), noun)} hold {bytes_text(retained)} in this way" if several else ""
        contiguous = subject.record.extent.contiguous
        how = "copy()" if array is not None else "clone()" if contiguous else "clone() or contiguous()"
        if (
            array is None and subject.record.impl.requires_grad and subject.record.impl.base_is_leaf
        ):  # its graph leads to the base
            how = "detach().clone()"
        others = sum(len(storage.beyond.records) for storage in storages)
        cloned = [member.record for member in members]
        cloned += [record for storage in storages for record in storage.beyond.records]
        copied = retained - pinned if array is not None else sum(map(_clone_nbytes, cloned))
        # Those see nothing of the rest, and keep it all the same.
        and_others = f" and {plural(others, 'other tensor')} over the storage" if others else ""
        return self.finding(
            subject.read.name,
            headline="small view keeps a large storage alive",
            subject=(
                f"{_what(subject)}  {bytes_text(seen)} used of a storage of {bytes_text(group.nbytes)} "
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
                "is_array": array is not None,
                "tensors": [member.read.name for member in members],
            },
            why="the storage is freed only with its last tensor, and no other tensor sees the rest; "
            + (
                "torch.save and pickle write all of it" if array is None else "the array keeps the tensor that lends it"
            ),
            fix=(
                f"{how} {'each' if several else 'it'}{and_others}: copies {bytes_text(copied)}, frees "
                f"{bytes_text(retained - copied)}"
                if copied < retained
                else f"keep a copy of what is distinct{and_others}, before it is expanded or unfolded: {how} of all "
                f"its elements copies {bytes_text(copied)}"
            ),
            source=_READ,
        )


def _clone_nbytes(record: Any) -> int:
    """Answer what a copy takes: every element, also where several lie on one cell."""
    if record.impl.numel is None:  # a nested tensor's
        return int(record.storage.nbytes)
    return int(record.impl.numel * record.impl.itemsize)


def _what(subject: Subject) -> str:
    if subject.array is None:
        return describe(subject.record)
    return f"array of {subject.array.dtype}{shape_text(subject.array.shape)}"


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
            if address not in scene.pinned and address not in scene.array_groups:  # NumPy saves what an array shows
                group = scene.groups[address]
                causes.setdefault(_cause(group), []).append((group, beyond))
        for storages in causes.values():
            group, beyond = storages[0]
            subject = group.members[0]
            seen, copied = scene.reached_by_members(group), _clone_nbytes(subject.record)
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
                fix=f"nothing, as long as it is not saved alone; else save x.clone(): {bytes_text(copied)}",
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
    buffer, are no tie, nor is one that a list or an optimizer has as well. Of DTensors and other wrappers the tensors
    they hold are compared. What two models, or a model and a state dict, have in common is one finding.

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
        """Explain one finding a pair of containers: models, modules, state dicts, lists."""
        wrappers = _wrappers(scene)
        tensors = {address: _tensors_over(group, wrappers) for address, group in scene.groups.items()}
        ties: dict[frozenset[str], list[_Tie]] = {}
        for address, over in tensors.items():
            for tie in _ties(scene, scene.groups[address], over):
                ties.setdefault(_sides(tie.names), []).append(tie)
        repeated = list(self._repeated(scene, ties))
        for together in ties.values():
            yield self._explain_ties(scene, together)
        yield from repeated
        yield from self._aliases(scene, [subject for over in tensors.values() for subject in over])

    def _explain_ties(self, scene: Scene, ties: Sequence[_Tie]) -> Finding:
        first = ties[0]
        names = [name for tie in ties for name in tie.short]
        shared = sum(tie.shared for tie in ties)
        nbytes = sum({tie.group.address: tie.group.nbytes for tie in ties}.values())
        if len(ties) == 1:
            inside = f" of {first.outer}" if first.outer else ""
            subject = (
                f"{describe(first.record)}  {{{some_of(names)}}}{inside}: one storage, {bytes_text(shared)} of "
                f"{bytes_text(nbytes)} shared"
            )
        else:
            sides = list(dict.fromkeys(side for side in _stems(first.short if first.is_state else first.names)))
            inside = f" of {first.outer}" if first.is_state else ""
            subject = (
                f"{some_of(sides)}{inside}: {len(ties)} parameters are the same in each ({some_of(names)}), "
                f"{bytes_text(shared)} shared"
            )
        finding = self.finding(
            first.names[0],
            headline="parameters share a storage",
            subject=subject,
            evidence={
                "names": names,
                "ties": len(ties),
                "shared_bytes": shared,
                "storage": first.group.address,
                "storage_nbytes": nbytes,
                "same_object": all(tie.same_object for tie in ties),
                "tensors": [name for tie in ties for name in tie.names],
            },
            why="a change through one name reaches all of them; a format without sharing wants one name",
            fix="nothing, if they are tied on purpose; else nn.Parameter(weight.detach().clone()) under one name",
            source=_READ,
        )
        return finding if scene.config.ties is None else msgspec.structs.replace(finding, severity="warning")

    def _repeated(self, scene: Scene, ties: dict[frozenset[str], list[_Tie]]) -> Iterator[Finding]:
        """Explain modules that have several paths, those in one place of a model together, with the ties beside them.

        Takes these ties away: copy.copy() of a module shares its parts and its parameters alike.
        """
        inside: dict[str, list[Subject]] = {paths[0]: [] for paths in scene.repeated_modules}
        for subject in scene.subjects if inside else ():
            if subject.record is not subject.read.record or subject.record.storage is None:
                continue
            for module in _modules_around(subject) & inside.keys():
                inside[module].append(subject)
        causes: dict[tuple[str, ...], list[Sequence[str]]] = {}
        for paths in scene.repeated_modules:
            if inside[paths[0]]:
                causes.setdefault(tuple(sorted(set(map(place_pattern, _stems(paths))))), []).append(paths)
        for modules in causes.values():
            sides = {_sides(paths): None for paths in modules}
            beside = [tie for side in sides for tie in ties.pop(side, ())]
            yield self._explain_repeated(scene, modules, [inside[paths[0]] for paths in modules], beside)

    def _explain_repeated(
        self, scene: Scene, modules: Sequence[Sequence[str]], parts: Sequence[Sequence[Subject]], beside: Sequence[_Tie]
    ) -> Finding:
        inside = list({id(subject): subject for part in parts for subject in part}.values())
        parameters = [sum(map(_is_parameter, part)) for part in parts]
        names = [path for paths in modules for path in paths]
        storages = {s.record.storage.address: s.record.storage.nbytes for s in inside}
        storages |= {tie.group.address: tie.group.nbytes for tie in beside}
        nbytes = sum(n for n in storages.values() if isinstance(n, int))
        also = f", and {plural(len(beside), 'parameter')} beside them" if beside else ""
        finding = self.finding(
            inside[0].read.name,
            headline="one module under several names",
            subject=f"{{{some_of(_relative(names))}}}: {len(names)} modules are "
            f"{plural(len(modules), 'object')}{also}, {plural(len(storages), 'storage')}, {bytes_text(nbytes)}",
            evidence={
                "names": _relative(names),
                "modules": len(names),
                "distinct_modules": len(modules),
                "parameter_names": sum(len(paths) * n for paths, n in zip(modules, parameters, strict=True))
                + sum(len(tie.names) for tie in beside),
                "unique_parameters": sum(map(_is_parameter, inside)) + len(beside),
                "distinct_storages": len(storages),
                "bytes": nbytes,
                "tensors": [s.read.name for s in inside] + [name for tie in beside for name in tie.names],
            },
            why="they train as one: [layer] * n and [layer for _ in range(n)] repeat one object, and copy.copy(model) "
            "has the parts of the model",
            fix="nothing, if that is meant; else copy.deepcopy(layer) for each, or build each anew",
            source="read: instance dictionaries of nn.Module; " + _READ.removeprefix("read: "),
        )
        warned = beside and scene.config.ties is not None
        return msgspec.structs.replace(finding, severity="warning") if warned else finding

    def _aliases(self, scene: Scene, tensors: Sequence[Subject]) -> Iterator[Finding]:
        """Explain containers outside a model that have its memory, those that one line filled together."""
        own: dict[tuple[Any, ...], Subject] = {}
        for subject in tensors:
            if _is_whole(subject) and (_is_parameter(subject) or _module_paths(scene, subject.read)):
                own.setdefault(_geometry(subject.record), subject)
        causes: dict[str, dict[str, Subject]] = {}
        for subject in tensors if own else ():
            same = own.get(_geometry(subject.record))
            name = subject.read.name
            container = _container(name)
            if same is None or not container or _container(same.read.name) == container:
                continue
            if _is_plain(subject) and not _module_paths(scene, subject.read) and not name.endswith((".data", ".grad")):
                causes.setdefault(place_pattern(container), {})[name] = same
        kept: dict[str, dict[str, Subject]] = {cause: {} for cause in causes}
        for subject in tensors if causes else ():
            for path in (subject.read.name, *subject.read.also):
                container = _container(path)
                pattern = place_pattern(container) if container else ""
                if pattern in kept:
                    kept[pattern].setdefault(path, subject)
                    if _module_paths(scene, subject.read):  # the module's own object, as buffers that were assigned
                        causes[pattern].setdefault(path, subject)
        for cause, aliases in causes.items():
            yield self._explain_aliases(scene, aliases, kept[cause])

    def _explain_aliases(self, scene: Scene, aliases: dict[str, Subject], kept: dict[str, Subject]) -> Finding:
        """Explain tensors by path, each with the parameter or buffer it is, among all that were kept with them."""
        shared = {s.record.storage.address: s.record.storage.nbytes for s in aliases.values()}
        storages = {s.record.storage.address: s.record.storage.nbytes for s in kept.values()}
        really = sum(nbytes for address, nbytes in storages.items() if address not in shared)
        containers = list(dict.fromkeys(map(_container, aliases)))
        owners = [(_module_paths(scene, same.read) or [same.read.name])[0] for same in aliases.values()]
        return self.finding(
            next(iter(aliases)),
            headline="kept tensors are the live parameters and buffers",
            subject=f"{plural(len(aliases), 'tensor')} of {some_of(containers)} are the memory of the module's own "
            f"({owners[0]}): {bytes_text(really)} really kept",
            evidence={
                "aliases": [_key(path[len(_container(path)) :]) for path in aliases],
                "containers": containers,
                "bytes_really_saved": really,
                "shared_bytes": sum(shared.values()),
                "tensors": list(aliases),
                "parameters": owners,
            },
            why="state_dict() answers the live memory of parameters and buffers: the next step changes these too",
            fix="copy.deepcopy(model.state_dict()) where the values are to be kept",
            source=_READ,
        )


class _Tie(NamedTuple):
    """Names of parameters that reach the same bytes of a storage."""

    group: StorageGroup
    record: Any
    names: list[str]
    short: list[str]
    """The names without what they begin with alike."""
    outer: str
    """What they begin with: a model, a state dict; nothing where they differ."""
    is_state: bool
    shared: int
    same_object: bool


def _ties(scene: Scene, group: StorageGroup, tensors: Sequence[Subject]) -> Iterator[_Tie]:
    """Answer each set of parameters that reach the same bytes, without those that are declared."""
    parameters = [subject for subject in tensors if _is_whole(subject) and _is_parameter(subject)]
    is_state = not parameters
    if is_state:
        parameters = [
            subject
            for subject in tensors
            if _is_whole(subject) and any(map(is_state_name, (subject.read.name, *subject.read.also)))
        ]
    for together, shared in _overlapping(scene, parameters):
        one, *others = (subject.read.record for subject in together)
        if any(s.record is not s.read.record for s in together) and not all(_is_kin(together[0], s) for s in together):
            continue  # TP314 says it
        names = [name for subject in together for name in _names(scene, subject.read)]
        if is_state:
            names = [name for name in _of_one_container(names) if is_state_name(name)]
        if len(names) < 2:
            continue
        if is_state:
            outer, short = _container(names[0]), [name.rpartition("['")[2].removesuffix("']") for name in names]
        else:
            short = _relative(names)
            outer = names[0].partition(".")[0] if short != names else ""
        ties = scene.config.ties
        if ties is None or not any(set(short) <= set(tie) for tie in ties):
            yield _Tie(group, one, names, short, outer, is_state, shared, not others)


def _stems(names: Sequence[str]) -> list[str]:
    """Answer some names without the components that all of them end with: what has the same parts."""
    parts = [name.replace("['", ".").removesuffix("']").split(".") for name in names]
    alike = 0
    while alike < min(map(len, parts)) - 1 and len({part[-1 - alike] for part in parts}) == 1:
        alike += 1
    return [".".join(part[: len(part) - alike]) for part in parts]


def _sides(names: Sequence[str]) -> frozenset[str]:
    return frozenset(_stems(names))


def _tensors_over(group: StorageGroup, wrappers: dict[str, _Wrapper]) -> list[Subject]:
    """Answer who lies in a storage: a wrapper, once, in place of the tensors that it consists of."""
    found: dict[int, Subject] = {}
    for subject in group.members:
        holders = [
            wrapper.read
            for path in ((subject.read.name, *subject.read.also) if wrappers else ())
            for outer, _, attribute in [path.rpartition(".")]
            if (wrapper := wrappers.get(outer)) is not None and wrapper.consists_of(attribute, subject.record)
        ]
        for read in holders:
            found.setdefault(read.record.impl.address, Subject(read, subject.record, subject.span))
        if not holders:
            found.setdefault(subject.record.impl.address, subject)
    return list(found.values())


def _is_whole(subject: Subject) -> bool:
    """Tell whether the record is all there is of a tensor, or what a wrapper consists of."""
    return subject.record is subject.read.record or subject.read.record.kind in WRAPPERS


def _is_parameter(subject: Subject) -> bool:
    return subject.read.is_parameter


def _module_paths(scene: Scene, read: Read) -> list[str]:
    """Answer the names by which modules have a tensor as their own."""
    return [path for path in (read.name, *read.also) if path.rpartition(".")[0] in scene.modules]


def _is_plain(subject: Subject) -> bool:
    return _is_whole(subject) and not subject.read.is_parameter and not subject.read.record.impl.is_view


def _modules_around(subject: Subject) -> set[str]:
    """Answer the paths that lead to a tensor's, of attributes alone: its modules are among them."""
    found = set()
    for path in (subject.read.name, *subject.read.also):
        while path := path.rpartition(".")[0]:
            found.add(path)
    return found


def _geometry(record: Any) -> tuple[Any, ...]:
    impl = record.impl
    return record.storage.address, impl.shape, impl.stride, impl.storage_offset, impl.dtype


def _container(name: str) -> str:
    """Answer the name of the list or dict that has a tensor at this path; nothing for an attribute's."""
    return name.rpartition("[")[0] if name.endswith("]") else ""


def _names(scene: Scene, read: Read) -> list[str]:
    """Answer the names a tensor has in modules, each module counted once; elsewhere, those of one container.

    That a list of parameters or an optimizer has it as well, or that it is handed in twice, gives it no second name.
    """
    paths = [read.name, *read.also]
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


def _joined(subjects: Sequence[Subject], couples: Iterable[tuple[Subject, Subject]]) -> dict[int, list[Subject]]:
    """Answer by identity the group of each subject: those that couples connect are one."""
    groups = {id(subject): [subject] for subject in subjects}
    for a, b in couples:
        one, two = groups[id(a)], groups[id(b)]
        if one is not two:
            one += two
            groups |= dict.fromkeys(map(id, two), one)
    return groups


def _overlapping(scene: Scene, subjects: Sequence[Subject]) -> Iterator[tuple[list[Subject], int]]:
    """Answer which of some tensors over one storage reach the same bytes, each with how many bytes several reach."""
    pairs = scene.pairs(subjects).found if len(subjects) > 1 else ()
    sets = _joined(subjects, ((a, b) for a, b, *_ in pairs))
    for together in {id(found): found for found in sets.values()}.values():
        yield together, scene.shared_bytes(together)


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
    attributes are compared instead, by the bytes they reach; of jagged nested tensors their values. Views of one
    wrapper, what `detach()` and `.data` made of it, copies of a parameter in a state dict, and parts beside the main
    one, as offsets and scales, are passed over.

    ## Why it matters

    They look like two tensors to every check that compares storages or pointers, and are one memory: a write through
    one changes the other, an optimizer that has both updates it twice.

    ## Known limits

    Only tensors that attributes or slots of the wrapper name are compared. Two wrappers, no parameters, that were built
    over a tensor and its `detach()` look like one and its `.data`, and are passed over.

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
        causes: dict[tuple[str, ...], list[_LocalTie]] = {}
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

    def _tie(self, scene: Scene, group: StorageGroup, wrappers: dict[str, _Wrapper]) -> _LocalTie | None:
        """Answer two wrappers that hold the same bytes, with the names of all that do."""
        held = [s for s in _tensors_over(group, wrappers) if s.read.record.kind in WRAPPERS]
        if any(map(_is_parameter, held)):  # others are its copies, as in a state dict
            held = list(filter(_is_parameter, held))
        couples = list(itertools.islice(itertools.combinations(held, 2), _MOST_PAIRS))
        families = _joined(held, ((one, two) for one, two in couples if _is_kin(one, two)))
        pairs = [
            (one, two, shared)
            for one, two in couples
            if families[id(one)] is not families[id(two)]
            for relation, shared in [scene.overlap(one.record, two.record)]
            if relation not in ("disjoint", "too_hard")
        ]
        if not pairs:
            return None
        one, two, shared = pairs[0]
        names = list(dict.fromkeys(subject.read.name for a, b, _ in pairs for subject in (a, b)))
        return _LocalTie(one.read, two.read, one, shared, names)


class _LocalTie(NamedTuple):
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
    found = {read.name: _Wrapper(read, 0) for read in scene.reads if read.record.kind in WRAPPERS}
    for subject in scene.subjects if found else ():
        extent = subject.record.extent
        for path in (subject.read.name, *subject.read.also):
            wrapper = found.get(path.rpartition(".")[0])
            if wrapper is not None and extent is not None and (extent.nbytes or 0) > wrapper.largest:
                found[wrapper.read.name] = wrapper._replace(largest=extent.nbytes)
    return found


def _is_data_of(a: Subject, b: Subject) -> bool:
    """Tell whether one wrapper may be the other's .data: another version, and what it holds detached, no view."""
    one, two = a.record.impl, b.record.impl
    return bool(
        one.address != two.address
        and (one.base or one.address) != (two.base or two.address)
        and one.version_counter is not None
        and one.version_counter == two.version_counter
        and _geometry(a.record) == _geometry(b.record)
        and a.read.record.python.type == b.read.record.python.type
    )


def _is_kin(a: Subject, b: Subject) -> bool:
    """Tell whether one wrapper is a view of the other, of the same base, or what detach() or .data made of it.

    Each of these makes the values of a jagged tensor anew: two that have one object were built over it.
    """
    one, two = a.read.record.impl, b.read.record.impl
    if a.read.record.kind == "nested_jagged" and a.record.impl.address == b.record.impl.address:
        return bool(one.address == two.address)
    if one.version_counter is not None and one.version_counter == two.version_counter:
        return True
    if _is_data_of(a, b) and not (_is_parameter(a) or _is_parameter(b)):
        return True
    return len({one.base or one.address, two.base or two.address}) == 1
