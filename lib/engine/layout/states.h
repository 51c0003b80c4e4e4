// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace shardwright::layout {

// Names of the states of a logical tensor. Every checkpoint format
// maps its own names to these; other optimizer states keep their
// names. Manifests, catalogues, stores and atoms contain these values.

inline constexpr std::string_view kMaster = "fp32";    ///< the optimizer's copy of a weight
inline constexpr std::string_view kWeight = "weight";  ///< the weight for forward and backward
inline constexpr std::string_view kBuffer = "buffer";
inline constexpr std::string_view kFrozen = "frozen";  ///< the weight of a frozen parameter
inline constexpr std::string_view kFirstMoment = "exp_avg";
inline constexpr std::string_view kSecondMoment = "exp_avg_sq";
inline constexpr std::string_view kStep = "step";  ///< one number, without the parameter's shape

/// Returns true for the states that do not belong to the optimizer.
constexpr bool IsModelState(std::string_view state) {
  return state == kMaster || state == kWeight || state == kBuffer || state == kFrozen;
}

inline constexpr std::string_view kPaddingPrefix = "padding:";

/// Returns the state of padding elements of a tensor in `state` (rows of a vocabulary up to a round
/// number). They are not part of the tensor; a target that has room for them keeps their values.
inline std::string PaddingOf(std::string_view state) {
  return std::string(kPaddingPrefix).append(state);
}

constexpr bool IsPadding(std::string_view state) { return state.starts_with(kPaddingPrefix); }

}  // namespace shardwright::layout
