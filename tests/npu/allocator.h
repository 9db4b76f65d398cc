// Memory of the two devices: blocks of host RAM that know which device they belong to.
//
// Derived from c10::DeviceAllocator, as torch.accelerator's memory figures ask for. Like torch_npu's, it does
// not report to the profiler. It has no cache: a freed block goes back to the host at once.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

namespace npu {

constexpr c10::DeviceIndex kDevices = 2;
constexpr size_t kCapacityBytes = size_t{64} << 30;  // of one device, as mem_get_info tells it
constexpr unsigned char kFreshByte = 0x5a;           // what unwritten memory holds

struct MemoryFigures {
  int64_t allocations = 0;
  int64_t frees = 0;
  int64_t live_blocks = 0;
  int64_t live_bytes = 0;  // as asked for, not as rounded
};

class NpuAllocator final : public c10::DeviceAllocator {
 public:
  // On the current device: callers hold a guard of the device they mean. No bytes are no allocation.
  c10::DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* dest, const void* src, size_t nbytes) const override;

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}  // all work is done when it is asked for
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  MemoryFigures figures(c10::DeviceIndex device);
  // The device whose block holds the address, its last byte included; none for memory of anybody else.
  std::optional<c10::DeviceIndex> owner_of(const void* address);
  // The n-th allocation from now on raises OutOfMemoryError, once; 0 takes the order back.
  void fail_next_allocation(int64_t n);
  bool used(c10::DeviceIndex device);

 private:
  struct Block {
    size_t nbytes;
    c10::DeviceIndex device;
  };
  struct Device {
    MemoryFigures figures;
    c10::CachingAllocator::Stat blocks, bytes, reserved;
    int64_t failures = 0;
    bool used = false;
  };

  void free(void* address);
  static void free_block(void* address);

  std::mutex mutex_;                     // guards all below
  std::map<uintptr_t, Block> blocks_{};  // by first address
  std::array<Device, kDevices> devices_{};
  int64_t fail_in_ = 0;
};

NpuAllocator& allocator();

}  // namespace npu
