// Asks for the interpreter's internal headers: must come before Python.h.
#define Py_BUILD_CORE_MODULE 1
#include <Python.h>
// Python.h comes first.
#include <algorithm>
#include <atomic>
#include <unordered_map>

#include "../frames.h"
#include "stacks.h"

namespace tensorplay::track {
namespace {

std::atomic<int> depth{30};

// The code objects that stacks go through, by what stands for a line in them: an instruction's address. Each
// is kept alive for good: another one at its address would have the stack's lines.
struct Pinned {
  std::unordered_map<uint64_t, PyCodeObject*> code_of;
};

Pinned& pinned() {
  static auto* const all = new Pinned;  // under the sites' lock
  return *all;
}

#if PY_VERSION_HEX >= 0x030B0000
uint64_t word_of(Frame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  return reinterpret_cast<uint64_t>(frame->instr_ptr);
#else
  return reinterpret_cast<uint64_t>(frame->prev_instr);
#endif
}

int line_of(PyCodeObject* code, uint64_t word) {
  const auto offset = static_cast<int>(word - reinterpret_cast<uint64_t>(_PyCode_CODE(code)));
  return PyCode_Addr2Line(code, offset);
}
#else
// Objects lie at multiples of 16, addresses of users have 47 bits.
uint64_t word_of(Frame* frame) {
  return reinterpret_cast<uint64_t>(frame->f_code) | static_cast<uint64_t>(frame->f_lasti) << 48;
}

int line_of(PyCodeObject* code, uint64_t word) {
  return PyCode_Addr2Line(code, static_cast<int>(word >> 48) * 2);
}
#endif

// Calls with each frame of Python code, innermost first, as many as are wanted.
template <class Visit>
void each_frame(PyThreadState* thread, int most, Visit visit) {
  int count = 0;
  for (Frame* frame = innermost(thread); frame != nullptr && count < most; frame = caller_of(frame)) {
    if (is_of_c(frame)) continue;
    visit(frame);
    ++count;
  }
}

uint32_t add(PyThreadState* thread, const StackKey& key, int most) {
#if PY_VERSION_HEX >= 0x030D0000
  if (Py_IsFinalizing()) return 0;
#else
  if (_Py_IsFinalizing()) return 0;
#endif
  // The GIL before the lock: whoever has the lock never waits for the GIL.
  const PyGILState_STATE gil = PyGILState_Ensure();
  const uint32_t number = known_sites().add(key, [&] {
    each_frame(thread, most, [&](Frame* frame) {
      PyCodeObject*& code = pinned().code_of[word_of(frame)];
      if (code == nullptr) {
        code = code_of(frame);
        Py_XINCREF(code);  // null for what is no code: nobody asks for its line
      }
    });
  });
  PyGILState_Release(gil);
  return number;
}

}  // namespace

Sites& known_sites() {
  static auto* const sites = new Sites;
  return *sites;
}

uint32_t capture_site() {
  PyThreadState* thread = PyGILState_GetThisThreadState();
  if (thread == nullptr) return 0;
  const int most = depth.load(std::memory_order_relaxed);
  StackKey key;
  each_frame(thread, most, [&](Frame* frame) { key.add(word_of(frame)); });
  if (key.size() == 0) return 0;
  const uint32_t known = known_sites().find(key);
  return known != 0 ? known : add(thread, key, most);
}

void set_stack_depth(int frames) {
  depth.store(std::clamp(frames, 1, static_cast<int>(kMostFrames)), std::memory_order_relaxed);
}

std::vector<FrameName> frames_of(uint32_t site) {
  std::vector<FrameName> frames;
  for (const uint64_t word : known_sites().words_of(site)) {
    PyCodeObject* code = nullptr;
    {
      const std::lock_guard guard(known_sites().mutex());
      const auto found = pinned().code_of.find(word);
      if (found != pinned().code_of.end()) code = found->second;
    }
    if (code == nullptr) continue;
    const auto text = [](PyObject* name) {
      const char* utf8 = name == nullptr ? nullptr : PyUnicode_AsUTF8(name);
      if (utf8 == nullptr) PyErr_Clear();
      return std::string(utf8 == nullptr ? "" : utf8);
    };
#if PY_VERSION_HEX >= 0x030B0000
    PyObject* name = code->co_qualname;
#else
    PyObject* name = code->co_name;
#endif
    const int line = line_of(code, word);
    frames.push_back({text(code->co_filename), text(name), line > 0 ? line : 0});
  }
  return frames;
}

}  // namespace tensorplay::track
