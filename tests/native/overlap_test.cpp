// Overlap and coverage against hand-made cases and against an oracle that collects every byte in a set.
//
// Links neither torch nor Python (the Makefile proves it).
#include "../../csrc/core/overlap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "geometries.h"

namespace tensorplay {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

// A region that owns its sizes and strides.
struct View {
  Geometry geometry;
  int64_t itemsize = 1;
  int64_t origin = 0;

  Region region() const { return {geometry.sizes, geometry.strides, geometry.offset, itemsize, origin}; }
};

std::ostream& operator<<(std::ostream& out, const View& view) {
  return out << view.geometry << " itemsize " << view.itemsize << " origin " << view.origin;
}

View view(Ints sizes, Ints strides, int64_t offset = 0, int64_t itemsize = 1, int64_t origin = 0) {
  return {{std::move(sizes), std::move(strides), offset}, itemsize, origin};
}

OverlapAnswer compare(const View& a, const View& b, const Budget& budget = {}) {
  return overlap(a.region(), b.region(), budget);
}

std::vector<Region> regions_of(const std::vector<View>& views) {
  std::vector<Region> regions;
  for (const View& each : views) regions.push_back(each.region());
  return regions;
}

CoverageAnswer cover(const std::vector<View>& views, int64_t nbytes, const Budget& budget = {}) {
  return coverage(regions_of(views), nbytes, budget);
}

std::optional<int64_t> exclusive(const std::vector<View>& views, size_t index, int64_t nbytes,
                                 const Budget& budget = {}) {
  return exclusive_bytes(regions_of(views), index, nbytes, budget);
}

// Closed forms and the search alone.
constexpr Budget kNoBitmap{int64_t{1} << 17, 0, 0};

std::string text(const OverlapAnswer& answer) {
  return std::string(relation_name(answer.relation)) + " " +
         (answer.shared_bytes ? std::to_string(*answer.shared_bytes) : "?");
}

// ---- The oracle ----

using Bytes = std::set<int64_t>;

Bytes bytes_of(const View& view) {
  Bytes bytes;
  for (const int64_t cell : walk(view.geometry, first_dim_first(view.geometry.sizes.size()))) {
    for (int64_t i = 0; i < view.itemsize; ++i) bytes.insert(view.origin + cell * view.itemsize + i);
  }
  return bytes;
}

std::string oracle(const Bytes& a, const Bytes& b) {
  Bytes shared;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::inserter(shared, shared.end()));
  const bool all_a = shared.size() == a.size();
  const bool all_b = shared.size() == b.size();
  const char* relation = shared.empty()   ? "disjoint"
                         : all_a && all_b ? "identical"
                         : all_a          ? "first_in_second"
                         : all_b          ? "second_in_first"
                                          : "partial";
  return relation + (" " + std::to_string(shared.size()));
}

struct Tally {
  int cases = 0;
  int meet = 0;
  int apart_in_one_hull = 0;  // disjoint, but not by their ranges
  int hard = 0;               // no full answer without a bitmap
  int undecided = 0;          // not even whether they overlap
  int64_t most_nodes = 0;
};

void check(const View& a, const View& b, Tally& tally) {
  const Bytes of_a = bytes_of(a);
  const Bytes of_b = bytes_of(b);
  const std::string expected = oracle(of_a, of_b);
  const bool disjoint = expected == "disjoint 0";
  const OverlapAnswer answer = compare(a, b);
  ASSERT_EQ(text(answer), expected) << a << "\n" << b;

  const OverlapAnswer bare = compare(a, b, kNoBitmap);
  ASSERT_EQ(bare.bitmap_units, 0);
  if (bare.shared_bytes) {
    ASSERT_EQ(text(bare), expected) << a << "\n" << b;
  } else if (bare.relation == Relation::kOverlapping) {
    ASSERT_FALSE(disjoint) << a << "\n" << b;
  } else if (bare.relation == Relation::kFirstInSecond || bare.relation == Relation::kSecondInFirst) {
    ASSERT_EQ(expected.find(relation_name(bare.relation)), size_t{0}) << a << "\n" << b;
  } else if (bare.relation == Relation::kIdentical) {
    ASSERT_EQ(of_a, of_b) << a << "\n" << b;
  } else {
    ASSERT_EQ(bare.relation, Relation::kTooHard) << a << "\n" << b;
  }
  // Starved in several ways, it may know less, but nothing else: by runs listed, by runs of a bitmap, by a
  // bitmap too small for most, by a few nodes.
  for (const Budget& budget :
       {Budget{0, 0, 1 << 18}, Budget{0, 200, 64}, Budget{0, 60, 0}, Budget{3, 0, 0}}) {
    const OverlapAnswer starved = compare(a, b, budget);
    ASSERT_TRUE(!starved.shared_bytes || text(starved) == expected) << a << "\n" << b;
    ASSERT_TRUE(starved.relation != Relation::kOverlapping || !disjoint) << a << "\n" << b;
  }

  ++tally.cases;
  tally.meet += !disjoint;
  tally.apart_in_one_hull += disjoint && !of_a.empty() && !of_b.empty() && *of_a.begin() < *of_b.rbegin() &&
                             *of_b.begin() < *of_a.rbegin();
  tally.hard += !bare.shared_bytes;
  tally.undecided += bare.relation == Relation::kTooHard;
  tally.most_nodes = std::max(tally.most_nodes, bare.nodes);
}

// ---- Random regions ----

constexpr std::array<int64_t, 5> kItemsizes{1, 2, 4, 8, 16};

// Narrower elements over the same bytes, as view(dtype) makes them.
void narrow(View& view, Dice& dice) {
  while (view.itemsize > 1 && dice.one_in(2)) {
    view.itemsize /= 2;
    view.geometry.offset *= 2;
    for (int64_t& stride : view.geometry.strides) stride *= 2;
    view.geometry.sizes.push_back(2);
    view.geometry.strides.push_back(1);
  }
}

View random_view(const Ints& sizes, int64_t itemsize, Dice& dice) {
  View made{dense(sizes, last_dim_first(sizes.size()), 0), itemsize, 0};
  for (int64_t steps = dice.between(0, 6); steps > 0; --steps) take_view(made.geometry, dice);
  if (dice.one_in(4)) narrow(made, dice);
  return made;
}

TEST(RandomOverlap, views_of_one_storage_agree_with_oracle) {
  Dice dice(20271);
  Tally tally;

  for (int i = 0; i < 15'000; ++i) {
    const Ints sizes = random_sizes(dice, 0, 4, 6);
    const int64_t itemsize = kItemsizes[static_cast<size_t>(dice.between(0, 4))];
    const View a = random_view(sizes, itemsize, dice);
    const View b = random_view(sizes, itemsize, dice);
    ASSERT_NO_FATAL_FAILURE(check(a, b, tally));
  }

  EXPECT_EQ(tally.cases, 15'000);
  EXPECT_GT(tally.meet, 5'000);
  EXPECT_GT(tally.apart_in_one_hull, 400);
  EXPECT_LT(tally.hard, 30);
  EXPECT_EQ(tally.undecided, 0);
  RecordProperty("hard", tally.hard);
  EXPECT_LT(tally.most_nodes, 1'000);
}

TEST(RandomOverlap, arbitrary_strides_and_types_agree_with_oracle) {
  Dice dice(20272);
  Tally tally;

  for (int i = 0; i < 15'000; ++i) {
    std::array<View, 2> pair;
    for (View& each : pair) {
      each.geometry = {random_sizes(dice, 0, 4, 5), {}, dice.between(-20, 20)};
      const int64_t reach = dice.one_in(2) ? 8 : 60;
      for (size_t dim = 0; dim < each.geometry.sizes.size(); ++dim) {
        each.geometry.strides.push_back(dice.between(-reach, reach));
      }
      each.itemsize = dice.one_in(10) ? 3 : kItemsizes[static_cast<size_t>(dice.between(0, 3))];
      each.origin = dice.one_in(3) ? dice.between(-40, 40) : 0;
    }
    ASSERT_NO_FATAL_FAILURE(check(pair[0], pair[1], tally));
  }

  EXPECT_EQ(tally.cases, 15'000);
  EXPECT_GT(tally.meet, 4'000);
  EXPECT_GT(tally.apart_in_one_hull, 800);
  EXPECT_GT(tally.hard, 300) << "the generator no longer reaches the bitmap";
  EXPECT_EQ(tally.undecided, 0);
  EXPECT_LT(tally.most_nodes, 20'000);
}

// Long progressions of strides without a common order: every closed form of the search.
TEST(RandomOverlap, long_progressions_agree_with_oracle) {
  Dice dice(20273);
  Tally tally;

  for (int i = 0; i < 6'000; ++i) {
    std::array<View, 2> pair;
    const int64_t row = dice.between(20, 90);
    for (View& each : pair) {
      const int64_t other = dice.one_in(2) ? row : dice.between(20, 90);
      each.geometry = {{dice.between(1, 12), dice.between(1, 30)},
                       {other * dice.between(1, 3), dice.between(1, 3)},
                       dice.between(0, 100)};
      each.itemsize = kItemsizes[static_cast<size_t>(dice.between(0, 2))];
    }
    ASSERT_NO_FATAL_FAILURE(check(pair[0], pair[1], tally));
  }

  EXPECT_GT(tally.meet, 3'000);
  EXPECT_GT(tally.apart_in_one_hull, 200);
}

TEST(RandomCoverage, agrees_with_oracle) {
  Dice dice(20274);
  int exact_without_bitmap = 0;
  constexpr int kCases = 4'000;

  for (int i = 0; i < kCases; ++i) {
    const Ints sizes = random_sizes(dice, 1, 4, 6);
    const int64_t itemsize = kItemsizes[static_cast<size_t>(dice.between(0, 3))];
    std::vector<View> views;
    for (int64_t n = dice.between(0, 7); n > 0; --n) views.push_back(random_view(sizes, itemsize, dice));
    // Now and then a storage too short for them, and one that begins before it.
    int64_t nbytes = count_elements(sizes).value() * itemsize;
    if (dice.one_in(4)) nbytes = nbytes * 2 / 3;
    if (dice.one_in(4)) {
      for (View& each : views) each.origin -= dice.between(0, 9);
    }
    std::vector<Bytes> bytes;
    Bytes all;
    for (const View& each : views) {
      Bytes inside;
      for (const int64_t byte : bytes_of(each)) {
        if (byte >= 0 && byte < nbytes) inside.insert(byte);
      }
      all.insert(inside.begin(), inside.end());
      bytes.push_back(std::move(inside));
    }
    const auto reached = static_cast<int64_t>(all.size());

    // Each way in turn: lists of runs; none of these; bitmaps neither; nothing.
    const std::array<Budget, 4> budgets{Budget{}, Budget{1 << 17, 1 << 24, 0}, Budget{1 << 17, 0, 0},
                                        Budget{0, 0, 0}};
    for (size_t way = 0; way < budgets.size(); ++way) {
      const CoverageAnswer answer = cover(views, nbytes, budgets[way]);
      ASSERT_LE(answer.least, reached) << i << " way " << way;
      ASSERT_GE(answer.most, reached) << i << " way " << way;
      ASSERT_TRUE(way >= 2 || answer.bytes() == reached) << i << " way " << way;
      exact_without_bitmap += way == 2 && answer.bytes().has_value();
    }
    for (size_t index = 0; index < views.size(); ++index) {
      Bytes others;
      for (size_t j = 0; j < views.size(); ++j) {
        if (j != index) others.insert(bytes[j].begin(), bytes[j].end());
      }
      ASSERT_EQ(exclusive(views, index, nbytes), reached - static_cast<int64_t>(others.size())) << i;
    }
  }

  EXPECT_GT(exact_without_bitmap, kCases * 8 / 10);
}

// ---- Hand-made cases ----

struct Case {
  const char* name;
  View a;
  View b;
  const char* expected;
};

const std::vector<Case>& cases() {
  const int64_t million = 1'000'000;
  static const std::vector<Case> kCases{
      {"halves", view({4, 8}, {8, 1}, 0, 4), view({4, 8}, {8, 1}, 32, 4), "disjoint 0"},
      {"slices", view({6}, {1}, 0, 4), view({6}, {1}, 4, 4), "partial 8"},
      {"interleaved", view({5}, {2}, 0, 4), view({5}, {2}, 1, 4), "disjoint 0"},
      {"interleaved rows", view({5, 3}, {6, 1}), view({5, 3}, {6, 1}, 3), "disjoint 0"},
      {"transposed", view({3, 4}, {4, 1}), view({4, 3}, {1, 4}), "identical 12"},
      {"diagonal", view({5}, {6}, 0, 8), view({5, 5}, {5, 1}, 0, 8), "first_in_second 40"},
      {"expanded", view({9, 4}, {0, 1}, 0, 4), view({4}, {1}, 0, 4), "identical 16"},
      {"windows", view({8, 3}, {1, 1}, 0, 4), view({10}, {1}, 0, 4), "identical 40"},
      {"flipped", view({4}, {-1}, 3), view({4}, {1}), "identical 4"},
      {"scalar", view({}, {}, 3, 4), view({4}, {1}, 0, 4), "first_in_second 4"},
      {"empty", view({0, 3}, {3, 1}), view({9}, {1}), "disjoint 0"},
      {"both empty", view({0}, {1}), view({0}, {1}), "disjoint 0"},
      {"other type", view({4}, {1}, 0, 4), view({3}, {1}, 5, 1), "second_in_first 3"},
      {"real parts and imaginary parts", view({4}, {2}, 0, 4), view({4}, {2}, 1, 4), "disjoint 0"},
      {"real parts of complex", view({4}, {2}, 0, 4), view({4}, {1}, 0, 8), "first_in_second 16"},
      {"two storages over one buffer", view({8}, {1}, 0, 4, 1000), view({8}, {1}, 0, 4, 1016), "partial 16"},
      {"misaligned types", view({3}, {1}, 0, 4), view({2}, {1}, 0, 8, 2), "partial 10"},
      // Beyond any enumeration.
      {"10^9 floats", view({1000, million}, {million, 1}, 0, 4), view({million, 1000}, {1, million}, 0, 4),
       "identical 4000000000"},
      {"column blocks, apart", view({million, 500}, {1000, 1}, 0, 4), view({million, 500}, {1000, 1}, 500, 4),
       "disjoint 0"},
      {"column blocks, by 100", view({million, 600}, {1000, 1}, 0, 4),
       view({million, 500}, {1000, 1}, 500, 4), "partial 400000000"},
      {"block in a run", view({million, 600}, {1000, 1}, 7, 4), view({1000 * million}, {1}, 0, 4),
       "first_in_second 2400000000"},
      {"every second row and every third", view({500'000, 1000}, {2000, 1}), view({333'334, 1000}, {3000, 1}),
       "partial 166667000"},
      {"even and odd rows", view({500'000, 1000}, {2000, 1}), view({500'000, 1000}, {2000, 1}, 1000),
       "disjoint 0"},
      {"rows of 1000 and rows of 999", view({1000, 500}, {1000, 1}), view({1000, 500}, {999, 1}),
       "partial 250000"},
      {"every second of 10^9, every third row", view({500 * million}, {2}), view({333'334, 500}, {3000, 1}),
       "partial 83333500"},
      {"steps along three dimensions", view({1000, 500, 400}, {1'200'000, 2400, 3}),
       view({500, 1000, 600}, {2'400'000, 1200, 2}), "partial 50000000"},
      {"a diagonal and rows", view({million}, {million + 1}), view({million / 2, million}, {2 * million, 1}),
       "partial 500000"},
      {"batched diagonals and columns", view({64, 4096}, {1 << 24, 4097}, 0, 2),
       view({64, 4096, 2048}, {1 << 24, 4096, 1}, 0, 2), "partial 262144"},
      {"dilated windows and their source",
       view({64, 3, 109, 3, 109, 3}, {150'528, 50'176, 448, 672, 2, 3}, 0, 4),
       view({64, 3, 224, 224}, {150'528, 50'176, 224, 1}, 0, 4), "first_in_second 37509888"},
      {"windows of two steps", view({1 << 27, 3}, {2, 3}), view({1 << 28}, {1}, 1), "partial 268435455"},
  };
  return kCases;
}

TEST(Overlap, hand_made_case_is_exact) {
  for (const Case& each : cases()) {
    const OverlapAnswer answer = compare(each.a, each.b, kNoBitmap);
    EXPECT_EQ(text(answer), each.expected) << each.name;
    EXPECT_LT(answer.nodes, 3'000) << each.name;

    const std::string mirrored = text(compare(each.b, each.a, kNoBitmap));
    std::string expected = each.expected;
    if (expected.starts_with("first_in_second")) {
      expected.replace(0, 15, "second_in_first");
    } else if (expected.starts_with("second_in_first")) {
      expected.replace(0, 15, "first_in_second");
    }
    EXPECT_EQ(mirrored, expected) << each.name;
  }
}

TEST(Overlap, beyond_64_bits_is_too_hard) {
  const View small = view({4}, {1});

  EXPECT_EQ(text(compare(view({2}, {kMax}, 0, 2), small)), "too_hard ?");
  EXPECT_EQ(text(compare(view({2}, {kMin}), small)), "too_hard ?");
  EXPECT_EQ(text(compare(view({3}, {kMax}), small)), "too_hard ?");
  EXPECT_EQ(text(compare(view({4}, {1}, kMax, 4), small)), "too_hard ?");
  EXPECT_EQ(text(compare(view({4}, {1}, kMax, 1, kMax), small)), "too_hard ?");
  EXPECT_EQ(text(compare(view({4}, {-1}, kMin), small)), "too_hard ?");
  EXPECT_EQ(text(compare(view({kMax, kMax}, {1, kMax}), small)), "too_hard ?");
  EXPECT_EQ(text(compare(view({kMax, kMax}, {0, 0}), small)), "first_in_second 1");
  EXPECT_EQ(text(compare(view({0}, {kMin}, kMax, 8), small)), "disjoint 0");
  EXPECT_EQ(text(compare(view({1}, {kMin}), small)), "first_in_second 1");
  EXPECT_EQ(text(compare(view({int64_t{1} << 59}, {1}), view({int64_t{1} << 59}, {1}, 1))),
            "partial 576460752303423487");
}

TEST(Overlap, more_dimensions_than_any_array_has_is_answered) {
  // 25 dimensions of size 2, as a state of 25 qubits: dense in any order.
  Ints sizes(25, 2);
  Ints strides;
  for (int64_t dim = 0; dim < 25; ++dim) strides.push_back(int64_t{1} << (dim * 7 % 25));

  EXPECT_EQ(text(compare(view(sizes, strides, 0, 8), view({1 << 25}, {1}, 0, 8))), "identical 268435456");

  // One of two states fixed in each: nothing merges from there on.
  Ints wide(20, 2);
  Ints apart;
  int64_t stride = 1;
  for (int64_t dim = 0; dim < 20; ++dim, stride *= 3) apart.push_back(stride);
  EXPECT_EQ(text(compare(view(wide, apart), view({5}, {1}))), "too_hard ?");
}

TEST(Overlap, what_cannot_be_counted_is_still_known_to_overlap_or_not) {
  // Bytes of 3 steps that fold into each other, over 10^12: neither nested nor enumerable.
  const int64_t far = 1'000'003;
  const View folded = view({1000, 1000, 1000, 4}, {far * 6, far * 10, far * 15, 1}, 0, 4);
  const View shifted = view({1000, 1000, 1000, 4}, {far * 6, far * 10, far * 15, 1}, 500 * far + 2, 4);

  EXPECT_EQ(compare(folded, folded).relation, Relation::kIdentical);
  const OverlapAnswer near = compare(folded, view({1}, {1}, 31 * far, 4));
  EXPECT_TRUE(near.relation == Relation::kOverlapping) << text(near);
  const OverlapAnswer between = compare(folded, view({3}, {1}, 31 * far + 5, 4));
  EXPECT_EQ(text(between), "disjoint 0");
  const OverlapAnswer both = compare(folded, shifted);
  EXPECT_EQ(text(both), "overlapping ?");
}

// No answer may cost more than its budget, however the strides were chosen.
TEST(Overlap, work_is_bounded_for_hostile_strides) {
  Dice dice(20275);
  int too_hard = 0;
  const Budget budget;

  for (int i = 0; i < 300; ++i) {
    std::array<View, 2> pair;
    for (View& each : pair) {
      const int64_t dims = dice.between(2, 6);
      for (int64_t dim = 0; dim < dims; ++dim) {
        each.geometry.sizes.push_back(dice.between(2, 2'000'000));
        each.geometry.strides.push_back(dice.between(1, 1'000'000'000));
      }
      each.itemsize = kItemsizes[static_cast<size_t>(dice.between(0, 4))];
    }
    const OverlapAnswer answer = compare(pair[0], pair[1], budget);
    ASSERT_LE(answer.nodes, 2 * budget.nodes);
    ASSERT_LE(answer.bitmap_units, 4 * budget.bitmap_units);
    too_hard += answer.relation == Relation::kTooHard;
  }

  RecordProperty("too_hard", too_hard);
}

TEST(Coverage, nothing_reaches_nothing) {
  EXPECT_EQ(cover({}, 100).bytes(), 0);
  EXPECT_EQ(cover({view({0}, {1})}, 100).bytes(), 0);
  EXPECT_EQ(cover({view({4}, {1})}, 0).bytes(), 0);
}

TEST(Coverage, slices_and_their_source) {
  const View whole = view({10}, {1}, 0, 4);
  const View head = view({6}, {1}, 0, 4);
  const View tail = view({6}, {1}, 4, 4);

  EXPECT_EQ(cover({head}, 40).bytes(), 24);
  EXPECT_EQ(cover({head, tail}, 40).bytes(), 40);
  EXPECT_EQ(cover({head, tail, whole, head}, 40).bytes(), 40);
  EXPECT_EQ(exclusive({head, tail}, 0, 40), 16);
  EXPECT_EQ(exclusive({head, tail}, 1, 40), 16);
  EXPECT_EQ(exclusive({head, tail, whole}, 2, 40), 0);
  EXPECT_EQ(exclusive({head, head}, 0, 40), 0);
  EXPECT_EQ(exclusive({whole, head}, 0, 40), 16);
  EXPECT_EQ(exclusive({head}, 0, 40), 24);
}

TEST(Coverage, what_leaves_the_storage_is_not_counted) {
  EXPECT_EQ(cover({view({10}, {1}, 0, 4)}, 30).bytes(), 30);
  EXPECT_EQ(cover({view({10}, {1}, -2, 4)}, 100).bytes(), 32);
  EXPECT_EQ(cover({view({10}, {1}, 50, 4)}, 100).bytes(), 0);
  EXPECT_EQ(cover({view({1000, 1000, 10}, {100'000, 100, 1})}, 50'000'050).bytes(), 5'000'010);
}

TEST(Coverage, column_blocks_of_a_huge_matrix_are_exact) {
  // 10^7 rows of 1000 bytes: 10^7 runs each, and no bitmap of 10^10.
  const int64_t rows = 10'000'000;
  const int64_t nbytes = rows * 1000;
  const View left = view({rows, 300}, {1000, 1});
  const View middle = view({rows, 300}, {1000, 1}, 200);
  const View upper = view({rows / 2, 100}, {1000, 1}, 450);
  const View row = view({2500}, {1}, 1500);
  const View sparse = view({rows, 10}, {1000, 7}, 900);

  EXPECT_EQ(cover({left}, nbytes).bytes(), 300 * rows);
  EXPECT_EQ(cover({left, middle}, nbytes).bytes(), 500 * rows);
  EXPECT_EQ(cover({left, middle, upper}, nbytes).bytes(), 500 * rows + 50 * rows / 2);
  // Rows 1 and 4 in half, 2 and 3 whole: of the first two, the columns from 550 were missing, of the last
  // two none.
  EXPECT_EQ(cover({left, middle, upper, row}, nbytes).bytes(), 500 * rows + 50 * rows / 2 + 3 * 450);
  EXPECT_EQ(cover({left, middle, sparse}, nbytes).bytes(), 510 * rows);
  EXPECT_EQ(exclusive({left, middle, upper}, 0, nbytes), 200 * rows);
  EXPECT_EQ(exclusive({left, middle, upper}, 1, nbytes), 150 * rows + 50 * rows / 2);
}

TEST(Coverage, steps_that_share_no_row_are_exact) {
  const int64_t rows = 3'000'000;
  const View seconds = view({rows / 2, 1000}, {2000, 1});
  const View thirds = view({rows / 3, 1000}, {3000, 1});

  // By inclusion and exclusion: 1/2 + 1/3 - 1/6 of all.
  EXPECT_EQ(cover({seconds, thirds}, rows * 1000).bytes(), rows * 1000 * 2 / 3);
  EXPECT_EQ(exclusive({seconds, thirds}, 1, rows * 1000), rows * 1000 / 6);
}

TEST(Coverage, ten_thousand_regions_are_exact) {
  std::vector<View> views;
  for (int64_t i = 0; i < 10'000; ++i) views.push_back(view({16, 32}, {64, 1}, i * 1024, 4));

  EXPECT_EQ(cover(views, 10'000 * 4096).bytes(), 10'000 * 16 * 32 * 4);
  EXPECT_EQ(exclusive(views, 5'000, 10'000 * 4096), 16 * 32 * 4);

  for (View& each : views) each.geometry.offset /= 3;  // three times as thick
  const CoverageAnswer thick = cover(views, 10'000 * 4096);
  EXPECT_TRUE(thick.bytes()) << thick.least << " " << thick.most;
}

TEST(Coverage, what_is_too_hard_has_bounds) {
  // Five progressions without a common row, each three of which meet: 10^10 bytes, gcd 1.
  std::vector<View> views;
  for (const int64_t step : {99'991, 99'989, 99'971, 99'961, 99'929}) {
    views.push_back(view({100'000, 5'000}, {step, 1}));
  }

  const CoverageAnswer answer = cover(views, 10'000'000'000);

  EXPECT_EQ(answer.bytes(), std::nullopt);
  EXPECT_EQ(answer.least, 500'000'000);
  EXPECT_EQ(answer.most, 2'500'000'000);
  EXPECT_EQ(exclusive(views, 0, 10'000'000'000), std::nullopt);
}

TEST(Coverage, region_beyond_64_bits_leaves_all_possible) {
  const CoverageAnswer answer = cover({view({2}, {kMax}, 0, 4), view({5}, {1})}, 100);

  EXPECT_EQ(answer.least, 5);
  EXPECT_EQ(answer.most, 100);
  EXPECT_EQ(answer.bytes(), std::nullopt);
}

}  // namespace
}  // namespace tensorplay
