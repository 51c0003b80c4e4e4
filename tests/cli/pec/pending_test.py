#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Restores that may have been a look at the store: nothing is abandoned until a restart is certain.

Usage: pending_test.py BIN
"""

import pathlib
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import agent_test  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position


class Looks(stores.Stores):
    def setUp(self):
        super().setUp()
        self.save_series((3, 4, 6), "--k", 2)

    def look(self, *words, at=4, code=0):
        return self.run_tool("pec-restore", self.store, self.work / "out", "--force", "--at", at, *words, code=code)

    def usable(self):
        listed = self.run_tool("pec-save", "list", self.store)["checkpoints"]
        return [one["iteration"] for one in listed if not one["abandoned"]]

    def recorded(self):
        return sorted(path.name for path in (self.store / "recoveries").iterdir())

    def test_an_export_records_nothing(self):
        for words in (["--read-only"], ["--format", "safetensors"]):
            self.assertFalse(self.look(*words)["recorded"])
            self.assertEqual(self.recorded(), [])

    def test_a_look_abandons_nothing(self):
        self.assertFalse(self.look()["recorded"])
        self.assertIn("would abandon the newer checkpoints 6", self.stderr)
        self.assertEqual(self.usable(), [3, 4, 6])
        self.run_tool("pec-save", "gc", self.store, "--keep-last", 1)
        self.assertEqual(self.usable(), [4, 6], "gc keeps both histories")
        self.restore("newest", "--read-only")
        self.assertEqual(self.report["result"]["iteration"], 6)

    def test_the_next_save_confirms_a_restart(self):
        self.look()
        self.save(5, "--k", 2, "--dry-run")
        self.assertEqual(self.usable(), [3, 4, 6])
        self.save(5, "--k", 2)
        self.assertIn("restarts from iteration 4; the newer checkpoints 6 are abandoned", self.stderr)
        self.assertEqual(self.usable(), [3, 4, 5])
        self.assertEqual(self.recorded(), ["0000000001.json"])

    def test_a_save_that_is_refused_decides_nothing(self):
        self.look()
        self.save(4, "--k", 2, code=5)
        self.assertIn("the store is at iteration 6, this checkpoint has iteration 4", self.stderr)
        self.assertEqual(self.recorded(), ["pending.json"])
        self.assertEqual(self.usable(), [3, 4, 6])

    def test_a_save_with_wrong_flags_decides_nothing(self):
        self.look()
        for words, code in ((["--keep", "master"], 5), (["--policy", "load-aware"], 2)):
            self.save(5, "--k", 2, *words, code=code)
            self.assertEqual(self.recorded(), ["pending.json"])
            self.assertEqual(self.usable(), [3, 4, 6])

    def test_a_save_that_may_continue_either_decides_nothing(self):
        self.look()
        self.save(7, "--k", 2, code=6)
        self.assertIn("may continue iteration 4, which pec-restore wrote last, or iteration 6", self.stderr)
        self.assertEqual(self.usable(), [3, 4, 6])
        undone = self.run_tool("pec-save", "undo", self.store)
        self.assertEqual((undone["was_pending"], undone["resume"], undone["newest"]), (True, 4, 6))
        self.save(7, "--k", 2)
        self.assertEqual(self.usable(), [3, 4, 6, 7])

    def test_a_restart_can_be_confirmed_by_hand(self):
        self.look()
        undone = self.run_tool("pec-save", "undo", self.store, "--confirm")
        self.assertEqual(undone["abandoned"], [6])
        self.assertIn("abandoned iterations 6", self.stdout)
        self.assertEqual(self.usable(), [3, 4])
        self.save(7, "--k", 2)
        self.assertEqual(self.usable(), [3, 4, 7])
        self.run_tool("pec-save", "undo", self.store, "--confirm", code=3)

    def test_resumed_from_decides(self):
        self.look()
        self.save(7, "--k", 2, "--resumed-from", 4)
        self.assertIn("restarts from iteration 4; the newer checkpoints 6 are abandoned", self.stderr)
        self.assertEqual(self.usable(), [3, 4, 7])

    def test_a_restore_of_the_newest_is_confirmed_by_any_save(self):
        self.look(at=6)
        self.save(7, "--k", 2)
        self.assertEqual(self.recorded(), ["0000000001.json"])
        self.assertEqual(self.usable(), [3, 4, 6, 7])

    def test_a_restart_is_recorded_at_once_and_can_be_taken_back(self):
        self.assertTrue(self.look("--restart")["recorded"])
        self.assertIn("the newer checkpoints 6 are abandoned", self.stderr)
        self.assertEqual(self.usable(), [3, 4])
        undone = self.run_tool("pec-save", "undo", self.store)
        self.assertEqual(undone["reinstated"], [6])
        self.run_tool("pec-save", "undo", self.store, code=3)
        self.assertIn("nothing to undo", self.stderr)
        self.assertEqual(self.usable(), [3, 4, 6])
        self.restore("newest", "--read-only")
        self.assertEqual(self.report["result"]["iteration"], 6)
        self.save(7, "--k", 2)
        self.assertEqual(self.usable(), [3, 4, 6, 7])

    def test_a_restart_with_saves_after_it_stays(self):
        self.look("--restart")
        self.save(5, "--k", 2)
        self.run_tool("pec-save", "undo", self.store, code=6)
        self.assertIn("iteration 5 was saved after the restart from iteration 4", self.stderr)
        self.assertEqual(self.usable(), [3, 4, 5])

    def test_an_iteration_that_is_not_there_is_reported(self):
        self.look("--read-only", at=5)
        self.assertIn("--at 5: the store has no such iteration; the newest one below it is 4", self.stderr)

    def test_nothing_to_undo(self):
        self.run_tool("pec-save", "undo", self.store, code=3)
        self.assertIn("no restore is recorded", self.stderr)

    def test_tokens_are_cut_off_by_a_restart_only(self):
        log = self.work / "tokens.jsonl"
        log.write_bytes(self.tokens_path.read_bytes())
        before = log.read_bytes()
        for words in ([], ["--read-only"]):
            self.look("--trim-tokens", log, *words, code=2)
            self.assertEqual(log.read_bytes(), before)
        self.look("--trim-tokens", log, "--restart")
        self.assertLess(len(log.read_bytes()), len(before))

    def test_tokens_are_not_cut_off_where_nothing_is_recorded(self):
        self.run_tool("pec-restore", self.store, "--format", "none", "--read-only", "--trim-tokens", self.tokens_path, code=2)
        self.assertIn("--trim-tokens requires --restart", self.stderr)

    def test_restart_and_read_only_exclude_each_other(self):
        for words in (["--read-only"], ["--format", "safetensors"]):
            self.run_tool("pec-restore", self.store, self.work / "out", "--restart", *words, code=2)


class AgentsAndLooks(agent_test.Agents):
    def test_a_running_agent_is_not_disturbed_by_a_look(self):
        agent = self.start("a", "--k", 2)
        for iteration in (4, 5):
            self.checkpoint(iteration)
            self.wait(lambda i=iteration: self.status("a")["persisted"] == i)
        self.run_tool("pec-restore", self.store, self.work / "out", "--at", 4)
        self.checkpoint(8)
        self.wait(lambda: self.status("a")["persisted"] == 8)
        listed = self.run_tool("pec-save", "list", self.store)["checkpoints"]
        self.assertEqual([one["iteration"] for one in listed if not one["abandoned"]], [4, 5, 8])
        self.assertEqual(self.end(agent), 0)

    def test_an_agent_that_starts_confirms_a_restore_of_the_newest(self):
        self.save(4, "--k", 2)
        self.run_tool("pec-restore", self.store, self.work / "out")
        agent = self.start("a", "--k", 2)
        self.wait((self.store / "recoveries" / "0000000001.json").exists)
        self.checkpoint(5)
        self.wait(lambda: self.status("a")["persisted"] == 5)
        self.assertEqual(self.end(agent), 0)


if __name__ == "__main__":
    stores.main()
