#include "differences.h"

#include <algorithm>

namespace tensorplay {
namespace {

bool has_memory(Kind kind) {
  return kind == Kind::kStrided || kind == Kind::kQuantized || kind == Kind::kNested;
}

// Wrappers too; a fake tensor stands for one on another device.
bool is_meta(const TensorFacts& facts) {
  return facts.kind != Kind::kFake && facts.is_meta();
}

bool same_shape(const TensorFacts& first, const TensorFacts& second) {
  return first.has_shape() && second.has_shape() && std::ranges::equal(first.impl.shape, second.impl.shape);
}

bool meets(const TensorFacts& first, const TensorFacts& second) {
  if (!first.has_storage || !second.has_storage) return false;
  if (first.storage.address == second.storage.address) return true;
  const auto one = memory_of(first);
  const auto other = one ? memory_of(second) : std::nullopt;
  return other && one->begin < other->end && other->begin < one->end;
}

bool is_small_part(const TensorFacts& facts, int64_t least_nbytes) {
  const auto memory = memory_of(facts);
  if (!memory || facts.storage.nbytes < least_nbytes) return false;
  const auto nbytes = facts.nbytes();
  return nbytes && *nbytes <= facts.storage.nbytes / 2;
}

bool reaches_past(const TensorFacts& facts) {
  if (!has_memory(facts.kind) || !facts.has_storage || facts.storage.symbolic) return false;
  const auto needed = facts.needed_nbytes();
  return needed && *needed > facts.storage.nbytes;
}

}  // namespace

uint32_t differences(const TensorFacts& first, const TensorFacts& second) {
  uint32_t found = 0;
  if (!same_shape(first, second)) found |= kShapeDiffers;
  if (first.impl.dtype != second.impl.dtype) found |= kDtypeDiffers;
  if (first.impl.device != second.impl.device) found |= kDeviceDiffers;
  if (first.kind != second.kind) found |= kKindDiffers;
  if (is_meta(first)) found |= kFirstIsMeta;
  if (is_meta(second)) found |= kSecondIsMeta;
  if (meets(first, second)) found |= kMemoryMeets;
  if (first.impl.requires_grad != second.impl.requires_grad) found |= kGradDiffers;
  return found;
}

std::optional<MemorySpan> memory_of(const TensorFacts& facts) {
  if (!has_memory(facts.kind) || !facts.has_storage || facts.storage.symbolic) return std::nullopt;
  if (facts.data.pointer == nullptr || facts.storage.nbytes <= 0) return std::nullopt;
  const auto begin = reinterpret_cast<uint64_t>(facts.data.pointer);
  return MemorySpan{begin, begin + static_cast<uint64_t>(facts.storage.nbytes)};
}

uint32_t marks(const TensorFacts& facts, int64_t least_nbytes) {
  uint32_t found = 0;
  if (is_meta(facts)) found |= kMeta;
  if (facts.impl.is_inference) found |= kInference;
  if (is_small_part(facts, least_nbytes)) found |= kSmallPart;
  if (reaches_past(facts)) found |= kPastStorage;
  return found;
}

}  // namespace tensorplay
