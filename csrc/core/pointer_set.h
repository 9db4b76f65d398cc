// A set of addresses: one block of memory, no node for each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tensorplay {

class PointerSet {
 public:
  PointerSet() : slots_(size_t{1} << kFirstBits), bits_(kFirstBits) {}

  // Whether it was not there before; not for null.
  bool insert(const void* pointer) {
    if (2 * ++count_ > slots_.size()) grow();
    const bool is_new = put(pointer);
    count_ -= is_new ? 0 : 1;
    return is_new;
  }

  bool contains(const void* pointer) const {
    for (size_t at = slot_of(pointer); slots_[at] != nullptr; at = (at + 1) & (slots_.size() - 1)) {
      if (slots_[at] == pointer) return true;
    }
    return false;
  }

  size_t size() const { return count_; }

 private:
  static constexpr int kFirstBits = 6;

  size_t slot_of(const void* pointer) const {
    return reinterpret_cast<uint64_t>(pointer) * uint64_t{0x9E3779B97F4A7C15} >> (64 - bits_);
  }

  bool put(const void* pointer) {
    size_t at = slot_of(pointer);
    for (; slots_[at] != nullptr; at = (at + 1) & (slots_.size() - 1)) {
      if (slots_[at] == pointer) return false;
    }
    slots_[at] = pointer;
    return true;
  }

  void grow() {
    const std::vector<const void*> old = std::move(slots_);
    slots_.assign(size_t{1} << ++bits_, nullptr);
    for (const void* pointer : old) {
      if (pointer != nullptr) put(pointer);
    }
  }

  std::vector<const void*> slots_;
  int bits_;
  size_t count_ = 0;
};

}  // namespace tensorplay
