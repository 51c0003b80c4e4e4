"""What a trainer says to an agent: docs/formats/agent.md."""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import select
import socket
from typing import Any

from ._errors import BAD_INPUT, IO, NOT_FOUND, UNSUPPORTED, Error

PATIENCE = 600  # seconds: an agent may work for long before it answers
F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 2, 4


class SharedMemory:
    """Memory that an agent gets to see, which keeps its size."""

    def __init__(self, name: str, size: int) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            self.map = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        os.close(self.descriptor)  # the mapping goes with the last that looks into it


class Connection:
    """To an agent behind a socket file; requests one after the other."""

    def __init__(self, address: str, patience: float = PATIENCE) -> None:
        kind, _, path = address.partition(":")
        if kind != "unix" or not path:
            raise Error(UNSUPPORTED, f"{address}: an agent behind a socket file expected, unix:PATH")
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(patience)
        self._ahead = bytearray()
        try:
            self._socket.connect(path)
        except OSError as error:
            self.close()
            raise Error(NOT_FOUND, f"{address}: cannot connect: {error.strerror or error}") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also of processes that were forked meanwhile
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, line: str) -> None:
        self.send_text(line + "\n")

    def send_text(self, text: str) -> None:
        try:
            self._socket.sendall(text.encode())
        except OSError as error:
            raise Error(IO, f"{self._address}: {error.strerror or error}") from error

    def send_descriptor(self, descriptor: int) -> None:
        """Memory that the agent may map."""
        try:
            socket.send_fds(self._socket, [b"\0"], [descriptor])
        except OSError as error:
            raise Error(IO, f"{self._address}: {error.strerror or error}") from error

    def readable(self) -> bool:
        """Whether an answer has come, or the end of the connection."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(self._ahead or poll.poll(0))

    def answer(self) -> str:
        """What follows "ok". Raises what the agent says."""
        while b"\n" not in self._ahead:
            self._receive("an answer")
        line = self._take(self._ahead.index(b"\n") + 1)[:-1]
        words = line.split(" ", 2)
        if words[0] == "ok":
            return line[3:]
        if words[0] == "error" and len(words) == 3 and words[1].isdigit():
            raise Error(int(words[1]), f"{self._address}: {words[2]}")
        raise Error(BAD_INPUT, f"{self._address}: no answer of an agent: {line[:80]!r}")

    def text(self) -> str:
        """The text behind an answer that is its length."""
        size = self.answer()
        if not size.isdigit():
            raise Error(BAD_INPUT, f"{self._address}: a length expected, found {size[:80]!r}")
        while len(self._ahead) < int(size):
            self._receive("the end of a text")
        return self._take(int(size))

    def status(self) -> dict[str, Any]:
        self.send("status")
        return json.loads(self.text())

    def _receive(self, what: str) -> None:
        try:
            more = self._socket.recv(1 << 16)
        except OSError as error:
            raise Error(IO, f"{self._address}: {error.strerror or error}") from error
        if not more:
            raise Error(IO, f"{self._address}: closed before {what}")
        self._ahead += more

    def _take(self, count: int) -> str:
        taken = self._ahead[:count].decode(errors="replace")
        del self._ahead[:count]
        return taken
