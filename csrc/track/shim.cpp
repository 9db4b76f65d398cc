#include "shim.h"

#include <atomic>
#include <mutex>

#include "../core/read.h"
#include "context.h"
#include "observer.h"
#include "recorder.h"

namespace tensorplay::track {

thread_local Context this_context;

namespace {

std::atomic<Recorder*> watcher{nullptr};
c10::Allocator* inner = nullptr;
c10::DeleterFnPtr inner_delete = nullptr;

// Told before the memory goes: whoever gets the address next tells so afterwards.
void tell_and_delete(void* block) {
  if (block != nullptr) {
    if (Recorder* recorder = watcher.load(std::memory_order_acquire)) {
      recorder->write(event_of(EventKind::kFree, recorder->ticks(), block, 0, this_context));
    }
  }
  inner_delete(block);
}

class Shim final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    c10::DataPtr data = inner->allocate(nbytes);
    if (Recorder* recorder = watcher.load(std::memory_order_acquire)) [[unlikely]] {
      tell(*recorder, data, nbytes);
    }
    return data;
  }

  // A pointer got from raw_allocate() comes back here, and is told where it was; others pass through.
  c10::DeleterFnPtr raw_deleter() const override { return &tell_and_delete; }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    inner->copy_data(to, from, nbytes);
  }

 private:
  static void tell(Recorder& recorder, c10::DataPtr& data, size_t nbytes) {
    arm_this_thread();
    const void* block = data.get();
    if (block == nullptr || !data.compare_exchange_deleter(inner_delete, &tell_and_delete)) return;
    recorder.write(event_of(EventKind::kAlloc, recorder.ticks(), block, nbytes, this_context));
  }
};

}  // namespace

bool install_shim() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::Allocator* found = c10::GetAllocator(c10::DeviceType::CPU);
    const c10::DeleterFnPtr deleter = found->raw_deleter();
    if (deleter == nullptr || !found->is_simple_data_ptr(found->allocate(1))) return;
    inner_delete = deleter;
    inner = found;
    auto* const shim = new Shim;  // never taken away: storages keep pointers to it
    learn_front_allocator({shim, &tell_and_delete, inner, inner_delete});
    c10::SetAllocator(c10::DeviceType::CPU, shim);
  });
  return is_shim_installed();
}

bool is_shim_installed() {
  return inner != nullptr;
}

void watch_allocations(Recorder* recorder) {
  watcher.store(recorder, std::memory_order_release);
}

}  // namespace tensorplay::track
