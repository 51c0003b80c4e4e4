# SPDX-License-Identifier: Apache-2.0
"""Shared code of the conformance tests: the rows of the table of formats, and a checkpoint in each of them."""

import json
import os
import pathlib
import subprocess
import sys
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "crash"))

import harness  # pylint: disable=wrong-import-position
import moe_checkpoint  # pylint: disable=wrong-import-position

# Codes for an input that a command does not take: not found, bad, over a limit, unsupported.
REFUSED = {3, 4, 8, 9}
DIFFERENT = 5
ASIDE = {"shardwright.json"}  # records the source of the output


class Conformance(unittest.TestCase):
    """`formats` are the names of the rows that write; `made` has the checkpoint `base` in each of them. `readers` are
    the names of the rows that are only read."""

    bin, launcher = pathlib.Path(), ""  # the launcher only where a test is called with one
    load = pathlib.Path()  # the program ucp-load, or ucp-load-example
    formats, readers = [], []
    scratch, base, base_format, made, left = None, None, "", {}, {}

    @classmethod
    def setUpClass(cls):
        cls.scratch = harness.Scratch("conformance-")
        cls.addClassCleanup(cls.scratch.__exit__)
        cls.make_all()

    @classmethod
    def make_all(cls):
        cls.base = cls.scratch.path / "base"
        cls.make_base()
        for name in cls.formats:
            cls.made[name] = cls.scratch.path / f"made-{name}"
            cls.left[name] = cls.convert(cls.base, cls.made[name], name)["not_carried"]
            cls.base_format = json.loads((cls.made[name] / "shardwright.json").read_text())["source"]["kind"]

    @classmethod
    def make_base(cls):
        """Experts, bf16 weights with fp32 masters, two parameter groups, a buffer, client state."""
        model = moe_checkpoint.Model(dtype="bf16", buffers={"position": (3, 5)}, hidden=24,
                                     config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
        moe_checkpoint.write(cls.base, model, 7)
        (cls.base / "config.json").write_text('{"model_type": "none"}\n')

    def setUp(self):
        scratch = harness.Scratch("conformance-")
        self.addCleanup(scratch.__exit__)
        self.work = scratch.path

    @classmethod
    def source_for(cls, name):
        """A checkpoint of another format, so that writing `name` is a conversion and no copy."""
        if name != cls.base_format:
            return cls.base
        return next(cls.made[other] for other in cls.formats if other != name and not cls.left[other])

    @classmethod
    def command(cls, source, output, name, *more):
        return [cls.load, source, output, "--format", name, "--progress", "off", *more]

    @classmethod
    def convert(cls, source, output, name, *more):
        """The `result` of the report."""
        report = output.with_name(output.name + ".report")
        harness.succeed(cls.command(source, output, name, f"--json={report}", *more))
        result = json.loads(report.read_text())["result"]
        report.unlink()
        return result

    def check(self, a, b):
        return harness.run([self.load, "--check", a, b, "--progress", "off"])

    def expect_same(self, a, b):
        done = self.check(a, b)
        self.assertEqual(done.code, 0, f"{done}\n{done.stdout}")

    def files(self, folder):
        return {name: digest for name, digest in harness.tree(folder).items() if name not in ASIDE}


def main(usage):
    words = usage.split()
    if len(sys.argv) < len([word for word in words if not word.startswith("[")]):
        sys.exit(f"usage: {usage}")
    rows = json.loads(subprocess.run([sys.argv.pop(1)], check=True, capture_output=True, text=True).stdout)
    Conformance.formats = [row["name"] for row in rows if row["writes"]]
    Conformance.readers = [row["name"] for row in rows if not row["writes"]]
    program = pathlib.Path(sys.argv.pop(1)).resolve()
    Conformance.bin = program if "BIN" in words else program.parent
    Conformance.load = program / "ucp-load" if "BIN" in words else program
    if "LAUNCHER" in words or ("[LAUNCHER]" in words and len(sys.argv) > 1):
        Conformance.launcher = sys.argv.pop(1)
    os.environ["LC_ALL"] = "C"
    unittest.main()
