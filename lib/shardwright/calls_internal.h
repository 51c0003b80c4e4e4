#pragma once

#include <cstdint>
#include <exception>
#include <new>
#include <string>

#include "base/result.h"
#include "shardwright/source.h"
#include "ucp/input.h"

namespace shardwright::internal {

/// A source as lib/ucp takes it, with nothing looked for beside it.
/// \error kUsage  it names no path, or sizes without a map
/// Pure.
Result<ucp::InputOptions> InputOf(const Source& source);

/// \error kUsage  no thread or too many, or less memory than any work needs
/// Pure.
Status CheckWork(unsigned threads, std::uint64_t memory_bytes);

/// Calls what may throw (memory, libraries of others), so that no exception leaves the library.
template <class Call>
auto Guarded(const Call& call) -> decltype(call()) {
  try {
    return call();
  } catch (const std::bad_alloc&) {
    return Fail(Errc::kLimit, "out of memory");
  } catch (const std::exception& error) {
    return Fail(Errc::kInternal, std::string("unexpected exception: ") + error.what());
  }
}

}  // namespace shardwright::internal
