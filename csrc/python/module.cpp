// The extension module tensorplay._C.
#include <Python.h>
// Python.h first, as CPython asks.
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "../core/read.h"
#include "../device/maps.h"
#include "bytes.h"
#include "call.h"
#include "chain.h"
#include "dtensor.h"
#include "graph.h"
#include "heap.h"
#include "holders.h"
#include "interpreter.h"
#include "modules.h"
#include "overlap.h"
#include "placement.h"
#include "record.h"
#include "tensorplay_build_info.h"  // written by setup.py
#include "track.h"
#include "unpack.h"
#include "values.h"

namespace tensorplay::python {
namespace {

PyObject* read(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 1, 2, "read(tensor, observer_refs=1)")) return nullptr;
  const at::Tensor* tensor = need_tensor(args[0]);
  if (tensor == nullptr) return nullptr;
  const Py_ssize_t observer_refs = count > 1 ? PyLong_AsSsize_t(args[1]) : 1;
  if (observer_refs == -1 && PyErr_Occurred() != nullptr) return nullptr;
  return make_record(*tensor, args[0], observer_refs);
}

PyObject* is_tensor(PyObject*, PyObject* object) {
  return boolean(unpack_tensor(object) != nullptr);
}

PyObject* is_node(PyObject*, PyObject* object) {
  return boolean(is_node_class(Py_TYPE(object)));
}

PyObject* read_grad(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const at::Tensor* tensor = need_tensor(object);
    if (tensor == nullptr) return nullptr;
    const at::TensorBase* grad = grad_of(*tensor->unsafeGetTensorImpl());
    if (grad == nullptr || python_object(*grad) != nullptr) return none();
    return make_record(*grad, nullptr, 0);
  });
}

PyObject* grad_object(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const at::Tensor* tensor = need_tensor(object);
    if (tensor == nullptr) return nullptr;
    const at::TensorBase* grad = grad_of(*tensor->unsafeGetTensorImpl());
    PyObject* found = grad == nullptr ? nullptr : python_object(*grad);
    return Py_NewRef(found == nullptr || Py_REFCNT(found) == 0 ? Py_None : found);
  });
}

// What vars() answers, without asking a `__dict__` that the class defines.
PyObject* instance_dict(PyObject*, PyObject* object) {
  return has_instance_dict(Py_TYPE(object)) ? PyObject_GenericGetDict(object, nullptr) : none();
}

PyObject* learn_storage_slice(PyObject*, PyObject* object) {
  const at::Tensor* tensor = need_tensor(object);
  if (tensor == nullptr) return nullptr;
  const c10::StorageImpl* storage = tensor->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (storage == nullptr) {
    PyErr_SetString(PyExc_ValueError, "learn_storage_slice() needs a tensor with a storage");
    return nullptr;
  }
  tensorplay::learn_storage_slice(*storage);
  return none();
}

PyObject* impl_data_address(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const at::Tensor* tensor = need_tensor(object);
    if (tensor == nullptr) return nullptr;
    TensorFacts facts;
    read_tensor(*tensor->unsafeGetTensorImpl(), facts);
    const auto data = impl_data(*tensor->unsafeGetTensorImpl(), facts);
    return data ? PyLong_FromUnsignedLongLong(reinterpret_cast<uintptr_t>(*data)) : none();
  });
}

PyObject* extent_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!need_arguments(count, 3, 3, "extent_of(shape, stride, storage_offset)")) return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
    if (!read_geometry(args[0], args[1], sizes, strides)) return nullptr;
    const long long offset = PyLong_AsLongLong(args[2]);
    if (offset == -1 && PyErr_Occurred() != nullptr) return nullptr;
    const auto range = cell_range(sizes, strides, offset);
    return Py_BuildValue("{s:N,s:N,s:N,s:N,s:N}", "begin",
                         optional_integer(range ? std::optional(range->begin) : std::nullopt), "end",
                         optional_integer(range ? std::optional(range->end) : std::nullopt), "distinct",
                         optional_integer(distinct_cells(sizes, strides)), "contiguous",
                         boolean(is_contiguous(sizes, strides)), "memory_format",
                         interned(memory_format_name(memory_format(sizes, strides))));
  });
}

PyObject* producer(PyObject*, PyObject* object) {
  return guarded([&]() -> PyObject* {
    const at::Tensor* tensor = need_tensor(object);
    if (tensor == nullptr) return nullptr;
    TensorFacts facts;
    read_tensor(*tensor->unsafeGetTensorImpl(), facts);
    const bool known = facts.has_storage && facts.data.producer_is_python && facts.data.producer != nullptr;
    return known ? Py_NewRef(static_cast<PyObject*>(const_cast<void*>(facts.data.producer))) : none();
  });
}

// One list for each (begin, end) of `ranges`: what `make_entry` says of the mappings that hold a byte of it;
// null is left out where no exception is set.
template <class MakeEntry>
PyObject* mappings_over(PyObject* ranges, const char* refusal, MakeEntry make_entry) {
  return guarded([&]() -> PyObject* {
    PyObject* fast = PySequence_Fast(ranges, refusal);
    PyObject* answers = fast == nullptr ? nullptr : PyList_New(0);
    const std::vector<Mapping> maps = answers == nullptr ? std::vector<Mapping>() : read_own_maps();
    for (Py_ssize_t i = 0; answers != nullptr && i < PySequence_Fast_GET_SIZE(fast); ++i) {
      unsigned long long begin = 0;
      unsigned long long end = 0;
      PyObject* found = nullptr;
      if (PyArg_ParseTuple(PySequence_Fast_GET_ITEM(fast, i), "KK", &begin, &end)) found = PyList_New(0);
      if (found != nullptr) {
        for (const Mapping* mapping : overlapping(maps, begin, end)) {
          PyObject* entry = make_entry(*mapping);
          if (entry == nullptr && PyErr_Occurred() == nullptr) continue;
          if (entry == nullptr || PyList_Append(found, entry) != 0) Py_CLEAR(found);
          Py_XDECREF(entry);
          if (found == nullptr) break;
        }
      }
      if (found == nullptr || PyList_Append(answers, found) != 0) Py_CLEAR(answers);
      Py_XDECREF(found);
    }
    Py_XDECREF(fast);
    return answers;
  });
}

PyObject* find_mappings(PyObject*, PyObject* ranges) {
  return mappings_over(ranges, "find_mappings() takes a sequence of (begin, end)",
                       [](const Mapping& mapping) {
                         return Py_BuildValue("KKsN", static_cast<unsigned long long>(mapping.begin),
                                              static_cast<unsigned long long>(mapping.end),
                                              mapping.permissions.c_str(), text(mapping.path));
                       });
}

PyObject* mapped_files(PyObject*, PyObject* ranges) {
  const char* refusal = "mapped_files() takes a sequence of (begin, end)";
  return mappings_over(ranges, refusal, [](const Mapping& mapping) -> PyObject* {
    if (mapping.file.empty()) return nullptr;
    return Py_BuildValue("KKKsNN", static_cast<unsigned long long>(mapping.begin),
                         static_cast<unsigned long long>(mapping.end),
                         static_cast<unsigned long long>(mapping.offset), mapping.file.c_str(),
                         text(mapping.path), boolean(mapping.permissions[3] == 's'));
  });
}

// The bytes that a built-in object hands out now. Only for types whose buffer is C code; the export is given
// back at once.
PyObject* buffer_of(PyObject*, PyObject* object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();  // a closed mmap: it has none
    return none();
  }
  PyObject* answer = Py_BuildValue("KK", reinterpret_cast<unsigned long long>(view.buf),
                                   static_cast<unsigned long long>(view.len));
  PyBuffer_Release(&view);
  return answer;
}

PyMethodDef methods[] = {
    {"read", fast_call(read), METH_FASTCALL,
     "read(tensor, observer_refs=1, /)\n--\n\nRead all four layers of one tensor."},
    {"is_tensor", is_tensor, METH_O,
     "is_tensor(object, /)\n--\n\nTell by type alone whether this is a live tensor."},
    {"is_node", is_node, METH_O,
     "is_node(object, /)\n--\n\nTell by type alone whether an object is a node of autograd's graph."},
    {"read_grad", read_grad, METH_O,
     "read_grad(tensor, /)\n--\n\nRead the gradient autograd keeps for a tensor, if it has no Python object; "
     "makes none. Else None."},
    {"grad_object", grad_object, METH_O,
     "grad_object(tensor, /)\n--\n\nAnswer the gradient autograd keeps for a tensor, if it has a Python "
     "object "
     "already. Else None."},
    {"instance_dict", instance_dict, METH_O,
     "instance_dict(object, /)\n--\n\nAnswer an object's own dictionary, or None, without asking its class."},
    {"learn_storage_slice", learn_storage_slice, METH_O,
     "learn_storage_slice(tensor, /)\n--\n\nLearn the deleter of sliced storages from a tensor over one."},
    {"producer", producer, METH_O,
     "producer(tensor, /)\n--\n\nAnswer the Python object whose memory a tensor borrows, where its deleter "
     "keeps "
     "one. Else None."},
    {"find_mappings", find_mappings, METH_O,
     "find_mappings(ranges, /)\n--\n\nAnswer, for each half-open range of addresses, the mappings of this "
     "process "
     "that hold a byte of it."},
    {"mapped_files", mapped_files, METH_O,
     "mapped_files(ranges, /)\n--\n\nAnswer, for each half-open range of addresses, the mappings of files "
     "that "
     "hold a byte of it: (begin, end, offset in the file, the file's device and inode, path, shared)."},
    {"buffer_of", buffer_of, METH_O,
     "buffer_of(object, /)\n--\n\nAnswer address and bytes of the buffer a built-in object has now, or "
     "None."},
    {"impl_data_address", impl_data_address, METH_O,
     "impl_data_address(tensor, /)\n--\n\nAnswer TensorImpl::data(), or None where asking would throw."},
    {"extent_of", fast_call(extent_of), METH_FASTCALL,
     "extent_of(shape, stride, storage_offset, /)\n--\n\nAnswer which cells of a storage a geometry "
     "reaches."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "tensorplay._C",
    "Native probes of TensorPlay.",
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

bool add_build_info(PyObject* module) {
  PyObject* info = Py_BuildValue("{s:s,s:i,s:s,s:s,s:l}", "torch", TENSORPLAY_BUILT_TORCH, "cxx11_abi",
                                 TENSORPLAY_BUILT_CXX11_ABI, "python", TENSORPLAY_BUILT_PYTHON, "compiler",
                                 TENSORPLAY_BUILT_COMPILER, "cxx_standard", static_cast<long>(__cplusplus));
  PyObject* frozen = info == nullptr ? nullptr : PyDictProxy_New(info);
  Py_XDECREF(info);
  const int failed = frozen == nullptr ? -1 : PyModule_AddObjectRef(module, "BUILD_INFO", frozen);
  Py_XDECREF(frozen);
  return failed == 0;
}

}  // namespace
}  // namespace tensorplay::python

PyMODINIT_FUNC PyInit__C() {
  using namespace tensorplay::python;
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) return nullptr;
  if (!init_unpack() || !init_record_types(module) || !add_build_info(module) ||
      !add_bytes_functions(module) || !add_chain_functions(module) || !add_dtensor_functions(module) ||
      !add_track_functions(module) || !add_graph_functions(module) || !add_heap_functions(module) ||
      !add_holder_functions(module) || !add_overlap_functions(module) || !add_placement_functions(module) ||
      !add_module_functions(module)) {
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
