// The tensors that a wrapper is made of, by the wrapper's own C++ type.
#define TENSORPLAY_COMPAT_INNER
#include "../compat.h"
#include "read.h"

namespace tensorplay {
namespace {

void add(std::vector<InnerTensor>& found, const char* role, const at::TensorBase& tensor) {
  if (tensor.defined()) found.push_back({role, &tensor});
}

}  // namespace

std::vector<InnerTensor> inner_tensors(const at::TensorBase& tensor, Kind kind) {
  std::vector<InnerTensor> found;
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  switch (kind) {
    case Kind::kBatched:
      if (const auto* batched = dynamic_cast<const at::functorch::BatchedTensorImpl*>(impl)) {
        add(found, "value", batched->value());
      }
      break;
    case Kind::kFunctorchWrapper:
      if (const at::Tensor* value = compat::functorch_value(*impl)) add(found, "value", *value);
      break;
    case Kind::kFunctional:
      if (const auto* wrapper = dynamic_cast<const at::FunctionalTensorWrapper*>(impl)) {
        add(found, "value", wrapper->value());
      }
      break;
    case Kind::kSparseCoo:
      if (const auto* sparse = dynamic_cast<const at::SparseTensorImpl*>(impl)) {
        add(found, "indices", compat::sparse_indices(*sparse));
        add(found, "values", compat::sparse_values(*sparse));
      }
      break;
    case Kind::kSparseCompressed:
      if (const auto* sparse = dynamic_cast<const at::SparseCsrTensorImpl*>(impl)) {
        add(found, "compressed_indices", sparse->compressed_indices());
        add(found, "plain_indices", sparse->plain_indices());
        add(found, "values", sparse->values());
      }
      break;
    case Kind::kNested:
      if (const auto* nested = dynamic_cast<const at::native::NestedTensorImpl*>(impl)) {
        add(found, "sizes", nested->get_nested_sizes());
      }
      break;
    default:
      break;
  }
  return found;
}

}  // namespace tensorplay
