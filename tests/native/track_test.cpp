// What events come to, on histories with known answers; rings between threads.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/track/ledger.h"
#include "../../csrc/track/recorder.h"
#include "../../csrc/track/ring.h"

namespace tensorplay::track {
namespace {

Event event(EventKind kind, uint64_t time, uint64_t address, uint64_t nbytes, uint16_t op, uint32_t site) {
  return {.time = time,
          .address = address,
          .nbytes = nbytes,
          .duration = 0,
          .site = site,
          .op = op,
          .kind = kind,
          .places = 0};
}
Event alloc(uint64_t time, uint64_t address, uint64_t nbytes, uint16_t op = 1, uint32_t site = 1) {
  return event(EventKind::kAlloc, time, address, nbytes, op, site);
}
Event freed(uint64_t time, uint64_t address) {
  return event(EventKind::kFree, time, address, 0, 0, 0);
}
Event tensor(uint64_t time, uint64_t address, uint16_t op = 1, uint32_t site = 1) {
  return event(EventKind::kTensor, time, address, 8, op, site);
}

OriginTotals of(const Ledger& ledger, uint16_t op, uint32_t site) {
  for (const OriginTotals& one : ledger.origins()) {
    if (one.origin == Origin{site, op}) return one;
  }
  return {};
}

TEST(Ledger, counts_what_came_and_went) {
  Ledger ledger;
  ledger.apply(alloc(10, 0x1000, 100));
  ledger.apply(alloc(20, 0x2000, 50, 2, 7));
  ledger.apply(freed(30, 0x1000));

  EXPECT_EQ(ledger.totals().allocs, 2);
  EXPECT_EQ(ledger.totals().alloc_bytes, 150);
  EXPECT_EQ(ledger.totals().frees, 1);
  EXPECT_EQ(ledger.totals().freed_bytes, 100);
  EXPECT_EQ(ledger.totals().live_bytes, 50);
  EXPECT_EQ(ledger.totals().live_blocks, 1);
  EXPECT_EQ(ledger.block_at(0x1000), nullptr);
  EXPECT_EQ(ledger.block_at(0x2000)->born, 20);
  EXPECT_EQ(ledger.block_at(0x2000)->number, 2);
  EXPECT_EQ(of(ledger, 1, 1).frees, 1);
  EXPECT_EQ(of(ledger, 2, 7).live_bytes, 50);
  EXPECT_EQ(ledger.lifetimes().blocks[4], 1);  // 20 ns
}

TEST(Ledger, peak_says_what_each_origin_had) {
  Ledger ledger;
  ledger.apply(alloc(1, 0x1000, 100, 1, 1));
  ledger.apply(alloc(2, 0x2000, 70, 2, 2));
  ledger.apply(freed(3, 0x1000));
  ledger.apply(alloc(4, 0x3000, 20, 3, 3));  // 90: no peak
  EXPECT_EQ(ledger.totals().peak_bytes, 170);
  EXPECT_EQ(ledger.totals().peak_time, 2);
  EXPECT_EQ(of(ledger, 1, 1).at_peak, 100);
  EXPECT_EQ(of(ledger, 2, 2).at_peak, 70);
  EXPECT_EQ(of(ledger, 3, 3).at_peak, 0);

  ledger.apply(alloc(5, 0x4000, 200, 3, 3));
  EXPECT_EQ(ledger.totals().peak_bytes, 290);
  EXPECT_EQ(of(ledger, 1, 1).at_peak, 0);
  EXPECT_EQ(of(ledger, 3, 3).at_peak, 220);
}

TEST(Ledger, block_from_before_is_none_of_its_own) {
  Ledger ledger;
  ledger.apply(freed(5, 0x9000));

  EXPECT_EQ(ledger.totals().frees_of_older, 1);
  EXPECT_EQ(ledger.totals().frees, 0);
  EXPECT_EQ(ledger.totals().live_bytes, 0);
}

TEST(Ledger, lost_end_is_counted_when_the_address_comes_again) {
  Ledger ledger;
  ledger.apply(alloc(1, 0x1000, 100));
  ledger.apply(alloc(2, 0x1000, 30));

  EXPECT_EQ(ledger.totals().frees_missed, 1);
  EXPECT_EQ(ledger.totals().live_bytes, 30);
  EXPECT_EQ(of(ledger, 1, 1).live_bytes, 30);
}

TEST(Ledger, full_table_is_counted) {
  Ledger ledger({.block_bits = 10, .origin_bits = 8, .freed_bits = 10});
  for (uint64_t i = 1; i <= 1'000; ++i) ledger.apply(alloc(i, i * 64, 1));

  EXPECT_EQ(ledger.totals().live_blocks, 768);
  EXPECT_EQ(ledger.totals().blocks_missed, 232);
}

TEST(Ledger, reuse_is_the_share_over_memory_that_was_there) {
  Ledger ledger;
  const uint64_t start = 100 * kSecond;
  ledger.apply(alloc(start, 0x1000, 8));
  ledger.apply(tensor(start + 1, 0x1000));  // new
  ledger.apply(tensor(start + 2, 0x1000));  // a view of it
  ledger.apply(freed(start + 3, 0x1000));
  ledger.apply(alloc(start + 4, 0x1000, 8));
  ledger.apply(tensor(start + 5, 0x1000));  // the address again
  EXPECT_EQ(ledger.reuse(start + 6).tensors, 3);
  EXPECT_EQ(ledger.reuse(start + 6).reusing, 2);

  ledger.apply(freed(start + 7, 0x1000));
  const uint64_t later = start + 6 * kSecond;
  ledger.apply(alloc(later, 0x1000, 8));
  ledger.apply(tensor(later + 1, 0x1000));  // six seconds are too long ago
  EXPECT_EQ(ledger.reuse(later + 2).tensors, 1);
  EXPECT_EQ(ledger.reuse(later + 2).reusing, 0);
  EXPECT_EQ(ledger.reuse(later + 2 * kSecond).tensors, 0);
}

TEST(Ledger, writes_are_noted_at_the_block) {
  Ledger ledger;
  ledger.apply(alloc(1, 0x1000, 8));
  Event write = tensor(9, 0x1000, 5, 6);
  write.kind = EventKind::kWrite;
  ledger.apply(write);

  EXPECT_EQ(ledger.block_at(0x1000)->writes, 1);
  EXPECT_EQ(ledger.block_at(0x1000)->written, 9);
  EXPECT_EQ(ledger.block_at(0x1000)->writer, (Origin{.site = 6, .op = 5}));
}

TEST(Ledger, random_histories_equal_a_plain_model) {
  std::mt19937_64 random(7);
  Ledger ledger;
  std::map<uint64_t, uint64_t> live;
  uint64_t live_bytes = 0, peak = 0, frees = 0;
  for (uint64_t time = 1; time < 200'000; ++time) {
    const uint64_t address = 64 * (1 + random() % 3'000);
    if (const auto at = live.find(address); at != live.end()) {
      ledger.apply(freed(time, address));
      live_bytes -= at->second;
      live.erase(at);
      ++frees;
    } else {
      const uint64_t nbytes = 1 + random() % 1'000;
      ledger.apply(alloc(time, address, nbytes, static_cast<uint16_t>(1 + random() % 5),
                         static_cast<uint32_t>(1 + random() % 50)));
      live[address] = nbytes;
      live_bytes += nbytes;
      peak = std::max(peak, live_bytes);
    }
  }

  EXPECT_EQ(ledger.totals().live_bytes, live_bytes);
  EXPECT_EQ(ledger.totals().live_blocks, live.size());
  EXPECT_EQ(ledger.totals().peak_bytes, peak);
  EXPECT_EQ(ledger.totals().frees, frees);
  for (const auto& [address, nbytes] : live) EXPECT_EQ(ledger.block_at(address)->nbytes, nbytes);
  uint64_t at_peak = 0, live_of_all = 0;
  for (const OriginTotals& one : ledger.origins()) {
    at_peak += one.at_peak;
    live_of_all += one.live_bytes;
  }
  EXPECT_EQ(at_peak, peak);
  EXPECT_EQ(live_of_all, live_bytes);
}

TEST(Ring, what_finds_no_room_is_counted) {
  Ring ring(4);
  for (uint64_t i = 0; i < 20; ++i) ring.push(alloc(i, i + 1, 1));

  EXPECT_EQ(ring.head() - ring.tail(), 16);
  EXPECT_EQ(ring.lost(), 4);
  ring.release(ring.head());
  EXPECT_EQ(ring.push(alloc(99, 1, 1)), 1);
  EXPECT_EQ(ring.at(ring.tail()).time, 99);
}

TEST(Ring, nothing_is_torn_or_reordered_between_threads) {
  Ring ring(8);
  constexpr uint64_t kMany = 300'000;
  uint64_t seen = 0, last = 0;
  bool ordered = true;
  std::thread writer([&] {
    for (uint64_t i = 1; i <= kMany; ++i) ring.push(alloc(i, i * 3, i * 5, static_cast<uint16_t>(i)));
  });
  const auto drain = [&] {
    const uint64_t head = ring.head();
    for (uint64_t at = ring.tail(); at != head; ++at) {
      const Event& event = ring.at(at);
      ordered = ordered && event.time > last && event.address == 3 * event.time &&
                event.nbytes == 5 * event.time && event.op == static_cast<uint16_t>(event.time);
      last = event.time;
      ++seen;
    }
    ring.release(head);
  };
  while (seen + ring.lost() < kMany) drain();
  writer.join();
  drain();

  EXPECT_TRUE(ordered);
  EXPECT_EQ(seen + ring.lost(), kMany);
}

Event now(const Recorder& recorder, EventKind kind, uint64_t address, uint64_t nbytes) {
  return event(kind, recorder.ticks(), address, nbytes, 1, 1);
}

TEST(Recorder, one_threads_events_come_to_what_they_are) {
  Recorder recorder;
  for (uint64_t i = 1; i <= 10; ++i) recorder.write(now(recorder, EventKind::kAlloc, i * 64, 100));
  recorder.write(now(recorder, EventKind::kFree, 64, 0));

  recorder.with_ledger([](const Ledger& ledger) {
    EXPECT_EQ(ledger.totals().allocs, 10);
    EXPECT_EQ(ledger.totals().live_bytes, 900);
    EXPECT_EQ(ledger.block_at(64), nullptr);
  });
  EXPECT_EQ(recorder.losses().all(), 0);
}

TEST(Recorder, time_is_nanoseconds_of_the_monotonic_clock) {
  Recorder recorder;
  const uint64_t before = monotonic_nanoseconds();
  recorder.write(now(recorder, EventKind::kAlloc, 64, 1));
  const uint64_t after = monotonic_nanoseconds();

  recorder.with_ledger([&](const Ledger& ledger) {
    EXPECT_GE(ledger.block_at(64)->born + 10'000, before);
    EXPECT_LE(ledger.block_at(64)->born, after + 10'000);
  });
}

TEST(Recorder, a_writer_reads_for_itself_before_its_ring_is_full) {
  Recorder recorder({.ring_bits = 6, .small_ring_bits = 6, .most_rings = 4, .ledger = {}});
  for (uint64_t i = 1; i <= 10'000; ++i) {
    recorder.write(now(recorder, EventKind::kAlloc, 64, 8));
    recorder.write(now(recorder, EventKind::kFree, 64, 0));
  }

  EXPECT_EQ(recorder.losses().all(), 0);
  recorder.with_ledger([](const Ledger& ledger) {
    EXPECT_EQ(ledger.totals().frees, 10'000);
    EXPECT_EQ(ledger.totals().frees_missed, 0);
  });
}

TEST(Recorder, what_finds_no_ring_is_counted) {
  Recorder recorder({.ring_bits = 6, .small_ring_bits = 6, .most_rings = 1, .ledger = {}});
  recorder.write(now(recorder, EventKind::kAlloc, 64, 8));
  std::thread([&] { recorder.write(now(recorder, EventKind::kAlloc, 128, 8)); }).join();

  EXPECT_EQ(recorder.losses().crowded, 1);
}

TEST(Recorder, threads_that_ended_leave_their_rings_and_events) {
  Recorder recorder({.ring_bits = 6, .small_ring_bits = 6, .most_rings = 2, .ledger = {}});
  recorder.write(now(recorder, EventKind::kAlloc, 64, 8));
  for (uint64_t i = 2; i < 20; ++i) {
    std::thread([&] { recorder.write(now(recorder, EventKind::kAlloc, 64 * i, 8)); }).join();
  }

  EXPECT_EQ(recorder.losses().all(), 0);
  recorder.with_ledger([](const Ledger& ledger) { EXPECT_EQ(ledger.totals().live_blocks, 19); });
}

// Addresses go from thread to thread as a heap's do: each is got by whoever finds it free.
TEST(Recorder, blocks_that_threads_hand_each_other_are_never_alive_twice) {
  Recorder recorder({.ring_bits = 10, .small_ring_bits = 10, .most_rings = 8, .ledger = {}});
  constexpr size_t kAddresses = 200;
  std::vector<std::atomic<bool>> taken(kAddresses);
  std::atomic<bool> done{false};
  std::atomic<uint64_t> made{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      for (int i = 0; i < 80'000; ++i) {
        const size_t at = random() % kAddresses;
        if (taken[at].exchange(true, std::memory_order_acq_rel)) continue;
        recorder.write(now(recorder, EventKind::kAlloc, 64 * (at + 1), 8));
        made.fetch_add(1, std::memory_order_relaxed);
        recorder.write(now(recorder, EventKind::kFree, 64 * (at + 1), 0));
        taken[at].store(false, std::memory_order_release);
      }
    });
  }
  std::thread reader([&] {
    while (!done.load()) recorder.drain();
  });
  for (std::thread& thread : threads) thread.join();
  done = true;
  reader.join();

  const Losses losses = recorder.losses();
  recorder.with_ledger([&](const Ledger& ledger) {
    if (losses.all() == 0) {
      EXPECT_EQ(ledger.totals().allocs, made.load());
      EXPECT_EQ(ledger.totals().frees, made.load());
      EXPECT_EQ(ledger.totals().frees_missed, 0);
      EXPECT_EQ(ledger.totals().frees_of_older, 0);
      EXPECT_EQ(ledger.totals().live_blocks, 0);
    }
    EXPECT_LE(ledger.totals().allocs + losses.all(), 2 * made.load());
  });
}

TEST(Recorder, a_forked_child_goes_on_with_what_was_and_its_own) {
  Recorder recorder;
  recorder.write(now(recorder, EventKind::kAlloc, 64, 8));
  recorder.before_fork();
  const pid_t child = fork();
  if (child == 0) {
    recorder.after_fork_in_child();
    recorder.write(now(recorder, EventKind::kAlloc, 128, 8));
    std::thread([&] { recorder.write(now(recorder, EventKind::kFree, 64, 0)); }).join();
    const uint64_t live =
        recorder.with_ledger([](const Ledger& ledger) { return ledger.totals().live_blocks; });
    _exit(live == 1 ? 0 : 1);
  }
  recorder.after_fork_in_parent();
  int status = -1;
  waitpid(child, &status, 0);

  EXPECT_EQ(status, 0);
  recorder.with_ledger([](const Ledger& ledger) { EXPECT_EQ(ledger.totals().live_blocks, 1); });
}

}  // namespace
}  // namespace tensorplay::track
