#include "owner.h"

#include <ATen/detail/AcceleratorHooksInterface.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <string_view>

namespace tensorplay {
namespace {

// Whether a driver was used in this process; absent where its hooks do not tell.
std::optional<bool> in_use(const at::AcceleratorHooksInterface& hooks) {
  try {
    return hooks.isBuilt() && hooks.hasPrimaryContext(0);
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

const at::AcceleratorHooksInterface* hooks_of(c10::DeviceType type) {
  switch (type) {
    case c10::DeviceType::CUDA:
      return &at::detail::getCUDAHooks();
    case c10::DeviceType::XPU:
      return &at::detail::getXPUHooks();
    case c10::DeviceType::PrivateUse1:
      return at::isPrivateUse1HooksRegistered() ? &at::detail::getPrivateUse1Hooks() : nullptr;
    default:
      return nullptr;
  }
}

}  // namespace

DriverAnswer ask_driver(c10::DeviceType type, const void* address) {
  // No backend can compute on such a device here, and none can have made memory on it.
  if (!c10::impl::hasDeviceGuardImpl(type)) return {Driver::kAbsent, std::nullopt};
  const at::AcceleratorHooksInterface* hooks = hooks_of(type);
  if (hooks == nullptr) return {};
  const std::optional<bool> used = in_use(*hooks);
  // A backend of one's own may not say whether it was used; those of PyTorch do.
  if (type != c10::DeviceType::PrivateUse1 && used == false) return {Driver::kAbsent, std::nullopt};
  try {
    return {Driver::kAnswered, hooks->getDeviceFromPtr(const_cast<void*>(address))};
  } catch (const c10::NotImplementedError&) {
    return {};
  } catch (const c10::Error& error) {
    const std::string_view text = error.what_without_backtrace();
    return {
        text.find("support getDeviceFromPtr") == std::string_view::npos ? Driver::kDenied : Driver::kUnknown,
        std::nullopt};
  } catch (const std::exception&) {  // SYCL has its own
    return {Driver::kDenied, std::nullopt};
  }
}

bool is_pinned(c10::DeviceType type, const void* address) {
  const at::AcceleratorHooksInterface* hooks = hooks_of(type);
  try {
    return hooks != nullptr && hooks->isPinnedPtr(address);
  } catch (const std::exception&) {
    return false;
  }
}

std::optional<c10::DeviceType> active_accelerator() {
  for (const c10::DeviceType type :
       {c10::DeviceType::PrivateUse1, c10::DeviceType::CUDA, c10::DeviceType::XPU}) {
    const at::AcceleratorHooksInterface* hooks = hooks_of(type);
    if (hooks != nullptr && in_use(*hooks) == true) return type;
  }
  return std::nullopt;
}

}  // namespace tensorplay
