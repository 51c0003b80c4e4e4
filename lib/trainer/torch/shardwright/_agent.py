# SPDX-License-Identifier: Apache-2.0
"""The trainer's end of the agent protocol: docs/formats/agent.md."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import pwd
import select
import socket
import struct
from typing import Any

from ._errors import BAD_INPUT, IO, MISMATCH, NOT_FOUND, UNSUPPORTED, USAGE, Error
from ._library import expanded

PATIENCE = 600  # seconds to wait for a reply: some requests take an agent minutes
LINE = 4096  # largest length of a reply line in bytes
TEXT = 256 << 20  # largest length of a text after a reply line in bytes
F_ADD_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 1033, 1, 2, 4, 16
CREDENTIALS = "iII"  # struct ucred: process, user, group


def user_id(user: int | str | None) -> int | None:
    """Returns the number of a user given by name or number. Raises UsageError for an unknown name."""
    if user is None or isinstance(user, int):
        return user
    try:
        return int(user) if user.isdigit() else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise Error(USAGE, f"trust_user={user!r}: there is no such user on this machine") from None


class SharedMemory:
    """Memory that this process writes and an agent reads. Its size is fixed, and no other process can map it for writing. (Linux
    before 5.1 cannot forbid the latter.)"""

    def __init__(self, name: str, size: int) -> None:
        self.descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            self.map = mmap.mmap(self.descriptor, size)  # before the seal: mappings that exist stay writable
            fcntl.fcntl(self.descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
            try:
                fcntl.fcntl(self.descriptor, F_ADD_SEALS, F_SEAL_FUTURE_WRITE)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            fcntl.fcntl(self.descriptor, F_ADD_SEALS, F_SEAL_SEAL)
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Closes the descriptor. The mapping is freed with the last reference to it."""
        os.close(self.descriptor)


class Connection:
    """Connection to an agent at a socket file. It sends one request at a time. Not thread safe.

    address: unix:PATH.
    patience: seconds to wait for a reply.
    user: name or number of a user: accept this user's agent. Default: only agents of this process's user and of root.

    Raises UnsupportedError for other addresses, NotFoundError if nothing listens, and MismatchError, before it sends anything, if
    a process of another user listens.
    """

    def __init__(self, address: str, patience: float = PATIENCE, *, user: int | str | None = None) -> None:
        address = expanded(address)
        kind, _, path = address.partition(":")
        if kind != "unix" or not path:
            raise Error(UNSUPPORTED, f"{address}: unix:PATH of an agent's socket file expected")
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(patience)
        self._ahead = bytearray()
        try:
            self._socket.connect(path)
        except OSError as error:
            self.close()
            raise Error(NOT_FOUND, f"{address}: cannot connect: {error.strerror or error}") from error
        try:
            self._check_user(user_id(user))
        except BaseException:
            self.close()
            raise

    def _check_user(self, user: int | None) -> None:
        """Applies the rule of CheckPeer in lib/support/base/peer.cc."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(CREDENTIALS))
        self.user: int = struct.unpack(CREDENTIALS, raw)[1]
        mine = os.geteuid()
        if self.user not in (mine, 0, user):
            expected = "user 0" if mine == 0 else f"user {mine} or root"
            raise Error(MISMATCH, f"{self._address}: an agent of {expected} expected, found user {self.user}; if you trust that "
                                  f"user with this run, pass trust_user={self.user}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closes it in processes that were forked meanwhile, too
        self._socket.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, line: str) -> None:
        """Sends a request line. Raises TransferError."""
        self.send_text(line + "\n")

    def send_text(self, text: str) -> None:
        """Sends a text after a request line. Raises TransferError."""
        try:
            self._socket.sendall(text.encode())
        except OSError as error:
            raise Error(IO, f"{self._address}: {error.strerror or error}") from error

    def send_descriptor(self, descriptor: int) -> None:
        """Sends the descriptor of shared memory, which the agent maps. Raises TransferError."""
        try:
            socket.send_fds(self._socket, [b"\0"], [descriptor])
        except OSError as error:
            raise Error(IO, f"{self._address}: {error.strerror or error}") from error

    def readable(self) -> bool:
        """Returns true if a reply has arrived or the connection has ended."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(self._ahead or poll.poll(0))

    def answer(self) -> str:
        """Waits for a reply and returns its text after "ok". Raises Error with the code and message of an error reply,
        CorruptInputError for an invalid reply, and TransferError if the connection ends."""
        while b"\n" not in self._ahead:
            if len(self._ahead) > LINE:
                raise Error(BAD_INPUT, f"{self._address}: a line of more than {LINE} bytes")
            self._receive("an answer")
        line = self._take(self._ahead.index(b"\n") + 1)[:-1]
        words = line.split(" ", 2)
        if words[0] == "ok":
            return line[3:]
        if words[0] == "error" and len(words) == 3 and words[1].isdigit():
            raise Error(int(words[1]), f"{self._address}: {words[2]}")
        raise Error(BAD_INPUT, f"{self._address}: an agent's reply expected, found {line[:80]!r}")

    def text(self) -> str:
        """Waits for a reply that is the length of a text, and returns the text. Raises like answer()."""
        size = self.answer()
        if not size.isdigit():
            raise Error(BAD_INPUT, f"{self._address}: a length expected, found {size[:80]!r}")
        if int(size) > TEXT:
            raise Error(BAD_INPUT, f"{self._address}: a text of {size} bytes, at most {TEXT} are accepted")
        while len(self._ahead) < int(size):
            self._receive("the end of a text")
        return self._take(int(size))

    def json(self) -> dict[str, Any]:
        """Waits for a text and returns it as a JSON object. Raises like answer()."""
        text = self.text()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise Error(BAD_INPUT, f"{self._address}: a JSON object expected, found {text[:80]!r}")
        return value

    def status(self) -> dict[str, Any]:
        """Requests the status of the agent (docs/formats/agent.md)."""
        self.send("status")
        return self.json()

    def _receive(self, what: str) -> None:
        try:
            more = self._socket.recv(1 << 16)
        except OSError as error:
            raise Error(IO, f"{self._address}: {error.strerror or error}") from error
        if not more:
            raise Error(IO, f"{self._address}: the connection was closed before {what}")
        self._ahead += more

    def _take(self, count: int) -> str:
        taken = self._ahead[:count].decode(errors="replace")
        del self._ahead[:count]
        return taken
