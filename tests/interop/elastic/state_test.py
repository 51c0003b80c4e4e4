#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The state of a trainer as an elastic run keeps it, in one process: buffers of experts, buffers that modules replace,
optimizers with attributes of their own, and errors for other models and optimizers.

    state_test.py PACKAGE
"""

import os
import re
import sys
import tempfile
import unittest

import torch
from torch import nn

PATTERN = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.")


class Expert(nn.Module):
    def __init__(self, buffers=True):
        super().__init__()
        self.up = nn.Parameter(torch.rand(3, 2))
        if buffers:
            self.register_buffer("scale", torch.rand(2))


class Model(nn.Module):
    def __init__(self, experts=2, **options):
        super().__init__()
        self.gate = nn.Linear(2, experts)
        self.register_buffer("average", torch.zeros(2))
        layer = nn.Module()
        layer.experts = nn.ModuleList(Expert(**options) for _ in range(experts))
        self.layers = nn.ModuleList([layer])

    def forward(self):
        return sum(one.sum() for one in self.parameters())


class Counting(torch.optim.AdamW):
    """An optimizer with an attribute that its steps need, and a counter of steps."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.steps = [0]

    def step(self, closure=None):
        self.steps[0] += 1
        return super().step(closure)


def trained(model, make=torch.optim.AdamW, steps=1):
    from shardwright._elastic_state import Trained
    optimizer = make(model.parameters())
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained(model, optimizer, PATTERN)


def copied(state):
    return {key: (list(labels), [one.clone() for one in tensors]) for key, (labels, tensors) in state.items()}


class States(unittest.TestCase):
    def same(self, one, other):
        left, right = one.parts(), other.parts()
        self.assertEqual({key: labels for key, (labels, _) in left.items()}, {key: labels for key, (labels, _) in right.items()})
        for key, (labels, tensors) in left.items():
            for label, a, b in zip(labels, tensors, right[key][1]):
                self.assertTrue(torch.equal(a, b), f"{key}: {label}")

    def folder(self):
        folder = tempfile.TemporaryDirectory(prefix="sw-elastic-")
        self.addCleanup(folder.cleanup)
        return os.path.join(folder.name, "ckpt")

    def test_buffers_of_an_expert_move_with_it(self):
        one, other = trained(Model()), trained(Model())
        self.assertIn("scale buffer:", one.parts()["0 1"][0])
        self.assertEqual([label for label in one.parts()["dense"][0] if "buffer" in label], ["average buffer:"])
        other.adopt(copied(one.parts()))
        self.same(one, other)

    def test_buffers_that_a_module_has_replaced(self):
        run = trained(Model())
        run.model.average = run.model.average + 3
        labels, tensors = run.parts()["dense"]
        self.assertEqual(tensors[labels.index("average buffer:")].tolist(), [3, 3])
        self.assertEqual(run.saved()["model"]["average"].tolist(), [3, 3])
        state = copied(run.parts())
        run.model.average = torch.zeros(2)
        run.adopt(state)
        self.assertEqual(run.model.average.tolist(), [3, 3])

    def test_from_a_checkpoint(self):
        from shardwright._group import Group
        path, group, run = self.folder(), Group(), trained(Model(), Counting, 2)
        run.save(path, group)
        other = trained(Model(), Counting, 0)
        self.assertGreater(other.load(path, {"dense", "0 0", "0 1"}, group), 0)
        self.same(run, other)
        # Experts alone: the rest is as it was.
        third = trained(Model(), Counting, 1)
        before, steps = copied(third.parts()), third.optimizer.steps[0]
        third.load(path, {"0 1"}, group)
        self.assertEqual(third.optimizer.steps[0], steps, "no step of the trainer's own optimizer")
        for key, want in (("0 0", before), ("dense", before), ("0 1", run.parts())):
            for label, a, b in zip(want[key][0], third.parts()[key][1], want[key][1]):
                self.assertTrue(torch.equal(a, b), f"{key}: {label}")

    def test_a_parameter_before_its_first_gradient(self):
        from shardwright._group import Group
        path, group, model = self.folder(), Group(), Model()
        model.gate.bias.requires_grad_(False)
        run = trained(model, steps=3)
        model.gate.bias.requires_grad_(True)
        run.save(path, group)
        other = trained(Model(), steps=0)
        other.load(path, {"dense", "0 0", "0 1"}, group)
        self.assertNotIn(other.model.gate.bias, other.optimizer.state, "no moments and no step, as in the run")
        self.same(run, other)

    def test_another_model_is_refused(self):
        from shardwright import MismatchError
        one, other = trained(Model()), trained(Model(buffers=False))
        with self.assertRaisesRegex(MismatchError, r'"scale" \(0 \d\): the model lacks this buffer'):
            other.adopt(copied(one.parts()))
        with self.assertRaisesRegex(MismatchError, r'"scale" \(0 \d\): the run has no such buffer'):
            one.adopt(copied(other.parts()))

    def test_two_parameters_of_one_expert_with_one_name_are_refused(self):
        from shardwright import UsageError
        model = Model()
        model.teacher = Model()
        with self.assertRaisesRegex(UsageError, r'another tensor of layer 0 expert 0 has the name "up"'):
            trained(model, steps=0)

    def test_optimizers_that_no_checkpoint_can_restore_are_refused(self):
        from shardwright import UnsupportedError
        for make, state in ((torch.optim.NAdam, "mu_product"), (torch.optim.Adafactor, "row_var")):
            with self.subTest(make.__name__), self.assertRaisesRegex(UnsupportedError, f"optimizer state {state} is not a tensor"):
                trained(Model(), make).parts()

    def test_a_frozen_parameter_of_a_replica_gets_no_gradient(self):
        from shardwright._experts import _gradient
        frozen, learned = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
        self.assertEqual([_gradient(one).tolist() for one in (frozen, learned)], [[0, 0]] * 2)
        self.assertIsNone(frozen.grad)
        self.assertIsNotNone(learned.grad)


if __name__ == "__main__":
    package = sys.argv.pop(1)
    if not package:
        print("skipped: the build has no operators for PyTorch (configure it with -DSW_TORCH_PYTHON=...)")
        sys.exit(1 if os.environ.get("CI") else 77)
    sys.path.insert(0, package)
    unittest.main(verbosity=2)
