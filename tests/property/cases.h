// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace shardwright {

/// Cases of every property. Sanitizers are ten times as slow, and detect other faults.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kCases = 2'000;
#else
inline constexpr int kCases = 100'000;
#endif

}  // namespace shardwright
