#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every format that is read and written keeps what it has a place for, and names what it has none for.

Usage: round_trips_test.py ROWS BIN
"""

import json
import shutil

from conformance import REFUSED, Conformance, harness, main, moe_checkpoint

NAMES = ["../../escape", "/escape", "a/b", "..", ".", "", "two\nlines", "\x1b[31mred", "nul\0name", "n" * 300,
         "__metadata__", "model.safetensors", "zero/../../escape", "latest"]


class RoundTrips(Conformance):
    def test_a_format_repeats_itself(self):
        for name in self.formats:
            with self.subTest(format=name):
                again = self.work / name
                result = self.convert(self.made[name], again, name)
                self.assertEqual(result["not_carried"], [])
                self.assertEqual(self.files(again), self.files(self.made[name]))
                self.expect_same(self.made[name], again)

    def test_there_and_back(self):
        """A to B to A: nothing is lost that B has a place for, and B reports the parts that it drops."""
        for a in self.formats:
            for b in self.formats:
                if a == b:
                    continue
                with self.subTest(there=a, back=b):
                    there, back, again = (self.work / f"{a}-{b}-{n}" for n in range(3))
                    left = self.convert(self.made[a], there, b)["not_carried"]
                    left += self.convert(there, back, a)["not_carried"]
                    if not left:
                        self.expect_same(self.made[a], back)
                    # B keeps the same parts of A and of the checkpoint that came back.
                    self.convert(back, again, b)
                    self.expect_same(there, again)

    def test_what_is_left_out_is_told(self):
        """A copy that differs from the base reports it; a format that reports nothing has everything."""
        for name in self.formats:
            with self.subTest(format=name):
                same = self.check(self.base, self.made[name]).code == 0
                if not same:
                    self.assertNotEqual(self.left[name], [])

    def test_all_formats_have_the_same_parameters(self):
        wanted = None
        for name in self.formats:
            report = self.work / "report"
            harness.succeed([self.bin / "ucp-load", self.made[name], "--list", f"--json={report}"])
            rows = json.loads(report.read_text())["result"]["parameters"]
            found = sorted((row["name"], tuple(row["shape"])) for row in rows)
            wanted = wanted or found
            self.assertEqual(found, wanted, name)

    def test_names_are_never_paths(self):
        """A name of a parameter is kept or refused; nothing is written outside the output."""
        for number, hostile in enumerate(NAMES):
            place = self.work / f"n{number}"
            place.mkdir()
            model = moe_checkpoint.Model(hidden=4, dtype="bf16", extra={hostile: (2, 3)},
                                         config={"bf16": {"enabled": True}})
            moe_checkpoint.write(place / "source", model, 3)
            for name in self.formats:
                with self.subTest(name=hostile, format=name):
                    source = place / "source"
                    if name == self.base_format:  # not a copy: another layout
                        command = self.command(source, place / "out", name, "--target", "dp=4")
                    else:
                        command = self.command(source, place / "out", name)
                    done = harness.run(command)
                    self.assertIn(done.code, REFUSED | {0}, done)
                    for line in done.stderr.splitlines():
                        self.assertNotIn("\x1b", line)
                    if done.code == 0:
                        report = place / "report"
                        harness.succeed([self.bin / "ucp-load", place / "out", "--list", f"--json={report}"])
                        rows = json.loads(report.read_text())["result"]["parameters"]
                        self.assertIn(hostile, [row["name"] for row in rows])
                        report.unlink()
                        shutil.rmtree(place / "out")
                    self.assertEqual(sorted(path.name for path in place.iterdir()), ["source"])
            self.assertEqual(sorted(path.name for path in self.work.iterdir()),
                             sorted(f"n{i}" for i in range(number + 1)))


if __name__ == "__main__":
    main("round_trips_test.py ROWS BIN")
