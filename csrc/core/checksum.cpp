#include "checksum.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <vector>

#include "read.h"

namespace tensorplay {
namespace {

// Four lanes of multiply and rotate over words, as the fast non-cryptographic hashes have them.
class Sum {
 public:
  void add(const std::byte* bytes, size_t count) {
    total_ += count;
    for (; count >= kBlock; bytes += kBlock, count -= kBlock) {
      for (size_t lane = 0; lane < lanes_.size(); ++lane) mix(lane, word_at(bytes + lane * 8, 8));
    }
    for (size_t lane = 0; count > 0; lane = (lane + 1) % lanes_.size()) {
      const size_t part = count < 8 ? count : 8;
      mix(lane, word_at(bytes, part));
      bytes += part;
      count -= part;
    }
  }

  uint64_t value() const {
    uint64_t out = total_;
    for (const uint64_t lane : lanes_) out = (out ^ lane ^ lane >> 29) * kSecond;
    return out ^ out >> 32;
  }

 private:
  static constexpr size_t kBlock = 32;
  static constexpr uint64_t kFirst = 0x9E3779B185EBCA87;
  static constexpr uint64_t kSecond = 0xC2B2AE3D27D4EB4F;

  static uint64_t word_at(const std::byte* bytes, size_t count) {
    uint64_t word = 0;
    std::memcpy(&word, bytes, count);
    return word;
  }
  void mix(size_t lane, uint64_t word) {
    const uint64_t mixed = (lanes_[lane] + word * kSecond);
    lanes_[lane] = (mixed << 31 | mixed >> 33) * kFirst;
  }

  std::array<uint64_t, 4> lanes_{kFirst, kSecond, 0, kFirst ^ kSecond};
  uint64_t total_ = 0;
};

// Element by element, the innermost dimensions that lie in one piece at once.
void add_elements(const TensorFacts& facts, const std::byte* first, Sum& sum) {
  const DimSpan shape = facts.shape();
  const DimSpan stride = facts.stride();
  const auto itemsize = static_cast<int64_t>(facts.impl.itemsize);
  size_t outer = shape.size();
  int64_t piece = 1;
  while (outer > 0 && (stride[outer - 1] == piece || shape[outer - 1] == 1)) piece *= shape[--outer];
  std::vector<int64_t> index(outer, 0);
  while (true) {
    int64_t offset = 0;
    for (size_t dim = 0; dim < outer; ++dim) offset += index[dim] * stride[dim];
    sum.add(first + offset * itemsize, static_cast<size_t>(piece * itemsize));
    size_t dim = outer;
    while (dim > 0 && ++index[dim - 1] == shape[dim - 1]) index[--dim] = 0;
    if (dim == 0) return;
  }
}

}  // namespace

std::optional<uint64_t> checksum_of(const c10::TensorImpl& impl) {
  TensorFacts facts;
  read_tensor(impl, facts);
  const bool readable = facts.kind == Kind::kStrided && facts.has_storage && facts.has_geometry() &&
                        !facts.symbolic && facts.data.device.is_cpu() && !facts.is_packed();
  if (!readable) return std::nullopt;
  Sum sum;
  if (facts.impl.numel == 0) return sum.value();
  const std::optional<int64_t> needed = facts.needed_nbytes();
  const bool inside = needed && *needed <= facts.storage.nbytes && facts.first_byte().value_or(-1) >= 0;
  if (facts.data.pointer == nullptr || !inside) return std::nullopt;
  const auto* bytes = static_cast<const std::byte*>(facts.data.pointer);
  add_elements(facts, bytes + facts.impl.storage_offset * static_cast<int64_t>(facts.impl.itemsize), sum);
  return sum.value();
}

}  // namespace tensorplay
