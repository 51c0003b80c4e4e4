# SPDX-License-Identifier: Apache-2.0
"""Shared code of the tests of the commands on the small real checkpoint."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

DEMO = pathlib.Path(__file__).resolve().parents[2] / "data" / "demo"
TAG = "global_step5"


class DemoTest(unittest.TestCase):
    """A private folder with a copy of the checkpoint, `ckpt`."""

    bin = pathlib.Path()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)
        shutil.copytree(DEMO, self.work / "ckpt")

    def run_in(self, *words, code=0, **environment):
        done = subprocess.run([str(self.bin / words[0]), *words[1:]], cwd=self.work, text=True,
                              capture_output=True, check=False, env={**os.environ, **environment})
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def report_of(self, *words, code=0, **environment):
        """The `result` of a command's report, or with a code its `error`."""
        self.run_in(*words, "--json=report", code=code, **environment)
        report = json.loads((self.work / "report").read_text())
        return report["error" if code else "result"]

    def files(self, folder):
        """Content of all files below a folder, by relative path, the manifest aside."""
        root = self.work / folder
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*")
                if path.is_file() and path.name != "shardwright.json"}

    def inodes(self, folder):
        return {path.name: path.stat().st_ino for path in (self.work / folder).iterdir()}

    def manifest(self, folder):
        return json.loads((self.work / folder / "shardwright.json").read_text())

    def left(self):
        """Names in the private folder, those of reports aside."""
        return sorted(set(os.listdir(self.work)) - {"report"})


def main(usage):
    if len(sys.argv) != 2:
        sys.exit(f"usage: {usage}")
    DemoTest.bin = pathlib.Path(sys.argv.pop()).resolve()
    unittest.main()
