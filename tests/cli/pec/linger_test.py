#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The end of an agent: some time after its trainer, after a save that makes no progress, or at a second signal. A message
names the lost iteration.

Usage: linger_test.py BIN
"""

import fcntl
import os
import pathlib
import signal
import subprocess
import sys
import time
from unittest import mock

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import agent_test  # pylint: disable=wrong-import-position
import stores  # pylint: disable=wrong-import-position

SLOW = pathlib.Path(__file__).resolve().parents[2] / "perf/slow_files.c"
TERM = -signal.SIGTERM
ENDS = 180  # seconds


class Trainer:
    """The lock that a trainer has while it runs."""

    def __init__(self, path):
        self.file = open(path, "wb")  # pylint: disable=consider-using-with
        fcntl.flock(self.file, fcntl.LOCK_SH)

    def end(self):
        self.file.close()


class Linger(agent_test.Agents):
    def start_for(self, seconds, *words):
        return self.start("a", "--trainer-lock", self.work / "trainer.lock", "--linger", seconds, *words)

    def test_it_ends_after_its_trainer_and_saves_first(self):
        trainer = Trainer(self.work / "trainer.lock")
        agent = self.start_for(2, "--k", 2, "--bandwidth", "2000")
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["newest"] == 3)
        time.sleep(4)
        self.assertIsNone(agent.poll(), "it ended although its trainer runs")
        self.assertIsNone(self.newest(), "the snapshot was to be in memory alone")
        trainer.end()
        self.assertEqual(agent.wait(ENDS), 0)
        self.assertIn("no trainer has run for 2 s", agent.stderr.read())
        self.assertEqual(self.newest(), 3)

    def test_it_stays_for_the_next_trainer(self):
        first = Trainer(self.work / "trainer.lock")
        agent = self.start_for(8)
        first.end()
        time.sleep(3)
        second = Trainer(self.work / "trainer.lock")
        time.sleep(8)
        self.assertIsNone(agent.poll(), "the second trainer came in time")
        second.end()
        self.assertEqual(agent.wait(ENDS), 0)

    def test_the_flags_need_each_other(self):
        for words in (("--linger", 5), ("--trainer-lock", "lock")):
            agent = self.start("a", *words, ready=False)
            self.assertEqual(agent.wait(ENDS), 2, words)


class Lost(agent_test.Agents):
    def test_a_save_without_progress_ends_and_names_what_is_lost(self):
        slow = self.work / "slow_files.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", SLOW, "-o", slow, "-ldl"], check=True)
        hangs = {"LD_PRELOAD": str(slow), "SLOW_FILES": str(self.store), "SLOW_FILES_US": str(3600 * 1_000_000)}
        with mock.patch.dict(os.environ, hangs):
            agent = self.start("a")
        self.checkpoint(3)
        self.wait(lambda: self.status("a")["newest"] == 3)
        start = time.monotonic()
        agent.send_signal(signal.SIGTERM)
        self.assertEqual(agent.wait(ENDS), 75)
        self.assertGreater(time.monotonic() - start, 9)
        self.assertIn("the last save makes no progress; iteration 3 is lost, none was saved", agent.stderr.read())

    def test_a_second_signal_names_what_is_lost(self):
        self.save(3)
        self.hold_lock()
        agent = self.start("a")
        self.checkpoint(4)
        self.wait(lambda: self.status("a")["newest"] == 4)
        agent.send_signal(signal.SIGTERM)
        time.sleep(2)
        self.assertIsNone(agent.poll(), "it waits for the process that uses the store")
        agent.send_signal(signal.SIGTERM)
        self.assertEqual(agent.wait(ENDS), TERM)
        self.assertIn("ended by a second signal; iteration 4 is lost, none was saved", agent.stderr.read())


if __name__ == "__main__":
    stores.main()
