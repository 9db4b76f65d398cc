"""materialize_audit(): what got its values between two moments, and what did not."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from torch import nn

from tensorplay.callers import Caller
from tensorplay.decorating import decorated
from tensorplay.inspection import outside_compiled_code
from tensorplay.layers import Document
from tensorplay.loading import ModelState, Moment
from tensorplay.modules import Modules
from tensorplay.statedict import LoadReport, named_optimizers, need_model, report_on
from tensorplay.written import WriteWatch

__all__ = ["MaterializeAudit", "materialize_audit"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_WORDS = {"written": "written", "never": "never written", "partly": "partly written", "unseen": "not seen"}


class MaterializeAudit(LoadReport):
    """A context, or a decorator: a report, once it has ended, on what the code within made of a model.

    Inside the context it is the report on the model as it was at the beginning.
    """

    __slots__ = ("_asks", "_before", "_model", "_name", "_optimizers", "_watch")

    def __init__(self, model: nn.Module, optimizers: list[tuple[str, Any]], caller: Caller, name: str) -> None:
        # A report keeps nothing alive.
        self._model = weakref.ref(model)
        self._optimizers = [(one, weakref.ref(optimizer)) for one, optimizer in optimizers]
        self._asks = caller
        self._name = name
        self._before: Moment | None = None
        self._watch: WriteWatch | None = None
        self._take(report_on(ModelState([Modules(model)], optimizers), caller, name, "", optimizers))

    def _take(self, report: LoadReport) -> None:
        """Become another report."""
        LoadReport.__init__(self, [], report.findings, **report._fields)

    def __enter__(self) -> MaterializeAudit:
        """Begin to watch.

        Raises:
            RuntimeError: it watches already, or the model is gone.
        """
        model = self._model()
        if self._watch is not None:
            raise RuntimeError("this materialize_audit() is entered already: make a second one")
        if model is None:
            raise RuntimeError("the model that materialize_audit() was made for is gone")
        self._before = Moment.of(Modules(model))
        self._watch = WriteWatch()
        self._watch.__enter__()
        return self

    @outside_compiled_code
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch, self._watch = self._watch, None
        assert watch is not None
        watch.__exit__(kind, error, trace)
        model = self._model()
        if model is None:
            return
        optimizers = [(name, one) for name, ref in self._optimizers if (one := ref()) is not None]
        modules = Modules(model)
        state = ModelState([modules], optimizers, before=self._before, written=watch.of)
        seen = Counter(_WORDS[known.state] for _, known in state.provenance)
        assert self._before is not None
        replaced = tuple(slot.key for slot in modules.slots if self._before.is_replaced(slot))
        self._take(report_on(state, self._asks, self._name, "", optimizers, replaced=replaced, seen=dict(seen)))

    def __call__(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Watch each call of a function; of a coroutine function while it is awaited.

        Raises:
            TypeError: it is an asynchronous generator function, or no function.
        """
        return decorated(function, lambda: self, "materialize_audit")

    @classmethod
    def from_document(cls, document: Document) -> MaterializeAudit:
        """Wrap a stored document: it watches nothing any more."""
        audit = cls(nn.Identity(), [], Caller.at(sys._getframe()), "")
        LoadReport.__init__(audit, [], document.findings)
        audit._document = document
        return audit


@outside_compiled_code
def materialize_audit(model: nn.Module, optimizer: object = None) -> MaterializeAudit:
    """Watch code that gives a model its values, and tell what has none afterwards.

    ``with tp.materialize_audit(model) as audit:`` around ``to_empty()``, initialisation and loading; ``audit`` is the
    report then. It tells what is still on meta, which memory was allocated and never written, or in part only, which
    ties were lost, what no longer requires grad, and which parameters the optimizer holds that the model has not.

    Args:
        model: the module.
        optimizer: whose parameters are looked for in the model; or several, as a list, or as a dict of name to one.

    Returns:
        The report, a context and a decorator of functions: ``.findings``, ``.load``, ``str()``, ``.to_json()``. It
        prints nothing.

    Raises:
        TypeError: model is no module, or optimizer no optimizer.

    Cost: about 10 microseconds an operator within, and 5 a registered tensor at both ends. Values are not read. Only
        operators of this thread are seen: not what writes past them (NumPy, C++ with a pointer, compiled code).

    Source: torch/utils/_python_dispatch.py ``TorchDispatchMode``; the operators' schemas, torch 2.13 and 2.14.
    """
    caller = Caller.at(sys._getframe(1))
    need_model(model, "materialize_audit")
    optimizers = named_optimizers(optimizer, caller, "materialize_audit", 1)
    return MaterializeAudit(model, optimizers, caller, caller.argument("model", 0))
