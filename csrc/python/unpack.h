// From a Python object to the C++ tensor inside, without running any Python and without counting as an owner.
#pragma once

#include <Python.h>

#include <span>

namespace at {
class Tensor;
}

namespace torch::autograd {
struct Node;
class SavedVariable;
}  // namespace torch::autograd

namespace tensorplay::python {

// The tensor inside, borrowed; null for anything that is not a torch.Tensor by type (weakref.proxy, a mock
// that lies about __class__). Needs the GIL.
const at::Tensor* unpack_tensor(PyObject* object);

// True for the classes of autograd's nodes: those of PyTorch's own, and those of a Python autograd.Function.
bool is_node_class(PyTypeObject* type);

// The node behind an object of such a class, borrowed; null where it has none, as while its forward runs.
const torch::autograd::Node* unpack_node(PyObject* object);

// What a Python autograd.Function saved; nothing for any other node. Fits PythonSaved of core/graph.h.
std::span<const torch::autograd::SavedVariable> saved_by_python(const torch::autograd::Node& node);

// Whether a Python autograd.Function's node saved tensors and gave them back after backward.
bool gave_back_by_python(const torch::autograd::Node& node);

// True for torch.utils.checkpoint's frame, which keeps the arguments to compute from again as `saved_args`.
bool is_checkpoint_class(PyTypeObject* type);

// True for torch._C._autograd.SavedTensor.
bool is_saved_class(PyTypeObject* type);

// What a torch._C._autograd.SavedTensor holds, borrowed; null for anything else.
const torch::autograd::SavedVariable* unpack_saved(PyObject* object);

// True for torch.nn.UninitializedParameter and its buffer sibling. Needs the GIL.
bool is_uninitialized(PyObject* object);

// True for torch's FakeTensor. Needs the GIL.
bool is_fake(PyObject* object);

// Imports what these compare with; false with a Python exception set on failure.
bool init_unpack();

}  // namespace tensorplay::python
