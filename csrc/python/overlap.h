// What regions of memory share, for Python: overlap_of(), coverage_of() and exclusive_of().
#pragma once

#include <Python.h>

namespace tensorplay::python {

// Adds the functions to the module; false with an exception set on failure. All need the GIL and release it
// around long work.
bool add_overlap_functions(PyObject* module);

}  // namespace tensorplay::python
