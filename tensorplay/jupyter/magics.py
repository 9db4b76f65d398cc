"""``%tensorplay EXPR`` and ``%%tensorplay``: the report of an expression, or of what a cell made."""

from __future__ import annotations

from types import CodeType

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand
from IPython.display import display

from tensorplay.errors import TensorPlayError
from tensorplay.inspection import check_at
from tensorplay.render.html import fragment
from tensorplay.reports import Report

__all__ = ["CellFailed", "MagicReport", "TensorPlayMagics"]


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
        expression = line.strip()
        if cell is None:
            if not expression:
                raise UsageError("%tensorplay takes an expression: %tensorplay x")
            return _report(self.shell.ev(self._compiled(expression)), expression)
        code = self._compiled(expression) if expression else None
        result = self.shell.run_cell(cell, store_history=False)
        if not result.success:
            raise CellFailed("tensorplay: no report, the cell raised")
        if code is not None:
            display(_report(self.shell.ev(code), expression))
        elif result.result is None:
            raise UsageError("%%tensorplay: the cell's last line has no value; name an expression, %%tensorplay x")
        else:
            display(_report(result.result, "_"))
        return None

    def _compiled(self, expression: str) -> CodeType:
        """Compile an expression so that a traceback shows its source."""
        __tracebackhide__ = True
        file = self.shell.compile.cache(expression, self.shell.execution_count, raw_code=expression)
        try:
            return compile(expression, file, "eval")
        except (SyntaxError, ValueError) as error:  # a null character
            raise UsageError(f"{expression} is no expression: {error.args[0]}") from None


def _report(value: object, name: str) -> MagicReport:
    """Check a value; check_at() takes the references of two calls off, and this is the other one."""
    __tracebackhide__ = True
    try:
        report = check_at(None, value, name=name, grads=False)
    except TensorPlayError as error:  # pyproject.toml is not valid
        raise UsageError(str(error)) from None
    if not report.records:
        kind = type(value).__name__
        raise UsageError(f"there is no tensor in {name}, a {kind}: name a tensor, or a module, list or dict of some")
    return MagicReport.from_document(report.document)
