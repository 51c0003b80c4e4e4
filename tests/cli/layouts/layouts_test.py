#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Targets in which ranks have several copies of a value, or not all parameter groups.

Usage: layouts_test.py BIN
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import zipfile

BIN = pathlib.Path(sys.argv[1]).resolve()
DATA = pathlib.Path(__file__).resolve().parents[2] / "data/deepspeed"
ONE_RANK, TWO_STAGES = DATA / "zero1_w2/ckpt", DATA / "pp2_dp2_zero1/ckpt"


def files(folder):
    """Content of all files below a folder, by relative path, without the manifest."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != "shardwright.json"}


class LayoutsTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def load(self, *words, code=0):
        argv = [BIN / "ucp-load", "-q", *map(str, words)]
        done = subprocess.run(argv, cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, code, f"{argv}\n{done.stderr}")
        return done.stderr

    def convert(self, source, name, *words):
        self.load(source, name, *words)
        return self.work / name

    def rules(self, name, *rules):
        path = self.work / name
        path.write_text(json.dumps({"version": 1, "family": "test", "rules": list(rules)}), encoding="utf-8")
        return path

    def test_copies_of_an_average_are_written_and_verified(self):
        replicated = {"match": ".*", "split": "replicated"}
        some = self.rules("some.json", {"match": r".*(narrow\.bias|norm\.weight)", "split": "average"}, replicated)
        every = self.rules("every.json", {"match": ".*", "split": "average"})
        for rules in (some, every):
            for target in ("tp=2,dp=1", "tp=3,dp=2", "tp=2,dp=2,zero=2", "tp=2,dp=2,zero=3", "tp=2,dp=1,zero=0"):
                with self.subTest(rules=rules.name, target=target):
                    output = self.convert(ONE_RANK, f"{rules.stem} {target}", "--target", target, "--patterns", rules)
                    self.load("--check", output, ONE_RANK, "--patterns", rules)
                    back = self.convert(output, f"{rules.stem} {target} back", "--target", "tp=1,dp=2,zero=1", "--patterns", rules)
                    self.load("--check", back, ONE_RANK)

    def test_damage_of_an_averaged_parameter_is_found(self):
        rules = self.rules("every.json", {"match": ".*", "split": "average"})
        source = self.convert(ONE_RANK, "source", "--target", "dp=1")
        shard = next(source.rglob("*optim_states.pt"))
        with zipfile.ZipFile(shard) as archive:
            largest = max(archive.infolist(), key=lambda member: member.file_size)
            values = archive.read(largest)
        content = shard.read_bytes()
        at = content.index(values) + len(values) // 2
        shard.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1:])
        said = self.load(source, "output", "--target", "tp=2,dp=1", "--patterns", rules, code=4)
        self.assertIn("CRC-32", said)

    def test_stages_without_a_group(self):
        # The first layer has only the embedding, the last one only the output layer: both are matrices.
        one = self.convert(TWO_STAGES, "one", "--target", "pp=1,dp=1")
        two = self.convert(one, "two", "--target", "pp=2,dp=2")
        for target in ("pp=3,dp=2", "pp=4,dp=1", "pp=4,dp=3", "pp=2,dp=1,stages=0-2,3", "pp=2,dp=2,stages=0,1-3",
                       "pp=2,dp=1,zero=0,stages=0,1-3"):
            with self.subTest(target=target):
                output = self.convert(two, target, "--target", target)
                self.load("--check", output, TWO_STAGES)
                back = self.convert(output, f"{target} back", "--target", "pp=2,dp=2,zero=1,stages=0-1,2-3")
                self.assertEqual(files(back), files(two))
                atoms = self.convert(output, f"{target} atoms", "--format", "universal")
                back = self.convert(atoms, f"{target} atoms back", "--format", "deepspeed", "--target",
                                    "pp=2,dp=2,zero=1,stages=0-1,2-3")
                self.assertEqual(files(back), files(two))

    def test_stages_without_a_group_are_warned_of(self):
        for target in ("pp=3,dp=2", "pp=2,dp=1,stages=0,1-3"):
            with self.subTest(target=target):
                said = self.load(TWO_STAGES, target, "--target", target, "--json=report.json")
                warnings = json.loads((self.work / "report.json").read_text(encoding="utf-8"))["warnings"]
                found = [text for text in map(json.dumps, warnings) if "different parameter groups" in text]
                self.assertEqual(len(found), 1, said)
                self.assertIn("stage 0 has group", found[0])
                self.assertIn("pp=", found[0])
        for target in ("pp=2,dp=1", "pp=1,dp=2", "pp=2,dp=1,zero=0,stages=0,1-3"):
            with self.subTest(target=target):
                self.load(TWO_STAGES, target, "--target", target, "--json=report.json")
                self.assertNotIn("different parameter groups", (self.work / "report.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
