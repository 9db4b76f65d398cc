// Geometries for tests: drawn at random, grown by views, walked index by index.
//
// All randomness is seeded: a failure repeats.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <ostream>
#include <random>
#include <utility>
#include <vector>

namespace tensorplay {

using Ints = std::vector<int64_t>;

struct Geometry {
  Ints sizes;
  Ints strides;
  int64_t offset = 0;
};

inline void print_ints(std::ostream& out, const char* name, const Ints& values) {
  out << name << " {";
  for (const int64_t value : values) out << value << ", ";
  out << "} ";
}

inline std::ostream& operator<<(std::ostream& out, const Geometry& geometry) {
  print_ints(out, "sizes", geometry.sizes);
  print_ints(out, "strides", geometry.strides);
  return out << "offset " << geometry.offset;
}

// The cells in the order in which the index runs, the last dimension of `slowest_first` fastest.
inline std::vector<int64_t> walk(const Geometry& geometry, const std::vector<size_t>& slowest_first) {
  std::vector<int64_t> cells{geometry.offset};
  for (const size_t dim : slowest_first) {
    std::vector<int64_t> next;
    for (const int64_t cell : cells) {
      for (int64_t i = 0; i < geometry.sizes[dim]; ++i) next.push_back(cell + i * geometry.strides[dim]);
    }
    cells = std::move(next);
  }
  return cells;
}

inline std::vector<size_t> first_dim_first(size_t dims) {
  std::vector<size_t> order(dims);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

inline std::vector<size_t> last_dim_first(size_t dims) {
  std::vector<size_t> order = first_dim_first(dims);
  std::reverse(order.begin(), order.end());
  return order;
}

class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}

  // By remainder: the standard distributions differ between libraries, the engines do not.
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(engine_() % static_cast<uint64_t>(high - low + 1));
  }
  bool one_in(int64_t n) { return between(1, n) == 1; }

 private:
  std::mt19937_64 engine_;
};

inline Geometry dense(Ints sizes, const std::vector<size_t>& fastest_first, int64_t offset) {
  Geometry made{std::move(sizes), {}, offset};
  made.strides.resize(made.sizes.size());
  int64_t step = 1;
  for (const size_t dim : fastest_first) {
    made.strides[dim] = step;
    step *= std::max<int64_t>(made.sizes[dim], 1);
  }
  return made;
}

inline Ints random_sizes(Dice& dice, int64_t min_dims, int64_t max_dims, int64_t max_size) {
  Ints sizes(static_cast<size_t>(dice.between(min_dims, max_dims)));
  for (int64_t& size : sizes) size = dice.one_in(40) ? 0 : dice.between(1, max_size);
  return sizes;
}

// One step that PyTorch's view functions (and a flip, which they lack) can take.
inline void take_view(Geometry& view, Dice& dice) {
  Ints& sizes = view.sizes;
  Ints& strides = view.strides;
  if (sizes.empty() || dice.one_in(8)) {  // unsqueeze, with any stride: nobody ever takes the step
    const auto at = dice.between(0, static_cast<int64_t>(sizes.size()));
    sizes.insert(sizes.begin() + at, 1);
    strides.insert(strides.begin() + at, dice.between(-3, 9));
    return;
  }
  const auto dim = static_cast<size_t>(dice.between(0, static_cast<int64_t>(sizes.size()) - 1));
  const int64_t size = sizes[dim];
  switch (dice.between(0, 6)) {
    case 0: {  // transpose
      const auto other = static_cast<size_t>(dice.between(0, static_cast<int64_t>(sizes.size()) - 1));
      std::swap(sizes[dim], sizes[other]);
      std::swap(strides[dim], strides[other]);
      break;
    }
    case 1: {  // slice, with a step
      const int64_t start = dice.between(0, std::max<int64_t>(size - 1, 0));
      const int64_t step = dice.between(1, 3);
      view.offset += start * strides[dim];
      sizes[dim] = (size - start + step - 1) / step;
      strides[dim] *= step;
      break;
    }
    case 2:  // select
      if (size == 0) break;
      view.offset += dice.between(0, size - 1) * strides[dim];
      sizes.erase(sizes.begin() + static_cast<int64_t>(dim));
      strides.erase(strides.begin() + static_cast<int64_t>(dim));
      break;
    case 3:  // expand
      if (size != 1) break;
      sizes[dim] = dice.between(1, 4);
      strides[dim] = 0;
      break;
    case 4: {  // unfold
      if (size == 0 || sizes.size() > 4) break;
      const int64_t window = dice.between(1, size);
      const int64_t step = dice.between(1, 3);
      sizes.push_back(window);
      strides.push_back(strides[dim]);
      sizes[dim] = (size - window) / step + 1;
      strides[dim] *= step;
      break;
    }
    case 5:  // flip
      if (size > 1) view.offset += (size - 1) * strides[dim];
      strides[dim] = -strides[dim];
      break;
    default: {  // diagonal
      const auto other = static_cast<size_t>(dice.between(0, static_cast<int64_t>(sizes.size()) - 1));
      if (other == dim) break;
      sizes[dim] = std::min(size, sizes[other]);
      strides[dim] += strides[other];
      sizes.erase(sizes.begin() + static_cast<int64_t>(other));
      strides.erase(strides.begin() + static_cast<int64_t>(other));
    }
  }
}

}  // namespace tensorplay
