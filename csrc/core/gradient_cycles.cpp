#include "gradient_cycles.h"

#include <torch/csrc/autograd/node.h>

#include <algorithm>
#include <cstdint>
#include <unordered_map>

#include "owners.h"
#include "read.h"

namespace tensorplay {
namespace {

using torch::autograd::Node;

constexpr uint32_t kNone = UINT32_MAX;

// The node behind the gradient of the leaf that a node accumulates into; null for any other.
const Node* behind_gradient(const Node& node) {
  const at::TensorBase* leaf = leaf_of(node);
  if (leaf == nullptr || !leaf->defined()) return nullptr;
  const at::TensorBase* gradient = grad_of(*leaf->unsafeGetTensorImpl());
  return gradient == nullptr ? nullptr : grad_fn_of(*gradient->unsafeGetTensorImpl());
}

// Strongly connected components by Tarjan's way, without recursion.
class Components {
 public:
  void search(const Node* start) {
    if (start == nullptr || numbers_.contains(start)) return;
    enter(start);
    while (!path_.empty()) {
      const uint32_t at = path_.back();
      if (const Node* next = take_next(at)) {
        const auto found = numbers_.find(next);
        if (found == numbers_.end()) {
          enter(next);
        } else if (states_[found->second].component == kNone) {
          states_[at].low = std::min(states_[at].low, found->second);
        }
        continue;
      }
      path_.pop_back();
      if (!path_.empty()) states_[path_.back()].low = std::min(states_[path_.back()].low, states_[at].low);
      if (states_[at].low == at) close(at);
    }
  }

  // Whether a node lies on a cycle: none leads to itself directly.
  bool is_on_cycle(const Node* node) const {
    const auto found = numbers_.find(node);
    return found != numbers_.end() && sizes_[states_[found->second].component] > 1;
  }

 private:
  struct State {
    const Node* node;
    uint32_t low;
    uint32_t next = 0;  // the edge to follow; one more than there are is the gradient's
    uint32_t component = kNone;
  };

  void enter(const Node* node) {
    const auto number = static_cast<uint32_t>(states_.size());
    numbers_.emplace(node, number);
    states_.push_back({node, number});
    path_.push_back(number);
    open_.push_back(number);
  }

  const Node* take_next(uint32_t at) {
    State& state = states_[at];
    const Node& node = *state.node;
    while (state.next < node.num_outputs()) {
      if (const Node* next = node.next_edge(state.next++).function.get()) return next;
    }
    return state.next++ == node.num_outputs() ? behind_gradient(node) : nullptr;
  }

  void close(uint32_t first) {
    const auto component = static_cast<uint32_t>(sizes_.size());
    sizes_.push_back(0);
    uint32_t member = kNone;
    while (member != first) {
      member = open_.back();
      open_.pop_back();
      states_[member].component = component;
      ++sizes_.back();
    }
  }

  std::unordered_map<const Node*, uint32_t> numbers_;
  std::vector<State> states_;
  std::vector<uint32_t> path_;
  std::vector<uint32_t> open_;  // of no component yet
  std::vector<uint32_t> sizes_;
};

}  // namespace

std::vector<const Node*> in_gradient_cycles(std::span<const Node* const> accumulators) {
  Components components;
  for (const Node* node : accumulators) components.search(node);
  std::vector<const Node*> found;
  std::ranges::copy_if(accumulators, std::back_inserter(found),
                       [&](const Node* node) { return components.is_on_cycle(node); });
  return found;
}

}  // namespace tensorplay
