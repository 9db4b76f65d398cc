#include "host_call.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "guard.h"
#include "hooks.h"
#include "tensor_impl.h"

namespace npu {

namespace {

bool same_geometry(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.storage_offset() == b.storage_offset();
}

// Unlike the other two bits, that of a zero tensor is settled when it is made.
c10::DispatchKeySet with_zero_bit(c10::DispatchKeySet keys, const at::Tensor& of) {
  return of._is_zerotensor() ? keys.add(c10::DispatchKey::ZeroTensor)
                             : keys.remove(c10::DispatchKey::ZeroTensor);
}

void copy_flags(const at::Tensor& from, const at::Tensor& to) {
  if (from.is_conj() != to.is_conj()) to.unsafeGetTensorImpl()->_set_conj(from.is_conj());
  if (from.is_neg() != to.is_neg()) to.unsafeGetTensorImpl()->_set_neg(from.is_neg());
}

}  // namespace

const c10::Storage& HostCall::lend_storage(const at::Tensor& x) {
  const c10::Storage& on_npu = x.storage();
  for (const Storages& known : storages_) {
    if (known.on_npu.unsafeGetStorageImpl() == on_npu.unsafeGetStorageImpl()) return known.on_host;
  }
  const size_t nbytes = on_npu.nbytes();
  void* const memory = on_npu.unsafeGetStorageImpl()->mutable_data();
  // Resizable, for out= tensors: a kernel that needs more takes CPU memory, which settle() brings over.
  auto on_host = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<int64_t>(nbytes),
      c10::DataPtr(memory, c10::Device(c10::DeviceType::CPU)), c10::GetCPUAllocator(), /*resizable=*/true);
  storages_.push_back({on_npu, std::move(on_host), memory, nbytes, x.key_set(), true});
  return storages_.back().on_host;
}

at::Tensor HostCall::lend(const at::Tensor& x) {
  if (!x.defined() || !x.is_privateuseone()) return x;
  TORCH_CHECK_NOT_IMPLEMENTED(x.layout() == at::kStrided && x.has_storage(), "the npu knows no ", x.layout(),
                              " tensors");
  for (const Tensors& known : tensors_) {
    if (known.on_npu.is_same(x)) return known.on_host;
  }
  auto lent = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(lend_storage(x)), with_zero_bit(c10::DispatchKeySet(c10::DispatchKey::CPU), x), x.dtype());
  c10::TensorImpl* const impl = lent.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  copy_flags(x, lent);
  tensors_.push_back({x, lent});
  return lent;
}

const HostCall::Storages& HostCall::take_storage(const c10::Storage& on_host) {
  for (const Storages& known : storages_) {
    if (known.on_host.unsafeGetStorageImpl() == on_host.unsafeGetStorageImpl()) return known;
  }
  const size_t nbytes = on_host.nbytes();
  c10::Storage on_npu;
  if (on_host.data() == nullptr && nbytes > 0) {  // of a zero tensor, which has no memory whatever its size
    on_npu = make_empty_storage(device_, nbytes);
  } else {
    on_npu = make_storage(device_, nbytes);
    if (nbytes > 0) std::memcpy(on_npu.mutable_data(), on_host.data(), nbytes);
  }
  storages_.push_back({std::move(on_npu), on_host, nullptr, nbytes,
                       c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), false});
  return storages_.back();
}

void HostCall::settle() {
  for (const Storages& lent : storages_) {
    c10::StorageImpl* const on_host = lent.on_host.unsafeGetStorageImpl();
    if (on_host->data() == lent.memory && on_host->nbytes() == lent.nbytes) continue;
    c10::StorageImpl* const on_npu = lent.on_npu.unsafeGetStorageImpl();
    resize_storage(on_npu, on_host->nbytes());
    if (on_host->nbytes() > 0) std::memcpy(on_npu->mutable_data(), on_host->data(), on_host->nbytes());
  }
  for (const Tensors& lent : tensors_) {
    const c10::Storage& on_npu = take_storage(lent.on_host.storage()).on_npu;
    c10::TensorImpl* const impl = lent.on_npu.unsafeGetTensorImpl();
    if (impl->storage().unsafeGetStorageImpl() != on_npu.unsafeGetStorageImpl()) {
      impl->set_storage_keep_dtype(on_npu);
    }
    if (!same_geometry(lent.on_npu, lent.on_host)) {
      impl->set_sizes_and_strides(lent.on_host.sizes(), lent.on_host.strides(),
                                  lent.on_host.storage_offset());
    }
  }
}

at::Tensor HostCall::take(const at::Tensor& answer) {
  if (!answer.defined()) return answer;
  TORCH_CHECK_NOT_IMPLEMENTED(answer.layout() == at::kStrided && answer.has_storage(), "the npu knows no ",
                              answer.layout(), " tensors");
  for (const Tensors& known : tensors_) {
    if (known.on_host.is_same(answer)) return known.on_npu;
  }
  const Storages& storages = take_storage(answer.storage());
  const auto keys = with_zero_bit(
      storages.keys.remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative), answer);
  auto x = storages.lent
               ? at::detail::make_tensor<NpuTensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storages.on_npu),
                                                        keys, answer.dtype())
               : at::detail::make_tensor<NpuTensorImpl>(c10::Storage(storages.on_npu), keys, answer.dtype());
  x.unsafeGetTensorImpl()->set_sizes_and_strides(answer.sizes(), answer.strides(), answer.storage_offset());
  copy_flags(answer, x);
  return x;
}

void SameDevice::refuse(const std::string& argument, c10::Device device, c10::Device others) const {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but got ", argument, " is on ", device,
              ", different from other tensors on ", others,
              " (when checking argument in method npu::", operator_name_, ")");
}

void SameDevice::add(const at::Tensor& x, const std::string& argument, bool written) {
  if (!x.defined()) return;
  const c10::Device device = x.device();
  if (device.is_privateuseone()) {
    if (!device_) {
      device_ = device;
      if (!strangers_.empty()) refuse(strangers_.front().first, strangers_.front().second, device);
    } else if (device != *device_) {
      refuse(argument, device, *device_);
    }
    return;
  }
  if (device.is_cpu() && x.dim() == 0 && !written) return;
  if (device_) refuse(argument, device, *device_);
  strangers_.emplace_back(argument, device);
}

namespace {

// Where PyTorch itself lets CPU index tensors stand beside a tensor of a device, and moves them.
bool takes_host_indices(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
         name == "aten::_index_put_impl_" || name == "aten::_unsafe_index" ||
         name == "aten::_unsafe_index_put";
}

bool is_generator(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  const auto& type = optional ? optional->getElementType() : argument.type();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// The CPU kernel draws from a CPU generator that goes on where the device's is, and the device's goes on from
// there.
class LentGenerator {
 public:
  explicit LentGenerator(at::Generator of) : of_(std::move(of)), lent_(at::detail::createCPUGenerator()) {
    std::lock_guard<std::mutex> lock(of_.mutex());
    copy_state(*of_.get<at::CPUGeneratorImpl>(), *lent_.get<at::CPUGeneratorImpl>());
  }
  void settle() {
    std::lock_guard<std::mutex> lock(of_.mutex());
    copy_state(*lent_.get<at::CPUGeneratorImpl>(), *of_.get<at::CPUGeneratorImpl>());
  }
  const at::Generator& generator() const { return lent_; }

 private:
  at::Generator of_;
  at::Generator lent_;
};

// For operators that draw without taking a generator, as native_dropout: the CPU's default one stands in
// meanwhile.
class DefaultGeneratorStandsIn {
 public:
  explicit DefaultGeneratorStandsIn(at::Generator of) : of_(std::move(of)) {
    at::Generator host = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(host.mutex());
    copy_state(*host.get<at::CPUGeneratorImpl>(), *kept_.get<at::CPUGeneratorImpl>());
    copy_state(*of_.get<at::CPUGeneratorImpl>(), *host.get<at::CPUGeneratorImpl>());
  }
  ~DefaultGeneratorStandsIn() {
    at::Generator host = at::detail::getDefaultCPUGenerator();
    std::lock_guard<std::mutex> lock(host.mutex());
    copy_state(*host.get<at::CPUGeneratorImpl>(), *of_.get<at::CPUGeneratorImpl>());
    copy_state(*kept_.get<at::CPUGeneratorImpl>(), *host.get<at::CPUGeneratorImpl>());
  }
  DefaultGeneratorStandsIn(const DefaultGeneratorStandsIn&) = delete;
  DefaultGeneratorStandsIn& operator=(const DefaultGeneratorStandsIn&) = delete;

 private:
  at::Generator of_;
  at::Generator kept_ = at::detail::createCPUGenerator();
};

// The device of the npu tensors among the arguments, or the one asked for.
c10::Device device_of_call(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const auto& declared = op.schema().arguments();
  SameDevice same(op.schema().name());
  std::optional<c10::Device> asked;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = arguments[i];
    const std::string& name = declared[i].name();
    const bool written = declared[i].alias_info() != nullptr && declared[i].alias_info()->isWrite();
    if (value.isTensor()) {
      same.add(value.toTensor(), name, written);
    } else if (value.isTensorList()) {
      for (const at::Tensor& x : value.toTensorVector()) same.add(x, name, written);
    } else if (value.isOptionalTensorList()) {
      if (name == "indices" && takes_host_indices(op.schema().name())) continue;
      for (const auto& x : value.toOptionalTensorVector()) same.add(x.value_or(at::Tensor()), name, written);
    } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
      asked = value.toDevice();
    }
  }
  if (same.device()) return *same.device();
  TORCH_CHECK_NOT_IMPLEMENTED(asked, op.schema().name(), " was given no npu tensor and no npu device");
  return whole(*asked);
}

c10::IValue lend(HostCall& call, const c10::IValue& value, c10::Device device) {
  if (value.isTensor()) return call.lend(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> lent;
    for (const at::Tensor& x : value.toTensorVector()) lent.push_back(call.lend(x));
    return lent;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> lent;
    for (const std::optional<at::Tensor>& x : value.toOptionalTensorVector()) {
      if (!x || !x->defined()) {
        lent.push_back(x);
      } else {  // an index from the CPU is moved first, which counts as the copy it is
        lent.push_back(call.lend(x->device() == device ? *x : x->to(device)));
      }
    }
    return lent;
  }
  if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
  return value;
}

c10::IValue take(HostCall& call, const c10::IValue& value) {
  if (value.isTensor()) return call.take(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> taken;
    for (const at::Tensor& x : value.toTensorVector()) taken.push_back(call.take(x));
    return taken;
  }
  return value;
}

}  // namespace

void run_on_host(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& declared = op.schema().arguments();
  const size_t first = stack->size() - declared.size();
  const c10::Device device = device_of_call(op, torch::jit::last(*stack, declared.size()));
  const c10::DeviceGuard guard(device);

  HostCall call(device);
  std::optional<LentGenerator> generator;
  for (size_t i = 0; i < declared.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (is_generator(declared[i])) {
      at::Generator of = value.isGenerator() ? value.toGenerator() : default_generator(device.index());
      TORCH_CHECK(of.device().is_privateuseone(), "Expected a '", device.type(),
                  "' device type for generator but found '", of.device().type(), "'");
      value = generator.emplace(std::move(of)).generator();
    } else {
      value = lend(call, value, device);
    }
  }
  {
    // Observers see one operator of the device, not what the CPU kernel calls.
    const at::DisableRecordFunctionGuard unobserved;
    std::optional<DefaultGeneratorStandsIn> stands_in;
    if (!generator && op.hasTag(at::Tag::nondeterministic_seeded)) {
      stands_in.emplace(default_generator(device.index()));
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  if (generator) generator->settle();
  call.settle();
  const size_t returns = op.schema().returns().size();
  for (size_t i = stack->size() - returns; i < stack->size(); ++i) (*stack)[i] = take(call, (*stack)[i]);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace npu
