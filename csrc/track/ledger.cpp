#include "ledger.h"

#include <algorithm>
#include <bit>

namespace tensorplay::track {
namespace {

// Never 0, which no map takes as a key.
uint64_t key_of(Origin origin) {
  return (uint64_t{origin.op} << 32 | origin.site) + 1;
}

Origin origin_of(const Event& event) {
  return {event.site, event.op};
}

}  // namespace

Ledger::Ledger(LedgerLimits limits)
    : blocks_(10, limits.block_bits), origins_(8, limits.origin_bits), freed_(10, limits.freed_bits) {}

void Ledger::apply(const Event& event) {
  switch (event.kind) {
    case EventKind::kAlloc:
      on_alloc(event);
      break;
    case EventKind::kFree:
      on_free(event);
      break;
    case EventKind::kTensor:
      on_tensor(event);
      break;
    case EventKind::kWrite: {
      ++totals_.writes;
      if (OriginTotals* of = totals_of(origin_of(event))) ++of->writes;
      if (Block* block = blocks_.find(event.address)) {
        block->written = event.time;
        block->writer = origin_of(event);
        ++block->writes;
      }
      break;
    }
    case EventKind::kCopy: {
      ++totals_.copies;
      totals_.copied_bytes += event.nbytes;
      totals_.copying += event.duration;
      if (OriginTotals* of = totals_of(origin_of(event))) {
        ++of->copies;
        of->copied_bytes += event.nbytes;
        of->copying += event.duration;
        of->longest_copy = std::max<uint64_t>(of->longest_copy, event.duration);
      }
      break;
    }
  }
}

OriginTotals* Ledger::totals_of(Origin origin) {
  bool is_new = false;
  OriginTotals* found = origins_.insert(key_of(origin), is_new);
  if (found == nullptr) {
    ++totals_.origins_missed;
  } else if (is_new) {
    found->origin = origin;
  }
  return found;
}

// What an origin had at the highest peak is noted at its first change after that peak: a new peak costs
// nothing.
void Ledger::change_live(OriginTotals* of, int64_t blocks, int64_t nbytes) {
  if (of != nullptr) {
    if (of->peak != peak_) {
      of->at_peak = of->live_bytes;
      of->peak = peak_;
    }
    of->live_blocks += static_cast<uint64_t>(blocks);
    of->live_bytes += static_cast<uint64_t>(nbytes);
  }
  totals_.live_blocks += static_cast<uint64_t>(blocks);
  totals_.live_bytes += static_cast<uint64_t>(nbytes);
}

void Ledger::on_alloc(const Event& event) {
  ++totals_.allocs;
  totals_.alloc_bytes += event.nbytes;
  OriginTotals* of = totals_of(origin_of(event));
  if (of != nullptr) {
    ++of->allocs;
    of->alloc_bytes += event.nbytes;
  }
  bool is_new = false;
  Block* block = blocks_.insert(event.address, is_new);
  if (block == nullptr) {
    ++totals_.blocks_missed;
    return;
  }
  if (!is_new) {
    ++totals_.frees_missed;
    forget(*block);
  }
  *block = Block{event.nbytes, event.time, totals_.allocs, origin_of(event), 0, {}, 0, 0};
  change_live(of, 1, static_cast<int64_t>(event.nbytes));
  if (totals_.live_bytes > totals_.peak_bytes) {
    totals_.peak_bytes = totals_.live_bytes;
    totals_.peak_time = event.time;
    ++peak_;
  }
}

// The block is gone: what it counted for goes with it.
void Ledger::forget(const Block& block) {
  OriginTotals* of = origins_.find(key_of(block.origin));
  change_live(of, -1, -static_cast<int64_t>(block.nbytes));
}

void Ledger::on_free(const Event& event) {
  const Block* block = blocks_.find(event.address);
  remember_freed(event.address, event.time);
  if (block == nullptr) {
    ++totals_.frees_of_older;
    return;
  }
  ++totals_.frees;
  totals_.freed_bytes += block->nbytes;
  if (OriginTotals* of = origins_.find(key_of(block->origin))) {
    ++of->frees;
    of->freed_bytes += block->nbytes;
  }
  const uint64_t age = event.time > block->born ? event.time - block->born : 1;
  const auto bucket = static_cast<size_t>(std::bit_width(age) - 1);
  ++lifetimes_.blocks[bucket];
  lifetimes_.nbytes[bucket] += block->nbytes;
  forget(*block);
  blocks_.erase(event.address);
}

void Ledger::remember_freed(uint64_t address, uint64_t now) {
  if (freed_.is_full()) {
    freed_.retain([&](const auto& entry) { return entry.value + kMemory > now; });
  }
  bool is_new = false;
  if (uint64_t* at = freed_.insert(address, is_new)) *at = now;
}

void Ledger::on_tensor(const Event& event) {
  ++totals_.tensors;
  if (OriginTotals* of = totals_of(origin_of(event))) ++of->tensors;
  if (event.address == 0) return;
  Block* block = blocks_.find(event.address);
  // The first tensor over a block came with it: its memory was there before only where an older block was.
  const bool is_first = block != nullptr && block->tensors == 0;
  if (block != nullptr) ++block->tensors;
  const uint64_t* freed = freed_.find(event.address);
  const bool was_freed = freed != nullptr && *freed + kMemory > event.time;
  const bool is_reusing = !is_first || was_freed;
  totals_.tensors_reusing += is_reusing ? 1 : 0;

  const uint64_t number = event.time / kSlice;
  const size_t at = number % kSlices;
  if (slice_numbers_[at] != number) {
    slice_numbers_[at] = number;
    slices_[at] = {};
  }
  ++slices_[at].tensors;
  slices_[at].reusing += is_reusing ? 1 : 0;
}

Reuse Ledger::reuse(uint64_t now) const {
  Reuse found;
  const uint64_t last = now / kSlice;
  for (size_t i = 0; i < kSlices; ++i) {
    if (slice_numbers_[i] > last || slice_numbers_[i] + kSlices <= last) continue;
    found.tensors += slices_[i].tensors;
    found.reusing += slices_[i].reusing;
  }
  return found;
}

std::vector<OriginTotals> Ledger::origins() const {
  std::vector<OriginTotals> all;
  all.reserve(origins_.size());
  origins_.each([&](const auto& entry) {
    all.push_back(entry.value);
    if (entry.value.peak != peak_) all.back().at_peak = entry.value.live_bytes;
  });
  return all;
}

}  // namespace tensorplay::track
