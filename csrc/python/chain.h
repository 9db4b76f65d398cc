// The function tensorplay._C.infer_chain.
#pragma once

#include <Python.h>

namespace tensorplay::python {

// Adds it to the module; false with an exception set on failure. Needs the GIL.
bool add_chain_functions(PyObject* module);

}  // namespace tensorplay::python
