// A set of small integers, a bit each. Pure integers: no torch, no Python, no I/O.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <vector>

namespace tensorplay {

class Bitmap {
 public:
  explicit Bitmap(int64_t bits) : words_(static_cast<size_t>((bits + 63) / 64), 0) {}

  void set_run(int64_t begin, int64_t end) {
    used_ = std::max(used_, end);
    while (begin < end) {
      const int low = static_cast<int>(begin % 64);
      const int64_t bits = std::min<int64_t>(64 - low, end - begin);
      words_[static_cast<size_t>(begin / 64)] |= (~uint64_t{0} >> (64 - bits)) << low;
      begin += bits;
    }
  }

  // Ors shifted copies of what is there, doubling their number in each step: all steps together touch little
  // more than the last one.
  void repeat(int64_t count, int64_t stride) {
    for (int64_t copies = 1; copies < count;) {
      const int64_t added = std::min(copies, count - copies);
      or_shifted(added * stride);
      copies += added;
    }
  }

  // Bit i of `other` becomes bit i + at here. What lies past the end must be 0.
  void include(const Bitmap& other, int64_t at) {
    used_ = std::max(used_, std::min(other.used_ + at, this->end()));
    const auto whole = static_cast<size_t>(at / 64);
    const int bits = static_cast<int>(at % 64);
    for (size_t from = 0; from < other.words_.size(); ++from) {
      const uint64_t word = other.words_[from];
      if (whole + from < words_.size()) words_[whole + from] |= word << bits;
      if (bits != 0 && whole + from + 1 < words_.size()) words_[whole + from + 1] |= word >> (64 - bits);
    }
  }

  int64_t count() const {
    return std::accumulate(words_.begin(), words_.end(), int64_t{0},
                           [](int64_t sum, uint64_t word) { return sum + std::popcount(word); });
  }

  // Every unbroken run of bits that are set, as begin and end.
  template <class Visit>
  void for_each_run(Visit visit) const {
    for (int64_t begin = next(0, true); begin < end();) {
      const int64_t after = next(begin, false);
      visit(begin, after);
      begin = next(after, true);
    }
  }

  // Number of i with bit i set in `other` and bit i + at set here; at >= 0.
  int64_t count_common(const Bitmap& other, int64_t at) const {
    const auto whole = static_cast<size_t>(at / 64);
    const int bits = static_cast<int>(at % 64);
    int64_t count = 0;
    for (size_t i = 0; i < other.words_.size() && whole + i < words_.size(); ++i) {
      uint64_t here = words_[whole + i] >> bits;
      if (bits != 0 && whole + i + 1 < words_.size()) here |= words_[whole + i + 1] << (64 - bits);
      count += std::popcount(here & other.words_[i]);
    }
    return count;
  }

 private:
  int64_t end() const { return static_cast<int64_t>(words_.size()) * 64; }

  // The first bit at or after `from` that is, or is not, set; end() where there is none.
  int64_t next(int64_t from, bool set) const {
    while (from < end()) {
      const uint64_t word = words_[static_cast<size_t>(from / 64)];
      const uint64_t wanted = (set ? word : ~word) >> (from % 64);
      if (wanted != 0) return from + std::countr_zero(wanted);
      from += 64 - from % 64;
    }
    return end();
  }

  // From the top down, so that every source word is still the old one.
  void or_shifted(int64_t distance) {
    const auto whole = static_cast<size_t>(distance / 64);
    const int bits = static_cast<int>(distance % 64);
    used_ += distance;
    for (size_t to = static_cast<size_t>((used_ + 63) / 64); to-- > whole;) {
      uint64_t moved = words_[to - whole] << bits;
      if (bits != 0 && to > whole) moved |= words_[to - whole - 1] >> (64 - bits);
      words_[to] |= moved;
    }
  }

  int64_t used_ = 0;  // no bit from here on is set
  std::vector<uint64_t> words_;
};

}  // namespace tensorplay
