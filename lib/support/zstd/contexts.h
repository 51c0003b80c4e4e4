// SPDX-License-Identifier: Apache-2.0
// lib/support/zstd: zstd compression on top of libzstd.
// contexts.h creates contexts and checks results, stream.h decompresses a byte range of a file, and
// compressed_item.h describes one compressed item of a file. libzstd reports out-of-memory by null
// contexts and by error codes that look like damaged input; these functions throw std::bad_alloc.
// Include contexts.h only in sources that link libzstd.

#pragma once

#include <zstd.h>
#include <zstd_errors.h>

#include <cstddef>
#include <new>

namespace shardwright {

/// Creates a context, which the caller frees.
/// \throws std::bad_alloc
inline ZSTD_CCtx* NewZstdWriter() {
  if (ZSTD_CCtx* const context = ZSTD_createCCtx()) return context;
  throw std::bad_alloc();
}
inline ZSTD_DCtx* NewZstdReader() {
  if (ZSTD_DCtx* const context = ZSTD_createDCtx()) return context;
  throw std::bad_alloc();
}

/// Returns whether the result of a libzstd call is an error.
/// \throws std::bad_alloc  if libzstd ran out of memory
inline bool ZstdFailed(std::size_t answer) {
  if (ZSTD_isError(answer) == 0) return false;
  if (ZSTD_getErrorCode(answer) == ZSTD_error_memory_allocation) throw std::bad_alloc();
  return true;
}

}  // namespace shardwright
