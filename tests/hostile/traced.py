# SPDX-License-Identifier: Apache-2.0
"""Checks by strace which system calls a command makes while it reads a hostile input.

No process is started, no socket made, nothing is changed but names that begin as those of OUTPUT and the report do, and
nothing is opened but the input, OUTPUT and the machine's own files. Memory and time are bounded, too.
"""

import math
import os
import pathlib
import re
import resource
import subprocess
import tempfile
import threading

from harness import Outcome, environment, expect  # pylint: disable=wrong-import-position

MEMORY_BYTES = 256 << 20
SECONDS = 2.0  # of the processor, those of strace included
# Libraries, locale and time zone; processors and memory that there are; random numbers.
MACHINE = ("/lib", "/lib64", "/usr/lib", "/usr/share/zoneinfo", "/usr/share/locale", "/etc/ld.so", "/etc/localtime", "/proc",
           "/sys", "/dev/urandom", "/dev/null", "/etc/openmpi", "/etc/ssl", "/usr/share/openmpi")
# Calls that change something, with the places of their paths among the arguments. Others of %file only look.
CHANGES = {"mkdir": 1, "mkdirat": 1, "rmdir": 1, "unlink": 1, "unlinkat": 1, "rename": 2, "renameat": 2, "renameat2": 2,
           "link": 2, "linkat": 2, "symlink": 2, "symlinkat": 2, "creat": 1, "truncate": 1, "mknod": 1, "mknodat": 1,
           "chmod": 1, "fchmodat": 1, "chown": 1, "lchown": 1, "fchownat": 1, "utimensat": 1, "setxattr": 1}
HARMLESS = {"exit", "exit_group", "wait4", "access", "faccessat", "faccessat2", "stat", "lstat", "newfstatat", "statx",
            "readlink", "readlinkat", "statfs", "getcwd", "chdir", "rt_sigreturn", "getxattr", "lgetxattr", "kill"}
CALL = re.compile(r"^\d+ +(\w+)\((.*)$")
PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')


def paths(arguments):
    """Each path of a call; those that are relative belong to the folder before them, or to the working folder."""
    for folder, text in PATH.findall(arguments):
        name = text.encode("latin-1", "replace").decode("unicode_escape")
        yield os.path.normpath(os.path.join(folder or os.getcwd(), name))


def check(log, argv, output, what):
    """Every line that strace has written. The input is in the folder of the output."""
    report = "--json="
    made = (str(output), *(str(word).removeprefix(report) for word in argv if str(word).startswith(report)))
    allowed = str(output.parent)
    targets = {os.path.realpath(path) for path in output.parent.rglob("*") if path.is_symlink()}
    executed = 0
    for line in log.read_text(errors="replace").splitlines():
        call = CALL.match(line)
        if call is None:
            # "???": the thread was gone with its process before strace could ask which call it had begun.
            expect(re.match(r"^\d+ +(<\.\.\.|\+\+\+|---|\?\?\?\( <unfinished \.\.\.>$)", line), f"{what}: not understood: {line}")
            continue
        name, arguments = call.groups()
        if name == "execve":
            executed += 1
        elif name in ("clone", "clone3"):
            expect("CLONE_THREAD" in arguments, f"{what}: a process was started: {line}")
        elif name in CHANGES:
            for path in list(paths(arguments))[:CHANGES[name]]:
                above = name.startswith("mkdir") and str(output).startswith(f"{path}/")  # existing folders
                expect(above or path.startswith(made), f"{what}: changed outside of the output: {line}")
        elif name in ("open", "openat", "openat2"):
            path = next(paths(arguments))
            if re.search(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC|O_APPEND", arguments):
                expect(path.startswith(made), f"{what}: opened for writing: {line}")
            elif not path.startswith(MACHINE):
                # The folders above a file are passed through one by one. A link of the input leads to one file.
                passed = "O_PATH" in arguments and "O_DIRECTORY" in arguments
                expect(f"{path}/".startswith(f"{allowed}/") or path in targets or
                       (passed and any(f"{other}/".startswith(f"{path.rstrip('/')}/") for other in (allowed, *targets))),
                       f"{what}: opened: {line}")
        else:
            expect(name in HARMLESS, f"{what}: not expected of a reader of files: {line}")
    expect(executed == 1, f"{what}: {executed} programs were executed")


def limited(before):
    """First steps of a child: those of the caller, and a limit on the processor time of each of its processes."""
    def limit():
        if before is not None:
            before()
        seconds = math.ceil(SECONDS) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    return limit


def run_traced(argv, output, what, deadline, preexec_fn=None):
    """As harness.run, with all that above checked. The deadline is for programs that wait: one that computes ends when its
    processor time is over, however long a busy machine takes for that."""
    with tempfile.TemporaryDirectory(prefix="sw-hostile-trace-") as folder:
        log, said, told = (pathlib.Path(folder) / name for name in ("calls", "stdout", "stderr"))
        words = ["strace", "-f", "-qq", "-y", "-s", "4096", "-e", "trace=%process,%network,%file", "-o", log, *argv]
        with open(said, "wb") as stdout, open(told, "wb") as stderr:
            with subprocess.Popen([str(word) for word in words], env=environment(), stdin=subprocess.DEVNULL,
                                  stdout=stdout, stderr=stderr, preexec_fn=limited(preexec_fn)) as process:
                timer = threading.Timer(deadline, process.kill)
                timer.start()
                _, status, used = os.wait4(process.pid, 0)
                expect(timer.is_alive(), f"{what}: not done after {deadline} s")
                timer.cancel()
                process.returncode = os.waitstatus_to_exitcode(status)
        done = Outcome(argv, process.returncode, said.read_text(errors="replace"), told.read_text(errors="replace"))
        check(log, argv, output, f"{what}: {done}")
        expect(used.ru_maxrss << 10 <= MEMORY_BYTES, f"{what}: {used.ru_maxrss >> 10} MiB of memory: {done}")
        seconds = used.ru_utime + used.ru_stime
        expect(seconds <= SECONDS, f"{what}: {seconds:.1f} s of the processor: {done}")
        return done
