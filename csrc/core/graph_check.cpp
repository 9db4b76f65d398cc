#include "graph_check.h"

#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <string_view>
#include <typeinfo>

#define TENSORPLAY_COMPAT_GRAPH
#include "../compat.h"
#include "gradient_cycles.h"
#include "owners.h"
#include "read.h"

namespace tensorplay {
namespace {

using torch::autograd::Node;

// What the terms of sums share is read for each of them: at most so many times the nodes there are.
constexpr uint64_t kMostTimes = 4;

// Whether the tensor has elements to read and not the memory to read them from, where its kind has memory.
bool lacks_memory(const c10::TensorImpl& impl) {
  const c10::StorageImpl* storage = impl.unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr || typeid(impl) != typeid(c10::TensorImpl)) return false;
  TensorFacts facts;
  read_tensor(impl, facts);
  if (facts.kind != Kind::kStrided || facts.impl.numel == 0) return false;
  return facts.data.pointer == nullptr ||
         facts.needed_nbytes().value_or(0) > nbytes_of(*storage).value_or(INT64_MAX);
}

// Backward takes the operator out of the node of an in-place write on a view.
bool is_copy_slices_given_back(const Node& node) {
  return typeid(node) == typeid(torch::autograd::CopySlices) &&
         static_cast<const torch::autograd::CopySlices&>(node).fn.get() == nullptr;
}

}  // namespace

size_t GraphCheck::kind_of(const Node& node) {
  const bool own_name = is_python_node(typeid(node));
  if (!own_name) {
    const auto found = kinds_.find(&typeid(node));
    if (found != kinds_.end()) return found->second;
  }
  std::string name = name_(node);
  const auto [found, is_new] = kinds_by_name_.try_emplace(name, by_kind.size());
  if (is_new) by_kind.emplace_back(std::move(name), SavedSum());
  if (!own_name) kinds_.emplace(&typeid(node), found->second);
  return found->second;
}

size_t GraphCheck::leaf_number(const Node& node) {
  const auto [found, is_new] = leaves_.try_emplace(leaf_behind(node), by_leaf.size());
  if (is_new) by_leaf.emplace_back(found->first, SavedSum());
  return found->second;
}

void GraphCheck::add_storage(const c10::TensorImpl& impl, size_t kind, size_t leaf) {
  const c10::StorageImpl* storage = impl.unsafe_storage().unsafeGetStorageImpl();
  if (storage != nullptr && seen_.insert(storage)) storages_.push_back({storage, kind, leaf});
}

void GraphCheck::visit(const Node& node, size_t root, std::span<const SavedSlot> slots, bool is_busy) {
  ++total.nodes;
  busy += is_busy ? 1 : 0;
  const size_t kind = kind_of(node);
  ++by_kind[kind].second.nodes;
  if (const at::TensorBase* leaf = leaf_of(node); leaf != nullptr && leaf->defined()) {
    if (const auto* storage = leaf->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()) {
      of_leaves_.insert(storage);
    }
    const at::TensorBase* gradient = grad_of(*leaf->unsafeGetTensorImpl());
    if (gradient != nullptr && grad_fn_of(*gradient->unsafeGetTensorImpl()) != nullptr) {
      with_gradient_graph_.push_back(&node);
    }
    return;
  }
  const size_t leaf = leaf_number(node);
  SavedSum* const sums[] = {&total, &by_kind[kind].second, &by_leaf[leaf].second};
  ++by_leaf[leaf].second.nodes;
  if (slots.empty() && !is_busy && is_copy_slices_given_back(node)) {
    released.push_back({&node, "fn", -1, nullptr, 0, root});
    for (SavedSum* sum : sums) ++sum->slots;
  }
  if (slots.empty() && !is_busy && gave_back_ != nullptr && gave_back_(node)) {
    released.push_back({&node, "saved_tensors", -1, nullptr, 0, root});
    for (SavedSum* sum : sums) ++sum->slots;
  }
  for (const SavedSlot& slot : slots) {
    const SavedFacts saved = read_saved(*slot.variable);
    if (saved.state == SlotState::kNothing) continue;
    for (SavedSum* sum : sums) ++sum->slots;
    const SavedAt at{&node, slot.argument, slot.index, saved.tensor, saved.expected_version, root};
    switch (saved.state) {
      case SlotState::kReleased:
        released.push_back(at);
        break;
      case SlotState::kPackedByHook:
        for (SavedSum* sum : sums) ++sum->packed;
        break;
      case SlotState::kHeld: {
        const c10::TensorImpl& impl = *saved.tensor->unsafeGetTensorImpl();
        if (version_counter_of(impl) != nullptr &&
            impl.version_counter().current_version() != saved.expected_version) {
          written.push_back(at);
          written.back().origin = origin_of(*slot.variable, node);
        }
        if (lacks_memory(impl)) memoryless.push_back(at);
        add_storage(impl, kind, leaf);
        break;
      }
      case SlotState::kNothing:
        break;
    }
  }
}

void GraphCheck::finish(std::span<const GraphRoot> roots, PythonSaved python_saved) {
  accumulations = find_accumulations(roots, python_saved, kMostTimes * total.nodes);
  for (const Node* node : in_gradient_cycles(with_gradient_graph_)) {
    cycles.push_back(leaf_of(*node)->unsafeGetTensorImpl());
  }
  // The engine takes the youngest node first: what it will stumble over comes first.
  std::ranges::stable_sort(written, std::ranges::greater(),
                           [](const SavedAt& at) { return at.node->sequence_nr(); });
  for (const Storage& one : storages_) {
    const auto nbytes = static_cast<uint64_t>(nbytes_of(*one.storage).value_or(0));
    if (of_leaves_.contains(one.storage)) {
      ++leaf_storages;
      leaf_nbytes += nbytes;
      continue;
    }
    for (SavedSum* sum : {&total, &by_kind[one.kind].second, &by_leaf[one.leaf].second}) {
      ++sum->storages;
      sum->nbytes += nbytes;
    }
  }
}

}  // namespace tensorplay
