// What every function of the module does with its arguments, and with what it throws.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

#include <exception>

#include "unpack.h"

namespace tensorplay::python {

// The tensor inside, borrowed; null with TypeError set for anything else.
inline const at::Tensor* need_tensor(PyObject* object) {
  const at::Tensor* tensor = unpack_tensor(object);
  if (tensor == nullptr) {
    PyErr_Format(PyExc_TypeError, "expected a torch.Tensor, got %.200s", Py_TYPE(object)->tp_name);
  }
  return tensor;
}

inline bool need_arguments(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most, const char* call) {
  if (given >= least && given <= most) return true;
  PyErr_Format(PyExc_TypeError, "wrong number of arguments: %s", call);
  return false;
}

// The Python object that a tensor has already, borrowed, or null.
inline PyObject* python_object(const at::TensorBase& tensor) {
  return tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
}

// A C++ exception must not cross into the interpreter.
template <class Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

}  // namespace tensorplay::python
