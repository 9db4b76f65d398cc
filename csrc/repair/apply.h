// The checked exchange of a DTensor's body for an alias of its local tensor, verified afterwards or taken
// back.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "plan.h"

namespace tensorplay::repair {

// What python/ does to the objects. Nothing of it may run code of the user's.
class Hands {
 public:
  virtual ~Hands() = default;
  // Exchanges impl and PyObject slot of the DTensor and of the donor's object. False: it was refused, and
  // nothing was changed.
  virtual bool exchange() = 0;
  // Has the hooks listed at the object fire for the impl that it has now. False: it could not.
  virtual bool attach_hooks() = 0;
  // The impl that the object has now.
  virtual const at::Tensor& body() const = 0;
  // The impl that the donor's object has now.
  virtual const at::Tensor& other() const = 0;
  // Whether object, class, dictionary, slots and registrations are what they were.
  virtual bool is_same_object() const = 0;
};

// An alias of the local tensor: an impl of its own over the same storage, with the same version counter.
at::Tensor make_donor(const at::Tensor& local, bool requires_grad);

// What does not hold of a donor; null where all does.
const char* wrong_with_donor(const at::Tensor& donor, const at::Tensor& local, bool requires_grad);

enum class End : uint8_t {
  kDone,
  kRefused,    // nothing was exchanged
  kTakenBack,  // exchanged, found wrong, exchanged back
  kStuck,      // exchanged, found wrong, and not to be exchanged back: the donor's object has the old impl
};

struct Outcome {
  End end;
  const char* check;  // which one did not hold; null where all did
};

// Needs: make_plan() refuses nothing; `donor` is the tensor of the object that `hands` exchanges with.
// `trip` names a check to be taken as failed, so that tests can see what then happens.
Outcome apply(Hands& hands, const at::Tensor& local, const Request& request, const std::string& trip);

// The names of the checks that follow the exchange, in their order; ends in null.
const char* const* checks_after();

}  // namespace tensorplay::repair
