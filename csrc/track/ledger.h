// What the events come to: blocks that are alive, who made how many, the peak, lifetimes, reuse. Pure: the
// same events in the same order give the same figures.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "address_map.h"
#include "event.h"

namespace tensorplay::track {

constexpr uint64_t kSecond = 1'000'000'000;

// The operator and the stack that something was done by.
struct Origin {
  uint32_t site = 0;
  uint16_t op = 0;

  friend bool operator==(const Origin&, const Origin&) = default;
};

// A block that is alive.
struct Block {
  uint64_t nbytes;
  uint64_t born;    // its time
  uint64_t number;  // which block it is, counted from 1: tells it from another at its address
  Origin origin;
  uint64_t written;  // time of the last write in place; 0: none was seen
  Origin writer;
  uint32_t writes;
  uint32_t tensors;  // how many tensors operators answered over it
};

struct Totals {
  uint64_t allocs = 0;
  uint64_t alloc_bytes = 0;
  uint64_t frees = 0;
  uint64_t freed_bytes = 0;
  uint64_t frees_of_older = 0;  // of blocks from before the first event
  uint64_t frees_missed = 0;    // a block came where one was alive: the event of its end was lost
  uint64_t blocks_missed = 0;   // the table of blocks was full
  uint64_t origins_missed = 0;  // the table of origins was full
  uint64_t live_blocks = 0;
  uint64_t live_bytes = 0;
  uint64_t peak_bytes = 0;
  uint64_t peak_time = 0;
  uint64_t tensors = 0;
  uint64_t tensors_reusing = 0;  // over memory that was there within the last five seconds
  uint64_t writes = 0;
  uint64_t copies = 0;
  uint64_t copied_bytes = 0;
  uint64_t copying = 0;  // nanoseconds
};

// The same for one origin.
struct OriginTotals {
  Origin origin;
  uint64_t allocs;
  uint64_t alloc_bytes;
  uint64_t frees;  // of blocks that were made here
  uint64_t freed_bytes;
  uint64_t live_blocks;
  uint64_t live_bytes;
  uint64_t tensors;
  uint64_t writes;
  uint64_t copies;
  uint64_t copied_bytes;
  uint64_t copying;
  uint64_t longest_copy;

  uint64_t at_peak;  // live_bytes when `peak` was new
  uint64_t peak;     // which peak that was
};

struct Lifetimes {
  // [i]: lived from two to the i nanoseconds to twice that.
  std::array<uint64_t, 64> blocks{};
  std::array<uint64_t, 64> nbytes{};
};

// How many tensors were created within a second that ends now, and how many over memory that was there
// before.
struct Reuse {
  uint64_t tensors = 0;
  uint64_t reusing = 0;
};

// Powers of two; three quarters of a table can be used.
struct LedgerLimits {
  unsigned block_bits = 18;   // 196 608 blocks
  unsigned origin_bits = 14;  // 12 288 pairs of operator and stack
  unsigned freed_bits = 17;   // 98 304 addresses of the last five seconds
};

class Ledger {
 public:
  explicit Ledger(LedgerLimits limits = {});

  // In the order of their times, but for what several threads did within one drain.
  void apply(const Event& event);

  const Totals& totals() const { return totals_; }
  const Lifetimes& lifetimes() const { return lifetimes_; }
  Reuse reuse(uint64_t now) const;

  // Null where none is known at the address.
  const Block* block_at(uint64_t address) const { return blocks_.find(address); }
  template <class Visit>
  void each_block(Visit visit) const {
    blocks_.each([&](const auto& entry) { visit(entry.key, entry.value); });
  }

  // With at_peak as of the highest peak.
  std::vector<OriginTotals> origins() const;

  size_t nbytes() const { return blocks_.nbytes() + origins_.nbytes() + freed_.nbytes(); }

 private:
  void on_alloc(const Event& event);
  void on_free(const Event& event);
  void on_tensor(const Event& event);
  OriginTotals* totals_of(Origin origin);
  void change_live(OriginTotals* of, int64_t blocks, int64_t nbytes);
  void forget(const Block& block);
  void remember_freed(uint64_t address, uint64_t now);

  static constexpr size_t kSlices = 20;
  static constexpr uint64_t kSlice = kSecond / kSlices;
  static constexpr uint64_t kMemory = 5 * kSecond;

  Totals totals_;
  Lifetimes lifetimes_;
  AddressMap<Block> blocks_;
  AddressMap<OriginTotals> origins_;
  AddressMap<uint64_t> freed_;  // when the block at an address went
  uint64_t peak_ = 0;           // number of the highest peak
  std::array<Reuse, kSlices> slices_{};
  std::array<uint64_t, kSlices> slice_numbers_{};
};

}  // namespace tensorplay::track
