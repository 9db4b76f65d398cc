#include "dtensor.h"

#include <c10/core/ScalarTypeToTypeMeta.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <array>
#include <typeinfo>

namespace tensorplay {
namespace {

constexpr std::array kNames{"NO_PYTHON_KEY", "LOCAL_FAKE",    "LOCAL_SPARSE",  "WRAPPER_NO_DATA",
                            "FREED",         "BODY_META",     "LOCAL_META",    "DTYPE",
                            "SHAPE",         "DEVICE",        "SPLIT",         "ALIASED_TWICE",
                            "OFFSET",        "STRIDE",        "LOCAL_NONLEAF", "LOCAL_INFERENCE",
                            "VERSION_SPLIT", "REQUIRES_GRAD", "PENDING",       "OK",
                            "HELD",          "FLAT",          "EMPTY"};
static_assert(kNames.size() == static_cast<size_t>(DtensorState::kEmpty) + 1);

bool is_wrapper_kind(Kind kind) {
  return kind == Kind::kWrapperSubclass || kind == Kind::kNestedJagged || kind == Kind::kFunctional ||
         kind == Kind::kBatched || kind == Kind::kFunctorchWrapper;
}

bool is_freed(const TensorFacts& facts) {
  const bool has_elements =
      facts.has_storage && !facts.is_meta() && facts.has_shape() && facts.impl.numel > 0;
  if (!has_elements || facts.storage.symbolic) return false;
  if (facts.storage.nbytes == 0) return true;
  // A backend with storages of its own may lay elements out in fewer bytes.
  const std::optional<int64_t> needed = facts.needed_nbytes();
  return *facts.storage.type == typeid(c10::StorageImpl) && needed && *needed > facts.storage.nbytes;
}

// cpu and cpu:0 are one; so are a device without an index and one of its kind with any.
bool same_device(c10::Device a, c10::Device b) {
  return a.type() == b.type() && (a.is_cpu() || !a.has_index() || !b.has_index() || a.index() == b.index());
}

// Strides of dimensions with one index, or none, say nothing.
bool same_strides(const TensorFacts& a, const TensorFacts& b) {
  const DimSpan shape = a.shape();
  for (size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] > 1 && a.stride()[i] != b.stride()[i]) return false;
  }
  return true;
}

// Two storages whose memory meets.
bool lie_over_each_other(const TensorFacts& a, const TensorFacts& b) {
  if (a.data.pointer == nullptr || b.data.pointer == nullptr) return false;
  if (a.data.device != b.data.device) return false;
  const auto begin = [](const TensorFacts& f) { return reinterpret_cast<uint64_t>(f.data.pointer); };
  const auto end = [&](const TensorFacts& f) { return begin(f) + static_cast<uint64_t>(f.storage.nbytes); };
  return begin(a) < end(b) && begin(b) < end(a);
}

class Relating {
 public:
  Relating(const TensorFacts& body, const TensorFacts& local, DtensorForm form)
      : body_(body), local_(local), form_(form) {}

  std::vector<DtensorState> states() {
    const bool has_key = body_.impl.keys.has(c10::DispatchKey::Python);
    if (form_.has_key && !has_key) found(DtensorState::kUnwrapped);
    const bool comparable = compare_kinds();
    if (comparable) {
      if (form_.is_wrapper) {
        compare_labels();
      } else {
        compare_layers();
      }
    }
    add_autograd();
    if (found_.empty()) found(both_meta_ ? DtensorState::kPending : DtensorState::kOk);
    if (comparable) add_traits();
    std::sort(found_.begin(), found_.end());
    return std::move(found_);
  }

 private:
  void found(DtensorState state) { found_.push_back(state); }

  // False where the local tensor has no layers of its own to compare.
  bool compare_kinds() {
    if (local_.kind == Kind::kFake) {
      // Under tracing both layers of a wrapper are what they should be.
      if (!form_.is_wrapper && body_.kind != Kind::kFake) found(DtensorState::kLocalFake);
      return false;
    }
    const bool is_wrapper = is_wrapper_kind(local_.kind);
    const bool is_sparse = local_.kind == Kind::kSparseCoo || local_.kind == Kind::kSparseCompressed ||
                           local_.kind == Kind::kMkldnn;
    if (!is_wrapper && !is_sparse && local_.has_storage && local_.has_geometry()) return true;
    if (form_.is_wrapper) {
      // It may well hold one: quantised shards, results still on their way. Devices can be told of any.
      compare_devices();
    } else {
      found(is_wrapper ? DtensorState::kWrapperNoData : DtensorState::kLocalSparse);  // or a nested tensor
    }
    return false;
  }

  void compare_devices() {
    const bool body = body_.is_meta();
    const bool local = local_.is_meta();
    both_meta_ = body && local;
    if (body && !local) found(DtensorState::kBodyMeta);
    if (local && !body) found(DtensorState::kLocalMeta);
    const bool known = !body && !local && body_.impl.device && local_.impl.device;
    if (form_.is_wrapper && known && !same_device(*body_.impl.device, *local_.impl.device)) {
      found(DtensorState::kDevice);
    }
  }

  void compare_labels() {
    compare_devices();
    if (is_freed(local_)) found(DtensorState::kFreed);
    if (body_.impl.dtype != local_.impl.dtype && !is_quantised()) found(DtensorState::kDtype);
  }

  // Elements of one byte under a wrapper that says a wider floating type: it is the class that knows the
  // scale.
  bool is_quantised() const {
    const auto says = c10::typeMetaToScalarType(body_.impl.dtype);
    return c10::isFloatingType(says) && body_.impl.dtype.itemsize() > 1 && local_.impl.dtype.itemsize() == 1;
  }

  void compare_layers() {
    compare_devices();
    if (is_freed(body_) || is_freed(local_)) found(DtensorState::kFreed);
    if (body_.impl.dtype != local_.impl.dtype) found(DtensorState::kDtype);
    if (!body_.has_storage || !body_.has_geometry()) {  // a sparse body, say: there is nothing that both have
      found(DtensorState::kSplit);
      return;
    }
    const bool one_shape = std::ranges::equal(body_.shape(), local_.shape());
    if (!one_shape) found(DtensorState::kShape);
    if (body_.is_meta() || local_.is_meta()) return;
    if (body_.storage.address != local_.storage.address) {
      const bool empty = body_.impl.numel == 0 && local_.impl.numel == 0;
      found(!empty && lie_over_each_other(body_, local_) ? DtensorState::kAliasedTwice
                                                         : DtensorState::kSplit);
      return;
    }
    if (one_shape && local_.impl.numel > 0) {
      if (body_.impl.storage_offset != local_.impl.storage_offset) found(DtensorState::kOffset);
      if (!same_strides(body_, local_)) found(DtensorState::kStride);
    }
    const bool counted = body_.impl.version_counter != nullptr && local_.impl.version_counter != nullptr;
    if (counted && body_.impl.version_counter != local_.impl.version_counter) {
      found(DtensorState::kVersionSplit);
    }
  }

  void add_autograd() {
    if (form_.is_parameter && !local_.impl.grad_fn_stale && local_.impl.grad_fn != nullptr) {
      found(DtensorState::kLocalNonleaf);
    }
    if (local_.impl.is_inference && !body_.impl.is_inference && !form_.is_wrapper) {
      found(DtensorState::kLocalInference);
    }
    if (!form_.is_wrapper && body_.impl.requires_grad && !local_.impl.requires_grad) {
      found(DtensorState::kRequiresGrad);
    }
  }

  void add_traits() {
    if (!form_.is_wrapper && body_.impl.use_count > 1) found(DtensorState::kHeld);
    if (local_.impl.numel == 0) {
      found(DtensorState::kEmpty);
    } else if (local_.impl.storage_offset > 0) {
      found(DtensorState::kFlat);
    }
  }

  const TensorFacts& body_;
  const TensorFacts& local_;
  DtensorForm form_;
  bool both_meta_ = false;
  std::vector<DtensorState> found_;
};

}  // namespace

const char* name_of(DtensorState state) {
  return kNames[static_cast<size_t>(state)];
}

DtensorForm form_of(const TensorFacts& body, bool dispatches, bool in_slot, bool is_parameter) {
  DtensorForm form{.is_wrapper = false, .has_key = dispatches, .is_parameter = is_parameter};
  if (!body.impl.keys.has(c10::DispatchKey::Python)) {
    form.is_wrapper = dispatches && in_slot;
    return form;
  }
  form.has_key = true;
  form.is_wrapper = body.kind == Kind::kWrapperSubclass || body.kind == Kind::kFake;
  return form;
}

std::vector<DtensorState> relate(const TensorFacts& body, const TensorFacts& local, DtensorForm form) {
  return Relating(body, local, form).states();
}

bool calls_for_exchange(const std::vector<DtensorState>& states) {
  return std::any_of(states.begin(), states.end(),
                     [](DtensorState state) { return state <= DtensorState::kStride; });
}

bool calls_for_donor(const std::vector<DtensorState>& states) {
  return std::any_of(states.begin(), states.end(), [](DtensorState state) {
    return state == DtensorState::kUnwrapped || state == DtensorState::kBodyMeta ||
           state == DtensorState::kDevice || state == DtensorState::kLocalMeta ||
           state == DtensorState::kFreed || state == DtensorState::kDtype;
  });
}

}  // namespace tensorplay
