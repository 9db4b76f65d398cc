// Every name that differs between PyTorch releases, or that PyTorch keeps private, and nothing else.
//
// Reads torch 2.13 and 2.14. The private fields are reached through explicit instantiation, which the
// language allows to name them ([temp.spec]/6): a renamed field is a compile error. Four things rest on
// layout: a VersionCounter is one pointer (asserted), functorch's wrapper begins with what it wraps, a custom
// function's node with its context, and a small lambda lies at the beginning of its std::function (tested).
//
// All is in an unnamed namespace: a template may be instantiated explicitly only once in a program, and each
// source file has its own here.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/version.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <string_view>
#include <typeinfo>

#ifdef TENSORPLAY_COMPAT_INNER  // asked for only where inner tensors are read: these headers are slow to
                                // parse
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#endif

#ifdef TENSORPLAY_COMPAT_GRAPH  // asked for only where the autograd graph is walked
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/saved_variable.h>
#endif

#if TORCH_VERSION_MAJOR != 2 || TORCH_VERSION_MINOR < 13 || TORCH_VERSION_MINOR > 14
#error "tensorplay reads the object layout of torch 2.13 and 2.14; install one of them and build again"
#endif

// expose_NAME() yields the pointer to a private member of CLASS.
#define TENSORPLAY_EXPOSE(NAME, CLASS, MEMBER)                        \
  namespace tensorplay::compat::detail {                              \
  namespace {                                                         \
  struct NAME##Tag {                                                  \
    friend constexpr auto expose_##NAME(NAME##Tag);                   \
  };                                                                  \
  template <auto Member>                                              \
  struct NAME##Exposer {                                              \
    friend constexpr auto expose_##NAME(NAME##Tag) { return Member; } \
  };                                                                  \
  template struct NAME##Exposer<&CLASS::MEMBER>;                      \
  }                                                                   \
  }

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wnon-template-friend"
#endif
TENSORPLAY_EXPOSE(combined_refcount, c10::intrusive_ptr_target, combined_refcount_)
TENSORPLAY_EXPOSE(device_opt, c10::TensorImpl, device_opt_)
TENSORPLAY_EXPOSE(sizes_and_strides, c10::TensorImpl, sizes_and_strides_)
TENSORPLAY_EXPOSE(storage_offset, c10::TensorImpl, storage_offset_)
TENSORPLAY_EXPOSE(numel, c10::TensorImpl, numel_)
TENSORPLAY_EXPOSE(data_type, c10::TensorImpl, data_type_)
TENSORPLAY_EXPOSE(matches_policy, c10::TensorImpl, matches_policy)
TENSORPLAY_EXPOSE(layout_impl, c10::TensorImpl, layout_impl)
TENSORPLAY_EXPOSE(size_bytes, c10::StorageImpl, size_bytes_)
TENSORPLAY_EXPOSE(data_ptr, c10::StorageImpl, data_ptr_)
TENSORPLAY_EXPOSE(throw_on_immutable, c10::StorageImpl, throw_on_immutable_data_ptr_)
TENSORPLAY_EXPOSE(throw_on_mutable, c10::StorageImpl, throw_on_mutable_data_ptr_)
#ifdef TENSORPLAY_COMPAT_INNER
TENSORPLAY_EXPOSE(sparse_indices, at::SparseTensorImpl, indices_)
TENSORPLAY_EXPOSE(sparse_values, at::SparseTensorImpl, values_)
#endif
#ifdef TENSORPLAY_COMPAT_GRAPH
TENSORPLAY_EXPOSE(node_mutex, torch::autograd::Node, mutex_)
TENSORPLAY_EXPOSE(saved_data, torch::autograd::SavedVariable, data_)
TENSORPLAY_EXPOSE(saved_version, torch::autograd::SavedVariable, saved_version_)
TENSORPLAY_EXPOSE(saved_grad_fn, torch::autograd::SavedVariable, grad_fn_)
TENSORPLAY_EXPOSE(saved_weak_grad_fn, torch::autograd::SavedVariable, weak_grad_fn_)
TENSORPLAY_EXPOSE(saved_output_nr, torch::autograd::SavedVariable, output_nr_)
TENSORPLAY_EXPOSE(saved_is_leaf, torch::autograd::SavedVariable, is_leaf_)
TENSORPLAY_EXPOSE(saved_is_original, torch::autograd::SavedVariable, saved_original_)
TENSORPLAY_EXPOSE(saved_in_place_on_view, torch::autograd::SavedVariable, is_inplace_on_view_)
TENSORPLAY_EXPOSE(saved_accumulator, torch::autograd::SavedVariable, grad_accumulator_)
TENSORPLAY_EXPOSE(saved_forward_gradients, torch::autograd::SavedVariable, fw_grad_)
TENSORPLAY_EXPOSE(saved_hooks, torch::autograd::SavedVariable, hooks_)
TENSORPLAY_EXPOSE(forward_content, torch::autograd::ForwardGrad, content_)
TENSORPLAY_EXPOSE(was_default_constructed, torch::autograd::SavedVariable, was_default_constructed_)
TENSORPLAY_EXPOSE(context_saved, torch::autograd::AutogradContext, saved_variables_)
#endif
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#undef TENSORPLAY_EXPOSE

namespace tensorplay::compat {
namespace {

// c10/util/intrusive_ptr.h: strong count in the low 32 bits, weak count above it, one bit says "has a
// PyObject".
struct RefCounts {
  uint32_t strong;
  uint32_t weak;  // weak references alone: the 1 that all strong references share is taken off
};

inline RefCounts ref_counts(const c10::intrusive_ptr_target& target) {
  const uint64_t both =
      (target.*expose_combined_refcount(detail::combined_refcountTag{})).load(std::memory_order_relaxed);
  const uint32_t strong = c10::detail::refcount(both);
  const uint32_t weak = c10::detail::weakcount(both);
  return {strong, weak - (strong > 0 ? 1U : 0U)};
}

// The impl's own device field. TensorImpl::device() may call into Python or a virtual override instead.
inline std::optional<c10::Device> own_device(const c10::TensorImpl& impl) {
  return impl.*expose_device_opt(detail::device_optTag{});
}

// Raw geometry: what sizes_default() would return, without its check for symbolic sizes.
inline const c10::impl::SizesAndStrides& own_geometry(const c10::TensorImpl& impl) {
  return impl.*expose_sizes_and_strides(detail::sizes_and_stridesTag{});
}
inline int64_t own_storage_offset(const c10::TensorImpl& impl) {
  return impl.*expose_storage_offset(detail::storage_offsetTag{});
}
inline int64_t own_numel(const c10::TensorImpl& impl) {
  return impl.*expose_numel(detail::numelTag{});
}
inline caffe2::TypeMeta own_dtype(const c10::TensorImpl& impl) {
  return impl.*expose_data_type(detail::data_typeTag{});
}

inline bool custom_strides(const c10::TensorImpl& impl) {
  return (impl.*expose_matches_policy(detail::matches_policyTag{}))(
      c10::TensorImpl::SizesStridesPolicy::CustomStrides);
}
inline bool custom_sizes(const c10::TensorImpl& impl) {
  return (impl.*expose_matches_policy(detail::matches_policyTag{}))(
      c10::TensorImpl::SizesStridesPolicy::CustomSizes);
}

// Bit-fields, which nothing can point to.
struct PolicyMirror : c10::TensorImpl {
  static bool has_device(const c10::TensorImpl& impl) {
    return static_cast<const PolicyMirror&>(impl).device_policy_;
  }
  static bool has_layout(const c10::TensorImpl& impl) {
    return static_cast<const PolicyMirror&>(impl).layout_policy_;
  }
};

// The compressed sparse layouts share their keys; only this virtual tells them apart. It never enters Python.
inline c10::Layout compressed_layout(const c10::TensorImpl& impl) {
  return (impl.*expose_layout_impl(detail::layout_implTag{}))();
}

inline const c10::SymInt& own_nbytes(const c10::StorageImpl& storage) {
  return storage.*expose_size_bytes(detail::size_bytesTag{});
}
// StorageImpl::data_ptr() throws for some storages; the field itself never does, and never materialises.
inline const at::DataPtr& own_data_ptr(const c10::StorageImpl& storage) {
  return storage.*expose_data_ptr(detail::data_ptrTag{});
}
inline bool throws_on_read(const c10::StorageImpl& storage) {
  return storage.*expose_throw_on_immutable(detail::throw_on_immutableTag{});
}
inline bool throws_on_write(const c10::StorageImpl& storage) {
  return storage.*expose_throw_on_mutable(detail::throw_on_mutableTag{});
}

// The counter's address: two tensors share their version exactly when these are equal. Its only member is the
// intrusive_ptr, whose only member is the pointer (c10/core/TensorImpl.h, VariableVersion).
inline const void* version_counter_address(const c10::VariableVersion& version) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  const void* address = nullptr;
  std::memcpy(&address, &version, sizeof(address));
  return address;
}

// The lambdas by which PyTorch gives foreign memory back, and what each captures first
// (torch/csrc/utils/tensor_numpy.cpp and tensor_new.cpp, ATen/DLConvertor.cpp). Small ones lie in their
// std::function (libstdc++, bits/std_function.h, _Any_data).
enum class Captured : uint8_t { kUnknown, kPythonObject, kDlpack, kDlpackVersioned };

inline Captured captured_by(const std::type_info& callable) {
  const std::string_view name = callable.name();
  if (name == "ZN5torch5utils17tensor_from_numpyEP7_objectbEUlPvE_" ||
      name == "ZN5torch5utils17tensor_frombufferEP7_objectN3c1010ScalarTypeEllbEUlPvE_") {
    return Captured::kPythonObject;
  }
  if (name ==
          "ZN2at12_GLOBAL__N_114fromDLPackImplI24DLManagedTensorVersionedEENS_6TensorEPT_"
          "St8functionIFvPvEEEUlS7_E_" ||
      name ==
          "ZN5torch5utils12_GLOBAL__N_121tensor_fromDLPackImplI24DLManagedTensorVersionedEEN2at6TensorEP7_"
          "objectPT_EUlPvE_") {
    return Captured::kDlpackVersioned;
  }
  if (name ==
          "ZN2at12_GLOBAL__N_114fromDLPackImplI15DLManagedTensorEENS_6TensorEPT_St8functionIFvPvEEEUlS7_E_" ||
      name ==
          "ZN5torch5utils12_GLOBAL__N_121tensor_fromDLPackImplI15DLManagedTensorEEN2at6TensorEP7_objectPT_"
          "EUlPvE_") {
    return Captured::kDlpack;
  }
  return Captured::kUnknown;
}

inline const void* captured_pointer(const std::function<void(void*)>& function) {
  static_assert(sizeof(function) == 4 * sizeof(void*));
  const void* captured = nullptr;
  std::memcpy(&captured, &function, sizeof(captured));
  return captured;
}

#ifdef TENSORPLAY_COMPAT_INNER
// The accessors of the same name return a Tensor by value, which would count as an owner.
inline const at::Tensor& sparse_indices(const at::SparseTensorImpl& impl) {
  return impl.*expose_sparse_indices(detail::sparse_indicesTag{});
}
inline const at::Tensor& sparse_values(const at::SparseTensorImpl& impl) {
  return impl.*expose_sparse_values(detail::sparse_valuesTag{});
}

// ATen/functorch/TensorWrapper.h cannot be included: it needs nlohmann/json, which PyTorch's wheels do not
// bring. The wrapped tensor is the class's first member after TensorImpl; a test compares it with functorch's
// own answer.
struct FunctorchWrapperMirror : c10::TensorImpl {
  at::Tensor value;
};
inline const at::Tensor* functorch_value(const c10::TensorImpl& impl) {
  if (std::string_view(typeid(impl).name()) != "N2at9functorch13TensorWrapperE") return nullptr;
  return &static_cast<const FunctorchWrapperMirror&>(impl).value;
}
#endif

#ifdef TENSORPLAY_COMPAT_GRAPH
// Held by the engine while the node computes, and while it gives its saved tensors back.
inline std::mutex& node_mutex(const torch::autograd::Node& node) {
  return const_cast<torch::autograd::Node&>(node).*expose_node_mutex(detail::node_mutexTag{});
}

// unpack() would run users' hooks, raise for a version that moved, and count as an owner.
inline const at::Tensor& saved_data(const torch::autograd::SavedVariable& saved) {
  return saved.*expose_saved_data(detail::saved_dataTag{});
}
inline uint32_t saved_version(const torch::autograd::SavedVariable& saved) {
  return saved.*expose_saved_version(detail::saved_versionTag{});
}
// Nodes that a saved tensor keeps beside its data: only where a hook packed it, but for a leaf's accumulator.
inline const c10::intrusive_ptr<torch::autograd::Node>& saved_grad_fn(
    const torch::autograd::SavedVariable& saved) {
  return saved.*expose_saved_grad_fn(detail::saved_grad_fnTag{});
}
inline const c10::intrusive_ptr<torch::autograd::Node>& saved_accumulator(
    const torch::autograd::SavedVariable& saved) {
  return saved.*expose_saved_accumulator(detail::saved_accumulatorTag{});
}
// What unpack() goes by to say which operator a saved tensor came from.
struct SavedOrigin {
  bool is_leaf;
  bool is_original;       // `saved_data` is the very tensor, with its own grad_fn
  bool in_place_on_view;  // `weak_grad_fn` says it
  const torch::autograd::Node* weak_grad_fn;
  uint32_t output;
};
inline SavedOrigin saved_origin(const torch::autograd::SavedVariable& saved) {
  return {saved.*expose_saved_is_leaf(detail::saved_is_leafTag{}),
          saved.*expose_saved_is_original(detail::saved_is_originalTag{}),
          saved.*expose_saved_in_place_on_view(detail::saved_in_place_on_viewTag{}),
          (saved.*expose_saved_weak_grad_fn(detail::saved_weak_grad_fnTag{})).lock().get(),
          saved.*expose_saved_output_nr(detail::saved_output_nrTag{})};
}
inline const std::shared_ptr<torch::autograd::ForwardGrad>& saved_forward_gradients(
    const torch::autograd::SavedVariable& saved) {
  return saved.*expose_saved_forward_gradients(detail::saved_forward_gradientsTag{});
}
inline const std::unique_ptr<torch::autograd::SavedVariableHooks>& saved_hooks(
    const torch::autograd::SavedVariable& saved) {
  return saved.*expose_saved_hooks(detail::saved_hooksTag{});
}
// Level to tangent, for forward-mode AD. The class's own lock is not taken.
inline const std::unordered_map<uint64_t, at::Tensor>& forward_gradients(
    const torch::autograd::ForwardGrad& gradients) {
  return gradients.*expose_forward_content(detail::forward_contentTag{});
}

// The tensor that a DLPack structure of PyTorch's keeps alive. ATen/DLConvertor.cpp lays out the tensor and,
// behind it, the structure that is handed out; a producer that is not PyTorch has another context.
inline const at::Tensor* dlpack_tensor(const void* context, const void* managed) {
  const auto* tensor = static_cast<const at::Tensor*>(context);
  return tensor != nullptr && static_cast<const void*>(tensor + 1) == managed ? tensor : nullptr;
}

// Made without a tensor: the operator's argument was None, or was not needed.
inline bool saved_nothing(const torch::autograd::SavedVariable& saved) {
  return saved.*expose_was_default_constructed(detail::was_default_constructedTag{});
}

// A custom C++ function's node is a template over the function's class; its first own member is the same in
// all.
struct CppNodeMirror : torch::autograd::Node {
  torch::autograd::AutogradContext context;
};
inline const std::vector<torch::autograd::SavedVariable>* custom_function_saved(
    const torch::autograd::Node& node) {
  if (!std::string_view(typeid(node).name()).starts_with("N5torch8autograd7CppNodeI")) return nullptr;
  return &(static_cast<const CppNodeMirror&>(node).context.*expose_context_saved(detail::context_savedTag{}));
}
#endif

}  // namespace
}  // namespace tensorplay::compat
