#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-save --dynamic-k: K that doubles as the budget of lost tokens is spent, kept in the store.

Usage: dynamic_k_test.py BIN
"""

import json
import pathlib
import shutil
import signal
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import stores  # pylint: disable=wrong-import-position
from stores import environment, moe_checkpoint  # pylint: disable=wrong-import-position

LIMIT = 0.0375


class Run(stores.Stores):
    """One checkpoint of even tokens, saved again and again under other iterations."""

    EXPERTS, LENGTH = 4, 1000

    def setUp(self):
        super().setUp()
        model = moe_checkpoint.Model(layers=1, experts=self.EXPERTS, ep=1, ranks=1, hidden=1)
        moe_checkpoint.write(self.work / "one", model, 1)
        self.count_tokens(self.LENGTH)
        self.iteration = 0

    def count_tokens(self, last):
        record = {"tokens": [[8] * self.EXPERTS]}
        (self.work / "tokens.jsonl").write_text(
            "".join(json.dumps({"iteration": i, **record}) + "\n" for i in range(1, last + 1)))

    def save_as(self, iteration, *words, limit=LIMIT, code=0, tokens=True, **options):
        flags = ["--tokens", self.work / "tokens.jsonl"] if tokens else []
        if limit is not None:
            flags += ["--dynamic-k", limit, "--iterations", self.LENGTH]
        result = self.run_tool("pec-save", self.work / "one", self.store, "--iteration", iteration,
                               *flags, *words, code=code, **options)
        return result and result.get("dynamic_k")

    def saves(self, count, *words):
        for _ in range(count):
            self.iteration += 1
            now = self.save_as(self.iteration, *words)
        return now

    def recover(self, *words, code=0):
        result = self.run_tool("pec-restore", self.store, "--format", "none", *words, code=code)
        return result and result["dynamic_k"]

    def listed(self):
        return self.run_tool("pec-save", "list", self.store)


class WorkedExample(Run):
    """Section 8.2: N = 16, a limit of 0.0375, and faults that cost 0.0025 (16/K - 1) / 15."""

    EXPERTS, LENGTH = 16, 3000

    def test_every_level_lasts_as_long_as_computed(self):
        self.count_tokens(600)
        self.saves(1, "--k", 1)
        lasted = {}
        covered = []
        k, turns = 1, 16
        while k < 16:
            now = self.saves(turns, "--k", 1)
            self.assertEqual(now["k"], k)
            covered.append(now["faults_covered"])
            after = self.recover()
            cost = 0.0025 * (16 / k - 1) / 15
            self.assertAlmostEqual(now["fault_plt"], cost, 12)
            self.assertAlmostEqual(after["total"] - now["total"], cost, 12)
            lasted[k] = lasted.get(k, 0) + 1
            if after["k"] != k:
                self.assertEqual(after["spent"], 0)
            # From one level to the next the rotation takes a round to settle.
            k, turns = after["k"], 16 // after["k"]
        self.assertEqual(lasted, {1: 4, 2: 9, 4: 19, 8: 57})
        self.assertEqual(covered, list(range(4 + 9 + 19 + 57, 0, -1)))
        self.assertAlmostEqual(after["total"], LIMIT + after["total"] - LIMIT)
        self.assertLess(after["total"], LIMIT + 0.0025 * (1 + 7 / 15 + 3 / 15 + 1 / 15))
        now = self.saves(1, "--k", 1)
        self.assertEqual((now["k"], now["faults_covered"]), (16, 0))
        self.assertEqual(len(self.report["result"]["persist"]["0"]), 16)


class State(Run):
    def spend(self):
        """A store after checkpoints 1 to 9, and the cost of one fault."""
        now = self.saves(9, "--k", 1)
        self.assertEqual((now["k"], now["spent"], now["total"]), (1, 0, 0))
        # Three turns before: 3, 2 and 1 iterations' worth of a quarter of the tokens.
        self.assertAlmostEqual(now["fault_plt"], 6 / 4 / self.LENGTH, 12)
        return 6 / 4 / self.LENGTH

    def test_a_recovery_is_entered_once(self):
        cost = self.spend()
        self.recover("--dry-run")
        self.recover("--read-only")
        self.assertEqual(self.listed()["dynamic_k"]["total"], 0)
        after = self.recover()
        self.assertAlmostEqual(after["total"], cost, 12)
        self.assertAlmostEqual(self.report["result"]["loss"]["fault_plt"], cost, 12)
        self.assertAlmostEqual(self.listed()["dynamic_k"]["total"], cost, 12)
        # Nothing was trained since: the same tokens are not lost again.
        self.assertAlmostEqual(self.recover()["total"], cost, 12)
        now = self.saves(1, "--k", 1)
        self.assertAlmostEqual(now["total"], cost, 12)
        self.assertAlmostEqual(self.save_as(10)["total"], cost, 12)
        self.assertAlmostEqual(self.listed()["checkpoints"][-1]["dynamic_k"]["total"], cost, 12)
        self.assertIn("DYNAMIC K", self.stdout)
        self.assertIn("1 of 4", self.stdout)

    def test_kills_between_restore_and_save(self):
        cost = self.spend()
        shutil.copytree(self.store, self.work / "kept")
        ends = set()
        for tool, words in (("pec-restore", ["--format", "none"]),
                            ("pec-save", ["--k", 1, "--iteration", 10, "--dynamic-k", LIMIT,
                                          "--iterations", self.LENGTH, "--tokens",
                                          self.work / "tokens.jsonl"])):
            for call in range(1, 500, 1 if tool == "pec-restore" else 3):
                shutil.rmtree(self.store)
                shutil.copytree(self.work / "kept", self.store)
                if tool == "pec-save":
                    self.recover()
                places = [self.store] if tool == "pec-restore" else [self.work / "one", self.store]
                env = environment()
                env["SHARDWRIGHT_FAULT"] = f"any:{call}:kill"
                done = subprocess.run([str(w) for w in (stores.Given.bin / tool, *places, *words)],
                                      env=env, cwd=self.work, capture_output=True, timeout=1200,
                                      check=False)
                if done.returncode == 0:
                    break
                self.assertEqual(done.returncode, -signal.SIGKILL, done.stderr)
                listed = self.listed()
                noted = listed["dynamic_k"]["total"]
                ends.add((tool, listed["checkpoints"][-1]["iteration"], round(noted, 9)))
                # The next step of the job: it restores again, and trains. If 10 was durable, its tokens are lost for
                # the three experts that it does not have.
                durable = listed["checkpoints"][-1]["iteration"] == 10
                total = cost + (3 / 4 / self.LENGTH if durable else 0)
                self.assertAlmostEqual(self.recover()["total"], total, 12)
                self.assertAlmostEqual(self.save_as(10)["total"], total, 12)
            else:
                self.fail("no end of calls")
        spent = round(cost, 9)
        self.assertEqual(ends, {("pec-restore", 9, 0), ("pec-restore", 9, spent),
                                ("pec-save", 9, spent), ("pec-save", 10, spent)})

    def test_what_is_spent_is_not_forgotten_with_a_checkpoint(self):
        cost = self.spend()
        self.recover()
        self.saves(4)
        # Back before the first fault: its checkpoint knows nothing of it.
        after = self.recover("--at", 8)
        self.assertGreaterEqual(after["total"], cost - 1e-12)
        self.iteration = 8
        self.assertAlmostEqual(self.saves(1)["total"], after["total"], 12)
        # And without pec-restore.
        self.iteration = 3
        self.assertAlmostEqual(self.saves(1, "--resumed-from", 3)["total"], after["total"], 12)

    def test_a_save_without_it_carries_it_on(self):
        cost = self.spend()
        self.recover()
        self.assertIsNone(self.save_as(10, "--k", 2, limit=None))
        self.assertAlmostEqual(self.listed()["dynamic_k"]["total"], cost, 12)
        self.assertAlmostEqual(self.save_as(11)["total"], cost, 12)
        # Without tokens the loss of a recovery is unknown.
        self.save_as(12, limit=None, tokens=False)
        self.assertAlmostEqual(self.recover()["total"], cost, 12)
        self.assertIn("the budget of dynamic K does not include them", self.stderr)

    def test_predict_raises_before(self):
        words = ["--k", 1, "--dynamic-k-mode", "predict"]
        limit = 2 * 1.2 * 6 / 4 / self.LENGTH  # two levels of 1.2 faults each
        for self.iteration in range(1, 10):
            now = self.save_as(self.iteration, *words, limit=limit)
        self.assertEqual((now["k"], now["faults_covered"], now["mode"]), (1, 4, "predict"))
        self.assertEqual(self.recover()["k"], 1)
        now = self.save_as(10, *words, limit=limit)
        self.assertEqual((now["k"], now["spent"]), (2, 0))
        self.assertLess(now["total"], limit)
        self.save_as(11, "--k", 1, limit=limit, code=5)
        self.assertIn("in mode predict", self.stderr)

    def test_older_stores_and_other_limits(self):
        self.save_as(1, limit=None)
        self.assertIsNone(self.listed().get("dynamic_k"))
        self.assertEqual(self.save_as(2, "--k", 2)["k"], 2)
        self.save_as(3, limit=0.05, code=5)
        self.assertIn("0.037500", self.stderr)
        path = next((self.store / "manifests").glob("0000000002-*"))
        text = path.read_text()
        path.write_text(text.replace('"k":2,"levels"', '"k":9,"levels"'))
        self.assertNotEqual(path.read_text(), text)
        self.save_as(3, code=4)
        self.assertIn("k is 9, expected 1 to 4", self.stderr)
        path.write_text(text.replace('"schema":1', '"schema":2'))
        self.save_as(3, code=9)

    def test_refuses(self):
        for words, said in ((["--policy", "full"], "has no K"), (["--policy", "budget"], "has no K"),
                            (["--policy", "budget-global"], "has no K"),
                            (["--k-persist", 1], "cannot be combined with --k-persist"),
                            (["--k", 5], "starts at 5, expected 1 to 4"),
                            (["--dynamic-k", 0], "--dynamic-k"), (["--list"], "pec-save list STORE")):
            self.save_as(1, *words, code=2)
            self.assertIn(said, self.stderr)
        self.save_as(1, tokens=False, code=2)
        self.assertIn("--dynamic-k requires --tokens", self.stderr)
        for flag in (["--iterations", 5], ["--dynamic-k-mode", "react"]):
            self.save_as(1, *flag, limit=None, code=2)
            self.assertIn(f"{flag[0]} requires --dynamic-k", self.stderr)
        self.assertEqual(list(self.store.glob("manifests/*")), [])


if __name__ == "__main__":
    stores.main()
