// The graph walk against what PyTorch's own public accessors say.
#include "../../csrc/core/graph.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <string>

#include "../../csrc/core/read.h"

namespace tensorplay {
namespace {

using torch::autograd::Node;

struct Seen {
  std::string node;
  std::string argument;
  SavedFacts saved;
};

class Collector : public GraphVisitor {
 public:
  std::vector<Seen> seen;
  size_t nodes = 0;
  size_t busy = 0;

  void visit(const Node& node, size_t, std::span<const SavedSlot> slots, bool is_busy) override {
    ++nodes;
    busy += is_busy ? 1 : 0;
    for (const SavedSlot& slot : slots) {
      std::string argument(slot.argument);
      if (slot.index >= 0) argument += std::to_string(slot.index);
      seen.push_back({node.name(), argument, read_saved(*slot.variable)});
    }
  }
};

Collector walk(const at::Tensor& root) {
  Collector collector;
  const GraphRoot start{nullptr, root.unsafeGetTensorImpl()};
  walk_graph(std::span(&start, 1), nullptr, collector);
  return collector;
}

at::Tensor leaf(at::IntArrayRef shape) {
  return at::rand(shape).set_requires_grad(true);
}

TEST(Graph, names_what_each_node_saved) {
  const at::Tensor x = leaf({2, 3});
  const at::Tensor y = at::rand({2, 3});
  const at::Tensor root = (x * y).exp().sum();
  const Collector found = walk(root);

  ASSERT_EQ(found.seen.size(), 3U);  // Exp's result; of Mul only what the leaf's gradient needs
  EXPECT_EQ(found.seen[0].node + "." + found.seen[0].argument, "ExpBackward0.result");
  EXPECT_EQ(found.seen[1].node + "." + found.seen[1].argument, "MulBackward0.other");
  EXPECT_EQ(found.seen[1].saved.tensor->unsafeGetTensorImpl(), y.unsafeGetTensorImpl());
  EXPECT_EQ(found.seen[2].saved.state, SlotState::kNothing);
}

TEST(Graph, goes_on_behind_a_gradient_that_has_a_graph) {
  const at::Tensor plain = leaf({3});
  plain.pow(3).sum().backward();
  const at::Tensor x = leaf({3});
  x.pow(3).sum().backward({}, std::nullopt, /*create_graph=*/true);

  EXPECT_EQ(walk(plain).nodes, 0U);
  const Collector found = walk(x);
  EXPECT_GT(found.nodes, 1U);
  const bool saved = std::any_of(found.seen.begin(), found.seen.end(), [&](const Seen& seen) {
    return seen.saved.tensor != nullptr && seen.saved.tensor->is_same(x);
  });
  EXPECT_TRUE(saved);
  x.mutable_grad() = at::Tensor();  // the gradient's graph holds the leaf
}

TEST(Graph, expected_version_stays_where_the_tensor_s_moves) {
  const at::Tensor x = leaf({3});
  const at::Tensor y = at::zeros({3});
  const auto version = static_cast<uint32_t>(y._version());
  const at::Tensor z = x * y;
  y.add_(1);
  const Collector found = walk(z);

  ASSERT_FALSE(found.seen.empty());
  EXPECT_EQ(found.seen[0].saved.expected_version, version);
  EXPECT_EQ(found.seen[0].saved.tensor->unsafeGetTensorImpl()->version_counter().current_version(),
            version + 1);
}

TEST(Graph, released_after_backward) {
  const at::Tensor x = leaf({3});
  const at::Tensor z = (x * at::rand({3})).sum();
  z.backward();

  EXPECT_EQ(walk(z).seen[0].saved.state, SlotState::kReleased);
}

TEST(Graph, lists_are_numbered) {
  const at::Tensor a = leaf({3});
  const at::Tensor index = at::tensor({0, 2});
  const at::Tensor root = a.index({index});
  const Collector found = walk(root);

  ASSERT_EQ(found.seen.size(), 1U);
  EXPECT_EQ(found.seen[0].argument, "indices0");
}

TEST(Graph, finds_the_operator_inside_an_in_place_write_on_a_view) {
  const at::Tensor x = leaf({4});
  const at::Tensor y = x * 1;
  y.narrow(0, 0, 2).mul_(leaf({2}));
  const Collector found = walk(y);

  EXPECT_TRUE(std::any_of(found.seen.begin(), found.seen.end(), [](const Seen& seen) {
    return seen.node == "MulBackward0" && seen.argument == "other" && seen.saved.state == SlotState::kHeld;
  }));
}

struct Custom : torch::autograd::Function<Custom> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 torch::autograd::variable_list gradients) {
    return gradients;
  }
};

TEST(Graph, reads_a_custom_cpp_function) {
  const at::Tensor x = leaf({3});
  const at::Tensor root = Custom::apply(x);
  const Collector found = walk(root);

  ASSERT_EQ(found.seen.size(), 1U);
  EXPECT_EQ(found.seen[0].argument, "saved_variables0");
  EXPECT_EQ(found.seen[0].saved.tensor->unsafeGetTensorImpl(), x.unsafeGetTensorImpl());
}

TEST(Graph, walking_changes_no_count) {
  const at::Tensor x = leaf({3});
  const at::Tensor y = at::rand({3});
  const at::Tensor z = (x * y).exp();
  const auto before = std::pair(y.use_count(), z.grad_fn().use_count());
  walk(z);

  EXPECT_EQ(std::pair(y.use_count(), z.grad_fn().use_count()), before);
}

TEST(Graph, a_long_chain_needs_no_stack) {
  at::Tensor x = leaf({1});
  for (int i = 0; i < 200'000; ++i) x = x + 1;

  EXPECT_EQ(walk(x).nodes, 200'001U);
}

TEST(ViewNodes, lead_from_the_base_to_the_view) {
  const at::Tensor base = leaf({4, 6}) * 1;
  const at::Tensor view = base.view({2, 12}).select(0, 1).unfold(0, 3, 2).transpose(0, 1);
  const std::vector<ViewNode> found = view_nodes(*view.unsafeGetTensorImpl());

  ASSERT_EQ(found.size(), 4U);
  EXPECT_EQ(found[0].node->name(), "ViewBackward0");
  EXPECT_EQ(found[0].shape, (std::vector<int64_t>{2, 12}));
  EXPECT_EQ(found[3].node->name(), "TransposeBackward0");
  std::map<std::string_view, ArgumentValue> arguments;
  for (const auto& [name, value] : arguments_of(*found[1].node)) arguments.emplace(name, value);
  EXPECT_EQ(std::get<int64_t>(arguments.at("index")), 1);
  EXPECT_EQ(std::get<int64_t>(arguments.at("dim")), 0);
}

TEST(ViewNodes, begin_at_a_leaf_too) {
  const at::Tensor base = leaf({4});
  EXPECT_EQ(view_nodes(*base.narrow(0, 1, 2).unsafeGetTensorImpl()).size(), 1U);
}

TEST(ViewNodes, none_where_grad_fn_is_stale) {
  const at::Tensor base = leaf({4}) * 1;
  const at::Tensor view = base.narrow(0, 1, 2);
  base.add_(1);

  EXPECT_TRUE(view_nodes(*view.unsafeGetTensorImpl()).empty());
}

TEST(ViewNodes, none_without_history_or_for_no_view) {
  EXPECT_TRUE(view_nodes(*at::rand({4}).narrow(0, 1, 2).unsafeGetTensorImpl()).empty());
  EXPECT_TRUE(view_nodes(*(leaf({4}) * 1).unsafeGetTensorImpl()).empty());
}

TEST(ViewOf, answers_base_and_whether_the_function_was_kept) {
  const at::Tensor base = at::rand({4});
  const at::Tensor view = base.narrow(0, 1, 2);
  const auto found = view_of(*view.unsafeGetTensorImpl());

  ASSERT_TRUE(found);
  EXPECT_EQ(found->base->unsafeGetTensorImpl(), base.unsafeGetTensorImpl());
  EXPECT_EQ(found->function, nullptr);
  EXPECT_FALSE(view_of(*base.unsafeGetTensorImpl()));
}

}  // namespace
}  // namespace tensorplay
