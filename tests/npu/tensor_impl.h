// Classes of their own for tensors and storages, as torch_npu has them.
//
// NpuTensorImpl adds nothing but its type, which its copies keep. NpuStorageImpl says what it was made for. A
// CPU Parameter that module.to("npu") moves stays a plain TensorImpl: a shallow copy changes fields, never
// the class.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <vector>

namespace npu {

struct StorageDescription {
  std::vector<int64_t> sizes, strides;  // of the tensor it was made for; bytes where it was made alone
  c10::ScalarType dtype = c10::ScalarType::Byte;
  int64_t resizes = 0;  // how often its memory was exchanged for a larger or smaller one
};

struct NpuStorageImpl final : c10::StorageImpl {
  using c10::StorageImpl::StorageImpl;
  StorageDescription description;
};

struct NpuTensorImpl final : c10::TensorImpl {
  NpuTensorImpl(c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype)
      : c10::TensorImpl(std::move(storage), keys, dtype) {}
  // A view keeps its base's keys: that of an inference tensor is one too.
  NpuTensorImpl(ImplType view, c10::Storage&& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype)
      : c10::TensorImpl(view, std::move(storage), keys, dtype) {}

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                              bool allow_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                              bool allow_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& from) override;

 private:
  template <typename Version>
  c10::intrusive_ptr<c10::TensorImpl> copy(Version&& version, bool allow_metadata_change) const;
};

// Memory and storage on that very device. The strides say how much memory there is.
at::Tensor make_tensor(c10::Device device, at::IntArrayRef sizes, at::IntArrayRef strides,
                       c10::ScalarType dtype);
c10::Storage make_storage(c10::Device device, size_t nbytes);
// A storage that says so many bytes and has none.
c10::Storage make_empty_storage(c10::Device device, size_t nbytes);
// Exchange a storage's memory for that many bytes; what fits is kept.
void resize_storage(c10::StorageImpl* storage, size_t nbytes);

}  // namespace npu
