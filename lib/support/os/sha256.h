// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "support/base/result.h"
#include "support/os/file.h"

namespace shardwright::os {

/// Computes the SHA-256 of bytes that arrive in several parts.
class Sha256 {
 public:
  Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  ~Sha256();

  void Add(std::span<const std::byte> bytes);
  /// Returns 64 lower-case hexadecimal digits. Do not call Add afterwards.
  std::string Finish() &&;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns the SHA-256 of a text.
std::string Sha256Of(std::string_view text);

/// Returns the SHA-256 of a file.
/// \error kNotFound  the file cannot be read; kBadInput  it was truncated meanwhile
/// Local. Reads the whole file.
Result<std::string> Sha256Of(const File& file);

}  // namespace shardwright::os
