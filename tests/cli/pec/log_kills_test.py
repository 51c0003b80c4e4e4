#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An agent that logs gradients is killed, or its disk fails, at its calls: whatever a restore shows
then, and after training has continued with another agent, is a state that an iteration has had.

Usage: log_kills_test.py BIN
Faults come at some calls of the agent, with SHARDWRIGHT_EVERY_KILL at every one.
"""

import collections
import json
import mmap
import os
import pathlib
import shutil
import signal
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import stores  # pylint: disable=wrong-import-position
from agent_test import PATIENCE, Agents  # pylint: disable=wrong-import-position
from replay_test import Replaying  # pylint: disable=wrong-import-position
from stores import environment, moe_checkpoint  # pylint: disable=wrong-import-position
from trainer_socket import Gone, TrainerSocket  # pylint: disable=wrong-import-position

EVERY = bool(os.environ.get("SHARDWRIGHT_EVERY_KILL"))
ACTIONS = {"kill": "any", "torn": "write", "eio": "any", "enospc": "write", "short": "write"}


class Trainer(TrainerSocket):
    """Hands the gradients of a model to an agent."""

    def __init__(self, path, model, begun, places=2, zstd=0):
        self.model, self.tensors = model, []
        try:
            super().__init__(path, PATIENCE)
        except OSError as error:
            raise Gone(str(error)) from error
        try:
            self.send(b"experts\n")
            size = int(self.answer())
            told = json.loads(self.take(size))
            modules = collections.defaultdict(list)
            offset = 0
            for module, name, elems in told["params"]:
                modules[module].append({"param": name, "elems": elems, "first": 0, "count": elems,
                                        "dtype": "float32", "offset": offset,
                                        "tensor": len(self.tensors)})
                self.tensors.append((name, offset))
                offset += 4 * elems
            self.place_bytes = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
            self.text("gradients 0", {"recovery": told["recovery"], "begun": begun, "zstd": zstd,
                                      "places": places, "place_bytes": self.place_bytes,
                                      "tensors": len(self.tensors), "modules": [
                                          {"name": name, "pieces": pieces}
                                          for name, pieces in modules.items()]})
            self.answer()
            self.memory = self.share("gradients", places * self.place_bytes)
        except (OSError, Gone) as error:
            self.close()
            raise Gone(str(error)) from error

    def step(self, iteration):
        """Returns when its gradients are appended."""
        place = iteration % 2
        step = self.model.steps[iteration]
        if not step["skipped"]:
            for name, offset in self.tensors:
                data = self.model.gradients[name, iteration]
                begin = place * self.place_bytes + offset
                self.memory[begin:begin + len(data)] = data
        try:
            self.text(f"step {iteration} {place}", [step] * len(self.tensors))
            self.answer()
        except OSError as error:
            raise Gone(str(error)) from error

    def text(self, line, value):
        text = json.dumps(value).encode()
        self.send(f"{line} {len(text)}\n".encode() + text)


class LogKills(Agents, Replaying):
    """Iteration 3 is in the store. An agent takes 4 with its gradients and 5; at a call of it something
    happens. Another one continues with 6, 7 and 8."""

    dtype = "fp32"

    def checkpoint(self, iteration, clock=None):
        shutil.rmtree(self.run_folder, ignore_errors=True)
        moe_checkpoint.write(self.run_folder, self.model, iteration)

    def train(self, agent, iterations, saved):
        """Steps from the one after the first iteration on, a checkpoint at those of `saved`; to the
        end, or until the agent is gone."""
        trainer = None
        try:
            for iteration in iterations:
                if trainer is not None:
                    try:
                        trainer.step(iteration)
                    except Gone:  # the log has ended; training continues
                        trainer.close()
                        trainer = None
                if iteration in saved:
                    self.checkpoint(iteration)
                    if self.ask("snapshot") and self.ask("flush"):
                        self.flushed = iteration
                if agent.poll() is not None:
                    return
                if iteration == iterations[0]:
                    try:
                        trainer = Trainer(self.work / "a", self.model, iteration)
                    except Gone:
                        pass
        finally:
            if trainer is not None:
                trainer.close()

    def ask(self, request):
        argv = [stores.Given.bin / "pec-save", "tell", self.address("a"), request, "-q"]
        return subprocess.run([str(word) for word in argv], env=environment(), timeout=1200,
                                     capture_output=True, check=False).returncode == 0

    def judge(self, allowed):
        """The store is sound and at one of these iterations. \\returns the iteration, and how many experts
        were brought to it by gradients"""
        self.run_tool("pec-save", "check", self.store)
        result = self.restore("out", "--read-only", "--force")
        self.assertIn(result["iteration"], allowed, self.what)
        versions = {m["module"]: m["version"] for m in result["modules"]}
        self.same("out", result["iteration"], versions, self.model)
        for module in result["modules"]:
            if module["version"] < result["iteration"]:
                self.assertNotIn("replayed", module, self.what)
        return result["iteration"], sum("replayed" in m for m in result["modules"])

    def disturbed(self, fault):
        """One run. \\returns the iteration and the replayed experts of both restores, and how the agent
        has ended"""
        self.what = fault
        shutil.rmtree(self.store)
        shutil.copytree(self.work / "kept", self.store)
        self.flushed = 3
        ends, allowed = [], {3}
        for part, saved, which in (((3, 4, 5), (5,), fault), ((6, 7, 8), (6, 8), None)):
            (self.work / "a").unlink(missing_ok=True)
            shutil.rmtree(self.run_folder, ignore_errors=True)
            self.run_folder.mkdir()
            agent = self.start("a", "--k", 1, fault=which, ready=False)
            self.wait(lambda a=agent: a.poll() is not None or (self.work / "a").exists())
            self.train(agent, part, saved)
            if agent.poll() is None:
                self.end(agent)
            agent.stderr.close()
            self.running.remove(agent)
            allowed |= set(saved)
            ends.append((*self.judge(allowed), agent.returncode))
            self.assertGreaterEqual(ends[-1][0], self.flushed, fault)
        self.assertEqual(ends[1][0], 8, fault)
        self.assertEqual(ends[1][2], 0, fault)
        return ends

    def test_at_every_call(self):
        self.save(3)
        shutil.copytree(self.store, self.work / "kept")
        counts = self.work / "counts"
        whole = self.disturbed(f"count:{counts}")
        # All but those that 5 has saved; of 8 those that 6 has saved, where the second log begins.
        layers, experts = self.model.layers, len(self.model.modules())
        self.assertEqual(whole, [(5, experts - layers, 0), (8, layers, 0)])
        calls = {name: int(number) for name, number in
                 (word.split("=") for word in counts.read_text().split())}
        seen = collections.Counter()
        for action, kind in ACTIONS.items():
            step = 1 if EVERY else max(1, calls[kind] // 3)
            for call in range(1, calls[kind] + 1, step):
                (iteration, replayed, code), (_, later, _) = self.disturbed(f"{kind}:{call}:{action}")
                seen[action] += 1
                seen[f"{iteration} with {'some' if replayed else 'no'} experts replayed"] += 1
                seen["killed"] += code == -signal.SIGKILL
                self.assertGreater(later, 0)
        self.assertGreater(seen["killed"], 0)
        print(f"log of gradients: {calls}; {dict(seen)}", file=sys.stderr)


if __name__ == "__main__":
    stores.main()
