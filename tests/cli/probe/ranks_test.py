#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Behaviour that all commands share under several ranks, seen through the probe.

Usage: ranks_test.py PROBE MPIRUN [unittest arguments]
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest

PROBE = os.path.abspath(sys.argv[1])
MPIRUN = sys.argv[2]
DEADLINE_SECONDS = 1200


def run(ranks, *arguments):
    environment = {key: value for key, value in os.environ.items()
                   if not key.startswith("SHARDWRIGHT_")}
    environment.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return subprocess.run([MPIRUN, "--oversubscribe", "-n", str(ranks), PROBE, *arguments],
                          env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=DEADLINE_SECONDS, check=False)


def own_lines(text):
    """Lines of the command, without those of the launcher."""
    return [line for line in text.splitlines() if line.startswith("probe: ")]


class Ranks(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.report = os.path.join(self.folder.name, "report.json")

    def read_report(self):
        with open(self.report, encoding="utf-8") as file:
            return json.load(file)

    def test_the_answer_comes_once_and_counts_add_up(self):
        for ranks in (2, 3):
            with self.subTest(ranks):
                done = run(ranks, "in", "out", f"--json={self.report}", "--warn", "odd")
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(done.stdout, "in -> out\n")
                warnings = [line for line in own_lines(done.stderr) if "warning:" in line]
                self.assertEqual(warnings, [f"probe: warning: odd (ranks 0-{ranks - 1})"])
                report = self.read_report()
                self.assertEqual(report["ranks"], ranks)
                self.assertEqual(report["files_written"], 3 * ranks)
                self.assertEqual(report["warnings"], [{"message": "odd", "ranks": list(range(ranks))}])

    def test_the_failing_rank_is_named_and_all_end_alike(self):
        done = run(3, "in", "out", f"--json={self.report}", "--fail", "4", "--rank", "1")
        self.assertEqual(done.returncode, 4, done.stderr)
        self.assertIn("probe: error: rank 1: in: made to fail", own_lines(done.stderr))
        error = self.read_report()["error"]
        self.assertEqual((error["code"], error["rank"]), (4, 1))

    def test_ranks_that_fail_alike_are_told_in_one_line(self):
        done = run(3, "in", "out", "--fail", "9")
        self.assertEqual(done.returncode, 9)
        errors = [line for line in own_lines(done.stderr) if "error:" in line]
        self.assertEqual(errors, ["probe: error: in: made to fail (ranks 0-2)"])

    def test_a_usage_error_is_told_once(self):
        done = run(2, "in", "out", "--treads", f"--json={self.report}")
        self.assertEqual(done.returncode, 2)
        errors = [line for line in own_lines(done.stderr) if "error:" in line]
        self.assertEqual(len(errors), 1, done.stderr)
        self.assertIn("did you mean --threads?", errors[0])
        self.assertEqual(self.read_report()["exit_code"], 2)

    def test_an_exception_on_one_rank_ends_the_job(self):
        done = run(2, "in", "out", "--throw", "error", "--rank", "1", f"--json={self.report}")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("probe: error: rank 1: unexpected exception: thrown by a library",
                      own_lines(done.stderr))
        self.assertEqual(self.read_report()["error"]["rank"], 1)

    def test_help_is_printed_once(self):
        done = run(3, "--help")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("Examples:"), 1)

    def test_each_rank_keeps_its_log(self):
        path = os.path.join(self.folder.name, "log-{rank}")
        self.assertEqual(run(2, "in", "out", f"--log-file={path}", "--warn", "odd").returncode, 0)
        for rank in range(2):
            with open(path.replace("{rank}", str(rank)), encoding="utf-8") as file:
                self.assertIn(f"probe[{rank}] warning: odd\n", file.read())

    def test_a_log_that_one_rank_cannot_open_ends_the_run(self):
        os.mkdir(os.path.join(self.folder.name, "log-1"))
        path = os.path.join(self.folder.name, "log-{rank}")
        done = run(2, "in", "out", f"--log-file={path}")
        self.assertEqual(done.returncode, 7, done.stderr)
        self.assertTrue(any("rank 1: log " in line for line in own_lines(done.stderr)), done.stderr)
        self.assertEqual(done.stdout, "")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
