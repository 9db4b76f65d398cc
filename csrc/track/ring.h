// A ring of events in fixed memory, from one thread to whoever drains. The writer never waits: what finds no
// room is counted.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "event.h"

namespace tensorplay::track {

class Ring {
 public:
  // `bits`: there is room for two to that power.
  explicit Ring(unsigned bits) : events_(new Event[size_t{1} << bits]), mask_((uint64_t{1} << bits) - 1) {}

  // By the one thread that writes. Answers how many wait now, the one just written among them; 0 where it was
  // lost.
  uint64_t push(const Event& event) {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    if (head - known_tail_ > mask_) {
      known_tail_ = tail_.load(std::memory_order_acquire);
      if (head - known_tail_ > mask_) {
        lost_.fetch_add(1, std::memory_order_relaxed);
        return 0;
      }
    }
    events_[head & mask_] = event;
    // Releases: whoever learns of this event sees all that its thread did before.
    head_.store(head + 1, std::memory_order_release);
    return head + 1 - known_tail_;
  }

  // By the one thread that drains at a time. What was written until now begins at tail() and ends before
  // head().
  uint64_t head() const { return head_.load(std::memory_order_acquire); }
  uint64_t tail() const { return tail_.load(std::memory_order_relaxed); }
  const Event& at(uint64_t number) const { return events_[number & mask_]; }
  // All before `number` were read: their room is free again.
  void release(uint64_t number) { tail_.store(number, std::memory_order_release); }

  uint64_t lost() const { return lost_.load(std::memory_order_relaxed); }
  size_t capacity() const { return mask_ + 1; }

 private:
  static constexpr size_t kCacheLine = 64;

  std::unique_ptr<Event[]> events_;
  uint64_t mask_;
  alignas(kCacheLine) std::atomic<uint64_t> head_{0};
  uint64_t known_tail_ = 0;  // the writer's: at least so much was read
  std::atomic<uint64_t> lost_{0};
  alignas(kCacheLine) std::atomic<uint64_t> tail_{0};
};

}  // namespace tensorplay::track
