# SPDX-License-Identifier: Apache-2.0
"""Trainers that shardwright.load takes: an engine with or without an optimizer, a model with its optimizer. A model
with a forgotten optimizer, and arguments in the wrong order, are errors before anything is loaded. Optimizers that differ from
the checkpoint's.

    trainers_test.py BIN PACKAGE
"""

import os
import unittest

import live  # first: it makes the modules of the other tests importable
import commands
import deepspeed
import ranks
import torch
import torch.distributed.checkpoint as dcp
from model import Model, complete, configuration, make_engine, make_model, train_step
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CASES = {"zero 0": {"zero": 0}, "zero 0, fp16": {"zero": 0, "dtype": "fp16"}, "zero 0, bf16": {"zero": 0, "dtype": "bf16"},
         "zero 2": {"zero": 2}, "zero 3": {"zero": 3}}


def save(folder):
    """Collective. A checkpoint after one step, and the weights alone."""
    case = complete({"zero": 1})
    engine = make_engine(case)
    train_step(engine, case, 1)
    engine.save_checkpoint(folder / "ckpt")
    torch.save(engine.module.state_dict(), folder / "weights.pt")


def failure(target, source):
    """(code, message) of the load that must fail."""
    import shardwright
    try:
        shardwright.load(target, source, threads=1)
    except shardwright.Error as error:
        return error.code, str(error)
    return 0, "it was loaded"


def parts_of_engine(source, case):
    """Errors when parts of an engine are loaded; True if the engine itself can be loaded afterwards."""
    import shardwright
    engine = make_engine(complete(case))
    before = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    said = [failure(target, source) for target in (engine.module, (engine.module, None),
                                                   (engine.module, torch.optim.SGD(engine.module.parameters(), 0.1)),
                                                   (engine, None), (engine, engine.optimizer))]
    touched = [name for name, param in engine.module.named_parameters() if not torch.equal(param, before[name])]
    return said, touched, int(shardwright.load(engine, source, threads=1))


def without_optimizer(source, weights, case):
    """Collective. Loads an engine that has no optimizer; names of weights that differ, and the step."""
    import shardwright
    case = complete(case)
    config = {key: value for key, value in configuration(case, False).items() if key != "scheduler"}
    if case["dtype"] == "fp16":
        from deepspeed.accelerator import get_accelerator
        get_accelerator().is_fp16_supported = lambda: True
    engine = deepspeed.initialize(model=make_model(case | {"seed": 99}), config=config)[0]
    loaded = shardwright.load(engine, source, threads=1)
    want = torch.load(weights, weights_only=True)
    params = dict(engine.module.named_parameters())
    wrong = []
    with deepspeed.zero.GatheredParameters(list(params.values()), enabled=case["zero"] == 3):
        wrong += [name for name, param in params.items() if not torch.equal(param.detach(), want[name].to(param.dtype))]
    return wrong, int(loaded), loaded.missing + loaded.unused


def forgotten(source):
    """Collective. What load does with a model of FSDP2 that has an optimizer: (code, message) or a step each."""
    import shardwright
    model = Model(complete({}))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    said = [failure(model, source), int(shardwright.load((model, None), source, threads=1)),
            int(shardwright.load((model, optimizer), source, threads=1))]
    del optimizer
    return said + [int(shardwright.load(model, source, threads=1))]


class Trainers(live.InFolder):
    @classmethod
    def setUpClass(cls):
        scratch = commands.Scratch()
        cls.addClassCleanup(scratch.close)
        cls.saved = scratch.path
        ranks.run(1, save, cls.saved)
        cls.source = cls.saved / "ckpt"

    def refuse(self, said, *words):
        self.assertEqual(said[0], 2, said)
        for word in words:
            self.assertIn(word, said[1])

    def test_parts_of_an_engine_are_refused(self):
        for name, case in CASES.items():
            with self.subTest(name):
                said, touched, step = ranks.run(1, parts_of_engine, self.source, case)
                for one in said[:3]:
                    self.refuse(one, "Model", "DeepSpeed engine", "pass the engine")
                for one in said[3:]:
                    self.refuse(one, "pass the engine alone")
                self.assertEqual((touched, step), ([], 1))

    def test_an_engine_without_an_optimizer_gets_the_weights(self):
        for world, name in ((1, "zero 0"), (1, "zero 0, fp16"), (1, "zero 0, bf16"), (2, "zero 3")):
            with self.subTest(name):
                self.assertEqual(ranks.run(world, without_optimizer, self.source, self.saved / "weights.pt", CASES[name]),
                                 [[], 1, []])

    def test_a_forgotten_optimizer_is_refused(self):
        said, *steps = ranks.run(2, forgotten, self.source)
        self.refuse(said, "Model", "AdamW", "(model, optimizer)", "(model, None)")
        self.assertEqual(steps, [1, 1, 1])

    def test_arguments_in_the_wrong_order_are_refused(self):
        model = Model(complete({}))
        optimizer = torch.optim.AdamW(model.parameters())
        self.refuse(failure(self.source, model), "the trainer comes first")
        self.refuse(failure((optimizer, model), self.source), "a model expected, found AdamW", "the model comes first")
        self.refuse(failure((model, model), self.source), "a PyTorch optimizer expected, found Model")
        self.refuse(failure((model, None), model), "source: a path or a list of paths expected, found Model")
        self.refuse(failure((model, None), [3]), "source: a path or a list of paths expected, found int")

    def test_strict_counts_states_that_the_optimizer_lacks(self):
        import shardwright
        model = Model(complete({}))
        target = model, torch.optim.SGD(model.parameters(), lr=0.1)
        code, message = failure(target, self.source)
        self.assertEqual(code, 5, message)
        self.assertIn("the trainer does not have", message)
        self.assertIn("exp_avg", message)
        loaded = shardwright.load(target, self.source, strict=False, threads=1)
        self.assertTrue(any("exp_avg_sq" in one for one in loaded.unused), loaded.unused)
        self.assertEqual(shardwright.load((model, None), self.source, threads=1).unused, [])

    def test_a_home_folder(self):
        import shardwright
        home, os.environ["HOME"] = os.environ.get("HOME", ""), str(self.saved)
        self.addCleanup(os.environ.__setitem__, "HOME", home)
        self.assertEqual(int(shardwright.load((Model(complete({})), None), "~/ckpt", threads=1)), 1)



class Optimizers(live.InFolder):
    """One process; the checkpoint is of torch.distributed.checkpoint."""

    def saved(self, make, steps=3, **case):
        """The folder of a checkpoint after some steps of an optimizer: make(parameters)."""
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        optimizer = make(list(model.parameters()))
        model[0].bias.requires_grad_(not case.get("frozen", False))
        for _ in range(steps):
            model(torch.rand(5, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model[0].bias.requires_grad_(True)
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=self.folder / "ckpt", no_dist=True)
        return self.folder / "ckpt"

    def trainer(self, make):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        return model, make(list(model.parameters()))

    def load(self, target, source, **options):
        import shardwright
        return shardwright.load(target, source, threads=1, **options)

    def test_weight_decay_stays_decoupled(self):
        source = self.saved(torch.optim.Adam)
        target = self.trainer(torch.optim.AdamW)
        self.load(target, source)
        group = target[1].param_groups[0]
        self.assertTrue(group["decoupled_weight_decay"])
        self.assertEqual(group["weight_decay"], 0)

    def test_a_variant_that_the_checkpoint_lacks(self):
        source = self.saved(lambda params: torch.optim.AdamW(params, amsgrad=True))
        target = self.trainer(torch.optim.AdamW)
        self.load(target, source, strict=False)
        target[0](torch.rand(5, 3)).sum().backward()
        target[1].step()

    def test_one_group_for_several(self):
        def two(params):
            return torch.optim.AdamW([{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:], "weight_decay": 0.0}], lr=0.25)

        target = self.trainer(lambda params: torch.optim.AdamW(params, lr=0.125, weight_decay=0.0625))
        loaded = self.load(target, self.saved(two))
        group = target[1].param_groups[0]
        self.assertEqual((group["lr"], group["weight_decay"]), (0.25, 0.0625))
        said = [one for one in loaded.not_carried if "weight_decay" in one]
        self.assertEqual(said, ['weight_decay of an optimizer group: the checkpoint has 0.5 for "0.weight", 0.0 for "0.bias"; 0.0625 is '
                                "used"])

    def test_a_parameter_without_states(self):
        source = self.saved(torch.optim.AdamW, frozen=True)
        model, optimizer = self.trainer(torch.optim.AdamW)
        self.assertEqual(failure((model, optimizer), source)[0], 5)
        self.assertEqual(len(optimizer.state), 0, "an error before anything was loaded changes nothing")
        self.load((model, optimizer), source, strict=False)
        self.assertNotIn(model[0].bias, optimizer.state, "its first step is still to come")
        self.assertEqual(optimizer.state[model[0].weight]["step"], 3)

    def test_weights_alone_leave_no_states(self):
        source = self.saved(lambda params: torch.optim.SGD(params, lr=0.1))
        model, optimizer = self.trainer(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1))
        self.load((model, optimizer), source, strict=False)
        self.assertEqual([one for state in optimizer.state.values() for one in state], [])


if __name__ == "__main__":
    Trainers.ucp = live.start()
    unittest.main(verbosity=2)
