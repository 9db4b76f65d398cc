#include "sites.h"

namespace tensorplay::track {

Sites::Seen& Sites::seen_by_this_thread(uint64_t hash) {
  constexpr size_t kSeen = 1024;
  static thread_local Seen seen[kSeen];
  return seen[hash >> 54];
}

uint32_t Sites::find(const StackKey& key) {
  Seen& seen = seen_by_this_thread(key.hash());
  if (seen.hash == key.hash() && seen.of == this) [[likely]]
    return seen.number;
  const std::lock_guard guard(mutex_);
  const uint32_t* number = numbers_.find(key.hash());
  if (number == nullptr) return 0;
  seen = {this, key.hash(), *number};
  return *number;
}

std::vector<uint64_t> Sites::words_of(uint32_t number) const {
  const std::lock_guard guard(mutex_);
  if (number == 0 || number + 1 >= begins_.size()) return {};
  const auto first = words_.begin();
  return {first + static_cast<ptrdiff_t>(begins_[number]),
          first + static_cast<ptrdiff_t>(begins_[number + 1])};
}

size_t Sites::size() const {
  const std::lock_guard guard(mutex_);
  return begins_.size() - 2;
}

uint64_t Sites::missed() const {
  const std::lock_guard guard(mutex_);
  return missed_;
}

}  // namespace tensorplay::track
