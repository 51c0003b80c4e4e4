// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>

namespace shardwright::layout {

// Names of the states that a logical tensor can be of. Every format maps its own spelling to them;
// further states of an optimizer keep the names that it gives them. The values stand in manifests,
// catalogues, stores and atoms.

inline constexpr std::string_view kMaster = "fp32";    ///< the optimizer's copy of a weight
inline constexpr std::string_view kWeight = "weight";  ///< what forward and backward compute with
inline constexpr std::string_view kBuffer = "buffer";
inline constexpr std::string_view kFrozen = "frozen";  ///< the weight of a frozen parameter
inline constexpr std::string_view kFirstMoment = "exp_avg";
inline constexpr std::string_view kSecondMoment = "exp_avg_sq";
inline constexpr std::string_view kStep = "step";  ///< one number, not of the parameter's shape

/// True for the states that are not the optimizer's.
constexpr bool IsModelState(std::string_view state) {
  return state == kMaster || state == kWeight || state == kBuffer || state == kFrozen;
}

inline constexpr std::string_view kPaddingPrefix = "padding:";

/// The state of elements that pad a tensor in `state` and belong to nobody (rows of a vocabulary up
/// to a round number): kept for whoever has room for them, and no part of the tensor.
inline std::string PaddingOf(std::string_view state) {
  return std::string(kPaddingPrefix).append(state);
}

constexpr bool IsPadding(std::string_view state) { return state.starts_with(kPaddingPrefix); }

}  // namespace shardwright::layout
