#include "modules.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "call.h"
#include "interpreter.h"
#include "record.h"
#include "unpack.h"
#include "values.h"

namespace tensorplay::python {
namespace {

constexpr size_t kMostLevels = 500;
constexpr Py_ssize_t kSlotFields = 6;

struct Tables {
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* buffers = PyUnicode_InternFromString("_buffers");
  PyObject* modules = PyUnicode_InternFromString("_modules");
  PyObject* kept_out = PyUnicode_InternFromString("_non_persistent_buffers_set");
};

const Tables& tables() {
  static const Tables known;
  return known;
}

class Walk {
 public:
  Walk(PyTypeObject* slot_class, PyObject* slots, PyObject* modules)
      : slot_class_(slot_class), slots_(slots), modules_(modules) {}

  // `path` ends in a dot, unless it is empty. False with an exception set on failure.
  bool enter(PyObject* object, PyObject* path) {
    PyObject* dict = dict_of(object);
    if (dict == nullptr || around_.size() > kMostLevels ||
        std::ranges::find(around_, object) != around_.end()) {
      return true;
    }
    const Owned module(PyTuple_Pack(2, path, object));
    if (module == nullptr || PyList_Append(modules_, module.get()) != 0) return false;
    const Owned number(PyLong_FromSsize_t(PyList_GET_SIZE(modules_) - 1));
    if (number == nullptr) return false;
    PyObject* kept_out = item_of(dict, tables().kept_out);
    if (kept_out != nullptr && PyAnySet_Check(kept_out) == 0) kept_out = nullptr;
    if (!add_table(item_of(dict, tables().parameters), path, number.get(), true, nullptr)) return false;
    if (!add_table(item_of(dict, tables().buffers), path, number.get(), false, kept_out)) return false;
    PyObject* children = item_of(dict, tables().modules);
    if (children == nullptr || PyDict_Check(children) == 0) return true;
    around_.push_back(object);
    // Nothing below runs Python, so nobody changes the table.
    PyObject *name, *child;
    Py_ssize_t position = 0;
    bool is_done = true;
    while (is_done && PyDict_Next(children, &position, &name, &child) != 0) {
      if (PyUnicode_Check(name) == 0) continue;
      const Owned below(PyUnicode_FromFormat("%U%U.", path, name));
      is_done = below != nullptr && (child == Py_None ? add_absent(below.get()) : enter(child, below.get()));
    }
    around_.pop_back();
    return is_done;
  }

 private:
  bool add_absent(PyObject* path) {
    const Owned module(PyTuple_Pack(2, path, Py_None));
    return module != nullptr && PyList_Append(modules_, module.get()) == 0;
  }

  bool add_table(PyObject* table, PyObject* path, PyObject* number, bool is_parameter, PyObject* kept_out) {
    if (table == nullptr || PyDict_Check(table) == 0) return true;
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(table, &position, &name, &value) != 0) {
      const at::Tensor* tensor = unpack_tensor(value);
      if (tensor == nullptr || !tensor->defined() || PyUnicode_Check(name) == 0) continue;
      const int is_kept_out = kept_out == nullptr ? 0 : PySet_Contains(kept_out, name);
      if (is_kept_out < 0) return false;
      const Owned slot(slot_class_->tp_alloc(slot_class_, kSlotFields));
      PyObject* key = slot == nullptr ? nullptr : PyUnicode_Concat(path, name);
      PyObject* record = key == nullptr ? nullptr : make_record(*tensor, value, 1);
      if (slot == nullptr) return false;
      // A slot that is not filled is given back with what it has.
      PyTuple_SET_ITEM(slot.get(), 0, key);
      PyTuple_SET_ITEM(slot.get(), 1, Py_NewRef(number));
      PyTuple_SET_ITEM(slot.get(), 2, boolean(is_parameter));
      PyTuple_SET_ITEM(slot.get(), 3, boolean(is_kept_out == 0));
      PyTuple_SET_ITEM(slot.get(), 4, Py_NewRef(value));
      PyTuple_SET_ITEM(slot.get(), 5, record);
      if (key == nullptr || record == nullptr || PyList_Append(slots_, slot.get()) != 0) return false;
    }
    return true;
  }

  PyTypeObject* slot_class_;
  PyObject* slots_;
  PyObject* modules_;
  std::vector<PyObject*> around_;
};

PyObject* registered(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!need_arguments(given, 3, 3, "registered(module, slot_class, prefix)")) return nullptr;
  if (PyType_Check(args[1]) == 0 ||
      PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(args[1]), &PyTuple_Type) == 0 ||
      PyUnicode_Check(args[2]) == 0) {
    PyErr_SetString(PyExc_TypeError, "registered() takes a module, a class of tuples and a prefix");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const CollectionPause pause;
    const Owned slots(PyList_New(0));
    const Owned modules(PyList_New(0));
    if (slots == nullptr || modules == nullptr) return nullptr;
    Walk walk(reinterpret_cast<PyTypeObject*>(args[1]), slots.get(), modules.get());
    if (!walk.enter(args[0], args[2])) return nullptr;
    return PyTuple_Pack(2, slots.get(), modules.get());
  });
}

PyMethodDef methods[] = {
    {"registered", fast_call(registered), METH_FASTCALL,
     "registered(module, slot_class, prefix, /)\n--\n\nAnswer what a module and all in it have registered, "
     "as "
     "`slot_class` of (key, number of the module, whether it is a parameter, whether it is persistent, "
     "tensor, "
     "record), and the modules as (path, module), each by all its paths; None stands for one that is not "
     "there."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_module_functions(PyObject* module) {
  return PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tensorplay::python
