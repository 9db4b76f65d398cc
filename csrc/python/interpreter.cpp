// Asks for the interpreter's internal headers: must come before Python.h.
#define Py_BUILD_CORE_MODULE 1
#include "interpreter.h"

#include <internal/pycore_gc.h>

#include <cstddef>
#include <cstdint>

#include "../frames.h"
#include "type_cache.h"

namespace tensorplay::python {
namespace {

struct WantedTypes {
  bool (*wanted)(PyTypeObject*);
  TypeCache<bool> known{};

  bool wants(PyTypeObject* type) { return known.of(type, wanted); }
};

PyGC_Head* head_of(PyObject* object) {
  return reinterpret_cast<PyGC_Head*>(object) - 1;
}

PyObject* object_of(PyGC_Head* head) {
  return reinterpret_cast<PyObject*>(head + 1);
}

PyGC_Head* next_of(PyGC_Head* head) {
  return reinterpret_cast<PyGC_Head*>(head->_gc_next);
}

PyGC_Head* previous_of(PyGC_Head* head) {
  return reinterpret_cast<PyGC_Head*>(head->_gc_prev & _PyGC_PREV_MASK);
}

bool is_list(PyGC_Head* head) {
  return head->_gc_next != 0 && previous_of(next_of(head)) == head && next_of(previous_of(head)) == head;
}

// Note [Finding the collector's lists]
// Their place in PyInterpreterState moves between releases, some say between patch releases too. A container
// made now is the last of the youngest list, so its next link is that list's head; the others lie beside it.
// The collector's own pointer to the youngest list says whether they lie where we think.
_gc_runtime_state* collector() {
  const Owned young(PyList_New(0));
  if (young == nullptr) return nullptr;
  char* head = reinterpret_cast<char*>(next_of(head_of(young.get())));
  auto* state = reinterpret_cast<_gc_runtime_state*>(head - offsetof(_gc_runtime_state, generations));
  bool known = reinterpret_cast<char*>(state->generation0) == head;
  for (int i = 0; known && i < NUM_GENERATIONS; ++i) known = is_list(&state->generations[i].head);
  if (known && is_list(&state->permanent_generation.head)) return state;
  PyErr_Format(PyExc_RuntimeError, "tensorplay does not know the collector of this Python (%.100s)",
               Py_GetVersion());
  return nullptr;
}

bool is_wanted(PyObject* object, WantedTypes& types) {
  return types.wants(Py_TYPE(object)) && Py_REFCNT(object) > 0;
}

// From both ends at once: each step waits for the object before it, and the two wait together.
void find_in(PyGC_Head* list, WantedTypes& types, std::vector<PyObject*>& found) {
  std::vector<PyObject*> from_behind;
  PyGC_Head* front = next_of(list);
  PyGC_Head* back = previous_of(list);
  while (front != list) {
    PyGC_Head* const next = next_of(front);
    PyGC_Head* const previous = previous_of(back);
    if (is_wanted(object_of(front), types)) found.push_back(object_of(front));
    if (front == back) break;
    if (is_wanted(object_of(back), types)) from_behind.push_back(object_of(back));
    if (next == back) break;
    front = next;
    back = previous;
  }
  found.insert(found.end(), from_behind.rbegin(), from_behind.rend());
}

Owned own(PyObject* object) {
  return Owned(Py_NewRef(object));
}

void add_local(PyObject* name, PyObject* value, FrameLocals& frame) {
  if (value != nullptr) frame.named.emplace_back(own(name), own(value));
}

void add_cell(PyObject* name, PyObject* value, FrameLocals& frame) {
  // An argument is put into its cell by the function's first instructions.
  const bool cell = value != nullptr && PyCell_Check(value);
  add_local(name, cell ? PyCell_GET(value) : value, frame);
}

void add_namespace(PyObject* locals, PyObject* globals, FrameLocals& frame) {
  if (locals == nullptr || locals == globals || !PyDict_CheckExact(locals)) return;
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(locals, &position, &name, &value) != 0) {
    if (PyUnicode_CheckExact(name)) add_local(name, value, frame);
  }
}

#if PY_VERSION_HEX >= 0x030B0000
bool is_complete(Frame* frame) {
  return !is_of_c(frame) && code_of(frame) != nullptr && !_PyFrame_IsIncomplete(frame);
}

int line_of(Frame* frame) {
  return PyCode_Addr2Line(code_of(frame),
                          _PyInterpreterFrame_LASTI(frame) * static_cast<int>(sizeof(_Py_CODEUNIT)));
}

void read_variables(Frame* frame, FrameLocals& out) {
  PyCodeObject* code = code_of(frame);
  const char* kinds = PyBytes_AS_STRING(code->co_localspluskinds);
  for (int i = 0; i < code->co_nlocalsplus; ++i) {
    PyObject* name = PyTuple_GET_ITEM(code->co_localsplusnames, i);
    const bool in_cell = (kinds[i] & (CO_FAST_CELL | CO_FAST_FREE)) != 0;
    (in_cell ? add_cell : add_local)(name, frame->localsplus[i], out);
  }
  if ((code->co_flags & CO_OPTIMIZED) == 0) add_namespace(frame->f_locals, frame->f_globals, out);
}

void read_slots(Frame* frame, FrameReferences& out) {
  PyCodeObject* code = code_of(frame);
  for (int i = 0; i < code->co_nlocalsplus; ++i) {
    if (PyObject* value = frame->localsplus[i]) {
      out.slots.push_back({PyTuple_GET_ITEM(code->co_localsplusnames, i), value});
    }
  }
  for (int i = code->co_nlocalsplus; i < frame->stacktop; ++i) {
    if (PyObject* value = frame->localsplus[i]) out.slots.push_back({nullptr, value});
  }
  if (frame->stacktop < 0) {
    out.unknown_stack = {frame->localsplus + code->co_nlocalsplus, static_cast<size_t>(code->co_stacksize)};
  }
#if PY_VERSION_HEX >= 0x030C0000
  out.function = frame->f_funcobj;
#else
  out.function = reinterpret_cast<PyObject*>(frame->f_func);
#endif
  if ((code->co_flags & CO_OPTIMIZED) == 0 && frame->f_locals != frame->f_globals) {
    out.variables = frame->f_locals;
  }
  if (frame->owner == FRAME_OWNED_BY_GENERATOR) {
    out.generator = reinterpret_cast<PyObject*>(_PyFrame_GetGenerator(frame));
  }
}

bool is_called_by_c(Frame* frame) {
#if PY_VERSION_HEX >= 0x030C0000
  return frame->previous != nullptr && frame->previous->owner == FRAME_OWNED_BY_CSTACK &&
         frame->previous->previous != nullptr;
#else
  return frame->is_entry && frame->previous != nullptr;
#endif
}

Frame* frame_in(PyObject* object) {
  Frame* frame = reinterpret_cast<PyFrameObject*>(object)->f_frame;
  return frame->owner == FRAME_OWNED_BY_FRAME_OBJECT ? frame : nullptr;
}

Frame* frame_of(PyObject* generator) {
  auto* found = reinterpret_cast<PyGenObject*>(generator);
  return found->gi_frame_state < FRAME_COMPLETED ? reinterpret_cast<Frame*>(found->gi_iframe) : nullptr;
}
#else
bool is_complete(Frame*) {
  return true;
}

int line_of(Frame* frame) {
  return PyFrame_GetLineNumber(frame);
}

void read_variables(Frame* frame, FrameLocals& out) {
  PyCodeObject* code = code_of(frame);
  PyObject** value = frame->f_localsplus;
  for (int i = 0; i < code->co_nlocals; ++i) add_local(PyTuple_GET_ITEM(code->co_varnames, i), *value++, out);
  for (PyObject* names : {code->co_cellvars, code->co_freevars}) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
      add_cell(PyTuple_GET_ITEM(names, i), *value++, out);
    }
  }
  if ((code->co_flags & CO_OPTIMIZED) == 0) add_namespace(frame->f_locals, frame->f_globals, out);
}

void read_slots(Frame* frame, FrameReferences& out) {
  PyCodeObject* code = code_of(frame);
  PyObject** value = frame->f_localsplus;
  const auto add = [&](PyObject* name) {
    if (*value != nullptr) out.slots.push_back({name, *value});
    ++value;
  };
  for (int i = 0; i < code->co_nlocals; ++i) add(PyTuple_GET_ITEM(code->co_varnames, i));
  for (PyObject* names : {code->co_cellvars, code->co_freevars}) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) add(PyTuple_GET_ITEM(names, i));
  }
  out.unknown_stack = {frame->f_valuestack, static_cast<size_t>(code->co_stacksize)};
  if ((code->co_flags & CO_OPTIMIZED) == 0 && frame->f_locals != frame->f_globals) {
    out.variables = frame->f_locals;
  }
  out.object = reinterpret_cast<PyObject*>(frame);
}

bool is_called_by_c(Frame* frame) {
  return frame->f_back != nullptr;
}

Frame* frame_in(PyObject* object) {
  auto* frame = reinterpret_cast<PyFrameObject*>(object);
  return frame->f_state == FRAME_EXECUTING || frame->f_state == FRAME_CLEARED ? nullptr : frame;
}

Frame* frame_of(PyObject* generator) {
  return reinterpret_cast<PyGenObject*>(generator)->gi_frame;
}
#endif

void read_frame(Frame* frame, FrameLocals& out) {
  out.code = own(reinterpret_cast<PyObject*>(code_of(frame)));
  const int line = line_of(frame);
  out.line = line > 0 ? line : 0;
  read_variables(frame, out);
}

}  // namespace

bool find_objects(bool (*wanted)(PyTypeObject*), std::vector<PyObject*>& found) {
  _gc_runtime_state* state = collector();
  if (state == nullptr) return false;
  WantedTypes types{wanted};
  find_in(&state->permanent_generation.head, types, found);
  for (int i = NUM_GENERATIONS; i-- > 0;) find_in(&state->generations[i].head, types, found);
  return true;
}

void read_frames(PyThreadState* thread, const CodeFilter& wanted, std::vector<FrameLocals>& frames) {
  for (Frame* frame = innermost(thread); frame != nullptr; frame = caller_of(frame)) {
    if (is_complete(frame) && wanted(code_of(frame))) read_frame(frame, frames.emplace_back());
  }
}

bool read_generator(PyObject* generator, FrameLocals& frame) {
  Frame* found = frame_of(generator);
  if (found == nullptr) return false;
  read_frame(found, frame);
  return true;
}

bool read_frame_object(PyObject* object, FrameLocals& frame) {
  Frame* found = frame_in(object);
  if (found == nullptr || !is_complete(found)) return false;
  read_frame(found, frame);
  return true;
}

void read_references(PyThreadState* thread, std::vector<FrameReferences>& frames) {
  for (Frame* frame = innermost(thread); frame != nullptr; frame = caller_of(frame)) {
    if (!is_complete(frame)) continue;
    FrameReferences& out = frames.emplace_back();
    out.code = code_of(frame);
    const int line = line_of(frame);
    out.line = line > 0 ? line : 0;
    read_slots(frame, out);
  }
}

bool has_c_code_between(PyThreadState* thread, const CodeFilter& passed_over) {
  bool inside = true;
  for (Frame* frame = innermost(thread); frame != nullptr; frame = caller_of(frame)) {
    if (!is_complete(frame)) continue;
    inside = inside && passed_over(code_of(frame));
    if (!inside && is_called_by_c(frame)) return true;
  }
  return false;
}

void read_references(PyThreadState* thread, std::vector<ThreadReference>& references) {
  // Generators have such an item each, and show it themselves.
  const _PyErr_StackItem& handled = thread->exc_state;
#if PY_VERSION_HEX < 0x030B0000
  for (PyObject* part : {handled.exc_type, handled.exc_traceback}) {
    if (part != nullptr) references.push_back({"exception being handled", part});
  }
#endif
  for (const auto& [name, value] : {ThreadReference{"exception being handled", handled.exc_value},
                                    ThreadReference{"thread-local variables", thread->dict},
                                    ThreadReference{"context variable", thread->context},
                                    ThreadReference{"trace function", thread->c_traceobj},
                                    ThreadReference{"profile function", thread->c_profileobj}}) {
    if (value != nullptr) references.push_back({name, value});
  }
}

PyObject* code_name(PyCodeObject* code) {
#if PY_VERSION_HEX >= 0x030B0000
  return code->co_qualname;
#else
  return code->co_name;
#endif
}

}  // namespace tensorplay::python
