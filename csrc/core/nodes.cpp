#include "nodes.h"

#include <torch/csrc/autograd/generated/Functions.h>

#include <cstddef>
#include <typeindex>
#include <unordered_map>

namespace tensorplay {
namespace {

template <class Field>
constexpr FieldKind kKind = FieldKind::kOther;
template <>
constexpr FieldKind kKind<torch::autograd::SavedVariable> = FieldKind::kSaved;
template <>
constexpr FieldKind kKind<std::vector<torch::autograd::SavedVariable>> = FieldKind::kSavedList;
template <>
constexpr FieldKind kKind<int64_t> = FieldKind::kInt;
template <>
constexpr FieldKind kKind<size_t> = FieldKind::kInt;
template <>
constexpr FieldKind kKind<c10::SymInt> = FieldKind::kSymInt;
template <>
constexpr FieldKind kKind<std::vector<int64_t>> = FieldKind::kInts;
template <>
constexpr FieldKind kKind<std::vector<c10::SymInt>> = FieldKind::kSymInts;
template <>
constexpr FieldKind kKind<std::optional<c10::SymInt>> = FieldKind::kOptionalSymInt;
template <>
constexpr FieldKind kKind<std::optional<int64_t>> = FieldKind::kOptionalInt;
template <>
constexpr FieldKind kKind<bool> = FieldKind::kBool;

struct TypedField {
  const std::type_info* node;
  NodeField field;
};

// offsetof of a class with virtual functions is defined by the compilers this is built with, as long as the
// bases are not virtual; theirs are not.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#define TENSORPLAY_NODE(NODE)
#define TENSORPLAY_FIELD(NODE, FIELD)                                 \
  {&typeid(torch::autograd::generated::NODE),                         \
   {#FIELD, kKind<decltype(torch::autograd::generated::NODE::FIELD)>, \
    static_cast<uint32_t>(offsetof(torch::autograd::generated::NODE, FIELD))}},
const TypedField kFields[] = {
#include "tensorplay_nodes.inc"  // written by generate_nodes.py
};
#undef TENSORPLAY_FIELD
#undef TENSORPLAY_NODE
#pragma GCC diagnostic pop

using Table = std::unordered_map<std::type_index, std::vector<NodeField>>;

Table make_table() {
  Table table;
  for (const TypedField& typed : kFields) table[*typed.node].push_back(typed.field);
  return table;
}

template <class Field>
const Field& at(const torch::autograd::Node& node, const NodeField& field) {
  return *reinterpret_cast<const Field*>(reinterpret_cast<const char*>(&node) + field.offset);
}

// False where a number is symbolic.
bool append_number(const c10::SymInt& value, std::vector<int64_t>& out) {
  if (value.is_heap_allocated()) return false;
  out.push_back(value.as_int_unchecked());
  return true;
}

std::optional<ArgumentValue> value_of(const torch::autograd::Node& node, const NodeField& field) {
  std::vector<int64_t> numbers;
  switch (field.kind) {
    case FieldKind::kBool:
      return at<bool>(node, field);
    case FieldKind::kInt:
      return at<int64_t>(node, field);
    case FieldKind::kSymInt:
      if (!append_number(at<c10::SymInt>(node, field), numbers)) return std::nullopt;
      return numbers.front();
    case FieldKind::kInts:
      return at<std::vector<int64_t>>(node, field);
    case FieldKind::kSymInts:
      for (const c10::SymInt& value : at<std::vector<c10::SymInt>>(node, field)) {
        if (!append_number(value, numbers)) return std::nullopt;
      }
      return numbers;
    case FieldKind::kOptionalSymInt: {
      const auto& value = at<std::optional<c10::SymInt>>(node, field);
      if (!value) return ArgumentValue(std::nullopt);
      if (!append_number(*value, numbers)) return std::nullopt;
      return numbers.front();
    }
    case FieldKind::kOptionalInt: {
      const auto& value = at<std::optional<int64_t>>(node, field);
      return value ? ArgumentValue(*value) : ArgumentValue(std::nullopt);
    }
    case FieldKind::kSaved:
    case FieldKind::kSavedList:
    case FieldKind::kOther:
      break;
  }
  return std::nullopt;
}

}  // namespace

std::span<const NodeField> fields_of(const torch::autograd::Node& node) {
  static const Table table = make_table();
  const auto found = table.find(typeid(node));
  return found == table.end() ? std::span<const NodeField>() : std::span<const NodeField>(found->second);
}

std::string_view argument_name(const NodeField& field) {
  std::string_view name = field.name;
  if (name.ends_with('_')) name.remove_suffix(1);
  return name;
}

std::vector<std::pair<std::string_view, ArgumentValue>> arguments_of(const torch::autograd::Node& node) {
  std::vector<std::pair<std::string_view, ArgumentValue>> found;
  for (const NodeField& field : fields_of(node)) {
    if (auto value = value_of(node, field)) found.emplace_back(argument_name(field), std::move(*value));
  }
  return found;
}

void append_saved(const torch::autograd::Node& node, std::vector<SavedSlot>& out) {
  for (const NodeField& field : fields_of(node)) {
    if (field.kind == FieldKind::kSaved) {
      out.push_back({argument_name(field), -1, &at<torch::autograd::SavedVariable>(node, field)});
    } else if (field.kind == FieldKind::kSavedList) {
      int32_t index = 0;
      for (const auto& variable : at<std::vector<torch::autograd::SavedVariable>>(node, field)) {
        out.push_back({argument_name(field), index++, &variable});
      }
    }
  }
}

}  // namespace tensorplay
