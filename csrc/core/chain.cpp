#include "chain.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

#include "coordinates.h"
#include "extent.h"
#include "last_call.h"

// Note [What the search leaves out]
//
// Chains are tried by length. The last operator is not searched but solved (last_call.h); those before it are
// tried with all arguments that can matter:
// - Where each cell of the state has one index, the target's cells fix the index of a select and the offset
// of
//   a diagonal, and a slice may be tight around them. A slice with slack matters only where a later operator
//   reads the size (view, unsqueeze) and a still later one cuts the slack off, so with two operators to come.
// - permute moves behind every operator that does not look at the order of the dimensions.
// - Nothing leaves the target's element type once it is reached.
// Small states (is_small) get every slack, index, window and shape; larger ones those that the target's sizes
// and strides suggest, and what that leaves out is counted as left out. So are all arguments past the first
// for states without cells. Left out everywhere, and not counted: steps longer than the dimension, and expand
// to sizes that do not come from the target's own.

namespace tensorplay {
namespace {

constexpr int64_t kSmallSize = 8;
constexpr int64_t kSmallCount = 64;
constexpr int kMaxPermutedDims = 6;
// Looked at after the first chain of a length, for a plainer one of the same length.
constexpr int64_t kNodesForPlainer = 1'500;
constexpr int kNoCost = std::numeric_limits<int>::max();

// How plain a call reads; among chains of one length the least sum wins.
int cost_of(const ViewCall& call) {
  switch (call.op) {
    case ViewOp::kSelect:
      return 20;
    case ViewOp::kSlice:
      return call.args[3] == 1 ? 20 : 22;
    case ViewOp::kPermute: {
      int moved = 0;
      for (int i = 0; i < call.count; ++i) moved += call.args[i] != i ? 1 : 0;
      return moved <= 2 ? 20 : 23;
    }
    case ViewOp::kSqueezeAll:
      return 23;
    case ViewOp::kUnsqueeze:
    case ViewOp::kSqueeze:
    case ViewOp::kReal:
    case ViewOp::kImag:
      return 22;
    case ViewOp::kView:
    case ViewOp::kConj:
      return 24;
    case ViewOp::kExpand:
    case ViewOp::kViewAsReal:
      return 25;
    case ViewOp::kDiagonal:
      return 28;
    default:
      return 30;
  }
}
constexpr int kLeastCost = 20;

// A few different numbers, in the order in which they came.
class Few {
 public:
  void add(int64_t value) {
    if (count_ == values_.size() || std::find(begin(), end(), value) != end()) return;
    values_[count_++] = value;
  }
  void add_between(int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) add(value);
  }
  const int64_t* begin() const { return values_.data(); }
  const int64_t* end() const { return values_.data() + count_; }
  bool empty() const { return count_ == 0; }

 private:
  std::array<int64_t, 48> values_;
  size_t count_ = 0;
};

struct Shape {
  int count = 0;
  std::array<int64_t, kMaxViewDims> sizes;

  void push(int64_t size) {
    if (count < kMaxViewDims) sizes[count++] = size;
  }
  Shape with(int at, int64_t size) const {
    Shape shape;
    for (int i = 0; i <= count; ++i) {
      if (i == at) shape.push(size);
      if (i < count) shape.push(sizes[i]);
    }
    return shape;
  }
  Shape without(int at) const {
    Shape shape;
    for (int i = 0; i < count; ++i) {
      if (i != at) shape.push(sizes[i]);
    }
    return shape;
  }
  std::span<const int64_t> values() const { return {sizes.data(), static_cast<size_t>(count)}; }
  friend bool operator==(const Shape& a, const Shape& b) {
    return std::equal(a.sizes.begin(), a.sizes.begin() + a.count, b.sizes.begin(), b.sizes.begin() + b.count);
  }
};

Shape shape_of(const View& view) {
  Shape shape;
  for (int i = 0; i < view.dims; ++i) shape.push(view.sizes[i]);
  return shape;
}

// Of each state, with how many operators to come it has been searched in vain.
class Visited {
 public:
  Visited() : slots_(1024) {}

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

// 64 bits stand for the state: among 10^5 states two share them once in 10^9 searches.
uint64_t key_of(const View& view, uint64_t restriction) {
  uint64_t key = 0x9e3779b97f4a7c15;
  const auto mix = [&key](uint64_t value) {
    key = (key ^ value) * 0xff51afd7ed558ccd;
    key ^= key >> 32;
  };
  mix(static_cast<uint64_t>(view.dims) << 2 | restriction);
  for (int i = 0; i < view.dims; ++i) {
    mix(static_cast<uint64_t>(view.sizes[i]));
    mix(static_cast<uint64_t>(view.strides[i]));
  }
  mix(static_cast<uint64_t>(view.offset));
  mix(static_cast<uint64_t>(view.element.dtype) << 2 | (view.element.is_conj ? 2 : 0) |
      (view.element.is_neg ? 1 : 0));
  return key | 1;
}

class Search {
 public:
  Search(const View& base, const View& target, int64_t max_nodes);

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

  void shapes_before_last(const View& state, int64_t count, std::vector<Shape>& shapes) const;
  void shapes_by_factors(const View& state, std::vector<Shape>& shapes) const;
  void shapes_by_target(const View& state, std::vector<Shape>& shapes) const;
  void add_ones(std::vector<Shape>& shapes) const;

  bool stopped() const { return nodes_ >= max_nodes_ || (best_cost_ != kNoCost && nodes_ >= plainer_until_); }
  bool exhaustive(bool needed = true);
  // A stride of the target in elements of the state.
  std::optional<int64_t> target_stride(const View& state, int dim) const;

  const View base_;
  const View target_;
  int64_t target_count_ = 0;
  int target_ones_ = 0;   // dimensions of the target that a dimension of size 1 can become
  int target_units_ = 0;  // dimensions of size 1
  int target_zeros_ = 0;  // dimensions that an expand can make
  bool all_small_ = false;
  Few expand_sizes_;

  const int64_t max_nodes_;
  int64_t nodes_ = 1;
  bool left_out_ = false;
  Visited visited_;

  std::array<std::vector<Shape>, kMaxChainOps + 1> shapes_;  // kept for their room, one a depth

  int ops_ = 0;
  std::array<ViewCall, kMaxChainOps> path_;
  std::array<ViewCall, kMaxChainOps> best_;
  int best_cost_ = kNoCost;
  int64_t plainer_until_ = 0;
};

bool is_small(const View& state) {
  int64_t count = 0;
  return count_view(state, count) && count <= kSmallCount &&
         std::all_of(state.sizes.begin(), state.sizes.begin() + state.dims,
                     [](int64_t size) { return size <= kSmallSize; });
}

Search::Search(const View& base, const View& target, int64_t max_nodes)
    : base_(base), target_(target), max_nodes_(max_nodes) {
  count_view(target, target_count_);
  for (int i = 0; i < target.dims; ++i) {
    const int64_t size = target.sizes[i];
    target_units_ += size == 1 ? 1 : 0;
    target_zeros_ += size == 0 || target.strides[i] == 0 ? 1 : 0;
    target_ones_ += size == 1 || size == 0 || target.strides[i] == 0 ? 1 : 0;
    if (size == 1 && target.strides[i] == 0) expand_sizes_.add(2);  // and cut down to one again
    if (size != 1 && (target.strides[i] == 0 || size == 0)) expand_sizes_.add(size);
  }
  if (!expand_sizes_.empty()) {  // a diagonal over a stretched dimension takes its length from it
    for (int i = 0; i < target.dims; ++i) {
      if (target.sizes[i] > 1) expand_sizes_.add(target.sizes[i]);
    }
  }
  all_small_ = target_count_ > 0 && is_small(base) && is_small(target);
}

bool Search::run(int ops) {
  ops_ = ops;
  if (ops == 1) {
    finish(base_, 0, ViewOp::kAsStrided);
  } else {
    visit(base_, ops, 0, ViewOp::kAsStrided);
  }
  return best_cost_ != kNoCost;
}

// Whether all arguments are to be tried; if not, that is remembered.
bool Search::exhaustive(bool needed) {
  if (all_small_) return true;
  left_out_ = left_out_ || needed;
  return false;
}

std::optional<int64_t> Search::target_stride(const View& state, int dim) const {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(target_.strides[dim], target_.element.itemsize, &bytes)) return std::nullopt;
  if (bytes % state.element.itemsize != 0) return std::nullopt;
  return bytes / state.element.itemsize;
}

void Search::finish(const View& state, int cost, ViewOp before) {
  for_last_calls(state, target_, before == ViewOp::kPermute, [&](const ViewCall& call) {
    const int total = cost + cost_of(call);
    if (total >= best_cost_) return;
    if (best_cost_ == kNoCost) plainer_until_ = nodes_ + kNodesForPlainer;
    best_cost_ = total;
    path_[ops_ - 1] = call;
    best_ = path_;
  });
}

// The state that a call gives, searched on. `remaining` counts the call.
bool Search::attempt(const View& state, const ViewCall& call, int remaining, int cost) {
  if (stopped()) return false;
  ++nodes_;
  View next;
  cost += cost_of(call);
  if (best_cost_ != kNoCost && cost + (remaining - 1) * kLeastCost >= best_cost_) return false;
  if (!apply(state, call, next)) return false;
  path_[ops_ - remaining] = call;
  if (remaining == 2) {
    finish(next, cost, call.op);
  } else {
    visit(next, remaining - 1, cost, call.op);
  }
  return true;
}

// The same cells by another name: x.view(dtype) of the same width, conj().
bool only_renames(const ElementType& from, const ElementType& to) {
  return from != to && from.itemsize == to.itemsize && from.is_complex == to.is_complex &&
         from.is_neg == to.is_neg;
}

void Search::visit(const View& state, int remaining, int cost, ViewOp before) {
  const bool permuted = before == ViewOp::kPermute;
  const bool viewed = before == ViewOp::kView;
  if (!visited_.enter(key_of(state, permuted ? 1 : viewed ? 2 : 0), remaining)) return;
  const Coordinates where = locate(target_, state);
  if (where.outside) return;
  if (only_renames(state.element, target_.element)) {
    // Bits that only get another name get it first: it commutes with all else.
    if (remaining == ops_) try_element_types(state, remaining, cost);
    return;
  }
  if (permuted) {
    try_views(state, remaining, cost);
    try_expands(state, remaining, cost);
    try_element_types(state, remaining, cost);
    return;
  }
  try_selects(state, where, remaining, cost);
  try_slices(state, where, remaining, cost);
  try_diagonals(state, where, remaining, cost);
  // Two views in a row are one, but for the strides of dimensions of size 1.
  if (!viewed || (target_units_ > 0 && exhaustive())) try_views(state, remaining, cost);
  try_element_types(state, remaining, cost);
  try_squeezes(state, remaining, cost);
  try_unsqueezes(state, remaining, cost);
  try_expands(state, remaining, cost);
  try_unfolds(state, where, remaining, cost);
  try_permutes(state, remaining, cost);
}

void Search::try_selects(const View& state, const Coordinates& where, int remaining, int cost) {
  for (int dim = 0; dim < state.dims; ++dim) {
    const int64_t size = state.sizes[dim];
    if (size == 0) continue;
    const auto select = [&](int64_t index) {
      attempt(state, ViewCall(ViewOp::kSelect, {dim, index}), remaining, cost);
    };
    if (size == 1 || state.strides[dim] == 0) {
      select(0);
    } else if (where.unique && where.bands[dim].exact) {
      if (where.bands[dim].first == where.bands[dim].last) select(where.bands[dim].first);
    } else if (size <= kSmallSize || exhaustive()) {
      for (int64_t index = 0; index < size; ++index) select(index);
    } else {
      select(0);
      const int64_t index = (target_.offset - state.offset) / std::max<int64_t>(state.strides[dim], 1);
      if (index > 0 && index < size) select(index);
      if (index >= size) select(size - 1);
    }
  }
}

void Search::try_slices(const View& state, const Coordinates& where, int remaining, int cost) {
  for (int dim = 0; dim < state.dims; ++dim) {
    if (!where.empty && where.unique && where.bands[dim].exact && state.strides[dim] != 0) {
      try_slice_of(state, dim, where.bands[dim], remaining, cost);
    } else {
      try_any_slice_of(state, dim, where.empty, remaining, cost);
    }
  }
}

ViewCall slice_call(int dim, int64_t start, int64_t length, int64_t step) {
  const int64_t end = length == 0 ? start : start + (length - 1) * step + 1;
  return ViewCall(ViewOp::kSlice, {dim, start, end, step});
}

void Search::try_slice_of(const View& state, int dim, const Band& band, int remaining, int cost) {
  const int64_t size = state.sizes[dim];
  const int64_t stride = state.strides[dim];
  const auto slice = [&](int64_t start, int64_t length, int64_t step) {
    if (length == size && step == 1) return;
    attempt(state, slice_call(dim, start, length, step), remaining, cost);
  };
  if (band.first == band.last) {
    slice(band.first, 1, 1);
    for (int i = 0; i < target_.dims; ++i) {
      const auto wanted = target_stride(state, i);
      if (target_.sizes[i] != 1 || !wanted || *wanted <= stride || *wanted % stride != 0) continue;
      slice(band.first, 1, *wanted / stride);
    }
    if (remaining > 2) try_slack(state, dim, band, 1, remaining, cost);
    return;
  }
  // All divisors: a step that is shorter leaves the rest to an operator that mixes this dimension with
  // others.
  for (int64_t step = 1; step <= band.common / step; ++step) {
    if (band.common % step != 0) continue;
    for (const int64_t each : {step, band.common / step}) {
      slice(band.first, (band.last - band.first) / each + 1, each);
      if (remaining > 2) try_slack(state, dim, band, each, remaining, cost);
      if (step == band.common / step) break;
    }
  }
}

// Wider than the target needs: what a view then splits must divide.
void Search::try_slack(const View& state, int dim, const Band& band, int64_t step, int remaining, int cost) {
  const int64_t size = state.sizes[dim];
  const auto slice = [&](int64_t start, int64_t end) {
    const int64_t length = (end - start - 1) / step + 1;
    if (length == (band.last - band.first) / step + 1 || (length == size && step == 1)) return;
    attempt(state, slice_call(dim, start, length, step), remaining, cost);
  };
  if (exhaustive()) {
    for (int64_t start = band.first; start >= 0; start -= step) {
      for (int64_t end = band.last + 1; end <= size; end += step) slice(start, end);
    }
    return;
  }
  Few units;
  for (int i = 0; i < target_.dims; ++i) {
    const auto wanted = target_stride(state, i);
    const int64_t stride = state.strides[dim] * step;
    if (wanted && *wanted > stride && *wanted % stride == 0) units.add(*wanted / stride);
    units.add(target_.sizes[i]);
  }
  for (const int64_t unit : units) {
    if (unit <= 1 || unit > size / step) continue;
    const int64_t tight = (band.last - band.first) / step + 1;
    const int64_t length = (tight + unit - 1) / unit * unit;
    const int64_t span = (length - 1) * step + 1;
    for (int64_t start : {band.first, band.first - band.first % (unit * step), band.first % step}) {
      const int64_t needed = (band.last - start) / step + 1;
      const int64_t rounded = (needed + unit - 1) / unit * unit;
      const int64_t end = start + (rounded - 1) * step + 1;
      if (end <= size) slice(start, end);
    }
    const int64_t latest = size - span - ((size - span - band.first) % step + step) % step;
    if (latest >= 0 && latest < band.first) slice(latest, latest + span);
  }
  slice(band.first % step, band.last + 1);
  slice(band.first, size - (size - 1 - band.first) % step);
}

// Without a place for each cell: every slice of a small dimension, or what the target suggests.
void Search::try_any_slice_of(const View& state, int dim, bool empty, int remaining, int cost) {
  const int64_t size = state.sizes[dim];
  const int64_t stride = state.strides[dim];
  const auto slice = [&](int64_t start, int64_t length, int64_t step) {
    if (length == size && step == 1) return;
    if (length > 0 && (length - 1) * step > size - 1 - start) return;
    attempt(state, slice_call(dim, start, length, step), remaining, cost);
  };
  if (stride == 0) {
    if (size == 1 && !empty) return;
    if (exhaustive(size > 2)) {
      for (int64_t length = empty ? 0 : 1; length < size; ++length) slice(0, length, 1);
    } else {
      if (empty) slice(0, 0, 1);
      slice(0, 1, 1);
      for (const int64_t length : expand_sizes_) {
        if (length < size) slice(0, length, 1);
      }
    }
    return;
  }
  Few steps;
  steps.add(1);
  for (int i = 0; i < target_.dims; ++i) {
    const auto wanted = target_stride(state, i);
    if (wanted && *wanted > stride && *wanted % stride == 0) steps.add(*wanted / stride);
  }
  if (exhaustive()) {
    for (int64_t start = 0; start < size; ++start) {
      for (const int64_t step : steps) slice(start, 1, step);
      for (int64_t step = 1; step < size - start; ++step) {
        for (int64_t length = 2; start + (length - 1) * step < size; ++length) slice(start, length, step);
      }
    }
    return;
  }
  Few starts;
  starts.add(0);
  const int64_t distance = target_.offset - state.offset;
  if (distance >= 0) {
    int64_t rest = distance;
    starts.add_between(distance / stride, 0, size);
    for (int i = 0; i < state.dims; ++i) {
      if (i != dim && state.strides[i] > stride) rest %= state.strides[i];
    }
    starts.add_between(rest / stride, 0, size);
  }
  for (const int64_t start : starts) {
    for (const int64_t step : steps) {
      if (empty) slice(start, 0, step);
      for (int i = 0; i < target_.dims; ++i) {
        if (target_.sizes[i] <= size && target_.sizes[i] > 0) slice(start, target_.sizes[i], step);
      }
      if (start < size) slice(start, (size - 1 - start) / step + 1, step);
    }
  }
}

void Search::try_views(const View& state, int remaining, int cost) {
  int64_t count = 0;
  if (!count_view(state, count)) return;
  std::vector<Shape>& shapes = shapes_[remaining];
  shapes.clear();
  if (remaining == 2) {
    shapes_before_last(state, count, shapes);
  } else if (count > 0 && exhaustive(count > 1)) {
    shapes_by_factors(state, shapes);
    add_ones(shapes);
  } else {
    shapes_by_target(state, shapes);
    add_ones(shapes);
  }
  for (const Shape& shape : shapes) attempt(state, ViewCall(ViewOp::kView, shape.values()), remaining, cost);
}

// The shapes from which one more call can lead to the target's.
void Search::shapes_before_last(const View& state, int64_t count, std::vector<Shape>& shapes) const {
  const Shape goal = shape_of(target_);
  const auto others = [&](int dim) {
    int64_t product = 1;
    for (int i = 0; i < goal.count; ++i) {
      if (i != dim && __builtin_mul_overflow(product, goal.sizes[i], &product)) return int64_t{0};
    }
    return product;
  };
  const auto add = [&](const Shape& shape) { shapes.push_back(shape); };
  const bool same_count = count == target_count_;
  if (same_count) {
    std::array<int64_t, kMaxViewDims> sorted = goal.sizes;  // before permute
    std::sort(sorted.begin(), sorted.begin() + goal.count);
    do {
      Shape shape = goal;
      shape.sizes = sorted;
      add(shape);
    } while (shapes.size() < 720 && std::next_permutation(sorted.begin(), sorted.begin() + goal.count));
    for (int i = 0; i < goal.count; ++i) {
      if (goal.sizes[i] == 1) add(goal.without(i));  // before unsqueeze
    }
    for (int i = 0; i <= goal.count; ++i) add(goal.with(i, 1));  // before squeeze
    Shape bare;  // before another view, which it frees from the strides of dimensions of size 1
    for (const int64_t size : goal.values()) {
      if (size != 1) bare.push(size);
    }
    add(bare);
    bare.count = 0;
    for (int i = 0; i < state.dims; ++i) {
      if (state.sizes[i] != 1) bare.push(state.sizes[i]);
    }
    add(bare);
  }
  if (target_count_ > 0 && count % target_count_ == 0) {
    const int64_t more = count / target_count_;
    for (int i = 0; i <= goal.count; ++i) add(goal.with(i, more));  // before select
    if (target_.element != state.element) {
      add(goal.with(goal.count, 2));  // before view_as_complex
    }
  }
  for (int dim = 0; dim < goal.count; ++dim) {  // before slice, expand of one, view(dtype)
    const int64_t rest = others(dim);
    if (rest <= 0 || count % rest != 0) continue;
    Shape shape = goal;
    shape.sizes[dim] = count / rest;
    add(shape);
  }
  if (goal.count >= 1) {  // before diagonal, whose result is the last dimension
    const Shape kept = goal.without(goal.count - 1);
    const int64_t rest = others(goal.count - 1);
    const int64_t length = goal.sizes[goal.count - 1];
    if (rest > 0 && count % rest == 0) {
      const int64_t both = count / rest;
      for (int64_t a = 1; a <= both / a; ++a) {
        if (both % a != 0) continue;
        if (a < length) continue;
        for (int i = 0; i <= kept.count; ++i) {
          for (int j = i + 1; j <= kept.count + 1; ++j) {
            add(kept.with(i, a).with(j, both / a));
            if (a * a != both) add(kept.with(i, both / a).with(j, a));
          }
        }
      }
    }
  }
  if (goal.count >= 2) {  // before unfold, whose window is the last dimension
    const Shape kept = goal.without(goal.count - 1);
    for (int dim = 0; dim < kept.count; ++dim) {
      int64_t rest = 1;
      for (int i = 0; i < kept.count; ++i) {
        if (i != dim && __builtin_mul_overflow(rest, kept.sizes[i], &rest)) rest = 0;
      }
      if (rest <= 0 || count % rest != 0) continue;
      Shape shape = kept;
      shape.sizes[dim] = count / rest;
      add(shape);
    }
  }
  if (!expand_sizes_.empty() ||
      target_units_ > 0) {  // before expand: ones where it stretches, fewer in front
    std::vector<Shape> open{Shape{}};
    bool bare_front = true;
    for (int i = goal.count - 1; i >= 0; --i) {
      const bool stretched = goal.sizes[i] != 1 && target_.strides[i] == 0;
      const size_t known = open.size();
      for (size_t k = 0; k < known && open.size() < 64; ++k) {
        Shape& shape = open[k];
        if (stretched || goal.sizes[i] == 0) {
          open.push_back(shape.with(0, goal.sizes[i]));
          open[k] = open[k].with(0, 1);
        } else {
          shape = shape.with(0, goal.sizes[i]);
        }
      }
    }
    for (const Shape& shape : open) {
      add(shape);
      for (int front = 1; front <= shape.count && (shape.sizes[front - 1] == 1) && bare_front; ++front) {
        Shape fewer;
        for (int i = front; i < shape.count; ++i) fewer.push(shape.sizes[i]);
        add(fewer);
      }
    }
  }
  if (target_.element != state.element) {
    add(goal);
    if (goal.count >= 1) add(goal.without(goal.count - 1));  // before view_as_real
    for (const int64_t ratio : {2, 4, 8, 16}) {
      if (goal.count == 0) break;
      Shape shape = goal;
      const int64_t last = shape.sizes[shape.count - 1];
      if (last % ratio == 0) {
        shape.sizes[shape.count - 1] = last / ratio;
        add(shape);
      }
      if (!__builtin_mul_overflow(last, ratio, &shape.sizes[shape.count - 1])) add(shape);
    }
  }
}

// Runs of dimensions that follow each other in memory, ones aside.
struct Chunk {
  int64_t count;
  int64_t stride;
  int first;  // of the dimensions
  int last;
};

std::vector<Chunk> chunks_of(const View& state) {
  std::vector<Chunk> chunks;  // innermost first
  for (int dim = state.dims - 1; dim >= 0; --dim) {
    if (state.sizes[dim] == 1) continue;
    int64_t joined = 0;
    if (!chunks.empty() && !__builtin_mul_overflow(chunks.back().count, chunks.back().stride, &joined) &&
        joined == state.strides[dim]) {
      chunks.back().count *= state.sizes[dim];
      chunks.back().first = dim;
    } else {
      chunks.push_back({state.sizes[dim], state.strides[dim], dim, dim});
    }
  }
  std::reverse(chunks.begin(), chunks.end());
  return chunks;
}

void append_factors(const Shape& head, int64_t count, std::vector<Shape>& out) {
  if (head.count >= kMaxViewDims - 1) return;
  Shape whole = head;
  if (count > 1) whole.push(count);
  out.push_back(whole);
  for (int64_t factor = 2; factor <= count / 2; ++factor) {
    if (count % factor != 0) continue;
    Shape longer = head;
    longer.push(factor);
    append_factors(longer, count / factor, out);
  }
}

// Every shape without ones.
void Search::shapes_by_factors(const View& state, std::vector<Shape>& shapes) const {
  shapes.assign(1, Shape{});
  for (const Chunk& chunk : chunks_of(state)) {
    std::vector<Shape> longer;
    for (const Shape& head : shapes) append_factors(head, chunk.count, longer);
    shapes.swap(longer);
  }
}

// Chunks whole, as they are, or cut where the target's strides and sizes suggest.
void Search::shapes_by_target(const View& state, std::vector<Shape>& shapes) const {
  const std::vector<Chunk> chunks = chunks_of(state);
  int64_t count = 0;
  if (!count_view(state, count)) return;
  shapes.push_back(shape_of(target_));
  if (count == 0) return;
  const auto as_it_is = [&](const Chunk& chunk, Shape& shape) {
    for (int i = chunk.first; i <= chunk.last; ++i) {
      if (state.sizes[i] != 1) shape.push(state.sizes[i]);
    }
  };
  for (size_t at = 0; at < chunks.size(); ++at) {
    const Chunk& chunk = chunks[at];
    Few cuts;  // cells of the chunk inside of a cut
    std::vector<int64_t> stepped;
    for (int i = 0; i < target_.dims; ++i) {
      const auto wanted = target_stride(state, i);
      if (!wanted || chunk.stride == 0 || *wanted % chunk.stride != 0) continue;
      const int64_t cells = *wanted / chunk.stride;
      cuts.add_between(cells, 2, chunk.count - 1);
      stepped.push_back(cells);
      int64_t outer = 0;
      if (!__builtin_mul_overflow(cells, target_.sizes[i], &outer))
        cuts.add_between(outer, 2, chunk.count - 1);
    }
    int64_t inner = 1;
    for (int i = target_.dims - 1; i >= 0; --i) {
      if (__builtin_mul_overflow(inner, target_.sizes[i], &inner) || inner == 0) break;
      cuts.add_between(inner, 2, chunk.count - 1);
      cuts.add_between(target_.sizes[i], 2, chunk.count - 1);
      if (chunk.count % target_.sizes[i] == 0) {
        cuts.add_between(chunk.count / target_.sizes[i], 2, chunk.count - 1);
      }
    }
    inner = 1;
    for (int i = chunk.last; i > chunk.first; --i) {
      inner *= state.sizes[i];
      cuts.add_between(inner, 2, chunk.count - 1);
    }
    for (int i = 0; i < target_.dims; ++i) {
      const auto wanted = target_stride(state, i);
      for (int other = 0; wanted && chunk.stride > 0 && other < state.dims; ++other) {
        const int64_t left = *wanted - state.strides[other];  // of a diagonal
        if (left > chunk.stride && left % chunk.stride == 0 && chunk.count % (left / chunk.stride) == 0) {
          cuts.add_between(left / chunk.stride, 2, chunk.count - 1);
          stepped.push_back(left / chunk.stride);
        }
      }
    }
    std::vector<Shape> parts(1);
    parts[0].push(chunk.count);
    std::vector<int64_t> present;
    inner = 1;
    for (int i = chunk.last; i > chunk.first; --i) present.push_back(inner *= state.sizes[i]);
    for (const bool keeps : {false, true}) {  // cut wherever the target steps
      if (keeps) stepped.insert(stepped.end(), present.begin(), present.end());
      std::sort(stepped.begin(), stepped.end());
      for (const bool inwards : {false, true}) {
        Shape steps;
        int64_t last_cut = inwards ? chunk.count : 1;
        for (size_t i = 0; i < stepped.size(); ++i) {
          const int64_t cut = inwards ? stepped[stepped.size() - 1 - i] : stepped[i];
          const int64_t large = std::max(cut, last_cut);
          const int64_t small = std::min(cut, last_cut);
          if (cut <= 1 || cut >= chunk.count || large == small || large % small != 0) continue;
          if (chunk.count % cut != 0 || inwards != (cut < last_cut)) continue;
          steps = steps.with(inwards ? steps.count : 0, large / small);
          last_cut = cut;
        }
        parts.push_back(inwards ? steps.with(steps.count, last_cut) : steps.with(0, chunk.count / last_cut));
      }
    }
    for (const int64_t cut : cuts) {
      if (chunk.count % cut != 0) continue;
      Shape part;
      part.push(chunk.count / cut);
      part.push(cut);
      parts.push_back(part);
      for (const int64_t wider : cuts) {
        if (wider <= cut || wider % cut != 0 || chunk.count % wider != 0 || parts.size() > 40) continue;
        Shape three;
        three.push(chunk.count / wider);
        three.push(wider / cut);
        three.push(cut);
        parts.push_back(three);
      }
    }
    for (const Shape& part : parts) {
      for (const bool others_whole : {false, true}) {
        Shape shape;
        for (size_t other = 0; other < chunks.size(); ++other) {
          if (other == at) {
            for (const int64_t size : part.values()) shape.push(size);
          } else if (others_whole) {
            shape.push(chunks[other].count);
          } else {
            as_it_is(chunks[other], shape);
          }
        }
        shapes.push_back(shape);
      }
    }
  }
}

// Each shape again with as many ones in it as the target can use.
void Search::add_ones(std::vector<Shape>& shapes) const {
  size_t begin = 0;
  for (int ones = 0; ones < std::min(target_ones_, 3); ++ones) {
    const size_t end = shapes.size();
    for (size_t k = begin; k < end && shapes.size() < 2000; ++k) {
      if (shapes[k].count >= kMaxViewDims) continue;
      for (int at = 0; at <= shapes[k].count; ++at) {
        if (at > 0 && shapes[k].sizes[at - 1] == 1) continue;  // next to a one: the same shape
        shapes.push_back(shapes[k].with(at, 1));
      }
    }
    begin = end;
  }
}

void Search::try_unsqueezes(const View& state, int remaining, int cost) {
  const auto ones = std::count(state.sizes.begin(), state.sizes.begin() + state.dims, 1);
  if (ones >= target_ones_) return;
  for (int dim = 0; dim <= state.dims; ++dim) {
    attempt(state, ViewCall(ViewOp::kUnsqueeze, {dim}), remaining, cost);
  }
}

void Search::try_squeezes(const View& state, int remaining, int cost) {
  int ones = 0;
  for (int dim = 0; dim < state.dims; ++dim) {
    if (state.sizes[dim] != 1) continue;
    ++ones;
    attempt(state, ViewCall(ViewOp::kSqueeze, {dim}), remaining, cost);
  }
  if (ones > 1) attempt(state, ViewCall(ViewOp::kSqueezeAll), remaining, cost);
}

void Search::try_expands(const View& state, int remaining, int cost) {
  if (expand_sizes_.empty() && target_units_ < 2) return;
  Few sizes = expand_sizes_;
  for (int dim = 0; dim < state.dims; ++dim) {
    if (state.strides[dim] != 0 || state.sizes[dim] < 2) continue;
    for (const int64_t wanted : expand_sizes_) {  // which a view joins with the stretched one that is there
      if (wanted % state.sizes[dim] == 0 && wanted > state.sizes[dim]) sizes.add(wanted / state.sizes[dim]);
    }
  }
  const int front = std::min(target_.dims - state.dims + 1, kMaxViewDims - state.dims);
  // From the last dimension on; one more than the target has may vanish in a diagonal.
  const auto extend = [&](auto& self, const Shape& shape, int stretched) -> void {
    if (stopped()) return;
    const int dim = state.dims - 1 - shape.count;
    if (dim < 0 && (stretched > 0 || shape.count > state.dims)) {
      attempt(state, ViewCall(ViewOp::kExpand, shape.values()), remaining, cost);
    }
    if (shape.count >= state.dims + std::max(front, 0)) return;
    const bool is_one = dim < 0 || state.sizes[dim] == 1;
    if (dim >= 0 || target_units_ > 0) self(self, shape.with(0, dim < 0 ? 1 : state.sizes[dim]), stretched);
    if (!is_one || stretched > target_zeros_) return;
    for (const int64_t size : sizes) self(self, shape.with(0, size), stretched + 1);
  };
  extend(extend, Shape{}, 0);
}

void Search::try_diagonals(const View& state, const Coordinates& where, int remaining, int cost) {
  for (int a = 0; a < state.dims; ++a) {
    for (int b = a + 1; b < state.dims; ++b) {
      const auto diagonal = [&](int64_t offset) {
        attempt(state, ViewCall(ViewOp::kDiagonal, {offset, a, b}), remaining, cost);
      };
      const bool placed = !where.empty && where.unique && where.bands[a].exact && where.bands[b].exact &&
                          state.strides[a] != 0 && state.strides[b] != 0;
      if (placed) {
        const Band& first = where.bands[a];
        const Band& second = where.bands[b];
        const bool together =
            first.last - first.first == second.last - second.first && first.common == second.common;
        if (together) diagonal(second.first - first.first);
        continue;
      }
      diagonal(0);
      if ((state.sizes[a] <= kSmallSize && state.sizes[b] <= kSmallSize) || exhaustive()) {
        for (int64_t offset = 1; offset < state.sizes[b]; ++offset) diagonal(offset);
        for (int64_t offset = 1; offset < state.sizes[a]; ++offset) diagonal(-offset);
      } else {
        const int64_t distance = target_.offset - state.offset;
        if (state.strides[b] > 0) diagonal(distance / state.strides[b]);
        if (state.strides[a] > 0) diagonal(-(distance / state.strides[a]));
      }
      if (where.empty) diagonal(state.sizes[b]);
    }
  }
}

void Search::try_unfolds(const View& state, const Coordinates& where, int remaining, int cost) {
  if (state.dims == 0) {
    attempt(state, ViewCall(ViewOp::kUnfold, {0, 1, 1}), remaining, cost);
    if (where.empty) attempt(state, ViewCall(ViewOp::kUnfold, {0, 0, 1}), remaining, cost);
    return;
  }
  for (int dim = 0; dim < state.dims; ++dim) {
    const int64_t size = state.sizes[dim];
    const int64_t stride = state.strides[dim];
    const auto unfold = [&](int64_t window, int64_t step) {
      if (window > size || window < (where.empty ? 0 : 1)) return;
      attempt(state, ViewCall(ViewOp::kUnfold, {dim, window, step}), remaining, cost);
    };
    Few steps;
    Few windows;
    steps.add(1);
    for (int i = 0; i < target_.dims; ++i) {
      const auto wanted = target_stride(state, i);
      if (!wanted || stride == 0) continue;
      if (*wanted > 0 && *wanted % stride == 0) steps.add(*wanted / stride);
      for (int other = 0; other < state.dims; ++other) {
        const int64_t left = *wanted - state.strides[other];
        if (left > 0 && left % stride == 0) steps.add(left / stride);
      }
    }
    const int64_t room = std::max<int64_t>(size, 1);
    if (dim + 1 < state.dims && stride > 0) {
      int64_t joined = 0;
      if (!__builtin_mul_overflow(state.sizes[dim + 1], state.strides[dim + 1], &joined) &&
          joined % stride == 0) {
        steps.add_between(joined / stride, 1, room);
      }
    }
    if (stride == 0) {
      for (int i = 0; i < target_.dims; ++i) steps.add_between(target_.sizes[i], 1, room);
    }
    if (remaining > 2 && exhaustive()) {
      for (int64_t window = 1; window <= size; ++window) {
        for (int64_t step = 1; step <= size - window + 1; ++step) unfold(window, step);
        for (const int64_t step : steps) {
          if (step > size - window + 1)
            unfold(window, step);  // one window; only its stride tells of the step
        }
      }
    } else {
      windows.add(1);     // a one to be stretched behind the others,
      windows.add(size);  // or in the place of this dimension
      int64_t trailing = 1;
      for (int i = target_.dims - 1; i >= 0; --i) {
        for (const int64_t step :
             steps) {  // the widest of as many windows, for a slice with a step, and the narrowest
          int64_t between = 0;
          if (target_.sizes[i] == 0 || __builtin_mul_overflow(target_.sizes[i], step, &between)) continue;
          windows.add_between(size - between + step, 1, size);
          windows.add_between(size - between + 1, 1, size);
        }
        windows.add_between(target_.sizes[i], 0, size);
        if (!__builtin_mul_overflow(trailing, target_.sizes[i], &trailing))
          windows.add_between(trailing, 0, size);
      }
      if (stride > 0 && state.strides[state.dims - 1] % stride == 0) {
        windows.add_between(state.strides[state.dims - 1] / stride, 1, size);
      }
      for (int i = 0; i < target_.dims; ++i) {
        const auto wanted = target_stride(state, i);
        if (!wanted || stride == 0 || *wanted % stride != 0) continue;
        for (int j = 0; j < target_.dims; ++j) {
          int64_t window = 0;
          if (__builtin_mul_overflow(target_.sizes[i] - 1, *wanted / stride, &window)) continue;
          if (__builtin_add_overflow(window, target_.sizes[j], &window)) continue;
          windows.add_between(window, 1, size);
        }
      }
      if (target_.dims > 0 && stride > 0 && target_.element == state.element) {
        const int64_t behind = (target_.offset - state.offset) / stride;
        windows.add_between(target_.sizes[target_.dims - 1] + behind, 1, size);
      }
    }
    for (const int64_t window : windows) {
      if (window < size) unfold(window, size - window + 1);  // one window
      for (const int64_t step : steps) {
        unfold(window, step);
      }
    }
  }
}

void Search::try_element_types(const View& state, int remaining, int cost) {
  if (state.element == target_.element) return;
  const auto call = [&](ViewOp op) { attempt(state, ViewCall(op), remaining, cost); };
  if (state.element.is_complex) {
    call(ViewOp::kReal);
    call(ViewOp::kImag);
    call(ViewOp::kViewAsReal);
    call(ViewOp::kConj);
  } else {
    call(ViewOp::kViewAsComplex);
  }
  ElementType type = target_.element;
  type.is_conj = false;
  type.is_neg = false;
  if (type.dtype != state.element.dtype) attempt(state, view_dtype_call(type), remaining, cost);
  if (type.partner < 0 || type.partner == state.element.dtype) return;
  std::swap(type.dtype, type.partner);
  type.itemsize = static_cast<int16_t>(type.is_complex ? type.itemsize / 2 : type.itemsize * 2);
  type.is_complex = !type.is_complex;
  attempt(state, view_dtype_call(type), remaining, cost);
}

// Whether a view could join two dimensions once they lie side by side in this order.
bool joins(const View& state, int64_t outer, int64_t inner) {
  int64_t reach = 0;
  return state.sizes[outer] != 1 && state.sizes[inner] != 1 &&
         !__builtin_mul_overflow(state.sizes[inner], state.strides[inner], &reach) &&
         reach == state.strides[outer];
}

// The neighbour inwards, ones aside.
bool is_neighbour(const View& state, int64_t outer, int64_t inner) {
  if (outer >= inner) return false;
  for (int64_t i = outer + 1; i < inner; ++i) {
    if (state.sizes[i] != 1) return false;
  }
  return true;
}

// Only what an operator that looks at the order can use: a view that joins, a type of other width that needs
// the last dimension, an expand in front of the first.
void Search::try_permutes(const View& state, int remaining, int cost) {
  if (state.dims < 2) return;
  int64_t count = 0;
  if (!count_view(state, count)) return;
  const bool last_view_possible =
      remaining > 2 ||
      (count == target_count_ && state.offset == target_.offset && state.element == target_.element);
  bool any_join = false;
  for (int a = 0; a < state.dims; ++a) {
    for (int b = 0; b < state.dims; ++b) {
      any_join = any_join || (a != b && joins(state, a, b) && !is_neighbour(state, a, b));
    }
  }
  std::array<int64_t, kMaxViewDims> order;
  const auto permute = [&] {
    attempt(state, ViewCall(ViewOp::kPermute, std::span<const int64_t>(order.data(), state.dims)), remaining,
            cost);
  };
  const auto move_one = [&](int from, int to) {
    std::iota(order.begin(), order.begin() + state.dims, 0);
    if (from < to) {
      std::rotate(order.begin() + from, order.begin() + from + 1, order.begin() + to + 1);
    } else {
      std::rotate(order.begin() + to, order.begin() + from, order.begin() + from + 1);
    }
    permute();
  };
  const bool type_changes = state.element != target_.element;
  const bool restrides_ones = target_units_ > 0 || count == 0;
  for (int dim = 0; dim < state.dims; ++dim) {
    if (dim + 1 < state.dims && (type_changes || restrides_ones)) move_one(dim, state.dims - 1);
    if (dim > 0 && target_units_ > 0) move_one(dim, 0);
  }
  if (!any_join || !last_view_possible) return;
  if (state.dims > kMaxPermutedDims) {
    left_out_ = true;
    std::iota(order.begin(), order.begin() + state.dims, 0);
    std::stable_sort(order.begin(), order.begin() + state.dims,
                     [&](int64_t a, int64_t b) { return state.strides[a] > state.strides[b]; });
    permute();
    return;
  }
  std::iota(order.begin(), order.begin() + state.dims, 0);
  while (!stopped() && std::next_permutation(order.begin(), order.begin() + state.dims)) {
    bool useful = false;
    int64_t before = -1;
    for (int i = 0; i < state.dims; ++i) {
      if (state.sizes[order[i]] == 1) continue;
      if (before >= 0 && joins(state, before, order[i]) && !is_neighbour(state, before, order[i]))
        useful = true;
      before = order[i];
    }
    if (useful) permute();
  }
}

// ---- What was found, in the words a reader knows ----

ViewCall plain_permute(const View& from, const ViewCall& call) {
  int moved = 0;
  int first = -1;
  int last = -1;
  for (int i = 0; i < call.count; ++i) {
    if (call.args[i] == i) continue;
    ++moved;
    if (first < 0) first = i;
    last = i;
  }
  if (moved != 2) return call;
  return from.dims == 2 ? ViewCall(ViewOp::kT) : ViewCall(ViewOp::kTranspose, {first, last});
}

// flatten or unflatten, where the rest of the shape stays.
ViewCall plain_view(const View& from, const ViewCall& call) {
  int head = 0;
  while (head < from.dims && head < call.count && from.sizes[head] == call.args[head]) ++head;
  int tail = 0;
  while (tail < from.dims - head && tail < call.count - head &&
         from.sizes[from.dims - 1 - tail] == call.args[call.count - 1 - tail]) {
    ++tail;
  }
  const int old_part = from.dims - head - tail;
  const int new_part = call.count - head - tail;
  if (old_part >= 2 && new_part == 1) return ViewCall(ViewOp::kFlatten, {head, from.dims - 1 - tail});
  if (old_part != 1 || new_part < 2 || from.dims == 1) return call;
  ViewCall named(ViewOp::kUnflatten, {head});
  for (int i = 0; i < new_part; ++i) named.args[named.count++] = call.args[head + i];
  return named;
}

ViewCall plain_call(const View& from, const ViewCall& call) {
  switch (call.op) {
    case ViewOp::kSlice:
      if (call.args[3] != 1) return call;
      return ViewCall(ViewOp::kNarrow, {call.args[0], call.args[1], call.args[2] - call.args[1]});
    case ViewOp::kPermute:
      return plain_permute(from, call);
    case ViewOp::kView:
      return plain_view(from, call);
    default:
      return call;
  }
}

Geometry to_geometry(const View& view) {
  return {{view.sizes.begin(), view.sizes.begin() + view.dims},
          {view.strides.begin(), view.strides.begin() + view.dims},
          view.offset,
          view.element};
}

// Absent where the search has no room or no rule for it.
std::optional<View> to_view(const Geometry& geometry) {
  // Room for what the operators add on the way.
  if (geometry.sizes.size() > kMaxViewDims - kMaxChainOps) return std::nullopt;
  if (geometry.sizes.size() != geometry.strides.size() || geometry.offset < 0) return std::nullopt;
  if (geometry.element.itemsize < 1 ||
      !std::has_single_bit(static_cast<unsigned>(geometry.element.itemsize))) {
    return std::nullopt;
  }
  View view;
  view.dims = static_cast<int>(geometry.sizes.size());
  view.sizes.fill(0);
  view.strides.fill(0);
  for (int i = 0; i < view.dims; ++i) {
    if (geometry.sizes[i] < 0 || geometry.strides[i] < 0) return std::nullopt;
    view.sizes[i] = geometry.sizes[i];
    view.strides[i] = geometry.strides[i];
  }
  view.offset = geometry.offset;
  view.element = geometry.element;
  return view;
}

ChainStep step_of(const ViewCall& call, const View& result) {
  const auto args = call.values();
  return {call.op, {args.begin(), args.end()}, to_geometry(result)};
}

ChainStep as_strided(const Geometry& geometry) {
  return {ViewOp::kAsStrided, {geometry.offset}, geometry};
}

// as_strided keeps the element type, so what changes it comes before.
void append_types(const View& base, const ElementType& wanted, std::vector<ChainStep>& steps) {
  if (base.element == wanted) return;
  ElementType bare = wanted;
  bare.is_conj = false;
  bare.is_neg = false;
  const std::array calls{ViewCall(ViewOp::kConj), ViewCall(ViewOp::kReal), ViewCall(ViewOp::kImag),
                         view_dtype_call(bare), ViewCall(ViewOp::kViewAsComplex)};
  View once;
  for (const ViewCall& call : calls) {
    if (!apply(base, call, once) || once.element != wanted) continue;
    steps.push_back(step_of(call, once));
    return;
  }
  for (const ViewCall& call : calls) {
    if (!apply(base, call, once)) continue;
    for (const ViewCall& second : calls) {
      View twice;
      if (!apply(once, second, twice) || twice.element != wanted) continue;
      steps.push_back(step_of(call, once));
      steps.push_back(step_of(second, twice));
      return;
    }
  }
}

// The bytes up to the target's end, flat: any element type can be had of them.
bool append_flat(const View& base, const View& target, std::vector<ChainStep>& steps) {
  const auto range = cell_range({target.sizes.data(), static_cast<size_t>(target.dims)},
                                {target.strides.data(), static_cast<size_t>(target.dims)}, target.offset);
  int64_t bytes = 0;
  if (!range || __builtin_mul_overflow(range->end, target.element.itemsize, &bytes)) return false;
  View flat;
  flat.dims = 1;
  const int64_t unit = std::max(base.element.itemsize, target.element.itemsize);
  if (__builtin_add_overflow(bytes, unit - 1, &bytes)) return false;
  flat.sizes[0] = bytes / unit * (unit / base.element.itemsize);
  flat.strides[0] = 1;
  flat.element = base.element;
  steps.push_back(as_strided(to_geometry(flat)));
  const size_t before = steps.size();
  append_types(flat, target.element, steps);
  return steps.size() > before;
}

void append_as_strided(const View& base, const View& target, std::vector<ChainStep>& steps) {
  append_types(base, target.element, steps);
  if (steps.empty() && base.element != target.element && !append_flat(base, target, steps)) steps.clear();
  steps.push_back(as_strided(to_geometry(target)));
}

}  // namespace

ChainAnswer infer_chain(const Geometry& base, const Geometry& target, int max_ops, int64_t max_nodes) {
  ChainAnswer answer;
  const std::optional<View> from = to_view(base);
  const std::optional<View> to = to_view(target);
  int64_t count = 0;
  if (!from || !to || !count_view(*from, count) || !count_view(*to, count)) {
    answer.complete = false;
    answer.ruled_out = -1;
    answer.steps.push_back(as_strided(target));
    return answer;
  }
  if (*from == *to) return answer;
  Search search(*from, *to, max_nodes);
  for (int ops = 1; ops <= std::min(max_ops, kMaxChainOps); ++ops) {
    const bool found = search.run(ops);
    answer.nodes = search.nodes();
    if (found) {
      View state = *from;
      for (const ViewCall& call : search.found()) {
        ViewCall named = plain_call(state, call);
        View next;
        View same;
        apply(state, call, next);
        if (!apply(state, named, same) || !(same == next)) named = call;
        answer.steps.push_back(step_of(named, next));
        state = next;
      }
      return answer;
    }
    answer.complete = !search.left_out();
    if (answer.complete) answer.ruled_out = ops;
  }
  append_as_strided(*from, *to, answer.steps);
  return answer;
}

}  // namespace tensorplay
