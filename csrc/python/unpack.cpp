#include <torch/csrc/autograd/python_variable.h>
// Python.h must come before unpack.h's, and python_variable.h brings PyTorch's own.
#include "unpack.h"

namespace tensorplay::python {
namespace {

// Both modules come with `import torch`. The references are kept for good.
PyTypeObject* uninitialized_class = nullptr;
PyTypeObject* fake_class = nullptr;

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

bool is_uninitialized(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), uninitialized_class) != 0;
}

bool is_fake(PyObject* object) {
  return PyType_IsSubtype(Py_TYPE(object), fake_class) != 0;
}

bool init_unpack() {
  uninitialized_class = import_class("torch.nn.parameter", "UninitializedTensorMixin");
  fake_class =
      uninitialized_class == nullptr ? nullptr : import_class("torch._subclasses.fake_tensor", "FakeTensor");
  return fake_class != nullptr;
}

}  // namespace tensorplay::python
