#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

namespace shardwright::dialect {

/// Files that name a save folder's tag.
inline constexpr std::array<const char*, 2> kPointers = {"latest", "latest_universal"};

bool IsPointer(std::string_view name);

/// Why a name in a save folder is of what we put there ourselves: not a part of the checkpoint.
std::optional<std::string> WhyOurs(std::string_view name);

}  // namespace shardwright::dialect
