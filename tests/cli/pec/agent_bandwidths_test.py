#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bandwidths that an agent measures: pec-save status shows them, and pec-save plan uses them.

Usage: agent_bandwidths_test.py BIN
"""

import json
import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import agent_test  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position


class Measured(agent_test.Agents):
    def setUp(self):
        super().setUp()
        tokens = self.work / "counts.jsonl"
        tokens.write_text(json.dumps({"iteration": 1, "tokens": [[40, 25, 20, 15], [70, 20, 6, 4]]}) + "\n", encoding="utf-8")
        self.sizes = ["--tokens", tokens, "--ep", 4, "--expert-params", 10, "--nonexpert-params", "0",
                      "--param-bytes", "1,0,0"]

    def plan(self, *words, policy="budget", code=0):
        return self.run_tool("pec-save", "plan", *self.sizes, "--policy", policy, *words, code=code)

    def test_of_memory_and_of_a_peer(self):
        self.start("far", "--copies-only", store=self.work / "far-store")
        self.start("a", "--peer", self.address("far"))
        plan = ["--agent", self.address("a"), "--iteration-time", 1]
        self.assertEqual(self.status("a")["bandwidths"], {"host_bytes_per_s": None, "network_bytes_per_s": None})
        self.assertIn("\nbandwidth none to memory, none to the slowest peer\n", self.stdout)
        self.plan(*plan, code=3)
        self.assertIn("has not copied a snapshot yet, so it has no bandwidth to host memory; take one with pec-save tell "
                      f"{self.address('a')} snapshot", " ".join(self.stderr.split()))
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["peers"][0]["iteration"] == 3)
        status = self.status("a")
        measured, peer = status["bandwidths"], status["peers"][0]
        self.assertGreater(min(status["snapshot_bytes"], peer["copied_bytes"]), 1000)
        self.assertLessEqual(peer["copied_bytes"], status["snapshot_bytes"])
        self.assertAlmostEqual(measured["host_bytes_per_s"] * status["snapshot_seconds"], status["snapshot_bytes"], 3)
        self.assertAlmostEqual(measured["network_bytes_per_s"] * peer["copied_seconds"], peer["copied_bytes"], 3)
        self.assertRegex(self.stdout, r"\nbandwidth [0-9.]+ [KMG]iB/s to memory, [0-9.]+ [KMG]iB/s to the slowest peer\n")

        # The agent copies for all ranks, so each has its share.
        levels = self.plan(*plan)["levels"]
        self.assertIn("measured by the agent, for all ranks: ", self.stdout)
        self.assertEqual(levels["agent"], measured)
        self.assertEqual((levels["local"]["bytes_per_s"], levels["local"]["ranks"]), (int(measured["host_bytes_per_s"] / 4), 4))
        self.assertEqual(levels["remote"]["bytes_per_s"], int(measured["network_bytes_per_s"] / 4))
        by_flags = self.plan("--iteration-time", 1, "--host-bandwidth", levels["local"]["bytes_per_s"],
                             "--network-bandwidth", levels["remote"]["bytes_per_s"])["levels"]
        self.assertIsNone(by_flags["agent"])
        self.assertEqual(by_flags | {"agent": measured}, levels)
        levels = self.plan(*plan, "--network-bandwidth", 77, "--copies", 1)["levels"]
        self.assertEqual(levels["remote"]["bytes_per_s"], 77)

        # The second copy sends only what changed, and both copies count.
        self.checkpoint(4)
        self.wait(lambda: self.status("a")["peers"][0]["iteration"] == 4)
        self.assertGreater(self.status("a")["peers"][0]["copied_bytes"], peer["copied_bytes"])

    def test_without_a_copy_on_another_node(self):
        self.start("a")
        self.start("b", "--peer", self.address("nobody"), store=self.work / "b-store")
        self.checkpoint(3)
        for name in ("a", "b"):
            self.wait(lambda name=name: self.status(name)["newest"] == 3)
        levels = self.plan("--agent", self.address("a"), "--iteration-time", 1)["levels"]
        self.assertIsNone(levels["remote"])
        self.assertIn("/s to host memory, none to its slowest peer", self.stdout)
        plan = ["--agent", self.address("b"), "--iteration-time", 1]
        self.plan(*plan, code=3)
        self.assertIn(f"has not completed a copy to its peer {self.address('nobody')} yet", " ".join(self.stderr.split()))
        self.assertEqual(self.plan(*plan, "--network-bandwidth", 9)["levels"]["remote"]["bytes_per_s"], 9)

    def test_wrong_uses(self):
        agent = ["--agent", self.address("nobody"), "--iteration-time", 1]
        for words, said in ((agent[:2], "--agent requires --iteration-time"),
                            ([*agent, "--host-bandwidth", 1], "--host-bandwidth cannot be combined with --agent"),
                            ([*agent, "--budget", 1], "--budget cannot be combined with --agent"),
                            ([*agent, "--copies", 1], "--copies cannot be combined with --agent"),
                            ([*agent, "--dead-ranks", 0], "--dead-ranks cannot be combined with --agent"),
                            (["--key", self.key], "--key requires --agent"),
                            (["--agent", "127.0.0.1:1", "--iteration-time", 1], "a port requires the key of the agents"),
                            (["--agent", "here", "--iteration-time", 1], "here")):
            with self.subTest(words=words):
                self.plan(*words, code=2)
                self.assertIn(said, " ".join(self.stderr.split()))
        self.plan(*agent, policy="sequential", code=2)
        self.assertIn("--agent requires --policy budget", self.stderr)
        self.plan(*agent, code=3)
        self.plan("--agent", "127.0.0.1:1", "--iteration-time", 1, "--key", self.key, code=3)


if __name__ == "__main__":
    stores.main()
