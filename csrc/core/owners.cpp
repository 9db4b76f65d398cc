#include "owners.h"

#include <ATen/DLConvertor.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <cstring>
#include <mutex>
#include <vector>

#define TENSORPLAY_COMPAT_GRAPH
#include "../compat.h"
#include "read.h"

namespace tensorplay {
namespace {

using torch::autograd::AutogradMeta;
using torch::autograd::DifferentiableViewMeta;
using torch::autograd::Node;
using torch::autograd::SavedVariable;

void tensor(OwnedVisitor& visitor, const Link& link, const at::TensorBase& owned) {
  if (owned.defined()) visitor.on_tensor(link, *owned.unsafeGetTensorImpl());
}

void node(OwnedVisitor& visitor, const Link& link, const c10::intrusive_ptr<Node>& owned) {
  if (owned.defined()) visitor.on_node(link, *owned);
}

template <class Hook>
void hook(OwnedVisitor& visitor, const Link& link, const std::unique_ptr<Hook>& owned) {
  if (owned != nullptr) visitor.on_hook(link, typeid(*owned), dynamic_cast<const void*>(owned.get()));
}

void forward_gradients(OwnedVisitor& visitor,
                       const std::shared_ptr<torch::autograd::ForwardGrad>& gradients) {
  if (gradients == nullptr) return;
  for (const auto& [level, value] : compat::forward_gradients(*gradients)) {
    tensor(visitor, {"forward gradient"}, value);
  }
}

void view_info(OwnedVisitor& visitor, const torch::autograd::ViewInfo& info) {
  tensor(visitor, {"base"}, info.base_);
  if (!info.has_view_fn()) return;
  for (const at::Tensor& kept : info.view_fn().get_tensors()) tensor(visitor, {"view function"}, kept);
}

void autograd_meta(OwnedVisitor& visitor, const AutogradMeta& meta) {
  node(visitor, {"grad_fn"}, meta.grad_fn_);
  forward_gradients(visitor, meta.fw_grad_);
  for (const auto& owned : meta.hooks_) hook(visitor, {"hook"}, owned);
  hook(visitor, {"post-accumulate hook"}, meta.post_acc_grad_hooks_);
  if (!meta.is_view_) return;
  const auto& view = static_cast<const DifferentiableViewMeta&>(meta);
  if (view.has_bw_view()) view_info(visitor, view.get_backward_view());
  if (view.has_fw_view() && !view.shared_view_info()) view_info(visitor, view.get_forward_view());
}

void saved(OwnedVisitor& visitor, const SavedSlot& slot) {
  const SavedVariable& variable = *slot.variable;
  tensor(visitor, {"saved", slot.argument, slot.index}, compat::saved_data(variable));
  node(visitor, {"grad_fn of saved", slot.argument, slot.index}, compat::saved_grad_fn(variable));
  node(visitor, {"accumulator of saved", slot.argument, slot.index}, compat::saved_accumulator(variable));
  forward_gradients(visitor, compat::saved_forward_gradients(variable));
  hook(visitor, {"packed", slot.argument, slot.index}, compat::saved_hooks(variable));
}

}  // namespace

std::string Link::text() const {
  std::string out(what);
  if (!argument.empty()) out.append(" ").append(argument);
  if (index >= 0) out.append("[").append(std::to_string(index)).append("]");
  return out;
}

void visit_owned(const c10::TensorImpl& impl, OwnedVisitor& visitor) {
  if (const c10::StorageImpl* storage = impl.unsafe_storage().unsafeGetStorageImpl()) {
    visitor.on_storage({"storage"}, *storage);
  }
  if (const at::TensorBase* grad = grad_of(impl)) tensor(visitor, {"grad"}, *grad);
  if (const auto* meta = static_cast<const AutogradMeta*>(impl.autograd_meta()))
    autograd_meta(visitor, *meta);
  if (typeid(impl) == typeid(c10::TensorImpl) || impl.has_symbolic_sizes_strides()) return;
  TensorFacts facts;
  read_tensor(impl, facts);
  if (!has_inner(facts.kind)) return;
  for (const InnerTensor& inner : inner_tensors(impl, facts.kind)) {
    tensor(visitor, {inner.role}, *inner.tensor);
  }
}

bool visit_owned(const Node& subject, PythonSaved python_saved, OwnedVisitor& visitor) {
  for (const torch::autograd::Edge& edge : subject.next_edges()) node(visitor, {"next"}, edge.function);
  for (const auto& owned : subject.pre_hooks()) hook(visitor, {"pre-hook"}, owned);
  for (const auto& owned : subject.post_hooks()) hook(visitor, {"hook"}, owned);
  auto& unguarded = const_cast<Node&>(subject);  // what PyTorch answers here it has no const form of
  for (const auto& owned : unguarded.tensor_pre_hooks()) hook(visitor, {"tensor hook"}, owned);
  for (const auto& [output, owned] : unguarded.retains_grad_hooks()) hook(visitor, {"retain_grad"}, owned);
  if (const at::TensorBase* leaf = leaf_of(subject)) tensor(visitor, {"variable"}, *leaf);

  const std::unique_lock<std::mutex> lock(compat::node_mutex(subject), std::try_to_lock);
  if (!lock.owns_lock()) return false;
  std::vector<SavedSlot> slots;
  read_slots(subject, python_saved, slots);
  for (const SavedSlot& slot : slots) saved(visitor, slot);
  if (const auto* slices = dynamic_cast<const torch::autograd::CopySlices*>(&subject)) {
    node(visitor, {"in-place operator"}, slices->fn);
  }
  return true;
}

void visit_owned(const c10::StorageImpl& storage, OwnedVisitor& visitor) {
  DataFacts facts;
  read_data_of(storage, facts);
  if (facts.origin == DataOrigin::kStorageSlice) {
    visitor.on_storage({"slice of"}, *static_cast<const c10::StorageImpl*>(facts.context));
  } else if (facts.producer != nullptr && facts.producer_is_python) {
    visitor.on_python({"memory of"}, facts.producer);
  } else if (facts.producer != nullptr) {
    const auto* context = static_cast<const c10::InefficientStdFunctionContext*>(facts.context);
    const void* managed = compat::captured_pointer(context->deleter_);
    if (const at::Tensor* lent = compat::dlpack_tensor(facts.producer, managed)) {
      tensor(visitor, {"memory of, by DLPack,"}, *lent);
    }
  }
}

void read_data_of(const c10::StorageImpl& storage, DataFacts& facts) {
  read_data(compat::own_data_ptr(storage), facts);
}

std::optional<int64_t> nbytes_of(const c10::StorageImpl& storage) {
  const c10::SymInt& nbytes = compat::own_nbytes(storage);
  if (nbytes.is_heap_allocated()) return std::nullopt;
  return nbytes.as_int_unchecked();
}

uint32_t use_count_of(const c10::intrusive_ptr_target& target) {
  return compat::ref_counts(target).strong;
}

}  // namespace tensorplay
