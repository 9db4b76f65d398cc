#include "own_memory.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

namespace tensorplay {
namespace {

// A signal waits for no more than this.
constexpr size_t kAtOnce = size_t{64} << 20;

}  // namespace

OwnMemory::~OwnMemory() {
  if (file_ >= 0) close(file_);
}

ptrdiff_t OwnMemory::by_call(const std::byte* from, std::byte* to, size_t count) {
  const iovec local{to, count};
  const iovec remote{const_cast<std::byte*>(from), count};
  const ptrdiff_t got = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
  if (got < 0 && errno != EFAULT) call_allowed_ = false;
  return got;
}

ptrdiff_t OwnMemory::by_file(const std::byte* from, std::byte* to, size_t count) {
  if (file_ < 0) file_ = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  if (file_ < 0) {
    file_allowed_ = false;
    return -1;
  }
  ptrdiff_t got = 0;
  do {
    got = pread(file_, to, count, static_cast<off_t>(reinterpret_cast<uintptr_t>(from)));
  } while (got < 0 && errno == EINTR);
  return got;
}

void OwnMemory::read(const std::byte* from, std::byte* to, size_t count) {
  int error = EPERM;
  while (count > 0) {
    const size_t part = std::min(count, kAtOnce);
    ptrdiff_t got = -1;
    if (call_allowed_) {
      got = by_call(from, to, part);
      error = errno;
    }
    // Asked again where the call failed: drivers let this one read mappings of devices.
    if (got <= 0 && file_allowed_) {
      got = by_file(from, to, part);
      if (file_allowed_ || !call_allowed_) error = errno;
    }
    if (got <= 0) {
      if (!call_allowed_ && !file_allowed_) {
        throw UnreadableMemory(error,
                               "neither process_vm_readv() nor /proc/self/mem reads this process's memory");
      }
      throw UnreadableMemory(got == 0 ? EFAULT : error, "the file mapped behind it was cut");
    }
    from += got;
    to += got;
    count -= static_cast<size_t>(got);
  }
}

}  // namespace tensorplay
