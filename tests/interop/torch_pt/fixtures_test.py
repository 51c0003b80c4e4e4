# SPDX-License-Identifier: Apache-2.0
"""Every file of real checkpoints keeps its object graph through our reader and writer."""

import os
import pathlib
import sys
import tempfile
import unittest

import torch

from same import Probe, same, sharing

SOURCE = pathlib.Path(__file__).resolve().parents[3]
# Those that the project carries, and more of them if the shared folder is present.
FOLDERS = (SOURCE / "tests" / "data",
           pathlib.Path(os.environ.get("SHARDWRIGHT_SHARED", SOURCE.parent / "shared")) / "fixtures" / "deepspeed")

# Megatron's files pickle enumerations of its own, which torch.load imports. Megatron-Core is installed in the
# environment of the trainers, inside the one that runs this (see scripts/peers).
sys.path += map(str, pathlib.Path(sys.prefix).glob("trainers/lib/python3*/site-packages"))


class Fixtures(unittest.TestCase):
    probe = None

    def test_every_file(self):
        files = [file for folder in FOLDERS for file in sorted(folder.rglob("*.pt"))]
        self.assertGreater(len(files), 200)
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder) / "target.pt"
            for source in files:
                with self.subTest(file=source):
                    self.probe.rewrite(source, target)
                    want = torch.load(source, weights_only=False, map_location="cpu")
                    got = torch.load(target, weights_only=False)
                    same(want, got)
                    self.assertEqual(sharing(want), sharing(got))


if __name__ == "__main__":
    Fixtures.probe = Probe(sys.argv.pop(1))
    unittest.main()
