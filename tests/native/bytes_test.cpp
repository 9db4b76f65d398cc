// What elements hold, against ATen's own operators, on random views in memory that may be touched and in
// memory that may not.
#include "../../csrc/core/bytes.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "specimens.h"

namespace tensorplay {
namespace {

// Copies, and checks that only the bytes of one tensor are asked for.
class Fetcher {
 public:
  explicit Fetcher(const at::Tensor& tensor) {
    const TensorFacts facts = read(tensor);
    begin_ = static_cast<const std::byte*>(facts.data.pointer) + facts.first_byte().value();
    end_ = static_cast<const std::byte*>(facts.data.pointer) + facts.needed_nbytes().value();
  }
  Fetch fetch() {
    return [this](const std::byte* from, std::byte* to, size_t count) {
      EXPECT_TRUE(begin_ <= from && from + count <= end_);
      fetched += count;
      ++calls;
      std::memcpy(to, from, count);
    };
  }

  size_t fetched = 0;
  int calls = 0;

 private:
  const std::byte* begin_;
  const std::byte* end_;
};

const Fetch kNever = [](const std::byte*, std::byte*, size_t) {
  throw std::logic_error("memory of the allocator is touched");
};

std::tuple<int64_t, int64_t, int64_t> counted(const at::Tensor& tensor, const Fetch& fetch) {
  const std::optional<Nonfinite> sum = count_nonfinite(read(tensor), fetch);
  EXPECT_TRUE(sum);
  return {sum->nans, sum->infinities, sum->elements};
}

std::tuple<int64_t, int64_t, int64_t> expected(const at::Tensor& tensor) {
  return {at::isnan(tensor).sum().item<int64_t>(), at::isinf(tensor).sum().item<int64_t>(), tensor.numel()};
}

// The same bytes at the same place of a storage, but of memory nobody here knows.
at::Tensor borrowed(const at::Tensor& tensor) {
  const at::Storage& storage = tensor.storage();
  const auto count = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return at::from_blob(
             storage.mutable_data(), {count}, [storage](void*) {}, tensor.options())
      .as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

at::Tensor random_view(std::mt19937& dice, at::ScalarType type) {
  const auto roll = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(dice);
  };
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t last = roll(0, 5);
  const int64_t offset = last;
  for (int64_t dim = roll(0, 4); dim > 0; --dim) {
    sizes.push_back(roll(1, roll(0, 9) == 0 ? 400 : 6));
    strides.push_back(roll(0, 3) == 0 ? 0 : roll(1, 40));
    last += (sizes.back() - 1) * strides.back();
  }
  const int64_t cells = last + 1;
  at::Tensor values = at::randn({cells}, at::kDouble);
  values.masked_fill_(at::rand({cells}) < 0.1, std::numeric_limits<double>::quiet_NaN());
  values.masked_fill_(at::rand({cells}) < 0.1, -std::numeric_limits<double>::infinity());
  return values.to(type).as_strided(sizes, strides, offset);
}

TEST(CountNonfinite, agrees_with_aten_on_random_views) {
  std::mt19937 dice(7);
  for (int round = 0; round < 300; ++round) {
    for (const at::ScalarType type : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat}) {
      const at::Tensor view = random_view(dice, type);
      const at::Tensor foreign = borrowed(view);
      Fetcher fetcher(foreign);
      ASSERT_EQ(counted(view, kNever), expected(view)) << view.sizes() << view.strides();
      ASSERT_EQ(counted(foreign, fetcher.fetch()), expected(view)) << view.sizes() << view.strides();
    }
  }
}

TEST(CountNonfinite, long_runs_are_fetched_once_and_in_parts) {
  at::Tensor values = at::zeros({300'000});
  values.slice(0, 65'530, 65'545).fill_(std::numeric_limits<float>::infinity());
  values[299'999] = std::numeric_limits<float>::quiet_NaN();
  const at::Tensor foreign = borrowed(values);
  Fetcher fetcher(foreign);

  EXPECT_EQ(counted(foreign, fetcher.fetch()), std::tuple(1, 15, 300'000));
  EXPECT_EQ(fetcher.fetched, 1'200'000U);
  EXPECT_EQ(fetcher.calls, 5);
}

TEST(CountNonfinite, far_elements_are_fetched_alone_and_near_ones_together) {
  const at::Tensor foreign = borrowed(at::zeros({64, 100'000}));
  Fetcher far(foreign);
  Fetcher near(foreign);

  counted(foreign.select(1, 0), far.fetch());
  counted(foreign.select(0, 0).unflatten(0, {-1, 8}).slice(1, 0, 4), near.fetch());

  EXPECT_LT(far.fetched, 32'000U);
  EXPECT_LT(near.calls, 30);
}

TEST(CountNonfinite, expanded_elements_count_for_each_index) {
  const at::Tensor infinite = at::full({1, 2}, std::numeric_limits<double>::infinity());
  const int64_t many = int64_t{1} << 40;

  EXPECT_EQ(counted(infinite.expand({many, 2}), kNever), std::tuple(0, 2 * many, 2 * many));
}

TEST(CountNonfinite, what_fetching_throws_comes_through) {
  const at::Tensor foreign = borrowed(at::zeros({3}));

  EXPECT_THROW(count_nonfinite(read(foreign), kNever), std::logic_error);
  EXPECT_THROW(same_values(read(at::zeros({3})), read(foreign), kNever), std::logic_error);
  EXPECT_THROW(copy_bytes(read(foreign), read(at::empty({12}, at::kByte)), kNever), std::logic_error);
}

TEST(SameValues, agrees_with_aten_on_random_views) {
  std::mt19937 dice(8);
  for (int round = 0; round < 500; ++round) {
    const at::Tensor view = random_view(dice, at::kFloat);
    at::Tensor other =
        round % 2 == 0 ? view.clone() : view.flip({}).transpose(0, -1).contiguous().transpose(0, -1);
    const at::Tensor foreign = borrowed(view);
    Fetcher fetcher(foreign);
    ASSERT_EQ(same_values(read(view), read(other), kNever), true);
    ASSERT_EQ(same_values(read(foreign), read(other), fetcher.fetch()), true);

    const int64_t at = std::uniform_int_distribution<int64_t>(0, view.numel() - 1)(dice);
    other = view.contiguous().clone();
    other.view(-1)[at] = 12345.0F;
    ASSERT_EQ(same_values(read(other), read(foreign), fetcher.fetch()), false);
    ASSERT_EQ(same_values(read(view), read(other), kNever), false);
  }
}

TEST(CopyBytes, copies_from_the_first_to_the_last_byte) {
  const at::Tensor whole = at::randn({40});
  const at::Tensor view = whole.as_strided({3, 4}, {9, 2}, 5);
  const at::Tensor foreign = borrowed(view);
  Fetcher fetcher(foreign);
  const at::Tensor bytes = whole.slice(0, 5, 30).view(at::kByte);
  const at::Tensor target = at::zeros({100}, at::kByte);

  EXPECT_TRUE(copy_bytes(read(foreign), read(target), fetcher.fetch()));
  EXPECT_TRUE(at::equal(target, bytes));
  target.zero_();
  EXPECT_TRUE(copy_bytes(read(view), read(target), kNever));
  EXPECT_TRUE(at::equal(target, bytes));
}

TEST(CopyBytes, only_such_a_target_is_written) {
  const at::Tensor source = at::randn({4});

  for (const at::Tensor& target :
       {at::zeros({15}, at::kByte), at::zeros({17}, at::kByte), at::zeros({16}, at::kChar),
        at::zeros({32}, at::kByte).slice(0, 0, 32, 2), borrowed(at::zeros({16}, at::kByte)),
        at::zeros({1}, at::kByte).expand({16}), at::_lazy_clone(at::zeros({16}, at::kByte)),
        at::empty({16}, at::TensorOptions(at::kMeta).dtype(at::kByte))}) {
    EXPECT_FALSE(copy_bytes(read(source), read(target), kNever));
    if (target.is_cpu()) {
      EXPECT_EQ(target.sum().item<int64_t>(), 0);
    }
  }
  EXPECT_TRUE(copy_bytes(read(at::empty({0})), read(at::empty({0}, at::kByte)), kNever));
}

class BytesOf : public testing::TestWithParam<Recipe> {};

INSTANTIATE_TEST_SUITE_P(Read, BytesOf, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(BytesOf, only_strided_tensors_have_an_answer) {
  const Specimen specimen = GetParam().make();
  const TensorFacts facts = read(specimen.tensor);
  const Fetch copy = [](const std::byte* from, std::byte* to, size_t count) { std::memcpy(to, from, count); };

  const std::optional<Nonfinite> sum = count_nonfinite(facts, copy);

  if (facts.kind != Kind::kStrided || !facts.has_geometry()) {
    EXPECT_FALSE(sum);
  } else if (sum) {
    EXPECT_EQ(sum->elements, facts.impl.numel);
  }
  EXPECT_EQ(same_values(facts, facts, copy), sum ? std::optional(true) : std::nullopt);
}

}  // namespace
}  // namespace tensorplay
