# SPDX-License-Identifier: Apache-2.0
"""Folders of torch.distributed.checkpoint that one PyTorch release saved go to other ranks, and load in all releases.

    dcp_release_test.py BIN [PYTHON]...

Each PYTHON saves once; the first is that which runs this. Each of them loads all that was made.
"""

import json
import pathlib
import subprocess
import sys
import unittest

import hops  # pylint: disable=unused-import  # it makes the modules of the DeepSpeed tests importable
import commands

HERE = pathlib.Path(__file__).resolve().parent


def run(python, ranks, do, folder):
    job = json.dumps({"ranks": ranks, "do": do, "folder": str(folder)})
    done = subprocess.run([python, HERE / "dcp_release.py", job], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"{python}: {do} of {folder}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class Releases(unittest.TestCase):
    ucp, pythons = None, []

    def test_each_reads_what_we_make_of_each(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        loads = 0
        for i, source in enumerate(self.pythons):
            saved, made = scratch.path / f"saved{i}", scratch.path / f"made{i}"
            release, _ = run(source, 2, "save", saved)
            self.ucp.run("ucp-load", saved, made, "--format", "dcp", "--target", "dp_shard=3")
            self.ucp.run("ucp-load", "--check", saved, made)
            for python in self.pythons:
                reader, wrong = run(python, 3, "load", made)
                self.assertEqual(wrong, [], f"of {release}, read by {reader}")
                print(f"saved by {release}, made for 3 ranks, read by {reader}: all equal")
                loads += 1
        self.assertEqual(loads, len(self.pythons) ** 2)


if __name__ == "__main__":
    Releases.ucp = commands.Commands(sys.argv[1], "")
    Releases.pythons = [sys.executable, *sys.argv[2:]]
    unittest.main(argv=sys.argv[:1])
