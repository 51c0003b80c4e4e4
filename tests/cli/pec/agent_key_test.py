#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Agents at ports with a key: a client with the key is accepted, by flag or environment, through the hooks
too. Every other client is rejected, and does not count as a lost node.

Usage: agent_key_test.py BIN
"""

import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import agent_test  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position
from stores import environment  # pylint: disable=wrong-import-position

SLOTS = 64


class Keyed(agent_test.Agents):
    def setUp(self):
        super().setUp()
        self.other_key = self.work / "other-key"
        self.run_tool("pec-save", "keygen", self.other_key)

    def serve(self, *words):
        """\\returns an agent for copies, and its port as HOST:PORT"""
        agent = self.start("b", "--copies-only", "--listen", "127.0.0.1:0", "--key", self.key, *words)
        return agent, self.tcp(agent)

    def at(self, address, *words, code=0):
        return self.run_tool("pec-save", "status", address, *words, code=code)


class KeyFiles(Keyed):
    def test_keygen_makes_a_file_for_its_owner(self):
        self.assertEqual(self.key.stat().st_mode & 0o777, 0o600)
        before = self.key.read_text()
        self.run_tool("pec-save", "keygen", self.key, code=6)
        self.assertEqual(self.key.read_text(), before)
        self.assertNotEqual(self.other_key.read_text(), before)

    def test_other_files_are_refused(self):
        _, address = self.serve()
        for mode in (0o640, 0o604, 0o666):
            self.key.chmod(mode)
            self.at(address, "--key", self.key, code=4)
            self.assertIn(f"found mode {mode:04o}", self.stderr)
        self.key.chmod(0o600)
        for text in ("", "0" * 63, "0" * 66, "x" * 64):
            self.other_key.write_text(text)
            self.at(address, "--key", self.other_key, code=4)
        self.at(address, "--key", self.work / "none", code=3)
        self.at(address, "--key", self.work, code=4)
        link = self.work / "link"
        link.symlink_to(self.key)
        self.at(address, "--key", link)
        if os.geteuid() == 0:
            os.chown(self.key, 65534, 65534)
            self.at(address, "--key", self.key, code=4)
            self.assertIn("found one of user 65534", self.stderr)
        # An agent does not start with such a file, nor without any.
        for words, code in ((("--key", self.other_key), 4), ((), 2)):
            self.run_tool("pec-save", "agent", self.run_folder, self.store, "--listen", "127.0.0.1:0",
                          *words, code=code)


class Letting(Keyed):
    def test_the_key_in_and_nothing_else(self):
        agent, address = self.serve()
        self.at(address, "--key", self.key)
        self.at(address, code=2)
        self.assertIn("--insecure to accept every client", self.stderr)
        self.at(address, "--insecure", code=2)
        self.assertIn("this port requires the agent's key; pass --key FILE", self.stderr)
        self.at(address, "--key", self.other_key, code=5)
        self.at(address, "--key", self.key, "--insecure", code=2)
        self.at("127.0.0.1:1", "--key", self.key, code=3)
        # The socket file is its user's, and asks for no key.
        self.at(self.address("b"), "--key", self.work / "none")
        self.assertEqual(self.end(agent), 0)

    def test_a_key_where_none_is_expected(self):
        agent = self.start("b", "--copies-only", "--listen", "127.0.0.1:0", "--insecure")
        address = self.tcp(agent)
        self.at(address, "--key", self.key, code=5)
        self.at(address, "--insecure")
        self.assertEqual(self.end(agent), 0)

    def test_who_has_another_key_is_not_lost(self):
        self.save(4)
        _, address = self.serve()
        agents = ("--agents", address, "--lost-nodes", "unreachable")
        self.restore("out", *agents, "--key", self.other_key, code=5)
        self.restore("out", *agents, "--insecure", code=2)
        self.restore("out", *agents, code=2)
        self.assertFalse((self.work / "out").exists())
        self.assertEqual(list((self.store / "recoveries").iterdir()), [])
        self.restore("out", *agents, "--key", self.key)
        self.assertEqual(self.report["result"]["lost_nodes"], [])

    def test_a_peer_with_another_key_gets_no_copy(self):
        _, address = self.serve()
        sender = self.start("a", "--k", 2, "--peer", address, "--key", self.other_key)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        self.assertEqual(self.status("b")["copies"], [])
        self.assertEqual(self.end(sender), 0)
        self.assertIn(f"copy to {address}", sender.stderr.read())


class Hooks(Keyed):
    def test_the_environment_gives_them_the_key(self):
        variables = {"SHARDWRIGHT_AGENT_KEY": str(self.key)}
        self.store.parent.mkdir(exist_ok=True)
        _, far = self.serve()
        start = ("pec-agent.sh", "start", self.work / "a", self.run_folder, self.store, "--k", 2,
                 "--listen", "127.0.0.1:0", "--peer", far, "--name", "node-a")
        self.hook(*start, code=1)
        self.assertIn("a port requires the key of the agents", self.stderr)
        self.hook(*start, **variables)
        pid = int((self.work / "a.pid").read_text())
        self.addCleanup(lambda: os.path.exists(f"/proc/{pid}") and os.kill(pid, signal.SIGKILL))
        self.checkpoint(3)
        self.hook("pec-save-hook.sh", self.work / "a", self.run_folder, self.store, **variables)
        self.wait(lambda: self.status("b")["copies"])
        self.hook("pec-agent.sh", "stop", self.work / "a", **variables)
        out = self.work / "out"
        restore = ("pec-restore-hook.sh", self.store, out, "--agents", far)
        self.hook(*restore, code=2)
        self.hook(*restore, code=5, SHARDWRIGHT_AGENT_KEY=str(self.other_key))
        self.assertFalse(out.exists())
        self.assertEqual(self.hook(*restore, **variables), str(out))
        self.assertEqual(self.hook(*restore, "--key", self.key), str(out))
        self.same("out", 3, self.report_versions())

    def report_versions(self):
        self.restore("again", "--read-only")
        return self.report["versions"]


class Between:
    """Passes bytes between a client and an agent, and flips one bit after a number of bytes."""

    def __init__(self, address, after, of_agent):
        host, port = address.rsplit(":", 1)
        self.to, self.after, self.of_agent = (host, int(port)), after, of_agent
        self.flips = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            try:
                front = self.listener.accept()[0]
            except OSError:
                return
            back = socket.create_connection(self.to)
            for pair in ((front, back, False), (back, front, True)):
                threading.Thread(target=self.carry, args=pair, daemon=True).start()

    def carry(self, source, sink, of_agent):
        done = 0
        try:
            while some := bytearray(source.recv(1 << 16)):
                if of_agent == self.of_agent and done <= self.after < done + len(some):
                    some[self.after - done] ^= 1 << random.randrange(8)
                    self.flips += 1
                done += len(some)
                sink.sendall(some)
        except OSError:
            pass
        for one in (source, sink):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self):
        self.listener.close()


class Attacks(Keyed):
    """Other clients at the port of an agent that takes copies, while copies come."""

    def resident(self, agent):
        status = pathlib.Path(f"/proc/{agent.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    def files(self, agent):
        return len(os.listdir(f"/proc/{agent.pid}/fd"))

    def test_bits_that_are_flipped_on_the_way(self):
        agent, address = self.serve()
        sender = self.start("a", "--k", 2)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        self.assertEqual(self.end(sender), 0)
        files = self.files(agent)
        flips = 0
        for after in (0, 5, 100, 250, 400, 1000, 5000, 12000):
            for of_agent in (False, True):
                between = Between(address, after, of_agent)
                self.addCleanup(between.close)
                argv = [stores.Given.bin / "pec-save", "status", between.address, "--key", self.key]
                done = subprocess.run([str(word) for word in argv], env=environment(), text=True,
                                      capture_output=True, timeout=1200, check=False)
                if between.flips:
                    self.assertNotEqual(done.returncode, 0, f"{after} {of_agent}")
                    self.assertNotIn("memory", done.stdout)
                flips += between.flips
        self.assertGreaterEqual(flips, 6)
        # A copy of a snapshot through a proxy that flips a bit of its bytes.
        between = Between(address, 9000, False)
        self.addCleanup(between.close)
        sender = self.start("a", "--k", 2, "--peer", between.address, "--key", self.key)
        self.checkpoint(4)
        self.wait(lambda: self.status("a")["persisted"] == 4)
        self.wait(lambda: between.flips)
        self.wait(lambda: self.files(agent) <= files + 1)
        self.assertEqual(self.status("b")["copies"], [])
        self.assertEqual(self.end(sender), 0)
        self.assertEqual(self.end(agent), 0)

    def test_a_crowd_that_says_nothing_holds_nothing_up(self):
        agent, address = self.serve()
        host, port = address.rsplit(":", 1)
        files, resident = self.files(agent), self.resident(agent)
        crowd = []
        for i in range(1000):
            one = socket.create_connection((host, int(port)), timeout=600)
            self.addCleanup(one.close)
            crowd.append(one)
            if i % 2:
                one.sendall(b"\x16\x03\x01\x02")
        sender = self.start("a", "--k", 2, "--peer", address, "--key", self.key, "--name", "node-a")
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        self.wait(lambda: self.status("b")["copies"] == [{"origin": "node-a", "iteration": 3}])
        self.at(address, "--key", self.key)
        self.assertLess(self.files(agent), files + 2 * SLOTS)
        self.assertLess(self.resident(agent) - resident, 128 << 20)
        for one in crowd:
            one.close()
        self.assertEqual(self.end(sender), 0)
        self.wait(lambda: self.files(agent) <= files)
        self.assertEqual(self.end(agent), 0)

    def test_slow_writers_and_noise(self):
        agent, address = self.serve()
        host, port = address.rsplit(":", 1)
        files = self.files(agent)
        over = threading.Event()

        def write(number):
            noise = random.Random(number)
            while not over.is_set():
                try:
                    with socket.create_connection((host, int(port)), timeout=100) as one:
                        if number % 2:
                            one.sendall(noise.randbytes(2000))
                        else:
                            one.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
                            while not over.wait(0.05):
                                one.sendall(b"x")
                except OSError:
                    time.sleep(0.05)

        writers = [threading.Thread(target=write, args=(number,)) for number in range(24)]
        for writer in writers:
            writer.start()
        try:
            self.start("a", "--k", 2, "--peer", self.address("b"), "--name", "node-a")
            for iteration in (3, 4):
                self.checkpoint(iteration)
                self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
                self.wait(lambda i=iteration:
                          [c["iteration"] for c in self.status("b")["copies"]] == [i])
        finally:
            over.set()
            for writer in writers:
                writer.join()
        self.at(address, "--key", self.key)
        self.wait(lambda: self.files(agent) <= files + 2)
        self.assertEqual(self.end(agent), 0)


if __name__ == "__main__":
    stores.main()
