#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Stores that lose files or vanish while training runs: purges of old files, unmounted file systems.

Usage: purged_test.py BIN
"""

import pathlib
import shutil
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import agent_test  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position


class Purged(stores.Stores):
    """Blobs that a purge of old files has removed."""

    def purge(self, iteration):
        """Removes every blob that the manifest of an iteration names. Returns how many."""
        manifest = next((self.store / "manifests").glob(f"*-{iteration:010}.json")).read_text()
        blobs = [blob for blob in self.blobs() if blob.stem in manifest]
        for blob in blobs:
            blob.unlink()
        return len(blobs)

    def test_unchanged_blobs_are_written_again(self):
        self.save(4, "--policy", "full")
        there = self.blobs()
        self.assertEqual(self.purge(4), len(there))
        result = self.save(4, "--policy", "full")
        self.assertEqual(result["blobs_restored"], result["blobs"])
        self.assertEqual(result["blobs_unchanged"], 0)
        self.assertIn("blobs that earlier checkpoints name were missing", self.stderr)
        self.assertEqual(self.blobs(), there)
        self.run_tool("pec-save", "check", self.store)
        self.restore("out", "--require-complete")

    def test_experts_that_are_not_selected_are_saved_as_well(self):
        self.save(4, "--policy", "full")
        self.purge(4)
        result = self.save(5, "--k", 1)
        self.assertIn("experts that this save does not select are missing", self.stderr)
        self.assertEqual({len(experts) for experts in result["persist"].values()}, {stores.MODEL.experts})
        self.run_tool("pec-save", "check", self.store, code=5)
        self.restore("out", "--require-complete", "--at", 5)
        self.same("out", 5, {})

    def test_a_truncated_blob_is_written_again(self):
        self.save(4, "--policy", "full")
        self.damage(self.blobs()[0], "cut")
        result = self.save(4, "--policy", "full")
        self.assertEqual(result["blobs_restored"], 1)
        self.run_tool("pec-save", "check", self.store)

    def test_files_of_others_among_the_blobs_do_not_stop_a_save(self):
        self.save(4, "--k", 1)
        (self.blobs()[0].parent / ".nfs0001").write_text("")
        self.save(5, "--k", 1)

    def test_an_existing_store_is_asked_for(self):
        self.save(4, "--existing-store", code=3)
        self.assertIn("there is no store", self.stderr)
        self.assertFalse(self.store.exists())
        self.save(4)
        self.save(5, "--existing-store")


class Unmounted(agent_test.Agents):
    """An agent with a store on a file system that goes away and comes back; a rename stands for it."""

    def move_away(self):
        """Starts an agent, and takes its store away once it has saved into it."""
        agent = self.start("a", "--k", 2)
        self.checkpoint(4)
        self.wait(lambda: self.status("a")["persisted"] == 4)
        away = self.work / "away"
        self.store.rename(away)
        return agent, away

    def test_a_store_that_is_gone_is_not_made_again(self):
        agent, away = self.move_away()
        self.store.mkdir()  # an empty mount point
        self.checkpoint(5)
        self.wait(lambda: self.status("a")["newest"] == 5)
        self.tell("a", "flush", code=3)
        self.assertIn("is missing; check that its file system is mounted", self.stderr)
        self.wait(lambda: self.status("a")["persists_failed"] > 0)
        self.assertEqual(list(self.store.iterdir()), [])
        self.store.rmdir()
        away.rename(self.store)
        self.wait(lambda: self.status("a")["persisted"] == 5)
        self.assertEqual(self.end(agent), 0)
        self.assertEqual(self.newest(), 5)

    def test_another_store_in_its_place_is_left_alone(self):
        agent, away = self.move_away()
        self.save(3, "--k", 1)
        before = sorted(self.store.rglob("*"))
        self.checkpoint(5)
        self.wait(lambda: "the right file system" in self.status("a")["last_error"])
        self.assertEqual(sorted(self.store.rglob("*")), before)
        shutil.rmtree(self.store)
        away.rename(self.store)
        self.assertEqual(self.end(agent), 0)
        self.assertEqual(self.newest(), 5)


if __name__ == "__main__":
    stores.main()
