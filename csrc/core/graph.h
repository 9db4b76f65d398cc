// The autograd graph behind some tensors, walked without recursion: nodes and what each saved for backward.
//
// Refuses to unpack, to rebuild a grad_fn, to make an AccumulateGrad and to wait for a lock: a node that is
// computing, or whose tensors are being given back, is reported as busy.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <optional>
#include <span>
#include <typeinfo>
#include <vector>

#include "nodes.h"

namespace tensorplay {

enum class SlotState : uint8_t {
  kHeld,
  kPackedByHook,  // saved_tensors_hooks: what is kept is the hook's own
  kNothing,       // the argument was None or not needed
  kReleased,      // given back after backward
};

// What one slot holds. Addresses to compare, valid while the node is alive and no backward runs.
struct SavedFacts {
  SlotState state = SlotState::kNothing;
  const at::TensorBase* tensor = nullptr;  // kHeld
  uint32_t expected_version = 0;           // kHeld, kPackedByHook
};

SavedFacts read_saved(const torch::autograd::SavedVariable& variable);

// The operator that a saved tensor came from, as PyTorch names it where its version is wrong.
struct Origin {
  const torch::autograd::Node* node = nullptr;
  bool is_rebuilt = false;  // a view written in place: its grad_fn is to become a new AsStridedBackward0
  uint32_t output = 0;
};

// Of a slot that is held by `saver`; nothing for a leaf, and where the name cannot be known before.
std::optional<Origin> origin_of(const torch::autograd::SavedVariable& variable,
                                const torch::autograd::Node& saver);

// Saved tensors of a Python autograd.Function's node; core/ does not know Python.
using PythonSaved = std::span<const torch::autograd::SavedVariable> (*)(const torch::autograd::Node& node);

// Appends the slots of a node, valid while it is held: its mutex is taken, or no backward runs.
void read_slots(const torch::autograd::Node& node, PythonSaved python_saved, std::vector<SavedSlot>& out);

class GraphVisitor {
 public:
  virtual ~GraphVisitor() = default;
  // Called once a node, from the roots on; the slots are valid during the call. `busy`: another thread holds
  // the node, its slots were not read.
  virtual void visit(const torch::autograd::Node& node, size_t root, std::span<const SavedSlot> slots,
                     bool busy) = 0;
};

// Where a walk begins: a node, or a tensor, with the graph behind it and the one behind its gradient, which
// create_graph made and nothing else need hold.
struct GraphRoot {
  const torch::autograd::Node* node = nullptr;
  const c10::TensorImpl* tensor = nullptr;
};

// Which gradients' own graphs are gone through: those of the leaves that are met, too, or of the roots alone.
// A backward goes through none.
enum class Gradients : uint8_t { kOfLeaves, kOfRoots };

// Needs the GIL where Python functions' nodes are in the graph (`python_saved` may be null: theirs are then
// not read), and the roots kept alive. A gradient that another thread accumulates now is passed over.
// O(nodes + edges).
void walk_graph(std::span<const GraphRoot> roots, PythonSaved python_saved, GraphVisitor& visitor,
                Gradients gradients = Gradients::kOfLeaves);

// The node that autograd's field names, also where it is stale; null for a leaf.
const torch::autograd::Node* grad_fn_of(const c10::TensorImpl& impl);

// Whether a view was written since autograd noted its grad_fn: the field is stale.
bool is_stale_view(const c10::TensorImpl& impl);

// The node that backward begins with: of a view whose field is stale that of its base, which PyTorch builds
// on.
const torch::autograd::Node* next_grad_fn_of(const c10::TensorImpl& impl);

// The leaf that an AccumulateGrad collects for; null for any other node.
const at::TensorBase* leaf_of(const torch::autograd::Node& node);

// The first leaf that a node works with, directly or through nodes of one input; null for none.
const c10::TensorImpl* leaf_behind(const torch::autograd::Node& node);

// One operator between a tensor and its view base, as its node remembers it.
struct ViewNode {
  const torch::autograd::Node* node;
  uint32_t output;             // which of the node's outputs is on the way
  std::vector<int64_t> shape;  // of that output; zeros where `symbolic`
  bool symbolic = false;
};

// The nodes from a view's grad_fn back to its base, the nearest to the base first; empty where the field is
// stale or the nodes do not lead there.
std::vector<ViewNode> view_nodes(const c10::TensorImpl& view);

// What autograd keeps of a view. Valid while the view is alive and nothing is written to it.
struct ViewFacts {
  const at::TensorBase* base = nullptr;
  const std::type_info* function = nullptr;  // the view function, where PyTorch kept one
};

// Absent for a tensor that backward takes for no view.
std::optional<ViewFacts> view_of(const c10::TensorImpl& impl);

}  // namespace tensorplay
