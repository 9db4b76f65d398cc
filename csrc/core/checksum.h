// A sum over the bytes that a tensor shows, to see later whether somebody wrote to them.
//
// The one place that reads elements, and only when asked to.
#pragma once

#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <optional>

namespace tensorplay {

// Absent for what has no bytes of its own that this process can read: other devices, other kinds than strided
// tensors, elements past the storage. Equal bytes give equal sums, whatever the strides. O(bytes); the GIL
// may be released meanwhile only by who keeps the tensor alive.
std::optional<uint64_t> checksum_of(const c10::TensorImpl& impl);

}  // namespace tensorplay
