#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every flag, target and file that takes a size or a bandwidth reads decimals, and refuses other forms with a reason.

Usage: sizes_test.py BIN
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BIN = pathlib.Path(sys.argv[1]).resolve()
SOURCE = pathlib.Path(__file__).resolve().parents[3]
DEMO = SOURCE / "tests/data/demo"
COMMANDS = ("ucp-extract", "ucp-union", "ucp-load", "pec-save", "pec-restore", "moe-replace")
GOOD = ("12.5GB", "62.5MB", "1.5GiB", "1048576", "4194304.0", "0.25T")
BAD = {"1e9": 'unknown unit "e9"', "-1GB": "is not a", "nan": "is not a", "inf": "is not a", "12.5 GB": 'unknown unit " GB"',
       "1.0000000000000000001GB": "more than 18 digits after the point", "1.5": "not a whole number of bytes",
       "99999999999GB": "does not fit in 64 bits", "18446744073709551616": "does not fit in 64 bits"}


def run(*words, **environment):
    return subprocess.run([BIN / words[0], *map(str, words[1:])], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          env={**os.environ, **environment}, check=False)


def flags():
    """For every command and subcommand: its words, a flag, and the values of the flag."""
    for command in COMMANDS:
        whole = json.loads(run(command, "--help=json").stdout)
        for words in ((command,), *((command, one["name"]) for one in whole["subcommands"])):
            for flag in json.loads(run(*words, "--help=json").stdout)["flags"]:
                if flag.get("value") in ("SIZE", "RATE"):
                    name = flag["names"][-1]
                    # A key of one format.
                    yield (*words, "--format=safetensors") if name == "--shard-size" else words, name, flag["value"]


class Sizes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def refused(self, code, why, *words, **environment):
        done = run(*words, **environment)
        self.assertEqual(done.returncode, code, done.stderr)
        self.assertIn(why, done.stderr)
        return done

    def test_every_flag(self):
        seen = set()
        for words, flag, kind in flags():
            seen.add((flag, kind))
            with self.subTest(" ".join(words), flag=flag):
                for value, why in BAD.items():
                    said = self.refused(2, why, *words, f"{flag}={value}").stderr
                    self.assertIn(flag.removeprefix("--"), said)
                    self.assertIn(f": \"{value}\"", said)
                for value in (*GOOD, *(("12.5GB/s",) if kind == "RATE" else ())):
                    # Other errors, such as a missing INPUT, are reported after a wrong value.
                    self.assertNotIn(f"{flag}: ", run(*words, f"{flag}={value}").stderr)
                if kind == "SIZE":
                    self.refused(2, 'unknown unit "GB/s"', *words, f"{flag}=12.5GB/s")
        self.assertLessEqual({("--memory", "SIZE"), ("--shard-size", "SIZE"), ("--expert-bytes", "SIZE"), ("--budget", "SIZE"),
                              ("--memory-limit", "SIZE"), ("--log-memory", "SIZE"), ("--split-above", "SIZE"),
                              ("--gradient-budget", "SIZE"), ("--bandwidth", "RATE"), ("--copy-bandwidth", "RATE"),
                              ("--host-bandwidth", "RATE"), ("--network-bandwidth", "RATE"),
                              ("--snapshot-bandwidth", "RATE"), ("--persist-bandwidth", "RATE")}, seen)

    def test_the_environment(self):
        self.refused(2, 'unknown unit "e9"', "ucp-load", DEMO, "--list", SHARDWRIGHT_MEMORY="1e9")
        self.assertEqual(run("ucp-load", DEMO, self.work / "out", "--dry-run", "--target", "zero=2,dp=2",
                             SHARDWRIGHT_MEMORY="62.5MB").returncode, 0)

    def test_what_they_mean(self):
        """The same numbers in whole bytes give the same answers."""
        def tune(*words):
            return json.loads(run("pec-save", "tune", *words, "--json").stdout)["result"]
        self.assertEqual(tune("--persist-bandwidth", "0.5GB/s", "--snapshot-bandwidth", "1.5GiB"),
                         tune("--persist-bandwidth", "500000000", "--snapshot-bandwidth", "1610612736"))
        self.assertNotEqual(tune("--persist-bandwidth", "0.5GB/s"), tune("--persist-bandwidth", "0.6GB/s"))

    def test_the_target_of_a_conversion(self):
        words = ("ucp-load", DEMO, self.work / "out", "--format", "safetensors", "--target")
        for value, why in BAD.items():
            self.refused(2, why, *words, f"shard-size={value}")
        done = run(*words, "shard-size=0.008MB")
        self.assertEqual(done.returncode, 0, done.stderr)
        files = sorted((self.work / "out").rglob("*.safetensors"))
        self.assertGreater(len(files), 1)
        whole = run("ucp-load", DEMO, self.work / "whole", "--format", "safetensors", "--target", "shard-size=8000")
        self.assertEqual(whole.returncode, 0, whole.stderr)
        self.assertEqual([path.read_bytes() for path in files],
                         [path.read_bytes() for path in sorted((self.work / "whole").rglob("*.safetensors"))])

    def test_a_cluster_description(self):
        def plan(**more):
            cluster = {"nodes": 2, "gpus": 1, "slots": 2, "expert_bytes": "62.5MB", **more}
            (self.work / "cluster.json").write_text(json.dumps(cluster), encoding="utf-8")
            (self.work / "loads.json").write_text("[[4, 3, 2, 1]]", encoding="utf-8")
            return ("moe-replace", self.work / "loads.json", "--cluster", self.work / "cluster.json", "--json")
        decimal = run(*plan(bandwidth={"gpu": "200GB/s", "node": "12.5GB/s"}, param_bytes="0.5MiB"))
        self.assertEqual(decimal.returncode, 0, decimal.stderr)
        whole = run(*plan(bandwidth={"gpu": 200e9, "node": 12.5e9}, expert_bytes=62500000, param_bytes=524288))
        for one in ("loads", "cluster"):
            self.assertEqual(json.loads(decimal.stdout)["result"].get(one), json.loads(whole.stdout)["result"].get(one))
        for value, why in BAD.items():
            self.refused(4, f"bandwidth: node: \"{value}\"", *plan(bandwidth={"node": value}))
            self.refused(4, f"expert_bytes: \"{value}\"", *plan(expert_bytes=value))
            self.refused(4, why, *plan(expert_bytes=value))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
