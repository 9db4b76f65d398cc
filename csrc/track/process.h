// The process's one recorder, and what watches for it.
#pragma once

#include "recorder.h"

namespace tensorplay::track {

// Made at the first call, never destroyed: threads write to it until the process is gone.
Recorder& process_recorder();

struct Watching {
  bool stacks = true;
  int depth = 30;
};

// False where the CPU allocator cannot be followed. Starting twice, or stopping twice, changes nothing.
bool start_watching(const Watching& how);
void stop_watching();
bool is_watching();

}  // namespace tensorplay::track
