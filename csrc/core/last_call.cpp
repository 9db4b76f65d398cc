#include "last_call.h"

#include <algorithm>

namespace tensorplay {

LastCalls::LastCalls(const View& state, const View& target, bool after_permute)
    : state_(state), target_(target) {
  if (state.element != target.element) {
    solve_element_type(after_permute);
    return;
  }
  if (target.offset < state.offset) return;
  const bool in_place = target.offset == state.offset;
  const int added = target.dims - state.dims;
  if (in_place) {
    const std::span<const int64_t> sizes(target.sizes.data(), static_cast<size_t>(target.dims));
    keep(ViewCall(ViewOp::kView, sizes));
    if (added >= 0) keep(ViewCall(ViewOp::kExpand, sizes));
  }
  if (after_permute) return;
  if (added == -1) {
    solve_select();
    solve_diagonal();
  }
  if (added == 0) solve_slice();
  if (!in_place) return;
  if (added == 0) solve_permute();
  if (added < 0) solve_squeeze();
  if (added == 1) {
    solve_unsqueeze();
    solve_unfold();
  }
}

void LastCalls::keep(const ViewCall& call) {
  View made;
  if (count_ < calls_.size() && apply(state_, call, made) && made == target_) calls_[count_++] = call;
}

// Without constructing every candidate: equal dimensions in front of it and behind it.
void LastCalls::solve_select() {
  int head = 0;
  while (head < target_.dims && state_.sizes[head] == target_.sizes[head] &&
         state_.strides[head] == target_.strides[head]) {
    ++head;
  }
  int tail = 0;
  while (tail < target_.dims &&
         state_.sizes[state_.dims - 1 - tail] == target_.sizes[target_.dims - 1 - tail] &&
         state_.strides[state_.dims - 1 - tail] == target_.strides[target_.dims - 1 - tail]) {
    ++tail;
  }
  for (int dim = std::max(state_.dims - 1 - tail, 0); dim <= head; ++dim) {
    const int64_t stride = state_.strides[dim];
    const size_t before = count_;
    keep(ViewCall(ViewOp::kSelect, {dim, stride == 0 ? 0 : (target_.offset - state_.offset) / stride}));
    if (count_ > before) return;
  }
}

void LastCalls::solve_slice() {
  int dim = -1;
  for (int i = 0; i < state_.dims; ++i) {
    if (state_.sizes[i] == target_.sizes[i] && state_.strides[i] == target_.strides[i]) continue;
    if (dim >= 0) return;
    dim = i;
  }
  if (dim < 0) return;
  const int64_t stride = state_.strides[dim];
  const int64_t length = target_.sizes[dim];
  int64_t start = 0;
  int64_t step = 1;
  if (stride > 0) {
    start = (target_.offset - state_.offset) / stride;
    step = std::max<int64_t>(target_.strides[dim] / stride, 1);
  }
  int64_t end = start;
  if (length > 0 && (__builtin_mul_overflow(length - 1, step, &end) ||
                     __builtin_add_overflow(end, start, &end) || __builtin_add_overflow(end, 1, &end))) {
    return;
  }
  keep(ViewCall(ViewOp::kSlice, {dim, start, end, step}));
}

void LastCalls::solve_permute() {
  if (state_.dims < 2) return;
  std::array<int64_t, kMaxViewDims> order{};
  uint32_t used = 0;
  const auto equal = [&](int from, int to) {
    return (used >> from & 1) == 0 && state_.sizes[from] == target_.sizes[to] &&
           state_.strides[from] == target_.strides[to];
  };
  for (int i = 0; i < state_.dims; ++i) {  // what stays, first
    order[i] = equal(i, i) ? i : -1;
    if (order[i] >= 0) used |= uint32_t{1} << i;
  }
  for (int i = 0; i < state_.dims; ++i) {
    for (int from = 0; from < state_.dims && order[i] < 0; ++from) {
      if (equal(from, i)) order[i] = from;
    }
    if (order[i] < 0) return;
    used |= uint32_t{1} << order[i];
  }
  keep(ViewCall(ViewOp::kPermute, std::span<const int64_t>(order.data(), static_cast<size_t>(state_.dims))));
}

void LastCalls::solve_squeeze() {
  if (target_.dims == state_.dims - 1) {
    for (int dim = 0; dim < state_.dims; ++dim) {
      const size_t before = count_;
      if (state_.sizes[dim] == 1) keep(ViewCall(ViewOp::kSqueeze, {dim}));
      if (count_ > before) return;
    }
  }
  keep(ViewCall(ViewOp::kSqueezeAll));
}

void LastCalls::solve_unsqueeze() {
  for (int dim = 0; dim < target_.dims; ++dim) {
    const size_t before = count_;
    if (target_.sizes[dim] == 1) keep(ViewCall(ViewOp::kUnsqueeze, {dim}));
    if (count_ > before) return;
  }
}

bool LastCalls::rest_matches(int dim, int other) const {
  int to = 0;
  for (int i = 0; i < state_.dims; ++i) {
    if (i == dim || i == other) continue;
    if (state_.sizes[i] != target_.sizes[to] || state_.strides[i] != target_.strides[to]) return false;
    ++to;
  }
  return true;
}

void LastCalls::solve_diagonal() {
  if (state_.dims < 2) return;
  const int64_t length = target_.sizes[target_.dims - 1];
  const int64_t stride = target_.strides[target_.dims - 1];
  const int64_t distance = target_.offset - state_.offset;
  for (int a = 0; a < state_.dims; ++a) {
    for (int b = a + 1; b < state_.dims; ++b) {
      const uint64_t sum =
          static_cast<uint64_t>(state_.strides[a]) + static_cast<uint64_t>(state_.strides[b]);
      if (sum != static_cast<uint64_t>(stride) || !rest_matches(a, b)) continue;
      const size_t before = count_;
      const auto diagonal = [&](int64_t offset) {
        if (count_ == before) keep(ViewCall(ViewOp::kDiagonal, {offset, a, b}));
      };
      diagonal(0);
      // Where it does not move along its dimension the offset only shortens the diagonal.
      if (state_.strides[b] > 0) {
        diagonal(distance / state_.strides[b]);
      } else {
        diagonal(std::max<int64_t>(state_.sizes[b] - length, 0));
      }
      if (state_.strides[a] > 0) {
        diagonal(-(distance / state_.strides[a]));
      } else {
        diagonal(-std::max<int64_t>(state_.sizes[a] - length, 0));
      }
      if (length == 0) diagonal(state_.sizes[b]);
      if (count_ > before) return;
    }
  }
}

void LastCalls::solve_unfold() {
  const int64_t window = target_.sizes[target_.dims - 1];
  const int64_t stride = target_.strides[target_.dims - 1];
  if (state_.dims == 0) {
    keep(ViewCall(ViewOp::kUnfold, {0, window, 1}));
    return;
  }
  for (int dim = 0; dim < state_.dims; ++dim) {
    if (state_.strides[dim] != stride || window > state_.sizes[dim]) continue;
    int64_t step = 1;
    if (stride > 0) {
      step = std::max<int64_t>(target_.strides[dim] / stride, 1);
    } else if (target_.sizes[dim] > 0) {
      // The shortest step that leaves room for no further window.
      step = (state_.sizes[dim] - window) / target_.sizes[dim] + 1;
    }
    const size_t before = count_;
    keep(ViewCall(ViewOp::kUnfold, {dim, window, step}));
    if (count_ > before) return;
  }
}

void LastCalls::solve_element_type(bool after_permute) {
  ElementType bare = target_.element;
  bare.is_conj = false;
  bare.is_neg = false;
  if (state_.element.is_complex && !after_permute) {
    keep(ViewCall(ViewOp::kReal));
    keep(ViewCall(ViewOp::kImag));
    keep(ViewCall(ViewOp::kViewAsReal));
    keep(ViewCall(ViewOp::kConj));
  }
  if (!state_.element.is_complex) keep(ViewCall(ViewOp::kViewAsComplex));
  if (bare.dtype != state_.element.dtype) keep(view_dtype_call(bare));
}

}  // namespace tensorplay
