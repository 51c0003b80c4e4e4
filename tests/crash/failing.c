// SPDX-License-Identifier: Apache-2.0
/* Preloaded before a command, this library makes C library calls fail while main runs:
 *
 * FAIL_ALLOCATION=N  the N-th malloc, calloc, realloc or aligned allocation fails with ENOMEM,
 *                    and with FAIL_ONWARD every later one
 * FAIL_SYNC=N        the N-th fsync, fdatasync or syncfs fails with FAIL_ERRNO; a later sync of
 *                    the same file is reported on stderr, since its success proves nothing
 * FAIL_COUNT=FILE    FILE gets the number of allocations
 *
 * operator new of libstdc++ calls malloc. Allocations before main or after it never fail. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

extern void* __libc_malloc(size_t bytes);
extern void* __libc_calloc(size_t count, size_t bytes);
extern void* __libc_realloc(void* old, size_t bytes);
extern void* __libc_memalign(size_t alignment, size_t bytes);

static atomic_int in_main;
static atomic_long allocations, syncs;
static long fail_allocation, fail_sync;
static int onward, sync_error = EIO;

static int Fails(void) {
  if (!atomic_load_explicit(&in_main, memory_order_relaxed)) return 0;
  const long number = atomic_fetch_add(&allocations, 1) + 1;
  if (fail_allocation == 0 || number < fail_allocation) return 0;
  if (number > fail_allocation && !onward) return 0;
  errno = ENOMEM;
  return 1;
}

void* malloc(size_t bytes) { return Fails() ? NULL : __libc_malloc(bytes); }
void* calloc(size_t count, size_t bytes) { return Fails() ? NULL : __libc_calloc(count, bytes); }
void* realloc(void* old, size_t bytes) {
  return bytes != 0 && Fails() ? NULL : __libc_realloc(old, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  return Fails() ? NULL : __libc_memalign(alignment, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }
int posix_memalign(void** out, size_t alignment, size_t bytes) {
  void* const made = memalign(alignment, bytes);
  if (made == NULL) return ENOMEM;
  *out = made;
  return 0;
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct stat failed;

/* Returns nonzero if this sync must fail. */
static int SyncFails(int fd) {
  struct stat info;
  int fails = 0;
  if (fail_sync == 0 || !atomic_load(&in_main) || fstat(fd, &info) != 0) return 0;
  pthread_mutex_lock(&mutex);
  const long number = atomic_fetch_add(&syncs, 1) + 1;
  if (number == fail_sync) {
    failed = info;
    fails = 1;
  } else if (number > fail_sync && failed.st_ino == info.st_ino && failed.st_dev == info.st_dev) {
    fprintf(stderr, "failing: a file whose sync has failed is synced again\n");
  }
  pthread_mutex_unlock(&mutex);
  if (fails) errno = sync_error;
  return fails;
}

typedef int (*SyncCall)(int);
#define SYNC(name)                                  \
  int name(int fd) {                                \
    if (SyncFails(fd)) return -1;                   \
    return ((SyncCall)dlsym(RTLD_NEXT, #name))(fd); \
  }
SYNC(fsync)
SYNC(fdatasync)
SYNC(syncfs)

typedef int (*Main)(int, char**, char**);
typedef int (*StartMain)(Main, int, char**, void (*)(void), void (*)(void), void (*)(void), void*);
static Main real_main;
static char count_file[4096];

static long Number(const char* name) {
  const char* const text = getenv(name);
  return text == NULL ? 0 : atol(text);
}

static void Count(void) {
  atomic_store(&in_main, 0);
  if (count_file[0] == '\0') return;
  FILE* const file = fopen(count_file, "w");
  if (file == NULL) return;
  fprintf(file, "%ld\n", atomic_load(&allocations));
  fclose(file);
}

static int Armed(int argc, char** argv, char** env) {
  fail_allocation = Number("FAIL_ALLOCATION");
  fail_sync = Number("FAIL_SYNC");
  onward = Number("FAIL_ONWARD") != 0;
  if (Number("FAIL_ERRNO") != 0) sync_error = (int)Number("FAIL_ERRNO");
  if (getenv("FAIL_COUNT") != NULL)
    snprintf(count_file, sizeof count_file, "%s", getenv("FAIL_COUNT"));
  atexit(Count);
  atomic_store(&in_main, 1);
  return real_main(argc, argv, env);
}

int __libc_start_main(Main main, int argc, char** argv, void (*init)(void), void (*fini)(void),
                      void (*rtld)(void), void* stack) {
  real_main = main;
  return ((StartMain)dlsym(RTLD_NEXT, "__libc_start_main"))(Armed, argc, argv, init, fini, rtld,
                                                            stack);
}
