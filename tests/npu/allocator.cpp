#include "allocator.h"

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>

#include "guard.h"

namespace npu {

namespace {

constexpr size_t kAlignment = 512;  // as large as a real device's, so that no address of two blocks is shared

size_t rounded(size_t nbytes) {
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

c10::CachingAllocator::StatArray all_pools(const c10::CachingAllocator::Stat& stat) {
  c10::CachingAllocator::StatArray stats;
  stats[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)] = stat;
  return stats;
}

}  // namespace

// Leaked on purpose: tensors that live until the interpreter is gone still free their blocks.
NpuAllocator& allocator() {
  static auto* const allocator = new NpuAllocator();
  return *allocator;
}

c10::DataPtr NpuAllocator::allocate(size_t nbytes) {
  const c10::Device current(c10::DeviceType::PrivateUse1, current_device());
  if (nbytes == 0) return {nullptr, nullptr, &free_block, current};

  std::lock_guard<std::mutex> lock(mutex_);
  Device& device = devices_[static_cast<size_t>(current.index())];
  const bool ordered = fail_in_ > 0 && --fail_in_ == 0;
  void* const address = ordered ? nullptr : std::aligned_alloc(kAlignment, rounded(nbytes));
  if (address == nullptr) {
    ++device.failures;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "NPU out of memory. Tried to allocate ", nbytes, " bytes on ",
                     current, ordered ? " (fail_next_allocation)." : ".");
  }
  std::memset(address, kFreshByte, nbytes);
  blocks_.emplace(reinterpret_cast<uintptr_t>(address), Block{nbytes, current.index()});
  device.used = true;
  ++device.figures.allocations;
  ++device.figures.live_blocks;
  device.figures.live_bytes += static_cast<int64_t>(nbytes);
  device.blocks.increase(1);
  device.bytes.increase(nbytes);
  device.reserved.increase(rounded(nbytes));
  return {address, address, &free_block, current};
}

void NpuAllocator::free(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto block = blocks_.find(reinterpret_cast<uintptr_t>(address));
  if (block == blocks_.end()) return;  // throwing out of a deleter would end the process
  Device& device = devices_[static_cast<size_t>(block->second.device)];
  const size_t nbytes = block->second.nbytes;
  ++device.figures.frees;
  --device.figures.live_blocks;
  device.figures.live_bytes -= static_cast<int64_t>(nbytes);
  device.blocks.decrease(1);
  device.bytes.decrease(nbytes);
  device.reserved.decrease(rounded(nbytes));
  blocks_.erase(block);
  std::free(address);
}

void NpuAllocator::free_block(void* address) {
  if (address != nullptr) allocator().free(address);
}

c10::DeleterFnPtr NpuAllocator::raw_deleter() const {
  return &free_block;
}

void NpuAllocator::copy_data(void* dest, const void* src, size_t nbytes) const {
  default_copy_data(dest, src, nbytes);
}

c10::CachingDeviceAllocator::DeviceStats NpuAllocator::getDeviceStats(c10::DeviceIndex index) {
  check_device(index);
  std::lock_guard<std::mutex> lock(mutex_);
  const Device& device = devices_[static_cast<size_t>(index)];
  c10::CachingDeviceAllocator::DeviceStats stats;
  stats.allocation = stats.active = stats.segment = all_pools(device.blocks);
  stats.allocated_bytes = stats.active_bytes = stats.requested_bytes = all_pools(device.bytes);
  stats.reserved_bytes = all_pools(device.reserved);
  stats.num_device_alloc = device.figures.allocations;
  stats.num_device_free = device.figures.frees;
  stats.num_ooms = device.failures;
  return stats;
}

void NpuAllocator::resetAccumulatedStats(c10::DeviceIndex index) {
  check_device(index);
  std::lock_guard<std::mutex> lock(mutex_);
  Device& device = devices_[static_cast<size_t>(index)];
  for (auto* stat : {&device.blocks, &device.bytes, &device.reserved}) stat->reset_accumulated();
  device.failures = 0;
}

void NpuAllocator::resetPeakStats(c10::DeviceIndex index) {
  check_device(index);
  std::lock_guard<std::mutex> lock(mutex_);
  Device& device = devices_[static_cast<size_t>(index)];
  for (auto* stat : {&device.blocks, &device.bytes, &device.reserved}) stat->reset_peak();
}

std::pair<size_t, size_t> NpuAllocator::getMemoryInfo(c10::DeviceIndex index) {
  check_device(index);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto reserved = static_cast<size_t>(devices_[static_cast<size_t>(index)].reserved.current);
  return {kCapacityBytes - std::min(reserved, kCapacityBytes), kCapacityBytes};
}

MemoryFigures NpuAllocator::figures(c10::DeviceIndex index) {
  check_device(index);
  std::lock_guard<std::mutex> lock(mutex_);
  return devices_[static_cast<size_t>(index)].figures;
}

std::optional<c10::DeviceIndex> NpuAllocator::owner_of(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(mutex_);
  auto block = blocks_.upper_bound(wanted);
  if (block == blocks_.begin()) return std::nullopt;
  --block;
  if (wanted - block->first >= block->second.nbytes) return std::nullopt;
  return block->second.device;
}

void NpuAllocator::fail_next_allocation(int64_t n) {
  std::lock_guard<std::mutex> lock(mutex_);
  fail_in_ = n;
}

bool NpuAllocator::used(c10::DeviceIndex index) {
  check_device(index);
  std::lock_guard<std::mutex> lock(mutex_);
  return devices_[static_cast<size_t>(index)].used;
}

namespace {
const c10::AllocatorRegisterer<c10::DeviceType::PrivateUse1> registered(&allocator());
}

}  // namespace npu
