# SPDX-License-Identifier: Apache-2.0
"""A FUSE file system that shows a folder and fails on request.

Usage: faulty.py FOLDER MOUNTPOINT SETTINGS CALLS

SETTINGS is a file that is read at every call that it may change, one setting a line:

    close-fails BYTES   a close of a file of more bytes fails with EDQUOT, and the file loses what it has beyond them, as
                        an upload that an object store refuses
    ignore-sync         fsync does nothing and succeeds
    delay SECONDS       every call takes so much longer

CALLS is a file that gets a line for each flush, fsync and rename: the call, then the path.

Needs the Debian package python3-fusepy. The program stays in the foreground until it is unmounted.
"""

import errno
import os
import sys
import time

import fusepy


class Faulty(fusepy.Operations):
    """Passes every call on to the folder."""

    def __init__(self, root, settings, calls):
        self.root = root
        self.settings_path = settings
        self.writers = set()  # handles
        self.calls = open(calls, "a", encoding="utf-8", buffering=1)  # pylint: disable=consider-using-with

    def settings(self):
        with open(self.settings_path, encoding="ascii") as file:
            return dict((line.split() + [""])[:2] for line in file if line.strip())

    def note(self, call, path):
        self.calls.write(f"{call} {path}\n")

    def __call__(self, op, path, *words):
        delay = self.settings().get("delay")
        if delay:
            time.sleep(float(delay))
        if not hasattr(self, op):
            raise fusepy.FuseOSError(errno.ENOSYS)
        return getattr(self, op)(self.root + path, *words)

    def access(self, path, amode):
        if not os.access(path, amode):
            raise fusepy.FuseOSError(errno.EACCES)

    def chmod(self, path, mode):
        os.chmod(path, mode)

    def chown(self, path, uid, gid):
        os.chown(path, uid, gid, follow_symlinks=False)

    def getattr(self, path, _handle=None):
        found = os.lstat(path)
        names = ("st_atime", "st_ctime", "st_gid", "st_ino", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid", "st_blocks")
        return {name: getattr(found, name) for name in names}

    def readdir(self, path, _handle):
        return [".", "..", *os.listdir(path)]

    def readlink(self, path):
        return os.readlink(path)

    def mkdir(self, path, mode):
        os.mkdir(path, mode)

    def rmdir(self, path):
        os.rmdir(path)

    def unlink(self, path):
        os.unlink(path)

    def symlink(self, path, target):
        os.symlink(target, path)

    def link(self, path, target):
        os.link(self.root + target, path)

    def rename(self, path, new):
        self.note("rename", new)
        os.rename(path, self.root + new)

    def statfs(self, path):
        found = os.statvfs(path)
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_flag", "f_frsize", "f_namemax")
        return {name: getattr(found, name) for name in names}

    def utimens(self, path, times=None):
        os.utime(path, times)

    def open(self, path, flags):
        handle = os.open(path, flags)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            self.writers.add(handle)
        return handle

    def create(self, path, mode, _info=None):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        self.writers.add(handle)
        return handle

    def read(self, _path, length, offset, handle):
        return os.pread(handle, length, offset)

    def write(self, _path, data, offset, handle):
        return os.pwrite(handle, data, offset)

    def truncate(self, path, length, _handle=None):
        os.truncate(path, length)

    def flush(self, path, handle):
        self.note("flush", path[len(self.root):])
        most = self.settings().get("close-fails")
        if most and handle in self.writers and os.fstat(handle).st_size > int(most):
            os.truncate(path, int(most))
            raise fusepy.FuseOSError(errno.EDQUOT)

    def fsync(self, path, _datasync, handle):
        self.note("fsync", path[len(self.root):])
        if "ignore-sync" not in self.settings():
            os.fsync(handle)

    def release(self, _path, handle):
        self.writers.discard(handle)
        os.close(handle)


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    os.umask(0)  # the kernel has applied the caller's
    fusepy.FUSE(Faulty(os.path.abspath(sys.argv[1]), sys.argv[3], sys.argv[4]), sys.argv[2], foreground=True, nothreads=True,
                default_permissions=True, nonempty=True)
