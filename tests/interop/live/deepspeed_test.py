# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed checkpoints are loaded straight into engines of other layouts, bit for bit, and the run continues.

    deepspeed_test.py BIN PACKAGE
"""

import unittest

import live  # first: it makes the modules of the other tests importable
import commands
import train

# Case and ranks of the checkpoint, and engines that load it: what differs in their case, and their ranks.
CASES = [
    ({"zero": 1}, 2, [({"zero": 2}, 3), ({"zero": 3}, 2), ({"zero": 0}, 1)]),
    ({"zero": 2, "groups": 3}, 2, [({"zero": 3, "sub_group": 300}, 3)]),
    ({"zero": 2, "groups": 1, "frozen": True, "tied": True}, 3, [({"zero": 1}, 2), ({"zero": 3}, 2)]),
    ({"zero": 3, "groups": 1, "frozen": True}, 2, [({"zero": 3}, 3), ({"zero": 2}, 2)]),
    ({"zero": 2, "groups": 1, "frozen": True, "left_out": True}, 2, [({"zero": 3}, 2)]),
    ({"zero": 2, "dtype": "bf16"}, 2, [({"zero": 3}, 2), ({"zero": 1, "grad_accum": "fp32"}, 3), ({"zero": 0}, 2)]),
    ({"zero": 2, "dtype": "fp16"}, 2, [({"zero": 3}, 2), ({"zero": 1}, 3)]),
    ({"zero": 1, "optimizer": "sgd"}, 2, [({"zero": 2}, 3), ({"zero": 0}, 1)]),
    ({"zero": 2, "groups": 1, "round_robin": True}, 2, [({"round_robin": False}, 3)]),
    ({"zero": 1, "experts": 4, "ep": 2}, 2, [({"ep": 4}, 4), ({"zero": 2, "ep": 1}, 2)]),
    ({"zero": 1, "tp": 2, "groups": 1}, 2, [({"tp": 1, "zero": 2}, 2)]),
]


class Engines(unittest.TestCase):
    ucp = None

    def scratch(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        return scratch.path

    def check(self, checkpoint, case, world, folder):
        found = train.resume_case(checkpoint, case, world, folder, load_it=live.into_engine)
        self.assertEqual(found["wrong"], [])
        print(f"{case} on {world}: {found['tensors']} tensors equal, losses off by {found['loss_off']:.2g}")

    def test_other_layouts(self):
        for case, world, targets in CASES:
            folder = self.scratch()
            train.make_case(folder, case, world)
            for more, ranks in targets:
                with self.subTest(**case, to=more, ranks=ranks):
                    self.check(folder / "ckpt", case | more, ranks, folder)

    def test_atoms_and_catalogues(self):
        folder, case = self.scratch(), {"zero": 3, "dtype": "bf16"}
        train.make_case(folder, case, 2)
        self.ucp.run("ucp-extract", folder / "ckpt", folder / "catalogue", "--pack=zstd")
        self.ucp.run("ucp-union", folder / "catalogue", folder / "atoms")
        for source in ("catalogue", "atoms"):
            with self.subTest(source):
                self.check(folder / source, case | {"zero": 2}, 3, folder)


if __name__ == "__main__":
    Engines.ucp = live.start()
    unittest.main(verbosity=2)
