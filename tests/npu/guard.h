// Which device is current in this thread.
#pragma once

#include <c10/core/Device.h>

namespace npu {

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex index);  // answers the one before
void check_device(c10::DeviceIndex index);                 // raises for an ordinal that is none
// The device meant by one with or without an index.
c10::Device whole(c10::Device device);

}  // namespace npu
