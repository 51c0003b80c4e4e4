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

/// A list of Python regular expressions, each matched at the start of a name. Looks up
/// anchored literals (`^a\.b$`), of which AutoTP writes thousands, in a hash table.
class NameList {
 public:
  NameList();
  ~NameList();
  NameList(NameList&&) noexcept;
  NameList& operator=(NameList&&) noexcept;

  /// Adds an expression; `key` names the list in messages.
  /// \error kUnsupported  RE2 does not support the expression; the message names it
  Status Add(std::string_view expression, std::string_view key);

  /// Returns the indices, ascending, of the expressions that match `name`.
  std::vector<std::uint32_t> Match(const std::string& name) const;

  const std::string& text(std::uint32_t index) const { return texts_[index]; }
  std::size_t size() const { return texts_.size(); }

 private:
  std::vector<std::string> texts_;
  std::unordered_multimap<std::string, std::uint32_t> literals_;
  std::vector<std::pair<std::uint32_t, std::unique_ptr<re2::RE2>>> expressions_;
};

/// Returns `^name$` with all special characters escaped, as Python's re.escape does.
std::string AnchoredLiteral(std::string_view name);

}  // namespace shardwright::checkpoints
