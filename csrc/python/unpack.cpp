#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
// Python.h must come before unpack.h's, and python_variable.h brings PyTorch's own.
#include "unpack.h"

namespace tensorplay::python {
namespace {

// Their modules come with `import torch`. The references are kept for good.
PyTypeObject* uninitialized_class = nullptr;
PyTypeObject* fake_class = nullptr;
PyTypeObject* checkpoint_class = nullptr;
PyTypeObject* saved_class = nullptr;

PyTypeObject* import_class(const char* module_name, const char* class_name) {
  PyObject* module = PyImport_ImportModule(module_name);
  if (module == nullptr) return nullptr;
  PyObject* found = PyObject_GetAttrString(module, class_name);
  Py_DECREF(module);
  if (found != nullptr && !PyType_Check(found)) {
    PyErr_Format(PyExc_TypeError, "%s.%s is not a class", module_name, class_name);
    Py_CLEAR(found);
  }
  return reinterpret_cast<PyTypeObject*>(found);
}

}  // namespace

const at::Tensor* unpack_tensor(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  // THPVariable_Check would honour a faked __class__, and may run its code.
  const bool tensor = THPVariable_CheckTypeExact(type) ||
                      PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
  if (!tensor) return nullptr;
  const at::Tensor& inside = THPVariable_Unpack(object);
  return inside.defined() ? &inside : nullptr;
}

bool is_node_class(PyTypeObject* type) {
  if (PyType_IsSubtype(type, &THPFunctionType) != 0) return true;
  if (type->tp_basicsize != sizeof(torch::autograd::THPCppFunction)) return false;
  PyObject head{};  // PyTorch keeps the list of its classes to itself, and answers for objects, by their type
  Py_SET_TYPE(&head, type);
  return torch::autograd::THPCppFunction_Check(&head);
}

const torch::autograd::Node* unpack_node(PyObject* object) {
  if (PyType_IsSubtype(Py_TYPE(object), &THPFunctionType) != 0) {
    return reinterpret_cast<const THPFunction*>(object)->cdata.get();
  }
  return reinterpret_cast<const torch::autograd::THPCppFunction*>(object)->cdata.get();
}

bool is_checkpoint_class(PyTypeObject* type) {
  return type == checkpoint_class;
}

const torch::autograd::SavedVariable* unpack_saved(PyObject* object) {
  if (Py_TYPE(object) != saved_class) return nullptr;
  // pybind11/detail/common.h `instance`: a class without bound bases has the pointer to its value here.
  struct Instance {
    PyObject ob_base;
    const torch::autograd::SavedVariable* value;
  };
  return reinterpret_cast<const Instance*>(object)->value;
}

bool is_uninitialized(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), uninitialized_class) != 0;
}

bool is_fake(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), fake_class) != 0;
}

bool init_unpack() {
  uninitialized_class = import_class("torch.nn.parameter", "UninitializedTensorMixin");
  if (uninitialized_class == nullptr) return false;
  fake_class = import_class("torch._subclasses.fake_tensor", "FakeTensor");
  if (fake_class == nullptr) return false;
  checkpoint_class = import_class("torch.utils.checkpoint", "_CheckpointFrame");
  if (checkpoint_class == nullptr) return false;
  saved_class = import_class("torch._C._autograd", "SavedTensor");
  return saved_class != nullptr;
}

}  // namespace tensorplay::python
