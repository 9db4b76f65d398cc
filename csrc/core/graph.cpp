#include "graph.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <mutex>
#include <utility>

#define TENSORPLAY_COMPAT_GRAPH
#include "../compat.h"
#include "pointer_set.h"
#include "read.h"

namespace tensorplay {
namespace {

using torch::autograd::AutogradMeta;
using torch::autograd::DifferentiableViewMeta;
using torch::autograd::Node;

// Nothing a person wrote has so many operators between a view and its base.
constexpr size_t kMostViewNodes = 10'000;

// Between an operator and its weight lie at most so many nodes of one input: a transpose, a cast, a view.
constexpr int kMostBetween = 4;

struct Step {
  const Node* node;
  size_t root;
};

void append_all(std::span<const torch::autograd::SavedVariable> saved, std::string_view name,
                std::vector<SavedSlot>& out) {
  int32_t index = 0;
  for (const auto& variable : saved) out.push_back({name, index++, &variable});
}

using NodeOwner = decltype(AutogradMeta::grad_fn_);

// The node behind the gradient in a tensor's slot, or null. Needs: no other thread replaces the gradient.
NodeOwner gradient_fn_of(const c10::TensorImpl& impl) {
  const at::TensorBase* grad = grad_of(impl);
  const c10::TensorImpl* found = grad == nullptr ? nullptr : grad->unsafeGetTensorImpl();
  return found == nullptr || grad_fn_of(*found) == nullptr
             ? NodeOwner()
             : static_cast<const AutogradMeta*>(found->autograd_meta())->grad_fn_;
}

// The same, or null while another thread accumulates into the slot.
NodeOwner settled_gradient_fn_of(const c10::TensorImpl& impl) {
  if (grad_of(impl) == nullptr) return {};
  NodeOwner accumulator;
  {
    const auto& meta = static_cast<const AutogradMeta&>(*impl.autograd_meta());
    const std::unique_lock<std::mutex> lock(meta.mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return {};
    accumulator = meta.grad_accumulator_.lock();
  }
  if (accumulator.get() == nullptr) return gradient_fn_of(impl);
  const std::unique_lock<std::mutex> lock(compat::node_mutex(*accumulator), std::try_to_lock);
  return lock.owns_lock() ? gradient_fn_of(impl) : NodeOwner();
}

}  // namespace

void read_slots(const Node& node, PythonSaved python_saved, std::vector<SavedSlot>& out) {
  append_saved(node, out);
  if (!out.empty()) return;
  if (const auto* custom = compat::custom_function_saved(node)) {
    append_all(*custom, "saved_variables", out);
  } else if (python_saved != nullptr) {
    append_all(python_saved(node), "saved_tensors", out);
  }
}

SavedFacts read_saved(const torch::autograd::SavedVariable& variable) {
  SavedFacts facts;
  if (variable.has_hooks()) {
    facts.state = SlotState::kPackedByHook;
    facts.expected_version = compat::saved_version(variable);
    return facts;
  }
  const at::Tensor& data = compat::saved_data(variable);
  if (data.defined()) {
    facts.state = SlotState::kHeld;
    facts.tensor = &data;
    facts.expected_version = compat::saved_version(variable);
  } else {
    facts.state = compat::saved_nothing(variable) ? SlotState::kNothing : SlotState::kReleased;
  }
  return facts;
}

// unpack() in torch/csrc/autograd/saved_variable.cpp, and grad_fn() in variable.cpp, which makes a new node
// for a view that was written, and is not called here.
std::optional<Origin> origin_of(const torch::autograd::SavedVariable& variable, const Node& saver) {
  const compat::SavedOrigin saved = compat::saved_origin(variable);
  const c10::TensorImpl& impl = *compat::saved_data(variable).unsafeGetTensorImpl();
  Origin found{nullptr, false, saved.output};
  if (saved.in_place_on_view) {
    found.node = saved.weak_grad_fn;
  } else if (saved.is_original) {
    found.node = grad_fn_of(impl);
    if (is_stale_view(impl)) {
      if (view_of(impl)->function != nullptr) return std::nullopt;
      found.is_rebuilt = true;
    }
  }
  if (found.node == nullptr && !found.is_rebuilt) {
    if (saved.is_leaf) return std::nullopt;
    found.node = &saver;
  }
  return found;
}

void walk_graph(std::span<const GraphRoot> roots, PythonSaved python_saved, GraphVisitor& visitor,
                Gradients gradients) {
  PointerSet seen;
  std::vector<Step> open;
  std::vector<SavedSlot> slots;
  const auto push = [&](const Node* node, size_t root) {
    if (node != nullptr && seen.insert(node)) open.push_back({node, root});
  };
  // Behind gradients: another thread may replace one meanwhile.
  std::vector<NodeOwner> owned;
  const auto push_owned = [&](NodeOwner node, size_t root) {
    push(node.get(), root);
    if (node.get() != nullptr) owned.push_back(std::move(node));
  };
  for (size_t root = 0; root < roots.size(); ++root) {
    push(roots[root].node, root);
    if (roots[root].tensor != nullptr) {
      if (gradients == Gradients::kOfLeaves) push(grad_fn_of(*roots[root].tensor), root);
      push(next_grad_fn_of(*roots[root].tensor), root);
      push_owned(settled_gradient_fn_of(*roots[root].tensor), root);
    }
    while (!open.empty()) {
      const Step step = open.back();
      open.pop_back();
      slots.clear();
      {
        const std::unique_lock<std::mutex> lock(compat::node_mutex(*step.node), std::try_to_lock);
        if (lock.owns_lock()) read_slots(*step.node, python_saved, slots);
        visitor.visit(*step.node, step.root, slots, !lock.owns_lock());
        if (lock.owns_lock()) {
          // An in-place write on a view: the operator's own node is inside.
          if (typeid(*step.node) == typeid(torch::autograd::CopySlices)) {
            push(static_cast<const torch::autograd::CopySlices&>(*step.node).fn.get(), step.root);
          }
          const at::TensorBase* leaf = gradients == Gradients::kOfLeaves ? leaf_of(*step.node) : nullptr;
          if (leaf != nullptr && leaf->defined()) {
            push_owned(gradient_fn_of(*leaf->unsafeGetTensorImpl()), step.root);
          }
        }
      }
      for (const torch::autograd::Edge& edge : step.node->next_edges()) push(edge.function.get(), step.root);
    }
  }
}

const Node* grad_fn_of(const c10::TensorImpl& impl) {
  const auto* meta = static_cast<const AutogradMeta*>(impl.autograd_meta());
  return meta == nullptr ? nullptr : meta->grad_fn_.get();
}

std::optional<ViewFacts> view_of(const c10::TensorImpl& impl) {
  const auto* meta = static_cast<const AutogradMeta*>(impl.autograd_meta());
  if (meta == nullptr || !meta->is_view_) return std::nullopt;
  const auto& view = static_cast<const DifferentiableViewMeta&>(*meta);
  if (!view.has_bw_view()) return std::nullopt;
  const torch::autograd::ViewInfo& info = view.get_backward_view();
  return ViewFacts{&info.base_, info.has_view_fn() ? &typeid(info.view_fn()) : nullptr};
}

bool is_stale_view(const c10::TensorImpl& impl) {
  const auto* meta = static_cast<const AutogradMeta*>(impl.autograd_meta());
  if (meta == nullptr || !meta->is_view_) return false;
  const auto& view = static_cast<const DifferentiableViewMeta&>(*meta);
  const bool counted = compat::version_counter_address(impl.version_counter()) != nullptr;
  if (!view.has_bw_view() || !counted) return false;
  const at::Tensor& base = view.get_backward_view().base_;
  return (view.grad_fn_.get() != nullptr || base.requires_grad()) &&
         view.get_attr_version() != impl.version_counter().current_version();
}

const Node* next_grad_fn_of(const c10::TensorImpl& impl) {
  return grad_fn_of(is_stale_view(impl) ? *view_of(impl)->base->unsafeGetTensorImpl() : impl);
}

const at::TensorBase* leaf_of(const Node& node) {
  // Its very class: a cast to it would cost as much as all else of a node.
  if (typeid(node) != typeid(torch::autograd::AccumulateGrad)) return nullptr;
  return &static_cast<const torch::autograd::AccumulateGrad&>(node).variable;
}

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

std::vector<ViewNode> view_nodes(const c10::TensorImpl& view) {
  const auto* meta = static_cast<const AutogradMeta*>(view.autograd_meta());
  if (meta == nullptr || !meta->is_view_ || meta->grad_fn_.get() == nullptr) return {};
  const auto& differentiable = static_cast<const DifferentiableViewMeta&>(*meta);
  if (!differentiable.has_bw_view()) return {};
  const bool counted = compat::version_counter_address(view.version_counter()) != nullptr;
  if (!counted || is_stale_view(view)) return {};
  const c10::TensorImpl* const base = differentiable.get_backward_view().base_.unsafeGetTensorImpl();
  const Node* const end = grad_fn_of(*base);

  std::vector<ViewNode> found;
  const Node* node = meta->grad_fn_.get();
  uint32_t output = meta->output_nr_;
  while (node != nullptr && node != end && found.size() < kMostViewNodes) {
    if (const at::TensorBase* leaf = leaf_of(*node)) {
      if (leaf->unsafeGetTensorImpl() != base) return {};
      return {found.rbegin(), found.rend()};
    }
    if (output >= node->num_inputs() || node->num_outputs() != 1) return {};
    const auto& metadata = node->input_metadata(output);
    if (metadata.was_default_constructed() || metadata.is_cpp_nested_tensor()) return {};
    ViewNode step{node, output, {}};
    for (const c10::SymInt& size : metadata.shape_as_dim_vector()) {
      step.symbolic = step.symbolic || size.is_heap_allocated();
      step.shape.push_back(size.is_heap_allocated() ? 0 : size.as_int_unchecked());
    }
    found.push_back(std::move(step));
    output = node->next_edge(0).input_nr;
    node = node->next_edge(0).function.get();
  }
  if (node == nullptr || node != end) return {};
  return {found.rbegin(), found.rend()};
}

}  // namespace tensorplay
