#include "liveness.h"

#include <c10/util/intrusive_ptr.h>
#include <dlfcn.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>

#include "../compat.h"

namespace tensorplay {
namespace {

thread_local bool others_expected = false;
thread_local bool settled = false;

enum class Memory : uint8_t { kRead, kGone, kForbidden };

Memory read_word(const void* from, const void*& word) {
  const iovec local{&word, sizeof word};
  const iovec remote{const_cast<void*>(from), sizeof word};
  if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == static_cast<ssize_t>(sizeof word))
    return Memory::kRead;
  return errno == EFAULT ? Memory::kGone : Memory::kForbidden;
}

// Whether an address lies in a library: the tables of classes do, and nothing that an allocator writes into
// free memory.
bool is_in_library(const void* address) {
  thread_local std::array<const void*, 16> known{};
  thread_local size_t next = 0;
  if (address == nullptr) return false;
  if (std::ranges::find(known, address) != known.end()) return true;
  Dl_info found;
  if (dladdr(address, &found) == 0) return false;
  known[next++ % known.size()] = address;
  return true;
}

// Time enough for a thread that has just let the GIL go to take away the last reference to a tensor.
constexpr auto kSettle = std::chrono::microseconds(20);

// Whether there is a tensor that somebody owns.
bool has_owner(const c10::TensorImpl* impl) {
  const void* table = nullptr;
  const Memory memory = read_word(impl, table);
  if (memory == Memory::kForbidden) return true;
  if (memory == Memory::kGone || !is_in_library(table)) return false;
  const auto* target = static_cast<const c10::intrusive_ptr_target*>(impl);
  return dynamic_cast<const c10::TensorImpl*>(target) != nullptr && compat::ref_counts(*target).strong > 0;
}

}  // namespace

void expect_other_threads(bool expected) {
  others_expected = expected;
  settled = false;
}

bool is_still_tensor(const c10::TensorImpl* impl) {
  if (!others_expected) return true;
  if (!has_owner(impl)) return false;
  if (const void* python = impl->pyobj_slot()->load_pyobj(); python != nullptr) {
    const void* references = nullptr;  // what an object of Python begins with
    return read_word(python, references) != Memory::kGone && references != nullptr;
  }
  if (settled) return true;
  const auto end = std::chrono::steady_clock::now() + kSettle;
  while (std::chrono::steady_clock::now() < end) continue;
  settled = true;
  return has_owner(impl);
}

}  // namespace tensorplay
