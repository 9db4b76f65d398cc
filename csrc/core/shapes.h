// Shapes worth a view on the way to a target.
//
// Pure integers: no torch, no Python, no I/O. Only proposals: whether a shape can be viewed is for apply() to
// say, and what is proposed twice does no harm.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "view_ops.h"

namespace tensorplay {

// A few different numbers, in the order in which they came.
class Few {
 public:
  void add(int64_t value) {
    if (count_ == values_.size() || std::find(begin(), end(), value) != end()) return;
    values_[count_++] = value;
  }
  void add_between(int64_t value, int64_t least, int64_t most) {
    if (value >= least && value <= most) add(value);
  }
  const int64_t* begin() const { return values_.data(); }
  const int64_t* end() const { return values_.data() + count_; }
  bool empty() const { return count_ == 0; }

 private:
  std::array<int64_t, 48> values_;
  size_t count_ = 0;
};

struct Shape {
  int count = 0;
  std::array<int64_t, kMaxViewDims> sizes;

  void push(int64_t size) {
    if (count < kMaxViewDims) sizes[count++] = size;
  }
  Shape with(int at, int64_t size) const {
    Shape shape;
    for (int i = 0; i <= count; ++i) {
      if (i == at) shape.push(size);
      if (i < count) shape.push(sizes[i]);
    }
    return shape;
  }
  Shape without(int at) const {
    Shape shape;
    for (int i = 0; i < count; ++i) {
      if (i != at) shape.push(sizes[i]);
    }
    return shape;
  }
  std::span<const int64_t> values() const { return {sizes.data(), static_cast<size_t>(count)}; }
  friend bool operator==(const Shape& a, const Shape& b) {
    return std::equal(a.sizes.begin(), a.sizes.begin() + a.count, b.sizes.begin(), b.sizes.begin() + b.count);
  }
};

Shape shape_of(const View& view);

// A stride of the target in elements of the state; absent where it is no whole number of them.
std::optional<int64_t> target_stride(const View& target, const View& state, int dim);

// From which one more call can lead to the target's shape.
void shapes_before_last(const View& state, const View& target, std::vector<Shape>& shapes);

// Every shape without ones. For few elements.
void shapes_by_factors(const View& state, std::vector<Shape>& shapes);

// Runs of dimensions whole, as they are, or cut where the target's strides and sizes suggest.
void shapes_by_target(const View& state, const View& target, std::vector<Shape>& shapes);

// Each shape again with up to so many ones in it.
void add_ones(int most, std::vector<Shape>& shapes);

}  // namespace tensorplay
