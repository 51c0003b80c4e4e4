#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save check --repair: writes missing and damaged blobs of a store again from a checkpoint that
still has exactly their content.

Usage: repair_test.py BIN [MPIEXEC]
"""

import shutil
import sys

sys.dont_write_bytecode = True

import stores
from stores import MODEL, Given, Stores, moe_checkpoint
from harness import tree


class Repairing(Stores):
    def repair(self, iteration, *words, source=None, **options):
        source = source or self.shared / "run"
        return self.run_tool("pec-save", "check", self.store, "--repair", source / f"global_step{iteration}", *words,
                             **options)

    def only_in(self, iteration):
        """Blobs that only the manifest of an iteration names."""
        texts = {int(p.name[11:21]): p.read_text() for p in (self.store / "manifests").iterdir()}
        mine = texts.pop(iteration)
        return [blob for blob in self.blobs()
                if blob.stem in mine and not any(blob.stem in text for text in texts.values())]

    def names(self, result):
        return [(blob["module"], blob["component"], blob["iteration"]) for blob in result["repair"]["blobs"]]

    def outside_blobs(self):
        return {name: digest for name, digest in tree(self.store).items() if not name.startswith("blobs/")}


class Repairs(Repairing):
    def test_purged_blobs_are_written_again(self):
        for words in ((), ("--compress", "zstd")):
            self.save_series((3, 4), "--k", 1, *words)
            before = tree(self.store)
            inodes = {blob: blob.stat().st_ino for blob in self.blobs()}
            lost = self.only_in(4)
            self.assertGreater(len(lost), 5)
            for blob in lost:
                blob.unlink()
                if not any(blob.parent.iterdir()):
                    blob.parent.rmdir()
            damaged = self.run_tool("pec-save", "check", self.store, code=5)["damaged"]
            self.assertEqual(len(damaged), len(lost))
            result = self.repair(4, "--mode", "0640")
            self.assertEqual({blob.stat().st_mode & 0o777 for blob in lost}, {0o640})
            self.assertEqual(result["damaged"], [])
            self.assertEqual((result["repair"]["repaired"], result["repair"]["not_repaired"]), (len(lost), 0))
            self.assertEqual(result["repair"]["bytes_written"], sum(blob.stat().st_size for blob in lost))
            self.assertIn(("client state", None, 4), self.names(result))
            self.assertIn((MODEL.module(0, 0), "moments", 4), self.names(result))
            self.assertIn(f"repaired {len(lost)} of {len(lost)} blobs from", self.stdout)
            self.assertEqual(tree(self.store), before)
            for blob in set(self.blobs()) - set(lost):
                self.assertEqual(blob.stat().st_ino, inodes[blob], "an intact blob was replaced")
            self.run_tool("pec-save", "check", self.store)
            self.restore("out", "--require-complete", "--read-only", "--at", 3)
            shutil.rmtree(self.work / "out")
            shutil.rmtree(self.store)

    def test_flipped_and_cut_blobs_are_replaced(self):
        for words in ((), ("--compress", "zstd")):
            self.save(4, *words)
            before = tree(self.store)
            flipped, cut = self.blobs()[0], self.blobs()[-1]
            self.damage(flipped, "flipped")
            self.damage(cut, "cut")
            result = self.repair(4)
            self.assertEqual(sorted(blob["path"] for blob in result["repair"]["blobs"]), [str(flipped), str(cut)])
            self.assertTrue(all(blob["repaired"] and blob["reason"] is None for blob in result["repair"]["blobs"]))
            self.assertEqual(tree(self.store), before)
            shutil.rmtree(self.store)

    def test_an_intact_store_is_left_alone(self):
        self.save(4)
        before = {path: path.stat().st_mtime_ns for path in self.store.rglob("*") if path.is_file()}
        result = self.repair(5)
        self.assertEqual((result["repair"]["blobs"], result["damaged"]), ([], []))
        self.assertEqual({path: path.stat().st_mtime_ns for path in self.store.rglob("*") if path.is_file()}, before)

    def test_a_checkpoint_that_does_not_have_it(self):
        self.save_series((3, 4), "--k", 1)
        before = tree(self.store)
        old = next(blob for blob in self.only_in(3))
        new = next(blob for blob in self.only_in(4))
        for blob in (old, new):
            blob.unlink()
        result = self.repair(4, code=5)
        done, left = sorted(result["repair"]["blobs"], key=lambda blob: not blob["repaired"])
        self.assertEqual((done["path"], done["iteration"], done["repaired"]), (str(new), 4, True))
        self.assertEqual((left["path"], left["iteration"], left["repaired"]), (str(old), 3, False))
        self.assertIn("global_step4 (iteration 4) has other content: --repair needs the checkpoint of iteration 3",
                      left["reason"])
        self.assertEqual(len(result["damaged"]), 1)
        self.assertIn(f"; not repaired: {left['reason']}", result["damaged"][0])
        self.assertIn(left["reason"], self.stderr)
        self.assertFalse(old.exists())
        self.assertTrue(new.exists())
        self.repair(3)
        self.assertEqual(tree(self.store), before)

    def test_a_checkpoint_that_was_written_again(self):
        self.save(4)
        self.blobs()[0].unlink()
        before = tree(self.store)
        moe_checkpoint.series(self.work / "other", moe_checkpoint.Model(seed=9), [4])
        result = self.repair(4, source=self.work / "other", code=5)
        self.assertIn("has the same iteration 4, but other content", result["repair"]["blobs"][0]["reason"])
        self.assertEqual(tree(self.store), before)

    def test_foreign_files_at_the_names_of_blobs(self):
        self.save(4)
        before = tree(self.store)
        text, link, folder = self.blobs()[:3]
        precious = self.work / "precious"
        precious.write_text("of someone else")
        text.write_text("a note")
        link.unlink()
        link.symlink_to(precious)
        folder.unlink()
        folder.mkdir()
        (folder / "mine").write_text("kept")
        result = self.repair(4, code=5)
        states = {blob["path"]: blob["reason"] for blob in result["repair"]["blobs"]}
        self.assertEqual(states.keys(), {str(text), str(link), str(folder)})
        self.assertIsNone(states[str(text)])
        self.assertIsNone(states[str(link)])
        self.assertIn("cannot be opened and may be intact", states[str(folder)])
        self.assertFalse(link.is_symlink())
        self.assertEqual(precious.read_text(), "of someone else")
        self.assertEqual((folder / "mine").read_text(), "kept")
        shutil.rmtree(folder)
        self.repair(4)
        self.assertEqual(tree(self.store), before)

    def test_a_locked_store(self):
        self.save(4)
        self.blobs()[0].unlink()
        before = tree(self.store)
        with stores.locked(self.store / "lock"):
            self.run_tool("pec-save", "check", self.store, code=5)
            self.repair(4, code=6)
            self.assertIn("lock", self.stderr)
            (self.store / "lock").unlink()
        self.assertEqual(tree(self.store), before)
        self.repair(4)
        self.assertFalse((self.store / "lock").exists())

    def test_another_model(self):
        self.save(4)
        self.blobs()[0].unlink()
        before = tree(self.store)
        moe_checkpoint.series(self.work / "wide", moe_checkpoint.Model(hidden=8), [4])
        self.repair(4, source=self.work / "wide", code=5)
        self.assertIn("another model", self.stderr)
        self.assertEqual(tree(self.store), before)

    def test_damaged_texts_are_not_repaired(self):
        self.save_series((3, 4), "--k", 1)
        self.only_in(4)[0].unlink()
        catalogue = sorted((self.store / "catalogues").iterdir())[0]
        catalogue.write_bytes(catalogue.read_bytes()[:-5])
        before = self.outside_blobs()
        result = self.repair(4, code=5)
        self.assertEqual(result["repair"]["repaired"], 1)
        self.assertEqual(len(result["damaged"]), 1)
        self.assertIn(catalogue.name, result["damaged"][0])
        self.assertEqual(self.outside_blobs(), before)

    def test_a_write_that_fails(self):
        self.save(4)
        lost = self.blobs()[:3]
        for blob in lost:
            blob.unlink()
        before = tree(self.store)
        self.repair(4, "--threads", 1, fault="write:2+:enospc", code=7)
        self.assertEqual(tree(self.store), before)
        self.repair(4)
        self.assertTrue(all(blob.exists() for blob in lost))

    def test_usage(self):
        self.save(4)
        for words in (["--take-over"], ["--also", self.work], ["--mode", "0600"], ["--repair", ""]):
            self.run_tool("pec-save", "check", self.store, *words, code=2)
        self.repair(9, code=3)


class Ranks(Repairing):
    def test_every_number_of_ranks_repairs_the_same(self):
        if Given.mpiexec is None:
            self.skipTest("no MPI launcher given")
        self.save_series((3, 4), "--k", 1)
        before = tree(self.store)
        lost = [*self.only_in(3)[:2], *self.only_in(4)]
        results = []
        for ranks in (1, 3):
            launcher = [Given.mpiexec, "--oversubscribe", "-n", ranks] if ranks > 1 else []
            for blob in lost:
                blob.unlink()
            result = self.repair(4, code=5, launcher=launcher)
            self.assertEqual(result["repair"]["not_repaired"], 2)
            results.append(result)
            self.repair(3, launcher=launcher)
            self.assertEqual(tree(self.store), before)
        results[0]["damaged"].sort()
        results[1]["damaged"].sort()
        self.assertEqual(*results)


if __name__ == "__main__":
    stores.main()
