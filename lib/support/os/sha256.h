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

/// SHA-256 of bytes that come in stretches.
class Sha256 {
 public:
  Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  ~Sha256();

  void Add(std::span<const std::byte> bytes);
  /// 64 hexadecimal digits in lower case. Nothing is added after that.
  std::string Finish() &&;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The same of a text.
std::string Sha256Of(std::string_view text);

/// The same of a file.
/// \error kNotFound  it cannot be read; kBadInput  it became shorter meanwhile
/// Local; reads all of it.
Result<std::string> Sha256Of(const File& file);

}  // namespace shardwright::os
