#pragma once

// zstd tells of want of memory by contexts that are null and among the errors of its calls, where
// it looks like damaged input. Here it is thrown as by everything else. For sources that link zstd.

#include <zstd.h>
#include <zstd_errors.h>

#include <cstddef>
#include <new>

namespace shardwright {

/// The caller frees what these make. \throws std::bad_alloc
inline ZSTD_CCtx* NewZstdWriter() {
  if (ZSTD_CCtx* const context = ZSTD_createCCtx()) return context;
  throw std::bad_alloc();
}
inline ZSTD_DCtx* NewZstdReader() {
  if (ZSTD_DCtx* const context = ZSTD_createDCtx()) return context;
  throw std::bad_alloc();
}

/// Whether what a call has answered is an error. \throws std::bad_alloc if it is want of memory
inline bool ZstdFailed(std::size_t answer) {
  if (ZSTD_isError(answer) == 0) return false;
  if (ZSTD_getErrorCode(answer) == ZSTD_error_memory_allocation) throw std::bad_alloc();
  return true;
}

}  // namespace shardwright
