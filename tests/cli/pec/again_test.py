#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""An iteration that is saved again, with the same or with other content: what the store calls by its
number is of one checkpoint.

Usage: again_test.py BIN
"""

import json
import pathlib
import shutil
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from agent_test import Agents  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position
from stores import MODEL, Stores, moe_checkpoint  # pylint: disable=wrong-import-position

OTHER = moe_checkpoint.Model(seed=9)


class Again(Stores):
    def setUp(self):
        super().setUp()
        moe_checkpoint.series(self.work / "other", OTHER, (4, 5, 6))

    def save_other(self, iteration, *words):
        result = self.save(iteration, *words, source=self.work / "other")
        self.assertIn("other content", self.stderr)
        return result

    def manifest(self):
        """The newest one: module -> component -> [version, digest, ...]"""
        path = sorted((self.store / "manifests").iterdir())[-1]
        return {m.pop("module"): m for m in json.loads(path.read_text())["modules"]}

    def assert_of_one_run(self, iteration):
        """The newest manifest's state of ITERATION is that of the other run."""
        there, self.store = self.manifest(), self.work / "full"
        self.save(iteration, source=self.work / "other")
        full, self.store = self.manifest(), self.work / "store"
        for module, parts in there.items():
            for name, held in parts.items():
                self.assertLessEqual(held[0], iteration)
                if held[0] == iteration:
                    self.assertEqual(held[1], full[module][name][1], module)

    def test_fewer_experts_leave_none_of_the_first_run(self):
        self.save_series((3, 4), "--k", 1)
        self.save(5, "--policy", "full")
        result = self.save_other(5, "--k", 1)
        self.assertEqual({len(experts) for experts in result["persist"].values()}, {4})
        self.assert_of_one_run(5)
        self.restore("out", "--require-complete")
        self.same("out", 5, {}, OTHER)

    def test_experts_that_were_never_saved_stay_older(self):
        after = self.save_series((3, 4, 5), "--k", 1)[5]
        self.save_other(5, "--k", 1)
        self.assert_of_one_run(5)
        self.restore("out", "--require-complete", code=5)
        self.restore("out")
        self.assertEqual(self.report["versions"], after)

    def test_after_a_collection_too(self):
        self.save_series((3, 4, 5), "--k", 1)
        self.run_tool("pec-save", "gc", self.store, "--keep-last", 1)
        self.save_other(5, "--k", 1)
        self.assert_of_one_run(5)

    def test_kept_components(self):
        self.save(3, "--keep", "master")
        self.save_series((4, 5), "--k", 2)
        result = self.save_other(5, "--k", 1)
        self.assertEqual({len(experts) for experts in result["persist"].values()}, {2})
        self.assert_of_one_run(5)

    def test_the_same_content_costs_nothing(self):
        after = self.save_series((3, 4, 5), "--k", 1)[5]
        for _ in range(2):
            result = self.save(5, "--k", 1)
            self.assertEqual((result["blobs_written"], result["blobs_unchanged"]),
                             (0, result["blobs"]))
            self.assertNotIn("other content", self.stderr)
            self.assertEqual({m: 5 for m, v in after.items() if v == 5},
                             {MODEL.module(layer, e): 5 for layer, experts
                              in result["persist"].items() for e in experts})
        self.restore("out")
        self.same("out", 5, after)

    def test_the_same_content_with_fewer_experts_stays_complete(self):
        self.save(4)
        self.save(5, "--policy", "full")
        self.assertEqual(self.save(5, "--k", 1)["blobs_written"], 0)
        self.restore("out", "--require-complete")
        self.same("out", 5, {})

    def test_damage_does_not_bring_the_first_run_back(self):
        self.save_series((3, 4), "--policy", "full")
        self.save(5, "--policy", "full")
        self.save_other(5, "--k", 1)
        expert = MODEL.module(0, 3)
        digest = self.manifest()[expert]["moments"][1]
        self.damage(self.store / "blobs" / digest[:2] / digest, "removed")
        self.restore("out", "--allow-older", "--read-only")
        self.assertEqual((self.report["iteration"], self.report["versions"][expert]), (5, 4))

    def states(self):
        listed = self.run_tool("pec-save", "list", self.store)["checkpoints"]
        return [(c["sequence"], c["iteration"], c["abandoned"]) for c in listed]

    def test_the_place_of_the_first_save_is_taken(self):
        self.save_series((3, 4), "--k", 1)
        self.save_other(4, "--k", 1)
        self.assertEqual(self.states(), [(1, 3, False), (2, 4, True), (3, 4, False)])
        # Going back discards both saves of 4, also when the second one is gone.
        self.assertEqual(self.restore("out", "--at", 3)["abandoned"], [4])
        (self.store / "manifests" / "0000000003-0000000004.json").unlink()
        self.assertEqual(self.states(), [(1, 3, False), (2, 4, True)])
        self.run_tool("pec-save", "gc", self.store, "--keep-last", 9)
        self.assertEqual(self.states(), [(1, 3, False)])

    def test_the_output_names_the_replaced_checkpoint(self):
        self.assertIsNone(self.save(3, "--k", 1)["replaces"])
        self.assertIn("checkpoint 1 of the store, its first", self.stdout)
        self.assertEqual(self.save(3, "--k", 1)["replaces"], 1)
        self.assertIn("checkpoint 2 of the store; replaces checkpoint 1 of the same iteration", self.stdout)
        self.assertNotIn("its first", self.stdout)
        self.save(4, "--k", 1)
        self.restore("out", "--at", 3)
        self.run_tool("pec-save", "list", self.store)
        states = [line.split(None, 6)[6] for line in self.stdout.splitlines() if "sequential" in line]
        self.assertEqual(states, ["replaced by 2", "usable", "abandoned"])

    def test_resumed_from_gives_up_both_saves(self):
        self.save_series((3, 4), "--k", 1)
        self.save_other(4, "--k", 1)
        self.save(5, "--k", 1, "--resumed-from", 3, source=self.work / "other")
        (self.store / "manifests" / "0000000003-0000000004.json").unlink()
        self.assertEqual(self.states(), [(1, 3, False), (2, 4, True), (4, 5, False)])

    def test_lost_tokens_are_those_of_the_versions(self):
        words = ("--k", 1, "--tokens", self.tokens_path)
        self.save_series((3, 4), *words)
        self.save(5, "--policy", "full", "--tokens", self.tokens_path)
        self.save_other(5, *words)
        self.save(6, *words, source=self.work / "other")
        loss = self.restore("out")["loss"]
        versions = self.report["versions"]
        self.assertEqual(set(versions.values()), {5, 6})
        self.assertEqual(loss["lost_by_expert"],
                         [[sum(self.tokens[i][m][e]
                               for i in range(versions[MODEL.module(m, e)] + 1, 7))
                           for e in range(MODEL.experts)] for m in range(MODEL.layers)])


class InMemory(Agents):
    def test_a_snapshot_takes_what_the_store_has(self):
        self.save_series((3, 4), "--policy", "full")
        self.checkpoint(4)
        self.start("a", "--k", 1)
        self.tell("a", "snapshot")
        self.tell("a", "flush")
        listed = self.run_tool("pec-save", "list", self.store)["checkpoints"]
        self.assertEqual([(c["iteration"], c["abandoned"], c["stale_modules"]) for c in listed],
                         [(3, False, 0), (4, True, 0), (4, False, 0)])

    def test_an_agent_takes_the_second_save(self):
        agent = self.start("a", "--k", 2, "--k-persist", 1)
        for iteration in (3, 4, 5):
            self.checkpoint(iteration)
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        self.assertEqual(self.tell("a", "snapshot global_step5"), {"answer": "5"})
        self.assertEqual(self.stdout, "iteration 5 is in the agent's memory\n")
        self.assertEqual(self.tell("a", "flush"), {"answer": "5"})
        self.assertEqual(self.stdout, "all snapshots are saved; the store's newest checkpoint has iteration 5\n")
        self.assertEqual((self.status("a")["persists"], len(list((self.store / "manifests").iterdir()))),
                         (3, 3), "the same files are not saved again")
        # Training was repeated without a restore.
        moe_checkpoint.write(self.run_folder / "other", OTHER, 5)
        shutil.rmtree(self.run_folder / "global_step5")
        (self.run_folder / "other" / "global_step5").rename(self.run_folder / "global_step5")
        self.assertEqual(self.tell("a", "snapshot global_step5"), {"answer": "5"})
        self.assertEqual(self.tell("a", "flush"), {"answer": "5"})
        listed = self.run_tool("pec-save", "list", self.store)["checkpoints"]
        self.assertEqual([(c["iteration"], c["abandoned"]) for c in listed],
                         [(3, False), (4, False), (5, True), (5, False)])
        # All that is called 5, in memory and in the store, is of the second save.
        self.run_tool("pec-save", self.run_folder / "global_step5", self.work / "full")
        full = {blob.name for blob in (self.work / "full" / "blobs").rglob("*") if blob.is_file()}
        texts = [path.read_text() for path in sorted((self.store / "manifests").iterdir())[-1:]]
        for text in texts:
            for module in json.loads(text)["modules"]:
                for name in ("weights", "master", "moments"):
                    version, digest = (module.get(name) or [0, ""])[:2]
                    self.assertTrue(version != 5 or digest in full, module["module"])
        result = self.restore("out", "--agents", self.address("a"))
        self.assertEqual((result["iteration"], result["bytes"]["storage"]), (5, 0))
        self.assertNotIn("other content", self.stderr)
        self.assertEqual(self.end(agent), 0)

    def test_an_agent_with_other_content_is_not_asked(self):
        self.start("a", "--k", 3, "--k-persist", 1)
        for iteration in (3, 4, 5):
            self.checkpoint(iteration)
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        moe_checkpoint.write(self.work / "other", OTHER, 5)
        self.save(5, "--policy", "full", source=self.work / "other")
        result = self.restore("out", "--agents", self.address("a"))
        self.assertIn("other content", self.stderr)
        self.assertEqual(result["bytes"]["memory"], 0)
        self.same("out", 5, {}, OTHER)


if __name__ == "__main__":
    stores.main()
