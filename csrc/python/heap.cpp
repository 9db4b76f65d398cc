#include <torch/csrc/autograd/python_variable.h>
// python_variable.h brings PyTorch's own Python.h.
#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "../core/groups.h"
#include "call.h"
#include "heap.h"
#include "interpreter.h"
#include "unpack.h"
#include "values.h"

namespace tensorplay::python {
namespace {

bool is_tensor_class(PyTypeObject* type) {
  return PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}

// The impl inside an object of a tensor class; null where its constructor or destructor is at work.
const c10::TensorImpl* impl_of(PyObject* object) {
  const at::Tensor& inside = THPVariable_Unpack(object);
  return inside.defined() ? inside.unsafeGetTensorImpl() : nullptr;
}

bool is_of_the_graph(PyTypeObject* type) {
  return is_tensor_class(type) || is_node_class(type) || is_checkpoint_class(type);
}

PyObject* list_of(std::span<PyObject* const> objects) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(objects.size()));
  for (size_t i = 0; list != nullptr && i < objects.size(); ++i) {
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), Py_NewRef(objects[i]));
  }
  return list;
}

PyObject* live_graph(PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    const CollectionPause pause;
    std::vector<PyObject*> found;
    if (!find_objects(is_of_the_graph, found)) return nullptr;
    // From here nothing runs Python before every object is in a list, which then holds it.
    std::array<std::vector<PyObject*>, 3> kinds;
    for (PyObject* object : found) {
      const bool tensor = is_tensor_class(Py_TYPE(object));
      if (tensor && impl_of(object) == nullptr) continue;
      kinds[tensor ? 0 : is_checkpoint_class(Py_TYPE(object)) ? 2 : 1].push_back(object);
    }
    const Owned tensors(list_of(kinds[0]));
    const Owned nodes(tensors == nullptr ? nullptr : list_of(kinds[1]));
    const Owned frames(nodes == nullptr ? nullptr : list_of(kinds[2]));
    return frames == nullptr ? nullptr : PyTuple_Pack(3, tensors.get(), nodes.get(), frames.get());
  });
}

PyObject* make_frame(const FrameLocals& frame) {
  PyObject* named = PyList_New(static_cast<Py_ssize_t>(frame.named.size()));
  for (size_t i = 0; named != nullptr && i < frame.named.size(); ++i) {
    PyObject* pair = PyTuple_Pack(2, frame.named[i].first.get(), frame.named[i].second.get());
    if (pair == nullptr) {
      Py_CLEAR(named);
    } else {
      PyList_SET_ITEM(named, static_cast<Py_ssize_t>(i), pair);
    }
  }
  if (named == nullptr) return nullptr;
  auto* code = reinterpret_cast<PyCodeObject*>(frame.code.get());
  return Py_BuildValue("OOiN", code->co_filename, code_name(code), frame.line, named);
}

// Reads the frames first: making the answer may start other threads, which move on.
PyObject* frame_locals(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 0, 2, "frame_locals(thread=None, skip=None)")) return nullptr;
  PyObject* only = count > 0 && args[0] != Py_None ? args[0] : nullptr;
  PyObject* skip = count > 1 && args[1] != Py_None ? args[1] : nullptr;
  const unsigned long thread_id = only == nullptr ? 0 : PyLong_AsUnsignedLong(only);
  if (PyErr_Occurred() != nullptr) return nullptr;
  if (skip != nullptr && !PyUnicode_Check(skip)) {
    PyErr_SetString(PyExc_TypeError, "frame_locals() takes the beginning of file names to skip as a str");
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const CollectionPause pause;
    const CodeFilter wanted = [skip](PyCodeObject* code) {
      return skip == nullptr || PyUnicode_Tailmatch(code->co_filename, skip, 0, PY_SSIZE_T_MAX, -1) == 0;
    };
    std::vector<FrameLocals> frames;
    PyThreadState* current = PyThreadState_Get();
    const auto add = [&](PyThreadState* thread) {
      if (only == nullptr || thread->thread_id == thread_id) read_frames(thread, wanted, frames);
    };
    add(current);
    // Threads go only while they hold the GIL, and new ones are put before the first.
    PyThreadState* thread = PyInterpreterState_ThreadHead(PyThreadState_GetInterpreter(current));
    for (; thread != nullptr; thread = PyThreadState_Next(thread)) {
      if (thread != current) add(thread);
    }
    PyObject* answer = PyList_New(static_cast<Py_ssize_t>(frames.size()));
    for (size_t i = 0; answer != nullptr && i < frames.size(); ++i) {
      PyObject* frame = make_frame(frames[i]);
      if (frame == nullptr) {
        Py_CLEAR(answer);
      } else {
        PyList_SET_ITEM(answer, static_cast<Py_ssize_t>(i), frame);
      }
    }
    return answer;
  });
}

PyObject* generator_locals(PyObject*, PyObject* object) {
  if (!PyGen_CheckExact(object) && !PyCoro_CheckExact(object) && !PyAsyncGen_CheckExact(object)) {
    PyErr_Format(PyExc_TypeError, "expected a generator or coroutine, got %.200s", Py_TYPE(object)->tp_name);
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const CollectionPause pause;
    FrameLocals frame;
    return read_generator(object, frame) ? make_frame(frame) : none();
  });
}

PyObject* frame_object_locals(PyObject*, PyObject* object) {
  if (!PyFrame_Check(object)) {
    PyErr_Format(PyExc_TypeError, "expected a frame, got %.200s", Py_TYPE(object)->tp_name);
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const CollectionPause pause;
    FrameLocals frame;
    return read_frame_object(object, frame) ? make_frame(frame) : none();
  });
}

// Each object is a cache line somewhere: it is asked for so many objects before it is looked at.
constexpr Py_ssize_t kObjectsAhead = 32;
constexpr Py_ssize_t kBlock = 512;

// False with an exception set.
bool add_all(PyObject* tensors, StorageGrouper& grouper) {
  PyObject* const* objects = PySequence_Fast_ITEMS(tensors);
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors);
  std::array<const c10::TensorImpl*, kBlock> impls;
  PyTypeObject* known = nullptr;
  for (Py_ssize_t begin = 0; begin < count; begin += kBlock) {
    const Py_ssize_t here = std::min(kBlock, count - begin);
    for (Py_ssize_t i = begin; i < begin + here; ++i) {
      if (i + kObjectsAhead < count) {
        const auto* coming = reinterpret_cast<const THPVariable*>(objects[i + kObjectsAhead]);
        __builtin_prefetch(&coming->ob_base.ob_type);  // its cdata may begin the next cache line
        __builtin_prefetch(&coming->cdata);
      }
      PyObject* object = objects[i];
      PyTypeObject* type = Py_TYPE(object);
      const c10::TensorImpl* impl = type == known || is_tensor_class(type) ? impl_of(object) : nullptr;
      if (impl == nullptr) {
        PyErr_Format(PyExc_TypeError, "expected a torch.Tensor at index %zd, got %.200s", i, type->tp_name);
        return false;
      }
      known = type;
      impls[static_cast<size_t>(i - begin)] = impl;
    }
    grouper.add({impls.data(), static_cast<size_t>(here)});
  }
  return true;
}

PyObject* room_for(Py_ssize_t count, size_t size) {
  return PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(size));
}

PyObject* group_by_storage(PyObject*, PyObject* tensors) {
  if (!PyList_Check(tensors) && !PyTuple_Check(tensors)) {
    PyErr_Format(PyExc_TypeError, "group_by_storage() takes a list or tuple, got %.200s",
                 Py_TYPE(tensors)->tp_name);
    return nullptr;
  }
  return guarded([&]() -> PyObject* {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(tensors);
    // The answer's own memory is written; there is a place for as many groups as tensors at first.
    const Owned ids(room_for(count, sizeof(uint32_t)));
    Owned storages(ids == nullptr ? nullptr : room_for(count, sizeof(void*)));
    if (storages == nullptr) return nullptr;
    StorageGrouper grouper(static_cast<size_t>(count),
                           reinterpret_cast<uint32_t*>(PyBytes_AS_STRING(ids.get())),
                           reinterpret_cast<const c10::StorageImpl**>(PyBytes_AS_STRING(storages.get())));
    if (!add_all(tensors, grouper)) return nullptr;
    PyObject* shrunk = storages.release();
    if (_PyBytes_Resize(&shrunk, static_cast<Py_ssize_t>(grouper.finish() * sizeof(void*))) != 0)
      return nullptr;
    storages.reset(shrunk);
    const Owned id_array(array_of(ids.get(), "I"));
    const Owned address_array(id_array == nullptr ? nullptr : array_of(storages.get(), "Q"));
    return address_array == nullptr ? nullptr : PyTuple_Pack(2, id_array.get(), address_array.get());
  });
}

PyMethodDef functions[] = {
    {"live_graph", live_graph, METH_NOARGS,
     "live_graph()\n--\n\nAnswer every tensor that has a Python object now, by type alone, those hidden by "
     "gc.freeze() too; every such node of autograd; and every frame of an activation checkpoint."},
    {"frame_locals", fast_call(frame_locals), METH_FASTCALL,
     "frame_locals(thread=None, skip=None, /)\n--\n\nAnswer (filename, qualified name, line, [(variable, "
     "value), ...]) of every frame now executing, this thread's first, innermost first."},
    {"generator_locals", generator_locals, METH_O,
     "generator_locals(generator, /)\n--\n\nAnswer what frame_locals() does for the frame of a generator or "
     "coroutine, or None where it has finished."},
    {"frame_object_locals", frame_object_locals, METH_O,
     "frame_object_locals(frame, /)\n--\n\nAnswer what frame_locals() does for a frame's object, without "
     "making "
     "its f_locals, which would keep its variables alive; None where it executes, or "
     "is a generator's."},
    {"group_by_storage", group_by_storage, METH_O,
     "group_by_storage(tensors, /)\n--\n\nAnswer each tensor's group, numbered by first appearance, and the "
     "address of each group's storage; a tensor without one is a group by itself, at 0."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_heap_functions(PyObject* module) {
  return PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace tensorplay::python
