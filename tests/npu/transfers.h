// What copies cost and how many there were, by direction.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace npu {

enum class Direction { kHostToDevice, kDeviceToHost, kDeviceToDevice };
constexpr int kDirections = 3;

struct TransferFigures {
  int64_t copies = 0;
  int64_t bytes = 0;
};

Direction direction(c10::Device from, c10::Device to);
// Count one copy and let the time go by that it is set to take. Copies without bytes are none.
void transfer(Direction direction, int64_t bytes);
TransferFigures transfer_figures(Direction direction);
void set_latency(Direction direction, int64_t fixed_ns, double ns_per_byte);

}  // namespace npu
