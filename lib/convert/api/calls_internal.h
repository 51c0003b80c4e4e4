// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "convert/api/source.h"
#include "convert/input.h"
#include "support/base/exception_to_error.h"
#include "support/base/result.h"

namespace shardwright::internal {

/// Converts a source to the options of lib/convert. Never searches for sibling files.
/// \error kUsage  there is no path, a path is empty, or sizes are given without a map
/// Pure.
Result<convert::InputOptions> InputOf(const Source& source);

/// \error kUsage  no or too many threads, or less memory than the minimum
/// Pure.
Status CheckWork(unsigned threads, std::uint64_t memory_bytes);

/// Runs a call and converts exceptions to errors, so that no exception leaves the library.
template <class Call>
auto Guarded(const Call& call) -> decltype(call()) {
  try {
    return call();
  } catch (...) {
    return tl::unexpected<Error>(CaughtError());
  }
}

}  // namespace shardwright::internal
