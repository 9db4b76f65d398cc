// By which view operators does one tensor come from another over the same storage?
//
// Pure integers: no torch, no Python, no I/O. The shortest chain of named operators whose replay gives the
// target's sizes, strides, offset and element type exactly; as_strided where there is none, or none was
// found, and the answer says which of the two.
#pragma once

#include <cstdint>
#include <vector>

#include "view_ops.h"

namespace tensorplay {

struct Geometry {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset = 0;
  ElementType element;

  friend bool operator==(const Geometry&, const Geometry&) = default;
};

struct ChainStep {
  ViewOp op = ViewOp::kAsStrided;
  std::vector<int64_t> args;  // as ViewOp lists them
  Geometry result;
};

struct ChainAnswer {
  std::vector<ChainStep> steps;  // none: the target is the base again
  // A chain: no shorter one exists. as_strided: no chain of named operators within max_ops exists. False: the
  // search left something out, see Note [What the search leaves out].
  bool complete = true;
  int ruled_out = 0;  // every chain of up to this many operators was tried and is none; -1: not even that
  int64_t nodes = 0;  // geometries looked at
};

inline constexpr int kMaxChainOps = 4;
inline constexpr int64_t kMaxChainNodes = 150'000;

// Bounded by max_nodes, which is tens of milliseconds at most. max_ops is cut to kMaxChainOps. `plain`:
// without unfold and diagonal; all that the answer says is then of chains without them.
ChainAnswer infer_chain(const Geometry& base, const Geometry& target, int max_ops = kMaxChainOps,
                        int64_t max_nodes = kMaxChainNodes, bool plain = false);

}  // namespace tensorplay
