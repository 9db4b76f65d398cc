#include "read.h"

#include <ATen/MapAllocator.h>
#include <ATen/dlpack.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/SymInt.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/COWDeleter.h>
#include <libshm.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <sstream>

#include "../compat.h"
#include "liveness.h"

namespace tensorplay {
namespace {

using torch::autograd::AutogradMeta;
using torch::autograd::DifferentiableViewMeta;

constexpr auto kNoType = c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES;

// The device whose kernels a backend bit selects (c10/core/DispatchKey.h, BackendComponent).
c10::DeviceType backend_device_type(c10::BackendComponent component) {
  switch (component) {
#define TENSORPLAY_BACKEND(name)         \
  case c10::BackendComponent::name##Bit: \
    return c10::DeviceType::name;
    TENSORPLAY_BACKEND(CPU)
    TENSORPLAY_BACKEND(CUDA)
    TENSORPLAY_BACKEND(HIP)
    TENSORPLAY_BACKEND(XLA)
    TENSORPLAY_BACKEND(MPS)
    TENSORPLAY_BACKEND(IPU)
    TENSORPLAY_BACKEND(XPU)
    TENSORPLAY_BACKEND(HPU)
    TENSORPLAY_BACKEND(VE)
    TENSORPLAY_BACKEND(Lazy)
    TENSORPLAY_BACKEND(MTIA)
    TENSORPLAY_BACKEND(MAIA)
    TENSORPLAY_BACKEND(PrivateUse1)
    TENSORPLAY_BACKEND(Meta)
#undef TENSORPLAY_BACKEND
    default:
      return kNoType;
  }
}

// The deleter of InefficientStdFunctionContext is a function no header names: take it from a sample.
c10::DeleterFnPtr sample_callback_deleter() {
  int owned = 0;
  const auto sample =
      c10::InefficientStdFunctionContext::makeDataPtr(&owned, [](void*) {}, c10::Device(c10::kCPU));
  return sample.get_deleter();
}

// Throwing while the library is loaded would end the process.
const c10::Allocator* meta_allocator() {
  try {
    return c10::GetAllocator(c10::kMeta);
  } catch (const c10::Error&) {
    return nullptr;
  }
}

// Set when the library is loaded, after libtorch_cpu and libc10: a guarded local would be checked on every
// read.
const c10::DeleterFnPtr kCallbackDeleter = sample_callback_deleter();
const c10::Allocator* const kCpuAllocator = c10::GetDefaultCPUAllocator();
const c10::Allocator* const kMetaAllocator = meta_allocator();
const c10::DeleterFnPtr kMetaDeleter = kMetaAllocator == nullptr ? nullptr : kMetaAllocator->raw_deleter();
const c10::DeleterFnPtr kCpuDeleter = kCpuAllocator->raw_deleter();

std::atomic<c10::DeleterFnPtr> slice_deleter{nullptr};
std::atomic<const FrontAllocator*> known_front{nullptr};

std::string expression(const c10::SymInt& value) {
  std::ostringstream text;
  text << value;
  return std::move(text).str();
}

void read_symbolic(const c10::TensorImpl& impl, TensorFacts& facts) {
  auto symbolic = std::make_unique<SymbolicFacts>();
  for (const c10::SymInt& size : impl.sym_sizes_default()) symbolic->shape.push_back(expression(size));
  for (const c10::SymInt& step : impl.sym_strides_default()) symbolic->stride.push_back(expression(step));
  symbolic->storage_offset = expression(impl.sym_storage_offset_default());
  symbolic->numel = expression(impl.sym_numel_default());
  facts.symbolic = std::move(symbolic);
}

void read_sizes(const c10::TensorImpl& impl, ImplFacts& out) {
  const c10::IntArrayRef sizes = compat::own_geometry(impl).sizes_arrayref();
  out.shape.assign(sizes.data(), sizes.size());
  out.storage_offset = compat::own_storage_offset(impl);
  out.numel = compat::own_numel(impl);
}

void read_strides(const c10::TensorImpl& impl, ImplFacts& out) {
  const c10::IntArrayRef strides = compat::own_geometry(impl).strides_arrayref();
  out.stride.assign(strides.data(), strides.size());
}

void read_geometry(const c10::TensorImpl& impl, TensorFacts& facts) {
  ImplFacts& out = facts.impl;
  out.shape_absence = Absence::kNone;
  out.stride_absence = Absence::kNone;
  out.python_decides_shape = false;
  // Symbolic and custom sizes imply custom strides: without them the fields hold plain numbers.
  if (!compat::custom_strides(impl)) [[likely]] {
    read_sizes(impl, out);
    read_strides(impl, out);
    return;
  }
  const bool python = out.keys.has(c10::DispatchKey::Python);
  out.python_decides_shape = python && !impl.has_symbolic_sizes_strides();
  if (impl.has_symbolic_sizes_strides()) {
    read_symbolic(impl, facts);
    out.shape_absence = out.stride_absence = Absence::kSymbolic;
    return;
  }
  if (facts.kind == Kind::kUndefined) {
    out.shape_absence = out.stride_absence = Absence::kUndefinedTensor;
    return;
  }
  if (!python && (facts.kind == Kind::kNested || out.keys.has(c10::DispatchKey::BatchedNestedTensor))) {
    out.shape_absence = out.stride_absence = Absence::kNestedShape;
    return;
  }
  read_sizes(impl, out);
  if (!python) {
    if (facts.kind == Kind::kSparseCoo || facts.kind == Kind::kSparseCompressed) {
      out.stride_absence = Absence::kSparseStride;
      return;
    }
    if (facts.kind == Kind::kMkldnn) {
      out.stride_absence = Absence::kOpaqueStride;
      return;
    }
  }
  read_strides(impl, out);
}

Kind classify(const c10::TensorImpl& impl, const TensorFacts& facts) {
  using Key = c10::DispatchKey;
  const c10::DispatchKeySet keys = facts.impl.keys;
  constexpr c10::DispatchKeySet kUnusual({Key::FuncTorchBatched, Key::BatchedNestedTensor,
                                          Key::FuncTorchGradWrapper, Key::Functionalize, Key::Sparse,
                                          Key::SparseCsr, Key::MkldnnCPU, Key::NestedTensor, Key::Quantized,
                                          Key::Python, Key::ZeroTensor});
  if (!keys.has_any(kUnusual)) [[likely]] {
    if (&impl == c10::UndefinedTensorImpl::singleton()) return Kind::kUndefined;  // its keys are not empty
    return facts.is_meta() ? Kind::kMeta : Kind::kStrided;
  }
  if (keys.has(Key::FuncTorchBatched) || keys.has(Key::BatchedNestedTensor)) return Kind::kBatched;
  if (keys.has(Key::FuncTorchGradWrapper)) return Kind::kFunctorchWrapper;
  const bool python = keys.has(Key::Python);
  if (keys.has(Key::Functionalize) && !python) return Kind::kFunctional;
  if (!python) {
    if (impl.is_sparse()) return Kind::kSparseCoo;
    if (impl.is_sparse_compressed()) return Kind::kSparseCompressed;
    if (impl.is_mkldnn()) return Kind::kMkldnn;
    if (impl.is_nested()) return Kind::kNested;
    if (impl.is_quantized()) return Kind::kQuantized;
  } else if (facts.has_storage && facts.data.pointer == nullptr) {
    if (impl.is_nested()) return Kind::kNestedJagged;
    // A FakeTensor is meta all through, but for the backend bits of the device it stands for. Over a meta
    // device it looks like any other wrapper: python/ asks its class.
    const bool meta_backend = facts.impl.backend == c10::DeviceType::Meta;
    if (facts.data.device.is_meta() && !meta_backend) return Kind::kFake;
    // A wrapper's storage has the meta allocator's name and none of its memory, whatever its label and
    // however few bytes; an ordinary tensor that lost its memory, or has no elements, has its own device's.
    const bool wrapper = facts.storage.allocator == kMetaAllocator &&
                         facts.data.deleter != reinterpret_cast<const void*>(kMetaDeleter);
    return wrapper ? Kind::kWrapperSubclass : meta_backend ? Kind::kMeta : Kind::kStrided;
  } else if (!facts.has_storage) {
    return Kind::kWrapperSubclass;
  }
  if (keys.has(Key::ZeroTensor)) return Kind::kZeroTensor;
  return facts.is_meta() ? Kind::kMeta : Kind::kStrided;
}

void read_shared_memory(const at::DataPtr& data, DataFacts& out) {
  auto shared = std::make_unique<SharedMemoryFacts>();
  // The manager's socket is a member of THManagedMapAllocator's private base; only its handle is public
  // there.
  if (const auto* managed = THManagedMapAllocator::fromDataPtr(data)) {
    shared->handle = managed->filename();
    shared->manager = managed->manager_handle();
    shared->mapped_nbytes = managed->size();
    shared->counted = true;
  } else if (const auto* counted = at::RefcountedMapAllocator::fromDataPtr(data)) {
    shared->handle = counted->filename();
    shared->mapped_nbytes = counted->size();
    shared->fd = counted->fd();
    shared->counted = true;
  } else if (const auto* mapped = at::MapAllocator::fromDataPtr(data)) {
    shared->handle = mapped->filename();
    shared->mapped_nbytes = mapped->size();
    shared->fd = mapped->fd();
  } else {
    return;
  }
  out.origin = DataOrigin::kMapped;
  out.shared_memory = std::move(shared);
}

void read_producer(const c10::InefficientStdFunctionContext& context, DataFacts& out) {
  out.maker = &context.deleter_.target_type();
  const void* const captured = compat::captured_pointer(context.deleter_);
  switch (compat::captured_by(*out.maker)) {
    case compat::Captured::kPythonObject:
      out.producer = captured;
      out.producer_is_python = true;
      break;
    case compat::Captured::kDlpack:
      if (captured != nullptr) out.producer = static_cast<const DLManagedTensor*>(captured)->manager_ctx;
      break;
    case compat::Captured::kDlpackVersioned:
      if (captured != nullptr) {
        const auto* managed = static_cast<const DLManagedTensorVersioned*>(captured);
        out.producer = managed->manager_ctx;
        out.read_only = (managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0;
      }
      break;
    case compat::Captured::kUnknown:
      break;
  }
}

}  // namespace

void learn_front_allocator(const FrontAllocator& front) {
  known_front.store(new FrontAllocator(front), std::memory_order_release);
}

const c10::Allocator* real_allocator(const c10::Allocator* allocator) {
  const FrontAllocator* front = known_front.load(std::memory_order_acquire);
  return front != nullptr && allocator == front->front ? front->behind : allocator;
}

void read_data(const at::DataPtr& data, DataFacts& out) {
  out.pointer = data.get();
  out.context = data.get_context();
  c10::DeleterFnPtr deleter = data.get_deleter();
  if (deleter != kCpuDeleter) [[unlikely]] {
    const FrontAllocator* front = known_front.load(std::memory_order_acquire);
    if (front != nullptr && deleter == front->front_deleter) deleter = front->behind_deleter;
  }
  std::memcpy(&out.deleter, &deleter, sizeof(out.deleter));
  out.device = data.device();
  out.maker = nullptr;
  out.producer = nullptr;
  out.producer_is_python = false;
  out.read_only.reset();
  out.shared_memory.reset();
  if (deleter == kCpuDeleter) [[likely]] {
    out.origin = out.pointer == nullptr ? DataOrigin::kNone : DataOrigin::kCpuAllocator;
    return;
  }
  if (out.pointer == nullptr) {
    out.origin = DataOrigin::kNone;
    return;
  }
  if (deleter == kCallbackDeleter) {
    const auto* context = static_cast<const c10::InefficientStdFunctionContext*>(out.context);
    out.origin = DataOrigin::kCallback;
    if (context != nullptr && context->deleter_) read_producer(*context, out);
  } else if (deleter == &c10::impl::cow::cow_deleter) {
    out.origin = DataOrigin::kCopyOnWrite;
  } else if (out.context == nullptr || deleter == nullptr || deleter == &c10::detail::deleteNothing) {
    // DataPtr calls no deleter on a null context; from_blob's own one is inline, another function in each
    // library.
    out.origin = DataOrigin::kBorrowed;
  } else {
    out.origin = DataOrigin::kOther;
    read_shared_memory(data, out);
    if (out.origin == DataOrigin::kOther && deleter == slice_deleter.load(std::memory_order_relaxed)) {
      // The context is the sliced storage, and this DataPtr is one of its owners; that may be a slice too.
      const at::DataPtr* whole = &data;
      while (whole->get_deleter() == deleter && whole->get_context() != nullptr) {
        whole = &compat::own_data_ptr(*static_cast<const c10::StorageImpl*>(whole->get_context()));
      }
      read_shared_memory(*whole, out);
      out.origin = DataOrigin::kStorageSlice;
    }
  }
}

namespace {

// A ZeroTensor's storage names an allocator that lived on the stack of the function that made it
// (_efficientzerotensor, ATen/native/TensorFactories.cpp): without memory only the lasting ones are looked
// at.
bool is_alive(const at::Allocator* allocator, const DataFacts& data) {
  if (allocator == nullptr) return false;
  return data.pointer != nullptr || allocator == kCpuAllocator || allocator == kMetaAllocator;
}

void read_storage(const c10::StorageImpl& storage, TensorFacts& facts) {
  StorageFacts& out = facts.storage;
  out.address = &storage;
  out.type = &typeid(storage);
  const compat::RefCounts counts = compat::ref_counts(storage);
  out.use_count = counts.strong;
  out.weak_count = counts.weak;
  const c10::SymInt& nbytes = compat::own_nbytes(storage);
  out.symbolic = nbytes.is_heap_allocated();
  out.nbytes = out.symbolic ? 0 : nbytes.as_int_unchecked();
  const at::Allocator* allocator = real_allocator(storage.allocator());
  out.allocator = allocator;
  out.resizable = storage.resizable();
  out.has_materializer = storage.has_materializer();
  out.throws_on_read = compat::throws_on_read(storage);
  out.throws_on_write = compat::throws_on_write(storage);
  out.has_python_wrapper = storage.pyobj_slot()->load_pyobj() != nullptr;
  read_data(compat::own_data_ptr(storage), facts.data);
  out.allocator_type = is_alive(allocator, facts.data) ? &typeid(*allocator) : nullptr;
  out.copy_on_write = facts.data.origin == DataOrigin::kCopyOnWrite;
}

void read_grad_fn(const AutogradMeta& meta, ImplFacts& out) {
  const torch::autograd::Node* node = meta.grad_fn_.get();
  if (node == nullptr) return;
  out.grad_fn = node;
  out.grad_fn_type = &typeid(*node);
  if (is_python_node(*out.grad_fn_type)) out.grad_fn_python_name = node->name();
}

void read_view(const DifferentiableViewMeta& view, ImplFacts& out) {
  // A view of forward-mode AD alone is none to backward, to Tensor._is_view() and to Tensor._base.
  out.is_view = view.has_bw_view();
  if (!out.is_view) {
    read_grad_fn(view, out);
    return;
  }
  const at::Tensor& base = view.get_backward_view().base_;
  out.base = base.unsafeGetTensorImpl();
  out.creation_meta = static_cast<uint8_t>(view.get_creation_meta());
  // The same condition under which Variable::grad_fn() rebuilds the node (torch/csrc/autograd/variable.cpp).
  out.base_requires_grad = base.requires_grad();
  const auto* base_meta = static_cast<const AutogradMeta*>(base.unsafeGetTensorImpl()->autograd_meta());
  out.base_is_leaf = base_meta == nullptr || base_meta->grad_fn_.get() == nullptr;
  out.requires_grad = out.requires_grad || out.base_requires_grad;
  const bool has_history = view.grad_fn_.get() != nullptr || out.base_requires_grad;
  out.grad_fn_stale = has_history && out.version_counter != nullptr && view.get_attr_version() != out.version;
  if (!out.grad_fn_stale) {
    read_grad_fn(view, out);
    return;
  }
  // Another thread may be rebuilding it now. Waiting could deadlock: that thread may want the GIL we hold.
  const std::unique_lock<std::mutex> lock(view.mutex_, std::try_to_lock);
  if (lock.owns_lock()) read_grad_fn(view, out);
}

void read_autograd(const c10::TensorImpl& impl, ImplFacts& out) {
  out.grad_fn = nullptr;
  out.grad_fn_type = nullptr;
  if (!out.grad_fn_python_name.empty()) [[unlikely]]
    out.grad_fn_python_name.clear();
  out.grad_fn_stale = false;
  out.output_nr = 0;
  out.requires_grad = false;
  out.is_leaf = true;
  out.is_view = false;
  out.base = nullptr;
  out.creation_meta.reset();
  const auto* meta = static_cast<const AutogradMeta*>(impl.autograd_meta());
  if (meta == nullptr) return;
  // What the virtual requires_grad() answers; read_view() adds the base's.
  out.requires_grad = meta->requires_grad_ || meta->grad_fn_.get() != nullptr;
  out.output_nr = meta->output_nr_;
  if (meta->is_view_) {
    read_view(static_cast<const DifferentiableViewMeta&>(*meta), out);
  } else {
    read_grad_fn(*meta, out);
  }
  out.is_leaf = out.grad_fn == nullptr;
}

void read_impl(const c10::TensorImpl& impl, ImplFacts& out) {
  out.address = &impl;
  out.type = &typeid(impl);
  const compat::RefCounts counts = compat::ref_counts(impl);
  out.use_count = counts.strong;
  out.weak_count = counts.weak;
  out.dtype = compat::own_dtype(impl);
  out.itemsize = static_cast<uint32_t>(out.dtype.itemsize());
  out.device = compat::own_device(impl);
  out.keys = impl.key_set();
  const c10::DeviceType backend = backend_device_type(out.keys.highestBackendKey());
  out.backend = backend == kNoType ? std::nullopt : std::optional(backend);
  out.is_conj = out.keys.has(c10::DispatchKey::Conjugate);
  out.is_neg = out.keys.has(c10::DispatchKey::Negative);
  out.is_wrapped_number = impl.is_wrapped_number();
  const c10::VariableVersion& version = impl.version_counter();
  out.version_counter = compat::version_counter_address(version);
  out.version = out.version_counter == nullptr ? 0 : version.current_version();
  // TensorImpl::is_inference() is not const.
  out.is_inference = !out.keys.has_any(c10::inplace_or_view_ks) &&
                     !out.keys.has_any(c10::autograd_dispatch_keyset) && !out.keys.empty();
  read_autograd(impl, out);
}

// TensorImpl::layout() would ask Python where a subclass answers; the keys decide as they do there.
c10::Layout layout_of(const c10::TensorImpl& impl, Kind kind) {
  constexpr c10::DispatchKeySet kOther = c10::sparse_ks | c10::sparse_csr_ks | c10::mkldnn_ks;
  const c10::DispatchKeySet keys = impl.key_set();
  if (!keys.has_any(kOther)) [[likely]]
    return kind == Kind::kNestedJagged ? c10::kJagged : c10::kStrided;
  if (impl.is_sparse()) return c10::kSparse;
  if (impl.is_mkldnn()) return c10::kMkldnn;
  try {
    return compat::compressed_layout(impl);
  } catch (const c10::Error&) {  // a wrapper with the keys alone: which of the four only Python knows
    return c10::Layout::NumOptions;
  }
}

std::optional<int64_t> times(std::optional<int64_t> cells, uint32_t itemsize) {
  int64_t bytes = 0;
  if (!cells || __builtin_mul_overflow(*cells, static_cast<int64_t>(itemsize), &bytes)) return std::nullopt;
  return bytes;
}

// Elements a byte: the packed quantized types say that an element has one byte and put several into it.
int64_t elements_a_byte(caffe2::TypeMeta dtype) {
  if (dtype == c10::ScalarType::QUInt4x2) return 2;
  if (dtype == c10::ScalarType::QUInt2x4) return 4;
  return 1;
}

// The bytes of a whole packed tensor: each row of the last dimension begins a new byte
// (get_sub_byte_tensor_size, ATen/quantized/QTensorImpl). Absent for a view of one.
std::optional<int64_t> packed_nbytes(const TensorFacts& facts) {
  const DimSpan shape = facts.shape();
  if (facts.impl.storage_offset != 0 || !is_contiguous(shape, facts.stride())) return std::nullopt;
  if (shape.empty()) return 1;
  const int64_t a_byte = elements_a_byte(facts.impl.dtype);
  const std::optional<int64_t> rows = count_elements(shape.first(shape.size() - 1));
  int64_t bytes = 0;
  if (!rows || __builtin_mul_overflow(*rows, (shape.back() + a_byte - 1) / a_byte, &bytes))
    return std::nullopt;
  return bytes;
}

}  // namespace

void read_tensor(const c10::TensorImpl& impl, TensorFacts& facts) {
  facts.symbolic.reset();
  facts.nested.reset();
  read_impl(impl, facts.impl);
  const c10::StorageImpl* storage = impl.unsafe_storage().unsafeGetStorageImpl();
  facts.has_storage = storage != nullptr;
  if (storage != nullptr) read_storage(*storage, facts);
  facts.kind = classify(impl, facts);
  facts.impl.layout = layout_of(impl, facts.kind);
  read_geometry(impl, facts);
  if (facts.has_storage && facts.storage.symbolic) {
    if (!facts.symbolic) facts.symbolic = std::make_unique<SymbolicFacts>();
    facts.symbolic->storage_nbytes = expression(compat::own_nbytes(*storage));
  }
}

void learn_storage_slice(const c10::StorageImpl& slice) {
  slice_deleter.store(compat::own_data_ptr(slice).get_deleter(), std::memory_order_relaxed);
}

bool is_python_node(const std::type_info& type) {
  // PyNode's type_info is hidden in libtorch_python, so that every library has its own: names are compared.
  return std::strcmp(type.name(), "N5torch8autograd6PyNodeE") == 0;
}

const void* version_counter_of(const c10::TensorImpl& impl) {
  return compat::version_counter_address(impl.version_counter());
}

const at::TensorBase* grad_of(const c10::TensorImpl& impl) {
  const auto* meta = static_cast<const AutogradMeta*>(impl.autograd_meta());
  if (meta == nullptr || !meta->grad_.defined()) return nullptr;
  return is_still_tensor(meta->grad_.unsafeGetTensorImpl()) ? &meta->grad_ : nullptr;
}

std::optional<const void*> impl_data(const c10::TensorImpl& impl, const TensorFacts& facts) {
  const bool answers = facts.has_storage && facts.has_geometry() && !facts.storage.symbolic &&
                       !facts.storage.throws_on_read && impl.has_storage() && !compat::custom_sizes(impl);
  if (!answers || (facts.data.pointer == nullptr && facts.kind != Kind::kStrided)) return std::nullopt;
  return impl.data();
}

std::optional<int64_t> TensorFacts::nbytes() const {
  if (nested) return times(nested->numel, impl.itemsize);
  return has_shape() ? times(impl.numel, impl.itemsize) : std::nullopt;
}

std::optional<int64_t> TensorFacts::needed_nbytes() const {
  if (nested) return times(nested->range.end, impl.itemsize);
  if (!has_geometry()) return std::nullopt;
  if (impl.numel == 0) return 0;
  if (is_packed()) return packed_nbytes(*this);
  const std::optional<CellRange> range = cell_range(shape(), stride(), impl.storage_offset);
  return times(range ? std::optional(range->end) : std::nullopt, impl.itemsize);
}

std::optional<int64_t> TensorFacts::first_byte() const {
  if (nested) return times(nested->range.begin, impl.itemsize);
  if (!has_geometry()) return std::nullopt;
  if (is_packed()) return packed_nbytes(*this) ? std::optional<int64_t>(0) : std::nullopt;
  const std::optional<CellRange> range = cell_range(shape(), stride(), impl.storage_offset);
  return times(range ? std::optional(range->begin) : std::nullopt, impl.itemsize);
}

std::optional<int64_t> TensorFacts::nbytes_of(std::optional<int64_t> cells) const {
  return is_packed() ? packed_nbytes(*this) : times(cells, impl.itemsize);
}

bool TensorFacts::is_packed() const {
  return elements_a_byte(impl.dtype) > 1;
}

std::optional<uint64_t> TensorFacts::data_address() const {
  if (!has_storage || !has_geometry()) return std::nullopt;
  if (impl.numel == 0) return 0;
  return reinterpret_cast<uint64_t>(data.pointer) +
         static_cast<uint64_t>(impl.storage_offset) * static_cast<uint64_t>(impl.itemsize);
}

}  // namespace tensorplay
