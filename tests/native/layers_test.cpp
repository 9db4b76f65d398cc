// The facts of each layer on tensors made for one of them: counts, sharing, extents, who owns the memory,
// autograd.
#include <ATen/ATen.h>
#include <ATen/native/Resize.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <latch>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../csrc/core/names.h"
#include "specimens.h"

namespace tensorplay {
namespace {

using Ints = std::vector<int64_t>;

Ints ints(const Dims& dims) {
  return {dims.begin(), dims.end()};
}

// ---- Counts and sharing ----

TEST(Counts, handle_and_weak_handle_are_told_apart) {
  const at::Tensor tensor = at::rand({3});
  const at::Tensor second =
      tensor;  // NOLINT(performance-unnecessary-copy-initialization): it is what is counted
  const c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> weak(tensor.getIntrusivePtr());

  const TensorFacts facts = read(tensor);

  EXPECT_EQ(facts.impl.use_count, 2);
  EXPECT_EQ(facts.impl.weak_count, 1);
}

TEST(Counts, storage_counts_its_views_and_weak_handles) {
  const at::Tensor base = at::rand({4});
  const at::Tensor view = base.slice(0, 1, 3);
  const c10::weak_intrusive_ptr<c10::StorageImpl> weak = base.storage().getWeakStorageImpl();

  const TensorFacts facts = read(view);

  EXPECT_EQ(facts.storage.use_count, 2);
  EXPECT_EQ(facts.storage.weak_count, 1);
}

TEST(Sharing, view_has_its_own_impl_over_the_bases_storage_and_version) {
  const at::Tensor base = at::zeros({5, 4});
  const at::Tensor view = base.slice(0, 1, 4);
  const uint32_t version = read(view).impl.version;
  base.add_(1);

  const TensorFacts of_base = read(base);
  const TensorFacts of_view = read(view);

  EXPECT_NE(of_view.impl.address, of_base.impl.address);
  EXPECT_EQ(of_view.impl.base, of_base.impl.address);
  EXPECT_EQ(of_view.storage.address, of_base.storage.address);
  EXPECT_EQ(of_view.data.pointer, of_base.data.pointer);
  EXPECT_EQ(of_view.impl.version_counter, of_base.impl.version_counter);
  EXPECT_EQ(of_view.impl.version, version + 1);
  EXPECT_EQ(of_view.impl.storage_offset, 4);
}

TEST(Sharing, detached_shares_the_version_and_variable_data_does_not) {
  const at::Tensor source = at::rand({3});

  const TensorFacts facts = read(source);

  EXPECT_EQ(read(source.detach()).impl.version_counter, facts.impl.version_counter);
  EXPECT_NE(read(source.variable_data()).impl.version_counter, facts.impl.version_counter);
  EXPECT_EQ(read(source.variable_data()).storage.address, facts.storage.address);
}

// ---- Extents ----

TEST(Extents, expanded_tensor_sees_each_cell_once) {
  const at::Tensor tensor = at::rand({1, 3}).expand({4, 3});

  const TensorFacts facts = read(tensor);

  EXPECT_EQ(facts.impl.numel, 12);
  EXPECT_EQ(facts.nbytes_of(distinct_cells(facts.shape(), facts.stride())), 12);
  EXPECT_EQ(facts.needed_nbytes(), 12);
}

TEST(Extents, view_with_gaps_needs_more_than_it_sees) {
  const at::Tensor view = at::rand({9}).slice(0, 1, 9, 2);

  const TensorFacts facts = read(view);

  EXPECT_EQ(facts.first_byte(), 4);
  EXPECT_EQ(facts.needed_nbytes(), 32);
  EXPECT_EQ(facts.nbytes_of(distinct_cells(facts.shape(), facts.stride())), 16);
}

TEST(Extents, tensor_without_elements_needs_nothing_wherever_it_starts) {
  const at::Tensor view = at::rand({9}).slice(0, 5, 5);

  const TensorFacts facts = read(view);

  EXPECT_EQ(facts.impl.storage_offset, 5);
  EXPECT_EQ(facts.needed_nbytes(), 0);
  EXPECT_EQ(facts.nbytes_of(distinct_cells(facts.shape(), facts.stride())), 0);
  EXPECT_EQ(facts.data_address(), 0);
}

TEST(Extents, view_over_a_shrunk_storage_needs_more_than_there_is) {
  const at::Tensor base = at::rand({5, 4});
  const at::Tensor view = base.slice(0, 1, 4);
  at::native::resize_bytes_cpu(base.storage().unsafeGetStorageImpl(), 0);

  const TensorFacts facts = read(view);

  EXPECT_EQ(facts.storage.nbytes, 0);
  EXPECT_EQ(facts.data.pointer, nullptr);
  EXPECT_EQ(facts.needed_nbytes(), 64);
  EXPECT_EQ(facts.data_address(), 16);
}

TEST(Extents, more_than_five_dimensions_are_read_whole) {
  const Ints shape{2, 1, 3, 1, 2, 1, 2, 1, 2};
  const at::Tensor tensor = at::rand(shape).transpose(0, 8);

  const TensorFacts facts = read(tensor);

  EXPECT_EQ(ints(facts.impl.shape), tensor.sizes().vec());
  EXPECT_EQ(ints(facts.impl.stride), tensor.strides().vec());
  EXPECT_EQ(facts.nbytes_of(distinct_cells(facts.shape(), facts.stride())), 48 * 4);
}

TEST(Extents, five_dimensions_lie_inside_the_record) {
  const TensorFacts facts = read(at::rand({1, 2, 1, 2, 2}));

  const auto inside = [&](const void* pointer) {
    return pointer >= static_cast<const void*>(&facts) && pointer < static_cast<const void*>(&facts + 1);
  };
  EXPECT_TRUE(inside(facts.impl.shape.data()));
  EXPECT_TRUE(inside(facts.impl.stride.data()));
}

// ---- Who owns the memory ----

TEST(Origin, null_pointer_is_none) {
  EXPECT_EQ(read(at::rand({0})).data.origin, DataOrigin::kNone);
  EXPECT_EQ(read(at::empty({3}, at::kMeta)).data.origin, DataOrigin::kNone);
  EXPECT_EQ(read(at::from_blob(nullptr, {2, 3})).data.origin, DataOrigin::kNone);
}

TEST(Origin, allocated_tensor_is_the_cpu_allocators) {
  const TensorFacts facts = read(at::rand({3}));

  EXPECT_EQ(facts.data.origin, DataOrigin::kCpuAllocator);
  EXPECT_EQ(allocator_device_type(facts.storage.allocator), c10::DeviceType::CPU);
}

TEST(Origin, blob_without_deleter_is_borrowed) {
  float memory[6] = {};

  const TensorFacts facts = read(at::from_blob(memory, {2, 3}));

  EXPECT_EQ(facts.data.pointer, memory);
  EXPECT_EQ(origin_name(facts.data.origin), "borrowed");
}

TEST(Origin, blob_with_deleter_names_the_callable) {
  float memory[6] = {};
  const auto give_back = [](void*) {};

  const TensorFacts facts = read(at::from_blob(memory, {2, 3}, give_back));

  EXPECT_EQ(facts.data.origin, DataOrigin::kCallback);
  EXPECT_EQ(facts.data.pointer, memory);
  ASSERT_NE(facts.data.maker, nullptr);
  EXPECT_TRUE(*facts.data.maker == typeid(give_back));
  EXPECT_EQ(facts.storage.allocator, nullptr);
}

TEST(Origin, copy_on_write_is_seen_on_both_sides) {
  const at::Tensor source = at::rand({2, 3});
  const at::Tensor clone = at::_lazy_clone(source);

  const TensorFacts of_source = read(source);
  const TensorFacts of_clone = read(clone);

  EXPECT_TRUE(of_source.storage.copy_on_write);
  EXPECT_TRUE(of_clone.storage.copy_on_write);
  EXPECT_NE(of_source.storage.address, of_clone.storage.address);
  EXPECT_EQ(of_source.data.pointer, of_clone.data.pointer);
}

TEST(Origin, mapping_tells_its_handle_size_and_descriptor) {
  const Specimen shared = make("shared_memory");
  const Specimen file = make("mapped_file");

  const TensorFacts of_shared = read(shared.tensor);
  const TensorFacts of_file = read(file.tensor);

  ASSERT_NE(of_shared.data.shared_memory, nullptr);
  EXPECT_EQ(of_shared.data.shared_memory->mapped_nbytes, 64);
  EXPECT_EQ(of_shared.data.shared_memory->handle.rfind("/torch_", 0), 0);
  EXPECT_GE(of_shared.data.shared_memory->fd, 0);
  EXPECT_FALSE(of_shared.data.shared_memory->counted);
  ASSERT_NE(of_file.data.shared_memory, nullptr);
  EXPECT_EQ(of_file.data.shared_memory->mapped_nbytes, 64);
  EXPECT_NE(of_file.data.shared_memory->handle.find("tensorplay_native_"), std::string::npos);
}

TEST(Origin, counted_mapping_says_so) {
  const TensorFacts facts = read(make("counted_shared_memory").tensor);

  ASSERT_NE(facts.data.shared_memory, nullptr);
  EXPECT_TRUE(facts.data.shared_memory->counted);
  EXPECT_EQ(facts.data.shared_memory->manager, "");
}

TEST(Origin, guarded_storages_are_told_apart) {
  const TensorFacts plain = read(make("plain").tensor);
  const TensorFacts guarded = read(make("guarded").tensor);
  const TensorFacts unreadable = read(make("unreadable").tensor);

  EXPECT_FALSE(plain.storage.throws_on_read);
  EXPECT_FALSE(plain.storage.throws_on_write);
  EXPECT_TRUE(guarded.storage.throws_on_write);
  EXPECT_FALSE(guarded.storage.throws_on_read);
  EXPECT_TRUE(unreadable.storage.throws_on_read);
}

// As Python's storage slicing makes it: the context is the sliced storage, of which the slice is one owner.
at::Tensor slice_of(const at::Tensor& whole, size_t nbytes) {
  void* owner = c10::Storage(whole.storage()).unsafeReleaseStorageImpl();
  const auto give_back = [](void* context) {
    c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim(static_cast<c10::StorageImpl*>(context)));
  };
  at::DataPtr data(whole.storage().mutable_data(), owner, give_back, c10::kCPU);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), nbytes,
                                                       std::move(data), nullptr, false);
  return at::empty({0}).set_(c10::Storage(std::move(storage)), 0, {static_cast<int64_t>(nbytes / 4)}, {1});
}

TEST(Origin, slice_of_a_storage_is_known_once_it_was_learnt) {
  const at::Tensor of_memory = slice_of(at::zeros({8}), 16);
  const at::Tensor of_mapping = slice_of(make("shared_memory").tensor, 16);
  const TensorFacts before = read(of_memory);
  learn_storage_slice(*of_memory.storage().unsafeGetStorageImpl());

  const TensorFacts facts = read(of_memory);
  const TensorFacts mapped = read(of_mapping);

  EXPECT_EQ(before.data.origin, DataOrigin::kOther);
  EXPECT_EQ(facts.data.origin, DataOrigin::kStorageSlice);
  EXPECT_EQ(facts.data.shared_memory, nullptr);
  EXPECT_EQ(mapped.data.origin, DataOrigin::kStorageSlice);
  ASSERT_NE(mapped.data.shared_memory, nullptr);
  EXPECT_EQ(mapped.data.shared_memory->mapped_nbytes, 64);
}

// Its storage names an allocator that lived on PyTorch's stack (_efficientzerotensor,
// ATen/native/TensorFactories.cpp, torch 2.13): an address to compare, never an object to look at.
TEST(Origin, zerotensors_allocator_is_not_followed) {
  const at::Tensor zeros = at::_efficientzerotensor({2, 3}, at::TensorOptions(at::kFloat));

  const TensorFacts facts = read(zeros);

  EXPECT_EQ(kind_name(facts.kind), "zerotensor");
  EXPECT_EQ(facts.data.origin, DataOrigin::kNone);
  EXPECT_EQ(facts.storage.allocator_type, nullptr);
}

// ---- Autograd ----

TEST(Autograd, stale_view_keeps_its_old_node_and_says_stale) {
  const at::Tensor base = at::rand({4}).requires_grad_() * 2;
  const at::Tensor view = base.slice(0, 1, 3);
  const auto old_node = view.grad_fn();
  base.mul_(3);

  const TensorFacts stale = read(view);
  const auto new_node = view.grad_fn();
  const TensorFacts fresh = read(view);

  EXPECT_TRUE(stale.impl.grad_fn_stale);
  EXPECT_EQ(stale.impl.grad_fn, old_node.get());
  EXPECT_EQ(node_name(stale.impl), "SliceBackward0");
  ASSERT_NE(new_node.get(), old_node.get()) << "the view was not stale: the test shows nothing";
  EXPECT_FALSE(fresh.impl.grad_fn_stale);
  EXPECT_EQ(fresh.impl.grad_fn, new_node.get());
}

TEST(Autograd, view_without_node_goes_stale_when_its_base_starts_to_require_grad) {
  const at::Tensor base = at::rand({4});
  const at::Tensor view = base.slice(0, 1, 3);
  base.mul_(at::rand({4}).requires_grad_());

  const TensorFacts facts = read(view);

  EXPECT_TRUE(facts.impl.requires_grad);
  EXPECT_TRUE(facts.impl.grad_fn_stale);
  EXPECT_EQ(facts.impl.grad_fn, nullptr);
}

TEST(Autograd, moved_version_without_history_is_not_stale) {
  const at::Tensor base = at::rand({4});
  const at::Tensor view = base.slice(0, 1, 3);
  base.mul_(3);

  const TensorFacts facts = read(view);

  EXPECT_FALSE(facts.impl.grad_fn_stale);
  EXPECT_TRUE(facts.impl.is_leaf);
}

TEST(Autograd, stale_view_whose_node_is_being_rebuilt_is_read_without_waiting) {
  const Specimen specimen = make("stale_view");
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(specimen.tensor);
  std::latch locked(1);
  std::latch done(1);
  std::thread rebuilding([&] {
    const std::lock_guard<std::mutex> lock(meta->mutex_);
    locked.count_down();
    done.wait();
  });
  locked.wait();

  const TensorFacts facts = read(specimen.tensor);

  done.count_down();
  rebuilding.join();
  EXPECT_TRUE(facts.impl.grad_fn_stale);
  EXPECT_EQ(facts.impl.grad_fn, nullptr);
}

TEST(Autograd, creation_meta_says_how_the_view_arose) {
  const auto creation = [](const char* name) {
    return creation_meta_name(*read(make(name).tensor).impl.creation_meta);
  };

  EXPECT_EQ(creation("view_of_computed"), "DEFAULT");
  EXPECT_EQ(creation("no_grad_view"), "NO_GRAD_MODE");
  EXPECT_EQ(creation("one_of_many_outputs"), "MULTI_OUTPUT_NODE");
  EXPECT_EQ(creation("normal_view_in_inference"), "INFERENCE_MODE");
}

TEST(Autograd, forward_only_view_is_no_view_to_backward) {
  const Specimen specimen = make("forward_view");

  const TensorFacts facts = read(specimen.tensor);

  EXPECT_FALSE(facts.impl.is_view);
  EXPECT_EQ(facts.impl.is_view, specimen.tensor.is_view());
  EXPECT_EQ(facts.impl.base, nullptr);
  EXPECT_EQ(facts.impl.creation_meta, std::nullopt);
}

TEST(Autograd, second_output_is_numbered) {
  const TensorFacts facts = read(make("one_of_many_outputs").tensor);

  EXPECT_EQ(facts.impl.output_nr, 1);
  EXPECT_EQ(node_name(facts.impl), "UnbindBackward0");
}

TEST(Autograd, gradient_is_answered_by_reference) {
  at::Tensor parameter = at::rand({3}).requires_grad_();
  EXPECT_EQ(grad_of(*parameter.unsafeGetTensorImpl()), nullptr);
  parameter.mutable_grad() = at::ones({3});

  const at::TensorBase* grad = grad_of(*parameter.unsafeGetTensorImpl());

  EXPECT_EQ(grad, &parameter.grad());
  EXPECT_EQ(grad->use_count(), 1);
}

// ---- Absence ----

TEST(Absence, reasons_are_the_kinds_own) {
  const auto absences = [](const char* name) {
    const TensorFacts facts = read(make(name).tensor);
    return std::pair(facts.impl.shape_absence, facts.impl.stride_absence);
  };

  EXPECT_EQ(absences("plain"), std::pair(Absence::kNone, Absence::kNone));
  EXPECT_EQ(absences("sparse_coo"), std::pair(Absence::kNone, Absence::kSparseStride));
  EXPECT_EQ(absences("sparse_bsr"), std::pair(Absence::kNone, Absence::kSparseStride));
  EXPECT_EQ(absences("mkldnn"), std::pair(Absence::kNone, Absence::kOpaqueStride));
  EXPECT_EQ(absences("nested"), std::pair(Absence::kNestedShape, Absence::kNestedShape));
  EXPECT_EQ(absences("symbolic"), std::pair(Absence::kSymbolic, Absence::kSymbolic));
}

TEST(Absence, symbolic_sizes_are_given_as_expressions) {
  const TensorFacts facts = read(make("symbolic").tensor);

  ASSERT_NE(facts.symbolic, nullptr);
  EXPECT_EQ(facts.symbolic->shape, (std::vector<std::string>{"2", "j7", "5"}));
  EXPECT_EQ(facts.symbolic->stride, (std::vector<std::string>{"5*j7", "5", "1"}));
  EXPECT_EQ(facts.symbolic->storage_offset, "0");
  EXPECT_EQ(facts.symbolic->storage_nbytes, "") << "the storage's own size is a number";
}

TEST(Absence, undefined_tensor_says_so) {
  const TensorFacts facts = read(at::Tensor());

  EXPECT_EQ(kind_name(facts.kind), "undefined");
  EXPECT_EQ(facts.impl.shape_absence, Absence::kUndefinedTensor);
  EXPECT_EQ(facts.impl.stride_absence, Absence::kUndefinedTensor);
  EXPECT_EQ(facts.impl.device, std::nullopt);
  EXPECT_FALSE(facts.has_storage);
}

}  // namespace
}  // namespace tensorplay
