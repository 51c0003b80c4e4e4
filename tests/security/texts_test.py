#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Texts that a peer, a forged agent or the owner of a checkpoint has made: they cost little processor time and memory, end
no command with a signal, and steer no terminal.

Usage: texts_test.py BIN
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True

import users  # pylint: disable=wrong-import-position
from users import VICTIM, home, run_as  # pylint: disable=wrong-import-position

BAD_INPUT, LIMIT = 4, 8
PATIENCE_SECONDS = 120


def processor_seconds(pid):
    """User and system time of a process."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Agents(users.TestCase):
    @contextlib.contextmanager
    def agent(self):
        """An agent that needs no key: its process and port."""
        shutil.copytree(users.SOURCE / "tests" / "data" / "deepspeed" / "moe4_ep2_series" / "ckpt", home(VICTIM) / "ck")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [users.WORLD / "bin" / "pec-save", "agent", "ck", "st", "--listen", f"127.0.0.1:{port}", "--insecure", "-q"]
        with subprocess.Popen(command, user=VICTIM, group=VICTIM, extra_groups=[], cwd=home(VICTIM), stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            try:
                self.connect(port).close()
                yield process, port
            finally:
                process.kill()

    def connect(self, port):
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def push(self, port, manifest):
        """Submits a checkpoint as a peer does; returns the agent's answer."""
        with self.connect(port) as connection, connection.makefile("rb") as answers:
            connection.sendall(b"hello 2 agent evil 1\n")
            self.assertRegex(answers.readline().decode(), "^ok 2 agent ")
            connection.sendall(b"push evil %d 2 0\n" % len(manifest) + manifest + b"{}")
            return answers.readline().decode()

    def test_manifests_with_many_keys_cost_little_time(self):
        with self.agent() as (process, port):
            before = processor_seconds(process.pid)
            keys = b"{" + b",".join(b'"k%07d":0' % i for i in range(80000)) + b"}"
            self.assertRegex(self.push(port, keys), f"^error {BAD_INPUT} ")
            # One second where nothing is optimised; a quadratic parser takes minutes there.
            self.assertLess(processor_seconds(process.pid) - before, 10)
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(PATIENCE_SECONDS), 0, process.stderr.read())

    def test_deep_manifests_are_refused(self):
        with self.agent() as (process, port):
            for deep in (b"[" * 1000000, b'{"a":' * 1000000):
                self.assertRegex(self.push(port, deep), f"^error {LIMIT} .*levels")
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.wait(PATIENCE_SECONDS), 0)


class ForgedAgents(users.TestCase):
    @contextlib.contextmanager
    def forged(self, text):
        """Answers every request with a text; of the same user as the clients."""
        path = home(VICTIM) / "forged.sock"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            os.chown(path, VICTIM, VICTIM)
            server.listen(5)

            def answer():
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = server.accept()
                        with connection, contextlib.suppress(OSError):
                            connection.recv(1000)
                            connection.sendall(b"ok %d\n" % len(text) + text)
                            connection.recv(1000)

            threading.Thread(target=answer, daemon=True).start()
            yield f"unix:{path}"
            server.shutdown(socket.SHUT_RDWR)
        path.unlink()

    def test_deep_and_wide_answers_end_no_command_with_a_signal(self):
        deep = b'{"pid":1,"x":' + b'{"a":' * 300000 + b"1" + b"}" * 300000 + b"}"
        for text in (deep, b"[" * 1000000, b"[" * 500000 + b"]" * 500000):
            with self.forged(text) as address:
                for command in (("pec-save", "status", address), ("ucp-load", "status", address)):
                    # The forged agent runs as root here, which every user trusts.
                    self.expect_exit(LIMIT, run_as(VICTIM, *command), "levels")


class Headers(users.TestCase):
    TENSORS = 40000

    def setUp(self):
        super().setUp()
        header = {f"model.layers.{i}.mlp.weight": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
                  for i in range(self.TENSORS)}
        text = json.dumps(header, separators=(",", ":")).encode()
        self.folder = home(VICTIM) / "hf"
        self.folder.mkdir()
        (self.folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(self.TENSORS))

    def load(self, memory):
        """Converts the file with a limit of memory in MiB; returns the exit code, the messages and the most memory in MiB."""
        with (home(VICTIM) / "messages").open("w+b") as said:
            child = subprocess.Popen([users.WORLD / "bin" / "ucp-load", self.folder, home(VICTIM) / f"out{memory}", "--format",
                                      "safetensors", "--threads", "1", "--memory", f"{memory}MiB", "-q"], user=0, stderr=said)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
            said.seek(0)
            return child.returncode, said.read().decode(), usage.ru_maxrss / 1024

    def test_many_tensors_take_what_memory_allows_or_are_refused(self):
        code, messages, most = self.load(64)
        self.assertEqual(code, LIMIT, messages)
        self.assertIn("header: ", messages)
        self.assertIn("raise --memory", messages)
        self.assertLess(most, 64 + 48)
        code, messages, most = self.load(144)
        self.assertEqual(code, 0, messages)
        self.assertLess(most, 144)


class Names(users.TestCase):
    def test_names_steer_no_terminal(self):
        names = ["a\x1b]0;title\x07", "b\u202etxt.exe", "c\u2066d\u2069", "e\u200f", "f\u061c", "g\u200bh"]
        header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
        text = json.dumps(header, ensure_ascii=False).encode()
        folder = home(VICTIM) / "hf"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4 * len(names)))
        hidden = "\x1b\x07\u202e\u2066\u2069\u200f\u061c\u200b"
        missing = ("ucp-load", folder, home(VICTIM) / "out", "--format", "safetensors", "--only", "b\u202e")
        for command in (("ucp-extract", folder, "--list"), ("ucp-load", folder, "--explain", names[1]), missing,
                        ("ucp-extract", folder, "--explain", names[0])):
            done = run_as(VICTIM, *command)
            for character in hidden:
                self.assertNotIn(character, done.stdout + done.stderr, command)
        self.assertIn("b\\xe2\\x80\\xaetxt.exe", run_as(VICTIM, "ucp-extract", folder, "--list").stdout)


if __name__ == "__main__":
    users.main()
