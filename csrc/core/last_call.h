// Which single view operators lead from a state to the target? Solved, not searched.
//
// Pure integers: no torch, no Python, no I/O, no allocation.
#pragma once

#include <array>

#include "view_ops.h"

namespace tensorplay {

// The calls found, each replayed and compared; of every operator the plainest arguments.
class LastCalls {
 public:
  // After a permute only what looks at the order of the dimensions; the rest moves in front of it.
  LastCalls(const View& state, const View& target, bool after_permute);

  const ViewCall* begin() const { return calls_.data(); }
  const ViewCall* end() const { return calls_.data() + count_; }

 private:
  void keep(const ViewCall& call);
  void solve_select();
  void solve_slice();
  void solve_permute();
  void solve_squeeze();
  void solve_unsqueeze();
  void solve_diagonal();
  void solve_unfold();
  void solve_element_type(bool after_permute);

  // Whether the state without dimension `dim` (and `other`) has the target's first dimensions.
  bool rest_matches(int dim, int other) const;

  const View& state_;
  const View& target_;
  std::array<ViewCall, 12> calls_;
  size_t count_ = 0;
};

template <class Take>
void for_last_calls(const View& state, const View& target, bool after_permute, Take take) {
  for (const ViewCall& call : LastCalls(state, target, after_permute)) take(call);
}

}  // namespace tensorplay
