// SPDX-License-Identifier: Apache-2.0
#include "checkpoints/megatron/folder.h"

#include <cstdio>

#include "support/base/checked.h"

namespace shardwright::checkpoints::megatron {
namespace {

constexpr std::string_view kStart = "mp_rank_";
constexpr std::size_t kTensorDigits = 2;
constexpr std::size_t kOtherDigits = 3;

}  // namespace

std::optional<Folder> ParseFolder(std::string_view name) {
  if (!name.starts_with(kStart)) return std::nullopt;
  name.remove_prefix(kStart.size());
  Folder folder;
  for (std::size_t part = 0;; ++part) {
    const std::string_view digits = name.substr(0, name.find('_'));
    const std::size_t least = part == 0 ? kTensorDigits : kOtherDigits;
    const auto number = NumberIn<std::uint64_t>(digits);
    const bool padded = digits.size() == least || (digits.size() > least && digits[0] != '0');
    if (!number || !padded || part > 2) return std::nullopt;
    if (part == 0) {
      folder.tensor = *number;
    } else {
      folder.more.push_back(*number);
    }
    if (digits.size() == name.size()) return folder;
    name.remove_prefix(digits.size() + 1);
  }
}

std::string FolderName(const Args& args, std::uint64_t t, std::uint64_t p, std::uint64_t e) {
  char text[32];
  std::snprintf(text, sizeof text, "%02llu", static_cast<unsigned long long>(t));
  std::string name = std::string(kStart) + text;
  const auto more = [&](std::uint64_t number) {
    std::snprintf(text, sizeof text, "_%03llu", static_cast<unsigned long long>(number));
    name += text;
  };
  if (args.pp > 1) more(p);
  if (args.ep > 1) more(e);
  return name;
}

}  // namespace shardwright::checkpoints::megatron
