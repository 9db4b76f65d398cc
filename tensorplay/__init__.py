"""AddressSanitizer for tensors: what a live PyTorch tensor really is, who shares its memory and what is wrong with it.

Public names are imported when they are first used; the native extension is loaded and checked then too.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "InconsistentTensor": "errors",
    "LeakFound": "errors",
    "LoadError": "errors",
    "LoadRefused": "errors",
    "RepairRefused": "errors",
    "TargetError": "errors",
    "TensorPlayError": "errors",
    "UnknownCode": "errors",
    "Finding": "layers",
    "Report": "reports",
    "TensorRecord": "layers",
    "Verdict": "reports",
    "audit_device_consistency": "devices",
    "check": "inspection",
    "check_graph": "graph",
    "compare": "comparison",
    "guard_backward": "graph",
    "inspect": "inspection",
    "inspect_data_ptr": "inspection",
    "inspect_storage_device": "inspection",
    "inspect_tensor_memory": "inspection",
    "is_safe_view": "writes",
    "leak_check": "leaks",
    "list_shared_storages": "sharing",
    "materialize_audit": "materialize",
    "recommend_fix": "fixes",
    "record_views": "views",
    "reproduce_device_mismatch": "mismatch",
    "safe_load_state_dict": "safeload",
    "saved_for_backward": "graph",
    "show_view_chain": "views",
    "snapshot": "leaks",
    "track": "tracking",
    "validate_state_dict_load": "statedict",
    "verify_data_ptr_consistency": "inspection",
    "who_holds": "holders",
}

_ROOMS = ("dtensor",)
"""Modules whose functions are public under their name: tensorplay.dtensor.verify."""

# Written out, not derived: type checkers read it as text.
__all__ = [
    "InconsistentTensor",
    "LeakFound",
    "LoadError",
    "LoadRefused",
    "RepairRefused",
    "TargetError",
    "TensorPlayError",
    "UnknownCode",
    "Finding",
    "Report",
    "TensorRecord",
    "Verdict",
    "audit_device_consistency",
    "check",
    "check_graph",
    "compare",
    "guard_backward",
    "inspect",
    "inspect_data_ptr",
    "inspect_storage_device",
    "inspect_tensor_memory",
    "is_safe_view",
    "leak_check",
    "list_shared_storages",
    "materialize_audit",
    "recommend_fix",
    "record_views",
    "reproduce_device_mismatch",
    "safe_load_state_dict",
    "saved_for_backward",
    "show_view_chain",
    "snapshot",
    "track",
    "validate_state_dict_load",
    "verify_data_ptr_consistency",
    "who_holds",
    "__version__",
]

if TYPE_CHECKING:
    from tensorplay import dtensor as dtensor
    from tensorplay.comparison import compare
    from tensorplay.devices import audit_device_consistency
    from tensorplay.errors import (
        InconsistentTensor,
        LeakFound,
        LoadError,
        LoadRefused,
        RepairRefused,
        TargetError,
        TensorPlayError,
        UnknownCode,
    )
    from tensorplay.fixes import recommend_fix
    from tensorplay.graph import check_graph, guard_backward, saved_for_backward
    from tensorplay.holders import who_holds
    from tensorplay.inspection import (
        check,
        inspect,
        inspect_data_ptr,
        inspect_storage_device,
        inspect_tensor_memory,
        verify_data_ptr_consistency,
    )
    from tensorplay.layers import Finding, TensorRecord
    from tensorplay.leaks import leak_check, snapshot
    from tensorplay.materialize import materialize_audit
    from tensorplay.mismatch import reproduce_device_mismatch
    from tensorplay.reports import Report, Verdict
    from tensorplay.safeload import safe_load_state_dict
    from tensorplay.sharing import list_shared_storages
    from tensorplay.statedict import validate_state_dict_load
    from tensorplay.tracking import track
    from tensorplay.views import record_views, show_view_chain
    from tensorplay.writes import is_safe_view


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"tensorplay.{name}")  # which makes it an attribute
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tensorplay' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tensorplay.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])


def load_ipython_extension(shell: Any) -> None:
    """Register the magics: what ``%load_ext tensorplay`` calls."""
    from tensorplay.jupyter.magics import TensorPlayMagics

    shell.register_magics(TensorPlayMagics)
