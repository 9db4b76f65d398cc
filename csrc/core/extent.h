// Which cells of a storage do these sizes, strides and offset reach?
//
// Pure integers: no torch, no Python, no I/O. A cell is one element slot of the storage; all answers are
// exact, or absent where finding them would cost too much. Sums that leave 64 bits are answered as absent
// too.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace tensorplay {

using DimSpan = std::span<const int64_t>;

// Half-open range of cells between the lowest and the highest one reached; empty when begin == end.
struct CellRange {
  int64_t begin = 0;
  int64_t end = 0;
};

enum class MemoryFormat : uint8_t {
  kContiguous,      // row-major
  kChannelsLast,    // 4 dims, NHWC in memory
  kChannelsLast3d,  // 5 dims, NDHWC in memory
  kPermuted,        // dense and free of overlap, in another order of the dimensions
  kStrided,         // leaves gaps or overlaps itself
};

// Beyond this many cells distinct_cells() does not enumerate (a bit a cell: 2 MiB, tens of milliseconds).
inline constexpr int64_t kMaxEnumeratedCells = int64_t{1} << 24;

// The number of elements, or absent when it leaves 64 bits.
std::optional<int64_t> count_elements(DimSpan sizes);

std::optional<CellRange> cell_range(DimSpan sizes, DimSpan strides, int64_t offset);

// Number of different cells reached. O(dims log dims) for what views, expand and unfold make; otherwise a
// bitmap.
std::optional<int64_t> distinct_cells(DimSpan sizes, DimSpan strides,
                                      int64_t max_cells = kMaxEnumeratedCells);

bool is_contiguous(DimSpan sizes, DimSpan strides);

MemoryFormat memory_format(DimSpan sizes, DimSpan strides);

}  // namespace tensorplay
