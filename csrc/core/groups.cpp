#include "groups.h"

#include <bit>

namespace tensorplay {
namespace {

// Objects on the heap are 16 bytes apart at least.
uintptr_t unit(const c10::StorageImpl* storage) {
  return reinterpret_cast<uintptr_t>(storage) >> 4;
}

// Fibonacci hashing: addresses at equal distances spread evenly. The upper bits say where, the lower half
// who.
uint64_t hash(const c10::StorageImpl* storage) {
  return unit(storage) * uint64_t{0x9E3779B97F4A7C15};
}

}  // namespace

// Half full at most.
StorageGrouper::StorageGrouper(size_t most, uint32_t* group_ids, const c10::StorageImpl** storages)
    : bits_(std::bit_width(2 * most + 7)),
      slots_(make_table<uint64_t>(size_t{1} << bits_)),
      group_ids_(group_ids),
      storages_(storages) {
  TORCH_CHECK_VALUE(most < UINT32_MAX, "tensors can be grouped by storage up to 2^32 - 2 at once");
}

// Note [Half an address is enough]
// A slot keeps the lower half of the hash, which an odd factor makes from the lower half of the address's
// unit and no other: within one region of 64 GiB it is the address itself. Only storages of several regions
// need a second look, at an array that may miss the cache.
inline void StorageGrouper::learn(const c10::StorageImpl* storage) {
  if (storage == nullptr) return;
  const uintptr_t region = unit(storage) >> 32;
  if (region_ == 0) region_ = region;
  one_region_ = one_region_ && region == region_;
}

// Open addressing. A slot is 0, or half of the hash above one more than the group.
inline uint32_t StorageGrouper::number(const c10::StorageImpl* storage, uint64_t* slots, int bits) {
  if (storage != nullptr) [[likely]] {
    const uint64_t hashed = hash(storage);
    const size_t mask = (size_t{1} << bits) - 1;
    size_t at = hashed >> (64 - bits);
    for (; slots[at] != 0; at = (at + 1) & mask) {
      const uint64_t slot = slots[at];
      const auto group = static_cast<uint32_t>(slot) - 1;
      if (slot >> 32 == (hashed & UINT32_MAX) && (one_region_ || storages_[group] == storage)) return group;
    }
    slots[at] = hashed << 32 | (groups_ + 1);
  }
  storages_[groups_] = storage;
  return groups_++;
}

void StorageGrouper::add(std::span<const c10::TensorImpl* const> tensors) {
  uint64_t* const slots = slots_.get();
  const int bits = bits_;
  size_t now = added_;
  for (const c10::TensorImpl* impl : tensors) {
    __builtin_prefetch(&impl->unsafe_storage());
    const size_t at = now % kAhead;
    if (now >= 2 * kAhead) group_ids_[now - 2 * kAhead] = number(waiting_[at], slots, bits);
    if (now >= kAhead) {
      const c10::StorageImpl* storage = impls_[at]->unsafe_storage().unsafeGetStorageImpl();
      learn(storage);
      waiting_[at] = storage;
      __builtin_prefetch(&slots[hash(storage) >> (64 - bits)], 1);
    }
    impls_[at] = impl;
    ++now;
  }
  added_ = now;
}

size_t StorageGrouper::finish() {
  for (size_t now = added_; now < added_ + 2 * kAhead; ++now) {
    const size_t at = now % kAhead;
    if (now >= 2 * kAhead) group_ids_[now - 2 * kAhead] = number(waiting_[at], slots_.get(), bits_);
    if (now >= kAhead && now < added_ + kAhead) {
      waiting_[at] = impls_[at]->unsafe_storage().unsafeGetStorageImpl();
      learn(waiting_[at]);
    }
  }
  return groups_;
}

StorageGroups group_by_storage(std::span<const c10::TensorImpl* const> tensors) {
  StorageGroups groups;
  groups.group_ids.resize(tensors.size());
  groups.storages.resize(tensors.size());
  StorageGrouper grouper(tensors.size(), groups.group_ids.data(), groups.storages.data());
  grouper.add(tensors);
  groups.storages.resize(grouper.finish());
  return groups;
}

}  // namespace tensorplay
