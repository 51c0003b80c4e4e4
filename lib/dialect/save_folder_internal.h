#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "base/result.h"

namespace shardwright::dialect {

/// Files that name a save folder's tag.
inline constexpr std::array<const char*, 2> kPointers = {"latest", "latest_universal"};

/// The tag in a pointer file. \error kNotFound, kBadInput  it cannot be read, or is no name
Result<std::string> PointedTag(const std::string& path);

bool IsPointer(std::string_view name);

/// Why a name in a save folder is of what we put there ourselves: not a part of the checkpoint.
std::optional<std::string> WhyOurs(std::string_view name);

}  // namespace shardwright::dialect
