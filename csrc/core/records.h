// What one probe read of a tensor, layer by layer. Plain structs: no Python, no references to the tensor.
//
// Pointers in a record are addresses to compare and print, never to follow: the tensor may be gone by then.
// The exceptions are std::type_info pointers, which live as long as the library that defines the type.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Layout.h>
#include <c10/core/impl/SizesAndStrides.h>
#include <c10/util/typeid.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <vector>

#include "extent.h"

namespace tensorplay {

// What kind of tensor this is: by key set, device labels and pointer (docs/explanation/kinds.md).
enum class Kind : uint8_t {
  kUndefined,
  kStrided,
  kMeta,              // shape without memory, by design
  kZeroTensor,        // all zero without memory (forward AD)
  kFake,              // FakeTensor: all on meta, with the backend bits of the device it stands for
  kWrapperSubclass,   // Python key, no memory of its own
  kNestedJagged,      // the same, for torch.nested's jagged layout
  kFunctional,        // functionalization's C++ wrapper
  kBatched,           // inside vmap
  kFunctorchWrapper,  // inside torch.func.grad, vjp, jvp
  kSparseCoo,
  kSparseCompressed,  // CSR, CSC, BSR, BSC: the layout says which
  kMkldnn,
  kNested,  // strided nested tensor
  kQuantized,
};

// Why a record has no answer for a field.
enum class Absence : uint8_t {
  kNone,  // it has one
  kNoStorage,
  kUndefinedTensor,
  kNestedShape,
  kSparseStride,
  kOpaqueStride,
  kInferenceVersion,
  kSymbolic,
  kOverflow,
  kTooHard,
  kStaleGradFn,
  kNoDevice,
  kNoBackend,
  kUninitialized,
  kNoAllocator,
  kForgottenAllocator,
  kUnregisteredAllocator,
  kNestedOrder,
  kPacked,
};

// Sizes or strides; on the heap only past five of them, as in c10::impl::SizesAndStrides.
class Dims {
 public:
  static constexpr size_t kNear = C10_SIZES_AND_STRIDES_MAX_INLINE_SIZE;

  // `first` points at kNear values at least, of which `count` mean something: five words are copied faster
  // than counted.
  void assign(const int64_t* first, size_t count) {
    size_ = count;
    if (count > kNear) [[unlikely]] {
      far_.assign(first, first + count);
    } else {
      std::memcpy(near_.data(), first, sizeof(near_));
    }
  }

  const int64_t* data() const { return size_ > kNear ? far_.data() : near_.data(); }
  size_t size() const { return size_; }
  const int64_t* begin() const { return data(); }
  const int64_t* end() const { return data() + size_; }

 private:
  size_t size_ = 0;
  std::array<int64_t, kNear> near_{};
  std::vector<int64_t> far_;
};

// Expressions in place of numbers, where sizes are symbolic.
struct SymbolicFacts {
  std::vector<std::string> shape;
  std::vector<std::string> stride;
  std::string storage_offset;
  std::string numel;
  std::string storage_nbytes;
};

// c10::TensorImpl and the AutogradMeta it owns.
struct ImplFacts {
  const void* address = nullptr;
  const std::type_info* type = nullptr;
  uint32_t use_count = 0;
  uint32_t weak_count = 0;

  Dims shape;                  // invalid unless shape_absence == kNone
  Dims stride;                 // invalid unless stride_absence == kNone
  int64_t storage_offset = 0;  // elements; invalid where shape is
  int64_t numel = 0;           // invalid where shape is
  Absence shape_absence = Absence::kNone;
  Absence stride_absence = Absence::kNone;
  bool python_decides_shape = false;  // the Python subclass answers .shape itself and may say otherwise

  caffe2::TypeMeta dtype;
  uint32_t itemsize = 0;
  std::optional<c10::Device> device;       // device_opt_, the impl's own label
  std::optional<c10::DeviceType> backend;  // the device the key set's highest backend bit computes on
  c10::Layout layout = c10::kStrided;
  c10::DispatchKeySet keys;

  const void* version_counter =
      nullptr;           // equal for tensors that share a counter; null for inference tensors
  uint32_t version = 0;  // valid when version_counter is set

  const void* grad_fn = nullptr;
  const std::type_info* grad_fn_type = nullptr;
  std::string grad_fn_python_name;  // set for nodes of Python's autograd.Function
  bool grad_fn_stale = false;  // PyTorch rebuilds grad_fn on its next read: leaf-ness is not known until then
  uint32_t output_nr = 0;
  bool requires_grad = false;
  bool is_leaf = true;  // invalid when grad_fn_stale

  bool is_view = false;
  const void* base = nullptr;  // TensorImpl of the root base
  bool base_requires_grad = false;
  bool base_is_leaf = false;
  std::optional<uint8_t> creation_meta;  // torch::autograd::CreationMeta; views only

  bool is_conj = false;
  bool is_neg = false;
  bool is_inference = false;
  bool is_wrapped_number = false;
};

// How the storage reaches other processes, where it does.
struct SharedMemoryFacts {
  std::string handle;   // file name of the mapping
  std::string manager;  // torch_shm_manager's socket, file_system strategy only
  int fd = -1;          // file_descriptor strategy
  int64_t mapped_nbytes = 0;
  bool counted = false;  // the mapping carries its own reference count (RefcountedMapAllocator)
};

struct StorageFacts {
  const void* address = nullptr;
  const std::type_info* type = nullptr;
  int64_t nbytes = 0;  // invalid when symbolic
  bool symbolic = false;
  uint32_t use_count = 0;
  uint32_t weak_count = 0;
  const void* allocator = nullptr;
  const std::type_info* allocator_type = nullptr;
  bool resizable = false;
  bool copy_on_write = false;
  bool has_materializer = false;
  bool throws_on_read = false;
  bool throws_on_write = false;
  bool has_python_wrapper = false;  // a live torch.UntypedStorage object is one of the owners
};

// What the deleter says about who owns the memory.
enum class DataOrigin : uint8_t {
  kNone,          // null pointer
  kCpuAllocator,  // PyTorch's own CPU allocator
  kBorrowed,      // from_blob without a deleter: nobody here frees it
  kCallback,      // from_blob with a callable: `maker` names it
  kMapped,        // a mapped file or shared memory
  kStorageSlice,  // part of another storage, which the context keeps alive (checkpoints loaded with mmap)
  kCopyOnWrite,
  kOther,
};

struct DataFacts {
  const void* pointer = nullptr;
  const void* context = nullptr;
  const void* deleter = nullptr;
  c10::Device device{c10::DeviceType::CPU};
  DataOrigin origin = DataOrigin::kNone;
  const std::type_info* maker = nullptr;  // kCallback: type of the callable that frees the memory
  const void* producer = nullptr;         // kCallback: whose memory it is, kept alive by the callable
  bool producer_is_python = false;        // whether that is a PyObject for certain
  std::optional<bool> read_only;          // what a DLPack producer says of its memory
  std::unique_ptr<SharedMemoryFacts> shared_memory;
};

// A strided nested tensor's components together, for it has no geometry of its own.
struct NestedFacts {
  int64_t dim = 0;
  int64_t numel = 0;
  CellRange range;
};

struct TensorFacts {
  Kind kind = Kind::kUndefined;
  bool has_storage = false;
  ImplFacts impl;
  StorageFacts storage;  // invalid unless has_storage
  DataFacts data;        // invalid unless has_storage
  std::unique_ptr<SymbolicFacts> symbolic;
  std::optional<NestedFacts> nested;  // set by read_nested() alone

  bool has_shape() const { return impl.shape_absence == Absence::kNone; }
  bool is_meta() const { return impl.device && impl.device->is_meta(); }
  bool has_geometry() const { return has_shape() && impl.stride_absence == Absence::kNone; }
  DimSpan shape() const { return {impl.shape.data(), impl.shape.size()}; }
  DimSpan stride() const { return {impl.stride.data(), impl.stride.size()}; }

  std::optional<int64_t> nbytes() const;  // numel x itemsize, as Tensor.nbytes answers
  // Bytes from the storage's start to the end of the last element reached: what reading the tensor needs.
  std::optional<int64_t> needed_nbytes() const;
  std::optional<int64_t> first_byte() const;
  std::optional<int64_t> nbytes_of(std::optional<int64_t> cells) const;
  bool is_packed() const;  // several elements share a byte
  // storage pointer + offset x itemsize, what Tensor.data_ptr() answers (0 for a tensor without elements).
  std::optional<uint64_t> data_address() const;
};

}  // namespace tensorplay
