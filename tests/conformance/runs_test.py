#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every format is written as planned, and by a run that resumes after a kill.

Usage: runs_test.py ROWS BIN
"""

import json

from conformance import Conformance, harness, main

KILLS = 6
SERIAL = ["--threads", "1", "--io-concurrency", "1"]  # only one thread has a fixed number of calls


class Runs(Conformance):
    def test_a_dry_run_tells_what_a_run_does(self):
        for name in self.formats:
            with self.subTest(format=name):
                source, out = self.source_for(name), self.work / name
                plan = self.convert(source, out, name, "--dry-run")["plan"]
                self.assertFalse(out.exists())
                result = self.convert(source, out, name)
                sizes = [path.stat().st_size for path in out.rglob("*")
                         if path.is_file() and path.name != "shardwright.json"]
                self.assertEqual((plan["output_files"], plan["output_bytes"]), (len(sizes), sum(sizes)))
                self.assertEqual(plan, result["plan"])
                self.assertEqual(result["run"]["payload_bytes_read"], plan["read_bytes"])

    def test_a_killed_run_goes_on(self):
        for name in self.formats:
            place = self.work / name
            place.mkdir()
            source, counts = self.source_for(name), place / "counts"
            harness.succeed(self.command(source, place / "whole", name, *SERIAL), fault=f"count:{counts}")
            words = dict(word.rsplit("=", 1) for word in counts.read_text().split())
            wanted, calls = harness.tree(place / "whole"), int(words["any"])
            for i in range(KILLS):
                number = 1 + i * (calls - 1) // (KILLS - 1)
                with self.subTest(format=name, call=number, calls=calls):
                    out = place / f"out{number}"
                    killed = harness.run(self.command(source, out, name, *SERIAL), fault=f"any:{number}:kill")
                    self.assertNotEqual(killed.code, 0, killed)
                    self.assertTrue(not out.exists() or harness.tree(out) == wanted, "neither whole nor absent")
                    harness.succeed(self.command(source, out, name, "--resume"))
                    self.assertEqual(harness.tree(out), wanted)

    def test_what_lies_beside_comes_along(self):
        for name in self.formats:
            with self.subTest(format=name):
                found = (self.made[name] / "config.json").read_text()
                self.assertEqual(found, (self.base / "config.json").read_text())

    def test_the_manifest_names_the_format(self):
        for name in self.formats:
            manifest = json.loads((self.made[name] / "shardwright.json").read_text())
            self.assertEqual(manifest["kind"], name)


if __name__ == "__main__":
    main("runs_test.py ROWS BIN")
