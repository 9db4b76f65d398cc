// Reading changes nothing: counts, versions, autograd's fields, copy-on-write and memory are as before, for
// every kind.
//
// The traces are taken through ATen's and c10's own accessors, never through the code under test.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "../../csrc/core/bytes.h"
#include "../../csrc/core/names.h"
#include "specimens.h"

namespace {
thread_local int64_t allocations = 0;
}

// Replaces the program's allocation functions, libtorch's included, to count what a read allocates.
void* operator new(size_t size) {
  ++allocations;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t size, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(size == 0 ? 1 : size);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}

namespace tensorplay {
namespace {

using Trace = std::map<std::string, uint64_t>;

uint64_t address(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

void trace_storage(const c10::Storage& handle, Trace& trace) {
  c10::StorageImpl& storage = *handle.unsafeGetStorageImpl();
  const at::DataPtr& data = storage._mutable_data_ptr_no_checks();
  trace["storage.use_count"] = handle.use_count();
  trace["storage.weak_use_count"] = handle.getWeakStorageImpl().weak_use_count();  // with its own
  trace["storage.has_materializer"] = storage.has_materializer();
  trace["data.pointer"] = address(data.get());
  trace["data.context"] = address(data.get_context());
  trace["data.deleter"] = reinterpret_cast<uint64_t>(data.get_deleter());
}

void trace_autograd(const at::Tensor& tensor, Trace& trace) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  trace["autograd"] = address(meta);
  if (meta == nullptr) return;
  trace["autograd.grad_fn"] = address(meta->grad_fn_.get());
  trace["autograd.grad_fn.use_count"] = meta->grad_fn_.use_count();
  trace["autograd.has_accumulator"] = !meta->grad_accumulator_.expired();
  trace["autograd.grad"] = address(meta->grad_.unsafeGetTensorImpl());
  trace["autograd.grad.use_count"] = meta->grad_.use_count();
  trace["autograd.fw_grad"] = address(meta->fw_grad_.get());
  if (!meta->is_view_) return;
  const auto& view = static_cast<const torch::autograd::DifferentiableViewMeta&>(*meta);
  if (!view.has_bw_view()) return;
  trace["view.attr_version"] = view.get_attr_version();
  trace["view.creation_meta"] = static_cast<uint64_t>(view.get_creation_meta());
  trace["view.base.use_count"] = view.get_backward_view().base_.use_count();
}

Trace trace_of(const at::Tensor& tensor) {
  c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  Trace trace;
  trace["use_count"] = tensor.use_count();
  trace["weak_use_count"] = tensor.weak_use_count();
  trace["keys"] = impl.key_set().raw_repr();
  trace["has_python_object"] = impl.pyobj_slot()->load_pyobj() != nullptr;
  if (!impl.is_inference()) trace["version"] = impl.version_counter().current_version();
  if (impl.unsafe_storage()) trace_storage(impl.unsafe_storage(), trace);
  trace_autograd(tensor, trace);
  return trace;
}

std::vector<Trace> traces_of(const Specimen& specimen) {
  std::vector<Trace> traces{trace_of(specimen.tensor)};
  for (const at::Tensor& companion : specimen.companions) traces.push_back(trace_of(companion));
  return traces;
}

// Everything that core/ can say of a tensor.
TensorFacts ask_everything(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  TensorFacts facts = read(tensor);
  for (const InnerTensor& inner : inner_tensors(*tensor.unsafeGetTensorImpl(), facts.kind)) {
    TensorFacts of_inner;
    read_tensor(*inner.tensor->unsafeGetTensorImpl(), of_inner);
  }
  grad_of(impl);
  impl_data(impl, facts);
  facts.needed_nbytes();
  facts.nbytes_of(distinct_cells(facts.shape(), facts.stride()));
  facts.data_address();
  node_name(facts.impl);
  key_names(facts.impl.keys);
  function_name(facts.data.deleter);
  const Fetch copy = [](const std::byte* from, std::byte* to, size_t count) { std::memcpy(to, from, count); };
  count_nonfinite(facts, copy);
  same_values(facts, facts, copy);
  return facts;
}

class Observer : public testing::TestWithParam<Recipe> {
 protected:
  Specimen specimen = GetParam().make();
};

INSTANTIATE_TEST_SUITE_P(Read, Observer, testing::ValuesIn(recipes().begin(), recipes().end()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(Observer, reading_leaves_no_trace) {
  const std::vector<Trace> before = traces_of(specimen);

  for (int i = 0; i < 3; ++i) ask_everything(specimen.tensor);

  EXPECT_EQ(traces_of(specimen), before);
}

TEST_P(Observer, inner_tensors_keep_their_counts) {
  const Kind kind = read(specimen.tensor).kind;
  std::vector<Trace> before;
  for (const InnerTensor& inner : inner_tensors(*specimen.tensor.unsafeGetTensorImpl(), kind)) {
    before.push_back(trace_of(at::Tensor(*inner.tensor)));
  }

  ask_everything(specimen.tensor);

  std::vector<Trace> after;
  for (const InnerTensor& inner : inner_tensors(*specimen.tensor.unsafeGetTensorImpl(), kind)) {
    after.push_back(trace_of(at::Tensor(*inner.tensor)));
  }
  EXPECT_EQ(after, before);
}

TEST_P(Observer, reading_runs_no_operator) {
  static thread_local int operators = 0;
  const auto count = [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
    ++operators;
    return nullptr;
  };
  const at::CallbackHandle handle = at::addThreadLocalCallback(at::RecordFunctionCallback(count));
  operators = 0;

  ask_everything(specimen.tensor);
  const int by_reading = operators;
  at::rand({1});
  const int by_an_operator = operators - by_reading;

  at::removeCallback(handle);
  EXPECT_EQ(by_reading, 0);
  EXPECT_GT(by_an_operator, 0) << "the callback counts nothing: the test shows nothing";
}

TEST_P(Observer, reading_allocates_only_for_mappings_and_expressions) {
  read(specimen.tensor);  // what is kept for all later reads is made by the first one
  TensorFacts facts;
  const int64_t before = allocations;

  read_tensor(*specimen.tensor.unsafeGetTensorImpl(), facts);

  // Memory of a maker unknown so far is looked at as a mapping before it is known to be none.
  const bool may_allocate = facts.symbolic || facts.impl.shape.size() > Dims::kNear ||
                            (facts.has_storage && (facts.data.origin == DataOrigin::kMapped ||
                                                   facts.data.origin == DataOrigin::kOther));
  if (!may_allocate) {
    EXPECT_EQ(allocations, before);
  }
  if (facts.symbolic || facts.data.shared_memory) {
    EXPECT_GT(allocations, before) << "the counter counts nothing: the test shows nothing";
  }
}

TEST(ObserverOfCopyOnWrite, lazy_clone_stays_lazy_until_it_is_written) {
  const at::Tensor source = at::rand({2, 3});
  const at::Tensor clone = at::_lazy_clone(source);

  ask_everything(clone);
  ask_everything(source);
  const bool still_shared = clone.const_data_ptr() == source.const_data_ptr();
  clone.add_(1);

  EXPECT_TRUE(still_shared);
  EXPECT_NE(clone.const_data_ptr(), source.const_data_ptr());
}

TEST(ObserverOfAutograd, leaf_gets_no_accumulator_until_a_graph_needs_one) {
  const at::Tensor leaf = at::rand({3}).requires_grad_();
  const auto* meta = torch::autograd::impl::get_autograd_meta(leaf);

  ask_everything(leaf);
  const bool after_reading = !meta->grad_accumulator_.expired();
  const at::Tensor result = leaf * 2;

  EXPECT_FALSE(after_reading);
  EXPECT_FALSE(meta->grad_accumulator_.expired());
}

TEST(ObserverOfAutograd, backward_after_reading_gives_the_same_gradient) {
  const auto gradient = [](bool read_between) {
    const at::Tensor leaf = at::ones({4}).requires_grad_();
    const at::Tensor base = leaf * 2;
    const at::Tensor view = base.slice(0, 1, 3);
    if (read_between) ask_everything(view);
    base.mul_(3);
    if (read_between) ask_everything(view);
    (view * view).sum().backward();
    return leaf.grad();
  };

  EXPECT_TRUE(at::equal(gradient(true), gradient(false)));
}

}  // namespace
}  // namespace tensorplay
