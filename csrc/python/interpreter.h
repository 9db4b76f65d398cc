// What CPython keeps to itself: the collector's lists, and the variables of executing frames.
//
// The only file that depends on the interpreter's internal headers, so on its minor version; a layout it does
// not know is refused when it is used. Runs no code of the user: not a property, not a `__class__`, not a
// finalizer. Everything here needs the GIL, and what is answered is borrowed unless said otherwise.
#pragma once

#include <Python.h>

#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace tensorplay::python {

// While it lives no automatic collection starts in this interpreter.
class CollectionPause {
 public:
  CollectionPause() : was_on_(PyGC_Disable() != 0) {}
  ~CollectionPause() {
    if (was_on_) PyGC_Enable();
  }
  CollectionPause(const CollectionPause&) = delete;
  CollectionPause& operator=(const CollectionPause&) = delete;

 private:
  bool was_on_;
};

struct Release {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
// One reference, given back when it goes.
using Owned = std::unique_ptr<PyObject, Release>;

// Whether objects of a type have a dictionary of their own, without asking a `__dict__` that the class
// defines.
inline bool has_instance_dict(const PyTypeObject* type) {
#ifdef Py_TPFLAGS_MANAGED_DICT
  if ((type->tp_flags & Py_TPFLAGS_MANAGED_DICT) != 0) return true;
#endif
  return type->tp_dictoffset != 0;
}

// The own dictionary, borrowed from the object, or null.
inline PyObject* dict_of(PyObject* object) {
  PyObject* dict = has_instance_dict(Py_TYPE(object)) ? PyObject_GenericGetDict(object, nullptr) : nullptr;
  if (dict == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  Py_DECREF(dict);
  return PyDict_Check(dict) != 0 ? dict : nullptr;
}

// Borrowed; null for a key that is not there.
inline PyObject* item_of(PyObject* dict, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr) PyErr_Clear();
  return found;
}

// Adds every container object that the collector knows and whose type is wanted, frozen ones first, then from
// old to young; an object that is being destroyed is left out. `wanted` is asked once for a type and must not
// run Python. False with an exception set where the collector's lists are not found.
bool find_objects(bool (*wanted)(PyTypeObject*), std::vector<PyObject*>& found);

// What one frame holds by name.
struct FrameLocals {
  Owned code;
  int line = 0;                                // 0 is unknown
  std::vector<std::pair<Owned, Owned>> named;  // name and value; unset variables are left out
};

// Whether the frames of this code are asked for.
using CodeFilter = std::function<bool(PyCodeObject*)>;

// Adds the frames executing in a thread, innermost first. Makes no frame object and no dictionary of locals.
// A cell gives what is in it; a class body gives its namespace; a module's names are its globals, which no
// frame owns, and are left out. Values on a frame's evaluation stack have no name and are not seen.
void read_frames(PyThreadState* thread, const CodeFilter& wanted, std::vector<FrameLocals>& frames);

// Reads a generator, coroutine or asynchronous generator; false where it has finished. Other types:
// undefined.
bool read_generator(PyObject* generator, FrameLocals& frame);

// Reads what a frame's object alone keeps, as for a traceback; false for a frame that executes, and for a
// generator's.
bool read_frame_object(PyObject* object, FrameLocals& frame);

// Whatever a frame refers to, borrowed.
struct FrameReferences {
  PyCodeObject* code = nullptr;
  int line = 0;  // 0 is unknown
  // Of a variable that closures share, the cell. Names are null for what has none: a value on the evaluation
  // stack.
  struct Slot {
    PyObject* name;
    PyObject* value;
  };
  std::vector<Slot> slots;
  PyObject* function = nullptr;   // Python 3.11 and later
  PyObject* variables = nullptr;  // the namespace of a class body or of exec(), which the frame owns
  // Where the evaluation stack lies of a frame that runs C code just now: how far it is filled is not known,
  // and what lies above may be gone. To compare, never to follow.
  std::span<PyObject* const> unknown_stack;
  // Python 3.10: the frame's object, which also may be referred to.
  PyObject* object = nullptr;
  // Python 3.11 and later: the generator or coroutine whose frame this is, which shows the same.
  PyObject* generator = nullptr;
};

// Adds what the frames executing in a thread refer to, innermost first.
void read_references(PyThreadState* thread, std::vector<FrameReferences>& frames);

// Whether C code lies between two frames of a thread, as in sorted(key=...): it may hold what it is making.
// Frames inside the innermost ones whose code is passed over do not count. Python 3.10 does not tell: true
// where there are two.
bool has_c_code_between(PyThreadState* thread, const CodeFilter& passed_over);

// Adds what a thread itself refers to beside its frames: its thread-local variables, the exceptions it is
// handling, its context.
struct ThreadReference {
  const char* name;
  PyObject* value;
};
void read_references(PyThreadState* thread, std::vector<ThreadReference>& references);

// The qualified name on Python 3.11 and later, before that the bare one.
PyObject* code_name(PyCodeObject* code);

}  // namespace tensorplay::python
