# SPDX-License-Identifier: Apache-2.0
"""torch.load(weights_only=True) opens the files we write, but for the DeepSpeed classes that DeepSpeed's
own shards hold too; with those allowed it opens every one.

    safe_loading_test.py BIN LAUNCHER
"""

import unittest

import commands
import ranks  # first: it prepares what DeepSpeed finds when imported
import torch
import train
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

CLASSES = [LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address]

# (source case, its ranks, targets)
ROWS = [
    ({"zero": 2, "frozen": True, "tied": True, "groups": 1}, 2, ["zero=1,dp=3", "zero=3,dp=2"]),
    ({"zero": 3, "dtype": "bf16"}, 2, ["zero=2,dp=3"]),
    ({"dtype": "fp16"}, 2, ["zero=2,dp=1"]),
    ({"dtype": "bf16", "grad_accum": "fp32"}, 2, ["zero=1,dp=3"]),
    ({"zero": 0}, 1, ["zero=0,dp=2", "zero=1,dp=2"]),
    ({"experts": 4, "ep": 2}, 2, ["zero=1,dp=2,ep=1"]),
    ({"pp": 2, "groups": 1}, 2, ["pp=1,dp=1"]),
]


def unsafe(path):
    return set(torch.serialization.get_unsafe_globals_in_checkpoint(path))


class SafeLoading(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def test_every_file(self):
        opened = 0
        for number, (case, world, targets) in enumerate(ROWS):
            made = self.folder / str(number)
            train.make_case(made, case, world)
            self.ucp.run("ucp-union", made / "ckpt", made / "atoms")
            for target in targets:
                self.ucp.convert("direct", made / "ckpt", made / target, target)
            for folder in ("atoms", *targets):
                files = sorted((made / folder).rglob("*.pt"))
                self.assertTrue(files)
                for file in files:
                    with self.subTest(source=case, file=file.relative_to(made)):
                        self.open(file)
                opened += len(files)
        print(f"{opened} files opened")

    def open(self, file):
        found = unsafe(file)
        if file.name.endswith("optim_states.pt") or file.name == "optimizer_state.pt":
            found -= {f"{one.__module__}.{one.__qualname__}" for one in CLASSES}
        self.assertEqual(found, set())
        with torch.serialization.safe_globals(CLASSES):
            torch.load(file, weights_only=True)


if __name__ == "__main__":
    SafeLoading.ucp = commands.from_arguments()
    unittest.main()
