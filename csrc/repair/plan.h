// What has to hold before a DTensor's body may be exchanged. Pure: it reads, and answers every check.
#pragma once

#include <c10/core/TensorImpl.h>

#include <optional>
#include <string>
#include <vector>

#include "../core/dtensor.h"
#include "../core/records.h"

namespace tensorplay::repair {

// What only Python can say of the two; read by python/.
struct ObjectFacts {
  bool dispatches = false;  // its class has a __torch_dispatch__
  bool in_slot = false;     // its class keeps the local tensor in a slot, as torch's own DTensor
  bool is_parameter = false;
  bool local_is_own = true;    // in the object's own dictionary, or a slot of its class
  bool local_is_body = false;  // the very object
  bool local_is_dtensor = false;
  bool slot_is_self = true;  // the impl's PyObject slot names this object
  bool has_hooks = false;    // Python hooks listed at the object
  bool has_accumulate_hooks = false;
};

struct Request {
  std::optional<bool> requires_grad;  // of the new body; the old one's where absent
  bool migrate_hooks = false;
  bool migrate_grad = false;
  bool migrate_version = false;  // the version counter alone is a reason, too
  bool whole = false;            // a whole DTensor takes its place, and may be a wrapper: not the impl alone
};

enum class Result : uint8_t {
  kPassed,
  kRefused,
  kReported,  // worth a word, no obstacle
  kNotChecked,
};

struct Check {
  const char* name;
  Result result;
  std::string found;  // what was read, where that is not said by the name
};

struct Plan {
  std::vector<DtensorState> states;
  std::vector<Check> checks;
  bool is_needed = false;  // whether there is anything to put right

  bool is_refused() const;
};

// What operators do with a tensor of these keys, whichever device computes.
c10::DispatchKeySet without_backends(c10::DispatchKeySet keys);

// Needs: the caller keeps both impls alive, and holds the GIL.
Plan make_plan(const c10::TensorImpl& body, const c10::TensorImpl& local, const ObjectFacts& object,
               const Request& request);

}  // namespace tensorplay::repair
