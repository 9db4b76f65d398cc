#include "bytes.h"

#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "extent.h"

namespace tensorplay {
namespace {

// The bytes from the first to the last one that a tensor reaches.
struct Bytes {
  const std::byte* begin = nullptr;  // null where there are none
  int64_t count = 0;
  int64_t first = 0;       // of the element at index 0, from `begin`
  bool touchable = false;  // no file can be behind them
};

std::optional<Bytes> bytes_of(const TensorFacts& facts) {
  const bool readable = facts.kind == Kind::kStrided && facts.has_storage && facts.has_geometry() &&
                        !facts.symbolic && facts.impl.dtype.isScalarType() && facts.data.device.is_cpu() &&
                        !facts.is_packed() && !facts.storage.throws_on_read;
  if (!readable) return std::nullopt;
  Bytes out;
  if (facts.impl.numel == 0) return out;
  const std::optional<int64_t> begin = facts.first_byte();
  const std::optional<int64_t> end = facts.needed_nbytes();
  const bool inside = begin && end && *begin >= 0 && *end <= facts.storage.nbytes;
  if (facts.data.pointer == nullptr || !inside) return std::nullopt;
  out.begin = static_cast<const std::byte*>(facts.data.pointer) + *begin;
  out.count = *end - *begin;
  out.first = facts.impl.storage_offset * static_cast<int64_t>(facts.impl.itemsize) - *begin;
  out.touchable = facts.data.origin == DataOrigin::kCpuAllocator;
  return out;
}

// Shows the bytes of a tensor: the memory itself, or a copy of as much as is asked for and a little more.
class Window {
 public:
  Window(const Bytes& bytes, const Fetch& fetch) : bytes_(bytes), fetch_(fetch) {
    if (!bytes.touchable && bytes.count > 0) {
      buffer_ =
          std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(std::min(bytes.count, kMost)));
    }
  }

  // No more than this can be asked for at once.
  static constexpr int64_t kMost = int64_t{1} << 18;

  // Valid until the next call.
  const std::byte* at(int64_t begin, int64_t count) {
    if (bytes_.touchable) return bytes_.begin + begin;
    if (begin < begin_ || begin + count > end_) {
      // Read on where little is left out, as in a narrow column; a far jump may be one of many.
      const bool near = begin >= begin_ && begin < end_ + kAhead;
      const int64_t wanted = near ? std::max(count, kAhead) : count;
      const int64_t end = std::min(begin + wanted, bytes_.count);
      begin_ = end_ = 0;
      fetch_(bytes_.begin + begin, buffer_.get(), static_cast<size_t>(end - begin));
      begin_ = begin;
      end_ = end;
    }
    return buffer_.get() + (begin - begin_);
  }

 private:
  static constexpr int64_t kAhead = int64_t{1} << 14;

  const Bytes& bytes_;
  const Fetch& fetch_;
  std::unique_ptr<std::byte[]> buffer_;
  int64_t begin_ = 0;
  int64_t end_ = 0;
};

// A dimension of one or two tensors; strides in elements, 0 for a second tensor that is not there.
struct Dim {
  int64_t size = 1;
  int64_t stride = 0;
  int64_t other = 0;
};

// The same indices in another order, in as few dimensions as they fit: the outermost first, as they lie in
// the first tensor, and the innermost always there. `repeats` is how often all of them are the same elements.
struct Loops {
  std::vector<Dim> outer;
  Dim inner;
  int64_t repeats = 1;
};

Loops loops_of(DimSpan shape, DimSpan strides, DimSpan others) {
  Loops out;
  std::vector<Dim>& dims = out.outer;
  for (size_t i = 0; i < shape.size(); ++i) {
    const Dim dim{shape[i], strides[i], others.empty() ? 0 : others[i]};
    if (dim.stride == 0 && dim.other == 0) {
      out.repeats *= dim.size;
    } else if (dim.size != 1) {
      dims.push_back(dim);
    }
  }
  std::stable_sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) {
    return a.stride != b.stride ? a.stride > b.stride : a.other > b.other;
  });
  size_t kept = 0;
  for (const Dim& dim : dims) {
    Dim* const last = kept > 0 ? &dims[kept - 1] : nullptr;
    if (last != nullptr && last->stride == dim.stride * dim.size && last->other == dim.other * dim.size) {
      *last = {last->size * dim.size, dim.stride, dim.other};
    } else {
      dims[kept++] = dim;
    }
  }
  dims.resize(kept);
  if (!dims.empty()) {
    out.inner = dims.back();
    dims.pop_back();
  }
  return out;
}

// Calls visit(first, first in the other, count) for runs along the innermost dimension of at most `most`
// elements, until it answers false.
template <class Visit>
bool for_each_run(const Loops& loops, int64_t most, Visit visit) {
  const Dim& inner = loops.inner;
  std::vector<int64_t> index(loops.outer.size(), 0);
  while (true) {
    int64_t first = 0;
    int64_t other = 0;
    for (size_t dim = 0; dim < index.size(); ++dim) {
      first += index[dim] * loops.outer[dim].stride;
      other += index[dim] * loops.outer[dim].other;
    }
    for (int64_t done = 0; done < inner.size; done += most) {
      const int64_t count = std::min(most, inner.size - done);
      if (!visit(first + done * inner.stride, other + done * inner.other, count)) return false;
    }
    size_t dim = index.size();
    while (dim > 0 && ++index[dim - 1] == loops.outer[dim - 1].size) index[--dim] = 0;
    if (dim == 0) return true;
  }
}

// How many elements a window shows at once. No product here leaves 64 bits: all lie in this process's memory.
int64_t most_of(int64_t stride, int64_t itemsize) {
  const int64_t step = stride * itemsize;
  return step == 0 ? Window::kMost : 1 + (Window::kMost - itemsize) / step;
}

int64_t span_of(int64_t count, int64_t stride, int64_t itemsize) {
  return ((count - 1) * stride + 1) * itemsize;
}

// Formats as the bits say what is not finite, answered as 0 or 1. Without a branch, and in the width of the
// element: compilers make vectors of it, though SSE2 compares no 64 bits.
template <class T, T kInfinity>  // the exponent's bits
struct Ieee {
  using Word = T;
  static constexpr T kSign = static_cast<T>(T{1} << (sizeof(T) * 8 - 1));
  static constexpr T at_least(T bits, T limit) {
    const T magnitude = bits & static_cast<T>(kSign - 1);
    return static_cast<T>(static_cast<T>(magnitude + static_cast<T>(kSign - limit)) >> (sizeof(T) * 8 - 1));
  }
  static constexpr T is_nonfinite(T bits) { return at_least(bits, kInfinity); }
  static constexpr T is_nan(T bits) { return at_least(bits, kInfinity + 1); }
};

// The float8 types without infinities.
template <uint8_t kNan, uint8_t kMask = 0xFF>
struct OneNan {
  using Word = uint8_t;
  static constexpr uint8_t is_nonfinite(uint8_t bits) { return (bits & kMask) == kNan ? 1 : 0; }
  static constexpr uint8_t is_nan(uint8_t bits) { return is_nonfinite(bits); }
};

using Float64 = Ieee<uint64_t, 0x7FF0000000000000>;
using Float32 = Ieee<uint32_t, 0x7F800000>;
using Float16 = Ieee<uint16_t, 0x7C00>;
using BFloat16 = Ieee<uint16_t, 0x7F80>;
using Float8E5m2 = Ieee<uint8_t, 0x7C>;
using Float8E4m3 = OneNan<0x7F, 0x7F>;
using Float8Fnuz = OneNan<0x80>;
using Float8E8m0 = OneNan<0xFF>;

template <class Word>
Word word_at(const std::byte* bytes) {
  Word word = 0;
  std::memcpy(&word, bytes, sizeof(word));
  return word;
}

// Of `count` words, which the width of a word can count.
template <class Format>
void add_block(const std::byte* bytes, size_t count, Nonfinite& sum) {
  using Word = typename Format::Word;
  Word nonfinite = 0;
  Word nans = 0;
  for (size_t i = 0; i < count; ++i) {
    const Word bits = word_at<Word>(bytes + i * sizeof(Word));
    nonfinite = static_cast<Word>(nonfinite + Format::is_nonfinite(bits));
    nans = static_cast<Word>(nans + Format::is_nan(bits));
  }
  sum.nans += static_cast<int64_t>(nans);
  sum.infinities += static_cast<int64_t>(nonfinite - nans);
}

template <class Format>
void add_words(const std::byte* bytes, int64_t count, Nonfinite& sum) {
  using Word = typename Format::Word;
  constexpr int64_t kBlock = sizeof(Word) == 1 ? 128 : 1024;  // a number that -O2 makes vectors for
  for (; count >= kBlock; count -= kBlock, bytes += kBlock * sizeof(Word)) {
    add_block<Format>(bytes, kBlock, sum);
  }
  for (; count > 0; count -= 1, bytes += sizeof(Word)) add_block<Format>(bytes, 1, sum);
}

// Elements of one or two words, `stride` of them apart.
template <class Format, int kParts>
void add_elements(const std::byte* bytes, int64_t count, int64_t stride, Nonfinite& sum) {
  using Word = typename Format::Word;
  if (stride == 1) {
    Nonfinite words;
    add_words<Format>(bytes, count * kParts, words);
    if (kParts == 1 || (words.nans == 0 && words.infinities == 0)) {
      sum.nans += words.nans;
      sum.infinities += words.infinities;
      return;
    }
  }
  for (int64_t i = 0; i < count; ++i, bytes += stride * kParts * static_cast<int64_t>(sizeof(Word))) {
    bool nan = false;
    bool infinite = false;
    for (int part = 0; part < kParts; ++part) {
      const Word bits = word_at<Word>(bytes + part * sizeof(Word));
      const bool is_nan = Format::is_nan(bits) != 0;
      nan = nan || is_nan;
      infinite = infinite || (!is_nan && Format::is_nonfinite(bits) != 0);
    }
    sum.nans += nan ? 1 : 0;
    sum.infinities += infinite ? 1 : 0;
  }
}

using Add = void (*)(const std::byte* bytes, int64_t count, int64_t stride, Nonfinite& sum);

// Null for types without NaN and infinity.
Add add_for(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Double:
      return add_elements<Float64, 1>;
    case c10::ScalarType::Float:
      return add_elements<Float32, 1>;
    case c10::ScalarType::Half:
      return add_elements<Float16, 1>;
    case c10::ScalarType::BFloat16:
      return add_elements<BFloat16, 1>;
    case c10::ScalarType::ComplexDouble:
      return add_elements<Float64, 2>;
    case c10::ScalarType::ComplexFloat:
      return add_elements<Float32, 2>;
    case c10::ScalarType::ComplexHalf:
      return add_elements<Float16, 2>;
    case c10::ScalarType::Float8_e5m2:
      return add_elements<Float8E5m2, 1>;
    case c10::ScalarType::Float8_e4m3fn:
      return add_elements<Float8E4m3, 1>;
    case c10::ScalarType::Float8_e5m2fnuz:
    case c10::ScalarType::Float8_e4m3fnuz:
      return add_elements<Float8Fnuz, 1>;
    case c10::ScalarType::Float8_e8m0fnu:
      return add_elements<Float8E8m0, 1>;
    default:
      return nullptr;
  }
}

}  // namespace

std::optional<Nonfinite> count_nonfinite(const TensorFacts& facts, const Fetch& fetch) {
  const std::optional<Bytes> bytes = bytes_of(facts);
  if (!bytes) return std::nullopt;
  Nonfinite sum;
  const Add add = add_for(c10::typeMetaToScalarType(facts.impl.dtype));
  if (add != nullptr && facts.impl.numel > 0) {
    const auto itemsize = static_cast<int64_t>(facts.impl.itemsize);
    const Loops loops = loops_of(facts.shape(), facts.stride(), {});
    const int64_t stride = loops.inner.stride;
    Window window(*bytes, fetch);
    for_each_run(loops, most_of(stride, itemsize), [&](int64_t first, int64_t, int64_t count) {
      const int64_t span = span_of(count, stride, itemsize);
      add(window.at(bytes->first + first * itemsize, span), count, stride, sum);
      return true;
    });
    sum.nans *= loops.repeats;
    sum.infinities *= loops.repeats;
  }
  sum.elements = facts.impl.numel;
  return sum;
}

std::optional<bool> same_values(const TensorFacts& a, const TensorFacts& b, const Fetch& fetch) {
  const std::optional<Bytes> bytes = bytes_of(a);
  const std::optional<Bytes> other_bytes = bytes_of(b);
  const bool comparable = bytes && other_bytes && a.impl.dtype == b.impl.dtype &&
                          std::ranges::equal(a.shape(), b.shape()) && a.impl.is_conj == b.impl.is_conj &&
                          a.impl.is_neg == b.impl.is_neg;
  if (!comparable) return std::nullopt;
  if (a.impl.numel == 0) return true;
  const auto itemsize = static_cast<int64_t>(a.impl.itemsize);
  const Loops loops = loops_of(a.shape(), a.stride(), b.stride());
  const int64_t stride = loops.inner.stride;
  const int64_t other_stride = loops.inner.other;
  const int64_t most = std::min(most_of(stride, itemsize), most_of(other_stride, itemsize));
  Window window(*bytes, fetch);
  Window other_window(*other_bytes, fetch);
  return for_each_run(loops, most, [&](int64_t first, int64_t other, int64_t count) {
    const std::byte* left = window.at(bytes->first + first * itemsize, span_of(count, stride, itemsize));
    const std::byte* right =
        other_window.at(other_bytes->first + other * itemsize, span_of(count, other_stride, itemsize));
    if (stride == 1 && other_stride == 1) {
      return std::memcmp(left, right, static_cast<size_t>(count * itemsize)) == 0;
    }
    for (; count > 0; --count, left += stride * itemsize, right += other_stride * itemsize) {
      if (std::memcmp(left, right, static_cast<size_t>(itemsize)) != 0) return false;
    }
    return true;
  });
}

bool copy_bytes(const TensorFacts& source, const TensorFacts& target, const Fetch& fetch) {
  const std::optional<Bytes> bytes = bytes_of(source);
  const std::optional<Bytes> room = bytes_of(target);
  const bool fits = bytes && room && target.impl.dtype == c10::ScalarType::Byte &&
                    is_contiguous(target.shape(), target.stride()) && target.impl.numel == bytes->count;
  if (!fits) return false;
  if (bytes->count == 0) return true;
  if (!room->touchable || target.storage.throws_on_write) return false;
  auto* to = const_cast<std::byte*>(room->begin);
  const auto count = static_cast<size_t>(bytes->count);
  if (bytes->touchable) {
    std::memmove(to, bytes->begin, count);
  } else {
    fetch(bytes->begin, to, count);
  }
  return true;
}

}  // namespace tensorplay
