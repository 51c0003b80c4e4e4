// SPDX-License-Identifier: Apache-2.0
/* Preloaded before a command, this library records every call that changes something below a
 * folder, with all bytes and in call order. power.py builds the disk contents after a power failure
 * from these records.
 *
 * RECORD_ROOT  the folder, an absolute path without links
 * RECORD_FILE  where the records are appended; not below the folder
 *
 * A record is a head (struct Head, native byte order) with its two paths and its bytes behind it.
 * Calls of several threads and processes run one after another, so that their order equals the
 * order of the records. A call that cannot be recorded (a writable mapping of a file, an unknown
 * call) ends the process. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct Head {
  char kind; /* see power.py */
  char unused;
  uint16_t path_bytes;
  uint16_t other_bytes;
  uint16_t flags;
  uint64_t inode; /* of the file or folder; of a clone's source in `at` */
  uint64_t at;
  uint64_t bytes;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int log_file = -1;
static char root[PATH_MAX];

static void Die(const char* what) {
  fprintf(stderr, "record: %s\n", what);
  abort();
}

#define REAL(name) ((__typeof__(&name))Real(#name))

static void* Real(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (found == NULL) Die(name);
  return found;
}

__attribute__((constructor)) static void Begin(void) {
  const char* file = getenv("RECORD_FILE");
  const char* folder = getenv("RECORD_ROOT");
  if (file == NULL || folder == NULL || strlen(folder) >= sizeof root) return;
  strcpy(root, folder);
  log_file = REAL(open)(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (log_file < 0) Die("cannot open RECORD_FILE");
}

/* Calls are made between these two. */
static void Enter(void) {
  pthread_mutex_lock(&mutex);
  if (log_file >= 0) flock(log_file, LOCK_EX);
}

static void Leave(void) {
  const int error = errno;
  if (log_file >= 0) flock(log_file, LOCK_UN);
  pthread_mutex_unlock(&mutex);
  errno = error;
}

static void Put(struct Head head, const char* path, const char* other, const void* data) {
  const int error = errno;
  struct iovec parts[4] = {{&head, sizeof head}};
  head.path_bytes = path == NULL ? 0 : (uint16_t)strlen(path);
  head.other_bytes = other == NULL ? 0 : (uint16_t)strlen(other);
  parts[1] = (struct iovec){(void*)path, head.path_bytes};
  parts[2] = (struct iovec){(void*)other, head.other_bytes};
  parts[3] = (struct iovec){(void*)data, data == NULL ? 0 : head.bytes};
  const size_t total = sizeof head + head.path_bytes + head.other_bytes + parts[3].iov_len;
  if (REAL(writev)(log_file, parts, 4) != (ssize_t)total) Die("cannot write to RECORD_FILE");
  errno = error;
}

/* The absolute path of `path` as openat sees it, its last name not followed. Empty if it is not
 * below the root. */
static void Resolve(int dir, const char* path, char out[PATH_MAX]) {
  char folder[PATH_MAX], joined[2 * PATH_MAX], link[64];
  out[0] = '\0';
  if (log_file < 0) return;
  if (path[0] == '/') {
    folder[0] = '\0';
  } else if (dir == AT_FDCWD) {
    if (getcwd(folder, sizeof folder) == NULL) return;
  } else {
    snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    const ssize_t length = readlink(link, folder, sizeof folder - 1);
    if (length < 0) return;
    folder[length] = '\0';
  }
  snprintf(joined, sizeof joined, "%s/%s", folder, path);
  size_t length = strlen(joined);
  while (length > 1 && joined[length - 1] == '/') joined[--length] = '\0';
  char* slash = strrchr(joined, '/');
  if (slash == NULL) return;
  *slash = '\0';
  char parent[PATH_MAX];
  if (realpath(joined[0] == '\0' ? "/" : joined, parent) == NULL) return;
  if (snprintf(out, PATH_MAX, "%s/%s", parent, slash + 1) >= PATH_MAX) Die("a path is too long");
  const size_t below = strlen(root);
  if (strncmp(out, root, below) != 0 || out[below] != '/') out[0] = '\0';
}

static uint64_t InodeOfPath(const char* path) {
  struct stat info;
  return fstatat(AT_FDCWD, path, &info, AT_SYMLINK_NOFOLLOW) == 0 ? info.st_ino : 0;
}

/* Returns nonzero if a descriptor refers to a file or folder below the root, and sets its inode. */
static int Below(int fd, uint64_t* inode) {
  char link[64], path[PATH_MAX];
  struct stat info;
  if (log_file < 0 || fstat(fd, &info) != 0) return 0;
  if (!S_ISREG(info.st_mode) && !S_ISDIR(info.st_mode)) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = '\0';
  *inode = info.st_ino;
  const size_t below = strlen(root);
  return strncmp(path, root, below) == 0 && (path[below] == '/' || path[below] == '\0');
}

static int Open(int dir, const char* path, int flags, mode_t mode) {
  char full[PATH_MAX];
  Enter();
  Resolve(dir, path, full);
  const uint64_t before = full[0] == '\0' ? 0 : InodeOfPath(full);
  const int fd = REAL(openat)(dir, path, flags, mode);
  uint64_t inode = 0;
  if (fd >= 0 && full[0] != '\0' && (flags & (O_CREAT | O_TRUNC)) != 0 && Below(fd, &inode)) {
    if (before == 0) Put((struct Head){.kind = 'c', .inode = inode}, full, NULL, NULL);
    if (before != 0 && (flags & O_TRUNC) != 0)
      Put((struct Head){.kind = 't', .inode = inode}, NULL, NULL, NULL);
  }
  Leave();
  return fd;
}

#define MODE_OF(flags, mode)                        \
  do {                                              \
    if (((flags) & (O_CREAT | __O_TMPFILE)) != 0) { \
      va_list more;                                 \
      va_start(more, flags);                        \
      mode = va_arg(more, mode_t);                  \
      va_end(more);                                 \
    }                                               \
  } while (0)

int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  MODE_OF(flags, mode);
  return Open(AT_FDCWD, path, flags, mode);
}
int openat(int dir, const char* path, int flags, ...) {
  mode_t mode = 0;
  MODE_OF(flags, mode);
  return Open(dir, path, flags, mode);
}
int open64(const char* path, int flags, ...) __attribute__((alias("open")));
int openat64(int dir, const char* path, int flags, ...) __attribute__((alias("openat")));
int __open_2(const char* path, int flags) { return Open(AT_FDCWD, path, flags, 0); }
int __open64_2(const char* path, int flags) { return Open(AT_FDCWD, path, flags, 0); }
int __openat_2(int dir, const char* path, int flags) { return Open(dir, path, flags, 0); }
int __openat64_2(int dir, const char* path, int flags) { return Open(dir, path, flags, 0); }
int creat(const char* path, mode_t mode) {
  return Open(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode);
}
int creat64(const char* path, mode_t mode) __attribute__((alias("creat")));

ssize_t pwrite(int fd, const void* data, size_t bytes, off_t at) {
  uint64_t inode = 0;
  Enter();
  const ssize_t moved = REAL(pwrite)(fd, data, bytes, at);
  if (moved > 0 && Below(fd, &inode)) {
    Put((struct Head){.kind = 'w', .inode = inode, .at = (uint64_t)at, .bytes = (uint64_t)moved},
        NULL, NULL, data);
  }
  Leave();
  return moved;
}
ssize_t pwrite64(int fd, const void* data, size_t bytes, off_t at) __attribute__((alias("pwrite")));

ssize_t write(int fd, const void* data, size_t bytes) {
  uint64_t inode = 0;
  Enter();
  const int said = log_file >= 0 && (fd == STDOUT_FILENO || fd == STDERR_FILENO);
  const ssize_t moved = REAL(write)(fd, data, bytes);
  if (moved > 0 && said) {
    Put((struct Head){.kind = 'p', .bytes = (uint64_t)moved}, NULL, NULL, data);
  } else if (moved > 0 && Below(fd, &inode)) {
    off_t at = lseek(fd, 0, SEEK_CUR) - moved;
    if ((fcntl(fd, F_GETFL) & O_APPEND) != 0) at = lseek(fd, 0, SEEK_END) - moved;
    Put((struct Head){.kind = 'w', .inode = inode, .at = (uint64_t)at, .bytes = (uint64_t)moved},
        NULL, NULL, data);
  }
  Leave();
  return moved;
}

static void Changed(int fd, char kind, uint64_t at) {
  uint64_t inode = 0;
  if (Below(fd, &inode))
    Put((struct Head){.kind = kind, .inode = inode, .at = at}, NULL, NULL, NULL);
}

int ftruncate(int fd, off_t bytes) {
  Enter();
  const int rc = REAL(ftruncate)(fd, bytes);
  if (rc == 0) Changed(fd, 't', (uint64_t)bytes);
  Leave();
  return rc;
}
int ftruncate64(int fd, off_t bytes) __attribute__((alias("ftruncate")));

int fallocate(int fd, int mode, off_t at, off_t bytes) {
  uint64_t inode = 0;
  Enter();
  const int rc = REAL(fallocate)(fd, mode, at, bytes);
  if (rc == 0 && Below(fd, &inode) && mode != 0) Die("fallocate with a mode");
  if (rc == 0) Changed(fd, 'a', (uint64_t)(at + bytes));
  Leave();
  return rc;
}
int fallocate64(int fd, int mode, off_t at, off_t bytes) __attribute__((alias("fallocate")));

int fsync(int fd) {
  Enter();
  const int rc = REAL(fsync)(fd);
  if (rc == 0) Changed(fd, 's', 0);
  Leave();
  return rc;
}
int fdatasync(int fd) {
  Enter();
  const int rc = REAL(fdatasync)(fd);
  if (rc == 0) Changed(fd, 's', 0);
  Leave();
  return rc;
}
int syncfs(int fd) {
  Enter();
  const int rc = REAL(syncfs)(fd);
  if (rc == 0) Changed(fd, 'S', 0);
  Leave();
  return rc;
}

static int Named(char kind, int rc, const char* full, const char* other, uint64_t inode,
                 uint64_t flags) {
  if (rc == 0 && full[0] != '\0') {
    Put((struct Head){.kind = kind, .inode = inode, .flags = (uint16_t)flags}, full, other, NULL);
  }
  return rc;
}

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned flags) {
  char full[PATH_MAX], other[PATH_MAX];
  Enter();
  Resolve(from_dir, from, full);
  Resolve(to_dir, to, other);
  const int rc = REAL(renameat2)(from_dir, from, to_dir, to, flags);
  if (rc == 0 && (full[0] == '\0') != (other[0] == '\0')) Die("a rename out of or into the folder");
  Named('r', rc, full, other, 0, (flags & RENAME_EXCHANGE) != 0);
  Leave();
  return rc;
}
int rename(const char* from, const char* to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int from_dir, const char* from, int to_dir, const char* to) {
  return renameat2(from_dir, from, to_dir, to, 0);
}

int linkat(int from_dir, const char* from, int to_dir, const char* to, int flags) {
  char full[PATH_MAX];
  Enter();
  Resolve(to_dir, to, full);
  const int rc = REAL(linkat)(from_dir, from, to_dir, to, flags);
  Named('l', rc, full, NULL, rc == 0 ? InodeOfPath(full) : 0, 0);
  Leave();
  return rc;
}
int link(const char* from, const char* to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int mkdirat(int dir, const char* path, mode_t mode) {
  char full[PATH_MAX];
  Enter();
  Resolve(dir, path, full);
  const int rc = REAL(mkdirat)(dir, path, mode);
  Named('m', rc, full, NULL, rc == 0 ? InodeOfPath(full) : 0, 0);
  Leave();
  return rc;
}
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int dir, const char* path, int flags) {
  char full[PATH_MAX];
  Enter();
  Resolve(dir, path, full);
  const int rc = Named('u', REAL(unlinkat)(dir, path, flags), full, NULL, 0, 0);
  Leave();
  return rc;
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int ioctl(int fd, unsigned long what, ...) {
  va_list more;
  va_start(more, what);
  void* argument = va_arg(more, void*);
  va_end(more);
  uint64_t inode = 0;
  const int rc = REAL(ioctl)(fd, what, argument);
  if (rc == 0 && (what == FICLONE || what == FICLONERANGE) && Below(fd, &inode))
    Die("a clone: record where there are none");
  return rc;
}

void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) {
  uint64_t inode = 0;
  if (fd >= 0 && (protection & PROT_WRITE) != 0 && (flags & MAP_SHARED) != 0 && Below(fd, &inode)) {
    Die("a writable mapping of a file");
  }
  return REAL(mmap)(at, bytes, protection, flags, fd, offset);
}
void* mmap64(void* at, size_t bytes, int protection, int flags, int fd, off_t offset)
    __attribute__((alias("mmap")));

#define UNKNOWN(name, below) \
  uint64_t inode = 0;        \
  if (Below(below, &inode)) Die(name " is not recorded")

ssize_t writev(int fd, const struct iovec* parts, int count) {
  UNKNOWN("writev", fd);
  return REAL(writev)(fd, parts, count);
}
ssize_t pwritev(int fd, const struct iovec* parts, int count, off_t at) {
  UNKNOWN("pwritev", fd);
  return REAL(pwritev)(fd, parts, count, at);
}
ssize_t copy_file_range(int from, off64_t* from_at, int to, off64_t* to_at, size_t bytes,
                        unsigned flags) {
  UNKNOWN("copy_file_range", to);
  return REAL(copy_file_range)(from, from_at, to, to_at, bytes, flags);
}
