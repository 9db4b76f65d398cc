// One live tensor of every kind that ATen can make without Python, for tests that must hold for all of them.
//
// Each call makes fresh tensors, so that reference counts are the specimen's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <ostream>
#include <span>
#include <string_view>
#include <vector>

#include "../../csrc/core/read.h"

namespace tensorplay {

struct Specimen {
  at::Tensor tensor;
  std::vector<at::Tensor> companions;  // what must live beside it, or what shares its memory
};

struct Recipe {
  const char* name;
  Kind kind;
  Specimen (*make)();
};

std::span<const Recipe> recipes();

// The specimen of that recipe.
Specimen make(std::string_view name);

// The recipe's name, for GoogleTest's messages.
std::ostream& operator<<(std::ostream& out, const Recipe& recipe);

inline TensorFacts read(const at::Tensor& tensor) {
  TensorFacts facts;
  read_tensor(*tensor.unsafeGetTensorImpl(), facts);
  return facts;
}

}  // namespace tensorplay
