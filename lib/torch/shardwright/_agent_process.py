"""An agent that a trainer starts for itself, and that outlives it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence

from ._agent import Connection
from ._errors import BUSY, INTERNAL, IO, MISMATCH, NOT_FOUND, USAGE, Error

START = 60  # seconds that an agent may take until it listens
LAUNCHERS = ("OMPI_", "PMI_", "PMIX_", "SLURM_PROCID", "SLURM_MPI_TYPE")  # an agent is no rank of the job that the trainer is one of
SHARED_MEMORY = "/dev/shm"


class OwnAgent:
    """pec-save agent for one store. Socket, log and the folder in shared memory are named after the store's path, so that
    a trainer that starts again finds what the one before has left running."""

    def __init__(self, store: str, command: str, flags: Sequence[str]) -> None:
        name = f"shardwright-{os.getuid()}-{hashlib.sha256(store.encode()).hexdigest()[:16]}"
        self._folder = os.path.join(SHARED_MEMORY, name)
        self._runtime = os.path.join(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), name)
        self.started = False  # by this object
        self._process: subprocess.Popen[bytes] | None = None
        self._log = os.path.join(self._runtime, "agent.log")
        self._started_with = os.path.join(self._runtime, "agent.json")
        self.address = f"unix:{os.path.join(self._runtime, 'agent.sock')}"
        program = shutil.which(command)
        if program is None:
            raise Error(NOT_FOUND, f"{command}: no such program; say where pec-save is with command=, or give agent=")
        self._words = [program, "agent", self._folder, store, "--listen", self.address, *map(str, flags)]

    def start(self) -> None:
        """Where none answers."""
        if self._process is not None:
            self._process.poll()  # one that has ended is forgotten by the system too
        if self._answers():
            return self._compare()
        for path in (self._folder, self._runtime):
            _own_folder(path)
        with open(self._started_with, "w", encoding="utf-8") as file:
            json.dump(self._words, file)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        with open(self._log, "wb") as log:
            process = subprocess.Popen(self._words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       start_new_session=True)
        self._process = process
        end = time.monotonic() + START
        while not self._answers():
            if process.poll() not in (None, BUSY):  # busy: another one got the socket, and answers soon
                with open(self._log, encoding="utf-8", errors="replace") as log:
                    said = log.read()[-2000:].strip()
                code = process.returncode
                self._clear()
                raise Error(code if 0 < code < 11 else INTERNAL, f"{' '.join(self._words)}: exit code {code}: {said}")
            if time.monotonic() > end:
                raise Error(NOT_FOUND, f"{' '.join(self._words)}: does not answer after {START} s; see {self._log}")
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
        for path in (self._folder, self._runtime):
            shutil.rmtree(path, ignore_errors=True)

    def _compare(self) -> None:
        """An agent that is there already must be what this one would be."""
        try:
            with open(self._started_with, encoding="utf-8") as file:
                words = json.load(file)
        except (OSError, ValueError):
            words = []
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


def _own_folder(path: str) -> None:
    """A folder that nobody else may look into, and that nobody else has made."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise Error(USAGE, f"{path}: is not a folder of this user alone; remove it") from None
