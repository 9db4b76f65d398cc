// Stacks by number. A stack is a row of words; the same row has the same number as long as the process lives.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "address_map.h"

namespace tensorplay::track {

constexpr size_t kMostFrames = 64;

// The words of one stack, innermost first, and their hash as they come.
class StackKey {
 public:
  void add(uint64_t word) {
    words_[count_++] = word;
    hash_ = (hash_ ^ word) * uint64_t{0x9E3779B97F4A7C15};
    hash_ ^= hash_ >> 29;
  }
  std::span<const uint64_t> words() const { return {words_.data(), count_}; }
  // Never 0.
  uint64_t hash() const { return (hash_ ^ count_) | 1; }
  size_t size() const { return count_; }

 private:
  std::array<uint64_t, kMostFrames> words_;
  size_t count_ = 0;
  uint64_t hash_ = 0;
};

// Two stacks are taken for one where 63 bits of hash are equal.
class Sites {
 public:
  explicit Sites(unsigned most_bits = 16) : numbers_(8, most_bits) {}

  // 0: not known yet. Takes the lock only where this thread has not met the stack lately.
  uint32_t find(const StackKey& key);

  // Its number, with what `note` answers kept beside its words: called under the lock, once for each stack. 0
  // where there is no more room.
  template <class Note>
  uint32_t add(const StackKey& key, Note note);

  std::vector<uint64_t> words_of(uint32_t number) const;
  size_t size() const;
  uint64_t missed() const;

  std::mutex& mutex() { return mutex_; }

 private:
  struct Seen {
    const Sites* of;
    uint64_t hash;
    uint32_t number;
  };
  static Seen& seen_by_this_thread(uint64_t hash);

  mutable std::mutex mutex_;
  AddressMap<uint32_t> numbers_;
  std::vector<uint64_t> words_;         // of all stacks, one after the other
  std::vector<uint64_t> begins_{0, 0};  // where those of a number begin; one more at the end
  uint64_t missed_ = 0;
};

template <class Note>
uint32_t Sites::add(const StackKey& key, Note note) {
  const std::lock_guard guard(mutex_);
  bool is_new = false;
  uint32_t* number = numbers_.insert(key.hash(), is_new);
  if (number == nullptr) {
    ++missed_;
    return 0;
  }
  if (is_new) {
    *number = static_cast<uint32_t>(begins_.size() - 1);
    const auto words = key.words();
    words_.insert(words_.end(), words.begin(), words.end());
    begins_.push_back(words_.size());
    note();
  }
  seen_by_this_thread(key.hash()) = {this, key.hash(), *number};
  return *number;
}

}  // namespace tensorplay::track
