// What the C++ objects of a tensor own of each other: tensors, storages and the nodes of autograd.
//
// One call answers every strong reference that one object holds, so that a use_count is the number of answers
// that name it. Refuses to unpack, to wait for a lock, to run a hook and to count as an owner. What Python
// objects hold, and what these hold of Python, is the business of python/.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>

#include "graph.h"
#include "records.h"

namespace tensorplay {

// How one object refers to another: ("saved", "self", -1) is what a node saved of its argument `self`.
struct Link {
  std::string_view what;           // of static storage
  std::string_view argument = {};  // of static storage; may be empty
  int32_t index = -1;

  std::string text() const;  // "saved self", "saved tensors[1]", "grad_fn"
};

class OwnedVisitor {
 public:
  virtual ~OwnedVisitor() = default;
  virtual void on_tensor(const Link& link, const c10::TensorImpl& impl) = 0;
  virtual void on_storage(const Link& link, const c10::StorageImpl& storage) = 0;
  virtual void on_node(const Link& link, const torch::autograd::Node& node) = 0;
  // An object of a polymorphic class that may hold Python objects: a hook, or what a hook packed.
  virtual void on_hook(const Link& link, const std::type_info& type, const void* hook) = 0;
  // A Python object that C++ owns.
  virtual void on_python(const Link& link, const void* object) = 0;
};

// Each is O(what it answers). Tensors: storage, gradient, grad_fn, base, forward gradients, hooks, and the
// tensors inside.
void visit_owned(const c10::TensorImpl& impl, OwnedVisitor& visitor);

// Next nodes, saved tensors, the leaf that is accumulated into, hooks. False where another thread holds the
// node: what it saved is then left out.
bool visit_owned(const torch::autograd::Node& node, PythonSaved python_saved, OwnedVisitor& visitor);

// Whose memory the storage lies over, as far as its deleter tells: an array, a tensor of another framework's
// capsule, a larger storage.
void visit_owned(const c10::StorageImpl& storage, OwnedVisitor& visitor);

// A storage's own pointer and label; its bytes, absent where symbolic.
void read_data_of(const c10::StorageImpl& storage, DataFacts& facts);
std::optional<int64_t> nbytes_of(const c10::StorageImpl& storage);

// Strong references to it.
uint32_t use_count_of(const c10::intrusive_ptr_target& target);

}  // namespace tensorplay
