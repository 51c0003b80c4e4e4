# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) as Accelerate and the Trainer save them with FSDP: without the base model, and with the names of PEFT's
files. DeepSpeed, which has the names of the running model, resumes from the outputs, and Accelerate from those of
DeepSpeed's checkpoints.

    adapters_test.py BIN
"""

import logging
import pathlib
import sys
import types
import unittest
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import ranks  # first: it sets the environment up
import commands
import deepspeed
import peft
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from accelerate.utils import fsdp_utils
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType, fully_shard

warnings.filterwarnings("ignore")
fsdp_utils.logger = logging.getLogger("accelerate")  # its own wants ranks that Accelerate has started
STATES = ("exp_avg", "exp_avg_sq")


def make_model():
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2))
    return peft.get_peft_model(base, peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"]))


def trained(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def save(folder):
    """Collective, of one rank."""
    model = make_model()
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in trained(model).values():
            weight.normal_()
    states = {name: {"step": torch.tensor(3.0)} | {key: torch.rand_like(weight) for key in STATES}
              for name, weight in trained(model).items()}
    group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": list(states)}
    dcp.save({"model": peft.get_peft_model_state_dict(model)}, checkpoint_id=folder / "ckpt/pytorch_model_fsdp_0")
    dcp.save({"optimizer": {"state": states, "param_groups": [group]}}, checkpoint_id=folder / "ckpt/optimizer_0")
    expected = {name: {"fp32": weight.detach().clone()} | {key: states[name][key] for key in STATES}
                for name, weight in trained(model).items()}
    torch.save(expected, folder / "expected.pt")


def make_engine(stage, universal):
    model = make_model()
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
              "checkpoint": {"load_universal": universal}}
    optimizer = torch.optim.AdamW(trained(model).values(), lr=0.01, foreach=False)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def differences(checkpoint, folder, stage, universal):
    """Resumes in DeepSpeed; the adapter's tensors that differ."""
    engine = make_engine(stage, universal)
    if engine.load_checkpoint(checkpoint, load_module_strict=False)[0] is None:
        raise AssertionError(f"DeepSpeed finds no checkpoint in {checkpoint}")
    expected = torch.load(folder / "expected.pt", weights_only=True)
    wrong = []
    for name, weight in trained(engine.module).items():
        found = {"fp32": safe_get_full_fp32_param(weight)}
        if stage == 3 or universal:
            found |= {key: safe_get_full_optimizer_state(weight, key) for key in STATES}
        wrong += [f"{name} {key}" for key, tensor in found.items() if not torch.equal(tensor, expected[name][key])]
    return wrong


def save_deepspeed(folder):
    """Collective. Trains the adapter, and saves it as the Trainer does: without the base model."""
    engine = make_engine(2, False)
    for step in range(2):
        tokens = torch.randint(0, 32, (1, 8), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    engine.save_checkpoint(folder / "ckpt", exclude_frozen_parameters=True)
    expected = {name: {"fp32": safe_get_full_fp32_param(weight)}
                | {key: safe_get_full_optimizer_state(weight, key) for key in STATES}
                for name, weight in trained(engine.module).items()}
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")


def differences_in_accelerate(checkpoint, folder, use_dcp):
    """Collective. Resumes with Accelerate's functions, as the Trainer calls them; the adapter's tensors that differ."""
    model = make_model()
    with torch.no_grad():
        for weight in trained(model).values():
            weight.fill_(7)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(trained(model).values(), lr=0.5, foreach=False)
    plugin = types.SimpleNamespace(fsdp_version=2, state_dict_type=StateDictType.SHARDED_STATE_DICT,
                                   state_dict_config=None, optim_state_dict_config=None)
    accelerator = types.SimpleNamespace(process_index=dist.get_rank(), num_processes=dist.get_world_size(),
                                        wait_for_everyone=dist.barrier)
    how = {"adapter_only": True, "use_dcp": use_dcp}
    fsdp_utils.load_fsdp_model(plugin, accelerator, model, checkpoint, **how)
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, checkpoint, **how)
    expected = torch.load(folder / "expected.pt", weights_only=True)
    wrong = [] if optimizer.param_groups[0]["lr"] == 0.01 else ["lr"]
    for name, weight in trained(model).items():
        found = {"fp32": weight} | {key: optimizer.state[weight][key] for key in STATES}
        wrong += [f"{name} {key}" for key, tensor in found.items()
                  if not torch.equal(tensor.full_tensor(), expected[name][key])]
    return wrong


class Adapters(unittest.TestCase):
    ucp = None

    def test_accelerate_resumes_an_adapter_of_deepspeed(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        ranks.run(2, save_deepspeed, scratch.path)
        first, made = scratch.path / "ckpt", scratch.path / "made"
        self.ucp.run("ucp-load", first, made, "--format", "dcp", "--flavour", "transformers", "--target", "dp_shard=3")
        self.ucp.run("ucp-load", "--check", first, made)
        self.assertEqual(ranks.run(3, differences_in_accelerate, made, scratch.path, True), [])
        back = scratch.path / "back"
        self.ucp.run("ucp-load", made, back, "--format", "deepspeed", "--target", "zero=1,dp=1")
        self.ucp.run("ucp-load", "--check", made, back)
        self.assertEqual(ranks.run(1, differences, back, scratch.path, 1, False), [])
        rank_files = scratch.path / "rank_files"
        self.ucp.run("ucp-load", made, rank_files, "--format", "dtensor", "--trainer", "accelerate", "--target",
                     "dp_shard=2,device=cpu")
        self.ucp.run("ucp-load", "--check", first, rank_files)
        self.assertEqual(ranks.run(2, differences_in_accelerate, rank_files, scratch.path, False), [])

    def test_deepspeed_resumes_an_adapter(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        ranks.run(1, save, scratch.path)
        for stage in (1, 2, 3):
            for form in ("deepspeed", "universal"):
                with self.subTest(stage=stage, form=form):
                    out = scratch.path / f"{form}-{stage}"
                    self.ucp.run("ucp-load", scratch.path / "ckpt", out, "--format", form, "--target",
                                 f"zero={stage},dp=1")
                    self.ucp.run("ucp-load", "--check", scratch.path / "ckpt", out)
                    self.assertEqual(ranks.run(1, differences, out, scratch.path, stage, form == "universal"), [])


if __name__ == "__main__":
    Adapters.ucp = commands.Commands(sys.argv.pop(1), "")
    unittest.main()
