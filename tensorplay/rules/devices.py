"""TP110, TP111, TP404, TP406, TP408: what lies on another device than it says, or than what it works with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tensorplay.layers import Finding
from tensorplay.rules.registry import DeviceRule
from tensorplay.words import bytes_text, describe, device_type, listed, place_pattern, plural, same_device, some_of

if TYPE_CHECKING:  # a rule explains itself also where the extension does not load
    from tensorplay.placement import Group, Member, Placement

__all__ = [
    "FakeAmongReal",
    "LeftBehind",
    "MemoryOfAnotherDevice",
    "ModuleOnSeveralDevices",
    "OptimizerStateElsewhere",
]

_FAKE = "fake"


class MemoryOfAnotherDevice(DeviceRule):
    """The driver says that the memory is not of the device that the tensor claims.

    ## What it checks

    Of each tensor with memory on an accelerator the driver is asked whose the address is (`getDeviceFromPtr()` of the
    backend's hooks); of one on the CPU too, where the memory was handed to PyTorch from outside and an accelerator is
    in use. Where no such backend is loaded, or its driver was not used in this process, no memory can be its own. The
    process's memory map says what lies there.

    ## Why it matters

    A label is no more than a label. Kernels are chosen by it, and then read an address that means something else to
    their device: wrong numbers, a fault on the device, or the end of the process. Nothing in PyTorch compares the two.

    ## Known limits

    A driver that is not in use is not started for the question, and a backend without `getDeviceFromPtr()` cannot be
    asked. Memory that PyTorch's CPU allocator freed by its own deleter is taken for the CPU's; so is memory of the host
    that a driver pinned.

    ## Example

    ```python
    import ctypes

    # A library that exports its memory by DLPack, and says that it is on Apple's GPU (8 is kDLMetal).
    capsule = torch.ones(4).__dlpack__()
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    ctypes.c_int32.from_address(address(capsule, b"dltensor") + 8).value = 8
    x = torch.utils.dlpack.from_dlpack(capsule)
    ```

    ## Use instead

    ```python
    x = torch.utils.dlpack.from_dlpack(torch.ones(4).__dlpack__())
    ```

    ## Fix safety

    Making the tensor anew on the device wanted copies its bytes.

    ## Sources

    ATen/detail/AcceleratorHooksInterface.h (`getDeviceFromPtr`, `hasPrimaryContext`), c10/core/Allocator.h (`DataPtr`),
    /proc/self/maps, torch 2.13 and 2.14.
    """

    code = "TP110"

    def in_placement(self, placement: Placement) -> Iterator[Finding]:
        """Explain one finding for all tensors of which the driver says the same."""
        for group, members in placement.by_group(filter(_is_denied, placement.groups)):
            first = members[0]
            data = None if first.record is None else first.record.data
            mapping = None if data is None else placement.mapping_of(data.pointer)
            says = _SAYS[group.driver].format(owner=group.owner, type=device_type(group.label or "?"))
            also = f", and {plural(group.tensors - 1, 'more tensor')} in the same way" if group.tensors > 1 else ""
            yield self.finding(
                first.path,
                headline=f"the memory is not of {group.label}: {says}",
                subject=f"{'a tensor' if first.record is None else describe(first.record)}{also}",
                evidence={
                    "data_device": group.label,
                    "impl_device": group.device,
                    "driver": group.driver,
                    "owner_device": group.owner,
                    "mapping": mapping,
                    "tensors": [member.path for member in members],
                },
                why="kernels are chosen by the label and read the address: what lies there is not theirs"
                + ("" if mapping is None else f"; the process's memory map has {mapping} there"),
                fix="find who made the storage: a DLPack producer, from_blob in an extension, or "
                "torch._C._construct_storage_from_data_pointer, with a device that does not own the pointer",
                source="asked: getDeviceFromPtr() of the backend's hooks (ATen/detail/AcceleratorHooksInterface.h); "
                "read: c10/core/StorageImpl.h data_ptr_; /proc/self/maps",
            )


_SAYS = {
    "answered": "the driver says {owner}",
    "denied": "the {type} driver says that the address is not its own",
    "absent": "no {type} backend is at work in this process",
}


def _is_denied(group: Group) -> bool:
    if not group.was_asked or group.label is None or group.driver == "unknown":
        return False
    if device_type(group.label) == "cpu":
        return group.driver == "answered" and group.owner is not None
    return group.driver != "answered" or (group.owner is not None and not same_device(group.owner, group.label))


class FakeAmongReal(DeviceRule):
    """A module or an optimizer holds fake tensors beside real ones, and their mode has ended.

    ## What it checks

    Whether some tensors of a module or an optimizer are FakeTensors and others have memory, while the FakeTensorMode
    they were made in is not at work. A model that is fake as a whole, as for an estimate, is left alone.

    ## Why it matters

    What tracing, exporting or estimating leaves in a cache or an attribute has a shape and a device and no values. It
    shows up far away: "Cannot access data pointer of Tensor that doesn't have storage", or a model that is fake where
    one number of it was.

    ## Known limits

    A fake tensor in a plain container is not looked at.

    ## Example

    ```python
    from torch._subclasses import FakeTensorMode

    model = torch.nn.Linear(2, 2)
    with FakeTensorMode():
        model.cache = torch.ones(2)
    tp.audit_device_consistency(model)
    ```

    ## Use instead

    ```python
    model = torch.nn.Linear(2, 2)
    model.cache = torch.ones(2)
    tp.audit_device_consistency(model)
    ```

    ## Fix safety

    Removing the tensor, or computing it anew outside the mode, costs what it costs to compute.

    ## Sources

    torch/_subclasses/fake_tensor.py, torch 2.13 and 2.14.
    """

    code = "TP111"

    def in_placement(self, placement: Placement) -> Iterator[Finding]:
        """Explain the one finding."""
        held = [group for group in placement.groups if group.role != "tensor"]
        fakes = [group for group in held if group.kind == _FAKE]
        if not fakes or not any(group.kind == "strided" for group in held):
            return
        if placement.has_active(placement.fake_modes(fakes)):
            return
        members = placement.members(fakes)
        paths = [member.path for member in members]
        count = sum(group.tensors for group in fakes)
        yield self.finding(
            paths[0],
            headline="fake tensors outlived their mode",
            subject=f"{plural(count, 'fake tensor')} among real ones: {some_of(paths)}",
            evidence={
                "tensors": paths,
                "fake": count,
                "real": sum(group.tensors for group in held if group.kind == "strided"),
            },
            why="a fake tensor has a shape and a device and no values: what computes with it raises, or is fake too",
            fix="remove what was kept under the mode, or compute it again outside",
            source="read: the tensors' class; torch/_subclasses/fake_tensor.py fake_mode",
        )


class LeftBehind(DeviceRule):
    """A module holds a tensor that is not registered, on another device than its parameters and buffers.

    ## What it checks

    Tensors in a module's plain attributes and its class's, in lists, tuples, dicts, sets, deques and objects there, in
    closures, bound methods and partials, in modules that a plain list holds, and in what hooks of the module and of its
    parameters refer to: against the devices of the parameters and buffers in the module and below; where there are
    none, of the module around it. `plain_attr_devices` and `left_bytes` say what was found.

    ## Why it matters

    `.to()`, `.cuda()` and `to_empty()` replace what is registered, and nothing else. The rest stays where it was:
    the forward pass raises "Expected all tensors to be on the same device", or copies at each step.

    ## Known limits

    What is held on another device on purpose looks alike, and so does a result that was kept without its graph. A
    number without dimensions on the CPU computes with every device and is passed over; so are tensors without elements,
    modules whose tensors an offload hook moves, results that are computed anew in each forward pass (those with a
    grad_fn are an info), the states of random number generators, and all that is registered somewhere as well. What
    global variables, data sets and loaders hold is not looked at, nor what an object holds that is itself an attribute
    of an object.

    ## Example

    ```python
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.scales = [torch.ones(2) for _ in range(3)]

    model = Net().to("meta")
    tp.audit_device_consistency(model)
    ```

    ## Use instead

    ```python
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            for number in range(3):
                self.register_buffer(f"scale{number}", torch.ones(2), persistent=False)

    model = Net().to("meta")
    tp.audit_device_consistency(model)
    ```

    ## Fix safety

    A buffer with `persistent=False` moves with the module and stays out of its state dict. A persistent one adds a key
    to the state dict: old checkpoints then need `strict=False`.

    ## Sources

    torch/nn/modules/module.py (`_apply`), c10/core/TensorImpl.h (`device_opt_`), torch 2.13 and 2.14.
    """

    code = "TP404"

    def in_placement(self, placement: Placement) -> Iterator[Finding]:
        """Explain one finding for the tensors that one line of code put in one place of each module."""
        strays = [
            group
            for group in placement.of("attribute", "hook", "own attribute")
            if group.is_elsewhere and not (group.is_number or group.has_offload_hook or group.kind == _FAKE)
        ]
        for group, found in placement.by_group(strays):
            by_place: dict[str, list[Member]] = {}
            for member in found:
                if _is_generator_state(member):
                    continue
                place = place_pattern(member.path) if group.is_registered else "modules"
                by_place.setdefault(place, []).append(member)
            for members in by_place.values():
                yield self._explained(group, members)

    def _explained(self, group: Group, members: Sequence[Member]) -> Finding:
        expected = listed(group.expected)
        storages = {
            member.record.storage.address: member.record.storage.nbytes
            for member in members
            if member.record is not None and member.record.storage is not None
        }
        left = sum(nbytes for nbytes in storages.values() if isinstance(nbytes, int))
        like = list(dict.fromkeys(name for member in members for name in member.like))
        paths = [member.path for member in members]
        what = {"hook": "a hook holds", "own attribute": "a tensor's attribute holds"}.get(group.role, "a module holds")
        alike = f"; the module's {some_of(like)} {'have' if len(like) > 1 else 'has'} their shape" if like else ""
        first = members[0].record
        also = f", and {some_of(paths[1:], 3)}" if len(paths) > 1 else ""
        kept = f": {bytes_text(left)}" if storages else ""  # a sparse tensor has none of its own
        return self.finding(
            paths[0],
            headline=f"{what} unregistered tensors on {group.device}, its parameters and buffers are on {expected}"
            if group.is_registered
            else f"a module that is not registered is on {group.device}, the module that holds it on {expected}",
            subject=f"{'a tensor' if first is None else describe(first)}{also}{kept} left behind{alike}",
            evidence={
                "plain_attr_devices": [group.device] * len(members),
                "expected": group.expected,
                "left_bytes": left,
                "tensors": paths,
                "module": members[0].module,
                "held_by": group.role,
                "same_shape_as": like,
            },
            why="it was computed before the move, and is computed anew in the next forward pass"
            if group.is_computed
            else "Module.to() replaces registered parameters and buffers, and looks into no list, dict or attribute",
            fix=_FIX_OF_MODULE if not group.is_registered else _FIX_OF_ROLE.get(group.role, _FIX),
            source="walked: the module's __dict__ and what it holds; read: c10/core/TensorImpl.h device_opt_",
            severity="info" if group.is_computed else None,
        )


def _is_generator_state(member: Member) -> bool:
    """Tell whether it is what torch.get_rng_state() answers, which has to be on the CPU."""
    impl = None if member.record is None else member.record.impl
    return impl is not None and (impl.dtype, impl.shape, impl.device) == ("uint8", (_RNG_STATE,), "cpu")


_RNG_STATE = 5056
_FIX = (
    "register it: self.register_buffer(name, tensor, persistent=False), and read lists of buffers through a property; "
    "or move it in an override of _apply()"
)
_FIX_OF_MODULE = "hold modules in nn.ModuleList or nn.ModuleDict: a plain list registers nothing"
_FIX_OF_ROLE = {
    "hook": "make the hook read the tensor from the module, where it is a buffer",
    "own attribute": "move the attribute with its tensor, or keep it as a buffer of the module",
}


class OptimizerStateElsewhere(DeviceRule):
    """An optimizer's state is on another device than the parameter it belongs to.

    ## What it checks

    Each tensor in an optimizer's `state`, and among the options of a group, against the device of its parameter. A
    number without dimensions on the CPU, as `step` is, computes with every device and is normal. `wrong_device` lists
    the keys, parameter by parameter.

    ## Why it matters

    `module.to()` moves parameters, and not the optimizer's state. Where the parameters stay the same objects, the next
    `optimizer.step()` raises, or a fused step fails on the device.

    ## Known limits

    An optimizer that keeps its state on the CPU on purpose, and moves it itself, looks alike.

    ## Example

    ```python
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(torch.empty_like(parameter, device="meta")))
    tp.audit_device_consistency(model, optimizer)
    ```

    ## Use instead

    ```python
    model = torch.nn.Linear(2, 2).to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    tp.audit_device_consistency(model, optimizer)
    ```

    ## Fix safety

    Moving the state copies it, and changes no number. `optimizer.load_state_dict(optimizer.state_dict())` after the
    move puts it on the parameters' devices.

    ## Sources

    torch/optim/optimizer.py (`_process_value_according_to_param_policy`), c10/core/TensorImpl.h (`device_opt_`), torch
    2.13 and 2.14.
    """

    code = "TP406"

    def in_placement(self, placement: Placement) -> Iterator[Finding]:
        """Explain one finding for all state on one device of parameters on another."""
        by_devices: dict[tuple[str | None, tuple[str, ...]], list[Group]] = {}
        for group in placement.of("state"):
            if group.is_elsewhere and not group.is_number and group.kind != _FAKE:
                by_devices.setdefault((group.device, tuple(group.around)), []).append(group)
        for (device, around), groups in by_devices.items():
            members = ((group, one) for group, found in placement.by_group(groups) for one in found)
            entries = sorted(members, key=lambda entry: (entry[1].owner, entry[0].number))
            keys = [group.key for group in groups if type(group.key) is str]
            beside = listed(list(around))
            parameters = len({member.owner for _, member in entries})
            yield self.finding(
                entries[0][-1].path,
                headline=f"optimizer state is on {device}, its parameters are on {beside}",
                subject=f"{listed(keys) if keys else 'the state'} of {plural(parameters, 'parameter')} on {device}",
                evidence={
                    "wrong_device": [group.key for group, _ in entries],
                    "param_device": beside,
                    "state_device": device,
                    "parameters": parameters,
                    "nbytes": sum(group.nbytes for group in groups),
                    "tensors": [member.path for _, member in entries],
                },
                why="module.to() moves parameters and gradients, and not what the optimizer keeps of them",
                fix="optimizer.load_state_dict(optimizer.state_dict()) after the move, or build the optimizer after "
                "it; 'step' on the CPU is normal",
                source="walked: optimizer.state; read: c10/core/TensorImpl.h device_opt_ of state and parameter",
            )


class ModuleOnSeveralDevices(DeviceRule):
    """One module's own parameters and buffers are on several devices.

    ## What it checks

    The devices of what one module has registered itself: not what lies in the modules below it, so that a model that is
    spread over devices by layers is fine. Meta tensors are passed over: they have no memory yet.

    ## Why it matters

    Most often one tensor was moved alone, or replaced by one that was made elsewhere: `module.bias.data =`, a buffer
    that is assigned anew, `load_state_dict(assign=True)`. The module's forward pass raises.

    ## Known limits

    A module that does its own transfers between its parameters looks alike. Numbers without dimensions on the CPU
    compute with every device, and modules under an offload hook are passed over.

    ## Example

    ```python
    class OnGpu(torch.Tensor):  # stands for a tensor there: shows it without one
        __torch_dispatch__ = classmethod(lambda *args: NotImplemented)

        def __new__(cls, size):
            return torch.Tensor._make_wrapper_subclass(cls, (size,), device="cuda:0")

    model = torch.nn.BatchNorm1d(2)
    model.running_mean = OnGpu(2)
    tp.audit_device_consistency(model)
    ```

    ## Use instead

    ```python
    model = torch.nn.BatchNorm1d(2)
    model.running_mean = torch.zeros(2)
    tp.audit_device_consistency(model)
    ```

    ## Fix safety

    `module.to(device)` of the whole module moves what is left, and copies nothing that is there already.

    ## Sources

    torch/nn/modules/module.py (`_parameters`, `_buffers`), c10/core/TensorImpl.h (`device_opt_`), torch 2.13 and 2.14.
    """

    code = "TP408"

    def in_placement(self, placement: Placement) -> Iterator[Finding]:
        """Explain one finding for all modules that have tensors of the same devices."""
        mixed: dict[tuple[str, ...], list[Group]] = {}
        for group in placement.of("parameter", "buffer"):
            devices = tuple(sorted(device for device in group.around if device != "meta"))
            if len(devices) > 1 and not group.is_number and not group.has_offload_hook and group.device in devices:
                mixed.setdefault(devices, []).append(group)
        for devices, groups in mixed.items():
            modules: dict[str, dict[str, list[str]]] = {}
            for group, members in placement.by_group(groups):
                for member in members:
                    holder = member.module or ""
                    modules.setdefault(holder, {}).setdefault(str(group.device), []).append(member.path)
            first, lying = next(iter(modules.items()))
            told = "; ".join(f"{some_of(paths, 2)} on {device}" for device, paths in lying.items())
            more = f"; and {plural(len(modules) - 1, 'more module')}" if len(modules) > 1 else ""
            yield self.finding(
                first,
                headline=f"one module's parameters and buffers are on {listed(list(devices))}",
                subject=f"{told}{more}",
                evidence={"devices": list(devices), "modules": list(modules), "tensors": lying},
                why="its forward pass computes with all of them, and PyTorch raises where their devices differ",
                fix="module.to(device), and look for who assigned one of them alone",
                source="walked: the module's _parameters and _buffers; read: c10/core/TensorImpl.h device_opt_",
            )
