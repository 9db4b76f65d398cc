#include "specimens.h"

#include <ATen/ATen.h>
#include <ATen/DLConvertor.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/MapAllocator.h>
#include <ATen/core/NestedIntSymNodeImpl.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/native/Resize.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

// ATen/functorch/DynamicLayer.h and TensorWrapper.h need nlohmann/json, which PyTorch's wheels do not bring.
namespace at::functorch {
enum class TransformType { Torch, Vmap, Grad };
enum class RandomnessType;
TORCH_API int64_t initAndPushDynamicLayer(TransformType, std::optional<c10::SymInt>,
                                          std::optional<RandomnessType>, std::optional<bool>,
                                          std::optional<bool>, std::optional<bool>, std::optional<bool>);
TORCH_API Tensor makeTensorWrapper(const Tensor&, int64_t, bool);
}  // namespace at::functorch

namespace tensorplay {
namespace {

using torch::autograd::CreationMeta;

at::Tensor leaf(at::IntArrayRef sizes) {
  return at::rand(sizes).requires_grad_();
}

// The buffer outlives every specimen.
std::array<float, 24>& foreign_memory() {
  static std::array<float, 24> memory{};
  return memory;
}

Specimen plain() {
  return {at::rand({3, 4}), {}};
}
Specimen scalar() {
  return {at::rand({}), {}};
}
Specimen empty() {
  return {at::rand({0, 3}), {}};
}
Specimen bytes() {
  return {at::ones({2, 3}, at::kByte), {}};
}
Specimen booleans() {
  return {at::ones({5}, at::kBool), {}};
}
Specimen complex_numbers() {
  return {at::rand({2, 2}, at::kComplexDouble), {}};
}
Specimen seven_dims() {
  return {at::rand({2, 1, 2, 1, 2, 1, 3}), {}};
}
Specimen channels_last() {
  return {at::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast), {}};
}
Specimen channels_last_3d() {
  return {at::rand({2, 3, 4, 5, 2}).contiguous(at::MemoryFormat::ChannelsLast3d), {}};
}

Specimen slice() {
  at::Tensor base = at::rand({5, 4});
  return {base.slice(0, 1, 4), {base}};
}
Specimen transposed() {
  at::Tensor base = at::rand({5, 4});
  return {base.t(), {base}};
}
Specimen every_other() {
  at::Tensor base = at::rand({9});
  return {base.slice(0, 1, 9, 2), {base}};
}
Specimen expanded() {
  at::Tensor base = at::rand({1, 3});
  return {base.expand({4, 3}), {base}};
}
Specimen windows() {
  at::Tensor base = at::rand({10});
  return {base.unfold(0, 4, 2), {base}};
}
Specimen detached() {
  at::Tensor source = leaf({3});
  return {source.detach(), {source}};
}
Specimen conjugated() {
  at::Tensor base = at::rand({3}, at::kComplexFloat);
  return {base.conj(), {base}};
}
Specimen negative() {
  at::Tensor base = at::rand({3});
  return {at::_neg_view(base), {base}};
}
Specimen wrapped_number() {
  at::Tensor number = at::scalar_tensor(2.5, at::kDouble);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return {number, {}};
}

Specimen meta() {
  return {at::empty({3, 4}, at::kMeta), {}};
}
Specimen meta_view() {
  at::Tensor base = at::empty({3, 4}, at::kMeta);
  return {base.slice(0, 1, 2), {base}};
}
Specimen zerotensor() {
  return {at::_efficientzerotensor({2, 3}, at::TensorOptions(at::kFloat)), {}};
}
Specimen sparse_coo() {
  return {at::eye(3).to_sparse(), {}};
}
Specimen sparse_csr() {
  return {at::eye(3).to_sparse_csr(), {}};
}
Specimen sparse_csc() {
  return {at::eye(3).to_sparse_csc(), {}};
}
Specimen sparse_bsr() {
  return {at::eye(4).to_sparse_bsr({2, 2}), {}};
}
Specimen sparse_bsc() {
  return {at::eye(4).to_sparse_bsc({2, 2}), {}};
}
Specimen mkldnn() {
  return {at::rand({4, 4}).to_mkldnn(), {}};
}
Specimen nested() {
  return {at::_nested_tensor_from_tensor_list({at::rand({2, 3}), at::rand({1, 3})}), {}};
}
Specimen quantized() {
  return {at::quantize_per_tensor(at::rand({2, 3}), 0.1, 5, at::kQInt8), {}};
}
Specimen functional() {
  return {at::functionalization::impl::to_functional_tensor(at::rand({2, 3})), {}};
}
Specimen batched() {
  at::Tensor value = at::rand({2, 3, 4});
  return {at::functorch::makeBatched(value, 1, 1), {value}};
}
// As torch.func.grad wraps what it is given.
at::Tensor wrap_for_grad(const at::Tensor& value) {
  at::Tensor wrapped;
  // On a thread of its own: the level stays on that thread's stack, since taking it off returns a class whose
  // header is not there.
  std::thread([&] {
    const int64_t level =
        at::functorch::initAndPushDynamicLayer(at::functorch::TransformType::Grad, {}, {}, true, {}, {}, {});
    wrapped = at::functorch::makeTensorWrapper(value, level, /*is_immutable=*/false);
  }).join();
  return wrapped;
}

Specimen functorch_wrapper() {
  at::Tensor value = at::rand({2, 3});
  return {wrap_for_grad(value), {value}};
}

Specimen borrowed() {
  return {at::from_blob(foreign_memory().data(), {4, 6}), {}};
}
Specimen freed_by_callback() {
  return {at::from_blob(new float[6], {2, 3}, [](void* p) { delete[] static_cast<float*>(p); }), {}};
}
Specimen over_null() {
  return {at::from_blob(nullptr, {2, 3}), {}};
}
Specimen from_dlpack() {
  at::Tensor source = at::rand({2, 3});
  return {at::fromDLPack(at::toDLPack(source)), {source}};
}
Specimen mapped_file() {
  // Named by the process, so that two runs side by side do not meet; gone once it is mapped.
  const std::filesystem::path path =
      std::filesystem::temp_directory_path() / ("tensorplay_native_" + std::to_string(getpid()));
  std::ofstream(path) << std::string(64, 'x');
  at::Tensor mapped =
      at::from_file(path.string(), /*shared=*/true, /*size=*/16, at::TensorOptions(at::kFloat));
  std::filesystem::remove(path);
  return {mapped, {}};
}
at::Tensor over_mapping(at::DataPtr data, size_t nbytes) {
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes, std::move(data),
                                            /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}).set_(c10::Storage(std::move(storage)), 0, {static_cast<int64_t>(nbytes / 4)}, {1});
}
constexpr int kNewSharedMemory = at::ALLOCATOR_MAPPED_SHAREDMEM | at::ALLOCATOR_MAPPED_EXCLUSIVE;
Specimen shared_memory() {  // as strategy file_descriptor shares it
  const int flags = kNewSharedMemory | at::ALLOCATOR_MAPPED_KEEPFD | at::ALLOCATOR_MAPPED_UNLINK;
  return {over_mapping(at::MapAllocator::makeDataPtr(at::NewProcessWideShmHandle(), flags, 64, nullptr), 64),
          {}};
}
Specimen counted_shared_memory() {  // as strategy file_system shares it, without the manager
  const std::string handle = at::NewProcessWideShmHandle();
  return {over_mapping(at::RefcountedMapAllocator::makeDataPtr(handle.c_str(), kNewSharedMemory, 64, nullptr),
                       64),
          {}};
}

// What `storage.resize_(0)` leaves behind under a view, as sharded training frees parameters.
Specimen shrunk() {
  at::Tensor base = at::rand({5, 4});
  at::Tensor view = base.slice(0, 1, 4);
  at::native::resize_bytes_cpu(base.storage().unsafeGetStorageImpl(), 0);
  return {view, {base}};
}
Specimen lazy_clone() {
  at::Tensor source = at::rand({2, 3});
  return {at::_lazy_clone(source), {source}};
}
Specimen lazily_cloned() {
  at::Tensor source = at::rand({2, 3});
  return {source, {at::_lazy_clone(source)}};
}
Specimen guarded() {
  at::Tensor tensor = at::rand({2, 3});
  tensor.storage().unsafeGetStorageImpl()->set_throw_on_mutable_data_ptr();
  return {tensor, {}};
}
Specimen unreadable() {
  at::Tensor tensor = at::rand({2, 3});
  tensor.storage().unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_("no access");
  return {tensor, {}};
}

Specimen inference() {
  const c10::InferenceMode guard;
  return {at::rand({3}), {}};
}
Specimen inference_view() {
  const c10::InferenceMode guard;
  at::Tensor base = at::rand({4});
  return {base.slice(0, 1, 3), {base}};
}
Specimen normal_view_in_inference() {
  at::Tensor base = at::rand({4});
  const c10::InferenceMode guard;
  return {base.slice(0, 1, 3), {base}};
}

Specimen trained_leaf() {
  at::Tensor parameter = leaf({3});
  parameter.mutable_grad() = at::ones({3});
  return {parameter, {}};
}
Specimen computed() {
  at::Tensor source = leaf({3});
  return {source * 2, {source}};
}
Specimen view_of_computed() {
  at::Tensor base = leaf({4}) * 2;
  return {base.slice(0, 1, 3), {base}};
}
Specimen stale_view() {
  at::Tensor base = leaf({4}) * 2;
  at::Tensor view = base.slice(0, 1, 3);
  base.mul_(3);
  return {view, {base}};
}
Specimen stale_view_without_grad_fn() {
  at::Tensor base = at::rand({4});
  at::Tensor view = base.slice(0, 1, 3);
  base.mul_(leaf({4}));
  return {view, {base}};
}
Specimen no_grad_view() {
  at::Tensor base = leaf({4});
  const at::NoGradGuard guard;
  return {base.slice(0, 1, 3), {base}};
}
Specimen one_of_many_outputs() {
  at::Tensor base = leaf({3, 2}) * 2;
  return {base.unbind(0)[1], {base}};
}
// A view for forward differentiation only, as a view operator without a backward formula returns it.
Specimen forward_view() {
  at::Tensor base = at::rand({4});
  const at::AutoDispatchBelowADInplaceOrView guard;
  return {torch::autograd::make_variable_differentiable_view(
              base.slice(0, 1, 3), std::nullopt, torch::autograd::ViewInfo(base, nullptr, nullptr),
              /*shared_view_info=*/false, CreationMeta::DEFAULT),
          {base}};
}

Specimen symbolic() {
  const c10::SymInt ragged(c10::SymNode(c10::make_intrusive<c10::NestedIntSymNodeImpl>(7, 1)));
  at::Tensor tensor = at::empty({2, 3}, at::kMeta);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(std::vector<c10::SymInt>{2, ragged, 5},
                                                      std::vector<c10::SymInt>{ragged * 5, 5, 1});
  return {tensor, {}};
}

#define TENSORPLAY_RECIPE(name, kind) \
  Recipe {                            \
    #name, Kind::kind, name           \
  }
constexpr std::array kRecipes{
    TENSORPLAY_RECIPE(plain, kStrided),
    TENSORPLAY_RECIPE(scalar, kStrided),
    TENSORPLAY_RECIPE(empty, kStrided),
    TENSORPLAY_RECIPE(bytes, kStrided),
    TENSORPLAY_RECIPE(booleans, kStrided),
    TENSORPLAY_RECIPE(complex_numbers, kStrided),
    TENSORPLAY_RECIPE(seven_dims, kStrided),
    TENSORPLAY_RECIPE(channels_last, kStrided),
    TENSORPLAY_RECIPE(channels_last_3d, kStrided),
    TENSORPLAY_RECIPE(slice, kStrided),
    TENSORPLAY_RECIPE(transposed, kStrided),
    TENSORPLAY_RECIPE(every_other, kStrided),
    TENSORPLAY_RECIPE(expanded, kStrided),
    TENSORPLAY_RECIPE(windows, kStrided),
    TENSORPLAY_RECIPE(detached, kStrided),
    TENSORPLAY_RECIPE(conjugated, kStrided),
    TENSORPLAY_RECIPE(negative, kStrided),
    TENSORPLAY_RECIPE(wrapped_number, kStrided),
    TENSORPLAY_RECIPE(meta, kMeta),
    TENSORPLAY_RECIPE(meta_view, kMeta),
    TENSORPLAY_RECIPE(zerotensor, kZeroTensor),
    TENSORPLAY_RECIPE(sparse_coo, kSparseCoo),
    TENSORPLAY_RECIPE(sparse_csr, kSparseCompressed),
    TENSORPLAY_RECIPE(sparse_csc, kSparseCompressed),
    TENSORPLAY_RECIPE(sparse_bsr, kSparseCompressed),
    TENSORPLAY_RECIPE(sparse_bsc, kSparseCompressed),
    TENSORPLAY_RECIPE(mkldnn, kMkldnn),
    TENSORPLAY_RECIPE(nested, kNested),
    TENSORPLAY_RECIPE(quantized, kQuantized),
    TENSORPLAY_RECIPE(functional, kFunctional),
    TENSORPLAY_RECIPE(batched, kBatched),
    TENSORPLAY_RECIPE(functorch_wrapper, kFunctorchWrapper),
    TENSORPLAY_RECIPE(borrowed, kStrided),
    TENSORPLAY_RECIPE(freed_by_callback, kStrided),
    TENSORPLAY_RECIPE(over_null, kStrided),
    TENSORPLAY_RECIPE(from_dlpack, kStrided),
    TENSORPLAY_RECIPE(mapped_file, kStrided),
    TENSORPLAY_RECIPE(shared_memory, kStrided),
    TENSORPLAY_RECIPE(counted_shared_memory, kStrided),
    TENSORPLAY_RECIPE(shrunk, kStrided),
    TENSORPLAY_RECIPE(lazy_clone, kStrided),
    TENSORPLAY_RECIPE(lazily_cloned, kStrided),
    TENSORPLAY_RECIPE(guarded, kStrided),
    TENSORPLAY_RECIPE(unreadable, kStrided),
    TENSORPLAY_RECIPE(inference, kStrided),
    TENSORPLAY_RECIPE(inference_view, kStrided),
    TENSORPLAY_RECIPE(normal_view_in_inference, kStrided),
    TENSORPLAY_RECIPE(trained_leaf, kStrided),
    TENSORPLAY_RECIPE(computed, kStrided),
    TENSORPLAY_RECIPE(view_of_computed, kStrided),
    TENSORPLAY_RECIPE(stale_view, kStrided),
    TENSORPLAY_RECIPE(stale_view_without_grad_fn, kStrided),
    TENSORPLAY_RECIPE(no_grad_view, kStrided),
    TENSORPLAY_RECIPE(one_of_many_outputs, kStrided),
    TENSORPLAY_RECIPE(forward_view, kStrided),
    TENSORPLAY_RECIPE(symbolic, kMeta),
};
#undef TENSORPLAY_RECIPE

}  // namespace

std::span<const Recipe> recipes() {
  return kRecipes;
}

Specimen make(std::string_view name) {
  for (const Recipe& recipe : kRecipes) {
    if (recipe.name == name) return recipe.make();
  }
  throw std::invalid_argument("no recipe named " + std::string(name));
}

std::ostream& operator<<(std::ostream& out, const Recipe& recipe) {
  return out << recipe.name;
}

}  // namespace tensorplay
