// What read_tensor() says of every kind of tensor, against ATen's own answers to the same questions.
//
// ATen is asked after the read: some of its answers change the tensor (grad_fn() of a stale view).
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/COW.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../../csrc/core/names.h"
#include "specimens.h"

namespace tensorplay {
namespace {

using Ints = std::vector<int64_t>;

Ints ints(const Dims& dims) {
  return {dims.begin(), dims.end()};
}

class EveryKind : public testing::TestWithParam<Recipe> {
 protected:
  // Read first, so that the questions put to ATen afterwards cannot have prepared the answers.
  EveryKind() : specimen(GetParam().make()), tensor(specimen.tensor), facts(read(tensor)) {}

  const c10::StorageImpl* storage() const {
    return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  }

  Specimen specimen;
  const at::Tensor& tensor;
  TensorFacts facts;
};

INSTANTIATE_TEST_SUITE_P(Read, EveryKind, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(EveryKind, kind_is_told) {
  EXPECT_EQ(kind_name(facts.kind), kind_name(GetParam().kind));
  EXPECT_EQ(facts.has_storage, storage() != nullptr);
}

TEST_P(EveryKind, impl_agrees_with_aten) {
  const ImplFacts& impl = facts.impl;

  EXPECT_EQ(impl.address, tensor.unsafeGetTensorImpl());
  EXPECT_TRUE(*impl.type == typeid(*tensor.unsafeGetTensorImpl()));
  EXPECT_EQ(impl.use_count, tensor.use_count());
  EXPECT_EQ(impl.weak_count + 1, tensor.weak_use_count());
  EXPECT_EQ(impl.dtype, tensor.dtype());
  EXPECT_EQ(impl.itemsize, tensor.dtype().itemsize());
  EXPECT_EQ(impl.device, tensor.device());
  // The keys of some kinds (mkldnn) name no backend.
  const bool has_backend = tensor.key_set().highestBackendKey() != c10::BackendComponent::InvalidBit;
  EXPECT_EQ(impl.backend, has_backend ? std::optional(tensor.device().type()) : std::nullopt);
  EXPECT_EQ(impl.layout, tensor.layout());
  EXPECT_EQ(impl.keys, tensor.key_set());
  EXPECT_EQ(impl.is_conj, tensor.is_conj());
  EXPECT_EQ(impl.is_neg, tensor.is_neg());
  EXPECT_EQ(impl.is_inference, tensor.is_inference());
  EXPECT_EQ(impl.is_wrapped_number, tensor.unsafeGetTensorImpl()->is_wrapped_number());
  EXPECT_FALSE(impl.python_decides_shape);
}

TEST_P(EveryKind, geometry_agrees_with_aten) {
  const ImplFacts& impl = facts.impl;

  if (facts.has_shape()) {
    EXPECT_EQ(ints(impl.shape), tensor.sizes().vec());
    EXPECT_EQ(impl.numel, tensor.numel());
    EXPECT_EQ(count_elements(facts.shape()), tensor.numel());
  } else {
    EXPECT_THROW(tensor.sizes(), c10::Error);
  }
  if (facts.has_geometry()) {
    EXPECT_EQ(ints(impl.stride), tensor.strides().vec());
    EXPECT_EQ(impl.storage_offset, tensor.storage_offset());
    EXPECT_EQ(is_contiguous(facts.shape(), facts.stride()), tensor.is_contiguous());
  } else if (facts.has_storage) {
    EXPECT_THROW(tensor.strides(), c10::Error);
  }  // Without a storage ATen may answer strides, which then describe no memory (sparse COO, mkldnn).
}

TEST_P(EveryKind, memory_format_agrees_with_aten) {
  if (!facts.has_geometry() || facts.kind == Kind::kBatched) return;  // ATen refuses to say it inside vmap
  const MemoryFormat format = memory_format(facts.shape(), facts.stride());

  EXPECT_EQ(format == MemoryFormat::kContiguous, tensor.is_contiguous());
  EXPECT_EQ(format == MemoryFormat::kChannelsLast,
            tensor.is_contiguous(at::MemoryFormat::ChannelsLast) && !tensor.is_contiguous());
  EXPECT_EQ(format == MemoryFormat::kChannelsLast3d,
            tensor.is_contiguous(at::MemoryFormat::ChannelsLast3d) && !tensor.is_contiguous());
  EXPECT_EQ(format != MemoryFormat::kStrided, tensor.is_non_overlapping_and_dense());
}

TEST_P(EveryKind, extents_agree_with_aten) {
  if (!facts.has_geometry()) {
    EXPECT_EQ(facts.needed_nbytes(), std::nullopt);
    EXPECT_EQ(facts.first_byte(), std::nullopt);
    EXPECT_EQ(facts.data_address(), std::nullopt);
    return;
  }
  const size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                         tensor.numel() == 0 ? 0 : tensor.storage_offset());

  EXPECT_EQ(facts.needed_nbytes(), static_cast<int64_t>(needed));
  EXPECT_EQ(facts.first_byte(), tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()));
}

TEST_P(EveryKind, version_agrees_with_aten) {
  if (tensor.is_inference()) {
    EXPECT_EQ(facts.impl.version_counter, nullptr);
    return;
  }

  EXPECT_NE(facts.impl.version_counter, nullptr);
  EXPECT_EQ(facts.impl.version, tensor._version());
}

TEST_P(EveryKind, autograd_agrees_with_aten) {
  const ImplFacts& impl = facts.impl;

  EXPECT_EQ(impl.requires_grad, tensor.requires_grad());
  EXPECT_EQ(impl.output_nr, tensor.output_nr());
  EXPECT_EQ(grad_of(*tensor.unsafeGetTensorImpl()) != nullptr, tensor.grad().defined());
  if (tensor.is_view()) {  // backward views: forward-only ones have a test of their own
    EXPECT_TRUE(impl.is_view);
    EXPECT_EQ(impl.base, tensor._base().unsafeGetTensorImpl());
    const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
    EXPECT_EQ(impl.creation_meta, static_cast<uint8_t>(meta->get_creation_meta()));
  } else {
    EXPECT_FALSE(impl.creation_meta.has_value());
  }
  if (impl.grad_fn_stale) return;
  EXPECT_EQ(impl.is_leaf, tensor.is_leaf());
  EXPECT_EQ(impl.grad_fn, tensor.grad_fn().get());
  EXPECT_EQ(node_name(impl), tensor.grad_fn() ? tensor.grad_fn()->name() : "");
}

TEST_P(EveryKind, storage_agrees_with_c10) {
  if (!facts.has_storage) return;
  const c10::StorageImpl& impl = *storage();
  const StorageFacts& out = facts.storage;

  EXPECT_EQ(out.address, &impl);
  EXPECT_TRUE(*out.type == typeid(impl));
  EXPECT_EQ(out.use_count, tensor.storage().use_count());
  EXPECT_EQ(out.weak_count + 1, tensor.storage().getWeakStorageImpl().weak_use_count() - 1);
  EXPECT_EQ(out.nbytes, static_cast<int64_t>(impl.nbytes()));
  EXPECT_FALSE(out.symbolic);
  EXPECT_EQ(out.allocator, impl.allocator());
  EXPECT_EQ(out.resizable, impl.resizable());
  EXPECT_EQ(out.has_materializer, impl.has_materializer());
  EXPECT_FALSE(out.has_python_wrapper);
}

TEST_P(EveryKind, data_agrees_with_the_data_ptr) {
  if (!facts.has_storage) return;
  const at::DataPtr& data = const_cast<c10::StorageImpl*>(storage())->_mutable_data_ptr_no_checks();

  EXPECT_EQ(facts.data.pointer, data.get());
  EXPECT_EQ(facts.data.context, data.get_context());
  EXPECT_EQ(facts.data.deleter, reinterpret_cast<const void*>(data.get_deleter()));
  EXPECT_EQ(facts.data.device, data.device());
  EXPECT_EQ(facts.data.origin == DataOrigin::kNone, data.get() == nullptr);
  EXPECT_EQ(facts.storage.copy_on_write, c10::impl::cow::is_cow_data_ptr(data));
  EXPECT_EQ(facts.data.origin == DataOrigin::kCopyOnWrite, facts.storage.copy_on_write);
  EXPECT_EQ(facts.data.origin == DataOrigin::kCallback, facts.data.maker != nullptr);
  EXPECT_EQ(facts.data.origin == DataOrigin::kMapped, facts.data.shared_memory != nullptr);
}

TEST_P(EveryKind, data_address_agrees_with_impl_data) {
  std::optional<const void*> atens;
  try {
    atens = tensor.unsafeGetTensorImpl()->data();
  } catch (const c10::Error&) {
  }

  const std::optional<const void*> ours = impl_data(*tensor.unsafeGetTensorImpl(), facts);

  if (ours) {
    EXPECT_EQ(ours, atens);
    EXPECT_EQ(facts.data_address(), reinterpret_cast<uint64_t>(*atens));
  } else {
    EXPECT_TRUE(!atens || facts.data.pointer == nullptr || !facts.has_geometry());
  }
}

// ---- A record is used again ----

// Every field that is valid, as one comparison.
void expect_equal(const TensorFacts& a, const TensorFacts& b) {
  const auto impl = [](const ImplFacts& f, bool stale) {
    return std::tuple(f.address, f.type, f.use_count, f.weak_count, f.shape_absence, f.stride_absence,
                      f.python_decides_shape, f.dtype.toScalarType(), f.itemsize, f.device, f.backend,
                      f.layout, f.keys.raw_repr(), f.version_counter, f.version, f.grad_fn, f.grad_fn_type,
                      f.grad_fn_python_name, stale || f.is_leaf, f.output_nr, f.requires_grad, f.is_view,
                      f.base, f.creation_meta, f.is_conj, f.is_neg, f.is_inference, f.is_wrapped_number);
  };
  const auto storage = [](const StorageFacts& f) {
    return std::tuple(f.address, f.type, f.nbytes, f.symbolic, f.use_count, f.weak_count, f.allocator,
                      f.allocator_type, f.resizable, f.copy_on_write, f.has_materializer, f.throws_on_read,
                      f.throws_on_write, f.has_python_wrapper);
  };
  const auto data = [](const DataFacts& f) {
    return std::tuple(f.pointer, f.context, f.deleter, f.device, f.origin, f.maker);
  };
  const auto shared = [](const SharedMemoryFacts& f) {
    return std::tuple(f.handle, f.manager, f.fd, f.mapped_nbytes, f.counted);
  };
  const auto symbolic = [](const SymbolicFacts& f) {
    return std::tuple(f.shape, f.stride, f.storage_offset, f.numel, f.storage_nbytes);
  };

  EXPECT_EQ(a.kind, b.kind);
  EXPECT_EQ(a.has_storage, b.has_storage);
  EXPECT_EQ(a.impl.grad_fn_stale, b.impl.grad_fn_stale);
  EXPECT_TRUE(impl(a.impl, a.impl.grad_fn_stale) == impl(b.impl, b.impl.grad_fn_stale));
  if (a.has_shape()) {
    EXPECT_EQ(ints(a.impl.shape), ints(b.impl.shape));
    EXPECT_EQ(a.impl.storage_offset, b.impl.storage_offset);
    EXPECT_EQ(a.impl.numel, b.impl.numel);
  }
  if (a.has_geometry()) {
    EXPECT_EQ(ints(a.impl.stride), ints(b.impl.stride));
  }
  if (a.has_storage) {
    EXPECT_TRUE(storage(a.storage) == storage(b.storage));
    EXPECT_TRUE(data(a.data) == data(b.data));
    ASSERT_EQ(a.data.shared_memory != nullptr, b.data.shared_memory != nullptr);
    if (a.data.shared_memory) {
      EXPECT_TRUE(shared(*a.data.shared_memory) == shared(*b.data.shared_memory));
    }
  }
  ASSERT_EQ(a.symbolic != nullptr, b.symbolic != nullptr);
  if (a.symbolic) {
    EXPECT_TRUE(symbolic(*a.symbolic) == symbolic(*b.symbolic));
  }
}

TEST_P(EveryKind, second_read_equals_the_first) {
  expect_equal(facts, read(tensor));
}

TEST_P(EveryKind, record_used_again_keeps_nothing_of_any_other_kind) {
  for (const Recipe& other : recipes()) {
    SCOPED_TRACE(other.name);
    const Specimen previous = other.make();
    TensorFacts reused = read(previous.tensor);

    read_tensor(*tensor.unsafeGetTensorImpl(), reused);

    expect_equal(reused, facts);
  }
}

}  // namespace
}  // namespace tensorplay
