// The plan and the exchange of a DTensor's body, without Python: the objects are two handles that change
// places.
#include <ATen/ATen.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../csrc/repair/apply.h"
#include "specimens.h"

namespace tensorplay::repair {
namespace {

using Names = std::vector<std::string>;
using torch::autograd::impl::materialize_autograd_meta;
using WeakImpl = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// What must not change: everything of both layers that could.
struct State {
  explicit State(const at::Tensor& tensor) {
    const TensorFacts facts = read(tensor);
    const ImplFacts& impl = facts.impl;
    of_impl = {impl.address, impl.version_counter, impl.grad_fn, facts.storage.address, facts.data.pointer};
    numbers = {impl.use_count,
               impl.weak_count,
               impl.version,
               static_cast<int64_t>(impl.keys.raw_repr()),
               impl.requires_grad,
               impl.is_leaf,
               impl.is_view,
               facts.storage.use_count,
               facts.storage.weak_count,
               facts.storage.nbytes,
               impl.storage_offset,
               static_cast<int64_t>(facts.kind),
               impl.itemsize,
               impl.is_conj,
               impl.is_neg};
    if (facts.has_geometry()) {
      numbers.insert(numbers.end(), facts.shape().begin(), facts.shape().end());
      numbers.insert(numbers.end(), facts.stride().begin(), facts.stride().end());
    }
    const at::TensorBase* kept = grad_of(*tensor.unsafeGetTensorImpl());
    grad = kept == nullptr ? nullptr : kept->unsafeGetTensorImpl();
  }
  bool operator==(const State&) const = default;

  std::vector<const void*> of_impl;
  std::vector<int64_t> numbers;
  const void* grad = nullptr;
};

// A body that is to be exchanged, and its local tensor: BODY_META, where nothing else is said.
struct Case {
  at::Tensor body = at::empty({2, 3}, at::kMeta);
  at::Tensor local = at::ones({2, 3});
  ObjectFacts object;
  Request request;
};

Plan plan_of(const Case& given) {
  const State body(given.body);
  const State local(given.local);
  Plan plan = make_plan(*given.body.unsafeGetTensorImpl(), *given.local.unsafeGetTensorImpl(), given.object,
                        given.request);
  EXPECT_TRUE(body == State(given.body));
  EXPECT_TRUE(local == State(given.local));
  return plan;
}

Names with_result(const Plan& plan, Result result) {
  Names names;
  for (const Check& check : plan.checks) {
    if (check.result == result) names.emplace_back(check.name);
  }
  return names;
}

Names refused(const Case& given) {
  return with_result(plan_of(given), Result::kRefused);
}

at::Tensor meta(at::IntArrayRef sizes = {2, 3}, at::ScalarType type = at::kFloat) {
  return at::empty(sizes, at::TensorOptions(at::kMeta).dtype(type));
}

// ---- The plan ----

TEST(Plan, a_body_on_meta_beside_a_real_local_tensor_may_be_exchanged) {
  const Plan plan = plan_of({});

  EXPECT_TRUE(plan.is_needed);
  EXPECT_FALSE(plan.is_refused());
  EXPECT_EQ(with_result(plan, Result::kReported), Names{});
  EXPECT_EQ(plan.states, std::vector{DtensorState::kBodyMeta});
}

TEST(Plan, nothing_is_needed_where_both_are_one) {
  Case healthy;
  healthy.body = make_donor(healthy.local, false);

  const Plan plan = plan_of(healthy);

  EXPECT_FALSE(plan.is_needed);
  EXPECT_FALSE(plan.is_refused());
}

struct Refusal {
  const char* name;
  Names checks;
  std::function<void(Case&)> spoil;
  // What a neighbour that is accepted has beside the start: all but that one fact.
  std::function<void(Case&)> neighbour = [](Case&) {};
};

std::ostream& operator<<(std::ostream& out, const Refusal& refusal) {
  return out << refusal.name;
}

void in_inference(at::Tensor& tensor) {
  const c10::InferenceMode guard;
  tensor = at::empty_like(tensor).fill_(1);
}

std::vector<Refusal> refusals() {
  const auto fact = [](bool ObjectFacts::* field, bool value) {
    return [=](Case& given) { given.object.*field = value; };
  };
  const auto body_requires_grad = [](Case& given) { given.body.requires_grad_(); };
  const auto with_grad = [](const at::Tensor& grad) {
    return [=](Case& given) {
      given.request.migrate_grad = true;
      materialize_autograd_meta(given.body)->grad_ = grad.clone();
    };
  };
  return {
      {"local of the class", {"local-own"}, fact(&ObjectFacts::local_is_own, false)},
      {"local is the body", {"local-not-body"}, fact(&ObjectFacts::local_is_body, true)},
      {"local is a DTensor", {"local-not-dtensor"}, fact(&ObjectFacts::local_is_dtensor, true)},
      {"class with a dispatch of its own", {"body-without-key"}, fact(&ObjectFacts::dispatches, true)},
      {"slot of another object", {"slot"}, fact(&ObjectFacts::slot_is_self, false)},
      {"hooks",
       {"no-hooks"},
       fact(&ObjectFacts::has_hooks, true),
       [](Case& given) {
         given.object.has_hooks = true;
         given.request.migrate_hooks = true;
       }},
      {"post-accumulate hooks",
       {"no-hooks"},
       fact(&ObjectFacts::has_accumulate_hooks, true),
       [](Case& given) {
         given.object.has_accumulate_hooks = true;
         given.request.migrate_hooks = true;
       }},
      {"sparse body",
       {"body-dense"},
       [](Case& given) { given.body = at::ones({2, 3}).to_sparse(); },
       [](Case& given) { given.body = at::ones({2, 3}); }},
      {"body of inference mode",
       {"not-inference"},
       [](Case& given) {
         given.body = at::ones({2, 3});
         in_inference(given.body);
       },
       [](Case& given) { given.body = at::ones({2, 3}); }},
      {"local of inference mode", {"not-inference"}, [](Case& given) { in_inference(given.local); }},
      {"sparse local", {"local-dense"}, [](Case& given) { given.local = given.local.to_sparse(); }},
      {"functional local",
       {"local-dense"},
       [](Case& given) { given.local = at::functionalization::impl::to_functional_tensor(given.local); }},
      {"fake local",
       {"local-not-fake"},
       [](Case& given) {
         given.local = meta();
         c10::TensorImpl* impl = given.local.unsafeGetTensorImpl();
         impl->_change_backend_component_keys(c10::Device(c10::kCPU));
         impl->set_python_dispatch(true);
       }},
      {"computed body",
       {"no-grad-fn"},
       [](Case& given) { given.body = meta().requires_grad_() * 2; },
       [](Case& given) { given.body = (meta().requires_grad_() * 2).detach().requires_grad_(); }},
      {"view",
       {"not-view"},
       [](Case& given) { given.body = meta({4, 3}).slice(0, 0, 2); },
       [](Case& given) { given.body = meta({4, 3}).slice(0, 0, 2).detach(); }},
      {"native hook",
       {"no-native-hooks"},
       [](Case& given) {
         given.body.requires_grad_();
         given.body.register_hook([](const at::Tensor& grad) { return grad; });
       },
       body_requires_grad},
      {"gradient",
       {"no-grad"},
       [=](Case& given) {
         with_grad(at::ones({2, 3}))(given);
         given.request.migrate_grad = false;
       },
       with_grad(at::ones({2, 3}))},
      {"gradient of another shape", {"grad-fits"}, with_grad(at::ones({3, 2})), with_grad(at::zeros({2, 3}))},
      {"gradient of another type",
       {"grad-fits"},
       with_grad(at::ones({2, 3}, at::kDouble)),
       with_grad(at::zeros({2, 3}))},
      {"gradient on another device", {"grad-fits"}, with_grad(meta()), with_grad(at::zeros({2, 3}))},
      {"forward gradient",
       {"no-forward-grad"},
       [](Case& given) {
         materialize_autograd_meta(given.body)->fw_grad_ = std::make_shared<torch::autograd::ForwardGrad>();
       },
       [](Case& given) { materialize_autograd_meta(given.body); }},
      {"local on meta",
       {"local-materialized"},
       [](Case& given) { std::swap(given.body, given.local); },
       [](Case& given) { given.body = at::zeros({2, 3}); }},
      {"computed local",
       {"local-leaf"},
       [](Case& given) { given.local = at::ones({2, 3}).requires_grad_() * 2; },
       [](Case& given) { given.local = (at::ones({2, 3}).requires_grad_() * 2).detach(); }},
      {"local past its storage",
       {"local-in-storage"},
       [](Case& given) { given.local.storage().unsafeGetStorageImpl()->set_nbytes(23); },
       [](Case& given) { given.local.storage().unsafeGetStorageImpl()->set_nbytes(24); }},
      {"local without memory",
       {"local-pointer"},
       [](Case& given) {
         given.local.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, c10::kCPU));
       }},
      {"conjugate local",
       {"conjugate-negative"},
       [](Case& given) {
         given.body = meta({2, 3}, at::kComplexFloat);
         given.local = at::ones({2, 3}, at::kComplexFloat);
         given.local._set_conj(true);
       },
       [](Case& given) {
         given.body = meta({2, 3}, at::kComplexFloat);
         given.local = at::ones({2, 3}, at::kComplexFloat);
         given.body._set_conj(true);
         given.local._set_conj(true);
       }},
      {"negative body",
       {"conjugate-negative"},
       [](Case& given) { given.body._set_neg(true); },
       [](Case& given) {
         given.body._set_neg(true);
         given.local._set_neg(true);
       }},
      {"other keys", {"keys"}, [](Case& given) { given.body.unsafeGetTensorImpl()->remove_autograd_key(); }},
      {"other shape", {"shape"}, [](Case& given) { given.body = meta({3, 2}); }},
      {"other type",
       {"dtype"},
       [](Case& given) { given.body = meta({2, 3}, at::kDouble); },
       [](Case& given) {
         given.body = meta({2, 3}, at::kDouble);
         given.local = at::ones({2, 3}, at::kDouble);
       }},
      {"integers that shall require grad",
       {"requires-grad-type"},
       [](Case& given) {
         given.body = meta({2, 3}, at::kLong);
         given.local = at::ones({2, 3}, at::kLong);
         given.request.requires_grad = true;
       },
       [](Case& given) {
         given.body = meta({2, 3}, at::kLong);
         given.local = at::ones({2, 3}, at::kLong);
         given.request.requires_grad = false;
       }},
  };
}

class Refusals : public testing::TestWithParam<Refusal> {};

TEST_P(Refusals, each_for_one_fact) {
  Case spoilt;
  GetParam().spoil(spoilt);
  Case neighbour;
  GetParam().neighbour(neighbour);

  EXPECT_EQ(refused(spoilt), GetParam().checks);
  EXPECT_EQ(refused(neighbour), Names{});
}

INSTANTIATE_TEST_SUITE_P(Plan, Refusals, testing::ValuesIn(refusals()), [](const auto& info) {
  std::string name = info.param.name;
  for (char& letter : name) {
    if (isalnum(letter) == 0) letter = '_';
  }
  return name;
});

TEST(Plan, body_with_a_python_key_is_refused) {
  Case given;
  given.body.unsafeGetTensorImpl()->set_python_dispatch(true);

  EXPECT_EQ(refused(given), Names{"body-without-key"});
  given.request.whole = true;
  EXPECT_EQ(refused(given), Names{});
}

TEST(Plan, version_counter_alone_is_a_reason_where_it_is_asked) {
  Case given;
  given.body = given.local.variable_data();
  EXPECT_FALSE(plan_of(given).is_needed);

  given.request.migrate_version = true;
  EXPECT_TRUE(plan_of(given).is_needed);
  EXPECT_EQ(refused(given), Names{});
}

TEST(Plan, slot_alone_makes_no_wrapper) {
  Case given;
  given.object.in_slot = true;

  EXPECT_EQ(refused(given), Names{});
}

TEST(Plan, live_graph_is_refused_until_it_is_gone) {
  Case given;
  given.body.requires_grad_();
  {
    const at::Tensor out = given.body * 2;
    EXPECT_EQ(refused(given), Names{"no-graph"});
  }

  EXPECT_EQ(refused(given), Names{});
}

TEST(Plan, another_owner_is_refused_until_it_is_gone) {
  Case given;
  {
    const at::Tensor owner =
        given.body;  // NOLINT(performance-unnecessary-copy-initialization): it is counted
    EXPECT_EQ(refused(given), Names{"not-held"});
  }

  EXPECT_EQ(refused(given), Names{});
}

TEST(Plan, weak_reference_is_refused_until_it_is_gone) {
  Case given;
  {
    const WeakImpl weak(given.body.getIntrusivePtr());
    EXPECT_EQ(refused(given), Names{"no-weak-references"});
  }

  EXPECT_EQ(refused(given), Names{});
}

TEST(Plan, shared_storage_of_the_body_is_worth_a_word_where_it_has_memory) {
  Case on_meta;
  const at::Tensor nothing = make_donor(on_meta.body, false);
  EXPECT_EQ(with_result(plan_of(on_meta), Result::kReported), Names{});

  Case given;
  given.body = at::zeros({2, 3});
  const at::Tensor other = make_donor(given.body, false);

  EXPECT_EQ(with_result(plan_of(given), Result::kReported), Names{"storage-alone"});
  EXPECT_EQ(refused(given), Names{});
}

TEST(Plan, modes_are_refused_while_they_last) {
  const Case given;
  {
    const c10::InferenceMode guard;
    EXPECT_EQ(refused(given), Names{"inference-mode"});
  }
  {
    const c10::impl::IncludeDispatchKeyGuard guard(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
    EXPECT_EQ(refused(given), Names{"functorch"});
  }
  Names within;
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  leaf.register_hook([&](const at::Tensor& grad) {
    within = refused(given);
    return grad;
  });
  leaf.sum().backward();

  EXPECT_EQ(within, Names{"backward"});
  EXPECT_EQ(refused(given), Names{});
}

// ---- The exchange ----

class TwoHandles final : public Hands {
 public:
  TwoHandles(at::Tensor body, at::Tensor donor) : body_(std::move(body)), donor_(std::move(donor)) {}

  bool exchange() override {
    ++exchanges;
    std::swap(body_, donor_);
    return true;
  }
  bool attach_hooks() override {
    attached_to.push_back(body_.unsafeGetTensorImpl());
    return can_attach;
  }
  const at::Tensor& body() const override { return body_; }
  const at::Tensor& other() const override { return donor_; }
  bool is_same_object() const override { return same; }

  int exchanges = 0;
  std::vector<const void*> attached_to;
  bool can_attach = true;
  bool same = true;

 private:
  at::Tensor body_;
  at::Tensor donor_;
};

// Hands over the case's body, and an alias of its local tensor.
TwoHandles hands_of(Case& given) {
  const bool requires_grad = given.request.requires_grad.value_or(given.body.requires_grad());
  at::Tensor donor = make_donor(given.local, requires_grad);
  EXPECT_EQ(wrong_with_donor(donor, given.local, requires_grad), nullptr);
  return {std::move(given.body), std::move(donor)};
}

Names checks() {
  Names names;
  for (const char* const* name = checks_after(); *name != nullptr; ++name) names.emplace_back(*name);
  return names;
}

TEST(Donor, is_an_alias_that_shares_storage_and_version_counter) {
  const at::Tensor local = at::ones({2, 3});
  const at::Tensor donor = make_donor(local, true);

  EXPECT_EQ(wrong_with_donor(donor, local, true), nullptr);
  EXPECT_STREQ(wrong_with_donor(donor, local, false), "donor-requires-grad");
  EXPECT_STREQ(wrong_with_donor(local, local, false), "donor-own-impl");
  EXPECT_STREQ(wrong_with_donor(at::ones({2, 3}), local, false), "donor-storage");
  EXPECT_STREQ(wrong_with_donor(local.variable_data(), local, false), "donor-version");
  EXPECT_STREQ(wrong_with_donor(local.to_sparse(), local, false), "donor-class");
  local.add_(1);
  EXPECT_EQ(donor._version(), local._version());
}

TEST(Exchange, gives_the_body_the_local_tensors_memory) {
  Case given;
  given.body.requires_grad_();
  TwoHandles hands = hands_of(given);

  const Outcome outcome = apply(hands, given.local, given.request, "");

  EXPECT_EQ(outcome.end, End::kDone);
  EXPECT_EQ(outcome.check, nullptr);
  EXPECT_EQ(relate(read(hands.body()), read(given.local), {.is_parameter = true}),
            std::vector{DtensorState::kRequiresGrad});
  given.local.fill_(7);
  EXPECT_EQ(hands.body().detach().sum().item<float>(), 42);
  EXPECT_TRUE(hands.body().requires_grad());
}

TEST(Exchange, requires_grad_is_as_asked) {
  for (const bool asked : {false, true}) {
    Case given;
    given.request.requires_grad = asked;
    given.body.requires_grad_(!asked);
    TwoHandles hands = hands_of(given);

    EXPECT_EQ(apply(hands, given.local, given.request, "").end, End::kDone);
    EXPECT_EQ(hands.body().requires_grad(), asked);
  }
}

class Trips : public testing::TestWithParam<std::string> {};

TEST_P(Trips, take_everything_back) {
  for (const bool with_grad : {false, true}) {
    Case given;
    given.body.requires_grad_();
    given.request = {std::nullopt, true, with_grad};
    if (with_grad) materialize_autograd_meta(given.body)->grad_ = at::ones({2, 3});
    TwoHandles hands = hands_of(given);
    const State local(given.local);
    const State body(hands.body());
    const void* donor = hands.other().unsafeGetTensorImpl();

    const Outcome outcome = apply(hands, given.local, given.request, GetParam());

    EXPECT_EQ(outcome.end, End::kTakenBack);
    EXPECT_EQ(outcome.check, GetParam());
    EXPECT_TRUE(body == State(hands.body()));
    EXPECT_TRUE(local == State(given.local));
    EXPECT_EQ(hands.other().unsafeGetTensorImpl(), donor);
    EXPECT_EQ(hands.exchanges, 2);
  }
}

Names trips() {
  Names names = checks();
  names.emplace_back("hooks");
  return names;
}

INSTANTIATE_TEST_SUITE_P(Exchange, Trips, testing::ValuesIn(trips()), [](const auto& info) {
  std::string name = info.param;
  for (char& letter : name) {
    if (letter == '-') letter = '_';
  }
  return name;
});

TEST(Exchange, that_is_refused_changes_nothing) {
  Case given;
  TwoHandles hands = hands_of(given);
  const State body(hands.body());
  const State local(given.local);

  const Outcome outcome = apply(hands, given.local, given.request, "exchange");

  EXPECT_EQ(outcome.end, End::kRefused);
  EXPECT_STREQ(outcome.check, "exchange");
  EXPECT_EQ(hands.exchanges, 0);
  EXPECT_TRUE(body == State(hands.body()));
  EXPECT_TRUE(local == State(given.local));
}

// What really does not hold, by the check that has to see it.
struct Wrong {
  const char* check;
  std::function<void(Case&)> before;
  std::function<at::Tensor(const Case&)> donor;
  std::function<void(TwoHandles&)> hands = [](TwoHandles&) {};
};

TEST(Exchange, each_check_sees_what_does_not_hold) {
  const auto alias = [](const Case& given) { return make_donor(given.local, false); };
  const auto nothing = [](Case&) {};
  at::Tensor kept;
  const std::vector<Wrong> all{
      {"object", nothing, alias, [](TwoHandles& hands) { hands.same = false; }},
      {"hooks", [](Case& given) { given.request.migrate_hooks = true; }, alias,
       [](TwoHandles& hands) { hands.can_attach = false; }},
      {"new-impl", nothing, [](const Case& given) { return given.local; }},
      {"class", nothing, [](const Case& given) { return given.local.to_sparse(); }},
      {"storage", nothing, [](const Case&) { return at::ones({2, 3}); }},
      {"geometry", nothing, [=](const Case& given) { return alias(given).view({3, 2}); }},
      {"dtype", [](Case& given) { given.body = meta({2, 3}, at::kDouble); }, alias},
      {"leaf", nothing, [=](const Case& given) { return alias(given).view({2, 3}); }},
      {"version", nothing, [](const Case& given) { return given.local.variable_data(); }},
      {"requires-grad", [](Case& given) { given.body.requires_grad_(); }, alias},
      {"gradient", nothing,
       [=](const Case& given) {
         at::Tensor donor = alias(given);
         materialize_autograd_meta(donor)->grad_ = at::ones({2, 3});
         return donor;
       }},
      {"use-counts", nothing, [&](const Case& given) { return kept = alias(given); }},
  };
  for (const Wrong& wrong : all) {
    SCOPED_TRACE(wrong.check);
    Case given;
    wrong.before(given);
    at::Tensor donor = wrong.donor(given);
    TwoHandles hands(std::move(given.body), std::move(donor));
    wrong.hands(hands);
    const State body(hands.body());
    const State local(given.local);

    const Outcome outcome = apply(hands, given.local, given.request, "");

    EXPECT_EQ(outcome.end, End::kTakenBack);
    EXPECT_STREQ(outcome.check, wrong.check);
    EXPECT_TRUE(body == State(hands.body()));
    EXPECT_TRUE(local == State(given.local));
  }
}

TEST(Exchange, gradient_goes_with_the_body_on_request) {
  Case given;
  const at::Tensor grad = at::full({2, 3}, 5.0);
  materialize_autograd_meta(given.body.requires_grad_())->grad_ = grad;
  given.request.migrate_grad = true;
  given.local.requires_grad_();
  TwoHandles hands = hands_of(given);

  EXPECT_EQ(apply(hands, given.local, given.request, "").end, End::kDone);

  EXPECT_TRUE(hands.body().grad().is_same(grad));
  EXPECT_FALSE(given.local.grad().defined());
  (hands.body() * 2).sum().backward();
  EXPECT_EQ(hands.body().grad().sum().item<float>(), 6 * 7);
}

TEST(Exchange, done_twice_is_as_before) {
  Case given;
  TwoHandles hands = hands_of(given);
  const State body(hands.body());
  const State local(given.local);

  ASSERT_EQ(apply(hands, given.local, given.request, "").end, End::kDone);
  hands.exchange();

  EXPECT_TRUE(body == State(hands.body()));
  EXPECT_TRUE(local == State(given.local));
}

size_t allocated() {
#ifdef __SANITIZE_ADDRESS__
  return 0;  // leaks are found when the program ends
#else
  return mallinfo2().uordblks;
#endif
}

TEST(Exchange, ten_thousand_leave_nothing_behind_and_others_alone) {
  const at::Tensor other = at::ones({4, 3}).requires_grad_();
  const at::Tensor view = other.slice(0, 1, 3);
  const at::Tensor out = (view * other.slice(0, 0, 2)).exp();
  const WeakImpl weak(other.getIntrusivePtr());
  const WeakImpl weak_view(view.getIntrusivePtr());
  const std::vector<State> before{State(other), State(view), State(out)};
  const at::Tensor base = at::ones({4, 3});
  const at::Tensor local = base.slice(0, 1, 3).detach();
  const State of_local(local);
  const State of_base(base);
  const Names names = trips();
  size_t reached = 0;

  for (int round = 0; round < 10'000; ++round) {
    if (round == 1'000) reached = allocated();
    Case given;
    given.local = local;
    given.request = {round % 2 == 0, round % 3 == 0, round % 5 == 0};
    given.body.requires_grad_(round % 7 == 0);
    if (given.request.migrate_grad) materialize_autograd_meta(given.body)->grad_ = at::ones({2, 3});
    ASSERT_FALSE(plan_of(given).is_refused());
    TwoHandles hands = hands_of(given);
    std::string trip = round % 11 == 0 ? names[static_cast<size_t>(round) % names.size()] : "";
    if (trip == "hooks" && !given.request.migrate_hooks) trip.clear();
    const Outcome outcome = apply(hands, given.local, given.request, trip);
    ASSERT_EQ(outcome.end, trip.empty() ? End::kDone : End::kTakenBack) << outcome.check;
  }

  EXPECT_LE(allocated(), reached + 65'536);
  EXPECT_TRUE(of_local == State(local));
  EXPECT_TRUE(of_base == State(base));
  EXPECT_EQ(before, (std::vector<State>{State(other), State(view), State(out)}));
  out.sum().backward();
  EXPECT_TRUE(other.grad().defined());
}

}  // namespace
}  // namespace tensorplay::repair
