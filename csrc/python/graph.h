// The autograd graph for Python: what nodes saved, and how a view came from its base.
#pragma once

#include <Python.h>

namespace tensorplay::python {

// Adds the functions to the module; false with an exception set on failure. All need the GIL.
bool add_graph_functions(PyObject* module);

}  // namespace tensorplay::python
