// From a Python object to the C++ tensor inside, without running any Python and without counting as an owner.
#pragma once

#include <Python.h>

namespace at {
class Tensor;
}

namespace tensorplay::python {

// The tensor inside, borrowed; null for anything that is not a torch.Tensor by type (weakref.proxy, a mock
// that lies about __class__). Needs the GIL.
const at::Tensor* unpack_tensor(PyObject* object);

// True for torch.nn.UninitializedParameter and its buffer sibling. Needs the GIL.
bool is_uninitialized(PyObject* object);

// True for torch's FakeTensor. Needs the GIL.
bool is_fake(PyObject* object);

// Imports what the two above compare with; false with a Python exception set on failure.
bool init_unpack();

}  // namespace tensorplay::python
