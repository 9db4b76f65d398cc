// Device facts that only C++ can bring to disagree, as a faulty extension does.
#include <torch/csrc/autograd/python_variable.h>
// python_variable.h brings PyTorch's own Python.h.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StorageImpl.h>
#include <pybind11/pybind11.h>

#include <string>

namespace {

const at::Tensor& unpack(const pybind11::handle& x) {
  if (!THPVariable_Check(x.ptr())) throw pybind11::type_error("expected a tensor");
  return THPVariable_Unpack(x.ptr());
}

// DataPtr::unsafe_set_device: another label, the same memory.
void relabel(const pybind11::handle& x, const std::string& device) {
  c10::StorageImpl* storage = unpack(x).storage().unsafeGetStorageImpl();
  storage->mutable_data_ptr().unsafe_set_device(c10::Device(device));
}

// StorageImpl::set_data_ptr: the memory of one tensor under the impl of another. The source must outlive it.
void put_memory_of(const pybind11::handle& x, const pybind11::handle& source) {
  const c10::Storage& from = unpack(source).storage();
  unpack(x).storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
      at::DataPtr(from.mutable_data(), from.device()));
}

// from_blob with an explicit target: whatever the address is, the tensor says it is there.
pybind11::object claim(const pybind11::handle& source, const std::string& device) {
  const at::Tensor& from = unpack(source);
  const c10::Device target(device);
  const at::Tensor made = at::from_blob(
      const_cast<void*>(from.const_data_ptr()), from.sizes(), from.strides(), [](void*) {},
      from.options().device(target), target);
  return pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(made));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("relabel", relabel);
  module.def("put_memory_of", put_memory_of);
  module.def("claim", claim);
}
