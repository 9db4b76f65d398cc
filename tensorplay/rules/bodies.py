"""Rules on DTensors: the tensor that C++ sees beside the local tensor that Python answers from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tensorplay.classes import class_name
from tensorplay.layers import FAULTLESS
from tensorplay.rules.registry import BodyRule
from tensorplay.words import bytes_text, describe, listed, plural, some_of

if TYPE_CHECKING:
    from tensorplay.bodies import Body
    from tensorplay.layers import Finding

__all__ = [
    "AliasedTwice",
    "Apart",
    "BodyOnMeta",
    "BufferStale",
    "Detached",
    "Freed",
    "GeometryDiffers",
    "LocalComputed",
    "LocalMissing",
    "LocalOnMeta",
    "NoPythonKey",
    "RequiresGradDiffers",
    "TypeDiffers",
    "VersionsApart",
]

_SOURCE = "read: `_local_tensor`, c10/core/TensorImpl.h"
_MOST_NAMES = 1_000


class _StateRule(BodyRule):
    """One finding for all DTensors whose worst state is one of the rule's."""

    states: ClassVar[tuple[str, ...]]
    source = f"{_SOURCE} storage_, device_opt_; c10/core/StorageImpl.h data_ptr_"

    def in_bodies(self, bodies: Sequence[Body]) -> Iterator[Finding]:
        """Explain one finding for all that are wrong in the same way."""
        groups: dict[tuple[str, bool], list[Body]] = {}
        for body in bodies:
            if body.state in self.states:
                groups.setdefault((body.state, body.is_wrapper), []).append(body)
        for group in groups.values():
            first = group[0]
            others = f", and {plural(len(group) - 1, 'more DTensor')} in the same way" if len(group) > 1 else ""
            placed = "" if first.placements is None else f" {first.placements}"
            yield self.finding(
                first.path,
                headline=self.headline(first),
                subject=f"{class_name(type(first.tensor))}{placed}: {self.subject(first)}{others}",
                evidence={**_facts(first), "tensors": [body.path for body in group[:_MOST_NAMES]]},
                why=self.why(first),
                fix=self.fix(first),
                source=self.source,
            )

    def headline(self, body: Body) -> str:
        """Say what is wrong in one line."""
        raise NotImplementedError

    def subject(self, body: Body) -> str:
        """Say both sides in figures."""
        return f"body {_side(body.record)}, local tensor {_side(body.local_record)}"

    def why(self, body: Body) -> str:
        """Say what comes of it."""
        raise NotImplementedError

    def fix(self, body: Body) -> str:
        """Say what puts it right."""
        raise NotImplementedError


def _side(record: Any) -> str:
    return "none" if record is None else f"{describe(record)} on {record.impl.device}"


def _facts(body: Body) -> dict[str, Any]:
    """Answer what was read of both as evidence."""
    outer, local = body.record, body.local_record
    facts: dict[str, Any] = {
        "state": body.state,
        "states": list(body.states),
        "wrapper": body.is_wrapper,
        "placements": body.placements,
        "outer_device": outer.impl.device,
        "outer_shape": list(outer.impl.shape or ()),
        "outer_dtype": outer.impl.dtype,
        "outer_storage": None if outer.storage is None else outer.storage.address,
        "outer_requires_grad": outer.impl.requires_grad,
    }
    if local is not None:
        facts |= {
            "local_device": local.impl.device,
            "local_shape": list(local.impl.shape or ()),
            "local_dtype": local.impl.dtype,
            "local_storage": None if local.storage is None else local.storage.address,
            "local_data_ptr": None if local.data is None else local.data.data_ptr,
            "local_requires_grad": local.impl.requires_grad,
            "consistent": body.state in FAULTLESS,
        }
    return facts


def _swap(body: Body) -> str:
    """Name the repair: which one depends on what the body is."""
    of = _subject(body)
    if body.has_key:
        return (
            f"tensorplay.dtensor.repair({of}, method='public'), which is torch.utils.swap_tensors(p, donor) with a "
            "whole donor DTensor of the local tensor: id(p) stays"
        )
    return (
        f"tensorplay.dtensor.repair({of}), which exchanges the TensorImpl for an alias of the local tensor: id(p) stays"
    )


def _subject(body: Body) -> str:
    """Name what a repair is asked of: a look at a module sees what is registered."""
    return "model" if body.is_registered else "p"


def _sizes(record: Any) -> str:
    shape = record.impl.shape
    return "that is still to come" if shape is None else str(list(shape))


class BodyOnMeta(_StateRule):
    """The local tensor has memory, the DTensor around it is still on meta.

    ## What it checks

    State `BODY_META`: the tensor that C++ sees, and that autograd, optimizers in C++ and serialization work with, has
    the device meta; the `_local_tensor` that the class answers from is on a real device. Both are read from the
    TensorImpl; no property is asked. A DTensor is recognised by its mechanism, whichever library it is from.

    ## Why it matters

    Where the class answers `.device` from the local tensor, no attribute shows the fault. What works with the body
    sees meta: fused and foreach kernels sort parameters by the body's device, `torch.save` writes no values, C++ code
    reads a null pointer.

    ## Known limits

    It arises where only `_local_tensor` was replaced: `load_state_dict(assign=True)` into a model built on meta, an
    assignment, a framework's reset after `to_empty()`. Which of them it was is not known.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    weight = torch.Tensor._make_subclass(Sharded, torch.empty(4, device="meta"))
    weight._local_tensor = torch.ones(4)
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    weight = torch.Tensor._make_subclass(Sharded, torch.empty(4, device="meta"))
    weight._local_tensor = torch.ones(4)
    tp.dtensor.repair(weight)
    ```

    ## Fix safety

    The repair checks more than twenty conditions first and changes nothing where one does not hold; it keeps the
    object, so that optimizers and frameworks that hold it go on. A graph, hooks or a gradient on the body are refused,
    with the way out.

    ## Sources

    c10/core/TensorImpl.h (`device_opt_`, `storage_`), torch/csrc/Module.cpp (`_swap_tensor_impl`),
    torch/utils/__init__.py (`swap_tensors`), torch 2.13 and 2.14.
    """

    code = "TP410"
    states = ("BODY_META",)

    def headline(self, body: Body) -> str:
        """Say which device is whose."""
        return (
            f"outer TensorImpl device {body.record.impl.device}, local tensor device {body.local_record.impl.device}: "
            "inconsistent"
        )

    def why(self, body: Body) -> str:
        """Say who sees what."""
        seen = "its .device says meta" if body.is_wrapper else "its class may answer .device from the local tensor"
        return (
            f"only the local tensor was replaced when the model was materialised: {seen}, and what works with the "
            "body in C++ finds no memory"
        )

    def fix(self, body: Body) -> str:
        """Name the repair."""
        return f"repair by swapping the TensorImpl: {_swap(body)}"


class LocalOnMeta(_StateRule):
    """The DTensor says a real device, its local tensor is still on meta.

    ## What it checks

    State `LOCAL_META`: the body's own device is real, the `_local_tensor`'s is meta.

    ## Why it matters

    The class computes with the local tensor: every operator gives tensors without values, or raises.

    ## Known limits

    Whether the body's memory holds the values that the local tensor lacks cannot be known.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    weight = torch.Tensor._make_subclass(Sharded, torch.ones(4))
    weight._local_tensor = torch.empty(4, device="meta")
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    local = torch.ones(4)
    weight = torch.Tensor._make_subclass(Sharded, local)
    weight._local_tensor = local
    ```

    ## Fix safety

    Materialise the local tensor and load it; the repair refuses this state, since there is no memory to point at.

    ## Sources

    c10/core/TensorImpl.h (`device_opt_`), torch 2.13 and 2.14.
    """

    code = "TP411"
    states = ("LOCAL_META",)

    def headline(self, body: Body) -> str:
        """Say which device is whose."""
        return f"local tensor on meta, the DTensor around it on {body.record.impl.device}"

    def why(self, body: Body) -> str:
        """Say what it computes with."""
        return "the class computes with the local tensor, which has no values"

    def fix(self, body: Body) -> str:
        """Name the way."""
        return "materialise the local tensor where the body is, and load its values: to_empty() and load_state_dict()"


class Apart(_StateRule):
    """Body and local tensor have two memories, or the wrapper says another device than its local tensor.

    ## What it checks

    State `SPLIT`, for a body that is an ordinary tensor: its StorageImpl and the local tensor's are two, and their
    memory does not meet. Of shards without elements only the StorageImpl is compared. State `DEVICE`, for a wrapper
    such as torch's own DTensor: both are on real devices, and these differ. A wrapper never shares storage with its
    local tensor: that is no fault.

    ## Why it matters

    What is written to one is not seen by the other. An optimizer in C++ updates the body; the model computes with the
    local tensor, and does not learn.

    ## Known limits

    Two tensors with the same values are two memories all the same. A subclass of Tensor that keeps a tensor of another
    meaning under the name `_local_tensor` is taken for a DTensor.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    weight = torch.Tensor._make_subclass(Sharded, torch.ones(4))
    weight._local_tensor = torch.ones(4)
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    local = torch.ones(4)
    weight = torch.Tensor._make_subclass(Sharded, local)
    weight._local_tensor = local
    ```

    ## Fix safety

    The repair makes the body an alias of the local tensor: what only the body had is lost. Compare the values first
    where you do not know which is newer.

    ## Sources

    c10/core/TensorImpl.h (`storage_`), c10/core/StorageImpl.h (`data_ptr_`), torch 2.13 and 2.14.
    """

    code = "TP412"
    states = ("SPLIT", "DEVICE")

    def headline(self, body: Body) -> str:
        """Say what is apart."""
        if body.state == "DEVICE":
            return f"the wrapper says {body.record.impl.device}, its local tensor is on {body.local_record.impl.device}"
        return "body and local tensor have two memories"

    def why(self, body: Body) -> str:
        """Say what comes of it."""
        if body.state == "DEVICE":
            return "who asks the wrapper for its device is told another one than where the shard is"
        return "what is written through one, as by an optimizer in C++, the other does not see"

    def fix(self, body: Body) -> str:
        """Name the repair, and what it gives up."""
        if body.is_wrapper:
            return _swap(body)
        return f"{_swap(body)}; what only the body has is given up: compare them first"


class AliasedTwice(_StateRule):
    """Body and local tensor lie over the same memory through two StorageImpls.

    ## What it checks

    State `ALIASED_TWICE`: two StorageImpls whose address ranges meet, on one device.

    ## Why it matters

    The memory is the same today. A resize of one storage, as frameworks do to free a shard, moves it away from the
    other without a word, and neither knows that the other is alive. PyTorch's checks for writes do not see both.

    ## Known limits

    Whether either storage owns the memory is told by its deleter: see TP104.

    ## Example

    ```python
    import numpy

    class Sharded(torch.Tensor):
        pass

    shared = numpy.ones(4, dtype="float32")
    weight = torch.Tensor._make_subclass(Sharded, torch.from_numpy(shared))
    weight._local_tensor = torch.from_numpy(shared)
    ```

    ## Use instead

    ```python
    import numpy

    class Sharded(torch.Tensor):
        pass

    shared = numpy.ones(4, dtype="float32")
    local = torch.from_numpy(shared)
    weight = torch.Tensor._make_subclass(Sharded, local)
    weight._local_tensor = local
    ```

    ## Fix safety

    The repair gives the body the local tensor's StorageImpl; no byte moves.

    ## Sources

    c10/core/StorageImpl.h (`data_ptr_`, `size_bytes_`), torch 2.13 and 2.14.
    """

    code = "TP413"
    states = ("ALIASED_TWICE",)

    def headline(self, body: Body) -> str:
        """Say what is double."""
        return "body and local tensor lie over one memory by two StorageImpls"

    def why(self, body: Body) -> str:
        """Say what comes of it."""
        return "the storages do not know of each other: resizing or freeing one leaves the other where nothing is"

    def fix(self, body: Body) -> str:
        """Name the repair."""
        return _swap(body)


class GeometryDiffers(_StateRule):
    """Body and local tensor share a storage and see different elements of it, or have different shapes.

    ## What it checks

    States `OFFSET`, `SHAPE` and `STRIDE`, for a body that is an ordinary tensor: both lie in one StorageImpl, and begin
    at different elements, have different sizes, or different strides in a dimension of more than one index. A local
    tensor that begins within its storage is fine where the body begins there too.

    `SHAPE` of torch's own DTensor: the local tensor has another number of dimensions than the global shape, another
    size in a dimension that no placement shards, or a larger one in one that is sharded. Placements of other classes
    than Shard, Replicate and Partial are passed over.

    ## Why it matters

    The body shows another shard, or another order of its elements: an optimizer in C++ updates the wrong ones.

    ## Known limits

    Of an ordinary body the shapes are compared as the TensorImpls hold them, which is the local shape: the global one
    is the class's answer. Which part of a sharded dimension is this rank's is not reckoned.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    flat = torch.arange(8.0)
    weight = torch.Tensor._make_subclass(Sharded, flat[:4])
    weight._local_tensor = flat[4:]
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    flat = torch.arange(8.0)
    weight = torch.Tensor._make_subclass(Sharded, flat[4:])
    weight._local_tensor = flat[4:]
    ```

    ## Fix safety

    The repair gives the body the local tensor's offset and strides. Different shapes it refuses: which one is meant
    cannot be known.

    ## Sources

    c10/core/TensorImpl.h (`sizes_and_strides_`, `storage_offset_`), torch 2.13 and 2.14.
    """

    code = "TP414"
    states = ("OFFSET", "SHAPE", "STRIDE")

    def headline(self, body: Body) -> str:
        """Say what differs."""
        outer, local = body.record.impl, body.local_record.impl
        if body.state == "SHAPE" and body.is_wrapper:
            return f"the local tensor of shape {list(local.shape)} is no part of a DTensor of {list(outer.shape)}"
        if body.state == "SHAPE":
            return f"the body has the shape {_sizes(body.record)}, the local tensor {_sizes(body.local_record)}"
        if body.state == "OFFSET":
            return f"the body begins at element {outer.storage_offset}, the local tensor at {local.storage_offset}"
        return f"the body has strides {list(outer.stride)}, the local tensor {list(local.stride)}"

    def why(self, body: Body) -> str:
        """Say what comes of it."""
        if body.is_wrapper:
            return (
                "the DTensor says the global shape, operators compute with a local tensor that its placements rule out"
            )
        return "what works with the body reads and writes other elements than the model computes with"

    def fix(self, body: Body) -> str:
        """Name the repair, or the way to it."""
        if body.is_wrapper:
            return "set the shard that its placements say, or make the DTensor anew with from_local()"
        if body.state == "SHAPE":
            return "make the DTensor anew from its local tensor, or give it the local tensor that it was made with"
        return _swap(body)


class TypeDiffers(_StateRule):
    """Body and local tensor have different data types.

    ## What it checks

    State `DTYPE`: the data types of the two TensorImpls.

    ## Why it matters

    Of an ordinary body the bytes are read as another type. A wrapper says a type that its results do not have.

    ## Known limits

    Which of the two is meant cannot be known.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    weight = torch.Tensor._make_subclass(Sharded, torch.ones(4))
    weight._local_tensor = torch.ones(4, dtype=torch.bfloat16)
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    local = torch.ones(4, dtype=torch.bfloat16)
    weight = torch.Tensor._make_subclass(Sharded, local)
    weight._local_tensor = local
    ```

    ## Fix safety

    The repair refuses it. Convert the local tensor to the body's type, or make the DTensor anew.

    ## Sources

    c10/core/TensorImpl.h (`data_type_`), torch 2.13 and 2.14.
    """

    code = "TP415"
    states = ("DTYPE",)

    def headline(self, body: Body) -> str:
        """Say which is whose."""
        return f"the body is {body.record.impl.dtype}, the local tensor {body.local_record.impl.dtype}"

    def why(self, body: Body) -> str:
        """Say what comes of it."""
        return "the local tensor was converted, or loaded in another type, without the DTensor around it"

    def fix(self, body: Body) -> str:
        """Name both ways."""
        return f"convert the local tensor to {body.record.impl.dtype}, or make the DTensor anew from it"


class Freed(_StateRule):
    """The storage of a DTensor was resized to fewer bytes than its elements reach.

    ## What it checks

    State `FREED`: of the body or the local tensor, a storage of 0 bytes under a tensor with elements, or of fewer bytes
    than these reach. `check()` tells it as TP102, of the tensor over that storage. Of a backend with storages of its
    own only 0 bytes count.

    ## Why it matters

    Reading it ends the process, or returns foreign bytes.

    ## Known limits

    Frameworks free gathered parameters in this way; those are no DTensors. A sharded one is meant to stay.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    local = torch.ones(4)
    weight = torch.Tensor._make_subclass(Sharded, local)
    weight._local_tensor = local
    local.untyped_storage().resize_(0)
    tp.dtensor.verify(weight)
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    local = torch.ones(4)
    weight = torch.Tensor._make_subclass(Sharded, local)
    weight._local_tensor = local
    tp.dtensor.verify(weight)
    ```

    ## Fix safety

    `untyped_storage().resize_(nbytes)` gives memory without values: load them again.

    ## Sources

    c10/core/StorageImpl.h (`size_bytes_`), torch 2.13 and 2.14.
    """

    code = "TP416"
    states = ("FREED",)

    def headline(self, body: Body) -> str:
        """Say whose memory is gone."""
        gone = {
            what: (record.storage.nbytes, record.extent.needed_nbytes)
            for what, record in (("body", body.record), ("local tensor", body.local_record))
            if record is not None and record.storage is not None and record.extent is not None
            if record.storage.nbytes < (record.extent.needed_nbytes or 0) and record.impl.device != "meta"
        }
        nbytes, needed = next(iter(gone.values()), (0, 0))
        return f"the storage of the {listed(list(gone))} has {bytes_text(nbytes)} of the {bytes_text(needed)} it needs"

    def why(self, body: Body) -> str:
        """Say what was done."""
        return "it was released by untyped_storage().resize_(), as frameworks do with gathered parameters"

    def fix(self, body: Body) -> str:
        """Name the way."""
        extents = [one.extent for one in (body.record, body.local_record) if one is not None and one.extent is not None]
        nbytes = max((extent.needed_nbytes or 0 for extent in extents), default=0)
        return f"give it memory, untyped_storage().resize_({nbytes}), and load its values again"


class BufferStale(_StateRule):
    """The framework gathers a parameter from other memory than its local tensor's.

    ## What it checks

    State `COMM_STALE`: the sharding state of a parameter, found in the hook by which it follows a load, keeps a flat
    buffer (`_sharded_param_data`) that lies in another StorageImpl than the local tensor. Only of frameworks that have
    begun to work: before the first forward they take the buffer anew.

    ## Why it matters

    All ranks gather the old values: the forward pass does not see what was loaded or written since.

    ## Known limits

    A framework that keeps its buffers elsewhere is not looked into. Shards without elements are passed over.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    class State:
        def __init__(self, module):
            local = module.weight.detach()
            self.sharded_param = torch.Tensor._make_subclass(Sharded, local)
            self.sharded_param._local_tensor = local
            self.sharded_param._is_param = True
            self._sharded_param_data = local.view(-1)
            self._param_fqn = "weight"
            module._parameters["weight"] = self.sharded_param
            module.register_load_state_dict_post_hook(lambda *args: self.reset_sharded_param())

        def reset_sharded_param(self):
            self._sharded_param_data = self.sharded_param._local_tensor.view(-1)

    model = torch.nn.Linear(2, 2, bias=False)
    State(model)
    model.weight._local_tensor = torch.ones(2, 2)
    tp.dtensor.repair(model)
    tp.check(model)
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    class State:
        def __init__(self, module):
            local = module.weight.detach()
            self.sharded_param = torch.Tensor._make_subclass(Sharded, local)
            self.sharded_param._local_tensor = local
            self.sharded_param._is_param = True
            self._sharded_param_data = local.view(-1)
            self._param_fqn = "weight"
            module._parameters["weight"] = self.sharded_param
            module.register_load_state_dict_post_hook(lambda *args: self.reset_sharded_param())

        def reset_sharded_param(self):
            self._sharded_param_data = self.sharded_param._local_tensor.view(-1)

    model = torch.nn.Linear(2, 2, bias=False)
    state = State(model)
    model.weight._local_tensor = torch.ones(2, 2)
    tp.dtensor.reset_sharded_param(state)
    tp.check(model)
    ```

    ## Fix safety

    The framework's own reset takes the local tensor's memory as its buffer and copies nothing, but for padding.

    ## Sources

    torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`reset_sharded_param`), torch 2.13 and 2.14.
    """

    code = "TP417"
    states = ("COMM_STALE",)
    source = "walked: the modules' hooks after loading; read: c10/core/TensorImpl.h storage_"

    def headline(self, body: Body) -> str:
        """Say what is gathered."""
        return "the framework gathers other memory than the local tensor's"

    def why(self, body: Body) -> str:
        """Say what was done."""
        return (
            "the local tensor was replaced after the framework took its buffer from it; other ranks get the old values"
        )

    def fix(self, body: Body) -> str:
        """Name the reset."""
        states = [class_name(type(one.state)) for one in body.sharding]
        return f"{some_of(states, 1)}.reset_sharded_param(), or tensorplay.dtensor.reset_sharded_param(state)"


class Detached(_StateRule):
    """Module, optimizer and sharding state hold different objects for one parameter.

    ## What it checks

    State `DETACHED`: the module's table has another object than the framework's sharding state takes for its sharded
    parameter, while the module is meant to have the sharded one; or an optimizer that was handed in holds a parameter
    of the same shape and type that no module has, in place of this one.

    ## Why it matters

    The framework puts its own object back after the next forward, the optimizer steps its own: what was set in the
    module is trained by nobody.

    ## Known limits

    Before the first forward a framework takes the module's object for its own: nothing is said then. `check()` tells
    the optimizer's case as TP405.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    def sharded(local):
        tensor = torch.Tensor._make_subclass(Sharded, local)
        tensor._local_tensor = local
        tensor._is_param = True
        return tensor

    class State:
        def __init__(self, module):
            self.sharded_param = sharded(module.weight.detach())
            self._sharded_param_data = self.sharded_param._local_tensor.view(-1)
            self._module_info = type("Info", (), {})()
            self._module_info.module, self._module_info.param_name = module, "weight"
            self._param_fqn = "weight"
            module._parameters["weight"] = self.sharded_param
            module.register_load_state_dict_post_hook(lambda *args: self)

    model = torch.nn.Linear(2, 2, bias=False)
    State(model)
    model._parameters["weight"] = sharded(torch.ones(2, 2))
    tp.check(model)
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    def sharded(local):
        tensor = torch.Tensor._make_subclass(Sharded, local)
        tensor._local_tensor = local
        tensor._is_param = True
        return tensor

    class State:
        def __init__(self, module):
            self.sharded_param = sharded(module.weight.detach())
            self._sharded_param_data = self.sharded_param._local_tensor.view(-1)
            self._module_info = type("Info", (), {})()
            self._module_info.module, self._module_info.param_name = module, "weight"
            self._param_fqn = "weight"
            module._parameters["weight"] = self.sharded_param
            module.register_load_state_dict_post_hook(lambda *args: self)

    model = torch.nn.Linear(2, 2, bias=False)
    State(model)
    with torch.no_grad():
        model.weight._local_tensor.copy_(torch.ones(2, 2))
    tp.check(model)
    ```

    ## Fix safety

    Write the values into the parameter that is registered everywhere; a repair keeps the object for that reason.

    ## Sources

    torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`sharded_param`, `_module_info`), torch 2.13 and 2.14.
    """

    code = "TP418"
    states = ("DETACHED",)
    source = "walked: the modules' tables and hooks after loading, the optimizers' param_groups"

    def headline(self, body: Body) -> str:
        """Say who holds another one."""
        if body.replaced_in:
            return f"{some_of(body.replaced_in, 2)} holds another parameter in its place"
        return "the module and the framework's sharding state hold different parameters"

    def why(self, body: Body) -> str:
        """Say what comes of it."""
        return (
            "the parameter was replaced after the framework or the optimizer took it: its values are trained by nobody"
        )

    def fix(self, body: Body) -> str:
        """Name the way."""
        return (
            "write the values into the parameter that was there, under torch.no_grad(); or replace it before "
            "fully_shard() and the optimizer"
        )


class LocalMissing(BodyRule):
    """A DTensor has no local tensor.

    ## What it checks

    State `NO_LOCAL`: a tensor whose class keeps a `_local_tensor`, in a slot or by declaration, and that has none, or
    one that is no tensor.

    ## Why it matters

    The class answers from the local tensor: every attribute and operator raises AttributeError.

    ## Known limits

    A class that neither declares `_local_tensor` nor has a slot for it is not recognised without one.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        _local_tensor: torch.Tensor

    weight = torch.Tensor._make_subclass(Sharded, torch.ones(4))
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        _local_tensor: torch.Tensor

    local = torch.ones(4)
    weight = torch.Tensor._make_subclass(Sharded, local)
    weight._local_tensor = local
    ```

    ## Fix safety

    Setting the local tensor that it was made from changes nothing else.

    ## Sources

    torch/distributed/tensor/_api.py (`DTensor.__slots__`), torch 2.13 and 2.14.
    """

    code = "TP419"

    def in_bodies(self, bodies: Sequence[Body]) -> Iterator[Finding]:
        """Explain one finding for all that lack it."""
        without = [body for body in bodies if body.state == "NO_LOCAL" and not body.is_plain]
        if without:
            first = without[0]
            yield self.finding(
                first.path,
                headline="the DTensor has no local tensor",
                subject=f"{class_name(type(first.tensor))}: {_side(first.record)}"
                + (f", and {plural(len(without) - 1, 'more')}" if len(without) > 1 else ""),
                evidence={**_facts(first), "tensors": [body.path for body in without[:_MOST_NAMES]]},
                why="its class keeps `_local_tensor`, and answers from it: whatever is asked raises AttributeError",
                fix="set _local_tensor to the tensor that it was made from, or make the DTensor anew with from_local()",
                source="read: the object's own dictionary, the slots of its class",
            )


class VersionsApart(_StateRule):
    """Body and local tensor share a storage and count its writes separately.

    ## What it checks

    State `VERSION_SPLIT`, for a body that is an ordinary tensor: one StorageImpl, two version counters.

    ## Why it matters

    Autograd finds a write to a saved tensor by its counter. With two of them, a write through one does not move the
    other: backward then computes a wrong gradient where a healthy DTensor raises. It arises from a repair with a
    `.data` alias, which has a counter of its own, and from copying or loading such a DTensor.

    ## Known limits

    Whether anything was saved and written since is not looked at.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    local = torch.ones(4)
    weight = torch.Tensor._make_subclass(Sharded, local.data)
    weight._local_tensor = local
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    local = torch.ones(4)
    weight = torch.Tensor._make_subclass(Sharded, local)
    weight._local_tensor = local
    ```

    ## Fix safety

    For this state alone the repair exchanges nothing unless asked, `migrate=("version",)`: no memory is wrong. A
    DTensor that is made from the local tensor itself, or from its `detach()`, has its counter.

    ## Sources

    c10/core/TensorImpl.h (`VariableVersion`), torch 2.13 and 2.14.
    """

    code = "TP420"
    states = ("VERSION_SPLIT",)
    source = f"{_SOURCE} version_counter_"

    def headline(self, body: Body) -> str:
        """Say what is counted twice."""
        return "body and local tensor have one storage and two version counters"

    def why(self, body: Body) -> str:
        """Say what comes of it."""
        return "an in-place write to one is not seen by a graph that saved the other: its gradients are silently wrong"

    def fix(self, body: Body) -> str:
        """Name the repair, and what to make new ones from."""
        if body.record.impl.is_view:
            return "make it anew from its local tensor: what copy and load make is a view, which no repair exchanges"
        method = "method='public', " if body.has_key else ""
        return (
            f"tensorplay.dtensor.repair({_subject(body)}, {method}migrate=('version',)), which gives the body the "
            "local tensor's counter; make new ones from the local tensor or its detach(), not from .data"
        )


class LocalComputed(_StateRule):
    """The local tensor of a parameter is the result of an operator.

    ## What it checks

    State `LOCAL_NONLEAF`: the DTensor is an `nn.Parameter`, by its class or its mark, and its local tensor has a
    grad_fn. What is no parameter may well have been computed.

    ## Why it matters

    Gradients go on to what it was computed from; `.grad` of the parameter stays None, and the optimizer does nothing.

    ## Known limits

    A parametrisation that computes the parameter on purpose looks the same.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    local = torch.ones(4, requires_grad=True) * 2
    weight = torch.Tensor._make_subclass(Sharded, local.detach())
    weight._local_tensor = local
    weight._is_param = True
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    local = (torch.ones(4) * 2).requires_grad_()
    weight = torch.Tensor._make_subclass(Sharded, local.detach())
    weight._local_tensor = local
    weight._is_param = True
    ```

    ## Fix safety

    `detach().requires_grad_()` cuts the local tensor off from what it was computed from.

    ## Sources

    torch/csrc/autograd/variable.h (`grad_fn_`), torch 2.13 and 2.14.
    """

    code = "TP421"
    states = ("LOCAL_NONLEAF",)
    source = "read: `_local_tensor`, torch/csrc/autograd/variable.h grad_fn_"

    def headline(self, body: Body) -> str:
        """Say what it came from."""
        return f"the local tensor of a parameter was computed, by {body.local_record.impl.grad_fn}"

    def why(self, body: Body) -> str:
        """Say what comes of it."""
        return "a parameter has to be a leaf: gradients pass on to what it was computed from, .grad stays None"

    def fix(self, body: Body) -> str:
        """Name the way."""
        return "p._local_tensor = p._local_tensor.detach().requires_grad_(), then tensorplay.dtensor.repair(p)"


class RequiresGradDiffers(_StateRule):
    """The body requires grad, the local tensor does not.

    ## What it checks

    State `REQUIRES_GRAD`, for a body that is an ordinary tensor. The other way round is how a healthy parameter of
    such a library looks: the class answers from the local tensor, the body is never computed with.

    ## Why it matters

    The class computes with the local tensor, which records no graph. What asks the body in C++ is told otherwise.

    ## Known limits

    It may be meant so, while a parameter is frozen.

    ## Example

    ```python
    class Sharded(torch.Tensor):
        pass

    local = torch.ones(4)
    weight = torch.Tensor._make_subclass(Sharded, local, True)
    weight._local_tensor = local
    ```

    ## Use instead

    ```python
    class Sharded(torch.Tensor):
        pass

    local = torch.ones(4, requires_grad=True)
    weight = torch.Tensor._make_subclass(Sharded, local.detach())
    weight._local_tensor = local
    ```

    ## Fix safety

    `requires_grad_()` of the local tensor changes no value.

    ## Sources

    torch/csrc/autograd/variable.h (`requires_grad_`), torch 2.13 and 2.14.
    """

    code = "TP422"
    states = ("REQUIRES_GRAD",)
    source = "read: `_local_tensor`, torch/csrc/autograd/variable.h requires_grad_"

    def headline(self, body: Body) -> str:
        """Say which does."""
        return "the body requires grad, the local tensor does not"

    def why(self, body: Body) -> str:
        """Say what comes of it."""
        return "the class computes with the local tensor: no graph is recorded, and .grad stays None"

    def fix(self, body: Body) -> str:
        """Name the way."""
        return "p._local_tensor.requires_grad_() where it is to be trained; else nothing"


class NoPythonKey(_StateRule):
    """A DTensor lost the key that sends operators to its class.

    ## What it checks

    State `NO_PYTHON_KEY`: the class has a `__torch_dispatch__`, with which PyTorch gives each of its tensors the
    Python dispatch key, and the body has none.

    ## Why it matters

    Operators no longer reach `__torch_dispatch__`: they compute with the body as if it were a plain tensor, without
    communication. It arises where the impl of a wrapper is exchanged for a plain alias.

    ## Known limits

    A `__torch_dispatch__` that a class got after its tensors were made looks the same.

    ## Example

    ```python
    class Wrapped(torch.Tensor):
        __slots__ = ["_local_tensor"]

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    weight = torch.Tensor._make_wrapper_subclass(Wrapped, (4,))
    weight._local_tensor = torch.ones(4)
    torch._C._swap_tensor_impl(weight, torch.ones(4))
    ```

    ## Use instead

    ```python
    class Wrapped(torch.Tensor):
        __slots__ = ["_local_tensor"]

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    weight = torch.Tensor._make_wrapper_subclass(Wrapped, (4,))
    weight._local_tensor = torch.ones(4)
    ```

    ## Fix safety

    `torch.utils.swap_tensors` with a whole DTensor gives it a body with the key again, and keeps the object.

    ## Sources

    c10/core/DispatchKey.h (`Python`), torch/csrc/autograd/python_variable.cpp, torch 2.13 and 2.14.
    """

    code = "TP423"
    states = ("NO_PYTHON_KEY",)
    source = "read: c10/core/TensorImpl.h key_set_; its class's __torch_dispatch__"

    def headline(self, body: Body) -> str:
        """Say what it lacks."""
        return "operators no longer reach the DTensor's class: its body has no Python key"

    def why(self, body: Body) -> str:
        """Say what comes of it."""
        return "its TensorImpl was exchanged for an ordinary one: operators compute with it as with a plain tensor"

    def fix(self, body: Body) -> str:
        """Name the way."""
        return "torch.utils.swap_tensors(p, donor) with a donor made by DTensor.from_local(p._local_tensor, ...)"
