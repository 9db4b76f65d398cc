// Gradients whose own graph, as create_graph makes it, leads back to their leaf: cycles that run through C++.
#pragma once

#include <c10/core/TensorImpl.h>

#include <span>
#include <vector>

#include "graph.h"

namespace tensorplay {

// Those of some AccumulateGrads whose leaf's gradient leads back to them, over the gradients of other leaves
// too; in their order. O(nodes + edges) of the graphs behind the gradients. Needs what walk_graph() needs.
std::vector<const torch::autograd::Node*> in_gradient_cycles(
    std::span<const torch::autograd::Node* const> accumulators);

}  // namespace tensorplay
