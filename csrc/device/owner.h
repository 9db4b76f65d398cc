// Whose memory an address is, as a device's own driver says it.
//
// Refuses to initialise a driver, and to ask one that is not: the answer is then known from that alone, or
// not known. No Python.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <optional>

namespace tensorplay {

enum class Driver : uint8_t {
  kUnknown,   // there is none to ask, or it does not answer this
  kAnswered,  // the address is of `device`
  kDenied,    // the driver says that the address is not its own
  kAbsent,    // no backend for such devices is loaded, or its driver was not used in this process
};

struct DriverAnswer {
  Driver driver = Driver::kUnknown;
  std::optional<c10::Device> device;  // kAnswered
};

// What the driver of a type of device says of an address. A denial is slow: the drivers throw. `type` is not
// CPU.
DriverAnswer ask_driver(c10::DeviceType type, const void* address);

// Whether an address is memory of the host that a driver pinned.
bool is_pinned(c10::DeviceType type, const void* address);

// The type of device that this process computes on beside the CPU, where a driver was used already.
std::optional<c10::DeviceType> active_accelerator();

}  // namespace tensorplay
