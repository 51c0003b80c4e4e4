# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of transformers' Trainer goes to another stage and rank count and on, and back, with no step by hand.

    trainer_test.py [--all] BIN LAUNCHER

A run is not interrupted; another one continues from its first checkpoint with more ranks at another stage, a third one
from a checkpoint of that one with fewer. Every loss has to be that of the first run at that step. Plain and tied
embeddings, full fine-tunes and LoRA, which saves no frozen parameters; --all runs every combination.
"""

import sys
import unittest

import finetune  # first: it makes the modules of the DeepSpeed tests importable
import commands

STEPS, SAVE = 6, 2
TOLERANCE = 2e-5  # other numbers of ranks add gradients up in another order

# For each case: only adapters are trained, tied embeddings, and stage and ranks of the three runs.
CASES = [
    (False, True, [(2, 2), (3, 3), (2, 1)]),
    (True, False, [(3, 2), (2, 3), (3, 1)]),
    (True, True, [(2, 2), (3, 3), (1, 2)]),
]
EVERY_CASE = [(lora, tied, runs) for lora in (False, True) for tied in (False, True)
              for runs in ([(2, 2), (3, 3), (2, 1)], [(3, 2), (2, 3), (3, 1)], [(1, 3), (3, 2), (1, 1)],
                           [(2, 3), (1, 2), (2, 3)], [(3, 3), (3, 2), (2, 2)])]


class Trainer(unittest.TestCase):
    ucp = None
    cases = CASES

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def test_goes_on_at_other_stages_and_rank_counts(self):
        for number, (lora, tied, runs) in enumerate(self.cases):
            with self.subTest(lora=lora, tied=tied, runs=runs):
                self.chain(self.folder / str(number), {"lora": lora, "tied": tied, "save": SAVE}, runs)

    def chain(self, folder, case, runs):
        (zero, world), *later = runs
        expected = finetune.run(world, folder / "run0", case | {"zero": zero}, STEPS)
        self.assertEqual(sorted(expected), list(range(1, STEPS + 1)))
        for i, (zero, world) in enumerate(later, start=1):
            source, resumed = folder / f"run{i - 1}" / f"checkpoint-{i * SAVE}", folder / f"from{i}"
            self.ucp.run("ucp-load", source, resumed, "--target", f"zero={zero},dp={world}")
            self.ucp.run("ucp-load", "--check", source, resumed)
            losses = finetune.run(world, folder / f"run{i}", case | {"zero": zero}, STEPS, resumed)
            self.assertEqual(sorted(losses), list(range(i * SAVE + 1, STEPS + 1)))
            off = max(abs(losses[step] - expected[step]) for step in losses)
            print(f"{case} {runs[:i + 1]}: losses off by {off:.2g} of {expected[STEPS]:.3g}", flush=True)
            self.assertLessEqual(off, TOLERANCE, f"{losses} for {expected}")


if __name__ == "__main__":
    if "--all" in sys.argv:
        sys.argv.remove("--all")
        Trainer.cases = EVERY_CASE
    Trainer.ucp = commands.from_arguments()
    unittest.main()
