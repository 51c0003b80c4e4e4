// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/os/directory.h"

namespace shardwright::os {

/// A directory that lives as long as a test.
class Scratch : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (Parent() / "sw-os-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = std::filesystem::canonical(name).string();
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  /// Returns the folder in which the directory is made.
  virtual std::filesystem::path Parent() const { return std::filesystem::temp_directory_path(); }

  std::string At(const std::string& name) const { return root_ + "/" + name; }

  Directory Here() const { return *Directory::Open(root_); }

  void Put(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(At(name)).parent_path());
    std::ofstream(At(name), std::ios::binary) << text;
  }

  std::string Get(const std::string& name) const {
    std::ifstream in(At(name), std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return in ? text.str() : "<absent>";
  }

  /// Relative path -> content of all below a directory; "/" marks directories.
  std::map<std::string, std::string> Contents(const std::string& name = "") const {
    const std::filesystem::path base = name.empty() ? root_ : At(name);
    std::map<std::string, std::string> all;
    if (!std::filesystem::exists(base)) return all;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(base)) {
      const std::string path = entry.path().lexically_relative(root_).string();
      all[path] = entry.is_symlink() ? "link" : entry.is_directory() ? "/" : Get(path);
    }
    return all;
  }

  std::string root_;
};

inline std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

inline std::string AsText(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// Runs `body` in a child process and returns its wait status.
inline int InChild(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

}  // namespace shardwright::os
