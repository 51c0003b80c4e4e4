# SPDX-License-Identifier: Apache-2.0
"""Two users of one machine, for the tests of this folder: a victim that runs the commands, and an attacker.

A test program calls main(). Run as root, it moves into a mount namespace of its own and mounts a file system there
(`WORLD`) that both users can reach:

    bin, lib, share   the built commands and the files that they load
    data, scripts     tests/data and scripts of the project
    python            the Python package (lib/trainer/torch)
    shared            sticky and writable by all users, like /tmp
    group             a project folder: setgid, writable by GROUP, of which both users can be members
    home1001, ...     private folders of the users

`shared`, `group` and the private folders are empty at the beginning of every test of TestCase. Without root or without
the right to mount, main() prints the reason and exits with 77, which ctest counts as skipped.

Usage of a test program: NAME_test.py BIN [ARGUMENTS OF unittest]
"""

import atexit
import contextlib
import ctypes
import fcntl
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

SOURCE = pathlib.Path(__file__).resolve().parents[2]
VICTIM, ATTACKER = 1001, 1002  # uid and gid
GROUP = 1003  # a gid
TIMEOUT_SECONDS = 300
SKIPPED = 77
CLONE_NEWNS = 0x00020000

WORLD = pathlib.Path()  # set by main()


def home(uid):
    return WORLD / f"home{uid}"


def _settings(uid, groups=(), umask=0o022, env=(), **settings):
    """Keyword arguments of subprocess for a process of a user."""
    variables = {"PATH": f"{WORLD}/bin:/usr/bin:/bin", "HOME": str(home(uid)), "LC_ALL": "C.UTF-8", "TERM": "dumb",
                 **dict(env)}
    return {"cwd": WORLD / "shared", "stdin": subprocess.DEVNULL, "user": uid, "group": uid, "extra_groups": list(groups),
            "umask": umask, "env": variables, "text": True, "errors": "replace", **settings}


def run_as(uid, *argv, timeout=TIMEOUT_SECONDS, **settings):
    """Runs a command as a user, in the shared folder unless `cwd` is given; returns what subprocess.run does, as text.

    groups: gids in addition to their own; umask; env: variables in addition to PATH, HOME and LC_ALL
    """
    return subprocess.run([str(word) for word in argv], capture_output=True, timeout=timeout, check=False,
                          **_settings(uid, **settings))


@contextlib.contextmanager
def stopped_at(call, uid, *argv, env=(), **settings):
    """Starts a command as a user that stops (SIGSTOP) before a call ("open:7"), and yields it stopped, or None if it ends
    before. Afterwards it continues; its `returncode` and `output` are set then."""
    words = [str(word) for word in argv]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        # pylint: disable-next=consider-using-with
        process = subprocess.Popen(words, stdout=said, stderr=said, **_settings(
            uid, env={"SHARDWRIGHT_FAULT": f"{call}:hang", **dict(env)}, **settings))
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        try:
            yield process if os.WIFSTOPPED(status) else None
        finally:
            while os.WIFSTOPPED(status):
                os.kill(process.pid, signal.SIGCONT)
                _, status = os.waitpid(process.pid, os.WUNTRACED)
            process.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            process.output = said.read()


def call_as(uid, function, *arguments, groups=(), umask=0o022):
    """Calls a function in a child process that is the user; an exception in it fails the caller."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.setgroups(list(groups))
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            os.umask(umask)
            function(*arguments)
            os._exit(0)
        except BaseException as error:  # pylint: disable=broad-exception-caught
            os.write(writer, repr(error).encode()[:4000])
            os._exit(1)
    os.close(writer)
    with open(reader, encoding="utf-8", errors="replace") as said:
        text = said.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 0:
        raise AssertionError(f"as user {uid}: {text or f'exit code {code}'}")


@contextlib.contextmanager
def kernel_setting(name, value):
    """Sets /proc/sys/fs/NAME, which holds for the whole machine, and sets it back. Skips the test where it cannot."""
    path = pathlib.Path("/proc/sys/fs") / name
    lock = os.open("/proc/sys/fs", os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # against another run of these tests
        try:
            before = path.read_text(encoding="ascii")
            if before.strip() != str(value):
                path.write_text(f"{value}\n", encoding="ascii")
        except OSError as error:
            raise unittest.SkipTest(f"{path} cannot be set: {error.strerror}") from None
        try:
            yield
        finally:
            path.write_text(before, encoding="ascii")
    finally:
        os.close(lock)


class TestCase(unittest.TestCase):
    """A test that begins with empty shared and private folders."""

    def setUp(self):
        for path in [WORLD / "shared", WORLD / "group", home(VICTIM), home(ATTACKER)]:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        os.chmod(WORLD / "shared", 0o1777)
        os.chown(WORLD / "group", 0, GROUP)
        os.chmod(WORLD / "group", 0o2770)
        for uid in (VICTIM, ATTACKER):
            os.chown(home(uid), uid, uid)
            os.chmod(home(uid), 0o700)

    def private_file(self, uid=VICTIM, name="thesis"):
        """A file that only its owner may read; returns its path."""
        path = home(uid) / name
        path.write_text("private " * 5000, encoding="ascii")
        os.chown(path, uid, uid)
        os.chmod(path, 0o600)
        return path

    @contextlib.contextmanager
    def unchanged(self, *paths):
        """Fails if the content of one of the files is another afterwards."""
        before = [path.read_bytes() for path in paths]
        yield
        for path, content in zip(paths, before):
            self.assertEqual(path.read_bytes(), content, f"{path} has changed")

    def expect_exit(self, code, done, *words):
        """Checks the exit code of a command, and that each of the words is in its messages."""
        self.assertEqual(done.returncode, code, f"{done.args}\n{done.stdout}{done.stderr}")
        for word in words:
            self.assertIn(str(word), done.stderr)


def _mount(*words):
    subprocess.run(["mount", *map(str, words)], check=True)


def _enter(programs):
    """Moves this process into its own mount namespace and makes WORLD there."""
    global WORLD  # pylint: disable=global-statement
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "no mount namespace")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True, capture_output=True)
    WORLD = pathlib.Path(tempfile.mkdtemp(prefix="sw-users-", dir="/tmp"))

    def leave():
        subprocess.run(["umount", "--lazy", WORLD], check=False, capture_output=True)
        WORLD.rmdir()

    atexit.register(leave)
    _mount("-t", "tmpfs", "-o", "mode=755,size=1g", "none", WORLD)
    places = {"bin": programs, "lib": programs.parent / "lib", "share": programs.parent / "share",
              "data": SOURCE / "tests" / "data", "scripts": SOURCE / "scripts", "python": SOURCE / "lib" / "trainer" / "torch"}
    for name, folder in places.items():
        if folder.is_dir():
            (WORLD / name).mkdir()
            _mount("--bind", folder, WORLD / name)


def main():
    """Runs the tests of the calling program in WORLD."""
    if len(sys.argv) < 2 or not pathlib.Path(sys.argv[1]).is_dir():
        sys.exit(f"usage: {sys.argv[0]} BIN [ARGUMENTS OF unittest]")
    if os.geteuid() != 0:
        print("skipped: only root can become two users")
        sys.exit(SKIPPED)
    try:
        _enter(pathlib.Path(sys.argv[1]).resolve())
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"skipped: no file system can be mounted here: {error}")
        sys.exit(SKIPPED)
    unittest.main(argv=sys.argv[:1] + sys.argv[2:], module="__main__")
