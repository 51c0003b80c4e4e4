# SPDX-License-Identifier: Apache-2.0
"""Parameters with slashes in their names, which torch allows: DeepSpeed's universal loader finds them in the folders that
we write, and continues with the same losses.

    slash_names_test.py BIN LAUNCHER
"""

import unittest

import commands
import ranks  # first: it prepares what DeepSpeed finds when imported
import deepspeed
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"enc/layer": nn.Linear(4, 4), "a/b/c": nn.Linear(4, 4)})

    def forward(self, x):
        return sum(part(x).pow(2).mean() for part in self.parts.values())


def engine_of(stage, seed, universal=False):
    torch.manual_seed(seed)
    model = Model()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage},
              "zero_allow_untested_optimizer": True, "checkpoint": {"load_universal": universal}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def trained(engine, first):
    losses = []
    for step in range(first, first + 3):
        loss = engine(torch.randn(2, 4, generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def make(folder):
    """Collective."""
    engine = engine_of(2, 1)
    trained(engine, 0)
    engine.save_checkpoint(folder / "ckpt")
    return trained(engine, 3)


def resume(atoms, stage):
    """Collective."""
    engine = engine_of(stage, 2, universal=True)
    engine.load_checkpoint(atoms)
    return trained(engine, 3)


class SlashNames(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def test_the_universal_loader_finds_them(self):
        wanted = ranks.run(1, make, self.folder)
        self.ucp.run("ucp-load", self.folder / "ckpt", self.folder / "atoms", "--format", "universal")
        self.ucp.run("ucp-extract", self.folder / "ckpt", self.folder / "catalogue")
        self.ucp.run("ucp-union", self.folder / "catalogue", self.folder / "stage3", "--loader", "stage3")
        for atoms, stage in (("atoms", 1), ("stage3", 3)):
            losses = ranks.run(1, resume, self.folder / atoms, stage)
            for loss, want in zip(losses, wanted):
                self.assertAlmostEqual(loss, want, delta=1e-5 * abs(want))
        self.ucp.run("ucp-load", self.folder / "atoms", self.folder / "back", "--target", "zero=2")
        self.ucp.run("ucp-load", "--check", self.folder / "ckpt", self.folder / "back")


if __name__ == "__main__":
    SlashNames.ucp = commands.from_arguments()
    unittest.main()
