// The operators that cannot run as the CPU's do: they make memory, move it, or exchange a tensor's storage.
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
#include <ATen/ops/detach_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/strides.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "guard.h"
#include "host_call.h"
#include "tensor_impl.h"
#include "transfers.h"

namespace npu {

namespace {

std::vector<int64_t> strides_of(at::IntArrayRef sizes, at::MemoryFormat format) {
  if (format == at::MemoryFormat::ChannelsLast) return c10::get_channels_last_strides_2d(sizes);
  if (format == at::MemoryFormat::ChannelsLast3d) return c10::get_channels_last_strides_3d(sizes);
  TORCH_CHECK(format == at::MemoryFormat::Contiguous, "unsupported memory format ", format);
  const auto strides = c10::contiguous_strides(sizes);
  return {strides.begin(), strides.end()};
}

void check_request(std::optional<at::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(at::kStrided) == at::kStrided, "the npu knows no ", *layout,
                              " tensors");
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> device, std::optional<bool> pinned,
                 std::optional<at::MemoryFormat> format) {
  check_request(layout, pinned);
  at::detail::check_size_nonnegative(sizes);
  return make_tensor(whole(device.value_or(at::kPrivateUse1)), sizes,
                     strides_of(sizes, format.value_or(at::MemoryFormat::Contiguous)),
                     c10::dtype_or_default(dtype));
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, std::optional<at::Device> device,
                         std::optional<bool> pinned) {
  check_request(layout, pinned);
  at::detail::check_size_nonnegative(sizes);
  return make_tensor(whole(device.value_or(at::kPrivateUse1)), sizes, strides, c10::dtype_or_default(dtype));
}

// Let the storage hold what the tensor reaches; it never shrinks.
void cover(const at::Tensor& x) {
  if (x.numel() == 0) return;
  const size_t needed = at::detail::computeStorageNbytes(x.sizes(), x.strides(), x.dtype().itemsize(),
                                                         static_cast<size_t>(x.storage_offset()));
  c10::StorageImpl* const storage = x.storage().unsafeGetStorageImpl();
  if (needed > storage->nbytes()) resize_storage(storage, needed);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes,
                         std::optional<at::MemoryFormat> format) {
  if (self.sizes() != sizes || format.has_value()) {
    at::detail::check_size_nonnegative(sizes);
    const auto wanted = format.value_or(at::MemoryFormat::Contiguous);
    TORCH_CHECK(wanted != at::MemoryFormat::Preserve, "Unsupported memory format", wanted);
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides_of(sizes, wanted));
  }
  cover(self);
  return self;
}

void set_storage(at::Tensor& self, const c10::Storage& source, int64_t offset, at::IntArrayRef sizes,
                 at::IntArrayRef strides) {
  TORCH_CHECK(source.device() == self.storage().device(),
              "Attempted to set the storage of a tensor on device \"", self.storage().device(),
              "\" to a storage on different device \"", source.device(),
              "\". This is no longer allowed; the devices must match.");
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  TORCH_CHECK(strides.empty() || strides.size() == sizes.size(), "unequal size length (", sizes.size(),
              ") and stride length (", strides.size(), ")");
  const auto contiguous = c10::contiguous_strides(sizes);
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      sizes, strides.empty() ? at::IntArrayRef(contiguous) : strides, offset);
  cover(self);
}

at::Tensor& set_source_storage(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  set_storage(self, source, 0, {numel}, {});
  return self;
}

at::Tensor& set_source_storage_offset(at::Tensor& self, at::Storage source, int64_t offset,
                                      at::IntArrayRef sizes, at::IntArrayRef strides) {
  set_storage(self, source, offset, sizes, strides);
  return self;
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  if (!self.is_same(source)) {
    set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  }
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  set_storage(self, make_storage(self.device(), 0), 0, {0}, {});
  return self;
}

// All that moves between memories comes through here, and nothing else does.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool) {
  const auto on_npu = dst.is_privateuseone() ? dst.device() : self.device();
  const c10::DeviceGuard guard(on_npu);
  HostCall call(on_npu);
  {
    const at::DisableRecordFunctionGuard unobserved;
    call.lend(dst).copy_(call.lend(self));
  }
  transfer(direction(self.device(), dst.device()), self.numel() * static_cast<int64_t>(self.element_size()));
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  return at::_ops::_local_scalar_dense::call(self.to(at::kCPU));
}

// module.to() asks whether a Parameter can stay the same object: between the CPU and this device it can.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  const auto dense = [](const at::Tensor& x) {
    return x.layout() == at::kStrided && (x.is_cpu() || x.is_privateuseone()) &&
           !x.key_set().has(c10::DispatchKey::Python);
  };
  return self.key_set() == from.key_set() || (dense(self) && dense(from));
}

void record_stream(at::Tensor&, at::Stream) {}

// PyTorch's kernels of these views, which are for every device, make a plain TensorImpl. They still serve
// tensors with this device's keys and without its memory, as fake ones are.
template <typename View>
at::Tensor view(const at::Tensor& self, const View& view) {
  if (!self.has_storage() || !self.storage().device().is_privateuseone() ||
      self.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return view(self);
  }
  HostCall call(self.storage().device());
  return call.take(view(call.lend(self)));
}

at::Tensor alias(const at::Tensor& self) {
  return view(self, [](const at::Tensor& x) { return at::native::alias(x); });
}

at::Tensor detach(const at::Tensor& self) {
  return view(self, [](const at::Tensor& x) { return at::native::detach(x); });
}

at::Tensor view_dtype(const at::Tensor& self, at::ScalarType dtype) {
  return view(self, [dtype](const at::Tensor& x) { return at::native::view_dtype(x, dtype); });
}

// PyTorch asks an unknown device for these two, whose default kernels raise.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
                       c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                       c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  SameDevice same("aten::convolution_overrideable");
  same.add(input, "input");
  same.add(weight, "weight");
  if (bias) same.add(*bias, "bias");
  const c10::DeviceGuard guard(*same.device());
  const at::DisableRecordFunctionGuard unobserved;
  HostCall call(*same.device());
  std::optional<at::Tensor> lent_bias;
  if (bias) lent_bias = call.lend(*bias);
  return call.take(at::_ops::convolution::call(call.lend(input), call.lend(weight), lent_bias, stride,
                                               padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
    c10::SymIntArrayRef stride, c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> output_mask) {
  SameDevice same("aten::convolution_backward_overrideable");
  same.add(grad_output, "grad_output");
  same.add(input, "input");
  same.add(weight, "weight");
  const c10::DeviceGuard guard(*same.device());
  const at::DisableRecordFunctionGuard unobserved;
  HostCall call(*same.device());
  const std::array<c10::SymInt, 1> bias_sizes{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  const auto [of_input, of_weight, of_bias] = at::_ops::convolution_backward::call(
      call.lend(grad_output), call.lend(input), call.lend(weight),
      at::OptionalSymIntArrayRef(c10::SymIntArrayRef(bias_sizes)), stride, padding, dilation, transposed,
      output_padding, groups, output_mask);
  return {call.take(of_input), call.take(of_weight), call.take(of_bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("set_", &set_nothing);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Storage_storage_offset", &set_source_storage_offset);
  m.impl("set_.source_Tensor", &set_source_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("alias", &alias);
  m.impl("detach", &detach);
  m.impl("view.dtype", &view_dtype);
  // PyTorch's kernel for every device calls the one with an out= tensor, which warns that it resizes it
  // (torch 2.13).
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// PyTorch would resolve these bits by a clone, whose copy would come here with the same bits again.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace npu
