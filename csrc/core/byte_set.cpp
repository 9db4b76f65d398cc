#include "byte_set.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace tensorplay {
namespace {

using Wide = __int128;

// Sums of two extents and two bases stay within 64 bits.
constexpr int64_t kFarthest = int64_t{1} << 60;

constexpr int64_t kUnknown = -1;

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

// i with i * value = 1 modulo modulus; the two have no common factor.
int64_t inverse_of(int64_t value, int64_t modulus) {
  int64_t a = value % modulus;
  int64_t b = modulus;
  int64_t x = 1;
  int64_t y = 0;
  while (a > 1) {
    const int64_t quotient = b / a;
    b -= quotient * a;
    y -= quotient * x;
    std::swap(a, b);
    std::swap(x, y);
  }
  x %= modulus;
  return x < 0 ? x + modulus : x;
}

int64_t multiplied(int64_t a, int64_t b, int64_t modulus) {
  return static_cast<int64_t>(static_cast<Wide>(a % modulus) * b % modulus);
}

// Positions that `step` apart begin at `first`.
struct Candidates {
  Wide first = 0;
  Wide step = 1;
  int64_t count = 0;
};

// All r of low..high that `inner` divides, with target - r divisible by `outer`. Their common divisor
// divides target.
Candidates candidates(int64_t low, int64_t high, int64_t target, int64_t outer, int64_t inner) {
  Candidates found;
  if (low > high) return found;
  if (outer % inner == 0) {
    found.first = target % outer;
    found.step = outer;
  } else if (inner % outer == 0) {
    found.step = inner;
  } else {
    const int64_t common = std::gcd(outer, inner);
    const int64_t modulus = outer / common;
    found.first = static_cast<Wide>(inner) *
                  multiplied(target / common, inverse_of(inner / common % modulus, modulus), modulus);
    found.step = static_cast<Wide>(inner) * modulus;
  }
  if (found.first < low) found.first += (low - found.first + found.step - 1) / found.step * found.step;
  found.first -= (found.first - low) / found.step * found.step;
  if (found.first <= high) found.count = static_cast<int64_t>((high - found.first) / found.step + 1);
  return found;
}

// Sum of floor((rise * i + start) / divisor) for 0 <= i < count, as Euclid would.
Wide sum_of_floors(Wide count, Wide divisor, Wide rise, Wide start) {
  Wide sum = 0;
  for (;;) {
    sum += count * (count - 1) / 2 * (rise / divisor) + count * (start / divisor);
    rise %= divisor;
    start %= divisor;
    const Wide top = rise * count + start;
    if (top < divisor) return sum;
    count = top / divisor;
    start = top % divisor;
    std::swap(divisor, rise);
  }
}

// Number of (i, j) with a.stride * i + b.stride * j <= most.
Wide count_below_line(const Step& a, const Step& b, int64_t most) {
  if (most < 0) return 0;
  const int64_t last = std::min(a.count - 1, most / a.stride);
  const int64_t over = most - (b.count - 1) * b.stride;
  const int64_t full = over < 0 ? 0 : std::min(last, over / a.stride) + 1;
  const Wide rest = last - full + 1;
  return static_cast<Wide>(full) * b.count + rest +
         sum_of_floors(rest, b.stride, a.stride, most - a.stride * last);
}

int64_t narrowed(Wide value) {
  return static_cast<int64_t>(std::min<Wide>(value, std::numeric_limits<int64_t>::max()));
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
  constexpr size_t kMostPieces = 256;
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

Meetings::Meetings(const ByteSet& a, const ByteSet& b) {
  size_t left = a.steps.size();
  size_t right = b.steps.size();
  reach_[0] = 0;
  while (left + right > 0) {
    const bool from_a = right == 0 || (left > 0 && a.steps[left - 1].stride >= b.steps[right - 1].stride);
    const Step& step = from_a ? a.steps[--left] : b.steps[--right];
    terms_[size_] = step;
    inverse_[size_] = kUnknown;
    reach_[size_ + 1] = reach_[size_] + (step.count - 1) * step.stride;
    ++size_;
  }
  for (size_t first = 0; first < size_; ++first) {
    int64_t divisor = terms_[first].stride;
    for (size_t last = first + 1; last <= size_; ++last) {
      if (divisor != 1) divisor = std::gcd(divisor, terms_[last - 1].stride);
      unit(first, last) = divisor;
    }
  }
  if (size_ > 3) {
    estimate();
  } else {
    for (size_t first = 0; first < size_; ++first) cost(first, first + 1) = 1;
    if (size_ == 3) cost(0, 2) = cost(1, 3) = 1;
  }
  // Counted from the far end, b's indices add where they would be taken off.
  target_ = b.base - a.base + b.extent;
}

std::optional<int64_t> Meetings::count(int64_t& nodes) {
  only_any_ = false;
  nodes_ = nodes;
  const int64_t found = solve(0, size_, target_);
  nodes = std::max<int64_t>(nodes_, 0);
  return found == kUnknown ? std::nullopt : std::optional(found);
}

std::optional<bool> Meetings::any(int64_t& nodes) {
  only_any_ = true;
  nodes_ = nodes;
  const int64_t found = solve(0, size_, target_);
  nodes = std::max<int64_t>(nodes_, 0);
  return found == kUnknown ? std::nullopt : std::optional(found > 0);
}

// Number of ways in which terms first..last sum to target. Note [Splitting a sum]: cut the terms, sorted by
// stride, in two. What the small ones may sum to is bounded by their reach and fixed modulo the divisor of
// the large ones, which leaves a value or two wherever one level of a tensor ends and the next begins. The
// cut that promises the fewest nodes is taken.
int64_t Meetings::solve(size_t first, size_t last, int64_t target) {
  if (target < 0 || target > reach(first, last)) return 0;
  if (first == last) return 1;
  if (nodes_-- <= 0) return kUnknown;
  if (target % unit(first, last) != 0) return 0;
  if (last - first == 1) return 1;
  if (last - first == 2) return solve_two(first, target);
  if (is_strip(first, last)) return solve_strip(first, target);

  size_t cut = 0;
  double least = 0;
  Candidates best;
  for (size_t at = first + 1; at < last; ++at) {
    const Candidates found =
        candidates(std::max<int64_t>(0, target - reach(first, at)), std::min(reach(at, last), target), target,
                   unit(first, at), unit(at, last));
    if (found.count == 0) return 0;
    const double nodes = static_cast<double>(found.count) * (cost(first, at) + cost(at, last));
    if (cut == 0 || nodes < least) {
      least = nodes;
      cut = at;
      best = found;
    }
  }
  if (!only_any_ && best.count > nodes_) return kUnknown;

  const bool small_first = last - cut < cut - first;
  bool unknown = false;
  int64_t sum = 0;
  for (int64_t i = 0; i < best.count; ++i) {
    const auto part = static_cast<int64_t>(best.first + i * best.step);
    const int64_t one = small_first ? solve(cut, last, part) : solve(first, cut, target - part);
    if (one == 0) continue;
    const int64_t other = small_first ? solve(first, cut, target - part) : solve(cut, last, part);
    if (other == 0) continue;
    if (one == kUnknown || other == kUnknown) {
      if (nodes_ <= 0 || !only_any_) return kUnknown;
      unknown = true;
      continue;
    }
    if (only_any_) return 1;
    sum += one * other;
  }
  return unknown ? kUnknown : sum;
}

int64_t Meetings::solve_two(size_t first, int64_t target) {
  const Step& large = terms_[first];
  const Step& small = terms_[first + 1];
  const int64_t over = target - reach(first + 1, first + 2);
  const int64_t low = over > 0 ? (over + large.stride - 1) / large.stride : 0;
  const int64_t high = std::min(large.count - 1, target / large.stride);
  if (low > high) return 0;
  const int64_t common = unit(first, first + 2);
  const int64_t modulus = small.stride / common;
  if (modulus == 1) return high - low + 1;
  int64_t& inverse = inverse_[first];
  if (inverse == kUnknown) inverse = inverse_of(large.stride / common % modulus, modulus);
  const int64_t wanted = multiplied(target / common, inverse, modulus);
  const int64_t at = low + (wanted - low % modulus + modulus) % modulus;
  return at > high ? 0 : (high - at) / modulus + 1;
}

bool Meetings::is_strip(size_t first, size_t last) {
  return last - first == 3 && terms_[last - 1].stride == unit(first, last);
}

// The third term fills every place between target less its reach and target: points of a lattice between
// two lines.
int64_t Meetings::solve_strip(size_t first, int64_t target) const {
  const Step& a = terms_[first];
  const Step& b = terms_[first + 1];
  return narrowed(count_below_line(a, b, target) -
                  count_below_line(a, b, target - reach(first + 2, first + 3) - 1));
}

// The fewest values for a cut are no good where each of them opens a search of its own.
void Meetings::estimate() {
  for (size_t length = 1; length <= size_; ++length) {
    for (size_t first = 0; first + length <= size_; ++first) {
      const size_t last = first + length;
      double best = 1;
      if (length > 2 && !is_strip(first, last)) {
        best = std::numeric_limits<double>::max();
        for (size_t at = first + 1; at < last; ++at) {
          const auto apart = static_cast<double>(std::max(unit(first, at), unit(at, last)));
          const auto range = static_cast<double>(std::min(reach(first, at), reach(at, last)));
          best = std::min(best, (range / apart + 1) * (cost(first, at) + cost(at, last)));
        }
      }
      cost(first, last) = best;
    }
  }
}

}  // namespace tensorplay
