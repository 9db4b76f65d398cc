// What modules have registered, in the order in which load_state_dict() goes through it.
#pragma once

#include <Python.h>

namespace tensorplay::python {

// Adds the function to the module; false with an exception set on failure. Needs the GIL.
bool add_module_functions(PyObject* module);

}  // namespace tensorplay::python
