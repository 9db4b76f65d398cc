// How the body of a DTensor and its local tensor lie to each other. Pure: facts in, states out.
//
// Two mechanisms are told apart. An ordinary body is a tensor over the storage of the local tensor, as
// Tensor._make_subclass() makes it: both have one StorageImpl and one version counter. A wrapper, as torch's
// own DTensor is, has the global shape and no memory: of it only labels can be wrong. By either one operators
// may be sent to the class by the Python key.
#pragma once

#include <cstdint>
#include <vector>

#include "records.h"

namespace tensorplay {

// Worst first: the first that holds is the tensor's state, the rest stand beside it.
enum class DtensorState : uint8_t {
  kUnwrapped,      // the class has __torch_dispatch__, and the body lost the key that leads there
  kLocalFake,      // the local tensor is a FakeTensor
  kLocalSparse,    // the local tensor is not strided
  kWrapperNoData,  // the local tensor is a wrapper itself: its memory lies in other tensors
  kFreed,          // a storage with fewer bytes than the elements reach
  kBodyMeta,       // the body is on meta, the local tensor is not
  kLocalMeta,      // the other way round
  kDtype,
  kShape,
  kDevice,        // a wrapper that says another device than its local tensor
  kSplit,         // two storages, each with memory of its own
  kAliasedTwice,  // two storages over the same memory
  kOffset,
  kStride,
  kLocalNonleaf,    // a parameter's local tensor was computed: gradients never stay with it
  kLocalInference,  // the local tensor was made in inference mode, the body was not
  kVersionSplit,    // one storage, two version counters: a write to one is not seen by the other's graph
  kRequiresGrad,    // the body requires grad, the local tensor does not
  kPending,         // both on meta: to be materialised
  kOk,
  kHeld,   // somebody beside the Python object owns the body's impl
  kFlat,   // the local tensor begins within its storage, and the body with it
  kEmpty,  // no elements: only the storages are compared
};

// As docs and users write them: BODY_META.
const char* name_of(DtensorState state);

// What the body is meant to be.
struct DtensorForm {
  bool is_wrapper = false;    // it has no memory
  bool has_key = false;       // it has the Python key
  bool is_parameter = false;  // a leaf is expected
};

// `dispatches`: the class has a __torch_dispatch__; `in_slot`: it keeps the local tensor in a slot, as
// torch's own does. What a body was that lost its key is told by that alone.
DtensorForm form_of(const TensorFacts& body, bool dispatches, bool in_slot, bool is_parameter);

// Worst first; never empty.
std::vector<DtensorState> relate(const TensorFacts& body, const TensorFacts& local, DtensorForm form);

// Of an ordinary body: whether its impl should be exchanged for an alias of the local tensor. That may be
// refused: of another type or without memory it would mend nothing.
bool calls_for_exchange(const std::vector<DtensorState>& states);

// Of a wrapper: whether a whole DTensor made from the local tensor should take its place.
bool calls_for_donor(const std::vector<DtensorState>& states);

}  // namespace tensorplay
