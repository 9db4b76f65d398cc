// Groups by storage against a map that takes one tensor after the other.
#include "../../csrc/core/groups.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <random>

#include "../../csrc/compat.h"
#include "specimens.h"

namespace tensorplay {
namespace {

using Impls = std::vector<const c10::TensorImpl*>;

Impls impls_of(const std::vector<at::Tensor>& tensors) {
  Impls impls;
  for (const at::Tensor& tensor : tensors) impls.push_back(tensor.unsafeGetTensorImpl());
  return impls;
}

StorageGroups one_by_one(const Impls& impls) {
  StorageGroups groups;
  std::map<const c10::StorageImpl*, uint32_t> known;
  for (const c10::TensorImpl* impl : impls) {
    const c10::StorageImpl* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    const auto next = static_cast<uint32_t>(groups.storages.size());
    const auto [found, fresh] = known.emplace(storage, next);
    const bool alone = storage == nullptr;
    if (fresh || alone) groups.storages.push_back(storage);
    groups.group_ids.push_back(alone ? next : found->second);
  }
  return groups;
}

void expect_equal(const StorageGroups& groups, const StorageGroups& expected) {
  EXPECT_EQ(groups.group_ids, expected.group_ids);
  EXPECT_EQ(groups.storages, expected.storages);
}

TEST(Groups, nothing_is_no_group) {
  expect_equal(group_by_storage({}), {});
}

TEST(Groups, views_are_with_their_base_and_numbered_by_first_appearance) {
  const at::Tensor a = at::ones({4});
  const at::Tensor b = at::ones({4});

  const StorageGroups groups = group_by_storage(impls_of({b, a.slice(0, 1), b.view({2, 2}), a, b}));

  EXPECT_EQ(groups.group_ids, (std::vector<uint32_t>{0, 1, 0, 1, 0}));
  EXPECT_EQ(groups.storages, (std::vector<const c10::StorageImpl*>{b.storage().unsafeGetStorageImpl(),
                                                                   a.storage().unsafeGetStorageImpl()}));
}

TEST(Groups, tensors_without_a_storage_are_each_alone) {
  const at::Tensor sparse = at::ones({2}).to_sparse();
  const at::Tensor plain = at::ones({2});

  const StorageGroups groups = group_by_storage(impls_of({sparse, plain, sparse, plain}));

  EXPECT_EQ(groups.group_ids, (std::vector<uint32_t>{0, 1, 2, 1}));
  EXPECT_EQ(groups.storages,
            (std::vector<const c10::StorageImpl*>{nullptr, plain.storage().unsafeGetStorageImpl(), nullptr}));
}

TEST(Groups, every_kind_of_tensor_is_grouped_and_gains_no_owner) {
  std::vector<Specimen> specimens;
  std::vector<at::Tensor> tensors;
  for (const Recipe& recipe : recipes()) {
    specimens.push_back(recipe.make());
    tensors.push_back(specimens.back().tensor);
    for (const at::Tensor& companion : specimens.back().companions) tensors.push_back(companion);
  }
  const Impls impls = impls_of(tensors);
  std::vector<std::pair<uint32_t, size_t>> counts;
  const auto count = [](const c10::TensorImpl* impl) {
    return std::pair(compat::ref_counts(*impl).strong, impl->unsafe_storage().use_count());
  };
  for (const c10::TensorImpl* impl : impls) counts.push_back(count(impl));

  expect_equal(group_by_storage(impls), one_by_one(impls));

  for (size_t i = 0; i < impls.size(); ++i) EXPECT_EQ(count(impls[i]), counts[i]);
}

// Lengths around the distance at which tensors are asked for ahead, and a table of several pages.
TEST(Groups, any_number_of_tensors_in_any_order) {
  std::mt19937 random(0);
  for (const size_t number : {1, 2, 3, 31, 32, 33, 63, 64, 65, 97, 1000, 300000}) {
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < number; ++i) {
      const bool view = i > 0 && random() % 3 == 0;
      tensors.push_back(view ? tensors[random() % i].slice(0, 1) : at::empty({2}));
    }
    std::shuffle(tensors.begin(), tensors.end(), random);
    const Impls impls = impls_of(tensors);

    expect_equal(group_by_storage(impls), one_by_one(impls));
  }
}

TEST(Groups, tensors_may_come_in_parts) {
  std::mt19937 random(0);
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < 500; ++i) {
    tensors.push_back(i % 3 == 1 ? tensors[random() % i].slice(0, 1) : at::empty({2}));
  }
  const Impls impls = impls_of(tensors);
  StorageGroups groups;
  groups.group_ids.resize(impls.size());
  groups.storages.resize(impls.size());

  StorageGrouper grouper(impls.size(), groups.group_ids.data(), groups.storages.data());
  for (size_t begin = 0, length = 0; begin < impls.size(); begin += length) {
    length = std::min(impls.size() - begin, static_cast<size_t>(random() % 70));
    grouper.add(std::span(impls).subspan(begin, length));
  }
  groups.storages.resize(grouper.finish());

  expect_equal(groups, one_by_one(impls));
}

// A tensor over a storage that is said to lie at `address`; only the pointer is ever looked at.
struct Pretended {
  explicit Pretended(uintptr_t address) : tensor(at::empty({2})), kept(exchange(address)) {}
  ~Pretended() { exchange(kept); }
  Pretended(const Pretended&) = delete;

  uintptr_t exchange(uintptr_t address) const {
    void* field = const_cast<c10::Storage*>(&tensor.unsafeGetTensorImpl()->unsafe_storage());
    uintptr_t before = 0;
    std::memcpy(&before, field, sizeof(before));
    std::memcpy(field, &address, sizeof(address));
    return before;
  }

  at::Tensor tensor;
  uintptr_t kept;
};

// See [Half an address is enough]: 64 GiB apart, their halves are the same.
TEST(Groups, storages_of_several_regions_are_told_apart) {
  static_assert(sizeof(c10::Storage) == sizeof(uintptr_t));
  constexpr uintptr_t kRegion = uintptr_t{1} << 36;
  std::vector<std::unique_ptr<Pretended>> pretended;
  Impls impls;
  for (const uintptr_t region : {5, 5, 6, 7, 5, 6, 7, 6}) {
    for (const uintptr_t unit : {1, 2, 3}) {
      pretended.push_back(std::make_unique<Pretended>(region * kRegion + unit * 16));
      impls.push_back(pretended.back()->tensor.unsafeGetTensorImpl());
    }
  }

  const StorageGroups groups = group_by_storage(impls);

  expect_equal(groups, one_by_one(impls));
  EXPECT_EQ(groups.storages.size(), 9U);
}

}  // namespace
}  // namespace tensorplay
