// The Python face of a record: tensorplay._C.TensorRecord and its layers.
//
// Same attribute names as tensorplay.layers.TensorRecord, each made on access from the plain struct inside.
// Immutable; holds no reference to the tensor it describes.
#pragma once

#include <Python.h>

#include "../core/records.h"

namespace at {
class TensorBase;
}

namespace tensorplay::python {

// The Python object's own facts; read here because core/ knows no Python.
struct PythonFacts {
  uintptr_t id = 0;            // 0: no Python object
  PyObject* type = nullptr;    // owned str
  PyObject* module = nullptr;  // owned str, or null
  Py_ssize_t refcount = 0;     // the probe's own references taken off
  bool has_weakrefs = false;
  bool slot_is_self = false;   // the impl's PyObject slot names this very object
  bool uninitialized = false;  // torch.nn.UninitializedParameter or Buffer
  bool fake = false;           // torch's FakeTensor
  PyObject* producer_type =
      nullptr;  // owned str: class of the Python object whose memory the data is, or null
};

// Registers the types with the module; false with an exception set on failure.
bool init_record_types(PyObject* module);

// A new record of a tensor and of those inside it. `object` is its Python object or null; `observer_refs` of
// the object's references belong to the probe and its callers. Null with an exception set on failure. Needs
// the GIL.
PyObject* make_record(const at::TensorBase& tensor, PyObject* object, Py_ssize_t observer_refs);
}  // namespace tensorplay::python
