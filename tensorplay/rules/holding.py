"""TP302, TP306 to TP309: what keeps memory alive that should have gone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tensorplay.failures import KeptError
from tensorplay.growth import Row, Surge, count_of, nbytes_of
from tensorplay.layers import Finding
from tensorplay.rules.registry import LeakRule, SceneRule
from tensorplay.scene import Scene
from tensorplay.words import bytes_text, plural, some_of

__all__ = ["CppHolders", "ErrorHoldsFrames", "GrowsEachStep", "HeldByCycle", "ModulesHoldActivations"]

_WAYS_OUT = {
    "context": "ctx.save_for_backward() in place of an attribute of ctx",
    "exception": "delete the variable that keeps the exception in a frame of its own traceback, or keep str(error)",
    "hook": "let the hook refer to the module weakly, as by weakref.proxy(self), or remove() it",
    "other": "a weak reference for one of these steps, or gc.collect() where they are dropped",
}
_MANY_STEPS = 1000
_SCALAR_NBYTES = 16
_READ = "read: tp_traverse of every type, c10/core/StorageImpl.h size_bytes_, torch/csrc/autograd/variable.h"


class CppHolders(LeakRule):
    """New memory is held by C or C++ code alone: no Python path and no graph leads to it.

    ## What it checks

    The storages that came between two moments and whose tensors still have their Python objects, while no module
    global, frame, thread, container, graph or cycle leads to them. 16 KiB count (`pinned-nbytes`).

    ## Why it matters

    Nothing that Python shows can free it: an extension, a serving runtime, a future or a queue in C++ holds a
    reference, by intent or because a `Py_DECREF` or a destructor is missing.

    ## Known limits

    A storage whose tensor has no Python object, and that no such tensor leads to, is not seen at all. Memory that other
    code than PyTorch's allocated is no storage. Objects of C types that hide what they hold from the garbage collector
    count as C code. Lists and the like that hang on nothing else are passed over while C code runs between frames of
    Python in some thread, as in `list(map(load, files))`: it may be making them. Where a TorchScript module is alive,
    which hides what it holds, the finding is an info.

    ## Example

    ```python
    future = torch.futures.Future()
    with tp.leak_check():
        future.set_result(torch.ones(100_000))
    ```

    ## Use instead

    ```python
    with tp.leak_check():
        future = torch.futures.Future()
        future.set_result(torch.ones(100_000))
        del future
    ```

    ## Fix safety

    None is offered: it lies in the code that holds it. `who_holds()` counts its references.

    ## Sources

    c10/util/intrusive_ptr.h, torch/csrc/autograd/python_variable.cpp, torch 2.13 and 2.14.
    """

    code = "TP302"

    def leaked(self, surge: Surge) -> Iterator[Finding]:
        """Explain one finding for all of it."""
        rows = surge.held_by_c
        members = [member for row in rows for member in row.members]
        if not members or not surge.counts(members):
            return
        yield self.finding(
            rows[0].path,
            headline="C or C++ code alone holds new memory",
            subject=f"{plural(count_of(members), 'storage')}, {bytes_text(nbytes_of(members))}",
            evidence={"bytes": nbytes_of(members), "storages": count_of(members), "held": [row.path for row in rows]},
            why="no Python path that can be seen leads to it: an object that hides what it holds, or nobody any more",
            fix="look where an extension, a future or a queue keeps a tensor, or a reference count is not lowered",
            source=_READ,
            severity="info" if surge.has_script_modules() else None,
        )


class HeldByCycle(LeakRule):
    """New memory hangs on a cycle of references: it goes when the garbage collector runs, not when the last name goes.

    ## What it checks

    The storages that came between two moments, that no root leads to, and that are not gone, because objects refer to
    each other in a circle. The steps of a shortest one are printed. 16 KiB count (`pinned-nbytes`). `bytes` are those
    of tensors on the circle itself, `indirect_bytes` those that hang on it, `parameter_bytes` those of parameters.

    ## Why it matters

    The garbage collector counts objects, not bytes: gigabytes may hang on a few hundred objects, and it may not run for
    many steps. On a GPU that shows as memory that rises and falls in a saw, or as an out-of-memory error.

    ## Known limits

    What the collector took before the check ended is not seen; `gc.disable()` around the check shows all. A cycle
    through C++ objects that hide what they hold shows as TP302.

    ## Example

    ```python
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.y = x.exp()
            return ctx.y

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.y

    with tp.leak_check():
        y = Exp.apply(torch.zeros(100_000, requires_grad=True))
        del y
    ```

    ## Use instead

    ```python
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    with tp.leak_check():
        y = Exp.apply(torch.zeros(100_000, requires_grad=True))
        del y
    ```

    ## Fix safety

    `save_for_backward()` also notices writes in place. A weak reference in place of one step of the circle breaks it;
    whoever uses it must have another reference. `gc.collect()` frees it, at the cost of looking at all objects.

    ## Sources

    Include/internal/pycore_gc.h of CPython; torch/csrc/autograd/python_function.h, torch 2.13 and 2.14.
    """

    code = "TP306"

    def leaked(self, surge: Surge) -> Iterator[Finding]:
        """Explain one finding a cycle; those of equal steps are one."""
        storages = dict(zip(map(id, surge.placed), surge.new, strict=True))
        for row in surge.rows("cycle"):
            if not surge.counts(row.members):
                continue
            around = [storages[id(member)].around for member in row.members]
            parameters = [member for member in row.members if surge.is_parameter(storages[id(member)])]
            cycles = len({min(begin for begin, _, _ in steps) for steps in around if steps})
            more = f" on {cycles} such cycles" if cycles > 1 else ""
            yield self.finding(
                row.path,
                headline="memory hangs on a reference cycle until the garbage collector runs",
                subject=f"{plural(row.storages, 'storage')}, {bytes_text(row.nbytes)}{more}",
                evidence={
                    "bytes": nbytes_of(row.direct),
                    "indirect_bytes": nbytes_of(row.indirect),
                    "parameter_bytes": nbytes_of(parameters),
                    "storages": row.storages,
                    "cycles": cycles,
                    "cycle": row.path,
                },
                why="the collector counts objects, not bytes, and may not run for a long time",
                fix=_WAYS_OUT[surge.kind_of_cycle(around[0])],
                source=f"{_READ}; no root leads to it",
            )


class GrowsEachStep(LeakRule):
    """Each step leaves memory behind.

    ## What it checks

    The bytes of all storages that something holds, after each step that was marked: the median of the slopes between
    every two steps, with the interval that holds it with 99 % confidence. It fires where that lies above zero. Garbage
    that waits for the collector is not counted (TP306).

    ## Why it matters

    What grows each step ends as an out-of-memory error, hours later and at a place that has nothing to do with it. The
    finding names who holds what came.

    ## Known limits

    An info where it is one tensor that gets larger, as a batch of longer sequences does, or so little that 1000 steps
    stay below `pinned-nbytes`. Six steps at least. A single jump, as by a cache or the optimizer's first step, is no
    growth; a cache that fills for as long as the check runs is. A leak of one in two steps needs more steps to be sure.

    ## Example

    ```python
    losses = []

    def step():
        x = torch.ones(10_000, requires_grad=True)
        losses.append((x * x).sum())

    tp.leak_check(step, steps=8)
    ```

    ## Use instead

    ```python
    losses = []

    def step():
        x = torch.ones(10_000, requires_grad=True)
        losses.append((x * x).sum().item())

    tp.leak_check(step, steps=8)
    ```

    ## Fix safety

    `item()` and `detach()` let go of the graph: they fit what is only shown or averaged, not what backward is called
    on.

    ## Sources

    Theil–Sen slope, Mann–Kendall test; c10/core/StorageImpl.h (`size_bytes_`), torch 2.13 and 2.14.
    """

    code = "TP307"

    def leaked(self, surge: Surge) -> Iterator[Finding]:
        """Explain the one finding."""
        slope = surge.slope
        if slope is None or slope.low <= 0:
            return
        steps = len(slope.nbytes)
        rows = surge.rows("reached")
        rows = [row for row in rows if row.storages >= steps] or rows
        one = len(rows) == 1 and rows[0].storages == 1
        is_small = slope.nbytes_per_step * _MANY_STEPS < surge.config.pinned_nbytes
        size = bytes_text(round(slope.nbytes_per_step))
        yield self.finding(
            rows[0].path if rows else "memory",
            headline=f"one tensor gets larger by {size} each step" if one else f"each step leaves {size} behind",
            subject=f"{bytes_text(round(slope.low))} to {bytes_text(round(slope.high))} a step with "
            f"{slope.confidence:.0%} confidence, over {plural(steps, 'step')}"
            + (f"; held by {some_of([row.path for row in rows])}" if rows else ""),
            evidence={
                "bytes_per_step": slope.nbytes_per_step,
                "low": slope.low,
                "high": slope.high,
                "confidence": slope.confidence,
                "p_value": slope.p_value,
                "steps": steps,
                "held": [{"path": row.path, "storages": row.storages, "bytes": row.nbytes} for row in rows],
            },
            why="if it is what torch.cat() adds to, it goes on until memory is full; a batch of longer sequences ends"
            if one
            else "it goes on until memory is full",
            fix=self._fix(rows),
            source=f"computed: Theil-Sen slope of the bytes of all storages that something holds; {_READ}",
            severity="info" if one or is_small else None,
        )

    def _fix(self, rows: Sequence[Row]) -> str:
        first = rows[0] if rows else None
        if first is not None and nbytes_of(first.indirect) > nbytes_of(first.direct):
            return "keep .item() there, or .detach() of what is no scalar: with a tensor its graph is kept"
        if first is not None and first.nbytes <= _SCALAR_NBYTES * first.storages:
            return "keep .item() there: a number needs no tensor; or bound it"
        return "drop what is kept there after use, or bound it"


class ErrorHoldsFrames(SceneRule, LeakRule):
    """A kept exception holds the frames it passed through, and these their tensors.

    ## What it checks

    Exceptions among the objects, or that hold what came between two moments: the local variables of the frames in their
    tracebacks that have ended, and the tensors that hang on these. It counts a storage where nothing else leads to it:
    the heap is walked without the traceback. 16 KiB count (`pinned-nbytes`).

    ## Why it matters

    After a caught out-of-memory error the memory is not free, and the retry with a smaller batch fails too: the
    exception is still in a variable, a log or `sys.last_exc`.

    ## Known limits

    Variables of frames that still run are not counted: they have them anyway.

    ## Example

    ```python
    def step():
        batch = torch.ones(10_000)
        raise RuntimeError("out of memory")

    errors = []
    try:
        step()
    except RuntimeError as error:
        errors.append(error)
    tp.check(errors)
    ```

    ## Use instead

    ```python
    def step():
        batch = torch.ones(10_000)
        raise RuntimeError("out of memory")

    errors = []
    try:
        step()
    except RuntimeError as error:
        errors.append(str(error))
    tp.check(errors)
    ```

    ## Fix safety

    The text of the error stays. `traceback.clear_frames()` keeps the exception with its traceback, and empties the
    variables of its frames: a debugger shows none of them then.

    ## Sources

    Objects/frameobject.c and Python/traceback.c of CPython 3.10 to 3.13.
    """

    code = "TP308"

    def findings(self, scene: Scene) -> Iterator[Finding]:
        """Explain one finding an exception handed in."""
        return self._explained(scene.kept_errors(), scene.config.pinned_nbytes)

    def leaked(self, surge: Surge) -> Iterator[Finding]:
        """Explain one finding for each exception that a new storage hangs on."""
        return self._explained(surge.kept_errors(), surge.config.pinned_nbytes)

    def _explained(self, errors: Sequence[KeptError], least: int) -> Iterator[Finding]:
        for error in errors:
            if error.nbytes < max(least, 1):
                continue
            yield self.finding(
                error.path,
                headline="a kept exception holds the tensors of frames that ended"
                if error.errors == 1
                else f"{error.errors} kept exceptions hold the tensors of frames that ended",
                subject=f"{error.kind} {error.path}: {bytes_text(error.nbytes)} through {some_of(error.variables)}",
                evidence={
                    "bytes": error.nbytes,
                    "storages": error.storages,
                    "held_through": list(error.variables),
                    "log_type": error.kind,
                    "errors": error.errors,
                    "error": error.path,
                },
                why="its traceback refers to the frames it passed through, they to their variables; nothing else does",
                fix="keep str(error) or traceback.format_exception(error); "
                "or traceback.clear_frames(error.__traceback__)",
                source="read: tb_next, tb_frame, the frames' variables; walked: the heap without the traceback",
            )


class ModulesHoldActivations(LeakRule):
    """Modules keep activations in plain attributes.

    ## What it checks

    Storages that came between two moments and that attributes of modules hold, outside parameters and buffers: those of
    tensors with a graph behind them; and those of tensors that several modules have under one name, or a module with a
    forward hook, where no method of the module's class names the attribute, so that something from outside put them
    there. 16 KiB count (`pinned-nbytes`).

    ## Why it matters

    Hooks that save inputs or outputs on the modules are often removed, what they saved is not: it lives as long as the
    model, and with a graph behind it all that was saved for backward.

    ## Known limits

    What a class keeps by its own code, without a graph, is taken for a cache that is meant: it shows as growth, without
    a finding. Weights that `torch.nn.utils` computes from others (`weight_g`, `weight_orig`) are passed over.

    ## Example

    ```python
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())

    def keep(module, inputs, output):
        module.output = output.detach()

    with tp.leak_check():
        hooks = [module.register_forward_hook(keep) for module in model]
        model(torch.ones(32, 64))
        for hook in hooks:
            hook.remove()
    ```

    ## Use instead

    ```python
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())

    def keep(module, inputs, output):
        module.output = output.detach()

    with tp.leak_check():
        hooks = [module.register_forward_hook(keep) for module in model]
        model(torch.ones(32, 64))
        for hook, module in zip(hooks, model):
            hook.remove()
            del module.output
    ```

    ## Fix safety

    Deleting the attributes frees them, unless something else holds them.

    ## Sources

    torch/nn/modules/module.py (`_parameters`, `_buffers`, `_modules`), torch 2.13 and 2.14.
    """

    code = "TP309"

    def leaked(self, surge: Surge) -> Iterator[Finding]:
        """Explain one finding for all modules."""
        found = surge.activations
        if not found.storages or not surge.counts(found.storages):
            return
        nbytes, count = nbytes_of(found.storages), count_of(found.storages)
        yield self.finding(
            found.attributes[0],
            headline="modules keep activations in plain attributes",
            subject=f"{plural(len(found.attributes), 'attribute')} outside parameters and buffers, on "
            f"{plural(count, 'storage')}, {bytes_text(nbytes)}: {some_of(found.attributes)}",
            evidence={
                "held_bytes": nbytes,
                "distinct_storages": count,
                "tensor_attributes": list(found.attributes),
                "modules": found.modules,
                "hooks_left": found.hooks,
            },
            why="they live as long as the model"
            + ("" if found.hooks else "; the hooks that may have saved them are removed"),
            fix="delete the attributes where the hooks are removed, or keep what the hooks see outside the modules",
            source=f"read: the modules' attributes, the code of their classes; {_READ}",
        )
