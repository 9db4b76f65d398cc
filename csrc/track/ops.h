// Which operators there are, by number, and what of their schemas the tracker goes by.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace tensorplay::track {

struct OpInfo {
  uint16_t number = 0;
  bool copies = false;  // a copy, wherever its result lies in other memory than its first tensor
  uint16_t arguments = 0;
  uint16_t results = 0;
  uint64_t written = 0;  // bit i: argument i is written in place
  uint64_t created = 0;  // bit i: result i is another tensor than an argument
};

// The same object for one operator as long as the process lives. Takes a lock at the first sight of an
// operator by a thread.
const OpInfo& info_of(const c10::OperatorHandle& op);

// For fork(): nobody may have it then.
std::mutex& ops_mutex();

// Its qualified name, by number; empty for none.
std::string op_name(uint16_t number);

}  // namespace tensorplay::track
