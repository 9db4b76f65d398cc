// What a thread is doing, as far as the tracker follows it: the operator it is in, and the stack that called
// it.
#pragma once

#include <cstdint>

#include "event.h"

namespace tensorplay::track {

struct Context {
  uint32_t site = 0;
  uint16_t op = 0;
};

// Of plain data, so that it is there as long as its thread is, also while the thread's other data is being
// destroyed.
extern thread_local Context this_context;

// What happened to the memory at an address, while a thread did what `context` says.
inline Event event_of(EventKind kind, uint64_t time, const void* memory, uint64_t nbytes, Context context) {
  return {.time = time,
          .address = reinterpret_cast<uint64_t>(memory),
          .nbytes = nbytes,
          .duration = 0,
          .site = context.site,
          .op = context.op,
          .kind = kind,
          .places = 0};
}

}  // namespace tensorplay::track
