"""safe_load_state_dict(): load all of a state dict, or nothing."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tensorplay._native import C  # before torch: it says in one line what to do where torch does not import

# isort: split
import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._pytree import tree_map_only

from tensorplay.callers import Caller
from tensorplay.checkpoints import open_state_dict
from tensorplay.errors import LoadRefused
from tensorplay.inspection import outside_compiled_code
from tensorplay.layers import Finding, Unread, VersionMove
from tensorplay.live import Live
from tensorplay.loading import ASSIGN_MARK, Loading, ModelState, Moment, Pair, lies_at
from tensorplay.modules import SCRIPTED, Modules
from tensorplay.progress import Step, bar
from tensorplay.rules.registry import state_rules
from tensorplay.statedict import LoadReport, named_optimizers, need_model, need_state_dict, report_on, state_dict_in
from tensorplay.undo import Undo
from tensorplay.words import plural, some_of
from tensorplay.written import Provenance, WriteWatch

__all__ = ["safe_load_state_dict"]

_OWN_HEAP = ("cpu_allocator", "copy_on_write")
_SIGNATURE = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
_MOST_SAVERS = 3


@outside_compiled_code
def safe_load_state_dict(
    model: nn.Module,
    path_or_dict: str | os.PathLike[str] | Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    assign: bool = False,
    strict: bool = True,
    optimizer: object = None,
    key: str | None = None,
    values: bool = False,
    undo: bool = True,
    chunk_nbytes: int | None = None,
    allow_live_graph: bool = False,
    progress: bool | Step | None = None,
) -> LoadReport:
    """Load a state dict wholly, or leave the model as it was.

    All is looked at before the first write: keys, shapes, types, and every byte of the source, so that a file that was
    cut raises while nothing is written. What was in the model is kept meanwhile; whatever raises on the way, objects,
    ties, bytes and version counters are put back as they were, and the error goes on.

    Args:
        model: the module.
        path_or_dict: a file of torch.save (read as ``weights_only`` does) or safetensors, a folder with an index of
            such files, or a state dict.
        device: where what is on meta in the model gets its memory first; ties stay. With ``assign`` where the tensors
            are put.
        assign: make the state dict's tensors the model's, as load_state_dict(assign=True) does. What a file maps is
            read into memory first.
        strict: whether every key has to match. A key that the state dict has under another name of a tie does.
        optimizer: refuse where it would hold parameters that the model no longer has.
        key: where in the checkpoint the state dict is; one that is plainly the model's is found.
        values: refuse a state dict that has NaN or infinities.
        undo: False saves the copy of the model's bytes: then what raises after the first write leaves some written.
        chunk_nbytes: read the source twice, in pieces of so many bytes, in place of once into memory.
        allow_live_graph: write also what a graph that is still to run backward has saved.
        progress: called with a name, bytes done and all bytes; a bar where stderr is a terminal unless told; False for
            none.

    Returns:
        The report on what was loaded: ``.findings``, ``.load`` with the versions that moved and the memory it took.

    Raises:
        LoadRefused: something is wrong before the first write; ``.reasons`` and ``.report`` say what.
        TargetError: the file cannot be read.
        TypeError: an argument is of the wrong kind.

    Not for two threads and one model at once.

    Cost: reading the source, one copy of the model's bytes that are written, and one write. Memory for the source's
        bytes and the model's, beside the model: with chunk_nbytes one chunk in place of the source's, without undo
        nothing in place of the model's.

    Source: torch/nn/modules/module.py ``load_state_dict``, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    need_model(model, "safe_load_state_dict")
    if chunk_nbytes is not None and (type(chunk_nbytes) is not int or chunk_nbytes < 1):
        raise TypeError(
            f"safe_load_state_dict(chunk_nbytes=) takes a number of bytes of 1 or more, got {chunk_nbytes!r}"
        )
    optimizers = named_optimizers(optimizer, caller, "safe_load_state_dict", -1)
    with _steps(None if progress is True else progress) as step:
        modules = Modules(model)
        source = _Source.of(path_or_dict, modules, key, caller)
        load = _Load(modules, source, device, assign, strict, optimizers, values, caller)
        return load.run(undo, chunk_nbytes, allow_live_graph, step)


@contextlib.contextmanager
def _steps(progress: bool | Step | None) -> Iterator[Step]:
    if progress is None:
        with bar() as step:
            yield step or _no_step
    else:
        yield _no_step if isinstance(progress, bool) else progress


def _no_step(name: str, done: int, total: int) -> None:
    pass


class _Source(NamedTuple):
    """The state dict, where it is from, and what tells that its files are still the same."""

    name: str
    state_dict: Mapping[Any, Any]
    files: dict[Path, tuple[int, ...]]
    unread: tuple[Unread, ...] = ()

    @classmethod
    def of(cls, given: object, modules: Modules, key: str | None, caller: Caller) -> _Source:
        """Open what was given.

        Raises:
            TargetError: it is a file that cannot be read, or no state dict is in it.
            TypeError: it is neither a path nor a mapping.
        """
        files: dict[Path, tuple[int, ...]] = {}
        unread: tuple[Unread, ...] = ()
        value: Any = given
        name = caller.argument("path_or_dict", 1)
        if isinstance(given, (str, os.PathLike)):
            name = os.fspath(given)
            before = {path: _signature(path) for path in _files_of(Path(name))}
            stored = open_state_dict(name)
            value, unread = stored.value, stored.unread
            files = {path: before.get(path) or _signature(path) for path in stored.files}
        else:
            need_state_dict(given, "safe_load_state_dict")
        chosen, found = state_dict_in(value, name, modules, key)
        return cls(name if found is None else f"{name}[{found!r}]", _unmarked(chosen), files, unread)

    def check_unchanged(self) -> None:
        """Raise LoadRefused where a file is no longer the one that was opened."""
        for path, before in self.files.items():
            try:
                same = _signature(path) == before
            except OSError:
                same = False
            if not same:
                raise LoadRefused([f"{path} was changed or replaced while it was read: load it again"])


def _files_of(path: Path) -> list[Path]:
    try:
        return [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path] if path.is_file() else []
    except OSError:
        return []  # opening it says what is wrong


def _signature(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return tuple(getattr(status, name) for name in _SIGNATURE)


class _Load:
    """One load, from what is there to what is to be."""

    def __init__(
        self,
        modules: Modules,
        source: _Source,
        device: torch.device | str | None,
        assign: bool,
        strict: bool,
        optimizers: list[tuple[str, Any]],
        values: bool,
        caller: Caller,
    ) -> None:
        self.model: nn.Module = modules.model
        self.modules = modules
        self.source = source
        self.device = device
        self.assign = assign
        self.strict = strict
        self.optimizers = optimizers
        self.caller = caller
        self.before = Moment.of(modules)
        self.loading = Loading(modules, source.state_dict, assign=assign, strict=strict, values=values)
        self.extra_nbytes = 0
        self.answered: tuple[list[str], list[str]] | None = None
        self.name = caller.argument("model", 0)

    def run(self, undo: bool, chunk_nbytes: int | None, allow_live_graph: bool, step: Step) -> LoadReport:
        """Look, read, keep, write; put back whatever was done where something raises."""
        self._refuse_what_is_wrong(chunk_nbytes, allow_live_graph)
        staged = self._read(chunk_nbytes, step)
        self.source.check_unchanged()
        log = Undo(self.modules)
        if undo and not self.assign:
            try:
                log.keep(self.modules.slots)  # a hook may write also what is not loaded
            except (NotImplementedError, RuntimeError) as error:
                raise LoadRefused([f"the model has what cannot be copied ({error}): say undo=False"]) from error
        self._keep_extra_states(log)
        self.extra_nbytes += log.nbytes
        watch = WriteWatch()
        try:
            with watch if self.device is not None else contextlib.nullcontext():
                if self.device is not None and not self.assign:
                    self._materialize()
                if staged is None:
                    assert chunk_nbytes is not None
                    self._write_in_chunks(chunk_nbytes, step)
                    self.source.check_unchanged()
                else:
                    self._write(staged)
        except BaseException as error:
            self._undo(log, error, undo)
            raise
        try:
            return self._report(watch.of if self.device is not None else None)
        except BaseException as error:
            _note(error, "TensorPlay: the state dict is loaded")
            raise

    # What is looked at before

    def _refuse_what_is_wrong(self, chunk_nbytes: int | None, allow_live_graph: bool) -> None:
        state = ModelState([self.modules], self.optimizers, loading=self.loading)
        findings = [finding for rule in state_rules() for finding in rule.in_state(state)]
        wrong = [finding for finding in findings if self._forbids(finding)]
        reasons = [f"{finding.code} {finding.where.name}: {finding.headline}; {_way_out(finding)}" for finding in wrong]
        reasons += self._why_not_written()
        if self.assign or self.device is not None:
            replaced = {pair.slot.key for pair in self.loading.pairs} if self.assign else self.before.meta
            held = [slot.key for slot in self.modules.slots if id(slot.tensor) in state.held and slot.key in replaced]
            if held:
                reasons.append(
                    f"{some_of(held)} would be replaced, and the optimizer would hold the old "
                    f"{'one' if len(held) == 1 else 'ones'}: load first, and build the optimizer then"
                )
        offloaded = [pair.slot.key for pair in self.loading.pairs if self.modules.has_value.get(pair.slot.key)]
        if offloaded:
            reasons.append(
                f"{some_of(offloaded, 3)} on meta, with the values in an offload hook, which would keep the old ones: "
                "load before the model is offloaded, or remove the hooks first "
                "(accelerate.hooks.remove_hook_from_submodules)"
            )
        if chunk_nbytes is not None:
            reasons += self._why_not_in_chunks()
        if not self.assign and not allow_live_graph:
            reasons += self._saved_by_graphs()
        if reasons:
            report = report_on(state, self.caller, self.name, self.source.name, self.optimizers, loaded=False)
            raise LoadRefused(reasons, report)

    def _forbids(self, finding: Finding) -> bool:
        if finding.code == "TP508":
            return True
        if finding.code == "TP504":
            return finding.severity != "info"
        if finding.code == "TP501" and "mixed" in finding.evidence:
            return True  # also where a hook would exchange the model's own on the way: that is not undone
        return finding.severity == "error" and not (finding.code == "TP507" and self._will_have_memory(finding))

    def _will_have_memory(self, finding: Finding) -> bool:
        return self.device is not None and "meta_after" in finding.evidence

    def _why_not_written(self) -> Iterator[str]:
        if torch.__future__.get_swap_module_params_on_conversion():
            yield (
                "torch.__future__.set_swap_module_params_on_conversion(True) makes loading exchange the insides of "
                "tensors, which is not undone here: set it to False"
            )
        if self.device is not None and torch.device(self.device).type == "meta":
            yield "device='meta' has no memory: say where the tensors are to be"
        short = self.loading.short
        if short:
            yield (
                f"{some_of(short, 3)} {'reaches' if len(short) == 1 else 'reach'} past the storage, as after "
                "storage.resize_(0): reading or writing it would end the process; give it memory first"
            )
        scripted = [path.rstrip(".") or "the model" for path, how in self.modules.loaders.items() if how == SCRIPTED]
        if scripted:
            yield (
                f"{some_of(scripted, 3)} scripted, whose parameters C++ keeps and nothing here can put back: "
                "use load_state_dict()"
            )
        inference = [pair.slot.key for pair in self.loading.pairs if pair.slot.record.impl.is_inference]
        if inference and not self.assign and not torch.is_inference_mode_enabled():
            yield (
                f"{some_of(inference, 3)} made in inference mode, and nothing else may write there: load within "
                "torch.inference_mode(), or say assign=True"
            )

    def _why_not_in_chunks(self) -> Iterator[str]:
        if self.assign:
            yield "chunk_nbytes reads pieces to copy them, and assign=True copies nothing: leave one of them out"
        if self.loading.own_loading:
            yield f"chunk_nbytes copies by itself, and {some_of(self.loading.own_loading, 3)} loads in a way of its own"
        if any(name in self.loading.modules.extra_states for name, _ in self.loading.others):
            yield "chunk_nbytes copies tensors alone, and the state dict has extra state"
        hooked = [
            path.rstrip(".") or "the model"
            for path, module in self.modules.items()
            if (C.instance_dict(module) or {}).get("_load_state_dict_post_hooks")
        ]
        if hooked:
            yield f"chunk_nbytes copies by itself, and runs no hook after loading, which {some_of(hooked, 3)} has"

    def _saved_by_graphs(self) -> Iterator[str]:
        """Name what graphs that are still to run backward have saved."""
        targets = {
            pair.slot.record.storage.address: pair.slot.key
            for pair in self.loading.pairs
            if pair.slot.has_memory and pair.slot.record.storage is not None
        }
        computed = {id(tensor) for tensor in _computed_anew(self.modules)}
        roots = [root for root in Live().roots if id(root) not in computed] if targets else []
        saved = C.saved_tensors(roots, None, list(targets))[0] if targets else []
        by_key: dict[str, str] = {}
        for node, _, argument, _, _, _, record, _ in saved:
            assert record is not None and record.storage is not None  # of these storages alone
            by_key.setdefault(targets[record.storage.address], f"{node}.{argument}")
        if by_key:
            some = [f"{key} (by {saver})" for key, saver in list(by_key.items())[:_MOST_SAVERS]]
            yield (
                "a graph that is still to run backward has saved "
                f"{some_of(some + [''] * (len(by_key) - len(some)), 3)}: run backward() or drop it first, or say "
                "allow_live_graph=True, and its backward raises"
            )

    # What is read before

    def _read(self, chunk_nbytes: int | None, step: Step) -> dict[str, Any] | None:
        """Read every byte that is to be loaded: into memory, or, in chunks, to know that it is there."""
        pairs = self.loading.pairs
        total = sum(pair.slot.nbytes for pair in pairs)
        done = 0
        staged: dict[tuple[Any, ...], Any] = {}
        found: dict[str, Any] = {}
        chunk = None if chunk_nbytes is None else _memory(chunk_nbytes)
        self.extra_nbytes += chunk_nbytes or 0
        for pair in pairs:
            entry = pair.entry
            if not _may_be_cut(entry.record):
                found[entry.key] = entry.tensor
            elif chunk is not None:
                self._reading(entry.key, functools.partial(_read_through, entry.tensor, chunk))
            else:
                record = entry.record
                place = lies_at(record)
                if place not in staged:
                    staged[place] = self._reading(entry.key, functools.partial(_copied, entry.tensor))
                    self.extra_nbytes += 0 if self.assign else record.extent.needed_nbytes - record.extent.first_byte
                found[entry.key] = staged[place]
            done += pair.slot.nbytes
            step(entry.key, done, total)
        for key, value in self.loading.items if chunk is None else ():
            if key in self.modules.extra_states:  # modules may keep what it holds
                found[key] = self._reading(key, functools.partial(tree_map_only, torch.Tensor, _own_memory, value))
        return None if chunk is not None else found

    def _reading(self, key: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except OSError as error:
            raise LoadRefused([f"{self.source.name} was cut while {key} was read: {error}"]) from error

    # What is written

    def _keep_extra_states(self, log: Undo) -> None:
        given = {key for key, _ in self.loading.items}
        for path, module in self.modules.items():
            if path + _EXTRA_STATE_KEY_SUFFIX in given and path + _EXTRA_STATE_KEY_SUFFIX in self.modules.extra_states:
                before = copy.deepcopy(module.get_extra_state())
                log.also(functools.partial(module.set_extra_state, before))
        for entry in self.loading.entries if self.assign else ():
            wanted = entry.record.impl.requires_grad
            if type(entry.tensor) is nn.Parameter:  # load_state_dict() makes it require what the model's does
                log.also(functools.partial(entry.tensor.requires_grad_, wanted))

    def _materialize(self) -> None:
        """Give what is on meta memory, each tensor once, under all its names."""
        made: dict[int, Any] = {}
        offloaded = self.modules.has_value
        for slot in self.modules.slots:
            if slot.is_meta and slot.key not in offloaded:
                if id(slot.tensor) not in made:
                    with torch.no_grad():
                        new = torch.empty_like(slot.tensor, device=self.device)
                    if isinstance(slot.tensor, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=slot.record.impl.requires_grad)
                    made[id(slot.tensor)] = new
                self.modules.put(slot, made[id(slot.tensor)])

    def _write(self, staged: Mapping[str, Any]) -> None:
        """Let load_state_dict() do it, with what was read in the place of the source's tensors."""
        state_dict: dict[Any, Any] = {
            key: staged.get(key, value) if type(key) is str else value for key, value in self.loading.items
        }
        if self.assign and self.device is not None:
            state_dict = {k: v.to(self.device) if C.is_tensor(v) else v for k, v in state_dict.items()}
        if self.loading.metadata is not None:
            state_dict = _with_metadata(state_dict, self.loading.metadata)
        answer = self.model.load_state_dict(state_dict, strict=False, assign=self.assign)
        if self.strict:
            missing = [key for key in answer.missing_keys if key not in self.loading.tied_to]
            if missing or answer.unexpected_keys:
                raise RuntimeError(
                    f"loading into {type(self.model).__name__}: missing keys {missing}, unexpected keys "
                    f"{answer.unexpected_keys}"
                )
        self.answered = (answer.missing_keys, answer.unexpected_keys)
        if self.assign:
            self._tie_again()

    def _tie_again(self) -> None:
        """Make one parameter of what was one before, where the same bytes were assigned to all its names."""
        fresh = {slot.key: slot for slot in Modules(self.model).slots}
        for tie in self.before.ties:
            first = fresh[next((key for key in tie.keys if key in self.loading.by_key), tie.keys[0])]
            for key in tie.keys if tie.is_one_object else ():
                if key in self.loading.tied_to or lies_at(fresh[key].record) == lies_at(first.record):
                    self.modules.put(fresh[key], first.tensor)

    def _write_in_chunks(self, chunk_nbytes: int, step: Step) -> None:
        targets = {slot.key: slot.tensor for slot in Modules(self.model).slots}
        chunk = _memory(chunk_nbytes)
        total = sum(pair.slot.nbytes for pair in self.loading.pairs)
        done = 0
        for pair in self.loading.pairs:
            self._reading(pair.entry.key, functools.partial(_write_chunked, targets[pair.slot.key], pair, chunk))
            done += pair.slot.nbytes
            step(pair.entry.key, done, total)

    def _undo(self, log: Undo, error: BaseException, undo: bool) -> None:
        failed = log.put_back()
        if failed:
            said = f"TensorPlay could not put the model back: {plural(len(failed), 'error')}, the first: {failed[0]!r}"
        elif undo or self.assign:
            said = "TensorPlay: what the model has registered is as it was: objects, ties, bytes and versions"
            if self.loading.own_loading:
                said += f"; what {some_of(self.loading.own_loading, 3)} keeps elsewhere is not known"
        else:
            said = "TensorPlay: undo=False: what was written before the error stays; objects and ties are as before"
        _note(error, said)

    # What is said afterwards

    def _report(self, written: Callable[[Any], Provenance] | None) -> LoadReport:
        modules = Modules(self.model)
        loading = self.loading.beside(modules)
        if self.answered is not None:
            loading.settle(*self.answered)
        state = ModelState([modules], self.optimizers, loading=loading, before=self.before, written=written)
        moves, replaced = [], []
        for slot in modules.slots:
            old, now = self.before.versions.get(slot.key), slot.record.impl.version
            if self.before.is_replaced(slot):
                replaced.append(slot.key)
            elif old is not None and now is not None and old != now:
                moves.append(VersionMove(name=slot.key, before=old, after=now))
        return report_on(
            state,
            self.caller,
            self.name,
            self.source.name,
            self.optimizers,
            unread=self.source.unread,
            loaded=True,
            versions=tuple(moves),
            replaced=tuple(replaced),
            extra_nbytes=self.extra_nbytes,
        )


def _computed_anew(modules: Modules) -> Iterator[Any]:
    """Answer the weights that hooks make before each forward, as of pruning and weight_norm: no backward is to come."""
    for module in modules.each():
        own = C.instance_dict(module) or {}
        if own.get("_forward_pre_hooks"):
            yield from (value for value in list(own.values()) if C.is_tensor(value))


def _note(error: BaseException, said: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(said)


def _way_out(finding: Finding) -> str:
    if finding.code == "TP507" and "meta_after" in finding.evidence:
        return "say device= to give it memory, or assign=True"
    return finding.fix


def _lazily(tensor: Any, record: Any) -> Any:
    """Answer a tensor that is conjugated or negated when it is read, as the one that was read is."""
    if record.impl.is_conj:
        tensor = torch.conj(tensor)
    return torch._neg_view(tensor) if record.impl.is_neg else tensor


class _StateDict(dict[Any, Any]):
    """A state dict that can carry ``_metadata``, as an OrderedDict can."""


def _with_metadata(state_dict: dict[Any, Any], metadata: Any) -> dict[Any, Any]:
    carrying = _StateDict(state_dict)
    carrying._metadata = metadata  # type: ignore[attr-defined]
    return carrying


def _unmarked(state_dict: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Answer it with metadata of its own, in which no earlier load with assign=True has left its mark."""
    metadata = getattr(state_dict, "_metadata", None)
    if not isinstance(metadata, Mapping):
        return state_dict
    own = {
        path: {name: value for name, value in one.items() if name != ASSIGN_MARK} if isinstance(one, Mapping) else one
        for path, one in metadata.items()
    }
    return _with_metadata(dict(state_dict), own)


def _may_be_cut(record: Any) -> bool:
    """Tell whether reading could fail: its memory is not of PyTorch's own allocator, and may be a mapped file's."""
    return (
        record.kind == "strided"
        and record.data is not None
        and record.data.pointer != 0
        and record.impl.device == "cpu"
        and record.impl.numel != 0
        and record.data.origin not in _OWN_HEAP
    )


def _bytes_of(record: Any) -> tuple[int, int]:
    return int(record.extent.first_byte), int(record.extent.needed_nbytes)


def _memory(nbytes: int) -> Any:
    """Answer memory that is filled natively: made by no operator, so that no watch takes it as never written."""
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(torch.UntypedStorage(nbytes, device="cpu"))


def _fetch(tensor: Any, memory: Any) -> None:
    """Copy the bytes that a tensor reaches into; raises OSError where they are not there."""
    if not C.copy_bytes(tensor, memory):
        raise OSError("its bytes cannot be read")


def _copied(tensor: Any) -> Any:
    """Answer a tensor of the same geometry over a copy of the bytes; raises OSError where they are not there."""
    record: Any = C.read(tensor)
    first, end = _bytes_of(record)
    memory = _memory(end - first)
    _fetch(tensor, memory)
    new = torch.empty(0, dtype=tensor.dtype, device="cpu")
    offset = int(record.impl.storage_offset) - first // record.impl.itemsize
    new.set_(memory.untyped_storage(), offset, record.impl.shape, record.impl.stride)
    return _lazily(new, record)


def _own_memory(tensor: Any) -> Any:
    return _copied(tensor) if _may_be_cut(C.read(tensor)) else tensor


def _pieces(tensor: Any, nbytes: int) -> Iterator[Any]:
    """Answer one-dimensional views of bytes that together are all that a tensor reaches into."""
    first, end = _bytes_of(C.read(tensor))
    storage = tensor.untyped_storage()
    for begin in range(first, end, nbytes):
        yield torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, begin, (min(nbytes, end - begin),))


def _read_through(tensor: Any, chunk: Any) -> None:
    for piece in _pieces(tensor, chunk.numel()):
        _fetch(piece, chunk[: piece.numel()])


def _write_chunked(target: Any, pair: Pair, chunk: Any) -> None:
    """Copy one tensor through the chunk, where both are laid out alike, otherwise by a copy of its own."""
    tensor, record = pair.entry.tensor, pair.entry.record
    with torch.no_grad():
        if not _may_be_cut(record):
            target.copy_(tensor if target.dim() else tensor.reshape(()))
            return
        plain = (
            record.extent.contiguous
            and not (record.impl.is_conj or record.impl.is_neg)
            and target.is_contiguous()
            and target.dim() > 0
            and chunk.numel() >= record.impl.itemsize
            and chunk.data_ptr() % record.impl.itemsize == 0
        )
        if not plain:
            target.copy_(_copied(tensor).reshape(target.shape))
            return
        step = chunk.numel() // record.impl.itemsize
        flat, source = target.view(-1), tensor.view(-1)
        for begin in range(0, source.numel(), step):
            piece = source[begin : begin + step]
            memory = chunk[: piece.numel() * record.impl.itemsize]
            _fetch(piece, memory)
            flat[begin : begin + step].copy_(memory.view(tensor.dtype))
