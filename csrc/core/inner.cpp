// The tensors that a wrapper is made of, by the wrapper's own C++ type.
#define TENSORPLAY_COMPAT_INNER
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <optional>

#include "../compat.h"
#include "read.h"

namespace tensorplay {
namespace {

void add(std::vector<InnerTensor>& found, const char* role, const at::TensorBase& tensor) {
  if (tensor.defined()) found.push_back({role, &tensor});
}

// Copies this process's own memory without touching it: an address that nobody may read is an error, no
// signal.
bool copy_safely(const void* from, void* to, size_t bytes) {
  const int memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  if (memory < 0) return false;
  size_t done = 0;
  while (done < bytes) {
    const auto at = static_cast<off_t>(reinterpret_cast<uintptr_t>(from) + done);
    const ssize_t count = pread(memory, static_cast<char*>(to) + done, bytes - done, at);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    done += static_cast<size_t>(count);
  }
  close(memory);
  return done == bytes;
}

// The rows of a contiguous integer tensor in CPU memory, copied; a vector is a column.
struct IntegerRows {
  std::vector<int64_t> values;
  int64_t count = 0;
  int64_t length = 0;

  DimSpan row(int64_t i) const { return {values.data() + i * length, static_cast<size_t>(length)}; }
};

std::optional<IntegerRows> integer_rows(const at::TensorBase& tensor) {
  if (!tensor.defined()) return std::nullopt;
  TensorFacts facts;
  read_tensor(*tensor.unsafeGetTensorImpl(), facts);
  const size_t dims = facts.impl.shape.size();
  const bool plain = facts.kind == Kind::kStrided && facts.has_storage && facts.has_geometry() &&
                     facts.data.device.is_cpu() && facts.data.pointer != nullptr && !facts.storage.symbolic &&
                     facts.impl.dtype == c10::ScalarType::Long && (dims == 1 || dims == 2) &&
                     is_contiguous(facts.shape(), facts.stride());
  if (!plain || facts.needed_nbytes().value_or(INT64_MAX) > facts.storage.nbytes) return std::nullopt;
  const auto* data = static_cast<const int64_t*>(facts.data.pointer) + facts.impl.storage_offset;
  IntegerRows rows{std::vector<int64_t>(static_cast<size_t>(facts.impl.numel)), facts.shape()[0],
                   dims == 2 ? facts.shape()[1] : 1};
  if (!copy_safely(data, rows.values.data(), rows.values.size() * sizeof(int64_t))) return std::nullopt;
  return rows;
}

}  // namespace

void read_nested(const c10::TensorImpl& impl, TensorFacts& facts) {
  const auto* nested = dynamic_cast<const at::native::NestedTensorImpl*>(&impl);
  if (nested == nullptr) return;
  const std::optional<IntegerRows> sizes = integer_rows(nested->get_nested_sizes());
  const std::optional<IntegerRows> strides = integer_rows(nested->get_nested_strides());
  const std::optional<IntegerRows> offsets = integer_rows(nested->get_storage_offsets());
  if (!sizes || !strides || !offsets || strides->count != sizes->count || offsets->count != sizes->count ||
      strides->length != sizes->length) {
    return;
  }
  NestedFacts all;
  all.dim = sizes->length + 1;
  bool first = true;
  for (int64_t i = 0; i < sizes->count; ++i) {
    const std::optional<int64_t> cells = count_elements(sizes->row(i));
    const std::optional<CellRange> range = cell_range(sizes->row(i), strides->row(i), offsets->row(i)[0]);
    if (!cells || !range || __builtin_add_overflow(all.numel, *cells, &all.numel)) return;
    if (*cells == 0) continue;
    all.range.begin = first ? range->begin : std::min(all.range.begin, range->begin);
    all.range.end = std::max(all.range.end, range->end);
    first = false;
  }
  facts.nested = all;
}

std::vector<InnerTensor> inner_tensors(const c10::TensorImpl& impl, Kind kind) {
  std::vector<InnerTensor> found;
  switch (kind) {
    case Kind::kBatched:
      if (const auto* batched = dynamic_cast<const at::functorch::BatchedTensorImpl*>(&impl)) {
        add(found, "value", batched->value());
      }
      break;
    case Kind::kFunctorchWrapper:
      if (const at::Tensor* value = compat::functorch_value(impl)) add(found, "value", *value);
      break;
    case Kind::kFunctional:
      if (const auto* wrapper = dynamic_cast<const at::FunctionalTensorWrapper*>(&impl)) {
        add(found, "value", wrapper->value());
      }
      break;
    case Kind::kSparseCoo:
      if (const auto* sparse = dynamic_cast<const at::SparseTensorImpl*>(&impl)) {
        add(found, "indices", compat::sparse_indices(*sparse));
        add(found, "values", compat::sparse_values(*sparse));
      }
      break;
    case Kind::kSparseCompressed:
      if (const auto* sparse = dynamic_cast<const at::SparseCsrTensorImpl*>(&impl)) {
        add(found, "compressed_indices", sparse->compressed_indices());
        add(found, "plain_indices", sparse->plain_indices());
        add(found, "values", sparse->values());
      }
      break;
    case Kind::kNested:
      if (const auto* nested = dynamic_cast<const at::native::NestedTensorImpl*>(&impl)) {
        add(found, "sizes", nested->get_nested_sizes());
      }
      break;
    default:
      break;
  }
  return found;
}

}  // namespace tensorplay
