# SPDX-License-Identifier: Apache-2.0
"""Equal layouts: torch.save over a file of one checkpoint leaves the other as it was.

    saving_over_test.py BIN LAUNCHER
"""

import unittest

import commands
import ranks  # first: it prepares what DeepSpeed finds when imported
import torch
import train


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save_over(folder):
    """Saves other states under the names of all files of a tag folder, as the next run does."""
    files = sorted(folder.glob("global_step*/*.pt"))
    for file in files:
        torch.save({"state": torch.full((1000,), 7.0)}, file)
    return len(files)


class SavingOver(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path
        train.make_case(self.folder / "made", {"zero": 2}, 2)
        self.source = self.folder / "made" / "ckpt"

    def test_the_source_survives_a_training_that_saves_into_the_output(self):
        self.ucp.run("ucp-load", self.source, self.folder / "out")
        whole = contents(self.source)
        self.assertGreater(save_over(self.folder / "out"), 2)
        self.assertEqual(contents(self.source), whole)

    def test_the_output_survives_a_rerun_that_saves_over_the_source(self):
        self.ucp.run("ucp-load", self.source, self.folder / "out")
        whole = contents(self.folder / "out")
        self.assertGreater(save_over(self.source), 2)
        self.assertEqual(contents(self.folder / "out"), whole)

    def test_linked_checkpoints_change_together_as_the_flag_says(self):
        self.ucp.run("ucp-load", self.source, self.folder / "out", "--link")
        whole = contents(self.source)
        save_over(self.folder / "out")
        self.assertNotEqual(contents(self.source), whole)


if __name__ == "__main__":
    SavingOver.ucp = commands.from_arguments()
    unittest.main()
