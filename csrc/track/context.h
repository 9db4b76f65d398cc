// What a thread is doing, as far as the tracker follows it: the operator it is in, and the stack that called
// it.
#pragma once

#include <cstdint>

namespace tensorplay::track {

struct Context {
  uint32_t site = 0;
  uint16_t op = 0;
};

// Of plain data, so that it is there as long as its thread is, also while the thread's other data is being
// destroyed.
extern thread_local Context this_context;

}  // namespace tensorplay::track
