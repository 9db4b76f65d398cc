// What the tracker writes down, in the order in which it happened. Plain: 40 bytes, copied through rings.
#pragma once

#include <cstdint>

namespace tensorplay::track {

enum class EventKind : uint8_t {
  kAlloc,   // a block came: `address`, `nbytes`
  kFree,    // it went
  kTensor,  // an operator answered a tensor: `address` is its storage's, `nbytes` the tensor's own
  kWrite,   // an operator wrote in place: `address` is the storage's
  kCopy,    // an operator copied: `nbytes`, `duration`
};

// Where memory lies, as far as copies are told apart.
enum class Place : uint8_t { kCpu, kPinned, kCuda, kPrivateUse, kOther };

struct Event {
  uint64_t time;     // the writer's in ticks, the ledger's in nanoseconds
  uint64_t address;  // of the storage's memory; of a kCopy what was written
  uint64_t nbytes;
  uint64_t duration;  // of a kCopy, as time
  uint32_t site;      // number of the stack, 0: none
  uint16_t op;        // number of the operator, 0: none
  EventKind kind;
  uint8_t places;  // of a kCopy: from, and to in the upper half
};
static_assert(sizeof(Event) == 40);

inline uint8_t places_of(Place from, Place to) {
  return static_cast<uint8_t>(static_cast<unsigned>(from) | static_cast<unsigned>(to) << 4);
}

}  // namespace tensorplay::track
