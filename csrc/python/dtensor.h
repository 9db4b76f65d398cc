// DTensors by their mechanism, never by their import: what they hold, in which state they are, and their
// repair.
#pragma once

#include <Python.h>

namespace tensorplay::python {

// Adds the functions to the module; false with an exception set on failure.
bool add_dtensor_functions(PyObject* module);

}  // namespace tensorplay::python
