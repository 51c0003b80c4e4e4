// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

// Parts of the texts of a store that manifest.cc writes and manifest_parse.cc reads.

namespace shardwright::partial {

inline constexpr std::string_view kStoreKind = "pec-store";
inline constexpr std::string_view kBegunKind = "pec-begun";
inline constexpr std::string_view kManifestKind = "pec-manifest";
inline constexpr std::string_view kTokensKind = "pec-tokens";
inline constexpr std::string_view kRecoveryKind = "pec-recovery";

// Separates the modules of a manifest from its other fields.
inline constexpr std::string_view kModulesBegin = "\n\"modules\":[\n";
inline constexpr std::string_view kModulesNext = ",\n";
inline constexpr std::string_view kModulesEnd = "\n]}\n";

}  // namespace shardwright::partial
