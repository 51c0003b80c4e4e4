# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face in the names and shapes of other programs, and back.

    maps_test.py BIN LAUNCHER
"""

import json
import pathlib
import sys
import types
import unittest

for folder in ("deepspeed", "trainer"):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / folder))

import finetune  # first: it makes the modules of the DeepSpeed tests importable
import commands
import safetensors.torch
import torch
import transformers

import forward

SMALL = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, vocab_size=61,
             max_position_embeddings=64, head_dim=8)
DENSE = dict(SMALL, intermediate_size=40)
TOKENS = torch.arange(13) * 7 % 61

# By name: the class, its configuration, the map, the Megatron naming schemes that it has.
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**DENSE), "llama"),
    "llama_tied": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**DENSE, tie_word_embeddings=True), "llama"),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig(**DENSE, sliding_window=None), "llama"),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**{**DENSE, "head_dim": 4}), "llama"),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**DENSE), "llama"),
    "mixtral": (transformers.MixtralForCausalLM, transformers.MixtralConfig(**DENSE, num_local_experts=5), "mixtral"),
    "qwen3_moe": (transformers.Qwen3MoeForCausalLM,
                  transformers.Qwen3MoeConfig(**DENSE, moe_intermediate_size=20, num_experts=5, num_experts_per_tok=2,
                                              norm_topk_prob=True), "qwen3_moe"),
    "gpt2": (transformers.GPT2LMHeadModel,
             transformers.GPT2Config(n_embd=24, n_layer=2, n_head=3, n_positions=64, vocab_size=61), "gpt2"),
}


def make(name):
    kind, config, _ = MODELS[name]
    torch.manual_seed(3)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases too, or a wrong place of them would not show.
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1 if parameter.dim() == 1 else 0))
    return model


def logits(model):
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


def load(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


class Maps(unittest.TestCase):
    ucp = None

    def setUp(self):
        scratch = commands.Scratch()
        self.addCleanup(scratch.close)
        self.folder = scratch.path

    def save(self, name):
        model = make(name)
        model.save_pretrained(self.folder / "hf")
        return model

    def map(self, source, out, to, *flags, ranks=1):
        self.ucp.run("ucp-load", self.folder / source, self.folder / out, "--format", "safetensors", "--map", to, *flags,
                     ranks=ranks)
        return load(self.folder / out)

    def back(self, name, out, of):
        """The same weights, and the same logits by transformers."""
        _, config, which = MODELS[name]
        self.map(out, "back", f"{which}:hf")
        self.ucp.run("ucp-load", "--check", self.folder / "hf", self.folder / "back")
        model = type(of).from_pretrained(self.folder / "back").eval()
        self.assertTrue(torch.equal(logits(model), logits(of)))

    def test_megatron_computes_the_same(self):
        for name, (_, _, which) in MODELS.items():
            for side in ("megatron", "megatron_te"):
                with self.subTest(name, side=side):
                    self.setUp()
                    model = self.save(name)
                    tensors = self.map("hf", "out", f"{which}:{side}")
                    self.assertTrue(all(not key.startswith(("model.", "transformer.")) for key in tensors))
                    ours = forward.Megatron(tensors, model.config, side == "megatron_te")(TOKENS)
                    torch.testing.assert_close(ours, logits(model), rtol=2e-4, atol=2e-4)
                    self.back(name, "out", model)

    def test_the_family_is_found_by_itself(self):
        """Of real models with the config.json that transformers writes; the way back by the one that came along."""
        for name in MODELS:
            with self.subTest(name):
                self.setUp()
                model = self.save(name)
                self.ucp.run("ucp-load", self.folder / "hf", self.folder / "core", "--format", "megatron", "--map", "auto")
                used, = json.loads((self.folder / "core/shardwright.json").read_text())["source"]["maps"]
                side = "megatron_te_saved" if name in ("mixtral", "qwen3_moe") else "megatron_te"
                self.assertEqual((used["name"], used["to"]), (MODELS[name][2], side))
                self.assertIn("model_type=", used["why"])
                back = self.map("core", "back", "auto")
                held = load(self.folder / "hf")
                self.assertEqual(sorted(back), sorted(held))
                for key, tensor in held.items():
                    self.assertTrue(torch.equal(tensor, back[key]), key)
                again = type(model).from_pretrained(self.folder / "back").eval()
                self.assertTrue(torch.equal(logits(again), logits(model)))

    def test_meta_computes_the_same(self):
        model = self.save("llama")
        tensors = self.map("hf", "out", "llama:meta")
        torch.testing.assert_close(forward.meta(tensors, model.config, TOKENS), logits(model), rtol=2e-4, atol=2e-4)
        self.back("llama", "out", model)

    def test_experts_are_stacked_as_transformers_does(self):
        for name in ("mixtral", "qwen3_moe"):
            with self.subTest(name):
                self.setUp()
                model = self.save(name)
                tensors = self.map("hf", "out", f"{name}:hf_stacked")
                held = dict(model.named_parameters())
                self.assertEqual(sorted(tensors), sorted(held))
                for key, tensor in tensors.items():
                    self.assertTrue(torch.equal(tensor, held[key]), key)
                self.back(name, "out", model)

    def test_torchtitan_converts_the_same(self):
        try:
            from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
            from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
        except ImportError as missing:
            self.skipTest(f"torchtitan cannot be imported: {missing}")
        for name, adapter, which in (("llama", Llama3StateDictAdapter, "llama"),
                                     ("qwen3", Qwen3StateDictAdapter, "qwen3"),
                                     ("qwen3_moe", Qwen3StateDictAdapter, "qwen3_moe")):
            with self.subTest(name):
                self.setUp()
                model = self.save(name)
                config = model.config
                experts = types.SimpleNamespace(num_experts=5) if which == "qwen3_moe" else None
                attention = types.SimpleNamespace(n_heads=6, n_kv_heads=2, head_dim=8)
                converter = adapter.__new__(adapter)
                converter.model_config = types.SimpleNamespace(
                    layers=[types.SimpleNamespace(attention=attention, moe=experts)] * 2, dim=24,
                    enable_weight_tying=False)
                converter.fqn_to_index_mapping = None
                # The maps of names are made by __init__, which wants a model of torchtitan's.
                base = adapter.__mro__[1]
                init, base.__init__ = base.__init__, lambda self, *_: None
                try:
                    adapter.__init__(converter, converter.model_config, None)
                finally:
                    base.__init__ = init
                ours = self.map("hf", "out", f"{which}:torchtitan")
                theirs = converter.to_hf({key: tensor.clone() for key, tensor in ours.items()})
                held = load(self.folder / "hf")
                self.assertEqual(sorted(theirs), sorted(held))
                for key, tensor in theirs.items():
                    self.assertTrue(torch.equal(tensor, held[key]), key)
                self.back_by(which, model, config)

    def back_by(self, which, model, config):
        self.map("out", "back", f"{which}:hf")
        again = type(model).from_pretrained(self.folder / "back", config=config).eval()
        self.assertTrue(torch.equal(logits(again), logits(model)))

    def test_one_rank_or_three_write_the_same(self):
        self.save("mixtral")
        self.map("hf", "one", "mixtral:megatron")
        self.map("hf", "three", "mixtral:megatron", ranks=3)
        self.assertEqual((self.folder / "one/model.safetensors").read_bytes(),
                         (self.folder / "three/model.safetensors").read_bytes())

    def test_a_trained_checkpoint_takes_its_moments_along(self):
        """DeepSpeed's ZeRO to atoms of torchtitan's names, and back to DeepSpeed."""
        for zero in (1, 3):
            with self.subTest(zero=zero):
                self.setUp()
                case = {"zero": zero, "tied": False, "lora": False, "save": 2}
                finetune.run(2, self.folder / "run", case, 2)
                trained = self.folder / "run/checkpoint-2"
                # 4 heads and 2 key-value heads of 6 in each.
                self.ucp.run("ucp-union", trained, self.folder / "plain")
                self.ucp.run("ucp-union", trained, self.folder / "atoms", "--map", "llama:torchtitan")
                old = next((self.folder / "plain").glob("*/zero"))
                new = next((self.folder / "atoms").glob("*/zero"))
                at = "self_attn.k_proj.weight", "attention.qkv_linear.wk.weight"
                for state in ("fp32", "exp_avg", "exp_avg_sq"):
                    a, b = (torch.load(folder / f"{prefix}layers.1.{name}/{state}.pt", weights_only=False)
                            for folder, prefix, name in ((old, "model.", at[0]), (new, "", at[1])))
                    a, b = (x["param"] if isinstance(x, dict) else x for x in (a, b))
                    expected = a.view(2, 2, 3, 24).transpose(1, 2).reshape(12, 24)
                    self.assertTrue(torch.equal(b.view(12, 24), expected), state)
                self.ucp.run("ucp-load", trained, self.folder / "titan", "--map", "llama:torchtitan", "--target",
                             "zero=3,dp=3")
                self.ucp.run("ucp-load", "--check", trained, self.folder / "titan", "--map", "llama:torchtitan")
                self.ucp.run("ucp-load", self.folder / "titan", self.folder / "back", "--map", "llama:hf",
                             "--map-sizes", "kv_heads=2", "--target", f"zero={zero},dp=2")
                self.ucp.run("ucp-load", "--check", trained, self.folder / "back")


if __name__ == "__main__":
    Maps.ucp = commands.from_arguments()
    unittest.main()
