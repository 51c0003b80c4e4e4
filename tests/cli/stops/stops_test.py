#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The first SIGINT, SIGTERM or SIGUSR1 ends every long computation with code 75, and leaves nothing behind.

Each case would run for minutes. Its end is measured in processor time, which a busy machine does not lengthen.

Usage: stops_test.py BIN
"""

import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "crash"))

import moe_checkpoint  # pylint: disable=wrong-import-position

BIN = pathlib.Path(sys.argv[1]).resolve()
SOURCE = pathlib.Path(__file__).resolve().parents[3]
DEMO = SOURCE / "tests/data/demo"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
WORKING_SECONDS = 0.5  # of processor time, after which a command is well into its work
ENDING_SECONDS = 2  # of processor time: a second of two threads
DEADLINE_SECONDS = 300


def loads(layers, experts, records):
    """A log of skewed token counts."""
    dice = random.Random(records)
    row = [[dice.randrange(1000) ** 2 // 1000 for _ in range(experts)] for _ in range(layers)]
    text = json.dumps(row)
    return "".join(f'{{"iteration": {i + 1}, "tokens": {text}}}\n' for i in range(records))


def processor_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def takes_signals(pid):
    """True if the command has installed its handlers."""
    for line in pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("SigCgt:"):
            return int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1
    return 0


class Stops(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def stop(self, number, *words):
        """Stops a command that is at work. Returns the processor time that it took to end."""
        before = sorted(self.work.iterdir())
        with open(self.work / "said", "w+", encoding="utf-8") as said:
            process = subprocess.Popen([BIN / words[0], *map(str, words[1:])], cwd=self.work, stdin=subprocess.DEVNULL,
                                       stdout=subprocess.DEVNULL, stderr=said,
                                       env={**os.environ, "SHARDWRIGHT_THREADS": "2"})
            self.addCleanup(lambda: process.returncode is None and process.kill())
            deadline = time.monotonic() + DEADLINE_SECONDS
            while not takes_signals(process.pid) or processor_seconds(process.pid) < WORKING_SECONDS:
                self.assertLess(time.monotonic(), deadline, "it does not compute")
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    said.seek(0)
                    self.fail(f"it ended by itself: {said.read()}")
                time.sleep(0.01)
            used = processor_seconds(process.pid)
            process.send_signal(number)
            while not os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self.assertLess(time.monotonic(), deadline, "it does not end")
                time.sleep(0.01)
            used = processor_seconds(process.pid) - used
            code = process.wait()
            said.seek(0)
            text = said.read()
        (self.work / "said").unlink()
        self.assertEqual(code, 75, text)
        self.assertIn("error: stopped on request", text)
        self.assertIn("exit code 75", text)
        self.assertEqual(sorted(self.work.iterdir()), before, "something was left behind")
        return used

    def stops(self, *words):
        for number in SIGNALS:
            with self.subTest(" ".join(map(str, words)), signal=number.name):
                self.assertLess(self.stop(number, *words), ENDING_SECONDS)

    def test_pec_save_tune(self):
        self.stops("pec-save", "tune", "--experts", 16384, "--moe-layers", 512, "--ep", 16384, "--dp", 16384)

    def test_pec_save_simulate(self):
        (self.work / "tokens.jsonl").write_text(loads(4, 64, 3000), encoding="utf-8")
        self.stops("pec-save", "simulate", "tokens.jsonl", "--interval", 1, "--ep", 64, "--dp", 65536)

    def test_pec_save_plan(self):
        self.stops("pec-save", "plan", "--experts", 64, "--moe-layers", 4, "--ep", 64, "--dp", 16384,
                   "--copies", 3, "--ranks-per-node", 5)

    def test_moe_replace(self):
        (self.work / "loads.jsonl").write_text(loads(24, 512, 3), encoding="utf-8")
        cluster = ["--nodes", 96, "--gpus", 8, "--slots", 3]
        self.stops("moe-replace", "loads.jsonl", *cluster, "--effort", 1000, "-o", "plan.json")
        self.stops("moe-replace", "compare", "loads.jsonl", *cluster, "--faults", 2, "--failures", 512)

    def test_moe_replace_simulate_failures(self):
        (self.work / "loads.jsonl").write_text(loads(8, 128, 3), encoding="utf-8")
        nodes = "".join(f"0,add,n{n}\n" for n in range(32))
        turns = "".join(f"{2 * i + 1},remove,n{i % 32}\n{2 * i + 2},add,n{i % 32}\n" for i in range(2000))
        (self.work / "events.csv").write_text(nodes + turns, encoding="utf-8")
        self.stops("moe-replace", "simulate-failures", "loads.jsonl", "events.csv", "--compare", "--nodes", 32, "--gpus", 8,
                   "--slots", 2)

    def test_moe_replace_evaluate(self):
        (self.work / "loads.jsonl").write_text(loads(96, 512, 1), encoding="utf-8")
        subprocess.run([BIN / "moe-replace", "loads.jsonl", "--nodes", "512", "--gpus", "8", "--slots", "3", "--strategy",
                        "spread", "-o", "plan.json"], cwd=self.work, check=True, capture_output=True)
        self.stops("moe-replace", "evaluate", "plan.json", "loads.jsonl", "--failures", 512)

    def test_ucp_load(self):
        for what in (["--dry-run", "--target", "zero=3,dp=200000"], ["--target", "zero=3,dp=200000"]):
            self.stops("ucp-load", DEMO, "out", *what)


class Summaries(unittest.TestCase):
    """A stopped run reports the bytes that it has read and written."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def stopped(self, write, *words):
        """Runs a command that gets SIGTERM in front of a write. Returns its report, and its summary."""
        argv = [BIN / words[0], *map(str, words[1:]), "--threads=1", "--json=report.json"]
        done = subprocess.run(argv, cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                              env={**os.environ, "SHARDWRIGHT_FAULT": f"write:{write}:term"})
        report = json.loads((self.work / "report.json").read_text(encoding="utf-8"))
        self.assertEqual(done.returncode, report["exit_code"], done.stderr)
        return report, done.stderr.splitlines()[-1]

    def counts(self, *words):
        """Stops a command at its writes 1, 2, 4, 8, ..., until it has fewer."""
        last = (0, 0)
        for write in (1 << i for i in range(20)):
            report, summary = self.stopped(write, *words)
            if report["exit_code"] == 0:
                break
            self.assertEqual(report["exit_code"], 75, summary)
            self.assertEqual(report["files_written"], 0)
            now = (report["bytes_read"], report["bytes_written"])
            self.assertGreaterEqual(now, last, summary)
            self.assertIn(" written in " if now[1] else " read in ", summary)
            last = now
            for left in self.work.glob("out.partial-*"):
                shutil.rmtree(left)
        self.assertEqual(report["exit_code"], 0)
        self.assertGreater(write, 1, "no write was stopped")
        self.assertGreater(min(last), 0, "a run that was stopped at its end has read and written nothing")
        self.assertLessEqual(last, (report["bytes_read"], report["bytes_written"]))

    def test_conversions(self):
        self.counts("ucp-load", DEMO, "out", "--target", "zero=3,dp=3")

    def test_packs(self):
        self.counts("ucp-extract", DEMO, "out", "--pack=zstd")

    def test_saves(self):
        moe_checkpoint.series(self.work / "run", moe_checkpoint.Model(), (3,))
        for words in (("store",), ("packed", "--compress", "zstd")):
            self.counts("pec-save", "run/global_step3", *words)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
