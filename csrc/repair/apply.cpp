#include "apply.h"

#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <typeinfo>

#include "../core/read.h"

namespace tensorplay::repair {
namespace {

constexpr std::array<const char*, 15> kChecks{
    "object", "new-impl", "old-impl", "class",         "storage",  "geometry",   "dtype", "device",
    "keys",   "leaf",     "version",  "requires-grad", "gradient", "use-counts", nullptr};

// Everything that is compared after the exchange, as it was before.
struct Before {
  const c10::TensorImpl* body;
  const c10::TensorImpl* donor;
  const c10::TensorImpl* local;
  TensorFacts body_facts;
  TensorFacts local_facts;
  at::Tensor grad;  // undefined where there is none
};

class Verifying {
 public:
  Verifying(const Hands& hands, const at::Tensor& local, const Request& request, const Before& before)
      : hands_(hands), before_(before), request_(request) {
    read_tensor(*hands.body().unsafeGetTensorImpl(), now_);
    read_tensor(*hands.other().unsafeGetTensorImpl(), other_);
    read_tensor(*local.unsafeGetTensorImpl(), local_);
  }

  bool holds(const std::string_view name) const {
    const ImplFacts& impl = now_.impl;
    if (name == "object") return hands_.is_same_object();
    if (name == "new-impl") return impl.address == before_.donor && impl.address != before_.local;
    if (name == "old-impl") return other_.impl.address == before_.body;
    if (name == "class") return *impl.type == *local_.impl.type && now_.kind == local_.kind;
    if (name == "storage") return now_.storage.address == local_.storage.address;
    if (name == "geometry") {
      return std::ranges::equal(now_.shape(), local_.shape()) &&
             std::ranges::equal(now_.stride(), local_.stride()) &&
             impl.storage_offset == local_.impl.storage_offset;
    }
    if (name == "dtype") return impl.dtype == before_.body_facts.impl.dtype;
    if (name == "device") {
      return impl.device == local_.impl.device && now_.data.device == local_.data.device &&
             impl.backend == local_.impl.backend;
    }
    if (name == "keys") return impl.keys == local_.impl.keys;
    if (name == "leaf") return impl.grad_fn == nullptr && !impl.grad_fn_stale && !impl.is_view;
    if (name == "version") return impl.version_counter == local_.impl.version_counter;
    if (name == "requires-grad") {
      return impl.requires_grad == request_.requires_grad.value_or(before_.body_facts.impl.requires_grad);
    }
    if (name == "gradient") {
      const at::TensorBase* grad = grad_of(*hands_.body().unsafeGetTensorImpl());
      if (!request_.migrate_grad || !before_.grad.defined()) return grad == nullptr;
      return grad != nullptr && grad->is_same(before_.grad);
    }
    // One owner each, the object; the local tensor has as many as before, its storage one more.
    return impl.use_count == 1 && other_.impl.use_count == 1 &&
           local_.impl.use_count == before_.local_facts.impl.use_count &&
           local_.storage.use_count == before_.local_facts.storage.use_count;
  }

 private:
  const Hands& hands_;
  const Before& before_;
  const Request& request_;
  TensorFacts now_;
  TensorFacts other_;
  TensorFacts local_;
};

}  // namespace

at::Tensor make_donor(const at::Tensor& local, bool requires_grad) {
  at::Tensor donor = torch::autograd::make_variable_non_differentiable_view(local, local);
  if (requires_grad) donor.set_requires_grad(true);
  return donor;
}

const char* wrong_with_donor(const at::Tensor& donor, const at::Tensor& local, bool requires_grad) {
  TensorFacts alias;
  TensorFacts original;
  read_tensor(*donor.unsafeGetTensorImpl(), alias);
  read_tensor(*local.unsafeGetTensorImpl(), original);
  if (alias.impl.address == original.impl.address) return "donor-own-impl";
  if (*alias.impl.type != *original.impl.type) return "donor-class";
  if (alias.storage.address != original.storage.address) return "donor-storage";
  if (alias.impl.version_counter != original.impl.version_counter) return "donor-version";
  if (alias.impl.requires_grad != requires_grad) return "donor-requires-grad";
  return nullptr;
}

const char* const* checks_after() {
  return kChecks.data();
}

Outcome apply(Hands& hands, const at::Tensor& local, const Request& request, const std::string& trip) {
  Before before{};
  before.body = hands.body().unsafeGetTensorImpl();
  before.donor = hands.other().unsafeGetTensorImpl();
  before.local = local.unsafeGetTensorImpl();
  if (const at::TensorBase* grad = grad_of(*before.body)) before.grad = at::Tensor(*grad);
  read_tensor(*before.body, before.body_facts);
  read_tensor(*before.local, before.local_facts);

  const auto exchange = [&] { return trip != "exchange" && hands.exchange(); };
  if (!exchange()) return {End::kRefused, "exchange"};
  const char* failed = nullptr;
  if (request.migrate_grad && before.grad.defined()) {
    torch::autograd::impl::materialize_autograd_meta(hands.body())->grad_ = before.grad;
  }
  // Lists that hold no hook any more, too: what is registered in them later has to fire for the new impl.
  if (trip == "hooks" || !hands.attach_hooks()) failed = "hooks";
  if (failed == nullptr) {
    const Verifying after(hands, local, request, before);
    for (const char* const* name = kChecks.data(); *name != nullptr && failed == nullptr; ++name) {
      if (trip == *name || !after.holds(*name)) failed = *name;
    }
  }
  if (failed == nullptr) return {End::kDone, nullptr};
  if (!hands.exchange()) return {End::kStuck, failed};
  // The old impl has its hooks as before: they were attached to the new one beside it.
  if (auto* meta = torch::autograd::impl::get_autograd_meta(hands.other())) meta->grad_.reset();
  return {End::kTakenBack, failed};
}

}  // namespace tensorplay::repair
