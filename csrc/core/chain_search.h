// The search behind infer_chain: chains of one length from a base to a target.
//
// Pure integers: no torch, no Python, no I/O.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "chain.h"
#include "coordinates.h"
#include "shapes.h"
#include "view_ops.h"

namespace tensorplay {

constexpr int kNoCost = std::numeric_limits<int>::max();

// Of each state, with how many operators to come it has been searched in vain.
class VisitedViews {
 public:
  VisitedViews() : slots_(1024) {}

  // False: searched with at least as many.
  bool enter(uint64_t key, int remaining) {
    if (used_ * 2 >= slots_.size()) grow();
    Slot& slot = find(key);
    if (slot.key == key && slot.remaining >= remaining) return false;
    used_ += slot.key == key ? 0 : 1;
    slot = {key, remaining};
    return true;
  }

 private:
  struct Slot {
    uint64_t key = 0;
    int remaining = 0;
  };

  Slot& find(uint64_t key) {
    size_t at = key & (slots_.size() - 1);
    while (slots_[at].key != 0 && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
    return slots_[at];
  }

  void grow() {
    std::vector<Slot> old(slots_.size() * 4);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (slot.key != 0) find(slot.key) = slot;
    }
  }

  std::vector<Slot> slots_;
  size_t used_ = 0;
};

class ChainSearch {
 public:
  // `plain`: without unfold and diagonal, which few people write.
  ChainSearch(const View& base, const View& target, int64_t max_nodes, bool plain);

  // Whether a chain of exactly this many operators was found.
  bool run(int ops);

  std::span<const ViewCall> found() const { return {best_.data(), static_cast<size_t>(ops_)}; }
  int64_t nodes() const { return nodes_; }
  bool left_out() const { return left_out_ || nodes_ >= max_nodes_; }

 private:
  void visit(const View& state, int remaining, int cost, ViewOp before);
  void finish(const View& state, int cost, ViewOp before);
  bool attempt(const View& state, const ViewCall& call, int remaining, int cost);

  void try_selects(const View& state, const Coordinates& where, int remaining, int cost);
  void try_slices(const View& state, const Coordinates& where, int remaining, int cost);
  void try_slice_of(const View& state, int dim, const Band& band, int remaining, int cost);
  void try_any_slice_of(const View& state, int dim, bool empty, int remaining, int cost);
  void try_slack(const View& state, int dim, const Band& band, int64_t step, int remaining, int cost);
  void try_views(const View& state, int remaining, int cost);
  void try_unsqueezes(const View& state, int remaining, int cost);
  void try_squeezes(const View& state, int remaining, int cost);
  void try_expands(const View& state, int remaining, int cost);
  void try_diagonals(const View& state, const Coordinates& where, int remaining, int cost);
  void try_unfolds(const View& state, const Coordinates& where, int remaining, int cost);
  void try_element_types(const View& state, int remaining, int cost);
  void try_permutes(const View& state, int remaining, int cost);

  bool stopped() const { return nodes_ >= max_nodes_ || (best_cost_ != kNoCost && nodes_ >= plainer_until_); }
  bool exhaustive(bool needed = true);
  const View base_;
  const View target_;
  const bool plain_;
  int64_t target_count_ = 0;
  int target_ones_ = 0;   // dimensions of the target that a dimension of size 1 can become
  int most_ones_ = 0;     // worth having on the way
  int target_units_ = 0;  // dimensions of size 1
  int target_zeros_ = 0;  // dimensions that an expand can make
  bool all_small_ = false;
  Few expand_sizes_;

  const int64_t max_nodes_;
  int64_t nodes_ = 1;
  bool left_out_ = false;
  VisitedViews visited_;

  std::array<std::vector<Shape>, kMaxChainOps + 1> shapes_;  // kept for their room, one a depth

  int ops_ = 0;
  std::array<ViewCall, kMaxChainOps> path_;
  std::array<ViewCall, kMaxChainOps> best_;
  int best_cost_ = kNoCost;
  int64_t plainer_until_ = 0;
};

}  // namespace tensorplay
