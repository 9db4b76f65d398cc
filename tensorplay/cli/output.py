"""How a command writes a report to its standard output."""

from __future__ import annotations

import os
import sys

from tensorplay.reports import Report

__all__ = ["stdout_text"]


def stdout_text(report: Report, *, addresses: bool = False) -> str:
    """Answer a report's text as standard output can show it: its colours, its characters."""
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    ascii = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    return report.text(color=color, ascii=ascii, addresses=addresses)
