// The words for what a record holds, and the tensors inside a tensor, against PyTorch's own words and
// accessors.
#include "../../csrc/core/names.h"

#include <ATen/ATen.h>
#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/COWDeleter.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>

#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "specimens.h"

namespace tensorplay {
namespace {

std::string_view name_of(c10::ScalarType type) {
  return dtype_name(c10::scalarTypeToTypeMeta(type));
}

TEST(DtypeName, common_types_are_named_as_in_python) {
  EXPECT_EQ(name_of(at::kByte), "uint8");
  EXPECT_EQ(name_of(at::kChar), "int8");
  EXPECT_EQ(name_of(at::kShort), "int16");
  EXPECT_EQ(name_of(at::kInt), "int32");
  EXPECT_EQ(name_of(at::kLong), "int64");
  EXPECT_EQ(name_of(at::kUInt16), "uint16");
  EXPECT_EQ(name_of(at::kUInt64), "uint64");
  EXPECT_EQ(name_of(at::kHalf), "float16");
  EXPECT_EQ(name_of(at::kBFloat16), "bfloat16");
  EXPECT_EQ(name_of(at::kFloat), "float32");
  EXPECT_EQ(name_of(at::kDouble), "float64");
  EXPECT_EQ(name_of(at::kComplexHalf), "complex32");
  EXPECT_EQ(name_of(at::kComplexFloat), "complex64");
  EXPECT_EQ(name_of(at::kComplexDouble), "complex128");
  EXPECT_EQ(name_of(at::kBool), "bool");
  EXPECT_EQ(name_of(at::kQInt8), "qint8");
  EXPECT_EQ(name_of(at::kQUInt8), "quint8");
  EXPECT_EQ(name_of(at::kQInt32), "qint32");
  EXPECT_EQ(name_of(at::kFloat8_e5m2), "float8_e5m2");
  EXPECT_EQ(name_of(at::kFloat8_e4m3fn), "float8_e4m3fn");
}

TEST(DtypeName, every_scalar_type_has_a_name_of_its_own) {
  std::set<std::string_view> names;
  const auto count = static_cast<int8_t>(c10::ScalarType::Undefined);

  for (int8_t type = 0; type < count; ++type) names.insert(name_of(static_cast<c10::ScalarType>(type)));

  EXPECT_EQ(names.size(), static_cast<size_t>(count));
  EXPECT_FALSE(names.contains(""));
}

TEST(DtypeName, undefined_type_is_named_not_thrown) {
  EXPECT_NO_THROW(EXPECT_FALSE(dtype_name(caffe2::TypeMeta()).empty()));
}

TEST(DeviceName, index_is_told_only_where_there_is_one) {
  EXPECT_EQ(device_name(c10::Device(c10::kCPU)), "cpu");
  EXPECT_EQ(device_name(c10::Device(c10::kCUDA, 3)), "cuda:3");
  EXPECT_EQ(device_name(c10::Device(c10::kCUDA, 0)), c10::Device(c10::kCUDA, 0).str());
  EXPECT_EQ(device_name(c10::Device(c10::kMeta)), c10::Device(c10::kMeta).str());
  EXPECT_EQ(device_type_name(c10::kMeta), "meta");
}

TEST(LayoutName, every_layout_is_named_as_in_python) {
  // c10 prints the names of the enumerators: Strided, SparseCsr, ...
  EXPECT_EQ(layout_name(c10::kStrided), "strided");
  EXPECT_EQ(layout_name(c10::kSparse), "sparse_coo");
  EXPECT_EQ(layout_name(c10::kSparseCsr), "sparse_csr");
  EXPECT_EQ(layout_name(c10::kSparseCsc), "sparse_csc");
  EXPECT_EQ(layout_name(c10::kSparseBsr), "sparse_bsr");
  EXPECT_EQ(layout_name(c10::kSparseBsc), "sparse_bsc");
  EXPECT_EQ(layout_name(c10::kMkldnn), "_mkldnn");
  EXPECT_EQ(layout_name(c10::kJagged), "jagged");
}

TEST(KeyNames, every_single_key_is_named_as_c10_does) {
  for (int key = 1; key <= static_cast<int>(c10::DispatchKey::EndOfFunctionalityKeys) - 1; ++key) {
    const auto functionality = static_cast<c10::DispatchKey>(key);
    if (c10::isPerBackendFunctionalityKey(functionality)) continue;  // no key without a backend
    const std::vector<std::string> names = key_names(c10::DispatchKeySet(functionality));
    EXPECT_EQ(names, std::vector<std::string>{c10::toString(functionality)});
  }
}

TEST(KeyNames, runtime_keys_join_functionality_and_backend) {
  const at::Tensor sparse = at::eye(3).to_sparse();

  std::vector<std::string> expected;
  for (const c10::DispatchKey key : sparse.key_set()) expected.emplace_back(c10::toString(key));

  EXPECT_EQ(key_names(sparse.key_set()), expected);
  EXPECT_EQ(key_names(c10::DispatchKeySet(c10::DispatchKey::SparseCPU)),
            std::vector<std::string>{"SparseCPU"});
  EXPECT_EQ(key_names(c10::DispatchKeySet()), std::vector<std::string>{});
}

TEST(TypeName, template_and_namespace_are_spelled_out) {
  EXPECT_EQ(type_name(typeid(c10::TensorImpl)), "c10::TensorImpl");
  EXPECT_EQ(type_name(typeid(*at::eye(2).to_sparse().unsafeGetTensorImpl())), "at::SparseTensorImpl");
}

TEST(NodeName, is_the_class_as_python_names_it) {
  const at::Tensor leaf = at::rand({3}).requires_grad_();

  EXPECT_EQ(node_name(read(leaf).impl), "");
  EXPECT_EQ(node_name(read(leaf + leaf).impl), (leaf + leaf).grad_fn()->name());
  EXPECT_EQ(node_name(read(leaf + leaf).impl), "AddBackward0");
}

TEST(FunctionName, exported_function_has_its_symbol) {
  const auto* function = reinterpret_cast<const void*>(&c10::impl::cow::cow_deleter);

  EXPECT_EQ(function_name(function), "c10::impl::cow::cow_deleter(void*)");
}

void hidden_function() {}

TEST(FunctionName, hidden_function_is_placed_in_its_library) {
  const std::string name = function_name(reinterpret_cast<const void*>(&hidden_function));

  EXPECT_NE(name.find("+0x"), std::string::npos) << name;
  EXPECT_EQ(name.find('/'), std::string::npos) << name;
}

TEST(FunctionName, unknown_address_is_printed_and_null_is_empty) {
  const int on_the_stack = 0;

  EXPECT_EQ(function_name(nullptr), "");
  EXPECT_EQ(function_name(&on_the_stack).rfind("0x", 0), 0);
}

// Callables named after the functions of PyTorch that make them.
namespace made {
auto tensor_from_numpy() {
  return [](void*) {};
}
auto tensor_frombuffer() {
  return [](void*) {};
}
auto by_the_user() {
  return [](void*) {};
}
}  // namespace made

TEST(MakerName, pytorchs_own_makers_are_recognised) {
  EXPECT_EQ(maker_name(typeid(made::tensor_from_numpy())), "numpy");
  EXPECT_EQ(maker_name(typeid(made::tensor_frombuffer())), "frombuffer");
}

TEST(MakerName, dlpack_is_recognised_in_a_real_import) {
  const TensorFacts facts = read(make("from_dlpack").tensor);

  ASSERT_NE(facts.data.maker, nullptr);
  EXPECT_EQ(maker_name(*facts.data.maker), "dlpack");
}

TEST(MakerName, any_other_callable_is_named_by_its_type) {
  EXPECT_NE(maker_name(typeid(made::by_the_user())).find("by_the_user"), std::string::npos);
  EXPECT_EQ(maker_name(typeid(void (*)(void*))), "void (*)(void*)");
}

TEST(AllocatorDeviceType, registered_allocator_is_found_and_others_are_not) {
  const int not_an_allocator = 0;

  EXPECT_EQ(allocator_device_type(c10::GetDefaultCPUAllocator()), c10::DeviceType::CPU);
  EXPECT_EQ(allocator_device_type(nullptr), std::nullopt);
  EXPECT_EQ(allocator_device_type(&not_an_allocator), std::nullopt);
  EXPECT_EQ(allocator_device_type(&not_an_allocator), std::nullopt);
  EXPECT_EQ(allocator_device_type(c10::GetDefaultCPUAllocator()), c10::DeviceType::CPU);
}

// No value of an enumeration may fall through to "unknown"; a value added without a word shows here.
template <class Value, class Name>
void expect_names(int count, Name name) {
  std::set<std::string_view> names;
  for (int i = 0; i < count; ++i) names.insert(name(static_cast<Value>(i)));
  EXPECT_EQ(names.size(), static_cast<size_t>(count));
  EXPECT_FALSE(names.contains("unknown"));
}

TEST(EnumNames, every_value_has_a_word_of_its_own) {
  expect_names<Kind>(static_cast<int>(Kind::kQuantized) + 1, kind_name);
  expect_names<MemoryFormat>(static_cast<int>(MemoryFormat::kStrided) + 1, memory_format_name);
  expect_names<DataOrigin>(static_cast<int>(DataOrigin::kOther) + 1, origin_name);
  expect_names<Absence>(static_cast<int>(Absence::kNoBackend) + 1, absence_reason);
  expect_names<uint8_t>(5, creation_meta_name);
  EXPECT_EQ(creation_meta_name(5), "unknown");
}

// ---- Tensors inside tensors ----

using Inner = std::vector<std::pair<std::string, const void*>>;

Inner inner_of(const at::Tensor& tensor) {
  Inner found;
  for (const InnerTensor& inner : inner_tensors(*tensor.unsafeGetTensorImpl(), read(tensor).kind)) {
    found.emplace_back(inner.role, inner.tensor->unsafeGetTensorImpl());
  }
  return found;
}

TEST(InnerTensors, sparse_coo_has_indices_and_values) {
  const at::Tensor sparse = at::eye(3).to_sparse();
  const auto& impl = static_cast<const at::SparseTensorImpl&>(*sparse.unsafeGetTensorImpl());

  EXPECT_EQ(inner_of(sparse), (Inner{{"indices", impl.indices().unsafeGetTensorImpl()},
                                     {"values", impl.values().unsafeGetTensorImpl()}}));
}

TEST(InnerTensors, compressed_sparse_has_two_indices_and_values) {
  for (const char* name : {"sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"}) {
    const at::Tensor sparse = make(name).tensor;
    const auto& impl = static_cast<const at::SparseCsrTensorImpl&>(*sparse.unsafeGetTensorImpl());

    EXPECT_EQ(inner_of(sparse),
              (Inner{{"compressed_indices", impl.compressed_indices().unsafeGetTensorImpl()},
                     {"plain_indices", impl.plain_indices().unsafeGetTensorImpl()},
                     {"values", impl.values().unsafeGetTensorImpl()}}));
  }
}

TEST(InnerTensors, wrappers_have_the_value_they_wrap) {
  const Specimen batched = make("batched");
  const Specimen wrapper = make("functorch_wrapper");
  const at::Tensor functional = make("functional").tensor;

  EXPECT_EQ(inner_of(batched.tensor), (Inner{{"value", batched.companions[0].unsafeGetTensorImpl()}}));
  EXPECT_EQ(inner_of(wrapper.tensor), (Inner{{"value", wrapper.companions[0].unsafeGetTensorImpl()}}));
  EXPECT_EQ(inner_of(functional),
            (Inner{{"value", at::functionalization::impl::unsafeGetFunctionalWrapper(functional)
                                 ->value()
                                 .unsafeGetTensorImpl()}}));
}

TEST(InnerTensors, nested_has_its_sizes) {
  const at::Tensor nested = make("nested").tensor;
  const auto& impl = static_cast<const at::native::NestedTensorImpl&>(*nested.unsafeGetTensorImpl());

  EXPECT_EQ(inner_of(nested), (Inner{{"sizes", impl.get_nested_sizes().unsafeGetTensorImpl()}}));
}

TEST(InnerTensors, only_the_kinds_that_are_said_to_have_any_have_some) {
  for (const Recipe& recipe : recipes()) {
    const Specimen specimen = recipe.make();
    EXPECT_EQ(!inner_tensors(*specimen.tensor.unsafeGetTensorImpl(), recipe.kind).empty(),
              has_inner(recipe.kind))
        << recipe;
  }
}

}  // namespace
}  // namespace tensorplay
