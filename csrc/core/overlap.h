// How much memory do strided tensors have in common, and how much of a storage do many of them reach?
//
// Pure integers: no torch, no Python, no I/O. Answers are exact or absent, never estimated; all work is
// bounded by a Budget and does not grow with the number of elements where sizes and strides have the order
// that views give them. Only which bytes are reached is compared: the types may differ.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "byte_set.h"

namespace tensorplay {

// What one answer may cost. The defaults keep the worst overlap() within tens of milliseconds.
struct Budget {
  int64_t nodes = int64_t{1} << 17;         // of the search for common positions
  int64_t bitmap_units = int64_t{1} << 25;  // that a bitmap may have: a bit each
  int64_t runs = int64_t{1} << 18;          // that may be listed
};

enum class Relation : uint8_t {
  kDisjoint,       // no byte in common; also where one of them is empty
  kIdentical,      // the same bytes
  kFirstInSecond,  // the first one's bytes, and more
  kSecondInFirst,
  kPartial,      // some in common, each with others of its own
  kOverlapping,  // at least a byte in common; which of the four above is too hard
  kTooHard,
};

struct OverlapAnswer {
  Relation relation = Relation::kTooHard;
  std::optional<int64_t> shared_bytes;
  int64_t nodes = 0;         // visited by the search
  int64_t bitmap_units = 0;  // written to bitmaps
};

OverlapAnswer overlap(const Region& a, const Region& b, const Budget& budget = {});
OverlapAnswer overlap(const ByteSet& a, const ByteSet& b, const Budget& budget = {});

const char* relation_name(Relation relation);

// Number of different bytes, between two bounds; known where they are equal.
struct CoverageAnswer {
  int64_t least = 0;
  int64_t most = 0;

  std::optional<int64_t> bytes() const { return least == most ? std::optional(least) : std::nullopt; }
};

// The bytes of [0, storage_nbytes) that at least one region reaches.
CoverageAnswer coverage(std::span<const Region> regions, int64_t storage_nbytes, const Budget& budget = {});

// The bytes of [0, storage_nbytes) that regions[index] reaches and no other region does. Two regions that
// reach the same bytes leave each other none. index < regions.size().
std::optional<int64_t> exclusive_bytes(std::span<const Region> regions, size_t index, int64_t storage_nbytes,
                                       const Budget& budget = {});

}  // namespace tensorplay
