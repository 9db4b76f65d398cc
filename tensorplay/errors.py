"""The exceptions TensorPlay raises by itself."""

from __future__ import annotations

__all__ = ["InconsistentTensor", "LeakFound", "LoadError", "TargetError", "TensorPlayError", "UnknownCode"]


class TensorPlayError(Exception):
    """Base of every error TensorPlay raises on purpose."""


class LoadError(TensorPlayError, ImportError):
    """The native extension cannot be used with this Python or this torch."""


class InconsistentTensor(TensorPlayError, ValueError):
    """A strict check found that a tensor's pointer, offset and bytes do not fit each other."""


class LeakFound(TensorPlayError, AssertionError):
    """leak_check(raises=True) found what keeps memory alive that should have gone."""


class TargetError(TensorPlayError):
    """What the user named cannot be loaded: a module, a factory, a file."""


class UnknownCode(TensorPlayError, ValueError):
    """No rule has this code."""
