# SPDX-License-Identifier: Apache-2.0
"""Contents that people save with torch.distributed.checkpoint: averages next to the model, hyper-parameters that are
tensors, parameters without state, names of wrappers, adapters. PyTorch, DeepSpeed's files and PEFT verify the results.

    dcp_saves_test.py BIN
"""

import json
import pathlib
import pickle
import sys
import unittest
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "deepspeed"))

import ranks  # pylint: disable=unused-import  # first: it sets the environment up
import commands
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

warnings.filterwarnings("ignore")


def two_layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()


def trained(model, **options):
    """A model and its optimizer after two steps."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **options)
    step(model, optimizer, 1)
    step(model, optimizer, 2)
    return model, optimizer


def save(state, folder):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def shards_of(folder):
    return next(folder.glob("*/zero_pp_rank_0*optim_states.pt"))


class Saves(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def equal(self, one, other):
        self.assertEqual(sorted(one), sorted(other))
        for name, tensor in one.items():
            self.assertTrue(torch.equal(tensor, other[name]), name)

    def test_the_model_is_taken_and_its_average_where_it_is_asked_for(self):
        for names, with_optimizer in ((("model", "ema"), True), (("net", "ema"), False), (("policy", "base"), True),
                                      (("unet", "ema_unet"), True), (("model", "initial_model"), False)):
            with self.subTest(names=names):
                model, optimizer = trained(two_layers(), lr=0.01)
                weights, states = get_state_dict(model, optimizer)
                average = {name: tensor * 0.5 for name, tensor in weights.items()}
                state = {names[0]: weights, names[1]: average} | ({"optim": states} if with_optimizer else {})
                source, out = save(state, self.folder / "-".join(names)), self.folder / ("-".join(names) + ".out")
                said = self.ucp.run("ucp-load", source, out, "--format", "safetensors")
                self.assertIn(f'"{names[0]}"', said)
                self.equal(load_file(out / "model.safetensors"), weights)
                self.ucp.run("ucp-load", source, out, "--format", "safetensors", "--weights-of", names[1], "--force")
                self.equal(load_file(out / "model.safetensors"), average)
                listed = self.ucp.run("ucp-extract", source, "--list")
                self.assertIn(f'weights of "{names[0]}": 4 tensors', listed)

    def test_an_average_that_is_asked_for_takes_the_place_of_the_model(self):
        model, optimizer = trained(two_layers(), lr=0.01)
        weights, states = get_state_dict(model, optimizer)
        average = {name: tensor * 0.5 for name, tensor in weights.items()}
        source = save({"model": weights, "ema": average, "optim": states}, self.folder / "ckpt")
        self.ucp.run("ucp-extract", source, self.folder / "catalogue", "--weights-of", "ema")
        for i, (where, flags) in enumerate(((source, ["--weights-of", "ema"]), (self.folder / "catalogue", []))):
            out = self.folder / f"out{i}"
            self.ucp.run("ucp-load", where, out, "--format", "dcp", "--target", "dp_shard=2", *flags)
            found = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}}
            dcp.load(found, checkpoint_id=out, no_dist=True)
            self.equal(found["model"], average)
            names = pickle.loads((out / ".metadata").read_bytes()).state_dict_metadata
            self.assertFalse([name for name in names if name.startswith("ema")])

    def test_of_several_models_of_accelerate_the_one_with_an_optimizer_is_taken(self):
        model, optimizer = trained(two_layers(), lr=0.01)
        weights, states = get_state_dict(model, optimizer)
        other = {name: tensor * 0.5 for name, tensor in weights.items()}
        source = self.folder / "accelerate"
        save({"model": other}, source / "pytorch_model_fsdp_0")
        save({"model": weights}, source / "pytorch_model_fsdp_1")
        save({"optimizer": states}, source / "optimizer_1")
        shards = self.folder / "shards"
        shards.mkdir()
        for name, tensors, item in (("_0", other, None), ("_1", weights, states)):
            state = {"model": tensors} | ({"optim": item} if item else {})
            made = self.folder / f"made{name}"
            self.ucp.run("ucp-load", save(state, self.folder / f"one{name}"), made, "--format", "dtensor", "--trainer",
                         "accelerate", "--target", "dp_shard=1,device=cpu")
            for file in made.glob("*_rank0.bin"):
                file.rename(shards / file.name.replace("_0_", name + "_"))
        for where in (source, shards):
            with self.subTest(where=where.name):
                out = self.folder / (where.name + ".out")
                said = self.ucp.run("ucp-load", where, out, "--format", "safetensors")
                self.assertIn('"pytorch_model_fsdp_1"', said)
                self.equal(load_file(out / "model.safetensors"), weights)
                self.ucp.run("ucp-load", where, out, "--format", "safetensors", "--force", "--weights-of",
                             "pytorch_model_fsdp_0")
                self.equal(load_file(out / "model.safetensors"), other)
        save({"optimizer": states}, source / "optimizer_0")
        said = self.ucp.run("ucp-load", source, self.folder / "none", "--format", "safetensors", expect=9)
        self.assertIn("--weights-of", said)

    def resumed(self, folder, **options):
        """A new model and optimizer, as PyTorch resumes them."""
        model = two_layers()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **options)
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": states}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return model, optimizer

    def test_hyper_parameters_that_are_tensors_stay_tensors_and_become_numbers_elsewhere(self):
        options = {"lr": torch.tensor(0.02), "betas": (torch.tensor(0.8), torch.tensor(0.95)), "weight_decay": 0.1}
        model, optimizer = trained(two_layers(), **options)
        weights, states = get_state_dict(model, optimizer)
        source = save({"model": weights, "optim": states}, self.folder / "ckpt")
        out = self.folder / "dcp"
        self.ucp.run("ucp-load", source, out, "--format", "dcp", "--target", "dp_shard=2", "--strict")
        self.ucp.run("ucp-load", "--check", source, out)
        again, resumed = self.resumed(out, lr=torch.tensor(0.5), betas=(torch.tensor(0.1), torch.tensor(0.1)),
                                      weight_decay=0.0)
        group = resumed.param_groups[0]
        self.assertTrue(torch.is_tensor(group["lr"]))
        self.assertEqual(float(group["lr"]), float(torch.tensor(0.02)))
        self.assertEqual([float(beta) for beta in group["betas"]], [float(beta) for beta in options["betas"]])
        step(model, optimizer, 3)
        step(again, resumed, 3)
        self.equal(model.state_dict(), again.state_dict())

        zero = self.folder / "zero"
        self.ucp.run("ucp-load", source, zero, "--format", "deepspeed", "--target", "zero=1,dp=2")
        saved = torch.load(shards_of(zero), weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
        self.assertEqual(saved["param_groups"][0]["lr"], float(torch.tensor(0.02)))
        self.assertEqual(saved["param_groups"][0]["betas"], (float(torch.tensor(0.8)), float(torch.tensor(0.95))))
        self.ucp.run("ucp-load", "--check", source, zero)

        shards = self.folder / "dtensor"
        self.ucp.run("ucp-load", source, shards, "--format", "dtensor", "--trainer", "accelerate", "--target",
                     "dp_shard=2,device=cpu")
        back = self.folder / "back"
        self.ucp.run("ucp-load", shards, back, "--format", "dcp", "--target", "dp_shard=1")
        self.ucp.run("ucp-load", "--check", shards, back)
        _, resumed = self.resumed(back, lr=torch.tensor(0.5), betas=(torch.tensor(0.1), torch.tensor(0.1)))
        for option in (resumed.param_groups[0]["lr"], *resumed.param_groups[0]["betas"]):
            self.assertTrue(torch.is_tensor(option))

    def test_a_check_sees_another_hyper_parameter(self):
        folders = []
        for rate in (0.02, 0.03):
            model, optimizer = trained(two_layers(), lr=torch.tensor(0.02))
            optimizer.param_groups[0]["lr"] = torch.tensor(rate)
            weights, states = get_state_dict(model, optimizer)
            folders.append(save({"model": weights, "optim": states}, self.folder / str(rate)))
        said = self.ucp.run("ucp-load", "--check", *folders, expect=5)
        self.assertIn("lr: 0.0", said)

    def test_parameters_without_state_stay_trained(self):
        model = two_layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
        model[0](torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weights, states = get_state_dict(model, optimizer)
        self.assertNotIn("1.weight", states["state"])
        source = save({"model": weights, "optim": states}, self.folder / "ckpt")
        said = self.ucp.run("ucp-load", source, self.folder / "zero", "--format", "deepspeed", "--target",
                            "zero=1,dp=1")
        self.assertIn("1.weight", said)
        saved = torch.load(next((self.folder / "zero").glob("*/mp_rank_00_model_states.pt")), weights_only=False)
        self.assertEqual(list(saved["param_shapes"][0]), list(weights))
        self.assertFalse(saved.get("frozen_param_shapes"))
        flat = torch.load(shards_of(self.folder / "zero"), weights_only=False)["optimizer_state_dict"]
        moments = flat["base_optimizer_state"]["state"][0]["exp_avg"]
        self.assertEqual(int((moments[20:35] != 0).sum()), 0)
        self.assertGreater(int((moments[:20] != 0).sum()), 0)
        self.ucp.run("ucp-load", source, self.folder / "strict", "--format", "deepspeed", "--target", "zero=1,dp=1",
                     "--strict", expect=5)
        # Formats that go by name keep such parameters without state.
        out = self.folder / "dcp"
        self.ucp.run("ucp-load", source, out, "--format", "dcp", "--target", "dp_shard=2", "--strict")
        names = pickle.loads((out / ".metadata").read_bytes()).state_dict_metadata
        self.assertNotIn("optim.state.1.weight.exp_avg", names)
        shards = self.folder / "dtensor"
        self.ucp.run("ucp-load", source, shards, "--format", "dtensor", "--trainer", "accelerate", "--target",
                     "dp_shard=1,device=cpu")
        saved = torch.load(next(shards.glob("optimizer*")), weights_only=False)
        self.assertEqual(saved["param_groups"][0]["params"], list(weights))
        self.assertEqual(sorted(saved["state"]), ["0.bias", "0.weight"])
        self.ucp.run("ucp-load", source, self.folder / "atoms", "--format", "universal")
        moment = torch.load(next((self.folder / "atoms").glob("*/zero/1.weight/exp_avg.pt")), weights_only=False)
        moment = moment["param"] if isinstance(moment, dict) else moment
        self.assertEqual((tuple(moment.shape), int((moment != 0).sum())), ((3, 4), 0))

    def test_names_of_a_compiled_model_are_matched_and_removed_in_model_files(self):
        plain = two_layers()
        model, optimizer = trained(torch.compile(plain, backend="eager"), lr=0.01)
        _, states = get_state_dict(model, optimizer)
        weights = model.state_dict()
        self.assertTrue(all(name.startswith("_orig_mod.") for name in weights))
        source = save({"model": weights, "optim": states}, self.folder / "ckpt")
        said = self.ucp.run("ucp-load", source, self.folder / "zero", "--format", "deepspeed", "--target",
                            "zero=1,dp=1")
        self.assertNotIn("fused", said)
        said = self.ucp.run("ucp-load", source, self.folder / "st", "--format", "safetensors")
        self.assertIn("_orig_mod.", said)
        self.equal(load_file(self.folder / "st" / "model.safetensors"), plain.state_dict())
        self.ucp.run("ucp-load", source, self.folder / "kept", "--format", "safetensors", "--keep-prefixes")
        self.equal(load_file(self.folder / "kept" / "model.safetensors"), weights)
        out = self.folder / "dcp"
        self.ucp.run("ucp-load", source, out, "--format", "dcp", "--target", "dp_shard=2", "--strict")
        self.ucp.run("ucp-load", "--check", source, out)
        read = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}, "optim": states}
        dcp.load(read, checkpoint_id=out, no_dist=True)
        self.equal(read["model"], weights)

    def test_each_parameter_keeps_its_type(self):
        model = two_layers()
        model[0].bfloat16()  # the second layer is its own master weight
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        weights, states = get_state_dict(model, optimizer)
        out = self.folder / "out"
        self.ucp.run("ucp-load", save({"model": weights, "optim": states}, self.folder / "mixed"), out, "--format", "dcp",
                     "--target", "dp_shard=2")
        index = dcp.FileSystemReader(out).read_metadata().state_dict_metadata
        self.assertEqual({name: index["model." + name].properties.dtype for name in weights},
                         {name: weight.dtype for name, weight in weights.items()})

    def test_an_adapter_becomes_a_folder_that_peft_loads(self):
        import peft
        import transformers

        def base():
            torch.manual_seed(0)
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(
                vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2))

        config = peft.LoraConfig(r=2, lora_alpha=6, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(base(), config)
        torch.manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_()
        tokens = torch.arange(12).reshape(1, 12)
        wanted = model.eval()(tokens).logits
        adapter = peft.get_peft_model_state_dict(model)
        states = {name: {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(tensor),
                         "exp_avg_sq": torch.rand_like(tensor)}
                  for name, tensor in model.named_parameters() if "lora_" in name}
        group = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "params": list(states)}
        accelerate = self.folder / "accelerate"
        save({"model": adapter}, accelerate / "pytorch_model_fsdp_0")
        save({"optimizer": {"state": states, "param_groups": [group]}}, accelerate / "optimizer_0")
        whole = save({"model": model.state_dict()}, self.folder / "whole")
        for i, (source, flags) in enumerate(((accelerate, ["--lora-alpha", "6"]), (whole, ["--lora-alpha", "6"]))):
            out = self.folder / f"peft{i}"
            said = self.ucp.run("ucp-load", source, out, "--format", "safetensors", *flags)
            self.assertIn("PEFT", said)
            self.assertNotIn("fused", said)
            loaded = peft.PeftModel.from_pretrained(base(), out).eval()
            self.assertTrue(torch.equal(loaded(tokens).logits, wanted))
        # The configuration that training wrote is taken as it is.
        model.peft_config["default"].save_pretrained(accelerate)
        self.ucp.run("ucp-load", accelerate, self.folder / "peft", "--format", "safetensors", "--strict",
                     expect=5)  # the optimizer's state is not carried over
        self.ucp.run("ucp-load", accelerate, self.folder / "peft", "--format", "safetensors")
        self.assertEqual(json.loads((self.folder / "peft" / "adapter_config.json").read_text())["lora_alpha"], 6)
        loaded = peft.PeftModel.from_pretrained(base(), self.folder / "peft").eval()
        self.assertTrue(torch.equal(loaded(tokens).logits, wanted))
        self.ucp.run("ucp-load", accelerate, self.folder / "zero", "--format", "deepspeed", "--target", "zero=1,dp=1")
        said = self.ucp.run("ucp-load", accelerate, self.folder / "guessed", "--format", "safetensors", "--siblings",
                            "none")
        self.assertNotIn("--lora-alpha", said)


if __name__ == "__main__":
    Saves.ucp = commands.Commands(sys.argv.pop(1), "")
    unittest.main()
