// How two tensors differ, where one is to be copied into the other: a few bits, so that thousands of equal
// pairs are passed over at once.
#pragma once

#include <cstdint>
#include <optional>

#include "records.h"

namespace tensorplay {

enum Difference : uint32_t {
  kShapeDiffers = 1,  // or one of them has none
  kDtypeDiffers = 2,
  kDeviceDiffers = 4,
  kKindDiffers = 8,
  kFirstIsMeta = 16,
  kSecondIsMeta = 32,
  kMemoryMeets = 64,  // one storage, or storages whose bytes meet
  kGradDiffers = 128,
};

// Bits of Difference.
uint32_t differences(const TensorFacts& first, const TensorFacts& second);

struct MemorySpan {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Where the storage's bytes are; absent for what has none of its own.
std::optional<MemorySpan> memory_of(const TensorFacts& facts);

enum Mark : uint32_t {
  kMeta = 1,
  kInference = 2,
  kSmallPart = 4,    // at most half of a storage of `least_nbytes` or more
  kPastStorage = 8,  // it has elements that its storage has no bytes for
};

// Bits of Mark.
uint32_t marks(const TensorFacts& facts, int64_t least_nbytes);

}  // namespace tensorplay
