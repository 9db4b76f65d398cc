"""The native extension, loaded and checked: ``from tensorplay._native import C``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensorplay._load import load

if TYPE_CHECKING:
    import tensorplay._C as C
else:
    C = load()

__all__ = ["C"]
