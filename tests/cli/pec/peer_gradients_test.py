#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save agent --peer-gradients: a peer replays gradients and has the sender's states, bit for bit. Between
the agents is a relay that counts bytes, changes or cuts gradients, or kills an agent while they move.

Usage: peer_gradients_test.py BIN
"""

import contextlib
import json
import pathlib
import re
import signal
import socket
import sys
import threading

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from log_kills_test import Trainer  # pylint: disable=wrong-import-position
from memory_replay_test import Replays  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "lossless.md"


class Cut(Exception):
    """The relay closes both connections."""


class End:
    """One end of a relayed connection."""

    def __init__(self, connection, relay):
        self.socket, self.relay, self.received = connection, relay, b""

    def more(self):
        data = self.socket.recv(1 << 20)
        if not data:
            raise Cut
        self.received += data

    def line(self):
        while b"\n" not in self.received:
            self.more()
        return self.take(self.received.index(b"\n") + 1)

    def take(self, size):
        while len(self.received) < size:
            self.more()
        taken, self.received = self.received[:size], self.received[size:]
        return taken

    def send(self, data):
        self.relay.bytes += len(data)
        self.socket.sendall(data)


class Relay(threading.Thread):
    """Forwards copies from one agent to another at socket files. `spoil` may change the gradients of a
    module, or raise Cut with the beginning that is still forwarded."""

    def __init__(self, path, target):
        super().__init__(daemon=True)
        self.target, self.spoil = target, None
        self.bytes, self.modules, self.repeated = 0, 0, 0
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.start()

    def run(self):
        while True:
            try:
                client = self.listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self.serve, args=(client,), daemon=True).start()

    def serve(self, client):
        with client, socket.socket(socket.AF_UNIX) as server:
            try:
                server.connect(str(self.target))
                sender, peer = End(client, self), End(server, self)
                while True:
                    self.copy(sender, peer)
            except Cut as cut:
                with contextlib.suppress(OSError):
                    peer.send(cut.args[0] if cut.args else b"")
            except OSError:
                pass

    def copy(self, sender, peer):
        """One request `push`, as docs/formats/agent.md describes it."""
        line = sender.line()
        sizes = [int(word) for word in line.split()[2:]]
        manifest, catalogue = sender.take(sizes[0]), sender.take(sizes[1])
        announced = sender.take(sizes[3]) if len(sizes) > 3 else b""
        peer.send(line + manifest + catalogue + announced)
        names = [module["module"] for module in json.loads(manifest)["modules"]]
        gradients = dict.fromkeys(names, 0)
        for text in announced.splitlines():
            record = json.loads(text)
            gradients[record["module"]] += sum(piece["bytes"] for piece in record["pieces"])
        for turn in range(2 if announced else 1):
            answer = peer.line()
            sender.send(answer)
            if not answer.startswith(b"ok"):
                return
            requested = peer.take(int(answer.split()[1]))
            sender.send(requested)
            for one in requested.decode().splitlines():
                if one.startswith("gradients "):
                    self.modules += 1
                    data = sender.take(gradients[names[int(one.split()[1])]])
                    peer.send(self.spoil(data) if self.spoil else data)
                else:
                    self.repeated += turn
                    head = sender.line()
                    size, units = map(int, head.split()[1:])
                    peer.send(head + sender.take(4 * units + size))
        sender.send(peer.line())


class Copying(Replays):
    def setUp(self):
        super().setUp()
        self.relay = Relay(self.work / "p", self.work / "b")
        self.addCleanup(self.relay.listener.close)

    def pair(self, *words):
        """A sender with iteration 3 in the store and at the peer, and its trainer."""
        self.peer = self.start("b", "--copies-only")
        agent, trainer = self.begin("--peer", self.address("p"), *words)
        self.wait(lambda: self.copied()["iteration"] == 3)
        return agent, trainer

    def copied(self):
        return self.status("a")["peers"][0]

    def iterate(self, trainer, iterations):
        """Trains, and waits for the peer after each iteration."""
        for iteration in iterations:
            self.train(trainer, (iteration,))
            self.wait(lambda i=iteration: self.complete_copy(i))

    def same_at_peer(self, agent, iteration=8):
        """The sender is lost; the peer alone has all of the iteration, bit for bit."""
        self.end(agent, signal.SIGKILL)
        result = self.from_memory(f"out{iteration}", iteration=iteration, agents=("b",))
        self.assertEqual(result["stale_modules"], 0)

    def once(self, spoil):
        """Spoils the gradients of the first module that comes, and no others."""
        def first(data):
            try:
                return spoil(data)
            finally:
                self.relay.spoil = None
        self.relay.spoil = first
        return lambda: self.relay.spoil is None


class Faults(Copying):
    def test_the_peer_has_the_states(self):
        agent, trainer = self.pair("--peer-gradients")
        self.assertEqual(self.copied()["gradient_bytes"], 0)
        self.iterate(trainer, range(4, 9))
        copied = self.copied()
        self.assertGreater(copied["gradient_bytes"], 0)
        self.assertGreater(copied["replaced_bytes"], 0)
        self.assertEqual(self.relay.modules, 4 * self.experts(), "a skipped step changes nothing")
        self.assertEqual(self.relay.repeated, 0)
        self.assertRegex(self.stdout, r"newest copy 8, \S+ \S+ of gradients in place of \S+ \S+ of states")
        self.same_at_peer(agent)
        self.assertNotIn("the replay of gradients failed", agent.stderr.read())

    def test_changed_gradients_and_another_order(self):
        changes = {4: lambda data: data[:-1] + bytes([data[-1] ^ 1]), 6: lambda data: data[::-1],
                   8: lambda data: data[len(data) // 2:] + data[:len(data) // 2]}
        agent, trainer = self.pair("--peer-gradients")
        repeated = 0
        for iteration, change in changes.items():
            with self.subTest(iteration):
                done = self.once(change)
                # Two steps in each snapshot after the first: the last change exchanges them.
                for step in range(max(4, iteration - 1), iteration + 1):
                    trainer.step(step)
                self.take(iteration)
                self.wait(lambda i=iteration: self.complete_copy(i))
                self.assertTrue(done())
                self.assertGreater(self.relay.repeated, repeated, "blobs of the module")
                repeated = self.relay.repeated
        self.same_at_peer(agent)
        self.assertIn("the replay of gradients failed there", agent.stderr.read())

    def test_a_stream_that_is_cut(self):
        agent, trainer = self.pair("--peer-gradients")
        for iteration, part in ((4, 0), (6, 0.1), (7, 0.5), (8, 1)):
            def cut(data, part=part):
                raise Cut(data[:int(part * len(data))])
            done = self.once(cut)
            self.iterate(trainer, (iteration,))
            self.assertTrue(done())
            if iteration == 4:
                self.iterate(trainer, (5,))  # a skipped step, for which nothing is sent
        modules = self.relay.modules
        self.iterate(trainer, (9,))
        self.assertGreater(self.relay.modules, modules, "after states there are gradients again")
        self.assertEqual(self.copied()["failures"], 0)
        self.same_at_peer(agent, 9)

    def test_the_sender_is_killed(self):
        agent, trainer = self.pair("--peer-gradients")
        self.iterate(trainer, (4, 5))

        def kill(data):
            self.end(agent, signal.SIGKILL)
            raise Cut(data[:len(data) // 2])
        done = self.once(kill)
        self.train(trainer, (6,))
        self.wait(done)
        result = self.restore("out", "--agents", self.address("b"), "--replay=never")
        self.assertIn(result["iteration"], (5, 6))
        self.same("out", result["iteration"], result["versions"], self.model)
        if result["iteration"] == 5:
            self.assertEqual(result["stale_modules"], 0)

    def test_the_peer_is_killed(self):
        agent, trainer = self.pair("--peer-gradients")
        self.iterate(trainer, (4, 5))

        def kill(data):
            self.end(self.peer, signal.SIGKILL)
            raise Cut(data)
        done = self.once(kill)
        self.train(trainer, (6,))
        self.wait(done)
        self.wait(lambda: self.copied()["state"] == "failed")
        self.train(trainer, (7,))
        (self.work / "b").unlink()
        self.peer = self.start("b", "--copies-only")
        self.wait(lambda: self.complete_copy(7))
        modules = self.relay.modules
        self.iterate(trainer, (8,))
        self.assertGreater(self.relay.modules, modules)
        self.same_at_peer(agent)

    def test_training_goes_back(self):
        agent, trainer = self.pair("--peer-gradients")
        self.iterate(trainer, range(4, 8))
        trainer.close()
        self.wait(lambda: self.status("a")["persisted"] == 7)
        self.restore("back", "--at", 6, "--agents", f"{self.address('a')},{self.address('b')}")
        self.take(6)
        trainer = Trainer(self.work / "a", self.model, 6)
        self.addCleanup(trainer.close)
        self.train(trainer, (7, 8))
        self.wait(lambda: self.copied()["iteration"] == 8 and self.replays()["older"] == 0)
        self.end(agent, signal.SIGKILL)
        result = self.restore("out", "--agents", self.address("b"), "--replay=never", "--read-only")
        self.same("out", result["iteration"], result["versions"], self.model)

    def test_flags(self):
        for words, why in ((("--peer", "unix:x"), "--replay"), (("--replay", "--listen", "unix:a"), "--peer or --plan")):
            self.run_tool("pec-save", "agent", self.run_folder, self.store, "--peer-gradients", *words, code=2)
            self.assertIn(why, self.stderr)


class Bytes(Copying):
    """Experts that are large against the descriptions of records."""

    model_options = {"expert": {"0.weight": (96, 64), "2.weight": (64, 96)}}
    row = "float32"

    def test_bytes_of_the_same_job(self):
        sent = {}
        for way, words in (("states", ()), ("gradients", ("--peer-gradients",))):
            self.store = self.work / f"store of {way}"
            agent, trainer = self.pair(*words)
            self.iterate(trainer, (4, 5))
            before = self.relay.bytes
            self.iterate(trainer, (6, 7, 8))  # no step of these is skipped
            sent[way] = self.relay.bytes - before
            trainer.close()
            self.end(agent)
            self.end(self.peer)
        found = sent["states"] / sent["gradients"]
        print(f"{self.row}: {sent}: {found:.2f} times", file=sys.stderr)
        (documented,) = re.findall(rf"^\| {self.row} \| \S+ \| \S+ \| ([0-9.]+) \|$", PAGE.read_text(), re.MULTILINE)
        # A snapshot is copied once or twice, depending on when its replay ends.
        self.assertAlmostEqual(found, float(documented), delta=0.05 * float(documented))


class HalfBytes(Bytes):
    model_options = {**Bytes.model_options, "half": True}
    zstd = 3
    row = "float32, compressed, with values of bfloat16"


if __name__ == "__main__":
    stores.main()
