// Which tensors have one storage.
//
// Refuses to look inside a storage or to count as an owner; depends on c10 alone. Two storages over the same
// bytes are two groups. Groups are numbered by first appearance; a tensor without a storage is a group by
// itself.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "table.h"

namespace tensorplay {

// Takes tensors a few at a time, so that a caller need not have them all as TensorImpl. Every tensor must
// stay alive until finish(); none is null.
class StorageGrouper {
 public:
  // Both arrays have a place for each of at most `most` tensors, fewer than 2^32 - 1. After finish()
  // `group_ids` has one for each tensor, and `storages` one for each group: null for a tensor without one.
  StorageGrouper(size_t most, uint32_t* group_ids, const c10::StorageImpl** storages);

  void add(std::span<const c10::TensorImpl* const> tensors);

  // Answers how many groups there are.
  size_t finish();

 private:
  // Note [Grouping waits for memory]
  // A tensor costs two reads that miss every cache: its storage field, and the slot of that storage. Each is
  // asked for so many tensors before it is used, so that many are on their way at once.
  static constexpr size_t kAhead = 32;

  void learn(const c10::StorageImpl* storage);
  uint32_t number(const c10::StorageImpl* storage, uint64_t* slots, int bits);

  int bits_;
  Table<uint64_t> slots_;
  uint32_t* group_ids_;
  const c10::StorageImpl** storages_;
  size_t added_ = 0;
  uint32_t groups_ = 0;
  // See [Half an address is enough].
  uintptr_t region_ = 0;
  bool one_region_ = true;
  std::array<const c10::TensorImpl*, kAhead> impls_{};
  std::array<const c10::StorageImpl*, kAhead> waiting_{};
};

struct StorageGroups {
  std::vector<uint32_t> group_ids;                // one a tensor
  std::vector<const c10::StorageImpl*> storages;  // one a group
};

StorageGroups group_by_storage(std::span<const c10::TensorImpl* const> tensors);

}  // namespace tensorplay
