#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save agent as a process that serves its memory to peers and to pec-restore, also from job scripts.

Usage: agent_restore_test.py BIN
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import sys
import threading

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import stores  # pylint: disable=wrong-import-position
from agent_test import Agents  # pylint: disable=wrong-import-position
from stores import moe_checkpoint  # pylint: disable=wrong-import-position


class Restoring(Agents):
    def test_memory_is_newer_than_storage(self):
        self.start("a", "--k", 3, "--k-persist", 1, "--tokens", self.tokens_path)
        for iteration in (3, 4, 5):
            self.checkpoint(iteration)
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        stored = dict(self.restore_versions("--dry-run"))
        lost = sum(self.report["result"]["loss"]["lost"])
        memory = self.restore_versions("--agents", self.address("a"))
        result = self.report["result"]
        self.assertEqual(self.report["result"]["iteration"], 5)
        self.assertTrue(all(memory[m] >= stored[m] for m in stored))
        self.assertGreater(sum(memory.values()), sum(stored.values()))
        self.assertLess(sum(result["loss"]["lost"]), lost)
        self.assertEqual((result["bytes"]["peer"], result["bytes"]["storage"]), (0, 0))
        self.assertGreater(result["bytes"]["memory"], 0)
        self.same("out", 5, memory)
        # Training continues from 5.
        self.checkpoint(6)
        self.wait(lambda: self.status("a")["persisted"] == 6)

    def restore_versions(self, *words):
        self.restore("out", *words)
        modules = self.report["result"]["modules"]
        return {m["module"]: m["version"] for m in modules if m["expert"]}

    def test_what_is_only_in_memory_is_saved_first(self):
        agent = self.start("a", "--k", 2)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        lock = self.hold_lock()
        self.checkpoint(4)
        self.wait(lambda: self.status("a")["newest"] == 4)
        self.assertEqual(self.newest(), 3)
        self.restore("out", "--agents", self.address("a"), "--dry-run")
        self.assertEqual(self.report["result"]["iteration"], 4)
        self.assertEqual(self.newest(), 3, "a dry run saves nothing")
        lock.close()
        self.restore("out", "--agents", self.address("a"))
        self.assertEqual(self.report["iteration"], 4)
        self.same("out", 4, self.report["versions"])
        self.assertEqual(self.newest(), 4)
        self.assertEqual(self.end(agent), 0)

    def test_a_copy_that_is_replaced_after_it_was_listed(self):
        self.start("a", "--k", 2)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        with self.hold_lock():
            self.checkpoint(4)
            self.wait(lambda: self.status("a")["newest"] == 4)
            asked = self.relay("relay", "a", gone=1)
            self.restore("out", "--agents", self.address("relay"), "--dry-run")
            self.assertEqual(self.report["result"]["iteration"], 4)
            self.assertEqual([asked.count(word) for word in ("list", "catalogue")], [2, 2])
            self.relay("never", "a", gone=100)
            self.run_tool("pec-restore", self.store, self.work / "none", "--dry-run", "--restart", "--agents",
                          self.address("never"), code=3)
            self.assertIn("is not in memory", self.stderr)

    def relay(self, name, agent, gone):
        """A socket file that leads to the agent, which at first no longer has the catalogues it has listed.
        \returns the first words of the requests so far"""
        asked = []
        listener = socket.socket(socket.AF_UNIX)
        self.addCleanup(listener.close)
        listener.bind(str(self.work / name))
        listener.listen()

        def answers(client, server):
            while data := server.recv(1 << 16):
                client.sendall(data)

        def requests(client):
            with client, socket.socket(socket.AF_UNIX) as server:
                server.connect(str(self.work / agent))
                threading.Thread(target=answers, args=(client, server), daemon=True).start()
                for line in client.makefile("rb"):
                    asked.append(line.split()[0].decode())
                    if asked[-1] == "catalogue" and asked.count("catalogue") <= gone:
                        client.sendall(b"error 3 catalogue " + line.split()[1] + b" is not in memory\n")
                    else:
                        server.sendall(line)

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=requests, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return asked

    def test_training_that_went_back_is_followed(self):
        self.start("a", "--k", 2)
        for iteration in (3, 4, 5):
            self.checkpoint(iteration)
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        self.restore("out", "--at", 4, "--agents", self.address("a"))
        versions = self.report["versions"]
        self.assertEqual(self.report["result"]["iteration"], 4)
        self.assertTrue(all(v <= 4 for v in versions.values()))
        self.checkpoint(5)
        self.wait(lambda: self.status("a")["persisted"] == 5 and self.newest() == 5)
        self.run_tool("pec-save", "check", self.store)

    def test_a_peer_has_what_a_lost_node_held(self):
        peer = self.start("b", "--copies-only")
        self.start("a", "--k", 3, "--k-persist", 1, "--peer", self.address("b"), "--name", "node-a")
        lost = self.running[-1]
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        lock = self.hold_lock()
        self.checkpoint(4)
        self.wait(lambda: self.status("b")["copies"] == [{"origin": "node-a", "iteration": 4}])
        lost.kill()
        lost.wait()
        lock.close()
        self.assertEqual(self.newest(), 3)
        agents = ["--agents", self.address("a"), "--agents", self.address("b")]
        self.restore("out", *agents, code=3)
        self.assertIn("pass --lost-nodes 0", self.stderr)
        self.assertEqual(self.newest(), 3, "the peer was not told to save either")
        self.assertFalse((self.work / "out").exists())
        self.restore("out", *agents, "--lost-nodes", 0)
        result = self.report["result"]
        self.assertEqual((result["lost_nodes"], result["lost_agents"]), ([0], [self.address("a")]))
        self.assertIn("lost with its snapshots in memory", self.stderr)
        self.assertIn("lost node 0", self.stdout)
        self.assertEqual(result["iteration"], 4)
        fresh = [m for m in result["modules"] if m["expert"] and m["version"] == 4]
        self.assertEqual(len(fresh), 6, "three of four experts of two layers were in memory")
        self.same("out", 4, self.report["versions"])
        self.assertEqual(self.end(peer), 0)

    def test_a_lost_node_among_three(self):
        self.save(3)
        key = ("--key", self.key)
        far = self.tcp(self.start("b", "--copies-only", "--listen", "127.0.0.1:0", *key))
        self.start("c", "--copies-only")
        lost = self.start("a", "--k", 3, "--k-persist", 1, "--name", "node-a", "--peer", far,
                          "--peer", self.address("c"), *key)
        lock = self.hold_lock()
        self.checkpoint(4)
        for name in ("b", "c"):
            self.wait(lambda n=name: [c["iteration"] for c in self.status(n)["copies"]] == [4])
        lost.kill()
        lost.wait()
        lock.close()
        three = ",".join([self.address("a"), far, self.address("c")])
        self.restore("out", "--agents", three, "--lost-nodes", 1, *key, code=3)
        self.assertIn("agent of node 0", self.stderr)
        self.assertEqual(self.newest(), 3)
        # A peer has the experts of the lost node, here behind TCP; its fourth expert is in the store alone.
        for agents, words, source in ((f"{self.address('a')},{far}", ["0"], "peer"),
                                      (three, ["unreachable"], "memory"),
                                      (three, ["0,2"], "peer"), (three, ["0,1,2"], "storage")):
            lost_nodes = [w for word in words for w in ("--lost-nodes", word)]
            self.restore("out", "--force", "--agents", agents, *lost_nodes, *key)
            result = self.report["result"]
            self.assertEqual(result["iteration"], 4)
            by_source = {"memory": 0, "peer": 0, "storage": 0}
            count = dict.fromkeys(by_source, 0)
            for module in result["modules"]:
                count[module["source"]] += 1
                by_source[module["source"]] += sum(
                    module[part]["bytes"] for part in ("weights", "master", "moments")
                    if part in module)
            self.assertEqual(result["bytes"], by_source)
            experts = [m for m in result["modules"] if m["expert"]]
            if source == "storage":
                # The persist level: one expert of each layer is of 4.
                self.assertEqual(count["storage"], len(result["modules"]))
                self.assertEqual(sum(m["version"] == 4 for m in experts), 2)
            else:
                self.assertEqual(count["storage"], 2)
                self.assertEqual(count[source], len(result["modules"]) - 2)
                self.assertEqual({(m["version"], m["source"]) for m in experts},
                                 {(4, source), (3, "storage")})
            self.same("out", 4, self.report["versions"])
        self.assertEqual(result["lost_nodes"], [0, 1, 2])

    def test_lost_nodes_are_not_asked(self):
        self.start("a", "--k", 3, "--k-persist", 1)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        self.restore("out", "--agents", self.address("a"), "--lost-nodes", 0)
        result = self.report["result"]
        self.assertEqual((result["bytes"]["memory"], result["lost_nodes"]), (0, [0]))
        for words, said in ((["--lost-nodes", 0], "--lost-nodes requires --agents"),
                            (["--agents", self.address("a"), "--lost-nodes", 1], "0 to 0"),
                            (["--agents", self.address("a"), "--lost-nodes", "all"], "all"),
                            (["--agents", "unix:/x,,"], "address")):
            self.restore("out2", *words, code=2)
            self.assertIn(said, self.stderr)

    def test_over_tcp(self):
        for words in (("--key", self.key), ("--insecure",)):
            shutil.rmtree(self.store, ignore_errors=True)
            peer = self.start("b", "--copies-only", "--listen", "127.0.0.1:0", *words)
            address = self.tcp(peer)
            agent = self.start("a", "--k", 2, "--peer", address, *words)
            self.checkpoint(3)
            self.wait(lambda: self.status("b")["copies"])
            self.wait(lambda: self.status("a")["persisted"] == 3)
            self.restore("out", "--force", "--agents", address, *words)
            self.assertEqual("--insecure turns off authentication" in self.stderr, len(words) == 1)
            result = self.report["result"]
            self.assertEqual((result["bytes"]["memory"], result["bytes"]["storage"]), (0, 0))
            self.assertGreater(result["bytes"]["peer"], 0)
            self.same("out", 3, self.report["versions"])
            self.assertEqual(self.run_tool("pec-save", "tell", address, "flush", *words),
                             {"answer": "3"})
            self.run_tool("pec-save", "tell", address, "stop", *words, code=2)
            self.assertEqual((self.end(agent), self.end(peer)), (0, 0))

    def test_another_model_is_not_used(self):
        self.start("a", "--k", 2)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        other = moe_checkpoint.Model(experts=2, ep=1, ranks=1, seed=5)
        moe_checkpoint.write(self.work / "other", other, 3)
        self.run_tool("pec-save", self.work / "other", self.work / "other-store")
        result = self.run_tool("pec-restore", self.work / "other-store", self.work / "out", "--agents", self.address("a"))
        self.assertIn("so of another run; the restore does not use it", self.stderr)
        self.assertEqual({one["source"] for one in result["modules"]}, {"storage"})


class Hooks(Agents):
    """The job-script pieces of scripts/slurm, with the real commands."""

    def log(self, *iterations, torn=""):
        text = "".join(json.dumps({"iteration": i, "tokens": self.tokens[i]}) + "\n"
                       for i in iterations)
        (self.work / "tokens.jsonl").write_text(text + torn)

    def logged(self):
        return [json.loads(line)["iteration"]
                for line in (self.work / "tokens.jsonl").read_text().splitlines()]

    def test_a_run_that_is_killed_and_requeued(self):
        socket, out = self.work / "a", self.work / "out"
        agents = ["--agents", self.address("a")]
        for counted in ((), (1, 2)):  # the first start; again, killed before a checkpoint
            self.log(*counted)
            self.assertEqual(self.hook("pec-restore-hook.sh", self.store, out, *agents), "")
            self.assertEqual(self.logged(), [], "training starts anew")
        flags = ["--k", 2, "--tokens", self.work / "tokens.jsonl"]
        self.hook("pec-agent.sh", "start", socket, self.run_folder, self.store, *flags)
        pid = int((self.work / "a.pid").read_text())
        self.addCleanup(lambda: os.path.exists(f"/proc/{pid}") and os.kill(pid, signal.SIGKILL))
        for iteration in (3, 4):
            self.log(*range(1, iteration + 1))
            self.checkpoint(iteration)
            self.hook("pec-save-hook.sh", socket, self.run_folder, self.store, *flags)
            # The hook returns when the files are copied; the agent still looks at the copy.
            self.wait(lambda newest=iteration: self.status("a")["newest"] == newest)
        # Killed in the middle of a line; the agent lives on, and a second start finds it.
        self.log(1, 2, 3, 4, 5, torn='{"iteration": 6, "tok')
        self.hook("pec-agent.sh", "start", socket, self.run_folder, self.store, *flags)
        self.assertEqual(int((self.work / "a.pid").read_text()), pid)
        self.assertEqual(self.hook("pec-restore-hook.sh", self.store, out, *agents), str(out))
        report = json.loads((self.work / "out.report.json").read_text())
        self.assertEqual(report["result"]["iteration"], 4)
        self.assertEqual(self.logged(), [1, 2, 3, 4])
        self.same("out", 4, report["versions"])
        self.hook("pec-agent.sh", "stop", socket)
        self.hook("pec-agent.sh", "stop", socket, code=3)
        # Without an agent the hooks use the store alone.
        self.log(*range(1, 6))
        self.checkpoint(5)
        self.hook("pec-save-hook.sh", socket, self.run_folder, self.store, *flags)
        self.assertEqual(self.newest(), 5)
        self.hook("pec-restore-hook.sh", self.store, out, *agents)
        self.assertEqual(json.loads((self.work / "out.report.json").read_text())
                         ["result"]["lost_agents"], [self.address("a")])

    def test_a_store_that_is_hidden_while_an_agent_has_it(self):
        self.start("a", "--k", 2)
        self.checkpoint(4)
        self.wait(lambda: self.status("a")["persisted"] == 4)
        self.store.rename(self.work / "elsewhere")
        agents = ["--agents", self.address("a")]
        for _ in range(2):  # no mark is left, so that the next start knows no more
            self.assertEqual(self.hook("pec-restore-hook.sh", self.store, self.work / "out",
                                       *agents, code=3), "")
            self.assertFalse(self.store.exists())
        self.run_tool("pec-restore", self.store, "--format", "none", "--allow-empty", "--begin",
                      *agents, "--dry-run", code=3)
        self.assertIn(f"there is no store, but {self.address('a')} has iteration 4", self.stderr)

    def test_misuse(self):
        for name in ("pec-agent.sh", "pec-save-hook.sh", "pec-restore-hook.sh"):
            self.hook(name, code=2)
        self.hook("pec-agent.sh", "restart", "a", code=2)
        self.hook("pec-agent.sh", "start", self.work / "a", self.run_folder, self.store,
                  "--policy", "none", code=1)


if __name__ == "__main__":
    stores.main()
