"""Every checkpoint file of the shared fixtures keeps its object graph through our reader and writer."""

import os
import pathlib
import sys
import tempfile
import unittest

import torch

from same import Probe, same, sharing

SOURCE = pathlib.Path(__file__).resolve().parents[3]
FIXTURES = pathlib.Path(os.environ.get("SHARDWRIGHT_SHARED", SOURCE.parent / "shared")) / "fixtures" / "deepspeed"


class Fixtures(unittest.TestCase):
    probe = None

    def test_every_file(self):
        files = sorted(FIXTURES.rglob("*.pt"))
        self.assertTrue(files, f"no .pt file in {FIXTURES}")
        with tempfile.TemporaryDirectory() as folder:
            target = pathlib.Path(folder) / "target.pt"
            for source in files:
                with self.subTest(file=source.relative_to(FIXTURES)):
                    self.probe.rewrite(source, target)
                    want = torch.load(source, weights_only=False, map_location="cpu")
                    got = torch.load(target, weights_only=False)
                    same(want, got)
                    self.assertEqual(sharing(want), sharing(got))


if __name__ == "__main__":
    if not FIXTURES.is_dir():
        print(f"skipped: no {FIXTURES} (SHARDWRIGHT_SHARED names the folder that holds fixtures/)")
        sys.exit(77)
    Fixtures.probe = Probe(sys.argv.pop(1))
    unittest.main()
