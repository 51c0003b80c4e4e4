#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads files that earlier releases wrote, and gets the same results as from files written today.

Each folder tests/data/releases/VERSION has what the commands of that version wrote:

    ucp-extract tests/data/demo packed --pack
    ucp-union tests/data/demo atoms
    pec-save tests/data/deepspeed/moe4_ep2_series/ckpt/global_step{4,5} store --k 2 --tokens .../tokens.jsonl
    moe-replace tests/data/deepspeed/routing_12x32/tokens.jsonl --nodes 4 --gpus 8 --slots 5 --strategy eplb -o placement.json

Usage: releases_test.py BIN
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(sys.argv[1]).resolve()
DATA = pathlib.Path(__file__).resolve().parents[2] / "data"
SERIES = DATA / "deepspeed/moe4_ep2_series"
RELEASES = sorted(path for path in (DATA / "releases").iterdir() if path.is_dir())


class Releases(unittest.TestCase):
    def setUp(self):
        self.assertTrue(RELEASES)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def run_in(self, *words):
        done = subprocess.run([str(BIN / words[0]), *map(str, words[1:])], cwd=self.work, stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, f"{words}: {done.stderr}")
        return done.stdout

    def files(self, folder):
        """Content of all files below a folder, by relative path, without the manifest of the run."""
        root = self.work / folder
        found = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*")
                 if path.is_file() and path.name != "shardwright.json"}
        self.assertTrue(found)
        return found

    def copy(self, release, name):
        """Copies a folder or a file that a release wrote, so that a command may change it."""
        target = self.work / f"{release.name}-{name}"
        if (release / name).is_dir():
            shutil.copytree(release / name, target)
            if name == "store":  # git does not keep empty folders
                (target / "recoveries").mkdir(exist_ok=True)
        else:
            shutil.copy(release / name, target)
        return target

    def test_catalogues_and_atoms(self):
        for target in ("dp=1", "dp=3"):
            self.run_in("ucp-load", DATA / "demo", f"today-{target}", "--target", target)
            today = self.files(f"today-{target}")
            for release in RELEASES:
                for name in ("packed", "atoms"):
                    # Atoms do not record the format of their source.
                    self.run_in("ucp-load", self.copy(release, name), "out", "--target", target, "--format", "deepspeed")
                    self.assertEqual(self.files("out").keys(), today.keys(), name)
                    if name == "packed":
                        self.assertEqual(self.files("out"), today)
                    self.run_in("ucp-load", "out", "--check", DATA / "demo")
                    shutil.rmtree(self.work / "out")
                    shutil.rmtree(self.work / f"{release.name}-{name}")

    def test_atoms_are_written_as_before(self):
        self.run_in("ucp-union", DATA / "demo", "atoms")
        for release in RELEASES:
            self.copy(release, "atoms")
            self.assertEqual(self.files(f"{release.name}-atoms"), self.files("atoms"))

    def save(self, store, steps):
        for step in steps:
            self.run_in("pec-save", SERIES / f"ckpt/global_step{step}", store, "--k", 2, "--tokens", SERIES / "tokens.jsonl")

    def test_stores(self):
        """A store of a release restores as one of today, also after a save and a collection by today's command."""
        for steps in ((4, 5), (6,)):
            self.save("today", steps)
            self.run_in("pec-restore", "today", f"today-{steps[-1]}", "--target", "dp=2,ep=2")
        for release in RELEASES:
            store = self.copy(release, "store")
            for step in (5, 6):
                if step == 6:
                    self.save(store, (6,))
                self.run_in("pec-save", "check", store)
                self.run_in("pec-restore", store, f"out-{step}", "--target", "dp=2,ep=2")
                self.assertEqual(self.files(f"out-{step}"), self.files(f"today-{step}"))
                shutil.rmtree(self.work / f"out-{step}")
            self.run_in("pec-save", "gc", store, "--keep-last", 1)
            self.run_in("pec-save", "check", store)

    def test_plans(self):
        tokens = DATA / "deepspeed/routing_12x32/tokens.jsonl"
        cluster = ("--nodes", 4, "--gpus", 8, "--slots", 5)
        self.run_in("moe-replace", tokens, *cluster, "--strategy", "eplb", "-o", "today.json")
        today = json.loads((self.work / "today.json").read_text())
        for release in RELEASES:
            plan = self.copy(release, "placement.json")
            self.assertEqual(json.loads(plan.read_text())["layers"], today["layers"])
            metrics = []
            for one in (plan, "today.json"):
                self.run_in("moe-replace", "evaluate", one, tokens, *cluster, "--json=report")
                metrics.append(json.loads((self.work / "report").read_text())["result"]["plan"]["metrics"])
            self.assertEqual(*metrics)
            self.run_in("moe-replace", tokens, *cluster, "--strategy", "eplb", "--old", plan)


if __name__ == "__main__":
    sys.argv[1:] = []
    unittest.main()
