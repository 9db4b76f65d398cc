// Memory that is read by the kernel: what it copies, and what it says of a file that was cut under its map.
#include "../../csrc/device/own_memory.h"

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <vector>

namespace tensorplay {
namespace {

using Ways = OwnMemory::Ways;

const auto kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// A file without a name, mapped.
class MappedFile {
 public:
  explicit MappedFile(size_t nbytes) : nbytes_(nbytes) {
    std::string path = testing::TempDir() + "own_memory_XXXXXX";
    file_ = mkstemp(path.data());
    unlink(path.c_str());
    std::vector<unsigned char> content(nbytes);
    for (size_t i = 0; i < nbytes; ++i) content[i] = static_cast<unsigned char>(i * 7 + i / 251);
    EXPECT_EQ(write(file_, content.data(), nbytes), static_cast<ssize_t>(nbytes));
    map_ = mmap(nullptr, nbytes, PROT_READ, MAP_SHARED, file_, 0);
    EXPECT_NE(map_, MAP_FAILED);
  }
  ~MappedFile() {
    munmap(map_, nbytes_);
    close(file_);
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* begin() const { return static_cast<const std::byte*>(map_); }
  void cut(size_t nbytes) const { EXPECT_EQ(ftruncate(file_, static_cast<off_t>(nbytes)), 0); }

 private:
  size_t nbytes_;
  int file_ = -1;
  void* map_ = nullptr;
};

// 0, or the errno of what was thrown.
int error_of(OwnMemory& memory, const std::byte* from, size_t count, const char* reason) {
  std::vector<std::byte> to(count);
  try {
    memory.read(from, to.data(), count);
    return 0;
  } catch (const UnreadableMemory& error) {
    EXPECT_STREQ(error.what(), reason);
    return error.error();
  }
}

class OwnMemoryBy : public testing::TestWithParam<Ways> {
 protected:
  OwnMemory memory{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Read, OwnMemoryBy, testing::Values(Ways::kBoth, Ways::kCallOnly, Ways::kFileOnly));

TEST_P(OwnMemoryBy, bytes_are_copied) {
  const MappedFile file(3 * kPage + 5);
  for (const size_t count : {size_t{0}, size_t{1}, size_t{9}, kPage, 3 * kPage + 4}) {
    std::vector<std::byte> to(count);
    memory.read(file.begin() + 1, to.data(), count);
    EXPECT_TRUE(std::equal(to.begin(), to.end(), file.begin() + 1)) << count;
  }
}

TEST_P(OwnMemoryBy, what_lies_behind_the_end_of_a_cut_file_is_an_error) {
  const char* const reason = "the file mapped behind it was cut";
  const MappedFile file(8 * kPage);
  file.cut(3 * kPage);

  EXPECT_EQ(error_of(memory, file.begin(), 3 * kPage, reason), 0);
  for (const size_t begin : {size_t{0}, 2 * kPage, 3 * kPage - 1, 3 * kPage, 7 * kPage}) {
    const int error = error_of(memory, file.begin() + begin, 8 * kPage - begin, reason);
    EXPECT_TRUE(error == EFAULT || error == EIO) << begin << ": " << error;
  }
  EXPECT_EQ(error_of(memory, file.begin() + kPage, kPage, reason), 0) << "an error stays";
}

TEST_P(OwnMemoryBy, memory_that_was_given_back_is_an_error) {
  void* gone = mmap(nullptr, kPage, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  munmap(gone, kPage);

  const auto* from = static_cast<const std::byte*>(gone);
  EXPECT_NE(error_of(memory, from, 8, "the file mapped behind it was cut"), 0);
}

// As containers do: these calls answer EPERM from now on, to this process.
bool forbid(std::initializer_list<uint32_t> calls) {
  std::vector<sock_filter> program{BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (const uint32_t call : calls) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

// Ends the process with 0 where all is as it should be.
[[noreturn]] void read_where_forbidden(const MappedFile& file, std::initializer_list<uint32_t> calls,
                                       int expected, const char* reason) {
  if (!forbid(calls)) _exit(1);
  OwnMemory memory;
  if (error_of(memory, file.begin(), kPage, reason) != expected) _exit(2);
  if (error_of(memory, file.begin(), kPage, reason) != expected) _exit(3);
  _exit(testing::Test::HasFailure() ? 4 : 0);
}

TEST(OwnMemoryDeathTest, the_file_is_read_where_the_call_is_forbidden) {
  const MappedFile file(2 * kPage);

  EXPECT_EXIT(read_where_forbidden(file, {SYS_process_vm_readv}, 0, ""), testing::ExitedWithCode(0), "");
  file.cut(0);
  EXPECT_EXIT(read_where_forbidden(file, {SYS_process_vm_readv}, EIO, "the file mapped behind it was cut"),
              testing::ExitedWithCode(0), "");
  EXPECT_EXIT(read_where_forbidden(file, {SYS_openat}, EFAULT, "the file mapped behind it was cut"),
              testing::ExitedWithCode(0), "");
}

TEST(OwnMemoryDeathTest, no_way_that_is_open_is_an_error_of_its_own) {
  const MappedFile file(kPage);

  EXPECT_EXIT(
      read_where_forbidden(file, {SYS_process_vm_readv, SYS_openat}, EPERM,
                           "neither process_vm_readv() nor /proc/self/mem reads this process's memory"),
      testing::ExitedWithCode(0), "");
}

TEST(OwnMemory, files_are_closed) {
  const MappedFile file(kPage);
  std::byte to{};
  const int before = dup(0);
  close(before);

  for (int i = 0; i < 3; ++i) OwnMemory(Ways::kFileOnly).read(file.begin(), &to, 1);

  const int after = dup(0);
  close(after);
  EXPECT_EQ(after, before);
}

}  // namespace
}  // namespace tensorplay
