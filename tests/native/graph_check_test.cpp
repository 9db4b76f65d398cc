// What one look at a graph finds before backward, and sums over the bytes of tensors.
#include "../../csrc/core/graph_check.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/node.h>

#include <string>
#include <vector>

#include "../../csrc/core/checksum.h"
#include "../../csrc/core/pointer_set.h"

namespace tensorplay {
namespace {

at::Tensor leaf(at::IntArrayRef shape) {
  return at::rand(shape).set_requires_grad(true);
}

std::string name_of(const torch::autograd::Node& node) {
  return node.name();
}

GraphCheck check(const at::Tensor& root) {
  const GraphRoot start{nullptr, root.unsafeGetTensorImpl()};
  GraphCheck found(name_of, nullptr);
  walk_graph(std::span(&start, 1), nullptr, found, Gradients::kOfRoots);
  found.finish(std::span(&start, 1), nullptr);
  return found;
}

TEST(CheckedGraph, counts_each_storage_once_and_those_of_leaves_beside) {
  const at::Tensor x = leaf({10});
  const at::Tensor y = x.exp();
  const GraphCheck found = check((y * y).sum() + x.sin().sum());

  EXPECT_EQ(found.total.storages, 1U);  // exp's result, which the product saved twice too
  EXPECT_EQ(found.total.nbytes, 40U);
  EXPECT_EQ(found.leaf_storages, 1U);
  EXPECT_EQ(found.leaf_nbytes, 40U);
  EXPECT_TRUE(found.written.empty());
  EXPECT_TRUE(found.released.empty());
}

TEST(CheckedGraph, finds_what_was_written_since) {
  const at::Tensor y = leaf({10}) * 1;
  const at::Tensor z = y.exp();
  const at::Tensor loss = z.sum();
  const at::NoGradGuard guard;
  z.add_(1);
  z.add_(1);
  const GraphCheck found = check(loss);

  ASSERT_EQ(found.written.size(), 1U);
  EXPECT_EQ(found.written[0].argument, "result");
  EXPECT_EQ(found.written[0].expected_version, 0U);
  EXPECT_EQ(found.written[0].tensor->unsafeGetTensorImpl()->version_counter().current_version(), 2U);
}

TEST(CheckedGraph, finds_what_was_given_back) {
  const at::Tensor y = leaf({10}).exp();
  y.sum().backward();
  EXPECT_EQ(check(y).released.size(), 1U);
}

TEST(CheckedGraph, finds_storages_without_the_memory) {
  const at::Tensor y = leaf({10}) * 2;
  const at::Tensor loss = y.pow(2).sum();
  EXPECT_TRUE(check(loss).memoryless.empty());
  y.storage().unsafeGetStorageImpl()->set_nbytes(8);
  EXPECT_EQ(check(loss).memoryless.size(), 1U);
  y.storage().unsafeGetStorageImpl()->set_nbytes(40);
}

TEST(CheckedGraph, proves_steps_by_versions_that_move) {
  const at::Tensor weight = leaf({3, 3});
  at::Tensor moving;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor loss = (weight * weight).sum();
    moving = moving.defined() ? moving + loss : loss;
    const at::NoGradGuard guard;
    weight.add_(1);
  }
  const GraphCheck found = check(moving);
  ASSERT_EQ(found.accumulations.size(), 1U);
  EXPECT_EQ(found.accumulations[0].terms, 3U);
  EXPECT_TRUE(found.accumulations[0].weights_moved);

  const at::Tensor x = leaf({3});
  const GraphCheck same = check(x.exp().sum() + x.exp().sum() + x.exp().sum());
  ASSERT_EQ(same.accumulations.size(), 1U);
  EXPECT_FALSE(same.accumulations[0].weights_moved);
}

TEST(CheckedGraph, finds_leaves_whose_gradient_leads_back) {
  const at::Tensor x = leaf({3});
  const at::Tensor loss = x.exp().sum();
  loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
  EXPECT_EQ(check(loss).cycles.size(), 1U);
  x.mutable_grad().reset();
  EXPECT_TRUE(check(loss).cycles.empty());
}

TEST(CheckedGraph, is_walked_without_recursion) {
  at::Tensor x = leaf({1});
  for (int i = 0; i < 50'000; ++i) x = x + 1;
  EXPECT_EQ(check(x).total.nodes, 50'001U);
}

TEST(Checksum, is_of_the_elements) {
  const at::Tensor x = at::arange(24, at::kFloat).reshape({4, 6});
  const auto sum = [](const at::Tensor& value) { return checksum_of(*value.unsafeGetTensorImpl()); };
  EXPECT_TRUE(sum(x));
  EXPECT_EQ(sum(x), sum(x.clone()));
  EXPECT_NE(sum(x), sum(x + 1));
  const at::Tensor half = x.slice(1, 0, 6, 2);
  const auto before = sum(half);
  x.slice(1, 1, 6, 2).fill_(-1);  // between them
  EXPECT_EQ(sum(half), before);
  half.select(0, 3).select(0, 2).fill_(-1);
  EXPECT_NE(sum(half), before);
}

TEST(Checksum, is_absent_for_what_cannot_be_read) {
  EXPECT_FALSE(checksum_of(*at::empty({3}, at::kMeta).unsafeGetTensorImpl()));
  EXPECT_FALSE(checksum_of(*at::eye(3).to_sparse().unsafeGetTensorImpl()));
  const at::Tensor x = at::rand({10});
  x.storage().unsafeGetStorageImpl()->set_nbytes(8);
  EXPECT_FALSE(checksum_of(*x.unsafeGetTensorImpl()));
  x.storage().unsafeGetStorageImpl()->set_nbytes(40);
  EXPECT_TRUE(checksum_of(*at::empty({0}).unsafeGetTensorImpl()));
}

TEST(SetOfPointers, knows_what_was_put_in) {
  PointerSet set;
  std::vector<int> places(5000);
  for (const int& place : places) EXPECT_TRUE(set.insert(&place));
  for (const int& place : places) {
    EXPECT_FALSE(set.insert(&place));
    EXPECT_TRUE(set.contains(&place));
  }
  EXPECT_EQ(set.size(), places.size());
  EXPECT_FALSE(set.contains(&set));
}

}  // namespace
}  // namespace tensorplay
