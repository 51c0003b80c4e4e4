#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save and pec-restore on small checkpoints made for the test: their promises, by exit code, report
and files on disk. Restored checkpoints are compared with ones that are made directly with the
versions that follow from the reports of the saves.

Usage: commands_test.py BIN
"""

import itertools
import json
import os
import pathlib
import random
import re
import shutil

import stores
from stores import ITERATIONS, MODEL, Stores, moe_checkpoint
from harness import real_checkpoints, tree


class Saving(Stores):
    def test_every_policy_restores_every_iteration(self):
        for policy, k in itertools.product(
                ("sequential", "load-aware", "budget", "budget-global", "full"), (1, 2, 4)):
            words = ["--policy", policy, "--tokens", self.tokens_path]
            words += ["--k", k] if policy != "full" else []
            with self.subTest(policy=policy, k=k):
                shutil.rmtree(self.store, ignore_errors=True)
                after = self.save_series(ITERATIONS, *words)
                self.assertEqual(len(after[ITERATIONS[0]]), 8, "the first checkpoint has all")
                for at in ITERATIONS:
                    self.restore("out", "--at", at, "--force", "--read-only")
                    self.assertEqual(self.report["iteration"], at)
                    self.assertEqual(self.report["versions"], after[at])
                    self.same("out", at, after[at])
                if policy == "full":
                    self.assertEqual(set(after[8].values()), {8})

    def test_stores_with_the_old_name_of_a_policy_stay_readable(self):
        after = self.save_series((3, 4), "--k", 1)
        paths = sorted((self.store / "manifests").iterdir())
        self.assertEqual(len(paths), 2)
        for path in paths:
            # A text without its digest is not checked.
            text, digests = re.subn(r'"xxh3_128":"[0-9a-f]+",|,"xxh3_128":"[0-9a-f]+"', "", path.read_text(encoding="utf-8"))
            text, policies = re.subn('"policy":"sequential"', '"policy":"replay"', text)
            self.assertEqual((digests, policies), (1, 1))
            path.chmod(0o600)
            path.write_text(text, encoding="utf-8")
        listed = self.run_tool("pec-save", "list", self.store)["checkpoints"]
        self.assertEqual([one["policy"] for one in listed], ["replay", "replay"])
        self.run_tool("pec-save", "check", self.store)
        self.restore("out", "--read-only")
        self.same("out", 4, after[4])
        self.save(5, "--k", 1)
        self.run_tool("pec-save", "plan", self.store, "--policy", "gradient-log")

    def test_a_store_is_no_checkpoint(self):
        self.save(3)
        self.run_tool("ucp-load", self.store, self.work / "out", "--target", "dp=1", code=3)
        self.assertIn("a store of partial checkpoints; restore a checkpoint from it with pec-restore", self.report["error"]["message"])
        other = self.shared / "run"
        self.run_tool("pec-restore", other, self.work / "out", code=3)
        self.assertIn("no store of partial checkpoints", self.report["error"]["message"])
        self.run_tool("pec-restore", other, self.work / "nowhere/out", code=3)
        self.assertIn("cannot find the parent directory", self.report["error"]["message"])

    def test_files_of_two_saves_are_named(self):
        mixed = self.work / "mixed/global_step4"
        shutil.copytree(self.shared / "run/global_step4", mixed)
        name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        shutil.copy(self.shared / "run/global_step5" / name, mixed / name)
        self.save(4, source=self.work / "mixed", code=4)
        self.assertIn('"step" of group 0 differs: 4 ', self.stderr)
        self.assertIn("the files come from two saves", self.stderr)

    def test_selection_is_the_ring(self):
        self.save(3)
        chosen = [self.save(i, "--k", 1)["layers"] for i in (4, 5, 6, 7)]
        # Experts 0 1 on rank 0, 2 3 on rank 1: ring 0 2 1 3, layer m starts at m.
        self.assertEqual([c["0"] for c in chosen], [[0], [2], [1], [3]])
        self.assertEqual([c["1"] for c in chosen], [[2], [1], [3], [0]])

    def test_bytes_are_those_of_the_formula(self):
        full = self.save(3)
        dense = sum(4 * 4 * rows * columns for rows, columns in MODEL.dense.values())
        expert = sum(4 * 4 * rows * columns for rows, columns in MODEL.expert.values())
        self.assertEqual(full["full_bytes"], dense + 8 * expert)
        self.assertEqual(full["bytes"], full["full_bytes"])
        for k in (1, 2, 4):
            self.assertEqual(self.save(3 + k, "--k", k)["bytes"], dense + 2 * k * expert)

    def test_kept_components(self):
        model = moe_checkpoint.Model(dtype="bf16", seed=5)
        moe_checkpoint.series(self.work / "run", model, range(1, 5))
        dense = sum(14 * r * c for r, c in model.dense.values())
        elems = sum(r * c for r, c in model.expert.values())
        held = {}
        for i in range(1, 5):
            result = self.save(i, *(["--keep", "master"] if i == 1 else []),
                               source=self.work / "run")
            if i > 1:
                # b_keep = 4 bytes of all experts, the other 10 of the selected ones.
                self.assertEqual(result["bytes"], dense + elems * (8 * 4 + 2 * 10))
            for layer, experts in result["persist"].items():
                held.update({model.module(layer, e): i for e in experts})
        result = self.restore("out")
        versions = {}
        for module, version in held.items():
            # Weights are the kept master, rounded.
            versions.update({(module, s): version for s in ("exp_avg", "exp_avg_sq")})
        self.same("out", 4, versions, model)
        by_name = {m["module"]: m for m in result["modules"]}
        for module, version in held.items():
            self.assertEqual(by_name[module]["moments"]["version"], version)
            self.assertEqual(by_name[module]["master"]["version"], 4)
            self.assertEqual("rounded_from" in by_name[module]["weights"], version < 4)
        self.save(4, "--keep", "weights", source=self.work / "run", code=5)
        self.assertIn("--keep master", self.stderr)

    def test_keeping_all_is_no_selection(self):
        self.save(3, "--keep", "weights,master,moments", code=2)
        self.assertFalse(self.store.exists())

    def test_two_levels(self):
        for i in ITERATIONS:
            result = self.save(i, "--k", 2, "--k-persist", 1)
            if i > 3:
                for layer in ("0", "1"):
                    self.assertEqual(len(result["layers"][layer]), 2)
                    self.assertEqual(len(result["persist"][layer]), 1)
                    self.assertIn(result["persist"][layer][0], result["layers"][layer])
        # After N / Kp checkpoints every expert has been persisted again.
        self.restore("out", "--dry-run")
        self.assertGreaterEqual(min(self.report["versions"].values()), 5)

    def test_budget_in_bytes(self):
        self.save(3, "--tokens", self.tokens_path)
        dense = sum(16 * r * c for r, c in MODEL.dense.values())
        expert = sum(16 * r * c for r, c in MODEL.expert.values())
        result = self.save(4, "--policy", "budget-global", "--tokens", self.tokens_path,
                           "--budget", dense + 3 * expert + expert // 2)
        self.assertEqual(sum(map(len, result["persist"].values())), 3)
        result = self.save(5, "--policy", "budget", "--tokens", self.tokens_path,
                           "--budget", dense - 1)
        self.assertEqual(sum(map(len, result["persist"].values())), 0)
        self.assertIn("non-expert part", self.stderr)

    def test_unchanged_content_is_not_written_again(self):
        self.save(3)
        before = tree(self.store / "blobs")
        result = self.save(3, "--policy", "full")
        self.assertEqual(result["blobs_written"], 0)
        self.assertEqual(result["blobs_unchanged"], result["blobs"])
        self.assertEqual(tree(self.store / "blobs"), before)
        self.restore("out")
        self.same("out", 3, {})

    def test_compressed_blobs_hold_the_same(self):
        self.save(3, "--compress", "zstd")
        self.assertTrue(all(p.suffix == ".zst" for p in self.blobs()))
        self.save(4, "--k", 1)
        self.run_tool("pec-save", "check", self.store)
        self.restore("out")
        self.same("out", 4, self.report["versions"])

    def test_dry_run_writes_nothing(self):
        planned = self.save(3, "--dry-run")
        self.assertFalse(self.store.exists())
        done = self.save(3)
        self.assertEqual(planned["bytes"], done["bytes"])
        before = tree(self.store)
        planned = self.save(4, "--k", 1, "--dry-run")
        self.restore("out", "--dry-run")
        self.assertFalse((self.work / "out").exists())
        self.assertEqual(tree(self.store), before)
        done = self.save(4, "--k", 1)
        self.assertEqual((planned["layers"], planned["bytes"]), (done["layers"], done["bytes"]))

    def test_a_model_without_experts_is_saved_whole(self):
        demo = pathlib.Path(__file__).resolve().parents[2] / "data" / "demo"
        result = self.run_tool("pec-save", demo, self.store)
        self.assertEqual(result["bytes"], result["full_bytes"])
        self.restore("out", "--target", "zero=3,dp=3")
        self.run_tool("ucp-load", demo, self.work / "direct", "--target", "zero=3,dp=3")
        self.run_tool("ucp-load", "--check", self.work / "direct", self.work / "out")

    def test_list_tells_what_is_stale(self):
        self.save_series((3, 4), "--k", 1)
        result = self.run_tool("pec-save", "list", self.store)
        self.assertEqual([c["stale_modules"] for c in result["checkpoints"]], [0, 6])
        self.assertEqual([c["iteration"] for c in result["checkpoints"]], [3, 4])

    def test_verify_levels(self):
        for level in ("none", "checksums", "replicas", "readback"):
            shutil.rmtree(self.store, ignore_errors=True)
            self.save(3, "--verify", level)
            self.run_tool("pec-save", "check", self.store)

    def test_damaged_source_is_refused(self):
        shutil.copytree(self.shared / "run" / "global_step3", self.work / "bad" / "global_step3")
        path = self.work / "bad/global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt"
        data = bytearray(path.read_bytes())
        at = data.find(MODEL.data("emb.weight", "exp_avg", (11, 6), 3)[-16:])
        self.assertGreater(at, 0)
        data[at] ^= 1
        path.write_bytes(data)
        self.save(3, source=self.work / "bad", code=4)
        self.assertIn("CRC-32", self.stderr)
        self.run_tool("pec-save", "list", self.store)
        self.assertEqual(list((self.store / "manifests").iterdir()), [])


class Restoring(Stores):
    def test_other_layouts(self):
        after = self.save_series((3, 4, 5), "--k", 1)
        for target in ("ep=1", "ep=4,dp=4", "ep=2,dp=4,zero=1"):
            self.restore("out", "--target", target, "--force", "--read-only")
            self.same("out", 5, after[5])
        self.restore("atoms", "--format", "universal", "--read-only")
        self.same("atoms", 5, after[5])

    def test_full_equals_the_source(self):
        self.save(3, "--policy", "full")
        self.restore("out")
        self.run_tool("ucp-load", "--check", self.shared / "run/global_step3", self.work / "out")
        model = moe_checkpoint.ptfile.load(self.work / "out/global_step3/mp_rank_00_model_states.pt")
        self.assertEqual(model["note"], "hello")
        self.assertEqual(model["random_state"].args[0].data, random.Random(3).randbytes(100))
        manifest = json.loads((self.work / "out/shardwright.json").read_text())
        self.assertEqual((manifest["iteration"], manifest["versions"]), (3, {}))

    def test_outputs_say_what_is_stale(self):
        after = self.save_series((3, 4), "--k", 1)
        self.restore("out")
        manifest = json.loads((self.work / "out/shardwright.json").read_text())
        stale = {module: v for module, v in after[4].items() if v < 4}
        self.assertEqual(manifest["versions"], stale)
        self.assertIn("-: not counted.", " ".join(self.stdout.split()))

    def test_tokens_that_an_earlier_restore_counted_are_explained(self):
        self.save_series((3, 4), "--k", 1, "--tokens", self.tokens_path)
        self.restore("out")
        self.assertNotIn("an earlier restore has counted them", " ".join(self.stdout.split()))
        self.restore("again")
        self.assertIn("0: the expert got no tokens in them, or an earlier restore has counted them.",
                      " ".join(self.stdout.split()))

    def lost(self, versions, x):
        return [sum(self.tokens[i][m][e] for e in range(MODEL.experts)
                    for i in range(versions[MODEL.module(m, e)] + 1, x + 1))
                for m in range(MODEL.layers)]

    def test_lost_tokens(self):
        words = ("--k", 1, "--tokens", self.tokens_path)
        after = self.save_series((3, 4, 5, 6), *words)
        loss = self.restore("out")["loss"]
        wanted = self.lost(after[6], 6)
        self.assertEqual(loss["lost"], wanted)
        seen = [sum(sum(self.tokens[i][m]) for i in range(1, 7)) for m in (0, 1)]
        self.assertAlmostEqual(loss["plt"], sum(w / s for w, s in zip(wanted, seen)) / 2)
        self.assertAlmostEqual(loss["mlt_sum"], sum(w / s for w, s in zip(wanted, seen)))
        # A second fault charges only what the first one has not: experts saved since, or later
        # iterations of those still stale.
        held = self.save_series((7,), *words)[7]
        versions = {**after[6], **held}
        second = self.restore("out2")["loss"]
        again = [sum(self.tokens[i][m][e] for e in range(MODEL.experts)
                     for i in range(max(versions[MODEL.module(m, e)], 6) + 1, 8))
                 for m in range(MODEL.layers)]
        self.assertEqual(second["lost"], again)
        self.assertEqual(second["faults"], 2)

    def test_a_restore_warns_above_the_limit(self):
        self.save_series((3, 4, 5, 6), "--k", 1, "--tokens", self.tokens_path)
        # The first checkpoint has all experts.
        self.assertEqual(self.restore("first", "--at", 3, "--read-only")["loss"]["plt"], 0)
        self.assertNotIn("accuracy suffers", self.stderr)
        loss = self.restore("out")["loss"]
        self.assertGreater(loss["plt"], loss["plt_limit"])
        lost = f"{100 * loss['plt']:.3f} % of"
        self.assertIn(f"the run has lost {lost} its tokens, more than 3.750 %, above which accuracy suffers: "
                      "save more experts (--k) or more often", self.stderr)
        self.assertIn(f"\nlost      {lost} the tokens over 1 fault, as the mean over the layers (PLT); limit 3.750 %\n"
                      f"          {100 * loss['mlt_sum']:.3f} % as the sum over the layers (MLT)\n", self.stdout)
        self.assertIn("\n\nVERSION: iteration of the restored module. ", self.stdout)
        self.run_tool("pec-save", "list", self.store)
        self.assertIn("\n\nK: experts of each layer that a checkpoint saves. STALE: ", self.stdout)

    def test_tokens_of_a_restarted_training(self):
        """The log repeats iterations and ends in a torn line: the counts are those of a whole log."""
        lines = self.tokens_path.read_text().splitlines(keepends=True)
        stale = [json.dumps({"iteration": i, "tokens": self.tokens[1]}) + "\n" for i in (4, 5)]
        resumed = self.work / "resumed.jsonl"
        resumed.write_text("".join(lines[:3] + stale + lines[3:]) + lines[-1][:20])
        results = []
        for log in (self.tokens_path, resumed):
            shutil.rmtree(self.store, ignore_errors=True)
            words = ("--k", 1, "--policy", "load-aware", "--tokens", log)
            saved = [self.save(iteration, *words)["persist"] for iteration in (3, 4, 5)]
            warnings = [warning["message"] for warning in self.report["warnings"]]
            results.append((saved, self.restore(f"out-{log.stem}")["loss"]))
        self.assertEqual(*results)
        for what in ("iteration 4 occurs again, as after a restart of training", "the last line is truncated and is ignored"):
            self.assertTrue(any(what in warning for warning in warnings), warnings)
        broken = self.work / "broken.jsonl"
        broken.write_text(lines[0] + lines[1][:20] + "\n" + "".join(lines[2:]))
        self.save(6, "--k", 1, "--tokens", broken, code=4)
        self.assertIn("broken.jsonl:2: ", self.stderr)

    def test_tokens_that_were_not_counted_are_not_invented(self):
        self.save_series((3, 4), "--k", 1)
        self.assertIsNone(self.restore("out")["loss"])
        self.assertIn("unknown", self.stdout)

    def test_counting_can_begin_late(self):
        self.save_series((3, 4), "--k", 1)
        after = self.save_series((5,), "--k", 1, "--tokens", self.tokens_path)
        result = self.restore("out")
        versions = self.report["versions"]
        self.assertEqual(result["loss"]["lost"], self.lost(versions, 5))
        self.assertEqual({m: v for m, v in versions.items() if v == 5}, after[5])

    def test_newer_checkpoints_are_abandoned(self):
        self.save_series((3, 4, 5, 6), "--k", 1)
        result = self.restore("out", "--at", 4)
        self.assertEqual(result["abandoned"], [5, 6])
        states = self.run_tool("pec-save", "list", self.store)["checkpoints"]
        self.assertEqual([c["abandoned"] for c in states], [False, False, True, True])
        self.restore("out2", "--dry-run")
        self.assertEqual(self.report["iteration"], 4)
        before = dict(self.report["versions"])
        held = self.save_series((5,), "--k", 1)[5]
        self.restore("out3")
        self.assertEqual(self.report["iteration"], 5)
        self.assertEqual(self.report["versions"], {**before, **held})
        self.same("out3", 5, {**before, **held})

    def test_reading_only_abandons_nothing(self):
        self.save_series((3, 4), "--k", 1)
        before = tree(self.store)
        self.restore("out", "--at", 3, "--read-only")
        self.assertEqual(tree(self.store), before)

    def test_format_none_only_notes(self):
        self.save_series((3, 4), "--k", 1)
        self.run_tool("pec-restore", self.store, "--format", "none", "--at", 3)
        self.assertEqual(sorted(os.listdir(self.work))[-1:], ["store"])
        self.restore("out", "--dry-run")
        self.assertEqual(self.report["iteration"], 3)

    def test_require_complete(self):
        self.save(3)
        self.restore("out", "--require-complete")
        self.save(4, "--k", 1)
        self.restore("out2", "--require-complete", code=5)
        self.assertIn("6 modules are older than iteration 4", self.stderr)
        self.assertFalse((self.work / "out2").exists())

    def test_experts_without_a_version(self):
        self.save_series((3, 4), "--k", 1, "--partial-start")
        self.restore("out", code=10)
        self.assertIn("expert 1 of MoE layer 0", self.stderr)
        self.assertFalse((self.work / "out").exists())
        result = self.restore("out", "--restart-missing", self.shared / "run/global_step3")
        self.assertEqual(result["restarted_modules"], 4)
        self.assertEqual({m["source"] for m in result["modules"]}, {"storage", "restart"})
        self.same("out", 4, self.report["versions"])

    def test_existing_output_stays(self):
        self.save(3)
        self.restore("out")
        before = tree(self.work / "out")
        self.restore("out", code=6)
        self.assertEqual(tree(self.work / "out"), before)


class Layouts(Stores):
    def files(self, folder):
        return {k: v for k, v in tree(self.work / folder).items() if k != "shardwright.json"}

    def through_a_store(self, source):
        """A full save and restore gives the files that a conversion writes, byte for byte."""
        # A packed catalogue has no files to link, so that its own layout is written again.
        self.run_tool("ucp-extract", source, self.work / "catalogue", "--pack=copy")
        self.run_tool("ucp-load", self.work / "catalogue", self.work / "direct", "--siblings=none")
        self.run_tool("pec-save", source, self.store, "--policy", "full")
        self.restore("out")
        self.assertEqual(self.files("out"), self.files("direct"), source)
        for name in ("catalogue", "direct", "store", "out"):
            shutil.rmtree(self.work / name)

    def test_checkpoints_made_here(self):
        self.through_a_store(self.shared / "run" / "global_step3")
        model = moe_checkpoint.Model(dtype="bf16", ranks=4, experts=8)
        moe_checkpoint.write(self.work / "run", model, 7)
        self.through_a_store(self.work / "run")

    def test_real_checkpoints_of_every_layout(self):
        for source in real_checkpoints():
            with self.subTest(source.parent.name):
                self.through_a_store(source)

    def test_atoms_and_packed_catalogues(self):
        source = self.shared / "run" / "global_step3"
        self.run_tool("ucp-union", source, self.work / "atoms")
        self.run_tool("ucp-extract", source, self.work / "packed", "--pack=zstd")
        for name in ("atoms", "packed"):
            self.run_tool("pec-save", self.work / name, self.store)
            self.restore("out")
            self.same("out", 3, {})
            shutil.rmtree(self.store)
            shutil.rmtree(self.work / "out")


if __name__ == "__main__":
    stores.main()
