// Geometry against hand-made cases and against an oracle that walks every index and collects the cells in a
// set.
//
// Links neither torch nor Python (the Makefile proves it). All randomness is seeded: a failure repeats.
#include "../../csrc/core/extent.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <ostream>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "geometries.h"

namespace tensorplay {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

// As a pair, which GoogleTest can compare and print.
using Bounds = std::pair<int64_t, int64_t>;

std::optional<Bounds> bounds(DimSpan sizes, DimSpan strides, int64_t offset) {
  const std::optional<CellRange> range = cell_range(sizes, strides, offset);
  return range ? std::optional(Bounds{range->begin, range->end}) : std::nullopt;
}

// ---- The oracle ----

bool is_unbroken(const std::vector<int64_t>& cells) {
  return std::adjacent_find(cells.begin(), cells.end(), [](int64_t a, int64_t b) { return b != a + 1; }) ==
         cells.end();
}

MemoryFormat oracle_format(const Geometry& geometry) {
  const std::vector<int64_t> cells = walk(geometry, first_dim_first(geometry.sizes.size()));
  if (is_unbroken(cells)) return MemoryFormat::kContiguous;
  const size_t dims = geometry.sizes.size();
  if (dims == 4 && is_unbroken(walk(geometry, {0, 2, 3, 1}))) return MemoryFormat::kChannelsLast;
  if (dims == 5 && is_unbroken(walk(geometry, {0, 2, 3, 4, 1}))) return MemoryFormat::kChannelsLast3d;
  const std::set<int64_t> distinct(cells.begin(), cells.end());
  const bool dense = *distinct.rbegin() - *distinct.begin() + 1 == static_cast<int64_t>(distinct.size());
  return dense && distinct.size() == cells.size() ? MemoryFormat::kPermuted : MemoryFormat::kStrided;
}

// What a run over many geometries has met, so that a generator that goes blind is noticed.
struct Tally {
  int cases = 0;
  int hard = 0;     // distinct_cells() needed its bitmap
  int overlap = 0;  // more elements than cells
  int empty = 0;
  int permuted = 0;
};

void check_against_oracle(const Geometry& geometry, Tally& tally) {
  const std::vector<int64_t> cells = walk(geometry, first_dim_first(geometry.sizes.size()));
  const std::set<int64_t> distinct(cells.begin(), cells.end());
  const Bounds range = cells.empty() ? Bounds{geometry.offset, geometry.offset}
                                     : Bounds{*distinct.begin(), *distinct.rbegin() + 1};

  ASSERT_EQ(count_elements(geometry.sizes), static_cast<int64_t>(cells.size())) << geometry;
  ASSERT_EQ(bounds(geometry.sizes, geometry.strides, geometry.offset), range) << geometry;
  ASSERT_EQ(distinct_cells(geometry.sizes, geometry.strides), static_cast<int64_t>(distinct.size()))
      << geometry;
  ASSERT_EQ(is_contiguous(geometry.sizes, geometry.strides), is_unbroken(cells)) << geometry;
  ASSERT_EQ(memory_format(geometry.sizes, geometry.strides), oracle_format(geometry)) << geometry;

  const std::optional<int64_t> without_bitmap = distinct_cells(geometry.sizes, geometry.strides, 0);
  ASSERT_TRUE(!without_bitmap || without_bitmap == static_cast<int64_t>(distinct.size())) << geometry;
  ++tally.cases;
  tally.hard += !without_bitmap;
  tally.overlap += distinct.size() < cells.size();
  tally.empty += cells.empty();
  tally.permuted += memory_format(geometry.sizes, geometry.strides) == MemoryFormat::kPermuted;
}

// ---- Random geometries ----

TEST(RandomGeometry, chain_of_views_agrees_with_oracle) {
  Dice dice(20261);
  Tally tally;

  for (int i = 0; i < 25'000; ++i) {
    Ints sizes = random_sizes(dice, 0, 4, 6);
    const size_t dims = sizes.size();
    Geometry view = dense(std::move(sizes), last_dim_first(dims), dice.between(0, 20));
    for (int64_t steps = dice.between(0, 6); steps > 0; --steps) take_view(view, dice);
    ASSERT_NO_FATAL_FAILURE(check_against_oracle(view, tally));
  }

  EXPECT_EQ(tally.cases, 25'000);
  EXPECT_GT(tally.overlap, 2'000);
  EXPECT_GT(tally.empty, 200);
}

TEST(RandomGeometry, arbitrary_strides_agree_with_oracle) {
  Dice dice(20262);
  Tally tally;

  for (int i = 0; i < 25'000; ++i) {
    Geometry made{random_sizes(dice, 0, 5, 4), {}, dice.between(-50, 50)};
    const int64_t reach = dice.one_in(2) ? 6 : 90;
    for (size_t dim = 0; dim < made.sizes.size(); ++dim) made.strides.push_back(dice.between(-reach, reach));
    ASSERT_NO_FATAL_FAILURE(check_against_oracle(made, tally));
  }

  EXPECT_EQ(tally.cases, 25'000);
  EXPECT_GT(tally.hard, 6'000) << "the generator no longer reaches the bitmap";
  EXPECT_LT(tally.hard, 19'000) << "the generator no longer reaches the closed form";
}

TEST(RandomGeometry, dense_in_any_order_agrees_with_oracle) {
  Dice dice(20263);
  Tally tally;

  for (int i = 0; i < 10'000; ++i) {
    Ints sizes = random_sizes(dice, 1, 5, 4);
    std::vector<size_t> order = first_dim_first(sizes.size());
    for (size_t at = order.size(); at > 1; --at) {
      std::swap(order[at - 1], order[static_cast<size_t>(dice.between(0, static_cast<int64_t>(at) - 1))]);
    }
    Geometry made = dense(std::move(sizes), order, dice.between(0, 9));
    for (int64_t& stride : made.strides) {
      if (dice.one_in(12)) stride += dice.between(-1, 1);  // a near miss
    }
    ASSERT_NO_FATAL_FAILURE(check_against_oracle(made, tally));
  }

  EXPECT_EQ(tally.cases, 10'000);
  EXPECT_GT(tally.permuted, 2'500);
}

// More cells than a word of the bitmap holds, and shifts that cross words.
TEST(RandomGeometry, long_overlapping_rows_agree_with_oracle) {
  Dice dice(20264);
  Tally tally;

  for (int i = 0; i < 1'000; ++i) {
    const Geometry made{
        {dice.between(2, 40), dice.between(2, 40)}, {dice.between(1, 130), dice.between(1, 130)}, 0};
    ASSERT_NO_FATAL_FAILURE(check_against_oracle(made, tally));
  }

  EXPECT_GT(tally.hard, 150);
  EXPECT_GT(tally.overlap, 100);
}

// ---- Hand-made cases ----

TEST(CountElements, scalar_has_one) {
  EXPECT_EQ(count_elements({}), 1);
}

TEST(CountElements, any_zero_makes_it_empty) {
  EXPECT_EQ(count_elements(Ints{3, 0, 4}), 0);
  EXPECT_EQ(count_elements(Ints{kMax, kMax, 0}), 0);
}

TEST(CountElements, beyond_64_bits_is_absent) {
  EXPECT_EQ(count_elements(Ints{int64_t{1} << 31, int64_t{1} << 31}), int64_t{1} << 62);
  EXPECT_EQ(count_elements(Ints{int64_t{1} << 32, int64_t{1} << 31}), std::nullopt);
  EXPECT_EQ(count_elements(Ints{kMax, 2}), std::nullopt);
}

TEST(CellRange, scalar_reaches_its_offset) {
  EXPECT_EQ(bounds({}, {}, 7), (Bounds{7, 8}));
}

TEST(CellRange, empty_reaches_nothing) {
  EXPECT_EQ(bounds(Ints{2, 0}, Ints{5, 1}, 7), (Bounds{7, 7}));
  EXPECT_EQ(bounds(Ints{0, kMax}, Ints{kMax, kMax}, kMax), (Bounds{kMax, kMax}));
}

TEST(CellRange, size_one_dimension_never_takes_its_stride) {
  EXPECT_EQ(bounds(Ints{1, 3, 1}, Ints{kMax, 2, kMin}, 1), (Bounds{1, 6}));
}

TEST(CellRange, negative_stride_moves_the_begin) {
  EXPECT_EQ(bounds(Ints{4}, Ints{-2}, 10), (Bounds{4, 11}));
  EXPECT_EQ(bounds(Ints{4, 3}, Ints{-2, 5}, 10), (Bounds{4, 21}));
}

TEST(CellRange, expanded_dimension_adds_nothing) {
  EXPECT_EQ(bounds(Ints{1000, 3}, Ints{0, 1}, 2), (Bounds{2, 5}));
}

TEST(CellRange, last_cell_that_fits_is_reached) {
  EXPECT_EQ(bounds(Ints{2}, Ints{kMax - 1}, 0), (Bounds{0, kMax}));
  EXPECT_EQ(bounds(Ints{2}, Ints{kMin}, 0), (Bounds{kMin, 1}));
}

TEST(CellRange, beyond_64_bits_is_absent) {
  EXPECT_EQ(bounds(Ints{2}, Ints{kMax}, 0), std::nullopt);
  EXPECT_EQ(bounds(Ints{2}, Ints{kMin}, -1), std::nullopt);
  EXPECT_EQ(bounds(Ints{3}, Ints{int64_t{1} << 62}, 0), std::nullopt);
  EXPECT_EQ(bounds(Ints{2, 2}, Ints{int64_t{1} << 62, int64_t{1} << 62}, 0), std::nullopt);
  EXPECT_EQ(bounds({}, {}, kMax), std::nullopt);
}

TEST(DistinctCells, contiguous_has_a_cell_for_each_element) {
  EXPECT_EQ(distinct_cells(Ints{3, 4}, Ints{4, 1}), 12);
  EXPECT_EQ(distinct_cells({}, {}), 1);
  EXPECT_EQ(distinct_cells(Ints{3, 0}, Ints{1, 1}), 0);
}

TEST(DistinctCells, expanded_dimension_is_counted_once) {
  EXPECT_EQ(distinct_cells(Ints{1000, 3}, Ints{0, 1}), 3);
  EXPECT_EQ(distinct_cells(Ints{kMax, kMax}, Ints{0, 0}), 1);
}

TEST(DistinctCells, unfolded_windows_share_their_overlap) {
  EXPECT_EQ(distinct_cells(Ints{8, 3}, Ints{1, 1}), 10);  // unfold(0, 3, 1) of 10
  EXPECT_EQ(distinct_cells(Ints{4, 3}, Ints{2, 1}), 9);   // unfold(0, 3, 2) of 10
  EXPECT_EQ(distinct_cells(Ints{3, 3}, Ints{3, 1}), 9);   // unfold(0, 3, 3) of 10: windows side by side
}

TEST(DistinctCells, huge_but_regular_is_exact) {
  EXPECT_EQ(distinct_cells(Ints{int64_t{1} << 40, 3}, Ints{1, 1}), (int64_t{1} << 40) + 2);
  EXPECT_EQ(distinct_cells(Ints{2, 2}, Ints{int64_t{1} << 61, int64_t{1} << 60}), 4);
  EXPECT_EQ(distinct_cells(Ints{2, int64_t{1} << 40}, Ints{3, 4}), int64_t{1} << 41);  // pairs, side by side
  EXPECT_EQ(distinct_cells(Ints{2}, Ints{kMax}), 2);
}

TEST(DistinctCells, negative_stride_counts_as_its_mirror_image) {
  EXPECT_EQ(distinct_cells(Ints{4, 3}, Ints{-2, 1}), 9);
  EXPECT_EQ(distinct_cells(Ints{4, 3}, Ints{-3, -1}), 12);
}

TEST(DistinctCells, size_one_dimension_never_takes_its_stride) {
  EXPECT_EQ(distinct_cells(Ints{1, 3}, Ints{kMax, 1}), 3);
}

TEST(DistinctCells, hard_geometry_is_exact_within_the_limit_and_absent_beyond) {
  // 0 2 4 · 3 5 7 · 6 8 10: nine different cells of eleven, in no closed form.
  const Ints sizes{3, 3};
  const Ints strides{2, 3};

  EXPECT_EQ(distinct_cells(sizes, strides), 9);
  EXPECT_EQ(distinct_cells(sizes, strides, 11), 9);
  EXPECT_EQ(distinct_cells(sizes, strides, 10), std::nullopt);
}

TEST(DistinctCells, hard_geometry_beyond_the_default_limit_is_absent) {
  EXPECT_EQ(distinct_cells(Ints{kMaxEnumeratedCells, 2}, Ints{2, 3}), std::nullopt);
}

TEST(DistinctCells, common_factor_of_strides_costs_no_cells) {
  const int64_t far = int64_t{1} << 40;

  EXPECT_EQ(distinct_cells(Ints{3, 3}, Ints{2 * far, 3 * far}, 11), 9);
}

TEST(DistinctCells, beyond_64_bits_is_absent) {
  EXPECT_EQ(distinct_cells(Ints{2, 2}, Ints{1, kMax}), std::nullopt);
  EXPECT_EQ(distinct_cells(Ints{kMax, kMax}, Ints{1, kMax}), std::nullopt);
  EXPECT_EQ(distinct_cells(Ints{4}, Ints{kMax}), 4);  // the strides' common factor goes first
}

// Absent or 2, but not undefined behaviour: the smallest number has no magnitude in 64 bits.
TEST(DistinctCells, smallest_stride_is_answered) {
  EXPECT_EQ(distinct_cells(Ints{2}, Ints{kMin}).value_or(2), 2);
  EXPECT_EQ(distinct_cells(Ints{2, 2}, Ints{kMin, kMin}).value_or(3), 3);
  EXPECT_EQ(memory_format(Ints{2}, Ints{kMin}), MemoryFormat::kStrided);
}

// No storage holds so many cells, so that nothing of this size is dense.
TEST(IsContiguous, more_elements_than_64_bits_is_not) {
  const int64_t large = int64_t{1} << 32;

  EXPECT_FALSE(is_contiguous(Ints{2, large, large}, Ints{0, large, 1}));
  EXPECT_EQ(memory_format(Ints{2, large, large}, Ints{0, large, 1}), MemoryFormat::kStrided);
  EXPECT_EQ(memory_format(Ints{large, large, 2}, Ints{1, large, 0}), MemoryFormat::kStrided);
}

TEST(IsContiguous, size_one_and_empty_ignore_strides) {
  EXPECT_TRUE(is_contiguous({}, {}));
  EXPECT_TRUE(is_contiguous(Ints{1, 3, 1}, Ints{77, 1, -5}));
  EXPECT_TRUE(is_contiguous(Ints{2, 0, 3}, Ints{9, 9, 9}));
}

TEST(IsContiguous, any_other_order_or_gap_is_not) {
  EXPECT_TRUE(is_contiguous(Ints{3, 4}, Ints{4, 1}));
  EXPECT_FALSE(is_contiguous(Ints{3, 4}, Ints{1, 3}));
  EXPECT_FALSE(is_contiguous(Ints{3, 4}, Ints{5, 1}));
  EXPECT_FALSE(is_contiguous(Ints{3}, Ints{-1}));
  EXPECT_FALSE(is_contiguous(Ints{3}, Ints{0}));
}

TEST(MemoryFormat, channels_last_is_named_in_four_and_five_dimensions) {
  EXPECT_EQ(memory_format(Ints{2, 3, 4, 5}, Ints{60, 1, 15, 3}), MemoryFormat::kChannelsLast);
  EXPECT_EQ(memory_format(Ints{2, 3, 4, 5, 6}, Ints{360, 1, 90, 18, 3}), MemoryFormat::kChannelsLast3d);
  EXPECT_EQ(memory_format(Ints{1, 3, 4, 5}, Ints{9, 1, 15, 3}), MemoryFormat::kChannelsLast);
  EXPECT_EQ(memory_format(Ints{3, 4, 5}, Ints{1, 15, 3}), MemoryFormat::kPermuted);
}

TEST(MemoryFormat, row_major_wins_where_both_fit) {
  EXPECT_EQ(memory_format(Ints{2, 1, 4, 5}, Ints{20, 1, 5, 1}), MemoryFormat::kContiguous);
  EXPECT_EQ(memory_format(Ints{2, 3, 1, 1}, Ints{3, 1, 3, 3}), MemoryFormat::kContiguous);
}

TEST(MemoryFormat, transposed_is_permuted) {
  EXPECT_EQ(memory_format(Ints{4, 3}, Ints{1, 4}), MemoryFormat::kPermuted);
  EXPECT_EQ(memory_format(Ints{4, 1, 3}, Ints{1, 99, 4}), MemoryFormat::kPermuted);
}

TEST(MemoryFormat, gap_or_overlap_is_strided) {
  EXPECT_EQ(memory_format(Ints{3, 4}, Ints{8, 1}), MemoryFormat::kStrided);
  EXPECT_EQ(memory_format(Ints{8, 3}, Ints{1, 1}), MemoryFormat::kStrided);
  EXPECT_EQ(memory_format(Ints{5, 3}, Ints{0, 1}), MemoryFormat::kStrided);
  EXPECT_EQ(memory_format(Ints{3}, Ints{2}), MemoryFormat::kStrided);
}

}  // namespace
}  // namespace tensorplay
