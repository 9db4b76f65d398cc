// What lies on which device in some modules and optimizers: every tensor they hold, registered or not,
// grouped by what the device facts say.
#pragma once

#include <Python.h>

namespace tensorplay::python {

// Adds the function to the module; false with an exception set on failure. Needs the GIL.
bool add_placement_functions(PyObject* module);

}  // namespace tensorplay::python
