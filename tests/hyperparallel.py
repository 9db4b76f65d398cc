"""A stand-in for HyperParallel's DTensor, which is on no package index: the same mechanism, on one rank or several.

The body of a DTensor is an ordinary dense tensor over the storage of the local tensor that its ``__dict__`` holds;
whatever Python asks is answered from that local tensor. Nothing moves the body when the local tensor is exchanged.

    model = fully_shard(on_meta(Net), Mesh())
    materialize(model, "cpu")  # locals on the CPU, bodies still on meta

Otherwise than the library's own:
- operators are known by name or refused; there is no inference of layouts and no switch that turns it off
- ``to_empty`` exchanges the local tensors, where the library's raises
- in-place operators write to the local tensor, where some of the library's exchange it
- every forward gathers into new memory, so that parts are given back after forward without a second gather
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

Made = TypeVar("Made", bound=nn.Module)


@dataclass(frozen=True)
class Shard:
    """Each rank of a mesh dimension has an equal part of this dimension of the tensor."""

    dim: int = 0


@dataclass(frozen=True)
class Replicate:
    """Each rank of a mesh dimension has the same."""


Placement = Shard | Replicate


@dataclass(frozen=True)
class Mesh:
    """Ranks in a grid, and where this one stands; one rank needs no process group."""

    shape: tuple[int, ...] = (1,)
    coordinates: tuple[int, ...] = (0,)
    group: Any = None

    @classmethod
    def of_world(cls) -> Mesh:
        """All ranks of the default process group, in a row."""
        return cls((dist.get_world_size(),), (dist.get_rank(),), dist.group.WORLD)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh: one placement for each mesh dimension."""

    mesh: Mesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if len(self.placements) != self.mesh.ndim:
            raise ValueError(f"{len(self.placements)} placements for a mesh of {self.mesh.ndim} dimensions")

    def cuts(self) -> Iterator[tuple[int, int, int]]:
        """Each dimension that is cut, into how many parts, and which is this rank's."""
        for placement, ranks, rank in zip(self.placements, self.mesh.shape, self.mesh.coordinates, strict=True):
            if isinstance(placement, Shard):
                yield placement.dim, ranks, rank

    def whole(self, shape: torch.Size) -> torch.Size:
        """Shape of the whole tensor, by that of a part."""
        sizes = list(shape)
        for dim, ranks, _ in self.cuts():
            sizes[dim] *= ranks
        return torch.Size(sizes)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy this rank's part of a whole tensor."""
        for dim, ranks, rank in self.cuts():
            if tensor.size(dim) % ranks:
                raise NotImplementedError(f"{ranks} ranks cannot share {tuple(tensor.shape)} evenly along {dim}")
            tensor = tensor.narrow(dim, tensor.size(dim) // ranks * rank, tensor.size(dim) // ranks)
        return tensor.detach().clone(memory_format=torch.contiguous_format)


POINTWISE = frozenset({"abs", "add", "addcdiv", "addcmul", "clone", "div", "lerp", "mul", "neg", "sqrt", "sub"})
"""Answer a DTensor laid out as the first one given."""

IN_PLACE = frozenset(
    {*(f"{name}_" for name in POINTWISE - {"clone"}), "clamp_", "copy_", "fill_", "normal_", "uniform_", "zero_"}
)
"""Answer what they wrote to."""

FOREACH = frozenset(
    {
        *(f"_foreach_{name}{end}" for name in POINTWISE - {"clone"} for end in ("", "_")),
        *("_foreach_copy_", "_foreach_maximum_", "_foreach_norm", "_foreach_reciprocal_", "_foreach_zero_"),
        *(
            "_fused_adagrad_",
            "_fused_adam_",
            "_fused_adamw_",
            "_fused_sgd_",
            "_amp_foreach_non_finite_check_and_unscale_",
        ),
    }
)

ASKED = frozenset(
    {
        *("__get__", "__set__", "dim", "element_size", "get_device", "is_complex", "is_contiguous"),
        *("is_floating_point", "item", "register_hook", "storage_offset", "stride", "untyped_storage"),
        *("empty_like", "full_like", "ones_like", "zeros_like", "_has_compatible_shallow_copy_type"),
    }
)
"""Answer as the local tensors do, attributes among them; the answer is no DTensor."""

KNOWN = POINTWISE | IN_PLACE | FOREACH | ASKED


def to_local(value: Any) -> Any:
    """Answer local tensors for DTensors, in containers too."""
    if isinstance(value, DTensor):
        return value._local_tensor
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_local, value))
    if isinstance(value, dict):
        return {key: to_local(each) for key, each in value.items()}
    return value


class DTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor of which this rank has a part."""

    _local_tensor: torch.Tensor
    _device_mesh: Mesh
    _placements: tuple[Placement, ...]
    _layout: Layout

    @staticmethod
    def __new__(cls: type[DTensor], local: torch.Tensor, mesh: Mesh, placements: tuple[Placement, ...]) -> DTensor:
        made: DTensor = torch.Tensor._make_subclass(cls, local, local.requires_grad)
        made.__dict__.update(
            _local_tensor=local, _device_mesh=mesh, _placements=placements, _layout=Layout(mesh, placements)
        )
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.__name__
        if name not in KNOWN:
            raise TypeError(f"this DTensor does not know {name}; it would run on the part, to_local()")
        answer = func(*to_local(args), **to_local(kwargs or {}))
        if name in IN_PLACE:
            return args[0]
        if name in POINTWISE:
            first = next(each for each in args if isinstance(each, DTensor))
            return first.with_local(answer)
        return answer

    def with_local(self, local: torch.Tensor) -> DTensor:
        return type(self)(local, self._device_mesh, self._placements)

    def to_local(self) -> torch.Tensor:
        return self._local_tensor

    def __repr__(self, **kwargs: Any) -> str:
        return f"DTensor({self._local_tensor!r}, {self._placements})"

    @property
    def device(self) -> torch.device:
        return self._local_tensor.device

    @property
    def dtype(self) -> torch.dtype:
        return self._local_tensor.dtype

    @property
    def is_meta(self) -> bool:
        return bool(self._local_tensor.is_meta)

    @property
    def shape(self) -> torch.Size:
        return self._layout.whole(self._local_tensor.shape)

    @property
    def ndim(self) -> int:
        return len(self._local_tensor.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def data_ptr(self) -> int:
        return int(self._local_tensor.data_ptr())

    @property
    def data(self) -> torch.Tensor:
        return self._local_tensor.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._local_tensor.data = to_local(value)

    @property
    def grad(self) -> torch.Tensor | None:
        return self._local_tensor.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._local_tensor.grad = value

    @property
    def grad_fn(self) -> Any:
        return self._local_tensor.grad_fn

    @property
    def is_leaf(self) -> bool:
        return bool(self._local_tensor.is_leaf)

    @property
    def requires_grad(self) -> bool:
        return bool(self._local_tensor.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._local_tensor.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        self._local_tensor.requires_grad_(requires_grad)
        return self

    def detach(self) -> DTensor:
        return self.with_local(self._local_tensor.detach())

    def to(self, *args: Any, **kwargs: Any) -> DTensor:
        return self.with_local(self._local_tensor.to(*args, **kwargs))


class ShardedState(enum.Enum):
    """What the module has at present."""

    SHARDED = enum.auto()
    UNSHARDED = enum.auto()


@dataclass
class ModuleInfo:
    """Where a parameter is: one module and name, and the others that share it."""

    module: nn.Module
    param_name: str
    shared_modules: list[nn.Module] = field(default_factory=list)
    shared_param_names: list[str] = field(default_factory=list)

    def places(self) -> Iterator[tuple[nn.Module, str]]:
        yield self.module, self.param_name
        yield from zip(self.shared_modules, self.shared_param_names, strict=True)

    def put(self, param: nn.Parameter) -> None:
        for module, name in self.places():
            module._parameters[name] = param


class ShardedParam:
    """One parameter's part, the flat view of it that goes between ranks, and the whole while it is used."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def __init__(self, param: nn.Parameter, module_info: ModuleInfo, layout: Layout) -> None:
        local = layout.part(param)
        self._module_info = module_info
        self._layout = layout
        self._param_fqn: str | None = None
        self._sharded_param_data: torch.Tensor = local.view(-1)
        self.sharded_size: torch.Size = local.shape
        self.sharded_param = nn.Parameter(DTensor(local, layout.mesh, layout.placements), param.requires_grad)
        self.sharded_state = ShardedState.SHARDED
        module_info.put(self.sharded_param)
        self._after_load = module_info.module.register_load_state_dict_post_hook(
            lambda module, keys: self.reset_sharded_param()
        )

    def reset_sharded_param(self) -> None:
        """Take what the module holds now for the part; the body of the DTensor stays as it is."""
        self.sharded_param = getattr(self._module_info.module, self._module_info.param_name)
        local = self.sharded_param._local_tensor
        if local.is_meta:
            return
        pointer = self._sharded_param_data.untyped_storage().data_ptr()
        if pointer and pointer == local.untyped_storage().data_ptr():
            return
        if local.shape != self.sharded_size:
            raise ValueError(f"expected a part of {tuple(self.sharded_size)}, not {tuple(local.shape)}")
        self._sharded_param_data = local.view(-1)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def unshard(self) -> None:
        """Put the whole on the module, a parameter that hands its gradient on."""
        mine = self._sharded_param_data.view(self.sharded_size)
        if self._layout.mesh.size == 1:
            whole = mine.clone()
        else:
            parts = [torch.empty_like(mine) for _ in range(self._layout.mesh.size)]
            dist.all_gather(parts, mine, group=self._layout.mesh.group)
            whole = torch.cat(parts, self._dim)
        param = nn.Parameter(whole, self.sharded_param.requires_grad)
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(self.reduce)
        self._module_info.put(param)
        self.sharded_state = ShardedState.UNSHARDED

    def reshard(self) -> None:
        self._module_info.put(self.sharded_param)
        self.sharded_state = ShardedState.SHARDED

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def reduce(self, param: nn.Parameter) -> None:
        """Add the mean gradient's part to the part's gradient."""
        grad, param.grad = param.grad, None
        ranks = self._layout.mesh.size
        if ranks > 1:
            parts = [each.contiguous() for each in grad.chunk(ranks, self._dim)]
            grad = torch.empty_like(parts[0])
            dist.reduce_scatter(grad, parts, group=self._layout.mesh.group)
            grad /= ranks
        if self.sharded_param.grad is None:
            self.sharded_param.grad = DTensor(grad, self._layout.mesh, self._layout.placements)
        else:
            self.sharded_param.grad.add_(grad)

    @property
    def _dim(self) -> int:
        return next(dim for dim, _, _ in self._layout.cuts())


class ShardingState:
    """The parameters that one call of fully_shard() took, and the hooks that gather and give back."""

    def __init__(self, model: nn.Module, mesh: Mesh, dim: int) -> None:
        self.model = model
        found: dict[nn.Parameter, ModuleInfo] = {}
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is None or isinstance(param, DTensor):
                    continue
                if param in found:
                    found[param].shared_modules.append(module)
                    found[param].shared_param_names.append(name)
                else:
                    found[param] = ModuleInfo(module, name)
        layout = Layout(mesh, (Shard(dim),))
        self.params = [ShardedParam(param, info, layout) for param, info in found.items()]
        self.ready = False
        model.register_forward_pre_hook(self._before_forward)
        model.register_forward_hook(self._after_forward)

    def lazy_init(self) -> None:
        """Name the parameters."""
        names = {id(param): name for name, param in self.model.named_parameters()}
        for param in self.params:
            param._param_fqn = names[id(param.sharded_param)]
        self.ready = True

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not self.ready:
            self.lazy_init()
        for param in self.params:
            param.unshard()

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for param in self.params:
            param.reshard()


class Sharded(nn.Module):  # type: ignore[misc]
    """What fully_shard() puts before the class of a model."""

    sharding: ShardingState

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy values into the parts; a part on meta is exchanged for the value, whatever assign says."""
        own = self.state_dict(keep_vars=True)
        missing = [key for key in own if key not in state_dict]
        unexpected = [key for key in state_dict if key not in own]
        if strict and (missing or unexpected):
            raise RuntimeError(f"missing keys: {missing}, unexpected keys: {unexpected}")
        for key in [key for key in own if key in state_dict]:
            target, value = own[key], state_dict[key]
            if not isinstance(target, DTensor):
                target.copy_(value)
                continue
            local = to_local(value)
            if local.shape != target._local_tensor.shape:
                local = target._layout.part(local)
            if target.is_meta:
                target._local_tensor = local
            else:
                target._local_tensor.copy_(local)
        keys = nn.modules.module._IncompatibleKeys(missing, unexpected)
        for module in self.modules():
            for hook in module._load_state_dict_post_hooks.values():
                hook(module, keys)
        return keys

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def to_empty(self, *, device: Any, recurse: bool = True) -> Sharded:
        """Exchange every part for one that nobody wrote yet."""
        for param in self.parameters(recurse):
            if isinstance(param, DTensor):
                empty = torch.empty_like(param._local_tensor, device=device)
                param._local_tensor = empty.requires_grad_(param.requires_grad)
        for module in self.modules() if recurse else [self]:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
        return self


def fully_shard(model: Made, mesh: Mesh, dim: int = 0) -> Made:
    """Cut every parameter that is not yet cut; each rank keeps one part along dim."""
    state = ShardingState(model, mesh, dim)
    kind = type(model)
    model.__class__ = type(f"Sharded{kind.__name__}", (Sharded, kind), {})
    model.sharding = state
    return model


def sharded_params(model: nn.Module) -> list[ShardedParam]:
    return [param for module in model.modules() if isinstance(module, Sharded) for param in module.sharding.params]


def on_meta(make: Callable[[], Made]) -> Made:
    with torch.device("meta"):
        return make()


def materialize(model: nn.Module, device: Any) -> None:
    """Give a model that was cut on meta its memory, as is done before values are written into it."""
    model.to_empty(device=device)
    for param in sharded_params(model):
        param.reset_sharded_param()
