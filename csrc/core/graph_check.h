// What one look at the graph behind some tensors finds before backward: saved tensors that were written
// since, buffers that are given back, storages without memory, and what all that is saved costs.
//
// Reads versions, never unpacks: what a hook packed is counted, and its hook does not run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include "accumulation.h"
#include "graph.h"
#include "pointer_set.h"

namespace tensorplay {

// A tensor that a node saved, as far as it matters here. Valid while the roots are alive and no backward
// runs.
struct SavedAt {
  const torch::autograd::Node* node = nullptr;
  std::string_view argument;
  int32_t index = -1;
  const at::TensorBase* tensor = nullptr;  // null where it is given back
  uint32_t expected_version = 0;
  size_t root = 0;
  std::optional<Origin> origin = {};  // where it was written
};

// What the nodes of one kind, or those of one module, saved.
struct SavedSum {
  uint64_t nodes = 0;
  uint64_t slots = 0;
  uint64_t storages = 0;  // not those of leaves; each where it was met first
  uint64_t nbytes = 0;    // of these
  uint64_t packed = 0;    // slots that a hook packed: their bytes are not known
};

// The name of a node, for sums by kind. Python functions' nodes have a name each, the others one a class.
using NodeName = std::string (*)(const torch::autograd::Node& node);

// Whether a Python function's node gave back what it saved, of which nothing is left to see.
using GaveBack = bool (*)(const torch::autograd::Node& node);

class GraphCheck : public GraphVisitor {
 public:
  GraphCheck(NodeName name, GaveBack gave_back) : name_(name), gave_back_(gave_back) {}

  void visit(const torch::autograd::Node& node, size_t root, std::span<const SavedSlot> slots,
             bool busy) override;
  // Before the walk: a storage that would be there anyway, as a frozen parameter's. To compare, never to
  // follow.
  void expect(const c10::StorageImpl* storage) { of_leaves_.insert(storage); }
  // After the walk, with its roots.
  void finish(std::span<const GraphRoot> roots, PythonSaved python_saved);

  SavedSum total;
  uint64_t busy = 0;
  uint64_t leaf_storages = 0;  // saved storages that leaves of the graph have, or that were expected: weights
  uint64_t leaf_nbytes = 0;
  std::vector<SavedAt> written;     // their version moved since they were saved: backward will raise
  std::vector<SavedAt> released;    // given back by a backward that ran: a second one will raise
  std::vector<SavedAt> memoryless;  // elements, but no memory behind them, or not enough
  std::vector<Accumulation> accumulations;
  std::vector<const c10::TensorImpl*>
      cycles;  // leaves whose gradient's graph leads to them: nothing frees it
  std::vector<std::pair<std::string, SavedSum>> by_kind;
  // By the leaf that a node works with, null for none: its TensorImpl.
  std::vector<std::pair<const c10::TensorImpl*, SavedSum>> by_leaf;

 private:
  struct Storage {
    const c10::StorageImpl* storage;
    size_t kind;
    size_t leaf;
  };
  size_t kind_of(const torch::autograd::Node& node);
  size_t leaf_number(const torch::autograd::Node& node);
  void add_storage(const c10::TensorImpl& impl, size_t kind, size_t leaf);

  NodeName name_;
  GaveBack gave_back_;
  std::unordered_map<const std::type_info*, size_t> kinds_;  // one class may have several of these
  std::unordered_map<std::string, size_t> kinds_by_name_;
  std::unordered_map<const c10::TensorImpl*, size_t> leaves_;
  PointerSet seen_;
  PointerSet of_leaves_;
  std::vector<Storage> storages_;
  std::vector<const torch::autograd::Node*> with_gradient_graph_;  // AccumulateGrads
};

}  // namespace tensorplay
