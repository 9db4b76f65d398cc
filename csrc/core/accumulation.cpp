#include "accumulation.h"

#include <torch/csrc/autograd/node.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <typeinfo>

#define TENSORPLAY_COMPAT_GRAPH
#include "../compat.h"
#include "pointer_set.h"
#include "read.h"

namespace tensorplay {
namespace {

using torch::autograd::Node;

// How an operator's node takes part in a sum.
enum class Part : uint8_t {
  kTerm,       // it is what is added up
  kSum,        // each input is added: an addition, torch.stack()
  kWeighted,   // its one input with a graph is scaled, cast or viewed
  kReduction,  // of a stack: all its elements are added
};

// "AddBackward" for AddBackward0 of the generated operators; empty for any other node.
std::string_view operator_of(const Node& node) {
  constexpr std::string_view kPrefix = "N5torch8autograd9generated";
  constexpr std::string_view kDigits = "0123456789";
  std::string_view name = typeid(node).name();
  if (!name.starts_with(kPrefix) || !name.ends_with('E')) return {};
  name.remove_prefix(kPrefix.size());
  name.remove_suffix(1);
  name.remove_prefix(std::min(name.find_first_not_of(kDigits), name.size()));
  return name.substr(0, name.find_last_not_of(kDigits) + 1);
}

bool is_stack(const Node& node) {
  const std::string_view name = operator_of(node);
  return name == "StackBackward" || name == "CatBackward";
}

Part part_of(const Node& node) {
  const std::string_view name = operator_of(node);
  const auto is_one_of = [name](std::initializer_list<std::string_view> names) {
    return std::ranges::find(names, name) != names.end();
  };
  if (name.empty()) return Part::kTerm;
  if (is_one_of({"AddBackward", "SubBackward", "RsubBackward", "LerpBackward"}) || is_stack(node))
    return Part::kSum;
  if (is_one_of({"MulBackward", "DivBackward", "NegBackward", "ToCopyBackward", "CloneBackward",
                 "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "UnsqueezeBackward",
                 "SqueezeBackward", "ExpandBackward"})) {
    return Part::kWeighted;
  }
  return is_one_of({"MeanBackward", "SumBackward"}) ? Part::kReduction : Part::kTerm;
}

// The shape of a node's one output, where it is plain.
std::optional<std::vector<int64_t>> shape_of(const Node& node) {
  if (node.num_inputs() != 1) return std::nullopt;
  const auto& metadata = node.input_metadata(0);
  if (metadata.was_default_constructed() || metadata.is_cpp_nested_tensor()) return std::nullopt;
  std::vector<int64_t> shape;
  for (const c10::SymInt& size : metadata.shape_as_dim_vector()) {
    if (size.is_heap_allocated()) return std::nullopt;
    shape.push_back(size.as_int_unchecked());
  }
  return shape;
}

bool has_one_element(const Node& node) {
  const auto shape = shape_of(node);
  return shape && std::ranges::all_of(*shape, [](int64_t size) { return size == 1; });
}

// The nodes behind one, as far as they take part in a sum; none for a term.
std::vector<const Node*> summands(const Node& node) {
  const Part part = part_of(node);
  std::vector<const Node*> found;
  if (part == Part::kTerm) return found;
  for (const torch::autograd::Edge& edge : node.next_edges()) {
    if (edge.function.get() != nullptr) found.push_back(edge.function.get());
  }
  if (part == Part::kWeighted && found.size() != 1) return {};  // a product of two graphs
  if (part == Part::kReduction && (found.size() != 1 || !is_stack(*found.front()))) return {};
  return found;
}

class Search {
 public:
  Search(PythonSaved python_saved, uint64_t budget) : python_saved_(python_saved), left_(budget) {}

  // What was added up behind a node; empty where it is no sum.
  std::vector<const Node*> terms_of(const Node& top) {
    const bool scalar = has_one_element(top);
    const auto shape = shape_of(top);
    if (!scalar && !is_stack(top) && part_of(top) != Part::kSum) return {};
    std::vector<const Node*> terms;
    std::vector<const Node*> open{&top};
    PointerSet seen;
    seen.insert(&top);
    while (!open.empty()) {
      if (left_ == 0 || --left_ == 0) return {};
      const Node* node = open.back();
      open.pop_back();
      // A vector is looked into where vectors of its shape are added, a stack where scalars are stacked.
      const bool inside = node == &top || has_one_element(*node) || (scalar && is_stack(*node)) ||
                          (!scalar && !is_stack(*node) && shape && shape_of(*node) == shape);
      const std::vector<const Node*> behind = inside ? summands(*node) : std::vector<const Node*>();
      if (behind.empty()) {
        terms.push_back(node);
        continue;
      }
      for (const Node* next : behind) {
        if (seen.insert(next)) open.push_back(next);
      }
    }
    return terms.size() < 2 ? std::vector<const Node*>() : terms;
  }

  // What is known of terms of one kind; nothing where the budget does not last.
  std::optional<Accumulation> judged(std::vector<size_t> roots, std::span<const Node* const> terms) {
    Accumulation found{.roots = std::move(roots), .terms = terms.size()};
    std::vector<Places> places;
    for (const Node* term : terms) {
      if (left_ == 0) return std::nullopt;
      found.released += read_term(*term, places.emplace_back()) ? 1 : 0;
    }
    if (left_ == 0) return std::nullopt;
    compare(places, found);
    return found;
  }

 private:
  // A place in the model: a leaf, a kind of node that works with it, and what that saved.
  using PlaceKey = std::tuple<const c10::TensorImpl*, const std::type_info*, std::string_view>;
  struct Saved {
    uint32_t version = 0;  // the youngest
    bool is_leaf = true;   // whether it was the leaf itself, or a view of it
  };
  using Places = std::map<PlaceKey, Saved>;

  // Whether a backward ran through it.
  bool read_term(const Node& term, Places& places) {
    bool is_released = false;
    PointerSet seen;
    std::vector<SavedSlot> slots;
    std::vector<const Node*> open{&term};
    seen.insert(&term);
    while (!open.empty()) {
      if (left_ == 0 || --left_ == 0) break;
      const Node& node = *open.back();
      open.pop_back();
      slots.clear();
      {
        const std::unique_lock<std::mutex> lock(compat::node_mutex(node), std::try_to_lock);
        if (lock.owns_lock()) read_slots(node, python_saved_, slots);
        const c10::TensorImpl* leaf = slots.empty() ? nullptr : leaf_behind(node);
        for (const SavedSlot& slot : slots) {
          const SavedFacts saved = read_saved(*slot.variable);
          is_released = is_released || saved.state == SlotState::kReleased;
          if (leaf == nullptr || (saved.state != SlotState::kHeld && saved.state != SlotState::kReleased)) {
            continue;
          }
          const uint32_t version = compat::saved_version(*slot.variable);  // a released slot keeps it
          Saved& place = places[{leaf, &typeid(node), slot.argument}];
          place.version = std::max(place.version, version);
          place.is_leaf = place.is_leaf && may_be_leaf(*leaf, saved, version);
        }
      }
      for (const torch::autograd::Edge& edge : node.next_edges()) {
        const Node* next = edge.function.get();
        if (next != nullptr && seen.insert(next)) open.push_back(next);
      }
    }
    return is_released;
  }

  // Of a slot that is given back no more is known than that a leaf's version only grows.
  static bool may_be_leaf(const c10::TensorImpl& leaf, const SavedFacts& saved, uint32_t version) {
    const void* counter = version_counter_of(leaf);
    if (counter == nullptr) return false;
    return saved.tensor == nullptr ? version <= leaf.version_counter().current_version()
                                   : version_counter_of(*saved.tensor->unsafeGetTensorImpl()) == counter;
  }

  // Which places are in each term; of those whether some saved another version of its leaf in each.
  static void compare(const std::vector<Places>& terms, Accumulation& out) {
    for (const auto& [key, first] : terms.front()) {
      std::set<uint32_t> versions;
      size_t found_in = 0;
      bool is_leaf = true;
      for (const Places& term : terms) {
        const auto found = term.find(key);
        if (found == term.end()) break;
        ++found_in;
        is_leaf = is_leaf && found->second.is_leaf;
        versions.insert(found->second.version);
      }
      if (found_in != terms.size()) continue;
      out.shares_places = true;
      out.weights_moved =
          out.weights_moved || (terms.size() > 2 && is_leaf && versions.size() == terms.size());
    }
  }

  PythonSaved python_saved_;
  uint64_t left_;
};

struct TypeLess {
  bool operator()(const std::type_info* a, const std::type_info* b) const { return a->before(*b); }
};

// Nodes by their kind, those of one kind in their order.
template <class Key>
using ByKind = std::map<const std::type_info*, std::vector<Key>, TypeLess>;

}  // namespace

std::vector<Accumulation> find_accumulations(std::span<const GraphRoot> roots, PythonSaved python_saved,
                                             uint64_t budget) {
  Search search(python_saved, budget);
  std::vector<Accumulation> found;
  const auto look_into = [&](size_t root, const Node& node, bool is_scalar) {
    ByKind<const Node*> kinds;
    for (const Node* term : search.terms_of(node)) kinds[&typeid(*term)].push_back(term);
    std::optional<Accumulation> best;
    for (const auto& [kind, terms] : kinds) {
      if (terms.size() < 2 || (best && best->terms >= terms.size())) continue;
      const auto sum = search.judged({root}, terms);
      // Several kinds are the terms of one loss, as a penalty is; vectors are the stream of a residual net.
      if (sum && (sum->spans_steps() || (is_scalar && kinds.size() == 1 && sum->shares_places))) best = sum;
    }
    if (best) found.push_back(std::move(*best));
  };
  const auto node_of = [&](size_t root) {
    const c10::TensorImpl* tensor = roots[root].tensor;
    return tensor == nullptr ? roots[root].node : next_grad_fn_of(*tensor);
  };

  std::vector<size_t> vectors;
  ByKind<size_t> listed;
  for (size_t root = 0; root < roots.size(); ++root) {
    const Node* node = node_of(root);
    if (node == nullptr) continue;
    if (!has_one_element(*node)) {
      vectors.push_back(root);
      continue;
    }
    look_into(root, *node, true);
    listed[&typeid(*node)].push_back(root);
  }
  for (const auto& [kind, members] : listed) {
    if (members.size() < 3) continue;
    std::vector<const Node*> terms;
    PointerSet seen;
    for (const size_t root : members) {
      if (seen.insert(node_of(root))) terms.push_back(node_of(root));
    }
    const auto list = search.judged(members, terms);
    if (list && list->weights_moved && terms.size() == members.size()) found.push_back(*list);
  }
  for (const size_t root : vectors) look_into(root, *node_of(root), false);
  return found;
}

}  // namespace tensorplay
