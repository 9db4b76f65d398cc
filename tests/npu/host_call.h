// Running an operator's CPU kernel on npu memory, in place of a kernel of the device.
//
// Note [Kernels borrow, they do not copy]
// The memory is in host RAM, so that a CPU tensor over the same bytes can be lent to the CPU kernel. Operands
// that share memory share it there too, an in-place operator writes where it should, and what a kernel
// answers over lent memory becomes a true view. at::native::cpu_fallback instead copies all operands to the
// CPU and back: each operator would be counted as copies and take their time, and views would silently become
// copies.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace npu {

class HostCall {
 public:
  // What the kernel makes anew goes to that device.
  explicit HostCall(c10::Device device) : device_(device) {}

  // A CPU tensor over the same memory; what is not on an npu is lent as it is.
  at::Tensor lend(const at::Tensor& x);
  // Give back sizes, strides and memory that the kernel changed. Call it before take().
  void settle();
  // The tensor of the device for one that the kernel answered.
  at::Tensor take(const at::Tensor& answer);

 private:
  struct Storages {
    c10::Storage on_npu;
    c10::Storage on_host;
    void* memory;  // what was lent
    size_t nbytes;
    c10::DispatchKeySet keys;  // of the tensor it was lent for
    bool lent;                 // or made by the kernel
  };
  struct Tensors {
    at::Tensor on_npu;
    at::Tensor on_host;
  };

  const c10::Storage& lend_storage(const at::Tensor& x);
  const Storages& take_storage(const c10::Storage& on_host);

  c10::Device device_;
  std::vector<Tensors> tensors_;
  std::vector<Storages> storages_;
};

// Raises like PyTorch's own kernels unless the tensors are on one device. A CPU tensor without dimensions may
// stand beside those of a device, as a number.
class SameDevice {
 public:
  explicit SameDevice(std::string operator_name) : operator_name_(std::move(operator_name)) {}
  void add(const at::Tensor& x, const std::string& argument, bool written = false);
  std::optional<c10::Device> device() const { return device_; }

 private:
  void refuse(const std::string& argument, c10::Device device, c10::Device others) const;

  std::string operator_name_;
  std::optional<c10::Device> device_;                             // of the first npu tensor
  std::vector<std::pair<std::string, c10::Device>> strangers_{};  // met before it
};

// The kernel of every operator that has none of its own here.
void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace npu
