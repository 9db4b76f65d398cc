#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/python_variable.h>
// Python.h must come before unpack.h's, and python_variable.h brings PyTorch's own.
#include "../core/read.h"
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

std::span<const torch::autograd::SavedVariable> saved_by_python(const torch::autograd::Node& node) {
  if (!is_python_node(typeid(node))) return {};
  PyObject* object = static_cast<const torch::autograd::PyNode&>(node).pyobj();
  if (object == nullptr || PyType_IsSubtype(Py_TYPE(object), &THPFunctionType) == 0) return {};
  return reinterpret_cast<const THPFunction*>(object)->saved_variables;
}

bool gave_back_by_python(const torch::autograd::Node& node) {
  if (!is_python_node(typeid(node))) return false;
  PyObject* object = static_cast<const torch::autograd::PyNode&>(node).pyobj();
  if (object == nullptr || PyType_IsSubtype(Py_TYPE(object), &THPFunctionType) == 0) return false;
  const auto* function = reinterpret_cast<const THPFunction*>(object);
  // A list that was emptied keeps its room: one that never held anything has none.
  return function->has_freed_buffers != 0 && function->saved_variables.capacity() > 0;
}

bool is_saved_class(PyTypeObject* type) {
  return type == saved_class;
}

const torch::autograd::SavedVariable* unpack_saved(PyObject* object) {
  if (!is_saved_class(Py_TYPE(object))) return nullptr;
  // pybind11/detail/common.h `instance`, of a class without bound bases. One that owns nothing is a node's
  // `_raw_saved_self`, whose node may be gone.
  struct Instance {
    PyObject ob_base;
    const torch::autograd::SavedVariable* value;
    void* holder[2];
    PyObject* weakrefs;
    bool owned : 1;
    bool simple_layout : 1;
  };
  const auto* instance = reinterpret_cast<const Instance*>(object);
  return instance->owned && instance->simple_layout ? instance->value : nullptr;
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
