// SPDX-License-Identifier: Apache-2.0
/* What the compiler's static libraries ask of a glibc newer than 2.28, for programs that run on
 * that: part of the libc_nonshared.a that scripts/wheel/sysroot makes. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>

#define HIDDEN __attribute__((visibility("hidden")))

/* glibc 2.32: whether libstdc++ may do without atomic operations. It never may. */
HIDDEN char __libc_single_threaded = 0;

/* glibc 2.36: std::random_device. */
HIDDEN uint32_t arc4random(void) {
  uint32_t value;
  if (getentropy(&value, sizeof value) != 0) abort();
  return value;
}

/* glibc 2.35: where the unwinder of gcc 12 looks for an address. */
struct search {
  uintptr_t address;
  struct dl_find_object* found;
};

static int in_object(struct dl_phdr_info* info, size_t size, void* data) {
  const struct search* const search = data;
  uintptr_t start = UINTPTR_MAX;
  uintptr_t end = 0;
  void* eh_frame = NULL;
  int inside = 0;
  (void)size;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)* const part = &info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + part->p_vaddr;
    if (part->p_type == PT_GNU_EH_FRAME) eh_frame = (void*)begin;
    if (part->p_type != PT_LOAD) continue;
    if (begin < start) start = begin;
    if (begin + part->p_memsz > end) end = begin + part->p_memsz;
    if (search->address >= begin && search->address - begin < part->p_memsz) inside = 1;
  }
  if (!inside || eh_frame == NULL) return 0;
  search->found->dlfo_map_start = (void*)start;
  search->found->dlfo_map_end = (void*)end;
  search->found->dlfo_eh_frame = eh_frame;
  return 1;
}

HIDDEN int _dl_find_object(void* address, struct dl_find_object* found) {
  struct search search = {(uintptr_t)address, found};
  return dl_iterate_phdr(in_object, &search) == 1 ? 0 : -1;
}
