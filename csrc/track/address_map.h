// From an address to a plain value: one block of memory, which grows up to a limit that is said beforehand.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

#include "../core/table.h"

namespace tensorplay::track {

template <class Value>
class AddressMap {
 public:
  struct Entry {
    uint64_t key;  // 0: free
    Value value;
  };

  // There is room for three quarters of two to the power of `most_bits`.
  AddressMap(unsigned first_bits, unsigned most_bits)
      : bits_(first_bits), most_bits_(most_bits), entries_(make_table<Entry>(size_t{1} << first_bits)) {}

  Value* find(uint64_t key) {
    Entry& entry = entries_[slot_of(key)];
    return entry.key == key ? &entry.value : nullptr;
  }
  const Value* find(uint64_t key) const { return const_cast<AddressMap*>(this)->find(key); }

  // The value under a key, zeroed where it was not there; null where the map is full. `is_new` says which.
  Value* insert(uint64_t key, bool& is_new) {
    size_t at = slot_of(key);
    is_new = entries_[at].key != key;
    if (!is_new) return &entries_[at].value;
    if (4 * (count_ + 1) > 3 * capacity()) {
      if (bits_ >= most_bits_) return nullptr;
      try {
        rebuild(bits_ + 1, [](const Entry&) { return true; });
      } catch (const std::bad_alloc&) {
        return nullptr;  // also in the middle of giving memory back, where nothing may be thrown
      }
      at = slot_of(key);
    }
    ++count_;
    entries_[at] = Entry{key, Value{}};
    return &entries_[at].value;
  }

  // What follows a gap moves into it, so that every search still ends at a free entry.
  void erase(uint64_t key) {
    size_t gap = slot_of(key);
    if (entries_[gap].key != key) return;
    const size_t mask = capacity() - 1;
    for (size_t at = (gap + 1) & mask; entries_[at].key != 0; at = (at + 1) & mask) {
      const size_t home = home_of(entries_[at].key);
      if (((at - home) & mask) >= ((at - gap) & mask)) {
        entries_[gap] = entries_[at];
        gap = at;
      }
    }
    entries_[gap].key = 0;
    --count_;
  }

  // Keeps what `is_kept` says; all where there is no memory to sort it.
  template <class Predicate>
  void retain(Predicate is_kept) {
    try {
      rebuild(bits_, is_kept);
    } catch (const std::bad_alloc&) {
      return;
    }
  }

  template <class Visit>
  void each(Visit visit) const {
    for (size_t at = 0; at < capacity(); ++at) {
      if (entries_[at].key != 0) visit(entries_[at]);
    }
  }

  size_t size() const { return count_; }
  bool is_full() const { return bits_ >= most_bits_ && 4 * (count_ + 1) > 3 * capacity(); }
  size_t nbytes() const { return capacity() * sizeof(Entry); }

 private:
  size_t capacity() const { return size_t{1} << bits_; }
  // Blocks lie at multiples of 64: the low bits say nothing, the product's high bits do.
  size_t home_of(uint64_t key) const { return key * uint64_t{0x9E3779B97F4A7C15} >> (64 - bits_); }

  size_t slot_of(uint64_t key) const {
    const size_t mask = capacity() - 1;
    size_t at = home_of(key);
    while (entries_[at].key != 0 && entries_[at].key != key) at = (at + 1) & mask;
    return at;
  }

  template <class Predicate>
  void rebuild(unsigned bits, Predicate is_kept) {
    const size_t before = capacity();
    const Table<Entry> old = std::exchange(entries_, make_table<Entry>(size_t{1} << bits));
    bits_ = bits;
    count_ = 0;
    for (size_t i = 0; i < before; ++i) {
      if (old[i].key == 0 || !is_kept(old[i])) continue;
      entries_[slot_of(old[i].key)] = old[i];
      ++count_;
    }
  }

  unsigned bits_;
  unsigned most_bits_;
  Table<Entry> entries_;
  size_t count_ = 0;
};

}  // namespace tensorplay::track
