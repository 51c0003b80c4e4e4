# SPDX-License-Identifier: Apache-2.0
"""A trainer's load of a checkpoint with several sets of weights, or files of two saves: it decides as ucp-load does.

    which_test.py BIN PACKAGE
"""

import shutil
import unittest

import live  # first: it makes the modules of the other tests importable
import ranks
import torch
import torch.distributed.checkpoint as dcp
from model import complete, make_engine, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict


def model_and_average(folder):
    """Collective. Saves a model, its average and its optimizer, and loads both sets: the names of tensors that differ, of
    each, and the error for a missing set."""
    import shardwright
    torch.manual_seed(3)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    average = {name: tensor.detach() + 1 for name, tensor in weights.items()}
    dcp.save({"model": weights, "ema": average, "optim": states}, checkpoint_id=folder / "ckpt")
    wrong = []
    for name, saved in (("", weights), ("ema", average)):
        other = torch.nn.Linear(4, 3)
        shardwright.load((other, None), folder / "ckpt", weights_of=name, threads=1)
        wrong.append(live.differing(live.state_of(other, None), {f"{key}/weight": one.detach() for key, one in saved.items()}))
    try:
        shardwright.load((torch.nn.Linear(4, 3), None), folder / "ckpt", weights_of="teacher", threads=1)
        refused = None
    except shardwright.Error as error:
        refused = (error.code, str(error))
    return wrong, refused


def mixed_saves(folder, case):
    """Collective. Loads model states of one save with optimizer states of the one before; the messages, and the
    steps."""
    import shardwright
    engine = make_engine(case)
    for part, first in (("old", 0), ("new", 2)):
        for step in range(first, first + 2):
            train_step(engine, case, step)
        engine.save_checkpoint(folder / part, tag="last")
    for shard in (folder / "old/last").glob("*optim_states.pt"):
        shutil.copy(shard, folder / "new/last" / shard.name)
    other = make_engine(case | {"seed": case["seed"] + 1})
    try:
        shardwright.load(other, folder / "new", threads=1)
        refused = None
    except shardwright.Error as error:
        refused = (error.code, str(error))
    return refused, int(shardwright.load(other, folder / "new", allow_mixed=True, threads=1))


class Which(live.InFolder):
    def test_of_several_sets_of_weights_the_named_one(self):
        wrong, refused = ranks.run(1, model_and_average, self.folder)
        self.assertEqual(wrong, [[], []])
        self.assertEqual(refused[0], 2)
        self.assertIn("teacher", refused[1])

    def test_files_of_two_saves_only_if_asked(self):
        refused, steps = ranks.run(1, mixed_saves, self.folder, complete({"zero": 1}))
        self.assertEqual(refused[0], 4)
        self.assertIn("two saves", refused[1])
        self.assertEqual(steps, 4)


if __name__ == "__main__":
    live.start()
    unittest.main(verbosity=2)
