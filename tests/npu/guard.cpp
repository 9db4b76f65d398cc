// The guard that PyTorch switches devices and streams with. Work is done when it is asked for: streams and
// events only keep their identity, and an event remembers when it was recorded.
#include "guard.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>

#include "allocator.h"

namespace npu {

namespace {

using Clock = std::chrono::steady_clock;

struct Event {
  Clock::time_point recorded;
};

constexpr c10::StreamId kPooledStreams = 32;  // a pool that comes round again, as CUDA's

thread_local c10::DeviceIndex current = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};
std::array<std::atomic<c10::StreamId>, kDevices> handed_out{};

c10::Stream stream(c10::Device device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, whole(device), id);
}

struct NpuGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return {type(), exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {type(), current}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < kDevices) current = device.index();
  }

  c10::Stream getStream(c10::Device device) const override {
    device = whole(device);
    return stream(device, current_streams[static_cast<size_t>(device.index())]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return next_stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return next_stream(device); }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const c10::Stream before = getStream(to.device());
    current_streams[static_cast<size_t>(before.device_index())] = to.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    static_cast<Event*>(*event)->recorded = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr,
                "Both events must be recorded before the time is asked for.");
    const auto elapsed = static_cast<Event*>(second)->recorded - static_cast<Event*>(first)->recorded;
    return std::chrono::duration<double, std::milli>(elapsed).count();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

 private:
  static c10::Stream next_stream(c10::Device device) {
    device = whole(device);
    return stream(device, 1 + handed_out[static_cast<size_t>(device.index())]++ % kPooledStreams);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, NpuGuard)

}  // namespace

void check_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "invalid npu device ordinal ", static_cast<int>(index),
              ": there are ", static_cast<int>(kDevices));
}

c10::DeviceIndex current_device() {
  return current;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) {
  check_device(index);
  const c10::DeviceIndex before = current;
  current = index;
  return before;
}

c10::Device whole(c10::Device device) {
  if (!device.has_index()) return {device.type(), current};
  check_device(device.index());
  return device;
}

}  // namespace npu
