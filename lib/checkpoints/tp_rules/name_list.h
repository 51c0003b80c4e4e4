// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "support/base/result.h"

namespace re2 {
class RE2;
}

namespace shardwright::checkpoints {

/// A list of Python expressions, each matched at the start of a name. Anchored literals
/// (`^a\.b$`), which AutoTP writes by the thousand, are looked up in a table.
class NameList {
 public:
  NameList();
  ~NameList();
  NameList(NameList&&) noexcept;
  NameList& operator=(NameList&&) noexcept;

  /// Adds an expression; `key` is the list's name in messages.
  /// \error kUnsupported if RE2 cannot match it; names it
  Status Add(std::string_view expression, std::string_view key);

  /// Indices, ascending, of the expressions that match `name`.
  std::vector<std::uint32_t> Match(const std::string& name) const;

  const std::string& text(std::uint32_t index) const { return texts_[index]; }
  std::size_t size() const { return texts_.size(); }

 private:
  std::vector<std::string> texts_;
  std::unordered_multimap<std::string, std::uint32_t> literals_;
  std::vector<std::pair<std::uint32_t, std::unique_ptr<re2::RE2>>> expressions_;
};

/// `^name$` with everything special escaped, as Python's re.escape does.
std::string AnchoredLiteral(std::string_view name);

}  // namespace shardwright::checkpoints
