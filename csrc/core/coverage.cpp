// The second half of overlap.h: unions of many sets.
#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

#include "overlap.h"

namespace tensorplay {
namespace {

using Sets = std::vector<ByteSet>;

constexpr size_t kMostPairwise = 16;              // sets that are compared two by two
constexpr int64_t kNodesOfPair = 8;               // what a pair in closed form is held to cost
constexpr int64_t kFewRuns = 4096;                // always listed
constexpr int64_t kMostWords = int64_t{1} << 25;  // of bitmaps, written
constexpr int64_t kMostRowParts = 1 << 15;  // parts of a row, summed over the rows where one begins or ends
constexpr size_t kMostTrimmed = 64;  // sets that one set may leave when it is cut at the storage's ends

ByteSet one_run(int64_t begin, int64_t end) {
  ByteSet set;
  set.base = begin;
  set.extent = end - begin - 1;
  if (set.extent > 0) set.steps.push_back({end - begin, 1});
  return set;
}

// Without its widest step: the first copy.
ByteSet inner_of(const ByteSet& set) {
  ByteSet inner = set;
  inner.extent -= (set.steps.back().count - 1) * set.steps.back().stride;
  inner.steps.resize(set.steps.size() - 1);
  return inner;
}

bool before(const ByteSet& a, const ByteSet& b) {
  if (a.base != b.base) return a.base < b.base;
  if (a.extent != b.extent) return a.extent > b.extent;
  return std::lexicographical_compare(
      a.steps.begin(), a.steps.end(), b.steps.begin(), b.steps.end(),
      [](const Step& x, const Step& y) { return std::tie(x.stride, x.count) < std::tie(y.stride, y.count); });
}

// Appends what of `set` lies in [0, end). False where that takes too many sets.
bool trim(const ByteSet& set, int64_t end, Sets& into, size_t most) {
  if (set.last() < 0 || set.base >= end) return true;
  if (into.size() >= most) return false;
  if (set.base >= 0 && set.last() < end) {
    into.push_back(set);
    return true;
  }
  if (set.is_one_run()) {
    into.push_back(one_run(std::max<int64_t>(set.base, 0), std::min(set.last() + 1, end)));
    return true;
  }
  const Step& step = set.steps.back();
  ByteSet copy = inner_of(set);
  // The copies that lie inside as they are; those before and after are cut one by one.
  int64_t low = 0;
  if (copy.base < 0) low = std::min((-copy.base + step.stride - 1) / step.stride, step.count);
  const int64_t room = end - 1 - copy.last();
  int64_t high = room < 0 ? 0 : std::min(room / step.stride + 1, step.count);
  high = std::max(low, high);
  const int64_t base = copy.base;
  if (high > low) {
    ByteSet inside = copy;
    inside.base = base + low * step.stride;
    if (high - low > 1) {
      inside.steps.push_back({high - low, step.stride});
      inside.extent += (high - low - 1) * step.stride;
    }
    into.push_back(inside);
  }
  for (int64_t i = low - 1; i >= 0; --i) {
    copy.base = base + i * step.stride;
    if (copy.last() < 0) break;
    if (!trim(copy, end, into, most)) return false;
  }
  for (int64_t i = high; i < step.count; ++i) {
    copy.base = base + i * step.stride;
    if (copy.base >= end) break;
    if (!trim(copy, end, into, most)) return false;
  }
  return true;
}

class Coverer {
 public:
  explicit Coverer(const Budget& budget)
      : budget_(budget), nodes_(budget.nodes), runs_(budget.runs), words_(kMostWords) {}

  CountBounds reach(Sets sets);

 private:
  CountBounds reach_component(const Sets& sets);
  std::optional<CountBounds> by_rows(const Sets& sets);
  std::optional<int64_t> by_pairs(const Sets& sets);
  int64_t by_runs(const Sets& sets, int64_t runs);
  std::optional<int64_t> by_bitmap(const Sets& sets);

  const Budget budget_;
  int64_t nodes_;
  int64_t runs_;
  int64_t words_;
  int64_t row_parts_ = kMostRowParts;
};

// Unbroken runs are merged first and hide what lies within them. The rest falls into components whose hulls
// meet.
CountBounds Coverer::reach(Sets sets) {
  std::sort(sets.begin(), sets.end(), before);
  Sets whole;
  for (const ByteSet& set : sets) {
    if (!set.is_one_run()) continue;
    if (!whole.empty() && set.base <= whole.back().last() + 1) {
      whole.back() = one_run(whole.back().base, std::max(whole.back().last(), set.last()) + 1);
    } else {
      whole.push_back(set);
    }
  }
  Sets kept;
  size_t next = 0;
  for (const ByteSet& set : sets) {
    while (next < whole.size() && whole[next].base <= set.base) kept.push_back(whole[next++]);
    if (set.is_one_run() || (next > 0 && set.last() <= whole[next - 1].last())) continue;
    if (kept.empty() || !(kept.back() == set)) kept.push_back(set);
  }

  CountBounds sum;
  for (size_t first = 0; first < kept.size();) {
    int64_t last = kept[first].last();
    size_t end = first + 1;
    for (; end < kept.size() && kept[end].base <= last; ++end) last = std::max(last, kept[end].last());
    const CountBounds found = reach_component(
        Sets(kept.begin() + static_cast<int64_t>(first), kept.begin() + static_cast<int64_t>(end)));
    sum.least += found.least;
    sum.most += found.most;
    first = end;
  }
  return sum;
}

// The most that sets reach together of which no two hulls meet: a choice of intervals by weight.
int64_t most_apart(const Sets& sets) {
  struct Hull {
    int64_t base;
    int64_t last;
    int64_t bytes;
  };
  std::vector<Hull> hulls;
  for (const ByteSet& set : sets) hulls.push_back({set.base, set.last(), count_bytes(set).least});
  std::sort(hulls.begin(), hulls.end(), [](const Hull& a, const Hull& b) { return a.last < b.last; });
  std::vector<int64_t> best{0};  // of the first i hulls
  for (const Hull& hull : hulls) {
    const auto before = std::partition_point(hulls.begin(), hulls.end(),
                                             [&](const Hull& other) { return other.last < hull.base; });
    best.push_back(std::max(best.back(), hull.bytes + best[static_cast<size_t>(before - hulls.begin())]));
  }
  return best.back();
}

CountBounds Coverer::reach_component(const Sets& sets) {
  CountBounds bounds{0, 0};
  int64_t last = 0;
  int64_t runs = 0;
  for (const ByteSet& set : sets) {
    const CountBounds one = count_bytes(set);
    bounds.least = std::max(bounds.least, one.least);
    if (__builtin_add_overflow(bounds.most, one.most, &bounds.most)) {
      bounds.most = std::numeric_limits<int64_t>::max();
    }
    last = std::max(last, set.last());
    if (__builtin_add_overflow(runs, number_of_runs(set), &runs)) runs = std::numeric_limits<int64_t>::max();
  }
  bounds.most = std::min(bounds.most, last - sets[0].base + 1);
  if (bounds.least == bounds.most) return bounds;

  const auto exact = [](int64_t bytes) { return CountBounds{bytes, bytes}; };
  if (runs <= std::min(kFewRuns, runs_)) return exact(by_runs(sets, runs));
  if (const auto found = by_rows(sets)) {
    bounds = {std::max(bounds.least, found->least), std::min(bounds.most, found->most)};
    if (bounds.least == bounds.most) return bounds;
  }
  if (const auto found = by_pairs(sets)) return exact(*found);
  if (runs <= runs_) return exact(by_runs(sets, runs));
  if (const auto found = by_bitmap(sets)) return exact(*found);
  bounds.least = std::max(bounds.least, most_apart(sets));
  return bounds;
}

int64_t Coverer::by_runs(const Sets& sets, int64_t runs) {
  runs_ -= runs;
  std::vector<Run> all;
  all.reserve(static_cast<size_t>(runs));
  for (const ByteSet& set : sets) for_each_run(set, [&](const Run& run) { all.push_back(run); });
  merge_runs(all);
  return length_of(all);
}

// Blocks of one matrix: the widest step of every set is a row, and no set's part of a row leaves that row.
// Between two rows at which a set begins or ends all rows are alike. Unbroken runs are cut into a row's end,
// whole rows and a row's begin.
std::optional<CountBounds> Coverer::by_rows(const Sets& sets) {
  struct Block {
    int64_t first_row;
    int64_t end_row;
    ByteSet part;
  };
  int64_t width = 0;
  for (const ByteSet& set : sets) {
    if (set.is_one_run()) continue;
    if (width != 0 && set.steps.back().stride != width) return std::nullopt;
    width = set.steps.back().stride;
  }
  if (width == 0) return std::nullopt;

  // A row begins where a set's part begins, unless another one's part goes on across that place.
  const auto crosses = [&](int64_t origin) {
    return std::any_of(sets.begin(), sets.end(), [&](const ByteSet& set) {
      return !set.is_one_run() && (set.base - origin) % width + inner_of(set).extent >= width;
    });
  };
  std::optional<int64_t> origin;
  for (size_t i = 0; i < std::min(sets.size(), kMostPairwise) && !origin; ++i) {
    // Not above any base, so that rows count from 0.
    const int64_t at = sets[0].base - (width - (sets[i].base - sets[0].base) % width) % width;
    if (!crosses(at)) origin = at;
  }
  if (!origin) return std::nullopt;

  std::vector<Block> blocks;
  std::vector<int64_t> borders;
  for (const ByteSet& set : sets) {
    const int64_t row = (set.base - *origin) / width;
    const int64_t column = (set.base - *origin) % width;
    if (!set.is_one_run()) {
      ByteSet part = inner_of(set);
      part.base = column;
      blocks.push_back({row, row + set.steps.back().count, part});
      continue;
    }
    const int64_t last_row = (set.last() - *origin) / width;
    const int64_t end = (set.last() - *origin) % width + 1;
    if (row == last_row) {
      blocks.push_back({row, row + 1, one_run(column, end)});
      continue;
    }
    blocks.push_back({row, row + 1, one_run(column, width)});
    if (row + 1 < last_row) blocks.push_back({row + 1, last_row, one_run(0, width)});
    blocks.push_back({last_row, last_row + 1, one_run(0, end)});
  }
  for (const Block& block : blocks) {
    borders.push_back(block.first_row);
    borders.push_back(block.end_row);
  }
  std::sort(borders.begin(), borders.end());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  std::sort(blocks.begin(), blocks.end(),
            [](const Block& a, const Block& b) { return a.first_row < b.first_row; });

  CountBounds sum;
  std::vector<const Block*> active;
  size_t next = 0;
  for (size_t i = 0; i + 1 < borders.size(); ++i) {
    std::erase_if(active, [&](const Block* block) { return block->end_row <= borders[i]; });
    for (; next < blocks.size() && blocks[next].first_row == borders[i]; ++next)
      active.push_back(&blocks[next]);
    row_parts_ -= static_cast<int64_t>(active.size());
    if (row_parts_ < 0) return std::nullopt;
    Sets row;
    for (const Block* block : active) row.push_back(block->part);
    const CountBounds found = reach(std::move(row));
    sum.least += found.least * (borders[i + 1] - borders[i]);
    sum.most += found.most * (borders[i + 1] - borders[i]);
  }
  return sum;
}

// What lies within another set is dropped. Of the rest, no three meet in one byte where no three meet two by
// two: then the sum of all less what pairs share is exact.
std::optional<int64_t> Coverer::by_pairs(const Sets& sets) {
  if (sets.size() > kMostPairwise || nodes_ == 0) return std::nullopt;
  Sets kept;
  for (const ByteSet& set : sets) {
    if (split_nested(set, kMostPairwise).empty()) return std::nullopt;
    kept.push_back(set);
  }
  std::array<std::array<int64_t, kMostPairwise>, kMostPairwise> shared{};
  for (size_t i = 0; i < kept.size(); ++i) {
    for (size_t j = i + 1; j < kept.size(); ++j) {
      Budget budget = budget_;
      budget.nodes = nodes_;
      budget.bitmap_units = 0;
      const OverlapAnswer answer = overlap(kept[i], kept[j], budget);
      nodes_ = std::max<int64_t>(nodes_ - answer.nodes - kNodesOfPair, 0);
      if (!answer.shared_bytes) return std::nullopt;
      shared[i][j] = shared[j][i] = *answer.shared_bytes;
    }
  }
  std::array<bool, kMostPairwise> hidden{};
  std::array<int64_t, kMostPairwise> bytes{};
  for (size_t i = 0; i < kept.size(); ++i) bytes[i] = count_bytes(kept[i]).least;
  for (size_t i = 0; i < kept.size(); ++i) {
    for (size_t j = 0; j < kept.size() && !hidden[i]; ++j) {
      hidden[i] = i != j && !hidden[j] && shared[i][j] == bytes[i];
    }
  }
  int64_t sum = 0;
  for (size_t i = 0; i < kept.size(); ++i) {
    if (hidden[i]) continue;
    sum += bytes[i];
    for (size_t j = i + 1; j < kept.size(); ++j) {
      if (hidden[j] || shared[i][j] == 0) continue;
      sum -= shared[i][j];
      for (size_t k = j + 1; k < kept.size(); ++k) {
        if (!hidden[k] && shared[i][k] != 0 && shared[j][k] != 0) return std::nullopt;
      }
    }
  }
  return sum;
}

std::optional<int64_t> Coverer::by_bitmap(const Sets& sets) {
  int64_t unit = 0;
  int64_t last = 0;
  for (const ByteSet& set : sets) {
    unit = common_unit(set, sets[0].base, unit);
    last = std::max(last, set.last());
  }
  const int64_t units = (last - sets[0].base + 1) / unit;
  if (units > budget_.bitmap_units * 4) return std::nullopt;

  // Run after run, or doubled in a bitmap of its own.
  const auto doubling = [&](const ByteSet& set) {
    int64_t words = 0;
    int64_t extent = 0;
    for (const Step& step : set.steps) {
      extent += (step.count - 1) * step.stride;
      words += 2 * (extent / unit / 64 + 1) + std::bit_width(static_cast<uint64_t>(step.count));
    }
    return 2 * words;
  };
  const auto listing = [&](const ByteSet& set) {
    int64_t words = 0;
    if (__builtin_mul_overflow(number_of_runs(set), set.run() / unit / 64 + 2, &words)) {
      return std::numeric_limits<int64_t>::max();
    }
    return words;
  };
  int64_t words = units / 64 + 1;
  for (const ByteSet& set : sets) {
    words += std::min(doubling(set), listing(set));
    if (words > words_) return std::nullopt;
  }
  words_ -= words;
  Bitmap bitmap(units);
  for (const ByteSet& set : sets) {
    const ByteSet scaled = divided(set, sets[0].base, unit);
    if (listing(set) <= doubling(set)) {
      for_each_run(scaled, [&](const Run& run) { bitmap.set_run(run.begin, run.end); });
    } else {
      bitmap.include(drawn(scaled), scaled.base);
    }
  }
  return bitmap.count() * unit;
}

// What regions reach of [0, storage_nbytes); the regions that are too hard to cut at its ends stay out.
struct Trimmed {
  Sets sets;
  CountBounds left_out;
  int64_t runs = 4 * kFewRuns;  // that may become sets of their own
};

bool trim_runs(const ByteSet& set, int64_t end, Trimmed& into) {
  const int64_t runs = number_of_runs(set);
  if (runs > into.runs) return false;
  into.runs -= runs;
  for_each_run(set, [&](const Run& run) {
    if (run.end > 0 && run.begin < end) {
      into.sets.push_back(one_run(std::max<int64_t>(run.begin, 0), std::min(run.end, end)));
    }
  });
  return true;
}

void trim_region(const Region& region, int64_t storage_nbytes, Trimmed& into) {
  const std::optional<ByteSet> set = normal_form(region);
  if (!set) {
    into.left_out.most = storage_nbytes;
    return;
  }
  if (set->empty) return;
  if (set->base >= 0 && set->last() < storage_nbytes) {
    into.sets.push_back(*set);
    return;
  }
  Sets parts;
  const std::vector<ByteSet> pieces = split_nested(*set, kMostTrimmed);
  bool done = !pieces.empty();
  for (const ByteSet& piece : pieces) done = done && trim(piece, storage_nbytes, parts, kMostTrimmed);
  if (done) {
    into.sets.insert(into.sets.end(), parts.begin(), parts.end());
  } else if (!trim_runs(*set, storage_nbytes, into)) {
    const int64_t most = std::min(set->last() + 1, storage_nbytes) - std::max<int64_t>(set->base, 0);
    into.left_out.most = std::min(storage_nbytes, into.left_out.most + std::max<int64_t>(most, 0));
  }
}

}  // namespace

CoverageAnswer coverage(std::span<const Region> regions, int64_t storage_nbytes, const Budget& budget) {
  if (storage_nbytes <= 0) return {};
  Trimmed trimmed;
  for (const Region& region : regions) trim_region(region, storage_nbytes, trimmed);
  const CountBounds found = Coverer(budget).reach(std::move(trimmed.sets));
  return {found.least, std::min(storage_nbytes, found.most + trimmed.left_out.most)};
}

std::optional<int64_t> exclusive_bytes(std::span<const Region> regions, size_t index, int64_t storage_nbytes,
                                       const Budget& budget) {
  Trimmed own;
  if (storage_nbytes > 0) trim_region(regions[index], storage_nbytes, own);
  if (own.left_out.most != 0) return std::nullopt;
  if (own.sets.empty()) return 0;
  int64_t base = storage_nbytes;
  int64_t last = 0;
  for (const ByteSet& set : own.sets) {
    base = std::min(base, set.base);
    last = std::max(last, set.last());
  }

  Trimmed others;
  for (size_t i = 0; i < regions.size(); ++i) {
    if (i != index) trim_region(regions[i], storage_nbytes, others);
  }
  if (others.left_out.most != 0) return std::nullopt;
  std::erase_if(others.sets, [&](const ByteSet& set) { return set.last() < base || set.base > last; });
  const CountBounds without = Coverer(budget).reach(others.sets);
  others.sets.insert(others.sets.end(), own.sets.begin(), own.sets.end());
  const CountBounds with = Coverer(budget).reach(std::move(others.sets));
  if (without.least != without.most || with.least != with.most) return std::nullopt;
  return with.least - without.least;
}

}  // namespace tensorplay
