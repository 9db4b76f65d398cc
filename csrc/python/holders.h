// The Python face of who refers to what.
#pragma once

#include <Python.h>

namespace tensorplay::python {

// False with an exception set.
bool add_holder_functions(PyObject* module);

}  // namespace tensorplay::python
