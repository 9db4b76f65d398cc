#include "names.h"

#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Type.h>
#include <dlfcn.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <sstream>

#include "read.h"

namespace tensorplay {
namespace {

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

}  // namespace

std::string type_name(const std::type_info& type) {
  return c10::demangle(type.name());
}

std::string node_name(const ImplFacts& impl) {
  if (!impl.grad_fn_python_name.empty()) return impl.grad_fn_python_name;
  if (impl.grad_fn_type == nullptr) return {};
  // torch::autograd::generated::AddBackward0 -> AddBackward0, as Python names its type.
  std::string name = type_name(*impl.grad_fn_type);
  const size_t scope = name.rfind("::", name.find('<'));  // CppNode<library::Function> keeps its argument
  return scope == std::string::npos ? name : name.substr(scope + 2);
}

std::string_view dtype_name(caffe2::TypeMeta dtype) {
  if (!dtype.isScalarType() || dtype.isScalarType(c10::ScalarType::Undefined)) return dtype.name();
  return c10::getDtypeNames(dtype.toScalarType()).first;
}

std::string device_type_name(c10::DeviceType type) {
  return c10::DeviceTypeName(type, /*lower_case=*/true);
}

std::string device_name(c10::Device device) {
  std::string name = device_type_name(device.type());
  if (device.has_index()) name += ":" + std::to_string(static_cast<int>(device.index()));
  return name;
}

std::string_view layout_name(c10::Layout layout) {
  switch (layout) {
    case c10::kStrided:
      return "strided";
    case c10::kSparse:
      return "sparse_coo";
    case c10::kSparseCsr:
      return "sparse_csr";
    case c10::kSparseCsc:
      return "sparse_csc";
    case c10::kSparseBsr:
      return "sparse_bsr";
    case c10::kSparseBsc:
      return "sparse_bsc";
    case c10::kMkldnn:
      return "_mkldnn";
    case c10::kJagged:
      return "jagged";
    default:
      return "unknown";
  }
}

std::vector<std::string> key_names(c10::DispatchKeySet keys) {
  std::vector<std::string> names;
  for (const c10::DispatchKey key : keys) names.emplace_back(c10::toString(key));
  return names;
}

std::string_view creation_meta_name(uint8_t meta) {
  using torch::autograd::CreationMeta;
  switch (static_cast<CreationMeta>(meta)) {
    case CreationMeta::DEFAULT:
      return "DEFAULT";
    case CreationMeta::IN_CUSTOM_FUNCTION:
      return "IN_CUSTOM_FUNCTION";
    case CreationMeta::MULTI_OUTPUT_NODE:
      return "MULTI_OUTPUT_NODE";
    case CreationMeta::NO_GRAD_MODE:
      return "NO_GRAD_MODE";
    case CreationMeta::INFERENCE_MODE:
      return "INFERENCE_MODE";
  }
  return "unknown";
}

std::string_view kind_name(Kind kind) {
  switch (kind) {
    case Kind::kUndefined:
      return "undefined";
    case Kind::kStrided:
      return "strided";
    case Kind::kMeta:
      return "meta";
    case Kind::kZeroTensor:
      return "zerotensor";
    case Kind::kFake:
      return "fake";
    case Kind::kWrapperSubclass:
      return "wrapper_subclass";
    case Kind::kNestedJagged:
      return "nested_jagged";
    case Kind::kFunctional:
      return "functional";
    case Kind::kBatched:
      return "batched";
    case Kind::kFunctorchWrapper:
      return "functorch_wrapper";
    case Kind::kSparseCoo:
      return "sparse_coo";
    case Kind::kSparseCompressed:
      return "sparse_compressed";
    case Kind::kMkldnn:
      return "mkldnn";
    case Kind::kNested:
      return "nested";
    case Kind::kQuantized:
      return "quantized";
  }
  return "unknown";
}

std::string_view memory_format_name(MemoryFormat format) {
  switch (format) {
    case MemoryFormat::kContiguous:
      return "contiguous";
    case MemoryFormat::kChannelsLast:
      return "channels_last";
    case MemoryFormat::kChannelsLast3d:
      return "channels_last_3d";
    case MemoryFormat::kPermuted:
      return "permuted";
    case MemoryFormat::kStrided:
      return "strided";
  }
  return "unknown";
}

std::string_view origin_name(DataOrigin origin) {
  switch (origin) {
    case DataOrigin::kNone:
      return "none";
    case DataOrigin::kCpuAllocator:
      return "cpu_allocator";
    case DataOrigin::kBorrowed:
      return "borrowed";
    case DataOrigin::kCallback:
      return "callback";
    case DataOrigin::kMapped:
      return "mapped";
    case DataOrigin::kStorageSlice:
      return "storage_slice";
    case DataOrigin::kCopyOnWrite:
      return "copy_on_write";
    case DataOrigin::kOther:
      return "other";
  }
  return "unknown";
}

std::string_view absence_reason(Absence absence) {
  switch (absence) {
    case Absence::kNone:
      return {};
    case Absence::kNoStorage:
      return "this kind has no storage of its own";
    case Absence::kUndefinedTensor:
      return "the tensor is undefined";
    case Absence::kNestedShape:
      return "a nested tensor has a shape for each component, see inner: sizes";
    case Absence::kSparseStride:
      return "a sparse tensor has no strides, see inner: values";
    case Absence::kOpaqueStride:
      return "the layout is opaque: oneDNN orders the elements itself";
    case Absence::kInferenceVersion:
      return "inference tensors keep no version counter";
    case Absence::kSymbolic:
      return "symbolic: known only as an expression";
    case Absence::kOverflow:
      return "does not fit 64 bits";
    case Absence::kTooHard:
      return "too hard: these strides would need the enumeration of more than 2^24 cells";
    case Absence::kStaleGradFn:
      return "stale: the version moved since grad_fn was made, PyTorch rebuilds it on its next read";
    case Absence::kNoDevice:
      return "the impl has no device";
    case Absence::kNoBackend:
      return "the key set names no backend";
    case Absence::kUninitialized:
      return "uninitialized: the shape is not known before the first forward()";
    case Absence::kNoAllocator:
      return "the storage was made without an allocator: it cannot grow";
    case Absence::kForgottenAllocator:
      return "not looked at: without memory nothing says that the allocator is alive";
    case Absence::kUnregisteredAllocator:
      return "the allocator is registered for no device";
    case Absence::kNestedOrder:
      return "a nested tensor has an order for each component";
    case Absence::kPacked:
      return "several elements share a byte: which bytes a view reaches is not worked out";
  }
  return "unknown";
}

std::string function_name(const void* function) {
  if (function == nullptr) return {};
  Dl_info info{};
  std::ostringstream text;
  if (dladdr(function, &info) == 0) {
    text << function;
  } else if (info.dli_sname != nullptr && info.dli_saddr == function) {
    text << c10::demangle(info.dli_sname);
  } else {
    const std::string_view path = info.dli_fname == nullptr ? "?" : info.dli_fname;
    const auto offset = static_cast<const char*>(function) - static_cast<const char*>(info.dli_fbase);
    text << path.substr(path.rfind('/') + 1) << "+0x" << std::hex << offset;
  }
  return std::move(text).str();
}

std::string maker_name(const std::type_info& callable) {
  const std::string name = type_name(callable);
  // Where PyTorch wraps foreign memory: torch/csrc/utils/tensor_numpy.cpp and tensor_new.cpp,
  // ATen/DLConvertor.cpp.
  if (contains(name, "tensor_from_numpy") || contains(name, "tensor_from_cuda_array_interface"))
    return "numpy";
  if (contains(name, "frombuffer")) return "frombuffer";
  if (contains(name, "fromDLPack") || contains(name, "DLPack")) return "dlpack";
  return name;
}

std::optional<c10::DeviceType> allocator_device_type(const void* allocator) {
  if (allocator == nullptr) return std::nullopt;
  constexpr std::array kTypes{c10::DeviceType::CPU, c10::DeviceType::CUDA,        c10::DeviceType::Meta,
                              c10::DeviceType::XPU, c10::DeviceType::PrivateUse1, c10::DeviceType::MPS,
                              c10::DeviceType::HIP, c10::DeviceType::MTIA,        c10::DeviceType::HPU,
                              c10::DeviceType::XLA};
  // Asking for a type without an allocator throws: remember the last pointer that belongs to none.
  thread_local const void* unregistered = nullptr;
  if (allocator == unregistered) return std::nullopt;
  for (const c10::DeviceType type : kTypes) {
    try {
      if (real_allocator(c10::GetAllocator(type)) == allocator) return type;
    } catch (const c10::Error&) {
      continue;
    }
  }
  unregistered = allocator;
  return std::nullopt;
}

}  // namespace tensorplay
