#include "maps.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <stdexcept>

namespace tensorplay {
namespace {

// Takes one hexadecimal number and the character after it off the front.
bool take_number(std::string_view& line, char after, uintptr_t& out) {
  const auto [stop, error] = std::from_chars(line.data(), line.data() + line.size(), out, 16);
  const auto length = static_cast<size_t>(stop - line.data());
  if (error != std::errc() || length >= line.size() || line[length] != after) return false;
  line.remove_prefix(length + 1);
  return true;
}

std::string_view take_word(std::string_view& line) {
  const size_t length = std::min(line.find(' '), line.size());
  const std::string_view word = line.substr(0, length);
  line.remove_prefix(std::min(line.find_first_not_of(' ', length), line.size()));
  return word;
}

std::string read_whole(const char* path) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) throw std::runtime_error(std::string(path) + ": " + std::strerror(errno));
  std::string text;
  std::array<char, 1 << 16> buffer;
  ssize_t count = 0;
  while ((count = ::read(file, buffer.data(), buffer.size())) != 0) {
    if (count > 0) {
      text.append(buffer.data(), static_cast<size_t>(count));
    } else if (errno != EINTR) {
      const std::string why = std::strerror(errno);
      close(file);
      throw std::runtime_error(std::string(path) + ": " + why);
    }
  }
  close(file);
  return text;
}

}  // namespace

std::vector<Mapping> parse_maps(std::string_view text) {
  std::vector<Mapping> maps;
  while (!text.empty()) {
    const size_t length = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, length);
    text.remove_prefix(std::min(length + 1, text.size()));
    Mapping mapping;
    if (!take_number(line, '-', mapping.begin) || !take_number(line, ' ', mapping.end)) continue;
    mapping.permissions = take_word(line);
    if (mapping.permissions.size() != 4 || !take_number(line, ' ', mapping.offset)) continue;
    const std::string_view device = take_word(line);
    const std::string_view inode = take_word(line);
    if (inode != "0") mapping.file.append(device).append(" ").append(inode);
    mapping.path = line;  // what is left: a path may hold blanks
    maps.push_back(std::move(mapping));
  }
  return maps;
}

std::vector<Mapping> read_own_maps() {
  return parse_maps(read_whole("/proc/self/maps"));
}

std::vector<const Mapping*> overlapping(const std::vector<Mapping>& maps, uintptr_t begin, uintptr_t end) {
  std::vector<const Mapping*> found;
  auto it = std::partition_point(maps.begin(), maps.end(), [&](const Mapping& m) { return m.end <= begin; });
  for (; it != maps.end() && it->begin < end; ++it) found.push_back(&*it);
  return found;
}

}  // namespace tensorplay
