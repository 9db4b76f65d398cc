// Reads a live tensor into a record.
//
// Refuses to run any operator, to call a virtual that can enter Python, to materialise a storage, to bump a
// version, to rebuild a grad_fn or to touch a reference count. Depends on c10, ATen/core and autograd's own
// headers.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Allocator.h>
#include <c10/core/TensorImpl.h>

#include <typeinfo>
#include <vector>

#include "records.h"

namespace tensorplay {

// Needs: the caller keeps `impl` alive. Needs the GIL only where sizes are symbolic (their expressions are
// printed by Python) or the grad_fn is a Python autograd.Function (its class is named). Allocates only in
// those cases, for tensors of more than 5 dimensions, and for shared memory.
void read_tensor(const c10::TensorImpl& impl, TensorFacts& facts);

// The pointer of a storage, whose it is, and who frees it.
void read_data(const at::DataPtr& data, DataFacts& facts);

// A tensor that another one is made of.
struct InnerTensor {
  const char* role;  // what it is to the outer one: value, indices, values, ...
  const at::TensorBase* tensor;
};

// Whether tensors of this kind are made of others that C++ can name.
constexpr bool has_inner(Kind kind) {
  return kind == Kind::kBatched || kind == Kind::kFunctorchWrapper || kind == Kind::kFunctional ||
         kind == Kind::kSparseCoo || kind == Kind::kSparseCompressed || kind == Kind::kNested;
}

// The tensors inside a batched, functorch, functional, sparse or nested tensor, outermost only; empty for the
// rest. Valid while the outer tensor is alive.
std::vector<InnerTensor> inner_tensors(const c10::TensorImpl& impl, Kind kind);

// Fills in what the components of a strided nested tensor reach together. Follows the pointer of its CPU
// tensor of sizes; leaves facts.nested unset where that is not readable.
void read_nested(const c10::TensorImpl& impl, TensorFacts& facts);

// The gradient that autograd keeps for the tensor, or null; null also for one that another thread is letting
// go of (liveness.h). Valid while the tensor is alive and its .grad is not set.
const at::TensorBase* grad_of(const c10::TensorImpl& impl);

// Whether a node of this type is a Python autograd.Function's.
bool is_python_node(const std::type_info& type);

// Equal for tensors that share a version counter; null for inference tensors.
const void* version_counter_of(const c10::TensorImpl& impl);

// Learns, from a storage made by slicing another one in Python, which deleter such slices carry: no header
// names it. Called once at load; before it, slices are read as DataOrigin::kOther.
void learn_storage_slice(const c10::StorageImpl& slice);

// An allocator that stands in front of another one and watches, and what it gives its blocks back with.
struct FrontAllocator {
  const c10::Allocator* front;
  c10::DeleterFnPtr front_deleter;
  const c10::Allocator* behind;
  c10::DeleterFnPtr behind_deleter;
};

// From now on memory that came through it is read as what it is: of the allocator behind. Once in a process;
// `front` lives for good.
void learn_front_allocator(const FrontAllocator& front);

// The allocator behind, where one stands in front of it.
const c10::Allocator* real_allocator(const c10::Allocator* allocator);

// Where TensorImpl itself says the data is, by its own arithmetic; absent where asking would throw.
std::optional<const void*> impl_data(const c10::TensorImpl& impl, const TensorFacts& facts);

}  // namespace tensorplay
