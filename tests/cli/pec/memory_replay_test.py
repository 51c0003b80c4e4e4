#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save agent --replay: gradients bring the experts in an agent's memory to each new snapshot, bit for
bit, so that a restore from agents loses nothing and reads no log; an expert with a gap in its gradients
stays older, and the report gives the reason.

Usage: memory_replay_test.py BIN
"""

import pathlib
import shutil
import signal
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import stores  # pylint: disable=wrong-import-position
from agent_test import Agents  # pylint: disable=wrong-import-position
from log_kills_test import Trainer  # pylint: disable=wrong-import-position
from trainer_socket import Gone  # pylint: disable=wrong-import-position
from replay_test import Replaying  # pylint: disable=wrong-import-position
from stores import moe_checkpoint  # pylint: disable=wrong-import-position


class Replays(Agents, Replaying):
    """An agent that has taken all of iteration 3, and one expert of each layer since."""

    dtype = "bf16"
    zstd = 0  # compression of the log

    def checkpoint(self, iteration, clock=None):
        shutil.rmtree(self.run_folder)
        moe_checkpoint.write(self.run_folder, self.model, iteration)

    def take(self, iteration, name="a"):
        self.checkpoint(iteration)
        self.tell(name, "snapshot")

    def begin(self, *words, name="a"):
        """An agent with iteration 3, and a trainer that submits the next ones."""
        agent = self.start(name, "--replay", "--k", 1, *words)
        self.take(3, name)
        self.wait(lambda: self.status(name)["persisted"] == 3)
        trainer = Trainer(self.work / name, self.model, 3, zstd=self.zstd)
        self.addCleanup(trainer.close)
        return agent, trainer

    def train(self, trainer, iterations, every=1, lost=()):
        for iteration in iterations:
            if iteration not in lost:
                trainer.step(iteration)
            if iteration % every == 0:
                self.take(iteration)

    def persist(self, trainer, iterations, agent="a"):
        """Trains, and waits for each checkpoint to reach the store."""
        for iteration in iterations:
            self.train(trainer, [iteration])
            self.wait(lambda last=iteration: self.status(agent)["persisted"] == last)

    def replays(self, name="a"):
        return self.status(name)["replays"]

    def from_memory(self, out, *words, iteration=8, agents=("a",)):
        """A restore without the log: it has only the state in the memory of agents, and that is right."""
        logs = self.store / "logs"
        if logs.exists():
            logs.rename(self.work / f"logs of {out}")
        result = self.restore(out, "--agents", ",".join(map(self.address, agents)), *words)
        self.said = self.stdout
        self.assertEqual((result["iteration"], result["replay"]["modules"]), (iteration, 0))
        self.same(out, iteration, result["versions"], self.model)
        return result

    def experts(self):
        return self.model.layers * self.model.experts

    def complete_copy(self, iteration=8):
        """True if a restore from the peer alone would find all experts at the iteration."""
        result = self.restore("dry", "--dry-run", "--replay=never", "--agents", self.address("b"))
        return result["iteration"] == iteration and result["stale_modules"] == 0


class MemoryReplay(Replays):
    def test_all_experts_are_of_the_newest_snapshot(self):
        for name, every in (("each", 1), ("fourth", 4)):
            with self.subTest(name):
                shutil.rmtree(self.store, ignore_errors=True)
                agent, trainer = self.begin("--tokens", self.tokens_path)
                self.train(trainer, range(4, 9), every)
                self.wait(lambda: self.status("a")["newest"] == 8 and self.replays()["older"] == 0)
                found = self.replays()
                self.assertEqual(found["refused"], [])
                self.assertGreaterEqual(found["modules"], self.experts() - self.model.layers)
                self.assertGreater(found["gradient_bytes"], 0)
                result = self.from_memory(name, "--replay=never")
                self.assertEqual(result["stale_modules"], 0)
                self.assertEqual(set(result["versions"].values()), {8})
                self.assertEqual(sum(map(sum, result["loss"]["lost_by_expert"])), 0)
                told = {m["module"]: m["replayed_in_memory"]["from"]
                        for m in result["modules"] if "replayed_in_memory" in m}
                self.assertEqual(result["replay"]["in_memory"], len(told))
                self.assertEqual(len(told), self.experts() - self.model.layers)
                self.assertLess(max(told.values()), 8)
                self.assertGreaterEqual(min(told.values()), 3)
                self.assertEqual({m["source"] for m in result["modules"]
                                  if m["module"] in told}, {"memory"})
                self.assertIn("by agents, in their memory", self.said)
                trainer.close()
                self.assertEqual(self.end(agent), 0)
                # Persists write the experts that snapshots have read, as before.
                self.run_tool("pec-save", "check", self.store)

    def test_a_gap_leaves_experts_older(self):
        _, trainer = self.begin()
        self.train(trainer, range(4, 7))
        self.wait(lambda: self.status("a")["newest"] == 6 and self.replays()["older"] == 0)
        self.train(trainer, (7, 8), lost=(7,))
        older = self.experts() - 2 * self.model.layers
        self.wait(lambda: self.status("a")["newest"] == 8 and self.replays()["older"] == older
                  and self.replays()["refused"])
        refused = self.replays()["refused"]
        self.assertEqual(len(refused), older)
        for why in refused:
            self.assertIn("iteration 7: no record has them", why)
        result = self.from_memory("out")
        self.assertEqual(result["stale_modules"], older)
        self.assertEqual({v for v in result["versions"].values() if v < 8}, {6})

    def test_gradients_that_come_late(self):
        _, trainer = self.begin()
        for iteration in (4, 5):
            self.take(iteration)
        trainer.step(4)
        trainer.step(5)
        self.wait(lambda: self.replays()["older"] == 0 and self.replays()["modules"] > 0)
        self.assertEqual(self.from_memory("out", iteration=5)["stale_modules"], 0)

    def test_a_restore_that_goes_back(self):
        _, trainer = self.begin()
        for iteration in range(4, 9):
            self.train(trainer, (iteration,))
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        self.wait(lambda: self.replays()["older"] == 0)
        # Half of the steps come again, and the log has those of both pasts.
        trainer.close()
        back = self.restore("back", "--at", 6, "--agents", self.address("a"))
        self.assertEqual(back["iteration"], 6)
        self.take(6)
        trainer = Trainer(self.work / "a", self.model, 6)
        self.addCleanup(trainer.close)
        self.train(trainer, range(7, 9))
        self.wait(lambda: self.status("a")["newest"] == 8 and self.replays()["older"] == 0)
        self.assertEqual(self.replays()["refused"], [])
        # In memory is what snapshots have read since, one expert of each layer three times at least.
        result = self.from_memory("out", "--replay=never")
        of_memory = [m for m in result["modules"] if m["expert"] and m["source"] == "memory"]
        self.assertGreaterEqual(len(of_memory), 3 * self.model.layers)
        self.assertEqual({m["version"] for m in of_memory}, {8})

    def test_memory_that_is_too_small(self):
        agent, trainer = self.begin()
        whole = self.status("a")["snapshot_bytes"]
        self.train(trainer, (4,))
        one = self.status("a")["snapshot_bytes"] - whole
        trainer.close()
        self.end(agent)
        shutil.rmtree(self.store)
        # Enough for all experts in memory, and for three snapshots: not for second versions of all experts.
        _, trainer = self.begin("--memory-limit", whole + 3 * one)
        for iteration in range(4, 9):
            self.train(trainer, (iteration,))
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        self.wait(lambda: self.replays()["refused"])
        status = self.status("a")
        self.assertEqual((status["newest"], status["snapshots_failed"]), (8, 0))
        self.assertGreater(status["replays"]["older"], 0)
        self.assertIn("reserved for the next snapshot", " ".join(status["replays"]["refused"]))
        # The log brings the rest.
        result = self.restored("out", "--agents", self.address("a"), "--replay=require")
        self.assertEqual(result["stale_modules"], 0)

    def test_peers_get_what_was_replayed(self):
        self.start("b", "--copies-only")
        agent, trainer = self.begin("--peer", self.address("b"))
        self.train(trainer, range(4, 9))
        self.wait(lambda: self.status("a")["newest"] == 8 and self.replays()["older"] == 0)
        self.wait(lambda: self.complete_copy())
        self.end(agent, signal.SIGKILL)
        result = self.from_memory("out", "--lost-nodes", 0, agents=("a", "b"))
        self.assertEqual(result["stale_modules"], 0)

    def test_a_second_save_of_the_iteration(self):
        _, trainer = self.begin()
        self.train(trainer, range(4, 6))
        self.wait(lambda: self.status("a")["newest"] == 5 and self.replays()["older"] == 0)
        # Other content under the same number: nothing of the first may stay, replayed experts neither.
        other = type(self.model)(dtype=self.dtype)
        for key in [key for key in other.trained if key[2] == 5]:
            other.trained[key] = bytes(byte ^ 1 for byte in other.trained[key])
        shutil.rmtree(self.run_folder)
        moe_checkpoint.write(self.run_folder, other, 5)
        self.tell("a", "snapshot")
        result = self.restore("out", "--agents", self.address("a"), "--replay=never")
        self.assertEqual(result["iteration"], 5)
        self.assertEqual({m["source"] for m in result["modules"] if m["expert"]}, {"memory"})
        self.assertEqual(result["stale_modules"], 0)
        self.same("out", 5, {}, other)

    def test_where_it_cannot_work(self):
        for words, code, why in [
                (["--listen", "unix:a", "--copies-only"], 2, "--copies-only"),
                (["--listen", "unix:a", "--policy", "full"], 2, "--policy full"),
                ([], 2, "--listen unix:PATH"),
                (["--listen", "unix:a", "--keep", "master"], 9, "keeps master"),
                (["--listen", "unix:a", "--keep", "moments"], 9, "keeps moments")]:
            with self.subTest(words):
                self.run_tool("pec-save", "agent", self.run_folder, self.store, "--replay", *words,
                              code=code)
                self.assertIn(why, self.stderr)


class RestartsMeanwhile(Replays):
    """A restart that is recorded while a trainer submits gradients."""

    def test_the_log_begins_again(self):
        self.start("a", "--policy", "gradient-log", "--k", 1, "--full-every", 50)
        self.take(3)
        self.wait(lambda: self.status("a")["persisted"] == 3)
        trainer = Trainer(self.work / "a", self.model, 3)
        self.addCleanup(trainer.close)
        self.persist(trainer, (4, 5))
        # A look at an older state without --read-only, which is then taken back.
        self.run_tool("pec-restore", self.store, self.work / "look", "--at", 4, "--restart")
        self.run_tool("pec-save", "undo", self.store)
        with self.assertRaisesRegex(Gone, "is of iteration 6, which was abandoned"):
            trainer.step(6)
        self.take(6)
        self.wait(lambda: self.status("a")["persisted"] == 6)
        again = Trainer(self.work / "a", self.model, 6)
        self.addCleanup(again.close)
        self.persist(again, (7, 8))
        result = self.run_tool("pec-restore", self.store, self.work / "out", "--read-only", "--replay", "require")
        self.assertEqual((result["iteration"], result["stale_modules"]), (8, 0))
        self.assertGreater(result["replay"]["modules"], 0)


class SinglePrecision(MemoryReplay):
    dtype = "fp32"


if __name__ == "__main__":
    stores.main()
