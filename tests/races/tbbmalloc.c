// SPDX-License-Identifier: Apache-2.0
// Serves TBB's allocator requests by malloc. Never frees memory: the thread that would free it
// is not always the one that used it last, and TBB hides how they agreed on that. It is some
// KiB for each arena.

#include <stdlib.h>

void* scalable_malloc(size_t bytes) { return malloc(bytes); }

void scalable_free(void* memory) { (void)memory; }

void* scalable_aligned_malloc(size_t bytes, size_t alignment) {
  void* memory = NULL;
  return posix_memalign(&memory, alignment, bytes) == 0 ? memory : NULL;
}

void scalable_aligned_free(void* memory) { (void)memory; }
