# SPDX-License-Identifier: Apache-2.0
"""Optimizers of many kinds, saved by torch, DeepSpeed and verl's way of saving: the weights are always exported.

    weights_test.py BIN
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                  MASTER_PORT=str(21000 + os.getpid() % 20000), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

BIN = None
WIDTH = 8


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("frequencies", torch.linspace(0.5, 2, WIDTH))

    def forward(self, x):
        return self.last(self.norm(torch.relu(self.first(x * self.frequencies)))).pow(2).mean()


def trained(optimizers, steps=2, seed=1):
    """A model, and its optimizers after some steps."""
    torch.manual_seed(seed)
    model = Net()
    made = optimizers(model)
    for _ in range(steps):
        model(torch.randn(4, WIDTH)).backward()
        for one in made:
            one.step()
            one.zero_grad()
    return model, made


class Weights(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = pathlib.Path(folder.name)

    def run_in(self, *words, code=0):
        done = subprocess.run([BIN / words[0], *words[1:]], cwd=self.work, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, code, done.stderr)
        return done.stderr

    def expect_export(self, state, *needs, only=("weight", "master")):
        """`src` gives the tensors of `state` in either way, and nothing that needs the optimizer."""
        for word in only:
            said = self.run_in("ucp-load", "src", f"hf_{word}", "--format", "safetensors", "--only", word)
            found = safetensors.torch.load_file(self.work / f"hf_{word}" / "model.safetensors")
            self.assertEqual(found.keys(), state.keys())
            for name, tensor in state.items():
                self.assertTrue(torch.equal(found[name].to(tensor.dtype), tensor), name)
            self.assertRegex(said, "not carried over|not part of --format")
        for words in needs:
            said = self.run_in("ucp-load", "src", "native", *words, code=9)
            self.assertIn("the weights can be exported: ucp-load src native --format safetensors", said)

    def save(self, state):
        dcp.save(state, checkpoint_id=self.work / "src", no_dist=True)

    def test_an_optimizer_with_numbers_in_dcp(self):
        model, (adam,) = trained(lambda model: [torch.optim.AdamW(model.parameters())])
        self.save({"model": model.state_dict(), "optim": adam.state_dict()})
        self.expect_export(model.state_dict(), ("--format", "deepspeed"), ("--format", "dcp"))

    def test_two_optimizers_in_dcp(self):
        model, (muon, adam) = trained(lambda model: [torch.optim.SGD(model.first.parameters(), momentum=0.9),
                                                     torch.optim.AdamW(model.last.parameters())])
        named = {name: value for name, value in model.state_dict().items()}
        keys = {value: name for name, value in model.named_parameters()}

        def by_name(optimizer):
            state = optimizer.state_dict()
            names = [keys[value] for group in optimizer.param_groups for value in group["params"]]
            return {"state": {names[i]: value for i, value in state["state"].items()},
                    "param_groups": [{**state["param_groups"][0], "params": names}]}
        self.save({"model": named, "muon": by_name(muon), "adam": by_name(adam)})
        self.expect_export(named, ("--format", "deepspeed"))

    def test_8_bit_states_in_dcp(self):
        import bitsandbytes
        model, (adam,) = trained(lambda model: [bitsandbytes.optim.AdamW8bit(model.parameters(), min_8bit_size=0)])
        keys = [name for name, _ in model.named_parameters()]
        state = adam.state_dict()["state"]
        options = {**adam.state_dict()["param_groups"][0], "params": keys}
        flat = lambda slots: {**{k: v for k, v in slots.items() if not isinstance(v, dict)},
                              **slots.get("__bnb_optimizer_quant_state__", {})}
        self.save({"model": model.state_dict(),
                   "optim": {"state": {keys[i]: flat(slots) for i, slots in state.items()}, "param_groups": [options]}})
        self.expect_export(model.state_dict(), ("--format", "deepspeed"))

    def test_verl_alone_with_a_persistent_buffer(self):
        model, (adam,) = trained(lambda model: [torch.optim.AdamW(model.parameters())])
        (self.work / "src").mkdir()
        for item, value in (("model", model.state_dict()), ("optim", adam.state_dict()),
                            ("extra_state", {"rng": None, "lr_scheduler": {}})):
            torch.save(value, self.work / "src" / f"{item}_world_size_1_rank_0.pt")
        (self.work / "src" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
        self.expect_export(model.state_dict())
        # The shapes show which parameters the optimizer's numbers are, so that all of it is converted.
        self.run_in("ucp-load", "src", "native", "--format", "deepspeed", "--target", "zero=2,dp=1")
        masters = get_fp32_state_dict_from_zero_checkpoint(self.work / "native")
        for name, param in model.named_parameters():
            self.assertTrue(torch.equal(masters[name], param.detach()), name)
        state = torch.load(next((self.work / "native").rglob("*optim_states.pt")), weights_only=False)
        (flat,) = state["optimizer_state_dict"]["base_optimizer_state"]["state"].values()
        moments = torch.cat([adam.state[param]["exp_avg"].flatten() for param in model.parameters()])
        self.assertTrue(torch.equal(flat["exp_avg"].flatten()[:moments.numel()], moments))

    def deepspeed(self, optimizer, zero, steps=2):
        """A checkpoint of one rank, and the model of the engine."""
        import deepspeed
        torch.manual_seed(1)
        model = Net()
        config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
                  "zero_optimization": {"stage": zero}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)
        for _ in range(steps):
            engine.backward(engine(torch.randn(4, WIDTH)))
            engine.step()
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=zero == 3):
            state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        engine.save_checkpoint(self.work / "src")
        engine.destroy()
        return state

    def test_optimizers_of_one_rank_only(self):
        import bitsandbytes
        from transformers import Adafactor
        # Stages at which an optimizer keeps state that only its own ranks can use.
        kinds = {"8bit": (lambda m: bitsandbytes.optim.AdamW8bit(m.parameters(), min_8bit_size=0), (1, 3)),
                 "adafactor": (lambda m: Adafactor(m.parameters(), lr=1e-3, relative_step=False), (0,))}
        for name, (optimizer, stages) in kinds.items():
            for zero in stages:
                with self.subTest(optimizer=name, zero=zero):
                    self.setUp()
                    state = self.deepspeed(optimizer, zero)
                    target = "zero=1,dp=2" if zero != 1 else "zero=3,dp=2"
                    self.expect_export(state, ("--target", target))

    def test_lost_shards(self):
        state = self.deepspeed(lambda model: torch.optim.AdamW(model.parameters()), 2)
        for path in (self.work / "src").rglob("*optim_states.pt"):
            path.unlink()
        self.expect_export(state)
        said = self.run_in("ucp-load", "src", "native", code=3)
        self.assertIn("zero_pp_rank_0_mp_rank_00_optim_states.pt", said)


if __name__ == "__main__":
    BIN = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
