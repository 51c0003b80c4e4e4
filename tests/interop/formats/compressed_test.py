# SPDX-License-Identifier: Apache-2.0
"""A DCP folder that torch has compressed, in other layouts and formats, loaded by torch again.

    compressed_test.py BIN LAUNCHER
"""

import copy
import pathlib
import shutil
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

try:
    import zstandard  # noqa: F401  what torch compresses with
except ImportError:
    print("skipped: no package zstandard (scripts/peers installs it)")
    sys.exit(77)

import commands
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.state_dict import get_state_dict


def trained():
    """A model of 13 million parameters and its optimizer, after two steps."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Embedding(5000, 1024), torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.arange(64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def flat(state, prefix=""):
    """Every value of nested dictionaries, by its path."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class Compressed(unittest.TestCase):
    ucp = None

    @classmethod
    def setUpClass(cls):
        cls.scratch = commands.Scratch()
        cls.addClassCleanup(cls.scratch.close)
        cls.source = cls.scratch.path / "compressed"
        cls.model, cls.optimizer = trained()
        writer = dcp.FileSystemWriter(cls.source, thread_count=2, _extensions=[ZStandard()])
        dcp.save(cls.state(), storage_writer=writer, no_dist=True)

    @classmethod
    def state(cls):
        model, optimizer = get_state_dict(cls.model, cls.optimizer)
        return {"model": model, "optim": optimizer}

    def test_torch_loads_it_as_plain_items(self):
        """More and fewer files than were saved; also by two processes, with the same bytes."""
        wanted = dict(flat(self.state()))
        for shards in (1, 3):
            out, by_two = self.scratch.path / f"plain{shards}", self.scratch.path / f"by_two{shards}"
            target = ("--format", "dcp", "--target", f"dp_shard={shards}")
            self.ucp.run("ucp-load", self.source, out, *target)
            self.ucp.run("ucp-load", "--check", self.source, out)
            state = copy.deepcopy(self.state())
            for _, value in flat(state):
                if isinstance(value, torch.Tensor):
                    value.detach().fill_(-1)
            dcp.load(state, checkpoint_id=out, no_dist=True)
            loaded = dict(flat(state))
            self.assertEqual(loaded.keys(), wanted.keys())
            for name, value in wanted.items():
                same = torch.equal(loaded[name], value) if isinstance(value, torch.Tensor) else loaded[name] == value
                self.assertTrue(same, name)
            self.ucp.run("ucp-load", self.source, by_two, *target, ranks=2)
            for file in out.glob("*.distcp"):
                self.assertEqual(file.read_bytes(), (by_two / file.name).read_bytes())

    def test_transformers_files_come_of_it(self):
        out = self.scratch.path / "files"
        self.ucp.run("ucp-load", self.source, out, "--format", "safetensors")
        found = load_file(out / "model.safetensors")
        self.assertEqual(found.keys(), self.model.state_dict().keys())
        for name, tensor in self.model.state_dict().items():
            self.assertTrue(torch.equal(found[name], tensor), name)

    def test_damage_is_named(self):
        """A byte in the middle of each file."""
        for file in sorted(self.source.glob("*.distcp")):
            broken = self.scratch.path / f"broken {file.name}"
            shutil.copytree(self.source, broken)
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 16
            (broken / file.name).write_bytes(data)
            said = self.ucp.run("ucp-load", broken, self.scratch.path / "never", "--format", "dcp", "--target", "dp_shard=2",
                                expect=4)
            self.assertIn(file.name, said)
            self.assertFalse((self.scratch.path / "never").exists())


if __name__ == "__main__":
    Compressed.ucp = commands.from_arguments()
    unittest.main()
