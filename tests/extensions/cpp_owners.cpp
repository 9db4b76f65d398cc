// Owners that only C++ knows, as a serving runtime or an allocator of its own would be.
#include <torch/csrc/autograd/python_variable.h>
// python_variable.h brings PyTorch's own Python.h.
#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <pybind11/pybind11.h>

#include <vector>

namespace {

std::vector<at::Tensor> tensors;
std::vector<c10::Storage> storages;
std::vector<PyObject*> objects;

const at::Tensor& unpack(const pybind11::handle& x) {
  if (!THPVariable_Check(x.ptr())) throw pybind11::type_error("expected a tensor");
  return THPVariable_Unpack(x.ptr());
}

void hold_tensor(const pybind11::handle& x) {
  tensors.push_back(unpack(x));
}

// A TensorImpl of its own over the same storage, which no Python object stands for.
void hold_alias(const pybind11::handle& x) {
  const c10::intrusive_ptr<c10::TensorImpl>& impl = unpack(x).getIntrusivePtr();
  tensors.emplace_back(impl->shallow_copy_and_detach(impl->version_counter(), false));
}

void hold_storage(const pybind11::handle& x) {
  storages.push_back(unpack(x).storage());
}

void hold_object(const pybind11::handle& x) {
  objects.push_back(Py_NewRef(x.ptr()));
}

void release() {
  tensors.clear();
  storages.clear();
  for (PyObject* object : objects) Py_DECREF(object);
  objects.clear();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("hold_tensor", hold_tensor);
  module.def("hold_alias", hold_alias);
  module.def("hold_storage", hold_storage);
  module.def("hold_object", hold_object);
  module.def("release", release);
}
