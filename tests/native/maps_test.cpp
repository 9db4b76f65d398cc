// The memory map: what the kernel writes, and odd lines.
#include "../../csrc/device/maps.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tensorplay {
namespace {

constexpr std::string_view kText =
    "55d0a0000000-55d0a0021000 rw-p 00000000 00:00 0                          [heap]\n"
    "7f0000000000-7f0000001000 r--s 00000000 08:01 42                         /tmp/with blanks (deleted)\n"
    "7f0000001000-7f0000003000 ---p 00000000 00:00 0 \n"
    "not a line\n"
    "7f0000004000-7f0000005000 r-xp 00001000 08:01 7                          /usr/lib/libc.so.6";

TEST(Maps, lines_are_read_whole) {
  const std::vector<Mapping> maps = parse_maps(kText);

  ASSERT_EQ(maps.size(), 4U);
  EXPECT_EQ(maps[0].begin, 0x55d0a0000000U);
  EXPECT_EQ(maps[0].end, 0x55d0a0021000U);
  EXPECT_EQ(maps[0].permissions, "rw-p");
  EXPECT_EQ(maps[0].path, "[heap]");
  EXPECT_EQ(maps[1].path, "/tmp/with blanks (deleted)");
  EXPECT_EQ(maps[2].path, "");
  EXPECT_EQ(maps[3].permissions, "r-xp");
  EXPECT_EQ(maps[0].file, "");
  EXPECT_EQ(maps[1].file, "08:01 42");
  EXPECT_EQ(maps[1].offset, 0U);
  EXPECT_EQ(maps[3].offset, 0x1000U);
}

TEST(Maps, odd_text_is_passed_over) {
  for (const std::string_view text :
       {"", "\n", "-", "7f-", "7f-80", "7f-80 ", "7f-80 rw", "zz-yy rw-p", "7f 80 rw-p"}) {
    EXPECT_TRUE(parse_maps(text).empty()) << text;
  }
}

TEST(Maps, ranges_find_every_mapping_they_touch) {
  const std::vector<Mapping> maps = parse_maps(kText);
  const auto touched = [&](uintptr_t begin, uintptr_t end) {
    std::vector<uintptr_t> begins;
    for (const Mapping* mapping : overlapping(maps, begin, end)) begins.push_back(mapping->begin);
    return begins;
  };

  EXPECT_EQ(touched(0x7f0000000000, 0x7f0000000001), std::vector<uintptr_t>{0x7f0000000000});
  EXPECT_EQ(touched(0x7f0000000fff, 0x7f0000001001),
            (std::vector<uintptr_t>{0x7f0000000000, 0x7f0000001000}));
  EXPECT_TRUE(touched(0x7f0000003000, 0x7f0000004000).empty());
  EXPECT_TRUE(touched(0, 8).empty());
  EXPECT_TRUE(touched(UINTPTR_MAX - 8, UINTPTR_MAX).empty());
}

TEST(Maps, own_map_knows_a_page_and_its_permissions) {
  void* page = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  const auto address = reinterpret_cast<uintptr_t>(page);

  const std::vector<Mapping> before = read_own_maps();
  const auto found = overlapping(before, address, address + 1);
  munmap(page, 4096);

  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0]->permissions, "r--p");
  EXPECT_TRUE(overlapping(read_own_maps(), address, address + 1).empty());
}

}  // namespace
}  // namespace tensorplay
