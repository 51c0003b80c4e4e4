#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save agent as a process: it watches, persists, is killed and stopped, serves its memory to
peers and to pec-restore.

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
        self.assertRegex(status["last_error"], "are needed beside 0 B in use; the limit is 1.95 KiB")
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
        self.assertIn("older than the checkpoint before", agent.stderr.read())


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
        self.assertIn("say --lost-nodes 0", self.stderr)
        self.assertEqual(self.newest(), 3, "the peer was not told to save either")
        self.assertFalse((self.work / "out").exists())
        self.restore("out", *agents, "--lost-nodes", 0)
        result = self.report["result"]
        self.assertEqual((result["lost_nodes"], result["lost_agents"]), ([0], [self.address("a")]))
        self.assertIn("lost with what it held in memory", self.stderr)
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

    def test_another_model_is_refused(self):
        self.start("a", "--k", 2)
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        other = moe_checkpoint.Model(experts=2, ep=1, ranks=1, seed=5)
        moe_checkpoint.write(self.work / "other", other, 3)
        self.run_tool("pec-save", self.work / "other", self.work / "other-store")
        self.run_tool("pec-restore", self.work / "other-store", self.work / "out", "--agents",
                      self.address("a"), code=5)
        self.assertIn("another model", self.stderr)


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
