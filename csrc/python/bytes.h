// What the elements of tensors hold, for Python: count_nonfinite(), same_values() and copy_bytes().
#pragma once

#include <Python.h>

namespace tensorplay::python {

// Adds the functions to the module; false with an exception set on failure. All need the GIL and release it
// around long work.
bool add_bytes_functions(PyObject* module);

}  // namespace tensorplay::python
