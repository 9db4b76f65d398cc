// The tracker's face in Python.
#pragma once

#include <Python.h>

namespace tensorplay::python {

// Adds the functions to the module; false with an exception set on failure.
bool add_track_functions(PyObject* module);

}  // namespace tensorplay::python
