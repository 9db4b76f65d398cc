// Memory for large tables that are touched all over.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

namespace tensorplay {

struct FreeTable {
  void operator()(void* table) const { std::free(table); }
};
template <class Slot>
using Table = std::unique_ptr<Slot[], FreeTable>;

constexpr size_t kHugePage = size_t{1} << 21;

// Zeroed; `count` is a power of two. In huge pages, where the system has them, a large table costs a few page
// faults instead of thousands.
template <class Slot>
Table<Slot> make_table(size_t count) {
  static_assert(std::is_trivially_copyable_v<Slot>);
  const size_t nbytes = count * sizeof(Slot);
  const bool large = nbytes >= kHugePage;
  void* slots = std::aligned_alloc(large ? kHugePage : alignof(Slot), nbytes);
  if (slots == nullptr) throw std::bad_alloc();
  if (large) madvise(slots, nbytes, MADV_HUGEPAGE);
  std::memset(slots, 0, nbytes);
  return Table<Slot>(static_cast<Slot*>(slots));
}

}  // namespace tensorplay
