#include "chain_search.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "last_call.h"

// Note [What the search leaves out]
//
// Chains are tried by length. The last operator is not searched but solved (last_call.h); those before it are
// tried with all arguments that can matter:
// - Where each cell of the state has one index, the cells of the target fix the index of a select and the
//   offset of a diagonal, and a slice may be tight around them. A slice with slack matters only where a later
//   operator reads the size (view, unsqueeze) and a still later one cuts the slack off: two operators to
//   come.
// - permute moves behind every operator that does not look at the order of the dimensions.
// - Bits that only need another name (dtype of the same width, conj) get it at once.
// - Nothing leaves the element type of the target once it is reached.
// Small bases and targets (is_small) get every slack, index, window and shape. Larger ones get those that the
// sizes and strides of the target suggest; that something was left out is then remembered, and the answer is
// not complete. Nor are three operators to a target with two or more dimensions of size 1, whose strides can
// be sums that a diagonal made on the way. Targets without cells are never complete: any shape without cells
// is a view of any other.
//
// Left out without a word: steps of a slice or an unfold longer than the dimension, unless a stride of the
// target names them; expand to sizes that are none of the target's own; element types that are neither the
// base's nor the target's nor the complex or real partner of the latter.

namespace tensorplay {
namespace {

constexpr int64_t kSmallSize = 8;
constexpr int64_t kSmallCount = 64;
constexpr int kMaxPermutedDims = 6;
constexpr int64_t kMostSteps = 1024;
// Looked at after the first chain of a length, for a plainer one of the same length.
constexpr int64_t kNodesForPlainer = 1'500;

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

bool is_small(const View& state) {
  int64_t count = 0;
  return count_view(state, count) && count <= kSmallCount &&
         std::all_of(state.sizes.begin(), state.sizes.begin() + state.dims,
                     [](int64_t size) { return size <= kSmallSize; });
}

// The same cells by another name: x.view(dtype) of the same width, conj().
bool only_renames(const ElementType& from, const ElementType& to) {
  return from != to && from.itemsize == to.itemsize && from.is_complex == to.is_complex &&
         from.is_neg == to.is_neg;
}

ViewCall slice_call(int dim, int64_t start, int64_t length, int64_t step) {
  const int64_t end = length == 0 ? start : start + (length - 1) * step + 1;
  return ViewCall(ViewOp::kSlice, {dim, start, end, step});
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

// Whether one dimension goes to the front or to the back and the others keep their order.
bool moves_one(std::span<const int64_t> order) {
  const auto count = static_cast<int64_t>(order.size());
  int64_t falls = 0;
  for (int64_t i = 0; i + 1 < count; ++i) falls += order[i] > order[i + 1] ? 1 : 0;
  return falls == 1 && (order[0] > order[1] || order[count - 2] > order[count - 1]);
}

// Whether two dimensions come to lie side by side for a view to join that did not before.
bool joins_anew(const View& state, std::span<const int64_t> order) {
  int64_t before = -1;
  for (const int64_t dim : order) {
    if (state.sizes[dim] == 1) continue;
    if (before >= 0 && joins(state, before, dim) && !is_neighbour(state, before, dim)) return true;
    before = dim;
  }
  return false;
}

bool is_of_windows(ViewOp op) {
  return op == ViewOp::kUnfold || op == ViewOp::kDiagonal;
}

}  // namespace

ChainSearch::ChainSearch(const View& base, const View& target, int64_t max_nodes, bool plain)
    : base_(base), target_(target), plain_(plain), max_nodes_(max_nodes) {
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
  // A diagonal makes one of two, with the sum of their strides.
  most_ones_ = target_ones_ + (all_small_ && target_units_ > 0 ? 1 : 0);
}

bool ChainSearch::run(int ops) {
  ops_ = ops;
  left_out_ = left_out_ || (ops > 2 && target_units_ > 1);  // see the note
  if (ops == 1) {
    finish(base_, 0, ViewOp::kAsStrided);
  } else {
    visit(base_, ops, 0, ViewOp::kAsStrided);
  }
  return best_cost_ != kNoCost;
}

// Whether all arguments are to be tried; if not, that is remembered.
bool ChainSearch::exhaustive(bool needed) {
  if (all_small_) return true;
  left_out_ = left_out_ || needed;
  return false;
}

void ChainSearch::finish(const View& state, int cost, ViewOp before) {
  for_last_calls(state, target_, before == ViewOp::kPermute, [&](const ViewCall& call) {
    const int total = cost + cost_of(call);
    if (total >= best_cost_ || (plain_ && is_of_windows(call.op))) return;
    if (best_cost_ == kNoCost) plainer_until_ = nodes_ + kNodesForPlainer;
    best_cost_ = total;
    path_[ops_ - 1] = call;
    best_ = path_;
  });
}

// The state that a call gives, searched on. `remaining` counts the call.
bool ChainSearch::attempt(const View& state, const ViewCall& call, int remaining, int cost) {
  if (stopped() || (plain_ && is_of_windows(call.op))) return false;
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

void ChainSearch::visit(const View& state, int remaining, int cost, ViewOp before) {
  const bool permuted = before == ViewOp::kPermute;
  const bool viewed = before == ViewOp::kView;
  if (!visited_.enter(key_of(state, permuted ? 1 : viewed ? 2 : 0), remaining)) return;
  const Coordinates where = locate(target_, state);
  if (where.outside) return;
  left_out_ = left_out_ || where.empty;
  if (only_renames(state.element, target_.element)) {
    try_element_types(state, remaining, cost);  // at once: it commutes with all else
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

void ChainSearch::try_selects(const View& state, const Coordinates& where, int remaining, int cost) {
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

void ChainSearch::try_slices(const View& state, const Coordinates& where, int remaining, int cost) {
  for (int dim = 0; dim < state.dims; ++dim) {
    if (!where.empty && where.unique && where.bands[dim].exact && state.strides[dim] != 0) {
      try_slice_of(state, dim, where.bands[dim], remaining, cost);
    } else {
      // The outermost dimension of a target that carries: not at which cells, but from where to where.
      const bool bounded = !where.empty && where.unique && state.strides[dim] != 0;
      if (bounded) try_slice_of(state, dim, where.bands[dim], remaining, cost);
      try_any_slice_of(state, dim, where.empty, remaining, cost);
    }
  }
}

void ChainSearch::try_slice_of(const View& state, int dim, const Band& band, int remaining, int cost) {
  const int64_t size = state.sizes[dim];
  const int64_t stride = state.strides[dim];
  const auto slice = [&](int64_t start, int64_t length, int64_t step) {
    if (length == size && step == 1) return;
    attempt(state, slice_call(dim, start, length, step), remaining, cost);
  };
  if (band.first == band.last) {
    slice(band.first, 1, 1);
    for (int i = 0; i < target_.dims; ++i) {
      const auto wanted = target_stride(target_, state, i);
      if (target_.sizes[i] != 1 || !wanted) continue;
      // Its own stride, or with that of another dimension that of a diagonal.
      if (*wanted > stride && *wanted % stride == 0) slice(band.first, 1, *wanted / stride);
      for (int other = 0; other < state.dims; ++other) {
        const int64_t left = *wanted - state.strides[other];
        if (other != dim && left > stride && left < *wanted && left % stride == 0)
          slice(band.first, 1, left / stride);
      }
    }
    if (remaining > 2) try_slack(state, dim, band, 1, remaining, cost);
    return;
  }
  // All divisors: a step that is shorter leaves the rest to an operator that mixes this dimension with
  // others.
  for (int64_t step = 1; step <= band.common / step; ++step) {
    if (step > kMostSteps) {
      left_out_ = true;
      break;
    }
    if (band.common % step != 0) continue;
    for (const int64_t each : {step, band.common / step}) {
      slice(band.first, (band.last - band.first) / each + 1, each);
      if (remaining > 2) try_slack(state, dim, band, each, remaining, cost);
      if (step == band.common / step) break;
    }
  }
}

// Wider than the target needs: what a view then splits must divide.
void ChainSearch::try_slack(const View& state, int dim, const Band& band, int64_t step, int remaining,
                            int cost) {
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
  if (size > std::numeric_limits<int64_t>::max() / 4) return;  // the sums below stay within 64 bits
  Few units;
  for (int i = 0; i < target_.dims; ++i) {
    const auto wanted = target_stride(target_, state, i);
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
void ChainSearch::try_any_slice_of(const View& state, int dim, bool empty, int remaining, int cost) {
  const int64_t size = state.sizes[dim];
  const int64_t stride = state.strides[dim];
  const auto slice = [&](int64_t start, int64_t length, int64_t step) {
    if (length == size && step == 1) return;
    if (length > 0 && (start >= size || (size - 1 - start) / step < length - 1)) return;
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
    const auto wanted = target_stride(target_, state, i);
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

void ChainSearch::try_views(const View& state, int remaining, int cost) {
  int64_t count = 0;
  if (!count_view(state, count)) return;
  std::vector<Shape>& shapes = shapes_[remaining];
  shapes.clear();
  if (remaining == 2) {
    shapes_before_last(state, target_, shapes);
  } else if (exhaustive(count != 1)) {
    shapes_by_factors(state, shapes);
    add_ones(most_ones_, shapes);
  } else {
    shapes_by_target(state, target_, shapes);
    add_ones(most_ones_, shapes);
  }
  for (const Shape& shape : shapes) attempt(state, ViewCall(ViewOp::kView, shape.values()), remaining, cost);
}

void ChainSearch::try_unsqueezes(const View& state, int remaining, int cost) {
  const auto ones = std::count(state.sizes.begin(), state.sizes.begin() + state.dims, 1);
  if (ones >= most_ones_) return;
  for (int dim = 0; dim <= state.dims; ++dim) {
    attempt(state, ViewCall(ViewOp::kUnsqueeze, {dim}), remaining, cost);
  }
}

void ChainSearch::try_squeezes(const View& state, int remaining, int cost) {
  int ones = 0;
  for (int dim = 0; dim < state.dims; ++dim) {
    if (state.sizes[dim] != 1) continue;
    ++ones;
    attempt(state, ViewCall(ViewOp::kSqueeze, {dim}), remaining, cost);
  }
  if (ones > 1) attempt(state, ViewCall(ViewOp::kSqueezeAll), remaining, cost);
}

void ChainSearch::try_expands(const View& state, int remaining, int cost) {
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

void ChainSearch::try_diagonals(const View& state, const Coordinates& where, int remaining, int cost) {
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

void ChainSearch::try_unfolds(const View& state, const Coordinates& where, int remaining, int cost) {
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
      const auto wanted = target_stride(target_, state, i);
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
          int64_t all = 0;
          if (target_.sizes[i] == 0 || __builtin_mul_overflow(target_.sizes[i], step, &all)) continue;
          windows.add_between(size - (all - step), 1, size);
          windows.add_between(size - all + 1, 1, size);
        }
        windows.add_between(target_.sizes[i], 0, size);
        if (!__builtin_mul_overflow(trailing, target_.sizes[i], &trailing))
          windows.add_between(trailing, 0, size);
      }
      if (stride > 0 && state.strides[state.dims - 1] % stride == 0) {
        windows.add_between(state.strides[state.dims - 1] / stride, 1, size);
      }
      for (int i = 0; i < target_.dims; ++i) {
        const auto wanted = target_stride(target_, state, i);
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
        if (behind < size)
          windows.add_between(std::min(target_.sizes[target_.dims - 1], size) + behind, 1, size);
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

void ChainSearch::try_element_types(const View& state, int remaining, int cost) {
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

// Only orders that an operator behind can use: a view that joins, a type of another width that needs the last
// dimension, an expand in front of the first, a view or expand that gives a one the stride beside it.
void ChainSearch::try_permutes(const View& state, int remaining, int cost) {
  if (state.dims < 2) return;
  int64_t count = 0;
  if (!count_view(state, count)) return;
  const bool type_changes = state.element != target_.element;
  const bool in_place = remaining > 2 || (state.offset == target_.offset && !type_changes);
  const bool view_can_follow = in_place && (remaining > 2 || count == target_count_);
  const bool restrides_ones = in_place && (target_units_ > 0 || count == 0);
  bool any_join = false;
  for (int a = 0; a < state.dims; ++a) {
    for (int b = 0; b < state.dims; ++b) {
      any_join = any_join || (a != b && joins(state, a, b) && !is_neighbour(state, a, b));
    }
  }
  const int last = state.dims - 1;
  const auto is_useful = [&](std::span<const int64_t> order) {
    if (type_changes && order[last] != last && state.strides[order[last]] == 1) return true;
    if (restrides_ones && remaining == 2 && (order[0] != 0 || order[last] != last)) return true;
    if (restrides_ones && moves_one(order)) return true;
    return any_join && view_can_follow && joins_anew(state, order);
  };
  if (!type_changes && !restrides_ones && !(any_join && view_can_follow)) return;
  std::array<int64_t, kMaxViewDims> order;
  std::iota(order.begin(), order.begin() + state.dims, 0);
  const std::span<const int64_t> used(order.data(), static_cast<size_t>(state.dims));
  const auto permute = [&] { attempt(state, ViewCall(ViewOp::kPermute, used), remaining, cost); };
  if (state.dims > kMaxPermutedDims) {
    left_out_ = true;
    std::stable_sort(order.begin(), order.begin() + state.dims,
                     [&](int64_t a, int64_t b) { return state.strides[a] > state.strides[b]; });
    permute();
    return;
  }
  while (!stopped() && std::next_permutation(order.begin(), order.begin() + state.dims)) {
    if (is_useful(used)) permute();
  }
}

}  // namespace tensorplay
