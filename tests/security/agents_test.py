#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Agents and shared-memory caches while other users of the machine, and processes without the key, do what they can:
sockets of another user, a relay that leads an agent back to itself, failed handshakes.

Usage: agents_test.py BIN
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True

import users  # pylint: disable=wrong-import-position
from users import ATTACKER, VICTIM, home, run_as  # pylint: disable=wrong-import-position

USAGE, MISMATCH, BUSY = 2, 5, 6
SECONDS = 120  # until something that takes moments has to have happened


def wait(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def become(uid):
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


@contextlib.contextmanager
def forked(uid, work, *arguments):
    """Runs a function in a process of a user until the block ends. The function calls its argument when it is ready."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            become(uid)
            work(lambda: os.write(writer, b"x"), *arguments)
        finally:
            os._exit(1)
    os.close(writer)
    try:
        with open(reader, "rb", buffering=0) as ready:
            assert ready.read(1) == b"x", "the process of the attacker has ended"
        yield
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def answer_ok(ready, path, heard):
    """Listens and answers ok to every line, as no agent would."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o777)
    listener.listen(8)
    ready()
    while True:
        connection = listener.accept()[0]
        with connection:
            while line := connection.recv(4096):
                with heard.open("ab") as file:
                    file.write(line)
                connection.sendall(b"ok\n")


def relay(ready, listener, port):
    """Passes bytes between its clients and a port."""
    ready()

    def carry(source, sink):
        with contextlib.suppress(OSError):
            while some := source.recv(1 << 16):
                sink.sendall(some)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    while True:
        front = listener.accept()[0]
        back = socket.create_connection(("127.0.0.1", port))
        for pair in ((front, back), (back, front)):
            threading.Thread(target=carry, args=pair, daemon=True).start()


def fail_handshakes(ready, port, failures):
    """Ten failed handshakes a second, half of them closed at once."""
    for number in range(1 << 30):
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", port), 1)
            connection.sendall(b"\x16\x03\x01\x00\x05hello")
            if number % 2:
                connection.settimeout(1)
                connection.recv(64)
            connection.close()
        os.write(failures, b"x")
        if number == 30:
            ready()
        time.sleep(0.01 if number < 30 else 0.1)


class Agents(users.TestCase):
    def setUp(self):
        super().setUp()
        self.shared = users.WORLD / "shared"

    def copy_series(self, uid):
        """A folder of checkpoints that a user's agent watches."""
        folder = home(uid) / "ckpt"
        shutil.copytree(users.WORLD / "data" / "deepspeed" / "moe4_ep2_series" / "ckpt", folder)
        for path, _, files in os.walk(folder):
            for name in (path, *(os.path.join(path, file) for file in files)):
                os.chown(name, uid, uid)
        return folder

    @contextlib.contextmanager
    def agent(self, uid, *words, path=None, prefix=()):
        """An agent of a user; yields its socket file, its process and the file with its messages."""
        path = path or home(uid) / "agent.sock"
        folder, log = home(uid) / "ckpt", self.shared / f"{path.name}.messages"
        if not folder.exists():
            self.copy_series(uid)
        argv = [*prefix, users.WORLD / "bin" / "pec-save", "agent", folder, home(uid) / "store",
                "--listen", f"unix:{path}", *words]
        with log.open("wb") as messages:
            process = subprocess.Popen([str(word) for word in argv], user=uid, group=uid, extra_groups=[], cwd=self.shared,
                                       stdin=subprocess.DEVNULL, stdout=messages, stderr=messages,
                                       env={"PATH": "/usr/bin:/bin", "HOME": str(home(uid))})
        try:
            wait(lambda: "listening on " in log.read_text(encoding="utf-8") or process.poll() is not None)
            self.assertIsNone(process.poll(), log.read_text(encoding="utf-8"))
            yield path, process, log
        finally:
            process.kill()
            process.wait()

    def status(self, uid, address, *words):
        done = run_as(uid, "pec-save", "status", address, "--json", *words)
        self.expect_exit(0, done)
        return json.loads(done.stdout)["result"]

    def port_of(self, log):
        """The port that an agent listens at, as its messages have it."""
        def find():
            for line in log.read_text(encoding="utf-8").splitlines():
                if "listening on 127.0.0.1:" in line:
                    return int(line.rsplit(":", 1)[1])
            return None
        wait(lambda: find() is not None)
        return find()

    def key(self, uid):
        path = home(uid) / "key"
        self.expect_exit(0, run_as(uid, "pec-save", "keygen", path))
        return path


class SocketFiles(Agents):
    def test_a_socket_of_another_user_is_refused_by_every_client(self):
        path, heard = self.shared / "agent.sock", self.shared / "heard"
        with forked(ATTACKER, answer_ok, path, heard):
            for uid in (VICTIM, 0):
                for words in (("pec-save", "status", f"unix:{path}"),
                              ("pec-save", "tell", f"unix:{path}", "stop"),
                              ("ucp-load", "status", f"unix:{path}"),
                              ("ucp-load", "stop", f"unix:{path}"),
                              ("pec-restore", home(uid) if uid else "/", self.shared / f"out{uid}", "--agents", f"unix:{path}")):
                    done = run_as(uid, *words)
                    with self.subTest(f"user {uid}: {words}"):
                        if words[0] == "pec-restore":
                            self.assertNotEqual(done.returncode, 0)
                            continue
                        self.expect_exit(MISMATCH, done, "user 0 expected" if uid == 0 else f"user {uid} or root expected",
                                         f"found user {ATTACKER}", "--trust-user")
            self.assertFalse(heard.exists(), "the other user's process was told something")
            done = run_as(0, "pec-save", "tell", f"unix:{path}", "stop", "--trust-user", ATTACKER)
            self.expect_exit(0, done)
            self.assertEqual(heard.read_bytes(), b"stop\n")
            done = run_as(0, "pec-save", "status", f"unix:{path}", "--trust-user", "no-such-user")
            self.expect_exit(USAGE, done, "no-such-user")

    def test_a_restore_asks_no_agent_of_another_user(self):
        folder = self.copy_series(VICTIM)
        self.expect_exit(0, run_as(VICTIM, "pec-save", folder, home(VICTIM) / "store"))
        path, heard = self.shared / "agent.sock", self.shared / "heard"
        with forked(ATTACKER, answer_ok, path, heard):
            done = run_as(VICTIM, "pec-restore", home(VICTIM) / "store", home(VICTIM) / "out", "--agents", f"unix:{path}",
                          "--lost-nodes", "unreachable")
            self.expect_exit(MISMATCH, done, f"found user {ATTACKER}")
            self.assertFalse(heard.exists())

    def test_agents_of_the_same_user_and_of_root_are_accepted(self):
        with self.agent(VICTIM) as (path, _, _):
            self.assertEqual(self.status(VICTIM, f"unix:{path}")["store"], str(home(VICTIM) / "store"))
            done = run_as(0, "pec-save", "status", f"unix:{path}")
            self.expect_exit(MISMATCH, done, f"found user {VICTIM}")
            self.status(0, f"unix:{path}", "--trust-user", VICTIM)
            # Another user is not let in, whatever the modes are.
            os.chmod(home(VICTIM), 0o755)
            os.chmod(path, 0o777)
            done = run_as(ATTACKER, "pec-save", "status", f"unix:{path}", "--trust-user", VICTIM)
            self.assertNotEqual(done.returncode, 0)
            done = run_as(VICTIM, "pec-save", "tell", f"unix:{path}", "stop")
            self.expect_exit(0, done)

    def test_root_of_a_container_has_agents_of_its_own(self):
        container = ("unshare", "--user", "--map-root-user")
        if run_as(VICTIM, *container, "true").returncode != 0:
            self.skipTest("no user namespaces here")
        with self.agent(VICTIM, prefix=container) as (path, process, _):
            enter = ("nsenter", "--user", "--preserve-credentials", "--target", process.pid)
            done = run_as(VICTIM, *enter, "pec-save", "status", f"unix:{path}")
            self.expect_exit(0, done)

    def test_a_socket_file_of_another_user_is_left_alone_and_named(self):
        path = users.WORLD / "group" / "agent.sock"
        os.chmod(users.WORLD / "group", 0o777)  # every user with write access could remove it
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        os.chown(path, ATTACKER, ATTACKER)
        self.copy_series(VICTIM)
        done = run_as(VICTIM, "pec-save", "agent", home(VICTIM) / "ckpt", home(VICTIM) / "store", "--listen", f"unix:{path}")
        self.expect_exit(BUSY, done, path, f"user {ATTACKER}")
        self.assertTrue(path.exists())


class Ports(Agents):
    def test_a_relay_does_not_make_an_agent_its_own_peer(self):
        key = self.key(VICTIM)
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)
        far = f"127.0.0.1:{listener.getsockname()[1]}"
        with self.agent(VICTIM, "--listen", "127.0.0.1:0", "--peer", far, "--key", key) as (path, _, log):
            with forked(ATTACKER, relay, listener, self.port_of(log)):
                self.expect_exit(0, run_as(VICTIM, "pec-save", "tell", f"unix:{path}", "snapshot"))
                wait(lambda: "itself" in log.read_text(encoding="utf-8"))
                said = log.read_text(encoding="utf-8")
                self.assertIn(f"copy to {far}", said)
                self.assertIn("a relay in between", said)
                self.assertNotIn("copied iteration", said)
                self.assertEqual(self.status(VICTIM, f"unix:{path}")["copies"], [])

    def test_two_agents_need_two_names(self):
        key = self.key(VICTIM)
        with self.agent(VICTIM, "--copies-only", "--listen", "127.0.0.1:0", "--key", key, "--name", "same",
                        path=home(VICTIM) / "b.sock") as (_, _, other):
            far = f"127.0.0.1:{self.port_of(other)}"
            with self.agent(VICTIM, "--peer", far, "--key", key, "--name", "same") as (path, _, log):
                self.expect_exit(0, run_as(VICTIM, "pec-save", "tell", f"unix:{path}", "snapshot"))
                wait(lambda: 'both agents have the name "same"' in log.read_text(encoding="utf-8"))
            with self.agent(VICTIM, "--peer", far, "--key", key, "--name", "other") as (path, _, log):
                self.expect_exit(0, run_as(VICTIM, "pec-save", "tell", f"unix:{path}", "snapshot"))
                wait(lambda: "copied iteration" in log.read_text(encoding="utf-8"))

    def test_failed_handshakes_keep_no_key_holder_out(self):
        key = self.key(VICTIM)
        with self.agent(VICTIM, "--copies-only", "--listen", "127.0.0.1:0", "--key", key) as (_, _, log):
            port = self.port_of(log)
            counted, failures = os.pipe()
            with forked(ATTACKER, fail_handshakes, port, failures):
                os.close(failures)
                for _ in range(5):
                    self.status(VICTIM, f"127.0.0.1:{port}", "--key", key)
            with open(counted, "rb") as all_failures:
                self.assertGreater(len(all_failures.read()), 30)
            # No client had to try a second time, and the failures were reported, but not one by one.
            said = log.read_text(encoding="utf-8")
            self.assertIn("a connection from 127.0.0.1", said)
            self.assertLess(said.count("a connection from 127.0.0.1"), 10)

    def test_an_older_client_is_told_so(self):
        with self.agent(VICTIM, "--copies-only", "--listen", "127.0.0.1:0", "--insecure") as (_, _, log):
            for line, expected in ((b"status\n", b"error 2 a client of an older version"),
                                   (b"hello 1 client a b\n", b"error 9 ")):
                with socket.create_connection(("127.0.0.1", self.port_of(log))) as older:
                    older.sendall(line)
                    self.assertTrue(older.recv(4096).startswith(expected))


if __name__ == "__main__":
    users.main()
