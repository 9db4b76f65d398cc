// What PyTorch's autograd nodes keep: the tensors saved for backward, and the arguments of the operator.
//
// The fields are read where they lie, never through the accessors: those run users' unpack hooks, refuse a
// freed node or count as an owner. Offsets come from the header of the torch this was built with.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace torch::autograd {
struct Node;
class SavedVariable;
}  // namespace torch::autograd

namespace tensorplay {

enum class FieldKind : uint8_t {
  kSaved,      // SavedVariable
  kSavedList,  // std::vector<SavedVariable>
  kInt,        // int64_t, size_t
  kSymInt,
  kInts,
  kSymInts,
  kOptionalSymInt,
  kOptionalInt,
  kBool,
  kOther,  // not read
};

struct NodeField {
  const char* name;  // as the header spells it: "self_" for a SavedVariable
  FieldKind kind;
  uint32_t offset;  // bytes from the node's beginning
};

// The fields of a generated node, in the header's order; empty for every other class of node.
std::span<const NodeField> fields_of(const torch::autograd::Node& node);

// What a field is called in the operator's schema: "self_" is "self".
std::string_view argument_name(const NodeField& field);

// Absent: the operator's own None.
using ArgumentValue = std::variant<std::nullopt_t, bool, int64_t, std::vector<int64_t>>;

// The operator's arguments that are numbers, as far as the node keeps them; symbolic ones are left out.
std::vector<std::pair<std::string_view, ArgumentValue>> arguments_of(const torch::autograd::Node& node);

// A tensor that a node saved for backward, or the place of one.
struct SavedSlot {
  std::string_view argument;
  int32_t index;  // in a list of tensors; -1 for a single one
  const torch::autograd::SavedVariable* variable;
};

// Appends the saved tensors of a generated node.
void append_saved(const torch::autograd::Node& node, std::vector<SavedSlot>& out);

}  // namespace tensorplay
