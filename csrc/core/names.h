// Words for what a record holds: type names, dispatch keys, data types, devices, deleters.
//
// Everything here is derived from a record after the read, so that the read itself stays free of strings.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "records.h"

namespace tensorplay {

std::string type_name(const std::type_info& type);    // demangled: c10::TensorImpl
std::string node_name(const ImplFacts& impl);         // AddBackward0, or the Python class
std::string_view dtype_name(caffe2::TypeMeta dtype);  // float32
std::string device_name(c10::Device device);          // cpu, cuda:0
std::string device_type_name(c10::DeviceType type);
std::string_view layout_name(c10::Layout layout);  // strided
std::vector<std::string> key_names(c10::DispatchKeySet keys);
std::string_view creation_meta_name(uint8_t meta);  // DEFAULT, NO_GRAD_MODE, ...
std::string_view kind_name(Kind kind);
std::string_view memory_format_name(MemoryFormat format);
std::string_view origin_name(DataOrigin origin);
std::string_view absence_reason(Absence absence);

// The function's symbol, or "library+0xoffset" where it has none. Reads the loader's tables, no file.
std::string function_name(const void* function);

// Who made memory that a callable frees: numpy, frombuffer, dlpack, from_blob, or the callable's own type.
std::string maker_name(const std::type_info& callable);

// The device type this allocator is registered for, or absent for one that is not registered (pinned memory,
// pools).
std::optional<c10::DeviceType> allocator_device_type(const void* allocator);

}  // namespace tensorplay
