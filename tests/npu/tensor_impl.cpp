#include "tensor_impl.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <algorithm>
#include <cstring>

#include "allocator.h"

namespace npu {

namespace {

c10::intrusive_ptr<c10::StorageImpl> create_storage(c10::StorageImpl::use_byte_size_t use_byte_size,
                                                    c10::SymInt nbytes, c10::DataPtr data,
                                                    c10::Allocator* from, bool resizable) {
  // PyTorch hands in an empty DataPtr, of the CPU, where the storage is to bring its own memory.
  if (data == nullptr && data.device().is_cpu())
    data = from->allocate(static_cast<size_t>(nbytes.expect_int()));
  auto storage = c10::make_intrusive<NpuStorageImpl>(use_byte_size, nbytes, std::move(data), from, resizable);
  storage->description = {{nbytes.expect_int()}, {1}};
  return storage;
}

[[maybe_unused]] const bool registered =
    (c10::SetStorageImplCreate(c10::DeviceType::PrivateUse1, &create_storage), true);

bool python_decides(const c10::TensorImpl& impl) {
  if (c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python)) return false;
  return c10::impl::TorchDispatchModeTLS::stack_len() > 0 || impl.key_set().has(c10::DispatchKey::Python);
}

}  // namespace

template <typename Version>
c10::intrusive_ptr<c10::TensorImpl> NpuTensorImpl::copy(Version&& version, bool allow_metadata_change) const {
  // A mode or a subclass detaches in its own way: only PyTorch's method asks it.
  if (python_decides(*this)) {
    return TensorImpl::shallow_copy_and_detach(std::forward<Version>(version), allow_metadata_change);
  }
  auto copy = c10::make_intrusive<NpuTensorImpl>(c10::Storage(storage()), key_set(), dtype());
  copy_tensor_metadata(this, copy.get(), std::forward<Version>(version), allow_metadata_change);
  copy->refresh_numel();
  copy->refresh_contiguous();
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> NpuTensorImpl::shallow_copy_and_detach(
    const c10::VariableVersion& version, bool allow_metadata_change) const {
  return copy(version, allow_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> NpuTensorImpl::shallow_copy_and_detach(c10::VariableVersion&& version,
                                                                           bool allow_metadata_change) const {
  return copy(std::move(version), allow_metadata_change);
}

void NpuTensorImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& from) {
  copy_tensor_metadata(from.get(), this, version_counter(), allow_tensor_metadata_change());
  refresh_numel();
  refresh_contiguous();
}

c10::Storage make_storage(c10::Device device, size_t nbytes) {
  const c10::DeviceGuard guard(device);
  return c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(nbytes),
                                allocator().allocate(nbytes), &allocator(), /*resizable=*/true, device);
}

c10::Storage make_empty_storage(c10::Device device, size_t nbytes) {
  return c10::make_storage_impl(c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(nbytes),
                                c10::DataPtr(nullptr, device), &allocator(), /*resizable=*/true, device);
}

at::Tensor make_tensor(c10::Device device, at::IntArrayRef sizes, at::IntArrayRef strides,
                       c10::ScalarType dtype) {
  const auto type = c10::scalarTypeToTypeMeta(dtype);
  c10::Storage storage =
      make_storage(device, at::detail::computeStorageNbytes(sizes, strides, type.itemsize()));
  static_cast<NpuStorageImpl*>(storage.unsafeGetStorageImpl())->description = {sizes.vec(), strides.vec(),
                                                                               dtype};
  auto x = at::detail::make_tensor<NpuTensorImpl>(std::move(storage),
                                                  c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
  x.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return x;
}

void resize_storage(c10::StorageImpl* storage, size_t nbytes) {
  TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
  const c10::DeviceGuard guard(storage->device());
  c10::DataPtr data = allocator().allocate(nbytes);
  const size_t kept = std::min(nbytes, storage->nbytes());
  if (kept > 0 && storage->data() != nullptr) std::memcpy(data.mutable_get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(nbytes);
  if (auto* described = dynamic_cast<NpuStorageImpl*>(storage)) ++described->description.resizes;
}

}  // namespace npu
