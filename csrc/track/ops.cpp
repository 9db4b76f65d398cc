#include "ops.h"

#include <deque>
#include <mutex>
#include <string_view>
#include <unordered_map>

namespace tensorplay::track {
namespace {

// Read beside each other by all threads, and never taken apart: threads may still be in an operator at exit.
struct Known {
  std::mutex mutex;
  std::unordered_map<const c10::OperatorName*, const OpInfo*> by_name;
  std::deque<OpInfo> infos;
  std::vector<std::string> names{""};
};

Known& known() {
  static auto* const all = new Known;
  return *all;
}

bool is_copy(std::string_view name) {
  for (const std::string_view one :
       {"aten::copy_", "aten::_to_copy", "aten::to", "aten::clone", "aten::contiguous", "aten::cat",
        "aten::concat", "aten::concatenate", "aten::stack", "aten::pin_memory", "aten::_pin_memory",
        "aten::reshape", "aten::type_as", "aten::_copy_from", "aten::_copy_from_and_resize",
        "aten::_foreach_copy_"}) {
    if (name == one) return true;
  }
  return false;
}

OpInfo info_from(const c10::OperatorHandle& op, uint16_t number) {
  OpInfo info{.number = number};
  if (!op.hasSchema()) return info;
  const c10::FunctionSchema& schema = op.schema();
  info.copies = is_copy(schema.name());
  info.arguments = static_cast<uint16_t>(schema.arguments().size());
  info.results = static_cast<uint16_t>(schema.returns().size());
  const auto is_written = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  for (size_t i = 0; i < schema.arguments().size() && i < 64; ++i) {
    if (is_written(schema.arguments()[i])) info.written |= uint64_t{1} << i;
  }
  for (size_t i = 0; i < schema.returns().size() && i < 64; ++i) {
    if (!is_written(schema.returns()[i])) info.created |= uint64_t{1} << i;
  }
  return info;
}

const OpInfo& find(const c10::OperatorHandle& op) {
  Known& all = known();
  const std::lock_guard guard(all.mutex);
  const OpInfo*& found = all.by_name[&op.operator_name()];
  if (found == nullptr) {
    if (all.names.size() > UINT16_MAX) {  // the last number stands for all that come after
      found = &all.infos.back();
    } else {
      all.infos.push_back(info_from(op, static_cast<uint16_t>(all.names.size())));
      all.names.push_back(op.operator_name().name);
      found = &all.infos.back();
    }
  }
  return *found;
}

}  // namespace

const OpInfo& info_of(const c10::OperatorHandle& op) {
  struct Seen {
    const c10::OperatorName* name;
    const OpInfo* info;
  };
  constexpr size_t kSeen = 256;
  static thread_local Seen seen[kSeen];
  const c10::OperatorName* name = &op.operator_name();
  // Names lie in entries of some hundred bytes.
  Seen& slot = seen[(reinterpret_cast<uint64_t>(name) * uint64_t{0x9E3779B97F4A7C15}) >> 56];
  if (slot.name != name) [[unlikely]]
    slot = {name, &find(op)};
  return *slot.info;
}

std::mutex& ops_mutex() {
  return known().mutex;
}

std::string op_name(uint16_t number) {
  Known& all = known();
  const std::lock_guard guard(all.mutex);
  return number < all.names.size() ? all.names[number] : std::string();
}

}  // namespace tensorplay::track
