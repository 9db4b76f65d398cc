// What C++ objects own of each other: every strong reference of a constructed tensor, node or storage, by
// name.
#include "../../csrc/core/owners.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/core/liveness.h"
#include "../../csrc/core/read.h"

namespace tensorplay {
namespace {

at::Tensor leaf(at::IntArrayRef shape) {
  return at::rand(shape).set_requires_grad(true);
}

// Every link and where it leads, in the order of the visit.
class Collector : public OwnedVisitor {
 public:
  void on_tensor(const Link& link, const c10::TensorImpl& impl) override { add(link, &impl); }
  void on_storage(const Link& link, const c10::StorageImpl& storage) override { add(link, &storage); }
  void on_node(const Link& link, const torch::autograd::Node& node) override { add(link, &node); }
  void on_hook(const Link& link, const std::type_info&, const void* hook) override { add(link, hook); }
  void on_python(const Link& link, const void* object) override { add(link, object); }

  std::vector<std::string> words() const {
    std::vector<std::string> out;
    for (const auto& [word, at] : found_) out.push_back(word);
    std::ranges::sort(out);
    return out;
  }
  const void* at(const std::string& word) const {
    const auto found = std::ranges::find(found_, word, &std::pair<std::string, const void*>::first);
    return found == found_.end() ? nullptr : found->second;
  }

 private:
  void add(const Link& link, const void* at) { found_.emplace_back(link.text(), at); }
  std::vector<std::pair<std::string, const void*>> found_;
};

std::span<const torch::autograd::SavedVariable> nothing_saved(const torch::autograd::Node&) {
  return {};
}

Collector owned_by(const at::Tensor& tensor) {
  Collector found;
  visit_owned(*tensor.unsafeGetTensorImpl(), found);
  return found;
}

Collector owned_by(const torch::autograd::Node& node) {
  Collector found;
  EXPECT_TRUE(visit_owned(node, nothing_saved, found));
  return found;
}

using Words = std::vector<std::string>;

TEST(OwnersOf, plain_tensor_owns_its_storage) {
  const at::Tensor x = at::rand({3});
  const Collector found = owned_by(x);
  EXPECT_EQ(found.words(), Words{"storage"});
  EXPECT_EQ(found.at("storage"), x.storage().unsafeGetStorageImpl());
}

TEST(OwnersOf, leaf_owns_its_gradient) {
  at::Tensor x = leaf({3});
  x.mutable_grad() = at::ones({3});
  const Collector found = owned_by(x);
  EXPECT_EQ(found.words(), (Words{"grad", "storage"}));
  EXPECT_EQ(found.at("grad"), x.grad().unsafeGetTensorImpl());
}

TEST(OwnersOf, view_owns_its_base) {
  const at::Tensor base = at::rand({3});
  const at::Tensor view = base.narrow(0, 1, 2);
  EXPECT_EQ(owned_by(view).at("base"), base.unsafeGetTensorImpl());
}

TEST(OwnersOf, result_owns_its_node_and_the_node_what_it_saved) {
  const at::Tensor x = leaf({3});
  const at::Tensor y = x * x;
  const Collector found = owned_by(y);
  EXPECT_EQ(found.words(), (Words{"grad_fn", "storage"}));
  EXPECT_EQ(found.at("grad_fn"), y.grad_fn().get());

  const Collector saved = owned_by(*y.grad_fn());
  EXPECT_EQ(saved.at("saved self"), x.unsafeGetTensorImpl());
  EXPECT_EQ(saved.at("saved other"), x.unsafeGetTensorImpl());
  EXPECT_EQ(std::ranges::count(saved.words(), "next"), 2);
  EXPECT_EQ(owned_by(*y.grad_fn()->next_edge(0).function).at("variable"), x.unsafeGetTensorImpl());
}

TEST(OwnersOf, each_use_is_counted_by_a_link) {
  const at::Tensor x = leaf({3});
  const at::Tensor y = x * x;
  const uint32_t accumulator = 1;
  const uint32_t saves = 2;
  EXPECT_EQ(use_count_of(*x.unsafeGetTensorImpl()), 1 + accumulator + saves);
  EXPECT_EQ(use_count_of(*x.storage().unsafeGetStorageImpl()), 1U);
}

TEST(OwnersOf, lists_that_were_saved_are_numbered) {
  const at::Tensor x = leaf({3});
  const at::Tensor y = leaf({3});
  const at::Tensor both = at::_foreach_mul(std::vector<at::Tensor>{x, y}, std::vector<at::Tensor>{y, x})[0];
  EXPECT_NE(both.grad_fn(), nullptr);
  const Words words = owned_by(*both.grad_fn()).words();
  EXPECT_TRUE(std::ranges::any_of(words, [](const std::string& word) { return word.starts_with("saved "); }));
}

TEST(OwnersOf, inner_tensors_are_named_by_their_roles) {
  const at::Tensor values = at::ones({2});
  const at::Tensor indices = at::tensor(std::vector<int64_t>{0, 2}).reshape({1, 2});
  const at::Tensor sparse = at::_sparse_coo_tensor_unsafe(indices, values, {4});
  const Collector found = owned_by(sparse);
  EXPECT_NE(found.at("indices"), nullptr);
  EXPECT_NE(found.at("values"), nullptr);
}

TEST(OwnersOf, storage_without_a_lender_owns_nothing) {
  const at::Tensor x = at::rand({3});
  Collector found;
  visit_owned(*x.storage().unsafeGetStorageImpl(), found);
  EXPECT_TRUE(found.words().empty());
}

class OtherThreads : public testing::Test {
 protected:
  void SetUp() override { expect_other_threads(true); }
  void TearDown() override { expect_other_threads(false); }
};

TEST_F(OtherThreads, tensors_of_every_class_are_told) {
  const at::Tensor dense = at::rand({3});
  const at::Tensor sparse = dense.to_sparse();
  EXPECT_TRUE(is_still_tensor(dense.unsafeGetTensorImpl()));
  EXPECT_TRUE(is_still_tensor(sparse.unsafeGetTensorImpl()));
}

TEST_F(OtherThreads, memory_without_a_tensor_is_none) {
  std::vector<uint64_t> zeros(64);
  EXPECT_FALSE(is_still_tensor(reinterpret_cast<const c10::TensorImpl*>(zeros.data())));
  std::vector<uint64_t> noise(64, 0x5555555555555555);
  EXPECT_FALSE(is_still_tensor(reinterpret_cast<const c10::TensorImpl*>(noise.data())));
  void* gone = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(gone, MAP_FAILED);
  munmap(gone, 4096);
  EXPECT_FALSE(is_still_tensor(static_cast<const c10::TensorImpl*>(gone)));
}

TEST_F(OtherThreads, objects_of_other_classes_are_none) {
  const at::Tensor y = leaf({3}).exp();
  const void* node = y.grad_fn().get();
  const void* storage = y.storage().unsafeGetStorageImpl();
  EXPECT_FALSE(is_still_tensor(static_cast<const c10::TensorImpl*>(node)));
  EXPECT_FALSE(is_still_tensor(static_cast<const c10::TensorImpl*>(storage)));
}

TEST_F(OtherThreads, tensor_without_an_owner_is_none) {
  at::Tensor x = at::rand({3});
  c10::weak_intrusive_ptr<c10::TensorImpl> weak(x.getIntrusivePtr());
  const c10::TensorImpl* impl = x.unsafeGetTensorImpl();
  x.reset();  // destroyed, but its memory is kept for the weak reference
  EXPECT_FALSE(is_still_tensor(impl));
}

TEST_F(OtherThreads, gradient_is_read) {
  at::Tensor x = leaf({3});
  x.mutable_grad() = at::ones({3});
  EXPECT_EQ(grad_of(*x.unsafeGetTensorImpl()), &x.grad());
  EXPECT_EQ(owned_by(x).words(), (Words{"grad", "storage"}));
}

}  // namespace
}  // namespace tensorplay
