#include "overlap.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "meetings.h"

namespace tensorplay {
namespace {

// A search may take as many pairs of nested sets as both sides are cut into.
constexpr size_t kMostPieces = 64;

int64_t stride_unit(const ByteSet& set, int64_t unit) {
  for (const Step& step : set.steps) unit = std::gcd(unit, step.stride);
  return unit;
}

// Every position a multiple of `unit`.
void thin(ByteSet& set, int64_t unit) {
  set.base /= unit;
  set.extent /= unit;
  for (size_t i = 0; i < set.steps.size(); ++i) set.steps[i].stride /= unit;
}

bool hulls_meet(const ByteSet& a, const ByteSet& b) {
  return a.base <= b.last() && b.base <= a.last();
}

// Told by the ends alone: all of `inner` and more.
bool lies_within(const ByteSet& inner, const ByteSet& outer) {
  return outer.is_one_run() && outer.base <= inner.base && inner.last() <= outer.last() &&
         inner.extent < outer.extent;
}

std::optional<int64_t> count_common(const ByteSet& a, const ByteSet& b, int64_t& nodes) {
  if (!hulls_meet(a, b)) return 0;
  if (a.is_one_run()) return count_below(b, a.last() + 1) - count_below(b, a.base);
  if (b.is_one_run()) return count_below(a, b.last() + 1) - count_below(a, b.base);
  return Meetings(a, b).count(nodes);
}

struct Counts {
  int64_t first = 0;
  int64_t second = 0;
  int64_t shared = 0;
};

std::optional<Counts> count_by_pieces(const ByteSet& a, const ByteSet& b, int64_t& nodes) {
  if (is_nested(a) && is_nested(b)) {
    const std::optional<int64_t> shared = count_common(a, b, nodes);
    return shared ? std::optional(Counts{count_nested(a), count_nested(b), *shared}) : std::nullopt;
  }
  const std::vector<ByteSet> of_a = split_nested(a, kMostPieces);
  const std::vector<ByteSet> of_b = of_a.empty() ? of_a : split_nested(b, kMostPieces);
  if (of_b.empty()) return std::nullopt;
  Counts counts;
  for (const ByteSet& piece : of_b) counts.second += count_nested(piece);
  for (const ByteSet& piece : of_a) {
    counts.first += count_nested(piece);
    for (const ByteSet& other : of_b) {
      const std::optional<int64_t> shared = count_common(piece, other, nodes);
      if (!shared) return std::nullopt;
      counts.shared += *shared;
    }
  }
  return counts;
}

// Its runs one by one, from a list or from a bitmap; none where there are too many.
std::vector<Run> runs_of(const ByteSet& set, const Budget& budget, OverlapAnswer& answer) {
  std::vector<Run> runs;
  if (number_of_runs(set) <= budget.runs / 16) {
    runs.reserve(static_cast<size_t>(number_of_runs(set)));
    for_each_run(set, [&](const Run& run) { runs.push_back(run); });
    merge_runs(runs);
  } else if (set.extent < budget.bitmap_units) {
    answer.bitmap_units += set.extent + 1;
    drawn(set).for_each_run([&](int64_t begin, int64_t end) {
      if (static_cast<int64_t>(runs.size()) <= budget.runs)
        runs.push_back({set.base + begin, set.base + end});
    });
  }
  if (static_cast<int64_t>(runs.size()) > budget.runs) runs.clear();
  return runs;
}

// `listed` run by run, each in closed form with what the other one splits into.
std::optional<Counts> count_by_runs(const ByteSet& split, const ByteSet& listed, const Budget& budget,
                                    OverlapAnswer& answer) {
  const std::vector<ByteSet> pieces = split_nested(split, kMostPieces);
  if (pieces.empty()) return std::nullopt;
  const std::vector<Run> runs = runs_of(listed, budget, answer);
  if (runs.empty() || static_cast<int64_t>(runs.size() * pieces.size()) > budget.runs) return std::nullopt;
  Counts counts;
  counts.second = length_of(runs);
  for (const ByteSet& piece : pieces) {
    counts.first += count_nested(piece);
    for (const Run& run : runs) counts.shared += count_below(piece, run.end) - count_below(piece, run.begin);
  }
  return counts;
}

Counts count_by_bitmap(const ByteSet& a, const ByteSet& b) {
  const Bitmap of_a = drawn(a);
  const Bitmap of_b = drawn(b);
  const int64_t apart = b.base - a.base;
  return {of_a.count(), of_b.count(),
          apart >= 0 ? of_a.count_common(of_b, apart) : of_b.count_common(of_a, -apart)};
}

void relate(const Counts& counts, int64_t unit, OverlapAnswer& answer) {
  answer.shared_bytes = counts.shared * unit;
  const bool all_of_first = counts.shared == counts.first;
  const bool all_of_second = counts.shared == counts.second;
  if (counts.shared == 0) {
    answer.relation = Relation::kDisjoint;
  } else if (all_of_first) {
    answer.relation = all_of_second ? Relation::kIdentical : Relation::kFirstInSecond;
  } else {
    answer.relation = all_of_second ? Relation::kSecondInFirst : Relation::kPartial;
  }
}

OverlapAnswer disjoint() {
  return {Relation::kDisjoint, 0};
}

OverlapAnswer identical(const ByteSet& set, const Budget& budget) {
  OverlapAnswer answer{Relation::kIdentical, std::nullopt};
  const CountBounds bounds = count_bytes(set);
  if (bounds.least == bounds.most) {
    answer.shared_bytes = bounds.least;
    return answer;
  }
  const int64_t unit = common_unit(set, set.base, 0);
  const ByteSet scaled = divided(set, set.base, unit);
  if (scaled.extent < budget.bitmap_units) {
    answer.bitmap_units = scaled.extent + 1;
    answer.shared_bytes = drawn(scaled).count() * unit;
  }
  return answer;
}

}  // namespace

OverlapAnswer overlap(const Region& a, const Region& b, const Budget& budget) {
  const std::optional<ByteSet> first = normal_form(a);
  const std::optional<ByteSet> second = normal_form(b);
  if ((first && first->empty) || (second && second->empty)) return disjoint();
  return first && second ? overlap(*first, *second, budget) : OverlapAnswer();
}

OverlapAnswer overlap(const ByteSet& a, const ByteSet& b, const Budget& budget) {
  if (a.empty || b.empty || !hulls_meet(a, b)) return disjoint();
  if (a == b) return identical(a, budget);

  const int64_t unit = common_unit(b, a.base, common_unit(a, a.base, 0));
  ByteSet first = divided(a, a.base, unit);
  ByteSet second = divided(b, a.base, unit);
  const int64_t lattice = stride_unit(second, stride_unit(first, 0));
  if (lattice > 1) {
    if (second.base % lattice != 0) return disjoint();
    thin(first, lattice);
    thin(second, lattice);
  }

  OverlapAnswer answer;
  int64_t nodes = budget.nodes;
  if (const std::optional<Counts> counts = count_by_pieces(first, second, nodes)) {
    relate(*counts, unit, answer);
    answer.nodes = budget.nodes - nodes;
    return answer;
  }
  answer.nodes = budget.nodes - nodes;
  if (std::max(first.extent, second.extent) < budget.bitmap_units) {
    answer.bitmap_units = first.extent + second.extent + 2;
    relate(count_by_bitmap(first, second), unit, answer);
    return answer;
  }
  if (const std::optional<Counts> counts = count_by_runs(first, second, budget, answer)) {
    relate(*counts, unit, answer);
    return answer;
  }
  if (std::optional<Counts> counts = count_by_runs(second, first, budget, answer)) {
    std::swap(counts->first, counts->second);
    relate(*counts, unit, answer);
    return answer;
  }
  if (lies_within(first, second)) {
    answer.relation = Relation::kFirstInSecond;
    return answer;
  }
  if (lies_within(second, first)) {
    answer.relation = Relation::kSecondInFirst;
    return answer;
  }
  nodes = budget.nodes;
  if (const std::optional<bool> any = Meetings(first, second).any(nodes)) {
    answer.relation = *any ? Relation::kOverlapping : Relation::kDisjoint;
    if (!*any) answer.shared_bytes = 0;
  }
  answer.nodes += budget.nodes - nodes;
  return answer;
}

const char* relation_name(Relation relation) {
  switch (relation) {
    case Relation::kDisjoint:
      return "disjoint";
    case Relation::kIdentical:
      return "identical";
    case Relation::kFirstInSecond:
      return "first_in_second";
    case Relation::kSecondInFirst:
      return "second_in_first";
    case Relation::kPartial:
      return "partial";
    case Relation::kOverlapping:
      return "overlapping";
    case Relation::kTooHard:
      break;
  }
  return "too_hard";
}

}  // namespace tensorplay
