// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "convert/api/source.h"
#include "convert/input.h"
#include "support/base/exception_to_error.h"
#include "support/base/result.h"

namespace shardwright::internal {

/// A source as lib/convert takes it, with nothing looked for beside it.
/// \error kUsage  it names no path, or sizes without a map
/// Pure.
Result<convert::InputOptions> InputOf(const Source& source);

/// \error kUsage  no thread or too many, or less memory than any work needs
/// Pure.
Status CheckWork(unsigned threads, std::uint64_t memory_bytes);

/// Calls what may throw (memory, libraries of others), so that no exception leaves the library.
template <class Call>
auto Guarded(const Call& call) -> decltype(call()) {
  try {
    return call();
  } catch (...) {
    return tl::unexpected<Error>(CaughtError());
  }
}

}  // namespace shardwright::internal
