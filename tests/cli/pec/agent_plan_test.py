#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Agents that find their peers in a plan of pec-save plan: start, a lost node, a new plan, a restore from the
copies, and plans that agents reject.

Usage: agent_plan_test.py BIN
"""

import json
import pathlib
import shutil
import socket
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from agent_test import Agents  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position

try:
    import jsonschema
except ImportError:
    jsonschema = None

JOB = ("--ep", 1, "--ranks-per-node", 1, "--copies", 1)


class Planned(Agents):
    def setUp(self):
        super().setUp()
        self.file = self.work / "plan.json"

    def plan(self, names, *words, file=None, code=0):
        """An agent plan with socket files, a rank each. \\returns its part of the report"""
        agents = ",".join(f"node-{name}={self.address(name)}" for name in names)
        result = self.run_tool("pec-save", "plan", *words, *JOB, "--dp", len(names), "--agents", agents,
                               "-o", file or self.file, code=code)
        return result and result["agent_plan"]

    def replan(self, *words, output=None, code=0):
        return self.run_tool("pec-save", "replan", self.file, output or self.file, "--force", *words, code=code)

    def follow(self, name, *words, file=None, **options):
        return self.start(name, "--plan", file or self.file, *words, **options)

    def versions(self, names, version):
        """Waits until these agents have a version of the plan."""
        for name in names:
            self.wait(lambda n=name: self.status(n)["plan"]["version"] == version)

    def copies(self, name):
        return [(c["origin"], c["iteration"]) for c in self.status(name)["copies"]]

    def peers(self, name):
        return [peer["address"] for peer in self.status(name)["peers"]]

    def kill(self, agent):
        agent.kill()
        agent.wait()


class Following(Planned):
    def test_copies_are_sent_again_after_a_node_is_lost(self):
        plan = self.plan("abc")
        self.assertEqual({a["name"]: a["peers"] for a in plan["agents"]},
                         {"node-a": ["node-b"], "node-b": ["node-c"], "node-c": ["node-a"]})
        self.assertRegex(self.stdout, r"node-a +unix:\S+ +0-0 +node-b")
        a = self.follow("a", "--k", 3, "--k-persist", 1)
        b, c = self.follow("b", "--copies-only"), self.follow("c", "--copies-only")
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        lock = self.hold_lock()
        self.checkpoint(4)
        self.wait(lambda: self.copies("b") == [("node-a", 4)])
        self.assertEqual((self.copies("c"), self.peers("a"), self.peers("c")),
                         ([], [self.address("b")], [self.address("a")]))

        self.kill(b)
        self.replan("--lost", "node-b")
        self.versions("ac", 2)
        self.wait(lambda: self.copies("c") == [("node-a", 4)])
        self.wait(lambda: self.status("a")["peers"][0]["state"] == "complete")
        self.assertEqual(self.peers("a"), [self.address("c")])
        self.assertIn("version 2 of job " + plan["job"], self.stdout)

        self.kill(a)
        lock.close()
        agents = ",".join(self.address(name) for name in "abc")
        self.restore("out", "--agents", agents, "--lost-nodes", "0,1")
        result = self.report["result"]
        self.assertEqual((result["iteration"], result["lost_nodes"]), (4, [0, 1]))
        self.assertGreater(result["bytes"]["memory"], 0)
        fresh = [m for m in result["modules"] if m["expert"] and m["version"] == 4]
        self.assertEqual(len(fresh), 6, "three of four experts of two layers were in memory only")
        self.same("out", 4, self.report["versions"])
        self.assertEqual(self.end(c), 0)

    def test_a_node_that_joins_gets_the_copies_of_its_place(self):
        ports = [free_port() for _ in range(3)]
        places = [f"node-{name}=127.0.0.1:{port}" for name, port in zip("abc", ports)]
        self.run_tool("pec-save", "plan", *JOB, "--dp", 2, "--agents", places[0], "--agents", places[1],
                      "-o", self.file)
        key = ("--key", self.key)
        self.follow("a", "--k", 3, *key)
        b = self.follow("b", "--copies-only", *key)
        self.checkpoint(3)
        self.wait(lambda: self.copies("b") == [("node-a", 3)])
        self.kill(b)
        self.replan("--lost", "node-b")
        self.assertIn("only 1 agent for 1 copies on other nodes", self.stderr)
        self.versions("a", 2)
        self.wait(lambda: self.peers("a") == [])
        self.replan("--joined", places[2])
        self.follow("c", "--copies-only", *key)
        self.wait(lambda: self.copies("c") == [("node-a", 3)])
        peer = self.status("a")["peers"][0]
        self.assertEqual((peer["agent"], peer["address"]), ("node-c", f"127.0.0.1:{ports[2]}"))
        # The same node again, as after a reboot: its memory is empty.
        self.kill(self.running[-1])
        (self.work / "c").unlink()
        self.replan("--lost", "node-c", "--joined", places[2])
        self.follow("c", "--copies-only", *key)
        self.wait(lambda: self.copies("c") == [("node-a", 3)])

    def test_a_plan_with_socket_files_is_followed_by_one_with_a_port(self):
        self.plan("ab")
        key = ("--key", self.key)
        self.follow("a", "--k", 3, *key)
        self.checkpoint(3)
        place = f"127.0.0.1:{free_port()}"
        self.replan("--lost", "node-b", "--joined", f"node-c={place}")
        self.follow("c", "--copies-only", *key)
        self.wait(lambda: self.copies("c") == [("node-a", 3)])
        self.assertEqual(self.peers("a"), [place])

    def test_copies_wait_for_the_plan_of_the_holder(self):
        files = {name: self.work / f"plan-{name}.json" for name in "abc"}
        self.plan("abc")
        for file in files.values():
            shutil.copy(self.file, file)
        self.follow("a", "--k", 3, file=files["a"])
        b = self.follow("b", "--copies-only", file=files["b"])
        self.follow("c", "--copies-only", file=files["c"])
        self.checkpoint(3)
        self.wait(lambda: self.copies("b") == [("node-a", 3)])
        self.kill(b)
        self.replan("--lost", "node-b")
        self.deliver(files["a"])
        self.wait(lambda: self.status("a")["peers"][0]["failures"] > 0)
        self.assertIn("has version 1 of the plan, this agent version 2", self.status("a")["peers"][0]["last_error"])
        self.assertEqual((self.peers("a"), self.copies("c")), ([self.address("c")], []))
        self.deliver(files["c"])
        self.wait(lambda: self.copies("c") == [("node-a", 3)])

    def deliver(self, file, text=None):
        """Replaces an agent's file in one step."""
        new = self.work / "new"
        new.write_text(self.file.read_text() if text is None else text)
        new.rename(file)


class Refused(Planned):
    def refused(self, *words, code):
        self.run_tool("pec-save", "agent", self.run_folder, self.store, "--copies-only", "--listen",
                      self.address("x"), "--plan", self.file, *words, code=code)

    def test_plans_that_an_agent_does_not_start_with(self):
        self.refused(code=3)
        self.plan("ab")
        self.refused("--peer", self.address("b"), code=2)
        self.refused("--name", "node-c", code=5)
        self.assertIn('none of them is "node-c"', self.stderr)
        text = self.file.read_text()
        for torn in (text[:len(text) // 2], text.replace("node-b", "node-x", 1), "", "[]", "{}"):
            self.file.write_text(torn)
            self.refused("--name", "node-a", code=4)
            self.assertIn(str(self.file), self.stderr)
        self.file.write_text(text)
        self.replan("--lost", "node-a")
        self.refused("--name", "node-a", code=5)
        self.file.unlink()
        self.run_tool("pec-save", "plan", *JOB, "--dp", 2, "--agents", "node7:4711,node8:4711", "-o", self.file)
        self.refused("--name", "node7", code=2)
        self.assertIn("a port requires the key", self.stderr)

    def test_plans_of_another_store(self):
        self.save(3)
        plan = self.plan("ab", self.store)
        self.assertEqual(plan["store"], json.loads((self.store / "store.json").read_text())["id"])
        self.run_tool("pec-save", self.shared / "run" / "global_step3", self.work / "other")
        for store, code in ((self.work / "other", 5), (self.work / "none", 3)):
            self.run_tool("pec-save", "agent", self.run_folder, store, "--copies-only", "--plan", self.file,
                          "--name", "node-a", code=code)
            self.assertIn(plan["store"], self.stderr)
        self.follow("a", "--copies-only")

    def test_a_running_agent_keeps_its_plan(self):
        plan = self.plan("abc")
        self.follow("a", "--k", 3)
        self.follow("b", "--copies-only")
        before = self.file.read_text()
        other = self.work / "other.json"
        self.plan("abc", file=other)
        self.replan("--lost", "node-b", output=self.work / "next.json")  # the agent must not see it yet
        after = (self.work / "next.json").read_text()
        for text, why in ((before[:300], "plan.json"), (other.read_text(), "this agent is of job " + plan["job"]),
                          (self.without_a(), 'none of them is "node-a"')):
            self.file.write_text(text)
            self.wait(lambda w=why: w in self.status("a")["plan"]["last_error"])
            self.assertEqual((self.status("a")["plan"]["version"], self.peers("a")), (1, [self.address("b")]))
        self.assertIn("none of them is", self.stdout)
        self.file.write_text(after)
        self.versions("a", 2)
        self.file.write_text(before)
        self.wait(lambda: "is stale" in self.status("a")["plan"]["last_error"])
        self.assertEqual(self.status("a")["plan"]["version"], 2)
        self.file.write_text(after)
        self.wait(lambda: self.status("a")["plan"]["last_error"] == "")

    def without_a(self):
        """A newer plan in which node-a is lost."""
        self.run_tool("pec-save", "replan", self.file, self.work / "without.json", "--lost", "node-a")
        return (self.work / "without.json").read_text()

    def test_an_agent_keeps_only_the_copies_of_its_plan(self):
        self.plan("abc")
        self.follow("b", "--copies-only")
        self.start("plain", "--copies-only")
        self.start("stranger", "--k", 3, "--peer", self.address("b"))
        self.checkpoint(3)
        self.wait(lambda: self.status("stranger")["peers"][0]["failures"] > 0)
        self.assertIn('assigns no copies of "node-stranger" to "node-b"',
                      self.status("stranger")["peers"][0]["last_error"])
        # Nor is a copy sent to an agent that follows another plan, or none.
        other = self.work / "other.json"
        folder = self.work / "second"
        shutil.copytree(self.run_folder, folder)
        for holder, why in (("b", "an agent of job"), ("plain", "follows no plan")):
            self.run_tool("pec-save", "plan", *JOB, "--dp", 2, "--agents",
                          f"node-a={self.address('a')},node-{holder}={self.address(holder)}", "-o", other, "--force")
            a = self.follow("a", "--k", 3, file=other, folder=folder, store=self.work / "second-store")
            self.tell("a", "snapshot")
            self.wait(lambda: self.status("a")["peers"][0]["failures"] > 0)
            self.assertIn(why, self.status("a")["peers"][0]["last_error"])
            self.assertEqual(self.end(a), 0)
        self.assertEqual((self.copies("b"), self.copies("plain")), ([], []))
        self.assertRegex(self.tell("b", "plan")["answer"], "^[0-9a-f]{32} 1 node-b$")


class Written(Planned):
    def test_usage(self):
        for words, said in ((("--agents", "a:1,b:1"), "--agents requires --copies"),
                            (("--copies", 1, "--agents", "a:1,b:1"), "--agents requires --output"),
                            (("--copies", 1, "-o", self.file), "--output requires --agents"),
                            (("--force",), "--force requires --output"),
                            ((*JOB, "--agents", "a:1,b", "-o", self.file), 'address "b":'),
                            ((*JOB, "--agents", "unix:/x,b:1", "-o", self.file), "requires a name"),
                            ((*JOB, "--agents", "a:1", "--dp", 2, "-o", self.file), "one agent for each node"),
                            ((*JOB, "--agents", "a:1,a:2", "--dp", 2, "-o", self.file), "two agents have the name")):
            self.run_tool("pec-save", "plan", *words, code=2)
            self.assertIn(said, self.stderr)
        self.assertFalse(self.file.exists())
        self.plan("ab")
        self.plan("ab", code=6)
        for words, said in (((), "requires agents that are lost or have joined"), (("--lost", "node-x"), '"node-x"'),
                            (("--joined", "c:1"), "has no place"), (("--lost", "node-a,node-b"), "all agents"),
                            (("--joined", "c"), 'address "c":')):
            self.replan(*words, code=2)
            self.assertIn(said, self.stderr)
        self.run_tool("pec-save", "replan", self.file, self.file, "--lost", "node-a", code=6)
        self.run_tool("pec-save", "replan", self.work / "none", self.work / "new.json", "--lost", "node-a", code=3)

    def test_agents_of_eight_ranks(self):
        agents = ",".join(f"n{i}:4711" for i in range(6))
        result = self.run_tool("pec-save", "plan", "--ep", 8, "--dp", 24, "--pp", 2, "--copies", 2, "--agents", agents,
                               "-o", self.file)
        plan = result["agent_plan"]
        self.assertEqual((plan["group"], plan["copies"], len(result["copies"]["workers"])), (3, 2, 48))
        # Copies stay among the nodes of a stage.
        self.assertEqual([a["peers"] for a in plan["agents"]],
                         [["n1", "n2"], ["n2", "n0"], ["n0", "n1"], ["n4", "n5"], ["n5", "n3"], ["n3", "n4"]])
        self.assertEqual(plan["agents"][5]["ranks"], [40, 48])

    @unittest.skipIf(jsonschema is None, "python3-jsonschema is not installed")
    def test_files_fit_the_schema(self):
        source = pathlib.Path(__file__).resolve().parents[3]
        schema = json.loads((source / "docs" / "formats" / "agent-plan.schema.json").read_text())
        validator = jsonschema.validators.validator_for(schema)
        validator.check_schema(schema)
        validator = validator(schema)
        self.save(3)
        for words in ((), (self.store,)):
            self.plan("abc", *words)
            validator.validate(json.loads(self.file.read_text()))
            self.replan("--lost", "node-b")
            plan = json.loads(self.file.read_text())
            validator.validate(plan)
            for key in set(plan) - {"xxh3_128"}:
                self.assertFalse(validator.is_valid({k: v for k, v in plan.items() if k != key}), key)
            self.assertFalse(validator.is_valid({**plan, "extra": 1}))
            self.file.unlink()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    stores.main()
