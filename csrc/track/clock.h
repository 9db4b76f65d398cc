// Ticks that cost a few nanoseconds to read, and what they are in nanoseconds.
#pragma once

#include <cpuid.h>
#include <time.h>
#include <x86intrin.h>

#include <cstdint>

namespace tensorplay::track {

inline uint64_t monotonic_nanoseconds() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

// Whether the processor's counter runs at one rate whatever the core does; virtual machines may hide that it
// does.
inline bool has_steady_counter() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d & (1u << 8)) != 0;
}

// One for the process. Ticks of all threads are in one order: where one thread's act follows another's, so do
// they.
class Clock {
 public:
  Clock() : is_counter_(has_steady_counter()), first_(both()) {}

  uint64_t ticks() const { return is_counter_ ? __rdtsc() : monotonic_nanoseconds(); }

  // The same; nothing that follows is begun before. A processor may read its counter later than what comes
  // after it.
  uint64_t ticks_before_what_follows() const {
    const uint64_t now = ticks();
    _mm_lfence();
    return now;
  }

  // What a tick is comes from both clocks' readings at the first and the last call: no waiting to find it
  // out.
  class Scale {
   public:
    Scale(uint64_t first_ticks, uint64_t first, double each)
        : first_ticks_(first_ticks), first_(first), each_(each) {}
    uint64_t nanoseconds(uint64_t ticks) const {
      const auto since = static_cast<int64_t>(ticks - first_ticks_);
      return first_ + static_cast<uint64_t>(static_cast<int64_t>(static_cast<double>(since) * each_));
    }
    uint64_t span(uint64_t ticks) const { return static_cast<uint64_t>(static_cast<double>(ticks) * each_); }

   private:
    uint64_t first_ticks_;
    uint64_t first_;
    double each_;
  };

  Scale scale() const {
    if (!is_counter_) return {0, 0, 1.0};
    const Both last = both();
    const double each = last.ticks == first_.ticks
                            ? 1.0
                            : static_cast<double>(last.nanoseconds - first_.nanoseconds) /
                                  static_cast<double>(last.ticks - first_.ticks);
    return {first_.ticks, first_.nanoseconds, each};
  }

 private:
  struct Both {
    uint64_t ticks;
    uint64_t nanoseconds;
  };

  // Both clocks at one moment: of some readings the one that nothing came between.
  Both both() const {
    Both best{};
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 4; ++i) {
      const uint64_t before = ticks();
      const uint64_t nanoseconds = monotonic_nanoseconds();
      const uint64_t between = ticks() - before;
      if (between < least) {
        least = between;
        best = {before + between / 2, nanoseconds};
      }
    }
    return best;
  }

  bool is_counter_;
  Both first_;
};

}  // namespace tensorplay::track
