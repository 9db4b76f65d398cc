// Python values for what a record holds. Strings that repeat are made once and kept.
//
// All functions need the GIL and return a new reference, or null with an exception set.
#pragma once

#include <Python.h>

#include <string>
#include <string_view>

#include "../core/names.h"
#include "../core/records.h"

namespace tensorplay::python {

PyObject* none();
PyObject* boolean(bool value);
PyObject* integer(int64_t value);
PyObject* address(const void* pointer);  // int; None for a null pointer
PyObject* text(std::string_view value);
PyObject* interned(std::string_view value);
PyObject* optional_integer(std::optional<int64_t> value);
PyObject* integers(DimSpan values);                             // tuple of int
PyObject* expressions(const std::vector<std::string>& values);  // tuple of int, or str where symbolic
PyObject* expression(const std::string& value);

PyObject* array_of(PyObject* bytes, const char* format);  // memoryview of struct's format

PyObject* type_name(const std::type_info* type);  // None for null
PyObject* grad_fn_name(const ImplFacts& impl);    // for a node of C++; the name is remembered by its type
PyObject* dtype_name(caffe2::TypeMeta dtype);
PyObject* device_name(c10::Device device);
PyObject* key_names(c10::DispatchKeySet keys);  // tuple of str
PyObject* function_name(const void* function);  // None for null

}  // namespace tensorplay::python
