// The bytes that a strided tensor reaches, as a sum of arithmetic progressions in normal form.
//
//   base + i0 * stride0 + i1 * stride1 + ...   with 0 <= ik < countk
//
// An element's own bytes are one progression of stride 1. Pure integers: no torch, no Python, no I/O.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "bitmap.h"
#include "extent.h"

namespace tensorplay {

// A strided tensor over some memory. Two storages over one buffer share an origin by their distance.
struct Region {
  DimSpan sizes;
  DimSpan strides;           // in elements; 0 and negative ones count
  int64_t offset = 0;        // in elements, from origin_bytes
  int64_t itemsize = 1;      // bytes an element
  int64_t origin_bytes = 0;  // where the storage begins, from a point common to all regions compared
};

struct Step {
  int64_t count;   // > 1
  int64_t stride;  // > 0

  bool operator==(const Step&) const = default;
};

// So many progressions that do not merge need gaps at every level: no real view has them.
inline constexpr size_t kMaxSteps = 16;

class Steps {
 public:
  const Step* begin() const { return steps_.data(); }
  const Step* end() const { return steps_.data() + size_; }
  Step* begin() { return steps_.data(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const Step& operator[](size_t i) const { return steps_[i]; }
  Step& operator[](size_t i) { return steps_[i]; }
  const Step& back() const { return steps_[size_ - 1]; }
  void push_back(Step step) { steps_[size_++] = step; }
  void resize(size_t size) { size_ = size; }

  bool operator==(const Steps& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

 private:
  std::array<Step, kMaxSteps> steps_;
  size_t size_ = 0;
};

// Positions are bytes, or units of several bytes where a caller divided.
struct ByteSet {
  int64_t base = 0;    // the lowest byte
  int64_t extent = 0;  // from the lowest to the highest byte: 0 for a single one
  Steps steps;         // by rising stride; no two of them make one progression
  bool empty = false;

  int64_t last() const { return base + extent; }
  // Bytes in the unbroken run that every element begins with.
  int64_t run() const { return !steps.empty() && steps[0].stride == 1 ? steps[0].count : 1; }
  bool is_one_run() const { return run() == extent + 1; }
  bool operator==(const ByteSet&) const = default;
};

// Absent where a position leaves 60 bits, or where more than kMaxSteps progressions stay.
std::optional<ByteSet> normal_form(const Region& region);

// Whether each step is wider than all smaller ones together reach: every byte is reached in one way only.
bool is_nested(const ByteSet& set);

// Number of bytes of a nested set.
int64_t count_nested(const ByteSet& set);

// Number of bytes of a nested set below `position`. O(steps).
int64_t count_below(const ByteSet& set, int64_t position);

// The same bytes as nested sets without a common one; none where that needs more than `most` sets or is not
// known how.
std::vector<ByteSet> split_nested(const ByteSet& set, size_t most);

// Number of bytes of any set, between two bounds that are equal where it is known.
struct CountBounds {
  int64_t least = 0;
  int64_t most = 0;
};
CountBounds count_bytes(const ByteSet& set);

// The largest unit in which positions relative to `base`, runs and strides of the set are whole, given one
// that must be whole as well (0: none).
int64_t common_unit(const ByteSet& set, int64_t base, int64_t unit);
ByteSet divided(const ByteSet& set, int64_t base, int64_t unit);

// A bit for each position from base to last().
Bitmap drawn(const ByteSet& set);

// Bytes begin..end-1.
struct Run {
  int64_t begin;
  int64_t end;
};

int64_t number_of_runs(const ByteSet& set);  // as for_each_run() lists them; at most the largest number

// Every run() of the set, smallest steps first. Only those of a nested set have no common byte.
template <class Visit>
void for_each_run(const ByteSet& set, Visit visit) {
  const size_t first = !set.steps.empty() && set.steps[0].stride == 1 ? 1 : 0;
  std::array<int64_t, kMaxSteps> index{};
  int64_t begin = set.base;
  for (;;) {
    visit(Run{begin, begin + set.run()});
    size_t at = first;
    for (; at < set.steps.size() && index[at] + 1 == set.steps[at].count; ++at) {
      begin -= index[at] * set.steps[at].stride;
      index[at] = 0;
    }
    if (at == set.steps.size()) return;
    ++index[at];
    begin += set.steps[at].stride;
  }
}

// Sorted, and those that touch made one.
void merge_runs(std::vector<Run>& runs);
int64_t length_of(const std::vector<Run>& merged);

}  // namespace tensorplay
