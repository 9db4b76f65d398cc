// The autograd graph for Python: what nodes saved, and how a view came from its base.
#pragma once

#include <Python.h>

namespace torch::autograd {
struct Node;
}

namespace tensorplay::python {

// A new str; the type's name where a Python function's class raises when asked.
PyObject* node_name(const torch::autograd::Node& node);

// Adds the functions to the module; false with an exception set on failure. All need the GIL.
bool add_graph_functions(PyObject* module);

}  // namespace tensorplay::python
