"""``%tensorplay EXPR`` and ``%%tensorplay``: the report of an expression, or of what a cell made."""

from __future__ import annotations

import ast
from types import CodeType
from typing import NamedTuple

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.display import display

from tensorplay.errors import TensorPlayError
from tensorplay.inspection import check_at
from tensorplay.render.html import fragment
from tensorplay.reports import Report
from tensorplay.views import chains_below

__all__ = ["CellFailed", "MagicReport", "TensorPlayMagics"]


# Every path begins with the name.
_LONGEST_NAME = 48


class _Expression(NamedTuple):
    code: CodeType
    name: str


class CellFailed(Exception):
    """The cell raised; its traceback stands above."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class MagicReport(Report):
    """A report that shows what the magics add."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return fragment(self.document, view_chain=True)


@magics_class
class TensorPlayMagics(Magics):
    """The magics of ``%load_ext tensorplay``."""

    @no_var_expand
    @line_cell_magic
    def tensorplay(self, line: str, cell: str | None = None) -> MagicReport | None:
        """Show what a tensor, or every tensor in an object, really is, and what is wrong with it.

        ``%tensorplay EXPR`` evaluates any expression and answers its report, which shows itself; every rule is asked.

        ``%%tensorplay`` as a cell's first line runs the cell, then shows the report of its last line's value;
        ``%%tensorplay EXPR`` shows that of an expression evaluated after the cell.
        """
        __tracebackhide__ = True
        asked = self._parsed(line.strip())
        if cell is None:
            if asked is None:
                raise UsageError("%tensorplay takes an expression: %tensorplay x")
            return _report(self.shell.ev(asked.code), asked.name)
        result = self.shell.run_cell(cell, store_history=False)
        if not result.success:
            raise CellFailed("tensorplay: no report, the cell raised")
        if asked is not None:
            display(_report(self.shell.ev(asked.code), asked.name))
        elif result.result is None:
            raise UsageError("%%tensorplay: the cell's last line has no value; name an expression, %%tensorplay x")
        else:
            display(_report(result.result, "_"))
        return None

    def _parsed(self, source: str) -> _Expression | None:
        """Compile an expression, so that a traceback shows its source, and name it; None where there is none."""
        if not source:
            return None
        file = self.shell.compile.cache(source, self.shell.execution_count, raw_code=source)
        try:
            tree = ast.parse(source, file, "eval")
            name = ast.unparse(tree)
            return _Expression(compile(tree, file, "eval"), name if len(name) <= _LONGEST_NAME else "x")
        except (SyntaxError, ValueError) as error:  # ValueError: a null character
            raise UsageError(f"{source} is no expression: {error.args[0]}") from None


def _report(value: object, name: str) -> MagicReport:
    """Check a value; check_at() takes the references of two calls off, and this is the other one."""
    __tracebackhide__ = True
    try:
        report = check_at(None, value, name=name, grads=False)
    except TensorPlayError as error:  # pyproject.toml is not valid
        raise UsageError(str(error)) from None
    if not report.records and not report.document.arrays:
        raise UsageError(
            f"no tensor in {name} ({type(value).__name__}): name a tensor, or a module, list or dict of some"
        )
    shown = MagicReport.from_document(report.document)
    shown.replace_document(chains=chains_below(name, value))
    return shown
