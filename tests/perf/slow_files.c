// SPDX-License-Identifier: Apache-2.0
/* Preload library that adds a delay to calls on files, as a busy network file system does:
 *
 *     cc -O2 -shared -fPIC tests/perf/slow_files.c -o slow_files.so -ldl
 *     LD_PRELOAD=./slow_files.so SLOW_FILES=/data SLOW_FILES_US=2000 COMMAND
 *
 * Open, read, write, allocate, truncate, sync and rename calls of paths that begin with SLOW_FILES
 * take SLOW_FILES_US microseconds longer. A descriptor belongs to SLOW_FILES if the path that /proc
 * names for it does. With SLOW_FILES_COUNT=FILE the process appends one line "opens=N reads=N
 * writes=N syncs=N renames=N" to FILE at its end. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { kOpen, kRead, kWrite, kSync, kRename, kKinds };
enum { kDescriptors = 65536 };

static const char* prefix;
static size_t prefix_bytes;
static long delay_us;
static atomic_ulong counts[kKinds];
/* State of a descriptor: 0 unknown, 1 not below the prefix, 2 below it. */
static atomic_char known[kDescriptors];

__attribute__((constructor)) static void Begin(void) {
  prefix = getenv("SLOW_FILES");
  prefix_bytes = prefix == NULL ? 0 : strlen(prefix);
  const char* const us = getenv("SLOW_FILES_US");
  delay_us = us == NULL ? 0 : atol(us);
}

__attribute__((destructor)) static void End(void) {
  const char* const path = getenv("SLOW_FILES_COUNT");
  if (path == NULL) return;
  char line[160];
  const int bytes =
      snprintf(line, sizeof line, "opens=%lu reads=%lu writes=%lu syncs=%lu renames=%lu\n",
               counts[kOpen], counts[kRead], counts[kWrite], counts[kSync], counts[kRename]);
  const int fd =
      (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return;
  if (syscall(SYS_write, fd, line, (size_t)bytes) != bytes) perror(path);
  syscall(SYS_close, fd);
}

/* Counts a call of a path or descriptor below the prefix and waits. Keeps errno. */
static void Wait(int kind) {
  const int error = errno;
  atomic_fetch_add(&counts[kind], 1);
  if (delay_us <= 0) return;
  struct timespec left = {delay_us / 1000000, delay_us % 1000000 * 1000};
  while (nanosleep(&left, &left) != 0 && errno == EINTR) {
  }
  errno = error;
}

/* True if the path of a descriptor begins with the prefix. */
static int IsBelow(int fd) {
  if (prefix_bytes == 0 || fd < 0) return 0;
  if (fd < kDescriptors && known[fd] != 0) return known[fd] == 2;
  const int error = errno;
  char link[64];
  char path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t bytes = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path);
  const int below = bytes >= (ssize_t)prefix_bytes && memcmp(path, prefix, prefix_bytes) == 0;
  if (fd < kDescriptors) known[fd] = below ? 2 : 1;
  errno = error;
  return below;
}

static void WaitFor(int kind, int fd) {
  if (IsBelow(fd)) Wait(kind);
}

/* Of a call that has opened `fd`. A descriptor that only names a directory costs no server
 * anything. */
static int Opened(int fd, int flags) {
  if (fd < 0) return fd;
  if (fd < kDescriptors) known[fd] = 0;
  if ((flags & O_PATH) == 0) WaitFor(kOpen, fd);
  return fd;
}

/* The function of this name that this one stands in front of. */
#define NEXT(function)                 \
  static __typeof__(&(function)) next; \
  if (next == NULL) next = (__typeof__(next))dlsym(RTLD_NEXT, #function)

static mode_t ModeOf(int flags, va_list rest) {
  return (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
}

#define OPEN(function)                             \
  int function(const char* path, int flags, ...) { \
    NEXT(function);                                \
    va_list rest;                                  \
    va_start(rest, flags);                         \
    const mode_t mode = ModeOf(flags, rest);       \
    va_end(rest);                                  \
    return Opened(next(path, flags, mode), flags); \
  }
#define OPENAT(function)                                    \
  int function(int dir, const char* path, int flags, ...) { \
    NEXT(function);                                         \
    va_list rest;                                           \
    va_start(rest, flags);                                  \
    const mode_t mode = ModeOf(flags, rest);                \
    va_end(rest);                                           \
    return Opened(next(dir, path, flags, mode), flags);     \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
#undef OPEN
#undef OPENAT

/* openat2 has no function of its own in libc. */
long syscall(long number, ...) {
  NEXT(syscall);
  va_list rest;
  va_start(rest, number);
  long a[6];
  for (int i = 0; i < 6; ++i) a[i] = va_arg(rest, long);
  va_end(rest);
  const long result = next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  if (number != SYS_openat2 || result < 0) return result;
  const unsigned long long flags = *(const unsigned long long*)a[2];
  return Opened((int)result, (int)flags);
}

ssize_t read(int fd, void* to, size_t bytes) {
  NEXT(read);
  WaitFor(kRead, fd);
  return next(fd, to, bytes);
}

ssize_t write(int fd, const void* from, size_t bytes) {
  NEXT(write);
  WaitFor(kWrite, fd);
  return next(fd, from, bytes);
}

#define AT_OFFSET(function, kind, memory, offset_type)                      \
  ssize_t function(int fd, memory data, size_t bytes, offset_type offset) { \
    NEXT(function);                                                         \
    WaitFor(kind, fd);                                                      \
    return next(fd, data, bytes, offset);                                   \
  }
AT_OFFSET(pread, kRead, void*, off_t)
AT_OFFSET(pread64, kRead, void*, off64_t)
AT_OFFSET(pwrite, kWrite, const void*, off_t)
AT_OFFSET(pwrite64, kWrite, const void*, off64_t)
#undef AT_OFFSET

#define ON_FD(function, kind) \
  int function(int fd) {      \
    NEXT(function);           \
    WaitFor(kind, fd);        \
    return next(fd);          \
  }
ON_FD(fsync, kSync)
ON_FD(fdatasync, kSync)
ON_FD(syncfs, kSync)
#undef ON_FD

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  NEXT(renameat2);
  if (from[0] == '/' ? prefix_bytes > 0 && strncmp(from, prefix, prefix_bytes) == 0
                     : IsBelow(from_dir))
    Wait(kRename);
  return next(from_dir, from, to_dir, to, flags);
}

int close(int fd) {
  NEXT(close);
  if (fd >= 0 && fd < kDescriptors) known[fd] = 0;
  return next(fd);
}
