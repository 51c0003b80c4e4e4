# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of pec-save and pec-restore: checkpoints, stores, running the commands."""

import contextlib
import fcntl
import itertools
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "crash"))

import moe_checkpoint  # pylint: disable=wrong-import-position
from harness import environment, scratch_parent  # pylint: disable=wrong-import-position


class Given:
    """The arguments of the command line."""

    bin = pathlib.Path()
    mpiexec = None


@contextlib.contextmanager
def locked(path):
    """As if another process wrote."""
    with open(path, "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


MODEL = moe_checkpoint.Model()
ITERATIONS = range(3, 9)


class Stores(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.shared = pathlib.Path(tempfile.mkdtemp(prefix="sw-pec-cli-", dir=scratch_parent()))
        cls.addClassCleanup(shutil.rmtree, cls.shared)
        cls.tokens_path, cls.tokens = moe_checkpoint.series(cls.shared / "run", MODEL, ITERATIONS)

    def setUp(self):
        self.work = pathlib.Path(tempfile.mkdtemp(prefix="sw-pec-cli-", dir=scratch_parent()))
        self.addCleanup(shutil.rmtree, self.work)
        self.store = self.work / "store"
        self.count = itertools.count()

    def run_tool(self, name, *words, code=0, launcher=(), fault=None):
        report = self.work / f"report-{next(self.count)}.json"
        argv = [*launcher, Given.bin / name, *words, f"--json={report}"]
        done = subprocess.run([str(word) for word in argv], env=environment(fault), cwd=self.work,
                              text=True, capture_output=True, timeout=1200, check=False)
        self.assertEqual(done.returncode, code, f"{argv}: {done.stdout}{done.stderr}")
        self.report = json.loads(report.read_text())
        self.stderr, self.stdout = done.stderr, done.stdout
        return self.report["result"]

    def save(self, iteration, *words, source=None, code=0, **options):
        source = source or self.shared / "run"
        return self.run_tool("pec-save", source / f"global_step{iteration}", self.store, *words,
                             code=code, **options)

    def restore(self, out, *words, code=0, **options):
        """As a training restarts, unless WORDS request read-only access to the store."""
        look = {"--read-only", "--restart", "safetensors"} & set(words)
        return self.run_tool("pec-restore", self.store, self.work / out, *words,
                             *([] if look else ["--restart"]), code=code, **options)

    def killed(self, out, *words, at):
        """A restore that SIGKILL ends at a fault point."""
        done = subprocess.run([str(word) for word in (Given.bin / "pec-restore", self.store,
                                                      self.work / out, *words)],
                              env=environment(f"{at}:kill"), text=True, capture_output=True,
                              timeout=1200, check=False)
        self.assertEqual(done.returncode, -signal.SIGKILL, f"{done.stdout}{done.stderr}")

    def save_series(self, iterations, *words):
        """\\returns by iteration: versions of all experts after it, as the reports imply"""
        held, after = {}, {}
        for iteration in iterations:
            result = self.save(iteration, *words)
            self.assertEqual(result["iteration"], iteration)
            for layer, experts in result["persist"].items():
                for expert in experts:
                    held[MODEL.module(layer, expert)] = iteration
            after[iteration] = dict(held)
        return after

    def same(self, out, iteration, versions, model=MODEL):
        """The output is, tensor by tensor, a checkpoint made with these versions."""
        wanted = self.work / f"wanted-{next(self.count)}"
        moe_checkpoint.write(wanted, model, iteration, versions)
        self.run_tool("ucp-load", "--check", wanted, self.work / out)
        shutil.rmtree(wanted)

    def blobs(self):
        return sorted(p for p in (self.store / "blobs").rglob("*") if p.is_file())

    def damage(self, path, how):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        {"flipped": lambda: path.write_bytes(data), "cut": lambda: path.write_bytes(data[:-1]),
         "removed": path.unlink}[how]()


def main():
    """Runs the tests of the calling script: BIN [MPIEXEC] [unittest arguments]."""
    arguments = [a for a in sys.argv[1:] if not a.startswith("-") and "/" in a]
    if not arguments:
        sys.exit(f"usage: {sys.argv[0]} BIN [MPIEXEC] [unittest arguments]")
    Given.bin = pathlib.Path(arguments[0]).resolve()
    Given.mpiexec = arguments[1] if len(arguments) > 1 else None
    unittest.main(argv=[sys.argv[0], *(a for a in sys.argv[1:] if a not in arguments)])
