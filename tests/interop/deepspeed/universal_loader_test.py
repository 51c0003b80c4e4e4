# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's own universal loader opens what ucp-union writes, whatever the stage of both sides.

    universal_loader_test.py BIN LAUNCHER [UniversalLoader.test_the_loader_that_was_asked_for]

The test of that name holds for older releases too, with SHARDWRIGHT_PEERS as their environment (docs/interop.md).

The loader restores neither buffers nor frozen parameters, and gives every group of a stage-3 engine
the hyper-parameters of the first (docs/interop.md), so the models here have none of these.
"""

import unittest

import commands
import deepspeed
import train

PLAIN = {"buffers": False, "groups": 1}
BF16 = PLAIN | {"dtype": "bf16"}
BF16_OPTIMIZER = BF16 | {"grad_accum": "fp32"}
TWO_GROUPS = {"buffers": False}

# (source case, its ranks, [(case that loads the atoms, its ranks)])
ROWS = [
    (PLAIN | {"zero": 2}, 2, [(PLAIN | {"zero": 1}, 3), (PLAIN | {"zero": 2}, 1), (PLAIN | {"zero": 3}, 2)]),
    (BF16 | {"zero": 3}, 3, [(BF16_OPTIMIZER, 2), (BF16 | {"zero": 3}, 4)]),
    (BF16_OPTIMIZER, 4, [(BF16 | {"zero": 2}, 2), (BF16 | {"zero": 3}, 2)]),
    (TWO_GROUPS | {"optimizer": "amsgrad"}, 2, [(TWO_GROUPS | {"optimizer": "amsgrad", "zero": 2}, 3)]),
    (TWO_GROUPS | {"round_robin": True, "zero": 2}, 2, [(TWO_GROUPS | {"zero": 1}, 3)]),
]

# (source case, how its atoms are written, case that loads them, its ranks); sources have two ranks.
ASKED_FOR = [
    (PLAIN | {"zero": 3}, ["ucp-union"], PLAIN | {"zero": 3}, 3),
    (PLAIN | {"zero": 3}, ["ucp-union", "--loader", "any"], PLAIN | {"zero": 2}, 3),
    (PLAIN | {"zero": 2}, ["ucp-union"], PLAIN | {"zero": 1}, 3),
    (PLAIN | {"zero": 2}, ["ucp-union", "--loader", "stage3"], PLAIN | {"zero": 3}, 3),
    (PLAIN | {"zero": 2}, ["ucp-load", "--format", "universal", "--target", "zero=3,dp=3"], PLAIN | {"zero": 3}, 3),
]


class UniversalLoader(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def test_atoms_of_every_stage_at_every_stage(self):
        for number, (case, ranks, loaders) in enumerate(ROWS):
            made = self.folder / str(number)
            train.make_case(made, case, ranks)
            atoms = made / "atoms"
            self.ucp.run("ucp-union", made / "ckpt", atoms)
            for loader, world in loaders:
                with self.subTest(source=case, loader=loader):
                    report = train.resume_case(atoms, loader, world, made, universal=True)
                    self.assertEqual(report["wrong"], [])

    def test_the_loader_that_was_asked_for(self):
        for number, (case, (command, *flags), loader, world) in enumerate(ASKED_FOR):
            made = self.folder / f"from{case['zero']}"
            if not made.exists():
                train.make_case(made, case, 2)
            with self.subTest(source=case, command=command, flags=flags, loader=loader):
                atoms = self.folder / f"atoms{number}"
                self.ucp.run(command, made / "ckpt", atoms, *flags)
                report = train.resume_case(atoms, loader, world, made, universal=True)
                self.assertEqual(report["wrong"], [])
                print(f"{deepspeed.__version__}: {report['tensors']} tensors equal, losses off by {report['loss_off']:.2g}")
                back = self.folder / f"back{number}"
                self.ucp.run("ucp-load", atoms, back, "--target", "zero=1,dp=2")
                self.ucp.run("ucp-load", "--check", made / "ckpt", back)

    def test_drop_in_for_ds_to_universal(self):
        """With the flags of ds_to_universal the pointer is next to the tag folder, as its callers want it."""
        case = PLAIN | {"zero": 1}
        train.make_case(self.folder, case, 2)
        saved = self.folder / "ckpt"
        tag = (saved / "latest").read_text()
        self.ucp.run("ucp-union", "--input_folder", saved / tag, "--output_folder", saved / f"{tag}_universal",
                     "--num_extract_workers", 1, "--num_merge_workers", 1, "--inject_missing_state")
        self.assertEqual((saved / "latest_universal").read_text(), f"{tag}_universal")
        self.assertEqual((saved / "latest").read_text(), tag)
        self.assertEqual(train.resume_case(saved, PLAIN | {"zero": 2}, 3, self.folder, universal=True)["wrong"], [])
        self.assertEqual(train.resume_case(saved, case, 2, self.folder)["wrong"], [])  # the source, as it was


if __name__ == "__main__":
    UniversalLoader.ucp = commands.from_arguments()
    unittest.main()
