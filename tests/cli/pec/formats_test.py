#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""pec-restore into every format: the same files as a conversion of the checkpoint that the store stands for.

Usage: formats_test.py BIN
"""

import json
import unittest

import stores
from stores import ITERATIONS, Stores, moe_checkpoint

# Formats with keys of --target and flags, and whether the optimizer's state goes there.
FORMATS = (
    ("universal", (), True),
    ("dcp", ("--target", "dp_shard=2"), True),
    ("dcp", ("--flavour", "torchtitan"), True),
    ("dtensor", ("--target", "dp_shard=3"), True),
    ("megatron", ("--target", "ep=2"), True),
    ("safetensors", (), False),
    ("safetensors", ("--only", "master", "--shard-size", "2KiB"), False),
)
NEWEST = 6


def files(folder):
    """Content by path, but the manifest, which names the source."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != "shardwright.json"}


class Formats(Stores):
    def setUp(self):
        super().setUp()
        self.versions = self.save_series([i for i in ITERATIONS if i <= NEWEST])[NEWEST]
        self.assertGreater(len(set(self.versions.values())), 1, "experts are of several iterations")
        self.wanted = self.work / "wanted"
        moe_checkpoint.write(self.wanted, stores.MODEL, NEWEST, self.versions)

    def test_the_files_are_those_of_a_conversion(self):
        for number, (name, words, whole) in enumerate(FORMATS):
            with self.subTest(name, words=words):
                restored, converted = self.work / f"restored{number}", self.work / f"converted{number}"
                result = self.restore(restored.name, "--format", name, *words, "--read-only")
                if name == "safetensors":
                    self.assertIn("no config.json was found", self.stderr)
                told = self.run_tool("ucp-load", self.wanted, converted, "--format", name, *words)
                self.assertEqual(result["conversion"]["not_carried"], told["not_carried"])
                if name == "universal":  # its atoms depend on the client state's file
                    self.run_tool("ucp-load", "--check", restored, converted)
                else:
                    self.assertEqual(files(restored), files(converted))
                manifest = json.loads((restored / "shardwright.json").read_text())
                self.assertEqual((manifest["kind"], manifest["iteration"]), (name, NEWEST))
                stale = {module: i for module, i in self.versions.items() if i != NEWEST}
                self.assertEqual(manifest["versions"], stale)
                if whole:
                    self.run_tool("ucp-load", "--check", converted, restored)

    def test_strict_refuses_before_the_store_is_told(self):
        before = sorted(path.name for path in self.store.rglob("*"))
        for more in ((), ("--dry-run",)):
            self.restore("out", "--format", "safetensors", "--strict", *more, code=5)
            self.assertIn("--strict: nothing is written", self.stderr)
            self.assertIn("exp_avg, exp_avg_sq", self.stderr)
            self.assertFalse((self.work / "out").exists())
        self.assertEqual(sorted(path.name for path in self.store.rglob("*")), before)
        self.restore("out", "--strict")
        self.same("out", NEWEST, self.versions)

    def test_what_flags_mean_nothing(self):
        for words, message in ((("--flavour", "torchtitan"), "--flavour requires --format=dcp"),
                               (("--format", "none", "--strict"), "--strict cannot be combined with --format none")):
            out = [self.work / "out"] if "none" not in words else []
            self.run_tool("pec-restore", self.store, *out, *words, code=2)
            self.assertIn(message, self.stderr)


if __name__ == "__main__":
    stores.main()
