#include <torch/csrc/autograd/python_variable.h>
// Python.h must come before unpack.h's, and python_variable.h brings PyTorch's own.
#include "unpack.h"

namespace tensorplay::python {
namespace {

PyTypeObject* uninitialized_class = nullptr;  // owned, never released

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

bool is_uninitialized(PyObject* object) { return PyType_IsSubtype(Py_TYPE(object), uninitialized_class) != 0; }

bool init_unpack() {
  PyObject* module = PyImport_ImportModule("torch.nn.parameter");
  if (module == nullptr) return false;
  PyObject* mixin = PyObject_GetAttrString(module, "UninitializedTensorMixin");
  Py_DECREF(module);
  uninitialized_class = reinterpret_cast<PyTypeObject*>(mixin);
  return mixin != nullptr;
}

}  // namespace tensorplay::python
