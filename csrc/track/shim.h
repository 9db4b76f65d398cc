// The one CPU allocator in front of PyTorch's own. It allocates nothing itself: it says what came and went.
//
// Memory outlives whoever watches it: a block that came while we watched is given back through our deleter,
// whenever that is. So the shim is put in place once and stays; without a watcher it costs one look at a
// flag.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>

namespace tensorplay::track {

class Recorder;

// Puts the shim in front of the CPU allocator, once in a process. False where that one's blocks are not
// simple: oneDNN and others need pointers that are their own contexts.
bool install_shim();
bool is_shim_installed();

// Whose events are told from now on; null for nobody's.
void watch_allocations(Recorder* recorder);

}  // namespace tensorplay::track
