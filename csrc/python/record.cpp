#include "record.h"

#include <ATen/core/TensorBase.h>

#include <exception>
#include <new>

#include "../core/read.h"
#include "unpack.h"
#include "values.h"

namespace tensorplay::python {
namespace {

struct Record {
  PyObject_HEAD TensorFacts facts;
  PythonFacts python;
  PyObject* inner;  // tuple of (role, TensorRecord), or null for none
  // distinct_cells(), which may take milliseconds: found out once, when first asked for, under the GIL.
  mutable std::optional<std::optional<int64_t>> distinct;
};

std::optional<int64_t> distinct(const Record& record) {
  if (!record.facts.has_geometry()) return std::nullopt;
  if (!record.distinct) record.distinct = distinct_cells(record.facts.shape(), record.facts.stride());
  return *record.distinct;
}

// One of a record's layers: a window on the record, which it keeps alive.
struct Layer {
  PyObject_HEAD Record* record;
};

PyTypeObject* record_type = nullptr;
PyTypeObject* python_type = nullptr;
PyTypeObject* impl_type = nullptr;
PyTypeObject* storage_type = nullptr;
PyTypeObject* data_type = nullptr;
PyTypeObject* extent_type = nullptr;
PyTypeObject* shared_memory_type = nullptr;

using Reader = PyObject* (*)(const Record&);

PyObject* guarded(Reader read, const Record& record) {
  try {
    return read(record);
  } catch (const std::exception& error) {
    PyErr_Format(PyExc_RuntimeError, "tensorplay could not name what it read: %s", error.what());
    return nullptr;
  }
}

template <Reader kRead>
PyObject* layer_field(PyObject* self, void*) {
  return guarded(kRead, *reinterpret_cast<Layer*>(self)->record);
}

template <Reader kRead>
PyObject* record_field(PyObject* self, void*) {
  return guarded(kRead, *reinterpret_cast<Record*>(self));
}

PyObject* make_layer(PyTypeObject* type, const Record& record) {
  auto* layer = PyObject_New(Layer, type);
  if (layer == nullptr) return nullptr;
  layer->record = const_cast<Record*>(&record);
  Py_INCREF(reinterpret_cast<PyObject*>(layer->record));
  return reinterpret_cast<PyObject*>(layer);
}

void free_layer(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Py_DECREF(reinterpret_cast<PyObject*>(reinterpret_cast<Layer*>(self)->record));
  PyObject_Free(self);
  Py_DECREF(type);
}

void free_record(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  auto* record = reinterpret_cast<Record*>(self);
  Py_XDECREF(record->python.type);
  Py_XDECREF(record->python.module);
  Py_XDECREF(record->python.producer_type);
  Py_XDECREF(record->inner);
  record->facts.~TensorFacts();
  PyObject_Free(self);
  Py_DECREF(type);
}

// ---- what is absent, and why
// -------------------------------------------------------------------------------------

struct Missing {
  const char* field;
  Absence why;
};

std::vector<Missing> missing_fields(const Record& record) {
  std::vector<Missing> missing;
  const TensorFacts& facts = record.facts;
  const ImplFacts& impl = facts.impl;
  const auto note = [&](std::initializer_list<const char*> fields, Absence why) {
    if (why == Absence::kNone) return;
    for (const char* field : fields) missing.push_back({field, why});
  };
  if (impl.shape_absence != Absence::kSymbolic) {
    note({"impl.shape", "impl.storage_offset"}, impl.shape_absence);
    if (!facts.nested) note({"impl.numel", "impl.dim"}, impl.shape_absence);
    note({"impl.stride"}, impl.stride_absence);
  }
  if (!impl.device) note({"impl.device"}, Absence::kNoDevice);
  if (!impl.backend) note({"impl.backend"}, Absence::kNoBackend);
  if (impl.version_counter == nullptr) {
    note({"impl.version", "impl.version_counter"},
         impl.is_inference ? Absence::kInferenceVersion : Absence::kUndefinedTensor);
  }
  if (impl.grad_fn_stale) note({"impl.is_leaf"}, Absence::kStaleGradFn);

  const Absence geometry = facts.has_shape() ? impl.stride_absence : impl.shape_absence;
  if (!facts.has_storage) {
    note({"storage", "data"}, Absence::kNoStorage);
  } else {
    if (facts.storage.allocator_type == nullptr) {
      const Absence why =
          facts.storage.allocator == nullptr ? Absence::kNoAllocator : Absence::kForgottenAllocator;
      note({"storage.allocator", "storage.allocator_device"}, why);
    } else if (!allocator_device_type(facts.storage.allocator)) {
      note({"storage.allocator_device"}, Absence::kUnregisteredAllocator);
    }
    note({"data.data_ptr"}, geometry);
  }

  if (facts.nested) {
    note({"extent.visible_nbytes", "extent.contiguous", "extent.memory_format", "extent.self_overlapping",
          "extent.non_overlapping_and_dense"},
         Absence::kNestedOrder);
  } else if (!facts.has_geometry()) {
    note({"extent"}, geometry);
    return missing;
  }
  if (!facts.nbytes()) note({"extent.nbytes"}, Absence::kOverflow);
  if (!facts.needed_nbytes()) {
    note({"extent.needed_nbytes", "extent.first_byte", "extent.out_of_bounds"},
         facts.is_packed() ? Absence::kPacked : Absence::kOverflow);
  }
  if (!facts.nested && !facts.nbytes_of(distinct(record))) {
    const Absence why = facts.nbytes() && facts.needed_nbytes() ? Absence::kTooHard : Absence::kOverflow;
    note({"extent.visible_nbytes"}, facts.is_packed() ? Absence::kPacked : why);
    if (!distinct(record)) note({"extent.self_overlapping"}, why);
  }
  if (!facts.has_storage) {
    note({"extent.storage_nbytes", "extent.out_of_bounds"}, Absence::kNoStorage);
  } else if (facts.storage.symbolic) {
    note({"extent.storage_nbytes", "extent.out_of_bounds"}, Absence::kSymbolic);
  }
  return missing;
}

PyObject* absent(const Record& record) {
  PyObject* reasons = PyDict_New();
  if (reasons == nullptr) return nullptr;
  for (const Missing& missing : missing_fields(record)) {
    PyObject* why = interned(absence_reason(missing.why));
    const int failed = why == nullptr ? -1 : PyDict_SetItemString(reasons, missing.field, why);
    Py_XDECREF(why);
    if (failed != 0) {
      Py_DECREF(reasons);
      return nullptr;
    }
  }
  return reasons;
}

// ---- fields
// ------------------------------------------------------------------------------------------------------

#define FIELD(NAME, BODY, DOC) \
  {#NAME, layer_field<[](const Record& r) -> PyObject* { BODY }>, nullptr, DOC, nullptr}

PyObject* out_of_bounds(const TensorFacts& facts) {
  if (!facts.has_storage || facts.storage.symbolic) return none();
  const std::optional<int64_t> needed = facts.needed_nbytes();
  const std::optional<int64_t> first = needed ? facts.first_byte() : std::nullopt;
  return first ? boolean(*needed > facts.storage.nbytes || *first < 0) : none();
}

// Answers of one geometry, which a nested tensor has not.
template <class Answer>
PyObject* of_geometry(const TensorFacts& facts, Answer answer) {
  return facts.nested ? none() : answer(facts.shape(), facts.stride());
}

PyObject* grad_fn(const ImplFacts& impl) {
  if (impl.grad_fn_type == nullptr) return none();
  // A node of Python's autograd.Function is named by its class, all others by their C++ type.
  return impl.grad_fn_python_name.empty() ? grad_fn_name(impl) : text(impl.grad_fn_python_name);
}

bool has_key(const Record& record, c10::DispatchKey key) {
  return record.facts.impl.keys.has(key);
}

PyGetSetDef python_fields[] = {
    FIELD(type, return Py_NewRef(r.python.type);, "Name of the object's class."),
    FIELD(module, return Py_NewRef(r.python.module == nullptr ? Py_None : r.python.module);
          , "Module of the class, or None."),
    FIELD(address, return PyLong_FromUnsignedLongLong(r.python.id);, "id() of the object."),
    FIELD(refcount, return PyLong_FromSsize_t(r.python.refcount);
          , "References to the object, the probe's own taken off."),
    FIELD(has_weakrefs, return boolean(r.python.has_weakrefs);
          , "Whether Python weak references point at it."),
    FIELD(slot_is_self, return boolean(r.python.slot_is_self);
          , "Whether the impl's PyObject slot names this object."),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyGetSetDef impl_fields[] = {
    FIELD(address, return address(r.facts.impl.address);, "Address of the TensorImpl."),
    FIELD(type, return type_name(r.facts.impl.type);, "Dynamic C++ type."),
    FIELD(use_count, return integer(r.facts.impl.use_count);, "Owners: the Python object is one of them."),
    FIELD(weak_count, return integer(r.facts.impl.weak_count);, "C++ weak references."),
    FIELD(shape, if (r.facts.symbolic &&
                     !r.facts.symbolic->shape.empty()) return expressions(r.facts.symbolic->shape);
          return r.facts.has_shape() ? integers(r.facts.shape()) : none();
          , "Sizes as the impl holds them: ints, or expressions where symbolic."),
    FIELD(stride, if (r.facts.symbolic &&
                      !r.facts.symbolic->stride.empty()) return expressions(r.facts.symbolic->stride);
          return r.facts.has_geometry() ? integers(r.facts.stride()) : none();, "Strides in elements."),
    FIELD(storage_offset, if (r.facts.impl.shape_absence ==
                              Absence::kSymbolic) return expression(r.facts.symbolic->storage_offset);
          return r.facts.has_shape() ? integer(r.facts.impl.storage_offset) : none();, "Offset in elements."),
    FIELD(numel,
          if (r.facts.impl.shape_absence == Absence::kSymbolic) return expression(r.facts.symbolic->numel);
          if (r.facts.nested) return integer(r.facts.nested->numel);
          return r.facts.has_shape() ? integer(r.facts.impl.numel) : none();, "Number of elements."),
    FIELD(dim, if (r.facts.symbolic && r.facts.impl.shape_absence == Absence::kSymbolic) return integer(
                   static_cast<int64_t>(r.facts.symbolic->shape.size()));
          if (r.facts.nested) return integer(r.facts.nested->dim);
          return r.facts.has_shape() ? integer(static_cast<int64_t>(r.facts.impl.shape.size())) : none();
          , "Number of dimensions."),
    FIELD(dtype, return dtype_name(r.facts.impl.dtype);, "Data type: float32, int64, ..."),
    FIELD(itemsize, return integer(r.facts.impl.itemsize);, "Bytes an element."),
    FIELD(device, return r.facts.impl.device ? device_name(*r.facts.impl.device) : none();
          , "The impl's own device label (device_opt_)."),
    FIELD(backend, return r.facts.impl.backend ? device_name(c10::Device(*r.facts.impl.backend)) : none();
          , "Device type whose kernels the key set selects."),
    FIELD(layout, return interned(layout_name(r.facts.impl.layout));, "strided, sparse_coo, ..."),
    FIELD(keys, return key_names(r.facts.impl.keys);, "Dispatch keys by name."),
    FIELD(requires_grad, return boolean(r.facts.impl.requires_grad);, "As AutogradMeta answers."),
    FIELD(is_leaf, return r.facts.impl.grad_fn_stale ? none() : boolean(r.facts.impl.is_leaf);
          , "No grad_fn; None while grad_fn is stale."),
    FIELD(grad_fn, return grad_fn(r.facts.impl);, "Name of the node in AutogradMeta's field, or None."),
    FIELD(grad_fn_stale, return boolean(r.facts.impl.grad_fn_stale);
          , "The version moved since grad_fn was made; PyTorch rebuilds it on its next read."),
    FIELD(output_nr, return integer(r.facts.impl.output_nr);, "Which output of grad_fn this is."),
    FIELD(version, return r.facts.impl.version_counter == nullptr ? none() : integer(r.facts.impl.version);
          , "In-place writes counted so far."),
    FIELD(version_counter, return address(r.facts.impl.version_counter);
          , "Address of the counter: equal for tensors that share it."),
    FIELD(is_view, return boolean(r.facts.impl.is_view);, "Whether autograd tracks it as a view."),
    FIELD(base, return address(r.facts.impl.base);, "Address of the root base's TensorImpl, or None."),
    FIELD(base_requires_grad, return r.facts.impl.is_view ? boolean(r.facts.impl.base_requires_grad) : none();
          , "Whether the base requires grad; None for no view."),
    FIELD(base_is_leaf, return r.facts.impl.is_view ? boolean(r.facts.impl.base_is_leaf) : none();
          , "Whether the base has no grad_fn; None for no view."),
    FIELD(creation_meta, return r.facts.impl.creation_meta
                                    ? interned(creation_meta_name(*r.facts.impl.creation_meta))
                                    : none();
          , "How the view was made (torch::autograd::CreationMeta), or None."),
    FIELD(is_conj, return boolean(r.facts.impl.is_conj);, "Conjugate bit: the bytes hold the conjugate."),
    FIELD(is_neg, return boolean(r.facts.impl.is_neg);, "Negative bit: the bytes hold the negative."),
    FIELD(is_inference, return boolean(r.facts.impl.is_inference);, "Made in inference mode."),
    FIELD(is_zerotensor, return boolean(has_key(r, c10::DispatchKey::ZeroTensor));
          , "All zeros without memory, as forward-mode AD makes them."),
    FIELD(is_functional, return boolean(has_key(r, c10::DispatchKey::Functionalize));
          , "functionalization's wrapper."),
    FIELD(is_python_dispatch, return boolean(has_key(r, c10::DispatchKey::Python));
          , "Operators on it go to a __torch_dispatch__."),
    FIELD(is_wrapped_number, return boolean(r.facts.impl.is_wrapped_number);
          , "A Python number that became a tensor for one call."),
    FIELD(is_symbolic, return boolean(r.facts.impl.shape_absence == Absence::kSymbolic);
          , "Shape, strides and offset are expressions."),
    FIELD(python_decides_shape, return boolean(r.facts.impl.python_decides_shape);
          , "The subclass answers .shape itself."),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyGetSetDef storage_fields[] = {
    FIELD(address, return address(r.facts.storage.address);, "Address of the StorageImpl."),
    FIELD(type, return type_name(r.facts.storage.type);, "Dynamic C++ type."),
    FIELD(nbytes, return r.facts.storage.symbolic ? expression(r.facts.symbolic->storage_nbytes)
                                                  : integer(r.facts.storage.nbytes);
          , "Bytes it says it has: an int, or an expression where symbolic."),
    FIELD(use_count, return integer(r.facts.storage.use_count);, "Owners: each TensorImpl over it is one."),
    FIELD(weak_count, return integer(r.facts.storage.weak_count);, "C++ weak references."),
    FIELD(resizable, return boolean(r.facts.storage.resizable);, "Whether resize_ may reallocate it."),
    FIELD(allocator, return type_name(r.facts.storage.allocator_type);
          , "Dynamic type of the allocator, or None."),
    FIELD(allocator_device, const auto type = allocator_device_type(r.facts.storage.allocator);
          return type ? device_name(c10::Device(*type)) : none();
          , "Device type this allocator is registered for, or None."),
    FIELD(copy_on_write, return boolean(r.facts.storage.copy_on_write);, "Shared until the first write."),
    FIELD(has_materializer, return boolean(r.facts.storage.has_materializer);
          , "A function runs before the first write."),
    FIELD(throws_on_read, return boolean(r.facts.storage.throws_on_read);, "data_ptr() raises."),
    FIELD(throws_on_write, return boolean(r.facts.storage.throws_on_write);, "mutable_data_ptr() raises."),
    FIELD(has_python_wrapper, return boolean(r.facts.storage.has_python_wrapper);
          , "A live UntypedStorage object is one of the owners."),
    FIELD(shared_memory, return r.facts.data.shared_memory ? make_layer(shared_memory_type, r) : none();
          , "The mapping behind it, or None."),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyGetSetDef shared_memory_fields[] = {
    FIELD(handle, return text(r.facts.data.shared_memory->handle);, "Name of the mapped file or object."),
    FIELD(manager, return r.facts.data.shared_memory->manager.empty()
                              ? none()
                              : text(r.facts.data.shared_memory->manager);
          , "Socket of torch_shm_manager (file_system strategy), or None."),
    FIELD(fd, return r.facts.data.shared_memory->fd < 0 ? none() : integer(r.facts.data.shared_memory->fd);
          , "Open descriptor (file_descriptor strategy), or None."),
    FIELD(mapped_nbytes, return integer(r.facts.data.shared_memory->mapped_nbytes);, "Bytes mapped."),
    FIELD(counted, return boolean(r.facts.data.shared_memory->counted);
          , "The mapping carries a reference count of its own."),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyGetSetDef data_fields[] = {
    FIELD(pointer, return PyLong_FromUnsignedLongLong(reinterpret_cast<uintptr_t>(r.facts.data.pointer));
          , "Where the storage begins; 0 is a null pointer."),
    FIELD(data_ptr, const auto where = r.facts.data_address();
          return where ? PyLong_FromUnsignedLongLong(*where) : none();
          , "pointer + offset x itemsize: what Tensor.data_ptr() answers (0 without elements)."),
    FIELD(context, return address(r.facts.data.context);, "What the deleter gets, or None."),
    FIELD(device, return device_name(r.facts.data.device);, "The DataPtr's device label."),
    FIELD(deleter, return function_name(r.facts.data.deleter);
          , "The function that frees the memory, or None."),
    FIELD(origin, return interned(origin_name(r.facts.data.origin));
          , "none, cpu_allocator, borrowed, callback, mapped, storage_slice, copy_on_write or other."),
    FIELD(maker, return r.facts.data.maker == nullptr ? none() : text(maker_name(*r.facts.data.maker));
          , "Whose memory it is, by the callable that frees it, or None."),
    FIELD(producer, return address(r.facts.data.producer);
          , "id() of the object whose memory it is, which the callable keeps alive, or None."),
    FIELD(producer_type,
          return Py_NewRef(r.python.producer_type == nullptr ? Py_None : r.python.producer_type);
          , "Class of that object, or None."),
    FIELD(read_only, return r.facts.data.read_only ? boolean(*r.facts.data.read_only) : none();
          , "Whether a DLPack producer forbids writing; None where nobody says."),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyGetSetDef extent_fields[] = {
    FIELD(nbytes, return optional_integer(r.facts.nbytes());, "numel x itemsize."),
    FIELD(first_byte, return optional_integer(r.facts.first_byte());
          , "First byte reached, from the storage's start."),
    FIELD(needed_nbytes, return optional_integer(r.facts.needed_nbytes());
          , "Bytes from the storage's start to the end of the last element reached."),
    FIELD(storage_nbytes,
          return r.facts.has_storage && !r.facts.storage.symbolic ? integer(r.facts.storage.nbytes) : none();
          , "Bytes the storage has, or None."),
    FIELD(visible_nbytes, return optional_integer(r.facts.nbytes_of(distinct(r)));
          , "Different bytes reached."),
    FIELD(out_of_bounds, return out_of_bounds(r.facts);, "Reaches past the storage."),
    FIELD(contiguous,
          return of_geometry(
              r.facts, [](DimSpan shape, DimSpan stride) { return boolean(is_contiguous(shape, stride)); });
          , "Row-major."),
    FIELD(memory_format, return of_geometry(r.facts,
                                            [](DimSpan shape, DimSpan stride) {
                                              return interned(
                                                  memory_format_name(memory_format(shape, stride)));
                                            });
          , "contiguous, channels_last, channels_last_3d, permuted (dense, other order) or strided."),
    FIELD(self_overlapping, const auto cells = distinct(r);
          return cells ? boolean(*cells < r.facts.impl.numel) : none();, "Two indices reach one element."),
    FIELD(non_overlapping_and_dense, return of_geometry(r.facts,
                                                        [](DimSpan shape, DimSpan stride) {
                                                          return boolean(memory_format(shape, stride) !=
                                                                         MemoryFormat::kStrided);
                                                        });
          , "Fills its range, each element once."),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
#undef FIELD

#define RECORD_FIELD(NAME, BODY, DOC) \
  {#NAME, record_field<[](const Record& r) -> PyObject* { BODY }>, nullptr, DOC, nullptr}

// The class decides where the C++ facts alone cannot.
PyObject* kind(const Record& record) {
  if (record.python.uninitialized) return interned("uninitialized");
  Kind kind = record.facts.kind;
  if (record.python.fake) kind = Kind::kFake;
  // A wrapper that stores itself as a FakeTensor does, and is none.
  if (kind == Kind::kFake && record.python.id != 0 && !record.python.fake) kind = Kind::kWrapperSubclass;
  return interned(kind_name(kind));
}

PyGetSetDef record_fields[] = {
    RECORD_FIELD(kind, return kind(r);, "What kind of tensor this is."),
    RECORD_FIELD(python, return r.python.id == 0 ? none() : make_layer(python_type, r);
                 , "The Python object, or None."),
    RECORD_FIELD(impl, return make_layer(impl_type, r);, "The c10::TensorImpl."),
    RECORD_FIELD(storage, return r.facts.has_storage ? make_layer(storage_type, r) : none();
                 , "The c10::StorageImpl, or None."),
    RECORD_FIELD(data, return r.facts.has_storage ? make_layer(data_type, r) : none();
                 , "The at::DataPtr, or None."),
    RECORD_FIELD(extent,
                 return r.facts.has_geometry() || r.facts.nested ? make_layer(extent_type, r) : none();
                 , "The bytes reached, or None."),
    RECORD_FIELD(inner, return r.inner == nullptr ? PyTuple_New(0) : Py_NewRef(r.inner);
                 , "(role, TensorRecord) of each tensor this one is made of."),
    RECORD_FIELD(absent, return absent(r);, "Field path to the reason why it is None."),
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
#undef RECORD_FIELD

PyTypeObject* make_type(PyObject* module, const char* name, const char* doc, size_t size, destructor free,
                        PyGetSetDef* fields) {
  PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(free)},
      {Py_tp_getset, fields},
      {Py_tp_doc, const_cast<char*>(doc)},
      {0, nullptr},
  };
  PyType_Spec spec{name, static_cast<int>(size), 0,
                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) return nullptr;
  if (PyModule_AddType(module, reinterpret_cast<PyTypeObject*>(type)) != 0) Py_CLEAR(type);
  return reinterpret_cast<PyTypeObject*>(type);  // the module and this file each keep a reference
}

PyObject* module_string = nullptr;  // "__module__"

bool read_python(PyObject* object, const c10::TensorImpl& impl, Py_ssize_t observer_refs, PythonFacts& out) {
  PyTypeObject* type = Py_TYPE(object);
  out.id = reinterpret_cast<uintptr_t>(object);
  out.refcount = Py_REFCNT(object) - observer_refs;
  out.slot_is_self = impl.pyobj_slot()->load_pyobj() == object;
  out.uninitialized = is_uninitialized(object);
  out.fake = impl.key_set().has(c10::DispatchKey::Python) && is_fake(object);
  if (PyType_SUPPORTS_WEAKREFS(type)) out.has_weakrefs = *PyObject_GET_WEAKREFS_LISTPTR(object) != nullptr;
  if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) == 0) {  // torch.Tensor itself and its subclasses are heap types
    out.type = PyUnicode_FromString(type->tp_name);
    return out.type != nullptr;
  }
  out.type = Py_NewRef(reinterpret_cast<PyHeapTypeObject*>(type)->ht_name);
  // The class's own entry: no descriptor, no metaclass is asked.
  PyObject* own = PyDict_GetItemWithError(type->tp_dict, module_string);
  if (own == nullptr && PyErr_Occurred() != nullptr) return false;
  if (own != nullptr && PyUnicode_CheckExact(own)) out.module = Py_NewRef(own);
  return true;
}

// While the tensor is alive its callable keeps the producer alive.
bool name_producer(const DataFacts& data, PythonFacts& out) {
  if (!data.producer_is_python || data.producer == nullptr) return true;
  out.producer_type = PyUnicode_FromString(Py_TYPE(static_cast<const PyObject*>(data.producer))->tp_name);
  return out.producer_type != nullptr;
}

// Null with an exception set on failure.
PyObject* read_inner(const at::TensorBase& tensor, Kind kind) {
  const std::vector<InnerTensor> found = inner_tensors(*tensor.unsafeGetTensorImpl(), kind);
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(found.size()));
  for (size_t i = 0; tuple != nullptr && i < found.size(); ++i) {
    PyObject* object = found[i].tensor->unsafeGetTensorImpl()->pyobj_slot()->load_pyobj();
    PyObject* record = make_record(*found[i].tensor, object, 0);
    PyObject* pair = record == nullptr ? nullptr : Py_BuildValue("(sN)", found[i].role, record);
    if (pair == nullptr) {
      Py_CLEAR(tuple);
      break;
    }
    PyTuple_SET_ITEM(tuple, static_cast<Py_ssize_t>(i), pair);
  }
  return tuple;
}

}  // namespace

bool init_record_types(PyObject* module) {
  module_string = PyUnicode_InternFromString("__module__");
  record_type = make_type(module, "tensorplay._C.TensorRecord", "What one probe read of a tensor.",
                          sizeof(Record), free_record, record_fields);
  python_type = make_type(module, "tensorplay._C.PythonLayer", "The Python object.", sizeof(Layer),
                          free_layer, python_fields);
  impl_type = make_type(module, "tensorplay._C.ImplLayer", "The c10::TensorImpl.", sizeof(Layer), free_layer,
                        impl_fields);
  storage_type = make_type(module, "tensorplay._C.StorageLayer", "The c10::StorageImpl.", sizeof(Layer),
                           free_layer, storage_fields);
  data_type = make_type(module, "tensorplay._C.DataLayer", "The at::DataPtr.", sizeof(Layer), free_layer,
                        data_fields);
  extent_type = make_type(module, "tensorplay._C.Extent", "The bytes of its storage a tensor reaches.",
                          sizeof(Layer), free_layer, extent_fields);
  shared_memory_type = make_type(module, "tensorplay._C.SharedMemory", "The mapping behind a storage.",
                                 sizeof(Layer), free_layer, shared_memory_fields);
  return module_string != nullptr && record_type != nullptr && python_type != nullptr &&
         impl_type != nullptr && storage_type != nullptr && data_type != nullptr && extent_type != nullptr &&
         shared_memory_type != nullptr;
}

PyObject* make_record(const at::TensorBase& tensor, PyObject* object, Py_ssize_t observer_refs) {
  auto* record = PyObject_New(Record, record_type);
  if (record == nullptr) return nullptr;
  new (&record->facts) TensorFacts();
  new (&record->python) PythonFacts();
  record->inner = nullptr;
  new (&record->distinct) std::optional<std::optional<int64_t>>();
  auto* made = reinterpret_cast<PyObject*>(record);
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  try {
    read_tensor(impl, record->facts);
    if (has_inner(record->facts.kind)) record->inner = read_inner(tensor, record->facts.kind);
    if (record->facts.kind == Kind::kNested) read_nested(impl, record->facts);
  } catch (const std::exception& error) {
    PyErr_Format(PyExc_RuntimeError, "tensorplay could not read this tensor: %s", error.what());
  }
  if (PyErr_Occurred() != nullptr || !name_producer(record->facts.data, record->python) ||
      (object != nullptr && !read_python(object, impl, observer_refs, record->python))) {
    Py_DECREF(made);
    return nullptr;
  }
  if (record->python.uninitialized) {  // its fields hold a shape that means nothing
    record->facts.impl.shape_absence = record->facts.impl.stride_absence = Absence::kUninitialized;
  }
  return made;
}

}  // namespace tensorplay::python
