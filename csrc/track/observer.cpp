#include "observer.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/TensorBase.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/function.h>

#include <array>
#include <atomic>
#include <bit>
#include <mutex>
#include <vector>

#include "../compat.h"
#include "context.h"
#include "forward.h"
#include "ops.h"
#include "recorder.h"

namespace tensorplay::track {
namespace {

constexpr c10::DispatchKey kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

std::atomic<Recorder*> watcher{nullptr};
std::atomic<CaptureSite> capture_site{nullptr};

ForwardSites& forward_sites() {
  static auto* const all = new ForwardSites;
  return *all;
}

// The stack that called what the running node is the backward of, marked as such; 0 where no node runs, or
// none is known for it.
uint32_t forward_site() {
  const auto node = torch::autograd::get_current_node();
  if (!node) return 0;
  const uint32_t site = forward_sites().find(node->thread_id(), node->sequence_nr());
  return site == 0 ? 0 : site | kInBackward;
}

// The storage's memory, as its DataPtr says: never materialised, no check that throws. Null where there is
// none.
const void* memory_of(const c10::TensorImpl& impl) {
  if (!impl.has_storage()) return nullptr;
  const c10::StorageImpl* storage = impl.unsafe_storage().unsafeGetStorageImpl();
  return storage == nullptr ? nullptr : compat::own_data_ptr(*storage).get();
}

Place place_of(const c10::TensorImpl& impl) {
  const std::optional<c10::Device> device = compat::own_device(impl);
  if (!device) return Place::kOther;
  switch (device->type()) {
    case c10::DeviceType::CPU:
      return Place::kCpu;
    case c10::DeviceType::CUDA:
      return Place::kCuda;
    case c10::DeviceType::PrivateUse1:
      return Place::kPrivateUse;
    default:
      return Place::kOther;
  }
}

uint64_t nbytes_of(const c10::TensorImpl& impl) {
  const int64_t numel = compat::own_numel(impl);
  return numel <= 0 ? 0 : static_cast<uint64_t>(numel) * compat::own_dtype(impl).itemsize();
}

// Calls with the implementation of each tensor of a value: one, or those of a list.
template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (tensor.defined()) visit(*tensor.unsafeGetTensorImpl());
  } else if (value.isTensorList()) {
    for (const c10::IValue& one : value.toListRef()) each_tensor(one, visit);
  }
}

// The call of an operator, from before it to after it.
class Call {
 public:
  Call(Recorder& recorder, const OpInfo& info, const torch::jit::Stack& stack)
      : recorder_(recorder), info_(info), before_(this_context) {
    this_context.op = info.number;
    if (const CaptureSite capture = capture_site.load(std::memory_order_relaxed)) {
      const uint32_t forward = forward_site();
      this_context.site = forward != 0 ? forward : capture();
      first_node_ = at::sequence_number::peek();
    }
    here_ = this_context;
    const size_t first = stack.size() - info.arguments;
    for (uint64_t left = info.written; left != 0; left &= left - 1) {
      each_tensor(stack[first + static_cast<size_t>(std::countr_zero(left))],
                  [&](const c10::TensorImpl& impl) { note_written(memory_of(impl)); });
    }
    for (size_t i = first; i < stack.size() && argument_ == nullptr; ++i) {
      each_tensor(stack[i], [&](const c10::TensorImpl& impl) {
        if (argument_ == nullptr) argument_ = &impl;
      });
    }
    if (info.copies) look_at_source(stack, first);
  }

  ~Call() { this_context = before_; }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Where it raised, nothing of this is told.
  void tell(const torch::jit::Stack& stack) {
    const uint64_t now = recorder_.ticks();
    note_nodes();
    for (size_t i = 0; i < written_count_; ++i) write(EventKind::kWrite, now, written_[i], 0);
    for (const void* memory : more_written_) write(EventKind::kWrite, now, memory, 0);
    const size_t first = stack.size() - info_.results;
    for (uint64_t left = info_.created; left != 0; left &= left - 1) {
      each_tensor(stack[first + static_cast<size_t>(std::countr_zero(left))],
                  [&](const c10::TensorImpl& impl) {
                    if (&impl == argument_) return;  // x.to(x.device) answers x
                    write(EventKind::kTensor, now, memory_of(impl), nbytes_of(impl));
                  });
    }
    if (info_.copies && info_.results > 0) tell_copy(stack[first], now);
  }

 private:
  // Nodes are numbered as they are made, each thread's by themselves.
  void note_nodes() {
    if ((here_.site & ~kInBackward) == 0) return;
    const uint64_t next = at::sequence_number::peek();
    if (next == first_node_) return;
    const uint64_t thread = at::RecordFunction::currentThreadId();
    for (uint64_t node = first_node_; node != next; ++node) {
      forward_sites().put(thread, node, here_.site & ~kInBackward);
    }
  }

  void note_written(const void* memory) {
    if (written_count_ < written_.size()) {
      written_[written_count_++] = memory;
    } else {
      more_written_.push_back(memory);
    }
  }

  void look_at_source(const torch::jit::Stack& stack, size_t first) {
    // copy_ and its kin write the first argument from the second.
    const bool writes_first = (info_.written & 1) != 0 && info_.arguments > 1;
    bool found = false;
    each_tensor(stack[first + (writes_first ? 1 : 0)], [&](const c10::TensorImpl& impl) {
      if (found) return;
      found = true;
      source_ = memory_of(impl);
      from_ = place_of(impl);
    });
    began_ = recorder_.ticks();
  }

  void tell_copy(const c10::IValue& result, uint64_t now) {
    each_tensor(result, [&](const c10::TensorImpl& impl) {
      const void* memory = memory_of(impl);
      if (memory == source_ && memory != nullptr) return;
      Event event = event_of(EventKind::kCopy, now, memory, nbytes_of(impl), here_);
      event.duration = now - began_;
      event.places = places_of(from_, place_of(impl));
      recorder_.write(event);
    });
  }

  void write(EventKind kind, uint64_t now, const void* memory, uint64_t nbytes) {
    recorder_.write(event_of(kind, now, memory, nbytes, here_));
  }

  Recorder& recorder_;
  const OpInfo& info_;
  Context before_;
  Context here_;
  const c10::TensorImpl* argument_ = nullptr;  // the first tensor: to compare, never to follow
  const void* source_ = nullptr;
  Place from_ = Place::kOther;
  uint64_t began_ = 0;
  uint64_t first_node_ = 0;
  size_t written_count_ = 0;
  std::array<const void*, 8> written_;
  std::vector<const void*> more_written_;
};

void observe(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Recorder* recorder = watcher.load(std::memory_order_acquire);
  if (recorder == nullptr) [[unlikely]] {
    // Nobody watches any more: this thread learns it here.
    c10::impl::tls_set_dispatch_key_included(kKey, false);
    op.callBoxed(stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard below(kKey);
  const OpInfo& info = info_of(op);
  Call call(*recorder, info, *stack);
  op.callBoxed(stack);
  call.tell(*stack);
}

}  // namespace

void watch_operators(Recorder* recorder, CaptureSite capture) {
  if (recorder != nullptr) {
    static std::once_flag once;
    std::call_once(once, [] {
      // Never taken back: other threads may be in the middle of a call.
      static auto* const kept = new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerFallback(
          kKey, c10::KernelFunction::makeFromBoxedFunction<&observe>(),
          "tensorplay's observer of operators"));
      (void)kept;
    });
  }
  capture_site.store(capture, std::memory_order_relaxed);
  watcher.store(recorder, std::memory_order_release);
  c10::impl::tls_set_dispatch_key_included(kKey, recorder != nullptr);
}

void arm_this_thread() {
  // The set itself is asked: leaving inference mode, for one, puts back what the set was.
  if (watcher.load(std::memory_order_relaxed) != nullptr && !c10::impl::tls_is_dispatch_key_included(kKey)) {
    c10::impl::tls_set_dispatch_key_included(kKey, true);
  }
}

}  // namespace tensorplay::track
