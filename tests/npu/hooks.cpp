#include "hooks.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>

#include <vector>

#include "allocator.h"
#include "guard.h"
#include "tensor_impl.h"

namespace npu {

NpuGeneratorImpl::NpuGeneratorImpl(c10::DeviceIndex index) {
  device_ = c10::Device(c10::DeviceType::PrivateUse1, index);
  key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
}

void copy_state(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to) {
  to.set_engine(from.engine());
  to.set_next_float_normal_sample(from.next_float_normal_sample());
  to.set_next_double_normal_sample(from.next_double_normal_sample());
}

NpuGeneratorImpl* NpuGeneratorImpl::clone_impl() const {
  auto* const copy = new NpuGeneratorImpl(device_.index());
  copy_state(const_cast<NpuGeneratorImpl&>(*this), *copy);  // its getters are not const
  return copy;
}

at::Generator& default_generator(c10::DeviceIndex index) {
  static auto* const generators = [] {
    auto* const made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < kDevices; ++i) made->push_back(at::make_generator<NpuGeneratorImpl>(i));
    return made;
  }();
  check_device(index);
  return (*generators)[static_cast<size_t>(index)];
}

namespace {

struct NpuHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}

  // As with CUDA, a device has a context from its first use on.
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return allocator().used(index); }

  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange_device(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index);
  }

  at::Device getDeviceFromPtr(void* data) const override {
    const auto owner = allocator().owner_of(data);
    TORCH_CHECK(owner.has_value(), "the address ", data, " is in no live block of an npu device");
    return {c10::DeviceType::PrivateUse1, *owner};
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index < 0 ? current_device() : index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<NpuGeneratorImpl>(index < 0 ? current_device() : index);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), nbytes);
  }
};

[[maybe_unused]] const bool registered = (at::RegisterPrivateUse1HooksInterface(new NpuHooks()), true);

}  // namespace

}  // namespace npu
