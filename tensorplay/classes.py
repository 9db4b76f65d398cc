"""What type itself says about a class: ``vars(cls)`` and ``cls.__mro__`` would ask its metaclass, which may be code."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

__all__ = ["class_name", "derives", "mro", "namespace"]

mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__
namespace: Callable[[type], types.MappingProxyType[str, Any]] = type.__dict__["__dict__"].__get__
class_name: Callable[[type], str] = type.__dict__["__name__"].__get__


def derives(cls: type, base: type) -> bool:
    """Tell whether a class is another one or derives from it; issubclass() would ask a metaclass."""
    return type.__subclasscheck__(base, cls)
