// What does one native read of a tensor cost, without Python?
//
// Times read_tensor() into one record that is used again and again, counts the allocations it makes, and, for
// callgrind, runs it a given number of times. Links csrc/core and libtorch; no interpreter.
//
//   native_read                     medians
//   native_read --samples ROUNDS    "name<TAB>ns" a line, one line a round and case, in turn
//   native_read --count             "name<TAB>operator new<TAB>malloc", over 100 000 reads
//   native_read --reads N NAME      N reads of one tensor and nothing else, to count instructions
#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "../csrc/core/read.h"

namespace {

std::atomic<int64_t> new_calls{0};
std::atomic<int64_t> malloc_calls{0};

}  // namespace

// Both are counted: c10::SmallVector grows by malloc, everything else by operator new. libtorch and c10 are
// bound to these definitions too, since an executable's come first where they are visible.
#pragma GCC visibility push(default)
extern "C" {
void* __libc_malloc(size_t);            // NOLINT
void* __libc_calloc(size_t, size_t);    // NOLINT
void* __libc_realloc(void*, size_t);    // NOLINT
void* __libc_memalign(size_t, size_t);  // NOLINT

void* malloc(size_t size) {
  malloc_calls.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  malloc_calls.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, size);
}
void* realloc(void* old, size_t size) {
  malloc_calls.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(old, size);
}
int posix_memalign(void** out, size_t alignment, size_t size) {
  malloc_calls.fetch_add(1, std::memory_order_relaxed);
  *out = __libc_memalign(alignment, size);
  return *out == nullptr ? 12 : 0;  // ENOMEM
}
}

void* operator new(size_t size) {
  new_calls.fetch_add(1, std::memory_order_relaxed);
  if (void* block = __libc_malloc(size == 0 ? 1 : size)) return block;
  throw std::bad_alloc();
}
void operator delete(void* block) noexcept {
  std::free(block);
}
void operator delete(void* block, size_t) noexcept {
  std::free(block);
}
#pragma GCC visibility pop

namespace {

using tensorplay::TensorFacts;

constexpr int64_t kReadsPerSample = 100'000;
constexpr int64_t kCountedReads = 100'000;
constexpr int kRounds = 41;
constexpr size_t kManyTensors = 1024;

// What the compiler must take to be read and changed by someone else.
template <class T>
void hide(T* pointer) {
  asm volatile("" : : "r"(pointer) : "memory");
}

int64_t thread_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{1'000'000'000} * now.tv_sec + now.tv_nsec;
}

struct Case {
  std::string name;
  std::vector<at::Tensor> tensors;  // read in turn; none for the empty loop
};

std::vector<Case> make_cases() {
  const at::Tensor plain = at::randn({64, 64});
  const at::Tensor parameter = at::randn({64, 64}).set_requires_grad(true);
  const auto view_of = [](const at::Tensor& base) {
    return base.slice(0, 3, 9).unsqueeze(0).transpose(1, 2);
  };
  std::vector<at::Tensor> many;
  for (size_t i = 0; i < kManyTensors; ++i) many.push_back(at::randn({8, 8}).set_requires_grad(true));
  return {
      {"empty loop", {}},         {"plain", {plain}},
      {"view", {view_of(plain)}}, {"grad view", {view_of(parameter * 2)}},
      {"parameter", {parameter}}, {"1024 parameters in turn", many},
  };
}

// One record for all reads, as a caller in a loop would keep it.
void read_many(const Case& which, int64_t reads, TensorFacts& facts) {
  if (which.tensors.empty()) {
    for (int64_t i = 0; i < reads; ++i) hide(&facts);
    return;
  }
  const at::Tensor* const tensors = which.tensors.data();
  const size_t last = which.tensors.size() - 1;
  if (last == 0) {
    const c10::TensorImpl* const impl = tensors->unsafeGetTensorImpl();
    for (int64_t i = 0; i < reads; ++i) {
      tensorplay::read_tensor(*impl, facts);
      hide(&facts);
    }
    return;
  }
  size_t next = 0;
  for (int64_t i = 0; i < reads; ++i) {
    tensorplay::read_tensor(*tensors[next].unsafeGetTensorImpl(), facts);
    hide(&facts);
    next = next == last ? 0 : next + 1;
  }
}

double sample(const Case& which, TensorFacts& facts) {
  const int64_t begin = thread_ns();
  read_many(which, kReadsPerSample, facts);
  return static_cast<double>(thread_ns() - begin) / static_cast<double>(kReadsPerSample);
}

void print_samples(const std::vector<Case>& cases, int rounds) {
  TensorFacts facts;
  for (const Case& which : cases) sample(which, facts);  // warm
  for (int round = 0; round < rounds; ++round) {
    for (const Case& which : cases) std::printf("%s\t%.4f\n", which.name.c_str(), sample(which, facts));
  }
}

void print_medians(const std::vector<Case>& cases) {
  TensorFacts facts;
  std::vector<std::vector<double>> spent(cases.size());
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < cases.size(); ++i) spent[i].push_back(sample(cases[i], facts));
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    std::sort(spent[i].begin(), spent[i].end());
    std::printf("%-26s%6.2f ns a read, %.2f to %.2f\n", cases[i].name.c_str(), spent[i][kRounds / 2],
                spent[i].front(), spent[i].back());
  }
}

void print_allocations(const std::vector<Case>& cases) {
  // Zero proves something only if libtorch's own allocations are seen: a tensor takes one of each kind.
  const int64_t news_before = new_calls;
  const int64_t mallocs_before = malloc_calls;
  const at::Tensor made = at::empty({2});
  if (new_calls == news_before || malloc_calls == mallocs_before) {
    std::fputs("native_read: allocations are not being counted\n", stderr);
    std::exit(1);
  }
  for (const Case& which : cases) {
    TensorFacts facts;
    read_many(which, static_cast<int64_t>(which.tensors.size()), facts);  // a first read may set up statics
    const int64_t news = new_calls;
    const int64_t mallocs = malloc_calls;
    read_many(which, kCountedReads, facts);
    std::printf("%s\t%lld\t%lld\n", which.name.c_str(), static_cast<long long>(new_calls - news),
                static_cast<long long>(malloc_calls - mallocs));
  }
}

int print_usage() {
  std::fputs("usage: native_read [--samples ROUNDS | --count | --reads N NAME]\n", stderr);
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string_view> args(argv + 1, argv + argc);
  const std::vector<Case> cases = make_cases();
  if (args.empty()) {
    print_medians(cases);
  } else if (args[0] == "--samples" && args.size() == 2) {
    print_samples(cases, std::atoi(argv[2]));
  } else if (args[0] == "--count" && args.size() == 1) {
    print_allocations(cases);
  } else if (args[0] == "--reads" && args.size() == 3) {
    const auto found =
        std::find_if(cases.begin(), cases.end(), [&](const Case& c) { return c.name == args[2]; });
    if (found == cases.end()) return print_usage();
    TensorFacts facts;
    read_many(*found, std::atoll(argv[2]), facts);
  } else {
    return print_usage();
  }
  return 0;
}
