#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An elastic run of torchrun on four simulated nodes that are killed and join, and the states that such runs continue from.

    elastic_test.py BIN PACKAGE [--kills N] [--seed S]

--kills N runs only a training in which N nodes are killed at random moments, each followed by a new node.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import signal
import socket
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import nodes
import rank_process
import torch

import reference
import train

BIN, PACKAGE = None, None
EXPERT = 3 * 2 * train.HIDDEN * train.INNER * 8  # bytes: weights and two moments of two matrices
WANTED = []  # losses of the reference


class Judged(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="sw-elastic-")
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)

    def judge(self, lines, first=0):
        """Every step from `first` was made, and each time with the loss of the reference."""
        steps = [line["step"] for line in lines]
        last = max(steps)
        self.assertEqual(set(steps), set(range(first, last + 1)))
        if len(WANTED) <= last:
            WANTED[:] = reference.losses(last + 1)
        worst = max(abs(line["loss"] - WANTED[line["step"]]) / abs(WANTED[line["step"]]) for line in lines)
        self.assertLess(worst, 1e-11)
        return worst


class States(Judged):
    """Ranks that are forks of this process stand for those that torchrun starts."""

    def setUp(self):
        super().setUp()
        self.memories, self.round = {}, 0
        self.addCleanup(lambda: [self.lose(name) for name in list(self.memories)])
        self.losses = self.folder / "losses.jsonl"
        self.run_folder = self.folder / "run"
        self.run_folder.mkdir()
        self.controller, port = None, self.folder / "port"

        def control():
            store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port.with_suffix(".new").write_text(str(store.port))
            port.with_suffix(".new").rename(port)
            signal.pause()

        self.join("controller", control)
        nodes.wait(port.exists, 600, lambda: "")
        self.controller = f"127.0.0.1:{port.read_text()}"

    def join(self, name, live=None):
        """Starts the launcher of a node: here it only has the node's memory."""
        from shardwright._node_memory import NodeMemory
        path = self.folder / f"{name}-{self.round}.sock"

        def remember():
            memory = NodeMemory(str(path))
            signal.pause()
            del memory

        pid = os.fork()
        if pid == 0:
            rank_process.become(self.folder / f"{name}.log", live or remember)
        if live is None:
            nodes.wait(path.exists, 600, lambda: (self.folder / f"{name}.log").read_text())
        self.memories[name] = (pid, path)

    def lose(self, name):
        """Kills the launcher of a node."""
        pid, path = self.memories.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        path.unlink(missing_ok=True)

    def train(self, names, steps, *flags, dying=()):
        """Trains on these nodes until so many steps were made. dying: nodes that end by SIGKILL; others may fail then. Returns the
        logs of the ranks."""
        self.round += 1
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        pids = {}
        for rank, name in enumerate(names):
            pid = os.fork()
            if pid == 0:
                launcher, path = self.memories[name]
                os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(len(names)), LOCAL_WORLD_SIZE="1",
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), SHARDWRIGHT_NODE_MEMORY=str(path),
                                  SHARDWRIGHT_NODE=path.stem, SHARDWRIGHT_CONTROLLER=self.controller, SHARDWRIGHT_JOB="job",
                                  SW_TEST_LAUNCHER=str(launcher))
                rank_process.become(self.folder / f"rank{rank}.log", lambda: train.main([
                    str(self.run_folder), str(steps), "--save-every", "4", "--losses", str(self.losses), "--command",
                    str(BIN / "moe-replace"), *flags]))
            pids[pid] = name
        codes = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, name in pids.items()}
        logs = [(self.folder / f"rank{rank}.log").read_text() for rank in range(len(names))]
        for name, code in codes.items():
            if name in dying:
                self.assertEqual(code, -signal.SIGKILL, logs)
            elif not dying:
                self.assertEqual(code, 0, "\n".join(logs))
        return logs

    def restart(self):
        """The report of the last restart."""
        return json.loads((self.run_folder / "restarts.jsonl").read_text().splitlines()[-1])

    def made(self):
        return [json.loads(line) for line in self.losses.read_text().splitlines()]

    def start(self, *names, steps=6):
        for name in names:
            self.join(name)
        self.train(names, steps)
        self.assertEqual(self.restart()["source"], "start")

    def hide(self):
        """Storage without any checkpoint."""
        for path in [*self.run_folder.glob("step-*"), self.run_folder / "checkpoint.json"]:
            path.rename(self.folder / f"hidden-{path.name}")

    def test_lost_node_is_replaced_from_replicas_and_a_new_one_joins(self):
        self.start("a", "b", "c", "d")
        self.lose("c")
        self.hide()
        self.train(["a", "b", "d"], 9)
        found = self.restart()
        self.assertEqual((found["source"], found["iteration"], found["ranks"]), ("memory", 6, 3))
        self.assertEqual((found["bytes"]["storage"], found["experts"]["stored"]), (0, 0))
        self.assertGreater(found["bytes"]["own_memory"], 0)
        self.join("e")
        self.train(["a", "e", "b", "d"], 12)
        found = self.restart()
        self.assertEqual((found["source"], found["iteration"], found["ranks"]), ("memory", 9, 4))
        self.assertGreaterEqual(found["experts"]["moved"], 6 * train.LAYERS)  # all slots of the new node
        self.assertGreater(found["bytes"]["other_nodes"], 0)
        self.assertEqual(found["bytes"]["storage"], 0)
        self.judge(self.made())

    def test_experts_without_a_live_replica_come_from_storage(self):
        self.start("a", "b", steps=7)  # 12 slots for 8 experts: most have one replica
        self.lose("b")
        self.join("e")
        self.train(["a", "e"], 10)
        found = self.restart()
        self.assertEqual((found["source"], found["iteration"]), ("storage", 4))
        self.assertGreater(found["experts"]["stored"], 0)
        self.assertGreater(found["experts"]["kept"], 0)
        print(found["experts"], found["bytes"])
        self.assertGreater(found["bytes"]["storage"], 0)
        self.assertEqual(found["bytes"]["storage"] % EXPERT, 0)  # whole experts and nothing else
        self.assertLessEqual(found["bytes"]["storage"], found["experts"]["stored"] * EXPERT)
        self.judge(self.made())

    def test_all_nodes_are_lost(self):
        self.start("a", "b", steps=9)
        for name in "ab":
            self.lose(name)
            self.join(name)
        self.train(["a", "b"], 10)
        found = self.restart()
        self.assertEqual((found["source"], found["iteration"]), ("storage", 8))
        self.assertEqual(found["experts"]["kept"], 0)
        self.judge(self.made())

    def test_node_dies_during_a_migration(self):
        self.start("a", "b", "c", "d")
        self.hide()
        self.join("e")
        (self.run_folder / "dies-in-migration").write_text("a")
        self.train(["a", "b", "c", "d", "e"], 9, dying="a")
        self.assertTrue((self.run_folder / "died").exists())
        self.lose("a")
        self.assertEqual(max(line["step"] for line in self.made()), 5)
        self.train(["b", "c", "d", "e"], 9)
        found = self.restart()
        self.assertEqual((found["source"], found["iteration"], found["bytes"]["storage"]), ("memory", 6, 0))
        self.judge(self.made())

    def test_memory_of_another_job_is_not_used(self):
        self.start("a", "b", steps=6)
        self.run_folder, self.losses = self.folder / "other", self.folder / "others.jsonl"
        self.run_folder.mkdir()
        self.train(["a", "b"], 3)
        self.assertEqual(self.restart()["source"], "start")
        self.judge(self.made())

    def test_plan_of_another_job_is_not_used(self):
        """The plan in a node's memory is replaced by one of the same nodes that places experts elsewhere."""
        import shardwright._node_memory as memory
        self.start("a", "b", steps=6)
        client = memory.NodeClient(str(self.memories["a"][1]), 0)
        slot = client.slots()[-1]
        state = client.get(slot)
        plan = json.loads(state.plan)
        plan.pop("xxh3_128")
        for layer in plan["layers"]:
            layer["placement"].reverse()
            layer["devices"].reverse()
        client.put(slot, state, json.dumps(plan), state.tokens)
        client.close()
        self.train(["a", "b"], 9)
        self.assertLess(self.restart()["iteration"], 6)  # that state has two plans, so it is not used
        self.judge(self.made())

    def test_folder_of_another_model_is_refused(self):
        self.start("a", "b", steps=5)
        job = json.loads((self.run_folder / "job.json").read_text())
        (self.run_folder / "job.json").write_text(json.dumps({**job, "experts": 16}))
        logs = self.train(["a", "b"], 9, dying=" ")
        for log in logs:
            self.assertIn("experts=16", log)
            self.assertIn("MismatchError", log)
        (self.run_folder / "job.json").write_text(json.dumps({**job, "job": "0" * 32}))
        for log in self.train(["a", "b"], 9, dying=" "):
            self.assertIn("a checkpoint of another run", log)
        (self.run_folder / "job.json").write_text(json.dumps(job))
        self.train(["a", "b"], 9)
        self.assertEqual((self.restart()["source"], self.restart()["iteration"]), ("memory", 5))
        self.judge(self.made())


class Nodes(Judged):
    """Launchers as users start them, with torchrun inside."""

    def next_with(self, cluster, before, ranks):
        """Waits for a restart on this number of ranks, after those that were there before. A slow machine may need several."""
        cluster.wait(lambda: any(one["ranks"] == ranks for one in cluster.restarts()[before:]), 1200)
        found = next(one for one in cluster.restarts()[before:] if one["ranks"] == ranks)
        self.assertEqual((found["source"], found["bytes"]["storage"], found["experts"]["stored"]), ("memory", 0, 0))
        return found

    def test_node_is_killed(self):
        with nodes.Cluster(self.folder, BIN, PACKAGE, 100000, "--save-every", "10", "--wait", "1", "--pause", "0.05") as cluster:
            for name in "abcd":
                cluster.start(name)
            cluster.wait(lambda: cluster.last_step() >= 12, 1200)
            before = len(cluster.restarts())
            killed = cluster.kill("c")
            cluster.hide_checkpoints()
            found = self.next_with(cluster, before, 3)
            cluster.show_checkpoints()
            parts = {"torchrun and imports": found["began"] - killed, **found["seconds"]}
            print("killed to next step:", {key: round(value, 2) for key, value in parts.items()},
                  "total", round(found["ended"] - killed, 2), "s;", found["experts"], found["bytes"])
            cluster.wait(lambda: cluster.last_step() > found["iteration"] + 2, 1200)
        print(f"{len(cluster.lines(cluster.losses))} steps, off by {self.judge(cluster.lines(cluster.losses)):.1e}")


class Kills(Judged):
    def test_kills(self):
        draw = random.Random(OPTIONS.seed)
        sources = {}
        with nodes.Cluster(self.folder, BIN, PACKAGE, 1000000, "--save-every", "10", "--wait", "1", "--pause", "0.02") as cluster:
            names = [f"n{number}" for number in range(4)]
            for name in names:
                cluster.start(name)
            cluster.wait(lambda: cluster.last_step() >= 3, 1200)
            for kill in range(OPTIONS.kills):
                # Half of the kills come soon after the one before, while its restart is running.
                time.sleep(draw.uniform(0, 5) if draw.random() < 0.5 else draw.uniform(5, 40))
                victim = names.pop(draw.randrange(len(names)))
                cluster.kill(victim)
                print(f"kill {kill + 1}: {victim} after step {cluster.last_step()}, {len(cluster.restarts())} restarts", flush=True)
                names.append(f"n{kill + 4}")
                cluster.start(names[-1])
            before, step = len(cluster.restarts()), cluster.last_step()
            cluster.wait(lambda: cluster.last_step() > step + 20 and len(cluster.restarts()) >= before, 2400)
            for one in cluster.restarts():
                sources[one["source"]] = sources.get(one["source"], 0) + 1
        lines = cluster.lines(cluster.losses)
        print(f"{OPTIONS.kills} kills, {sources} restarts, {len(lines)} steps, {len({one['step'] for one in lines})} different ones, "
              f"off by {self.judge(lines):.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("package")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("tests", nargs="*")
    OPTIONS = parser.parse_args()
    BIN, PACKAGE = OPTIONS.bin.resolve(), OPTIONS.package
    if not PACKAGE:
        print("skipped: this build has no operators for PyTorch")
        sys.exit(77)
    sys.path.insert(0, PACKAGE)
    import shardwright.elastic  # noqa: F401: before this process forks, as the next one, which optimizers import
    import torch._dynamo  # noqa: F401
    import torch.distributed.run

    torch.set_num_threads(1)
    chosen = ["Kills"] if OPTIONS.kills else OPTIONS.tests or ["States", "Nodes"]
    unittest.main(argv=[sys.argv[0], *chosen], verbosity=2)
