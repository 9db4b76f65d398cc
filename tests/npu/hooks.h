// Random numbers: one generator a device, which draws the very numbers a CPU generator of that seed draws.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace npu {

struct NpuGeneratorImpl final : at::CPUGeneratorImpl {
  explicit NpuGeneratorImpl(c10::DeviceIndex index);

 private:
  NpuGeneratorImpl* clone_impl() const override;
};

at::Generator& default_generator(c10::DeviceIndex index);
// Make one generator go on where the other is.
void copy_state(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to);

}  // namespace npu
