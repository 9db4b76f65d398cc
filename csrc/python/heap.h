// The Python face of what is alive: tensors, the variables of frames, and who shares a storage.
#pragma once

#include <Python.h>

namespace tensorplay::python {

// False with an exception set.
bool add_heap_functions(PyObject* module);

}  // namespace tensorplay::python
