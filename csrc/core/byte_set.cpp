#include "byte_set.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace tensorplay {
namespace {

// Sums of two extents and two bases stay within 64 bits.
constexpr int64_t kFarthest = int64_t{1} << 60;

bool is_far(int64_t position) {
  return position > kFarthest || position < -kFarthest;
}

// In place; answers how many stay. A step that is a multiple of a smaller one, and no wider than that one's
// progression, only lengthens it.
size_t merge(Step* steps, size_t size) {
  std::sort(steps, steps + size, [](const Step& a, const Step& b) { return a.stride < b.stride; });
  for (bool again = true; again;) {
    again = false;
    for (size_t i = 0; i < size; ++i) {
      for (size_t j = i + 1; j < size;) {
        const int64_t ratio = steps[j].stride / steps[i].stride;
        if (ratio > steps[i].count || ratio * steps[i].stride != steps[j].stride) {
          ++j;
          continue;
        }
        steps[i].count += ratio * (steps[j].count - 1);
        std::move(steps + j + 1, steps + size, steps + j);
        --size;
        again = true;
      }
    }
  }
  return size;
}

// The first step that smaller ones together reach or pass; their number where there is none.
size_t first_folded(const Steps& steps) {
  int64_t extent = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    if (steps[i].stride <= extent) return i;
    extent += (steps[i].count - 1) * steps[i].stride;
  }
  return steps.size();
}

// The step at `at` and the one before it fold into each other. Classes of the wider one modulo the other
// give progressions with no common byte. False where bytes below or above spoil that.
bool unfold_step(const ByteSet& set, size_t at, size_t most, std::vector<ByteSet>& into) {
  const Step& narrow = set.steps[at - 1];
  const Step& wide = set.steps[at];
  const int64_t common = std::gcd(narrow.stride, wide.stride);
  int64_t below = 0;
  for (size_t i = 0; i + 1 < at; ++i) below += (set.steps[i].count - 1) * set.steps[i].stride;
  if (below >= common) return false;
  const int64_t within = below + (narrow.count - 1) * narrow.stride + (wide.count - 1) * wide.stride;
  bool apart = at + 1 == set.steps.size() || set.steps[at + 1].stride > within;
  if (!apart) {
    apart = std::all_of(set.steps.begin() + at + 1, set.steps.end(),
                        [&](const Step& step) { return step.stride % narrow.stride == 0; });
  }
  const int64_t classes = std::min(narrow.stride / common, wide.count);
  if (!apart || static_cast<uint64_t>(classes) > most) return false;

  for (int64_t first = 0; first < classes; ++first) {
    const int64_t period = narrow.stride / common;
    const int64_t count = (wide.count - first + period - 1) / period;
    ByteSet piece = set;
    piece.base += first * wide.stride;
    size_t size = set.steps.size();
    if (count > 1) {
      piece.steps[at] = {count, period * wide.stride};
    } else {
      std::copy(set.steps.begin() + at + 1, set.steps.end(), piece.steps.begin() + at);
      --size;
    }
    piece.steps.resize(merge(piece.steps.begin(), size));
    piece.extent = 0;
    for (const Step& step : piece.steps) piece.extent += (step.count - 1) * step.stride;
    into.push_back(piece);
  }
  return true;
}

}  // namespace

std::optional<ByteSet> normal_form(const Region& region) {
  ByteSet set;
  set.empty = region.itemsize <= 0 ||
              std::any_of(region.sizes.begin(), region.sizes.end(), [](int64_t n) { return n <= 0; });
  if (set.empty) return set;
  if (__builtin_mul_overflow(region.offset, region.itemsize, &set.base) ||
      __builtin_add_overflow(set.base, region.origin_bytes, &set.base)) {
    return std::nullopt;
  }

  std::vector<Step> steps;
  steps.reserve(region.sizes.size() + 1);
  if (region.itemsize > 1) steps.push_back({region.itemsize, 1});
  set.extent = region.itemsize - 1;
  for (size_t i = 0; i < region.sizes.size(); ++i) {
    if (region.sizes[i] == 1 || region.strides[i] == 0) continue;
    int64_t reach = 0;
    if (__builtin_mul_overflow(region.sizes[i] - 1, region.strides[i], &reach) ||
        __builtin_mul_overflow(reach, region.itemsize, &reach) || is_far(reach)) {
      return std::nullopt;
    }
    if (reach < 0) {  // reflected
      if (__builtin_add_overflow(set.base, reach, &set.base)) return std::nullopt;
      reach = -reach;
    }
    set.extent += reach;
    if (is_far(set.extent)) return std::nullopt;
    steps.push_back({region.sizes[i], reach / (region.sizes[i] - 1)});
  }
  if (is_far(set.base)) return std::nullopt;
  const size_t size = merge(steps.data(), steps.size());
  if (size > kMaxSteps) return std::nullopt;
  for (size_t i = 0; i < size; ++i) set.steps.push_back(steps[i]);
  return set;
}

bool is_nested(const ByteSet& set) {
  return first_folded(set.steps) == set.steps.size();
}

int64_t count_nested(const ByteSet& set) {
  int64_t count = 1;
  for (const Step& step : set.steps) count *= step.count;
  return count;
}

int64_t count_below(const ByteSet& set, int64_t position) {
  int64_t left = position - set.base;
  if (left <= 0) return 0;
  int64_t inner = count_nested(set);
  int64_t below = 0;
  for (size_t i = set.steps.size(); i-- > 0;) {
    const Step& step = set.steps[i];
    inner /= step.count;
    const int64_t whole = left / step.stride;
    if (whole >= step.count) return below + step.count * inner;
    below += whole * inner;
    left -= whole * step.stride;
  }
  return below + (left > 0 ? 1 : 0);
}

std::vector<ByteSet> split_nested(const ByteSet& set, size_t most) {
  std::vector<ByteSet> done;
  std::vector<ByteSet> open;
  size_t at = first_folded(set.steps);
  if (at == set.steps.size()) {
    done.push_back(set);
    return done;
  }
  for (ByteSet next = set;;) {
    if (at == next.steps.size()) {
      done.push_back(next);
    } else if (!unfold_step(next, at, most - std::min(most, done.size() + open.size()), open)) {
      return {};
    }
    if (open.empty()) return done;
    next = open.back();
    open.pop_back();
    at = first_folded(next.steps);
  }
}

CountBounds count_bytes(const ByteSet& set) {
  constexpr size_t kMostPieces = 64;
  if (set.empty) return {};
  CountBounds bounds;
  const std::vector<ByteSet> pieces = split_nested(set, kMostPieces);
  for (const ByteSet& piece : pieces) bounds.least += count_nested(piece);
  bounds.most = bounds.least;
  if (!pieces.empty()) return bounds;
  // A sum of two sets of integers has at least as many members as both, less one.
  bounds.least = 1;
  for (const Step& step : set.steps) bounds.least += step.count - 1;
  bounds.most = 1;
  for (const Step& step : set.steps) {
    if (__builtin_mul_overflow(bounds.most, step.count, &bounds.most)) bounds.most = set.extent + 1;
  }
  bounds.most = std::min(bounds.most, set.extent + 1);
  return bounds;
}

int64_t common_unit(const ByteSet& set, int64_t base, int64_t unit) {
  unit = std::gcd(std::gcd(unit, set.run()), set.base - base);
  for (const Step& step : set.steps) {
    if (unit == 1) break;
    if (step.stride != 1) unit = std::gcd(unit, step.stride);
  }
  return unit;
}

ByteSet divided(const ByteSet& set, int64_t base, int64_t unit) {
  ByteSet result;
  result.base = (set.base - base) / unit;
  result.extent = (set.extent + 1) / unit - 1;
  for (const Step& step : set.steps) {
    if (step.stride != 1) {
      result.steps.push_back({step.count, step.stride / unit});
    } else if (step.count != unit) {
      result.steps.push_back({step.count / unit, 1});
    }
  }
  return result;
}

Bitmap drawn(const ByteSet& set) {
  Bitmap bitmap(set.extent + 1);
  bitmap.set_run(0, set.run());
  for (const Step& step : set.steps) {
    if (step.stride != 1) bitmap.repeat(step.count, step.stride);
  }
  return bitmap;
}

int64_t number_of_runs(const ByteSet& set) {
  int64_t runs = 1;
  for (const Step& step : set.steps) {
    if (step.stride != 1 && __builtin_mul_overflow(runs, step.count, &runs)) {
      return std::numeric_limits<int64_t>::max();
    }
  }
  return runs;
}

void merge_runs(std::vector<Run>& runs) {
  const auto begins_before = [](const Run& a, const Run& b) { return a.begin < b.begin; };
  if (!std::is_sorted(runs.begin(), runs.end(), begins_before)) {
    std::sort(runs.begin(), runs.end(), begins_before);
  }
  size_t kept = 0;
  for (const Run& run : runs) {
    if (kept > 0 && run.begin <= runs[kept - 1].end) {
      runs[kept - 1].end = std::max(runs[kept - 1].end, run.end);
    } else {
      runs[kept++] = run;
    }
  }
  runs.resize(kept);
}

int64_t length_of(const std::vector<Run>& merged) {
  int64_t length = 0;
  for (const Run& run : merged) length += run.end - run.begin;
  return length;
}

}  // namespace tensorplay
