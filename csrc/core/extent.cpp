#include "extent.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "bitmap.h"

namespace tensorplay {
namespace {

struct Dim {
  int64_t size;
  int64_t stride;  // magnitude: reflecting a dimension moves its cells, their number stays
};

bool is_empty(DimSpan sizes) {
  return std::any_of(sizes.begin(), sizes.end(), [](int64_t n) { return n == 0; });
}

// The smallest number has no magnitude in 64 bits, and no storage is so long.
bool has_unmeasurable_stride(DimSpan sizes, DimSpan strides) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides[i] == std::numeric_limits<int64_t>::min()) return true;
  }
  return false;
}

// Dimensions that move, smallest stride first. On the stack up to 16 of them.
class MovingDims {
 public:
  MovingDims(DimSpan sizes, DimSpan strides) {
    if (sizes.size() > near_.size()) far_.resize(sizes.size());
    Dim* const dims = far_.empty() ? near_.data() : far_.data();
    size_t count = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] > 1 && strides[i] != 0) dims[count++] = {sizes[i], std::abs(strides[i])};
    }
    dims_ = {dims, count};
    std::sort(dims_.begin(), dims_.end(), [](const Dim& a, const Dim& b) { return a.stride < b.stride; });
  }
  MovingDims(const MovingDims&) = delete;  // dims_ points into near_
  MovingDims& operator=(const MovingDims&) = delete;

  auto begin() const { return dims_.begin(); }
  auto end() const { return dims_.end(); }

 private:
  std::array<Dim, 16> near_;
  std::vector<Dim> far_;
  std::span<Dim> dims_;
};

bool follows_order(DimSpan sizes, DimSpan strides, std::span<const size_t> fastest_first) {
  int64_t expected = 1;
  for (const size_t dim : fastest_first) {
    if (sizes[dim] == 1) continue;
    if (strides[dim] != expected) return false;
    expected *= sizes[dim];
  }
  return true;
}

}  // namespace

std::optional<int64_t> count_elements(DimSpan sizes) {
  if (is_empty(sizes)) return 0;
  int64_t count = 1;
  for (const int64_t n : sizes) {
    if (__builtin_mul_overflow(count, n, &count)) return std::nullopt;
  }
  return count;
}

std::optional<CellRange> cell_range(DimSpan sizes, DimSpan strides, int64_t offset) {
  if (is_empty(sizes)) return CellRange{offset, offset};
  CellRange range{offset, offset};
  for (size_t i = 0; i < sizes.size(); ++i) {
    int64_t step = 0;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step)) return std::nullopt;
    int64_t& side = step < 0 ? range.begin : range.end;
    if (__builtin_add_overflow(side, step, &side)) return std::nullopt;
  }
  if (__builtin_add_overflow(range.end, 1, &range.end)) return std::nullopt;
  return range;
}

std::optional<int64_t> distinct_cells(DimSpan sizes, DimSpan strides, int64_t max_cells) {
  if (is_empty(sizes)) return 0;
  if (has_unmeasurable_stride(sizes, strides)) return std::nullopt;
  const MovingDims dims(sizes, strides);
  int64_t unit = 0;
  for (const Dim& dim : dims) unit = std::gcd(unit, dim.stride);

  // While the cells so far form one unbroken run, a stride within it only lengthens the run; a stride past
  // all of them makes separate copies. What is neither needs the bitmap.
  int64_t count = 1;
  int64_t extent = 1;
  bool easy = true;
  for (Dim& dim : dims) {
    dim.stride /= unit;
    int64_t step = 0;
    if (__builtin_mul_overflow(dim.size - 1, dim.stride, &step)) return std::nullopt;
    const bool run = count == extent;
    const bool within = dim.stride <= extent;
    if (__builtin_add_overflow(extent, step, &extent)) return std::nullopt;
    if (within && run && dim.stride <= count) {
      count = extent;
    } else if (!within || dim.stride == extent - step) {
      if (__builtin_mul_overflow(count, dim.size, &count)) return std::nullopt;
    } else {
      easy = false;
    }
  }
  if (easy) return count;
  if (extent > max_cells) return std::nullopt;
  Bitmap cells(extent);
  cells.set_run(0, 1);
  for (const Dim& dim : dims) cells.repeat(dim.size, dim.stride);
  return cells.count();
}

bool is_contiguous(DimSpan sizes, DimSpan strides) {
  const std::optional<int64_t> count = count_elements(sizes);
  if (count == 0) return true;
  if (!count) return false;
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

MemoryFormat memory_format(DimSpan sizes, DimSpan strides) {
  if (!count_elements(sizes) || has_unmeasurable_stride(sizes, strides)) return MemoryFormat::kStrided;
  if (is_contiguous(sizes, strides)) return MemoryFormat::kContiguous;
  constexpr std::array<size_t, 4> kNhwc{1, 3, 2, 0};
  constexpr std::array<size_t, 5> kNdhwc{1, 4, 3, 2, 0};
  if (sizes.size() == 4 && follows_order(sizes, strides, kNhwc)) return MemoryFormat::kChannelsLast;
  if (sizes.size() == 5 && follows_order(sizes, strides, kNdhwc)) return MemoryFormat::kChannelsLast3d;
  int64_t expected = 1;
  for (const Dim& dim : MovingDims(sizes, strides)) {
    if (dim.stride != expected) return MemoryFormat::kStrided;
    expected *= dim.size;
  }
  return count_elements(sizes) == expected ? MemoryFormat::kPermuted : MemoryFormat::kStrided;
}

}  // namespace tensorplay
