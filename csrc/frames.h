// The frames of a thread, by the interpreter's minor version: for the two files that walk over them.
//
// Each of them defines Py_BUILD_CORE_MODULE and includes Python.h before this.
#pragma once

#include <frameobject.h>
#if PY_VERSION_HEX >= 0x030B0000
#include <internal/pycore_code.h>
#include <internal/pycore_frame.h>
#endif

#if PY_VERSION_HEX < 0x030A0000 || PY_VERSION_HEX >= 0x030E0000 || defined(Py_GIL_DISABLED)
#error "tensorplay reads the heap and the frames of CPython 3.10 to 3.13 with a GIL"
#endif

namespace tensorplay {

#if PY_VERSION_HEX >= 0x030B0000
using Frame = _PyInterpreterFrame;

inline Frame* innermost(PyThreadState* thread) {
#if PY_VERSION_HEX >= 0x030D0000
  return thread->current_frame;
#else
  return thread->cframe == nullptr ? nullptr : thread->cframe->current_frame;
#endif
}

inline Frame* caller_of(Frame* frame) {
  return frame->previous;
}

// Whether it is an entry that stands for C code.
inline bool is_of_c([[maybe_unused]] Frame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  return frame->owner == FRAME_OWNED_BY_CSTACK;
#else
  return false;
#endif
}

// Null for the entries that stand for C code.
inline PyCodeObject* code_of(Frame* frame) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* code = frame->f_executable;
#else
  PyObject* code = reinterpret_cast<PyObject*>(frame->f_code);
#endif
  return code != nullptr && PyCode_Check(code) ? reinterpret_cast<PyCodeObject*>(code) : nullptr;
}
#else
using Frame = PyFrameObject;

inline Frame* innermost(PyThreadState* thread) {
  return thread->frame;
}

inline Frame* caller_of(Frame* frame) {
  return frame->f_back;
}

inline bool is_of_c(Frame*) {
  return false;
}

inline PyCodeObject* code_of(Frame* frame) {
  return frame->f_code;
}
#endif

}  // namespace tensorplay
