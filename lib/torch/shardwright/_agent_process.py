"""An agent that a trainer starts for itself, and that outlives it."""

from __future__ import annotations

import contextlib
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

START = 60  # seconds that an agent may take until it listens
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_PROCID", "SLURM_MPI_TYPE")  # an agent is no rank of the job that the trainer is one of
SHARED_MEMORY = "/dev/shm"
HOW = "its owner or root can remove it; else start pec-save agent elsewhere and give agent="


class OwnAgent:
    """pec-save agent for one store. Socket, log and the folder in shared memory are named after the store's path, so that
    a trainer that starts again finds what the one before has left running."""

    def __init__(self, store: str, command: str, flags: Sequence[str]) -> None:
        name = f"shardwright-{os.getuid()}-{hashlib.sha256(store.encode()).hexdigest()[:16]}"
        self.folder = os.path.join(SHARED_MEMORY, name)  # of the checkpoints that trainers hand over
        self._runtime = os.path.join(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), name)
        self.started = False  # by this object
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"unix:{os.path.join(self._runtime, 'agent.sock')}"
        program = shutil.which(command)
        if program is None:
            raise Error(NOT_FOUND, f"{command}: no such program; say where pec-save is with command=, or give agent=")
        self._words = [program, "agent", self.folder, store, "--listen", self.address, *map(str, flags)]

    def start(self) -> None:
        """Where none answers."""
        if self._process is not None:
            self._process.poll()  # one that has ended is forgotten by the system too
        # Both folders first: a socket in a folder of another user may be anybody's.
        with _own_folder(self.folder), _own_folder(self._runtime) as runtime:
            if self._answers():
                return self._compare(runtime)
            self._start(runtime)

    def _start(self, runtime: int) -> None:
        with _open_in(runtime, "agent.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
            file.write(json.dumps(self._words).encode())
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        with _open_in(runtime, "agent.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as log:
            process = subprocess.Popen(self._words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       start_new_session=True)
        self._process = process
        end = time.monotonic() + START
        while not self._answers():
            if process.poll() not in (None, BUSY):  # busy: another one got the socket, and answers soon
                with _open_in(runtime, "agent.log", os.O_RDONLY) as log:
                    said = log.read().decode(errors="replace")[-2000:].strip()
                code = process.returncode
                self._clear()
                raise Error(code if 0 < code < 11 else INTERNAL, f"{' '.join(self._words)}: exit code {code}: {said}")
            if time.monotonic() > end:
                raise Error(NOT_FOUND, f"{' '.join(self._words)}: does not answer after {START} s; see "
                                       f"{os.path.join(self._runtime, 'agent.log')}")
            time.sleep(0.02)
        self.started = True

    def stop(self) -> None:
        """When its newest snapshot is in the store."""
        with Connection(self.address, 24 * 3600) as agent:
            agent.send("stop")
            agent.answer()
        end = time.monotonic() + START
        while self._answers() and time.monotonic() < end:  # it removes its socket as it ends
            time.sleep(0.02)
        if self._process is not None:
            self._process.wait()
        self._clear()

    def _clear(self) -> None:
        for path in (self.folder, self._runtime):
            shutil.rmtree(path, ignore_errors=True)

    def _compare(self, runtime: int) -> None:
        """An agent that is there already must be what this one would be."""
        words: list[str] = []
        with contextlib.suppress(OSError, ValueError), _open_in(runtime, "agent.json", os.O_RDONLY) as file:
            words = list(map(str, json.load(file)))
        if words != self._words:
            raise Error(MISMATCH, f"{self.address}: was started as {' '.join(words)!r}, asked for is {' '.join(self._words)!r}; "
                                  "stop it with pec-save tell ... stop")

    def _answers(self) -> bool:
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
    """Makes a folder that only this user may look into, or opens the one that is there. Yields its descriptor.

    Raises Error with MISMATCH, naming the owner and the mode, where the folder is another user's or open to others.
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
    """A file of a folder that is this user's alone."""
    descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    return open(descriptor, "rb" if flags == os.O_RDONLY else "wb")
