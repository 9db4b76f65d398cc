#include "meetings.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace tensorplay {
namespace {

using Wide = __int128;

constexpr int64_t kUnknown = -1;

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

}  // namespace

Meetings::Meetings(const ByteSet& a, const ByteSet& b) {
  size_t left = a.steps.size();
  size_t right = b.steps.size();
  while (left + right > 0) {
    const bool from_a = right == 0 || (left > 0 && a.steps[left - 1].stride >= b.steps[right - 1].stride);
    terms_[size_++] = from_a ? a.steps[--left] : b.steps[--right];
  }
  prepare();
  // The order of strides follows the levels of both tensors. Where these are not the same, the order of what
  // the terms reach leaves the short ones to the end.
  constexpr double kMuch = 64;
  if (size_ > 2 && cost(0, size_) > kMuch) {
    const std::array<Step, kMaxTerms> by_stride = terms_;
    const double before = cost(0, size_);
    std::stable_sort(terms_.begin(), terms_.begin() + size_, [](const Step& x, const Step& y) {
      return (x.count - 1) * x.stride > (y.count - 1) * y.stride;
    });
    prepare();
    if (cost(0, size_) >= before) {
      terms_ = by_stride;
      prepare();
    }
  }
  // Counted from the far end, b's indices add where they would be taken off.
  target_ = b.base - a.base + b.extent;
}

void Meetings::prepare() {
  reach_[0] = 0;
  for (size_t i = 0; i < size_; ++i) {
    reach_[i + 1] = reach_[i] + (terms_[i].count - 1) * terms_[i].stride;
    inverse_[i] = kUnknown;
  }
  for (size_t first = 0; first < size_; ++first) {
    int64_t divisor = terms_[first].stride;
    for (size_t last = first + 1; last <= size_; ++last) {
      if (divisor != 1) divisor = std::gcd(divisor, terms_[last - 1].stride);
      unit(first, last) = divisor;
    }
  }
  if (size_ > 2) estimate();
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
