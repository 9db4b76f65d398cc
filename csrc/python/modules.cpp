#include "modules.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <vector>

#include "../core/differences.h"
#include "../core/pointer_set.h"
#include "../core/read.h"
#include "call.h"
#include "interpreter.h"
#include "record.h"
#include "unpack.h"
#include "values.h"

namespace tensorplay::python {
namespace {

struct Span {
  MemorySpan memory;
  Py_ssize_t index = 0;
};

constexpr size_t kMostLevels = 500;
constexpr Py_ssize_t kSlotFields = 6;

struct Tables {
  PyObject* parameters = PyUnicode_InternFromString("_parameters");
  PyObject* buffers = PyUnicode_InternFromString("_buffers");
  PyObject* modules = PyUnicode_InternFromString("_modules");
  PyObject* kept_out = PyUnicode_InternFromString("_non_persistent_buffers_set");
  std::array<PyObject*, 3> hooks{PyUnicode_InternFromString("_load_state_dict_pre_hooks"),
                                 PyUnicode_InternFromString("_load_state_dict_post_hooks"),
                                 PyUnicode_InternFromString("_hf_hook")};
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
    const Owned module(PyTuple_Pack(3, path, object, has_hooks(dict) ? Py_True : Py_False));
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
  // Of loading, or of a library that keeps the values elsewhere.
  static bool has_hooks(PyObject* dict) {
    for (PyObject* name : tables().hooks) {
      PyObject* found = item_of(dict, name);
      if (found != nullptr && (PyDict_Check(found) == 0 || PyDict_GET_SIZE(found) != 0)) return true;
    }
    return false;
  }

  bool add_absent(PyObject* path) {
    const Owned module(PyTuple_Pack(3, path, Py_None, Py_False));
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

// Reads both at once.
bool read_pair(PyObject* first, PyObject* second, TensorFacts& ours, TensorFacts& theirs) {
  const at::Tensor* one = need_tensor(first);
  const at::Tensor* other = one == nullptr ? nullptr : need_tensor(second);
  if (other == nullptr) return false;
  read_tensor(*one->unsafeGetTensorImpl(), ours);
  read_tensor(*other->unsafeGetTensorImpl(), theirs);
  return true;
}

bool are_lists(PyObject* const* args, Py_ssize_t count) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (PyList_Check(args[i]) == 0) {
      PyErr_Format(PyExc_TypeError, "expected a list, got %.200s", Py_TYPE(args[i])->tp_name);
      return false;
    }
  }
  if (count == 2 && PyList_GET_SIZE(args[0]) != PyList_GET_SIZE(args[1])) {
    PyErr_SetString(PyExc_ValueError, "the lists have different lengths");
    return false;
  }
  return true;
}

PyObject* read_entries(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!need_arguments(given, 2, 2, "read_entries(items, entry_class)") || !are_lists(args, 1)) return nullptr;
  if (PyType_Check(args[1]) == 0 ||
      PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(args[1]), &PyTuple_Type) == 0) {
    PyErr_SetString(PyExc_TypeError, "read_entries() takes pairs and a class of tuples");
    return nullptr;
  }
  auto* entry_class = reinterpret_cast<PyTypeObject*>(args[1]);
  return guarded([&]() -> PyObject* {
    const CollectionPause pause;
    const Owned entries(PyList_New(0));
    const Owned others(PyList_New(0));
    if (entries == nullptr || others == nullptr) return nullptr;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); ++i) {
      PyObject* item = PyList_GET_ITEM(args[0], i);
      if (PyTuple_Check(item) == 0 || PyTuple_GET_SIZE(item) != 2) {
        PyErr_SetString(PyExc_TypeError, "read_entries() takes pairs of key and value");
        return nullptr;
      }
      PyObject* key = PyTuple_GET_ITEM(item, 0);
      PyObject* value = PyTuple_GET_ITEM(item, 1);
      const at::Tensor* tensor = PyUnicode_CheckExact(key) == 0 ? nullptr : unpack_tensor(value);
      if (tensor == nullptr || !tensor->defined()) {
        if (PyList_Append(others.get(), item) != 0) return nullptr;
        continue;
      }
      const Owned entry(entry_class->tp_alloc(entry_class, 3));
      PyObject* record = entry == nullptr ? nullptr : make_record(*tensor, value, 1);
      if (entry == nullptr) return nullptr;
      PyTuple_SET_ITEM(entry.get(), 0, Py_NewRef(key));
      PyTuple_SET_ITEM(entry.get(), 1, Py_NewRef(value));
      PyTuple_SET_ITEM(entry.get(), 2, record);
      if (record == nullptr || PyList_Append(entries.get(), entry.get()) != 0) return nullptr;
    }
    return PyTuple_Pack(2, entries.get(), others.get());
  });
}

PyObject* differences_of(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!need_arguments(given, 2, 2, "differences_of(ours, theirs)") || !are_lists(args, 2)) return nullptr;
  return guarded([&]() -> PyObject* {
    const Py_ssize_t count = PyList_GET_SIZE(args[0]);
    Owned bytes(PyBytes_FromStringAndSize(nullptr, count));
    if (bytes == nullptr) return nullptr;
    TensorFacts ours;
    TensorFacts theirs;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!read_pair(PyList_GET_ITEM(args[0], i), PyList_GET_ITEM(args[1], i), ours, theirs)) return nullptr;
      PyBytes_AS_STRING(bytes.get())[i] = static_cast<char>(differences(ours, theirs));
    }
    return bytes.release();
  });
}

PyObject* meetings_of(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!need_arguments(given, 3, 3, "meetings_of(ours, theirs, most)") || !are_lists(args, 2)) return nullptr;
  const Py_ssize_t most = PyLong_AsSsize_t(args[2]);
  if (most == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    const Py_ssize_t count = PyList_GET_SIZE(args[0]);
    std::vector<Span> ours;
    std::vector<Span> theirs;
    TensorFacts first;
    TensorFacts second;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!read_pair(PyList_GET_ITEM(args[0], i), PyList_GET_ITEM(args[1], i), first, second)) return nullptr;
      if (const auto memory = memory_of(first)) ours.push_back({*memory, i});
      if (const auto memory = memory_of(second)) theirs.push_back({*memory, i});
    }
    std::ranges::sort(ours, {}, [](const Span& span) { return span.memory.begin; });
    uint64_t longest = 0;
    for (const Span& span : ours) longest = std::max(longest, span.memory.end - span.memory.begin);
    Owned found(PyList_New(0));
    if (found == nullptr) return nullptr;
    for (const Span& their : theirs) {
      const uint64_t from = their.memory.begin < longest ? 0 : their.memory.begin - longest;
      auto our = std::ranges::lower_bound(ours, from, {}, [](const Span& span) { return span.memory.begin; });
      for (; our != ours.end() && our->memory.begin < their.memory.end; ++our) {
        if (our->index == their.index || our->memory.end <= their.memory.begin) continue;
        if (PyList_GET_SIZE(found.get()) >= most) return found.release();
        const Owned pair(Py_BuildValue("(nn)", our->index, their.index));
        if (pair == nullptr || PyList_Append(found.get(), pair.get()) != 0) return nullptr;
      }
    }
    return found.release();
  });
}

PyObject* marks_of(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!need_arguments(given, 2, 2, "marks_of(tensors, least_nbytes)") || !are_lists(args, 1)) return nullptr;
  const long long least = PyLong_AsLongLong(args[1]);
  if (least == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    const Py_ssize_t count = PyList_GET_SIZE(args[0]);
    Owned bytes(PyBytes_FromStringAndSize(nullptr, count));
    if (bytes == nullptr) return nullptr;
    TensorFacts facts;
    for (Py_ssize_t i = 0; i < count; ++i) {
      const at::Tensor* tensor = need_tensor(PyList_GET_ITEM(args[0], i));
      if (tensor == nullptr) return nullptr;
      read_tensor(*tensor->unsafeGetTensorImpl(), facts);
      PyBytes_AS_STRING(bytes.get())[i] = static_cast<char>(marks(facts, least));
    }
    return bytes.release();
  });
}

// Counts labels into a dictionary; most often the next one is the last one again.
class LabelCounter {
 public:
  LabelCounter() : counts_(PyDict_New()) {}

  // Takes the reference. False with an exception set on failure.
  bool add(PyObject* label) {
    if (label == nullptr) return false;
    if (label == last_.get()) {
      ++run_;
      Py_DECREF(label);
      return true;
    }
    if (!flush()) {
      Py_DECREF(label);
      return false;
    }
    last_.reset(label);
    run_ = 1;
    return true;
  }

  // A new reference to the dictionary, or null with an exception set.
  PyObject* finish() { return flush() ? Py_NewRef(counts_.get()) : nullptr; }

 private:
  bool flush() {
    if (counts_ == nullptr) return false;
    if (last_ == nullptr) return true;
    PyObject* known = PyDict_GetItemWithError(counts_.get(), last_.get());
    if (known == nullptr && PyErr_Occurred() != nullptr) return false;
    const Owned more(PyLong_FromLong(run_ + (known == nullptr ? 0 : PyLong_AsLong(known))));
    return more != nullptr && PyDict_SetItem(counts_.get(), last_.get(), more.get()) == 0;
  }

  Owned counts_;
  Owned last_;
  long run_ = 0;
};

PyObject* count_labels(PyObject*, PyObject* tensors) {
  if (!are_lists(&tensors, 1)) return nullptr;
  return guarded([&]() -> PyObject* {
    LabelCounter dtypes;
    LabelCounter devices;
    TensorFacts facts;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
      const at::Tensor* tensor = need_tensor(PyList_GET_ITEM(tensors, i));
      if (tensor == nullptr) return nullptr;
      read_tensor(*tensor->unsafeGetTensorImpl(), facts);
      PyObject* device = facts.impl.device ? device_name(*facts.impl.device) : interned("no device");
      if (!devices.add(device) || !dtypes.add(dtype_name(facts.impl.dtype))) return nullptr;
    }
    const Owned by_dtype(dtypes.finish());
    const Owned by_device(by_dtype == nullptr ? nullptr : devices.finish());
    return by_device == nullptr ? nullptr : PyTuple_Pack(2, by_dtype.get(), by_device.get());
  });
}

PyObject* pair_up(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!need_arguments(given, 3, 3, "pair_up(slots, entries, pair_class)") || !are_lists(args, 1))
    return nullptr;
  if (PyDict_Check(args[1]) == 0 || PyType_Check(args[2]) == 0 ||
      PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(args[2]), &PyTuple_Type) == 0) {
    PyErr_SetString(PyExc_TypeError, "pair_up() takes slots, entries by key and a class of tuples");
    return nullptr;
  }
  auto* pair_class = reinterpret_cast<PyTypeObject*>(args[2]);
  const CollectionPause pause;
  Owned pairs(PyList_New(0));
  for (Py_ssize_t i = 0; pairs != nullptr && i < PyList_GET_SIZE(args[0]); ++i) {
    PyObject* slot = PyList_GET_ITEM(args[0], i);
    if (PyTuple_Check(slot) == 0 || PyTuple_GET_SIZE(slot) == 0) {
      PyErr_SetString(PyExc_TypeError, "pair_up() takes tuples that begin with a key");
      return nullptr;
    }
    PyObject* entry = PyDict_GetItemWithError(args[1], PyTuple_GET_ITEM(slot, 0));
    if (entry == nullptr) {
      if (PyErr_Occurred() != nullptr) return nullptr;
      continue;
    }
    const Owned pair(pair_class->tp_alloc(pair_class, 2));
    if (pair == nullptr) return nullptr;
    PyTuple_SET_ITEM(pair.get(), 0, Py_NewRef(slot));
    PyTuple_SET_ITEM(pair.get(), 1, Py_NewRef(entry));
    if (PyList_Append(pairs.get(), pair.get()) != 0) return nullptr;
  }
  return pairs.release();
}

PyObject* storage_nbytes(PyObject*, PyObject* tensors) {
  if (!are_lists(&tensors, 1)) return nullptr;
  return guarded([&]() -> PyObject* {
    PointerSet seen;
    int64_t total = 0;
    TensorFacts facts;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
      const at::Tensor* tensor = need_tensor(PyList_GET_ITEM(tensors, i));
      if (tensor == nullptr) return nullptr;
      read_tensor(*tensor->unsafeGetTensorImpl(), facts);
      if (facts.has_storage && !facts.storage.symbolic && seen.insert(facts.storage.address)) {
        total += facts.storage.nbytes;
      }
    }
    return integer(total);
  });
}

PyMethodDef methods[] = {
    {"registered", fast_call(registered), METH_FASTCALL,
     "registered(module, slot_class, prefix, /)\n--\n\nAnswer what a module and all in it have registered, "
     "as "
     "`slot_class` of (key, number of the module, whether it is a parameter, whether it is persistent, "
     "tensor, "
     "record), and the modules as (path, module, whether it has hooks of loading), each by all its paths; "
     "None "
     "stands for one that is not there."},
    {"read_entries", fast_call(read_entries), METH_FASTCALL,
     "read_entries(items, entry_class, /)\n--\n\nAnswer the pairs of a name and a tensor as `entry_class` of "
     "(name, "
     "tensor, record), and all other pairs."},
    {"differences_of", fast_call(differences_of), METH_FASTCALL,
     "differences_of(ours, theirs, /)\n--\n\nAnswer for each two tensors a byte of what differs: shape 1, "
     "dtype 2, "
     "device 4, kind 8, ours on meta 16, theirs on meta 32, their memory meets 64, requires_grad 128."},
    {"meetings_of", fast_call(meetings_of), METH_FASTCALL,
     "meetings_of(ours, theirs, most, /)\n--\n\nAnswer which of our tensors' storages meet which of theirs "
     "in memory, "
     "as (index, index), but for those of one index; no more than `most`."},
    {"storage_nbytes", storage_nbytes, METH_O,
     "storage_nbytes(tensors, /)\n--\n\nSum up the bytes of some tensors' storages, each once, as far as "
     "they are known."},
    {"marks_of", fast_call(marks_of), METH_FASTCALL,
     "marks_of(tensors, least_nbytes, /)\n--\n\nAnswer for each tensor a byte of what it is: on meta 1, an "
     "inference tensor "
     "2, at most half of a storage of so many bytes or more 4, past its storage 8."},
    {"count_labels", count_labels, METH_O,
     "count_labels(tensors, /)\n--\n\nCount some tensors by their types, and by their devices."},
    {"pair_up", fast_call(pair_up), METH_FASTCALL,
     "pair_up(slots, entries, pair_class, /)\n--\n\nAnswer each slot with the entry of its key, where there "
     "is one, as "
     "`pair_class`."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_module_functions(PyObject* module) {
  return PyModule_AddFunctions(module, methods) == 0;
}

}  // namespace tensorplay::python
