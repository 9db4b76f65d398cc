// What tests/npu/__init__.py and tests/npu/device.py call.
#include <torch/csrc/autograd/python_variable.h>
// python_variable.h brings PyTorch's own Python.h.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "allocator.h"
#include "guard.h"
#include "hooks.h"
#include "tensor_impl.h"
#include "transfers.h"

namespace py = pybind11;

namespace npu {

namespace {

const at::Tensor& unpack(const py::handle& x) {
  if (!THPVariable_Check(x.ptr())) throw py::type_error("expected a tensor");
  return THPVariable_Unpack(x.ptr());
}

py::tuple transfers(int direction) {
  if (direction < 0 || direction >= kDirections) throw py::value_error("no such direction");
  const TransferFigures figures = transfer_figures(static_cast<Direction>(direction));
  return py::make_tuple(figures.copies, figures.bytes);
}

py::tuple memory(c10::DeviceIndex index) {
  const MemoryFigures figures = allocator().figures(index);
  return py::make_tuple(figures.allocations, figures.frees, figures.live_blocks, figures.live_bytes);
}

py::object owner_of(uintptr_t address) {
  const auto owner = allocator().owner_of(reinterpret_cast<const void*>(address));
  return owner ? py::object(py::int_(static_cast<int>(*owner))) : py::none();
}

// Asked as any other part of PyTorch asks it.
std::string device_of_pointer(uintptr_t address) {
  return at::detail::getPrivateUse1Hooks().getDeviceFromPtr(reinterpret_cast<void*>(address)).str();
}

bool has_context(c10::DeviceIndex index) {
  return at::detail::getPrivateUse1Hooks().hasPrimaryContext(index);
}

std::string impl_class(const py::handle& x) {
  return dynamic_cast<NpuTensorImpl*>(unpack(x).unsafeGetTensorImpl()) != nullptr ? "NpuTensorImpl" : "other";
}

py::object describe_storage(const py::handle& x) {
  const auto* storage = dynamic_cast<NpuStorageImpl*>(unpack(x).storage().unsafeGetStorageImpl());
  if (storage == nullptr) return py::none();
  const StorageDescription& said = storage->description;
  return py::make_tuple(py::tuple(py::cast(said.sizes)), py::tuple(py::cast(said.strides)),
                        c10::toString(said.dtype), said.resizes);
}

void seed(c10::DeviceIndex index, uint64_t value) {
  at::Generator& generator = default_generator(index);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(value);
}

py::object rng_state(c10::DeviceIndex index) {
  at::Generator& generator = default_generator(index);
  std::lock_guard<std::mutex> lock(generator.mutex());
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(generator.get_state()));
}

void set_rng_state(c10::DeviceIndex index, const py::handle& state) {
  at::Generator& generator = default_generator(index);
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(unpack(state));
}

}  // namespace

}  // namespace npu

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("DEVICES") = static_cast<int>(npu::kDevices);
  module.attr("FRESH_BYTE") = npu::kFreshByte;
  module.def("current_device", npu::current_device);
  module.def("exchange_device", npu::exchange_device);
  module.def("check_device", npu::check_device);
  module.def("transfers", npu::transfers);
  module.def("set_latency", [](int direction, int64_t fixed_ns, double ns_per_byte) {
    npu::set_latency(static_cast<npu::Direction>(direction), fixed_ns, ns_per_byte);
  });
  module.def("memory", npu::memory);
  module.def("mem_get_info", [](c10::DeviceIndex index) { return npu::allocator().getMemoryInfo(index); });
  module.def("has_context", npu::has_context);
  module.def("fail_next_allocation", [](int64_t n) { npu::allocator().fail_next_allocation(n); });
  module.def("owner_of", npu::owner_of);
  module.def("device_of_pointer", npu::device_of_pointer);
  module.def("impl_class", npu::impl_class);
  module.def("describe_storage", npu::describe_storage);
  module.def("seed", npu::seed);
  module.def("rng_state", npu::rng_state);
  module.def("set_rng_state", npu::set_rng_state);
}
