#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Inputs that pec-save and pec-restore reject, how they handle damage, which files a collection removes,
and that the number of ranks does not show.

Usage: damage_test.py BIN [MPIEXEC]
"""

import fcntl
import json
import os
import shutil
import subprocess

import stores
from stores import ITERATIONS, MODEL, Given, Stores, moe_checkpoint
from harness import environment, tree


class Refusing(Stores):
    def test_another_model(self):
        self.save_series((3, 4), "--k", 1)
        other = moe_checkpoint.Model(extra={"blocks.0.more.weight": (3, 5)})
        moe_checkpoint.series(self.work / "run", other, [4])
        before = tree(self.store)
        self.save(4, "--resumed-from", 3, source=self.work / "run", code=5)
        self.assertEqual(tree(self.store), before)
        self.assertIn('"blocks.0.more.weight" exp_avg: expected none, found float32 [3, 5]', self.stderr)
        wide = moe_checkpoint.Model(hidden=8)
        moe_checkpoint.series(self.work / "wide", wide, [4])
        self.save(4, source=self.work / "wide", code=5)
        self.assertIn(", found float32 [", self.stderr)

    def test_policies_that_need_tokens(self):
        self.save(3, "--tokens", self.tokens_path)
        for policy in ("load-aware", "budget", "budget-global"):
            self.save(4, "--policy", policy, code=2)
            self.assertIn("pass --tokens", self.stderr)

    def test_tokens_that_are_not_there(self):
        self.save(3, "--tokens", self.work / "absent", code=3)
        self.assertIn("absent", self.stderr)
        self.assertFalse(self.store.exists(), "a store was made")

    def test_tokens_of_another_shape_and_gaps(self):
        self.save(3, "--tokens", self.tokens_path)
        lines = self.tokens_path.read_text().splitlines(keepends=True)
        bad = self.work / "tokens.jsonl"
        bad.write_text('{"iteration": 4, "tokens": [[1, 2, 3], [1, 2, 3]]}\n')
        self.save(4, "--tokens", bad, code=5)
        self.assertIn("3", self.stderr)
        bad.write_text("".join(lines[:3] + lines[4:]))
        self.save(5, "--tokens", bad, code=4)
        self.assertIn("iterations 4 to 4 are missing", self.stderr)
        self.save(4, "--tokens", self.work / "absent", code=3)

    def test_a_store_that_is_ahead(self):
        self.save_series((3, 4, 5), "--k", 1)
        self.save(4, code=5)
        self.assertIn("the store is at iteration 5, this checkpoint has iteration 4", self.stderr)
        self.save(4, "--k", 1, "--resumed-from", 3)
        self.restore("out")
        self.assertEqual(self.report["iteration"], 4)
        self.same("out", 4, self.report["versions"])

    def test_two_writers(self):
        self.save(3)
        before = tree(self.store)
        with open(self.store / "lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.save(4, code=6)
            self.restore("out", code=6)
            self.run_tool("pec-save", "gc", self.store, "--keep-last", 1, code=6)
            (self.store / "lock").unlink()
        self.assertEqual(tree(self.store), before)
        self.save(4)

    def test_folders_that_are_no_stores(self):
        self.store.mkdir()
        (self.store / "mine").write_text("precious")
        self.save(3, code=6)
        self.restore("out", code=3)
        self.assertEqual(os.listdir(self.store), ["mine"])

    def test_flags_that_mean_nothing(self):
        step = self.shared / "run/global_step3"
        for words in (["check", self.store, "--k", 2], ["gc", "check", self.store],
                      [step, self.store, "--keep-last", 2], [step, self.store, "--max-age", 2],
                      [step, self.store, "--policy", "full", "--k", 2],
                      [step, self.store, "--k", 1, "--k-persist", 2],
                      [step, self.store, "--budget", "1GiB"], [step, self.store, "--keep", "all"],
                      ["check", self.store, self.store]):
            self.run_tool("pec-save", *words, code=2)
        self.assertFalse(self.store.exists())

    def test_k_above_the_experts_of_every_layer(self):
        for words in (["--k", 9], ["--k", 9, "--dry-run"], ["--k", 9, "--policy", "budget"], ["--k", 5]):
            self.save(3, *words, code=2)
            self.assertIn(f"--k {words[1]}: layer 0 has 4 experts, and no layer has more; use at most 4, or --policy full",
                          self.stderr)
            self.assertFalse(self.store.exists(), "a store was made")
        self.save(3, "--k", 4)
        self.save(4, "--policy", "full")
        dense = moe_checkpoint.Model(layers=0)
        moe_checkpoint.series(self.work / "dense", dense, [3])
        self.store = self.work / "dense-store"
        self.save(3, "--k", 9, source=self.work / "dense")  # a model without experts has no K

    def test_iterations_up_to_nothing(self):
        self.save(3)
        self.restore("out", "--at", 2, code=3)
        self.assertIn("the first one has iteration 3", self.stderr)


class Damage(Stores):
    def victims(self, iteration, *modules):
        """Blobs of modules in the newest manifest."""
        path = sorted((self.store / "manifests").iterdir())[-1]
        self.assertIn(f"{iteration:010}", path.name)
        found = []
        for module in json.loads(path.read_text())["modules"]:
            if module["module"] in modules:
                digest = module["moments"][1]
                found.append(self.store / "blobs" / digest[:2] / digest)
        return found

    def test_check_lists_what_is_damaged(self):
        self.save_series((3, 4), "--k", 1)
        expert = MODEL.module(0, 3)
        for how in ("flipped", "cut", "removed"):
            path = self.victims(4, expert)[0]
            good = path.read_bytes()
            self.damage(path, how)
            result = self.run_tool("pec-save", "check", self.store, code=5)
            self.assertEqual(len(result["damaged"]), 1)
            self.assertIn(f"{expert} moments of iteration 3", result["damaged"][0])
            path.write_bytes(good)
        self.run_tool("pec-save", "check", self.store)

    def test_damaged_blobs_are_not_restored(self):
        self.save_series((3, 4, 5, 6, 7), "--k", 1)
        expert = MODEL.module(0, 3)  # saved at 3 and 7
        for how in ("flipped", "cut", "removed"):
            path = self.victims(7, expert)[0]
            good = path.read_bytes()
            self.damage(path, how)
            self.restore("out", code=4)
            self.assertIn(expert, self.stderr)
            self.assertFalse((self.work / "out").exists())
            result = self.restore("out", "--allow-older", "--read-only")
            self.assertEqual(self.report["versions"][expert], 3)
            self.assertEqual(self.report["iteration"], 7)
            self.assertEqual(len(result["damaged"]), 1)
            self.same("out", 7, self.report["versions"])
            shutil.rmtree(self.work / "out")
            path.write_bytes(good)

    def test_damage_outside_experts_goes_back_an_iteration(self):
        after = self.save_series((3, 4, 5), "--k", 1)
        self.damage(self.victims(5, "blocks.0.qkv")[0], "flipped")
        self.restore("out", "--allow-older", "--read-only")
        self.assertEqual(self.report["iteration"], 4)
        self.same("out", 4, after[4])

    def test_damaged_texts(self):
        after = self.save_series((3, 4), "--k", 1)
        for folder in ("manifests", "catalogues"):
            path = sorted((self.store / folder).iterdir())[-1]
            good = path.read_bytes()
            path.write_bytes(good[:-5])
            self.restore("out", code=4)
            self.assertIn(path.name, self.stderr)
            self.restore("out", "--allow-older", "--read-only", "--force")
            self.assertEqual(self.report["iteration"], 3)
            self.same("out", 3, after[3])
            self.run_tool("pec-save", "check", self.store, code=5)
            path.write_bytes(good)
        head = self.store / "store.json"
        head.write_text(head.read_text().replace('"schema": 1', '"schema": 2'))
        self.restore("out2", code=9)

    def test_older_versions_count_as_lost(self):
        self.save_series((3, 4, 5, 6, 7), "--k", 1, "--tokens", self.tokens_path)
        expert = MODEL.module(0, 3)
        plain = self.restore("out", "--read-only", "--dry-run")["loss"]["lost_by_expert"][0][3]
        self.damage(self.victims(7, expert)[0], "removed")
        older = self.restore("out", "--allow-older")["loss"]["lost_by_expert"][0][3]
        self.assertEqual(plain, 0)
        self.assertEqual(older, sum(self.tokens[i][0][3] for i in (4, 5, 6, 7)))
        self.save(8, "--k", 1, "--tokens", self.tokens_path)


class Collecting(Stores):
    def iterations(self):
        return sorted(int(p.name[11:21]) for p in (self.store / "manifests").iterdir())

    def test_rules(self):
        after = self.save_series(ITERATIONS, "--k", 1)
        self.run_tool("pec-save", "gc", self.store, "--keep-last", 2, "--keep-every", 4, "-n")
        self.assertEqual(self.iterations(), list(ITERATIONS))
        self.run_tool("pec-save", "gc", self.store, "--keep-last", 2, "--keep-every", 4)
        self.assertEqual(self.iterations(), [4, 7, 8])
        self.run_tool("pec-save", "check", self.store)
        for at in (4, 7, 8):
            self.restore("out", "--at", at, "--read-only", "--force")
            self.same("out", at, after[at])
        self.run_tool("pec-save", "gc", self.store, "--keep-last", 1)
        self.assertEqual(self.iterations(), [8])
        self.restore("out", "--read-only", "--force")
        self.same("out", 8, after[8])
        names = {v[1] for m in json.loads(next((self.store / "manifests").iterdir()).read_text())
                 ["modules"] for v in m.values() if isinstance(v, list)}
        self.assertLessEqual(names, {p.name for p in self.blobs()})
        self.assertEqual(len(self.blobs()), len(names) + 1, "and the client state")

    def test_without_a_rule_nothing_is_removed(self):
        self.save_series((3, 4), "--k", 1)
        self.run_tool("pec-save", "gc", self.store, code=2)
        self.assertIn("give --keep-last N or --keep-every N", self.stderr)
        self.assertEqual(self.iterations(), [3, 4])
        self.run_tool("pec-save", "gc", self.store, "--keep-every", 4)
        self.assertIn("keeps    1 checkpoint: 4\nremoved  1 checkpoint: 3, ", self.stdout)
        self.assertEqual(self.iterations(), [4])

    def test_abandoned_ones_go_and_numbers_are_not_used_again(self):
        self.save_series((3, 4, 5), "--k", 1)
        self.restore("out", "--at", 4)
        self.run_tool("pec-save", "gc", self.store, "--keep-last", 9)
        self.assertEqual(self.iterations(), [3, 4])
        self.assertEqual(self.save(5, "--k", 1)["sequence"], 4)

    def test_readers_beside_a_collection(self):
        for _ in range(4):
            shutil.rmtree(self.store, ignore_errors=True)
            self.save_series(ITERATIONS, "--k", 2)
            readers = [subprocess.Popen([Given.bin / "pec-save", how, self.store, "-q"],
                                        env=environment(), stdout=subprocess.DEVNULL)
                       for how in 3 * ("check", "list")]
            self.run_tool("pec-save", "gc", self.store, "--keep-last", 1)
            self.assertEqual([reader.wait(60) for reader in readers], [0] * len(readers))

    def test_nothing_goes_while_the_newest_is_damaged(self):
        self.save_series((3, 4, 5), "--k", 1)
        Damage.victims(self, 5, MODEL.module(1, 3))[0].unlink()
        before = tree(self.store)
        self.run_tool("pec-save", "gc", self.store, "--keep-last", 1, code=5)
        self.assertEqual(tree(self.store), before)


class Ranks(Stores):
    def test_every_number_of_ranks_gives_the_same_store(self):
        if Given.mpiexec is None:
            self.skipTest("no MPI launcher given")
        stores, outputs = [], []
        for ranks in (1, 2, 3):
            launcher = [Given.mpiexec, "--oversubscribe", "-n", ranks] if ranks > 1 else []
            shutil.rmtree(self.store, ignore_errors=True)
            for i in (3, 4, 5):
                result = self.save(i, "--k", 1, "--threads", 1, "--tokens", self.tokens_path,
                                   launcher=launcher)
                self.assertEqual(len(result["rank_bytes"]), ranks)
                self.assertEqual(sum(result["rank_bytes"]), result["bytes"])
                self.assertEqual(max(result["rank_bytes"]), result["bottleneck_bytes"])
                self.assertEqual(" each, bound " in self.stdout, ranks > 1)
                self.assertLessEqual(result["bottleneck_bytes"], 4 * result["bound_bytes"] / 3)
            files = tree(self.store)
            del files["store.json"]  # has the random name of the store
            stores.append(files)
            self.run_tool("pec-save", "check", self.store, launcher=launcher)
            self.restore("out", "--target", "ep=4,dp=4", "--threads", 1, launcher=launcher)
            outputs.append(tree(self.work / "out"))
            shutil.rmtree(self.work / "out")
        self.assertEqual(stores[0], stores[1])
        self.assertEqual(stores[0], stores[2])
        self.assertEqual(outputs[0], outputs[1])
        self.assertEqual(outputs[0], outputs[2])

    def test_ranks_tell_damage_once(self):
        if Given.mpiexec is None:
            self.skipTest("no MPI launcher given")
        self.save_series((3, 4), "--k", 1)
        for path in self.blobs()[::5]:
            self.damage(path, "cut")
        alone = self.run_tool("pec-save", "check", self.store, code=5)
        self.assertGreater(len(alone["damaged"]), 3)
        launcher = [Given.mpiexec, "--oversubscribe", "-n", 3]
        together = self.run_tool("pec-save", "check", self.store, code=5, launcher=launcher)
        self.assertEqual(sorted(together["damaged"]), sorted(alone["damaged"]))
        sorted((self.store / "manifests").iterdir())[0].write_text("{")
        together = self.run_tool("pec-save", "check", self.store, code=5, launcher=launcher)
        self.assertEqual(len([d for d in together["damaged"] if "manifests" in d]), 1)

    def test_ranks_measure_at_once(self):
        if Given.mpiexec is None:
            self.skipTest("no MPI launcher given")
        result = self.run_tool("pec-save", "tune", "--measure", self.work,
                               launcher=[Given.mpiexec, "--oversubscribe", "-n", 2])
        self.assertIn("the slowest of 2 at once", self.stdout)
        self.assertEqual(self.report["bytes_written"], 512 << 20)
        self.assertGreater(result["measured"]["persist_bytes_per_s"], 1e6)
        self.assertEqual([p for p in self.work.iterdir() if not p.name.startswith("report")], [])


if __name__ == "__main__":
    stores.main()
