#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks that stop, or hang in a file system, under a launcher: the others end with exit code 75, name the rank and
write the report. Slow ranks, and runs that were suspended as a whole, continue.

Usage: lost_rank_test.py BIN MPIRUN [MPIEXEC_MPICH]
"""
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEMO = ROOT / "tests" / "data" / "demo"
BIN = pathlib.Path()
LAUNCHERS = []
ENVIRONMENT = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                   OMPI_MCA_rmaps_base_oversubscribe="1")
SECONDS = 120  # that anything may take on a busy machine


class LostRank(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="sw-lost-rank-")
        cls.addClassCleanup(folder.cleanup)
        cls.slow = pathlib.Path(folder.name) / "slow_files.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", ROOT / "tests/perf/slow_files.c", "-o", cls.slow, "-ldl"],
                       check=True)

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="sw-lost-rank-")
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def launch(self, launcher, ranks, odd=None, setting=(), timeout=3):
        """Starts a conversion in which rank ODD has further environment variables."""
        command = [BIN / "ucp-load", DEMO, "out", "--target", "zero=3,dp=4", "--json=report.json", "--io-concurrency", 1,
                   "--threads", 1, "--rank-timeout", timeout]
        argv = [launcher]
        for rank in range(ranks):
            argv += [*((":",) if rank else ()), "-n", 1, *(("env", *setting) if rank == odd else ()), *command]
        return subprocess.Popen([str(word) for word in argv], cwd=self.work, env=ENVIRONMENT, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def ends(self, job, code):
        try:
            _, errors = job.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            job.kill()
            raise
        if code is None:
            self.assertNotEqual(job.returncode, 0, errors)
        else:
            self.assertEqual(job.returncode, code, errors)
        return errors

    def lost(self, job, rank, reason):
        # MPICH's launcher mixes the exit codes of all ranks, also of the stopped one that it kills.
        errors = self.ends(job, None if "mpich" in job.args[0] else 75)
        found = [line for line in errors.splitlines() if " is lost: " in line]
        self.assertEqual(len(found), 1, errors)
        self.assertRegex(found[0], rf"error: rank {rank} on \S+ is lost: {reason}.*run the command again")
        report = json.loads((self.work / "report.json").read_text())
        self.assertEqual((report["exit_code"], report["status"]), (75, "stopped"))
        self.assertIn(f"rank {rank} on ", report["error"]["message"])
        self.assertFalse((self.work / "out").exists())

    def test_a_stopped_rank_is_named(self):
        for launcher in LAUNCHERS:
            for rank in (0, 2) if launcher == LAUNCHERS[0] else (2,):
                with self.subTest(launcher=launcher, rank=rank):
                    job = self.launch(launcher, 3, rank, ["SHARDWRIGHT_FAULT=every:30:hang"])
                    self.lost(job, rank, "nothing was heard of it for [0-9]+ s")

    def test_a_rank_that_hangs_in_a_read_is_named(self):
        setting = [f"LD_PRELOAD={self.slow}", f"SLOW_FILES={DEMO}", f"SLOW_FILES_US={3600 * 10**6}"]
        for launcher in LAUNCHERS:
            with self.subTest(launcher=launcher):
                self.lost(self.launch(launcher, 3, 1, setting), 1, "it hangs: it has used no processor time")

    def test_a_slow_rank_is_waited_for(self):
        setting = [f"LD_PRELOAD={self.slow}", f"SLOW_FILES={DEMO}", f"SLOW_FILES_US={100 * 10**3}"]
        start = time.monotonic()
        self.ends(self.launch(LAUNCHERS[0], 2, 1, setting), 0)
        self.assertGreater(time.monotonic() - start, 3)

    def test_a_run_that_was_suspended_goes_on(self):
        setting = [f"LD_PRELOAD={self.slow}", f"SLOW_FILES={DEMO}", f"SLOW_FILES_US={100 * 10**3}"]
        job = self.launch(LAUNCHERS[0], 2, 1, setting, timeout=4)
        time.sleep(1.5)
        ranks = self.ranks_of(job.pid)
        for how, wait in ((signal.SIGSTOP, 4.5), (signal.SIGCONT, 1), (signal.SIGSTOP, 8), (signal.SIGCONT, 0)):
            for pid in ranks:
                os.kill(pid, how)
            time.sleep(wait)
        self.ends(job, 0)
        self.assertEqual(len(ranks), 2)

    def ranks_of(self, launcher):
        """Processes of our command below a launcher."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                name = os.readlink(path / "exe")
                parents = [int(path.name)]
                while parents[-1] > 1:
                    parents.append(int((pathlib.Path("/proc") / str(parents[-1]) / "stat").read_text().rsplit(")", 1)[1].split()[1]))
            except OSError:
                continue
            if name == str((BIN / "ucp-load").resolve()) and launcher in parents:
                found.append(int(path.name))
        return found


if __name__ == "__main__":
    BIN = pathlib.Path(sys.argv.pop(1)).resolve()
    while len(sys.argv) > 1 and sys.argv[1].startswith("/"):
        LAUNCHERS.append(sys.argv.pop(1))
    unittest.main()
