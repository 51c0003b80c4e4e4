# SPDX-License-Identifier: Apache-2.0
"""Starts an agent process for a trainer. The agent keeps running for a while after the trainer has ended."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ._agent import Connection
from ._errors import BUSY, INTERNAL, IO, MISMATCH, NOT_FOUND, Error

LINGER = 30 * 60  # seconds that an agent waits for another trainer by default
START = 60  # seconds until a new agent must listen
# Prefixes of launcher variables. A program starts without them, because it is not a rank of the trainer's job.
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_PROCID", "SLURM_MPI_TYPE")
SHARED_MEMORY = "/dev/shm"
HOW = "ask its owner or root to remove it, or start pec-save agent at another address and pass agent="


def own_environment() -> dict[str, str]:
    """Returns the environment of a program that is not a rank of the trainer's job."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}


class OwnAgent:
    """A `pec-save agent` process for one store. The names of its runtime folder (socket, log) and of its folder in shared memory
    are derived from the path of the store, so that a restarted trainer finds the agent of the previous one. scripts/clean and
    pec-save agents use the same names.

    store: absolute path of the store. command: the program pec-save. flags: flags of the agent.
    Raises NotFoundError if there is no such program.
    """

    def __init__(self, store: str, command: str, flags: Sequence[str]) -> None:
        name = f"shardwright-{os.getuid()}-{hashlib.sha256(store.encode()).hexdigest()[:16]}"
        self.folder = os.path.join(SHARED_MEMORY, name)  # checkpoints that trainers submit
        self._runtime = os.path.join(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), name)
        self.started = False  # true: this object has started the agent
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"unix:{os.path.join(self._runtime, 'agent.sock')}"
        program = shutil.which(command)
        if program is None:
            raise Error(NOT_FOUND, f"{command}: the program does not exist; pass the path of pec-save as command=, or pass agent=")
        given = any(str(flag).partition("=")[0] == "--linger" for flag in flags)
        linger = [] if given else ["--linger", str(LINGER)]
        self._words = [program, "agent", self.folder, store, "--listen", self.address,
                       "--trainer-lock", os.path.join(self._runtime, "trainer.lock"), *linger, *map(str, flags)]
        self._lock: Any = None

    def start(self) -> None:
        """Starts the agent, unless one is running. Raises MismatchError if the running one was started with other arguments, or if
        another user owns its folders."""
        if self._process is not None:
            self._process.poll()  # reaps a process that has ended
        # Checks both folders first: any user can place a socket in a folder of another user.
        with _own_folder(self.folder), _own_folder(self._runtime) as runtime:
            if self._lock is None:
                self._lock = _open_in(runtime, "trainer.lock", os.O_WRONLY | os.O_CREAT)
                fcntl.flock(self._lock, fcntl.LOCK_SH)  # until this process ends: the agent then lingers
            if self._answers():
                return self._compare(runtime)
            self._start(runtime)

    def _start(self, runtime: int) -> None:
        with _open_in(runtime, "agent.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            file.write(json.dumps(self._words).encode())
        with _open_in(runtime, "agent.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as log:
            process = subprocess.Popen(self._words, env=own_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       start_new_session=True)
        self._process = process
        end = time.monotonic() + START
        while not self._answers():
            if process.poll() not in (None, BUSY):  # busy: another process started the agent, which will reply soon
                with _open_in(runtime, "agent.log", os.O_RDONLY) as log:
                    output = log.read().decode(errors="replace")[-2000:].strip()
                code = process.returncode
                self._clear()
                raise Error(code if 0 < code < 11 else INTERNAL, f"{' '.join(self._words)}: exit code {code}: {output}")
            if time.monotonic() > end:
                raise Error(NOT_FOUND, f"{' '.join(self._words)}: does not answer after {START} s; see "
                                       f"{os.path.join(self._runtime, 'agent.log')}")
            time.sleep(0.02)
        self.started = True

    def stop(self) -> None:
        """Waits until the newest snapshot is in the store, stops the agent and removes its folders. Raises Error."""
        with Connection(self.address, 24 * 3600) as agent:
            agent.send("stop")
            agent.answer()
        end = time.monotonic() + START
        while self._answers() and time.monotonic() < end:  # the agent removes its socket when it ends
            time.sleep(0.02)
        if self._process is not None:
            self._process.wait()
        self._clear()

    def _clear(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        for path in (self.folder, self._runtime):
            shutil.rmtree(path, ignore_errors=True)

    def _compare(self, runtime: int) -> None:
        """Raises MismatchError if the running agent was started with other arguments."""
        words: list[str] = []
        with contextlib.suppress(OSError, ValueError), _open_in(runtime, "agent.json", os.O_RDONLY) as file:
            words = list(map(str, json.load(file)))
        if words != self._words:
            raise Error(MISMATCH, f"{self.address}: the agent was started as {' '.join(words)!r}, expected {' '.join(self._words)!r}; "
                                  "stop it with pec-save tell ... stop")

    def _answers(self) -> bool:
        """Returns true if an agent replies at the address."""
        try:
            with Connection(self.address) as agent:
                agent.status()
                return True
        except Error as error:
            if error.code not in (NOT_FOUND, IO):
                raise
            return False


@contextlib.contextmanager
def _own_folder(path: str) -> Iterator[int]:
    """Creates a folder with access for this user only, or opens the existing one. Yields its descriptor.

    Raises MismatchError, with the owner and the mode, if another user owns the folder or has access to it.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        try:
            owner = f"owned by user {os.lstat(path).st_uid}"
        except OSError:
            owner = "which is gone"
        raise Error(MISMATCH, f"{path}: a folder of user {os.geteuid()} expected, found something else, {owner} "
                              f"({error.strerror}); {HOW}") from None
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise Error(MISMATCH, f"{path}: a folder of user {os.geteuid()} with mode 0700 expected, found one of user "
                                  f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}; {HOW}")
        yield folder
    finally:
        os.close(folder)


def _open_in(folder: int, name: str, flags: int) -> Any:
    """Opens a file in a folder of _own_folder."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    return open(descriptor, "rb" if flags == os.O_RDONLY else "wb")
