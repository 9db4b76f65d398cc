// At which indices of one geometry lie the cells of another?
//
// Pure integers: no torch, no Python, no I/O. The answer bounds what can still be cut out of the one to reach
// the other: a cell that is not there never comes back, since no view operator leaves the cells it is given.
#pragma once

#include <array>
#include <cstdint>

#include "view_ops.h"

namespace tensorplay {

// Where the cells of the target lie along one dimension of a state.
struct Band {
  int64_t first = 0;
  int64_t last = 0;    // inclusive
  int64_t common = 0;  // greatest common divisor of the distances; 0: one place
  bool exact = false;  // otherwise the cells lie in the band, maybe not at its ends
};

struct Coordinates {
  bool outside = false;  // proven: the state does not hold all cells of the target
  bool empty = false;    // the target has no cells; the bands say nothing
  bool unique = false;   // each cell of the state has one index (stride 0 aside): the bands are set
  std::array<Band, kMaxViewDims> bands;
};

// Elements of different widths are compared in units of the narrower one.
Coordinates locate(const View& target, const View& state);

}  // namespace tensorplay
