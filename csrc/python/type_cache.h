// What is known of a type, for the few types that most objects have.
#pragma once

#include <Python.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace tensorplay::python {

// In front of a question that walks a type's bases. Types stay alive while it does.
template <class Answer>
class TypeCache {
 public:
  template <class Ask>
  Answer of(PyTypeObject* type, Ask ask) {
    Entry& entry = entries_[(reinterpret_cast<uintptr_t>(type) >> 4) * kMix >> (64 - kBits)];
    if (entry.type != type) [[unlikely]]
      entry = {type, ask(type)};
    return entry.answer;
  }

 private:
  static constexpr int kBits = 9;
  static constexpr uint64_t kMix = 0x9E3779B97F4A7C15;
  struct Entry {
    PyTypeObject* type;
    Answer answer;
  };
  std::array<Entry, size_t{1} << kBits> entries_{};
};

}  // namespace tensorplay::python
