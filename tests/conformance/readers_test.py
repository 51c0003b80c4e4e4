#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every format that is only read converts to every format that is written, and its damaged files end no command in
another way than with an error.

Usage: readers_test.py ROWS LOAD [LAUNCHER]
LOAD is a program ucp-load that has these formats. With a launcher, only the test of several ranks runs.
"""

import json
import shutil
import subprocess
import sys

from conformance import DIFFERENT, REFUSED, Conformance, harness, main
from damage_test import damages, flipped

# Scripts that write a checkpoint of a format into the folder that they are called with.
SAMPLES = {"minimal": harness.SOURCE / "examples" / "format_minimal" / "write.py"}


class Readers(Conformance):
    @classmethod
    def make_all(cls):
        for name in cls.readers:
            cls.made[name] = cls.scratch.path / f"made-{name}"
            subprocess.run([sys.executable, SAMPLES[name], cls.made[name]], check=True)

    def setUp(self):
        super().setUp()
        if self.launcher and "ranks" not in self.id():
            self.skipTest("only the test of several ranks uses the launcher")

    def parameters(self, folder):
        report = self.work / "report"
        harness.succeed([self.load, folder, "--list", f"--json={report}"])
        rows = json.loads(report.read_text())["result"]["parameters"]
        return sorted((row["name"], tuple(row["shape"])) for row in rows)

    def test_every_reader_has_a_sample(self):
        self.assertEqual(sorted(self.readers), sorted(SAMPLES))

    def test_every_format_can_be_written(self):
        for name in self.readers:
            for other in self.formats:
                with self.subTest(source=name, target=other):
                    source, out = self.made[name], self.work / f"{name}-{other}"
                    plan = self.convert(source, out, other, "--dry-run")["plan"]
                    result = self.convert(source, out, other)
                    self.assertEqual(plan, result["plan"])
                    self.assertEqual(result["run"]["payload_bytes_read"], plan["read_bytes"])
                    self.assertEqual(self.parameters(out), self.parameters(source))
                    if not result["not_carried"]:
                        self.expect_same(source, out)

    def test_one_format_loses_nothing(self):
        for name in self.readers:
            left = [self.convert(self.made[name], self.work / f"{name}-{other}", other)["not_carried"]
                    for other in self.formats]
            self.assertIn([], left)

    def test_it_is_not_written(self):
        for name in self.readers:
            done = harness.run(self.command(self.made[name], self.work / "out", name))
            self.assertEqual(done.code, 2, done)
            self.assertFalse((self.work / "out").exists())

    def test_no_damage_goes_wrong(self):
        for name in self.readers:
            copy = self.work / name
            shutil.copytree(self.made[name], copy)
            for path in sorted(copy.iterdir()):
                whole = path.read_bytes()
                for what, data in damages(whole):
                    with self.subTest(format=name, file=path.name, what=what):
                        path.write_bytes(data)
                        done = self.check(copy, self.made[name])
                        self.assertIn(done.code, REFUSED | {0, DIFFERENT}, done)
                        if done.code in REFUSED:
                            self.assertTrue(done.stderr.strip(), "the error has no message")
                path.write_bytes(whole)
            self.expect_same(copy, self.made[name])

    def test_the_largest_data_file_is_all_read(self):
        for name in self.readers:
            copy = self.work / name
            shutil.copytree(self.made[name], copy)
            data_files = [path for path in copy.iterdir() if path.suffix != ".json"]
            path = max(data_files, key=lambda path: path.stat().st_size)
            whole = path.read_bytes()
            for what, data in [("cut", whole[:-1]), ("longer", whole + b"x"),
                               ("changed", flipped(whole, len(whole) * 3 // 4))]:
                with self.subTest(format=name, file=path.name, what=what):
                    path.write_bytes(data)
                    self.assertIn(self.check(copy, self.made[name]).code, REFUSED | {DIFFERENT})
            path.unlink()
            self.assertIn(self.check(copy, self.made[name]).code, REFUSED)

    def test_any_number_of_ranks_reads_the_same(self):
        if not self.launcher:
            self.skipTest("no launcher")
        for name in self.readers:
            trees = []
            for ranks in (1, 2, 3):
                out = self.work / f"{name}-{ranks}"
                words = self.command(self.made[name], out, self.formats[0], "--threads", "1")
                harness.succeed([self.launcher, "--oversubscribe", "-n", ranks, *words])
                trees.append(harness.tree(out))
            self.assertEqual(trees[1:], trees[:1] * 2, name)


if __name__ == "__main__":
    main("readers_test.py ROWS LOAD [LAUNCHER]")
