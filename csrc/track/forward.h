// Which stack made which node of the graph, so that what backward does can be told of the line that it is
// for.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace tensorplay::track {

// Set in a site's number where an operator runs in the backward of what that stack called.
constexpr uint32_t kInBackward = uint32_t{1} << 31;

// The last hundred thousand or so nodes; older ones are forgotten, and so is one of two that meet in a place.
class ForwardSites {
 public:
  void put(uint64_t thread, uint64_t sequence, uint32_t site) {
    const uint64_t key = key_of(thread, sequence);
    slots_[key & (kSlots - 1)].store((key & kCheck) | site, std::memory_order_relaxed);
  }

  // 0 where it is not known.
  uint32_t find(uint64_t thread, uint64_t sequence) const {
    const uint64_t key = key_of(thread, sequence);
    const uint64_t slot = slots_[key & (kSlots - 1)].load(std::memory_order_relaxed);
    return (slot & kCheck) == (key & kCheck) ? static_cast<uint32_t>(slot) : 0;
  }

 private:
  static constexpr uint64_t kSlots = uint64_t{1} << 17;
  static constexpr uint64_t kCheck = ~uint64_t{0} << 32;

  // The low bits follow the sequence: nodes of one thread do not meet. The high ones tell them apart.
  static uint64_t key_of(uint64_t thread, uint64_t sequence) {
    const uint64_t low = (sequence + thread * uint64_t{7919}) & (kSlots - 1);
    const uint64_t mixed =
        (sequence * uint64_t{0x9E3779B97F4A7C15}) ^ (thread * uint64_t{0xC2B2AE3D27D4EB4F});
    return (mixed & kCheck) | low;
  }

  std::array<std::atomic<uint64_t>, kSlots> slots_{};
};

}  // namespace tensorplay::track
