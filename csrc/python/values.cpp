#include "values.h"

#include <unordered_map>

namespace tensorplay::python {
namespace {

// Values kept for the life of the process. The keys come from small closed sets (types, devices, key sets),
// so the map does not grow with the number of tensors.
template <class Key, class Make>
PyObject* remembered(std::unordered_map<Key, PyObject*>& known, Key key, Make make) {
  const auto it = known.find(key);
  if (it != known.end()) return Py_NewRef(it->second);
  PyObject* value = make();
  if (value != nullptr) known.emplace(key, Py_NewRef(value));
  return value;
}

template <class Values, class Make>
PyObject* tuple_of(const Values& values, Make make) {
  PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(values.size()));
  Py_ssize_t index = 0;
  for (const auto& value : values) {
    PyObject* item = tuple == nullptr ? nullptr : make(value);
    if (item == nullptr) {
      Py_XDECREF(tuple);
      return nullptr;
    }
    PyTuple_SET_ITEM(tuple, index++, item);
  }
  return tuple;
}

}  // namespace

PyObject* none() {
  Py_RETURN_NONE;
}

PyObject* boolean(bool value) {
  return PyBool_FromLong(value ? 1 : 0);
}

PyObject* integer(int64_t value) {
  return PyLong_FromLongLong(value);
}

PyObject* address(const void* pointer) {
  if (pointer == nullptr) return none();
  return PyLong_FromUnsignedLongLong(reinterpret_cast<uintptr_t>(pointer));
}

PyObject* text(std::string_view value) {
  // Names can hold bytes of any encoding (a shared library's path, a file name).
  return PyUnicode_DecodeUTF8(value.data(), static_cast<Py_ssize_t>(value.size()), "backslashreplace");
}

PyObject* interned(std::string_view value) {
  // Keyed by the literal's address: the views come from the name tables in core/names.cpp.
  static std::unordered_map<const char*, PyObject*> known;
  return remembered(known, value.data(), [&] { return text(value); });
}

PyObject* optional_integer(std::optional<int64_t> value) {
  return value ? integer(*value) : none();
}

PyObject* integers(DimSpan values) {
  return tuple_of(values, integer);
}

PyObject* expression(const std::string& value) {
  const size_t digits = value.find_first_not_of("0123456789", value.starts_with('-') ? 1 : 0);
  const bool number = digits == std::string::npos && !value.empty() && value != "-";
  return number ? PyLong_FromString(value.c_str(), nullptr, 10) : text(value);
}

PyObject* expressions(const std::vector<std::string>& values) {
  return tuple_of(values, expression);
}

PyObject* array_of(PyObject* bytes, const char* format) {
  PyObject* view = PyMemoryView_FromObject(bytes);
  PyObject* array = view == nullptr ? nullptr : PyObject_CallMethod(view, "cast", "s", format);
  Py_XDECREF(view);
  return array;
}

PyObject* type_name(const std::type_info* type) {
  if (type == nullptr) return none();
  static std::unordered_map<const std::type_info*, PyObject*> known;
  return remembered(known, type, [&] { return text(tensorplay::type_name(*type)); });
}

PyObject* grad_fn_name(const ImplFacts& impl) {
  static std::unordered_map<const std::type_info*, PyObject*> known;
  return remembered(known, impl.grad_fn_type, [&] { return text(tensorplay::node_name(impl)); });
}

PyObject* dtype_name(caffe2::TypeMeta dtype) {
  return interned(tensorplay::dtype_name(dtype));
}

PyObject* device_name(c10::Device device) {
  // The name of PrivateUse1 can be set once, later: not remembered before it is a device somebody has.
  static std::unordered_map<int, PyObject*> known;
  const int key = (static_cast<int>(device.type()) << 8) | static_cast<uint8_t>(device.index());
  return remembered(known, key, [&] { return text(tensorplay::device_name(device)); });
}

PyObject* key_names(c10::DispatchKeySet keys) {
  static std::unordered_map<uint64_t, PyObject*> known;
  return remembered(known, keys.raw_repr(), [&] { return tuple_of(tensorplay::key_names(keys), text); });
}

PyObject* function_name(const void* function) {
  if (function == nullptr) return none();
  static std::unordered_map<const void*, PyObject*> known;
  return remembered(known, function, [&] { return text(tensorplay::function_name(function)); });
}

}  // namespace tensorplay::python
