// What every function of the module does with its arguments, and with what it throws.
#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>

#include <cstdint>
#include <exception>
#include <vector>

#include "../core/liveness.h"
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
  PyThreadState* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  expect_other_threads(PyThreadState_Next(thread) != nullptr);
  try {
    return body();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// While it lives, other threads run. Also when an exception passes.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Appends; false with an exception set for what holds anything but integers of 64 bits.
inline bool read_integers(PyObject* sequence, std::vector<int64_t>& out) {
  PyObject* fast = PySequence_Fast(sequence, "expected a sequence of int");
  if (fast == nullptr) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast); ++i) {
    const long long value = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast, i));
    if (value == -1 && PyErr_Occurred() != nullptr) {
      Py_DECREF(fast);
      return false;
    }
    out.push_back(value);
  }
  Py_DECREF(fast);
  return true;
}

// Appends the sizes and strides; false with an exception set for what no tensor can have.
inline bool read_geometry(PyObject* sizes, PyObject* strides, std::vector<int64_t>& out_sizes,
                          std::vector<int64_t>& out_strides) {
  if (!read_integers(sizes, out_sizes) || !read_integers(strides, out_strides)) return false;
  bool valid = out_sizes.size() == out_strides.size();
  for (const int64_t size : out_sizes) valid = valid && size >= 0;
  if (!valid) PyErr_SetString(PyExc_ValueError, "shape and stride need one length and no negative size");
  return valid;
}

// METH_FASTCALL functions have another type than the table's.
inline PyCFunction fast_call(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace tensorplay::python
