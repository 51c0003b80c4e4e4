#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-restore-hook.sh and its condition: it must prove that there is no checkpoint yet. Whatever hides a
store ends with a code that is not 0 and leaves the token log as it is.

Usage: hooks_test.py BIN
"""

import json
import os
import pathlib
import shutil
import subprocess

import stores
from stores import Stores
from harness import environment, tree

HOOK = pathlib.Path(__file__).resolve().parents[3] / "scripts" / "slurm" / "pec-restore-hook.sh"


class Hooks(Stores):
    def setUp(self):
        super().setUp()
        self.log = self.work / "tokens.jsonl"
        self.out = self.work / "out"

    def hook(self, store, *words, code=0, restarts=None):
        env = environment()
        if restarts is not None:
            env["SLURM_RESTART_COUNT"] = str(restarts)
        env["PATH"] = f"{stores.Given.bin}:{env['PATH']}"
        env["PEC_TOKENS"] = str(self.log)
        done = subprocess.run([str(word) for word in (HOOK, store, self.out, *words)], env=env,
                              cwd=self.work, text=True, capture_output=True, timeout=1200,
                              check=False)
        self.stderr = done.stderr
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout.strip()

    def write_log(self, *iterations, end=""):
        self.log.write_text("".join(json.dumps({"iteration": i, "tokens": self.tokens[i]}) + "\n"
                                    for i in iterations) + end)

    def counted(self):
        return [json.loads(line)["iteration"] for line in self.log.read_text().splitlines()]

    def refuses(self, store, code):
        before = self.log.read_bytes()
        there = sorted(os.listdir(self.work))
        with self.subTest(store=str(store)):
            self.assertEqual(self.hook(store, code=code), "")
            self.assertEqual(self.log.read_bytes(), before)
            reports = {"out.report.json"}
            self.assertEqual(set(os.listdir(self.work)) - reports, set(there) - reports)


class FirstStart(Hooks):
    def test_the_first_start_makes_a_mark(self):
        self.assertEqual(self.hook(self.store), "")
        self.assertEqual(os.listdir(self.store), ["begun.json"])
        self.assertIsNone(json.loads((self.work / "out.report.json").read_text())["iteration"])
        # Killed before its first checkpoint: the counted iterations are counted again.
        self.write_log(1, 2)
        self.assertEqual(self.hook(self.store), "")
        self.assertEqual(self.counted(), [])
        self.save(3, "--k", 1)
        self.write_log(1, 2, 3, 4)
        self.assertEqual(self.hook(self.store), str(self.out))
        self.assertEqual(self.counted(), [1, 2, 3])

    def test_a_store_that_is_missing_later(self):
        self.hook(self.store)
        self.save(3)
        self.write_log(1, 2, 3)
        self.store.rename(self.work / "elsewhere")
        self.refuses(self.store, 3)
        self.log.unlink()
        (self.work / "elsewhere").rename(self.store)
        self.hook(self.store)
        self.store.rename(self.work / "elsewhere")
        self.assertEqual(self.hook(self.store, code=3), "", "OUT tells of an earlier start")
        self.assertFalse(self.store.exists())

    def test_a_requeued_job_on_another_node(self):
        # OUT is each node's own, and no tokens are counted.
        self.log = ""
        self.assertEqual(self.hook(self.store), "")
        self.save(3)
        self.store.rename(self.work / "elsewhere")
        for restarts in (1, 3):
            self.assertEqual(self.hook(self.store, restarts=restarts, code=3), "")
            self.assertIn("SLURM_RESTART_COUNT", self.stderr)
            self.assertFalse(self.store.exists())
        self.assertEqual(self.hook(self.store, restarts=0), "")

    def test_saves_that_fail_are_no_lost_manifests(self):
        self.hook(self.store)
        for _ in range(3):
            self.save(3, code=7, fault="store.manifest:1+:enospc")
            self.assertEqual(list((self.store / "catalogues").iterdir()), [])
        self.assertEqual(self.hook(self.store), "")
        self.save(3)
        self.assertEqual(self.hook(self.store), str(self.out))

    def test_a_parent_that_is_missing(self):
        self.assertEqual(self.hook(self.work / "scratch" / "store", code=3), "")
        self.assertFalse((self.work / "scratch").exists())

    def test_a_save_that_was_killed_leaves_no_checkpoint(self):
        self.save(3)
        for path in (self.store / "manifests").iterdir():
            path.unlink()
        self.write_log(1, 2, 3)
        self.assertEqual(self.hook(self.store), "")
        self.assertEqual(self.counted(), [])
        for name in ("store.json", "catalogues", "tokens", "recoveries", "blobs"):
            path = self.store / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self.assertEqual(self.hook(self.store), "", "killed while the store was made")

    def test_a_first_save_that_may_be_under_way(self):
        self.hook(self.store)
        with stores.locked(self.store / "lock"):
            self.assertEqual(self.hook(self.store, code=6), "")
        self.assertEqual(self.hook(self.store), "")

    def test_what_the_command_says(self):
        self.run_tool("pec-restore", self.store, "--format", "none", "--allow-empty", code=3)
        self.assertIn("--begin", self.stderr)
        begin = ("pec-restore", self.store, "--format", "none", "--allow-empty", "--begin")
        self.run_tool(*begin, "--dry-run")
        self.assertFalse(self.store.exists())
        self.run_tool(*begin)
        self.assertIn("no checkpoint yet", self.stdout)
        before = tree(self.store)
        self.run_tool(*begin)
        self.assertEqual(tree(self.store), before)
        self.restore("out", code=3)
        self.save(3)
        self.run_tool(*begin)
        self.assertEqual(self.report["iteration"], 3)
        self.restore("out", "--begin", code=2)
        self.restore("out", "--begin", "--allow-empty", "--read-only", code=2)
        self.restore("out", "--at", 2, "--allow-empty", code=3)


class Hidden(Hooks):
    def setUp(self):
        super().setUp()
        self.save_series((3, 4), "--k", 1)
        self.write_log(*range(1, 7))

    def test_names_with_pattern_characters(self):
        place = self.work / "run[1]*?"
        place.mkdir()
        self.store.rename(place / "store")
        self.assertEqual(self.hook(place / "store"), str(self.out))
        self.assertEqual(self.counted(), [1, 2, 3, 4])

    def test_stores_that_cannot_be_seen(self):
        manifests = self.store / "manifests"
        empty = self.work / "empty"
        empty.mkdir()
        self.refuses(empty, 3)  # a file system that is not mounted
        file = self.work / "file"
        file.write_text("x")
        self.refuses(file, 3)
        link = self.work / "link"
        link.symlink_to("nowhere")
        self.refuses(link, 3)
        self.refuses(self.work / "absent", 3)
        self.refuses(self.work / "file" / "store", 3)
        foreign = self.work / "foreign"
        foreign.mkdir()
        (foreign / "notes").write_text("x")
        self.refuses(foreign, 3)
        manifests.rename(self.work / "aside")
        self.refuses(self.store, 3)
        manifests.symlink_to("nowhere")
        self.refuses(self.store, 3)
        manifests.unlink()
        manifests.write_text("x")
        self.refuses(self.store, 3)
        manifests.unlink()
        manifests.mkdir()
        self.refuses(self.store, 4)  # two catalogues, no manifest
        manifests.rmdir()
        (self.work / "aside").rename(manifests)
        (self.store / "store.json").rename(self.work / "head")
        self.refuses(self.store, 4)
        (self.work / "head").rename(self.store / "store.json")
        self.assertEqual(self.hook(self.store), str(self.out))

    def test_a_store_that_cannot_be_read(self):
        if os.geteuid() == 0:
            self.skipTest("root reads every folder")
        for path in (self.store, self.store / "manifests", self.store / "store.json"):
            mode = path.stat().st_mode
            path.chmod(0)
            try:
                self.refuses(self.store, 3)
            finally:
                path.chmod(mode)

    def test_manifests_that_cannot_be_read(self):
        for path in (self.store / "manifests").iterdir():
            path.unlink()
            path.symlink_to("nowhere")
        self.refuses(self.store, 3)

    def test_checkpoints_that_are_all_abandoned(self):
        recovery = {"schema": 1, "program": "shardwright", "version": "0", "kind": "pec-recovery",
                    "sequence": 1, "manifest": 0, "resume": 2, "abandoned": [1, 2],
                    "state": {"snapshot": EMPTY, "persist": EMPTY, "counted_to": None},
                    "ledger": None}
        (self.store / "recoveries" / "0000000001.json").write_text(json.dumps(recovery))
        self.refuses(self.store, 3)
        for path in (self.store / "manifests").iterdir():
            path.unlink()
        self.refuses(self.store, 4)


EMPTY = {"checkpoints": 0, "cursor": [], "tokens": [], "covered": [], "version": [],
         "saved_at": []}


class Tokens(Hooks):
    def setUp(self):
        super().setUp()
        self.save_series((3, 4), "--k", 1)

    def test_a_last_line_that_is_torn_goes(self):
        self.write_log(1, 2, 3, 4, 5, end='{"iteration": 6, "tok')
        self.assertEqual(self.hook(self.store), str(self.out))
        self.assertEqual(self.counted(), [1, 2, 3, 4])

    def test_a_last_line_that_lacks_its_end_only_stays(self):
        self.write_log(1, 2, 3, end=json.dumps({"iteration": 4, "tokens": self.tokens[4]}))
        self.hook(self.store)
        self.assertEqual(self.counted(), [1, 2, 3, 4])
        self.assertTrue(self.log.read_text().endswith("\n"))

    def test_a_torn_line_in_the_middle_is_named(self):
        self.write_log(1, 2)
        for bad in ('{"iteration": 3, "tok{"iteration": 3, "tokens": []}', '{"tokens": []}', "7"):
            self.write_log(1, 2, end=bad + "\n" + json.dumps({"iteration": 4}) + "\n")
            before = tree(self.store)
            self.refuses(self.store, 4)
            self.assertIn(f"{self.log}: line 3", self.stderr)
            self.assertEqual(tree(self.store), before, "nothing is abandoned")
            self.assertFalse(self.out.exists())

    def test_a_log_that_cannot_be_read(self):
        self.log.symlink_to("nowhere")
        self.assertEqual(self.hook(self.store, code=3), "")
        self.assertIn(str(self.log), self.stderr)
        self.log.unlink()
        self.assertEqual(self.hook(self.store), str(self.out), "none is fine")

    def test_a_log_behind_a_link_stays_there(self):
        self.write_log(1, 2, 3, 4, 5)
        self.log.rename(self.work / "real")
        self.log.symlink_to("real")
        self.hook(self.store)
        self.assertTrue(self.log.is_symlink())
        self.assertEqual(self.counted(), [1, 2, 3, 4])


if __name__ == "__main__":
    stores.main()
