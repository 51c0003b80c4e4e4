# SPDX-License-Identifier: Apache-2.0
"""A trainer's process at an agent's socket, as specified by docs/formats/agent.md."""

import fcntl
import mmap
import os
import socket

F_ADD_SEALS, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 2, 4


class Gone(Exception):
    """The agent has ended, or refuses."""


class TrainerSocket:
    def __init__(self, path, patience=600):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(patience)
        self.received = b""
        self.socket.connect(str(path))

    def send(self, data):
        self.socket.sendall(data)

    def answer(self):
        """The words after "ok"."""
        while b"\n" not in self.received:
            self.receive()
        line, self.received = self.received.split(b"\n", 1)
        if not line.startswith(b"ok"):
            raise Gone(line.decode())
        return line[3:].decode().strip()

    def take(self, size):
        while len(self.received) < size:
            self.receive()
        taken, self.received = self.received[:size], self.received[size:]
        return taken

    def receive(self):
        more = self.socket.recv(1 << 16)
        if not more:
            raise Gone("the connection has ended")
        self.received += more

    def share(self, name, size):
        """Memory that the agent sees too, once it has answered."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        fcntl.fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        socket.send_fds(self.socket, [b"\0"], [descriptor])
        os.close(descriptor)
        self.answer()
        return memory

    def close(self):
        self.socket.close()
