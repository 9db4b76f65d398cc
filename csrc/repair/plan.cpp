#include "plan.h"

#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <typeinfo>

#include "../core/names.h"
#include "../core/read.h"

namespace tensorplay::repair {
namespace {

// Whether operators go to the tensor's class, and pending conjugation and negation, are checked by
// themselves.
constexpr c10::DispatchKeySet kCheckedElsewhere({c10::DispatchKey::Python,
                                                 c10::DispatchKey::PythonTLSSnapshot,
                                                 c10::DispatchKey::PythonDispatcher,
                                                 c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});

// An ordinary tensor: of c10's own class, or of one that a device backend derives from it.
bool is_dense(const TensorFacts& facts) {
  if (facts.kind != Kind::kStrided && facts.kind != Kind::kMeta) return false;
  if (!facts.has_storage || !facts.has_geometry()) return false;
  const bool own_class = *facts.impl.type == typeid(c10::TensorImpl);
  const bool of_backend = facts.impl.device && !facts.impl.device->is_cpu() && !facts.impl.device->is_meta();
  return own_class || of_backend;
}

std::string kind_in_words(const TensorFacts& facts, bool has_key) {
  return has_key && is_dense(facts) ? "of a class with __torch_dispatch__"
                                    : std::string(kind_name(facts.kind));
}

class Planning {
 public:
  Planning(const c10::TensorImpl& body, const c10::TensorImpl& local, const ObjectFacts& object,
           const Request& request)
      : body_impl_(body), local_impl_(local), object_(object), request_(request) {
    read_tensor(body, body_);
    read_tensor(local, local_);
    form_ = form_of(body_, object.dispatches, object.in_slot, object.is_parameter);
  }

  Plan plan() {
    plan_.states = relate(body_, local_, form_);
    plan_.is_needed = form_.is_wrapper ? calls_for_donor(plan_.states) : calls_for_exchange(plan_.states);
    if (!object_.local_is_own || object_.local_is_body) plan_.is_needed = true;
    if (is_mistaken(DtensorState::kVersionSplit) && request_.migrate_version) plan_.is_needed = true;
    check_kinds();
    if (!plan_.is_refused()) {
      check_body();
      check_local();
      check_fit();
    }
    check_surroundings();
    return std::move(plan_);
  }

 private:
  void check(const char* name, bool holds, std::string found = {}) {
    plan_.checks.push_back({name, holds ? Result::kPassed : Result::kRefused, std::move(found)});
  }
  void report(const char* name, bool holds, std::string found) {
    plan_.checks.push_back({name, holds ? Result::kPassed : Result::kReported, std::move(found)});
  }

  bool is_mistaken(DtensorState state) const {
    return std::ranges::find(plan_.states, state) != plan_.states.end();
  }

  void check_kinds() {
    check("local-own", object_.local_is_own);
    check("local-not-body", !object_.local_is_body);
    check("local-not-dtensor", object_.local_is_body || !object_.local_is_dtensor);
    if (!request_.whole) check("body-without-key", !form_.has_key, form_.is_wrapper ? "wrapper" : "tensor");
    if (!form_.is_wrapper) check("body-dense", is_dense(body_), std::string(kind_name(body_.kind)));
    const bool inference = body_.impl.is_inference || local_.impl.is_inference;
    check("not-inference", !inference, body_.impl.is_inference ? "body" : "local tensor");
    const bool fake = local_.kind == Kind::kFake;
    check("local-not-fake", !fake);
    const bool has_key = local_.impl.keys.has(c10::DispatchKey::Python);
    // A wrapper holds the local tensor as an object, whatever that is made of.
    if (!fake && !form_.is_wrapper) {
      check("local-dense", is_dense(local_) && !has_key, kind_in_words(local_, has_key));
    }
  }

  void check_body() {
    check("slot", object_.slot_is_self);
    const auto* meta = static_cast<const torch::autograd::AutogradMeta*>(body_impl_.autograd_meta());
    check("no-grad-fn", body_.impl.grad_fn == nullptr);
    const bool pending = meta != nullptr && !meta->grad_accumulator_.expired();
    check("no-graph", !pending, std::to_string(body_.impl.use_count));
    // The accumulator of a graph is the second owner: named above.
    check("not-held", body_.impl.use_count == 1 || pending, std::to_string(body_.impl.use_count));
    check("no-weak-references", body_.impl.weak_count == 0, std::to_string(body_.impl.weak_count));
    check("not-view", !body_.impl.is_view);
    const bool hooks = object_.has_hooks || object_.has_accumulate_hooks;
    check("no-hooks", !hooks || request_.migrate_hooks,
          object_.has_hooks ? "hooks" : "post-accumulate hooks");
    const bool native_hooks = meta != nullptr && (meta->cpp_hooks_list_ != nullptr || meta->retains_grad_);
    check("no-native-hooks", !native_hooks);
    const at::TensorBase* grad = grad_of(body_impl_);
    check("no-grad", grad == nullptr || request_.migrate_grad);
    if (grad != nullptr && request_.migrate_grad) check_grad(*grad->unsafeGetTensorImpl());
    const auto dtype = c10::typeMetaToScalarType(body_.impl.dtype);
    check("no-grad-dtype", meta == nullptr || (!meta->allow_grad_dtype_mismatch_ &&
                                               meta->grad_dtype_.value_or(dtype) == dtype));
    check("no-forward-grad", meta == nullptr || meta->fw_grad_ == nullptr);
    if (form_.is_wrapper) return;
    report("storage-alone",
           !body_.has_storage || body_.storage.use_count == 1 || shares_storage() || body_.is_meta(),
           std::to_string(body_.storage.use_count));
  }

  // What .grad of a tensor may be (torch/csrc/autograd/python_variable.cpp, check_inplace and set_grad).
  void check_grad(const c10::TensorImpl& grad) {
    TensorFacts facts;
    read_tensor(grad, facts);
    const bool fits = facts.impl.device == local_.impl.device && facts.impl.dtype == local_.impl.dtype &&
                      facts.has_shape() && std::ranges::equal(facts.shape(), local_.shape());
    check("grad-fits", fits, facts.impl.device ? facts.impl.device->str() : "");
  }

  bool shares_storage() const {
    return body_.has_storage && local_.has_storage && body_.storage.address == local_.storage.address;
  }

  void check_local() {
    check("local-materialized", !local_.is_meta());
    const bool leaf = !local_.impl.grad_fn_stale && local_.impl.grad_fn == nullptr;
    check("local-leaf", leaf);
    if (!is_dense(local_)) return;
    const std::optional<int64_t> needed = local_.needed_nbytes();
    if (*local_.impl.type == typeid(c10::TensorImpl) && typeid(c10::StorageImpl) == *local_.storage.type) {
      check("local-in-storage", needed && *needed <= local_.storage.nbytes,
            std::to_string(needed.value_or(-1)) + " of " + std::to_string(local_.storage.nbytes));
    } else {
      // A backend may lay elements out in a format of its own.
      plan_.checks.push_back({"local-in-storage", Result::kNotChecked, "the backend's own storage"});
    }
    check("local-pointer", local_.is_meta() || local_.impl.numel == 0 || local_.data.pointer != nullptr);
  }

  void check_fit() {
    // What a quantised shard stands for its class knows.
    const bool is_told = form_.is_wrapper && !is_mistaken(DtensorState::kDtype);
    check("dtype", is_told || body_.impl.dtype == local_.impl.dtype);
    const bool wanted = request_.requires_grad.value_or(body_.impl.requires_grad);
    const auto type = c10::typeMetaToScalarType(local_.impl.dtype);
    check("requires-grad-type", !wanted || c10::isFloatingType(type) || c10::isComplexType(type));
    if (form_.is_wrapper) return;  // its own shape is the global one
    check("conjugate-negative",
          body_.impl.is_conj == local_.impl.is_conj && body_.impl.is_neg == local_.impl.is_neg);
    check("keys", without_backends(body_.impl.keys - kCheckedElsewhere) ==
                      without_backends(local_.impl.keys - kCheckedElsewhere));
    check("shape", std::ranges::equal(body_.shape(), local_.shape()));
  }

  void check_surroundings() {
    check("inference-mode", !c10::InferenceMode::is_enabled());
    check("dispatch-mode", !c10::impl::TorchDispatchModeTLS::any_modes_set());
    // vmap, grad and functionalize of torch.func put this key before all operators while they run.
    check("functorch",
          !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode));
    check("backward", torch::autograd::get_current_graph_task_id() == -1);
  }

  const c10::TensorImpl& body_impl_;
  const c10::TensorImpl& local_impl_;
  const ObjectFacts& object_;
  const Request& request_;
  TensorFacts body_;
  TensorFacts local_;
  DtensorForm form_;
  Plan plan_;
};

}  // namespace

bool Plan::is_refused() const {
  return std::ranges::any_of(checks, [](const Check& one) { return one.result == Result::kRefused; });
}

c10::DispatchKeySet without_backends(c10::DispatchKeySet keys) {
  // Each backend has autocast keys of its own.
  const uint64_t bits = (keys - c10::autocast_dispatch_keyset).raw_repr();
  return {c10::DispatchKeySet::RAW, bits & ~static_cast<uint64_t>(c10::full_backend_mask)};
}

Plan make_plan(const c10::TensorImpl& body, const c10::TensorImpl& local, const ObjectFacts& object,
               const Request& request) {
  return Planning(body, local, object, request).plan();
}

}  // namespace tensorplay::repair
