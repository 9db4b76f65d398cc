// How often two sets of bytes meet: a bounded search for the solutions of one linear equation.
//
// Pure integers: no torch, no Python, no I/O.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "byte_set.h"

namespace tensorplay {

// Whether sum(count_i * stride_i) meets between two sets: the number of pairs (element of a, element of b) at
// one position. For nested sets that is the number of positions in common.
class Meetings {
 public:
  Meetings(const ByteSet& a, const ByteSet& b);

  // Absent where more than `nodes` nodes would be visited; what was visited is taken off.
  std::optional<int64_t> count(int64_t& nodes);
  // Whether there is any. For all sets, nested or not.
  std::optional<bool> any(int64_t& nodes);

 private:
  int64_t solve(size_t first, size_t last, int64_t target);
  int64_t solve_two(size_t first, int64_t target);
  int64_t solve_strip(size_t first, int64_t target) const;
  bool is_strip(size_t first, size_t last);
  void prepare();
  void estimate();
  int64_t reach(size_t first, size_t last) const { return reach_[last] - reach_[first]; }
  int64_t& unit(size_t first, size_t last) { return units_[first * kMaxTerms + last - 1]; }
  double& cost(size_t first, size_t last) { return costs_[first * kMaxTerms + last - 1]; }

  static constexpr size_t kMaxTerms = 2 * kMaxSteps;
  std::array<Step, kMaxTerms> terms_;                 // of both sets, the widest first
  std::array<int64_t, kMaxTerms + 1> reach_;          // sums of (count - 1) * stride of the terms before
  std::array<int64_t, kMaxTerms> inverse_;            // of one term modulo the next one; -1: not asked yet
  std::array<int64_t, kMaxTerms * kMaxTerms> units_;  // greatest common divisors of strides first..last
  // Nodes that terms first..last take, by a rough estimate.
  std::array<double, kMaxTerms * kMaxTerms> costs_;
  size_t size_ = 0;
  int64_t target_ = 0;
  bool only_any_ = false;
  int64_t nodes_ = 0;
};

}  // namespace tensorplay
