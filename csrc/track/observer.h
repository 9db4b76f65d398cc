// Every operator that a thread calls, once: a boxed fallback at the topmost dispatch key, which only threads
// that we armed have in their sets. What operators call among each other is not seen.
#pragma once

#include <cstdint>

namespace tensorplay::track {

class Recorder;

// Answers the number of the stack that calls; may take its time at the first sight of one.
using CaptureSite = uint32_t (*)();

// Whose events are told from now on, with stacks where `capture` is not null. The calling thread is armed;
// others arm themselves at their first allocation. Registers the fallback at the first call: it stays, and is
// never reached without a watcher.
void watch_operators(Recorder* recorder, CaptureSite capture);

// Has the calling thread's operators observed, if anybody watches.
void arm_this_thread();

}  // namespace tensorplay::track
