# SPDX-License-Identifier: Apache-2.0
"""Adapters (LoRA) as Accelerate and the Trainer save them with FSDP: without the base model, and with the names of PEFT's
files. DeepSpeed resumes from the outputs. It has the names of the running model.

    adapters_test.py BIN
"""

import pathlib
import sys
import unittest
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import ranks  # first: it sets the environment up
import commands
import deepspeed
import peft
import torch
import torch.distributed.checkpoint as dcp
import transformers
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

warnings.filterwarnings("ignore")
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


def differences(checkpoint, folder, stage, universal):
    """Resumes in DeepSpeed; the adapter's tensors that differ."""
    model = make_model()
    config = {"train_batch_size": 2, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
              "checkpoint": {"load_universal": universal}}
    optimizer = torch.optim.AdamW(trained(model).values(), lr=0.01, foreach=False)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
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


class Adapters(unittest.TestCase):
    ucp = None

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
