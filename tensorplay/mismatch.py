"""reproduce_device_mismatch(): how device facts really come to disagree on stock PyTorch, each way made live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec

from tensorplay._native import C  # noqa: F401 -- before torch: it says in one line what to do where that does not import

# isort: split
import torch

from tensorplay.inspection import outside_compiled_code
from tensorplay.layers import Document, Mismatch
from tensorplay.reports import Report

__all__ = ["MismatchReport", "reproduce_device_mismatch"]

_SECONDS = 120
_NEEDS_ONE = 77


class _Way(NamedTuple):
    """One way; its source leaves `report`, what TensorPlay says, and `effect`, what PyTorch does."""

    name: str
    title: str
    disagrees: str
    by_design: bool
    source: str
    needs_accelerator: bool = False


_WAYS = (
    _Way(
        "local",
        "a wrapper's body and the local tensor it computes with",
        "body against _local_tensor",
        False,
        """
        class Sharded(torch.Tensor):
            @property
            def device(self):
                return self._local_tensor.device

        weight = torch.Tensor._make_subclass(Sharded, torch.empty(4, device="meta"))
        weight._local_tensor = torch.ones(4)
        effect = f"weight.device says {weight.device}; the body that autograd and optimizers see is on meta"
        report = tp.check({"weight": weight})
        """,
    ),
    _Way(
        "gradient",
        "a parameter and its gradient, by p.grad.data =",
        "tensor against gradient",
        False,
        """
        weight = torch.nn.Parameter(torch.ones(4))
        weight.grad = torch.ones(4)
        weight.grad.data = torch.ones(4, device=accelerator)
        report = tp.check({"weight": weight})
        optimizer = torch.optim.SGD([weight], lr=0.1)
        effect = f"weight.grad.device says {weight.grad.device}; optimizer.step() {outcome(optimizer.step)}"
        """,
        needs_accelerator=True,
    ),
    _Way(
        "state",
        "a parameter that moved and the optimizer's state that did not",
        "parameter against optimizer state",
        False,
        """
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.__future__.set_swap_module_params_on_conversion(True)
        model.to(elsewhere)
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        report = tp.audit_device_consistency(model, optimizer)
        effect = f"the next optimizer.step() {outcome(optimizer.step)}"
        """,
    ),
    _Way(
        "view",
        "a view that was made before .data of its base was replaced",
        "view against base",
        False,
        """
        base = torch.ones(4)
        view = base[:2]
        base.data = torch.zeros(4, device=accelerator)
        effect = f"view.device says {view.device}, view._base.device says {view._base.device}"
        report = tp.check({"view": view})
        """,
        needs_accelerator=True,
    ),
    _Way(
        "keys",
        "a key set that is another device's, by _make_subclass(device_for_backend_keys=)",
        "key set against impl and DataPtr",
        False,
        """
        class Tagged(torch.Tensor):
            pass

        tagged = torch.Tensor._make_subclass(Tagged, torch.ones(4), False, device_for_backend_keys=torch.device("meta"))
        effect = f"tagged.device says {tagged.device}; kernels of meta run, and results are never written"
        report = tp.check({"tagged": tagged})
        """,
    ),
    _Way(
        "dlpack",
        "CPU memory that a DLPack producer says is on a GPU",
        "memory against impl and DataPtr",
        False,
        """
        import ctypes

        capsule = torch.ones(4).__dlpack__()
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(address(capsule, b"dltensor") + 8).value = 8  # kDLMetal
        claimed = torch.utils.dlpack.from_dlpack(capsule)
        effect = f"claimed.device says {claimed.device}, whatever this machine has; the four labels agree"
        report = tp.check({"claimed": claimed})
        """,
    ),
    _Way(
        "storage",
        "a storage that is labelled by hand, by torch._C._construct_storage_from_data_pointer",
        "memory against DataPtr",
        False,
        """
        source = torch.ones(4)
        label = torch.device(accelerator.type if accelerator else "cuda", 0)
        storage = torch._C._construct_storage_from_data_pointer(source.data_ptr(), label, 16)
        over = torch.empty(0, device=label if accelerator else "cpu")
        outcome_of_set = outcome(lambda: over.set_(storage, 0, (4,), (1,)))
        effect = f"storage.device says {storage.device}; a tensor on {over.device} over it: set_() {outcome_of_set}"
        report = tp.check({"over": over})
        """,
    ),
    _Way(
        "fake",
        "a FakeTensor",
        "what Python says against impl and DataPtr",
        True,
        """
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode():
            fake = torch.empty(4, device="cuda")
        effect = f"fake.device says {fake.device}; all layers are on meta, and there is no memory"
        report = tp.check({"fake": fake})
        """,
    ),
    _Way(
        "wrapper",
        "a wrapper subclass that has no memory of its own",
        "impl against the tensor inside",
        True,
        """
        class Wrapper(torch.Tensor):
            __torch_dispatch__ = classmethod(lambda *args: NotImplemented)

            def __new__(cls, inside):
                wrapper = torch.Tensor._make_wrapper_subclass(cls, inside.shape, device="cuda:0")
                wrapper.inside = inside
                return wrapper

        wrapper = Wrapper(torch.ones(4))
        effect = f"wrapper.device says {wrapper.device}; its pointer is null"
        report = tp.check({"wrapper": wrapper})
        """,
    ),
)

_BEFORE = """
import json
import os
import warnings

import torch

import tensorplay as tp

{setup}

warnings.simplefilter("ignore")
accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
elsewhere = accelerator or torch.device("meta")


def outcome(call):
    try:
        call()
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return "raises nothing"

"""
# Not through Python's own end: a thread of autograd's engine that asks for the GIL there ends the process by SIGABRT.
_AFTER = """
print(json.dumps({"effect": effect, "report": report.to_json()}), flush=True)
os._exit(0)
"""
_NONE_HERE = "needs an accelerator: between the CPU and meta PyTorch refuses .data ="
_NO_SET_DEVICE = (
    "Tensor._set_device does not exist: no call of PyTorch's changes the label of a tensor alone. A parameter on the "
    "CPU that says it is on a GPU is one of these, or was made by an extension"
)


class MismatchReport(Report):
    """A report whose text is what came to disagree, and what was found."""

    __slots__ = ()
    about = ("mismatches",)

    @property
    def mismatches(self) -> tuple[Mismatch, ...]:
        """The ways, in the order they were asked for."""
        return self.document.mismatches

    def __repr__(self) -> str:
        return f"<tensorplay.MismatchReport: {len(self.mismatches)} ways, {len(self.findings)} findings>"


@outside_compiled_code
def reproduce_device_mismatch(ways: Sequence[str] | None = None, *, setup: str = "") -> MismatchReport:
    """Make each way in which device facts come to disagree on stock PyTorch, live in a process of its own, and show it.

    Nothing in this process is changed. The second device is the accelerator, or ``meta`` where that shows the same;
    where the machine has no accelerator and meta will not do, the way is said to need one.

    Args:
        ways: which: local, gradient, state, view, keys, dlpack, storage, fake, wrapper. All where None.
        setup: statements to run first in each process, as ``import torch_npu``.

    Returns:
        The report: ``.mismatches`` with the source, what PyTorch does and the codes of what was found; ``.findings`` of
        all of them; ``str()``, ``.to_json()``. It prints nothing.

    Raises:
        ValueError: there is no such way.

    Cost: some seconds each for a new process that imports torch, as many at a time as there are processors.

    Source: docs/explanation/devices.md.
    """
    known = {way.name: way for way in _WAYS}
    if ways is not None and (type(ways) not in (list, tuple) or not all(type(name) is str for name in ways)):
        raise ValueError(f"reproduce_device_mismatch() takes a list of names: {', '.join(known)}")
    for name in ways or ():
        if name not in known:
            raise ValueError(f"there is no way {name!r} for device facts to disagree; there are {', '.join(known)}")
    wanted = list(_WAYS) if ways is None else [known[name] for name in ways]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        shown = list(pool.map(lambda way: _show(way, setup), wanted))
    notes = () if hasattr(torch.Tensor, "_set_device") else (_NO_SET_DEVICE,)
    findings = tuple(finding for mismatch, document in shown for finding in (document.findings if document else ()))
    return MismatchReport(
        [], findings, mismatches=tuple(mismatch for mismatch, _ in shown), notes=notes, focus="mismatches"
    )


def _show(way: _Way, setup: str) -> tuple[Mismatch, Document | None]:
    """Run a way in a process of its own."""
    source = textwrap.dedent(way.source).strip()
    folders = [str(Path(__file__).parent.parent), os.getcwd()]
    folders += map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    guard = f"if accelerator is None:\n    raise SystemExit({_NEEDS_ONE})\n" if way.needs_accelerator else ""
    effect, document, error = "", None, None
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, f"{way.name}.py")
        script.write_text(f"{_BEFORE.replace('{setup}', setup)}{guard}{source}\n{_AFTER}")
        try:
            done = subprocess.run(
                [sys.executable, str(script)],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=False,
                stdin=subprocess.DEVNULL,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
            )
        except subprocess.TimeoutExpired:
            error = f"was not done after {_SECONDS} s"
        else:
            if done.returncode == 0:
                answer = msgspec.json.decode(done.stdout.splitlines()[-1])
                effect, document = answer["effect"], msgspec.json.decode(answer["report"], type=Document)
            else:
                error = _NONE_HERE if done.returncode == _NEEDS_ONE else _failure(done)
    return (
        Mismatch(
            name=way.name,
            title=way.title,
            disagrees=way.disagrees,
            by_design=way.by_design,
            source=source,
            effect=effect,
            codes=() if document is None else tuple(finding.code for finding in document.findings),
            error=error,
        ),
        document,
    )


def _failure(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        return f"its process ended by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.strip().splitlines()
    return f"raised {lines[-1]}" if lines else f"its process ended with {done.returncode}"
