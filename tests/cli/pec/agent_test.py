#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save agent as a process: it watches, persists, is killed and stopped.

Usage: agent_test.py BIN
Kills come at some calls of the agent, with SHARDWRIGHT_EVERY_KILL at every one.
"""

import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import stores  # pylint: disable=wrong-import-position
from stores import MODEL, environment, moe_checkpoint  # pylint: disable=wrong-import-position

PATIENCE = 600
# Calls from one kill to the next.
STEP = 1 if os.environ.get("SHARDWRIGHT_EVERY_KILL") else 29


class Agents(stores.Stores):
    def setUp(self):
        super().setUp()
        self.run_folder = self.work / "run"
        self.run_folder.mkdir()
        self.running = []
        self.addCleanup(self.kill_all)
        # For agents at ports and all their clients.
        self.key = self.work / "key"
        self.run_tool("pec-save", "keygen", self.key)

    def kill_all(self):
        for agent in self.running:
            if agent.poll() is None:
                agent.kill()
            agent.wait()
            agent.stderr.close()

    def start(self, name, *words, folder=None, store=None, fault=None, ready=True):
        """An agent that listens on the socket file NAME. Agents of one host need different names."""
        if "--name" not in words:
            words += ("--name", f"node-{name}")
        env = environment()
        if fault:
            env["SHARDWRIGHT_FAULT"] = fault
        argv = [stores.Given.bin / "pec-save", "agent", folder or self.run_folder,
                store or self.store, "--listen", f"unix:{self.work / name}",
                f"--json={self.work / name}.json", *words]
        agent = subprocess.Popen([str(word) for word in argv], env=env, cwd=self.work, text=True,
                                 stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.running.append(agent)
        if ready:
            self.wait(lambda: (self.work / name).exists() or agent.poll() is not None)
            self.assertIsNone(agent.poll(), agent.stderr.read() if agent.poll() else "")
        return agent

    def address(self, name):
        return f"unix:{self.work / name}"

    def tcp(self, agent):
        """Its port, from the line with its address."""
        while not (found := re.search(r"listening on (127\.0\.0\.1:\d+)", agent.stderr.readline())):
            self.assertIsNone(agent.poll())
        return found.group(1)

    def wait(self, condition):
        end = time.monotonic() + PATIENCE
        while not condition():
            self.assertLess(time.monotonic(), end, "waited in vain")
            time.sleep(0.02)

    def status(self, name):
        return self.run_tool("pec-save", "status", self.address(name))

    def tell(self, name, request, code=0):
        return self.run_tool("pec-save", "tell", self.address(name), request, code=code)

    def checkpoint(self, iteration, clock=None):
        """A checkpoint as DeepSpeed leaves it: `latest` last; CLOCK is what the clock shows."""
        moe_checkpoint.write(self.run_folder / "new", MODEL, iteration)
        tag = f"global_step{iteration}"
        if clock is not None:
            for path in (self.run_folder / "new").rglob("*"):
                os.utime(path, (clock, clock))
        shutil.rmtree(self.run_folder / tag, ignore_errors=True)
        (self.run_folder / "new" / tag).rename(self.run_folder / tag)
        (self.run_folder / "new" / "latest").rename(self.run_folder / "latest")
        (self.run_folder / "new").rmdir()

    def newest(self):
        """Iteration of the store's newest usable checkpoint; nothing without one."""
        if not list((self.store / "manifests").glob("*.json")):
            return None
        listed = self.run_tool("pec-save", "list", self.store)["checkpoints"]
        return max((c["iteration"] for c in listed if not c["abandoned"]), default=None)

    def hold_lock(self):
        """As if another process wrote: nothing can be persisted meanwhile."""
        lock = open(self.store / "lock", "a", encoding="utf-8")
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.addCleanup(lock.close)
        return lock

    def end(self, agent, how=signal.SIGTERM):
        agent.send_signal(how)
        agent.wait(PATIENCE)
        return agent.returncode

    def hook(self, name, *words, code=0, fault=None, **variables):
        """A job-script piece of scripts/slurm, with the real commands."""
        scripts = pathlib.Path(__file__).resolve().parents[3] / "scripts" / "slurm"
        env = environment(fault)
        env["PATH"] = f"{stores.Given.bin}:{env['PATH']}"
        env["PEC_TOKENS"] = str(self.work / "tokens.jsonl")
        env.update(variables)
        done = subprocess.run([str(word) for word in (scripts / name, *words)], env=env,
                              cwd=self.work, text=True, capture_output=True, timeout=1200,
                              check=False)
        self.assertEqual(done.returncode, code, f"{name}: {done.stdout}{done.stderr}")
        self.stderr = done.stderr
        return done.stdout.strip()


class Watching(Agents):
    def test_saves_what_is_written(self):
        agent = self.start("a", "--k", 2, "--k-persist", 1)
        for iteration in (3, 4, 5):
            self.checkpoint(iteration)
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        status = self.status("a")
        self.assertEqual([status[k] for k in ("newest", "snapshots", "persists", "snapshots_failed",
                                              "persists_failed")], [5, 3, 3, 0, 0])
        self.assertEqual(sorted(b["state"] for b in status["buffers"]),
                         ["idle", "idle", "recovery"])
        self.assertIn("recovery", self.stdout)
        self.assertEqual(self.end(agent), 0)
        report = json.loads((self.work / "a.json").read_text())
        self.assertEqual((report["exit_code"], report["result"]["persisted"]), (0, 5))
        self.assertFalse((self.work / "a").exists(), "the socket file is gone")
        self.run_tool("pec-save", "check", self.store)
        self.restore("out", "--read-only")
        self.same("out", 5, self.report["versions"])

    def test_is_told(self):
        agent = self.start("a", "--k", 1)
        self.checkpoint(3)
        self.assertEqual(self.tell("a", "snapshot global_step3"), {"answer": "3"})
        self.assertEqual(self.tell("a", "flush"), {"answer": "3"})
        self.assertEqual(self.newest(), 3)
        self.tell("a", "snapshot ../secret", code=4)
        self.tell("a", "snapshot global_step99", code=3)
        self.tell("a", "dance", code=2)
        self.tell("a", "stop")
        self.assertEqual(self.stdout, "stopped; all snapshots of the agent are saved\n")
        agent.wait(PATIENCE)
        self.assertEqual(agent.returncode, 0)
        self.tell("a", "status", code=3)

    def test_a_signal_persists_the_newest(self):
        for how in (signal.SIGTERM, signal.SIGINT):
            shutil.rmtree(self.store, ignore_errors=True)
            (self.run_folder / "latest").unlink(missing_ok=True)
            # About 16 KiB a checkpoint: a persist takes seconds, so that the newest one is in memory alone.
            agent = self.start("a", "--k", 2, "--bandwidth", "6000")
            self.checkpoint(3)
            self.wait(lambda: self.status("a")["newest"] == 3)
            self.checkpoint(4)
            self.wait(lambda: self.status("a")["newest"] == 4)
            self.checkpoint(5)
            self.wait(lambda: self.status("a")["newest"] == 5)
            self.assertEqual(self.end(agent, how), 0, agent.stderr.read())
            self.assertEqual(self.newest(), 5)
            self.run_tool("pec-save", "check", self.store)

    def test_limits_are_kept(self):
        self.start("a", "--memory-limit", "2000")
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["snapshots_failed"] == 1)
        status = self.status("a")
        self.assertRegex(status["last_error"], "needed in addition to 0 B in use; the limit is 1.95 KiB")
        self.assertEqual((status["snapshots"], status["memory_bytes"]), (0, 0))

    def test_refuses(self):
        self.start("a")
        second = self.start("a", ready=False)
        second.wait(PATIENCE)
        self.assertEqual(second.returncode, 6)
        for words in (["--listen", "nowhere"], ["--peer", "x:99999"], ["--copies-only"],
                      ["--listen", "127.0.0.1:0"], ["--peer", "x:9"], ["--key", "k", "--insecure"],
                      ["--dry-run"], ["--force"], ["--resumed-from", "3"]):
            self.run_tool("pec-save", "agent", self.run_folder, self.store, *words, code=2)
        for words in (["--listen", "unix:/x"], ["--bandwidth", "1MB"], ["--peer", "a:1"]):
            self.run_tool("pec-save", self.run_folder, self.store, *words, code=2)
        self.run_tool("pec-save", "status", self.address("a"), self.store, code=2)
        self.run_tool("pec-save", "status", self.run_folder, code=2)

    def test_a_damaged_checkpoint_is_passed_over(self):
        agent = self.start("a", "--k", 4)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        moe_checkpoint.write(self.run_folder / "bad", MODEL, 4)
        bad = self.run_folder / "bad" / "global_step4"
        self.damage(next(bad.glob("*optim*")), "flipped")
        bad.rename(self.run_folder / "global_step4")
        (self.run_folder / "latest").write_text("global_step4")
        self.wait(lambda: self.status("a")["snapshots_failed"] >= 1)
        self.assertEqual(self.status("a")["newest"], 3)
        self.checkpoint(5)
        self.wait(lambda: self.status("a")["persisted"] == 5)
        self.assertEqual(self.end(agent), 0)


    def test_a_checkpoint_that_is_not_whole_yet_is_waited_for(self):
        agent = self.start("a", "--k", 4)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        # As rank 0 of DeepSpeed does: `latest` before the other ranks are done.
        moe_checkpoint.write(self.run_folder / "new", MODEL, 4)
        tag = self.run_folder / "new" / "global_step4"
        late = next(tag.glob("*rank_1_*optim*"))
        late.rename(self.run_folder / "late")
        tag.rename(self.run_folder / "global_step4")
        (self.run_folder / "latest").write_text("global_step4")
        time.sleep(1)
        self.assertEqual(self.status("a")["newest"], 3)
        (self.run_folder / "late").rename(self.run_folder / "global_step4" / late.name)
        self.wait(lambda: self.status("a")["persisted"] == 4)
        # A file that is left of an older checkpoint with the same tag is not taken for one of it.
        moe_checkpoint.write(self.run_folder / "other", MODEL, 5)
        late = self.run_folder / "other" / "global_step5" / late.name
        os.utime(late, (1, 1))
        late.parent.rename(self.run_folder / "global_step5")
        (self.run_folder / "latest").write_text("global_step5")
        time.sleep(1)
        self.assertEqual(self.tell("a", "flush"), {"answer": "4"})
        self.assertEqual(self.end(agent), 0)
        self.assertIn("older than the previous checkpoint", agent.stderr.read())


    def test_the_clock_may_be_set_back(self):
        agent = self.start("a", "--k", 4)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        # An hour earlier, and the next one an hour later again.
        for iteration, ahead in ((4, -3600), (5, 3600), (6, 0)):
            self.checkpoint(iteration, time.time() + ahead)
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        self.assertEqual(self.end(agent), 0)
        self.assertNotIn("older than", agent.stderr.read())
        self.run_tool("pec-save", "check", self.store)


class Killed(Agents):
    def prepare(self):
        """A store with iterations 3 and 4."""
        self.save(3, "--k", 2)
        self.save(4, "--k", 2)
        self.restore("before", "--read-only")
        self.before = self.report["versions"]

    def judge(self):
        """The store is whole, and holds 4 or, saved completely, 5."""
        self.run_tool("pec-save", "check", self.store)
        newest = self.newest()
        self.restore("out", "--read-only", "--force")
        versions = self.report["versions"]
        self.same("out", newest, versions)
        if newest == 4:
            self.assertEqual(versions, self.before)
        return newest

    def campaign(self, target):
        """Kills the agent at calls of a kind. \\returns by newest iteration: how often"""
        self.prepare()
        shutil.copytree(self.store, self.work / "kept")
        ends = {4: 0, 5: 0}
        for call in range(1, 5000, STEP):
            shutil.rmtree(self.store)
            shutil.copytree(self.work / "kept", self.store)
            (self.work / "a").unlink(missing_ok=True)
            agent = self.start("a", "--k", 2, fault=f"{target}:{call}:kill", ready=False)
            self.wait(lambda a=agent: a.poll() is not None or (self.work / "a").exists())
            self.checkpoint(5)
            self.wait(lambda a=agent: a.poll() is not None or self.saved())
            if agent.poll() is None:
                code = self.end(agent)
                if code == 0:
                    return ends
            self.assertEqual(agent.returncode, -signal.SIGKILL)
            ends[self.judge()] += 1
        return self.fail("no end of calls")

    def saved(self):
        return any(int(path.stem.split("-")[1]) == 5
                   for path in (self.store / "manifests").glob("*-*.json")) and \
            not (self.store / "lock").exists()

    def test_while_filling(self):
        ends = self.campaign("read")
        self.assertGreater(ends[4], 3)
        print(f"killed while filling: {ends}", file=sys.stderr)

    def test_while_persisting(self):
        ends = self.campaign("any")
        self.assertGreater(ends[4], 5)
        if STEP == 1:
            self.assertGreater(ends[5], 0)
        print(f"killed while persisting: {ends}", file=sys.stderr)


if __name__ == "__main__":
    stores.main()
