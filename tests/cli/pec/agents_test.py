#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save agents: lists agents that trainers have started for themselves, and ends them.

Usage: agents_test.py BIN
"""

import os
import pathlib
import shutil
import subprocess
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import stores  # pylint: disable=wrong-import-position

PATIENCE = 600


class Agents(stores.Stores):
    def setUp(self):
        super().setUp()
        before = os.environ.get("XDG_RUNTIME_DIR")
        os.environ["XDG_RUNTIME_DIR"] = str(self.work)  # of agents, and where they are looked for
        self.addCleanup(lambda: os.environ.pop("XDG_RUNTIME_DIR") if before is None
                        else os.environ.__setitem__("XDG_RUNTIME_DIR", before))

    def folder(self, number):
        """As a trainer's package names it."""
        path = self.work / f"shardwright-{os.getuid()}-{number:016x}"
        path.mkdir(mode=0o700)
        return path

    def start(self, number, store):
        runtime, checkpoints = self.folder(number), self.work / f"run{number}"
        checkpoints.mkdir()
        agent = subprocess.Popen([stores.Given.bin / "pec-save", "agent", checkpoints, store, "--listen",
                                  f"unix:{runtime}/agent.sock", "-q"], stdout=subprocess.DEVNULL)
        self.addCleanup(agent.wait)
        self.addCleanup(agent.kill)
        end = time.monotonic() + PATIENCE
        while not (runtime / "agent.sock").exists() and time.monotonic() < end:
            self.assertIsNone(agent.poll(), "the agent has ended")
            time.sleep(0.02)
        return agent, checkpoints

    def agents(self, *words):
        """The listed agents of this test, by the path of the socket. Other tests may have agents in /tmp."""
        found = self.run_tool("pec-save", "agents", *words)["agents"]
        self.assertEqual(len({one["address"] for one in found}), len(found), "an agent is listed twice")
        mine = f"unix:{self.work}/"
        return {one["address"].removeprefix(mine): one for one in found if one["address"].startswith(mine)}

    def name(self, number):
        return f"shardwright-{os.getuid()}-{number:016x}/agent.sock"

    def test_none(self):
        self.assertEqual(self.agents(), {})

    def test_an_empty_list_names_the_folders_and_the_other_agents(self):
        self.assertEqual(self.agents("--in", self.work), {})
        self.assertIn(f"no agent that a trainer of this user has started was found in {self.work}\n", self.stdout)
        self.assertIn("pec-save status ADDRESS", self.stdout)

    def test_lists_and_ends(self):
        (first, checkpoints), (second, _) = self.start(1, self.store), self.start(2, self.work / "other")
        self.folder(3)
        (self.work / "shardwright-else").mkdir()
        shutil.copytree(self.shared / "run" / "global_step3", checkpoints / "global_step3")
        (checkpoints / "latest").write_text("global_step3")
        end = time.monotonic() + PATIENCE
        while self.agents()[self.name(1)]["status"]["newest"] != 3 and time.monotonic() < end:
            time.sleep(0.05)
        found = self.agents()
        self.assertEqual({name: one["state"] for name, one in found.items()},
                         {self.name(1): "running", self.name(2): "running", self.name(3): "ended"})
        status = found[self.name(1)]["status"]
        self.assertEqual((status["pid"], status["store"], status["newest"]), (first.pid, str(self.store), 3))
        self.assertIn(f"unix:{self.work}/{self.name(2)}", self.stdout)
        self.assertIn(str(second.pid), self.stdout)

        # With the variables of another shell they are found, too.
        before = {name: os.environ.pop(name, None) for name in ("XDG_RUNTIME_DIR", "TMPDIR")}
        try:
            os.environ["TMPDIR"] = f"{self.work}/"  # as another spelling of the same folder
            os.environ["XDG_RUNTIME_DIR"] = str(self.work)
            self.assertEqual(set(self.agents()), set(found))
        finally:
            os.environ.pop("TMPDIR")
            os.environ.pop("XDG_RUNTIME_DIR")
            os.environ.update({name: value for name, value in before.items() if value is not None})

        self.agents("--stop", "--in", self.work)  # other tests may have agents in /tmp
        self.assertIn("stopped; all its snapshots are saved", self.stderr)
        self.assertEqual([agent.wait(PATIENCE) for agent in (first, second)], [0, 0])
        self.assertEqual([one["iteration"] for one in self.run_tool("pec-save", "list", self.store)["checkpoints"]], [3])
        self.assertEqual({one["state"] for one in self.agents().values()}, {"ended"})
        self.run_tool("pec-save", "agents", "--in", self.work / "none", code=3)


if __name__ == "__main__":
    stores.main()
