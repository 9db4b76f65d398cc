#include "coordinates.h"

#include <algorithm>
#include <numeric>

namespace tensorplay {
namespace {

// Targets that carry from one dimension of the state into the next are walked cell by cell up to this many.
constexpr int64_t kMaxWalkedCells = 128;
constexpr int kBitmapWords = 8;

struct Axis {
  int64_t size;
  int64_t stride;
  int dim;  // of the view; -1: the parts of an element
};

// The dimensions that move, in units that both views share.
struct Axes {
  std::array<Axis, kMaxViewDims + 1> axes;
  int count = 0;
  int64_t offset = 0;
  int64_t last = 0;  // the highest cell

  bool fill(const View& view, int64_t unit) {
    const int64_t parts = view.element.itemsize / unit;
    if (__builtin_mul_overflow(view.offset, parts, &offset)) return false;
    last = offset;
    for (int i = 0; i < view.dims; ++i) {
      if (view.sizes[i] == 1 || view.strides[i] == 0) continue;
      int64_t stride = 0;
      if (__builtin_mul_overflow(view.strides[i], parts, &stride)) return false;
      if (!add({view.sizes[i], stride, i})) return false;
    }
    return parts == 1 || add({parts, 1, -1});
  }

 private:
  bool add(const Axis& axis) {
    int64_t reach = 0;
    axes[count++] = axis;
    return !__builtin_mul_overflow(axis.size - 1, axis.stride, &reach) &&
           !__builtin_add_overflow(last, reach, &last);
  }
};

// Greatest stride first, each past all cells of those behind it: then division finds the only index.
bool sort_nested(Axes& state) {
  std::sort(state.axes.begin(), state.axes.begin() + state.count,
            [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
  int64_t reach = 0;  // within 64 bits: the highest cell is
  for (int i = state.count - 1; i >= 0; --i) {
    if (state.axes[i].stride <= reach) return false;
    reach += (state.axes[i].size - 1) * state.axes[i].stride;
  }
  return true;
}

using Digits = std::array<int64_t, kMaxViewDims + 1>;

bool digits_of(int64_t distance, const Axes& state, Digits& digits) {
  for (int i = 0; i < state.count; ++i) {
    digits[i] = distance / state.axes[i].stride;
    if (digits[i] >= state.axes[i].size) return false;
    distance -= digits[i] * state.axes[i].stride;
  }
  return distance == 0;
}

using Bands = std::array<Band, kMaxViewDims + 1>;

// The target moves along the state's axes without a carry from one into the next. From the innermost axis
// outwards, up to the first that carries, the bands are exact.
bool bands_without_carry(const Axes& target, const Axes& state, const Digits& start, Bands& bands) {
  for (int i = 0; i < state.count; ++i) bands[i] = {start[i], start[i], 0, true};
  bool whole = true;
  for (int j = 0; j < target.count; ++j) {
    Digits step;
    if (!digits_of(target.axes[j].stride, state, step)) {
      whole = false;
      break;
    }
    for (int i = 0; i < state.count; ++i) {
      // Within 64 bits: either factor times the state's stride is within the target's reach.
      bands[i].last += step[i] * (target.axes[j].size - 1);
      bands[i].common = std::gcd(bands[i].common, step[i]);
    }
  }
  bool exact = whole;
  for (int i = state.count - 1; i >= 0; --i) {
    exact = exact && bands[i].last < state.axes[i].size;
    if (!exact) bands[i] = {0, state.axes[i].size - 1, 1, false};
  }
  return exact;
}

// False: some cell is not there.
bool bands_by_walking(const Axes& target, const Axes& state, Bands& bands) {
  Digits index{};
  Digits place;
  bool first = true;
  int64_t cell = target.offset - state.offset;
  while (true) {
    if (!digits_of(cell, state, place)) return false;
    for (int i = 0; i < state.count; ++i) {
      Band& band = bands[i];
      if (first) {
        band = {place[i], place[i], 0, true};
      } else {
        band.common = std::gcd(band.common, place[i] - band.first);
        // `first` moves down by a multiple of what divides all distances, so they stay divisible.
        band.first = std::min(band.first, place[i]);
        band.last = std::max(band.last, place[i]);
      }
    }
    first = false;
    int j = target.count - 1;
    for (; j >= 0; --j) {
      cell += target.axes[j].stride;
      if (++index[j] < target.axes[j].size) break;
      cell -= index[j] * target.axes[j].stride;
      index[j] = 0;
    }
    if (j < 0) return true;
  }
}

int64_t count_cells(const Axes& target) {
  int64_t count = 1;
  for (int j = 0; j < target.count; ++j) {
    if (__builtin_mul_overflow(count, target.axes[j].size, &count)) return INT64_MAX;
  }
  return count;
}

bool off_the_lattice(const Axes& target, const Axes& state) {
  int64_t unit = 0;
  for (int i = 0; i < state.count; ++i) unit = std::gcd(unit, state.axes[i].stride);
  const auto misses = [unit](int64_t distance) { return unit == 0 ? distance != 0 : distance % unit != 0; };
  if (misses(target.offset - state.offset)) return true;
  return std::any_of(target.axes.begin(), target.axes.begin() + target.count,
                     [&](const Axis& axis) { return misses(axis.stride); });
}

using Bitmap = std::array<uint64_t, kBitmapWords>;

void mark(const Axes& axes, int64_t offset, Bitmap& cells) {
  cells = {};
  cells[offset / 64] = uint64_t{1} << (offset % 64);
  for (int i = 0; i < axes.count; ++i) {
    for (int64_t copies = 1; copies < axes.axes[i].size;) {
      const int64_t added = std::min(copies, axes.axes[i].size - copies);
      const int64_t shift = added * axes.axes[i].stride;
      for (int64_t to = kBitmapWords - 1; to >= shift / 64; --to) {
        const int64_t from = to - shift / 64;
        uint64_t moved = cells[from] << (shift % 64);
        if (shift % 64 != 0 && from > 0) moved |= cells[from - 1] >> (64 - shift % 64);
        cells[to] |= moved;
      }
      copies += added;
    }
  }
}

// Only for states of few cells.
bool misses_a_cell(const Axes& target, const Axes& state) {
  if (state.last - state.offset >= int64_t{kBitmapWords} * 64) return false;
  Bitmap wanted;
  Bitmap held;
  mark(target, target.offset - state.offset, wanted);
  mark(state, 0, held);
  for (int i = 0; i < kBitmapWords; ++i) {
    if ((wanted[i] & ~held[i]) != 0) return true;
  }
  return false;
}

}  // namespace

Coordinates locate(const View& target, const View& state) {
  Coordinates answer;
  const int64_t unit = std::min(target.element.itemsize, state.element.itemsize);
  Axes wanted;
  Axes held;
  const bool measurable = wanted.fill(target, unit) && held.fill(state, unit);
  const auto is_zero = [](int64_t size) { return size == 0; };
  answer.empty = std::any_of(target.sizes.begin(), target.sizes.begin() + target.dims, is_zero);
  if (!measurable) return answer;
  answer.outside = wanted.offset < held.offset;
  if (answer.outside || answer.empty) return answer;
  if (std::any_of(state.sizes.begin(), state.sizes.begin() + state.dims, is_zero) ||
      wanted.last > held.last || off_the_lattice(wanted, held)) {
    answer.outside = true;
    return answer;
  }
  answer.unique = sort_nested(held);
  if (!answer.unique) {
    answer.outside = misses_a_cell(wanted, held);
    return answer;
  }
  Digits start;
  Digits end;
  if (!digits_of(wanted.offset - held.offset, held, start) ||
      !digits_of(wanted.last - held.offset, held, end)) {
    answer.outside = true;
    return answer;
  }
  Bands bands;
  if (!bands_without_carry(wanted, held, start, bands)) {
    if (count_cells(wanted) <= kMaxWalkedCells) {
      answer.outside = !bands_by_walking(wanted, held, bands);
    } else if (!bands[0].exact) {
      bands[0] = {start[0], end[0], 1, false};  // the outermost axis only grows with the cell
    }
  }
  for (int i = 0; i < state.dims; ++i) answer.bands[i] = {0, 0, 0, true};
  for (int i = 0; i < held.count; ++i) {
    if (held.axes[i].dim >= 0) answer.bands[held.axes[i].dim] = bands[i];
  }
  return answer;
}

}  // namespace tensorplay
