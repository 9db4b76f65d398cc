// Chains of view operators: every operator by hand, then against a search of its own that tries all
// arguments.
//
// Links neither torch nor Python (the Makefile proves it). All randomness is seeded: a failure repeats.
#include "../../csrc/core/chain.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <map>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tensorplay {

// Found by GoogleTest, which looks in the namespace of the type alone.
static void print_ints(std::ostream& out, const char* name, const std::vector<int64_t>& values) {
  out << name << " {";
  for (const int64_t value : values) out << value << ", ";
  out << "} ";
}

static std::ostream& operator<<(std::ostream& out, const Geometry& geometry) {
  print_ints(out, "sizes", geometry.sizes);
  print_ints(out, "strides", geometry.strides);
  return out << "offset " << geometry.offset << " dtype " << geometry.element.dtype
             << geometry.element.is_conj << geometry.element.is_neg;
}

namespace {

using Ints = std::vector<int64_t>;
using Calls = std::vector<std::pair<ViewOp, Ints>>;

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr ElementType kFloat{0, 1, 4, false, false, false};
constexpr ElementType kComplex{1, 0, 8, true, false, false};
constexpr ElementType kConjugate{1, 0, 8, true, true, false};
constexpr ElementType kNegative{0, 1, 4, false, false, true};
constexpr ElementType kInt{2, -1, 4, false, false, false};
constexpr ElementType kByte{3, -1, 1, false, false, false};

Geometry contiguous(Ints sizes, ElementType element = kFloat) {
  Geometry made{sizes, sizes, 0, element};
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    made.strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  return made;
}

Calls calls_of(const ChainAnswer& answer) {
  Calls calls;
  for (const ChainStep& step : answer.steps) calls.emplace_back(step.op, step.args);
  return calls;
}

bool has_as_strided(const ChainAnswer& answer) {
  return std::any_of(answer.steps.begin(), answer.steps.end(),
                     [](const ChainStep& step) { return step.op == ViewOp::kAsStrided; });
}

// A long run: CHAIN_TARGETS=20000 CHAIN_COMPOSITIONS=100000 CHAIN_ONES=2 CHAIN_SEED=5.
int asked(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

// ---- Operators by hand ----

struct Case {
  Geometry base;
  Geometry target;
  Calls calls;
};

class OneCall : public testing::TestWithParam<Case> {};

TEST_P(OneCall, IsNamed) {
  const ChainAnswer answer = infer_chain(GetParam().base, GetParam().target);
  EXPECT_EQ(calls_of(answer), GetParam().calls) << GetParam().target;
  EXPECT_TRUE(answer.complete);
  if (answer.steps.empty()) return;
  EXPECT_EQ(answer.steps.back().result, GetParam().target);
}

const Geometry kCube = contiguous({4, 6, 5});
const Geometry kMatrix = contiguous({4, 6});
const Geometry kSignal = contiguous({4, 6}, kComplex);
const Geometry kSpectrum = contiguous({4, 6}, kConjugate);

INSTANTIATE_TEST_SUITE_P(
    Chain, OneCall,
    testing::Values(
        Case{kCube, kCube, {}}, Case{kCube, {{4, 5}, {30, 1}, 10, kFloat}, {{ViewOp::kSelect, {1, 2}}}},
        Case{kCube, {{4, 2, 5}, {30, 5, 1}, 15, kFloat}, {{ViewOp::kNarrow, {1, 3, 2}}}},
        Case{kCube, {{4, 3, 5}, {30, 10, 1}, 5, kFloat}, {{ViewOp::kSlice, {1, 1, 6, 2}}}},
        Case{kCube, {{4, 0, 5}, {30, 5, 1}, 15, kFloat}, {{ViewOp::kNarrow, {1, 3, 0}}}},
        Case{kCube, {{5, 6, 4}, {1, 5, 30}, 0, kFloat}, {{ViewOp::kTranspose, {0, 2}}}},
        Case{kMatrix, {{6, 4}, {1, 6}, 0, kFloat}, {{ViewOp::kT, {}}}},
        Case{kCube, {{5, 4, 6}, {1, 30, 5}, 0, kFloat}, {{ViewOp::kPermute, {2, 0, 1}}}},
        Case{kCube, {{3, 8, 5}, {40, 5, 1}, 0, kFloat}, {{ViewOp::kView, {3, 8, 5}}}},
        Case{kCube, {{4, 30}, {30, 1}, 0, kFloat}, {{ViewOp::kFlatten, {1, 2}}}},
        Case{kCube, {{4, 2, 3, 5}, {30, 15, 5, 1}, 0, kFloat}, {{ViewOp::kUnflatten, {1, 2, 3}}}},
        Case{kCube, {{4, 6, 1, 5}, {30, 5, 5, 1}, 0, kFloat}, {{ViewOp::kUnsqueeze, {2}}}},
        Case{{{1, 3, 1}, {9, 2, 7}, 0, kFloat}, {{3, 1}, {2, 7}, 0, kFloat}, {{ViewOp::kSelect, {0, 0}}}},
        Case{{{1, 3, 1}, {9, 2, 7}, 0, kFloat}, {{3}, {2}, 0, kFloat}, {{ViewOp::kSqueezeAll, {}}}},
        Case{{{4, 1}, {1, 1}, 0, kFloat}, {{4, 3}, {1, 0}, 0, kFloat}, {{ViewOp::kExpand, {4, 3}}}},
        Case{kMatrix, {{2, 4, 6}, {0, 6, 1}, 0, kFloat}, {{ViewOp::kExpand, {2, 4, 6}}}},
        Case{kMatrix, {{4}, {7}, 1, kFloat}, {{ViewOp::kDiagonal, {1, 0, 1}}}},
        Case{kMatrix, {{2}, {7}, 12, kFloat}, {{ViewOp::kDiagonal, {-2, 0, 1}}}},
        Case{kMatrix, {{4, 2, 4}, {6, 2, 1}, 0, kFloat}, {{ViewOp::kUnfold, {1, 4, 2}}}},
        Case{kSignal, {{4, 6}, {12, 2}, 0, kFloat}, {{ViewOp::kReal, {}}}},
        Case{kSignal, {{4, 6}, {12, 2}, 1, kFloat}, {{ViewOp::kImag, {}}}},
        Case{kSpectrum, {{4, 6}, {12, 2}, 1, kNegative}, {{ViewOp::kImag, {}}}},
        Case{kSpectrum, {{4, 6}, {12, 2}, 0, kFloat}, {{ViewOp::kReal, {}}}},
        Case{kSignal, kSpectrum, {{ViewOp::kConj, {}}}},
        Case{kSignal, {{4, 6, 2}, {12, 2, 1}, 0, kFloat}, {{ViewOp::kViewAsReal, {}}}},
        Case{contiguous({3, 2}), contiguous({3}, kComplex), {{ViewOp::kViewAsComplex, {}}}},
        Case{kMatrix, contiguous({4, 6}, kInt), {{ViewOp::kViewDtype, {2, -1, 4, 0}}}},
        Case{kMatrix, contiguous({4, 24}, kByte), {{ViewOp::kViewDtype, {3, -1, 1, 0}}}},
        Case{kMatrix, contiguous({4, 3}, kComplex), {{ViewOp::kViewDtype, {1, 0, 8, 1}}}},
        Case{contiguous({}), {{1, 1}, {1, 1}, 0, kFloat}, {{ViewOp::kView, {1, 1}}}},
        Case{contiguous({}), {{3}, {0}, 0, kFloat}, {{ViewOp::kExpand, {3}}}},
        Case{contiguous({2, 0, 3}), {{0, 7}, {7, 1}, 0, kFloat}, {{ViewOp::kView, {0, 7}}}}));

TEST(Chain, ShortestOfSeveralIsTaken) {
  const Geometry target{{2, 3}, {1, 12}, 14, kFloat};  // base[1:4, 2:4].t() of a matrix of 12 columns
  const ChainAnswer answer = infer_chain(contiguous({8, 12}), target);
  EXPECT_EQ(calls_of(answer),
            (Calls{{ViewOp::kNarrow, {0, 1, 3}}, {ViewOp::kNarrow, {1, 2, 2}}, {ViewOp::kT, {}}}));
}

TEST(Chain, TypeThatChangesOnTheWayIsNamed) {
  const Geometry target{{3}, {2}, 13, kFloat};  // base[1, :3].imag
  const ChainAnswer answer = infer_chain(kSignal, target);
  EXPECT_EQ(calls_of(answer),
            (Calls{{ViewOp::kSelect, {0, 1}}, {ViewOp::kNarrow, {0, 0, 3}}, {ViewOp::kImag, {}}}));
}

TEST(Chain, CellOutsideOfTheBaseIsRuledOut) {
  const ChainAnswer answer = infer_chain(contiguous({4}), {{4}, {1}, 1, kFloat});
  EXPECT_TRUE(has_as_strided(answer));
  EXPECT_TRUE(answer.complete);
  EXPECT_EQ(answer.ruled_out, 4);
}

TEST(Chain, AnotherTypeIsReachedBeforeAsStrided) {
  const ChainAnswer same_width = infer_chain(contiguous({4}), {{4}, {1}, 1, kInt});
  EXPECT_EQ(calls_of(same_width), (Calls{{ViewOp::kViewDtype, {2, -1, 4, 0}}, {ViewOp::kAsStrided, {1}}}));

  const ChainAnswer scalar = infer_chain(contiguous({}), {{3}, {1}, 2, kByte});
  EXPECT_EQ(
      calls_of(scalar),
      (Calls{{ViewOp::kAsStrided, {0}}, {ViewOp::kViewDtype, {3, -1, 1, 0}}, {ViewOp::kAsStrided, {2}}}));
}

TEST(Chain, CutSearchSaysSo) {
  const ChainAnswer answer = infer_chain(contiguous({6, 6}), {{2, 2, 2}, {1, 3, 6}, 2, kFloat}, 4, 50);
  EXPECT_TRUE(has_as_strided(answer));
  EXPECT_FALSE(answer.complete);
  EXPECT_LT(answer.ruled_out, 4);
}

TEST(Chain, ExtremeNumbersEndInAnAnswer) {
  const Ints values{0, 1, 2, kMax / 2, kMax - 1, kMax};
  for (const int64_t size : values) {
    for (const int64_t stride : values) {
      for (const int64_t offset : values) {
        const Geometry odd{{size, 3}, {stride, 1}, offset, kFloat};
        EXPECT_LE(infer_chain(contiguous({4, 4}), odd).steps.size(), 4U);
        EXPECT_LE(infer_chain(odd, contiguous({4, 4})).steps.size(), 4U);
        EXPECT_LE(infer_chain(odd, {{size}, {stride}, offset, kComplex}).steps.size(), 4U);
      }
    }
  }
}

TEST(Chain, NegativeStridesAndMismatchedLengthsAreNotSearched) {
  for (const Geometry& odd : {Geometry{{2}, {-1}, 1, kFloat}, Geometry{{2}, {1, 1}, 0, kFloat},
                              Geometry{{2}, {1}, -1, kFloat}, Geometry{{-2}, {1}, 0, kFloat}}) {
    const ChainAnswer answer = infer_chain(contiguous({2}), odd);
    EXPECT_TRUE(has_as_strided(answer));
    EXPECT_FALSE(answer.complete);
  }
}

// ---- An independent search: its own operators, all arguments, forward from the base ----

struct Wide {
  Ints sizes;
  Ints strides;
  int64_t offset = 0;
  int kind = 0;  // 0 real, 1 complex, 2 conjugate, 3 negative
};

Wide wide(const Geometry& geometry) {
  const ElementType& element = geometry.element;
  const int kind = element.is_complex ? (element.is_conj ? 2 : 1) : (element.is_neg ? 3 : 0);
  return {geometry.sizes, geometry.strides, geometry.offset, kind};
}

Geometry narrow(const Wide& state) {
  constexpr ElementType kinds[]{kFloat, kComplex, kConjugate, kNegative};
  return {state.sizes, state.strides, state.offset, kinds[state.kind]};
}

// The same information in one string: what the search has seen.
std::string key(const Wide& state) {
  std::string text = std::to_string(state.kind) + "@" + std::to_string(state.offset);
  for (size_t i = 0; i < state.sizes.size(); ++i) {
    text += ' ' + std::to_string(state.sizes[i]) + ':' + std::to_string(state.strides[i]);
  }
  return text;
}

int64_t product(const Ints& values) {
  int64_t count = 1;
  for (const int64_t value : values) count *= value;
  return count;
}

Wide dropped(Wide state, size_t dim) {
  state.sizes.erase(state.sizes.begin() + static_cast<ptrdiff_t>(dim));
  state.strides.erase(state.strides.begin() + static_cast<ptrdiff_t>(dim));
  return state;
}

// Each old index has a cell; the new strides must lead to the same cells in the same order. A dimension of
// size 1 takes the stride of the memory it stands in: past the dimensions behind it of the same old run.
std::optional<Wide> reshaped(const Wide& state, const Ints& sizes) {
  Wide made = state;
  made.sizes = sizes;
  made.strides.assign(sizes.size(), 1);
  if (state.sizes.empty()) return made;
  // Old dimensions, split into runs from the back, each as (elements, stride of its last).
  std::vector<std::pair<int64_t, int64_t>> runs{{state.sizes.back(), state.strides.back()}};
  for (size_t i = state.sizes.size() - 1; i-- > 0;) {
    const bool follows = state.sizes[i] == 1 || state.strides[i] == runs.back().first * runs.back().second;
    if (follows) {
      runs.back().first *= state.sizes[i];
    } else {
      runs.emplace_back(state.sizes[i], state.strides[i]);
    }
  }
  size_t run = 0;
  int64_t filled = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (filled == runs[run].first && sizes[i] != 1 && run + 1 < runs.size()) {
      ++run;
      filled = 1;
    }
    made.strides[i] = filled * runs[run].second;
    filled *= sizes[i];
    if (runs[run].first % filled != 0) return std::nullopt;
  }
  if (filled != runs[run].first) return std::nullopt;
  for (++run; run < runs.size(); ++run) {
    if (runs[run].first != 1) return std::nullopt;
  }
  return made;
}

void factorizations(int64_t count, int ones, Ints& head, std::vector<Ints>& out) {
  if (count == 1) out.push_back(head);
  if (head.size() >= 5) return;
  for (int64_t factor = 1; factor <= count; ++factor) {
    if (count % factor != 0 || (factor == 1 && ones == 0)) continue;
    head.push_back(factor);
    factorizations(count / factor, ones - (factor == 1 ? 1 : 0), head, out);
    head.pop_back();
  }
}

class BruteForce {
 public:
  BruteForce(const Geometry& base, int ones, size_t most_dims) : ones_(ones), most_dims_(most_dims) {
    level_.push_back(wide(base));
    depth_[key(level_[0])] = 0;
  }

  void deepen() {
    ++reached_;
    std::vector<Wide> next;
    for (const Wide& state : level_) {
      grow(state, [&](Wide made) {
        if (made.sizes.size() > most_dims_) return;
        if (depth_.emplace(key(made), reached_).second) next.push_back(std::move(made));
      });
    }
    level_.swap(next);
  }

  std::vector<Wide> successors(const Wide& state) const {
    std::vector<Wide> all;
    grow(state, [&](Wide made) {
      if (made.sizes.size() <= most_dims_) all.push_back(std::move(made));
    });
    return all;
  }

  size_t size() const { return depth_.size(); }
  const std::vector<Wide>& level() const { return level_; }
  std::optional<int> depth(const Geometry& geometry) const {
    const auto found = depth_.find(key(wide(geometry)));
    return found == depth_.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  template <class Take>
  void grow(const Wide& state, Take take) const {
    const size_t dims = state.sizes.size();
    for (size_t d = 0; d < dims; ++d) {
      const int64_t size = state.sizes[d];
      const int64_t stride = state.strides[d];
      for (int64_t i = 0; i < size; ++i) {
        Wide made = dropped(state, d);
        made.offset += i * stride;
        take(made);
      }
      for (int64_t start = 0; start < size; ++start) {
        for (int64_t end = start + 1; end <= size; ++end) {
          for (int64_t step = 1; step == 1 || step < end - start; ++step) {
            Wide made = state;
            made.offset += start * stride;
            made.sizes[d] = (end - start + step - 1) / step;
            made.strides[d] *= step;
            take(made);
          }
        }
      }
      if (size == 1) take(dropped(state, d));
      for (int64_t window = 1; window <= size; ++window) {
        for (int64_t step = 1; step <= size - window + 1; ++step) {
          Wide made = state;
          made.sizes[d] = (size - window) / step + 1;
          made.strides[d] *= step;
          made.sizes.push_back(window);
          made.strides.push_back(stride);
          take(made);
        }
      }
      for (size_t e = 0; e < dims; ++e) {
        if (e == d) continue;
        for (int64_t shift = 0; shift < state.sizes[e]; ++shift) {
          Wide made = dropped(dropped(state, std::max(d, e)), std::min(d, e));
          made.offset += shift * state.strides[e];
          made.sizes.push_back(std::min(size, state.sizes[e] - shift));
          made.strides.push_back(stride + state.strides[e]);
          take(made);
        }
      }
    }
    if (dims == 0) take({{1}, {1}, state.offset, state.kind});
    grow_orders(state, take);
    grow_ones(state, take);
    std::vector<Ints> shapes;
    Ints head;
    factorizations(product(state.sizes), ones_, head, shapes);
    for (const Ints& shape : shapes) {
      if (const auto made = reshaped(state, shape)) take(*made);
    }
    grow_types(state, take);
  }

  template <class Take>
  void grow_orders(const Wide& state, Take take) const {
    std::vector<size_t> order(state.sizes.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    while (std::next_permutation(order.begin(), order.end())) {
      Wide made = state;
      for (size_t i = 0; i < order.size(); ++i) {
        made.sizes[i] = state.sizes[order[i]];
        made.strides[i] = state.strides[order[i]];
      }
      take(made);
    }
  }

  template <class Take>
  void grow_ones(const Wide& state, Take take) const {
    const auto ones = std::count(state.sizes.begin(), state.sizes.end(), 1);
    const size_t dims = state.sizes.size();
    for (size_t d = 0; ones < ones_ && d <= dims; ++d) {
      Wide made = state;
      made.sizes.insert(made.sizes.begin() + static_cast<ptrdiff_t>(d), 1);
      const int64_t stride = d < dims ? state.sizes[d] * state.strides[d] : 1;
      made.strides.insert(made.strides.begin() + static_cast<ptrdiff_t>(d), stride);
      take(made);
    }
    Wide bare = state;
    for (size_t d = dims; d-- > 0;) {
      if (bare.sizes[d] == 1) bare = dropped(bare, d);
    }
    take(bare);
    // expand: every one kept or stretched to 2 or 3, then up to two new dimensions of 1 to 3.
    std::vector<Wide> open{state};
    for (size_t d = 0; d < dims; ++d) {
      if (state.sizes[d] != 1) continue;
      const size_t known = open.size();
      for (size_t k = 0; k < known; ++k) {
        for (const int64_t size : {2, 3}) {
          open.push_back(open[k]);
          open.back().sizes[d] = size;
          open.back().strides[d] = 0;
        }
      }
    }
    for (size_t begin = 0, front = 0; front < 2; ++front) {
      const size_t end = open.size();
      for (size_t k = begin; k < end; ++k) {
        if (open[k].sizes.size() >= most_dims_) continue;
        for (const int64_t size : {1, 2, 3}) {
          Wide made = open[k];
          const bool scalar = dims == 0;
          const int64_t stride = size > 1 || scalar ? 0 : made.sizes[0] * made.strides[0];
          made.sizes.insert(made.sizes.begin(), size);
          made.strides.insert(made.strides.begin(), stride);
          open.push_back(made);
        }
      }
      begin = end;
    }
    for (const Wide& made : open) take(made);
  }

  template <class Take>
  void grow_types(const Wide& state, Take take) const {
    const bool complex = state.kind == 1 || state.kind == 2;
    if (complex) {
      Wide made = state;
      made.kind = 3 - state.kind;
      take(made);
      made = state;
      for (int64_t& stride : made.strides) stride *= 2;
      made.offset *= 2;
      made.kind = 0;
      take(made);
      Wide both = made;
      ++made.offset;
      made.kind = state.kind == 2 ? 3 : 0;
      take(made);
      if (state.kind == 2) return;
      both.sizes.push_back(2);
      both.strides.push_back(1);
      take(both);
    } else if (state.kind == 0 && !state.sizes.empty() && state.sizes.back() == 2 &&
               state.strides.back() == 1) {
      Wide made = dropped(state, state.sizes.size() - 1);
      bool even = made.offset % 2 == 0;
      for (int64_t& stride : made.strides) {
        even = even && stride % 2 == 0;
        stride /= 2;
      }
      made.offset /= 2;
      made.kind = 1;
      if (even) take(made);
    }
  }

  int ones_;
  size_t most_dims_;
  int reached_ = 0;
  std::vector<Wide> level_;
  std::unordered_map<std::string, int> depth_;
};

struct Tally {
  int targets = 0;
  int chains = 0;
  int proven_none = 0;
  int cut = 0;
  int longer_though_cut = 0;
};

// `depth`: the length of the shortest chain that the brute force knows, if any.
void check(const Geometry& base, const Geometry& target, std::optional<int> depth, Tally& tally) {
  const ChainAnswer answer = infer_chain(base, target);
  ++tally.targets;
  const bool none = has_as_strided(answer);
  const int length = static_cast<int>(answer.steps.size());
  if (!none) {
    ++tally.chains;
    if (length > 0) {
      ASSERT_EQ(answer.steps.back().result, target) << "from " << base;
    }
    if (!depth) return;  // further than the brute force went, or with arguments it does not try
  }
  if (!answer.complete) {
    ++tally.cut;
    if (depth && (none || *depth < length)) ++tally.longer_though_cut;
    return;
  }
  if (none) {
    ++tally.proven_none;
    ASSERT_FALSE(depth) << "no chain for " << target << " from " << base << ", brute force has " << *depth;
  } else if (depth) {
    ASSERT_LE(length, *depth) << target << " from " << base;
  }
}

class Minimal : public testing::TestWithParam<Case> {};

TEST_P(Minimal, NoChainIsShorterThanTheInferredOne) {
  const Geometry& base = GetParam().base;
  BruteForce all(base, asked("CHAIN_ONES", 1), 4);
  const int targets = asked("CHAIN_TARGETS", 400);
  std::mt19937 random(static_cast<unsigned>(asked("CHAIN_SEED", 7)));
  Tally tally;
  const int depth = static_cast<int>(GetParam().target.offset);
  for (int reached = 1; reached <= depth; ++reached) {
    all.deepen();
    std::vector<Wide> sample;
    std::sample(all.level().begin(), all.level().end(), std::back_inserter(sample), targets, random);
    for (const Wide& state : sample) {
      const Geometry target = narrow(state);
      EXPECT_NO_FATAL_FAILURE(check(base, target, reached, tally));
    }
  }
  const auto pick = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  for (int i = 0; i < 2 * targets; ++i) {
    Geometry target{{}, {}, pick(0, 3), base.element};
    for (int64_t dims = pick(0, 3); dims > 0; --dims) {
      target.sizes.push_back(pick(pick(1, 2), 3));
      target.strides.push_back(pick(0, 5));
    }
    EXPECT_NO_FATAL_FAILURE(check(base, target, all.depth(target), tally));
  }
  std::cout << "reached " << all.size() << ", targets " << tally.targets << ", chains " << tally.chains
            << ", proven none " << tally.proven_none << ", cut " << tally.cut << ", longer though cut "
            << tally.longer_though_cut << "\n";
}

// The target's offset: to which depth all chains are tried.
INSTANTIATE_TEST_SUITE_P(Chain, Minimal,
                         testing::Values(Case{contiguous({}), {{}, {}, 4, kFloat}, {}},
                                         Case{contiguous({4}), {{}, {}, 4, kFloat}, {}},
                                         Case{contiguous({2, 3}), {{}, {}, 3, kFloat}, {}},
                                         Case{contiguous({6}), {{}, {}, 3, kFloat}, {}},
                                         Case{contiguous({2, 2, 2}), {{}, {}, 3, kFloat}, {}},
                                         Case{{{3, 2}, {1, 3}, 0, kFloat}, {{}, {}, 3, kFloat}, {}},
                                         Case{{{3, 3}, {1, 1}, 0, kFloat}, {{}, {}, 3, kFloat}, {}},
                                         Case{{{2, 3, 2}, {1, 2, 10}, 0, kFloat}, {{}, {}, 2, kFloat}, {}},
                                         Case{{{2, 3}, {0, 1}, 0, kFloat}, {{}, {}, 3, kFloat}, {}},
                                         Case{contiguous({2, 2}, kComplex), {{}, {}, 3, kFloat}, {}},
                                         Case{contiguous({3}, kConjugate), {{}, {}, 3, kFloat}, {}}));

TEST(Chain, RandomCompositionsAreReproducedAndNeverLonger) {
  const int compositions = asked("CHAIN_COMPOSITIONS", 10'000);
  const std::vector<Geometry> bases{contiguous({}),
                                    contiguous({7}),
                                    contiguous({4, 6}),
                                    contiguous({2, 3, 4}),
                                    contiguous({2, 2, 3}),
                                    {{4, 3}, {1, 4}, 2, kFloat},
                                    {{3, 4}, {2, 1}, 0, kFloat},
                                    {{3, 1, 4}, {0, 7, 2}, 1, kFloat},
                                    contiguous({3, 4}, kComplex),
                                    contiguous({2, 5}, kConjugate)};
  std::mt19937 random(static_cast<unsigned>(asked("CHAIN_SEED", 11)));
  int as_strided = 0;
  int complete = 0;
  std::vector<double> times;
  for (int i = 0; i < compositions; ++i) {
    const Geometry& base = bases[random() % bases.size()];
    const BruteForce operators(base, 2, 5);
    const int length = 1 + static_cast<int>(random() % 5);
    Wide state = wide(base);
    std::string composed;
    for (int made = 0; made < length; ++made) {
      const std::vector<Wide> next = operators.successors(state);
      state = next[random() % next.size()];
      composed += " -> " + key(state);
    }
    const Geometry target = narrow(state);

    const auto begin = std::chrono::steady_clock::now();
    const ChainAnswer answer = infer_chain(base, target, 4, 10'000);
    times.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());

    if (!answer.steps.empty()) {
      ASSERT_EQ(answer.steps.back().result, target) << "from " << base;
    }
    as_strided += has_as_strided(answer) ? 1 : 0;
    complete += answer.complete ? 1 : 0;
    if (answer.complete && length <= 4) {
      ASSERT_FALSE(has_as_strided(answer)) << base << composed;
      ASSERT_LE(static_cast<int>(answer.steps.size()), length) << base << composed;
    }
  }
  std::sort(times.begin(), times.end());
  std::cout << "as_strided " << as_strided << ", complete " << complete << " of " << compositions
            << "; median " << times[times.size() / 2] << " us, longest " << times.back() << " us\n";
}

}  // namespace
}  // namespace tensorplay
