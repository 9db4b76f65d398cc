// Stacks of Python frames, taken in the middle of an operator without the GIL: the frames of a thread that is
// in C code stand still.
//
// The one file of this room that knows CPython.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "sites.h"

namespace tensorplay::track {

// The number of the calling thread's stack, 0 where it has no Python frames. At the first sight of a stack it
// takes the GIL, to keep the code objects alive whose addresses stand for its lines.
uint32_t capture_site();

// How many frames are taken, the innermost ones; 1 to kMostFrames.
void set_stack_depth(int frames);

struct FrameName {
  std::string file;
  std::string function;
  int line = 0;  // 0: unknown
};

// Innermost first. Needs the GIL.
std::vector<FrameName> frames_of(uint32_t site);

Sites& known_sites();

}  // namespace tensorplay::track
