"""The exceptions TensorPlay raises by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorplay.reports import Report

__all__ = [
    "InconsistentTensor",
    "LeakFound",
    "LoadError",
    "LoadRefused",
    "Reason",
    "RepairRefused",
    "TargetError",
    "TensorPlayError",
    "UnknownCode",
]


class TensorPlayError(Exception):
    """Base of every error TensorPlay raises on purpose."""


class LoadError(TensorPlayError, ImportError):
    """The native extension cannot be used with this Python or this torch."""


class InconsistentTensor(TensorPlayError, ValueError):
    """A strict check found that a tensor's pointer, offset and bytes do not fit each other."""


class LeakFound(TensorPlayError, AssertionError):
    """leak_check(raises=True) found what keeps memory alive that should have gone."""


class _Refused(TensorPlayError, RuntimeError):
    """Nothing was changed, for reasons that each say what is wrong, and the way out."""

    reasons: list[Any]

    def __init__(self, reasons: list[Any], report: Report | None = None) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons
        self.report = report

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.reasons, self.report)


class LoadRefused(_Refused):
    """safe_load_state_dict() wrote nothing: each of the reasons says what is wrong, and the way out."""

    reasons: list[str]
    report: Report | None
    """What was found, where the model and the state dict were compared."""


class Reason(str):
    """Why something was refused: what is wrong, and the way out, as one line."""

    name: str
    """Of the check that did not hold."""
    tensor: str
    """Path of the tensor."""
    way_out: str
    """What to do."""

    def __new__(cls, text: str, *, name: str, tensor: str, way_out: str) -> Reason:
        """Make the line, and say of what it is."""
        reason = super().__new__(cls, text)
        reason.name, reason.tensor, reason.way_out = name, tensor, way_out
        return reason

    def __reduce__(self) -> tuple[object, ...]:
        return _reason, (str(self), self.name, self.tensor, self.way_out)


def _reason(text: str, name: str, tensor: str, way_out: str) -> Reason:
    return Reason(text, name=name, tensor=tensor, way_out=way_out)


class RepairRefused(_Refused):
    """dtensor.repair() changed nothing: each of the reasons says what is wrong, and the way out."""

    reasons: list[Reason]
    report: Report | None
    """Every check of every DTensor, with its result."""


class TargetError(TensorPlayError):
    """What the user named cannot be loaded: a module, a factory, a file."""


class UnknownCode(TensorPlayError, ValueError):
    """No rule has this code."""
