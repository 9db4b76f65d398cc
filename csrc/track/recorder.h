// All threads' events on their way into one ledger. Writers never wait for each other or for the reader; what
// finds no room is counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "clock.h"
#include "event.h"
#include "ledger.h"
#include "ring.h"

namespace tensorplay::track {

struct RecorderLimits {
  unsigned ring_bits = 15;  // 32 768 events a thread, 1.25 MiB, of which only what is used takes memory
  unsigned large_rings = 16;
  unsigned small_ring_bits = 12;  // of threads beyond these
  unsigned most_rings = 96;
  LedgerLimits ledger;
};

// How many events found no room, and why.
struct Losses {
  uint64_t full = 0;     // a ring was full, and another thread was reading
  uint64_t crowded = 0;  // more threads at once than there are rings
  uint64_t ended = 0;    // by threads whose own data was gone already

  uint64_t all() const { return full + crowded + ended; }
};

// Outlives every thread that writes to it. The process has one, which lives for good; a thread writes to one
// at a time.
class Recorder {
 public:
  explicit Recorder(RecorderLimits limits = {});
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();

  // With its time in ticks(), taken where it happened: before a block goes, after one came. Takes a few
  // nanoseconds; where the thread's ring is nearly full it first reads all rings, if nobody else does.
  void write(const Event& event);
  uint64_t ticks() const { return clock_.ticks(); }

  // Reads all that was written until now into the ledger. The second one answers false, and reads nothing,
  // where another thread is at it.
  void drain();
  bool try_drain();
  // Whether some ring is filled to an eighth.
  bool has_much() const;

  // Calls `use` with the ledger, in which all is that was written until now. `use` must write no event.
  template <class Use>
  auto with_ledger(Use use) {
    const std::lock_guard guard(mutex_);
    drain_locked();
    return use(static_cast<const Ledger&>(ledger_));
  }

  // Begins anew: nothing is known of what was written until now.
  void reset();

  // Since the last reset().
  Losses losses() const;
  size_t nbytes() const;

  // Around fork(): the child goes on with the events until then, and with the one thread it has.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  struct Lane;
  struct Ending;

  Lane* take_lane();
  void drain_locked();
  Losses all_losses() const;

  const RecorderLimits limits_;
  const Clock clock_;
  std::atomic<Lane*> lanes_{nullptr};
  std::atomic<unsigned> lane_count_{0};
  Losses before_;  // losses until the last reset()
  std::atomic<uint64_t> crowded_{0};
  std::atomic<uint64_t> ended_{0};
  mutable std::mutex mutex_;  // whoever reads
  Ledger ledger_;
  std::vector<Lane*> reading_;
};

}  // namespace tensorplay::track
