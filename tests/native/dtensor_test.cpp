// In which states a DTensor's body and its local tensor are, on tensors made for each.
#include "../../csrc/core/dtensor.h"

#include <ATen/ATen.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "../../csrc/repair/apply.h"
#include "specimens.h"

namespace tensorplay {
namespace {

using Names = std::vector<std::string>;

constexpr DtensorForm kDense{};
constexpr DtensorForm kParameter{.is_parameter = true};
constexpr DtensorForm kWrapper{.is_wrapper = true, .has_key = true};

at::Tensor alias_of(const at::Tensor& local) {
  return repair::make_donor(local, false);
}

// A tensor over another one's storage, with a version counter of its own.
at::Tensor over(const at::Tensor& other) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(other.storage()),
                                                   c10::DispatchKeySet(c10::DispatchKey::CPU), other.dtype());
  impl->set_sizes_contiguous(other.sizes());
  return at::Tensor(std::move(impl));
}

Names names_of(const std::vector<DtensorState>& states) {
  Names names;
  for (const DtensorState state : states) names.emplace_back(name_of(state));
  return names;
}

Names states(const at::Tensor& body, const at::Tensor& local, DtensorForm form = kDense) {
  return names_of(relate(read(body), read(local), form));
}

// The facts of a wrapper as torch's own DTensor is; its labels are the given tensor's.
TensorFacts wrapper_like(const at::Tensor& tensor) {
  TensorFacts facts = read(tensor);
  facts.kind = Kind::kWrapperSubclass;
  facts.impl.keys = facts.impl.keys.add(c10::DispatchKey::Python);
  return facts;
}

Names wrapped(const at::Tensor& labels, const at::Tensor& local) {
  return names_of(relate(wrapper_like(labels), read(local), kWrapper));
}

TEST(DtensorState, every_state_has_a_name_of_its_own) {
  std::set<std::string> names;
  for (size_t i = 0; i <= static_cast<size_t>(DtensorState::kEmpty); ++i) {
    names.insert(name_of(static_cast<DtensorState>(i)));
  }

  EXPECT_EQ(names.size(), static_cast<size_t>(DtensorState::kEmpty) + 1);
}

TEST(DtensorState, only_a_wrong_layer_calls_for_an_exchange) {
  for (size_t i = 0; i <= static_cast<size_t>(DtensorState::kEmpty); ++i) {
    const auto state = static_cast<DtensorState>(i);
    const bool wrong = state <= DtensorState::kStride;
    EXPECT_EQ(calls_for_exchange({state}), wrong) << name_of(state);
  }
  EXPECT_TRUE(calls_for_exchange({DtensorState::kBodyMeta, DtensorState::kHeld}));
  EXPECT_FALSE(calls_for_exchange({DtensorState::kOk, DtensorState::kFlat}));
}

TEST(DtensorState, alias_of_the_local_tensor_is_ok) {
  const at::Tensor local = at::ones({2, 3});

  EXPECT_EQ(states(alias_of(local), local), Names{"OK"});
  EXPECT_EQ(states(alias_of(local), local, kParameter), Names{"OK"});
}

TEST(DtensorState, both_on_meta_is_pending) {
  const at::Tensor local = at::empty({2, 3}, at::kMeta);

  EXPECT_EQ(states(alias_of(local), local), Names{"PENDING"});
  EXPECT_EQ(states(at::empty({2, 3}, at::kMeta), local), Names{"PENDING"});
  EXPECT_EQ(wrapped(at::empty({4, 3}, at::kMeta), local), Names{"PENDING"});
}

TEST(DtensorState, one_on_meta) {
  const at::Tensor meta = at::empty({2, 3}, at::kMeta);
  const at::Tensor real = at::ones({2, 3});

  EXPECT_EQ(states(at::empty({2, 3}, at::kMeta), real), Names{"BODY_META"});
  EXPECT_EQ(states(at::ones({2, 3}), meta), Names{"LOCAL_META"});
  EXPECT_EQ(wrapped(meta, real), Names{"BODY_META"});
  EXPECT_EQ(wrapped(real, meta), Names{"LOCAL_META"});
}

TEST(DtensorState, storage_without_bytes_is_freed) {
  const at::Tensor local = at::ones({2, 3});
  const at::Tensor body = alias_of(local);
  local.storage().unsafeGetStorageImpl()->set_nbytes(0);

  EXPECT_EQ(states(body, local), Names{"FREED"});
  EXPECT_EQ(wrapped(at::ones({4, 3}), local), Names{"FREED"});
}

TEST(DtensorState, other_type) {
  const at::Tensor local = at::ones({2, 3});

  EXPECT_EQ(states(alias_of(local).view(at::kInt), local), Names{"DTYPE"});
  EXPECT_EQ(wrapped(at::ones({4, 3}, at::kInt), local), Names{"DTYPE"});
}

TEST(DtensorState, other_shape) {
  const at::Tensor local = at::ones({2, 3});

  EXPECT_EQ(states(alias_of(local).view({3, 2}), local), Names{"SHAPE"});
  EXPECT_EQ(states(alias_of(local).view({6}), local), Names{"SHAPE"});
  EXPECT_EQ(wrapped(at::ones({4, 3}), local), Names{"OK"});  // it has the global one
}

TEST(DtensorState, other_device_of_a_wrapper) {
  const at::Tensor local = at::ones({2, 3});
  TensorFacts body = wrapper_like(local);
  body.impl.device = c10::Device(c10::DeviceType::PrivateUse1, 0);

  EXPECT_EQ(names_of(relate(body, read(local), kWrapper)), Names{"DEVICE"});
  body.impl.device = c10::Device(c10::DeviceType::CPU, 0);
  EXPECT_EQ(names_of(relate(body, read(local), kWrapper)), Names{"OK"});
}

TEST(DtensorState, two_storages) {
  const at::Tensor local = at::ones({2, 3});

  EXPECT_EQ(states(at::ones({2, 3}), local), Names{"SPLIT"});
}

TEST(DtensorState, two_storages_over_one_memory) {
  const at::Tensor local = at::ones({2, 3});
  const at::Tensor body = at::from_blob(local.data_ptr(), {2, 3});
  const at::Tensor part = at::from_blob(local.data_ptr<float>() + 3, {3});

  EXPECT_EQ(states(body, local), Names{"ALIASED_TWICE"});
  EXPECT_EQ(states(part, local), (Names{"SHAPE", "ALIASED_TWICE"}));
}

TEST(DtensorState, other_offset) {
  const at::Tensor base = at::ones({6});
  const at::Tensor local = base.slice(0, 2, 4);

  EXPECT_EQ(states(base.slice(0, 1, 3), local), (Names{"OFFSET", "FLAT"}));
  EXPECT_EQ(states(base.slice(0, 2, 4), local), (Names{"OK", "FLAT"}));
}

TEST(DtensorState, other_strides) {
  const at::Tensor local = at::ones({2, 2});
  const at::Tensor row = at::ones({1, 3});

  EXPECT_EQ(states(alias_of(local).t(), local), Names{"STRIDE"});
  EXPECT_EQ(states(alias_of(row).as_strided({1, 3}, {7, 1}), row), Names{"OK"});  // says nothing
}

TEST(DtensorState, computed_local_tensor) {
  const at::Tensor local = at::ones({3}).requires_grad_() * 2;

  EXPECT_EQ(states(alias_of(local), local, kParameter), Names{"LOCAL_NONLEAF"});
  EXPECT_EQ(states(alias_of(local), local), Names{"OK"});
}

TEST(DtensorState, local_tensor_of_inference_mode) {
  at::Tensor local;
  at::Tensor body;
  {
    const c10::InferenceMode guard;
    local = at::ones({3});
    body = alias_of(local);
  }

  EXPECT_EQ(states(over(local), local), Names{"LOCAL_INFERENCE"});
  EXPECT_EQ(states(body, local), Names{"OK"});  // both are
}

TEST(DtensorState, two_version_counters) {
  const at::Tensor local = at::ones({3});

  EXPECT_EQ(states(over(local), local), Names{"VERSION_SPLIT"});
}

TEST(DtensorState, only_the_body_requires_grad) {
  at::Tensor local = at::ones({3});
  const at::Tensor body = repair::make_donor(local, true);

  EXPECT_EQ(states(body, local), Names{"REQUIRES_GRAD"});
  local.requires_grad_();
  EXPECT_EQ(states(body, local), Names{"OK"});
  EXPECT_EQ(states(alias_of(local), local), Names{"OK"});  // the body of a healthy parameter does not
}

TEST(DtensorState, fake_local_tensor) {
  const at::Tensor body = at::ones({3});
  TensorFacts local = read(at::empty({3}, at::kMeta));
  local.kind = Kind::kFake;

  EXPECT_EQ(names_of(relate(read(body), local, kDense)), Names{"LOCAL_FAKE"});
  EXPECT_EQ(names_of(relate(wrapper_like(body), local, kWrapper)), Names{"OK"});
}

TEST(DtensorState, local_tensor_that_is_not_strided) {
  const at::Tensor dense = at::eye(3);
  for (const at::Tensor& local : {dense.to_sparse(), dense.to_sparse_csr()}) {
    EXPECT_EQ(states(dense, local), Names{"LOCAL_SPARSE"});
    EXPECT_EQ(wrapped(dense, local), Names{"OK"});
  }
}

TEST(DtensorState, local_tensor_that_is_a_wrapper) {
  const at::Tensor dense = at::ones({3});
  const at::Tensor local = at::functionalization::impl::to_functional_tensor(dense);

  EXPECT_EQ(states(dense, local), Names{"WRAPPER_NO_DATA"});
  EXPECT_EQ(wrapped(dense, local), Names{"OK"});
  EXPECT_EQ(wrapped(at::empty({3}, at::kMeta), local), Names{"BODY_META"});
}

TEST(DtensorState, what_a_body_is_meant_to_be) {
  const TensorFacts plain = read(at::ones({3}));
  const TensorFacts wrapper = wrapper_like(at::ones({3}));
  TensorFacts keyed = wrapper_like(at::ones({3}));
  keyed.kind = Kind::kStrided;
  const auto form = [](const TensorFacts& body, bool dispatches, bool in_slot) {
    const DtensorForm found = form_of(body, dispatches, in_slot, false);
    return std::pair(found.is_wrapper, found.has_key);
  };

  for (const bool in_slot : {false, true}) {
    EXPECT_EQ(form(plain, false, in_slot), std::pair(false, false));
    EXPECT_EQ(form(wrapper, true, in_slot), std::pair(true, true));
    EXPECT_EQ(form(keyed, true, in_slot), std::pair(false, true));
    EXPECT_EQ(form(plain, true, in_slot), std::pair(in_slot, true)) << "the key is lost";
  }
}

TEST(DtensorState, ordinary_body_without_its_python_key) {
  const at::Tensor local = at::ones({3});
  const DtensorForm keyed{.has_key = true};

  EXPECT_EQ(states(alias_of(local), local, keyed), Names{"NO_PYTHON_KEY"});
  EXPECT_EQ(states(at::ones({3}), local, keyed), (Names{"NO_PYTHON_KEY", "SPLIT"}));
}

TEST(DtensorState, wrapper_without_its_python_key) {
  const at::Tensor local = at::ones({3});

  EXPECT_EQ(states(alias_of(local), local, kWrapper), Names{"NO_PYTHON_KEY"});
  EXPECT_EQ(states(at::empty({3}, at::kMeta), local, kWrapper), (Names{"NO_PYTHON_KEY", "BODY_META"}));
}

TEST(DtensorState, traits_stand_beside_the_state) {
  const at::Tensor base = at::ones({6});
  const at::Tensor local = base.slice(0, 3, 6);
  const at::Tensor body = alias_of(local);
  const at::Tensor holder =
      body;  // NOLINT(performance-unnecessary-copy-initialization): it is what is counted

  EXPECT_EQ(states(body, local), (Names{"OK", "HELD", "FLAT"}));
  EXPECT_EQ(wrapped(body, local), (Names{"OK", "FLAT"}));
}

TEST(DtensorState, of_empty_shards_only_the_storages_are_compared) {
  const at::Tensor local = at::ones({0, 3});

  EXPECT_EQ(states(alias_of(local), local), (Names{"OK", "EMPTY"}));
  EXPECT_EQ(states(alias_of(local).as_strided({0, 3}, {9, 2}), local), (Names{"OK", "EMPTY"}));
  EXPECT_EQ(states(at::ones({0, 3}), local), (Names{"SPLIT", "EMPTY"}));
}

TEST(DtensorState, worst_comes_first) {
  const at::Tensor local = at::ones({2, 3});
  const at::Tensor body = at::ones({3}, at::kInt).requires_grad_(false);

  EXPECT_EQ(states(body, local), (Names{"DTYPE", "SHAPE", "SPLIT"}));
}

}  // namespace
}  // namespace tensorplay
