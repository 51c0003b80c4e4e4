# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with files of two saves are an error, and those of one save never are, whatever happened to the
optimizer's steps: overflows, a reset optimizer, optimizers that count no steps, stages and number formats.

    two_saves_test.py BIN LAUNCHER
"""

import pathlib
import shutil
import unittest

import commands
import ranks  # first: it prepares what DeepSpeed finds when imported
from model import complete, make_engine, train_step


def two_saves(folder, case):
    """Collective. Saves under one tag after 2 steps and after 4."""
    engine = make_engine(case)
    for part, first in (("old", 0), ("new", 2)):
        for step in range(first, first + 2):
            train_step(engine, case, step)
        engine.save_checkpoint(folder / part, tag="last")


def odd_steps(folder, case, how):
    """Collective. Saves a run with an optimizer that has taken other steps than the engine counts iterations."""
    engine = make_engine(case)
    for step in range(3):
        train_step(engine, case, step)
    if how == "reset":
        engine.save_checkpoint(folder / "before")
        engine = make_engine(case | {"seed": case["seed"] + 1})
        engine.load_checkpoint(folder / "before", load_optimizer_states=False)
    for step in range(4, 6):
        train_step(engine, case, step)
    if how == "overflow" and not 0 < engine.skipped_steps < engine.global_steps:
        raise AssertionError(f"{engine.skipped_steps} of {engine.global_steps} steps were skipped")
    engine.save_checkpoint(folder / "ckpt")


MIXED = [{"zero": 1}, {"zero": 2, "dtype": "bf16"}, {"zero": 1, "optimizer": "sgd"}]
VALID = [({"zero": 1}, "reset"), ({"zero": 2, "dtype": "bf16"}, "reset"), ({"zero": 3, "dtype": "bf16"}, "reset"),
         ({"zero": 2, "dtype": "fp16", "config": {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}}},
          "overflow"),
         ({"zero": 2, "optimizer": "lion"}, "plain"), ({"dtype": "bf16", "grad_accum": "fp32"}, "plain")]


class TwoSaves(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def made(self, function, case, *arguments):
        folder = self.folder / str(len(list(self.folder.iterdir())))
        folder.mkdir()
        ranks.run(1, function, folder, complete(case), *arguments)
        return folder

    def test_optimizer_shards_of_the_save_before_are_an_error(self):
        for case in MIXED:
            with self.subTest(case=case):
                folder = self.made(two_saves, case)
                whole = shutil.copytree(folder / "new", folder / "mixed")
                for shard in pathlib.Path(folder / "old/last").glob("*optim_states.pt"):
                    shutil.copy(shard, whole / "last" / shard.name)
                self.ucp.run("ucp-load", folder / "new", folder / "out", "--target", "zero=2,dp=2")
                said = self.ucp.run("ucp-load", whole, folder / "wrong", "--target", "zero=2,dp=2", expect=4)
                self.assertIn("two saves", said)
                self.assertIn("--allow-mixed", said)
                said = self.ucp.run("ucp-load", whole, folder / "asked", "--target", "zero=2,dp=2", "--allow-mixed")
                self.assertIn("two saves", said)

    def test_runs_of_one_save_are_converted(self):
        for case, how in VALID:
            with self.subTest(case=case, how=how):
                folder = self.made(odd_steps, case, how)
                said = self.ucp.run("ucp-load", folder / "ckpt", folder / "out", "--target", "dp=2")
                if how == "reset" and case.get("zero") == 3:
                    self.assertIn("the optimizer was reset", said)  # nothing can decide
                else:
                    self.assertNotIn("two saves", said)


if __name__ == "__main__":
    TwoSaves.ucp = commands.from_arguments()
    unittest.main()
