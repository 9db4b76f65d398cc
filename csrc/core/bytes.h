// What the elements of a tensor hold: NaNs and infinities, the same bytes as another's, a copy of them.
//
// Memory of PyTorch's own CPU allocator is touched; whatever else (mapped files, their slices, borrowed
// memory) is read through Fetch, for a file that is cut under its map must not end the process. Nothing here
// runs an operator or changes a version. Needs no GIL, but that the tensors stay alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>

#include "records.h"

namespace tensorplay {

// Copies bytes that may not be there any more; throws where they are not.
using Fetch = std::function<void(const std::byte* from, std::byte* to, size_t count)>;

// A complex element is both where one part is NaN and the other infinite.
struct Nonfinite {
  int64_t nans = 0;
  int64_t infinities = 0;
  int64_t elements = 0;  // all that were looked at: one for each index
};

// Absent for what has no bytes of its own that this process can read: other devices, other kinds than strided
// tensors, elements past the storage. O(elements), those of stride 0 once.
std::optional<Nonfinite> count_nonfinite(const TensorFacts& facts, const Fetch& fetch);

// Whether each element has the same bytes in both, wherever they lie: NaNs are equal to themselves, 0.0 is
// not to -0.0. Absent too where dtype, shape, or a pending conjugation or negation differ.
std::optional<bool> same_values(const TensorFacts& a, const TensorFacts& b, const Fetch& fetch);

// The bytes from the first to the last one that `source` reaches, into all of `target`: a contiguous uint8
// tensor of that many, in memory of PyTorch's CPU allocator. False where one of them is none such. Where
// Fetch throws, some are copied.
bool copy_bytes(const TensorFacts& source, const TensorFacts& target, const Fetch& fetch);

}  // namespace tensorplay
