#include "recorder.h"

#include <algorithm>
#include <new>

namespace tensorplay::track {

// A ring, and whose it is. Lanes are never taken apart: the next thread gets the one of a thread that ended.
struct Recorder::Lane {
  explicit Lane(unsigned bits) : ring(bits) {}

  Ring ring;
  std::atomic<bool> in_use{true};
  Lane* next = nullptr;
  // The reader's, within one reading.
  uint64_t until = 0;
  uint64_t next_time = 0;  // UINT64_MAX where there is none

  // Whether there is one more event of that time or before.
  bool look_at_next(uint64_t now) {
    const uint64_t at = ring.tail();
    next_time = at < until ? ring.at(at).time : UINT64_MAX;
    if (next_time > now) next_time = UINT64_MAX;
    return next_time != UINT64_MAX;
  }
};

namespace {

thread_local Recorder* of_thread = nullptr;
thread_local void* lane_of_thread = nullptr;
thread_local bool has_ended = false;

}  // namespace

struct Recorder::Ending {
  bool is_armed = false;
  ~Ending() {
    has_ended = true;
    if (lane_of_thread != nullptr)
      static_cast<Lane*>(lane_of_thread)->in_use.store(false, std::memory_order_release);
    lane_of_thread = nullptr;
    of_thread = nullptr;
  }
};

Recorder::Recorder(RecorderLimits limits) : limits_(limits), ledger_(limits.ledger) {
  reading_.reserve(limits.most_rings);
}

Recorder::~Recorder() {
  if (of_thread == this) {
    of_thread = nullptr;
    lane_of_thread = nullptr;
  }
  for (Lane* lane = lanes_.load(); lane != nullptr;) delete std::exchange(lane, lane->next);
}

Recorder::Lane* Recorder::take_lane() {
  static thread_local Ending ending;
  ending.is_armed = true;  // its destructor is registered with the first use
  if (lane_of_thread != nullptr)
    static_cast<Lane*>(lane_of_thread)->in_use.store(false, std::memory_order_release);
  lane_of_thread = nullptr;
  of_thread = this;
  for (Lane* lane = lanes_.load(std::memory_order_acquire); lane != nullptr; lane = lane->next) {
    bool free = false;
    // Acquires: what its last thread wrote is there.
    if (lane->in_use.compare_exchange_strong(free, true, std::memory_order_acq_rel)) {
      lane_of_thread = lane;
      return lane;
    }
  }
  const unsigned number = lane_count_.fetch_add(1, std::memory_order_relaxed);
  if (number >= limits_.most_rings) {
    lane_count_.fetch_sub(1, std::memory_order_relaxed);
    return nullptr;
  }
  auto* lane =
      new (std::nothrow) Lane(number < limits_.large_rings ? limits_.ring_bits : limits_.small_ring_bits);
  if (lane == nullptr) {
    lane_count_.fetch_sub(1, std::memory_order_relaxed);
    return nullptr;
  }
  lane->next = lanes_.load(std::memory_order_relaxed);
  while (
      !lanes_.compare_exchange_weak(lane->next, lane, std::memory_order_release, std::memory_order_relaxed)) {
  }
  lane_of_thread = lane;
  return lane;
}

void Recorder::write(const Event& event) {
  auto* lane = static_cast<Lane*>(lane_of_thread);
  if (of_thread != this || lane == nullptr) [[unlikely]] {
    if (has_ended) {
      ended_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    lane = take_lane();
    if (lane == nullptr) {
      crowded_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
  }
  const uint64_t waiting = lane->ring.push(event);
  if (4 * waiting > 3 * lane->ring.capacity()) [[unlikely]]
    try_drain();
}

void Recorder::drain() {
  const std::lock_guard guard(mutex_);
  drain_locked();
}

bool Recorder::try_drain() {
  const std::unique_lock guard(mutex_, std::try_to_lock);
  if (guard.owns_lock()) drain_locked();
  return guard.owns_lock();
}

bool Recorder::has_much() const {
  for (const Lane* lane = lanes_.load(std::memory_order_acquire); lane != nullptr; lane = lane->next) {
    if (8 * (lane->ring.head() - lane->ring.tail()) > lane->ring.capacity()) return true;
  }
  return false;
}

// Events of one address are read in the order in which they happened, whichever threads wrote them. The end
// of a block is written before its memory is given back, and its beginning after it was got and before it is
// handed on: so whatever came before an event was written before that event's time was taken. Only events up
// to a moment are read, and rings are looked at after it: what came before each of them is there, too.
void Recorder::drain_locked() {
  const uint64_t now = clock_.ticks_before_what_follows();
  reading_.clear();
  for (Lane* lane = lanes_.load(std::memory_order_acquire); lane != nullptr; lane = lane->next) {
    lane->until = lane->ring.head();
    if (reading_.size() < reading_.capacity()) reading_.push_back(lane);
  }
  const Clock::Scale scale = clock_.scale();
  // Threads run for thousands of events at a stretch: each stretch is read in one go.
  std::erase_if(reading_, [&](Lane* lane) { return !lane->look_at_next(now); });
  while (!reading_.empty()) {
    std::ranges::iter_swap(reading_.begin(), std::ranges::min_element(reading_, {}, &Lane::next_time));
    Lane* lane = reading_.front();
    uint64_t others = now;
    for (size_t i = 1; i < reading_.size(); ++i) others = std::min(others, reading_[i]->next_time);
    do {
      Event event = lane->ring.at(lane->ring.tail());
      event.time = scale.nanoseconds(event.time);
      event.duration = scale.span(event.duration);
      ledger_.apply(event);
      lane->ring.release(lane->ring.tail() + 1);
    } while (lane->look_at_next(now) && lane->next_time <= others);
    if (lane->next_time > now) {
      reading_.front() = reading_.back();
      reading_.pop_back();
    }
  }
}

void Recorder::reset() {
  const std::lock_guard guard(mutex_);
  drain_locked();
  ledger_ = Ledger(limits_.ledger);
  before_ = all_losses();
}

Losses Recorder::losses() const {
  const std::lock_guard guard(mutex_);
  const Losses all = all_losses();
  return {all.full - before_.full, all.crowded - before_.crowded, all.ended - before_.ended};
}

Losses Recorder::all_losses() const {
  Losses found{.full = 0,
               .crowded = crowded_.load(std::memory_order_relaxed),
               .ended = ended_.load(std::memory_order_relaxed)};
  for (const Lane* lane = lanes_.load(std::memory_order_acquire); lane != nullptr; lane = lane->next) {
    found.full += lane->ring.lost();
  }
  return found;
}

size_t Recorder::nbytes() const {
  size_t nbytes = ledger_.nbytes();
  for (const Lane* lane = lanes_.load(std::memory_order_acquire); lane != nullptr; lane = lane->next) {
    nbytes += lane->ring.capacity() * sizeof(Event);
  }
  return nbytes;
}

void Recorder::before_fork() {
  mutex_.lock();
  drain_locked();
}

void Recorder::after_fork_in_parent() {
  mutex_.unlock();
}

// The other threads are gone. What they wrote since before_fork() happened in the parent: it is passed over.
void Recorder::after_fork_in_child() {
  for (Lane* lane = lanes_.load(std::memory_order_acquire); lane != nullptr; lane = lane->next) {
    if (lane == lane_of_thread) continue;
    lane->ring.release(lane->ring.head());
    lane->in_use.store(false, std::memory_order_release);
  }
  mutex_.unlock();
}

}  // namespace tensorplay::track
