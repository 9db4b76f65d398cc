// Where the addresses of this process lie: /proc/self/maps.
//
// Reading takes about half a millisecond, so nobody does it for one inspect(). No torch, no Python.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tensorplay {

struct Mapping {
  uintptr_t begin = 0;  // half-open
  uintptr_t end = 0;
  std::string permissions;  // as the kernel writes them: rw-p, r--s
  std::string path;         // a file's path, with " (deleted)" after it where that is so; [heap]; or empty
  uintptr_t offset = 0;     // where in the file `begin` lies
  std::string file;         // device and inode, "08:01 42"; empty where no file is behind it
};

// Sorted by address, as the kernel writes them. Lines of another form are passed over.
std::vector<Mapping> parse_maps(std::string_view text);

// Throws std::runtime_error where the file cannot be read.
std::vector<Mapping> read_own_maps();

// The mappings that hold a byte of [begin, end), in order; there may be gaps between them.
std::vector<const Mapping*> overlapping(const std::vector<Mapping>& maps, uintptr_t begin, uintptr_t end);

}  // namespace tensorplay
