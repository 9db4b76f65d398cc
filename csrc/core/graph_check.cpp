#include "graph_check.h"

#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <string_view>
#include <typeinfo>

#define TENSORPLAY_COMPAT_GRAPH
#include "../compat.h"
#include "owners.h"
#include "read.h"

namespace tensorplay {
namespace {

using torch::autograd::Node;

// Between an operator and its weight lie at most so many nodes of one input: a transpose, a cast, a view.
constexpr int kMostBetween = 4;

// The first leaf that a node works with, directly or through nodes of one input; null for none.
const c10::TensorImpl* leaf_behind(const Node& node) {
  for (const torch::autograd::Edge& edge : node.next_edges()) {
    const Node* next = edge.function.get();
    for (int step = 0; next != nullptr && step < kMostBetween; ++step) {
      if (const at::TensorBase* leaf = leaf_of(*next))
        return leaf->defined() ? leaf->unsafeGetTensorImpl() : nullptr;
      next = next->num_outputs() == 1 ? next->next_edge(0).function.get() : nullptr;
    }
  }
  return nullptr;
}

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

// Ends what the walk over one graph goes through; no more than this is worth a search.
constexpr size_t kMostSearched = 64;
constexpr uint64_t kMostTimes = 4;

bool is_addition(const Node& node) {
  return std::string_view(typeid(node).name()) == "N5torch8autograd9generated12AddBackward0E";
}

bool has_one_element(const Node& node) {
  if (node.num_inputs() != 1) return false;
  const auto& metadata = node.input_metadata(0);
  return !metadata.was_default_constructed() && !metadata.is_cpp_nested_tensor() &&
         std::ranges::all_of(metadata.shape_as_dim_vector(), [](const c10::SymInt& size) {
           return !size.is_heap_allocated() && size.as_int_unchecked() == 1;
         });
}

// The node behind one that has but one behind it, or null.
const Node* only_next(const Node& node) {
  const Node* found = nullptr;
  for (const torch::autograd::Edge& edge : node.next_edges()) {
    if (edge.function.get() == nullptr) continue;
    if (found != nullptr) return nullptr;
    found = edge.function.get();
  }
  return found;
}

// Every node behind some, each once.
template <class Visit>
void each_behind(const Node* from, PointerSet& seen, Visit visit) {
  std::vector<const Node*> open;
  if (from != nullptr && seen.insert(from)) open.push_back(from);
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    if (!visit(*node)) return;
    for (const torch::autograd::Edge& edge : node->next_edges()) {
      const Node* next = edge.function.get();
      if (next != nullptr && seen.insert(next)) open.push_back(next);
    }
  }
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
      with_gradient_graph_.push_back(leaf->unsafeGetTensorImpl());
    }
    return;
  }
  const size_t leaf = leaf_number(node);
  SavedSum* const sums[] = {&total, &by_kind[kind].second, &by_leaf[leaf].second};
  ++by_leaf[leaf].second.nodes;
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

void GraphCheck::find_accumulation(const Node* node, size_t root, PythonSaved python_saved) {
  for (int step = 0; node != nullptr && !is_addition(*node) && step < 2; ++step) {  // as a mean, total / n
    node = has_one_element(*node) ? only_next(*node) : nullptr;
  }
  std::vector<const Node*> terms;
  while (node != nullptr && is_addition(*node) && has_one_element(*node) && node->num_outputs() == 2) {
    const Node* left = node->next_edge(0).function.get();
    const Node* right = node->next_edge(1).function.get();
    if (left == nullptr || right == nullptr) {  // what it began with, as 0
      node = left == nullptr ? right : left;
      break;
    }
    const bool goes_right = !is_addition(*left) && is_addition(*right);
    terms.push_back(goes_right ? left : right);
    node = goes_right ? right : left;
  }
  if (terms.empty() || node == nullptr) return;
  terms.push_back(node);
  const std::type_info& kind = typeid(*terms.front());
  Accumulation found{root, terms.size(), 0, false};
  std::vector<Versions> versions;
  uint64_t left = kMostTimes * total.nodes;  // what terms share is read for each of them
  for (const Node* term : terms) {
    if (typeid(*term) != kind || left == 0) return;  // terms of one loss, as a penalty is
    found.released += read_term(*term, python_saved, left, versions.emplace_back()) ? 1 : 0;
  }
  found.weights_moved = terms.size() > 2 && any_moves(versions);
  accumulations.push_back(found);
}

bool GraphCheck::read_term(const Node& term, PythonSaved python_saved, uint64_t& left, Versions& versions) {
  bool is_released = false;
  PointerSet seen;
  std::vector<SavedSlot> slots;
  each_behind(&term, seen, [&](const Node& at) {
    if (left == 0 || --left == 0) return false;
    const std::unique_lock<std::mutex> lock(compat::node_mutex(at), std::try_to_lock);
    slots.clear();
    if (lock.owns_lock()) read_slots(at, python_saved, slots);
    const c10::TensorImpl* leaf = slots.empty() ? nullptr : leaf_behind(at);
    for (const SavedSlot& slot : slots) {
      const SlotState state = read_saved(*slot.variable).state;
      is_released = is_released || state == SlotState::kReleased;
      if (leaf == nullptr || (state != SlotState::kHeld && state != SlotState::kReleased)) continue;
      // Of several alike in one term, as in a recurrent net, the first.
      versions.try_emplace({leaf, &typeid(at), slot.argument}, compat::saved_version(*slot.variable));
    }
    return true;
  });
  return is_released;
}

// Whether what some place saved has an older version in each term than in the one before: the terms come from
// the last one back. A released slot keeps its number.
bool GraphCheck::any_moves(const std::vector<Versions>& terms) {
  return std::ranges::any_of(terms.front(), [&](const auto& first) {
    const auto& [place, version] = first;
    uint32_t last = version;
    for (size_t i = 1; i < terms.size(); ++i) {
      const auto found = terms[i].find(place);
      if (found == terms[i].end() || found->second >= last) return false;
      last = found->second;
    }
    return true;
  });
}

void GraphCheck::find_cycles() {
  for (size_t i = 0; i < std::min(with_gradient_graph_.size(), kMostSearched); ++i) {
    const c10::TensorImpl* leaf = with_gradient_graph_[i];
    const at::TensorBase* gradient = grad_of(*leaf);
    PointerSet seen;
    bool leads_back = false;
    std::vector<const at::TensorBase*> gradients{gradient};  // of two leaves each may lead to the other
    for (size_t next = 0; next < gradients.size() && !leads_back; ++next) {
      const at::TensorBase* from = gradients[next];
      each_behind(from == nullptr ? nullptr : grad_fn_of(*from->unsafeGetTensorImpl()), seen,
                  [&](const Node& node) {
                    const at::TensorBase* reached = leaf_of(node);
                    if (reached == nullptr || !reached->defined()) return true;
                    leads_back = leads_back || reached->unsafeGetTensorImpl() == leaf;
                    gradients.push_back(grad_of(*reached->unsafeGetTensorImpl()));
                    return !leads_back;
                  });
    }
    if (leads_back) cycles.push_back(leaf);
  }
}

void GraphCheck::finish(std::span<const GraphRoot> roots, PythonSaved python_saved) {
  for (size_t root = 0; root < roots.size(); ++root) {
    const c10::TensorImpl* tensor = roots[root].tensor;
    find_accumulation(tensor == nullptr ? roots[root].node : next_grad_fn_of(*tensor), root, python_saved);
  }
  find_cycles();
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
