"""is_safe_view() and recommend_fix() against what PyTorch does: each tensor is built anew, and really written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import tensorplay as tp
from tensorplay import fixes, writes
from tensorplay._native import C
from tests.helpers import Same, raises

pytestmark = [pytest.mark.filterwarnings("ignore")]  # masked_fill_ and its kin warn on expanded tensors


# -- how a tensor is made


class FirstRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x[0]

    @staticmethod
    def backward(ctx, grad):
        full = torch.zeros(ctx.shape)
        full[0] = grad
        return full


class Times(torch.autograd.Function):
    """Saves its first argument."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * w

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return None, (grad * x.conj()).sum().real


def leaf(dtype=torch.float32) -> torch.Tensor:
    return (torch.arange(16.0).reshape(4, 4) / 16 + 0.25).to(dtype).requires_grad_()


def plain(dtype=torch.float32) -> torch.Tensor:
    return leaf(dtype).detach()


def inner(dtype=torch.float32) -> torch.Tensor:
    return leaf(dtype) * 1


def quiet(make: Callable, view: Callable, mode=torch.no_grad) -> tuple:
    base = make()
    with mode():
        return view(base), base


def of(make: Callable, view: Callable) -> tuple:
    base = make()
    return view(base), base


def made_in_inference(view: Callable = lambda x: x) -> tuple:
    with torch.inference_mode():
        return (view(torch.ones(4, 4)),)


def row(x):
    return x[1]


BASES = {"plain": plain, "leaf": leaf, "inner": inner}

# Each answers the tensor, and further tensors that live beside it.
MADE: dict[str, Callable[[], tuple]] = {
    "plain": lambda: (plain(),),
    "leaf": lambda: (leaf(),),
    "parameter": lambda: (torch.nn.Parameter(plain()),),
    "inner": lambda: (inner(),),
    "0 dimensions": lambda: (torch.tensor(2.0),),
    "0 dimensions, leaf": lambda: (torch.tensor(2.0, requires_grad=True),),
    "empty": lambda: (torch.empty(0, 4),),
    "empty, leaf": lambda: (torch.empty(0, 4, requires_grad=True),),
    "inference": made_in_inference,
    "view of inference": lambda: made_in_inference(row),
    "view outside of inference": lambda: (row(made_in_inference()[0]),),
    "custom: same": lambda: of(inner, Same.apply),
    "custom: same, leaf": lambda: of(leaf, Same.apply),
    "custom: view inside": lambda: of(inner, FirstRow.apply),
    "custom: view of its result": lambda: of(inner, lambda x: Same.apply(x)[0]),
    "detached": lambda: of(leaf, torch.Tensor.detach),
    "detached inner": lambda: of(inner, torch.Tensor.detach),
    "view of detached": lambda: of(leaf, lambda x: x.detach()[0]),
    "data of leaf": lambda: of(leaf, lambda x: x.data),
    "data of inner": lambda: of(inner, lambda x: x.data),
    "base beside its chunks": lambda: (lambda base: (base, *base.chunk(2)))(inner()),
    "leaf beside its chunks": lambda: (lambda base: (base, *base.chunk(2)))(leaf()),
    "plain beside its chunks": lambda: (lambda base: (base, *base.chunk(2)))(plain()),
    "view beside chunks": lambda: (lambda base: (base[1], base, *base.chunk(2)))(inner()),
    "view beside one row of no_grad": lambda: (lambda base: (base[1], *quiet(lambda: base, row)))(inner()),
    "base of a row of no_grad": lambda: (lambda base: (base, quiet(lambda: base, row)[0]))(inner()),
    "plain base of a row of no_grad": lambda: (lambda base: (base, quiet(lambda: base, row)[0]))(plain()),
    "detached beside chunks": lambda: (lambda base: (base.detach(), base, *base.chunk(2)))(inner()),
    "chunk beside its sibling": lambda: inner().chunk(2),
    "view of a view whose base was written": lambda: (lambda base: (base[0], base.mul_(2)))(inner()),
    "stale chunk": lambda: (lambda parts: (parts[0], torch.autograd.graph.increment_version(parts[0]))[:1])(
        inner().chunk(2)
    ),
    "plain view of what requires grad now": lambda: (lambda base: (base[0], base.requires_grad_()))(plain()),
    "view whose base got a history": lambda: (lambda base: (base[0], base.mul_(leaf())))(plain()),
    "int view": lambda: of(plain, lambda x: x.view(torch.int32)),
}
VIEWS: dict[str, Callable] = {
    "row": row,
    "view of view": lambda x: x.t()[1:, 1],
    "chunk": lambda x: x.chunk(2)[0],
    "chunk's row": lambda x: x.chunk(2)[0][1],
    "split": lambda x: x.split([1, 3], 1)[1],
    "unbind": lambda x: x.unbind(1)[2],
    "iteration": lambda x: next(iter(x)),
    "expanded": lambda x: x[:, :1].expand(4, 3),
    "expanded to itself": lambda x: x[:, :1].expand(4, 1),
    "expanded, empty": lambda x: x[:0, :1].expand(0, 3),
    "windows": lambda x: x.unfold(1, 3, 1),
    "windows side by side": lambda x: x.unfold(1, 2, 2),
    "as_strided overlap": lambda x: x.as_strided((3, 3), (2, 1)),
    "diagonal": lambda x: x.diagonal(),
}
COMPLEX: dict[str, Callable] = {
    "conj": lambda x: x.conj(),
    "neg": lambda x: x.conj().imag,
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "as real": lambda x: torch.view_as_real(x),
}
for (_view, _function), (_base, _make) in itertools.product(VIEWS.items(), BASES.items()):
    MADE[f"{_view} of {_base}"] = lambda make=_make, view=_function: of(make, view)
    if _view in ("row", "chunk", "iteration", "windows"):
        MADE[f"{_view} of {_base} under no_grad"] = lambda make=_make, view=_function: quiet(make, view)
        MADE[f"{_view} of {_base} in inference mode"] = lambda make=_make, view=_function: quiet(
            make, view, torch.inference_mode
        )
for (_view, _function), (_base, _make) in itertools.product(COMPLEX.items(), BASES.items()):
    MADE[f"{_view} of {_base}"] = lambda make=_make, view=_function: of(lambda: make(torch.complex64), view)


# -- who saved it


def weight(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(3.0, requires_grad=True)


def freed(x: torch.Tensor) -> tuple:
    loss = (x * weight(x)).sum().real
    loss.backward()
    return x, loss


def retained(x: torch.Tensor) -> tuple:
    loss = (x * weight(x)).sum().real
    loss.backward(retain_graph=True)
    return x, loss


def hooked(x: torch.Tensor) -> tuple:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return x, x * weight(x)


def moved(x: torch.Tensor) -> tuple:
    y = x * weight(x)
    torch.autograd.graph.increment_version(x)
    return x, y


def moved_before(x: torch.Tensor) -> tuple:
    torch.autograd.graph.increment_version(x)
    return x, x * weight(x)


def result(function: Callable) -> Callable:
    def apply(x: torch.Tensor) -> tuple:
        y = function(x)
        return y, y

    return apply


# Each answers the tensor to write, which may be its own result, and what backward begins with.
SAVED: dict[str, Callable[[torch.Tensor], tuple]] = {
    "nobody": lambda x: (x, None),
    "mul": lambda x: (x, x * weight(x)),
    "both factors": lambda x: (x, x * x),
    "exp's result": result(torch.exp),
    "relu's result": result(torch.relu),
    "matmul": lambda x: (x, x.reshape(1, -1) @ torch.ones(x.numel(), 2, dtype=x.dtype).requires_grad_()),
    "custom": lambda x: (x, Times.apply(x, weight(x))),
    "linear": lambda x: (x, F.linear(x.reshape(1, -1), torch.ones(2, x.numel(), dtype=x.dtype).requires_grad_())),
    "hooks": hooked,
    "freed": freed,
    "retained": retained,
    "moved since": moved,
    "moved before": moved_before,
    "a view": lambda x: (x, x.view_as(x) * weight(x)),
    "a detached alias": lambda x: (x, x.detach() * weight(x)),
    "data": lambda x: (x, x.data * weight(x)),
}
SILENT = {"hooks"}  # no version is checked, and nobody can look at what a hook keeps
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
WRITES = {"mul_": torch.mul, "add_": torch.add}


class Built(NamedTuple):
    x: torch.Tensor
    beside: tuple
    loss: torch.Tensor | None
    value: torch.Tensor


class Impossible(Exception):
    """PyTorch does not make this combination."""


def build(made: str, saved: str, value_requires_grad: bool) -> Built:
    x, *beside = MADE[made]()
    try:
        x, root = SAVED[saved](x)
        loss = None if root is None else root.sum().real
        # Of the bits of a float, read as an integer, two more or less are lost in a sum of float32.
        value = torch.full(
            x.shape, 4096 if x.dtype == torch.int32 else 2, dtype=x.dtype, requires_grad=value_requires_grad
        )
    except RuntimeError as error:
        raise Impossible from error
    if loss is not None and not loss.requires_grad:
        loss = None
    return Built(x, tuple(b for b in beside if b is not None), loss, value)


# -- what really happens


class Consequences(NamedTuple):
    """Which of the backward that was prepared, and of using what is alive, raises; and what that backward gives."""

    raised: list[bool]
    gradients: list[torch.Tensor | None]


def consequences(built: Built) -> Consequences:
    found = [built.loss is not None and raises(lambda: built.loss.backward(retain_graph=True))]
    gradients = gradients_of(built)
    for x in (built.x, *built.beside):
        try:
            y = (x * 1.0).sum().real
        except RuntimeError:
            found += [True, True]
        else:
            found += [False, y.requires_grad and raises(lambda y=y: y.backward(retain_graph=True))]
    return Consequences(found, gradients)


def gradients_of(built: Built) -> list[torch.Tensor | None]:
    graph, found = [] if built.loss is None else [built.loss.grad_fn], []
    while graph:
        node = graph.pop()
        if hasattr(node, "variable"):
            found.append(None if node.variable.grad is None else node.variable.grad.clone())
        graph += [function for function, _ in node.next_functions if function is not None]
    return found


class Happened(NamedTuple):
    raised: bool = False
    wrong: bool = False
    broken: bool = False
    """The backward that was prepared raises."""
    unusable: bool = False
    """The next use of a view raises."""


def write(built: Built, mode: str, op: str, untouched: Consequences) -> tuple[Happened, bool]:
    """Write; answer what became visible, and whether the gradient silently became another."""
    expected = WRITES[op](built.x.detach().clone(memory_format=torch.contiguous_format), built.value.detach())
    with MODES[mode]():
        try:
            getattr(built.x, op)(built.value)
        except RuntimeError:
            return Happened(raised=True), False
    wrong = not torch.equal(built.x.detach().resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg())
    after = consequences(built)
    new = [now and not before for now, before in zip(after.raised, untouched.raised, strict=True)]
    happened = Happened(wrong=wrong, broken=new[0], unusable=any(new[1:]))
    return happened, not new[0] and not is_same(after.gradients, untouched.gradients)


def is_same(some: list[torch.Tensor | None], others: list[torch.Tensor | None]) -> bool:
    pairs = zip(some, others, strict=True)
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def tensors_of(built: Built) -> list[torch.Tensor]:
    return [x for x in (built.x, *built.beside, built.loss, built.value) if x is not None]


def ask(built: Built, mode: str, value_requires_grad: bool) -> writes.SafeView:
    with MODES[mode]():
        return tp.is_safe_view(built.x, value_requires_grad=value_requires_grad)


@pytest.mark.parametrize("part", range(4))
def test_verdict_is_what_the_write_and_the_backward_after_it_do(part, show, monkeypatch):
    scan = C.live_graph
    monkeypatch.setattr(writes, "RULES", ())  # reading the memory map takes half of the time
    combinations = impossible = unsafe = silent = 0
    mismatches = []
    for number, (made, saved) in enumerate(itertools.product(list(MADE)[part::4], SAVED)):
        for value_requires_grad in (False, True):
            try:
                untouched = consequences(build(made, saved, value_requires_grad))
            except Impossible:
                impossible += len(MODES)
                continue
            for mode in MODES:
                if value_requires_grad and mode != "grad" and saved != "nobody":
                    continue  # nothing is recorded: the value's gradient is all that could differ, and is asked once
                built = build(made, saved, value_requires_grad)
                # The scan of a whole test process takes most of the time: every 97th asks it.
                live = tensors_of(built)
                monkeypatch.setattr(
                    C, "live_graph", scan if number % 97 == 0 else lambda live=live: (list(live), [], [])
                )
                verdict = ask(built, mode, value_requires_grad)
                for op in list(WRITES) if saved == "nobody" else list(WRITES)[number % 2 :][:1]:
                    happened, other_gradient = write(build(made, saved, value_requires_grad), mode, op, untouched)
                    foretold = {hazard.raises for hazard in verdict.hazards}
                    now = happened.raised or happened.wrong or happened.broken
                    now = now or (other_gradient and saved not in SILENT)
                    later = bool(verdict.later) if verdict else happened.unusable
                    if (
                        bool(verdict) == now
                        or happened.raised != bool({True, None} & foretold)
                        or later != happened.unusable
                    ):
                        mismatches.append((made, saved, mode, value_requires_grad, op, happened, str(verdict)))
                    if verdict and other_gradient:
                        assert saved in SILENT, (made, saved, mode, value_requires_grad, op)
                        silent += 1
                combinations += 1
                unsafe += not verdict
    monkeypatch.setattr(C, "live_graph", scan)

    show(
        f"is_safe_view part {part + 1} of 4: {combinations} combinations as PyTorch does, {unsafe} of them unsafe; "
        f"{silent} silent gradients behind hooks; {impossible} more cannot be made"
    )
    assert mismatches == []
    assert combinations > 1_000
    assert unsafe > 200


# -- what to do instead


def ask_for_fixes(built: Built, mode: str, value_requires_grad: bool) -> fixes.Fixes:
    """Ask where the tensors have names, as they do for names_of()."""
    x = built.x
    other0, other1, other2 = (*built.beside, None, None, None)[:3]
    with MODES[mode]():
        found = tp.recommend_fix(x, write="x.mul_(value)", value_requires_grad=value_requires_grad)
    del other0, other1, other2
    return found


def names_of(built: Built) -> dict[str, Any]:
    others = {f"other{number}": other for number, other in enumerate(built.beside)}
    return {"torch": torch, "x": built.x, "value": built.value, **others}


def sensitive(x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a loss that depends on the values, and on how they came about."""
    loss = (x * x * 1.0).sum().real
    if not loss.requires_grad:
        return []
    loss.backward(retain_graph=True)
    found = gradients_of(Built(x, (), loss, x))
    return sorted((grad for grad in found if grad is not None), key=lambda grad: str((grad.shape, grad)))


def reference(made: str, saved: str, mode: str, value_requires_grad: bool, recorded: bool) -> list[torch.Tensor]:
    built = build(made, saved, value_requires_grad)
    if built.loss is not None:
        built.loss.grad_fn  # noqa: B018  kept alive, as beside the fix
    if not recorded:
        built.x.data.mul_(built.value.detach())
        return sensitive(built.x)
    with MODES[mode]():
        y = built.x.clone().mul(built.value)  # a clone: autograd saves no inference tensor
    return sensitive(y)


def address(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def near(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.allclose, some, others))


def execute(fix: fixes.Fix, made: str, saved: str, mode: str, value_requires_grad: bool) -> None:
    untouched = consequences(build(made, saved, value_requires_grad))
    built = build(made, saved, value_requires_grad)
    before = built.x.detach().clone(memory_format=torch.contiguous_format)
    kept = built.x.untyped_storage()
    expected = before * built.value.detach()
    names = names_of(built)
    loss = built.loss
    if fix.code.startswith("# after .backward()"):
        loss.backward()
        loss = None
    with MODES[mode]():
        exec(fix.code, names)

    x = names["x"]
    assert torch.equal(x.detach().resolve_conj().resolve_neg(), expected.resolve_conj().resolve_neg())
    if fix.safety == "copies":
        assert fix.cost_nbytes == x.untyped_storage().nbytes()
        assert address(x) != kept._cdata
        assert torch.equal(built.x.detach(), before)
    elif fix.cost_nbytes == 0:
        assert address(x) == kept._cdata
    else:
        assert fix.cost_nbytes == x.untyped_storage().nbytes()
    beside = tuple(names[f"other{number}"] for number in range(len(built.beside)))
    if loss is not None:
        after = consequences(Built(x, beside, loss, built.value))
        assert not any(now and not was for now, was in zip(after.raised, untouched.raised, strict=True))
        assert is_same(after.gradients, untouched.gradients)

    # Once more, for the gradient of what comes after.
    built = build(made, saved, value_requires_grad)
    names = names_of(built)
    if fix.code.startswith("# after .backward()"):
        return  # the graph behind the tensor is gone with that backward
    with MODES[mode]():
        exec(fix.code, names)
    now = sensitive(names["x"])
    if fix.safety == "copies":
        assert near(now, reference(made, saved, mode, value_requires_grad, recorded=True))
        return
    if "detach()" in fix.code:
        assert now == [] or value_requires_grad
        return
    if "flow back to it" in fix.note:
        before = len(reference(made, saved, mode, value_requires_grad, recorded=True))
        x = build(made, saved, value_requires_grad).x
        if mode == "grad" and x.requires_grad and x.grad_fn is None:  # else it is a view beside it
            assert len(now) > before - value_requires_grad
        return
    recorded = mode == "grad" and not any(text in fix.code for text in ("no_grad", "inference_mode", ".data"))
    assert near(now, reference(made, saved, mode, value_requires_grad, recorded))
    if fix.safety == "changes gradient" and expected.numel() > 0:
        assert not near(now, reference(made, saved, mode, value_requires_grad, recorded=True))


@pytest.mark.parametrize("part", range(2))
def test_every_fix_does_what_it_claims(part, show, monkeypatch):
    monkeypatch.setattr(fixes, "RULES", ())
    monkeypatch.setattr(writes, "RULES", ())
    tried: dict[str, int] = {}
    failed = []
    for made, saved in itertools.product(list(MADE)[part::2], ["nobody", "mul", "exp's result"]):
        for mode, value_requires_grad in [("grad", False), ("grad", True), ("no_grad", False), ("inference", False)]:
            try:
                built = build(made, saved, value_requires_grad)
            except Impossible:
                continue
            live = tensors_of(built)
            monkeypatch.setattr(C, "live_graph", lambda live=live: (list(live), [], []))
            found = ask_for_fixes(built, mode, value_requires_grad)
            assert bool(found) != bool(ask(built, mode, value_requires_grad))
            for fix in found:
                tried[fix.safety] = tried.get(fix.safety, 0) + 1
                try:
                    execute(fix, made, saved, mode, value_requires_grad)
                except (AssertionError, RuntimeError) as error:
                    failed.append((made, saved, mode, value_requires_grad, fix.code, fix.safety, str(error)[:200]))

    show(f"recommend_fix part {part + 1} of 2: executed {tried}")
    assert failed == []
    assert min(tried.values()) > 20


# -- what the words say of operators on a tensor of which several indices reach one element

OPERATORS: dict[str, Callable] = {
    "mul_": lambda x: x.mul_(2),
    "add_": lambda x: x.add_(1),
    "exp_": lambda x: x.exp_(),
    "neg_": lambda x: x.neg_(),
    "copy_": lambda x: x.copy_(torch.arange(float(x.numel())).reshape(x.shape)),
    "normal_": lambda x: x.normal_(),
    "clamp_": lambda x: x.clamp_(0, 1),
    "relu_": lambda x: x.relu_(),
    "cumsum_": lambda x: x.cumsum_(0),
    "lerp_": lambda x: x.lerp_(torch.ones(x.shape), 0.5),
    "fill_": lambda x: x.fill_(3),
    "zero_": lambda x: x.zero_(),
    "masked_fill_": lambda x: x.masked_fill_(x > 2, 5.0),
    "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0]), 7.0),
    "tril_": lambda x: x.tril_(),
    "triu_": lambda x: x.triu_(),
    "fill_diagonal_": lambda x: x.fill_diagonal_(5.0),
}


def outcome(make: Callable, op: Callable) -> str:
    x = make()
    expected = x.clone()
    torch.manual_seed(0)
    op(expected)
    torch.manual_seed(0)
    if raises(lambda: op(x)):
        return "raises"
    return "right" if torch.equal(x, expected) else "wrong"


def test_words_on_expanded_tensors_and_on_windows_are_what_operators_do(show):
    def expanded() -> torch.Tensor:
        return torch.arange(1.0, 4).view(3, 1).expand(3, 4)

    def windows() -> torch.Tensor:
        return torch.arange(1.0, 9).unfold(0, 4, 2)

    stretched = {name: outcome(expanded, op) for name, op in OPERATORS.items()}
    overlapping = {name: outcome(windows, op) for name, op in OPERATORS.items()}

    show(f"in-place operators: expanded {stretched}; windows {overlapping}")
    assert [name for name, what in stretched.items() if what == "right"] == [
        "fill_", "zero_", "masked_fill_", "index_fill_",
    ]  # fmt: skip
    assert [name for name, what in stretched.items() if what == "wrong"] == ["tril_", "triu_", "fill_diagonal_"]
    assert list(stretched.values()).count("raises") > len(OPERATORS) / 2
    assert "raises" not in overlapping.values()
    assert {overlapping[name] for name in ("mul_", "add_", "copy_", "normal_")} == {"wrong"}
    assert {overlapping[name] for name in ("fill_", "zero_", "clamp_", "relu_")} == {"right"}
    (reason,) = tp.is_safe_view(expanded()).reasons
    assert "most in-place operators raise" in reason
    (reason,) = tp.is_safe_view(windows()).reasons
    assert "PyTorch raises nothing" in reason


# -- from the exception


def two_halves() -> tuple:
    qkv = inner()
    return (*qkv.chunk(2), qkv)


class Holder:
    def __init__(self, w: torch.Tensor) -> None:
        self.w = w


# What raises, what the code writes to, and whether the write is still recorded.
FAILING: dict[str, tuple[str, Callable[[], dict]]] = {
    "leaf": ("x.mul_(2)", lambda: {"x": leaf()}),
    "view of a leaf": ("x[0].mul_(2)", lambda: {"x": leaf()}),
    "view of a view of a leaf": ("x[1:].t().mul_(2)", lambda: {"x": leaf()}),
    "augmented": ("x *= 2", lambda: {"x": leaf()}),
    "item": ("x[0] = 2", lambda: {"x": leaf()}),
    "attribute": ("h.w.mul_(2)", lambda: {"h": Holder(leaf())}),
    "key": ("objs['x'].mul_(2)", lambda: {"objs": {"x": leaf()}}),
    "list": ("params[0].mul_(2)", lambda: {"params": [leaf()]}),
    "chunk": ("x.mul_(2)", lambda: {"x": of(inner, lambda t: t.chunk(2)[0])[0]}),
    "custom": ("x.mul_(2)", lambda: {"x": of(inner, Same.apply)[0]}),
    "no_grad view": ("x.mul_(2)", lambda: {"x": quiet(inner, row)[0]}),
    "inference view": ("x.mul_(2)", lambda: {"x": quiet(inner, row, torch.inference_mode)[0]}),
    "inference": ("x.mul_(2)", lambda: {"x": made_in_inference()[0]}),
    "expanded": ("x.mul_(2)", lambda: {"x": plain()[:, :1].expand(4, 3)}),
    "overlap": ("x[1:].add_(x[:-1])", lambda: {"x": torch.arange(5.0)}),
    "zero tensor": ("x.mul_(2)", lambda: {"x": torch._efficientzerotensor(3)}),
}


@pytest.mark.parametrize("name", FAILING)
def test_fixes_of_an_exception_run_where_it_was_raised(name):
    write, make = FAILING[name]
    # Variables that the line of the write can name.
    names = make()
    x, h, objs, params = (names.get(key) for key in ("x", "h", "objs", "params"))
    try:
        exec(write, {"torch": torch}, names)
    except RuntimeError as error:
        found = tp.recommend_fix(error, write=write)
    else:
        pytest.fail("the write went through")
    del x, h, objs, params

    assert len(found) > 0
    for fix in found:
        names = make()
        exec(fix.code, {"torch": torch}, names)
        if name not in ("zero tensor", "overlap", "item"):
            assert not torch.equal(tensor_in(names).detach(), tensor_in(make()).detach())


def tensor_in(names: dict) -> torch.Tensor:
    """What a write goes to: the variable itself, or what it holds."""
    value = next(iter(names.values()))
    if isinstance(value, Holder):
        return value.w
    return value["x"] if isinstance(value, dict) else value[0] if isinstance(value, list) else value


def test_fix_of_a_value_that_overlaps_copies_it():
    x = torch.arange(5.0)
    try:
        x[1:].add_(x[:-1])
    except RuntimeError as error:
        (fix,) = tp.recommend_fix(error)

    exec(fix.code)

    assert x.tolist() == [0, 1, 3, 5, 7]


def test_fix_of_a_use_after_the_write_takes_the_values():
    x = inner()
    half, other = x.chunk(2)
    with torch.no_grad():
        half.mul_(2)
    try:
        other.sum()
    except RuntimeError as error:
        (fix,) = tp.recommend_fix(error, write="other.sum()")

    assert fix.safety == "changes gradient"
    assert fix.code.endswith(".detach()")


# -- what keeps too much alive


def pinned(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: make(torch.zeros(100_000))


@pytest.mark.parametrize(
    ("make", "code", "safety"),
    [
        (pinned(lambda x: x[:10]), "x = x.clone()", "copies"),
        (pinned(lambda x: x.view(100, 1000)[:, 0]), "x = x.clone()", "copies"),
        (pinned(lambda x: (x.requires_grad_() * 1)[:10]), "x = x.clone()", "copies"),
        (pinned(lambda x: quiet(x.requires_grad_, lambda t: t[:10])[0]), "x = x.detach().clone()", "changes gradient"),
        (pinned(lambda x: torch.nn.Parameter(x[:10])), "x.data = x.data.clone()", "copies"),
    ],
    ids=["row", "column", "inner", "no_grad", "parameter"],
)
def test_fix_of_a_pinned_storage_frees_it(make, code, safety):
    from torch.multiprocessing.reductions import StorageWeakRef

    x = make()
    values, needed_grad = x.detach().clone(), x.requires_grad
    fix = tp.recommend_fix(x)[-1]
    storage = StorageWeakRef(x.untyped_storage())

    assert (fix.code, fix.safety) == (code, safety)
    assert fix.cost_nbytes == x.nbytes
    assert fix.title.startswith("keep a copy of what is used: frees 39")
    assert "contiguous" not in fix.code + fix.title + fix.note
    names = {"x": x}
    del x
    exec(fix.code, names)
    x = names.pop("x")
    assert storage.expired()
    assert x.untyped_storage().nbytes() == fix.cost_nbytes
    assert torch.equal(x.detach(), values)
    assert x.requires_grad == (needed_grad and safety == "copies")


# -- names


def test_code_has_the_names_of_the_call():
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(plain())
            self.buffer_like = plain()[:, :1].expand(4, 3)

    module, holder, objs, rows = Module(), Holder(plain()[:1].expand(4, 4)), {"x": plain()[:1].expand(4, 4)}, [leaf()]
    table = leaf()
    asked = [
        (lambda: tp.recommend_fix(module.w), "copied = module.w.clone()\ncopied.mul_(2)"),
        (lambda: tp.recommend_fix(module.buffer_like), "module.buffer_like = module.buffer_like.clone()"),
        (lambda: tp.recommend_fix(holder.w), "holder.w = holder.w.clone()\nholder.w.mul_(2)"),
        (lambda: tp.recommend_fix(objs["x"]), "objs['x'] = objs['x'].clone()\nobjs['x'].mul_(2)"),
        (lambda: tp.recommend_fix(rows[0]), "rows[0] = rows[0].clone()\nrows[0].mul_(2)"),
        (lambda: tp.recommend_fix(table[0]), "copied = table[0].clone()\ncopied.mul_(2)"),
        (lambda: tp.recommend_fix(table[0], write="table[0].add_(1)"), "copied = table[0].clone()\ncopied.add_(1)"),
        (lambda: tp.recommend_fix(leaf()), "copied = leaf().clone()\ncopied.mul_(2)"),
        (lambda: tp.recommend_fix(table, write="table += 1"), "table = table + 1"),
    ]
    for ask_it, code in asked:
        codes = [fix.code for fix in ask_it()]
        assert any(found.startswith(code) for found in codes), (code, codes)
        for found in codes:
            names = {"holder": Holder(holder.w), "objs": dict(objs), "rows": [leaf()], "table": leaf()}
            exec(found, {**globals()}, {"module": Module(), **names})


def test_halves_are_sliced_again_from_the_base_that_has_a_name():
    qkv = inner()
    q, k = qkv.chunk(2, 1)

    best = tp.recommend_fix(q)[0]

    assert best.code == "q = qkv[:, :2]\nk = qkv[:, 2:4]\nq.mul_(2)"
    assert (best.safety, best.cost_nbytes) == ("safe", 0)
    del k


# -- graphs that no tensor holds: each answers what keeps the graph, and how to run its backward


def backward_of(node) -> Callable:
    return lambda: torch.autograd.backward(torch.autograd.graph.GradientEdge(node, 0), torch.ones(4, 4))


def by_node(x):
    node = (x * x).grad_fn
    return backward_of(node)


def by_python_node(x):
    node = Times.apply(x, torch.tensor(2.0, requires_grad=True)).grad_fn
    return backward_of(node)


def by_next_function(x):
    node = (x * x).sum().grad_fn.next_functions[0][0]
    return backward_of(node)


def by_edge(x):
    edge = torch.autograd.graph.get_gradient_edge(x.exp() * x)
    return lambda: torch.autograd.backward(edge, torch.ones(4, 4))


def by_frame(x):
    def suspended():
        node = (x * x).grad_fn
        yield
        backward_of(node)()

    generator = suspended()
    next(generator)
    return lambda: next(generator, None)


def by_checkpoint(x):
    y = checkpoint(lambda t: (t * 2).sin(), x, use_reentrant=False)
    return lambda: y.sum().backward()


def by_checkpoint_node(x):
    node = checkpoint(lambda t: (t * 2).sin(), x, use_reentrant=False).grad_fn
    return backward_of(node)


KEPT_BY = [by_node, by_python_node, by_next_function, by_edge, by_frame, by_checkpoint, by_checkpoint_node]


@pytest.mark.parametrize("keep", KEPT_BY)
def test_graph_that_no_tensor_holds_is_seen(keep):
    x = inner()
    backward = keep(x)

    verdict = tp.is_safe_view(x)
    x.mul_(2)

    assert [hazard.kind for hazard in verdict.hazards] == ["saved"]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward()


@pytest.mark.parametrize("keep", KEPT_BY)
def test_graph_that_ran_or_went_is_seen_no_more(keep):
    x = inner()
    backward = keep(x)
    assert not tp.is_safe_view(x)
    backward()
    assert tp.is_safe_view(x)
    x = inner()
    backward = keep(x)
    del backward
    assert tp.is_safe_view(x)
    x.mul_(2)
    x.sum().backward()


def test_graph_that_did_not_save_the_tensor_is_no_hazard():
    x = inner()
    node, edge = (x + x).grad_fn, torch.autograd.graph.get_gradient_edge(x.exp())

    assert tp.is_safe_view(x)
    x.mul_(2)
    backward_of(node)()
    del edge
