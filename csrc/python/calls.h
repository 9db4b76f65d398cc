// What a function called from Python begins and ends with: its arguments counted, its exceptions caught.
#pragma once

#include <Python.h>

#include <exception>

namespace tensorplay::python {

inline bool need_arguments(Py_ssize_t given, Py_ssize_t least, Py_ssize_t most, const char* call) {
  if (given >= least && given <= most) return true;
  PyErr_Format(PyExc_TypeError, "wrong number of arguments: %s", call);
  return false;
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

// METH_FASTCALL functions have another type than the table's.
inline PyCFunction fast_call(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace tensorplay::python
