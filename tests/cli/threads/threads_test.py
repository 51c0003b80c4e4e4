#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""More --threads than the process has processors: every command works, and prints nothing about it.

Usage: threads_test.py BIN
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
SOURCE = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(SOURCE / "tests/crash"))

import moe_checkpoint  # pylint: disable=wrong-import-position

BIN = pathlib.Path(sys.argv[1]).resolve()
DEMO = SOURCE / "tests/data/demo"
THREADS = "16"


def one_processor():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


class Threads(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def quiet(self, *words):
        """Runs a command on one processor. It prints no warning to stderr."""
        argv = [BIN / words[0], *map(str, words[1:]), "--threads", THREADS, "-q"]
        done = subprocess.run(argv, cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                              preexec_fn=one_processor)
        self.assertEqual((done.returncode, done.stderr), (0, ""), argv)

    def test_ucp(self):
        self.quiet("ucp-load", DEMO, "out", "--target", "zero=3,dp=3", "--verify=replicas", "--json=report.json")
        report = json.loads((self.work / "report.json").read_text(encoding="utf-8"))
        self.assertEqual(report["threads"], int(THREADS), "the report has the value of the flag")
        self.quiet("ucp-load", "--check", DEMO, "out")
        self.quiet("ucp-union", DEMO, "atoms")
        self.quiet("ucp-extract", DEMO, "packed", "--pack=zstd")

    def test_pec(self):
        moe_checkpoint.series(self.work / "run", moe_checkpoint.Model(), (3,))
        self.quiet("pec-save", "run/global_step3", "store")
        self.quiet("pec-save", "check", "store")
        self.quiet("pec-restore", "store", "out", "--read-only")

    def test_moe(self):
        text = "".join(f'{{"iteration": {i}, "tokens": [[5, 1, 2, 8]]}}\n' for i in (1, 2))
        (self.work / "loads.jsonl").write_text(text, encoding="utf-8")
        self.quiet("moe-replace", "loads.jsonl", "--nodes", 2, "--gpus", 2, "--slots", 2, "-o", "plan.json")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
